"""verl's SFT trainer with deftune's objectives, on a CPU in place of a GPU, against a plain float32 loop."""

import functools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import deftune
from deftune import Context
from deftune.data.encoding import end_tokens_of

pytest.importorskip("verl", reason="verl is not installed; its environment is described in .ci/stacks.d/verl.txt")

import pandas
import transformers
from omegaconf import OmegaConf

from deftune.adapters.verl import first_step_line, quoted, settings
from deftune.adapters.verl_loss import choose_source
from deftune.selftest import tiny

STEPS, BATCH, ROWS = 20, 8, 64
HERE = Path(__file__).parent
OBJECTIVES = ["nll", "linear", "cayley", "deft", "deft | floor(0.2)", "eaft", "eaft(norm=full)", "linear | eos(nll)",
              "deft | warmup(0.3)", "clip(1)", "deft | mean_one"]  # fmt: skip
COLUMNS = ["nll", "deft", "mile"]  # trained once more from verl's columns instead of its logits
PADDED_PACKS = ["model.use_remove_padding=True", "engine.pad_to_length=True", "engine.pad_to_length_bucket=64"]
HARMS = {  # what tests/adapters/verl_on_cpu.py does to verl: the error
    "ignore_the_loss": "the engine did not call the objective's loss",
    "backpropagate_another_loss": "the engine backpropagated 0 of 4 losses",
    "show_other_logits": "the gradient at the model's output differs from gate x error by ",
    "add_a_hidden_loss": "the gradient at the model's output differs from gate x error by ",
    "divide_by_another_count": "the gradient at the model's output differs from gate x error by 3 (relative)",
    "leave_out_tokens": " supervised tokens of a rank",
    "keep_verls_loss": "verl replaced the objective by another loss, functools.partial(<function sft_loss",
}
PARALLEL = ["model.use_remove_padding=True", "engine.ulysses_sequence_parallel_size=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verl")
    text = [message["content"] for row in tiny.conversations(ROWS) for message in row["messages"]]
    tokenizer = tiny.make_tokenizer([*text, "user\nassistant\nsystem\n"], size=320)
    tiny.save_model(folder / "model", tokenizer, gain=20.0)  # an untrained model's gates are all alike
    pandas.DataFrame(tiny.conversations(ROWS)).to_parquet(folder / "rows.parquet")
    return folder


def overrides(folder, *more):
    return [
        f"model.path={folder}/model", f"data.train_files={folder}/rows.parquet", f"data.train_batch_size={BATCH}",
        "data.micro_batch_size_per_gpu=2", "data.use_dynamic_bsz=False", "data.num_workers=0", "engine.strategy=fsdp2",
        "+engine.mixed_precision.param_dtype=fp32", "engine.use_torch_compile=False", "model.use_remove_padding=False",
        "+model.override_config.attn_implementation=sdpa", "trainer.device=cpu", "trainer.logger=[file]",
        f"trainer.total_training_steps={STEPS}", "trainer.total_epochs=3", "trainer.resume_mode=disable",
        "checkpoint.save_contents=[extra]", f"trainer.default_local_dir={folder}/checkpoints",
        f"hydra.run.dir={folder}/hydra", *more,
    ]  # fmt: skip


def train(folder, ranks, entries):
    """Run the entries in one set of processes (0 ranks: Ray's); {name: [metrics of each step], or an error's text}."""
    work = folder / f"ranks{ranks}-{len(entries)}"
    work.mkdir()
    (work / "runs.json").write_text(json.dumps(entries))
    paths = [str(HERE), str(Path(deftune.__file__).parents[1])]
    environment = os.environ | {
        "PYTHONPATH": ":".join(paths), "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu", "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1",
    }  # fmt: skip
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    command = [sys.executable, *torchrun, str(HERE / "verl_on_cpu.py"), "runs.json"]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return {entry["name"]: outcome(work / entry["name"]) for entry in entries} | {
        "output": done.stdout, "updated": {path.stem for path in work.glob("*.updated")},
    }  # fmt: skip


def outcome(path):
    error = path.with_name(path.name + ".error")
    if error.exists():
        return error.read_text()
    lines = path.with_name(path.name + ".jsonl").read_text().splitlines()
    return [json.loads(line)["data"] for line in lines]


@pytest.fixture(scope="module")
def one_rank(folder):
    """Trainings in one process: every objective, the columns, harms, and other settings, by name."""
    entries = [{"name": o, "args": overrides(folder, f"deft.objective={o}")} for o in OBJECTIVES]
    entries += [
        {"name": f"columns {o}", "args": overrides(folder, f"deft.objective={o}", *PADDED_PACKS)} for o in COLUMNS
    ]
    entries += [
        {"name": "stock", "main": "verl", "args": overrides(folder)},
        {"name": "packed", "args": overrides(folder, "model.use_remove_padding=True")},
        {"name": "validated", "args": overrides(folder, f"data.val_files={folder}/rows.parquet",
                                                "trainer.total_training_steps=2", "deft.objective=deft | mean_one")},
        {"name": "dynamic", "args": overrides(folder, "data.use_dynamic_bsz=True", "data.max_token_len_per_gpu=200")},
        {"name": "fused deft", "args": overrides(folder, "model.use_fused_kernels=True", "deft.objective=deft")},
        *({"name": harm, "harm": harm, "args": overrides(folder, "trainer.total_training_steps=3")}
          for harm in HARMS),
        {"name": "unchecked", "main": "verl", "harm": "ignore_the_loss", "args": overrides(folder)},
        {"name": "bfloat16", "args": overrides(folder, "engine.mixed_precision.param_dtype=bf16")},
        # last: verl changes the model's class for its fused kernels
        {"name": "fused harm", "harm": "divide_by_another_count",
         "args": overrides(folder, "model.use_fused_kernels=True", "deft.objective=cayley")},
        {"name": "fused", "args": overrides(folder, "model.use_fused_kernels=True", "deft.objective=cayley")},
        {"name": "fused bfloat16", "args": overrides(folder, "model.use_fused_kernels=True", "deft.objective=cayley",
                                                     "engine.mixed_precision.param_dtype=bf16")},
    ]  # fmt: skip
    return train(folder, 1, entries)


@functools.cache
def batches(folder, ranks=1):
    """[(input_ids, loss_mask) of the rows] of each step, from verl's own dataset and sampler."""
    from torch.utils.data import DistributedSampler
    from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    config = OmegaConf.create({"max_length": 1024, "truncation": "error", "pad_mode": "no_padding"})
    dataset = MultiTurnSFTDataset(str(folder / "rows.parquet"), tokenizer, config)
    found = []
    for epoch in range(3):
        orders = []
        for rank in range(ranks):
            sampler = DistributedSampler(dataset, num_replicas=ranks, rank=rank, shuffle=True, drop_last=True)
            sampler.set_epoch(epoch)
            orders.append(list(sampler))
        for start in range(0, ROWS // ranks, BATCH // ranks):
            found.append([dataset[i] for order in orders for i in order[start : start + BATCH // ranks]])
    return [[(row["input_ids"], row["loss_mask"]) for row in batch] for batch in found[:STEPS]]


def reference(folder, objective, ranks=1):
    """[(loss, gradient norm)] of a plain loop: one forward per step, deftune.token_loss, clip, AdamW."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01)
    special_ids = tuple(end_tokens_of(tokenizer).values())
    trajectory = []
    for step, rows in enumerate(batches(folder, ranks)):
        pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        ids = pad([row for row, _ in rows])
        labels = pad([row.masked_fill(mask == 0, -100) for row, mask in rows], padding_value=-100)
        attention = pad([torch.ones_like(row) for row, _ in rows])
        logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1]
        context = Context(progress=step / STEPS, special_ids=special_ids)
        loss = deftune.token_loss(logits, labels[:, 1:], objective, context=context)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        trajectory.append((loss.item(), norm.item()))
    return trajectory


def assert_same(metrics, expected):
    """Loss and gradient norm of every step; float32 sums in another order, 20 AdamW steps that amplify them."""
    assert isinstance(metrics, list), metrics
    found = [(step["train/loss"], step["train/grad_norm"]) for step in metrics if "train/loss" in step]
    assert len(found) == len(expected)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_trajectory_is_that_of_a_plain_loop(folder, one_rank, objective):
    """Four micro-batches a step in verl, one batch in the loop."""
    assert_same(one_rank[objective], reference(folder, objective))


@pytest.mark.parametrize("objective", COLUMNS)
def test_columns_of_verls_output_train_the_same(folder, one_rank, objective):
    assert_same(one_rank[f"columns {objective}"], reference(folder, objective))


@pytest.mark.smoke
def test_two_objectives_in_a_minute(folder):
    """A part of `test_the_trajectory_is_that_of_a_plain_loop`."""
    specs = ["nll", "deft | floor(0.2)"]
    found = train(folder, 1, [{"name": spec, "args": overrides(folder, f"deft.objective={spec}")} for spec in specs])
    for spec in specs:
        assert_same(found[spec], reference(folder, spec))
    assert "deftune: verl trains `deft | floor(0.2)`: loss " in found["output"]


def test_nll_is_verls_own_training(folder, one_rank):
    assert_same(one_rank["stock"], reference(folder, "nll"))


@pytest.mark.parametrize("objective", [o for o in OBJECTIVES if o != "nll"])
def test_no_objective_trains_nll(folder, one_rank, objective):
    """The comparison can fail: NLL's trajectory is far outside of the tolerance."""
    nll = torch.tensor([norm for _, norm in reference(folder, "nll")])
    trained = torch.tensor([step["train/grad_norm"] for step in one_rank[objective]])
    assert ((trained - nll).abs() / nll).max() > 1e-3  # a hundred times the tolerance


def test_other_batchings_train_the_same(folder, one_rank):
    for name in ("packed", "dynamic"):
        assert_same(one_rank[name], reference(folder, "deft"))
    assert_same(one_rank["fused"], reference(folder, "cayley"))


def test_validation_reports_the_objective(folder, one_rank):
    assert_same(one_rank["validated"], reference(folder, "deft | mean_one")[:2])
    assert math.isfinite(one_rank["validated"][-1]["val/loss"])


def test_the_first_step_is_reported(one_rank):
    lines = re.findall(r"verl trains `(.*)`: loss .* gradient verified from the logits to (.*)", one_rank["output"])
    assert {str(deftune.objective(spec)) for spec in OBJECTIVES} <= {name for name, _ in lines}
    errors = sorted(float(error) for _, error in lines)
    assert errors[-2] < 1e-6 < errors[-1] < 0.01  # the last one is in bfloat16
    assert not any("deft/" in key for step in one_rank["deft"] for key in step)


@pytest.mark.parametrize("harm", HARMS)
def test_a_verl_that_trains_something_else_is_an_error_before_the_first_update(one_rank, harm):
    assert HARMS[harm] in one_rank[harm]
    assert HARMS["divide_by_another_count"] in one_rank["fused harm"]
    assert one_rank["updated"] == {"unchecked"}  # verl's own trainer did update


def test_a_worker_that_does_not_check_is_an_error():
    with pytest.raises(RuntimeError, match=r"verl's engine was not checked in its first step.* than `deft`"):
        first_step_line({"loss": 1.0, "deft/loss": [[1.0]], "deft/nll": [[2.0]]}, deftune.objective("deft"))


def test_two_ranks(folder):
    """FSDP2 over two ranks, and sequence parallel, whose loss comes from verl's gathered columns."""
    specs = ["deft | floor(0.2)", "clip(1)"]
    entries = [{"name": spec, "args": overrides(folder, f"deft.objective={spec}")} for spec in specs]
    entries += [{"name": f"parallel {main}", "main": main, "args": overrides(folder, *more, *PARALLEL)}
                for main, more in (("verl", []), ("deftune", ["deft.objective=nll"]))]  # fmt: skip
    found = train(folder, 2, entries)
    for spec in specs:
        assert_same(found[spec], reference(folder, spec, ranks=2))
    # attention on a CPU knows no sequence parallel, so only verl's own training is a reference
    stock = [(step["train/loss"], step["train/grad_norm"]) for step in found["parallel verl"]]
    assert_same(found["parallel deftune"], stock)
    assert found["output"].count("gradient verified from the logits to ") == 3


def test_ray(folder):
    """Two workers of verl's Ray trainer, an objective of the whole step: the loss and its statistics live in them."""
    more = ["deft.ray=True", "trainer.n_gpus_per_node=2", "trainer.total_training_steps=3", "deft.objective=clip(1)"]
    found = train(folder, 0, [{"name": "ray", "args": overrides(folder, *more)}])
    assert_same(found["ray"], reference(folder, "clip(1)")[:3])
    assert re.search(r"deftune: verl trains `clip\(k=1\)`: .* gradient verified from the logits", found["output"])


# --- refusals ---------------------------------------------------------------------------------------------------------


def config(**changes):
    base = {"engine": {"strategy": "fsdp2"}, "model": {"use_fused_kernels": False, "mtp": {"enable_train": False}}}
    return OmegaConf.merge(OmegaConf.create(base), OmegaConf.from_dotlist([f"{k}={v}" for k, v in changes.items()]))


@pytest.mark.parametrize(
    ("changes", "objective", "message"),
    [
        ({"engine.strategy": "veomni"}, "deft", "engine.strategy=veomni is not supported"),
        ({"model.use_fused_kernels": True}, "deft", r"reads sum P\^2, which verl's fused kernels do not return"),
        ({"engine.ulysses_sequence_parallel_size": 2}, "eaft", "no whole logits with engine.ulysses_sequence_parallel"),
        ({"engine.strategy": "megatron"}, "eaft(k=5)", "no whole logits with engine.strategy=megatron"),
        ({"model.mtp.enable_train": True}, "nll", "multi-token heads with NLL"),
        ({"engine.strategy": "megatron", "engine.dynamic_context_parallel": True}, "nll", "dynamic_context_parallel"),
    ],
)
def test_refusals(changes, objective, message):
    with pytest.raises(ValueError, match=message):
        choose_source(config(**changes), deftune.objective(objective))


def test_refusals_reach_the_command(one_rank):
    assert one_rank["fused deft"].startswith("ValueError: deftune: `deft` reads sum P^2")


def test_source():
    assert choose_source(config(), deftune.objective("eaft")) == "logits"
    assert choose_source(config(**{"engine.strategy": "megatron"}), deftune.objective("deft")) == "columns"
    assert choose_source(config(**{"model.use_fused_kernels": True}), deftune.objective("mile")) == "columns"


def test_settings():
    assert settings({}) == {"objective": "deft", "ray": False}
    with pytest.raises(ValueError, match=r"unknown key deft\.objektive; known: deft\.objective, deft\.ray"):
        settings({"deft": {"objektive": "deft"}})


def test_specs_are_quoted_for_hydra():
    assert quoted("deft.objective=deft | eos(nll)") == 'deft.objective="deft | eos(nll)"'
    assert quoted('+deft.objective="deft"') == '+deft.objective="deft"'
    assert quoted("model.path=/a b") == "model.path=/a b"
