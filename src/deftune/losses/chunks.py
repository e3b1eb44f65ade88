"""The base of the backends, which drives a request chunk by chunk; a backend supplies the work on one chunk.

With E = e^{z - r} for a reference r of the row, without the target's entry, v = gate / sum E and t = gate (1 - p):

    dX = v (E W) - t W[y]        dW = E^T (v X) - t X at y        db = E^T v - t at y

Three GEMMs, as for NLL: the softmax is never formed, and the gate multiplies vectors after E was made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from deftune.losses.checks import nan_error
from deftune.losses.head import Head
from deftune.losses.pending import note_rows, raise_pending
from deftune.losses.request import Gradients, Request, Result, Rows
from deftune.losses.sparse import Products, Sparse
from deftune.losses.statistics import COLUMNS, LOG_P, compute_dtype, plain, stats_of, supervised_rows, wide_dtype
from deftune.objectives import TokenStats
from deftune.objectives.step import step_stats


@dataclass
class Supervised:
    """The supervised rows of a request: x = hidden[index], targets y."""

    hidden: Tensor  # [N, D]
    index: Tensor  # [M]
    y: Tensor  # [M]: rows of the head's weight; below 0: of another rank's (`Head.columns`)
    facts: Tensor | None = None  # on the device: M, and a flag that is set if a log p is NaN
    known: bool = True  # False: index and y are [N], and the host does not know M yet

    def __post_init__(self) -> None:
        self.count = self.index.shape[0]
        self.dense = self.known and self.count == self.hidden.shape[0]

    def take(self, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        """(x, y, positions) of some rows."""
        index, y = self.index[part], self.y[part]
        return self.hidden[part] if self.dense else self.hidden.index_select(0, index), y, index


@dataclass
class Chunk:
    """A chunk of C rows after the forward GEMM.

    ``columns`` [5, C] are the `COLUMNS` of the rows in float64; ``e`` is E [C, V], or None where no gradient needs it;
    ``top`` [C, k] holds the largest log-probabilities, where they were asked for, and ``top_entropy`` the entropy of
    their shares, where the same kernel has computed it. Of a vocabulary shard, E and ``y`` are this rank's, all else is
    of whole rows.
    """

    part: slice
    x: Tensor
    y: Tensor
    index: Tensor
    columns: Tensor
    target: Tensor  # z_y
    e: Tensor | None
    top: Tensor | None
    top_entropy: Tensor | None = None
    reference: Tensor | None = None  # of the torch backend: the logits that E is relative to


class Backend(ABC):
    """One way to run a request: measure a chunk, evaluate the objective in PyTorch, add the chunk's gradients.

    `backends.choose` picks a class by its ``refusal`` and ``reservation``; then the class methods ``run`` and
    ``recompute`` do the work. An instance holds the buffers of one pass over the chunks.
    """

    name: ClassVar[str]
    first_rows_done = 0  # rows of the first chunk, if its forward GEMM was launched before M was known
    started = False  # whether dW holds a chunk already: the first one writes, the others add
    sparse: Products | None = None

    @abstractmethod
    def __init__(self, head: Head, dtype: torch.dtype, rows: Supervised): ...

    @abstractmethod
    def rows(self, total: int, bound: int | None) -> int:
        """Rows of a chunk of ``total`` rows, at most the caller's bound."""

    @abstractmethod
    def measure(self, part: slice, columns: Tensor, keep: bool, top: int) -> Chunk:
        """The forward GEMM and the statistics of some rows, into ``columns`` [5, C]; E is kept if ``keep``."""

    @abstractmethod
    def add(self, chunk: Chunk, gate: Tensor, scale: Tensor | float, to: Gradients) -> None:
        """The gradients of dz = scale gate (P - onehot) of a chunk."""

    @abstractmethod
    def end(self, to: Gradients) -> None:
        """The work that is left after the last chunk."""

    @abstractmethod
    def use_sparse(self, sparse: Sparse) -> None:
        """Make the gradients from the classes that ``sparse`` keeps, and from the mean of the others."""

    @staticmethod
    @abstractmethod
    def finish(grads: list[Tensor], factor: Tensor, dtypes: list[torch.dtype]) -> list[Tensor]:
        """factor * gradient in the dtype given for each; may write to the gradients."""

    @staticmethod
    def refusal(request: Request) -> str:
        """Why this backend cannot run the request; '' if it can."""
        return ""

    @staticmethod
    def reservation(request: Request) -> str:
        """Why ``auto`` does not choose this backend although it can run the request; '' if it does."""
        return ""

    @classmethod
    def start(cls, request: Request) -> tuple[Rows, Self | None]:
        """(supervised rows, a pass whose first chunk is launched already, or None)."""
        index, labels = supervised_rows(request.targets, request.head.vocab_size)
        raise_pending(wait=False)
        return Rows(index, labels), None

    @classmethod
    def new_pass(cls, request: Request) -> Self:
        rows = request.supervised
        columns = request.head.columns(rows.labels)
        return cls(request.head, request.dtype, Supervised(request.hidden, rows.index, columns, rows.facts))

    @classmethod
    def run(cls, request: Request) -> Result:
        """The loss, the wanted gradients and the statistics of a request."""
        with plain(request.hidden.device):
            first_pass = None
            if request.rows is None:
                rows, first_pass = cls.start(request)
                request = request.located(rows)
            scale, count = request.scale(), request.count
            objective, context, wanted = request.objective, request.context, request.wanted
            if objective is None or request.reduction == "none":
                return (first_pass or cls.new_pass(request)).per_token(request)
            own_mass = objective.kind == "mass" and context.step is None
            if own_mass:  # the request is the step: unnormalised gradients first, then one factor count / mass
                context = replace(context, step="deferred")
            elif objective.kind == "step" and context.step is None and count:
                # the request is the step, and its statistic comes before the first gate: one more forward GEMM
                stats = (first_pass or cls.new_pass(request)).all_stats(request)
                first_pass = None  # its buffers are freed before the next pass allocates its own
                context = replace(context, step=step_stats(objective, [stats], context=context, local=True))
            backend = first_pass or cls.new_pass(request)
            if request.sparse is not None:
                backend.use_sparse(request.sparse)
            columns = new_columns(request)
            into: Gradients | None = None
            gates: list[Tensor] = []
            losses: list[Tensor] = []
            masses: list[Tensor] = []
            largest: list[Tensor | None] = []
            for chunk in backend.chunks(request, columns, any(wanted), request.top_k):
                into = into or new_gradients(request, wanted, own_mass)  # allocated while the first GEMM runs
                labels = request.supervised.labels[chunk.part]
                stats = stats_of(chunk.columns, chunk.top, labels, request.head.vocab_size, chunk.top_entropy)
                gate, value = weighted(request, chunk.part, *objective.evaluate(stats, context))
                losses.append(value)
                if request.gates:
                    gates.append(gate)
                if own_mass:
                    masses.append(objective.mass(stats, context).sum())
                if any(wanted):
                    backend.add(chunk, gate, scale, into)
                largest.append(chunk.top)
            into = into or new_gradients(request, wanted)
            backend.end(into)
            sum_hidden(request, into)
            values = torch.cat(losses) if losses else columns.new_zeros(0)
            loss = values.sum() * scale if losses else columns.new_zeros(())
            if masses:
                mass = torch.stack(masses).sum()
                into.factor = torch.where(mass == 0, 0.0, count / mass)
                loss, values = loss * into.factor, values * into.factor
                gates = [gate * into.factor for gate in gates]
            check_nan(columns[LOG_P], request)
            return Result(
                loss.to(compute_dtype(request.dtype)), into, request_stats(request, columns, largest), request,
                (torch.cat(gates) if gates else columns.new_zeros(0)) if request.gates else None, values,
            )  # fmt: skip

    def per_token(self, request: Request) -> Result:
        """The statistics, and with an objective the gate and the loss [M] of each token; no gradients."""
        stats = self.all_stats(request)
        if request.objective is None:
            return Result(None, None, stats, request)
        gate, value = weighted(request, slice(0, len(stats)), *request.objective.evaluate(stats, request.context))
        return Result(None, None, stats, request, gate, value)

    @classmethod
    def recompute(
        cls, request: Request, wanted: Sequence[bool], gate: Tensor, grad_entropy: Tensor | None = None
    ) -> Gradients:
        """The gradients of sum gate * NLL + grad_entropy * entropy, the chunks measured once more."""
        with plain(request.hidden.device):
            backend, into = cls.new_pass(request), new_gradients(request, wanted)
            for chunk in backend.chunks(request, new_columns(request), True, 0):
                if grad_entropy is None:
                    backend.add(chunk, gate[chunk.part], 1.0, into)
                else:
                    backend.add_entropy(chunk, gate[chunk.part], grad_entropy[chunk.part], into)
            backend.end(into)
            sum_hidden(request, into)
        return into

    def add_entropy(self, chunk: Chunk, gate: Tensor, grad_entropy: Tensor, to: Gradients) -> None:
        """The gradients of gate * NLL + grad_entropy * entropy of a chunk, which is not gate x error: torch only."""
        raise NotImplementedError

    def chunks(self, request: Request, columns: Tensor, keep: bool, top: int) -> Iterator[Chunk]:
        """The chunks, measured one after the other into ``columns`` [5, M]."""
        count = columns.shape[1]
        done = min(self.first_rows_done, count)
        size = self.rows(count - done, request.chunk_rows)
        starts = [*([0] if done else []), *range(done, count, size)]
        for start, stop in zip(starts, [*starts[1:], count]):
            part = slice(start, stop)
            yield self.measure(part, columns[:, part], keep, top)

    def all_stats(self, request: Request) -> TokenStats:
        """The statistics of every supervised row; E is not kept."""
        columns = new_columns(request)
        tops = [chunk.top for chunk in self.chunks(request, columns, False, request.top_k)]
        check_nan(columns[LOG_P], request)
        return request_stats(request, columns, tops)


def new_columns(request: Request) -> Tensor:
    """[5, M]; each column starts on 128 bytes, so that Triton does not compile for other alignments."""
    device, count = request.hidden.device, request.count
    return torch.empty(len(COLUMNS), -(-count // 16) * 16, dtype=wide_dtype(device), device=device)[:, :count]


def new_gradients(request: Request, wanted: Sequence[bool], rescaled: bool = False) -> Gradients:
    """Buffers for the wanted gradients; those that a factor will rescale are rounded afterwards."""
    hidden, weight = request.hidden, request.head.weight
    full = compute_dtype(request.dtype)
    new = torch.zeros if request.count < hidden.shape[0] else torch.empty
    # float16 would underflow before the upstream gradient, a loss scale, is multiplied in; what is still to be summed
    # over ranks is rounded afterwards
    summed = request.head.shard is not None and request.head.shard.reduce_hidden
    kept = full if rescaled or summed or hidden.dtype == torch.float16 else hidden.dtype
    return Gradients(
        new(hidden.shape, dtype=kept, device=hidden.device) if wanted[0] else None,
        torch.empty(weight.shape, dtype=full, device=weight.device) if wanted[1] else None,
        torch.zeros(weight.shape[:1], dtype=full, device=weight.device) if wanted[2] else None,
    )


def weighted(request: Request, part: slice, gate: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and value times the external weights of some supervised rows."""
    if request.weights is None:
        return gate, value
    factor = request.weights[part].to(gate.dtype)
    return gate * factor, torch.where(factor == 0, 0.0, value * factor)


def request_stats(request: Request, columns: Tensor, tops: Sequence[Tensor | None]) -> TokenStats:
    """The statistics of all rows from the columns and the chunks' largest log-probabilities."""
    top = None
    if request.top_k:
        found = [chunk for chunk in tops if chunk is not None]
        width = min(request.top_k, request.head.vocab_size)
        top = torch.cat(found) if found else columns.new_zeros(0, width)
    return stats_of(columns, top, request.supervised.labels, request.head.vocab_size)


def sum_hidden(request: Request, gradients: Gradients) -> None:
    """Sum dX over the ranks that share the vocabulary, unless the caller does."""
    shard = request.head.shard
    if shard is not None and shard.reduce_hidden and gradients.hidden is not None:
        shard.total(gradients.hidden)


def check_nan(log_p: Tensor, request: Request) -> None:
    """Name the first token without a distribution: at the next synchronisation on CUDA, elsewhere at once."""
    rows, sharded = request.supervised, request.head.shard is not None
    if log_p.device.type == "cuda":
        flag = log_p.isnan().sum() if rows.facts is None else rows.facts[1:]
        note_rows(flag, log_p, rows.index, sharded)
    elif bool((bad := log_p.isnan()).any()):
        raise nan_error(int(rows.index[bad.nonzero()[0, 0]]), "hidden x weight", sharded)


def balanced(total: int, limit: int, multiple: int = 1) -> int:
    """Rows of a chunk, at most ``limit``, such that all chunks are about equally large."""
    limit = max(1, limit)
    if total <= limit:
        return max(1, total)
    chunks = -(-total // limit)
    return min(limit, -(-total // chunks // multiple) * multiple)


def bounded(rows: int, bound: int | None) -> int:
    return rows if bound is None else min(rows, bound)


def scaled_gradients(
    backend: type[Backend], gradients: Gradients, factor: Tensor, dtypes: list[torch.dtype | None]
) -> tuple[Tensor | None, ...]:
    """factor * each gradient in its dtype; a gradient that is not wanted stays None."""
    all_three = (gradients.hidden, gradients.weight, gradients.bias)
    with plain(factor.device):
        if gradients.factor is not None:
            factor = factor * gradients.factor
        pairs = [(g, dtype) for g, dtype in zip(all_three, dtypes) if g is not None and dtype is not None]
        scaled = iter(backend.finish([g for g, _ in pairs], factor, [dtype for _, dtype in pairs]))
        return tuple(None if g is None else next(scaled) for g in all_three)
