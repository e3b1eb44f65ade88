"""From logits to statistics, and from a gate to gradients. Nothing here knows an objective's name."""

from deftune.kernels.loss import token_loss
from deftune.kernels.statistics import token_stats

__all__ = ["token_loss", "token_stats"]
