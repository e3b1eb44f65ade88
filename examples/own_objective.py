"""Your own objective in five lines; every function, table and figure of deftune then takes it.

python examples/own_objective.py
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import deftune
from deftune import Context, TokenStats


# --- the five lines: a focus a(token), and a name -------------------------------------------------
@deftune.register("half-deft")
@dataclass(frozen=True)
class HalfDeft(deftune.Focus):
    """DEFT's focus, softened: a = scale * sum P^2."""

    scale: float = 0.5

    def focus(self, stats: TokenStats, context: Context = Context()) -> Tensor:  # noqa: B008
        return self.scale * stats.concentration


# --------------------------------------------------------------------------------------------------

torch.manual_seed(0)
logits = (3 * torch.randn(6, 1000)).requires_grad_()
targets = torch.tensor([3, -100, 17, 999, 0, 42])

for spec in ("nll", "deft", "half-deft", "half-deft(scale=0.25) | floor(0.1)"):
    loss = deftune.token_loss(logits, targets, spec)
    (gradient,) = torch.autograd.grad(loss, logits)
    print(f"{spec:36} loss {loss.item():.4f}   gradient norm {gradient.norm().item():.4f}")

stats = deftune.token_stats(logits, targets)
print("gates of half-deft:", [round(gate, 3) for gate in deftune.objective("half-deft").gate(stats).tolist()])
