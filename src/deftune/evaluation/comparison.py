"""Compare results with the result of a base model, paired by item.

Every difference is *other - base*: after tuning on maths, a negative difference on a medical suite is forgetting.
``won`` and ``lost`` count the items whose score is higher and lower than the base's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deftune.evaluation import heldout
from deftune.evaluation.evaluate import by_item, describe_errors, error_record
from deftune.evaluation.results import Record, Result, changed_questions, graded_questions
from deftune.evaluation.statistics import Estimate, holm, item_means, macro_average, mean_over_items, paired
from deftune.evaluation.suites import SUITES, coverage

ALIKE = ("top_p", "max_new_tokens", "rule")  # settings that must agree for scores to be comparable


def results_in(folder: Path) -> list[Result]:
    """The result in ``folder``, or the results in its subfolders, one per suite."""
    if (folder / "settings.json").is_file():
        return [Result(folder)]
    found = sorted(path.parent for path in folder.glob("*/settings.json"))
    if not found:
        raise ValueError(
            f"{folder}: neither a result nor a folder of results (no settings.json); `deftune eval run` makes one"
        )
    return [Result(path) for path in found]


def results_by_kind(folder: Path) -> dict[str, Result]:
    """Results by what was evaluated: the name of a suite, the names of single tasks, or "heldout" and the dataset."""
    named: dict[str, Result] = {}
    for result in results_in(folder):
        settings = result.settings()
        suite = settings["suite"] or ", ".join(settings["tasks"])
        name = f"heldout {settings['data']}" if suite == "heldout" else suite
        if name in named:
            raise ValueError(f"{named[name].folder} and {result.folder} both hold {name}; name one of them")
        named[name] = result
    return named


def compare(base: Result, other: Result) -> list[Record]:
    """other - base for every shared task and temperature, paired by item; p-values are not adjusted."""
    before, after = base.read_graded(), other.read_graded()
    old, new = base.settings(), other.settings()
    for name in ALIKE:
        if old.get(name) != new.get(name):
            raise ValueError(
                f"{base.folder} and {other.folder}: {name} was {old.get(name)} and {new.get(name)}; evaluate both alike"
            )
    have = {(r["task"], r["temperature"]) for r in after}
    shared = [key for key in dict.fromkeys((r["task"], r["temperature"]) for r in before) if key in have]
    if not shared:
        raise ValueError(f"{base.folder} and {other.folder} have no task and temperature in common")
    theirs, mine = graded_questions(before), graded_questions(after)
    for task in dict.fromkeys(task for task, _ in shared):
        if old["tasks"].get(task) != new["tasks"].get(task):
            versions = old["tasks"].get(task), new["tasks"].get(task)
            raise ValueError(
                f"{task}: version {versions[0]} and version {versions[1]} are different tasks; the command that made "
                f"the older result grades its answers again"
            )
        if alone := theirs[task].keys() ^ mine[task].keys():
            raise ValueError(f"{task}: {len(alone)} items are in one result only; evaluate both on the same items")
        if changed := changed_questions(theirs[task], mine[task]):
            raise ValueError(
                f"{base.folder} and {other.folder}: {len(changed)} of {len(mine[task])} questions of {task} differ in "
                f"prompt or gold, such as {changed[0]!r}; evaluate both on the same data"
            )
    return [_compare_task(before, after, task, temperature, old["suite"]) for task, temperature in shared]


def _compare_task(
    before: Sequence[Record], after: Sequence[Record], task: str, temperature: float, suite: str
) -> Record:
    theirs, mine = by_item(before, task, temperature), by_item(after, task, temperature)
    a, b = [theirs[i] for i in mine], list(mine.values())
    found = paired(b, a)
    changes = [y - x for x, y in zip(item_means(a), item_means(b))]
    return {
        "suite": suite, "task": task, "temperature": temperature, "items": found.num_items,
        "base": mean_over_items(a), "score": mean_over_items(b), "difference": found.difference,
        "standard_error": found.standard_error, "interval": [found.interval.low, found.interval.high],
        "won": sum(change > 0 for change in changes), "lost": sum(change < 0 for change in changes),
        "p": found.p_value,
    }  # fmt: skip


def average_changes(rows: Sequence[Record]) -> list[Record]:
    """The macro average of the differences for each suite, run and temperature, with the covered share of the suite."""
    averages: list[Record] = []
    for name, run, temperature in dict.fromkeys((r["suite"], r["run"], r["temperature"]) for r in rows):
        if name not in SUITES:
            continue
        suite = SUITES[name]
        mine = [
            r
            for r in rows
            if (r["suite"], r["run"], r["temperature"]) == (name, run, temperature) and r["task"] in suite.averaged
        ]
        if mine:
            change = macro_average([Estimate(r["difference"], r["standard_error"]) for r in mine])
            averages.append({
                "suite": name, "run": run, "temperature": temperature,
                "covers": coverage(suite, [r["task"] for r in mine]),
                "base": sum(r["base"] for r in mine) / len(mine), "score": sum(r["score"] for r in mine) / len(mine),
                "difference": change.mean, "standard_error": change.standard_error,
            })  # fmt: skip
    return averages


def compare_folders(base: str | Path, others: Sequence[str | Path]) -> dict[str, Any]:
    """Compare the result folder ``base`` with each of ``others``, on the suites that both have.

    Returns:
        ``tasks``, ``averages`` of suites and ``heldout`` token statistics: one record per run and row, with
        ``difference``, ``interval`` and ``p``; ``p_holm`` is adjusted by Holm's rule over all tasks of all runs.
        ``alone`` names results without a partner, ``engines`` results of different engines, ``errors`` tasks with
        answers that are errors.

    Raises:
        ValueError: nothing is shared, or the questions, task versions or sampling settings differ.
    """
    tasks: list[Record] = []
    tokens: list[Record] = []
    alone: list[str] = []
    engines: list[str] = []
    errors: dict[str, None] = {}
    bases = results_by_kind(Path(base))
    for folder in others:
        mine = results_by_kind(Path(folder))
        if not bases.keys() & mine.keys():
            raise ValueError(f"{base} has {'; '.join(bases)} and {folder} has {'; '.join(mine)}: nothing in common")
        alone += [f"{folder if name in mine else base}: {name}" for name in sorted(bases.keys() ^ mine.keys())]
        for name in [name for name in bases if name in mine]:
            if name.startswith("heldout "):
                rows = heldout.compare(bases[name], mine[name])
                tokens += [{"run": str(folder), "data": name.removeprefix("heldout "), **row} for row in rows]
            else:
                tasks += [{"run": str(folder), **row} for row in compare(bases[name], mine[name])]
                errors |= dict.fromkeys([*error_notes(bases[name]), *error_notes(mine[name])])
                made = [engine_name(result) for result in (bases[name], mine[name])]
                if made[0] != made[1]:
                    engines.append(f"{folder}: {name} was answered by {made[1]}, and in {base} by {made[0]}")
    for row, adjusted in zip(tasks, holm([row["p"] for row in tasks])):
        row["p_holm"] = adjusted
    return {
        "base": str(base), "tasks": tasks, "averages": average_changes(tasks), "heldout": tokens, "alone": alone,
        "engines": engines, "errors": list(errors),
    }  # fmt: skip


def error_notes(result: Result) -> list[str]:
    """A line for each task and temperature with errors among its answers; errors count as wrong answers."""
    notes: list[str] = []
    graded = result.read_graded()
    for task, temperature in dict.fromkeys((r["task"], r["temperature"]) for r in graded):
        mine = [r for r in graded if (r["task"], r["temperature"]) == (task, temperature) and "finish" in r]
        if errors := describe_errors({"errors": error_record(mine)}):
            notes.append(f"{result.folder}: {task} T={temperature:g}: {errors}")
    return notes


def engine_name(result: Result) -> str:
    """Name, version and dtype of the engine of a result; older results do not record them."""
    engine: Record = result.settings().get("engine") or {}
    named = [str(engine[key]) for key in ("name", "version", "dtype") if engine.get(key)]
    return " ".join(named) or "an engine not recorded"
