"""Atomic files, of which a reader sees the old content or the new, never a part; and the folder of the cache."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO


def cache_folder() -> Path:
    """$DEFTUNE_CACHE, or deftune/ in the user's cache folder."""
    if home := os.environ.get("DEFTUNE_CACHE"):
        return Path(home)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deftune"


def sync(path: Path) -> None:
    """Have the system write a file, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def whole_file(path: Path) -> Generator[BinaryIO]:
    """A file to write into, under a temporary name until it is complete; the old file stays until then.

    The next write removes a temporary file that a kill left. A link under either name is replaced, never followed.
    """
    temporary = path.with_name(f".{path.name}.writing")
    try:
        temporary.unlink(missing_ok=True)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with open(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.filename not in (None, str(temporary)):  # of a file that the caller reads
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # names the file, not the temporary one
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_atomic(path: Path, text: str) -> None:
    """Replace a small file's content by ``text``."""
    with whole_file(path) as file:
        file.write(text.encode())
