"""Encoded rows kept on disk, so that a resumed run, another objective or another rank need not encode them again.

An entry is a folder named by the sha256 of all that its tokens depend on: the rows and their places, the tokenizer, the
template, the encoder's options, and the code of this package. It holds the arrays as safetensors, the rest as JSON,
and a manifest with their checksums, which are compared on every read. Nothing in it is ever executed.

A second kind of entry, a `Reading`, records what was found when sources were read. Its name is made of what the rows
depend on (the sha256 of the files, the options), so that the encoded rows are found without reading the sources.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deftune.artifacts.folders import (
    MANIFEST,
    FolderError,
    clear_leftovers,
    disk_error,
    locked_file,
    remove,
    sealed_folder,
    verify,
    waiting,
)
from deftune.data.encoding import EncodedRows, Encoder, EncodingError, checked
from deftune.data.examples import Examples
from deftune.data.rows import BadRow, BadRows, PackedRows

SIZE_VARIABLE = "DEFTUNE_DATA_CACHE_GB"
DEFAULT_GIGABYTES = 20.0
ENCODING = "encoding rows"  # what another process does while this one waits
BLOCK = 2**20  # values that are copied at a time
_DTYPES = {"I32": "<i4", "U8": "<u1"}
_LISTS = ("fully_truncated", "overlong", "fully_masked")


def cache_bytes() -> int:
    """How much the cache may hold: $DEFTUNE_DATA_CACHE_GB; 0 turns the cache off."""
    text = os.environ.get(SIZE_VARIABLE) or str(DEFAULT_GIGABYTES)
    try:
        gigabytes = float(text)
        if not 0 <= gigabytes < 1e9:
            raise ValueError
    except ValueError:
        raise ValueError(f"{SIZE_VARIABLE}: a number of gigabytes, 0 for no cache, got {text!r}") from None
    return int(gigabytes * 1e9)


def is_cached(encoder: Encoder) -> bool:
    """Whether rows of this encoder are kept, so that one of several ranks encodes them and the others read them."""
    return cache_bytes() > 0 and not encoder.depends_on_the_date


def encode_cached(
    rows: PackedRows,
    encoder: Encoder,
    folder: Path,
    *,
    bad: BadRows,
    encode: Callable[[], EncodedRows],
    notice: Callable[[str], None] = lambda _: None,
) -> EncodedRows:
    """The result of ``encode()``: read from the cache in ``folder``, or computed and written there.

    Of several processes that want the same rows one encodes them; the others wait and read its result.
    """
    if not is_cached(encoder):
        return encode()
    entry = folder / _entry_name(rows.digest(), encoder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked_file(folder / f".lock-{entry.name[0]}", waiting(notice, ENCODING)):
            if found := _read(entry, notice):
                notice(_taken_from(found, entry))
                return checked(found, encoder, bad)
            result = encode()
            if _write(entry, result, notice):  # from here on a map of the entry's file, not of one more copy
                with suppress(OSError):  # a file system without maps: the encoded rows are still there
                    result.examples = _examples(entry, result.examples.sources)
            _make_room(folder, cache_bytes(), keep=[entry])
            return result
    except OSError as error:
        if error.filename is None or not str(error.filename).startswith(str(folder)):
            raise
        notice(f"encoded rows cannot be kept in {folder} ({error.strerror}); {SIZE_VARIABLE}=0 turns this off")
        return encode()


def _entry_name(digest: str, encoder: Encoder) -> str:
    return hashlib.sha256(f"{encoder.digest}\n{digest}".encode()).hexdigest()


def _taken_from(found: EncodedRows, entry: Path) -> str:
    return f"{found.num_rows:,} rows were encoded before: taken from {entry}"


@dataclass(frozen=True)
class Reading:
    """What was found when the sources of a run were read."""

    digests: list[str]  # `PackedRows.digest` of the rows to train on, and of the held-out rows if there are any
    said: list[str]  # the lines that told of it
    bad: list[BadRow]  # rows that could not be read


def find_encoded(
    key: str,
    encoder: Encoder,
    folder: Path,
    *,
    bad: BadRows,
    notice: Callable[[str], None],
    warn: Callable[[str], None] = lambda _: None,
) -> list[EncodedRows] | None:
    """The encoded rows of the sources that ``key`` stands for; None where they must be read, or encoded, again.

    ``notice`` gets the lines of the first reading, and ``bad`` its bad rows. ``warn`` is told of a damaged entry.
    """
    reading = _read_reading(folder / key, warn)
    if reading is None:
        return None
    entries = [folder / _entry_name(digest, encoder) for digest in reading.digests]
    found = [encoded for entry in entries if (encoded := _read(entry, lambda _: None))]
    if len(found) < len(entries):
        return None
    bad.rows += reading.bad
    for line in reading.said:
        notice(line)
    for encoded, entry in zip(found, entries):
        notice(_taken_from(encoded, entry))
        checked(encoded, encoder, bad)
    return found


def _read_reading(entry: Path, warn: Callable[[str], None]) -> Reading | None:
    if not entry.is_dir():
        return None
    try:
        verify(entry)
        about: dict[str, Any] = json.loads((entry / "reading.json").read_text(encoding="utf-8"))
        bad = [BadRow(**row) for row in about["bad"]]
        reading = Reading(list(about["digests"]), list(about["said"]), bad)
    except (FolderError, OSError, ValueError, KeyError, TypeError) as error:
        warn(f"reading the rows again, the record of an earlier reading is damaged: {error}")
        return None
    with suppress(OSError):
        os.utime(entry / MANIFEST)
    return reading


def write_reading(
    key: str, reading: Reading, encoder: Encoder, folder: Path, notice: Callable[[str], None] = lambda _: None
) -> None:
    """Remember a reading for `find_encoded`; a full disk is only a notice."""
    entry = folder / key
    try:
        with sealed_folder(entry.with_name(f".{entry.name}-{os.getpid()}"), entry) as place:
            (place / "reading.json").write_text(json.dumps(asdict(reading)), encoding="utf-8")
    except OSError as error:
        notice(f"{folder}: what was read could not be kept ({error.strerror}); {SIZE_VARIABLE}=0 turns this off")
        return
    rows = [folder / _entry_name(digest, encoder) for digest in reading.digests]
    _make_room(folder, cache_bytes(), keep=[entry, *rows])


def _write(entry: Path, result: EncodedRows, notice: Callable[[str], None]) -> bool:
    """Whether an entry was written; a full disk is only a notice, since the run can go on without the cache."""
    about: dict[str, Any] = {
        "max_length": result.max_length, "num_rows": result.num_rows, "num_ended": result.num_ended,
        "sources": result.examples.sources, "refused": [[e.where, e.problem, e.raw] for e in result.refused],
        **{name: getattr(result, name) for name in _LISTS},
    }  # fmt: skip
    try:
        with sealed_folder(entry.with_name(f".{entry.name}-{os.getpid()}"), entry) as place:
            _save_file(result.examples.columns, place / "examples.safetensors")
            (place / "rows.json").write_text(json.dumps(about), encoding="utf-8")
    except Exception as error:
        reason = disk_error(error)
        if not reason:
            raise
        notice(f"{entry.parent}: the encoded rows could not be kept ({reason}); {SIZE_VARIABLE}=0 turns this off")
        return False
    return True


def _read(entry: Path, notice: Callable[[str], None]) -> EncodedRows | None:
    """Read and verify an entry; None where there is none, or where it is damaged."""
    if not entry.is_dir():
        return None
    try:
        verify(entry)
        about: dict[str, Any] = json.loads((entry / "rows.json").read_text(encoding="utf-8"))
        result = EncodedRows(
            examples=_examples(entry, about["sources"]),
            max_length=about["max_length"], num_rows=about["num_rows"], num_ended=about["num_ended"],
            refused=[EncodingError(*fields) for fields in about["refused"]],
            **{name: about[name] for name in _LISTS},
        )  # fmt: skip
    except (FolderError, OSError, ValueError, KeyError, TypeError) as error:
        notice(f"encoding again, the cached rows are damaged: {error}")
        return None
    with suppress(OSError):
        os.utime(entry / MANIFEST)  # marks the entry as used now: the oldest are removed first
    return result


def _examples(entry: Path, sources: list[str]) -> Examples:
    return Examples.of_columns(_map_file(entry / "examples.safetensors"), sources)


def _save_file(arrays: dict[str, NDArray[Any]], path: Path) -> None:
    """A safetensors file, written block by block: the library's own function would copy every array into memory."""
    names = sorted(arrays, key=lambda name: -arrays[name].itemsize)  # aligned: the wide ones first
    header: dict[str, Any] = {}
    start = 0
    for name in names:
        code = next(code for code, dtype in _DTYPES.items() if np.dtype(dtype) == arrays[name].dtype)
        stop = start + arrays[name].nbytes
        header[name] = {"dtype": code, "shape": [len(arrays[name])], "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            for at in range(0, len(arrays[name]), BLOCK):
                file.write(arrays[name][at : at + BLOCK].tobytes())


def _map_file(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a safetensors file, memory-mapped, so that the ranks of a machine share the memory."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(size))
    arrays: dict[str, NDArray[Any]] = {}
    for name, about in header.items():
        if name == "__metadata__":
            continue
        start, stop = about["data_offsets"]
        dtype = np.dtype(_DTYPES[about["dtype"]])
        if stop == start:  # an empty file cannot be mapped
            arrays[name] = np.zeros(0, dtype=dtype)
        else:
            shape = ((stop - start) // dtype.itemsize,)
            arrays[name] = np.memmap(path, dtype=dtype, mode="r", offset=8 + size + start, shape=shape)
    return arrays


def _make_room(folder: Path, limit: int, *, keep: Collection[Path]) -> None:
    """Remove the entries that were not used for the longest time, until the rest is within ``limit`` bytes."""
    clear_leftovers(folder)
    used: list[tuple[float, int, Path]] = []
    for entry in folder.iterdir():
        if entry.name.startswith(".") or not entry.is_dir() or entry.is_symlink():
            continue
        with suppress(OSError):
            manifest = entry / MANIFEST
            last = manifest.stat().st_mtime if manifest.exists() else 0.0  # none: its removal was interrupted
            used.append((last, sum(file.stat().st_size for file in entry.iterdir()), entry))
    total = sum(size for _, size, _ in used)
    for _, size, entry in sorted(used):
        if total <= limit:
            break
        if entry not in keep or size > limit:
            with suppress(OSError):
                remove(entry)
                total -= size
