"""Commands that take long say where they stand: in a pipe, at least every 20 seconds by the clock."""

import json
from contextlib import contextmanager
from pathlib import Path

import pytest

import tiny
from deftune.cli import analyze, inspect, main
from deftune.cli.compare import show_cells
from deftune.cli.progress import QUIET_SECONDS, Lines


class Clock:
    """A minute later whenever it is read: every place that would tell where the work stands does."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 60.0
        return self.now


@pytest.fixture
def said(monkeypatch) -> list[str]:
    """What is written to a pipe when time passes fast."""
    lines: list[str] = []

    @contextmanager
    def progress():
        yield Lines(lines.append, Clock())

    for module in (analyze, inspect):
        monkeypatch.setattr(module, "progress", progress)
    return lines


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("models") / "tiny", tiny.make_tokenizer())


@pytest.fixture
def data(tmp_path) -> Path:
    path = tmp_path / "rows.jsonl"
    row = {"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "12 plus 30"}]}
    path.write_text((json.dumps(row) + "\n") * 5)
    return path


def stages(lines: list[str]) -> list[str]:
    """Without the time that each ends with."""
    return list(dict.fromkeys(line.rpartition(" (")[0] for line in lines))


def test_analyze_tokens_says_where_it_stands(said, model, data, tmp_path, capsys):
    out = tmp_path / "t.parquet"
    args = ["analyze", "tokens", str(model), str(data), "--out", str(out), "--batch-tokens", "8", "--objectives", "nll"]
    assert main(args) == 0
    found = stages(said)
    assert found[:3] == ["loading the libraries", f"reading {data}", f"loading {model}"]
    assert found[3:5] == ["rows have at most 2,048 tokens", "rows: 0 of 5"]
    assert found.index("rows: 5 of 5") > 5  # and between them
    assert found[-1] == "0 truncated (0%); 90 tokens, 20 supervised"


def test_inspect_says_where_it_stands(said, model, data, tmp_path, capsys):
    page, flagged = tmp_path / "p.html", tmp_path / "f.jsonl"
    args = ["inspect", str(model), str(data), "--objectives", "nll", "--html", str(page), "--export", str(flagged)]
    assert main(args) == 0
    found = stages(said)
    assert found[0] == "loading the libraries" and "rows: 5 of 5" in found
    assert found[-3:] == ["ranking the rows", f"writing {page}", "writing rows"]


def test_compare_says_where_its_cells_stand(monkeypatch, tmp_path):
    """The text is what the cells have written; the 15 seconds are the clock's."""
    now, lines = [0.0], list[str]()
    shown = Lines(lines.append, lambda: now[0])
    monkeypatch.setattr("deftune.comparison.schedule.cell_progress", lambda cell: f"{cell}: training, step {now[0]:g}")
    for second in range(0, 101, 5):
        now[0] = float(second)
        show_cells(shown, None, ["a", "b"])
    assert [line.rpartition("(")[2] for line in lines] == [
        "15 s)",
        "30 s)",
        "45 s)",
        "1 min 0 s)",
        "1 min 15 s)",
        "1 min 30 s)",
    ]
    assert lines[0] == "a: training, step 15; b: training, step 15 (15 s)" and QUIET_SECONDS == 15
