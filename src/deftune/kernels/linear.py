"""`linear_loss`: hidden states to gradients, an objective at the price of NLL, without an [N, V] tensor.

One driver for every backend: supervised rows are taken out first, then chunk by chunk: forward GEMM, row sums, the
objective as plain PyTorch on the chunk's vectors, two gradient GEMMs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from deftune.kernels.backends import (
    BACKENDS,
    Backend,
    Chunk,
    Gradients,
    Supervised,
    TorchBackend,
    TritonBackend,
    choose_backend,
)
from deftune.kernels.checks import (
    check_reduction,
    check_targets,
    check_weight_values,
    check_weights,
    label_error,
    nan_error,
    second_derivative_error,
)
from deftune.kernels.eager import eager
from deftune.kernels.head import Head, check_head
from deftune.kernels.pending import answer, latest_note, note_rows, raise_pending
from deftune.kernels.reduction import check_step, mean_items
from deftune.kernels.statistics import compute_dtype, plain, supervised_rows, wide, wide_dtype
from deftune.objectives import Context, Objective, TokenStats
from deftune.objectives import objective as parse_objective
from deftune.objectives.stats import IGNORE_INDEX, NO_CONTEXT, TopK, columns_of
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
) -> Tensor:
    """An objective's loss from ``[..., D]`` hidden states and the head's ``[V, D]`` weight, without the logits.

        z = softcap(logit_scale (h W^T + bias)),  d loss / d z_i = gate (P_i - [i = y])

    The value and the gradients are those of `token_loss` on fp32 logits; memory does not grow with the tokens beyond
    the gradients. Gradients are made in the forward pass, for what requires one (a frozen head costs no dW), and scaled
    by the upstream in the backward. ``reduction="none"`` recomputes them there, for any upstream vector. ``backend`` is
    ``auto``, ``triton`` or ``torch``; `deftune doctor` prints what auto takes. ``chunk_rows`` bounds the tokens
    worked on at a time (default: chosen for speed; fewer take less memory). Under autocast hidden and weight take
    its dtype, as in a linear layer; the head's gradient is accumulated in float32 in any case.

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
        )
    return linear_loss_with_stats(
        hidden, weight, targets, objective, bias=bias, softcap=softcap, logit_scale=logit_scale, reduction=reduction,
        num_items=num_items, weights=weights, context=context, backend=backend, chunk_rows=chunk_rows,
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
) -> tuple[Tensor, TokenStats]:
    """`linear_loss`, and the statistics of the supervised tokens that the same pass measured (detached)."""
    objective = parse_objective(objective)
    check_call(hidden, weight, targets, bias, softcap, logit_scale, reduction, num_items, weights)
    keep = reduction != "none" and any(wants(hidden, weight, bias))
    call = prepare(
        hidden, weight, targets, objective, bias, softcap, logit_scale, weights, context, backend,
        chunk_rows=chunk_rows, keep=keep,
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
    needs: frozenset[TopK] = frozenset(),
    backend: str = "auto",
    chunk_rows: int | None = None,
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
    call = prepare(
        hidden, weight, targets, None, bias, softcap, logit_scale, None, None, backend, needs, chunk_rows=chunk_rows
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
    check_reduction(reduction, num_items)
    check_weights(weights, targets.shape)


def gemm_dtype(hidden: Tensor) -> torch.dtype:
    """As a linear layer: autocast's dtype where it is on, but for float64."""
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(device) if autocast else hidden.dtype


def wants(*tensors: Tensor | None) -> list[bool]:
    """Which of them a gradient will be asked of."""
    enabled = torch.is_grad_enabled()
    return [enabled and tensor is not None and tensor.requires_grad for tensor in tensors]


def scale_of(call: _Call, reduction: str, num_items: Tensor | float | None) -> Tensor | float:
    """What a sum over this call's tokens is multiplied with."""
    items = 1.0 if reduction == "sum" else mean_items(num_items, call.count)
    return 1.0 / (wide(items) if isinstance(items, Tensor) else items)


def _under_compile(
    hidden: Tensor, weight: Tensor, targets: Tensor, objective: str | Objective, bias: Tensor | None,
    softcap: float | None, logit_scale: float, reduction: str, num_items: Tensor | float | None, weights: Tensor | None,
    context: Context | None, backend: str, chunk_rows: int | None,
) -> Tensor:  # fmt: skip
    """One opaque operator in the compiled graph, where its signature can say it all; else a graph break."""
    stepwise = context is not None and context.step is not None
    if not isinstance(objective, str) or stepwise or reduction == "none" or chunk_rows is not None:
        return linear_loss_with_stats(
            hidden, weight, targets, objective, bias=bias, softcap=softcap, logit_scale=logit_scale,
            reduction=reduction, num_items=num_items, weights=weights, context=context, backend=backend,
            chunk_rows=chunk_rows,
        )[0]  # fmt: skip
    from deftune.kernels.compiled import linear_loss_op

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
    training: bool  # whether gradients will be asked for at all
    facts: Tensor | None  # of the triton backend's survey: their number, ..., its NaN flag
    chunk_rows: int | None  # a bound from the caller
    early: Backend | None  # one that has begun with the first chunk

    def __post_init__(self) -> None:
        self.count = self.index.shape[0]

    def over(self, inputs: Sequence[Tensor]) -> _Call:
        """The same call on the tensors that autograd saved."""
        hidden, weight, bias = inputs
        return replace(self, hidden=hidden, weight=weight, bias=bias)

    def make_backend(self) -> Backend:
        early, self.early = self.early, None
        if early is not None:
            return early
        head = Head(self.weight.detach(), _detached(self.bias), self.scale, self.softcap)
        rows = Supervised(self.hidden.detach(), self.index, self.targets, self.facts)
        return BACKENDS[self.backend](head, self.dtype, rows)

    def chunks(self, backend: Backend, columns: Tensor, keep: bool, top: int) -> Iterator[Chunk]:
        """The chunks, measured one after the other into ``columns`` [5, M]."""
        begun = min(backend.begun, self.count)
        size = bounded(backend.rows(self.count - begun), self.chunk_rows)
        starts = [*([0] if begun else []), *range(begun, self.count, size)]
        for start, stop in zip(starts, [*starts[1:], self.count]):
            part = slice(start, stop)
            yield backend.measure(part, columns[:, part], keep, top)

    def new_columns(self) -> Tensor:
        # each on 128 bytes, so that Triton need not compile for other pointers
        device, pitch = self.hidden.device, -(-self.count // 16) * 16
        return torch.empty(5, pitch, dtype=wide_dtype(device), device=device)[:, : self.count]

    def chunk_stats(self, chunk: Chunk) -> TokenStats:
        return self.stats(chunk.columns, self.top_log_p([chunk.top], chunk.columns), chunk.y)

    def top_log_p(self, largest: Sequence[Tensor | None], columns: Tensor) -> Tensor | None:
        """The likeliest tokens' log-probabilities from the chunks' largest logits, where they were asked for."""
        if not self.top:
            return None
        tops = [wide(top) for top in largest if top is not None]
        if not tops:
            return columns.new_zeros(0, min(self.top, self.weight.shape[0]))
        return torch.cat(tops) - (columns[3] + columns[4])[:, None]

    def stats(
        self, columns: Tensor | Sequence[Tensor], top: Tensor | None, targets: Tensor | None = None
    ) -> TokenStats:
        vocab_size = self.weight.shape[0]
        return TokenStats(
            columns[0], columns[1], columns[2], self.targets if targets is None else targets, vocab_size,
            None if top is None else columns_of(top, vocab_size),
        )  # fmt: skip

    def measure_all(self) -> tuple[Tensor, Tensor | None]:
        """(columns, likeliest tokens) of every supervised row, nothing kept for a backward."""
        columns = self.new_columns()
        largest = [chunk.top for chunk in self.chunks(self.make_backend(), columns, False, self.top)]
        self.check_nan(columns[0])
        return columns, self.top_log_p(largest, columns)

    def new_gradients(self, wanted: Sequence[bool], rescaled: bool = False) -> Gradients:
        """Room for the gradients wanted of hidden, weight and bias; what will be rescaled is rounded after that."""
        hidden, weight = self.hidden, self.weight
        full = compute_dtype(self.dtype)
        new = torch.zeros if self.count < hidden.shape[0] else torch.empty
        # float16 would underflow before the upstream, a loss scale, arrives
        kept = full if rescaled or hidden.dtype == torch.float16 else hidden.dtype
        return Gradients(
            new(hidden.shape, dtype=kept, device=hidden.device) if wanted[0] else None,
            torch.empty(weight.shape, dtype=full, device=weight.device) if wanted[1] else None,
            torch.zeros(weight.shape[:1], dtype=full, device=weight.device) if wanted[2] else None,
        )

    def weighted(self, part: slice, gate: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Gate and value times the external weights."""
        if self.weights is None:
            return gate, value
        factor = self.weights[part].to(gate.dtype)
        return gate * factor, torch.where(factor == 0, 0.0, value * factor)

    def check_nan(self, log_p: Tensor) -> None:
        """Name the first row without a distribution: at the next synchronisation on CUDA, elsewhere at once."""
        if log_p.device.type == "cuda":
            facts = self.facts if self.backend == "triton" else None
            flag = log_p.isnan().sum() if facts is None else facts[3:]
            note_rows(flag, log_p, self.index)
        elif bool((bad := log_p.isnan()).any()):
            raise nan_error(int(self.index[bad.nonzero()[0, 0]]), "hidden x weight")


def bounded(rows: int, bound: int | None) -> int:
    return rows if bound is None else min(rows, bound)


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def prepare(
    hidden: Tensor, weight: Tensor, targets: Tensor, objective: Objective | None, bias: Tensor | None,
    softcap: float | None, scale: float, weights: Tensor | None, context: Context | None, backend: str,
    needs: frozenset[TopK] = frozenset(), dtype: torch.dtype | None = None, chunk_rows: int | None = None,
    keep: bool = False,
) -> _Call:  # fmt: skip
    """A call, flat and checked; ``dtype`` is that of its GEMMs (None: autocast's, or the hidden states').

    ``keep`` says that the first pass over the chunks will ask for gradients.
    """
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows: at least 1, got {chunk_rows}")
    context = context or NO_CONTEXT
    dtype = dtype or gemm_dtype(hidden)
    top = max((need.k for need in (objective.needs if objective else needs)), default=0)
    name, _ = choose_backend(backend, hidden.device, dtype, Head(weight, bias, scale, softcap), top)
    hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    early = facts = None
    if name == "triton" and len(targets):
        # a step objective's first pass is for its statistic, without gradients
        keep = (keep and not (objective and objective.kind == "step" and context.step is None)) or top > 0
        head = Head(weight.detach(), _detached(bias), scale, softcap)
        index, flat, facts, early = find_and_begin(hidden.detach(), targets, head, dtype, keep, chunk_rows)
    else:
        index, flat = supervised_rows(targets, weight.shape[0])
        raise_pending(wait=False)
    check_weight_values(weights, targets)
    return _Call(
        hidden, weight, bias, flat, index, None if weights is None else weights.reshape(-1)[index],
        objective, context, softcap, scale, name, top, dtype, torch.is_grad_enabled(), facts, chunk_rows, early,
    )  # fmt: skip


def find_and_begin(
    hidden: Tensor, targets: Tensor, head: Head, dtype: torch.dtype, keep: bool, chunk_rows: int | None
) -> tuple[Tensor, Tensor, Tensor, TritonBackend]:
    """(places, labels, facts, backend): the supervised tokens, and the GEMM of their first chunk under way.

    The GPU is kept busy while the host learns how many there are: the first chunk's kernels read the number on the
    device. A bad label, or an earlier call's NaN, is raised.
    """
    from deftune.kernels.triton_rows import survey

    device = targets.device
    earlier = latest_note(device) if device.type == "cuda" else None
    with plain(device):
        flag = None if earlier is None else earlier.flag
        places, labels, facts = survey(targets.contiguous(), head.vocab_size, IGNORE_INDEX, flag)
        read = read_later(facts)
        backend = TritonBackend(head, dtype, Supervised(hidden, places, labels, facts, known=False))
        backend.begin(bounded(backend.rows(len(targets)), chunk_rows), keep)
        count, bad, was, _ = read()  # the one read of the device
        backend.settle(count)
    if earlier is not None:
        answer(earlier, was)
    if bad < len(targets):
        raise label_error(bad, int(targets[bad]), head.vocab_size)
    return places[:count], labels[:count], facts, backend


def read_later(numbers: Tensor) -> Callable[[], list[int]]:
    """A copy to the host that starts now; the call returned waits for it, not for what is launched in between."""
    if numbers.device.type != "cuda":
        return numbers.tolist
    there = numbers.to("cpu", non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def read() -> list[int]:
        done.synchronize()
        return there.tolist()

    return read


def fused(
    call: _Call, wanted: Sequence[bool], scale: Tensor | float
) -> tuple[Tensor, Gradients, Tensor, Tensor | None]:
    """(loss, gradients, columns, likeliest tokens): forward and backward in one pass over the chunks."""
    objective, context = call.objective, call.context
    assert objective is not None
    with plain(call.hidden.device):
        own_mass = objective.kind == "mass" and context.step is None
        if own_mass:  # this call is the step: unnormalised first, then once by count / mass
            context = replace(context, step="deferred")
        elif objective.kind == "step" and context.step is None and call.count:
            # this call is the step, and its statistic must be known before the first gate: one more forward GEMM
            step = step_stats(objective, [call.stats(*call.measure_all())], context=context, local=True)
            context = replace(context, step=step)
        backend = call.make_backend()
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
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: _Call, scale: Tensor | float
    ) -> tuple[Tensor | None, ...]:
        wanted = [call.training and needed for needed in ctx.needs_input_grad[:3]]
        loss, grads, columns, top = fused(call, wanted, scale)
        ctx.mark_non_differentiable(columns, *([] if top is None else [top]))
        ctx.set_materialize_grads(False)  # no zeros for what has no gradient; the loss always comes with one
        ctx.save_for_backward(hidden, weight, bias)
        ctx.call, ctx.scale, ctx.grads = call, scale, grads
        return loss, columns, top

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        call, inputs = ctx.call, ctx.saved_tensors
        # handed out once: a second backward over the same graph makes them anew
        grads = ctx.grads or fused(call.over(inputs), ctx.needs_input_grad[:3], ctx.scale)[1]
        ctx.grads = None
        return (*finished(call, grads, grad), None, None)


def finished(call: _Call, grads: Gradients, factor: Tensor, *, to_parameters: bool = True) -> tuple[Tensor | None, ...]:
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
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: _Call
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
        ctx.call = call
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
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, call: _Call
    ) -> tuple[Tensor | None, ...]:
        with plain(hidden.device):
            columns, top = call.measure_all()
        log_p, entropy, log_collision = (column.clone() for column in columns[:3])
        ctx.mark_non_differentiable(log_collision, *([] if top is None else [top]))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.call = call
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


def _recompute(call: _Call, wanted: Sequence[bool], gate: Tensor, grad_entropy: Tensor | None) -> Gradients:
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
