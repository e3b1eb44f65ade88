"""Rows of a source: a file, a folder, a dataset on the hub, or a generator; `read_rows` reads all four."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from deftune._suggest import did_you_mean
from deftune.data.files import SUFFIXES, describe_error, read_records
from deftune.data.formats import Ambiguous, check_conversation, detect, known_format
from deftune.data.generated import generate
from deftune.data.rows import BadRows, Fault, Record, Row, RowError, raw_text

log = logging.getLogger(__name__)

GENERATED = "generated:"
GENERATED_ROWS = 1000  # of a generator where no limit is given
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(?::[\w.-]+)?")
_SAVED = ("dataset_dict.json", "dataset_info.json", "state.json")  # beside the rows that `save_to_disk` writes
_HELD_OUT = ("test", "valid", "val", "dev", "eval")


def read_rows(
    source: str | Path,
    *,
    format: str = "auto",
    split: str | None = None,
    limit: int | None = None,
    seed: int = 42,
    bad: BadRows | None = None,
    fields: Mapping[str, str] | None = None,
) -> list[Row]:
    """The rows of a file, a folder of files, a dataset on the Hugging Face hub, or a generator.

    Args:
        source: a path, a hub id ("org/name", "org/name:config"), or "generated:NAME" with a name of `GENERATORS`.
        format: one of `FORMATS`, or "auto": the format of the first row, which every other row must have too.
        split: chooses a folder's files by their names, the hub's split, or a generator's; default of the last two:
            train.
        limit: how many good rows to read; default: all, and `GENERATED_ROWS` of a generator, which has no end.
        seed: of a generator.
        bad: what to do with a row that cannot be read: by default the first one raises `RowError`.
        fields: the format's names of fields -> those of the data, e.g. ``{"prompt": "q", "completion": "a"}``; the
            other fields of the data are not read.

    Raises:
        RowError: a row or the whole source cannot be read; the message says where, what is wrong and what to do.
    """
    return list(iterate_rows(source, format=format, split=split, limit=limit, seed=seed, bad=bad, fields=fields))


def iterate_rows(
    source: str | Path,
    *,
    format: str = "auto",
    split: str | None = None,
    limit: int | None = None,
    seed: int = 42,
    bad: BadRows | None = None,
    fields: Mapping[str, str] | None = None,
) -> Iterator[Row]:
    """`read_rows`, one row at a time: for callers that do not hold them all."""
    source, bad = str(source), BadRows() if bad is None else bad
    if limit is not None and limit < 1:
        raise ValueError(f"limit: at least 1 row, got {limit}; leave it out to read all")
    if is_generated(source):
        if format != "auto":
            raise ValueError(f"--format: {source} is generated and has none; leave it out")
        if fields:
            raise ValueError(f"fields: {source} is generated and has its own; leave them out")
        name = source.removeprefix(GENERATED)
        yield from generate(name, split=split or "train", size=limit or GENERATED_ROWS, seed=seed)
        return
    chosen = None if format == "auto" else format
    if chosen is not None:
        known_format(chosen)
    count = 0
    for name, records in _parts(source, split, limit, bad):
        good, skipped = count, len(bad.rows)
        for where, record in records:
            try:
                record = _renamed(record, fields) if fields else record
                chosen = chosen or detect(record)
                row = _row(record, chosen, where, source)
            except Ambiguous as fault:  # about the source, not the row
                raise RowError(where, fault) from None
            except Fault as fault:
                bad.add(where, fault, raw_text(record))
                continue
            count += 1
            yield row
            if count == limit:
                break
        if count == good:
            raise RowError(name, _nothing_good(bad, skipped))
        if count == limit:
            break
    log.info("%s: %d rows, format %s%s", source, count, chosen, f"; {bad.summary()}" if bad.rows else "")


def _renamed(record: dict[str, Any], fields: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a row under the names of its format."""
    if missing := [name for name in fields.values() if name not in record]:
        known = ", ".join(map(repr, record)) or "none"
        raise Fault(f"no field {missing[0]!r}", f"the row has {known}", "correct `fields` to the names of the data")
    return {name: record[own] for name, own in fields.items()}


def read_fields(
    source: str | Path, *, split: str | None = None, limit: int | None = None, bad: BadRows | None = None
) -> Iterator[Record]:
    """(place, fields) of each row of a source as the source has them, one at a time; a generated row is messages.

    The place is the one that `Row.where` has. ``limit`` is for generators, which have no end; other sources are read to
    their end.
    """
    if is_generated(str(source)):
        for row in iterate_rows(source, split=split, limit=limit):
            yield row.where, {"messages": list(row.messages)}
        return
    for _, records in _parts(str(source), split, None, BadRows() if bad is None else bad):
        yield from records


def is_generated(source: str) -> bool:
    """Whether a source is "generated:NAME"."""
    return source.startswith(GENERATED)


def _nothing_good(bad: BadRows, before: int) -> Fault:
    """A file without a good row is an error even if bad rows are skipped; ``before`` were skipped in other files."""
    number = len(bad.rows) - before
    if not number:
        return Fault("no rows", "", "check how it was made")
    count = f"all {number} rows are bad" if number > 1 else "its only row is bad"
    return Fault(count, f"the first, {bad.rows[before].where}: {bad.rows[before].reason}", "fix the file")


def parse_row(fields: Mapping[str, Any], where: str) -> Row:
    """A row from its fields, such as ``{"messages": [...]}``, in the format that the fields show.

    >>> parse_row({"prompt": "1 + 1?", "completion": "2"}, "rows[0]").messages[-1]
    {'role': 'assistant', 'content': '2'}
    """
    if not isinstance(fields, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"{where}: a row is a dict of fields such as messages, got {type(fields).__name__}")
    record = dict(fields)
    try:
        return _row(record, detect(record), where, "rows")
    except Fault as fault:
        raise RowError(where, fault) from None


def _row(record: dict[str, Any], format: str, where: str, source: str) -> Row:
    messages, tools = known_format(format).convert(record)
    try:
        checked = check_conversation(messages)
    except RecursionError:
        raise Fault("nested too deep") from None
    return Row(checked, None if tools is None else tuple(tools), where, source)


# Where rows come from ------------------------------------------------------------------------------------------------


def _parts(source: str, split: str | None, limit: int | None, bad: BadRows) -> Iterator[tuple[str, Iterator[Record]]]:
    """(name, records) of each file of a source; of the hub's dataset as a whole."""
    path = Path(source)
    files = files_of_source(source, split)
    if files is not None and path.is_dir():
        for file in files:
            yield str(file), read_records(file, bad)
    elif files is not None:
        if split is not None:
            raise ValueError(f"{source}: a file has no splits, got split={split!r}; leave it out, or give the folder")
        yield source, read_records(path, bad)
    elif is_hub_id(source):
        yield source, read_hub(source, split or "train", streaming=limit is not None)
    else:
        raise RowError(
            source, Fault("no such file or folder", _beside(path), "give a file, a folder or a hub id org/name")
        )


def is_hub_id(source: str) -> bool:
    """Whether a name has the form of a hub dataset's, and not that of a data file.

    >>> is_hub_id("org/name"), is_hub_id("org/name:config"), is_hub_id("data/rows.jsonl"), is_hub_id("./rows")
    (True, True, False, False)
    """
    return _HUB_ID.fullmatch(source) is not None and not source.lower().endswith(SUFFIXES)


def files_of_source(source: str, split: str | None) -> list[Path] | None:
    """The files that `iterate_rows` reads for a source, in their order; None for the hub and for generators."""
    path = Path(source)
    if is_generated(source) or not path.exists():
        return None
    return _folder(path, split) if path.is_dir() else [path]


def _beside(path: Path) -> str:
    """A file in the same folder whose name is near; without one, the folder where a relative path begins."""
    names = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    begins = "" if path.is_absolute() else f"relative to the working directory, {Path.cwd()}"
    return did_you_mean(path.name, names).strip() or begins


def _folder(folder: Path, split: str | None) -> list[Path]:
    """The folder's data files, sorted; hidden ones and other kinds (a README, a licence) are passed over."""
    inside = sorted(file for file in folder.rglob("*") if file.is_file())
    files = [
        f
        for f in inside
        if f.name.lower().endswith(SUFFIXES)
        and not any(p[0] in "._" for p in f.relative_to(folder).parts)
        and not (f.name in _SAVED and any(f.parent.rglob("*.arrow")))
        and not f.match("cache-*.arrow")  # of `map`, in the folder that datasets read
    ]
    if not files:
        found = ", ".join(file.name for file in inside[:5]) or "nothing"
        raise RowError(str(folder), Fault("no data files", f"it holds {found}", f"known: {', '.join(SUFFIXES)}"))

    def starts(file: Path, *names: str) -> bool:
        return any(part.lower().startswith(names) for part in file.relative_to(folder).parts)

    names = ", ".join(str(file.relative_to(folder)) for file in files[:8])
    if split is not None:
        kept = [file for file in files if starts(file, split.lower())]
        if not kept:
            raise RowError(str(folder), Fault(f"no files of split {split!r}", f"it holds {names}", "name one of them"))
        return kept
    if any(starts(file, "train") for file in files) and any(starts(file, *_HELD_OUT) for file in files):
        remedy = "choose with split, e.g. split='train': training on both would leak"
        raise RowError(str(folder), Fault("holds train and held-out files", names, remedy))
    return files


def read_hub(source: str, split: str, *, streaming: bool) -> Iterator[Record]:
    """The rows of a dataset on the hub. No code of the dataset is ever run."""
    try:
        import datasets
    except ImportError:
        raise ImportError(
            f'{source}: no such file, and reading the hub needs datasets; pip install "deftune[train]"'
        ) from None
    name, _, config = source.partition(":")
    load = cast("Callable[..., Any]", datasets.load_dataset)
    index = 0
    try:
        for record in load(name, config or None, split=split, streaming=streaming):
            yield f"{source}:{split}[{index}]", dict(record)
            index += 1
    except Exception as error:  # the hub's client has no common class for not found, offline, gated and broken
        remedy = "check the name (org/name:config) and split, your network and access, or give a local file"
        where = f"{source}:{split}[{index}]" if index else source
        kind = "not readable from the hub" if index else "no such file, and not readable from the hub"
        raise RowError(where, Fault(kind, describe_error(error), remedy)) from error
