"""torchtitan's trainer with deftune's objectives, on a CPU in place of a GPU, against the equation through autograd."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import deftune

pytest.importorskip("torchtitan", reason="torchtitan is not installed; see .ci/stacks.d/torchtitan.txt")

import torch.distributed as dist
import torchtitan.components.loss as titan
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from deftune.adapters.torchtitan import ObjectiveLoss
from deftune.selftest import tiny

HERE, STEPS = Path(__file__).parent, 5
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)  # torchtitan's Jinja has no generation tag


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torchtitan")
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "tokenizer")
    settings = folder / "tokenizer" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    tiny.save_conversations(folder / "rows.jsonl")
    return folder


def train(folder, *arguments, ranks=1):
    """[(loss, gradient norm)] of each step, as printed: five and four digits after the point."""
    paths = [str(HERE), str(Path(deftune.__file__).parents[1])]
    environment = os.environ | {"PYTHONPATH": ":".join(paths), "OMP_NUM_THREADS": "1", "TITAN_OUT": str(folder / "out")}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*torchrun, str(HERE / "titan_on_cpu.py"), "--module", "titan_on_cpu"]
    command += ["--debug.seed=0", "--training.mixed_precision_param=float32", "--config"]
    done = subprocess.run([*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    printed = re.sub(r"\x1b\[[\d;]*m", "", done.stderr + done.stdout)
    found = [(float(loss), float(norm)) for loss, norm in re.findall(r"loss: +([\d.]+) +grad_norm: +([\d.]+)", printed)]
    assert len(found) in (STEPS, STEPS * ranks), printed[-3000:]
    return torch.tensor(found[:STEPS])


def assert_same(actual, expected):
    torch.testing.assert_close(actual[:, 0], expected[:, 0], rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(actual[:, 1], expected[:, 1], rtol=1e-5, atol=2e-4)


def test_plain_and_chunked_train_deft_by_its_equation(folder):
    """Four micro-batches a step; eight chunks of each in the second."""
    expected = train(folder, "written_out")
    assert_same(train(folder, "plain"), expected)
    assert_same(train(folder, "chunked"), expected)
    nll = train(folder, "stock")
    assert (nll[:, 1] - expected[:, 1]).abs().max() > 0.01  # the comparison can fail
    assert_same(train(folder, "plain", "--loss.objective=nll"), nll)


def test_two_ranks(folder):
    backend = "--parallelism.spmd_backend=partial_dtensor"
    expected = train(folder, "written_out", backend, ranks=2)
    assert_same(train(folder, "chunked", backend, ranks=2), expected)


@pytest.mark.parametrize(
    "objective", ["nll", "linear", "cayley", "deft", "deft | floor(0.2)", "eaft", "deft | eos(nll)"]
)
def test_chunked_gradients_are_those_of_token_loss(objective):
    torch.manual_seed(0)
    hidden, head = torch.randn(2, 16, 8), torch.nn.Linear(8, 50, bias=False)
    labels = torch.randint(0, 50, (2, 16)).masked_fill(torch.rand(2, 16) < 0.3, -100)
    settings = ObjectiveLoss.Config(objective=objective, special_ids=(3, 4))
    results = []
    for form in ("token_loss", "plain", "chunked"):
        leaf = hidden.clone().requires_grad_()
        count = (labels != -100).sum()
        head.zero_grad()  # the chunked loss goes backward through the head as it is called
        if form == "chunked":
            loss = titan.ChunkedLossWrapper.Config(num_chunks=4, loss_fn=settings).build()
            loss.set_lm_head(head)
            value = loss(leaf, labels, count)[0]
        elif form == "plain":
            value = settings.build()(head(leaf), labels, count)[0]
        else:
            context = deftune.Context(special_ids=(3, 4))
            value = deftune.token_loss(head(leaf), labels, objective, context=context)
        value.backward()
        results.append((value.detach(), leaf.grad, head.weight.grad.clone()))
    for form in results[1:]:
        for actual, expected in zip(form, results[0]):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ("deft | mean_one", "depends on the whole optimizer step"),
        ("deft | warmup(0.1)", "depends on the progress of the run"),
        ("deft | eos(nll)", "needs special_ids="),
        ("defft", "Did you mean 'deft'"),
    ],
)
def test_refusals(objective, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveLoss.Config(objective=objective).build()


def test_logits_divided_over_the_vocabulary_are_refused(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        logits = distribute_tensor(torch.randn(1, 4, 6), mesh, [Shard(2)])
        with pytest.raises(ValueError, match="torchtitan's logits are divided over the vocabulary"):
            ObjectiveLoss.Config().build()(logits, torch.zeros(1, 4, dtype=torch.long))
    finally:
        dist.destroy_process_group()
