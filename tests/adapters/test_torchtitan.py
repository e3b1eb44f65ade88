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
import torch.multiprocessing as mp
import torchtitan.components.loss as titan
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torchtitan.config import ConfigManager
from torchtitan.distributed.spmd_types import set_current_spmd_mesh
from torchtitan.distributed.utils import set_spmd_backend

import deftune.adapters.torchtitan as adapter
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


def launch(folder, *arguments, ranks=1):
    """torchtitan's own command on a CPU, with a config of titan_on_cpu.py."""
    paths = [str(HERE), str(Path(deftune.__file__).parents[1])]
    environment = os.environ | {"PYTHONPATH": ":".join(paths), "OMP_NUM_THREADS": "1", "TITAN_OUT": str(folder / "out")}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*torchrun, str(HERE / "titan_on_cpu.py"), "--module", "titan_on_cpu"]
    command += ["--debug.seed=0", "--training.mixed_precision_param=float32", "--config"]
    return subprocess.run([*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def train(folder, *arguments, ranks=1):
    """[(loss, gradient norm)] of each step, as rank 0 prints it: five and four digits after the point."""
    done = launch(folder, *arguments, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    printed = re.sub(r"\x1b\[[\d;]*m", "", done.stderr + done.stdout)
    lines = re.findall(r"step: +(\d+) +loss: +([\d.]+) +grad_norm: +([\d.]+)", printed)
    found = {int(step): (float(loss), float(norm)) for step, loss, norm in lines}  # ranks may print the same
    assert sorted(found) == [*range(1, STEPS + 1)], printed[-3000:]
    ours = "--loss.objective=nll" in arguments or arguments[0] in ("plain", "chunked")
    assert ("verified from the logits" in printed) == ours, printed[-3000:]
    return torch.tensor([found[step] for step in sorted(found)])


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


def test_nll_in_place_of_the_objective_stops_before_the_first_update(folder):
    done = launch(folder, "swapped")
    assert done.returncode != 0
    printed = done.stderr + done.stdout
    assert "torchtitan: `deft` is not what is trained: the loss is" in printed and "look for a second loss" in printed
    assert not re.search(r"step: +1 ", printed)


def test_fsdp_on_two_ranks(folder):
    """torchtitan 0.3.0 cannot use FSDP2 of torch 2.13 with its default, spmd_backend=spmd_types."""
    backend = "--parallelism.spmd_backend=partial_dtensor"
    expected = train(folder, "written_out", backend, ranks=2)
    assert_same(train(folder, "chunked", backend, ranks=2), expected)


def test_tensor_parallel_on_two_ranks(folder):
    """Each rank has half of the vocabulary; the logits alone are a DTensor, or the labels too."""
    degree, backend = "--parallelism.tensor_parallel_degree=2", "--parallelism.spmd_backend="
    expected = train(folder, "written_out", degree, backend + "partial_dtensor", ranks=2)
    assert_same(train(folder, "chunked", degree, backend + "partial_dtensor", ranks=2), expected)
    assert_same(train(folder, "plain", degree, backend + "full_dtensor", ranks=2), expected)
    nll = train(folder, "stock", degree, backend + "partial_dtensor", ranks=2)
    assert (nll[:, 1] - expected[:, 1]).abs().max() > 0.01  # the comparison fails for NLL


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


def test_the_file_of_the_page_trains_the_objective(tmp_path, monkeypatch):
    page = (HERE.parents[1] / "docs" / "stacks" / "torchtitan.md").read_text()
    (tmp_path / "my_configs.py").write_text(page.split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    for name, option in (("deft", "--loss.loss_fn.objective"), ("deft_plain", "--loss.objective")):
        for more, expected in (([], "deft | floor(0.2)"), ([f"{option}=cayley"], "cayley")):
            loss = ConfigManager().parse_args(["--module", "my_configs", "--config", name, *more]).loss.build()
            loss = loss if isinstance(loss, ObjectiveLoss) else loss.loss_fn
            assert str(loss.objective) == expected


def shard_losses(rank, folder):
    """ObjectiveLoss on local and on distributed logits of two ranks against one, uneven halves of 51 classes."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2, 8, 51, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 51, (2, 8), generator=generator).masked_fill(torch.arange(8) % 3 == 0, -100)
    count, context = (labels != -100).sum(), deftune.Context(special_ids=(3, 4))
    mine = slice(26 * rank, 26 + 26 * rank)
    for objective in ("nll", "linear", "cayley", "deft", "deft | floor(0.2)", "eaft", "deft | eos(nll)"):
        leaf = logits.clone().requires_grad_()
        expected = deftune.token_loss(leaf, labels, objective, context=context)
        (gradient,) = torch.autograd.grad(expected, leaf)
        settings = ObjectiveLoss.Config(objective=objective, special_ids=(3, 4), global_vocab_size=51)
        for backend in ("partial_dtensor", "spmd_types"):
            set_spmd_backend(backend)
            local = logits[..., mine].clone().requires_grad_()
            if backend == "spmd_types":
                with set_current_spmd_mesh(mesh):
                    loss = settings.build()(local, labels, count)[0]
            else:
                pred = DTensor.from_local(local, mesh, [Shard(-1)], shape=logits.shape, stride=logits.stride())
                loss = settings.build()(pred, labels, count)[0]
            (own,) = torch.autograd.grad(loss, local)
            torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
            torch.testing.assert_close(own, gradient[..., mine], rtol=1e-12, atol=1e-14)
    with set_current_spmd_mesh(mesh):
        with pytest.raises(ValueError, match=r"set ObjectiveLoss.Config.global_vocab_size=decoder_vocab_size"):
            ObjectiveLoss.Config().build()(logits[..., mine], labels, count)
        for size in (52, 60):  # the shard of 52 classes fits rank 0, and rank 0 must not wait for rank 1
            with pytest.raises(ValueError, match=r"shard: the shards (have 51 classes and vocab_size is|leave a gap)"):
                ObjectiveLoss.Config(global_vocab_size=size).build()(logits[..., mine], labels, count)
    dist.destroy_process_group()


def test_local_and_distributed_shards(tmp_path):
    mp.spawn(shard_losses, args=(str(tmp_path),), nprocs=2)


@pytest.mark.parametrize("wrong", ["nll", "linear"])
def test_the_first_loss_is_checked(monkeypatch, wrong):
    """Another objective than the one asked for stops the training at its first loss."""
    monkeypatch.setattr(
        adapter, "token_loss", lambda pred, labels, objective, **more: deftune.token_loss(pred, labels, wrong, **more)
    )
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(1, 6, 9, generator=generator), torch.arange(6)[None]
    loss = ObjectiveLoss.Config(objective="deft").build()
    loss(logits, torch.full_like(labels, -100))  # nothing to check yet
    with pytest.raises(ValueError, match="`deft` is not what is trained: the loss is"):
        loss(logits, labels)
