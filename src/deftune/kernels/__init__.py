"""From hidden states or logits to statistics, and from a gate to gradients. Nothing here knows an objective's name."""

from deftune.kernels.linear import linear_loss, linear_loss_with_stats, linear_token_stats
from deftune.kernels.loss import token_loss
from deftune.kernels.pending import raise_pending
from deftune.kernels.sparse import Sparse, SparseReport
from deftune.kernels.statistics import token_stats

__all__ = [
    "Sparse",
    "SparseReport",
    "linear_loss",
    "linear_loss_with_stats",
    "linear_token_stats",
    "raise_pending",
    "token_loss",
    "token_stats",
]
