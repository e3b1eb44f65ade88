"""Encoded rows, in flat arrays of five bytes a token; once they are many the arrays are maps of files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from deftune.data.spool import Spool

IGNORE_INDEX = -100  # objectives.IGNORE_INDEX; written again, so that an encoding process need not load torch


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


class Examples(Sequence[Encoded]):
    """A sequence of `Encoded`, each made when it is asked for.

    ``columns``: input_ids (int32) and supervised (uint8) of all tokens, end to end; size, truncated, straddled and
    source (int32) of each example; the places' UTF-8 (uint8), end to end, and where_size (int32) of each.
    """

    def __init__(self, examples: Iterable[Encoded] = ()):
        self._growing = {name: Spool() for name in _CODES}
        self._columns: dict[str, NDArray[Any]] | None = None
        self._sources: dict[str, int] = {}
        for example in examples:
            self.append(example)

    @classmethod
    def of_columns(cls, columns: Mapping[str, NDArray[Any]], sources: Sequence[str]) -> Examples:
        """From what `columns` and `sources` returned; ValueError if they do not belong together."""
        examples = cls()
        examples._sources = {name: i for i, name in enumerate(sources)}
        examples._columns = dict(columns)
        wrong = [name for name, code in _CODES.items() if name not in columns or columns[name].dtype != np.dtype(code)]
        if wrong or set(columns) - set(_CODES):
            raise ValueError(f"not the columns of encoded rows: {', '.join(wrong) or 'too many'}")
        sizes = {len(columns[name]) for name in ("size", "truncated", "straddled", "source", "where_size")}
        tokens = {len(columns["input_ids"]), len(columns["supervised"]), int(columns["size"].sum(dtype=np.int64))}
        if len(sizes) != 1 or len(tokens) != 1 or len(columns["where"]) != columns["where_size"].sum(dtype=np.int64):
            raise ValueError("the columns of encoded rows have different lengths")
        examples._place()
        return examples

    def __getstate__(self) -> dict[str, Any]:
        """Without arrays that are views of the spools: they are made again.

        A process that is being started (a data worker under spawn) maps the files of the other arrays itself.
        """
        if self._growing["size"].num_bytes > 0:
            return {**vars(self), "_columns": None}
        if self._columns is None or get_spawning_popen() is None:
            return vars(self)
        return {**vars(self), "_columns": {name: _place_of(values) for name, values in self._columns.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        columns: dict[str, Any] = state["_columns"] or {}
        if any(isinstance(values, _Mapped) for values in columns.values()):
            self._columns = {
                name: values.open() if isinstance(values, _Mapped) else values for name, values in columns.items()
            }

    def append(self, example: Encoded) -> None:
        ids, labels = np.array(example.input_ids, dtype=np.int32), np.array(example.labels, dtype=np.int32)
        where, supervised = example.where.encode("utf-8", "surrogatepass"), labels != IGNORE_INDEX
        if len(ids) != len(labels) or (ids[supervised] != labels[supervised]).any():
            raise ValueError(f"{example.where}: a label is neither its token nor {IGNORE_INDEX}")
        columns = self._grow()
        columns["input_ids"].append(ids.tobytes())
        columns["supervised"].append(supervised.tobytes())
        columns["where"].append(where)
        numbers = {
            "size": len(ids), "truncated": example.truncated, "straddled": example.straddled,
            "source": self._sources.setdefault(example.source, len(self._sources)), "where_size": len(where),
        }  # fmt: skip
        for name, number in numbers.items():
            columns[name].append(np.int32(number).tobytes())

    def extend(self, other: Examples) -> None:
        columns = self._grow()
        numbers = [self._sources.setdefault(name, len(self._sources)) for name in other.sources]
        for name, values in other.columns.items():
            if name == "source":
                values = np.array(numbers, dtype=values.dtype)[values]
            columns[name].append(values.tobytes())

    def _grow(self) -> dict[str, Spool]:
        if self._columns is not None:
            if not self._growing["size"].num_bytes:  # made of columns
                for name, values in self._columns.items():
                    self._growing[name].append(values.tobytes())
            self._columns = None  # they hold the arrays' memory, which could not grow
        return self._growing

    @property
    def columns(self) -> dict[str, NDArray[Any]]:
        if self._columns is None:
            self._columns = {name: values.view(_CODES[name]) for name, values in self._growing.items()}
            self._place()
        return self._columns

    def _place(self) -> None:
        columns = self.columns
        self._starts = np.concatenate([[0], np.cumsum(columns["size"], dtype=np.int64)])
        self._where_starts = np.concatenate([[0], np.cumsum(columns["where_size"], dtype=np.int64)])

    @property
    def sources(self) -> list[str]:
        return list(self._sources)

    def __len__(self) -> int:
        return self._growing["size"].num_bytes // 4 if self._columns is None else len(self._columns["size"])

    @overload
    def __getitem__(self, place: int) -> Encoded: ...
    @overload
    def __getitem__(self, place: slice) -> list[Encoded]: ...
    def __getitem__(self, place: int | slice) -> Encoded | list[Encoded]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        place, columns = place % len(self), self.columns
        ids = columns["input_ids"][self._starts[place] : self._starts[place + 1]]
        supervised = columns["supervised"][self._starts[place] : self._starts[place + 1]]
        where = columns["where"][self._where_starts[place] : self._where_starts[place + 1]]
        return Encoded(
            input_ids=ids.tolist(),
            labels=np.where(supervised, ids, IGNORE_INDEX).tolist(),
            where=where.tobytes().decode("utf-8", "surrogatepass"),
            source=self.sources[columns["source"][place]],
            truncated=int(columns["truncated"][place]),
            straddled=int(columns["straddled"][place]),
        )

    @property
    def sizes(self) -> list[int]:
        """Tokens of each example."""
        return self.columns["size"].tolist()

    @property
    def num_tokens(self) -> int:
        return len(self.columns["input_ids"])

    @property
    def num_supervised(self) -> int:
        return int(np.count_nonzero(self.columns["supervised"]))

    @property
    def num_truncated(self) -> int:
        return int(np.count_nonzero(self.columns["truncated"]))

    @property
    def num_straddled(self) -> int:
        return int(self.columns["straddled"].sum(dtype=np.int64))

    def length_of_share(self, share: float) -> int:
        """The number of tokens that so many of the rows have at most, before any was cut off."""
        columns = self.columns
        whole = np.sort(columns["size"].astype(np.int64) + columns["truncated"])
        return int(whole[int(np.ceil(share * len(whole))) - 1]) if len(whole) else 0

    def first_above(self, limit: int) -> tuple[int, str] | None:
        """The first token id from ``limit`` on and the place of its row; None if there is none."""
        ids = self.columns["input_ids"]
        if not len(ids) or int(ids.max()) < limit:
            return None
        at = int(np.argmax(ids >= limit))
        return int(ids[at]), self[int(np.searchsorted(self._starts, at, side="right")) - 1].where


class _Mapped(NamedTuple):
    """Where an array lies that is a map of a file."""

    path: Path
    dtype: str
    offset: int
    size: int

    def open(self) -> NDArray[Any]:
        return np.memmap(self.path, self.dtype, mode="r", offset=self.offset, shape=(self.size,))


def _place_of(values: NDArray[Any]) -> NDArray[Any] | _Mapped:
    if not isinstance(values, np.memmap) or not isinstance(values.filename, Path):
        return values
    return _Mapped(values.filename, values.dtype.str, values.offset, len(values))


_CODES = {
    "input_ids": "i4", "supervised": "u1", "size": "i4", "truncated": "i4", "straddled": "i4", "source": "i4",
    "where": "u1", "where_size": "i4",
}  # fmt: skip
