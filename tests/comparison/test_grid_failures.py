"""What a grid does with failures: those that cells share stop it, one objective's own does not; files are checked."""

import json
import shutil
from pathlib import Path

import pytest

import tiny
from deftune.cli import main
from deftune.comparison.grid import Comparison, load_comparison
from deftune.comparison.report import cautions
from deftune.comparison.schedule import Failures, run_grid
from deftune.comparison.summary import summarize_comparison
from deftune.objectives import Context
from deftune.tokens.table import read_token_table, table_objectives
from serial import run_here
from tiny_comparison import comparison_at, content, save_model, write


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, model) -> Comparison:
    comparison = comparison_at(tmp_path_factory.mktemp("comparison"), model, seeds=[0])
    assert run_grid(comparison, run_here, lambda _: None).exit_code == 0
    return comparison


# --- failures that cells share ----------------------------------------------------------------------------------------


def scripted(errors: dict[str, str]):
    """A runner whose cells fail with an error by name, or finish; it starts nothing."""

    def run(cells, begin):
        for cell in cells:
            if begin(cell):
                error = errors.get(cell.name)
                cell.set_state("failed", error=error) if error else cell.set_state("finished", cost={})
                yield cell, "failed" if error else "finished"

    return run


def grid(tmp_path, model, regimes=("weak",), **changes) -> Comparison:
    what = content(model, tmp_path / "grid") | changes
    what["regimes"] = dict.fromkeys(regimes, what["regimes"]["weak"])
    return load_comparison(write(tmp_path / "c.yaml", what))


def names(comparison) -> list[str]:
    return [cell.name for cell in comparison.cells()]


def test_the_same_error_of_two_objectives_stops_the_grid_with_one_message(tmp_path, model):
    comparison, said = grid(tmp_path, model), []
    error = "ValueError: model: cannot load x"
    outcome = run_grid(comparison, scripted(dict.fromkeys(names(comparison), error)), said.append)
    base, nll, *rest = names(comparison)
    assert outcome.exit_code == 1 and list(outcome.failed) == [base, nll] and outcome.not_started == rest
    assert said == [
        f"[1/5] {base}", f"  {base} failed: {error}",
        f"[2/5] {nll}", f"  {nll} failed in the same way",
        "  weak: no tuned cell has finished and cells of different objectives fail alike, so no other cell is started; "
        "remove the cause and run the same command, or pass --keep-going to start them all",
        f"not started: {', '.join(rest)}",
    ]  # fmt: skip


def test_errors_that_differ_in_the_cells_own_folder_are_alike(tmp_path, model):
    comparison = grid(tmp_path, model, base=False)
    errors = {cell.name: f"killed by signal 9; see {cell.folder / 'log.txt'}" for cell in comparison.cells()}
    assert len(run_grid(comparison, scripted(errors), lambda _: None).failed) == 2


def test_keep_going_starts_them_all(tmp_path, model):
    comparison = grid(tmp_path, model)
    errors = dict.fromkeys(names(comparison), "the same")
    outcome = run_grid(comparison, scripted(errors), lambda _: None, keep_going=True)
    assert list(outcome.failed) == names(comparison) and not outcome.not_started


def test_an_objective_that_fails_alone_does_not_stop_the_others(tmp_path, model):
    comparison = grid(tmp_path, model, objectives=["linear", "nll", "deft"])
    errors = {name: "of its own" for name in names(comparison) if "/linear/" in name}
    outcome = run_grid(comparison, scripted(errors), lambda _: None)
    assert sorted(outcome.failed) == sorted(errors) and not outcome.not_started
    assert len(outcome.finished) == 5


def test_different_errors_do_not_stop_it(tmp_path, model):
    comparison = grid(tmp_path, model)
    errors = {name: f"error {n}" for n, name in enumerate(names(comparison))}
    assert list(run_grid(comparison, scripted(errors), lambda _: None).failed) == names(comparison)


def test_the_untuned_models_success_proves_nothing_about_training(tmp_path, model):
    comparison = grid(tmp_path, model)
    base, nll, deft, *rest = names(comparison)
    outcome = run_grid(comparison, scripted(dict.fromkeys([nll, deft, *rest], "not finite")), lambda _: None)
    assert outcome.finished == [base] and list(outcome.failed) == [nll, deft] and outcome.not_started == rest


def test_a_single_objective_is_given_up_after_two_cells(tmp_path, model):
    comparison = grid(tmp_path, model, objectives=["deft"], seeds=[0, 1, 2], base=False)
    outcome = run_grid(comparison, scripted(dict.fromkeys(names(comparison), "the same")), lambda _: None)
    assert len(outcome.failed) == 2 and len(outcome.not_started) == 1


def test_a_regime_that_cannot_run_leaves_the_others(tmp_path, model):
    comparison = grid(tmp_path, model, regimes=("strong", "weak"))
    errors = {name: "no such file" for name in names(comparison) if name.startswith("strong/")}
    outcome = run_grid(comparison, scripted(errors), lambda _: None)
    assert len(outcome.failed) == 2 and len(outcome.not_started) == 3 and len(outcome.finished) == 5


def test_the_same_error_in_two_regimes_stops_the_grid(tmp_path, model):
    comparison = grid(tmp_path, model, regimes=("strong", "weak", "mixed"))
    outcome = run_grid(comparison, scripted(dict.fromkeys(names(comparison), "no GPU")), lambda _: None)
    assert list(outcome.failed) == ["mixed/base", names(comparison)[1], "strong/base"]
    assert len(outcome.not_started) == 12


def test_a_cell_that_finished_keeps_its_regime(tmp_path, model):
    comparison = grid(tmp_path, model, objectives=["nll", "deft", "linear"])
    failures = Failures(comparison.cells())
    _, nll, deft, linear, *_ = comparison.cells()
    failures.finish(nll)
    failures.add(deft, "x")
    assert failures.add(linear, "x") and not failures.given_up


@pytest.mark.long
def test_the_real_command_stops_too(tmp_path, model, capsys):
    """A model that cannot be loaded, in cells of their own processes."""
    broken = shutil.copytree(model, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"x")
    path = write(tmp_path / "c.yaml", content(broken, tmp_path / "grid"))
    assert main(["compare", "run", str(path)]) == 1
    out = capsys.readouterr().out
    assert out.count("cannot load") == 1 and "0 of 5 cells finished, 2 failed, 3 not started" in out
    assert "next:" not in out
    assert [cell.state()["state"] for cell in load_comparison(path).cells()] == ["failed"] * 2 + ["new"] * 3


# --- an objective that cannot be computed -----------------------------------------------------------------------------


def test_an_objective_without_end_tokens_fails_in_its_own_cell_only(tmp_path, capsys, monkeypatch):
    """Where the end tokens are not known, base and NLL are measured without the columns of `deft | eos(nll)`."""
    for module in ("tokens.passes", "tokens.table", "comparison.cells"):
        monkeypatch.setattr(f"deftune.{module}.token_context", lambda encoder: Context())
    for module in ("trainer", "assembly"):
        monkeypatch.setattr(f"deftune.training.{module}.end_tokens_of", lambda *args, **options: {})
    tokenizer = tiny.make_tokenizer(["user assistant system sort these words in ascending order"])
    where = tiny.save_model(tmp_path / "model", tokenizer, max_position_embeddings=2048)
    comparison = comparison_at(tmp_path, where, objectives=["nll", "deft | eos(nll)"], seeds=[0])
    said = []
    outcome = run_grid(comparison, run_here, said.append)
    base, nll, eos = comparison.cells()
    assert outcome.finished == [base.name, nll.name] and list(outcome.failed) == [eos.name]
    assert table_objectives(read_token_table(base.folder / "tokens.parquet")) == ["nll"]
    why = "the columns of `deft | eos(nll)`: the tokens that end an answer, which it needs, are not known"
    assert base.state()["left_out"] == nll.state()["left_out"] == [why]
    assert f"Token tables lack {why}." in cautions(summarize_comparison(comparison))
    assert main(["compare", "show", comparison.folder]) == 0
    shown = capsys.readouterr().out
    assert shown.count("left out of the token tables: the columns of `deft | eos(nll)`: the tokens") == 1
    base.set_state("running", stage="measure")  # the answers and the table are there: nothing is measured again
    assert run_grid(comparison, run_here, said.append).exit_code == 1
    assert base.state()["left_out"] == [why]


# --- damaged files ----------------------------------------------------------------------------------------------------

DAMAGED_CELLS = {
    "": "it is not JSON",
    "{": "it is not JSON",
    "[" * 100_000: "it is not JSON",
    "[1]": "Input should be a valid dictionary",
    "{}": "state: missing",
    '{"state": "done"}': "state: Input should be",
    '{"state": {}}': "state: Input should be",
    '{"state": "finished", "cost": {"seconds": 1}}': "cost: has no tokens, tokens_per_second, memory_gib",
    '{"state": "finished", "cost": [1]}': "cost: Input should be a valid dictionary",
    '{"state": "finished", "cost": {"seconds": "1", "tokens": 1, "tokens_per_second": 1, "memory_gib": 1}}': (
        "cost.seconds: Input should be a valid number"
    ),
    '{"state": "finished", "eval_seconds": "long"}': "eval_seconds: Input should be a valid number",
    '{"state": "failed", "error": 7}': "error: Input should be a valid string",
}


@pytest.mark.parametrize(("text", "problem"), DAMAGED_CELLS.items(), ids=range(len(DAMAGED_CELLS)))
@pytest.mark.parametrize("command", [("compare", "show"), ("report",), ("compare", "run")])
def test_a_damaged_cell_is_one_line(finished, tmp_path, capsys, text, problem, command):
    folder = shutil.copytree(finished.folder, tmp_path / "copy")
    path = folder / finished.cells()[1].name / "cell.json"
    path.write_text(text)
    assert main([*command, str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"deftune: {path}: is damaged ({problem}") and error.count("\n") == 1
    assert error.endswith("remove it, and `deftune compare run` goes on with the cell\n")


@pytest.mark.parametrize("command", [("compare", "show"), ("report",)])
@pytest.mark.parametrize(("name", "text"), [
    ("summary.json", "{"), ("summary.json", "[]"), ("summary.json", '{"rows": [1], "missing": {}}'),
    ("summary.json", '{"rows": [], "missing": 7}'), ("summary.json", '{"rows": null}'),
    ("graded.jsonl", '{"task": "figfont"}\n'), ("graded.jsonl", '{"task": "figfont", "temperature": "x"}\n'),
    ("graded.jsonl", '{"task": [], "temperature": 0, "score": 1, "id": "a"}\n'),
])  # fmt: skip
def test_a_damaged_result_is_one_line(finished, tmp_path, capsys, name, text, command):
    folder = shutil.copytree(finished.folder, tmp_path / "copy")
    path = folder / finished.cells()[1].name / "eval-tasks" / name
    path.write_text(text)
    (folder / "comparison.json").unlink(missing_ok=True)
    assert main([*command, str(folder)]) == 2
    error = capsys.readouterr().err
    assert str(path) in error and error.count("\n") == 1, error


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"cells": 1}', "whole", "regimes"])
def test_a_damaged_summary_is_made_anew(finished, tmp_path, capsys, text):
    folder = shutil.copytree(finished.folder, tmp_path / "copy")
    assert main(["compare", "show", str(folder), "--format", "json"]) == 0
    good = capsys.readouterr().out
    kept = json.loads((folder / "comparison.json").read_text())
    if text in ("whole", "regimes"):  # the right cells, and anything else
        kept["regimes"] = {} if text == "regimes" else {"weak": {"evaluations": [{}], "tokens": 3}}
        text = json.dumps(kept)
    (folder / "comparison.json").write_text(text)
    assert main(["compare", "show", str(folder), "--format", "json"]) == 0
    assert capsys.readouterr().out == good


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_damaged_environment_is_one_line(finished, tmp_path, capsys, text):
    folder = shutil.copytree(finished.folder, tmp_path / "copy")
    (folder / "environment.json").write_text(text)
    assert main(["report", str(folder)]) == 2
    assert "environment.json: is damaged; restore it, or remove it" in capsys.readouterr().err
    (folder / "environment.json").unlink()
    assert main(["report", str(folder)]) == 0


def test_states_are_escaped_in_what_show_prints(finished, tmp_path, capsys):
    folder = shutil.copytree(finished.folder, tmp_path / "copy")
    _, nll, deft = load_comparison(folder).cells()
    nll.set_state("failed", error="*bold* [link](x) \x1b[2J | <b>")
    deft.set_state("running", stage="train")  # by no process
    assert main(["compare", "show", str(folder)]) == 0
    out = capsys.readouterr().out
    assert f"failed: {nll.name}: ConfigError" not in out and "\x1b" not in out
    assert f"failed: {nll.name}: *bold* [link](x) \\x1b[2J | <b>" in out
    assert f"interrupted: {deft.name}\n" in out
    assert main(["compare", "show", str(folder), "--format", "markdown"]) == 0
    assert f"failed: {nll.name}: \\*bold\\* \\[link\\](x) \\x1b\\[2J \\| \\<b\\>" in capsys.readouterr().out


def test_scores_name_a_dequantised_model(finished, capsys):
    from deftune.comparison.show import score_tables

    summary = json.loads(json.dumps(summarize_comparison(finished)))
    summary["regimes"]["weak"]["model"] = "smollm2"
    assert score_tables(summary)[0].caption.startswith("weak: SmolLM2-135M-Instruct (Q4_1, dequantised), ")
