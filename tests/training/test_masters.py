"""bfloat16 weights with float32 masters: the trajectory of autocast, exact resume, float32 results."""

import importlib.util
import json
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small import make_arguments, make_model, make_rows, make_trainer

from deftune.artifacts.config import ConfigError, RunConfig
from deftune.training import optimizers
from deftune.training.machine import check_config
from deftune.training.optimizers import WITH_MASTERS, MasterAdamW, Masters
from deftune.training.train import train_run
from interpreter import run_checks

WEIGHTS = {"train.weights": WITH_MASTERS, "train.precision": "bf16"}


def trajectory(folder, weights: str, objective: str, **more) -> list[float]:
    """The losses of 20 steps in bfloat16."""
    arguments = make_arguments(
        folder, bf16=True, num_train_epochs=10, gradient_accumulation_steps=2, learning_rate=1e-3,
        max_grad_norm=1.0, weight_decay=0.01, **more,
    )  # fmt: skip
    trainer, _ = make_trainer(make_model(torch.float32), arguments, make_rows(16), objective=objective, weights=weights)
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    assert len(losses) == 20
    return losses


@pytest.mark.parametrize("objective", ["nll", "deft", "eaft", "mile"])  # mile rescales the gradients of the step
def test_the_trajectory_is_that_of_autocast(tmp_path, objective):
    plain, masters = (trajectory(tmp_path, weights, objective) for weights in ("float32", WITH_MASTERS))
    assert plain[-1] < 0.98 * plain[0]
    assert masters == pytest.approx(plain, rel=1e-3)
    assert masters[0] == plain[0]  # the same forward pass


def one_layer() -> torch.nn.Linear:
    """A linear layer with the methods of a causal LM, and no embeddings."""
    layer: Any = torch.nn.Linear(1, 1, bias=False)
    layer.get_input_embeddings = layer.get_output_embeddings = torch.nn.Identity
    return layer


def test_gradients_of_micro_batches_are_summed_in_float32():
    """1 + 256 times 2^-9 is 1.5; in bfloat16 each sum 1 + 2^-9 is 1 again."""
    layer = one_layer()
    masters = Masters(layer)
    (weight,), (master,) = layer.parameters(), masters.parameters()
    for value in [1.0, *[2.0**-9] * 256]:
        (weight * torch.tensor(value, dtype=torch.bfloat16)).sum().backward()
        assert weight.grad is None
    assert weight.dtype == torch.bfloat16 and master.grad.dtype == torch.float32 and master.grad.item() == 1.5


def test_small_updates_add_up():
    layer = one_layer()
    torch.nn.init.ones_(layer.weight)
    masters = Masters(layer)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    masters.drive(optimizer)
    (master,) = masters.parameters()
    for _ in range(100):
        layer(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        assert master.grad is None
    assert master.item() == pytest.approx(0.99, abs=1e-4)
    assert layer.weight.item() == master.detach().bfloat16().item() == 0.98828125


def test_a_weight_that_has_moved_goes_on_training():
    """A callback that measures on the CPU and moves the model back leaves the weights in other memory."""
    layer = one_layer()
    masters = Masters(layer)
    optimizer = masters.drive(torch.optim.AdamW(layer.parameters(), lr=0.1))
    (master,) = masters.parameters()
    for _ in range(3):
        layer.weight.data = layer.weight.data.clone()
        before = layer.weight.item()
        layer(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        assert layer.weight.item() == master.detach().bfloat16().item() != before
    layer.weight.data = layer.weight.data.clone()
    masters.masters[layer.weight] = torch.nn.Parameter(torch.ones(1, 1, device="meta"))  # the only other device here
    with pytest.raises(ValueError, match=r"was moved from meta to cpu while it trains; move it back before"):
        masters.round()


def test_one_kernel_serves_contiguous_parameters_on_one_gpu(monkeypatch):
    """Its programs walk through memory; the gradient of a transposed weight lies in another order."""
    device, plain = type("Device", (), {"type": "cuda"})(), torch.nn.Parameter(torch.ones(4, 2))
    monkeypatch.setattr(torch.nn.Parameter, "device", device, raising=False)
    monkeypatch.setattr(optimizers, "ONE_KERNEL_FROM", 0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert MasterAdamW.serves(optimizer_of(plain))
    assert not MasterAdamW.serves(optimizer_of(plain, torch.nn.Parameter(torch.ones(4, 2).t())))


def optimizer_of(*parameters) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(parameters)
    optimizer.param_groups[0]["fused"] = True
    return optimizer


def test_a_step_that_is_not_finite_changes_no_master(tmp_path):
    arguments = make_arguments(tmp_path, bf16=True)
    trainer, _ = make_trainer(make_model(torch.float32), arguments, make_rows(8), weights=WITH_MASTERS)
    before = [master.detach().clone() for master in trainer.masters.parameters()]
    weight = trainer.model.model.layers[1].mlp.up_proj.weight
    weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(ValueError, match=r"training step 1: the gradient's norm is nan; the weights were not changed"):
        trainer.train()
    assert all(map(torch.equal, before, trainer.masters.parameters()))
    assert trainer.model.model.layers[1].mlp.up_proj.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("objective", ["deft", "mile"])
def test_a_resumed_run_is_bitwise_the_same(tmp_path, make_config, objective):
    """The masters and the moments come back from a checkpoint; the result is float32 and more than rounded weights."""
    plan = {**WEIGHTS, "train.max_steps": 6, "train.save_steps": 3, "train.batch_size": 4, "train.micro_batch_size": 2}
    whole = make_config(tmp_path / "whole", plan, objective=objective)
    train_run(whole)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for gone in ("model", "checkpoints/checkpoint-6"):
        shutil.rmtree(tmp_path / "cut" / gone)
    (tmp_path / "cut" / "status.json").unlink()
    outcome = train_run(make_config(tmp_path / "cut", plan, objective=objective))
    assert outcome.start_step == 3 and outcome.step == 6
    one, two = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "cut"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert {value.dtype for value in one.values()} == {torch.float32}
    assert not all(torch.equal(value, value.bfloat16().float()) for value in one.values())
    assert json.loads((tmp_path / "whole" / "model" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize("first, then", [("float32", WITH_MASTERS), (WITH_MASTERS, "float32")])
def test_a_run_resumes_with_other_weights(tmp_path, make_config, first, then):
    """As a run does that began on another machine, or with an older version; the losses differ by rounding."""
    plan = {**WEIGHTS, "train.max_steps": 6, "train.save_steps": 3, "train.weights": first}
    whole = train_run(make_config(tmp_path / "run", plan)).run
    expected = [record["loss"] for record in whole.read_metrics() if "loss" in record]
    for gone in ("model", "checkpoints/checkpoint-6"):
        shutil.rmtree(tmp_path / "run" / gone)
    (tmp_path / "run" / "status.json").unlink()
    outcome = train_run(make_config(tmp_path / "run", plan | {"train.weights": then}))
    assert outcome.start_step == 3 and outcome.step == 6
    found = [record["loss"] for record in outcome.run.read_metrics() if "loss" in record]
    assert found[:3] == expected[:3] and found == pytest.approx(expected, rel=1e-3)


def test_the_best_step_is_the_masters_of_that_step(tmp_path, make_config):
    plan = {
        **WEIGHTS, "train.max_steps": 8, "train.eval_steps": 1, "train.best": "eval_nll", "train.stop_after": 2,
        "train.learning_rate": 1.0, "train.warmup_ratio": 0.0, "data.holdout": 0.2,
    }  # fmt: skip
    train_run(make_config(tmp_path / "run", plan))
    kept = json.loads((tmp_path / "run" / "status.json").read_text())
    assert kept["kept"] < kept["step"] and kept["stopped_early"]
    result = load_file(tmp_path / "run" / "model" / "model.safetensors")
    saved = load_file(tmp_path / "run" / "checkpoints" / f"checkpoint-{kept['kept']}" / "model.safetensors")
    assert all(torch.equal(result[name], saved[name]) for name in saved)


def test_a_model_in_memory_has_the_masters(tmp_path, make_config):
    plan = {**WEIGHTS, "train.max_steps": 3}
    train_run(make_config(tmp_path / "saved", plan))
    model = train_run(make_config(tmp_path / "kept", plan), save=False).model
    saved = load_file(tmp_path / "saved" / "model" / "model.safetensors")
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in saved.items())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"train.fsdp": True}, "train.fsdp"),
        ({"train.tensor_parallel": 2}, "train.tensor_parallel"),
        ({"model.lora": {"r": 2}}, "model.lora"),
        ({"train.optimizer": "muon"}, "train.optimizer=muon"),
        ({"train.precision": "fp32"}, "train.precision=fp32"),
    ],
)
def test_what_was_not_tested_is_refused(tmp_path, make_config, more, what):
    with pytest.raises(ValueError, match=f"train.weights: {WITH_MASTERS} was not tested with {what}; drop one"):
        make_config(tmp_path, {**WEIGHTS, **more})


def test_several_ranks_and_float32_are_refused(tmp_path, make_config, monkeypatch):
    config: RunConfig = make_config(tmp_path, {**WEIGHTS, "train.batch_size": 8, "train.micro_batch_size": 4})
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="was not tested with several ranks; leave it out"):
        check_config(config)
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"computes in bfloat16; set train\.precision=bf16"):
        check_config(make_config(tmp_path, {**WEIGHTS, "train.precision": "auto"}))


def test_the_trainer_refuses_autocast_and_unknown_names(tmp_path):
    for more, weights, text in [
        ({"bf16": False}, WITH_MASTERS, "was not tested with bf16=False in args"),
        ({"bf16": True, "optim": "adafactor"}, WITH_MASTERS, "was not tested with optim='adafactor'"),
        ({}, "bfloat16", "weights='bfloat16' is unknown; one of float32, bfloat16_with_masters"),
    ]:
        with pytest.raises(ValueError, match=text):
            make_trainer(make_model(torch.float32), make_arguments(tmp_path, **more), make_rows(4), weights=weights)


def test_the_trainer_refuses_a_bfloat16_model(tmp_path):
    """Its embeddings, norms and head would have no masters."""
    with pytest.raises(ValueError, match="was not tested with weights that are not float32"):
        make_trainer(
            make_model(torch.bfloat16), make_arguments(tmp_path, bf16=True), make_rows(4), weights=WITH_MASTERS
        )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and none is here")
@pytest.mark.gpu
@pytest.mark.parametrize("objective", ["nll", "deft", "eaft", "mile"])
def test_the_trajectory_on_a_gpu_is_that_of_autocast(tmp_path, objective):
    plain, masters = (trajectory(tmp_path, w, objective, use_cpu=False) for w in ("float32", WITH_MASTERS))
    assert masters == pytest.approx(plain, rel=1e-3)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.long
def test_the_kernel_in_the_interpreter():
    run_checks("training", "check_adamw.py", "not slow")


def layers(device: str) -> torch.nn.Sequential:
    torch.manual_seed(0)
    # sizes that are no multiple of a block, and more than one block
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in ((64, 2100), (2100, 30), (30, 1))))
    model.get_input_embeddings = model.get_output_embeddings = torch.nn.Identity
    return model.to(device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and none is here")
@pytest.mark.gpu
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_kernel_on_a_gpu_is_torchs_adamw(monkeypatch, micro_batches):
    """Ten steps with clipping: masters, moments and counts are torch's, and the weights are rounded to the nearest."""
    states: list[tuple[Any, ...]] = []
    for serves in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(optimizers, "ONE_KERNEL_FROM", 0 if serves else 10**12)
            model = layers("cuda")
            masters = Masters(model)
            groups = [{"params": [p for p in model.parameters() if p.dim() == n], "weight_decay": 0.1 * (n - 1)}
                      for n in (1, 2)]  # fmt: skip
            optimizer = masters.drive(torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True))
            assert isinstance(optimizer, MasterAdamW) == serves
            for step in range(10):
                for micro in range(micro_batches):
                    torch.manual_seed(micro_batches * step + micro)
                    for p in model.parameters():  # gradients that do not depend on the weights
                        (p * torch.randn(p.shape, device="cuda").to(p.dtype)).sum().backward()
                if serves:
                    norm = masters.clip(1e-2)
                    assert bool(masters.held) == (micro_batches == 1)
                else:
                    norm = torch.nn.utils.clip_grad_norm_(masters.parameters(), 1e-2)
                assert norm > 1e-2
                optimizer.step()
            for weight, master in masters.masters.items():
                assert torch.equal(weight, master.bfloat16())
            states.append((list(masters.parameters()), [optimizer.state[p] for p in masters.parameters()]))
    for (p, state), (q, other) in zip(zip(*states[0], strict=True), zip(*states[1], strict=True), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        for moment in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(state[moment], other[moment], rtol=1e-5, atol=1e-10)
        assert torch.equal(state["step"], other["step"])
