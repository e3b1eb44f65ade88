"""`token_loss`: an objective on logits, with backward = gate x (softmax - onehot)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from deftune.losses.checks import check_logits, check_options, second_derivative_error
from deftune.losses.dtensors import check_divided_rows, local_logits
from deftune.losses.eager import eager
from deftune.losses.reduction import check_step, reduce_losses
from deftune.losses.shards import VocabShard
from deftune.losses.statistics import (
    block_rows,
    compute_dtype,
    logits_stats,
    plain,
    row_blocks,
    supervised_index,
    widened_difference,
)
from deftune.objectives import IGNORE_INDEX, Context, Objective
from deftune.objectives import objective as parse_objective
from deftune.objectives.stats import NO_CONTEXT


@eager
def token_loss(
    logits: Tensor,
    targets: Tensor,
    objective: str | Objective = "deft",
    *,
    reduction: str = "mean",
    num_items: Tensor | float | None = None,
    weights: Tensor | None = None,
    context: Context | None = None,
    shard: VocabShard | None = None,
) -> Tensor:
    """The loss of an objective from logits, in place of ``torch.nn.functional.cross_entropy``.

        d loss / d z_i = gate (P_i - [i = y])

    The backward pass keeps no ``[tokens, V]`` probabilities. `linear_loss` starts from hidden states and needs no
    logits at all.

    Args:
        logits: ``[..., V]``.
        targets: ``[...]`` token ids, already shifted: the target at a place is the next token. IGNORE_INDEX (-100)
            marks tokens without a loss.
        objective: a spec such as ``"deft | floor(0.1)"``, or an `Objective`.
        reduction: ``mean``, ``sum``, or ``none``: one loss per target, 0 at ignored ones.
        num_items: the divisor of the mean: the supervised tokens of the whole optimizer step, over all micro-batches
            and ranks, never times the number of ranks. Default: those of this call.
        weights: ``[...]``, constant factors of the tokens' losses.
        context: what the objective needs beyond the tokens (progress, special ids, step statistics).
        shard: the classes of this rank, if ranks share the vocabulary (`VocabShard`): the logits have only these
            classes, the loss is that of the whole vocabulary. Not needed for a DTensor sharded on its last dimension.

    Returns:
        The loss, float32 (float64 for float64 logits).

    Raises:
        ValueError: an argument is wrong, a label is outside [0, V), logits are NaN, or the objective needs a context
            that was not given.

    >>> logits = torch.tensor([[2.0, 0.0, -1.0]], requires_grad=True)
    >>> token_loss(logits, torch.tensor([1]), "linear").backward()
    >>> logits.grad
    tensor([[ 0.0964, -0.1012,  0.0048]])
    """
    objective = parse_objective(objective)
    given = logits
    logits, targets, weights, shard = local_logits(logits, targets, weights, shard)
    check_divided_rows("logits", given, objective, reduction, num_items, context)
    check_logits(logits, targets, shard is not None)
    check_options(targets, reduction, num_items, weights, context)
    if shard is not None:
        shard = shard.checked(logits.shape[-1], logits.device, "logits")
    flat = targets.reshape(-1)
    columns = _TokenLoss.apply(logits, flat, objective, context or NO_CONTEXT, num_items, shard)
    losses: Tensor = columns[0]  # pyright: ignore
    losses = losses.to(compute_dtype(logits.dtype)) if reduction == "none" else losses
    if weights is not None:
        factor = torch.where(flat == IGNORE_INDEX, 0.0, weights.reshape(-1).to(losses.dtype))
        losses = torch.where(factor == 0, 0.0, losses * factor)  # 0 * inf = 0
    if reduction == "none":
        return losses.view(targets.shape)
    count = (flat != IGNORE_INDEX).sum()
    return reduce_losses(losses, reduction, num_items, count).to(compute_dtype(logits.dtype))


class _TokenLoss(Function):
    """(losses, gate, shift, log_sum, error), each one entry per row, 0 at ignored ones; the first is differentiable."""

    @staticmethod
    def forward(
        logits: Tensor, targets: Tensor, objective: Objective, context: Context, num_items: Tensor | float | None,
        shard: VocabShard | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        stats, index, sums, log_sum = logits_stats(logits, targets, shard)
        check_step(objective, context, num_items, len(index))
        gate, loss = objective.evaluate(stats, context)
        columns = (loss, gate, sums.shift.to(stats.log_p.dtype), log_sum, stats.error)
        return tuple(column.new_zeros(targets.shape).index_copy_(0, index, column) for column in columns)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        logits, targets = inputs[:2]
        ctx.shard = inputs[-1]
        _, *rows = output
        ctx.mark_non_differentiable(*rows)
        ctx.save_for_backward(logits, targets, *rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        logits, targets, gate, shift, log_sum, error = ctx.saved_tensors
        # a gate of 0 gives 0 for any upstream: 0 * inf must not reach the logits
        scale = torch.where(gate == 0, 0.0, grad * gate)
        if ctx.shard is not None:
            columns = ctx.shard.columns(targets, logits.shape[-1]).clamp(min=-1)  # and none is IGNORE_INDEX
            targets = torch.where(targets == IGNORE_INDEX, targets, columns)
        grad = _GateTimesError.apply(logits, targets, scale, shift, log_sum, error, ctx.shard is not None)
        return grad, *(None,) * 5  # pyright: ignore

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        logits, targets, objective, context, _, shard = inputs
        if shard is not None:
            raise ValueError("shard: a loss over ranks cannot be mapped by torch.func.vmap; pass a batch of rows")
        if objective.kind != "local" and context.step is None:
            raise ValueError(f"`{objective}` depends on the whole optimizer step and cannot be mapped over its parts")
        logits = _batch_first(logits, in_dims[0], info.batch_size)
        targets = _batch_first(targets, in_dims[1], info.batch_size)
        out = _TokenLoss.apply(logits, targets.flatten(), objective, context, None, None)
        return tuple(column.view(info.batch_size, -1) for column in out), (0,) * len(out)  # pyright: ignore


class _GateTimesError(Function):
    """scale * (softmax - onehot), rows of 0 at ignored tokens: the whole backward of every objective.

    ``partial``: the columns are a shard's; a target below 0 is on another rank, and its row has no onehot.
    """

    @staticmethod
    def forward(
        logits: Tensor, targets: Tensor, scale: Tensor, shift: Tensor, log_sum: Tensor, error: Tensor, partial: bool
    ) -> Tensor:
        index = supervised_index(targets)
        grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
        if not grad.shape[-1]:
            return grad
        if len(index) < targets.numel():
            grad.zero_()
        flat = grad.view(-1, grad.shape[-1])
        dtype = compute_dtype(logits.dtype)
        size = min(block_rows(flat.shape[-1], dtype, logits.device), max(1, len(index)))
        e = torch.empty(size, flat.shape[-1], dtype=dtype, device=logits.device)
        inverse_sum = torch.exp(-log_sum)
        in_place = len(index) == targets.numel() and flat.dtype == dtype
        with plain(logits.device):
            for part, z in row_blocks(logits, index, size):
                rows, block = index[part], flat[part] if in_place else e[: len(z)]
                widened_difference(z, shift[rows, None], block)
                block.exp_().mul_((scale[rows] * inverse_sum[rows])[:, None].to(dtype))
                y, at_target = targets[rows, None], (-scale[rows] * error[rows])[:, None].to(dtype)
                if partial:
                    y, own = y.clamp(min=0), y >= 0
                    at_target = torch.where(own, at_target, block.gather(-1, y))
                block.scatter_(-1, y, at_target)
                if not in_place:
                    flat.index_copy_(0, rows, block.to(flat.dtype))
        return grad

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:  # pyright: ignore
        raise second_derivative_error()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        first, *rest = (_batch_first(x, dim, info.batch_size) for x, dim in zip(inputs[:-1], in_dims))
        return _GateTimesError.apply(first, *(x.flatten() for x in rest), inputs[-1]), 0  # pyright: ignore


def _batch_first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
