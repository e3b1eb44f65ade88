"""Encoded rows, in flat arrays of five bytes a token; once they are many the arrays are maps of files."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deftune.data.spool import LazySequence, Spool

IGNORE_INDEX = -100  # objectives.IGNORE_INDEX; written again, so that an encoding process need not load torch

_ROW_FIELDS = ("size", "truncated", "straddled", "source", "where_size")
_DTYPES = {
    "input_ids": np.dtype("<i4"),
    "supervised": np.dtype("u1"),
    "where": np.dtype("u1"),
    "rows": np.dtype([(name, "<i4") for name in _ROW_FIELDS]),
}


@dataclass(frozen=True)
class Encoded:
    """One example. ``labels`` are not shifted; `IGNORE_INDEX` where nothing is supervised, and always at 0."""

    input_ids: list[int]
    labels: list[int]
    where: str
    source: str
    truncated: int = 0  # tokens cut off the end
    straddled: int = 0  # tokens that begin in the prompt and end in the answer; not supervised

    @property
    def num_supervised(self) -> int:
        return len(self.labels) - self.labels.count(IGNORE_INDEX)


class Examples(LazySequence[Encoded]):
    """A sequence of `Encoded`, each made when it is accessed.

    ``columns``: input_ids (int32) and supervised (uint8) of all tokens, end to end; the places' UTF-8 (uint8), end to
    end; and ``rows``, with size, truncated, straddled, source (its index in ``sources``) and where_size of each
    example.
    """

    def __init__(self, examples: Iterable[Encoded] = ()):
        self._spools = {name: Spool() for name in _DTYPES}
        self._columns: dict[str, NDArray[Any]] | None = None  # views of the spools
        self._sources: dict[str, int] = {}
        for example in examples:
            self.append(example)

    @classmethod
    def open(cls, folder: Path, sources: Sequence[str]) -> Examples:
        """The examples that `save` wrote; ``sources`` are what the property had then."""
        examples = cls()
        examples._spools = {name: Spool.open(folder / f"{name}.bin") for name in _DTYPES}
        examples._sources = {name: i for i, name in enumerate(sources)}
        return examples

    def save(self, folder: Path) -> None:
        """Write the columns into a folder, one file each."""
        for name, spool in self._spools.items():
            spool.save(folder / f"{name}.bin")

    def __getstate__(self) -> dict[str, Any]:
        return {"_spools": self._spools, "_columns": None, "_sources": self._sources}

    def append(self, example: Encoded) -> None:
        ids, labels = np.array(example.input_ids, dtype=np.int32), np.array(example.labels, dtype=np.int32)
        where, supervised = example.where.encode("utf-8", "surrogatepass"), labels != IGNORE_INDEX
        if len(ids) != len(labels) or (ids[supervised] != labels[supervised]).any():
            raise ValueError(f"{example.where}: a label is neither its token nor {IGNORE_INDEX}")
        source = self._sources.setdefault(example.source, len(self._sources))
        row = struct.pack("<5i", len(ids), example.truncated, example.straddled, source, len(where))
        self._grow({"input_ids": ids.tobytes(), "supervised": supervised.tobytes(), "where": where, "rows": row})

    def extend(self, other: Examples) -> None:
        rows = other.columns["rows"].copy()
        sources = [self._sources.setdefault(name, len(self._sources)) for name in other.sources]
        rows["source"] = np.array(sources, dtype=np.int32)[rows["source"]]
        self._grow({name: column.tobytes() for name, column in (other.columns | {"rows": rows}).items()})

    def _grow(self, added: dict[str, bytes]) -> None:
        self._columns = None  # a view would keep its spool from growing
        for name, data in added.items():
            self._spools[name].append(data)

    @property
    def columns(self) -> dict[str, NDArray[Any]]:
        if self._columns is None:
            self._columns = {name: spool.view(_DTYPES[name]) for name, spool in self._spools.items()}
            rows = self._columns["rows"]
            self._starts = np.concatenate([[0], np.cumsum(rows["size"], dtype=np.int64)])
            self._where_starts = np.concatenate([[0], np.cumsum(rows["where_size"], dtype=np.int64)])
        return self._columns

    @property
    def sources(self) -> list[str]:
        return list(self._sources)

    def __len__(self) -> int:
        return self._spools["rows"].num_bytes // _DTYPES["rows"].itemsize

    def item(self, place: int) -> Encoded:
        columns = self.columns
        tokens = slice(self._starts[place], self._starts[place + 1])
        ids, supervised = columns["input_ids"][tokens], columns["supervised"][tokens]
        where = columns["where"][self._where_starts[place] : self._where_starts[place + 1]]
        _, truncated, straddled, source, _ = columns["rows"][place].tolist()
        return Encoded(
            input_ids=ids.tolist(),
            labels=np.where(supervised, ids, IGNORE_INDEX).tolist(),
            where=where.tobytes().decode("utf-8", "surrogatepass"),
            source=self.sources[source],
            truncated=truncated,
            straddled=straddled,
        )

    @property
    def sizes(self) -> list[int]:
        """Tokens of each example."""
        return self.columns["rows"]["size"].tolist()

    @property
    def num_tokens(self) -> int:
        return len(self.columns["input_ids"])

    @property
    def num_supervised(self) -> int:
        return int(np.count_nonzero(self.columns["supervised"]))

    @property
    def num_truncated(self) -> int:
        return int(np.count_nonzero(self.columns["rows"]["truncated"]))

    @property
    def num_straddled(self) -> int:
        return int(self.columns["rows"]["straddled"].sum(dtype=np.int64))

    def length_of_share(self, share: float) -> int:
        """The number of tokens that so many of the rows have at most, before any was cut off."""
        rows = self.columns["rows"]
        whole = np.sort(rows["size"].astype(np.int64) + rows["truncated"])
        return int(whole[int(np.ceil(share * len(whole))) - 1]) if len(whole) else 0

    def first_above(self, limit: int) -> tuple[int, str] | None:
        """The first token id from ``limit`` on and the place of its row; None if there is none."""
        ids = self.columns["input_ids"]
        if not len(ids) or int(ids.max()) < limit:
            return None
        at = int(np.argmax(ids >= limit))
        return int(ids[at]), self[int(np.searchsorted(self._starts, at, side="right")) - 1].where
