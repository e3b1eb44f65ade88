"""Bytes that are appended and read: few of them in memory, many in a file on disk, so that data may exceed memory."""

from __future__ import annotations

import os
import tempfile
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

MEMORY_BYTES = 8 * 2**20  # of one spool; beyond this the bytes are in a file


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

    def __getstate__(self) -> dict[str, Any]:
        if self._file is None:
            return {"data": bytes(self._memory)}
        if get_spawning_popen() is None:
            return {"data": self.read(0, self.num_bytes)}
        return {"file": reduction.DupFd(self._flush().fileno()), "num_bytes": self.num_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Spool.__init__(self)
        if "file" in state:
            self._file = cast("BinaryIO", open(state["file"].detach(), "rb", buffering=0))
            self._written = self.num_bytes = state["num_bytes"]
        else:
            self.append(state["data"])

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
        from deftune.artifacts.models import cache_folder  # here: an encoding process does without its imports

        if self._file is not None and not self._file.writable():
            raise ValueError("data: the file belongs to the process that started this one, which can only read it")
        folder = cache_folder() / "spool"
        try:
            if self._file is None:
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    file = tempfile.TemporaryFile(dir=folder, buffering=2**20)
                except OSError:  # a cache folder that cannot be written
                    file = tempfile.TemporaryFile(buffering=2**20)
                self._file = cast("BinaryIO", file)
            self._file.write(data)
        except OSError as error:
            raise _no_room(folder, error) from error

    def _flush(self) -> BinaryIO:
        assert self._file is not None
        if self._written < self.num_bytes:
            try:
                self._file.flush()
            except OSError as error:
                from deftune.artifacts.models import cache_folder

                raise _no_room(cache_folder() / "spool", error) from error
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

    def view(self, dtype: str) -> NDArray[Any]:
        """All of it as an array: of the memory, which cannot grow while the array lives, or a map of the file."""
        if not self.num_bytes:
            return np.zeros(0, dtype=dtype)
        if self._file is None:
            return np.frombuffer(self._memory, dtype=dtype)
        return np.memmap(self._flush(), dtype=dtype, mode="r")


def _no_room(folder: object, error: OSError) -> ValueError:
    return ValueError(
        f"data: the rows cannot be kept in {folder} ({error.strerror}); free some space, or set DEFTUNE_CACHE to a "
        f"folder on a larger disk"
    )
