"""`linear_loss`: hidden states to gradients, an objective at the price of NLL, without an [N, V] tensor.

One driver for every backend: supervised rows are taken out first, then chunk by chunk: forward GEMM, row sums, the objective
as plain PyTorch on the chunk's vectors, two gradient GEMMs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from deftune.kernels.backends import BACKENDS, Backend, Chunk, Gradients, TorchBackend, choose_backend
from deftune.kernels.checks import check_labels, check_reduction, check_targets, check_weights, nan_error
from deftune.kernels.head import Head, check_head
from deftune.kernels.pending import note_nan, raise_pending
from deftune.kernels.reduction import check_step, mean_items
from deftune.kernels.statistics import compute_dtype, no_autocast, stats_columns, supervised_index, wide
from deftune.objectives import Context, Objective, TokenStats
from deftune.objectives import objective as parse_objective
from deftune.objectives.stats import NO_CONTEXT, TopK, columns_of
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
) -> Tensor:
    """An objective's loss from ``[..., D]`` hidden states and the head's ``[V, D]`` weight, without the logits.

        z = softcap(logit_scale (h W^T + bias)),  d loss / d z_i = gate (P_i - [i = y])

    The value and the gradients are those of `token_loss` on fp32 logits; memory does not grow with the tokens beyond the
    gradients. Gradients are made in the forward pass, for what requires one (a frozen head costs no dW), and scaled by
    the upstream in the backward. ``reduction="none"`` recomputes them there, for any upstream vector. ``backend`` is
    ``auto``, ``triton`` or ``torch``; `deftune doctor` prints what auto takes. Under autocast hidden and weight take its
    dtype, as in a linear layer; the head's gradient is accumulated in float32 in any case.

    >>> hidden, weight = torch.eye(2, requires_grad=True), torch.tensor([[2.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    >>> loss = linear_loss(hidden, weight, torch.tensor([0, 2]), "linear")
    >>> loss.backward()
    >>> round(loss.item(), 4), hidden.grad
    (0.5450, tensor([[-0.1112,  0.0560],
            [ 0.0309, -0.0720]]))
    """
    return linear_loss_with_stats(
        hidden, weight, targets, objective, bias=bias, softcap=softcap, logit_scale=logit_scale, reduction=reduction,
        num_items=num_items, weights=weights, context=context, backend=backend,
    )[0]  # fmt: skip


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
) -> tuple[Tensor, TokenStats]:
    """`linear_loss`, and the statistics of the supervised tokens that the same pass measured (detached)."""
    objective = parse_objective(objective)
    check_head(hidden, weight, bias, logit_scale, softcap)
    check_targets(targets, hidden.shape[:-1], "hidden")
    check_reduction(reduction, num_items)
    check_weights(weights, targets.shape)
    raise_pending()
    call = _prepare(hidden, weight, targets, objective, bias, softcap, logit_scale, weights, context, backend)
    check_step(objective, call.context, num_items, len(call.index))
    if reduction == "none":
        losses, *columns = _PerTokenLoss.apply(call.hidden, call.weight, call.bias, call)  # pyright: ignore
        return losses.view(targets.shape), call.stats(columns)
    scale = 1.0 if reduction == "sum" else 1.0 / mean_items(num_items, len(call.index))
    loss, *columns = _FusedLoss.apply(call.hidden, call.weight, call.bias, call, scale)  # pyright: ignore
    return loss, call.stats(columns)


def linear_token_stats(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    needs: frozenset[TopK] = frozenset(),
    backend: str = "auto",
) -> TokenStats:
    """The statistics of the supervised tokens from hidden states, without the logits.

    ``log_p`` and ``entropy`` are differentiable, for any upstream vector, in ``hidden``, ``weight`` and ``bias``; their
    backward recomputes the chunks. ``log_collision`` is detached (a focus is a stop-gradient quantity). ``needs`` asks
    for the likeliest tokens, as an objective's ``needs`` does.

    >>> stats = linear_token_stats(torch.zeros(1, 2), torch.ones(4, 2), torch.tensor([3]))
    >>> stats.p, stats.concentration
    (tensor([0.2500], dtype=torch.float64), tensor([0.2500], dtype=torch.float64))
    """
    check_head(hidden, weight, bias, logit_scale, softcap)
    check_targets(targets, hidden.shape[:-1], "hidden")
    raise_pending()
    call = _prepare(hidden, weight, targets, None, bias, softcap, logit_scale, None, None, backend, needs)
    columns = _Statistics.apply(call.hidden, call.weight, call.bias, call)  # pyright: ignore
    return call.stats(columns)


# --- one call ---------------------------------------------------------------------------------------------------------


@dataclass
class _Call:
    """What a call is about, flat, checked and on one dtype."""

    hidden: Tensor  # [N, D]
    weight: Tensor
    bias: Tensor | None
    targets: Tensor  # [M], of the supervised rows
    index: Tensor  # [M], their places among the N
    weights: Tensor | None  # [M]
    objective: Objective | None
    context: Context
    softcap: float | None
    scale: float
    backend: str
    top: int
    dtype: torch.dtype  # of the GEMMs

    def make_backend(self, name: str | None = None) -> Backend:
        head = Head(self.weight.detach(), _detached(self.bias), self.scale, self.softcap)
        return BACKENDS[name or self.backend](head, self.dtype)

    def chunks(self, backend: Backend, keep: bool, top: int) -> Iterator[tuple[slice, Chunk]]:
        """(places among the supervised rows, the chunk measured)."""
        size = backend.rows(len(self.index))
        hidden = self.hidden.detach()
        dense = len(self.index) == len(hidden)
        for start in range(0, len(self.index), size):
            part = slice(start, min(start + size, len(self.index)))
            x = hidden[part] if dense else hidden.index_select(0, self.index[part])
            yield part, backend.measure(x, self.targets[part], keep, top)

    def columns(self, chunk: Chunk) -> tuple[TokenStats, Tensor]:
        """A chunk's statistics, and log sum e^u."""
        log_p, entropy, log_collision, log_sum = stats_columns(chunk.sums)
        stats = self.stats([log_p, entropy, log_collision, *self.top_columns(chunk, log_sum)], chunk.y)
        return stats, log_sum

    def top_columns(self, chunk: Chunk, log_sum: Tensor) -> list[Tensor]:
        if chunk.top is None:
            return []
        return [wide(chunk.top) - (wide(chunk.sums.shift) + log_sum)[:, None]]

    def stats(self, columns: list[Tensor] | tuple[Tensor, ...], targets: Tensor | None = None) -> TokenStats:
        """The record of log_p, entropy, log_collision and, where taken, the likeliest tokens."""
        log_p, entropy, log_collision, *top = columns
        vocab_size = self.weight.shape[0]
        source = columns_of(top[0], vocab_size) if top else None
        return TokenStats(
            log_p, entropy, log_collision, self.targets if targets is None else targets, vocab_size, source
        )

    def new_gradients(self, wanted: tuple[bool, ...]) -> Gradients:
        """Room for the gradients wanted of hidden, weight and bias."""
        hidden, weight = self.hidden, self.weight
        full = torch.float64 if self.dtype == torch.float64 else torch.float32
        empty = len(self.index) < len(hidden)
        return Gradients(
            (torch.zeros_like if empty else torch.empty_like)(hidden, memory_format=torch.contiguous_format)
            if wanted[0] else None,
            (torch.zeros if len(self.index) == 0 or self.low_torch else torch.empty)(
                weight.shape, dtype=full, device=weight.device
            ) if wanted[1] else None,
            torch.zeros(weight.shape[:1], dtype=full, device=weight.device) if wanted[2] else None,
        )  # fmt: skip

    @property
    def low_torch(self) -> bool:
        return self.backend == "torch" and self.dtype != compute_dtype(self.dtype)

    def check_nan(self, log_p: Tensor) -> None:
        """Name the first row without a distribution: at once on CPU, at the next synchronisation elsewhere."""
        if log_p.numel() == 0:
            return
        if log_p.device.type == "cpu":
            if bool((bad := log_p.isnan()).any()):
                raise nan_error(int(self.index[bad.nonzero()[0, 0]]), "hidden x weight")
        else:
            note_nan(log_p, self.index)


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def _prepare(
    hidden: Tensor, weight: Tensor, targets: Tensor, objective: Objective | None, bias: Tensor | None,
    softcap: float | None, scale: float, weights: Tensor | None, context: Context | None, backend: str,
    needs: frozenset[TopK] = frozenset(),
) -> _Call:  # fmt: skip
    flat = targets.reshape(-1)
    check_labels(flat, weight.shape[0])
    index = supervised_index(flat)
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    top = max((need.k for need in (objective.needs if objective else needs)), default=0)
    head = Head(weight, bias, scale, softcap)
    name, _ = choose_backend(backend, hidden.device, dtype, head, top)
    return _Call(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, flat[index], index,
        None if weights is None else weights.reshape(-1)[index],
        objective, context or NO_CONTEXT, softcap, scale, name, top, dtype,
    )  # fmt: skip


def _coefficients(call: _Call, chunk: Chunk, log_p: Tensor, log_sum: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """(v, t): dz = v E off the target, -t on it, for dz = gate (P - onehot) through scale and softcap."""
    # P = e^{z - shift - log_sum} = E e^{reference - shift - log_sum}
    v = gate * torch.exp(wide(chunk.reference) - wide(chunk.sums.shift) - log_sum) * call.scale
    t = gate * -torch.expm1(log_p) * call.scale
    if call.softcap is not None:
        t = t * (1 - (wide(chunk.sums.target) / call.softcap) ** 2)
    # a shut gate is 0 whatever stands beside it
    return torch.where(gate == 0, 0.0, v), torch.where(gate == 0, 0.0, t)


def _cat(parts: list[TokenStats], call: _Call) -> tuple[Tensor, ...]:
    """The columns of all chunks."""
    if not parts:
        none = wide(call.hidden.new_zeros(0, dtype=torch.float32))
        return (none, none, none, *([none.view(0, min(call.top, call.weight.shape[0]))] if call.top else []))
    columns = [torch.cat(column) for column in zip(*((p.log_p, p.entropy, p.log_collision) for p in parts))]
    return (*columns, *([torch.cat([p.top_log_p(call.top) for p in parts])] if call.top else []))


def _measure_all(call: _Call, backend: Backend) -> list[TokenStats]:
    return [call.columns(chunk)[0] for _, chunk in call.chunks(backend, False, call.top)]


def _fused(call: _Call, wanted: tuple[bool, ...], scale: Tensor | float) -> tuple[Tensor, Gradients, tuple[Tensor, ...]]:
    """(loss, gradients, columns): the whole of forward and backward in one pass over the chunks."""
    objective, context = call.objective, call.context
    assert objective is not None
    with torch.no_grad(), no_autocast(call.hidden.device):
        backend = call.make_backend()
        own_mass = objective.kind == "mass" and context.step is None
        if own_mass:  # this call is the step: unnormalised first, then once by count / mass
            context = replace(context, step="deferred")
        elif objective.kind == "step" and context.step is None and len(call.index):
            # this call is the step, and its statistic must be known before the first gate: one more forward GEMM
            context = replace(context, step=step_stats_here(objective, _measure_all(call, backend), context))
        into = call.new_gradients(wanted)
        parts: list[TokenStats] = []
        device = call.hidden.device
        loss = wide(torch.zeros((), device=device))
        mass = wide(torch.zeros((), device=device))
        for part, chunk in call.chunks(backend, any(wanted), call.top):
            stats, log_sum = call.columns(chunk)
            gate, value = objective.gate(stats, context), objective.loss(stats, context)
            if call.weights is not None:
                factor = call.weights[part].to(gate.dtype)
                gate, value = gate * factor, torch.where(factor == 0, 0.0, value * factor)
            loss += value.sum()
            if own_mass:
                mass += objective.mass(stats, context).sum()
            if any(wanted):
                v, t = _coefficients(call, chunk, stats.log_p, log_sum, gate * scale)
                backend.add(chunk, call.index[part], v, t, into)
            parts.append(stats)
        columns = _cat(parts, call)
        call.check_nan(columns[0])
        loss = loss * scale
        if own_mass and len(call.index):
            factor = torch.where(mass == 0, 0.0, len(call.index) / mass)
            loss = loss * factor
            for grad in (into.hidden, into.weight, into.bias):
                if grad is not None:
                    grad.mul_(factor.to(grad.dtype))
        return loss.to(compute_dtype(call.dtype)), into, columns


def step_stats_here(objective: Objective, parts: list[TokenStats], context: Context) -> Any:
    """Step statistics of this process alone: the caller said that this call is the whole step."""
    return step_stats(objective, parts, context=context, group=None, local=True)


class _FusedLoss(Function):
    """(loss, *columns): gradients are made in the forward pass and handed out, scaled, in the backward."""

    @staticmethod
    def forward(  # pyright: ignore
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: _Call, scale: Tensor | float
    ) -> tuple[Tensor, ...]:
        wanted = ctx.needs_input_grad[:3]
        loss, grads, columns = _fused(call, wanted, scale)
        ctx.mark_non_differentiable(*columns)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.call, ctx.scale, ctx.grads = replace(call, hidden=hidden, weight=weight, bias=bias), scale, grads
        return loss, *columns

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        hidden, weight, bias = ctx.saved_tensors
        # handed out once: a second backward over the same graph makes them anew
        grads = ctx.grads or _fused(ctx.call, ctx.needs_input_grad[:3], ctx.scale)[1]
        ctx.grads = None
        return (*_finished(ctx.call, grads, grad, hidden, weight, bias), None, None)


def _finished(
    call: _Call, grads: Gradients, factor: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients times the upstream scalar, in their parameters' dtypes."""
    backend = call.make_backend()
    return tuple(
        None if grad is None or like is None else backend.finish(grad, factor, like.dtype)
        for grad, like in zip((grads.hidden, grads.weight, grads.bias), (hidden, weight, bias))
    )


class _PerTokenLoss(Function):
    """(losses [N], *columns): the backward recomputes the chunks for any upstream vector."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> tuple[Tensor, ...]:  # pyright: ignore
        objective = call.objective
        assert objective is not None
        with torch.no_grad(), no_autocast(hidden.device):
            columns = _cat(_measure_all(call, call.make_backend()), call)
            call.check_nan(columns[0])
            stats = call.stats(columns)
            gate, value = objective.gate(stats, call.context), objective.loss(stats, call.context)
            if call.weights is not None:
                factor = call.weights.to(gate.dtype)
                gate, value = gate * factor, torch.where(factor == 0, 0.0, value * factor)
            losses = value.new_zeros(len(hidden)).index_copy_(0, call.index, value).to(compute_dtype(call.dtype))
        ctx.mark_non_differentiable(*columns)
        ctx.save_for_backward(hidden, weight, bias, gate)
        ctx.call = call
        return losses, *columns

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        hidden, weight, bias, gate = ctx.saved_tensors
        call = replace(ctx.call, hidden=hidden, weight=weight, bias=bias)
        upstream = wide(grad[call.index]) * gate
        grads = _recompute(call, ctx.needs_input_grad[:3], upstream, None)
        return (*_finished(call, grads, torch.ones((), device=hidden.device), hidden, weight, bias), None)


class _Statistics(Function):
    """(log_p, entropy, log_collision, ...) with gradients through the first two."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> tuple[Tensor, ...]:  # pyright: ignore
        with torch.no_grad(), no_autocast(hidden.device):
            columns = _cat(_measure_all(call, call.make_backend()), call)
            call.check_nan(columns[0])
        ctx.mark_non_differentiable(*columns[2:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.call = call
        return columns

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore
        ctx: Any, grad_log_p: Tensor | None, grad_entropy: Tensor | None, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        if grad_log_p is None and grad_entropy is None:
            return (None,) * 4
        call = replace(ctx.call, hidden=hidden, weight=weight, bias=bias)
        gate = torch.zeros(len(call.index), device=hidden.device) if grad_log_p is None else -grad_log_p
        grads = _recompute(call, ctx.needs_input_grad[:3], wide(gate), grad_entropy)
        return (*_finished(call, grads, torch.ones((), device=hidden.device), hidden, weight, bias), None)


def _recompute(call: _Call, wanted: tuple[bool, ...], gate: Tensor, grad_entropy: Tensor | None) -> Gradients:
    """Gradients of sum gate * NLL + grad_entropy * entropy, the chunks measured anew.

    dH/dz_i = -P_i (log P_i + H): not gate x error, so the entropy's part goes through the torch backend's float32 E.
    """
    with torch.no_grad(), no_autocast(call.hidden.device):
        if grad_entropy is not None:
            call = replace(call, backend="torch")
        backend = call.make_backend()
        into = call.new_gradients(wanted)
        for part, chunk in call.chunks(backend, True, 0):
            log_p, entropy, _, log_sum = stats_columns(chunk.sums)
            if grad_entropy is None:
                v, t = _coefficients(call, chunk, log_p, log_sum, gate[part])
                backend.add(chunk, call.index[part], v, t, into)
                continue
            assert isinstance(backend, TorchBackend) and chunk.e is not None
            e = chunk.e
            slope_y = 1.0 if call.softcap is None else 1 - (wide(chunk.sums.target) / call.softcap) ** 2
            if call.softcap is not None:  # E carries the slope already; log P needs it without
                z = backend.logits(chunk.x)
                log_e = z - chunk.sums.shift[:, None]
            else:
                log_e = e.log()
            h = grad_entropy[part]
            row = torch.where(e == 0, 0.0, log_e - log_sum[:, None].to(e.dtype))
            e *= (gate[part] - h * entropy)[:, None].to(e.dtype) - h[:, None].to(e.dtype) * row
            p_term = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * (log_p + entropy))
            on_target = (gate[part] * torch.expm1(log_p) - h * p_term) * slope_y
            e.scatter_(-1, chunk.y[:, None], (on_target * log_sum.exp())[:, None].to(e.dtype))
            backend.add_rows(chunk, call.index[part], (torch.exp(-log_sum) * call.scale).to(e.dtype), into)
    return into



