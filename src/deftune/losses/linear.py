"""`linear_loss`: from hidden states to gradients, any objective at the cost of NLL, without an [N, V] tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.autograd import Function

from deftune.losses.backends import choose
from deftune.losses.checks import first_only
from deftune.losses.chunks import Backend, scaled_gradients
from deftune.losses.dtensors import check_divided_rows, is_dtensor, local_head
from deftune.losses.eager import eager
from deftune.losses.from_log_probs import MinusGate
from deftune.losses.head import Head
from deftune.losses.request import (
    Gradients,
    Request,
    Result,
    make_request,
)
from deftune.losses.shards import VocabShard
from deftune.losses.sparse import Sparse
from deftune.losses.statistics import compute_dtype, wide
from deftune.losses.torch_backend import TorchBackend
from deftune.objectives import Context, Objective, TokenStats
from deftune.objectives import objective as parse_objective


class _Options(TypedDict, total=False):
    """The keywords of `linear_loss`, for type checkers."""

    bias: Tensor | None
    softcap: float | None
    logit_scale: float
    reduction: str
    num_items: Tensor | float | None
    weights: Tensor | None
    context: Context | None
    backend: str
    chunk_rows: int | None
    sparse: Sparse | None
    shard: VocabShard | None


@overload
def linear_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, objective: str | Objective = "deft", *,
    return_stats: Literal[False] = False, **options: Unpack[_Options],
) -> Tensor: ...  # fmt: skip
@overload
def linear_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, objective: str | Objective = "deft", *,
    return_stats: Literal[True], **options: Unpack[_Options],
) -> tuple[Tensor, TokenStats]: ...  # fmt: skip
def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    objective: str | Objective = "deft",
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    num_items: Tensor | float | None = None,
    weights: Tensor | None = None,
    context: Context | None = None,
    backend: str = "auto",
    chunk_rows: int | None = None,
    sparse: Sparse | None = None,
    shard: VocabShard | None = None,
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, TokenStats]:
    """An objective's loss from hidden states and the head's weight, without the logits.

        z = softcap(logit_scale (h W^T + bias)),  d loss / d z_i = gate (P_i - [i = y])

    The value and the gradients are those of `token_loss` on float32 logits. Beyond the gradients, memory does not grow
    with the number of tokens. The forward pass computes the gradients of the inputs that require one (a frozen head
    costs no dW), and the backward pass multiplies them by the upstream gradient. For ``reduction="none"`` the backward
    pass recomputes them, for any upstream vector. Under autocast hidden and weight are cast to its dtype, as in a
    linear layer; the gradient of the weight is always accumulated in float32.

    Args:
        hidden: ``[..., D]``, the input of the head.
        weight: ``[V, D]``, of the head.
        targets: ``[...]`` token ids, already shifted; IGNORE_INDEX is skipped.
        objective: a spec such as ``"deft | floor(0.1)"``, or an `Objective`.
        bias: ``[V]``, of the head.
        softcap: c of softcap(a) = c tanh(a / c); None: no cap.
        logit_scale: the factor of the logits.
        reduction: ``mean``, ``sum`` or ``none``.
        num_items: the divisor of the mean: the supervised tokens of the whole optimizer step (default: of this call).
        weights: ``[...]``, constant factors of the tokens' losses.
        context: what the objective needs beyond the tokens (progress, special ids, step statistics).
        backend: ``graphs``, ``triton``, ``torch``, or several in order of preference: ``"triton,torch"``. ``auto``
            tries all three in this order; `deftune doctor` prints which one it takes. ``graphs`` keeps the buffers of a
            chunk allocated between calls; ``"triton,torch"`` does not.
        chunk_rows: the most tokens of a chunk: larger chunks are faster, smaller chunks take less memory. Default:
            4,096 if such a chunk takes less than 0.5 GiB, else a quarter of the tokens, at least 1,024 and at most
            4,096; twice as many on a GPU with a shard. ``graphs`` rounds up to a multiple of 128.
        sparse: the opt-in approximation of the gradients, `Sparse`.
        shard: the classes of this rank, if ranks share the vocabulary (`VocabShard`): weight and bias have only these
            classes, the loss is that of the whole vocabulary. Not needed if hidden and weight are DTensors.
        return_stats: also return the statistics of the supervised tokens, from the same pass.

    Returns:
        The loss, float32 (float64 for float64 inputs); with ``return_stats`` (loss, detached `TokenStats`).

    Raises:
        ValueError: an argument is wrong, or the named backend cannot run the call. A NaN on a GPU is raised at the
            next call, or by `raise_pending`.

    >>> hidden, weight = torch.eye(2, requires_grad=True), torch.tensor([[2.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    >>> loss = linear_loss(hidden, weight, torch.tensor([0, 2]), "linear")
    >>> loss.backward()
    >>> round(loss.item(), 4), hidden.grad
    (0.545, tensor([[-0.1413,  0.1413],
            [-0.0704,  0.0704]]))
    """
    head = Head(weight, bias, logit_scale, softcap, shard)
    sharded = shard is not None or any(is_dtensor(tensor) for tensor in (hidden, weight, bias, targets, weights))
    whole = not (return_stats or sharded or reduction == "none")
    if torch.compiler.is_compiling() and whole and isinstance(objective, str):
        # all that the signature of an operator can hold; the rest is a graph break
        if chunk_rows is None and sparse is None and (context is None or context.step is None):
            from deftune.losses.compiled import compiled_loss

            return compiled_loss(hidden, head, targets, objective, reduction, num_items, weights, context, backend)
    loss, stats = _loss_and_stats(
        hidden, head, targets, objective, backend, reduction=reduction, num_items=num_items, weights=weights,
        context=context, chunk_rows=chunk_rows, sparse=sparse,
    )  # fmt: skip
    return (loss, stats) if return_stats else loss


@eager
def _loss_and_stats(
    hidden: Tensor, head: Head, targets: Tensor, objective: str | Objective, backend: str, **options: Any
) -> tuple[Tensor, TokenStats]:
    objective, given = parse_objective(objective), hidden
    hidden, head, targets, options["weights"] = local_head(hidden, head, targets, options["weights"])
    check_divided_rows("hidden", given, objective, options["reduction"], options["num_items"], options["context"])
    result = fused_loss(make_request(hidden, head, targets, objective, **options), backend)
    assert result.loss is not None
    return result.loss.view(targets.shape) if options["reduction"] == "none" else result.loss, result.stats


@eager
def linear_token_stats(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    top_k: int = 0,
    backend: str = "auto",
    chunk_rows: int | None = None,
    shard: VocabShard | None = None,
) -> TokenStats:
    """The statistics of the supervised tokens from hidden states, without the logits.

    ``log_p`` and ``entropy`` are differentiable in ``hidden``, ``weight`` and ``bias``; the backward pass computes the
    logits again, chunk by chunk. ``log_collision`` is detached, because a focus is a constant for the gradient.

    Args:
        hidden: ``[..., D]``, the input of the head.
        weight: ``[V, D]``, of the head.
        targets: ``[...]`` token ids, already shifted; IGNORE_INDEX (-100) is skipped.
        top_k: how many of the largest log-probabilities to keep for `TokenStats.top_log_p`.
        bias: ``[V]``, of the head; this and the following as for `linear_loss`.
        softcap: logits become softcap * tanh(logits / softcap).
        logit_scale: the logits are multiplied by it.
        backend: what computes the statistics.
        chunk_rows: how many tokens are computed at a time.
        shard: this rank's part of the vocabulary.

    Returns:
        One entry for each supervised token, in the order of the targets.

    Raises:
        ValueError: as for `linear_loss`.

    >>> stats = linear_token_stats(torch.zeros(1, 2), torch.ones(4, 2), torch.tensor([3]))
    >>> stats.p, stats.concentration
    (tensor([0.2500], dtype=torch.float64), tensor([0.2500], dtype=torch.float64))
    """
    head = Head(weight, bias, logit_scale, softcap, shard)
    hidden, head, targets, _ = local_head(hidden, head, targets)
    request = make_request(hidden, head, targets, top_k=top_k, chunk_rows=chunk_rows)
    chosen, _ = choose(backend, request)
    inputs = request.hidden, head.weight, head.bias
    result = chosen.run(request.over(*inputs))
    log_p, entropy = _Statistics.apply(*inputs, chosen, result)  # pyright: ignore
    return replace(result.stats, log_p=log_p, entropy=entropy)


def fused_loss(request: Request, backend: str = "auto") -> Result:
    """Run a request that has an objective; the loss of the result is differentiable."""
    chosen, _ = choose(backend, request)
    inputs = request.hidden, request.head.weight, request.head.bias
    result = chosen.run(request.over(*inputs))
    if request.reduction == "none":
        log_p, _ = _Statistics.apply(*inputs, chosen, result)  # pyright: ignore
        values: Tensor = MinusGate.apply(log_p, result.gate, result.values)  # pyright: ignore
        zeros = values.new_zeros(len(request.hidden))
        loss = zeros.index_copy(0, result.request.supervised.index, values).to(compute_dtype(request.dtype))
    else:
        loss = _ReducedLoss.apply(*inputs, chosen, result)
    return replace(result, loss=loss, gradients=None)


# --- autograd ---------------------------------------------------------------------------------------------------------


class _ReducedLoss(Function):
    """A scalar loss: its gradients were made with it, and the backward multiplies them by the upstream gradient."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor | None:  # pyright: ignore
        _keep(ctx, *inputs)
        ctx.gradients = inputs[-1].gradients
        return inputs[-1].loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        saved = ctx.saved_tensors
        # handed out once: a second backward over the same graph makes them once more
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            gradients = ctx.backend.run(ctx.request.over(*saved)).gradients
        return _finished(ctx.backend, gradients, grad, saved)


class _Statistics(Function):
    """(log_p, entropy), whose backward recomputes the chunks."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:  # pyright: ignore
        _keep(ctx, *inputs)
        ctx.set_materialize_grads(False)
        stats = inputs[-1].stats
        return stats.log_p.clone(), stats.entropy.clone()

    @staticmethod
    def backward(  # pyright: ignore
        ctx: Any, grad_log_p: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad_log_p is None:
            if grad_entropy is None:
                return (None,) * 5
            grad_log_p = torch.zeros_like(grad_entropy)
        saved = ctx.saved_tensors
        backend = ctx.backend if grad_entropy is None else TorchBackend  # an entropy's gradient is not gate x error
        gradients = backend.recompute(
            ctx.request.over(*saved), ctx.needs_input_grad[:3], wide(-grad_log_p), grad_entropy
        )
        return _finished(backend, gradients, torch.ones((), device=grad_log_p.device), saved)


def _keep(
    ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, backend: type[Backend], result: Result
) -> None:
    """Store what a backward needs: the request without the tensors that autograd saves, and these tensors."""
    ctx.save_for_backward(hidden, weight, bias)
    ctx.request, ctx.backend = result.request.released(), backend


def _finished(
    backend: type[Backend], gradients: Gradients, factor: Tensor, inputs: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """factor * gradients in the dtypes of (hidden, weight, bias); the derivative of these gradients is refused."""
    done = scaled_gradients(backend, gradients, factor, [None if x is None else x.dtype for x in inputs])
    return *first_only(inputs, done), None, None
