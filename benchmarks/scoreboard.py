"""Write docs/reliability.md: the scoreboard's rows with every figure in benchmarks/results/reliability*.json.

    pytest -m reliability --scoreboard benchmarks/results/reliability_cpu.json       # the full CPU rows, two hours
    deftune selftest --full --row 3 --row 4 --row 8 --json benchmarks/results/reliability_gpu.json      # on a GPU
    python benchmarks/scoreboard.py

A figure carries its own date and machine, so that rows can be measured again one at a time. A row without a figure
says "not measured".
"""

from __future__ import annotations

import sys
from pathlib import Path

from deftune.selftest.board import render_markdown
from deftune.selftest.records import read_records

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# Reliability: what must hold

Each row has a promise, what the most trusted peers promise or where they failed, and the measured figure.
`deftune selftest` measures the small sizes on your machine, `pytest -m reliability` the full sizes. `python
benchmarks/scoreboard.py` writes this page from the figures in `benchmarks/results/reliability*.json`; each figure has
the letter of its machine and its date. A figure that breaks its promise is marked **FAILS**. "Small size" marks a
figure of `deftune selftest`, which tries fewer cases than the promise says. Rows without a figure say "not measured".

"""


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
