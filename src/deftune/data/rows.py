"""A row of training data, and what is wrong with a row that cannot be read."""

from __future__ import annotations

import collections
import functools
import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deftune.artifacts.files import whole_file
from deftune.data.spool import LazySequence, Records, Spool

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


class PackedRows(LazySequence[Row]):
    """Rows held as JSON text, in a file once they are many; a `Row` is made when it is accessed.

    >>> rows = PackedRows([Row(({"role": "user", "content": "Hello"},), None, "a.jsonl:1", "a.jsonl")])
    >>> rows[0].messages, rows.texts.num_bytes
    (({'role': 'user', 'content': 'Hello'},), 70)

    Args:
        rows: the rows.
        bad: what to do with a row that JSON cannot hold.
        spool: where the text goes; rows in one spool are gathered without a copy of their text.
    """

    def __init__(self, rows: Iterable[Row] = (), bad: BadRows | None = None, spool: Spool | None = None):
        bad = BadRows() if bad is None else bad
        self.texts = Records(spool)  # the rows as JSON; `unpack_row` reads one
        for row in rows:
            try:
                text = json.dumps([row.messages, row.tools, row.where, row.source], ensure_ascii=False)
            except (TypeError, ValueError, RecursionError) as error:  # of Parquet or the hub: a date, bytes
                fault = Fault("a value that JSON cannot hold", str(error)[:100])
                bad.add(row.where, fault, raw_text(row.messages))
            else:
                self.texts.append(text.encode("utf-8", "surrogatepass"))

    def __len__(self) -> int:
        return len(self.texts)

    def item(self, place: int) -> Row:
        return unpack_row(self.texts.item(place))

    @classmethod
    def gather(cls, parts: Iterable[tuple[PackedRows, int]]) -> PackedRows:
        """The rows at (rows, place), in that order."""
        gathered: PackedRows | None = None
        for rows, place in parts:
            if gathered is None:
                gathered = cls(spool=rows.texts.spool)
            gathered.texts.append_from(rows.texts, place)
        return cls() if gathered is None else gathered

    @functools.cached_property
    def digest(self) -> str:
        """The sha256 of the rows' content and places, in their order."""
        digest = hashlib.sha256()
        for text in self.texts:
            digest.update(b"%d\n" % len(text))
            digest.update(text)
        return digest.hexdigest()


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
        return f"{_reason(self.kind, self.detail)}; {self.remedy}"


def _reason(kind: str, detail: str) -> str:
    return f"{kind} ({detail})" if detail else kind


class RowError(ValueError):
    """A fault and its place: ``train.jsonl:1042: no assistant turn (roles: system, user); fix the row or ...``."""

    def __init__(self, where: str, fault: Fault):
        super().__init__(where, fault)  # both, so that the error survives pickling between processes
        self.where, self.fault = where, fault

    def __str__(self) -> str:
        return f"{self.where}: {self.fault}"


@dataclass(frozen=True)
class BadRow:
    """A skipped row: its place, the kind of fault and its detail, and the start of its text."""

    where: str
    kind: str
    detail: str
    raw: str

    @property
    def reason(self) -> str:
        return _reason(self.kind, self.detail)


class BadRowList(LazySequence[BadRow]):
    """Skipped rows, in a file once they are many."""

    def __init__(self) -> None:
        self._lines = Records()

    def append(self, row: BadRow) -> None:
        self._lines.append(json.dumps(asdict(row)).encode())

    def extend(self, rows: Iterable[BadRow]) -> None:
        for row in rows:
            self.append(row)

    def __len__(self) -> int:
        return len(self._lines)

    def item(self, place: int) -> BadRow:
        return BadRow(**json.loads(self._lines.item(place)))


class BadRows:
    """What to do with a row that cannot be read: raise (the default), or with ``skip=True`` record it and go on.

    >>> bad = BadRows(skip=True)
    >>> bad.add("a.jsonl:3", Fault("not JSON"), "{oops")
    >>> bad.summary()
    '1 row skipped: 1 not JSON'
    """

    def __init__(self, skip: bool = False):
        self.skip = skip
        self.rows = BadRowList()
        self._kinds: collections.Counter[str] = collections.Counter()

    def add(self, where: str, fault: Fault, raw: str) -> None:
        if not self.skip:
            raise RowError(where, fault) from None
        self.extend([BadRow(where, fault.kind, fault.detail, raw)])

    def extend(self, rows: Iterable[BadRow]) -> None:
        """Add rows that were skipped elsewhere."""
        for row in rows:
            self.rows.append(row)
            self._kinds[row.kind] += 1

    def summary(self) -> str:
        """E.g. ``3 rows skipped: 2 no assistant turn, 1 not JSON``, the most frequent first."""
        if not self.rows:
            return "no rows skipped"
        counts = ", ".join(f"{count} {kind}" for kind, count in self._kinds.most_common())
        return f"{len(self.rows)} row{'s' if len(self.rows) > 1 else ''} skipped: {counts}"

    def write(self, path: str | Path) -> None:
        """The rows as JSONL (where, reason, raw). The file appears whole or not at all."""
        with whole_file(Path(path)) as file:
            for row in self.rows:
                line = json.dumps({"where": row.where, "reason": row.reason, "raw": row.raw})
                file.write(f"{line}\n".encode())


def raw_text(value: object) -> str:
    """The start of a row's text, for the report of bad rows."""
    if isinstance(value, bytes):
        return value[: 4 * MAX_RAW_CHARS].decode("utf-8", errors="replace")[:MAX_RAW_CHARS]
    try:
        return json.dumps(value, ensure_ascii=False, default=str)[:MAX_RAW_CHARS]
    except (RecursionError, ValueError, TypeError):
        return type(value).__name__
