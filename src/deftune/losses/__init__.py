"""Losses from logits or hidden states: statistics of each token, then gate x error; no objective is named here."""

from deftune.losses.from_log_probs import columns_read, loss_from_log_probs
from deftune.losses.linear import linear_loss, linear_token_stats
from deftune.losses.loss import token_loss
from deftune.losses.pending import raise_pending
from deftune.losses.shards import VocabShard
from deftune.losses.sparse import Sparse, SparseReport
from deftune.losses.statistics import token_stats

__all__ = [
    "Sparse",
    "SparseReport",
    "VocabShard",
    "columns_read",
    "linear_loss",
    "linear_token_stats",
    "loss_from_log_probs",
    "raise_pending",
    "token_loss",
    "token_stats",
]
