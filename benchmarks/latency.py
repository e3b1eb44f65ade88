"""How long a person waits: the command line's start, generated rows, a long answer, the page of `deftune inspect`.

    python benchmarks/latency.py            # on an idle machine; exit code 1 where a limit is passed

Wall-clock time, the least of a few tries. The tests of the same code measure no time. The page's lines need Chromium.
Needs deftune[test].
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deftune.data.generated import GENERATORS, generate
from deftune.evaluation.answers import normalize_answer
from deftune.inspection.page import write_page

TABLES = Path(__file__).resolve().parents[1] / "tests" / "analysis"


def least(tries: int, action: Callable[[], object]) -> float:
    """Seconds of the fastest try."""

    def once() -> float:
        start = time.perf_counter()
        action()
        return time.perf_counter() - start

    return min(once() for _ in range(tries))


def twenty_rows_of_each() -> None:
    for name, generator in GENERATORS.items():
        for split in generator.splits:
            generate(name, split=split, size=20)


def pages() -> Iterator[tuple[str, float, float]]:
    """Seconds until the page is ready, by its own clock, of 100,000 tokens in rows of 100 and of one row of 30,000."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        print("the page of deftune inspect: no Chromium on this machine", file=sys.stderr)
        return
    from playwright.sync_api import sync_playwright

    sys.path.insert(0, str(TABLES))
    tables: Any = importlib.import_module("inspect_tables")
    with sync_playwright() as driver, tempfile.TemporaryDirectory() as folder:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for tokens, per_row, limit in ((100_000, 100, 2.0), (30_000, 30_000, 4.0)):
            inspection = tables.make_inspection(tables.many_rows(tokens, per_row=per_row))
            page = browser.new_page()
            page.goto(f"file://{write_page(inspection, Path(folder) / 'page.html')}")
            page.wait_for_selector("html[data-ready]")
            ready = float(page.evaluate("document.documentElement.dataset.ready")) / 1000
            yield f"page of {tokens:,} tokens in rows of {per_row:,}", ready, limit
        browser.close()


def main() -> int:
    command = [sys.executable, "-m", "deftune", "--help"]
    twenty_rows_of_each()  # reads word lists and fonts once
    measured = [
        ("deftune --help", least(5, lambda: subprocess.run(command, capture_output=True, check=True)), 0.3),
        ("20 rows of every generator", least(3, twenty_rows_of_each), 3.0),
        ("an answer of 100,000 characters normalised", least(3, lambda: normalize_answer("1," * 50_000)), 0.5),
        *pages(),
    ]
    for name, seconds, limit in measured:
        print(f"{seconds:7.3f} s of at most {limit:.1f} s  {name}{'' if seconds <= limit else '  TOO SLOW'}")
    return int(any(seconds > limit for _, seconds, limit in measured))


if __name__ == "__main__":
    sys.exit(main())
