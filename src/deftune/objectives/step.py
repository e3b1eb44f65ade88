"""Statistics of a whole optimizer step, over its micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from deftune.objectives.base import Objective, reduce_step
from deftune.objectives.grammar import objective as parse_objective
from deftune.objectives.stats import NO_CONTEXT, Context, StepStats, TokenStats


def step_stats(
    objective: Objective | str,
    batches: Iterable[TokenStats],
    *,
    context: Context | None = None,
    group: dist.ProcessGroup | None = None,
    local: bool = False,
) -> StepStats:
    """The statistics of a whole optimizer step that a step objective needs, such as the median NLL of `clip`.

    They come from a pass over the step's micro-batches without gradients, which costs one forward pass. Local
    objectives need no such pass. If torch.distributed is initialised, every rank must call this function, and all ranks
    get the same numbers.

    Args:
        objective: a spec or an `Objective`.
        batches: the token statistics of this rank's micro-batches; they may hold no supervised token.
        context: progress and special ids, for modifiers that need them.
        group: the process group of the ranks that hold the step's tokens; default: all ranks. Ranks that share a
            vocabulary (tensor parallel) have the same tokens: pass the data-parallel group, or ``local=True``.
        local: the batches are the whole step; no other rank is asked.

    Returns:
        A `StepStats` for ``Context(step=...)``.

    Raises:
        ValueError: the step has no supervised token on any rank, there is no batch, or the objective needs a context
            that was not given.

    >>> from deftune.objectives.stats import from_columns
    >>> half = from_columns([-1.0, -2.0], [0.0, 0.0], [0.0, 0.0], vocab_size=4)
    >>> step_stats("clip", [half, half]).values
    {'median nll': tensor(1.5000, dtype=torch.float64)}
    """
    objective = parse_objective(objective)
    stats = TokenStats.cat(batches)
    values: dict[str, Tensor] = {}
    ranks = 1 if local else _ranks(group)
    num_items = int(_sum_over_ranks(stats.log_p.new_tensor(len(stats)), ranks, group))
    if num_items == 0:
        raise ValueError("step_stats: the step has no supervised token on any rank; skip it or check the labels")
    context = replace(context or NO_CONTEXT, step=StepStats(values, num_items))
    for statistic in objective.step_statistics:  # each may read the ones before it
        column = statistic.column(stats, context).detach()
        values[statistic.key] = _reduce_over_ranks(column, statistic.reduce, num_items, ranks, group)
    return StepStats(values, num_items)


def _ranks(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def _sum_over_ranks(value: Tensor, ranks: int, group: dist.ProcessGroup | None) -> Tensor:
    if ranks > 1:
        dist.all_reduce(value, group=group)
    return value


def _reduce_over_ranks(
    column: Tensor, how: Literal["mean", "median"], num_items: int, ranks: int, group: dist.ProcessGroup | None
) -> Tensor:
    if how == "mean":
        return _sum_over_ranks(column.sum(), ranks, group) / num_items
    if ranks > 1:  # a median needs every value: columns padded to the longest, with their lengths
        lengths = [torch.zeros(1, dtype=torch.long, device=column.device) for _ in range(ranks)]
        dist.all_gather(lengths, torch.tensor([len(column)], device=column.device), group=group)
        longest = max(int(n) for n in lengths)
        padded = torch.cat([column, column.new_zeros(longest - len(column))])
        gathered = [torch.empty_like(padded) for _ in range(ranks)]
        dist.all_gather(gathered, padded, group=group)
        column = torch.cat([part[: int(n)] for part, n in zip(gathered, lengths)])
    return reduce_step(column, how)
