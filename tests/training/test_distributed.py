"""Ranks change nothing: DDP and FSDP2, launched as users do, equal one process."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from run_process import run_ranks, start_ranks
from safetensors.torch import load_file
from small import deviation, make_model, make_rows, oracle, padded

import deftune
from deftune.artifacts import checkpoints
from deftune.artifacts.config import ConfigError, render_yaml
from deftune.artifacts.models import load_model, resolve_model
from deftune.artifacts.runs import Run
from deftune.cli import train as cli_train
from deftune.data.examples import Encoded, Examples
from deftune.objectives import IGNORE_INDEX, Context
from deftune.tokens.head import shifted
from deftune.training import train
from deftune.training.data_record import compare_ranks
from deftune.training.machine import check_config, leave_ranks
from deftune.training.reuse import Reuse
from deftune.training.train import Outcome, train_run
from ranks import run_ranks as fork_ranks
from tolerances import tolerance
from waiting import HANG_SECONDS, wait_for

DRIVERS = Path(__file__).parent / "drivers"
FLOAT64, FLOAT32 = 1e-10, 1e-5  # sums over ranks in another order
SPECS = ["nll", "deft", "mile(1)", "clip"]


TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# accelerate's `--cpu` would start one process, whatever --num_processes says
ACCELERATE = ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--mixed_precision", "no",
              "--num_machines", "1", "--dynamo_backend", "no")  # fmt: skip


def launch(launcher: tuple[str, ...], *command: object) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    whole = [sys.executable, "-m", *launcher, *map(str, command)]
    done = subprocess.run(whole, env=environment, text=True, capture_output=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


def launch_training(how: str, config: Path) -> None:
    """`deftune train` over two ranks."""
    if how == "fsdp":
        launch(TORCHRUN, DRIVERS / "train_sharded.py", config)
    else:
        launch({"torchrun": TORCHRUN, "accelerate": ACCELERATE}[how], "-m", "deftune", "train", config)


def count_gloo_threads() -> int:
    found = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            found += "gloo" in (task / "comm").read_text()
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="the names of threads are in /proc")
def test_a_run_leaves_its_process_group(monkeypatch):
    """Whatever ends inside one has threads left, and may abort after all its work."""
    before = count_gloo_threads()

    def train_run(config, **_):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = SimpleNamespace(group=dist.group.WORLD)
        model.itself = model  # as DistributedDataParallel is, so that only a collection frees it
        dist.barrier()  # a thread has its name once it works
        assert count_gloo_threads() > before
        return Outcome("finished", 1, None)

    monkeypatch.setattr(train, "train_run", train_run)
    model, data = SimpleNamespace(trust_remote_code=False), SimpleNamespace(tasks=[])
    monkeypatch.setattr(cli_train, "read_config", lambda *_: SimpleNamespace(model=model, data=data))
    flags = dict.fromkeys(("skip_bad_rows", "no_cache", "dry_run", "trust_remote_code", "restart", "profile"), False)
    assert cli_train.run_train(argparse.Namespace(set=[], config=None, **flags)) == 0
    assert not dist.is_initialized()
    leave_ranks()  # alone: nothing to leave
    for _ in range(100):  # the kernel may show a thread for a moment after its end
        if count_gloo_threads() <= before:
            return
        time.sleep(0.1)
    pytest.fail("threads of gloo are left")


def start_with_rows(rank: int, folder: str, rows: list[list[int]]) -> None:
    """A rank whose files hold the row ``rows[rank]``."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=len(rows))
    examples = Examples([Encoded(rows[rank], [IGNORE_INDEX, *rows[rank][1:]], "a.jsonl:1", "a.jsonl")])
    with pytest.raises(ValueError, match="rank 1 has other rows than rank 0") if rows[0] != rows[1] else nullcontext():
        compare_ranks(SimpleNamespace(sequences=examples, eval=None))
    dist.destroy_process_group()


def test_ranks_with_different_rows_are_refused(tmp_path):
    """Every machine of a run may have files of its own, or a file changes while the ranks start."""
    for name, rows in (("same", [[1, 2, 3], [1, 2, 3]]), ("other", [[1, 2, 3], [1, 2, 4]])):
        (tmp_path / name).mkdir()
        fork_ranks(start_with_rows, (str(tmp_path / name), rows), 2)


# --- float64: the gradients of every step -----------------------------------------------------------------------------


def unequal_rows() -> list[dict[str, list[int]]]:
    """37 rows: 8 a step and 5 in the last; some micro-batches, and all of the second rank's in step 2, say nothing."""
    rows = make_rows(37)
    for place in (2, 3, 10, 11, 14, 15, 20):
        rows[place]["labels"] = [IGNORE_INDEX] * len(rows[place]["labels"])
    return rows


def check_steps(folder: Path, how: str, ranks: int, micro: int, accumulated: int, specs: list[str]) -> None:
    rows, held_out = unequal_rows(), make_rows(13, seed=5)
    torch.save((rows, held_out), folder / "rows.pt")
    script = DRIVERS / "float64_steps.py"
    run_ranks(ranks, script, folder, how, micro, accumulated, *specs, output=folder / "output")
    found = torch.load(folder / "found.pt")
    size = ranks * micro * accumulated
    for (spec, tied), run in found.items():
        model = make_model(tie_word_embeddings=tied)
        steps = [rows[start : start + size] for start in range(0, len(rows), size)]
        assert len(run["steps"]) == len(run["records"]) == len(steps) == 5
        for step, gradients, record in zip(steps, run["steps"], run["records"]):
            loss, expected = oracle(model, step, spec, Context())
            assert deviation(gradients, expected) <= FLOAT64, (spec, tied)
            assert abs(record["loss"] - loss) <= FLOAT64 * max(1, loss), (spec, tied)
            supervised = sum(label != IGNORE_INDEX for row in step for label in row["labels"][1:])
            assert record["tokens"] == supervised, (spec, tied)
        batch = padded(held_out)
        targets = shifted(batch.pop("labels"))
        with torch.no_grad():
            logits = model(**batch).logits
        for name, objective in (("eval_loss", spec), ("eval_nll", "nll")):
            value = deftune.token_loss(logits, targets, objective).item()
            assert abs(run["eval"][name] - value) <= FLOAT64 * max(1, value), (spec, name)
        assert run["eval"]["eval_tokens"] == int((targets != IGNORE_INDEX).sum())
    assert len(found) == 2 * len(specs)


def test_two_ranks_of_ddp_are_exact(tmp_path):
    check_steps(tmp_path, "ddp", ranks=2, micro=2, accumulated=2, specs=SPECS)


@pytest.mark.long
def test_two_ranks_of_fsdp2_are_exact(tmp_path):
    check_steps(tmp_path, "fsdp", ranks=2, micro=2, accumulated=2, specs=SPECS)


@pytest.mark.slow
def test_four_ranks_of_ddp_are_exact(tmp_path):
    check_steps(tmp_path, "ddp", ranks=4, micro=1, accumulated=2, specs=["deft", "mile(1)"])


# --- float32: whole runs, as they are launched ------------------------------------------------------------------------


def write_config(config, path: Path) -> Path:
    path.write_text(render_yaml(config), encoding="utf-8")
    return path


def assert_same_run(one: Path, other: Path) -> None:
    def records(run: Path) -> list[dict]:
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]

    a, b = load_file(one / "model" / "model.safetensors"), load_file(other / "model" / "model.safetensors")
    assert a.keys() == b.keys()
    assert max(float((a[name] - b[name]).abs().max()) for name in a) <= FLOAT32
    pairs = list(zip(records(one), records(other), strict=True))
    for x, y in pairs:
        assert (x["step"], x["kind"]) == (y["step"], y["kind"])
        name = "loss" if x["kind"] == "train" else "eval_loss"
        assert abs(x[name] - y[name]) <= FLOAT32 * max(1, abs(x[name]))
        assert x["tokens" if x["kind"] == "train" else "eval_tokens"] == y["tokens" if "loss" in y else "eval_tokens"]
    assert len(pairs) >= 5
    assert " 2 ranks x " in (other / "data.json").read_text()


# 53 rows in steps of 8: the last one is short
RUN = {
    "train.micro_batch_size": 2,
    "train.max_steps": None,
    "train.epochs": 1,
    "data.holdout": 0.1,
    "train.save_steps": 3,
}


def quietly(config) -> None:
    assert train_run(config, Console(quiet=True)).state == "finished"


@pytest.mark.long
@pytest.mark.parametrize(
    "launcher, spec, packing",
    [("torchrun", "clip", False), pytest.param("accelerate", "mile(1)", True, marks=pytest.mark.slow)],
)
def test_a_launched_run_equals_one_process(launcher, spec, packing, tmp_path, make_config):
    options = {**RUN, "objective": spec, "data.packing": packing}
    if packing:  # fewer sequences than rows
        options |= {"train.batch_size": 6, "train.micro_batch_size": 3}
    quietly(make_config(tmp_path / "one", options))
    path = write_config(make_config(tmp_path / "two", options), tmp_path / "two.yaml")
    launch_training(launcher, path)
    assert_same_run(tmp_path / "one", tmp_path / "two")


@pytest.mark.long
def test_a_sharded_run_equals_one_process_and_resumes(tmp_path, make_config):
    options = {**RUN, "objective": "deft"}
    quietly(make_config(tmp_path / "one", options))
    config = make_config(tmp_path / "two", {**options, "train.fsdp": True})
    path = write_config(config, tmp_path / "two.yaml")
    run_ranks(2, DRIVERS / "train_sharded.py", path, output=tmp_path / "output")
    assert_same_run(tmp_path / "one", tmp_path / "two")
    saved = json.loads((tmp_path / "two" / "model" / "config.json").read_text())
    assert saved["architectures"] == ["LlamaForCausalLM"]
    run = tmp_path / "two"
    shutil.copytree(run, tmp_path / "before")
    last = max(int(folder.name.split("-")[1]) for folder in (run / "checkpoints").glob("checkpoint-*"))
    shutil.rmtree(run / "checkpoints" / f"checkpoint-{last}")
    shutil.rmtree(run / "model")
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps({**status, "state": "stopped"}))
    run_ranks(2, DRIVERS / "train_sharded.py", path, output=tmp_path / "output")
    assert_same_run(tmp_path / "before", run)


def stop_after(run: Path, step: int) -> None:
    """Leave the run as one that was killed after the checkpoint of ``step``."""
    for folder in (run / "checkpoints").glob("checkpoint-*"):
        if int(folder.name.split("-")[1]) > step:
            shutil.rmtree(folder)
    shutil.rmtree(run / "model")
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps({**status, "state": "stopped"}))


def assert_same_steps(one: Path, other: Path) -> None:
    """The same losses and the same last weights."""
    a, b = load_file(one / "model" / "model.safetensors"), load_file(other / "model" / "model.safetensors")
    assert a.keys() == b.keys() and max(float((a[name] - b[name]).abs().max()) for name in a) <= FLOAT32
    losses = [[r["loss"] for r in Run(run).read_metrics() if "loss" in r] for run in (one, other)]
    assert len(losses[0]) >= 5
    for x, y in zip(*losses, strict=True):
        assert abs(x - y) <= FLOAT32 * max(1, abs(x))


@pytest.mark.long
@pytest.mark.parametrize("first, then", [(2, 1), (1, 2)])
def test_a_sharded_run_resumes_on_another_number_of_ranks(first, then, tmp_path, make_config):
    """The checkpoint of FSDP2 over two ranks continues in one process, and the other way round."""
    options = {**RUN, "objective": "deft", "train.keep": 10}
    quietly(make_config(tmp_path / "one", options))
    config = make_config(tmp_path / "two", {**options, "train.fsdp": True})
    path = write_config(config, tmp_path / "two.yaml")

    def train(ranks: int) -> None:
        if ranks == 1:
            quietly(config)
        else:
            run_ranks(ranks, DRIVERS / "train_sharded.py", path, output=tmp_path / "output")

    train(first)
    assert_same_steps(tmp_path / "one", tmp_path / "two")
    saved = tmp_path / "two" / "checkpoints" / "checkpoint-3"
    assert len([*(saved / "distributed").glob("*.distcp")]) == first
    stop_after(tmp_path / "two", 3)
    train(then)
    assert_same_steps(tmp_path / "one", tmp_path / "two")
    facts = (tmp_path / "two" / "data.json").read_text()
    assert f"{then} rank" in facts


# --- checkpoints that are written while training goes on ---


@pytest.mark.long
def test_shards_are_those_of_the_moment_of_saving(tmp_path):
    run_ranks(2, DRIVERS / "async_shards.py", tmp_path / "checkpoint", output=tmp_path / "output")


ASYNC = {**RUN, "objective": "deft", "train.save_steps": 2, "train.fsdp": True, "train.async_checkpoints": True}


@pytest.mark.long
def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path, make_config):
    quietly(make_config(tmp_path / "one", {**RUN, "objective": "deft"}))
    run = tmp_path / "two"
    path = write_config(make_config(run, ASYNC), tmp_path / "two.yaml")
    started = start_ranks(2, DRIVERS / "train_held.py", "held", "4", path, output=tmp_path / "output")
    written = run / "checkpoints" / ".saving-4" / "checkpoint-4" / "distributed"

    def is_past() -> bool:  # all shards of step 4 are on the disk, not sealed, and step 5 was taken
        shards = all((written / f"written-{rank}").exists() for rank in (0, 1))
        return shards and max(record["step"] for record in Run(run).read_metrics()) >= 5

    wait_for(lambda: is_past() or any(rank.process.exitcode is not None for rank in started))
    for rank in started:
        assert rank.process.exitcode is None, rank.output.read_text()[-4000:]
        rank.process.kill()
        rank.process.join()
    found = checkpoints.latest(run / "checkpoints", pytest.fail)
    assert found is not None and found.name == "checkpoint-2" and written.is_dir()
    run_ranks(2, DRIVERS / "train_sharded.py", path, output=tmp_path / "output")
    assert f"resuming from {found}" in (tmp_path / "output-0").read_text()
    assert_same_run(tmp_path / "one", run)
    left = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert left == ["checkpoint-6", "checkpoint-7"] and all(checkpoints.verify(run / "checkpoints" / n) for n in left)


@pytest.mark.long
def test_a_full_disk_while_a_checkpoint_is_written(tmp_path, make_config):
    run = tmp_path / "two"
    path = write_config(make_config(run, ASYNC), tmp_path / "two.yaml")
    started = start_ranks(2, DRIVERS / "train_held.py", "full", "4", path, output=tmp_path / "output")
    assert started[0].ended() == 2
    started[1].process.kill()
    started[1].process.join()
    text = started[0].output.read_text()
    assert "the checkpoint of step 4 could not be written (No space left on device); the last one, checkpoint-2" in text
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["checkpoint-2"]


def test_async_checkpoints_need_shards(tmp_path, make_config):
    with pytest.raises(ValueError, match=r"train.async_checkpoints: needs train.fsdp or train.tensor_parallel"):
        make_config(tmp_path, {"train.async_checkpoints": True})


@pytest.mark.long
def test_hybrid_sharding_equals_one_process_and_resumes(tmp_path, make_config):
    """Two copies of the weights, each over two ranks; resumed on two ranks that hold one copy."""
    options = {**RUN, "objective": "deft", "train.keep": 10}
    quietly(make_config(tmp_path / "one", options))
    config = make_config(tmp_path / "two", {**options, "train.fsdp": True, "train.shard_size": 2})
    path = write_config(config, tmp_path / "two.yaml")
    run_ranks(4, DRIVERS / "train_sharded.py", path, output=tmp_path / "output")
    assert "FSDP2: 2 copies of the weights, each over 2 ranks" in (tmp_path / "two" / "data.json").read_text()
    assert_same_steps(tmp_path / "one", tmp_path / "two")
    stop_after(tmp_path / "two", 3)
    run_ranks(2, DRIVERS / "train_sharded.py", path, output=tmp_path / "output")
    assert_same_steps(tmp_path / "one", tmp_path / "two")


@pytest.mark.long
@pytest.mark.parametrize("spec", ["deft", *(pytest.param(name, marks=pytest.mark.slow) for name in ("nll", "eaft"))])
def test_a_divided_run_equals_one_process_and_resumes(spec, tmp_path, make_config):
    """Tensor parallel: 20 steps of two ranks that share layers and vocabulary; resumed on two ranks and on one."""
    options = {**RUN, "objective": spec, "train.max_steps": 20, "train.epochs": 1000, "train.save_steps": 18,
               "train.tensor_parallel": 2}  # fmt: skip
    config = make_config(tmp_path / "two", options)
    path = write_config(config, tmp_path / "two.yaml")
    quietly(make_config(tmp_path / "one", {**options, "train.tensor_parallel": 1}))
    run_ranks(2, DRIVERS / "train_divided.py", path, output=tmp_path / "output")
    assert "2 ranks share each layer and the vocabulary" in (tmp_path / "two" / "data.json").read_text()
    assert_same_steps(tmp_path / "one", tmp_path / "two")
    records = [Run(run).read_metrics() for run in (tmp_path / "one", tmp_path / "two")]
    for a, b in zip(*records, strict=True):
        for name in ("tokens", "input_tokens", "eval_tokens"):
            assert a.get(name) == b.get(name)
        for name in ("eval_loss", "nll", "grad_norm"):
            assert abs(a.get(name, 0) - b.get(name, 0)) <= FLOAT32 * max(1, a.get(name, 0)), name
    if spec == "deft":
        stop_after(tmp_path / "two", 18)
        run_ranks(2, DRIVERS / "train_divided.py", path, output=tmp_path / "output")
        assert_same_steps(tmp_path / "one", tmp_path / "two")
        stop_after(tmp_path / "two", 18)
        quietly(config)
        assert_same_steps(tmp_path / "one", tmp_path / "two")


def test_models_that_cannot_be_divided_are_refused(tmp_path, monkeypatch):
    from deftune.selftest import tiny

    folder = tiny.save_model(tmp_path, tiny.make_tokenizer())
    monkeypatch.setattr(transformers, "PreTrainedModel", object)
    with pytest.raises(
        ValueError, match=r"the Trainer of transformers 5\..* does not train divided layers; install 5.22"
    ):
        load_model(str(folder), tensor_parallel=2)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"3 ranks cannot share 4 attention heads and 2 key value heads .*most 2"):
        load_model(str(folder), tensor_parallel=3)


@pytest.mark.parametrize(
    "changes, ranks, message",
    [
        ({}, 4, "2 ranks share the model, and torchrun started 4; start as many, or one"),
        ({"train.fsdp": True}, 2, "cannot be combined with train.fsdp: both divide the weights; drop one"),
        ({"model.lora": {"r": 4}}, 2, "cannot be combined with model.lora: adapters are not divided"),
        ({"train.sparse": 0.1}, 2, "cannot be combined with train.sparse: a rank knows the mass of its own"),
        ({"train.compile": True}, 2, "cannot be combined with train.compile: it was not tried"),
        ({"objective": "clip"}, 2, "cannot be combined with objective: clip.* sums over the rows of all ranks"),
    ],
)
def test_wrong_tensor_parallel_runs_are_refused(changes, ranks, message, tmp_path, make_config, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setattr("deftune.training.machine.can_shard", lambda: True)
    options = {"train.batch_size": 8, "train.micro_batch_size": 2, "train.tensor_parallel": 2}
    with pytest.raises(ValueError, match=message):
        check_config(make_config(tmp_path, {**options, **changes}))


@pytest.mark.parametrize(
    "changes, ranks, message",
    [
        ({"train.fsdp": True, "train.shard_size": 3}, 4, "4 ranks cannot be divided into groups of 3"),
        ({"train.shard_size": 2}, 4, "needs train.fsdp=true"),
        ({"train.fsdp": True, "train.shard_size": 1}, 4, "1 shards nothing"),
    ],
)
def test_wrong_shard_sizes_are_refused(changes, ranks, message, tmp_path, make_config, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setattr("deftune.training.machine.can_shard", lambda: True)
    options = {"train.batch_size": 8, "train.micro_batch_size": 2}
    with pytest.raises(ValueError, match=message):
        check_config(make_config(tmp_path, {**options, **changes}))


# --- a real model: SmolLM2, its head tied to the embedding ------------------------------------------------------------

# torch's float32 norm of the embedding's 28 million gradients is itself 3e-5 off, and half as much over two shards
NORM = 5e-5
# of the way the weights went, 8e-5 in two steps: half a float32 ulp of a weight of 0.1 is 5e-5 of that
WAY = 1e-4


@pytest.fixture(scope="module")
def smollm2_alone(tmp_path_factory, make_config, chat_file):
    """One process: 8 rows of unequal lengths, two micro-batches a step, two steps; and the options of that run."""
    try:
        resolve_model("smollm2")
    except ValueError as error:
        pytest.skip(f"SmolLM2 is not here: {error}")
    options = {
        "model.name": "smollm2", "data.train": [{"path": str(chat_file), "limit": 8}], "train.learning_rate": 5e-5,
        "train.batch_size": 4, "train.micro_batch_size": 2, "train.max_steps": 2, "train.save_steps": 100,
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("smollm2") / "one"
    quietly(make_config(folder, options))
    return folder, options


def norm(tensors) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("how", ["torchrun", "accelerate", "fsdp"])
def test_smollm2_over_two_ranks_equals_one_process(how, tmp_path, make_config, smollm2_alone):
    (alone, options), run = smollm2_alone, tmp_path / "two"
    config = make_config(run, {**options, "train.fsdp": how == "fsdp"})
    launch_training(how, write_config(config, tmp_path / "two.yaml"))
    assert " 2 ranks x 2 x 1" in (run / "data.json").read_text()

    one, two = Run(alone).read_metrics(), Run(run).read_metrics()
    assert [record["step"] for record in one] == [record["step"] for record in two] == [1, 2]
    for a, b in zip(one, two):
        assert (a["tokens"], a["input_tokens"]) == (b["tokens"], b["input_tokens"])
        for name in ("loss", "nll", "p", "focus", "gate"):
            assert abs(a[name] - b[name]) <= tolerance("fused loss") * max(1, a[name]), name
        assert abs(a["grad_norm"] - b["grad_norm"]) <= NORM * a["grad_norm"]  # Adam would hide a wrong scale

    files = (Path(resolve_model("smollm2")), alone / "model", run / "model")
    start, a, b = (load_file(folder / "model.safetensors") for folder in files)
    assert a.keys() == b.keys() == start.keys() and "lm_head.weight" not in b
    way = norm(a[name] - start[name] for name in a)
    assert way > 0.1 and norm(a[name] - b[name] for name in a) <= WAY * way
    loaded = load_model(str(run / "model"))
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert torch.equal(loaded.get_output_embeddings().weight, b["model.embed_tokens.weight"])


def test_sharding_without_a_gpu_is_refused(tmp_path, make_config, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match=r"train.fsdp: accelerate shards over GPUs only and would run DDP here"):
        check_config(make_config(tmp_path, {"train.fsdp": True}))
    with pytest.raises(ConfigError, match=r"train.tensor_parallel: accelerate divides models among GPUs only"):
        check_config(make_config(tmp_path, {"train.tensor_parallel": 2}))


def test_ranks_share_no_kept_model(tmp_path, make_config, monkeypatch):
    """The kept model would be loaded before the ranks have their devices."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"^reuse: every rank of a distributed launch loads its own part"):
        train_run(make_config(tmp_path / "run", {}), reuse=Reuse())
    assert not (tmp_path / "run").exists()
