"""`linear_loss`: hidden states to gradients, an objective at the price of NLL, without an [N, V] tensor.

One driver for every backend: supervised rows are taken out first, then chunk by chunk: forward GEMM, row sums, the
objective as plain PyTorch on the chunk's vectors, two gradient GEMMs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from deftune.losses.backends import BACKENDS
from deftune.losses.call import Call, gemm_dtype, prepare
from deftune.losses.checks import check_reduction, check_targets, check_weights, second_derivative_error
from deftune.losses.chunks import Chunk, Gradients
from deftune.losses.eager import eager
from deftune.losses.head import check_head, check_together
from deftune.losses.reduction import check_step, mean_items
from deftune.losses.sparse import Sparse
from deftune.losses.statistics import compute_dtype, plain, wide
from deftune.losses.torch_backend import TorchBackend
from deftune.objectives import Context, Objective, TokenStats
from deftune.objectives import objective as parse_objective
from deftune.objectives.step import step_stats


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
    graphs: bool = True,
    sparse: Sparse | None = None,
) -> Tensor:
    """An objective's loss from ``[..., D]`` hidden states and the head's ``[V, D]`` weight, without the logits.

        z = softcap(logit_scale (h W^T + bias)),  d loss / d z_i = gate (P_i - [i = y])

    The value and the gradients are those of `token_loss` on fp32 logits; memory does not grow with the tokens beyond
    the gradients. Gradients are made in the forward pass, for what requires one (a frozen head costs no dW), and scaled
    by the upstream in the backward. ``reduction="none"`` recomputes them there, for any upstream vector. ``backend`` is
    ``auto``, ``triton`` or ``torch``; `deftune doctor` prints what auto takes. ``chunk_rows`` bounds the tokens
    worked on at a time (default: a quarter of them, from 1,024 to 4,096; more are faster, fewer take less memory;
    graphs round it up to 128). A small head's chunks run as CUDA graphs, which keep a chunk's memory from call to call;
    ``graphs=False`` keeps nothing. Under autocast hidden and weight take its dtype, as in a linear layer; the head's
    gradient is accumulated in float32 in any case. ``sparse`` is the opt-in approximation of `Sparse`.

    >>> hidden, weight = torch.eye(2, requires_grad=True), torch.tensor([[2.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    >>> loss = linear_loss(hidden, weight, torch.tensor([0, 2]), "linear")
    >>> loss.backward()
    >>> round(loss.item(), 4), hidden.grad
    (0.545, tensor([[-0.1413,  0.1413],
            [-0.0704,  0.0704]]))
    """
    if torch.compiler.is_compiling():
        return _under_compile(
            hidden,
            weight,
            targets,
            objective,
            bias,
            softcap,
            logit_scale,
            reduction,
            num_items,
            weights,
            context,
            backend,
            chunk_rows,
            graphs,
            sparse,
        )
    return linear_loss_with_stats(
        hidden, weight, targets, objective, bias=bias, softcap=softcap, logit_scale=logit_scale, reduction=reduction,
        num_items=num_items, weights=weights, context=context, backend=backend, chunk_rows=chunk_rows, graphs=graphs,
        sparse=sparse,
    )[0]  # fmt: skip


@eager
def linear_loss_with_stats(
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
    graphs: bool = True,
    sparse: Sparse | None = None,
) -> tuple[Tensor, TokenStats]:
    """`linear_loss`, and the statistics of the supervised tokens that the same pass measured (detached)."""
    objective = parse_objective(objective)
    check_call(hidden, weight, targets, bias, softcap, logit_scale, reduction, num_items, weights)
    check_sparse(sparse, softcap, reduction)
    wanted = wants(hidden, weight, bias)
    keep = reduction != "none" and any(wanted)
    call = prepare(
        hidden, weight, targets, objective, bias, softcap, logit_scale, weights, context, backend,
        chunk_rows=chunk_rows, keep=keep, keep_hidden=wanted[0], graphs=graphs, sparse=sparse,
    )  # fmt: skip
    check_step(objective, call.context, num_items, call.count)
    if reduction == "none":
        losses, columns, top = _PerTokenLoss.apply(call.hidden, call.weight, call.bias, call)  # pyright: ignore
        return losses.view(targets.shape), call.stats(columns, top)
    scale = scale_of(call, reduction, num_items)
    loss, columns, top = _FusedLoss.apply(call.hidden, call.weight, call.bias, call, scale)  # pyright: ignore
    return loss, call.stats(columns, top)


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
) -> TokenStats:
    """The statistics of the supervised tokens from hidden states, without the logits.

    ``log_p`` and ``entropy`` are differentiable, for any upstream vector, in ``hidden``, ``weight`` and ``bias``; their
    backward recomputes the chunks. ``log_collision`` is detached (a focus is a stop-gradient quantity). ``top_k`` asks
    for that many of the largest log-probabilities (`TokenStats.top_log_p`).

    >>> stats = linear_token_stats(torch.zeros(1, 2), torch.ones(4, 2), torch.tensor([3]))
    >>> stats.p, stats.concentration
    (tensor([0.2500], dtype=torch.float64), tensor([0.2500], dtype=torch.float64))
    """
    check_head(hidden, weight, bias, logit_scale, softcap)
    check_targets(targets, hidden.shape[:-1], "hidden")
    check_together(hidden, targets)
    call = prepare(
        hidden, weight, targets, None, bias, softcap, logit_scale, None, None, backend, top_k, chunk_rows=chunk_rows
    )
    *columns, top = _Statistics.apply(call.hidden, call.weight, call.bias, call)  # pyright: ignore
    return call.stats(columns, top)


def check_call(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, softcap: float | None, logit_scale: float,
    reduction: str, num_items: Tensor | float | None, weights: Tensor | None,
) -> None:  # fmt: skip
    """Everything that shapes, types and numbers on the host can tell."""
    check_head(hidden, weight, bias, logit_scale, softcap)
    check_targets(targets, hidden.shape[:-1], "hidden")
    check_together(hidden, targets)
    check_reduction(reduction, num_items)
    check_weights(weights, targets.shape)


def check_sparse(sparse: Sparse | None, softcap: float | None, reduction: str) -> None:
    """Refuse what the sparse mode would get wrong, or ignore."""
    if sparse is None:
        return
    if not isinstance(sparse, Sparse):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"sparse: a deftune.Sparse(share=...), got {type(sparse).__name__}")
    if softcap is not None:
        raise ValueError("sparse: not with a softcap, whose slope the sums of the left-out classes do not know")
    if reduction == "none":
        raise ValueError('sparse: needs reduction="mean" or "sum"; "none" makes its gradients anew in the backward')


def wants(*tensors: Tensor | None) -> list[bool]:
    """Which of them a gradient will be asked of."""
    enabled = torch.is_grad_enabled()
    return [enabled and tensor is not None and tensor.requires_grad for tensor in tensors]


def scale_of(call: Call, reduction: str, num_items: Tensor | float | None) -> Tensor | float:
    """What a sum over this call's tokens is multiplied with."""
    items = 1.0 if reduction == "sum" else mean_items(num_items, call.count)
    return 1.0 / (wide(items) if isinstance(items, Tensor) else items)


def _under_compile(
    hidden: Tensor, weight: Tensor, targets: Tensor, objective: str | Objective, bias: Tensor | None,
    softcap: float | None, logit_scale: float, reduction: str, num_items: Tensor | float | None, weights: Tensor | None,
    context: Context | None, backend: str, chunk_rows: int | None, graphs: bool,
    sparse: Sparse | None,
) -> Tensor:  # fmt: skip
    """One opaque operator in the compiled graph, where its signature can say it all; else a graph break."""
    stepwise = context is not None and context.step is not None
    plain_call = chunk_rows is None and graphs and sparse is None
    if not isinstance(objective, str) or stepwise or reduction == "none" or not plain_call:
        return linear_loss_with_stats(
            hidden, weight, targets, objective, bias=bias, softcap=softcap, logit_scale=logit_scale,
            reduction=reduction, num_items=num_items, weights=weights, context=context, backend=backend,
            chunk_rows=chunk_rows, graphs=graphs, sparse=sparse,
        )[0]  # fmt: skip
    from deftune.losses.compiled import linear_loss_op

    # a count in a tensor is looked at by the operator
    known = None if isinstance(num_items, Tensor) else num_items
    check_call(hidden, weight, targets, bias, softcap, logit_scale, reduction, known, weights)
    if isinstance(num_items, Tensor) and reduction != "mean":
        check_reduction(reduction, 1)
    if num_items is not None and not isinstance(num_items, Tensor):
        num_items = torch.tensor(float(num_items), dtype=torch.float64)
    dtype = gemm_dtype(hidden)
    wanted = wants(hidden, weight, bias)
    progress, special_ids = (None, None) if context is None else (context.progress, context.special_ids)
    # as a tensor: a number in the operator's signature would be compiled in, anew at every step
    moment = None if progress is None else torch.tensor(progress, dtype=torch.float64)
    return linear_loss_op(
        hidden, weight, targets, bias, weights, num_items, objective, reduction, softcap, logit_scale, moment,
        None if special_ids is None else list(special_ids), backend, dtype, wanted,
    )[0]  # fmt: skip


# --- the passes -------------------------------------------------------------------------------------------------------


def fused(call: Call, wanted: Sequence[bool], scale: Tensor | float) -> tuple[Tensor, Gradients, Tensor, Tensor | None]:
    """(loss, gradients, columns, likeliest tokens): forward and backward in one pass over the chunks."""
    objective, context = call.objective, call.context
    assert objective is not None
    with plain(call.hidden.device):
        replay, call.replay = call.replay, None
        if replay is not None:
            return replay.run(call, wanted, scale)
        own_mass = objective.kind == "mass" and context.step is None
        if own_mass:  # this call is the step: unnormalised first, then once by count / mass
            context = replace(context, step="deferred")
        elif objective.kind == "step" and context.step is None and call.count:
            # this call is the step, and its statistic must be known before the first gate: one more forward GEMM
            step = step_stats(objective, [call.stats(*call.measure_all())], context=context, local=True)
            context = replace(context, step=step)
        backend = call.make_backend()
        if call.sparse is not None:
            backend.thin(call.sparse)
        columns = call.new_columns()
        into: Gradients | None = None
        losses: list[Tensor] = []
        masses: list[Tensor] = []
        largest: list[Tensor | None] = []
        for chunk in call.chunks(backend, columns, any(wanted), call.top):
            into = into or call.new_gradients(wanted, own_mass)  # once the first GEMM is under way
            stats = call.chunk_stats(chunk)
            gate, value = call.weighted(chunk.part, *objective.evaluate(stats, context))
            losses.append(value)
            if own_mass:
                masses.append(objective.mass(stats, context).sum())
            if any(wanted):
                backend.add(chunk, gate, scale, into)
            largest.append(chunk.top)
        into = into or call.new_gradients(wanted)
        backend.end(into)
        loss = torch.cat(losses).sum() * scale if losses else columns.new_zeros(())
        if masses:
            mass = torch.stack(masses).sum()
            into.factor = torch.where(mass == 0, 0.0, call.count / mass)
            loss = loss * into.factor
        call.check_nan(columns[0])
        return loss.to(compute_dtype(call.dtype)), into, columns, call.top_log_p(largest, columns)


class _FusedLoss(Function):
    """(loss, columns, ...): gradients are made in the forward pass and handed out, scaled, in the backward."""

    @staticmethod
    def forward(  # pyright: ignore
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call, scale: Tensor | float
    ) -> tuple[Tensor | None, ...]:
        wanted = [call.training and needed for needed in ctx.needs_input_grad[:3]]
        loss, grads, columns, top = fused(call, wanted, scale)
        ctx.mark_non_differentiable(columns, *([] if top is None else [top]))
        ctx.set_materialize_grads(False)  # no zeros for what has no gradient; the loss always comes with one
        ctx.save_for_backward(hidden, weight, bias)
        ctx.call, ctx.scale, ctx.grads = call.released(), scale, grads
        return loss, columns, top

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        call = ctx.call.over(ctx.saved_tensors)
        # handed out once: a second backward over the same graph makes them anew
        grads = ctx.grads or fused(call, ctx.needs_input_grad[:3], ctx.scale)[1]
        ctx.grads = None
        return (*finished(call, grads, grad), None, None)


def finished(call: Call, grads: Gradients, factor: Tensor, *, to_parameters: bool = True) -> tuple[Tensor | None, ...]:
    """The gradients times a scalar, in their parameters' dtypes (or that of d hidden, and as accumulated)."""
    with plain(call.hidden.device):
        if grads.factor is not None:
            factor = factor * grads.factor
        there = (grads.hidden, grads.weight, grads.bias)
        kept = call.hidden if grads.factor is not None and call.hidden.dtype != torch.float16 else grads.hidden
        like = (call.hidden, call.weight, call.bias) if to_parameters else (kept, grads.weight, grads.bias)
        pairs = [(grad, as_.dtype) for grad, as_ in zip(there, like) if grad is not None and as_ is not None]
        scaled = iter(BACKENDS[call.backend].finish([g for g, _ in pairs], factor, [d for _, d in pairs]))
        done = tuple(None if grad is None else next(scaled) for grad in there)
    # under create_graph=True: a second derivative must not be lost silently
    return _FirstOnly.apply(call.hidden, call.weight, call.bias, *done) if torch.is_grad_enabled() else done  # pyright: ignore


class _FirstOnly(Function):
    """Gradients as they are, whose own derivative is refused."""

    @staticmethod
    def forward(  # pyright: ignore
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        return tuple(None if grad is None else grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:  # pyright: ignore
        raise second_derivative_error()


class _PerTokenLoss(Function):
    """(losses [N], columns, ...): the backward recomputes the chunks for any upstream vector."""

    @staticmethod
    def forward(  # pyright: ignore
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call
    ) -> tuple[Tensor | None, ...]:
        objective = call.objective
        assert objective is not None
        with plain(hidden.device):
            columns, top = call.measure_all()
            stats = call.stats(columns, top)
            everything = slice(0, call.count)
            gate, value = call.weighted(everything, *objective.evaluate(stats, call.context))
            losses = value.new_zeros(len(hidden)).index_copy_(0, call.index, value).to(compute_dtype(call.dtype))
        ctx.mark_non_differentiable(columns, *([] if top is None else [top]))
        ctx.save_for_backward(hidden, weight, bias, gate)
        ctx.call = call.released()
        return losses, columns, top

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        *inputs, gate = ctx.saved_tensors
        call = ctx.call.over(inputs)
        # a shut gate is 0 whatever the upstream says
        gate = torch.where(gate == 0, 0.0, wide(grad[call.index]) * gate)
        grads = _recompute(call, ctx.needs_input_grad[:3], gate, None)
        return (*finished(call, grads, torch.ones((), device=gate.device)), None)


class _Statistics(Function):
    """(log_p, entropy, log_collision, likeliest tokens) with gradients through the first two."""

    @staticmethod
    def forward(  # pyright: ignore
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: Call
    ) -> tuple[Tensor | None, ...]:
        with plain(hidden.device):
            columns, top = call.measure_all()
        log_p, entropy, log_collision = (column.clone() for column in columns[:3])
        ctx.mark_non_differentiable(log_collision, *([] if top is None else [top]))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.call = call.released()
        return log_p, entropy, log_collision, top

    @staticmethod
    def backward(  # pyright: ignore
        ctx: Any, grad_log_p: Tensor | None, grad_entropy: Tensor | None, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        if grad_log_p is not None:
            gate = -grad_log_p
        elif grad_entropy is not None:
            gate = torch.zeros_like(grad_entropy)
        else:
            return (None,) * 4
        call = ctx.call.over(ctx.saved_tensors)
        if grad_entropy is not None:  # not gate x error: see _recompute
            call = replace(call, backend="torch")
        grads = _recompute(call, ctx.needs_input_grad[:3], wide(gate), grad_entropy)
        return (*finished(call, grads, torch.ones((), device=gate.device)), None)


def _recompute(call: Call, wanted: Sequence[bool], gate: Tensor, grad_entropy: Tensor | None) -> Gradients:
    """Gradients of sum gate * NLL + grad_entropy * entropy, the chunks measured anew.

    dH/dz_i = -P_i (log P_i + H) is not gate x error: it is written into the torch backend's float32 E.
    """
    with plain(call.hidden.device):
        backend = call.make_backend()
        into = call.new_gradients(wanted)
        for chunk in call.chunks(backend, call.new_columns(), True, 0):
            if grad_entropy is None:
                backend.add(chunk, gate[chunk.part], 1.0, into)
            else:
                assert isinstance(backend, TorchBackend)
                _add_entropy(backend, chunk, gate[chunk.part], grad_entropy[chunk.part], into)
        backend.end(into)
    return into


def _add_entropy(backend: TorchBackend, chunk: Chunk, gate: Tensor, h: Tensor, into: Gradients) -> None:
    """dz_i = P_i (gate - h H - h log P_i), and at the target P_y (...) - gate, each times the softcap's slope."""
    log_p, entropy, _, log_sum, shift = chunk.columns
    e = chunk.e
    assert e is not None
    # E carries the slope already, which log P must not
    u = e.log() if backend.head.softcap is None else backend.logits(chunk.x) - shift[:, None].to(e.dtype)
    log_probs = torch.where(e == 0, 0.0, u - log_sum[:, None].to(e.dtype))
    e *= (gate - h * entropy)[:, None].to(e.dtype) - h[:, None].to(e.dtype) * log_probs
    at_target = gate * torch.expm1(log_p) - h * torch.where(log_p == -torch.inf, 0.0, log_p.exp() * (log_p + entropy))
    backend.add_rows(chunk, torch.exp(-log_sum), -at_target * backend.target_slope(chunk), into)
