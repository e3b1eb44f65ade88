"""Cells whose weights are not kept: measured in memory, without a checkpoint of the last step or a model folder."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from deftune.artifacts.results import load_result
from deftune.comparison import cells
from deftune.comparison.grid import Cell, load_comparison
from deftune.comparison.summary import summarize_comparison
from deftune.selftest import tiny
from deftune.training.stopping import StopSignal
from deftune.training.train import train_run
from tiny_comparison import content, save_model, write
from waiting import wait_for

LORA = {"r": 4, "alpha": 8, "dropout": 0.1, "target_modules": "all-linear"}
KINDS = {
    "full": {},
    "LoRA": {"lora": LORA},
    "full, bf16, checkpointing": {"precision": "bf16", "gradient_checkpointing": True},
    "LoRA, bf16, checkpointing": {"lora": LORA, "precision": "bf16", "gradient_checkpointing": True},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


def one_cell(folder: Path, model: Path, *, keep_models: bool = False, lora=None, **train) -> Cell:
    folder.mkdir(exist_ok=True)
    what = content(model, folder / "grid") | {"seeds": [0], "objectives": ["deft"], "base": False}
    what["train"] |= train
    what["model"]["lora"] = lora
    (cell,) = load_comparison(write(folder / "compare.yaml", what | {"keep_models": keep_models})).cells()
    return cell


def measurements(cell: Cell) -> dict:
    """Token table, answers and grades of a finished cell, and the run's records without clocks."""
    assert cell.is_finished
    result = cell.folder / "eval-tasks"
    found = {name: sorted((result / f"{name}.jsonl").read_text().splitlines()) for name in ("samples", "graded")}
    assert {json.loads(line)["temperature"] for line in found["samples"]} == {0, 1}
    found["tokens"] = parquet.read_table(cell.folder / "tokens.parquet").to_pydict()
    found["losses"] = [(r["step"], r["loss"]) for r in cell.run.read_metrics()]
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, model) -> dict:
    cell = one_cell(tmp_path_factory.mktemp("undisturbed"), model)
    assert cells.run_cell(cell) == "finished"
    return measurements(cell)


@pytest.mark.parametrize("kind", KINDS)
def test_measurements_are_those_of_a_saved_model(tmp_path, model, monkeypatch, kind):
    kept, not_kept = (one_cell(tmp_path / str(keep), model, keep_models=keep, **KINDS[kind]) for keep in (True, False))
    seen = {}

    def look(cell, say, shared, model=None, tokenizer=None, measure=cells.measure_cell):
        seen[cell.comparison.keep_models] = model
        names = sorted(path.name for path in cell.run.checkpoints.iterdir())
        assert names == (["checkpoint-2", "checkpoint-3"] if model is None else ["checkpoint-2"])
        assert cell.run.model.exists() == (model is None)
        return measure(cell, say, shared, model, tokenizer)

    monkeypatch.setattr(cells, "measure_cell", look)
    assert cells.run_cell(kept) == cells.run_cell(not_kept) == "finished"
    assert measurements(kept) == measurements(not_kept)
    assert seen[True] is None and not not_kept.run.model.exists() and not not_kept.run.checkpoints.exists()
    assert not_kept.run.status()["state"] == "finished"
    as_loaded(seen[False], load_result(str(kept.run.folder))[0])


def as_loaded(found, loaded) -> None:
    """The model that was in memory is in the state of the loaded one, after both were measured."""
    assert type(found) is type(loaded) and found.training is loaded.training is False
    for (name, module), (other, fresh) in zip(found.named_modules(), loaded.named_modules(), strict=True):
        assert name == other and "forward" not in vars(module) and "_original_forward" not in vars(module)
        assert len(module._forward_hooks) == len(fresh._forward_hooks)
        assert len(module._forward_pre_hooks) == len(fresh._forward_pre_hooks)
        assert module.training is fresh.training
        assert getattr(module, "gradient_checkpointing", False) is getattr(fresh, "gradient_checkpointing", False)
    for (name, value), (other, fresh) in zip(found.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == other and value.dtype == fresh.dtype and value.equal(fresh) and value.grad is None
        assert value.requires_grad == fresh.requires_grad
    assert found.generation_config.eos_token_id == loaded.generation_config.eos_token_id
    assert found.config.use_cache


def test_the_parts_of_a_cell_have_their_seconds(tmp_path, model):
    cell = one_cell(tmp_path, model)
    cells.run_cell(cell)
    state = cell.state()
    parts = [state[f"{part}_seconds"] for part in ("prepare", "train", "save", "load", "tokens", "eval")]
    assert all(part >= 0 for part in parts) and state["train_seconds"] > 0
    assert sum(parts) <= state["overhead_seconds"] + state["cost"]["seconds"] + sum(parts[-2:])


@pytest.mark.parametrize("where", ["tokens", "answers"])
def test_a_cell_that_fails_while_it_measures_trains_again_and_mixes_nothing(
    tmp_path, model, undisturbed, monkeypatch, where, capsys
):
    cell = one_cell(tmp_path, model)
    with monkeypatch.context() as patched:

        def fail(*args):
            if where == "answers":
                cells_evaluate(*args)
            raise RuntimeError("out of memory")

        cells_evaluate = cells.evaluate_cell
        patched.setattr(cells, "evaluate_cell", fail)
        with pytest.raises(RuntimeError):
            cells.run_cell(cell)
    assert cell.state()["state"] == "failed" and not cell.run.model.exists()
    if where == "answers":  # as if the lost weights had answered otherwise, and the kill had come in a line
        result = cell.folder / "eval-tasks"
        (result / "summary.json").unlink()
        (result / "graded.jsonl").unlink()
        text = (result / "samples.jsonl").read_text().replace('"text": "', '"text": "lost ')
        (result / "samples.jsonl").write_text(text[: len(text) // 2])
    assert cells.run_cell(cell) == "finished"
    what = "tokens.parquet, eval-tasks" if where == "answers" else "tokens.parquet"
    assert f"removed {what}: the weights they were measured with" in " ".join(capsys.readouterr().err.split())
    assert measurements(cell) == undisturbed
    before = (cell.folder / "tokens.parquet").stat().st_mtime_ns
    assert cells.run_cell(cell) == "finished" and (cell.folder / "tokens.parquet").stat().st_mtime_ns == before


def test_a_cell_that_needs_files_and_trains_again_mixes_nothing(tmp_path, model, undisturbed, monkeypatch, capsys):
    """Its model is removed when the cell has finished; a damaged token table is made anew as the error says."""
    cell = one_cell(tmp_path, model)
    monkeypatch.setattr(cells, "fits_in_memory", lambda _: False)
    assert cells.run_cell(cell) == "finished" and not cell.run.model.exists()
    samples = cell.folder / "eval-tasks" / "samples.jsonl"
    samples.write_text(samples.read_text().replace('"text": "', '"text": "lost '))
    (cell.folder / "tokens.parquet").unlink()
    (cell.folder / "cell.json").unlink()
    assert cells.run_cell(cell) == "finished"
    assert "removed eval-tasks: the weights they were measured with" in " ".join(capsys.readouterr().err.split())
    assert measurements(cell) == undisturbed


@pytest.mark.parametrize("call", [2, 3, 4])
def test_a_signal_writes_a_checkpoint_also_of_the_last_step(tmp_path, model, undisturbed, monkeypatch, call, capsys):
    """Heard after step 2, after step 3 (the last), and when the training is over."""
    cell, calls = one_cell(tmp_path, model, save_steps=100), []
    with monkeypatch.context() as patched:
        patched.setattr(StopSignal, "received_anywhere", lambda *_: calls.append(1) or len(calls) >= call)
        assert cells.run_cell(cell) == "stopped"
    step = min(call, 3)
    assert [path.name for path in cell.run.checkpoints.iterdir()] == [f"checkpoint-{step}"]
    assert cell.state()["step"] == cell.run.status()["step"] == step
    assert cells.run_cell(cell) == "finished"
    assert "resuming from" in capsys.readouterr().err
    assert measurements(cell) == undisturbed


def test_a_cell_with_its_model_on_disk_goes_on_with_its_measurements(tmp_path, model, undisturbed, monkeypatch):
    """As a version that saved every model left it."""
    cell = one_cell(tmp_path, model)
    train_run(cell.config)
    with monkeypatch.context() as patched:
        patched.setattr(cells, "evaluate_cell", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cells.run_cell(cell)
    before = (cell.folder / "tokens.parquet").stat().st_mtime_ns
    assert cells.run_cell(cell) == "finished" and (cell.folder / "tokens.parquet").stat().st_mtime_ns == before
    assert measurements(cell) == undisturbed and not cell.run.model.exists()


@pytest.mark.parametrize("train", [{"best": "eval_nll", "eval_steps": 1}, {"push_to_hub": "a/b"}])
def test_what_needs_files_is_refused_without_them(tmp_path, model, train):
    cell = one_cell(tmp_path, model)
    config = cell.config.model_copy(update={"train": cell.config.train.model_copy(update=train)})
    with pytest.raises(ValueError, match="save=False: several"):
        train_run(config, save=False)


@pytest.mark.slow
def test_a_cell_killed_while_it_answers(tmp_path, model):
    """SIGKILL once answers are written; the next start gives what an undisturbed cell gives."""
    found = []
    for name in ("killed", "undisturbed"):
        what = content(model, tmp_path / name) | {
            "objectives": ["deft"], "seeds": [0], "base": False, "keep_models": False
        }  # fmt: skip
        what["regimes"]["weak"]["evaluate"][0] |= {"samples": 20, "batch_size": 1, "max_new_tokens": 32}
        path = write(tmp_path / f"{name}.yaml", what)
        (cell,) = load_comparison(path).cells()
        command = [sys.executable, "-m", "deftune", "compare", "run", str(path), "--cell", cell.name]
        if name == "killed":
            process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            samples = cell.folder / "eval-tasks" / "samples.jsonl"
            wait_for(lambda: process.poll() is not None or (samples.is_file() and samples.stat().st_size > 0))  # noqa: B023
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
            assert cell.state() == {"state": "running", "stage": "measure"}
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert ("removed tokens.parquet, eval-tasks" in done.stderr) is (name == "killed")
        found.append(measurements(cell))
    assert found[0] == found[1]


def two_cells(folder: Path, model: Path) -> list[Cell]:
    """Two objectives that train on, and measure, the rows of a file."""
    what = content(model, folder / "grid") | {"seeds": [0], "base": False, "keep_models": False}
    rows, held = (tiny.save_conversations(folder / f"{name}.jsonl", 12) for name in ("rows", "held"))
    regime = what["regimes"]["weak"] | {"tokens": [{"path": str(held)}], "evaluate": []}
    what["regimes"]["weak"] = regime | {"data": {"train": [{"path": str(rows)}], "max_length": 512}}
    return load_comparison(write(folder / "compare.yaml", what)).cells()


def test_a_cell_is_not_trained_on_other_rows_than_the_cells_before(tmp_path, model):
    first, second = two_cells(tmp_path, model)
    data, shared = tmp_path / "rows.jsonl", cells.Shared()
    text = data.read_text()
    assert cells.run_cell(first, shared=shared) == "finished"
    data.write_text(text.replace("What", "Whot", 1))
    with pytest.raises(ValueError, match=r"nll/lr0\.001-s0/run: was trained on other rows"):
        cells.run_cell(second)
    assert second.state()["state"] == "failed" and not second.run.config.exists()
    data.write_text(text)
    assert cells.run_cell(second, shared=shared) == "finished"


def test_token_tables_of_other_rows_are_not_compared(tmp_path, model):
    first, second = two_cells(tmp_path, model)
    held = tmp_path / "held.jsonl"
    assert cells.run_cell(first) == "finished"
    held.write_text(held.read_text().replace("is", "was", 1))
    assert cells.run_cell(second) == "finished"
    with pytest.raises(ValueError, match=r"deft/lr0\.001-s0/tokens\.parquet: is of other rows than .*nll/"):
        summarize_comparison(first.comparison)
