"""A run's folder: its config, its environment, its records, its checkpoints and its model.

config.yaml  environment.json  data.json  metrics.jsonl  bad_rows.jsonl  checkpoints/  model/  status.json
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from deftune.artifacts.checkpoints import checkpoints
from deftune.artifacts.config import ConfigError, RunConfig, load_config, parse_yaml, render_yaml
from deftune.artifacts.environment import environment
from deftune.artifacts.files import write_atomic
from deftune.artifacts.folders import MANIFEST, Kind, differences, is_locked

RUN = Kind("run", "config.yaml", "--set run=...")
MAY_CHANGE = frozenset(  # keys of train that may differ when a run is resumed: they change a result by rounding at most
    ("micro_batch_size", "gradient_checkpointing", "weights", "compile", "workers", "save_steps", "save_at", "keep",
     "async_checkpoints", "report_to", "push_to_hub", "push_private")
)  # fmt: skip
BEGINNING = ("environment.json", ".environment.json.writing", ".config.yaml.writing")  # written before the config


@dataclass(frozen=True)
class Run:
    """A run's folder and the paths in it."""

    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def status(self) -> dict[str, Any]:
        """{"state": "new" | "running" | "stopped" | "failed" | "finished", "step": ..., ...}"""
        path = self.folder / "status.json"
        try:
            status = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}  # a pipe would block
            return {**status, "state": str(status["state"]), "step": int(status["step"])}
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):  # int(Infinity) overflows
            return {"state": "new", "step": 0}

    def has_result(self) -> bool:
        """Whether the run is finished and its model lies in the folder."""
        return self.status()["state"] == "finished" and (self.model / MANIFEST).is_file()

    def set_status(self, state: str, **facts: Any) -> None:
        write_atomic(self.folder / "status.json", json.dumps({"state": state, "time": time.time(), **facts}))

    def template_time(self) -> str | None:
        """The time, in ISO 8601, that the chat template wrote into the run's rows; None if it writes none."""
        path = self.folder / "data.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}  # a pipe would block
            return datetime.fromisoformat(content["now"]).isoformat()
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def read_config(self) -> RunConfig:
        if not self.config.is_file():
            raise ValueError(f"{self.folder}: is no run (it has no config.yaml)")
        return load_config(self.config)

    def read_metrics(self) -> list[dict[str, Any]]:
        """The records, oldest first; a last line cut off by a kill is left out."""
        if not self.metrics.is_file():
            return []
        records: list[dict[str, Any]] = []
        for line in self.metrics.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line, parse_int=_bounded)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):  # pyright: ignore
                records.append(record)  # pyright: ignore[reportUnknownArgumentType]
        return records


def _bounded(digits: str) -> int:
    """A whole number that a float can hold; a record with a larger one is damaged."""
    if len(digits) > 300:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def find_run(config: RunConfig) -> Run:
    """The run's folder; a folder that holds something else is refused. Nothing is written."""
    run = Run(Path(config.run))
    if RUN.is_begun(run.folder, BEGINNING):
        RUN.refuse_changes(run.folder, _fixed(_recorded(run)), _fixed(config.model_dump(mode="json")))
    return run


def _recorded(run: Run) -> Any:
    """The content of a run's config.yaml; a key that came later has its default."""
    try:
        content = parse_yaml(run.config.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{run.config}: is damaged; restore it, or choose another folder with {RUN.option}"
        ) from error
    with suppress(ValidationError):
        content = RunConfig.model_validate(content).model_dump(mode="json")
    return content


def _fixed(content: Any) -> Any:
    """The part of a config that a resumed run must have in common; a folder that was moved is the same run."""
    match content:
        case {"train": {} as train}:
            kept = {key: value for key, value in train.items() if key not in MAY_CHANGE}
            return {key: value for key, value in content.items() if key != "run"} | {"train": kept}
        case _:
            return content


def open_run(config: RunConfig) -> tuple[Run, list[str]]:
    """The run's folder, made or continued, and the keys that changed; a folder that holds something else is refused."""
    run = find_run(config)
    if not run.config.exists():
        run.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(run.folder / "environment.json", json.dumps(environment(), indent=1))
        write_atomic(run.config, render_yaml(config))
        return run, []
    before, now = _recorded(run), config.model_dump(mode="json")
    changed = differences(before | {"run": now["run"]}, now)
    if changed:
        write_atomic(run.config, render_yaml(config))
    return run, changed


def cut_metrics(run: Run, step: int) -> None:
    """Drop the records after ``step``, and the result's: a resumed run writes them again."""
    records = [r for r in run.read_metrics() if r["step"] <= step and not r.get("final")]
    write_atomic(run.metrics, "".join(json.dumps(record) + "\n" for record in records))


def find_runs(root: Path) -> list[Run]:
    """The runs below a folder, by name."""
    return [
        Run(path.parent) for path in sorted(root.rglob("config.yaml")) if (path.parent / "environment.json").exists()
    ]


def names_in(run: Run) -> tuple[str, str]:
    """The objective and the model in a run's config, also of an objective that this process does not know."""
    if not run.config.is_file():
        raise ValueError(f"{run.config}: is no file")
    content = parse_yaml(run.config.read_text(encoding="utf-8"))
    match content:
        case {"objective": str(objective), "model": {"name": str(model)}}:
            return objective, model
        case _:
            raise ValueError(f"{run.config}: names no objective or no model")


def summary(run: Run) -> dict[str, Any]:
    """One line of `deftune runs`. Nothing is written."""
    state = run.status()["state"]
    last: dict[str, Any] = {}
    evaluated: dict[str, Any] = {}
    objective = model = None
    kept = 0
    try:
        if state == "running" and not is_locked(run.folder):  # killed, or the power went
            state = "interrupted"
        records = run.read_metrics()[::-1]
        last = next((record for record in records if "nll" in record), {})
        evaluated = next((record for record in records if "eval_loss" in record), {})
        kept = len(checkpoints(run.checkpoints))
        objective, model = names_in(run)
    except (ValueError, RecursionError, yaml.YAMLError):
        state = "damaged"
    except OSError:
        state = "unreadable"
    return {
        "run": str(run.folder),
        "state": state,
        "step": last.get("step", 0),
        "kept": run.status().get("kept"),
        "objective": objective,
        "model": model,
        "loss": last.get("loss"),
        "nll": last.get("nll"),
        "p": last.get("p"),
        "eval_loss": evaluated.get("eval_loss"),
        "eval_nll": evaluated.get("eval_nll"),
        "checkpoints": kept,
    }
