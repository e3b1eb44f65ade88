"""The scoreboard itself: its rows, its figures in a file, its page, its command. The rows' checks are tests already."""

import importlib
import json
import re
import warnings

import pytest

from deftune.cli import main
from deftune.selftest import board, losses
from deftune.selftest.attacks import ATTACKS
from deftune.selftest.board import ROWS, Row, measure, run_rows
from deftune.selftest.check import Figure, NotHere, Size, counted
from deftune.selftest.files import damaged
from deftune.selftest.records import Record, machine, read_records, write_records
from deftune.selftest.runs import Bench, loss_of_all_rows, refused


def test_the_rows_are_numbered_and_their_checks_exist():
    assert [row.number for row in ROWS] == list(range(1, 29))
    for row in ROWS:
        for name in row.checks:
            module, function = name.split(".")
            assert callable(getattr(importlib.import_module(f"deftune.selftest.{module}"), function)), name


def record(row, figure, test="scoreboard"):
    return Record(row, test, figure, True, 1.0, "a command", "2026-01-02", "A machine")


def test_a_newer_figure_of_a_row_replaces_the_older(tmp_path):
    path = tmp_path / "results" / "figures.json"
    write_records(path, [record(2, "old"), record(1, "one")])
    write_records(path, [record(2, "new"), record(None, "soaked", test="soak")])
    assert [(r.row, r.figure) for r in read_records(path)] == [(1, "one"), (2, "new"), (None, "soaked")]


def test_a_check_that_breaks_is_a_figure_and_one_that_cannot_run_is_none(monkeypatch):
    def breaks(size):
        raise RuntimeError("no such kernel")

    def elsewhere(size):
        raise NotHere("needs a GPU")

    monkeypatch.setattr(losses, "breaks", breaks, raising=False)
    monkeypatch.setattr(losses, "elsewhere", elsewhere, raising=False)
    monkeypatch.setattr(board, "ROWS", [Row(1, "a", "b", "c", ("losses.breaks",)), Row(2, "a", "b", "c")])
    monkeypatch.setattr(board, "ROWS", [*board.ROWS, Row(3, "a", "b", "c", ("losses.elsewhere",), by="a script")])
    shown = []
    records = run_rows([1, 2, 3], False, lambda row, text, seconds: shown.append(text), "deftune selftest")
    assert [(r.row, r.passed, r.figure) for r in records] == [(1, False, "RuntimeError: no such kernel")]
    assert shown == [
        "FAILED: RuntimeError: no such kernel", "not run: measured by pytest -m reliability", "not run: needs a GPU",
    ]  # fmt: skip


def test_several_checks_of_a_row_must_all_hold(monkeypatch):
    monkeypatch.setattr(losses, "good", lambda size: Figure("fine", True), raising=False)
    monkeypatch.setattr(losses, "bad", lambda size: counted("kept", 3, ["this"]), raising=False)
    figure = measure(Row(1, "a", "b", "c", ("losses.good", "losses.bad")), full=False)
    assert figure == Figure("fine; 2 of 3 kept", False, ("this",))
    assert not counted("kept", 0, []).holds  # nothing tried proves nothing


def test_the_command_prints_and_writes_its_figures(tmp_path, capsys):
    out = tmp_path / "figures.json"
    assert main(["selftest", "--row", "5", "--row", "4", "--row", "12", "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert machine() in text and "not run: measured by pytest -m reliability" in text
    assert re.search(r"ok: at most [\d.]+ x torch's error", text)
    found = {entry["row"]: entry for entry in json.loads(out.read_text())}
    assert found[5]["passed"] and found[5]["machine"] == machine() and found[5]["command"] == "deftune selftest"


def test_a_broken_promise_is_exit_code_one(monkeypatch, capsys):
    monkeypatch.setattr(losses, "confident", lambda size: Figure("4 x torch's error", False, ("margin 20",)))
    assert main(["selftest", "--row", "5"]) == 1
    assert "FAILED: 4 x torch's error" in (text := capsys.readouterr().out) and "- margin 20" in text


def test_an_unknown_row_is_one_line(capsys):
    assert main(["selftest", "--row", "29"]) == 2
    assert capsys.readouterr().err == "deftune: --row: 29 is no row of the table, which has 1 to 28\n"


@pytest.mark.parametrize(
    "check",
    ["loss_and_gate", "gradients", "fused_loss", "per_token", "confident", "extremes", "nothing_supervised"],
)
def test_the_losses_keep_their_promises(check, tmp_path):
    figure = getattr(losses, check)(Size(False, tmp_path))
    assert figure.holds, (figure.text, figure.misses)


def test_a_wrong_loss_is_noticed(monkeypatch, tmp_path):
    true = losses.deformed
    monkeypatch.setattr(
        losses, "deformed", lambda log_p, focus: (true(log_p, focus)[0], true(log_p, focus)[1] * (1 + 1e-6))
    )
    assert not losses.loss_and_gate(Size(False, tmp_path)).holds


def test_there_are_more_attacks_than_the_promise_says():
    assert len(ATTACKS) >= 60


def test_damage_changes_something():
    import random

    draw = random.Random(0)
    assert sum(damaged(b'{"a": 1}', draw) != b'{"a": 1}' for _ in range(100)) >= 95


def test_refused_options_warn_of_nothing(tmp_path):
    """A FutureWarning of transformers would stand between the rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert refused(tmp_path, {"average_tokens_across_devices": False})


def test_loading_the_tiny_model_draws_no_progress_bar(tmp_path, capfd):
    assert loss_of_all_rows(Bench(tmp_path), "nll") > 0
    assert "Loading weights" not in capfd.readouterr().err
