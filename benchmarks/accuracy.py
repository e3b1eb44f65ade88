"""How exact the losses are: the figures of docs/benchmarks.md.

    python benchmarks/accuracy.py

1. value and gate of (1 - p^a)/a from given float32 (a, log p), over a grid from 1/V and 0 to p = 0 and p = 1,
   against 50 digits
2. log p from float32 logits, relative to 1 + max|z|, against float64
3. the gradient gate x (P - onehot) from float64 logits, every objective of the catalogue
4. the true class's gradient of confident tokens, beside F.cross_entropy's
"""

from __future__ import annotations

import mpmath
import torch
import torch.nn.functional as F

import deftune
from deftune.objectives.base import deformed

mpmath.mp.dps = 50


def grid_error() -> tuple[float, float]:
    """Largest relative errors of value and gate (over 1 + |a log p|) on the grid."""
    focuses = [0.0, 1 / 262144, 1 / 152064, 1e-3, 0.05, 0.25, 0.5, 0.9, 1.0, 2.0]
    log_ps = [-(10.0**e) for e in range(-30, 5)] + [-0.5, -2.0, -20.0, -80.0, 0.0]
    a = torch.tensor(focuses, dtype=torch.float32).repeat_interleave(len(log_ps))
    log_p = torch.tensor(log_ps, dtype=torch.float32).repeat(len(focuses))
    worst = [0.0, 0.0]
    for focus, x, gate, value in zip(*(c.tolist() for c in (a, log_p, *deformed(log_p, a)))):
        power = mpmath.mpf(focus) * mpmath.mpf(x)
        true_value = -mpmath.mpf(x) if focus == 0 else -mpmath.expm1(power) / mpmath.mpf(focus)
        true_gate = mpmath.exp(power)
        if true_value > 1e-37:
            worst[0] = max(worst[0], float(abs(value - true_value) / true_value))
        if true_gate > 1e-37:
            worst[1] = max(worst[1], float(abs(gate - true_gate) / true_gate / (1 + abs(power))))
    return worst[0], worst[1]


def log_p_error() -> float:
    """Largest |d log p| / (1 + max|z|) over vocabularies and scales, float32 logits."""
    worst = 0.0
    for vocab in (1, 7, 1000, 49152, 152064):
        for scale in (0.0, 0.1, 1.0, 10.0, 100.0):
            torch.manual_seed(vocab)
            z = torch.randn(8, vocab) * scale
            y = torch.arange(8) % vocab
            got = deftune.token_stats(z, y).log_p
            want = torch.log_softmax(z.double(), -1)[torch.arange(8), y]  # float64: 1e9 times finer than the bound
            worst = max(worst, float(((got - want).abs() / (1 + z.abs().amax(-1))).max()))
    return worst


def closed_form_error() -> float:
    """Largest |gradient - gate (P - onehot)| over the catalogue, float64 logits."""
    torch.manual_seed(0)
    worst = 0.0
    for name in deftune.OBJECTIVES:
        spec = {"alpha": "alpha(0.3)", "top": "top(0.01)", "bottom": "bottom(0.5)"}.get(name, name)
        z = (torch.randn(64, 500, dtype=torch.float64) * 3).requires_grad_()
        y = torch.randint(500, (64,))
        (grad,) = torch.autograd.grad(deftune.token_loss(z, y, spec, reduction="sum"), z)
        gate = deftune.objective(spec).gate(deftune.token_stats(z, y))
        want = gate[:, None] * (torch.softmax(z.detach(), -1) - F.one_hot(y, 500))
        worst = max(worst, float((grad - want).abs().max()))
    return worst


def confident_error(margin: float) -> tuple[float, float]:
    """Relative error of the true class's NLL gradient, (ours, F.cross_entropy), float32, V = 49152."""
    torch.manual_seed(0)
    z = torch.randn(16, 49152)
    y = torch.arange(16)
    z[y, y] = z.amax(-1) + margin
    wide = z.double()
    others = wide.exp().index_put((y, y), torch.zeros(16, dtype=torch.float64)).sum(-1)
    want = -others / (others + wide[y, y].exp())

    def off(loss: torch.Tensor, leaf: torch.Tensor) -> float:
        (grad,) = torch.autograd.grad(loss, leaf)
        return float((grad[y, y].double() / want - 1).abs().max())

    ours, theirs = z.clone().requires_grad_(), z.clone().requires_grad_()
    return (
        off(deftune.token_loss(ours, y, "nll", reduction="sum"), ours),
        off(F.cross_entropy(theirs, y, reduction="sum"), theirs),
    )


def main() -> None:
    value, gate = grid_error()
    print("| what | largest error | promised |\n|---|---|---|")
    print(f"| value from float32 (a, log p), relative | {value:.1e} | 5e-07 |")
    print(f"| gate from float32 (a, log p), relative, over 1 + abs(a log p) | {gate:.1e} | 5e-07 |")
    print(f"| log p from float32 logits, over 1 + max abs(z) | {log_p_error():.1e} | 2.4e-07 |")
    print(f"| gradient against gate x error, float64 | {closed_form_error():.1e} | 1e-12 |")
    for margin in (10.0, 20.0):
        ours, theirs = confident_error(margin)
        print(f"| true class's gradient, margin {margin:g}, float32 | {ours:.1e} | F.cross_entropy: {theirs:.1e} |")


if __name__ == "__main__":
    main()
