"""Reduction of the tokens' losses: the only code that divides by a token count."""

from __future__ import annotations

from torch import Tensor

from deftune.losses.checks import check_count
from deftune.objectives.base import Objective
from deftune.objectives.stats import Context, StepStats


def reduce_losses(losses: Tensor, reduction: str, num_items: Tensor | float | None, count: Tensor | int) -> Tensor:
    """``sum``; ``mean``: sum / num_items, by default / the call's supervised tokens (0: 0)."""
    total = losses.sum()
    return total if reduction == "sum" else total / mean_items(num_items, count)


def mean_items(num_items: Tensor | float | None, count: Tensor | int) -> Tensor | float:
    """The divisor of a mean."""
    if num_items is None:
        return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
    return num_items.reshape(()) if isinstance(num_items, Tensor) else num_items


def check_step(objective: Objective, context: Context, num_items: Tensor | float | None, count: int) -> None:
    """Refuse an objective of the whole step for a part of the step without its statistics, and a missing context."""
    check_count(num_items, count)
    for field in sorted(objective.requires):
        context.need_progress(objective) if field == "progress" else context.need_special_ids(objective)
    if context.step == "deferred" and objective.kind == "step":
        raise ValueError(
            f"`{objective}` needs a statistic of the whole step before its backward, which a deferred mass cannot "
            f"replace; pass context=Context(step=deftune.step_stats(objective, batches))"
        )
    if isinstance(context.step, StepStats) and num_items is not None and float(num_items) != context.step.num_items:
        raise ValueError(
            f"num_items: {float(num_items):g}, but the context's step statistics are of {context.step.num_items} "
            f"tokens; make them anew for every optimizer step, over all of its tokens"
        )
    if objective.kind == "local" or context.step is not None or num_items is None or float(num_items) == count:
        return
    deferred = (
        ', or context=Context(step="deferred") and rescale the accumulated gradients once by num_items / mass'
        if objective.kind == "mass"
        else ""
    )
    raise ValueError(
        f"`{objective}` depends on the whole optimizer step, and this call holds {count} of its {float(num_items):g} "
        f"supervised tokens; pass context=Context(step=deftune.step_stats(objective, batches)) from a no-grad "
        f"pre-pass over the step{deferred}"
    )
