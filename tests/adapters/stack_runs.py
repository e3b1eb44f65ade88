"""Runs of other training stacks on a tiny model, and the plain loop that their trajectories are compared with."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import deftune
from deftune.objectives import IGNORE_INDEX, Context
from deftune.selftest import tiny
from deftune.tokens.head import shifted

OBJECTIVES = {
    "nll": "nll", "linear": "linear", "cayley": "cayley", "deft": "deft", "eaft": "eaft", "floor": "deft | floor(0.2)",
    "eos": "linear | eos(nll)", "warmup": "deft | warmup(0.2)",
}  # fmt: skip
STEPS = 20
LEARNING_RATE = 1e-3
CLIP = 1.0
TRAJECTORY = 1e-5  # of losses: float32 over 20 steps of Adam, rounding in another order
# of all weights, in norm: Adam moves a weight whose gradient is near 0 by its rounding, here one of 28,960
WEIGHTS = 2e-6


def needs_stack(package: str) -> pytest.MarkDecorator:
    """A mark that skips the tests of a stack where the stack is not installed."""
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed here; .ci/stacks builds its environment")


def make_files(folder: Path, cls=transformers.Qwen2ForCausalLM) -> tuple[Path, Path]:
    """(a model folder, a JSONL file of 60 conversations); weights large enough for the objectives to differ."""
    text = [message["content"] for row in tiny.conversations(60) for message in row["messages"]]
    tokenizer = tiny.make_tokenizer([*text, "user\nassistant\nsystem\n"], size=320)
    model = tiny.save_model(folder / "model", tokenizer, cls=cls, gain=20.0)
    return model, tiny.save_conversations(folder / "rows.jsonl")


def launch(folder: Path, stack: str, runs: dict[str, list[str]], ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """Run the stack in a process of its own, or one for each rank, one run after the other."""
    (folder / "runs.json").write_text(json.dumps(runs))
    script = [str(Path(__file__).parent / "drivers" / "recorded.py"), str(folder), stack, *runs]
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    hidden = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "DEFTUNE"))}
    environment = {**hidden, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
                   "ACCELERATE_USE_CPU": "true", "TOKENIZERS_PARALLELISM": "false", "DO_NOT_TRACK": "1"}  # fmt: skip
    return subprocess.run(
        [*command, *script], env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def read_run(folder: Path, name: str, ranks: int = 1) -> dict:
    """A recorded run; its steps hold the micro-batches of all ranks."""
    found = [torch.load(folder / f"{name}.{rank}.pt") for rank in range(ranks)]
    steps = [[batch for part in parts for batch in part] for parts in zip(*(run["steps"] for run in found))]
    return {**found[0], "steps": steps}


def plain_run(model_folder: Path, steps: list, spec: str, special_ids: tuple[int, ...]) -> tuple[list[float], dict]:
    """Losses and final weights of a loop without any trainer: all tokens of a step in one sum, AdamW, clipping."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    losses = []
    for number, batches in enumerate(steps):
        context = Context(progress=number / len(steps), special_ids=special_ids)
        count = sum(int((shifted(batch["labels"]) != IGNORE_INDEX).sum()) for batch in batches)
        optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            scale = batch.get("loss_scale")
            inputs = {name: value for name, value in batch.items() if name not in ("labels", "loss_scale")}
            loss = deftune.token_loss(
                model(**inputs, use_cache=False).logits, shifted(batch["labels"]), spec, num_items=count,
                weights=None if scale is None else torch.roll(scale, -1, -1), context=context,
            )  # fmt: skip
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(total)
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def distance(weights: dict, others: dict) -> float:
    """The norm of the difference of all weights, relative to that of the weights."""
    assert weights.keys() == others.keys()
    apart = sum(float((weights[name] - others[name]).double().square().sum()) for name in weights)
    return (apart / sum(float(weight.double().square().sum()) for weight in weights.values())) ** 0.5


def assert_trains(model_folder: Path, run: dict, spec: str, other: dict | None = None) -> None:
    """The recorded run took the way of the plain loop with ``spec``, and not the way of ``other``, by default NLL's."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    assert len(run["steps"]) == len(run["losses"]) == STEPS
    losses, weights = plain_run(model_folder, run["steps"], spec, (tokenizer.eos_token_id,))
    assert max(abs(a - b) / max(1, abs(a)) for a, b in zip(losses, run["losses"])) <= TRAJECTORY
    assert distance(weights, run["weights"]) <= WEIGHTS
    if other is None and spec != "nll":
        other = {"weights": plain_run(model_folder, run["steps"], "nll", (tokenizer.eos_token_id,))[1]}
    if other is not None:
        assert distance(other["weights"], run["weights"]) > 50 * WEIGHTS
