"""A check of the first loss of a stack that passes logits, whole rows or parts of a divided vocabulary."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from deftune.losses import VocabShard, token_stats
from deftune.objectives import Context, Objective

TOLERANCE = 1e-4  # relative; both losses are float32 sums over the same logits


def check_first_loss(
    stack: str,
    objective: Objective,
    loss: Tensor,
    logits: Tensor,
    targets: Tensor,
    context: Context,
    shard: VocabShard | None = None,
) -> None:
    """Compare the sum of a loss with the objective, computed anew from gathered logits, and say so on the first rank.

    Args:
        stack: the name of the training stack, for messages.
        objective: what is to be trained.
        loss: the sum over the supervised tokens that the stack will use.
        logits: ``[..., V]``, or this rank's classes of them.
        targets: ``[...]``.
        context: of the objective.
        shard: of the logits.

    Raises:
        ValueError: the loss is not the objective's; on every rank that shares the vocabulary.
    """
    whole = logits if shard is None else whole_rows(logits, shard)
    expected = float(objective.loss(token_stats(whole, targets), context).sum())
    if not math.isclose(float(loss), expected, rel_tol=TOLERANCE, abs_tol=1e-12) and math.isfinite(expected):
        advice = "look for a second loss" if shard is None else "compare the order and sizes of the vocabulary's shards"
        raise ValueError(
            f"{stack}: `{objective}` is not what is trained: the loss is {float(loss):.6g}, the objective of the "
            f"logits is {expected:.6g}; {advice}"
        )
    ranks = dist.is_available() and dist.is_initialized()
    if not ranks or dist.get_rank() == 0:
        shared = "" if shard is None else f", with {dist.get_world_size(shard.group)} ranks that share the vocabulary"
        print(f"deftune: {stack} trains `{objective}`: loss {expected:.6g} (sum) verified from the logits{shared}")


def whole_rows(logits: Tensor, shard: VocabShard) -> Tensor:
    """The logits of all classes from those of the ranks of a shard."""
    shard = shard.checked(logits.shape[-1], logits.device, "logits")
    assert shard.layout is not None
    mine = logits.new_zeros(*logits.shape[:-1], shard.largest)
    mine[..., : logits.shape[-1]] = logits
    parts = [torch.empty_like(mine) for _ in shard.layout]
    dist.all_gather(parts, mine, group=shard.group)
    ordered = sorted(zip(shard.layout, parts), key=lambda pair: pair[0])
    return torch.cat([part[..., :size] for (_, size), part in ordered], -1)
