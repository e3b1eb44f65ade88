"""Bytes that are appended and read: few of them in memory, many in a file on disk, so that data may exceed memory."""

from __future__ import annotations

import os
import tempfile
from abc import abstractmethod
from array import array
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from deftune.artifacts.files import cache_folder

MEMORY_BYTES = 8 * 2**20  # of one spool; beyond this the bytes are in a file
BLOCK_BYTES = 2**20  # copied at a time

T = TypeVar("T")


class Spool:
    """Bytes in memory up to `MEMORY_BYTES`, then in a file without a name, which is gone when the process ends.

    It can be pickled. A process that is being started with it (a data worker under spawn) has the same file, and can
    only read it; otherwise the bytes are copied.

    >>> spool = Spool()
    >>> spool.append(b"one"), spool.append(b"two"), spool.read(3, 3)
    (None, None, b'two')
    """

    def __init__(self) -> None:
        self._memory = bytearray()
        self._file: BinaryIO | None = None
        self._written = 0  # bytes of the file that can be read; the rest is in its buffer
        self.num_bytes = 0

    @classmethod
    def open(cls, path: Path) -> Spool:
        """The bytes that `save` wrote; those of a large file can only be read."""
        spool = cls()
        if path.stat().st_size <= MEMORY_BYTES:
            spool.append(path.read_bytes())
        else:
            spool._read_from(open(path, "rb", buffering=0), path.stat().st_size)
        return spool

    def save(self, path: Path) -> None:
        with path.open("wb") as file:
            for start in range(0, self.num_bytes, BLOCK_BYTES):
                file.write(self.read(start, min(BLOCK_BYTES, self.num_bytes - start)))

    def __getstate__(self) -> dict[str, Any]:
        if self._file is None or get_spawning_popen() is None:
            return {"data": self.read(0, self.num_bytes)}
        return {"file": reduction.DupFd(self._flush().fileno()), "num_bytes": self.num_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Spool.__init__(self)
        if "file" in state:
            self._read_from(open(state["file"].detach(), "rb", buffering=0), state["num_bytes"])
        else:
            self.append(state["data"])

    def _read_from(self, file: Any, num_bytes: int) -> None:
        self._file = cast("BinaryIO", file)
        self._written = self.num_bytes = num_bytes

    def append(self, data: bytes) -> None:
        if self._file is None and self.num_bytes + len(data) > MEMORY_BYTES:
            self._write(self._memory)
            self._memory = bytearray()
        if self._file is None:
            self._memory += data
        else:
            self._write(data)
        self.num_bytes += len(data)

    def _write(self, data: bytes | bytearray) -> None:
        if self._file is None:
            self._file = _unnamed_file()
        elif not self._file.writable():
            raise ValueError("data: the file belongs to another process or to the cache, and can only be read")
        with _disk_errors():
            self._file.write(data)

    def _flush(self) -> BinaryIO:
        assert self._file is not None
        if self._written < self.num_bytes:
            with _disk_errors():
                self._file.flush()
            self._written = self.num_bytes
        return self._file

    def read(self, start: int, size: int) -> bytes:
        if self._file is None:
            return bytes(self._memory[start : start + size])
        file = self._flush().fileno()
        data = os.pread(file, size, start)
        while len(data) < size and (more := os.pread(file, size - len(data), start + len(data))):
            data += more  # Linux reads at most 2 GiB at a time
        return data

    def view(self, dtype: DTypeLike) -> NDArray[Any]:
        """All of it as an array: of the memory, which cannot grow while the array lives, or a map of the file."""
        if not self.num_bytes:
            return np.zeros(0, dtype=dtype)
        if self._file is None:
            return np.frombuffer(self._memory, dtype=dtype)
        return np.memmap(self._flush(), dtype=cast("Any", dtype), mode="r")


def _unnamed_file() -> BinaryIO:
    folder = cache_folder() / "spool"
    with _disk_errors():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = tempfile.TemporaryFile(dir=folder, buffering=2**20)
        except OSError:  # a cache folder that cannot be written
            file = tempfile.TemporaryFile(buffering=2**20)
    return cast("BinaryIO", file)


@contextmanager
def _disk_errors() -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"data: the rows cannot be kept in {cache_folder() / 'spool'} ({error.strerror}); free some space, or set "
            f"DEFTUNE_CACHE to a folder on a larger disk"
        ) from error


class LazySequence(Sequence[T]):
    """A sequence whose items are made when they are accessed: a subclass has `__len__` and `item`."""

    @abstractmethod
    def item(self, place: int) -> T:
        """The item at a place from 0 to len - 1."""

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> list[T]: ...
    def __getitem__(self, place: int | slice) -> T | list[T]:
        if isinstance(place, slice):
            return [self.item(i) for i in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        return self.item(place % len(self))


class Records(LazySequence[bytes]):
    """Byte strings in a spool, with 12 bytes of memory for each.

    >>> records = Records()
    >>> records.append(b"one"), records.append(b"two"), records[-1]
    (None, None, b'two')

    Args:
        spool: where the bytes go; several `Records` can share a spool.
    """

    def __init__(self, spool: Spool | None = None):
        self.spool = Spool() if spool is None else spool
        self._starts, self._sizes = array("q"), array("i")
        self.num_bytes = 0

    def append(self, data: bytes) -> None:
        start = self.spool.num_bytes
        self.spool.append(data)
        self._place(start, len(data))

    def append_from(self, other: Records, place: int) -> None:
        """Append a record of ``other``; its bytes are copied only from another spool."""
        if other.spool is self.spool:
            self._place(other._starts[place], other._sizes[place])
        else:
            self.append(other[place])

    def _place(self, start: int, size: int) -> None:
        self._starts.append(start)
        self._sizes.append(size)
        self.num_bytes += size

    def __len__(self) -> int:
        return len(self._starts)

    def item(self, place: int) -> bytes:
        return self.spool.read(self._starts[place], self._sizes[place])
