"""The fused loss as one opaque operator for torch.compile.

An operator's signature can hold a spec string; an `Objective` instance or step statistics make a graph break.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deftune.losses.backends import choose
from deftune.losses.checks import check_options, check_targets, first_only
from deftune.losses.chunks import scaled_gradients
from deftune.losses.head import Head, check_head
from deftune.losses.request import gemm_dtype, make_request, wanted_gradients
from deftune.losses.statistics import compute_dtype
from deftune.objectives import Context
from deftune.objectives import objective as parse_objective


def compiled_loss(
    hidden: Tensor, head: Head, targets: Tensor, spec: str, reduction: str, num_items: Tensor | float | None,
    weights: Tensor | None, context: Context | None, backend: str,
) -> Tensor:  # fmt: skip
    """The loss as one opaque operator in a compiled graph."""
    check_head(hidden, head)
    check_targets(targets, hidden, "hidden")
    check_options(targets, reduction, num_items, weights, context)
    if num_items is not None and not isinstance(num_items, Tensor):
        num_items = torch.tensor(float(num_items), dtype=torch.float64, device="cpu")
    moment, special_ids = (None, None) if context is None else (context.progress, context.special_ids)
    # as a tensor: a number in the operator's signature would be compiled in, again at every step
    progress = None if moment is None else torch.tensor(moment, dtype=torch.float64, device="cpu")
    return linear_loss_op(
        hidden, head.weight, targets, head.bias, weights, num_items, spec, reduction, head.softcap, head.scale,
        progress, None if special_ids is None else list(special_ids), backend, gemm_dtype(hidden),
        list(wanted_gradients(hidden, head)),
    )[0]  # fmt: skip


@torch.library.custom_op("deftune::linear_loss", mutates_args=())
def linear_loss_op(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    weights: Tensor | None,
    num_items: Tensor | None,
    spec: str,
    reduction: str,
    softcap: float | None,
    logit_scale: float,
    progress: Tensor | None,
    special_ids: list[int] | None,
    backend: str,
    dtype: torch.dtype,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, dX, dW, db); a gradient that is not wanted is empty."""
    context = Context(
        None if progress is None else float(progress), None if special_ids is None else tuple(special_ids)
    )
    request = make_request(
        hidden, Head(weight, bias, logit_scale, softcap), targets, parse_objective(spec), reduction=reduction,
        num_items=num_items, weights=weights, context=context, dtype=dtype, wanted=wanted,
    )  # fmt: skip
    chosen, _ = choose(backend, request)
    result = chosen.run(request)
    loss, grads = result.loss, result.gradients
    assert loss is not None and grads is not None
    # d hidden is rounded to its dtype (not to float16, before a loss scale); dW and db stay as accumulated
    full = compute_dtype(dtype)
    kept = full if hidden.dtype == torch.float16 else hidden.dtype
    gradients = scaled_gradients(chosen, grads, torch.ones((), device=hidden.device), [kept, full, full])
    dx, dw, db = (loss.new_empty(0) if grad is None else grad for grad in gradients)
    return loss, dx.view(hidden.shape) if wanted[0] else dx, dw, db


@linear_loss_op.register_fake
def _(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    dtype, wanted = rest[-2:]
    full = compute_dtype(dtype)
    none = hidden.new_empty(0, dtype=full)
    return (
        hidden.new_empty((), dtype=full),
        hidden.new_empty(hidden.shape, dtype=full if hidden.dtype == torch.float16 else hidden.dtype)
        if wanted[0]
        else none.clone(),
        weight.new_empty(weight.shape, dtype=full) if wanted[1] else none.clone(),
        weight.new_empty(weight.shape[:1], dtype=full) if wanted[2] else none.clone(),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, _, bias, *_ = inputs
    ctx.save_for_backward(*output[1:])
    ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)


def _backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    done = [
        (saved * grad).to(dtype) if needed and dtype is not None else None
        for saved, needed, dtype in zip(ctx.saved_tensors, (ctx.needs_input_grad[i] for i in (0, 1, 3)), ctx.dtypes)
    ]
    dx, dw, db = first_only(ctx.saved_tensors, done)
    return dx, dw, None, db, *(None,) * 11


linear_loss_op.register_autograd(_backward, setup_context=_setup)
