"""Megatron-core's GPTModel with deftune's objectives on one and two tensor-parallel ranks, on a CPU with gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import deftune

pytest.importorskip("megatron.core", reason="megatron-core is not installed; see .ci/stacks.d/megatron.txt")

from deftune.adapters import megatron

DRIVER = Path(__file__).parent / "drivers" / "megatron_run.py"


def launch(out: Path, how: str, ranks: int, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(DRIVER), str(out), f"how={how}", *(f"{name}={value}" for name, value in options.items())]
    source = str(Path(deftune.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """train(how, ranks, options) -> [(loss, gradient norm)] of each step; each run once."""
    folder, done = tmp_path_factory.mktemp("megatron"), {}

    def run(how: str, ranks: int, **options: object) -> torch.Tensor:
        key = " ".join([how, str(ranks), *(f"{name}={value}" for name, value in options.items())])
        if key not in done:
            out = folder / f"{len(done)}.json"
            result = launch(out, how, ranks, **options)
            assert result.returncode == 0, result.stderr[-4000:]
            assert ("verified from the logits" in result.stdout) == (how == "model"), result.stdout
            done[key] = torch.tensor(json.loads(out.read_text()), dtype=torch.float64)
        return done[key]

    return run


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)  # float32 over six steps of Adam


@pytest.mark.parametrize("how, ranks, options", [
    ("model", 1, {}), ("model", 2, {}), ("logits", 2, {}), ("model", 2, {"sequence_parallel": True}),
    ("model", 2, {"parallel_output": False}),
], ids=str)  # fmt: skip
def test_deft_is_trained_by_its_equation(train, how, ranks, options):
    """Two micro-batches a step with a loss mask; the equation through autograd on one rank."""
    expected = train("written_out", 1)
    assert_same(train(how, ranks, **options), expected)
    nll = train("stock", 1)
    assert (nll - expected).abs().amax(0).min() > 0.1  # losses and gradients: the comparison fails for NLL


def test_nll_in_place_of_the_objective_stops_before_the_first_update(tmp_path):
    done = launch(tmp_path / "out.json", "swapped", 2)
    assert done.returncode != 0
    assert "megatron: `deft` is not what is trained: the loss is" in done.stderr, done.stderr[-4000:]
    assert "look for a second loss, and compare the order and sizes of the vocabulary's shards" in done.stderr
    assert not (tmp_path / "out.json").exists()  # written after the training


def test_nll_is_megatrons_own_loss(train):
    assert_same(train("model", 2, objective="nll"), train("stock", 1))


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ("deft | mean_one", "depends on the whole optimizer step"),
        ("clip", "depends on the whole optimizer step"),
        ("deft | warmup(0.1)", "depends on the progress of the run"),
        ("deft | eos(nll)", "needs special_ids="),
        ("defft", "Did you mean 'deft'"),
    ],
)
def test_objectives_that_need_more_are_refused(objective, message):
    with pytest.raises(ValueError, match=message):
        megatron.use_objective(model(), objective)
    with pytest.raises(ValueError, match=message):
        megatron.token_losses(torch.zeros(1, 2, 4), torch.zeros(1, 2, dtype=torch.long), objective)


def model(**config):
    settings = SimpleNamespace(**{"cross_entropy_loss_fusion": False, "mtp_num_layers": None, **config})
    return SimpleNamespace(
        config=settings, compute_language_model_loss=None, parallel_output=False, pg_collection=SimpleNamespace(tp=None)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cross_entropy_loss_fusion": True}, "cross_entropy_loss_fusion computes another loss than `deft`; set it to"),
        ({"mtp_num_layers": 1}, "mtp_num_layers=1: the layers for further tokens"),
    ],
)
def test_options_that_replace_the_loss_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        megatron.use_objective(model(**options), "deft")
    with pytest.raises(ValueError, match="Linear has no compute_language_model_loss"):
        megatron.use_objective(torch.nn.Linear(2, 2))


def test_the_first_loss_is_checked(monkeypatch):
    """Training NLL, where DEFT was asked for, stops at the first loss."""
    wrapped = SimpleNamespace(module=model())
    megatron.use_objective(wrapped, "deft")
    loss = wrapped.module.compute_language_model_loss
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(5, 2, 7, generator=generator), torch.arange(10).view(2, 5) % 7
    expected = deftune.token_loss(logits.transpose(0, 1), labels, "deft", reduction="none")
    torch.testing.assert_close(loss(labels, logits), expected)
    monkeypatch.setattr(
        megatron, "token_loss", lambda z, labels, objective, **more: deftune.token_loss(z, labels, "nll", **more)
    )
    megatron.use_objective(wrapped, "deft")
    with pytest.raises(ValueError, match="`deft` is not what is trained: the loss is"):
        wrapped.module.compute_language_model_loss(labels, logits)
