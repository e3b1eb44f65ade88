"""Cells that share a process give what they give in processes of their own."""

import copy
import gc
import json
import os
import signal
import subprocess
import sys
import weakref
from dataclasses import asdict
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
import torch

from deftune.artifacts.config import RunConfig
from deftune.artifacts.models import load_model
from deftune.comparison.cells import Shared, run_cell
from deftune.comparison.grid import Cell, load_comparison, open_comparison
from deftune.comparison.process import Request, Requests
from deftune.comparison.schedule import Children
from deftune.comparison.worker import FLAGS, ProcessState
from deftune.training.data_record import fingerprint
from deftune.training.preparation import prepare
from deftune.training.reuse import copy_model
from deftune.training.stopping import StopSignal, ask_to_stop
from tiny_comparison import comparison_at, content, save_model, write

REQUEST = Request(1.5, "comparisons/a b", "weak/nll/lr1-s0", False)
CLOCKS = {"step_seconds", "tokens_per_second", "memory_gib"}
LORA = {"model": {"lora": {"r": 4, "alpha": 8, "dropout": 0.1, "target_modules": "all-linear"}},
        "train": {"precision": "bf16", "gradient_checkpointing": True}}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


def measured(cell: Cell) -> dict:
    """Everything that a cell has measured, and the records of its run but for clocks and memory."""
    assert cell.is_finished, (cell.folder / "log.txt").read_text()
    found = {name: (cell.folder / "eval-tasks" / f"{name}.jsonl").read_text() for name in ("samples", "graded")}
    found["tokens"] = parquet.read_table(cell.folder / "tokens.parquet").to_pydict()
    found["metrics"] = [{k: v for k, v in r.items() if k not in CLOCKS} for r in cell.run.read_metrics()]
    return found


def four_regimes(folder: Path, model: Path) -> list[Cell]:
    """Full and LoRA, each twice: a cell comes after one of another kind, and repeats an earlier one."""
    what = content(model, folder / "grid") | {"seeds": [0], "objectives": ["deft"], "base": False, "keep_models": False}
    plain = what["regimes"]["weak"]
    kinds = {"a": plain, "b": plain | LORA, "c": plain, "d": plain | LORA}
    what["regimes"] = {name: copy.deepcopy(regime) for name, regime in kinds.items()}
    what["train"] |= {"save_steps": 100}
    folder.mkdir()
    return load_comparison(write(folder / "compare.yaml", what)).cells()


@pytest.mark.long
def test_a_later_cell_of_a_process_is_bitwise_that_of_a_new_process(tmp_path, model):
    cells = four_regimes(tmp_path / "shared", model)
    open_comparison(cells[0].comparison)
    assert [state for _, state in Children(1)(cells, lambda cell: True)] == ["finished"] * 4
    full, lora, full_again, lora_again = map(measured, cells)
    assert full == full_again and lora == lora_again and full["metrics"] != lora["metrics"]
    for number, cell in enumerate(four_regimes(tmp_path / "alone", model)[2:], 2):
        command = [sys.executable, "-m", "deftune", "compare", "run", str(tmp_path / "alone" / "compare.yaml")]
        subprocess.run([*command, "--cell", cell.name], check=True, capture_output=True)
        assert measured(cell) == measured(cells[number])
    logs = [(cell.folder / "log.txt").read_text() for cell in cells]
    assert all("deftune" not in log and f"{cell.folder}/eval-tasks: " in log for cell, log in zip(cells, logs))
    starts = [cell.state()["start_seconds"] for cell in cells]
    assert starts[0] > max(starts[1:])  # the imports, once


def test_the_data_is_read_once_and_the_model_loaded_once(tmp_path, model, monkeypatch):
    comparison = comparison_at(tmp_path, model, seeds=[0], keep_models=False)
    calls = []
    for name in ("read_data", "load_model"):
        real = getattr(sys.modules["deftune.training.reuse"], name)
        monkeypatch.setattr(
            f"deftune.training.reuse.{name}", lambda *a, real=real, name=name, **k: calls.append(name) or real(*a, **k)
        )
    shared, state, living = Shared(), ProcessState(), []
    for cell in comparison.cells():
        assert run_cell(cell, shared=shared) == "finished"
        state.restore()
        living.append(sum(issubclass(type(thing), torch.nn.Module) for thing in gc.get_objects()))
    assert len(set(living)) == 1  # the kept model, and no trained one
    assert calls == ["load_model", "read_data"]  # of the untuned model's cell, and of the first tuned one


def test_compiled_layers_serve_every_cell_of_a_regime_and_keep_no_trained_model(tmp_path, model, monkeypatch):
    from torch._dynamo.utils import counters

    compile_it = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *a, **k: compile_it(*a, **k, backend="aot_eager"))
    fast = {"compile": "layers", "attention": "varlen", "precision": "bf16", "weights": "bfloat16_with_masters"}
    what = content(model, tmp_path / "grid") | {"seeds": [0], "objectives": ["nll", "deft", "eaft"], "base": False}
    what["keep_models"] = False
    what["train"] |= fast
    comparison = load_comparison(write(tmp_path / "compare.yaml", what))
    shared, state, graphs, living = Shared(), ProcessState(), [], []
    for cell in comparison.cells():
        state.restore(keep_compiled=bool(graphs))
        assert run_cell(cell, shared=shared) == "finished"
        graphs.append(counters["stats"]["unique_graphs"])
        state.restore(keep_compiled=True)
        living.append(sum(issubclass(type(thing), torch.nn.Module) for thing in gc.get_objects()))
    assert graphs[0] > 0 and len(set(graphs)) == 1, graphs
    assert max(living) == living[0], living  # what other tests of this process have left may go meanwhile
    state.restore()


@pytest.mark.parametrize("change", [{"train": {"seed": 1}}, {"data": {"max_length": 400}}, {"data": {"holdout": 0.3}}])
def test_data_is_shared_only_if_it_is_the_same(tmp_path, model, change):
    """The seed of the training does not change the rows, unless it chooses those that are held out."""
    (cell,) = comparison_at(tmp_path, model, seeds=[0], objectives=["deft"], base=False).cells()
    config, shared = cell.config, Shared()
    first = shared.prepare(config, lambda _: None)
    content = json.loads(config.model_dump_json())
    for section, values in change.items():
        content[section] |= values
    other = RunConfig.model_validate(content)
    second = shared.prepare(other, lambda _: None)
    assert (second.train is first.train) is ("train" in change)
    assert second.config is other and fingerprint(second) == fingerprint(prepare(other, lambda _: None))


def test_a_copy_of_a_model_is_as_it_was_loaded(model):
    loaded = load_model(str(model))
    weights = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    used = copy_model(loaded, torch.device("cpu"))
    getattr(used, "activation_checkpointing_enable", used.gradient_checkpointing_enable)()
    used.train()
    used.config.use_cache = False
    used.generation_config.eos_token_id = 99
    used(input_ids=torch.arange(4)[None], labels=torch.arange(4)[None]).loss.backward()
    torch.optim.SGD(used.parameters(), 1.0).step()
    fresh = copy_model(loaded, torch.device("cpu"))
    assert (
        type(fresh) is type(loaded)
        and not fresh.training
        and not any(getattr(m, "gradient_checkpointing", 0) for m in fresh.modules())
    )
    assert fresh.config.to_dict() == loaded.config.to_dict() and fresh.config.use_cache
    assert fresh.generation_config.eos_token_id == loaded.generation_config.eos_token_id != 99
    assert all(tensor.equal(weights[name]) for name, tensor in fresh.state_dict().items())
    assert all(p.grad is None and p.requires_grad and p.is_leaf for p in fresh.parameters())
    tied = fresh.get_output_embeddings().weight is fresh.get_input_embeddings().weight
    assert tied is (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight)
    kept = {p.data_ptr() for p in loaded.parameters()}
    assert kept.isdisjoint(p.data_ptr() for p in fresh.parameters())


def test_a_model_too_large_to_keep_is_loaded_for_each_run(model, monkeypatch):
    loads = []
    monkeypatch.setattr("deftune.training.reuse.load_model", lambda *a, **k: loads.append(a) or load_model(*a, **k))
    monkeypatch.setattr("deftune.training.reuse.room_to_keep", lambda: 1000)
    shared = Shared()
    first, second = shared.load(str(model)), shared.load(str(model))
    assert len(loads) == 2 and first is not second
    monkeypatch.setattr("deftune.training.reuse.room_to_keep", lambda: 1 << 40)
    third, fourth = shared.load(str(model)), shared.load(str(model))
    assert len(loads) == 3 and third is not fourth


def test_the_kept_model_is_freed_before_another_is_loaded(model, monkeypatch):
    freed, kept = [], []

    def load(*arguments, **options):
        freed.append([one() is None for one in kept])
        loaded = load_model(*arguments, **options)
        kept.append(weakref.ref(loaded))
        return loaded

    monkeypatch.setattr("deftune.training.reuse.load_model", load)
    shared = Shared()
    shared.load(str(model))
    shared.load(str(model))
    assert freed == [[]]
    shared.load(str(model), dtype="bfloat16")
    assert freed == [[], [True]]


@pytest.mark.parametrize("when", ["before", "training", "told", "saving", "after"])
def test_the_end_of_requests_is_never_a_second_signal(monkeypatch, when):
    """A cell that was told to stop, and loses whoever told it, saves. Otherwise the end stops it, as SIGTERM does."""
    killed, stop = [], StopSignal()
    monkeypatch.setattr(StopSignal, "last", None)
    monkeypatch.setattr("deftune.comparison.process.os.read", lambda *_: b"")
    monkeypatch.setattr("os.kill", lambda *what: killed.append(what))

    def end() -> None:
        requests = Requests()
        requests.stop = ask_to_stop
        requests.put(REQUEST)
        requests.read()

    if when == "before":
        end()
    with stop.handling():
        if when in ("told", "saving"):
            signal.raise_signal(signal.SIGTERM)
        if when in ("training", "told"):
            end()
            end()
    if when in ("saving", "after"):  # of a model in memory: its checkpoint is written here
        end()
    assert stop.received is (when in ("training", "told", "saving"))
    assert killed == ([] if stop.received else [(os.getpid(), signal.SIGTERM)])


@pytest.mark.parametrize(("finished", "kills"), [(1, 0), (0, 1)])
def test_the_end_of_requests_stops_only_a_process_with_a_cell(monkeypatch, finished, kills):
    line = f"{json.dumps(asdict(REQUEST))}\n".encode()
    killed, pieces, requests = [], [line[:20], line[20:], b""], Requests()
    requests.stop = ask_to_stop
    monkeypatch.setattr(StopSignal, "last", None)
    monkeypatch.setattr("os.kill", lambda *what: killed.append(what))

    def read(*_) -> bytes:
        if len(pieces) == 1:
            for _ in range(finished):
                requests.task_done()
        return pieces.pop(0)

    monkeypatch.setattr("deftune.comparison.process.os.read", read)
    requests.read()
    assert requests.get() == REQUEST and requests.get() is None
    assert len(killed) == kills


OTHER = {"default dtype": torch.float64, "deterministic algorithms": 1, "float32 matmul precision": "high",
         "working folder": "/"}  # fmt: skip


def test_flags_that_a_cell_changes_are_restored():
    state = ProcessState()
    try:
        for name, (read, set_to) in FLAGS.items():
            before = read()
            set_to(OTHER.get(name, before + 1 if name == "threads" else not before))
            assert read() != before, name
        state.restore()
        assert {name: read() for name, (read, _) in FLAGS.items()} == state.flags
    finally:
        for name, (_, set_to) in FLAGS.items():
            set_to(state.flags[name])


def test_environment_and_seed_are_restored(monkeypatch):
    monkeypatch.setenv("DEFTUNE_TEST_KEPT", "1")
    state = ProcessState()
    first = (state.restore(), torch.rand(3))[1]
    os.environ["DEFTUNE_TEST_KEPT"], os.environ["DEFTUNE_TEST_NEW"] = "2", "3"
    torch.rand(5)
    state.restore()
    assert os.environ["DEFTUNE_TEST_KEPT"] == "1" and "DEFTUNE_TEST_NEW" not in os.environ
    assert torch.rand(3).equal(first)


def test_cell_json_has_the_seconds_of_the_start(tmp_path, model):
    (cell,) = comparison_at(tmp_path, model, seeds=[0], objectives=["deft"], base=False).cells()
    run_cell(cell, start_seconds=100.0)
    state = json.loads((cell.folder / "cell.json").read_text())
    assert state["start_seconds"] == 100.0 < state["overhead_seconds"]
