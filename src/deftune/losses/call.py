"""A call of the fused loss: what it is about, flat, checked and on one dtype, and what is under way for it already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deftune.losses.backends import BACKENDS, choose_backend
from deftune.losses.checks import check_weight_values, label_error, nan_error
from deftune.losses.chunks import Backend, Chunk, Gradients, Supervised
from deftune.losses.head import Head
from deftune.losses.pending import answer, latest_note, note_rows, raise_pending
from deftune.losses.replay import Asked, Replay, Room, room_for, settled, suits
from deftune.losses.sparse import Sparse
from deftune.losses.statistics import (
    compute_dtype,
    plain,
    stats_of,
    supervised_rows,
    wide_dtype,
)
from deftune.losses.triton_backend import TritonBackend
from deftune.objectives import Context, Objective, TokenStats
from deftune.objectives.stats import IGNORE_INDEX, NO_CONTEXT


def gemm_dtype(hidden: Tensor) -> torch.dtype:
    """As a linear layer: autocast's dtype where it is on, but for float64."""
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(device) if autocast else hidden.dtype


@dataclass
class Call:
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
    replay: Replay | None  # or one that has measured it, by a graph
    sparse: Sparse | None

    def __post_init__(self) -> None:
        self.count = self.index.shape[0]

    def released(self) -> Call:
        """The same call without its large tensors: autograd saves them, and frees them while the loss is still held."""
        nothing = self.hidden.new_empty(0)
        return replace(self, hidden=nothing, weight=nothing, bias=None)

    def over(self, inputs: Sequence[Tensor]) -> Call:
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
        size = backend.rows(self.count - begun, self.chunk_rows)
        starts = [*([0] if begun else []), *range(begun, self.count, size)]
        for start, stop in zip(starts, [*starts[1:], self.count]):
            part = slice(start, stop)
            yield backend.measure(part, columns[:, part], keep, top)

    def new_columns(self) -> Tensor:
        # each on 128 bytes, so that Triton need not compile for other pointers
        device, pitch = self.hidden.device, -(-self.count // 16) * 16
        return torch.empty(5, pitch, dtype=wide_dtype(device), device=device)[:, : self.count]

    def chunk_stats(self, chunk: Chunk) -> TokenStats:
        return stats_of(chunk.columns, chunk.top, chunk.y, self.weight.shape[0], chunk.top_entropy)

    def top_log_p(self, chunks: Sequence[Tensor | None], columns: Tensor) -> Tensor | None:
        """The likeliest tokens' log-probabilities out of the chunks', where they were asked for."""
        if not self.top:
            return None
        tops = [top for top in chunks if top is not None]
        return torch.cat(tops) if tops else columns.new_zeros(0, min(self.top, self.weight.shape[0]))

    def stats(self, columns: Tensor | Sequence[Tensor], top: Tensor | None) -> TokenStats:
        return stats_of(columns, top, self.targets, self.weight.shape[0])

    def measure_all(self) -> tuple[Tensor, Tensor | None]:
        """(columns, likeliest tokens) of every supervised row, nothing kept for a backward."""
        columns = self.new_columns()
        tops = [chunk.top for chunk in self.chunks(self.make_backend(), columns, False, self.top)]
        self.check_nan(columns[0])
        return columns, self.top_log_p(tops, columns)

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
            flag = log_p.isnan().sum() if facts is None else facts[1:]
            note_rows(flag, log_p, self.index)
        elif bool((bad := log_p.isnan()).any()):
            raise nan_error(int(self.index[bad.nonzero()[0, 0]]), "hidden x weight")


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def prepare(
    hidden: Tensor, weight: Tensor, targets: Tensor, objective: Objective | None, bias: Tensor | None,
    softcap: float | None, scale: float, weights: Tensor | None, context: Context | None, backend: str,
    top_k: int = 0, dtype: torch.dtype | None = None, chunk_rows: int | None = None,
    keep: bool = False, keep_hidden: bool = False, graphs: bool = True, sparse: Sparse | None = None,
) -> Call:  # fmt: skip
    """A call, flat and checked; ``dtype`` is that of its GEMMs (None: autocast's, or the hidden states').

    ``keep`` says that the first pass over the chunks will ask for gradients, ``keep_hidden`` that it will for those of
    the hidden states; ``graphs``, that they may be replayed.
    """
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows: at least 1, got {chunk_rows}")
    context = context or NO_CONTEXT
    dtype = dtype or gemm_dtype(hidden)
    top = objective.top_k if objective else top_k
    head = Head(weight.detach(), _detached(bias), scale, softcap)
    name, _ = choose_backend(backend, hidden.device, dtype, head, top)
    if targets.dim() != 1:
        hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    early = replay = facts = None
    if name == "triton" and (tokens := targets.shape[0]):
        size = TritonBackend.first_rows(head, dtype, tokens, chunk_rows)
        with plain(hidden.device), Survey(hidden.detach(), targets, head.vocab_size) as rows:
            # the GPU is kept busy while the host learns how many rows there are: what comes first reads it there
            graphs = graphs and sparse is None
            if graphs and keep and objective and suits(head, objective, context, weights, dtype, size):
                asked = rows.ask(room_for(head, dtype, size, rows.stream.cuda_stream if rows.stream else 0))
                replay = Replay(asked, head, size, objective, context, top, keep_hidden)
            else:
                # a step objective's first pass is for its statistic, without gradients
                first = keep and not (objective and objective.kind == "step" and context.step is None)
                early = TritonBackend(head, dtype, rows.begin())
                early.begin(size, first, top)
            index, flat, facts = rows.wait()
            if early is not None:
                early.settle(len(index))
    else:
        index, flat = supervised_rows(targets, weight.shape[0])
        raise_pending(wait=False)
    check_weight_values(weights, targets)
    return Call(
        hidden, weight, bias, flat, index, None if weights is None else weights.reshape(-1)[index],
        objective, context, softcap, scale, name, top, dtype, torch.is_grad_enabled(), facts, chunk_rows, early, replay,
        sparse,
    )  # fmt: skip


class Survey:
    """The supervised tokens, looked for on the device; ``wait`` says how many there are."""

    all: Supervised
    told: Tensor

    def __init__(self, hidden: Tensor, targets: Tensor, vocab_size: int):
        self.hidden, self.targets, self.vocab_size = hidden, targets, vocab_size
        self.stream = torch.cuda.current_stream(targets.device) if targets.is_cuda else None
        self.earlier = None if self.stream is None else latest_note(self.stream)
        self.flag = None if self.earlier is None else self.earlier.flag
        self.done = self.asked = None

    def ask(self, room: Room) -> Asked:
        """A program of this room is to look."""
        self.asked = room.ask(settled(self.hidden), settled(self.targets.long()), self.flag)
        return self.asked

    def begin(self) -> Supervised:
        """Start looking."""
        from deftune.losses.triton_rows import survey

        try:
            *found, self.told = survey(self.targets.contiguous(), self.vocab_size, IGNORE_INDEX, self.flag)
        finally:  # whatever happened: what was launched has to be waited for, what comes after this has not
            self.done = self.stream.record_event() if self.stream is not None else None
        self.all = Supervised(self.hidden, *found, known=False)
        return self.all

    def __enter__(self) -> Survey:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.done is not None:  # whatever happened: the kernel may still have to write what it tells
            self.done.synchronize()
        elif kind is not None and self.stream is not None:
            self.stream.record_event().synchronize()

    def wait(self) -> tuple[Tensor, Tensor, Tensor]:
        """(places, labels, facts): the one read of the device. A bad label, or an earlier call's NaN, is raised."""
        if self.asked is not None:
            (_, bad, was), found = self.asked.answer()
        else:
            if self.done is not None:
                self.done.synchronize()
            count, bad, was = self.told.tolist()
            assert self.all.facts is not None
            found = self.all.index[:count], self.all.y[:count], self.all.facts
        if self.earlier is not None:
            answer(self.earlier, was)
        if bad < self.targets.shape[0]:
            raise label_error(bad, int(self.targets[bad]), self.vocab_size)
        return found
