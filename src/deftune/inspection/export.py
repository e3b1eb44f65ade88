"""Rows out of an inspection, in the form they came in: the suspicious ones with reasons, and all the others."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from deftune.artifacts.files import whole_file
from deftune.data.rows import BadRows, Record
from deftune.data.sources import is_generated, read_fields
from deftune.inspection.inspect import Inspection, reasons

KEY = "deftune_inspect"
"""The field that an exported row has beside its own; formats ignore it, so that the file can be read back as data."""


class Exported(NamedTuple):
    """How many rows were written; of the kept ones, how many the inspection did not cover."""

    flagged: int
    kept: int
    not_inspected: int


def finding(inspection: Inspection, row: int, rank: int, by: str) -> dict[str, Any]:
    """Why a row is suspicious, for JSON: its rank in the ranking ``by``, that score's reason first."""
    scores = {name: float(values[row]) for name, values in inspection.scores.items()}
    return {
        "where": inspection.rows[row]["where"],
        "rank": rank,
        "by": by,
        "reasons": reasons(inspection, row, by),
        "scores": {name: None if np.isnan(value) else round(value, 6) for name, value in scores.items()},
    }


def source_records(inspection: Inspection, split: str | None, bad: BadRows) -> Iterator[Record]:
    """The rows as the data has them, each with its place; generated ones as messages.

    ``split`` is by default the one that the token table was made from.
    """
    data: str = inspection.facts["data"]
    split = split or inspection.facts.get("split")
    last = max(line["row"] for line in inspection.rows)
    return read_fields(data, split=split, limit=last + 1 if is_generated(data) else None, bad=bad)


def write_export(
    inspection: Inspection, flagged: Sequence[int], records: Iterable[Record], *, by: str, export: Path | None,
    keep: Path | None,
) -> Exported:  # fmt: skip
    """Write the ``flagged`` rows to ``export``, in their order, and all other ``records`` to ``keep``, in theirs.

    Each flagged row comes with its rank by the score ``by`` among all rows, and the reasons.

    ``records`` are the source's rows with their places; rows that were not inspected (over ``--rows``, or dropped)
    are among those kept: nothing is lost. A flagged row that the source no longer has is an error. The files are JSONL
    and appear whole or not at all.
    """
    ranks = {row: place for place, row in enumerate(inspection.ranked_rows(by).tolist(), 1)}
    wanted = {inspection.rows[row]["where"]: place for place, row in enumerate(flagged)}
    inspected = {line["where"] for line in inspection.rows}
    found: dict[int, dict[str, Any]] = {}
    kept = not_inspected = 0
    for path in filter(None, (export, keep)):
        path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as files:
        to_keep = files.enter_context(whole_file(keep)) if keep else None
        for where, fields in records:
            if where in wanted:
                found[wanted[where]] = fields
            elif to_keep:
                to_keep.write(json_line(fields))
                kept += 1
                not_inspected += where not in inspected
        if missing := [where for where, place in wanted.items() if place not in found]:
            raise ValueError(
                f"{missing[0]}: is not in the data; name its split (--split) if the token table is of another split, "
                f"or write the token table again if the data has changed"
            )
        if export:
            sink = files.enter_context(whole_file(export))
            for place, row in enumerate(flagged):
                sink.write(json_line({**found[place], KEY: finding(inspection, int(row), ranks[int(row)], by)}))
    return Exported(len(found), kept, not_inspected)


def json_line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, ensure_ascii=False, default=str).encode() + b"\n"
