"""Read the questions of an evaluation: of suites, of tasks by name, and of task files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from deftune.artifacts.options import OptionError, check_counts
from deftune.evaluation.items import MissingData, find_data, read_task, with_data
from deftune.evaluation.results import Tasks
from deftune.evaluation.suites import Suite, Task, suite_named, task_named
from deftune.evaluation.task_files import load_task_file


def wanted_tasks(
    suite: Suite | None, tasks: Iterable[str], task_files: Iterable[str | Path]
) -> list[tuple[Task, bool]]:  # fmt: skip
    """The tasks of a suite and the tasks named beside it; the bool says whether the data of a task must exist."""
    own = [load_task_file(path) for path in task_files]
    names = [task.name for task in own]
    if twice := [name for name in names if names.count(name) > 1]:
        raise OptionError("task_files", f"two task files have the name {twice[0]}; rename one of the tasks")
    named = [(task_named(name), False) for name in (suite.tasks if suite else ())]
    return named + [(task_named(name), True) for name in tasks] + [(task, True) for task in own]


def load_items(
    wanted: Iterable[tuple[Task, bool]], data: Path | None, limit: int | None
) -> tuple[Tasks, dict[str, str]]:
    """(tasks with their items, task without data -> reason). A task that must have data raises `MissingData`."""
    found: Tasks = {}
    missing: dict[str, str] = {}
    for task, required in wanted:
        try:
            path = find_data(task, data)
            chosen = task if path is None else with_data(task, path)  # so that the result records the path
            found[task.name] = (chosen, read_task(chosen, None, limit=limit))
        except MissingData as error:
            if required:
                raise
            missing[task.name] = str(error)
    if not found:
        first, *others = missing.values()
        more = f"; nor have {len(others)} others, see `deftune eval list`" if others else ""
        raise ValueError(f"no task has data: {first}{more}")
    return found, missing


class Questions(NamedTuple):
    """A suite, or None for single tasks, with its items; ``missing`` has the tasks without data, and why."""

    suite: Suite | None
    tasks: Tasks
    missing: dict[str, str]


def load_questions(
    suites: Sequence[str] = (), tasks: Sequence[str] = (), task_files: Sequence[str | Path] = (),
    *, data: str | Path | None = None, limit: int | None = None,
) -> list[Questions]:  # fmt: skip
    """Read the questions of each suite. Single ``tasks`` and ``task_files`` go with one suite at most.

    Args:
        data: the folder of the benchmarks' files; None reads from the hub.
        limit: a sample of this many items of each task.

    Raises:
        OptionError: nothing or something twice is named, or there is no such folder.
        MissingData: a task that was named has no data. A suite may lack the data of some tasks.
    """
    check_counts(limit=limit)
    if data is not None and not Path(data).is_dir():
        raise OptionError("data", f"{data}: no such folder")
    if not (suites or tasks or task_files):
        raise OptionError("suites", "name a suite, a task or a task file; `deftune eval list` shows them")
    if len(set(suites)) < len(suites):
        raise OptionError("suites", f"a suite is named twice: {', '.join(suites)}")
    if len(suites) > 1 and (tasks or task_files):
        raise OptionError("suites", "single tasks go with one suite at most; evaluate them in a call of their own")
    found: list[Questions] = []
    for suite in [suite_named(name) for name in suites] or [None]:
        wanted = wanted_tasks(suite, tasks, task_files)
        found.append(Questions(suite, *load_items(wanted, Path(data) if data is not None else None, limit)))
    return found
