"""`loss_from_log_probs`: an objective's loss from log-probabilities that another engine computed, without logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from deftune.losses.checks import check_context, check_float, first_only
from deftune.losses.eager import eager
from deftune.losses.reduction import check_step
from deftune.losses.statistics import wide
from deftune.objectives import Context, Objective, TokenStats
from deftune.objectives import objective as parse_objective
from deftune.objectives.stats import NO_CONTEXT, STATISTICS, from_columns


@eager
def loss_from_log_probs(
    log_p: Tensor,
    objective: str | Objective = "deft",
    *,
    vocab_size: int,
    entropy: Tensor | None = None,
    log_collision: Tensor | None = None,
    targets: Tensor | None = None,
    context: Context | None = None,
) -> Tensor:
    """The loss of each token from its log-probability; the gradient that arrives at ``log_p`` is minus the gate.

        d loss / d log_p = -gate,  so that  d loss / d z_i = gate (P_i - [i = y])  through any differentiable log_p(z)

    Entropy and collision are constants of the loss: no gradient flows through them, whatever graph they carry. Where a
    column that the objective reads is NaN, the loss and its gradient are NaN.

    Args:
        log_p: ``[tokens]`` log-probabilities of the targets, float32 or float64, supervised tokens only; values above
            0 are taken for rounding.
        objective: a spec or an objective. Objectives that read the likeliest tokens (`eaft`) need logits: use
            `token_loss`.
        vocab_size: V.
        entropy: ``[tokens]``; may be left out where `columns_read` does not name it.
        log_collision: ``[tokens]``, log sum P^2, values above 0 are taken for rounding; likewise.
        targets: ``[tokens]`` ids; may be left out where the objective does not read them (``| eos(...)`` does).
        context: progress, special ids, step statistics, as in `token_loss`.

    Returns:
        ``[tokens]`` losses in the dtype of ``log_p``.

    Raises:
        ValueError: a column that the objective reads is missing, the columns are not flat or not equally long, or
            ``log_p`` has a half-precision dtype.

    >>> log_p = torch.tensor([-2.0], requires_grad=True)
    >>> loss = loss_from_log_probs(log_p, "linear", vocab_size=9)
    >>> loss.sum().backward()
    >>> loss.detach(), log_p.grad
    (tensor([0.8647]), tensor([-0.1353]))
    """
    check_context(context)
    objective, context = parse_objective(objective), context or NO_CONTEXT
    check_float(log_p, "log_p")
    if log_p.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"log_p: must be float32 or float64, got {log_p.dtype}; a gate from rounded log-probabilities is another "
            f"objective, so compute them in float32"
        )
    read = _read_by(objective)
    if "top_log_p" in read:
        raise ValueError(f"`{objective}` reads the likeliest tokens of each row; use deftune.token_loss on the logits")
    given = {"entropy": entropy, "log_collision": log_collision, "targets": targets}
    for name in sorted(read):
        if given[name] is None:
            raise ValueError(f"`{objective}` reads {name}, which this call lacks; pass {name}=...")
    check_step(objective, context, None, log_p.numel())
    unread = torch.full_like(log_p, torch.nan)
    stats = from_columns(
        wide(log_p.detach().clamp(max=0)),
        wide(unread if entropy is None else entropy.detach()),
        wide(unread if log_collision is None else log_collision.detach().clamp(max=0)),
        vocab_size=vocab_size,
        targets=targets,
    )
    gate, value = objective.evaluate(stats, context)
    # p^a with a NaN focus is 1, as 0^0 is: a column without a number must not train as NLL
    columns = [stats.log_p, *(getattr(stats, name) for name in sorted(read) if name in STATISTICS)]
    unknown = torch.stack(columns).isnan().any(0)
    return MinusGate.apply(log_p, gate.masked_fill(unknown, torch.nan), value.masked_fill(unknown, torch.nan))  # pyright: ignore


def columns_read(objective: str | Objective) -> frozenset[str]:
    """What the objective reads beside ``log_p``: other `STATISTICS`, and "top_log_p" for the likeliest tokens.

    >>> sorted(columns_read("deft | blend(mile, 0.5)")), columns_read("cayley")
    (['entropy', 'log_collision'], frozenset())
    """
    return _read_by(parse_objective(objective)) - {"targets"}


def _read_by(objective: Objective) -> frozenset[str]:
    """The columns of `TokenStats` that the objective reads beside ``log_p``: it is tried on two tokens."""
    half = torch.full((2, 2), 0.5, dtype=torch.float64, device="cpu").log()
    stats = _Watched(
        **dict.fromkeys(STATISTICS, half[0]),
        targets=torch.arange(2, device="cpu"),
        vocab_size=2,
        _top_source=lambda k: half,
    )
    objective.evaluate(stats, Context(progress=1.0, special_ids=(0,)))
    return frozenset(stats.__dict__.get("read", ()))


class _Watched(TokenStats):
    """Statistics that note which of their columns were read."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("top_log_p", "targets") or (name in STATISTICS and name != "log_p"):
            object.__getattribute__(self, "__dict__").setdefault("read", set()).add(name)
        return object.__getattribute__(self, name)


class MinusGate(Function):
    """The value of each token as it is; its derivative with respect to log_p is -gate."""

    @staticmethod
    def forward(ctx: Any, log_p: Tensor, gate: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(log_p, gate)
        return value.to(log_p.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        log_p, gate = ctx.saved_tensors
        # a shut gate is 0 whatever the upstream says: 0 * inf must not reach the model
        return *first_only([log_p], [torch.where(gate == 0, 0.0, -grad * gate.to(grad.dtype))]), None, None
