"""benchmarks/scoreboard.py: the page of the figures."""

import importlib.util
import re
from pathlib import Path

import pytest

from deftune.selftest.records import Record


@pytest.fixture
def scoreboard():
    path = Path(__file__).parents[2] / "benchmarks/scoreboard.py"
    spec = importlib.util.spec_from_file_location("scoreboard", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(row, figure, passed=True, machine="A machine", test="scoreboard", command="a command", **details):
    return Record(row, test, figure, passed, 1.0, command, "2026-01-02", machine, details)


def test_the_page_has_every_row_each_figure_its_machine_and_what_fails(scoreboard):
    page = scoreboard.render_markdown([
        record(1, "1e-7 | x", command="deftune selftest"), record(3, "cpu", machine="B"), record(3, "gpu", machine="C"),
        record(18, "2 of 40", passed=False, misses=["a `tag`"]), record(None, "flat", test="soak"),
    ])  # fmt: skip
    lines = page.splitlines()
    assert sum(bool(re.match(r"\| \d+ \|", line)) for line in lines) == 28
    assert "1e-7 \\| x (A, 2026-01-02, small size)" in page
    assert "cpu (B, 2026-01-02)<br>gpu (C, 2026-01-02)" in page
    assert "**FAILS**: 2 of 40" in page and "  - `a 'tag'`" in lines
    assert next(line for line in lines if line.startswith("| 8 |")).endswith("| not measured |")
    assert "| soak | flat (A, 2026-01-02) | `a command` |" in lines
    assert "- B: B" in lines
