"""A comparison: objectives x seeds x regimes (x learning rates), from one YAML file, as folders.

    comparison.yaml    environment.json    comparison.json
    REGIME/base/                    the untuned model, measured like the others
    REGIME/OBJECTIVE/lrRATE-sSEED/  a cell: run/ (a `deftune train` run), eval-NAME/ (`deftune eval` results),
                                    tokens.parquet, cell.json (its state and cost), log.txt

All objectives get the same data in the same order for a seed, the same steps, the same learning rates to choose from.
Objectives, seeds, learning rates and regimes may be added later; anything else is another comparison.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from deftune.artifacts.config import (
    ConfigError,
    NotNegative,
    Positive,
    RunConfig,
    Section,
    Source,
    apply_override,
    explain,
    read_yaml,
)
from deftune.artifacts.environment import environment
from deftune.artifacts.files import write_atomic
from deftune.artifacts.folders import LOCK, FolderError, Kind, differences, locked_file
from deftune.artifacts.runs import Run
from deftune.evaluation.questions import wanted_tasks
from deftune.evaluation.results import Result
from deftune.evaluation.suites import Suite, Task, suite_named, task_named
from deftune.objectives import objective as parse_objective

Temperature = Annotated[float, Field(ge=0)]
BASE = "base"
CONFIG = "comparison.yaml"
COMPARISON = Kind("comparison", CONFIG, "--set folder=...")
NAME = r"[\w-][\w.-]*"  # of a folder: not .., nor a hidden one


class Evaluation(Section):
    """An evaluation of every cell: a suite, or tasks by name."""

    name: str | None = Field(None, description="the name of the result's folder (default: the suite's name, or tasks)")
    suite: str | None = Field(None, description="math, medical or figfont")
    tasks: list[str] = Field(default_factory=list, description="single tasks, beside the suite's or alone")
    task_files: list[str] = Field(default_factory=list, description="task files of your own")
    data: str | None = Field(None, description="folder with the benchmarks' files (default: the hub)")
    samples: Positive | None = Field(None, description="answers per item where T > 0 (default: the suite's)")
    temperatures: list[Temperature] = Field(
        default_factory=list, description="sampling temperatures, 0 is greedy (default: the suite's)"
    )
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling; 1 is all tokens")
    seed: NotNegative = Field(0, description="seed of the sampling")
    limit: Positive | None = Field(None, description="ask a sample of so many items (default: all)")
    max_new_tokens: Positive | None = Field(None, description="the most tokens of an answer (default: the task's)")
    rule: Literal["strict", "lenient"] = Field(
        "strict", description="how a multiple-choice answer is read: strict needs a stated letter"
    )
    batch_size: Positive | None = Field(None, description="answers at a time (default: as `deftune eval run`)")

    @field_validator("suite")
    @classmethod
    def _suite(cls, value: str | None) -> str | None:
        if value == "heldout":
            raise ValueError("token statistics are asked for with `tokens`; no suite to sample")
        return suite_named(value).name if value is not None else None

    @field_validator("tasks")
    @classmethod
    def _tasks(cls, value: list[str]) -> list[str]:
        return [task_named(name).name for name in value]

    @field_validator("name")
    @classmethod
    def _name(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(NAME, value):
            raise ValueError("letters, digits, _, . and - only, and not a . first")
        return value

    @model_validator(mode="after")
    def _something(self) -> Evaluation:
        if not (self.suite or self.tasks or self.task_files):
            raise ValueError("name a `suite`, `tasks` or `task_files`; `deftune eval list` has them")
        if len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError("temperatures: one is there twice")
        return self

    @property
    def title(self) -> str:
        return self.name or self.suite or "tasks"

    @property
    def whole_suite(self) -> Suite | None:
        return suite_named(self.suite) if self.suite else None

    def sweep(self) -> tuple[float, ...]:
        """The sampling temperatures, low to high."""
        suite = self.whole_suite
        return tuple(sorted(self.temperatures)) or (suite.temperature if suite else 0.0,)

    def samples_each(self) -> int:
        suite = self.whole_suite
        return self.samples or (suite.samples if suite else 1)

    def wanted(self) -> list[tuple[Task, bool]]:
        """The tasks, and whether each must be there."""
        return wanted_tasks(self.whole_suite, self.tasks, self.task_files)


class Regime(Section):
    """Data to train on and how to measure; its `model` and `train` override the comparison's."""

    data: dict[str, Any] = Field(description="as `data` of a run")
    model: dict[str, Any] = Field(default_factory=dict, description="as `model` of a run")
    train: dict[str, Any] = Field(default_factory=dict, description="as `train` of a run")
    evaluate: list[Evaluation] = Field(
        default_factory=list[Evaluation], description="the benchmarks that every cell answers"
    )
    tokens: list[Source] = Field(default_factory=list[Source], description="rows whose token statistics are measured")

    @model_validator(mode="after")
    def _measured(self) -> Regime:
        if not self.evaluate and not self.tokens:
            raise ValueError("nothing is measured; give `evaluate` or `tokens`")
        titles = [evaluation.title for evaluation in self.evaluate]
        if len(set(titles)) < len(titles):
            raise ValueError("evaluate: two have the same name; give each a `name`")
        return self


class Comparison(Section):
    """The whole file of a comparison."""

    folder: str = Field("comparisons/first", description="the folder of the comparison; the same folder resumes")
    objectives: list[str] = Field(min_length=1, description="the objectives to compare, as names or specs")
    seeds: list[NotNegative] = Field([0], min_length=1, description="the seeds of each objective's runs")
    learning_rates: list[Annotated[float, Field(gt=0)]] = Field(
        [5e-5], min_length=1, description="every objective tries all of them and is shown at its own best"
    )
    base: bool = Field(True, description="measure the untuned model too")
    keep_models: bool = Field(
        True, description="keep the weights of each cell; false: measure them in memory and write none"
    )
    model: dict[str, Any] = Field(default_factory=dict, description="as `model` of a run")
    train: dict[str, Any] = Field(
        default_factory=dict, description="as `train` of a run, without learning_rate and seed"
    )
    regimes: dict[str, Regime] = Field(
        min_length=1, description="kinds of data, each with its own evaluations; you choose the names"
    )

    @field_validator("objectives")
    @classmethod
    def _objectives(cls, value: list[str]) -> list[str]:
        specs = [str(parse_objective(spec)) for spec in value]
        return _distinct(specs)

    @field_validator("seeds", "learning_rates")
    @classmethod
    def _distinct(cls, value: list[Any]) -> list[Any]:
        return _distinct(value)

    @field_validator("regimes")
    @classmethod
    def _names(cls, value: dict[str, Regime]) -> dict[str, Regime]:
        for name in value:
            if not re.fullmatch(NAME, name):
                raise ValueError(f"{name!r}: letters, digits, _, . and - only, and not a . first")
        return value

    @model_validator(mode="after")
    def _swept(self) -> Comparison:
        for section in (self.train, *(regime.train for regime in self.regimes.values())):
            for key, instead in (("learning_rate", "learning_rates"), ("seed", "seeds")):
                if key in section:
                    raise ValueError(f"train.{key}: belongs in `{instead}`, which all objectives share")
        _distinct([f"{rate:g}" for rate in self.learning_rates])  # as the folders of cells are named
        return self

    def cells(self) -> list[Cell]:
        """Every cell, so that all objectives of a seed come before the next seed's."""
        found: list[Cell] = []
        for regime in self.regimes:
            if self.base:
                found.append(Cell(self, regime, BASE, None, None))
            for seed in self.seeds:
                for rate in self.learning_rates:
                    found += [Cell(self, regime, objective, rate, seed) for objective in self.objectives]
        return found

    def finished_cells(self, regime: str) -> dict[str, list[Cell]]:
        """Objective -> its finished cells in a regime; the untuned model first, then as the file lists them."""
        finished = [cell for cell in self.cells() if cell.regime == regime and cell.is_finished]
        by_objective = {name: [c for c in finished if c.objective == name] for name in (BASE, *self.objectives)}
        return {name: cells for name, cells in by_objective.items() if cells}

    def cell(self, name: str) -> Cell:
        for cell in self.cells():
            if cell.name == name:
                return cell
        raise ValueError(f"unknown cell {name!r}; `deftune compare run FILE --dry-run` lists them")


def _distinct(values: list[Any]) -> list[Any]:
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{value} is there twice")
    return values


def slug(spec: str) -> str:
    """A folder's name for an objective's spec; a hash distinguishes specs that would get the same name.

    >>> slug("deft"), slug("alpha(0.5)")
    ('deft', 'alpha-0.5-3776')
    """
    plain = re.sub(r"[^A-Za-z0-9.]+", "-", spec).strip("-.")
    return plain if plain == spec else f"{plain}-{hashlib.sha256(spec.encode()).hexdigest()[:4]}"


COST = ("seconds", "tokens", "tokens_per_second", "memory_gib")


class CellState(BaseModel):
    """The content of `cell.json`."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, strict=True)
    state: Literal["new", "running", "stopped", "failed", "finished"]
    stage: str = ""
    cost: dict[str, float] = Field(default_factory=dict[str, float])
    error: str = ""
    eval_seconds: float = 0.0
    left_out: list[str] = Field(default_factory=list[str])
    failures: list[dict[str, str]] = Field(default_factory=list[dict[str, str]])  # of calls before this state

    @field_validator("cost")
    @classmethod
    def _cost(cls, value: dict[str, float]) -> dict[str, float]:
        if value and (missing := [name for name in COST if name not in value]):  # the untuned model's is empty
            raise ValueError(f"has no {', '.join(missing)}")
        return value


@dataclass(frozen=True)
class Cell:
    """One run and its measurements; the cell of the untuned model has neither learning rate nor seed."""

    comparison: Comparison
    regime: str
    objective: str
    learning_rate: float | None
    seed: int | None

    @property
    def name(self) -> str:
        if self.objective == BASE:
            return f"{self.regime}/{BASE}"
        return f"{self.regime}/{slug(self.objective)}/lr{self.learning_rate:g}-s{self.seed}"

    @property
    def folder(self) -> Path:
        return Path(self.comparison.folder) / self.name

    @property
    def run(self) -> Run:
        """The cell's training run; the cell of the untuned model has none in it."""
        return Run(self.folder / "run")

    @property
    def token_table(self) -> Path:
        """The file of the cell's held-out tokens."""
        return self.folder / "tokens.parquet"

    def result(self, evaluation: Evaluation) -> Result:
        """The cell's answers to the questions of an evaluation."""
        return Result(self.folder / f"eval-{evaluation.title}")

    def train_records(self) -> list[dict[str, Any]]:
        """What the cell's run recorded at each of its steps; nothing for the untuned model."""
        return [record for record in self.run.read_metrics() if record.get("kind") == "train"]

    @property
    def section(self) -> Regime:
        return self.comparison.regimes[self.regime]

    @cached_property
    def config(self) -> RunConfig:
        """The config of the cell's run; for the untuned model it states the model and the template."""
        comparison, regime = self.comparison, self.section
        train = {**comparison.train, **regime.train}
        if self.objective != BASE:
            train |= {"learning_rate": self.learning_rate, "seed": self.seed}
        content: dict[str, Any] = {
            "run": str(self.folder / "run"),
            "objective": "nll" if self.objective == BASE else self.objective,
            "model": {**comparison.model, **regime.model},
            "data": regime.data,
            "train": train,
        }
        try:
            return RunConfig.model_validate(content)
        except ValidationError as error:
            lines = [f"regimes.{self.regime}: {line}" for line in explain(error)]
            raise ConfigError("\n".join(lines)) from None

    def state(self) -> dict[str, Any]:
        """{"state": "new" | "running" | "stopped" | "failed" | "finished", ...}; a damaged `cell.json` is an error."""
        path = self.folder / "cell.json"
        try:
            content = json.loads(path.read_bytes())
            CellState.model_validate(content)
            return content
        except (FileNotFoundError, NotADirectoryError):
            return {"state": "new"}
        except (ValueError, RecursionError) as error:
            problem = explain(error, CellState)[0] if isinstance(error, ValidationError) else "it is not JSON"
            raise ValueError(
                f"{path}: is damaged ({problem}); remove it, and `deftune compare run` goes on with the cell"
            ) from None

    @property
    def is_finished(self) -> bool:
        return self.state()["state"] == "finished"

    def set_state(self, state: str, **facts: Any) -> None:
        """Write `cell.json`; the failures of earlier calls are kept, so that a cell that was run again says so."""
        failures = list(self.state().get("failures", ()))
        if state == "failed":
            failures.append({key: facts[key] for key in ("stage", "error") if key in facts})
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = {"failures": failures} if failures else {}
        write_atomic(self.folder / "cell.json", json.dumps({"state": state, **facts} | kept, indent=1))


# --- reading and opening ----------------------------------------------------------------------------------------------


def load_comparison(path: Path, overrides: Sequence[str] = ()) -> Comparison:
    """Read a comparison from a YAML file, or from the folder of a comparison."""
    if path.is_dir():
        if not (path / CONFIG).is_file():
            raise ConfigError(f"{path}: is no comparison (it has no {CONFIG})")
        overrides = [f"folder={json.dumps(str(path))}", *overrides]  # wherever it lies now
        path = path / CONFIG
    elif not path.is_file():
        raise ConfigError(f"{path}: no such file; `deftune compare init` writes one to start from")
    content = read_yaml(path, Comparison)
    for override in overrides:
        apply_override(content, override)
    try:
        comparison = Comparison.model_validate(content)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in explain(error, Comparison))) from None
    try:
        for cell in comparison.cells():
            _ = cell.config  # every cell's run is checked before the first is trained
    except ConfigError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None
    return comparison


def render_comparison(comparison: Comparison) -> str:
    """The comparison as YAML with every default; `load_comparison` reads it back."""
    return yaml.safe_dump(json.loads(comparison.model_dump_json()), sort_keys=False, allow_unicode=True)


GROWS = ("objectives", "seeds", "learning_rates", "regimes")
BEGINNING = ("environment.json", ".environment.json.writing", f".{CONFIG}.writing")  # written before the config
OPEN_SECONDS = 60.0  # for other processes to open the folder: each takes a moment


def open_comparison(comparison: Comparison) -> None:
    """Make or continue the folder. It may grow by objectives, seeds, rates and regimes; nothing else may change.

    Several processes may open it at the same time: the jobs of an array, each with `--cell`.
    """
    folder = Path(comparison.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        COMPARISON.is_begun(folder)  # refuses a file
        raise

    def wait(seconds: float) -> None:
        if seconds > OPEN_SECONDS:
            raise FolderError(f"{folder}: another process has been opening this comparison for {seconds:.0f} seconds")

    with locked_file(folder / LOCK, wait):
        now = json.loads(comparison.model_dump_json())
        if COMPARISON.is_begun(folder, BEGINNING):
            refuse_changes(folder, now)
        else:
            write_atomic(folder / "environment.json", json.dumps(environment(), indent=1))
        write_atomic(folder / CONFIG, render_comparison(comparison))


def refuse_changes(folder: Path, now: dict[str, Any]) -> None:
    """Refuse a config that differs from the folder's in more than what may grow."""
    before = read_yaml(folder / CONFIG, Comparison)
    with suppress(ValidationError):  # a key that came later has its default
        before = json.loads(Comparison.model_validate(before).model_dump_json())
    changed = [
        line
        for name, regime in now["regimes"].items()
        if name in before["regimes"]
        for line in differences(before["regimes"][name], regime, f"regimes.{name}")
    ]
    changed += [f"{key}: {value} is gone" for key in GROWS for value in before[key] if value not in now[key]]
    old, new = ({k: v for k, v in content.items() if k not in (*GROWS, "folder")} for content in (before, now))
    COMPARISON.refuse_changes(folder, old, new, *changed)


STARTER = """\
# A first comparison: two objectives, two seeds, on generated problems; no hub and no GPU needed.
# `deftune compare run FILE` runs it and goes on where it was stopped; `deftune report FOLDER` makes a page of it.

folder: comparisons/first
objectives: [nll, deft]           # `deftune objectives` lists them
seeds: [0, 1]                     # every objective sees the same rows in the same order for a seed
learning_rates: [5.0e-5]          # several are swept alike for every objective; each is shown at its own best

model:
  name: smollm2                   # or a hub id, a folder, a .gguf file

train:
  max_steps: 20
  batch_size: 8
  micro_batch_size: 4
  save_steps: 10

regimes:                          # strong, intermediate, weak and mixed are the paper's names
  weak:
    data:
      train:
        - {generate: figlet_font, limit: 400}
      max_length: 512
    evaluate:
      - suite: figfont            # or math, medical, with data: FOLDER; or tasks: [gsm8k]
        limit: 20                 # a sample of the items: for a try
        temperatures: [0, 1]      # temperature is part of a result
        samples: 2
    tokens:                       # held-out rows: probabilities and entropies of their answers
      - {generate: figlet_font, split: test, limit: 20}
"""
