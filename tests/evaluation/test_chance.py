"""The chance: pinned, of the right distribution, and honest about close calls."""

import math

import pytest
import torch

from deftune.evaluation import chance
from deftune.evaluation.chance import derive_key, draw, exponentials
from deftune.evaluation.chance import nucleus as nucleus_masks


def keys_of(number: int) -> torch.Tensor:
    keys = [derive_key(0, "item", sample) for sample in range(number)]
    return torch.tensor([[key >> 32, key & 0xFFFFFFFF] for key in keys]).to(torch.int32)


def test_keys_are_pinned():
    """A change of the derivation would change every sampled result."""
    assert derive_key(0, "gsm8k/0", 0) == 0x2805EAB28A23C0C0
    noise = exponentials(keys_of(1), torch.tensor([5], dtype=torch.int32), 3)
    assert noise.tolist() == [[pytest.approx(value, rel=1e-6) for value in PINNED]]


PINNED = (0.4083150625228882, 0.673494279384613, 2.0412437915802)


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("vary", ["sample", "step"])
def test_tokens_are_drawn_from_the_softmax(vary):
    number = 40_000
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, 0.5, -3.0])
    keys = keys_of(number) if vary == "sample" else keys_of(1).expand(number, 2)
    steps = torch.arange(number, dtype=torch.int32) if vary == "step" else torch.zeros(number, dtype=torch.int32)
    tokens, _ = draw(logits.expand(number, 6), exponentials(keys, steps, 6), torch.full((number,), 0.8), 1.0, 0.0)
    counts = torch.bincount(tokens, minlength=6).double()
    # 5 degrees of freedom: above 20.5 once in a thousand, and the draws are fixed
    assert chi_square(counts, number * (logits.double() / 0.8).softmax(0)) < 20.5
    pairs = torch.bincount(tokens[:-1] * 6 + tokens[1:], minlength=36).double()
    shares = counts / number
    assert chi_square(pairs, (number - 1) * torch.outer(shares, shares).flatten()) < 57.3  # 25 degrees, 1 in 4000


def test_exponentials_are_exponential_over_a_vocabulary():
    noise = exponentials(keys_of(8), torch.arange(8, dtype=torch.int32), 50_000).double()
    assert noise.min() > 0 and noise.isfinite().all()
    u = (-noise).exp()
    for row in u:  # Kolmogorov-Smirnov: above 1.95 / sqrt(n) once in a thousand
        ordered = row.sort().values
        assert (ordered - torch.arange(1, 50_001) / 50_000).abs().max() < 1.95 / math.sqrt(50_000)
    assert torch.corrcoef(u).fill_diagonal_(0).abs().max() < 0.02


def nucleus(z, top_p, slack=0.0) -> list[bool]:
    [mask] = nucleus_masks(torch.tensor([z]), top_p, [slack])
    return mask[0].tolist()


def test_thenucleus_masks():
    z = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().tolist()
    assert nucleus(z, 0.6) == [False, True, False, True]
    assert nucleus(z, 0.75) == [False, True, True, True]
    assert nucleus(z, 1e-6) == [False, True, False, False]
    assert nucleus([1.0, 1.0, 0.0], 0.1) == [True, True, False]  # equals go together
    for top_p in (0.05, 0.39, 0.5, 0.7, 0.71, 0.9):
        for slack in (1e-3, 0.1):
            small, exact, large = (torch.tensor(nucleus(z, top_p, s)) for s in (slack, 0.0, -slack))
            assert (small <= exact).all() and (exact <= large).all()
    assert sum(nucleus(z, 0.7001, 1e-3)) < sum(nucleus(z, 0.7001, -1e-3))  # 0.4 + 0.3 are above the third


@pytest.mark.parametrize("spread", [0.0, 0.01, 3.0])
def test_the_nucleus_of_a_large_vocabulary(monkeypatch, spread):
    """Whether the upper part is enough (a spread of 3) or not, the masks are those of the whole order."""
    z = spread * torch.randn(4, 2000, generator=torch.Generator().manual_seed(0))
    slacks = (0.0, -1e-3, 1e-3)
    monkeypatch.setattr(chance, "NUCLEUS_PART", 2000)
    whole = nucleus_masks(z, 0.8, slacks)
    monkeypatch.setattr(chance, "NUCLEUS_PART", 500)
    assert all(torch.equal(a, b) for a, b in zip(nucleus_masks(z, 0.8, slacks), whole))
    share = z.double().softmax(-1)
    above = torch.stack([(share * (z > z[:, v : v + 1])).sum(-1) for v in range(2000)], 1)
    assert torch.equal(whole[0], (above < 0.8) | (z == z.amax(-1, keepdim=True)))


def test_a_close_call_is_seen():
    """Whatever a change of half the margin does to the choice, ``draw`` said that it could."""
    generator = torch.Generator().manual_seed(0)
    rows, size, margin = 3000, 20, 0.2
    logits = 2 * torch.randn(rows, size, generator=generator)
    noise = exponentials(keys_of(1).expand(rows, 2), torch.arange(rows, dtype=torch.int32), size)
    for temperature, top_p in ((0.0, 1.0), (1.0, 1.0), (0.6, 1.0), (1.0, 0.7), (0.6, 0.9)):
        part = None if temperature == 0 else noise
        temperatures = torch.full((rows,), temperature)
        token, close = draw(logits, part, temperatures, top_p, margin)
        changed = torch.zeros(rows, dtype=torch.bool)
        for _ in range(40):
            moved = logits + margin / 2 * (2 * torch.rand(rows, size, generator=generator) - 1)
            changed |= draw(moved, part, temperatures, top_p, 0.0)[0] != token
        assert changed.sum() > 20 and not (changed & ~close).any()
        assert close.float().mean() < 0.5


def test_equal_logits_go_to_the_lowest_token():
    token, close = draw(torch.zeros(2, 1000), None, torch.zeros(2), 1.0, 1e-3)
    assert token.tolist() == [0, 0] and close.all()
