"""A row of training data, and what is wrong with a row that cannot be read."""

from __future__ import annotations

import collections
import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from deftune.artifacts.files import write_atomic
from deftune.data.spool import Spool

MAX_RAW_CHARS = 2000  # of a bad row's text, kept for the report
SKIP_REMEDY = "fix the row or pass --skip-bad-rows"

Record = tuple[str, dict[str, Any]]
"""Where a row stands, and its fields as the file has them."""


@dataclass(frozen=True)
class Row:
    """One conversation to train on.

    ``messages`` are OpenAI style: a role (system, developer, user, assistant, tool), ``content`` (text, or None beside
    ``tool_calls``), perhaps ``tool_calls``, ``name``, ``tool_call_id``, ``reasoning_content``. ``where`` is its
    place ("train.jsonl.gz:1042", "gsm_symbolic[7]"), ``source`` the file, folder, hub id or generator it came from.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None
    where: str
    source: str


class PackedRows(Sequence[Row]):
    """Rows held as JSON text, in a file once they are many; a `Row` is made when it is accessed.

    >>> rows = PackedRows([Row(({"role": "user", "content": "Hello"},), None, "a.jsonl:1", "a.jsonl")])
    >>> rows[0].messages, rows.num_bytes
    (({'role': 'user', 'content': 'Hello'},), 70)

    Args:
        rows: the rows.
        bad: what to do with a row that JSON cannot hold.
        spool: where the text goes; rows in one spool are gathered without a copy of their text.
    """

    def __init__(self, rows: Iterable[Row] = (), bad: BadRows | None = None, spool: Spool | None = None):
        self._spool = Spool() if spool is None else spool
        self._starts, self._sizes = array("q"), array("i")
        self.num_bytes = 0
        self._digest: str | None = None
        for row in rows:
            try:
                text = json.dumps([row.messages, row.tools, row.where, row.source], ensure_ascii=False)
            except (TypeError, ValueError, RecursionError) as error:  # of Parquet or the hub: a date, bytes
                fault = Fault("a value that JSON cannot hold", str(error)[:100])
                (bad or BadRows()).add(row.where, fault, raw_text(row.messages))
            else:
                self._add(text.encode("utf-8", "surrogatepass"))

    def _add(self, text: bytes) -> None:
        start = self._spool.num_bytes
        self._spool.append(text)
        self._place(start, len(text))

    def _place(self, start: int, size: int) -> None:
        self._starts.append(start)
        self._sizes.append(size)
        self.num_bytes += size
        self._digest = None

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...
    def __getitem__(self, place: int | slice) -> Row | list[Row]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        return unpack_row(self._text(place))

    def _text(self, place: int) -> bytes:
        return self._spool.read(self._starts[place], self._sizes[place])

    def texts(self) -> Iterator[bytes]:
        """The rows as JSON, one at a time; `unpack_row` reads one."""
        return (self._text(place) for place in range(len(self)))

    @classmethod
    def gather(cls, parts: Iterable[tuple[PackedRows, int]]) -> PackedRows:
        """The rows at (rows, place), in that order."""
        gathered: PackedRows | None = None
        for rows, place in parts:
            if gathered is None:
                gathered = cls(spool=rows._spool)
            if rows._spool is gathered._spool:
                gathered._place(rows._starts[place], rows._sizes[place])
            else:
                gathered._add(rows._text(place))
        return cls() if gathered is None else gathered

    def digest(self) -> str:
        """The sha256 of the rows' content and places, in their order."""
        if self._digest is None:
            digest = hashlib.sha256()
            for text in self.texts():
                digest.update(b"%d\n" % len(text))
                digest.update(text)
            self._digest = digest.hexdigest()
        return self._digest


def unpack_row(text: bytes) -> Row:
    """The row of one of `PackedRows.texts`."""
    messages, tools, where, source = json.loads(text.decode("utf-8", "surrogatepass"))
    return Row(tuple(messages), None if tools is None else tuple(tools), where, source)


class Fault(ValueError):
    """What is wrong with a row, raised by code that does not know the row's place; ``kind`` is counted in summaries."""

    def __init__(self, kind: str, detail: str = "", remedy: str = SKIP_REMEDY):
        super().__init__(kind, detail, remedy)
        self.kind, self.detail, self.remedy = kind, detail, remedy

    def __str__(self) -> str:
        return f"{self.kind}{self.detail and f' ({self.detail})'}; {self.remedy}"


class RowError(ValueError):
    """A fault and its place: ``train.jsonl:1042: no assistant turn (roles: system, user); fix the row or ...``."""

    def __init__(self, where: str, fault: Fault):
        super().__init__(where, fault)  # both, so that the error survives pickling between processes
        self.where, self.fault = where, fault

    def __str__(self) -> str:
        return f"{self.where}: {self.fault}"


@dataclass(frozen=True)
class BadRow:
    """A skipped row: its place, the kind of fault, the whole reason, and the start of its text."""

    where: str
    kind: str
    reason: str
    raw: str


@dataclass
class BadRows:
    """What to do with a row that cannot be read: raise (the default), or with ``skip=True`` set it aside and go on.

    >>> bad = BadRows(skip=True)
    >>> bad.add("a.jsonl:3", Fault("not JSON"), "{oops")
    >>> bad.summary()
    '1 row skipped: 1 not JSON'
    """

    skip: bool = False
    rows: list[BadRow] = field(default_factory=list[BadRow])

    def add(self, where: str, fault: Fault, raw: str) -> None:
        if not self.skip:
            raise RowError(where, fault) from None
        self.rows.append(BadRow(where, fault.kind, f"{fault.kind}{fault.detail and f' ({fault.detail})'}", raw))

    def summary(self) -> str:
        """E.g. ``3 rows skipped: 2 no assistant turn, 1 not JSON``, the most frequent first."""
        if not self.rows:
            return "no rows skipped"
        kinds = collections.Counter(row.kind for row in self.rows).most_common()
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds)
        return f"{len(self.rows)} row{'s' if len(self.rows) > 1 else ''} skipped: {counts}"

    def write(self, path: str | Path) -> None:
        """The rows as JSONL (where, reason, raw). The file appears whole or not at all."""
        lines = [json.dumps({"where": row.where, "reason": row.reason, "raw": row.raw}) + "\n" for row in self.rows]
        write_atomic(Path(path), "".join(lines))


def raw_text(value: object) -> str:
    """The start of a row's text, for the report of bad rows."""
    if isinstance(value, bytes):
        return value[: 4 * MAX_RAW_CHARS].decode("utf-8", errors="replace")[:MAX_RAW_CHARS]
    try:
        return json.dumps(value, ensure_ascii=False, default=str)[:MAX_RAW_CHARS]
    except (RecursionError, ValueError, TypeError):
        return type(value).__name__
