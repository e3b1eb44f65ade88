"""Find the data of a task in a folder or on the hub, read it, and make its items: prompts with gold answers.

A prompt is one user message, which later passes through the chat template of training.
"""

from __future__ import annotations

import hashlib
import os
import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from deftune.artifacts.options import OptionError, check_counts
from deftune.data.files import SUFFIXES
from deftune.data.rows import SKIP_REMEDY, Fault, Record, RowError
from deftune.data.sources import GENERATED_ROWS, read_fields, read_hub, read_rows
from deftune.evaluation.readers import REPAIR, Item
from deftune.evaluation.sampler import check_unique
from deftune.evaluation.suites import TASKS, Task


class MissingData(ValueError):
    """The data of a task was not found."""


def find_data(task: Task, data_dir: str | Path | None = None) -> Path | None:
    """The file of a task's data, searched by name below ``data_dir``; None if the data is generated or on the hub.

    With a data folder the hub is never asked: a file that is missing there raises `MissingData`.
    """
    source = task.source
    if source.generator is not None:
        return None
    given = source.path if source.path is not None else data_dir
    if given is None:
        if source.hub is None:
            raise MissingData(f"{task.name}: no data: {_looked_for(task)}; pass a folder that holds one (--data DIR)")
        return None
    given = Path(given)
    if given.is_file() and given == source.path:
        return given
    if not given.is_dir():
        raise MissingData(f"{task.name}: {given}: no such {'file' if given == source.path else 'folder'}")
    for name in source.files:
        found = _named_files(given, name)
        if len(found) > 1:
            raise MissingData(f"{task.name}: {found[0]} and {found[1]} both match; leave one in the data folder")
        if found:
            return found[0]
    instead = f", or leave the folder out to read {source.hub} from the hub" if source.hub else ""
    raise MissingData(f"{task.name}: not below {given}: {_looked_for(task)}; put it there{instead}")


def _looked_for(task: Task) -> str:
    names = ", ".join(f"{name}.jsonl" for name in task.source.files) or "a file of its own"
    hub = f"on the hub it is {task.source.hub}" if task.source.hub else "the hub is not known to have it"
    return f"looked for {names} (or {', '.join(suffix for suffix in SUFFIXES if suffix != '.jsonl')}); {hub}"


def _named_files(folder: Path, name: str) -> list[Path]:
    """Files below ``folder`` whose path ends in ``name`` and a known suffix, ignoring case and hidden files."""
    wanted = name.lower().split("/")
    found: list[Path] = []
    for path in _files_below(folder):
        lower = path.name.lower()
        suffix = next((suffix for suffix in sorted(SUFFIXES, key=len, reverse=True) if lower.endswith(suffix)), None)
        if suffix is None or lower.removesuffix(suffix) != wanted[-1] or not path.is_file():
            continue
        parents = [part.lower() for part in path.absolute().parent.parts]
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not hidden and (len(wanted) == 1 or parents[-len(wanted) + 1 :] == wanted[:-1]):
            found.append(path)
    return found


def _files_below(folder: Path) -> list[Path]:
    """Files below ``folder``, also through links to folders; a folder that links lead back to is read once."""
    found: list[Path] = []
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in seen:
            folders.clear()
            continue
        seen.add(real)
        found += [Path(place, name) for name in names]
    return sorted(found)


def locate_tasks(data_dir: str | Path | None = None) -> dict[str, str | MissingData]:
    """Name of each built-in task -> where its data is (a file, "hub: NAME" or "generated"), or why it has none."""
    if data_dir is not None and not Path(data_dir).is_dir():
        raise OptionError("data", f"{data_dir}: no such folder")
    found: dict[str, str | MissingData] = {}
    for name, task in TASKS.items():
        try:
            path = find_data(task, data_dir)
            found[name] = str(path or ("generated" if task.source.generator else f"hub: {task.source.hub}"))
        except MissingData as error:
            found[name] = error
    return found


def read_task(task: Task, data_dir: str | Path | None = None, *, limit: int | None = None) -> list[Item]:
    """The items of a task, in the order of its data.

    ``limit``: at most this many items. Of a file, the items whose ids have the smallest hashes are taken, so that the
    sample is fair and a larger sample contains a smaller one; of a generated task, the first.
    """
    check_counts(limit=limit)
    items: list[Item] = []
    for index, question in enumerate(task.read(_records(task, data_dir, limit))):
        options = question.options
        lines = "\n".join(f"{letter}. {text.strip()}" for letter, text in (options or {}).items())
        prompt = render_prompt(task.prompt, {"question": question.question, "options": lines})
        key = question.key or str(index)
        items.append(Item(f"{task.name}/{key}", prompt, question.gold, options, question.rule))
    if not items:
        raise MissingData(f"{task.name}: its data has no row of this task")
    check_unique(item.id for item in items)
    if limit is None or len(items) <= limit:
        return items
    chosen = sorted(items, key=lambda item: hashlib.sha256(item.id.encode()).digest())[:limit]
    kept = {item.id for item in chosen}
    return [item for item in items if item.id in kept]


def _records(task: Task, data_dir: str | Path | None, limit: int | None) -> Iterable[Record]:
    source = task.source
    if source.generator is not None:
        size = min(limit or task.size or GENERATED_ROWS, task.size or limit or GENERATED_ROWS)
        rows = read_rows(f"generated:{source.generator}", split=source.split, limit=size)
        return (
            (row.where, {"question": row.messages[0]["content"], "answer": row.messages[1]["content"],
                         "index": row.where.partition("[")[2].rstrip("]")})
            for row in rows
        )  # fmt: skip
    path = find_data(task, data_dir)
    if path is not None:
        return _benchmark_rows(read_fields(path))
    return read_hub(cast("str", source.hub), source.split, streaming=False)


def _benchmark_rows(records: Iterator[Record]) -> Iterator[Record]:
    """The rows of a file; an error advises to repair the file, since rows of a benchmark are not to be skipped."""
    try:
        yield from records
    except RowError as error:
        kind, detail, remedy = error.fault.kind, error.fault.detail, error.fault.remedy
        if SKIP_REMEDY not in remedy:
            raise
        also = "" if "messages" in remedy else remedy.removesuffix(SKIP_REMEDY)  # the shape of a row of training data
        raise RowError(error.where, Fault(kind, detail, also + REPAIR)) from None


def render_prompt(template: str, fields: Mapping[str, str]) -> str:
    """``template`` with each {name} replaced; {{ and }} are braces. Attributes, indices and formats are refused.

    >>> render_prompt("{question} Box it: \\\\boxed{{}}", {"question": "2 + 2?"})
    '2 + 2? Box it: \\\\boxed{}'
    """
    parts: list[str] = []
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"prompt: {error}; a brace that is meant is written twice, {{{{ or }}}}") from None
    for text, name, spec, conversion in pieces:
        parts.append(text)
        if name is None:
            continue
        if name not in fields or spec or conversion:
            known = ", ".join(f"{{{key}}}" for key in fields)
            raise ValueError(f"prompt: unknown {{{name}}}; known: {known}; a brace that is meant is written twice")
        parts.append(fields[name])
    return "".join(parts)


def with_data(task: Task, path: str | Path) -> Task:
    """The task with its data in the file ``path``, whatever a data folder holds."""
    return replace(task, source=replace(task.source, path=Path(path), generator=None))
