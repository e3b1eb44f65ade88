"""The committed results of a comparison: one small JSON file in place of folders of runs, answers and token tables.

Every finished cell keeps its config, environment, cost, the grade of every answer, the token statistics of held-out
rows, some training records, its failures and the command that runs it again. Weights and texts are not kept.
"""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deftune.artifacts.files import write_atomic
from deftune.artifacts.folders import differences
from deftune.comparison.cells import task_versions
from deftune.comparison.grid import BASE, GROWS, Cell, Comparison, load_comparison
from deftune.comparison.report import read_environment
from deftune.comparison.scores import Scores
from deftune.comparison.summary import readable, table_record
from deftune.evaluation.evaluate import Result

Record = dict[str, Any]
FORMAT = 1
RECORDS = 20  # training records of a cell that are kept, evenly spaced, the first and the last among them
TRAINED = ("step", "loss", "nll", "p", "concentration", "focus", "gate", "conflicts", "eos_p")
SECONDS = ("train_seconds", "eval_seconds", "tokens_seconds", "load_seconds", "overhead_seconds")
MEASURED = ("scores", "held_out", "training")  # of a cell; all else may differ between two runs of the same cell
SPEED = ("micro_batch_size", "compile")  # of `train`: they change speed, memory and rounding; each cell records its own


# --- from a folder ----------------------------------------------------------------------------------------------------


def rounded(value: float, digits: int = 5) -> float:
    """
    >>> rounded(0.123456789), rounded(123456.7)
    (0.12346, 123460.0)
    """
    return float(f"{value:.{digits}g}")


def cell_record(cell: Cell, environment: int, file: str) -> Record:
    """A finished or failed cell as it is committed."""
    state = cell.state()
    record: Record = {
        "regime": cell.regime, "objective": cell.objective, "learning_rate": cell.learning_rate, "seed": cell.seed,
        "state": state["state"], "environment": environment, "command": rerun_command(cell, file),
    }  # fmt: skip
    if failures := state.get("failures"):
        record["failures"] = failures
    if state["state"] == "failed":
        return record
    cost: Mapping[str, float] = state.get("cost", {})
    if cell.objective != BASE:
        record["train"] = {name: getattr(cell.config.train, name) for name in SPEED}
    record["time"] = round(float(state.get("time", 0.0)))
    record["cost"] = {name: rounded(float(state.get(name, 0.0)), 4) for name in SECONDS}
    record["cost"] |= {"steps_seconds": rounded(cost.get("seconds", 0.0), 4),
                       "memory_gib": rounded(cost.get("memory_gib", 0.0), 4)}  # fmt: skip
    record["scores"] = {
        evaluation.title: answers_record(cell, evaluation.title) for evaluation in cell.section.evaluate
    }
    record["task_versions"] = task_versions(cell)
    if cell.section.tokens:
        with readable(cell.folder / "tokens.parquet", cell):
            record["held_out"] = short(table_record(cell.folder / "tokens.parquet"))
    if records := thinned(cell.train_records(), RECORDS):
        record["training"] = {
            name: [rounded(float(r[name]), 4) for r in records] for name in TRAINED if all(name in r for r in records)
        }
    return record


def seconds_of(cell: Record) -> float:
    """Wall seconds of a cell: training steps, token table, answers, and the rest."""
    cost = cell["cost"]
    return sum(cost[name] for name in ("steps_seconds", "tokens_seconds", "eval_seconds", "overhead_seconds"))


def rerun_command(cell: Cell, file: str) -> str:
    """The command that trains and measures the cell from the beginning, in a folder of its own."""
    words = ["deftune", "compare", "run", file, "--set", "folder=comparisons/again"]
    if cell.objective != BASE:
        chosen = {"objectives": [cell.objective], "seeds": [cell.seed], "learning_rates": [cell.learning_rate]}
        for name, value in chosen.items():
            words += ["--set", f"{name}={json.dumps(value)}"]
    return shlex.join([*words, "--cell", cell.name])


def answers_record(cell: Cell, title: str) -> Record:
    """task -> items (their ids) and, by temperature, grades and form of the answers."""
    folder = cell.folder / f"eval-{title}"
    by_task: dict[str, list[Record]] = {}
    with readable(folder / "graded.jsonl", cell):
        for record in Result(folder).read_graded():
            by_task.setdefault(str(record["task"]), []).append(record)
    found: Record = {}
    for task, records in by_task.items():
        items = list(dict.fromkeys(str(r["id"]) for r in records))
        temperatures: dict[str, list[Record]] = {}
        for record in records:
            temperatures.setdefault(f"{record['temperature']:g}", []).append(record)
        found[task] = {
            "items": items,
            "temperatures": {t: graded_record(group, items) for t, group in temperatures.items()},
        }
    return found


def graded_record(records: Sequence[Record], items: Sequence[str]) -> Record:
    """The answers at one temperature: a string of 0 and 1 for each sample, in the order of the items."""
    places = {item: place for place, item in enumerate(items)}
    samples = max(int(r["sample"]) for r in records) + 1
    grades = [[""] * len(items) for _ in range(samples)]
    similar = [[0] * len(items) for _ in range(samples)]
    for r in records:
        if float(r["score"]) not in (0.0, 1.0):
            raise ValueError(f"{r['id']}: a score is 0 or 1, got {r['score']}")
        grades[r["sample"]][places[r["id"]]] = str(int(r["score"]))
        similar[r["sample"]][places[r["id"]]] = round(1000 * float(r.get("similarity", 0.0)))
    if any("" in row for row in grades):
        raise ValueError("an item lacks an answer")
    record: Record = {
        "grades": ["".join(row) for row in grades],
        "extracted": dict(sorted(Counter(str(r["how"]) for r in records).items())),
        "finished": dict(sorted(Counter(str(r["finish"]) for r in records).items())),
        "answer_tokens": rounded(math.fsum(float(r["tokens"]) for r in records) / len(records)),
    }
    return record | ({"similarity": similar} if "similarity" in records[0] else {})  # in thousandths


def short(value: Any) -> Any:
    """Statistics with rounded numbers: a mean and its 95% interval become [mean, low, high].

    >>> short({"rows": 2, "p": {"mean": 0.123456789, "low": 0.1, "high": 0.2}})
    {'rows': 2, 'p': [0.12346, 0.1, 0.2]}
    """
    if isinstance(value, dict):
        found: Record = {name: short(part) for name, part in value.items()}  # pyright: ignore
        return list(found.values()) if "low" in found else found
    return rounded(value) if isinstance(value, float) else value


def thinned(records: Sequence[Record], number: int) -> list[Record]:
    """At most ``number`` records, evenly spaced, the first and the last among them.

    >>> [r["step"] for r in thinned([{"step": n} for n in range(1, 8)], 3)]
    [1, 4, 7]
    """
    if len(records) <= number:
        return list(records)
    return [records[round(i * (len(records) - 1) / (number - 1))] for i in range(number)]


# --- files ------------------------------------------------------------------------------------------------------------


@dataclass
class Study:
    """The content of a results file.

    ``config`` is the comparison's without what the cells say themselves; ``items`` are the ids of each task's items, by
    regime and evaluation; ``cells`` are records by name.
    """

    config: Record
    environments: list[Record]
    items: dict[str, dict[str, dict[str, list[str]]]]
    cells: dict[str, Record]

    def comparison(self) -> Comparison:
        """The comparison that the cells belong to."""
        trained = [cell for cell in self.cells.values() if cell["objective"] != BASE]
        grown: Record = {
            "objectives": list(dict.fromkeys(c["objective"] for c in trained)) or ["nll"],
            "seeds": sorted({c["seed"] for c in trained}) or [0],
            "learning_rates": sorted({c["learning_rate"] for c in trained}) or [1e-5],
        }
        return Comparison.model_validate({**self.config, **grown})

    def finished(self, regime: str) -> Iterator[Record]:
        return (c for c in self.cells.values() if c["regime"] == regime and c["state"] == "finished")

    def scores(self, regime: str, title: str) -> dict[str, Scores]:
        """The item scores of each objective, the untuned model's too, in an evaluation of a regime."""
        comparison, found = self.comparison(), dict[str, Scores]()
        for record in self.finished(regime):
            if title not in record["scores"]:
                continue
            cell = Cell(comparison, regime, record["objective"], record["learning_rate"], record["seed"])
            found.setdefault(cell.objective, Scores()).add(
                cell, graded(record["scores"][title], self.items[regime][title])
            )
        return found


def graded(scores: Mapping[str, Any], items: Mapping[str, Sequence[str]]) -> Iterator[Record]:
    """The graded answers of a committed cell, as `Scores.add` takes them."""
    for task, temperatures in scores.items():
        for temperature, record in temperatures.items():
            for sample, grades in enumerate(record["grades"]):
                for place, (item, grade) in enumerate(zip(items[task], grades, strict=True)):
                    one: Record = {"task": task, "id": item, "temperature": float(temperature), "score": int(grade)}
                    if "similarity" in record:
                        one["similarity"] = record["similarity"][sample][place] / 1000
                    yield one


def read_study(path: Path) -> Study:
    """Read a results file that `collect` wrote."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"{path}: has format {content['format']}, this version reads {FORMAT}")
        return Study(*(content[name] for name in ("config", "environments", "items", "cells")))
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: is no results file of the study ({type(error).__name__}: {error})") from None


def write_study(study: Study, path: Path) -> None:
    """Write a results file: one line for each cell, so that a change of one cell is a change of one line."""
    head = {"format": FORMAT, "config": study.config, "environments": study.environments, "items": study.items}
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    cells = [f"  {json.dumps(name)}: {json.dumps(cell)}" for name, cell in sorted(study.cells.items())]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "\n".join(["{", *lines, ' "cells": {', ",\n".join(cells), " }", "}", ""]))


# --- merging ----------------------------------------------------------------------------------------------------------


def collect(
    folders: Iterable[Path], out: Path, *, reruns: Iterable[Path] = (), file: str | None = None,
    only: Collection[str] | None = None,
) -> tuple[Study, list[str]]:  # fmt: skip
    """Merge the cells of comparisons into a results file.

    Args:
        folders: folders of the same comparison: of several sessions, or of one that was extended.
        out: the results file; the cells that it has are kept.
        reruns: folders whose cells were run again; their results stand beside the first ones, under ``reruns``.
        file: the YAML file of the comparison, for the commands that run a cell again.
        only: names of the cells to take (default: all).

    Returns:
        The merged results, and messages: cells that were left out because they are not finished.

    Raises:
        ValueError: a folder holds another comparison, or a cell that is there already with another result.
    """
    study = read_study(out) if out.is_file() else None
    if study is not None:  # an option that came later has its default
        study.config = shared_config(study.comparison())
    messages: list[str] = []
    file = file or f"benchmarks/study/{out.stem}.yaml"
    for folder, again in [*((f, False) for f in folders), *((f, True) for f in reruns)]:
        comparison = load_comparison(folder)
        config = shared_config(comparison)
        if study is None:
            study = Study(config, [], {}, {})
        merge_config(study, config, folder)
        waiting: list[str] = []
        for cell in comparison.cells():
            if only is not None and cell.name not in only:
                continue
            if cell.state()["state"] not in ("finished", "failed"):
                waiting.append(cell.name)
                continue
            record = cell_record(cell, environment_index(study, cell), file)
            take_items(study, record, folder)
            add_cell(study, cell.name, record, folder, again=again)
        if waiting:
            messages.append(f"{folder}: {len(waiting)} cells are not finished: {', '.join(waiting)}")
    if study is None:
        raise ValueError("collect: name at least one folder of a comparison")
    write_study(study, out)
    return study, messages


def shared_config(comparison: Comparison) -> Record:
    """The config without the folder, and without what the cells have themselves: lists that they repeat, speed."""
    content: Record = json.loads(comparison.model_dump_json())
    for regime in content["regimes"].values():
        if len(regime["tokens"]) == 1:  # one source has all rows, whatever its weight; 1.0 was the default once
            regime["tokens"][0]["weight"] = None
    for section in (content, *content["regimes"].values()):
        section["train"] = {key: value for key, value in section["train"].items() if key not in SPEED}
    return {key: value for key, value in content.items() if key == "regimes" or key not in (*GROWS, "folder")}


def merge_config(study: Study, config: Record, folder: Path) -> None:
    old, new = ({k: v for k, v in content.items() if k != "regimes"} for content in (study.config, config))
    changed = differences(old, new)
    for name, regime in config["regimes"].items():
        known = study.config["regimes"].setdefault(name, regime)
        changed += differences(known, regime, f"regimes.{name}")
    if changed:
        raise ValueError(f"{folder}: is another comparison than the results: {'; '.join(changed)}; name another --out")


def environment_index(study: Study, cell: Cell) -> int:
    """The place of a cell's environment in the list; added where it is new. Commands and dates are left out."""
    own = cell.run.folder if cell.objective != BASE else Path(cell.comparison.folder)
    found = read_environment(own / "environment.json")
    found = {key: value for key, value in found.items() if key not in ("command", "started")}
    if found not in study.environments:
        study.environments.append(found)
    return study.environments.index(found)


def take_items(study: Study, record: Record, folder: Path) -> None:
    """Move the ids of a cell's items to the study, where they stand once; a cell with other items is refused."""
    for title, tasks in record.get("scores", {}).items():
        for task, about in tasks.items():
            known = study.items.setdefault(record["regime"], {}).setdefault(title, {})
            if known.setdefault(task, about["items"]) != about["items"]:
                raise ValueError(f"{folder}: {task} was asked other items than in the results; name another --out")
            tasks[task] = about["temperatures"]


def add_cell(study: Study, name: str, record: Record, folder: Path, *, again: bool) -> None:
    """Add a cell; one that is there already must be the same, or a rerun."""
    known = study.cells.get(name)
    earlier: list[Record] = known.get("failures", []) if known else []
    failures = [*earlier, *(failure for failure in record.get("failures", []) if failure not in earlier)]
    if known is None or known["state"] == "failed":
        study.cells[name] = record | ({"failures": failures} if failures else {})
        return
    if record["state"] == "failed":
        known["failures"] = failures
        return
    if all(known.get(part) == record.get(part) for part in MEASURED):
        return
    if not again:
        raise ValueError(
            f"{folder}: {name} is in the results already, with other measurements; pass the folder with --rerun if the "
            f"cell was run again on purpose"
        )
    if record not in known.setdefault("reruns", []):
        known["reruns"].append(record)
