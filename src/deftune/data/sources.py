"""Sources: a file, a folder or a hub id becomes rows; sources are mixed by weight and split without leaks."""

from __future__ import annotations

import difflib
import hashlib
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any, TypeVar, cast

from deftune.data.formats import Ambiguous, check_conversation, detect, known_format
from deftune.data.rows import SUFFIXES, BadRow, BadRows, Fault, Record, Row, RowError, raw_text, read_records

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(?::[\w.-]+)?")
_HELD_OUT = ("test", "valid", "val", "dev", "eval")


def read_source(
    path_or_id: str | Path,
    *,
    format: str = "auto",
    split: str | None = None,
    limit: int | None = None,
    bad: BadRows | None = None,
) -> list[Row]:
    """The rows of a file, a folder of files, or a dataset on the Hugging Face hub ("org/name", "org/name:config").

    ``format`` is one of `FORMATS`, or "auto": the first row's format, logged, and every other row must have it too.
    ``split`` chooses a folder's files by their names, and the hub's split (train unless said). ``limit`` is a number of
    good rows. ``bad`` says what becomes of the others: by default the first one raises `RowError`.
    """
    return list(iterate_source(path_or_id, format=format, split=split, limit=limit, bad=bad))


def iterate_source(
    path_or_id: str | Path,
    *,
    format: str = "auto",
    split: str | None = None,
    limit: int | None = None,
    bad: BadRows | None = None,
) -> Iterator[Row]:
    """What `read_source` returns, one row at a time."""
    source, bad = str(path_or_id), BadRows() if bad is None else bad
    if limit is not None and limit < 1:
        raise ValueError(f"limit: at least 1 row, got {limit}; leave it out to read all")
    chosen = None if format == "auto" else format
    if chosen is not None:
        known_format(chosen)
    count = 0
    for name, records in _parts(source, split, limit, bad):
        good, skipped = count, len(bad.rows)
        for where, record in records:
            try:
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
            raise RowError(name, _nothing_good(bad.rows[skipped:]))
        if count == limit:
            break
    log.info("%s: %d rows, format %s%s", source, count, chosen, f"; {bad.summary()}" if bad.rows else "")


def read_fields(path_or_id: str | Path, *, split: str | None = None, bad: BadRows | None = None) -> Iterator[Record]:
    """The rows of a source as its files have them, each with the place that `Row.where` names; none is converted."""
    for _, records in _parts(str(path_or_id), split, None, BadRows() if bad is None else bad):
        yield from records


def _nothing_good(skipped: list[BadRow]) -> Fault:
    """A file that gives nothing is a mistake even where bad rows are skipped."""
    if not skipped:
        return Fault("no rows", "", "check how it was made")
    count = f"all {len(skipped)} rows are bad" if len(skipped) > 1 else "its only row is bad"
    return Fault(count, f"the first, {skipped[0].where}: {skipped[0].reason}", "fix the file")


def parse_row(fields: Mapping[str, Any], where: str) -> Row:
    """A row from its fields, such as ``{"messages": [...]}``, in the format that the fields show.

    >>> parse_row({"prompt": "1 + 1?", "completion": "2"}, "rows[0]").messages[-1]
    {'role': 'assistant', 'content': '2'}
    """
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
    if path.is_dir():
        for file in _folder(path, split):
            yield str(file), read_records(file, bad)
    elif path.exists():
        if split is not None:
            raise ValueError(f"{source}: a file has no splits, got split={split!r}; leave it out, or give the folder")
        yield source, read_records(path, bad)
    elif _HUB_ID.fullmatch(source) and not source.endswith(SUFFIXES):
        yield source, read_hub(source, split or "train", streaming=limit is not None)
    else:
        raise RowError(
            source, Fault("no such file or folder", _beside(path), "give a file, a folder or a hub id org/name")
        )


def _beside(path: Path) -> str:
    names = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {path.parent / close[0]}?" if close else ""


def _folder(folder: Path, split: str | None) -> list[Path]:
    """The folder's data files, sorted; hidden ones and other kinds (a README, a licence) are passed over."""
    inside = sorted(file for file in folder.rglob("*") if file.is_file())
    files = [
        f
        for f in inside
        if f.name.lower().endswith(SUFFIXES) and not any(p[0] in "._" for p in f.relative_to(folder).parts)
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
        lines = str(error).strip().splitlines() or [""]
        detail = f"{type(error).__name__}: {lines[0][:200]}"
        remedy = "check the name (org/name:config) and split, your network and access, or give a local file"
        where = f"{source}:{split}[{index}]" if index else source
        kind = "not readable from the hub" if index else "no such file, and not readable from the hub"
        raise RowError(where, Fault(kind, detail, remedy)) from error


# Mixing and splitting ------------------------------------------------------------------------------------------------


def _shares(weights: Sequence[float], total: int) -> list[int]:
    """``total`` divided in proportion: floors first, then one each to the largest remainders (ties: the earlier)."""
    exact = [Fraction(weight) for weight in weights]
    quotas = [total * weight / sum(exact) for weight in exact]
    counts = [math.floor(quota) for quota in quotas]
    order = sorted(range(len(quotas)), key=lambda i: (counts[i] - quotas[i], i))
    for index in order[: total - sum(counts)]:
        counts[index] += 1
    return counts


def mix(
    sources: Sequence[tuple[Sequence[Row], float]], *, total: int | None = None, seed: int, repeat: bool = False
) -> list[Row]:
    """Rows of several sources in exact proportion to their weights, shuffled; the same for the same seed everywhere.

    ``total`` unless given is the most that the smallest source allows without repeating a row. A source gives each of
    its rows once before any twice, and twice only with ``repeat=True``, each pass in a new order.
    """
    return [sources[index][0][place] for index, place in mix_places(sources, total=total, seed=seed, repeat=repeat)]


def mix_places(
    sources: Sequence[tuple[Sequence[Row], float]], *, total: int | None = None, seed: int, repeat: bool = False
) -> Iterator[tuple[int, int]]:
    """What `mix` returns, as (source, place of the row in it)."""
    if not sources:
        raise ValueError("mix: no sources; give at least one (rows, weight)")
    for index, (rows, weight) in enumerate(sources):
        if not rows:
            raise ValueError(f"mix: source {index} has no rows; leave it out")
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"mix: {_named(sources, index)} has weight {weight}; a weight is a number above 0")
    weights = [weight for _, weight in sources]
    if total is None:
        whole = sum(map(Fraction, weights))
        total = min(math.floor(len(rows) * whole / Fraction(weight)) for rows, weight in sources)
    if total < 1:
        raise ValueError(f"mix: total is at least 1, got {total}")
    counts = _shares(weights, total)
    picked: list[list[int]] = []
    for index, ((rows, _), count) in enumerate(zip(sources, counts)):
        if count > len(rows) and not repeat:
            raise ValueError(
                f"mix: {_named(sources, index)} has {len(rows)} rows and {count} of {total} are needed; "
                f"lower the total or its weight, or pass repeat=True"
            )
        places = range(len(rows))
        passes = [_shuffled(places, f"{seed}/{index}/{turn}") for turn in range(math.ceil(count / len(rows)))]
        picked.append([place for places in passes for place in places][:count])
    order = _shuffled([index for index, count in enumerate(counts) for _ in range(count)], f"{seed}/order")
    queues = [iter(places) for places in picked]
    return ((index, next(queues[index])) for index in order)


def _named(sources: Sequence[tuple[Sequence[Row], float]], index: int) -> str:
    return f"source {index} ({sources[index][0][0].source})"


def _shuffled(items: Sequence[_T], seed: str) -> list[_T]:
    shuffled = list(items)
    Random(seed).shuffle(shuffled)  # a string seeds through SHA-512, so PYTHONHASHSEED has no part in it
    return shuffled


def prompt_of(row: Row) -> str:
    """What a row asks: all that stands before its first answer, with runs of white space made one."""
    parts: list[str] = []
    asked = False
    for message in row.messages:
        if message["role"] == "assistant":
            if asked:
                break
            continue
        asked = asked or message["role"] == "user"
        parts.append(f"{message['role']}: {message.get('content') or ''}")
    return " ".join(" ".join(parts).split()) if asked else repr(row.messages)


def split_rows(rows: Sequence[Row], holdout: float, seed: int) -> tuple[list[Row], list[Row]]:
    """(train, held out), each in the rows' order. Rows with the same prompt are always on the same side.

    A whole number holds out that many rows (a few more if the last prompt has several), a fraction about that share.
    The side follows from the prompt's hash and the seed alone, so that with a fraction new rows move no old ones.
    """
    train, held = split_places(rows, holdout, seed)
    return [rows[place] for place in train], [rows[place] for place in held]


def split_places(rows: Sequence[Row], holdout: float, seed: int) -> tuple[list[int], list[int]]:
    """What `split_rows` returns, as places in ``rows``."""
    fraction = isinstance(holdout, float)
    if not 0 < holdout < (1 if fraction else len(rows)):
        bound = "between 0 and 1" if fraction else f"from 1 to {len(rows) - 1}"
        raise ValueError(f"holdout: a number of rows or a fraction, {bound} for {len(rows)} rows, got {holdout}")
    places = [_place(row, seed) for row in rows]
    limit = holdout if fraction else sorted(places)[int(holdout) - 1]
    held = [index for index, place in enumerate(places) if place <= limit]
    train = [index for index, place in enumerate(places) if place > limit]
    if not held or not train:
        empty = "held out" if not held else "left to train on"
        raise ValueError(
            f"holdout: no rows are {empty} of {len(rows)} with holdout={holdout}, seed={seed}; change them"
        )
    return train, held


def _place(row: Row, seed: int) -> float:
    """A number in [0, 1), spread evenly over prompts."""
    digest = hashlib.sha256(f"{seed}/{prompt_of(row)}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48
