"""What a run shows, in terminals of usual widths and in logs."""

import io
import math
import re

import pytest
from rich.console import Console

from deftune.artifacts.runs import summary
from deftune.cli import main
from deftune.cli.train import table_of_runs
from deftune.cli.watch import curve, render
from deftune.training.display import StepDisplay, render_step
from deftune.training.train import train_run

LOGS = {
    "loss": 0.31234, "nll": 1.9234, "p": 0.51234, "focus": 0.4, "gate": 0.712, "suppressed": 0.0123, "grad_norm": 1.234,
    "learning_rate": 4.9123e-05, "tokens_per_second": 12345.6,
}  # fmt: skip
EVALUATION = {"eval_loss": 0.33333, "eval_nll": 1.41, "eval_p": 0.55, "eval_gsm8k": 0.31, "eval_focus": 0.4}


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_shows_the_step_and_the_numbers_one_watches(width):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, legacy_windows=False)
    display = StepDisplay(console, "train", ["gsm8k"])
    display.start(0, 26400)
    display.evaluation(1000, 26400, EVALUATION)
    display.step(13700, 26400, LOGS)
    display.progress.refresh()
    display.stop()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue()).replace("\r", "\n")
    line = [line for line in text.splitlines() if "13700" in line][-1]
    assert len(line.rstrip()) <= width
    for part in ("13700/26400", "loss 0.312", "p 0.512", "lr 4.91e-05", "eval 0.333"):
        assert part in line, line
    assert "…" not in text and ("tok/s" in line) == (width == 120)
    assert "train 1000/26400  eval_loss 0.3333 | eval_nll 1.41 | eval_p 0.55 | eval_gsm8k 0.31" in text


def test_steps_of_a_minute_have_a_time_left_too():
    """rich's own estimate needs two steps within 30 seconds."""
    console, clock = Console(file=io.StringIO(), width=80, force_terminal=True, legacy_windows=False), Clock()
    display = StepDisplay(console, "train", clock=clock)
    display.start(10, 20)
    for step in (11, 12, 13):
        clock.now += 60.0
        display.step(step, 20, LOGS)
    display.progress.refresh()
    display.evaluation(13, 20, EVALUATION)
    display.stop()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    assert "13/20 0:07:00 loss" in text
    assert "eval 0.333" in text.rpartition("13/20 0:07:00")[2]  # the bar has the newest evaluation at once


def test_a_log_has_a_line_every_ten_seconds_and_every_evaluation():
    console, clock = Console(file=io.StringIO(), width=60), Clock()
    display = StepDisplay(console, "train", clock=clock)
    display.start(100, 200)
    for step in range(101, 201):
        clock.now += 1.0
        display.step(step, 200, LOGS)
        if step == 150:
            display.evaluation(step, 200, EVALUATION)
    display.evaluation(200, 200, EVALUATION, final=True)
    lines = console.file.getvalue().splitlines()
    assert all(line.isprintable() for line in lines)
    steps = [int(line.split()[1].split("/")[0]) for line in lines if "left" in line]
    assert steps == [101, *range(111, 200, 10), 200]
    assert lines[0] == (
        "train 101/200  0:01:39 left  loss 0.312 p 0.512 lr 4.91e-05 nll 1.92 gate 0.712 norm 1.23 12,346 tok/s"
    )
    assert "train 150/200  eval_loss 0.3333 | eval_nll 1.41 | eval_p 0.55" in lines
    assert lines[-1] == "result  eval_loss 0.3333 | eval_nll 1.41 | eval_p 0.55"


def test_numbers_that_do_not_fit_are_left_out_from_the_end():
    assert render_step(LOGS, 10) == "loss 0.312" and render_step(LOGS, 9) == ""


def test_a_runs_evaluations_are_printed_listed_and_drawn(tmp_path, make_config, capsys):
    printed = Console(file=io.StringIO(), width=200)
    settings = {"data.holdout": 0.2, "train.eval_steps": 2, "train.best": "eval_loss"}
    run = train_run(make_config(tmp_path / "run", settings), printed).run
    records = [record for record in run.read_metrics() if record["kind"] == "eval"]
    for record in records:
        place = "result" if record.get("final") else f"train {record['step']}/4"
        assert f"{place}  eval_loss {record['eval_loss']:.4g} | eval_nll" in printed.file.getvalue()
    found = summary(run)
    assert (found["eval_loss"], found["eval_nll"]) == (records[-1]["eval_loss"], records[-1]["eval_nll"])
    assert main(["runs", str(tmp_path)]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert {"kept", "eval_loss", "eval_nll"} <= set(header.split()) and f"{found['eval_loss']:.4g}" in line
    assert main(["watch", str(run.folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "finished, step 4"
    assert [line.split()[0] for line in lines[1:]] == [
        "loss", "nll", "p", "gate", "grad_norm", "learning_rate", "eval_loss", "eval_nll", "eval_p"
    ]  # fmt: skip
    assert main(["watch", str(tmp_path)]) == 2
    assert "is no run (it has no config.yaml)" in capsys.readouterr().err


def test_curves_average_what_does_not_fit():
    assert curve([1, 3, 5, 7], 2) == "▁█" and curve([2, 2], 5) == "▁▁"
    records = [{"step": i, "loss": float(i)} for i in range(1, 101)] + [{"step": 100, "loss": 1e9, "final": True}]
    (_, line) = render(records, "running", [], 80).splitlines()
    assert len(line) <= 80 and line.endswith("(1 to 100)") and "█" in line


@pytest.mark.parametrize(("width", "ranges"), [(40, False), (60, False), (80, True), (120, True)])
def test_a_curve_is_no_wider_than_the_terminal(width, ranges):
    values = [0.001234 + i * 1.7e-05 for i in range(50)]
    records = [{"step": i, "loss": 5.6 + value, "learning_rate": value} for i, value in enumerate(values)]
    _, *lines = render(records, "running", [], width).splitlines()
    assert len(lines) == 2 and all(len(line) <= width and (" to " in line) == ranges for line in lines), lines


def test_a_narrow_list_of_runs_keeps_the_evaluations():
    """The list is there to compare runs by eval_nll; the last columns were cut at 80."""
    run = {
        "run": "support-nll", "state": "finished", "step": 12, "kept": 12, "objective": "deft | floor(0.2)",
        "loss": 1.2345, "nll": 2.3456, "p": 0.3456, "eval_loss": 1.3456, "eval_nll": 2.4567, "checkpoints": 2,
        "model": "SmolLM2-135M-Instruct (Q4_1, dequantised)",
    }  # fmt: skip
    header, line, note = table_of_runs([run], 80).splitlines()
    assert {"run", "state", "step", "objective", "nll", "eval_loss", "eval_nll"} <= set(
        header.split()
    ) and line.endswith("2.457")
    assert len(line) <= 80 and note == "left out: checkpoints, model, p, kept, loss (--json has all)"
    assert table_of_runs([{**run, "objective": "deft"}], 40).splitlines()[0].split() == ["run", "objective", "eval_nll"]
    assert "left out" not in table_of_runs([run], None) and "left out" not in table_of_runs([run], 200)


def test_a_curve_leaves_out_what_is_no_number():
    records = [{"step": i, "grad_norm": value} for i, value in enumerate((1.0, math.nan, math.inf, 3.0), 1)]
    (_, line) = render(records, "running", [], 80).splitlines()
    assert line.endswith("(1 to 3)")


def test_a_short_curve_leaves_the_columns_in_line():
    records = [{"step": i, "loss": float(i)} for i in range(1, 61)] + [{"step": 60, "eval_loss": 3.5}]
    _, loss, evaluation = render(records, "running", [], 80).splitlines()
    assert loss.index("(") == evaluation.index("(")
