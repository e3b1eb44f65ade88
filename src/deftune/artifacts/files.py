"""Files that are there as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO


def sync(path: Path) -> None:
    """Have the system write a file, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def whole_file(path: Path) -> Generator[BinaryIO]:
    """A file to write into, under another name until it is complete; what was there before stays until then.

    What a kill leaves aside is gone with the next write. A link in either place is replaced, never written through.
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
        if error.filename not in (None, str(temporary)):  # another file, that what is written comes from
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # not of the one aside
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_atomic(path: Path, text: str) -> None:
    """A small file, whole or as it was before."""
    with whole_file(path) as file:
        file.write(text.encode())
