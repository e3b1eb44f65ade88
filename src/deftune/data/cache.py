"""Encoded rows kept on disk, so that a resumed run, another objective or another rank need not encode them again.

An entry is a folder named by the sha256 of all that its tokens depend on: the rows and their places, the tokenizer, the
template, the encoder's options, and the code of this package. It holds the arrays as they are in memory, the rest as
JSON, and a manifest with their checksums, which are compared on every read. Nothing in it is ever executed.

A second kind of entry, a `Reading`, records what was found when sources were read. Its name is made of what the rows
depend on (the sha256 of the files, the options), so that the encoded rows are found without reading the sources.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from deftune.artifacts.folders import (
    MANIFEST,
    FolderError,
    clear_leftovers,
    locked_file,
    remove,
    sealed_folder,
    sha256,
    verify,
    waiting,
)
from deftune.data.encoding import EncodedRows, Encoder, Places, checked
from deftune.data.examples import Examples
from deftune.data.rows import BadRow, BadRowList, BadRows, PackedRows, RowError
from deftune.data.sources import files_of_source

SIZE_VARIABLE = "DEFTUNE_DATA_CACHE_GB"
DEFAULT_GIGABYTES = 20.0
ENCODING = "encoding rows"  # what another process does while this one waits
ROW_BYTES = 2**16  # hashing so many takes about as long as reading a row
_DROPPED = ("fully_truncated", "overlong", "fully_masked")

T = TypeVar("T")


def digest_files(source: str, split: str | None, limit: int | None = None) -> list[tuple[str, str]] | None:
    """The path and sha256 of each file of a source, in the order in which they are read.

    Every call reads the files: on some file systems a changed file keeps its times and its inode.

    Args:
        source: as for `read_rows`.
        split: as for `read_rows`.
        limit: how many rows will be read; None: all.

    Returns:
        None for a source without files (the hub, a generator), with files that cannot be hashed (a pipe), or with files
        so large that reading ``limit`` rows takes less time than hashing them.
    """
    try:
        paths = files_of_source(source, split)
        if paths is None or not all(path.is_file() for path in paths):  # a pipe could be read only once
            return None
        if limit is not None and sum(path.stat().st_size for path in paths) > limit * ROW_BYTES:
            return None
        return [(str(path), sha256(path)) for path in paths]
    except (OSError, RowError):  # whoever reads the source says what is wrong
        return None


@functools.cache
def code_digest(*further: Path) -> str:
    """The sha256 of the code that reads and encodes rows (this package and ``further``), with the versions it needs."""
    digest = hashlib.sha256()
    for path in [*sorted(Path(__file__).parent.glob("*.py")), *further]:
        digest.update(f"{path.name} {sha256(path)}\n".encode())
    for package in ("deftune", "jinja2", "pyarrow", "tokenizers"):
        try:
            digest.update(f"{package} {version(package)}\n".encode())
        except PackageNotFoundError:
            digest.update(f"no {package}\n".encode())
    digest.update(platform.python_version().encode())
    return digest.hexdigest()


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
    entry = folder / _entry_name(rows.digest, encoder)
    result = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked_file(folder / f".lock-{entry.name[0]}", waiting(notice, ENCODING)):
            if found := _read_rows(entry, bad, notice):
                notice(_taken_from(found, entry))
                return checked(found, encoder, bad)
            result = encode()
            if _write_entry(entry, functools.partial(_save_rows, result), "the encoded rows", notice):
                result.examples = Examples.open(entry, result.examples.sources)  # the entry's files, not one more copy
            _make_room(folder, cache_bytes(), keep=[entry])
    except OSError as error:
        if error.filename is None or not str(error.filename).startswith(str(folder)):
            raise
        notice(f"encoded rows cannot be kept in {folder} ({error.strerror}); {SIZE_VARIABLE}=0 turns this off")
    return result or encode()


def _entry_name(digest: str, encoder: Encoder) -> str:
    return hashlib.sha256(f"{code_digest()}\n{encoder.digest}\n{digest}".encode()).hexdigest()


def _taken_from(found: EncodedRows, entry: Path) -> str:
    return f"{found.num_rows:,} rows were encoded before: taken from {entry}"


@dataclass(frozen=True)
class Reading:
    """What was found when the sources of a run were read."""

    digests: list[str]  # `PackedRows.digest` of the rows to train on, and of the held-out rows if there are any
    notices: list[str]  # the lines that the user was shown
    bad: BadRowList  # rows that could not be read


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

    ``notice`` gets the lines of the first reading, and ``bad`` its bad rows. ``warn`` gets a line for a damaged entry.
    """
    reading = _read_entry(
        folder / key, _load_reading, "reading the rows again, the record of an earlier reading is damaged", warn
    )
    if reading is None:
        return None
    entries = [folder / _entry_name(digest, encoder) for digest in reading.digests]
    found = [encoded for entry in entries if (encoded := _read_rows(entry, bad, lambda _: None))]
    if len(found) < len(entries):
        return None
    bad.extend(reading.bad)
    for line in reading.notices:
        notice(line)
    for encoded, entry in zip(found, entries):
        notice(_taken_from(encoded, entry))
        checked(encoded, encoder, bad)
    return found


def write_reading(
    key: str, reading: Reading, encoder: Encoder, folder: Path, notice: Callable[[str], None] = lambda _: None
) -> None:
    """Remember a reading for `find_encoded`; a full disk is only a notice."""

    def save(place: Path) -> None:
        about = {"digests": reading.digests, "notices": reading.notices}
        (place / "reading.json").write_text(json.dumps(about), encoding="utf-8")
        _save_bad_rows(reading.bad, place)

    entry = folder / key
    if _write_entry(entry, save, "what was read", notice):
        rows = [folder / _entry_name(digest, encoder) for digest in reading.digests]
        _make_room(folder, cache_bytes(), keep=[entry, *rows])


def _load_reading(entry: Path) -> Reading:
    about = json.loads((entry / "reading.json").read_text(encoding="utf-8"))
    return Reading(about["digests"], about["notices"], _load_bad_rows(entry))


def _read_rows(entry: Path, bad: BadRows, notice: Callable[[str], None]) -> EncodedRows | None:
    """The encoded rows of an entry; None also where rows were refused and are not to be skipped, but to raise."""
    found = _read_entry(entry, _load_rows, "encoding again, the cached rows are damaged", notice)
    return found if found and (bad.skip or not found.refused) else None


def _load_rows(entry: Path) -> EncodedRows:
    about: dict[str, Any] = json.loads((entry / "rows.json").read_text(encoding="utf-8"))
    about["examples"] = Examples.open(entry, about.pop("sources"))
    about["refused"] = _load_bad_rows(entry)
    for name in _DROPPED:
        about[name] = Places(**about[name])
    return EncodedRows(**about)


def _save_rows(rows: EncodedRows, place: Path) -> None:
    about = {
        "max_length": rows.max_length, "num_rows": rows.num_rows, "num_ended": rows.num_ended,
        "sources": rows.examples.sources, **{name: asdict(getattr(rows, name)) for name in _DROPPED},
    }  # fmt: skip
    (place / "rows.json").write_text(json.dumps(about), encoding="utf-8")
    rows.examples.save(place)
    _save_bad_rows(rows.refused, place)


def _load_bad_rows(entry: Path) -> BadRowList:
    rows = BadRowList()
    with (entry / "bad_rows.jsonl").open(encoding="utf-8") as file:
        rows.extend(BadRow(**json.loads(line)) for line in file)
    return rows


def _save_bad_rows(rows: BadRowList, place: Path) -> None:
    with (place / "bad_rows.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)


def _write_entry(entry: Path, save: Callable[[Path], None], what: str, notice: Callable[[str], None]) -> bool:
    """Whether an entry was written; a full disk is only a notice, since the run can go on without the cache."""
    try:
        with sealed_folder(entry.with_name(f".{entry.name}-{os.getpid()}"), entry) as place:
            save(place)
    except OSError as error:
        notice(f"{entry.parent}: {what} could not be kept ({error.strerror}); {SIZE_VARIABLE}=0 turns this off")
        return False
    return True


def _read_entry(entry: Path, load: Callable[[Path], T], damaged: str, notice: Callable[[str], None]) -> T | None:
    """Verify and read an entry; None where there is none, or where it is damaged."""
    if not entry.is_dir():
        return None
    try:
        verify(entry)
        found = load(entry)
    except (FolderError, OSError, ValueError, KeyError, TypeError) as error:
        notice(f"{damaged}: {error}")
        return None
    with suppress(OSError):
        os.utime(entry / MANIFEST)  # marks the entry as used now: the oldest are removed first
    return found


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
