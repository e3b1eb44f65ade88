"""The sha256 of the files of a source. It is remembered, so that a file that did not change is not hashed again."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import stat
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

from deftune.artifacts.files import write_atomic
from deftune.artifacts.folders import locked_file
from deftune.data.rows import RowError
from deftune.data.sources import files_of_source

YOUNG_NS = 2 * 10**9  # a file changed less than this before its hash was taken may change again under the same time

_Known = dict[str, list[Any]]  # of each file: its identity and its sha256


def digest_files(source: str, split: str | None, folder: Path) -> list[tuple[str, str]] | None:
    """The path and sha256 of each file of a source, in the order in which they are read.

    Args:
        source: as for `read_rows`.
        split: as for `read_rows`.
        folder: where digests are remembered, under the file's device, inode, size, and times of change.

    Returns:
        None for a source without files (the hub, a generator), or with files that cannot be hashed: no file, a pipe, a
        file that changes at this moment.
    """
    try:
        paths = files_of_source(source, split)
        if paths is None:
            return None
        name = hashlib.sha256(json.dumps([os.path.abspath(source), split]).encode()).hexdigest()
        folder.mkdir(parents=True, exist_ok=True)
        with locked_file(folder / f".lock-{name[:2]}", lambda _: None):
            return _digest_all(paths, folder / f"{name}.json")
    except (OSError, RowError):  # whoever reads the source says what is wrong
        return None


def _digest_all(paths: Sequence[Path], index: Path) -> list[tuple[str, str]] | None:
    known, found, kept = _load(index), list[tuple[str, str]](), _Known()
    for path in paths:
        name = str(path)
        digest, identity = _digest(path, known.get(name))
        if digest is None:
            return None
        found.append((name, digest))
        if identity is not None:
            kept[name] = [identity, digest]
    if kept != known:
        write_atomic(index, json.dumps(kept))
    return found


def _load(index: Path) -> _Known:
    """The remembered digests; nothing where the file is missing or not as it was written."""
    try:
        content: Any = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    whole = isinstance(content, dict) and all(
        isinstance(entry, list) and len(cast("list[Any]", entry)) == 2
        for entry in cast("dict[str, Any]", content).values()
    )
    return cast("_Known", content) if whole else {}


def _digest(path: Path, known: list[Any] | None) -> tuple[str | None, list[int] | None]:
    """A file's sha256, None if it changes meanwhile; and its identity, None if it must be hashed again next time."""
    if not path.is_file():  # a pipe, which could be read only once
        return None, None
    with path.open("rb") as file:
        taken, before = time.time_ns(), os.fstat(file.fileno())
        if not stat.S_ISREG(before.st_mode):
            return None, None
        identity = _identity(before)
        if known is not None and known[0] == identity:
            return str(known[1]), identity
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if _identity(os.fstat(file.fileno())) != identity:
            return None, None
    is_young = max(before.st_mtime_ns, before.st_ctime_ns) > taken - YOUNG_NS
    return digest, None if is_young else identity


def _identity(found: os.stat_result) -> list[int]:
    """With ctime, which no program can set: a changed file may keep its size and its mtime."""
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


@functools.cache
def code_digest(*further: Path) -> str:
    """The sha256 of the code that reads rows (this package and ``further``), with the versions that it depends on."""
    digest = hashlib.sha256()
    for path in [*sorted(Path(__file__).parent.glob("*.py")), *further]:
        digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    for package in ("deftune", "pyarrow"):
        try:
            digest.update(f"{package} {version(package)}\n".encode())
        except PackageNotFoundError:
            digest.update(f"no {package}\n".encode())
    digest.update(platform.python_version().encode())
    return digest.hexdigest()
