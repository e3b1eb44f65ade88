"""What the checks of the adapters compare with: objectives from logits, by plain torch operations in float64.

Nothing of `deftune.losses` computes these figures, so that a defect there is noticed too.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from deftune.losses import VocabShard
from deftune.objectives import IGNORE_INDEX, Context, Objective, TokenStats
from deftune.objectives.stats import from_columns

TOLERANCE = 1e-4  # relative; the compared losses are float32 sums
ROWS = 256  # whose logits are held in float64 at a time


def plain_stats(log_P: Tensor, targets: Tensor, top_k: int = 0) -> TokenStats:
    """The statistics of log-probabilities ``[tokens, V]``, every target an id.

    >>> plain_stats(torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([1])).concentration
    tensor([0.3750])
    """
    P = log_P.exp()
    return from_columns(
        log_P.gather(-1, targets[:, None])[:, 0],
        -torch.xlogy(P, P).sum(-1),
        torch.logsumexp(2 * log_P, -1).clamp(max=0),
        vocab_size=log_P.shape[-1],
        targets=targets,
        top_log_p=log_P.topk(min(top_k, log_P.shape[-1]), -1).values,
    )


def plain_losses(logits: Tensor, targets: Tensor, objective: Objective, context: Context) -> Tensor:
    """The objective's loss of each supervised token, ``[supervised]``; logits ``[..., V]``, targets ``[...]``."""
    supervised = (targets != IGNORE_INDEX).reshape(-1).nonzero()[:, 0]
    rows, ids = logits.detach().reshape(-1, logits.shape[-1]), targets.reshape(-1)
    losses = [torch.empty(0, dtype=torch.float64, device=logits.device)]
    for places in supervised.split(ROWS):
        log_P = torch.log_softmax(rows[places].double(), -1)
        losses.append(objective.loss(plain_stats(log_P, ids[places], objective.top_k), context))
    return torch.cat(losses)


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
    expected = float(plain_losses(whole, targets, objective, context).sum())
    if not math.isclose(float(loss), expected, rel_tol=TOLERANCE, abs_tol=1e-12) and math.isfinite(expected):
        advice = "look for a second loss"
        if shard is not None:
            advice += ", and compare the order and sizes of the vocabulary's shards"
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
