"""Write docs/reliability.md: the scoreboard's rows with every figure in benchmarks/results/reliability*.json.

    pytest -m reliability --scoreboard benchmarks/results/reliability_cpu.json       # the full CPU rows, two hours
    deftune selftest --full --row 3 --row 4 --row 8 --json benchmarks/results/reliability_gpu.json      # on a GPU
    python benchmarks/scoreboard.py

A figure carries its own date and machine, so that rows can be measured again one at a time. A row without a figure
says "not measured".
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from deftune.selftest.board import ROWS, SMALL
from deftune.selftest.records import Record, read_records

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# Reliability: what must hold

Each row has a promise, what the most trusted peers promise or where they failed, and the measured figure.
`deftune selftest` measures the small sizes on your machine, `pytest -m reliability` the full sizes. `python
benchmarks/scoreboard.py` writes this page from the figures in `benchmarks/results/reliability*.json`; each figure has
the letter of its machine and its date. A figure that breaks its promise is marked **FAILS**. "Small size" marks a
figure of `deftune selftest`, which tries fewer cases than the promise says. Rows without a figure say "not measured".

"""


def render_markdown(records: Sequence[Record]) -> str:
    """The scoreboard with every figure that there is, and the machines that they come from."""
    machines = list(dict.fromkeys(record.machine for record in sorted(records, key=lambda record: record.date)))
    letters = {machine: chr(ord("A") + place) for place, machine in enumerate(machines)}

    def figures(number: int | None) -> str:
        found = [record for record in records if record.row == number]
        return "<br>".join(figure(record) for record in found) or "not measured"

    def figure(record: Record) -> str:
        mark = "" if record.passed else "**FAILS**: "
        small = ", small size" if record.command == SMALL else ""
        return f"{mark}{escape(record.figure)} ({letters[record.machine]}, {record.date}{small})"

    lines = ["| # | test | peers | promised | measured |", "|---|---|---|---|---|"]
    for row in ROWS:
        cells = (str(row.number), escape(row.test), escape(row.peers), escape(row.promise), figures(row.number))
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Machines:", "", *(f"- {letter}: {machine}" for machine, letter in letters.items())]
    beside = [record for record in records if record.row is None]
    if beside:
        lines += ["", "## Long runs", "", "| test | measured | command |", "|---|---|---|"]
        lines += [f"| {escape(r.test)} | {figure(r)} | `{r.command}` |" for r in beside]
    misses = [(r, r.details.get("misses") or r.details.get("survivors") or []) for r in records]
    if any(listed for _, listed in misses):
        lines += ["", "## What does not hold, item by item", ""]
        for record, listed in misses:
            if listed:
                lines.append(f"- row {record.row or '-'}, {record.test}:")
                lines += [f"  - `{str(miss).replace('`', chr(39))}`" for miss in listed]
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> int:
    files = sorted((ROOT / "benchmarks" / "results").glob("reliability*.json"))
    records = [record for path in files for record in read_records(path)]
    page = ROOT / "docs" / "reliability.md"
    page.write_text(HEAD + render_markdown(records), encoding="utf-8")
    failed = sum(not record.passed for record in records)
    print(f"{page}: {len(records)} figures of {len(files)} files, {failed} break their promise")
    return 0


if __name__ == "__main__":
    sys.exit(main())
