"""The sha256 of the files of a source, and of the code that reads and encodes rows."""

from __future__ import annotations

import functools
import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from deftune.artifacts.folders import sha256
from deftune.data.rows import RowError
from deftune.data.sources import files_of_source

ROW_BYTES = 2**16  # hashing so many takes about as long as reading a row


def digest_files(source: str, split: str | None, limit: int | None = None) -> list[tuple[str, str]] | None:
    """The path and sha256 of each file of a source, in the order in which they are read.

    Every call reads the files: neither their times nor their inodes tell on every file system that they are unchanged.

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
    for package in ("deftune", "pyarrow"):
        try:
            digest.update(f"{package} {version(package)}\n".encode())
        except PackageNotFoundError:
            digest.update(f"no {package}\n".encode())
    digest.update(platform.python_version().encode())
    return digest.hexdigest()
