"""The kernel of `MasterAdamW` in Triton's interpreter: beside float64, beside torch's AdamW, and in a run.

The interpreter cuts bfloat16 off where a GPU rounds to the nearest; `test_masters.py` has a test of that for a GPU.
"""

import copy
import math
from typing import Any

import pytest
import torch
from small import make_arguments, make_model, make_rows, make_trainer
from torch import nn

from deftune.training.optimizers import WITH_MASTERS, MasterAdamW, Masters
from deftune.training.triton_adamw import MOST_BLOCKS

SIZES = [(1,), (3, 5), (2047,), (2048,), (2, 2049), (0,), (6000,)]
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Tied:
    """What `MasterAdamW` reads of `Masters`: here no parameter is a master, unless it is given a rounded copy."""

    follow = Masters.follow

    def __init__(self, rounded: dict[nn.Parameter, torch.Tensor]):
        self.held: dict[nn.Parameter, torch.Tensor] = {}
        self.masters, self.rounded = {copy: master for master, copy in rounded.items()}, {
            copy: copy for copy in rounded.values()
        }  # fmt: skip

    def forget_gradients(self) -> None:
        self.held = {}


def parameters(seed: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]


def cut_off(values: torch.Tensor) -> torch.Tensor:
    """The interpreter's bfloat16: the upper half of the bits."""
    return (values.detach().view(torch.int32) & -65536).view(torch.float32).bfloat16()


def in_float64(start: torch.Tensor, gradients: list[torch.Tensor], scales: list[float]) -> torch.Tensor:
    """AdamW by its definition, without its order of operations."""
    p, m, v = start.double(), torch.zeros_like(start).double(), torch.zeros_like(start).double()
    beta1, beta2 = OPTIONS["betas"]
    for t, (gradient, scale) in enumerate(zip(gradients, scales, strict=True), 1):
        g = gradient.double() * scale
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        hat = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + OPTIONS["eps"])
        p = p * (1 - OPTIONS["lr"] * OPTIONS["weight_decay"]) - OPTIONS["lr"] * hat
    return p


@pytest.mark.parametrize("half", [False, True])
def test_steps_are_those_of_float64_and_of_torch(half):
    mine, theirs = parameters(0), parameters(0)
    starts = [p.detach().clone() for p in mine]
    rounded = {p: p.detach().bfloat16() for p in mine} if half else {}
    tied = Tied(rounded)
    optimizer = MasterAdamW([{"params": mine, **OPTIONS}], tied)
    other = torch.optim.AdamW([{"params": theirs, **OPTIONS}], fused=True)
    seen: list[list[torch.Tensor]] = [[] for _ in mine]
    scales = [1.0, 0.25, 1.0, 1e-3]
    for step, scale in enumerate(scales):
        generator = torch.Generator().manual_seed(step)
        for p, q, gradients in zip(mine, theirs, seen, strict=True):
            gradient = torch.randn(p.shape, generator=generator) * 10.0 ** (step - 2)
            gradient = gradient.bfloat16() if half else gradient
            gradients.append(gradient)
            if half:
                tied.held[p] = gradient
            else:
                p.grad = gradient
            q.grad = gradient.float() * scale
        optimizer.scale = None if scale == 1.0 else torch.tensor(scale)
        optimizer.step()
        other.step()
        assert optimizer.scale is None and not tied.held and optimizer.table._seen is None
    for p, q, start, gradients in zip(mine, theirs, starts, seen, strict=True):
        exact = in_float64(start, gradients, scales)
        torch.testing.assert_close(p.detach().double(), exact, rtol=3e-6, atol=3e-7)
        torch.testing.assert_close(p, q, rtol=1e-6, atol=2e-7)
        state, torchs = optimizer.state[p], other.state[q]
        assert torch.equal(state["step"], torchs["step"]) and state["step"] == 4
        torch.testing.assert_close(state["exp_avg"], torchs["exp_avg"], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(state["exp_avg_sq"], torchs["exp_avg_sq"], rtol=1e-6, atol=1e-12)
        if half:
            assert torch.equal(rounded[p], cut_off(p))


def test_a_step_that_is_not_finite_changes_nothing():
    mine = parameters(1)
    rounded = {p: p.detach().bfloat16() for p in mine}
    optimizer = MasterAdamW([{"params": mine, **OPTIONS}], Tied(rounded))
    before = [p.detach().clone() for p in mine]
    for p in mine:
        p.grad = torch.full_like(p, math.nan)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert all(map(torch.equal, before, mine))
    assert all(torch.equal(rounded[p], p.detach().bfloat16()) for p in mine)
    assert all(state["step"] == 0 and not state["exp_avg"].any() for state in optimizer.state.values())


def test_addresses_need_not_be_aligned():
    whole = torch.arange(4001.0)
    parameter, aligned = nn.Parameter(whole[1:]), nn.Parameter(whole[1:].clone())
    for one in (parameter, aligned):
        optimizer = MasterAdamW([{"params": [one], **OPTIONS}], Tied({}))
        one.grad = torch.ones(4000)
        optimizer.step()
        assert optimizer.table.aligned == (one is aligned)
    assert torch.equal(parameter, aligned) and whole[0] == 0


def test_a_parameter_may_move():
    """As `model.to` moves it: its old memory is not touched."""
    moving, staying = nn.Parameter(torch.ones(3000)), nn.Parameter(torch.ones(3000))
    first, second = (MasterAdamW([{"params": [p], **OPTIONS}], Tied({})) for p in (moving, staying))
    for _ in range(3):
        old, kept = moving.data, moving.detach().clone()
        moving.data = old.clone()
        moving.grad, staying.grad = torch.ones(3000), torch.ones(3000)
        first.step()
        second.step()
        assert torch.equal(moving, staying) and torch.equal(old, kept)


def test_a_weight_of_the_model_may_move():
    layer = nn.Linear(40, 50, bias=False)
    layer.get_input_embeddings = layer.get_output_embeddings = nn.Identity
    masters = Masters(layer)
    optimizer = MasterAdamW([{"params": list(masters.parameters()), **OPTIONS}], masters)
    masters.optimizer = optimizer
    for moves in (False, True, False, True):
        if moves:
            layer.weight.data = layer.weight.data.clone()
        before = layer.weight.detach().clone()
        layer(torch.ones(1, 40, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        assert not torch.equal(layer.weight, before)
        assert torch.equal(layer.weight, cut_off(masters.masters[layer.weight]))


def test_the_places_of_a_launch_are_not_kept_for_ever():
    """Experts without a token have no gradient: other ones in each step."""
    mine, theirs = ([nn.Parameter(torch.full((3,), float(i))) for i in range(6)] for _ in range(2))
    optimizer, other = MasterAdamW([{"params": mine, **OPTIONS}], Tied({})), torch.optim.AdamW(theirs, **OPTIONS)
    for step in range(1, 40):
        for i, (p, q) in enumerate(zip(mine, theirs, strict=True)):
            p.grad = q.grad = torch.full((3,), float(step)) if step >> i & 1 else None
        optimizer.step()
        other.step()
        assert len(optimizer.table.blocks) <= MOST_BLOCKS
    assert len(optimizer.state[mine[0]]) == 3 and optimizer.state[mine[5]]["step"] == 8
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=1e-6)


def test_parameters_without_a_gradient_keep_their_own_count():
    one, two = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = MasterAdamW([{"params": [one, two], **OPTIONS}], Tied({}))
    one.grad = torch.ones(3)
    optimizer.step()
    one.grad, two.grad = torch.ones(3), torch.ones(3)
    optimizer.step()
    assert optimizer.state[one]["step"] == 2 and optimizer.state[two]["step"] == 1
    assert two[0].item() == pytest.approx(1 - 1e-3 - 1e-2, abs=1e-6)


def test_the_norm_is_that_of_all_gradients():
    mine = parameters(2)
    tied = Tied({mine[1]: mine[1].detach().bfloat16(), mine[6]: mine[6].detach().bfloat16()})
    optimizer = MasterAdamW([{"params": mine[:3], **OPTIONS}, {"params": mine[3:], **OPTIONS}], tied)
    assert optimizer.norm() == 0
    for p in (mine[0], mine[3], mine[4], mine[5]):
        p.grad = torch.randn_like(p)
    for p in (mine[1], mine[6]):
        tied.held[p] = torch.randn_like(p).bfloat16()
    found = [g for g in optimizer.gradients() if g is not None]
    assert len(found) == 6
    exact = math.sqrt(sum(float(g.double().square().sum()) for g in found))
    assert optimizer.norm().dtype == torch.float32 and optimizer.norm().item() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize(("largest", "scale"), [(0.5, 0.1), (10.0, 1.0), (None, None)])
def test_clipping_scales_the_next_step(monkeypatch, largest, scale):
    monkeypatch.setattr(MasterAdamW, "serves", lambda _: True)
    layer: Any = nn.Linear(25, 1, bias=False)
    layer.get_input_embeddings = layer.get_output_embeddings = nn.Identity
    masters = Masters(layer)
    masters.drive(torch.optim.AdamW(layer.parameters(), fused=True))
    layer(torch.ones(1, 25, dtype=torch.bfloat16)).sum().backward()  # 25 gradients of 1: their norm is 5
    assert masters.clip(largest).item() == pytest.approx(5.0)
    assert masters.optimizer.scale == (None if scale is None else pytest.approx(scale))


def test_a_loaded_state_goes_on():
    """The state has the form of torch's: it comes from torch's AdamW, and goes back into it."""
    mine, theirs = parameters(3), parameters(3)
    other = torch.optim.AdamW([{"params": theirs, **OPTIONS}], fused=True)
    optimizer = MasterAdamW([{"params": mine, **OPTIONS}], Tied({}))
    for step in range(4):
        for p, q in zip(mine, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            q.grad = p.grad.clone()
        other.step()
        if step != 1:
            optimizer.step()
        else:  # loaded after two steps of torch's, one of which it has made, too
            optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
            for p, q in zip(mine, theirs, strict=True):
                p.data.copy_(q.detach())
    back = torch.optim.AdamW([{"params": parameters(3), **OPTIONS}], fused=True)
    back.load_state_dict(optimizer.state_dict())
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=2e-7)
        assert optimizer.state[p]["step"] == other.state[q]["step"] == 4
    assert all(state["step"] == 4 for state in back.state.values())


@pytest.mark.parametrize(("objective", "accumulation"), [("deft", 1), ("deft", 2), ("deft", 3), ("mile", 2)])
def test_a_run_is_that_of_torchs_adamw(tmp_path, monkeypatch, objective, accumulation):
    """With one micro-batch a step, or several; with gradients that are clipped, and rescaled (mile)."""
    losses: list[list[float]] = []
    step = MasterAdamW.step

    def step_and_round(self, *rest):
        step(self, *rest)
        self.masters.round()  # to the nearest

    monkeypatch.setattr(MasterAdamW, "step", step_and_round)
    for serves in (False, True):
        monkeypatch.setattr(MasterAdamW, "serves", lambda _, serves=serves: serves)
        arguments = make_arguments(
            tmp_path, bf16=True, num_train_epochs=4, gradient_accumulation_steps=accumulation, learning_rate=1e-3,
            max_grad_norm=0.5, weight_decay=0.01, per_device_train_batch_size=4,
        )  # fmt: skip
        trainer, _ = make_trainer(
            make_model(torch.float32), arguments, make_rows(12), objective=objective, weights=WITH_MASTERS
        )
        trainer.train()
        history = trainer.state.log_history
        losses.append([value for record in history for key, value in record.items() if key in ("loss", "grad_norm")])
        assert isinstance(trainer.masters, Masters) and (trainer.masters.optimizer is not None) == serves
        assert not trainer.masters.held and all(p.grad is None for p in trainer.masters.parameters())
    plain, mine = losses
    assert len(plain) == len(mine) >= 8
    assert mine == pytest.approx(plain, rel=1e-3)


def test_a_nan_stops_the_run_and_changes_no_weight(tmp_path, monkeypatch):
    monkeypatch.setattr(MasterAdamW, "serves", lambda _: True)
    arguments = make_arguments(tmp_path, bf16=True)
    trainer, _ = make_trainer(make_model(torch.float32), arguments, make_rows(8), weights=WITH_MASTERS)
    before = [master.detach().clone() for master in trainer.masters.parameters()]
    weight = trainer.model.model.layers[1].mlp.up_proj.weight
    weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(ValueError, match=r"training step 1: the gradient's norm is nan; the weights were not changed"):
        trainer.train()
    assert all(map(torch.equal, before, trainer.masters.parameters()))
