"""What the checks of the interpreted kernels share: rows, heads, float64 truths, and the two losses side by side."""

import math

import pytest
import torch
from torch import Tensor

from battery import CONTEXT
from deftune import IGNORE_INDEX, linear_loss, token_loss
from deftune.losses import triton_rows
from deftune.losses.chunks import Chunk, Supervised
from deftune.losses.head import Head
from deftune.losses.triton_backend import TritonBackend, interpreted
from tolerances import assert_near, tolerance

assert interpreted(), "TRITON_INTERPRET=1 must be set before triton is imported"

HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.7},
    "softcap": {"softcap": 6.0},
    "all": {"bias": True, "scale": 0.7, "softcap": 6.0},
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """In files that import it: tiles of 16 rows x 16 classes x 16 channels; small sizes have several, ragged too."""
    for name in ("BLOCK_M_FLOAT32", "BLOCK_N", "BLOCK_K_FLOAT32"):
        monkeypatch.setattr(triton_rows, name, 16)


class Example:
    """Rows, a head, and their float64 logits; 17 x 33 x 20 are one and a bit past the blocks."""

    def __init__(self, options: dict, tokens=17, vocab_size=33, width=20, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(tokens, width, generator=generator) * torch.linspace(0.2, 1.5, tokens)[:, None]
        self.x *= (20 / width) ** 0.5
        bias = torch.randn(vocab_size, generator=generator) if options.get("bias") else None
        weight = torch.randn(vocab_size, width, generator=generator)
        self.head = Head(weight, bias, options.get("scale", 1.0), options.get("softcap"))
        self.y = torch.randint(0, vocab_size, (tokens,), generator=generator)
        self.index = torch.arange(tokens)

    @property
    def uncapped(self) -> Tensor:
        head = self.head
        z = self.x.double() @ head.weight.double().T
        return (z if head.bias is None else z + head.bias) * head.scale

    @property
    def z(self) -> Tensor:
        cap = self.head.softcap
        return self.uncapped if cap is None else cap * torch.tanh(self.uncapped / cap)

    @property
    def size(self) -> Tensor:
        """What float32 rounds: the GEMM's logits, and the cap itself (its tanh is 1 - 2 / (1 + e^2a))."""
        finite = self.uncapped[self.uncapped.isfinite()]
        return 1 + finite.abs().max() + (self.head.softcap or 0.0)

    def expected_e(self, reference: Tensor) -> Tensor:
        """e^{z - r} times the softcap's slope, 0 at the target; a reference is in units of ln 2."""
        e = torch.exp(self.z - math.log(2) * reference.double()[:, None]) * self.head.slope(self.z)
        return e.scatter(-1, self.y[:, None], 0.0)

    def measured(self, top: int = 0) -> tuple[TritonBackend, Chunk]:
        """The backend after one chunk of all rows, and the chunk."""
        backend = TritonBackend(self.head, torch.float32, Supervised(self.x, self.index, self.y))
        columns = torch.full((5, len(self.x)), math.nan, dtype=torch.float64)
        return backend, backend.measure(slice(0, len(self.x)), columns, True, top)


def some_of(cases: list[tuple], kept: list[tuple]) -> list:
    """All cases for parametrize, those that are not kept marked slow: an interpreted call takes seconds."""
    assert all(case in cases for case in kept)
    return [case if case in kept else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def error(actual: Tensor, expected: Tensor) -> float:
    gap, size = (actual.double() - expected.double()).norm().item(), expected.double().norm().item()
    return gap / size if size else gap


def sample(tokens, vocab_size=37, width=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator) * torch.linspace(0.1, 1.0, tokens)[:, None]
    weight = torch.randn(vocab_size, width, generator=generator)
    targets = torch.randint(0, vocab_size, (tokens,), generator=generator)
    targets = torch.where(torch.arange(tokens) % 3 == 0, (hidden @ weight.T).argmax(-1), targets)
    return hidden, weight, targets.masked_fill(torch.arange(tokens) % 5 == 1, IGNORE_INDEX)


def both(
    hidden, weight, targets, objective, *, bias=None, softcap=None, logit_scale=1.0, upstream=None, backend="triton",
    **kwargs,
):  # fmt: skip
    """[(loss, gradients)] of a Triton backend and of float64 logits."""
    results = []
    for fused in (True, False):
        inputs = [
            x.detach().to(x.dtype if fused else torch.float64).clone() for x in (hidden, weight, bias) if x is not None
        ]
        inputs = [x.requires_grad_() for x in inputs]
        if fused:
            extra = {"bias": inputs[2] if bias is not None else None, "softcap": softcap, "logit_scale": logit_scale}
            loss = linear_loss(*inputs[:2], targets, objective, context=CONTEXT, backend=backend, **extra, **kwargs)
        else:
            z = inputs[0] @ inputs[1].T
            z = (z if bias is None else z + inputs[2]) * logit_scale
            z = z if softcap is None else softcap * torch.tanh(z / softcap)
            loss = token_loss(z, targets, objective, context=CONTEXT, **kwargs)
        up = None if upstream is None else upstream.to(loss.dtype)
        results.append((loss.detach(), torch.autograd.grad(loss, inputs, up)))
    return results


def assert_both(results) -> None:
    (loss, grads), (expected, truth) = results
    assert_near(loss, expected, "fused loss", condition=expected.abs().clamp(min=1), what="loss")
    for got, want, name in zip(grads, truth, ("hidden", "weight", "bias")):
        assert error(got, want) <= tolerance("fused gradient"), f"d {name}: {error(got, want):.2e}"
