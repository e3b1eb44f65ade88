"""The fused loss by the Triton kernels in `triton_rows`, on CUDA."""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from deftune.losses.checks import label_error
from deftune.losses.chunks import Backend, Chunk, Supervised, balanced, bounded
from deftune.losses.head import Head, Slices
from deftune.losses.pending import latest_note, resolve
from deftune.losses.request import Gradients, Request, Rows
from deftune.losses.sparse import Products, Sparse
from deftune.objectives.stats import IGNORE_INDEX


def interpreted() -> bool:
    """Whether Triton kernels run in the interpreter, on the CPU: slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def triton_missing() -> bool:
    return importlib.util.find_spec("triton") is None


def product(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
    """out = a @ b in float32, or out += a @ b."""
    if a.dtype == torch.float32:
        out.addmm_(a, b, beta=1.0 if add else 0.0)
    elif add:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)


class TritonBackend(Backend):
    """CUDA: one GEMM with the statistics in its epilogue, E stored once in the inputs' dtype, two cuBLAS GEMMs."""

    name = "triton"
    # each chunk reads and writes a float32 dW: 4% of the time at 4096 rows, 20% below 1024
    min_rows, max_rows = 1024, 4096
    # bytes of E, bytes of all tensors of a chunk, share of the tokens: at most an eighth of what a compiled loss keeps
    max_e_bytes, max_bytes = 31 << 25, 17 << 26
    max_share = 15 / 64
    # a small head, whose chunk of max_rows takes no more than this, has such chunks whatever the number of tokens: the
    # host and dW cost most there, and with vectors and workspaces the extra memory stays below 0.5 GiB
    small_bytes = 7 << 26

    def __init__(
        self,
        head: Head,
        dtype: torch.dtype,
        rows: Supervised,
        vectors: Tensor | None = None,
        likeliest: Tensor | None = None,
    ):
        """``vectors`` [4, C] and ``likeliest`` [C, k] are buffers to use; None: new ones."""
        from deftune.losses import triton_rows

        self.kernels = triton_rows
        self.head = replace(head, weight=head.weight.contiguous())
        self.weights = Slices(self.head.weight, dtype)
        self.dtype = dtype
        device = rows.hidden.device
        facts = torch.tensor([rows.count, 0], device=device) if rows.facts is None else rows.facts
        self.number, self.nan = facts[:1], facts[1:]
        self.all = replace(rows, hidden=rows.hidden.to(dtype).contiguous())
        # rows of E start on 128 bytes whatever V is
        self.stride = -(-head.classes // 64) * 64
        self.e = self.u = self.scaled = torch.empty(0, dtype=dtype, device=device)
        self.first: tuple[Tensor, Tensor | None, Tensor] | None = None
        self.multiplied = False  # whether u of the current chunk is E W already
        self.likeliest = likeliest
        if rows.count:
            given = self.all.hidden, rows.index, rows.y
            self.vectors = triton_rows.target_logits(*given, self.head, self.number, vectors)

    @staticmethod
    def refusal(request: Request) -> str:
        device, dtype, head = request.hidden.device, request.dtype, request.head
        if device.type != "cuda" and not interpreted():
            return f"the device is {device.type}, not cuda"
        if triton_missing():
            return "triton is not installed"
        if dtype not in (torch.bfloat16, torch.float32):
            return f"{dtype} has not the range that E needs; bfloat16 has"
        if head.width * dtype.itemsize % 16:
            return f"a row of the weight, {head.width} of {dtype}, is no multiple of 16 bytes"
        if request.top_k and head.softcap is not None:
            return "the likeliest tokens under a softcap are found by torch only"
        if head.shard is not None and not head.shard.smallest:
            return "a rank has no class of the vocabulary"
        return ""

    @staticmethod
    def reservation(request: Request) -> str:
        if request.hidden.device.type != "cuda":
            return "the interpreter is for tests"
        if request.dtype == torch.float32:
            return "float32 goes through cuBLAS (as precise as torch.set_float32_matmul_precision says)"
        return ""

    @classmethod
    def start(cls, request: Request) -> tuple[Rows, Self | None]:
        """Launch the search for the supervised rows and the first chunk's forward GEMM, then wait for their number."""
        if not len(request.targets):
            return super().start(request)
        objective, head = request.objective, request.head
        size = cls.first_rows(head, request.dtype, len(request.targets), request.chunk_rows)
        # the first pass of a step objective is for its statistic, without gradients
        statistic_first = objective is not None and objective.kind == "step" and request.context.step is None
        with Survey(request) as survey:
            found = survey.launch()
            backend = cls(head, request.dtype, replace(found, y=head.columns(found.y)))
            backend.begin(size, any(request.wanted) and not statistic_first, request.top_k)
            rows = survey.wait()
            backend.settle(len(rows.index))
        return rows, backend

    def use_sparse(self, sparse: Sparse) -> None:
        def multiply(a: Tensor, b: Tensor) -> Tensor:
            out = torch.empty(len(a), b.shape[1], dtype=torch.float32, device=a.device)
            product(a, b, out)
            return out

        self.sparse = Products(sparse, self.head.weight, self.dtype, multiply, self.kernels.add_products)

    def rows(self, total: int, bound: int | None) -> int:
        limit = self.first_rows(self.head, self.dtype, len(self.all.hidden), bound)
        return bounded(balanced(total, limit, 128), bound)

    @classmethod
    def first_rows(cls, head: Head, dtype: torch.dtype, tokens: int, bound: int | None) -> int:
        """Rows of the first chunk, chosen before the number of supervised tokens is known; no chunk has more."""
        e = -(-head.most_classes // 64) * 64 * dtype.itemsize
        # E, the sums of its tiles, x, v X and E W
        row = e + head.most_classes // 16 + 2 * head.width * (dtype.itemsize + 2)
        # of a shard E has few columns, and every chunk waits for two reductions: chunks of twice the rows
        times = 1 if head.shard is None else 2
        limit = min(times * cls.max_rows, cls.max_e_bytes // e, cls.max_bytes // row)
        if bound is None and cls.max_rows * row > cls.small_bytes:
            limit = min(limit, max(cls.min_rows, int(times * cls.max_share * tokens)))
        return bounded(min(tokens, max(128, limit // 128 * 128)), bound)

    def begin(self, rows: int, keep: bool, top: int) -> None:
        """Launch the forward GEMM of the first ``rows`` rows; kernels skip those beyond the number of rows."""
        self.first_rows_done = rows
        # E W waits for the number of rows: a GEMM would not skip
        self.first = self.exponentials(slice(0, rows), keep, top, multiply=False)

    def settle(self, count: int) -> None:
        """The host knows the number of rows now."""
        self.all = replace(self.all, index=self.all.index[:count], y=self.all.y[:count], known=True)

    def exponentials(self, part: slice, keep: bool, top: int, multiply: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        """(x, E, tiles) of some rows; with ``multiply`` also u = E W, slice by slice while each is in its buffer."""
        x, y, _ = self.all.take(part)
        e, rows, then = None, x.shape[0], None
        if keep or top:
            if self.e.shape[0] < rows:
                self.e = torch.empty(rows, self.stride, dtype=self.dtype, device=x.device)
            e = self.e[:rows]
        if multiply:
            then = functools.partial(self.multiply, self.e[:rows], self.new_u(rows))
        tiles = self.kernels.exponentials(
            x, y, self.vectors[1, part], self.head, self.weights, e, self.number, part.start, then
        )
        return x, e, tiles

    def new_u(self, rows: int) -> Tensor:
        if self.u.shape[0] < rows:
            self.u = torch.empty(rows, self.head.width, dtype=torch.float32, device=self.e.device)
        return self.u[:rows]

    @staticmethod
    def multiply(e: Tensor, u: Tensor, begin: int, classes: Tensor, add: bool) -> None:
        """u = E W, or u += E W over some classes."""
        product(e[:, begin : begin + len(classes)], classes, u, add)

    def measure(self, part: slice, columns: Tensor, keep: bool, top: int) -> Chunk:
        kernels, head, rows = self.kernels, self.head, part.stop - part.start
        self.multiplied = keep and self.weights.several and self.first is None and self.sparse is None
        x, e, tiles = self.first or self.exponentials(part, keep, top, self.multiplied)
        self.first = None  # freed before the next chunk
        x, e, tiles = x[:rows], None if e is None else e[:rows], tiles[:, :, :rows]
        y, index = self.all.y[part], self.all.index[part]
        z_y, reference, _, _ = self.vectors[:, part].unbind()
        u, shard = self.u if self.multiplied else None, head.shard
        out = columns if shard is None else kernels.new_sums(rows, columns.device)
        kernels.reduce_tiles(tiles, z_y, out, x, y, reference, head, e, u, self.nan, self.number, part.start)
        if shard is not None:  # as `statistics.merge_ranks`, in two launches
            shard.maximum(out[:3])
            kernels.rescale_sums(out)
            shard.total(out[3:6])
            kernels.merged_columns(out, z_y, columns, self.nan)
        found = None, None
        if e is not None and top:
            into = self.likeliest
            if into is None:
                into = columns.new_empty(rows, min(top, head.classes))
            found = into, columns.new_empty(rows)
            target = z_y if shard is None else torch.where(y >= 0, z_y, -torch.inf)
            kernels.likeliest(x, target, reference, tiles, e, head, columns, self.number, part.start, *found)
            if shard is not None:
                found = shard.likeliest(into, top), None
        return Chunk(part, x, y, index, columns, z_y, None if e is None else e[:, : head.classes], *found)

    def add(self, chunk: Chunk, gate: Tensor, scale: Tensor | float, to: Gradients) -> None:
        if isinstance(scale, Tensor):
            gate, scale = gate * scale, 1.0
        assert chunk.e is not None
        scaled = self.spread(chunk, gate, scale, to.hidden, to.weight is not None)
        if to.weight is not None and scaled is not None and self.sparse is not None:
            self.sparse.over_rows(chunk.e, scaled, to.weight)
        elif to.weight is not None and scaled is not None:
            product(chunk.e.T, scaled, to.weight, add=self.started)
        if to.bias is not None:
            to.bias += self.kernels.column_sums(chunk.e, self.vectors[2, chunk.part])
        self.started = True

    def spread(self, chunk: Chunk, gate: Tensor, scale: float, hidden: Tensor | None, weight: bool) -> Tensor | None:
        """Compute v and t of a chunk, write its rows of dX into ``hidden``, and return v X if dW is wanted."""
        e, u, scaled = chunk.e, None, None
        assert e is not None
        rows = e.shape[0]
        if weight:
            if self.scaled.shape[0] != rows:
                self.scaled = torch.empty_like(chunk.x)
            scaled = self.scaled
        z_y, reference, v, t = self.vectors[:, chunk.part].unbind()
        given = gate, chunk.columns, reference, z_y, v, t, chunk.x, chunk.y, chunk.index, self.head, scale
        if self.sparse is not None:  # the classes are chosen by v, before u is made from them
            self.kernels.finish_rows(*given, None, None, scaled)
            self.sparse.choose(e, v, t, self.kernels.column_sums(e, v, absolute=True))
            if hidden is not None:
                self.kernels.finish_rows(*given, self.sparse.over_classes(e, v, t, chunk.y), hidden, None)
            return scaled
        if hidden is not None:
            u = self.new_u(rows)
            if not self.multiplied:
                for number, (begin, classes) in enumerate(self.weights.each()):
                    self.multiply(e, u, begin, classes, add=number > 0)
        self.kernels.finish_rows(*given, u, hidden, scaled)
        return scaled

    def end(self, to: Gradients) -> None:
        if not self.started:
            if to.weight is not None:
                to.weight.zero_()
            return
        rows, y, t = self.all, self.all.y, self.vectors[3]
        if self.head.shard is not None:  # 0 for other ranks' targets, and not all of these at one class
            elsewhere = torch.arange(len(y), device=y.device) % self.head.classes
            y, t = torch.where(y >= 0, y, elsewhere), torch.where(y >= 0, t[: len(y)], 0.0)
        runs = self.kernels.sort_targets(y, self.head.classes)
        if to.weight is not None:
            self.kernels.subtract_targets(rows.hidden, rows.index, runs, t, to.weight)
        if to.bias is not None:
            column = to.bias[:, None]
            ones = torch.ones(1, 1, device=column.device)
            self.kernels.subtract_targets(ones, torch.zeros_like(rows.index), runs, t, column)
        if self.sparse is not None:
            self.sparse.end(to.weight)

    @staticmethod
    def finish(grads: list[Tensor], factor: Tensor, dtypes: list[torch.dtype]) -> list[Tensor]:
        from deftune.losses import triton_rows

        return triton_rows.scaled(grads, factor, dtypes)


class Survey:
    """The search for the supervised tokens, on the device; ``wait`` is the request's one synchronisation.

    The host gets three numbers: how many there are, the position of the first bad label, and the NaN flag of an
    earlier call. As a context manager it waits for the kernel in any case, since the kernel writes to host memory.
    """

    all: Supervised
    report: Tensor

    def __init__(self, request: Request):
        self.hidden, self.targets, self.vocab_size = request.hidden, request.targets, request.head.vocab_size
        self.stream = torch.cuda.current_stream(self.targets.device) if self.targets.is_cuda else None
        self.earlier = None if self.stream is None else latest_note(self.stream)
        self.flag = None if self.earlier is None else self.earlier.flag
        self.done = None

    def launch(self) -> Supervised:
        from deftune.losses.triton_rows import survey

        try:
            *found, self.report = survey(self.targets.contiguous(), self.vocab_size, IGNORE_INDEX, self.flag)
        finally:  # after an error too: what was launched has to be waited for, what comes after it has not
            self.done = self.stream.record_event() if self.stream is not None else None
        self.all = Supervised(self.hidden, *found, known=False)
        return self.all

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.done is not None:
            self.done.synchronize()
        elif kind is not None and self.stream is not None:
            self.stream.record_event().synchronize()

    def wait(self) -> Rows:
        if self.done is not None:
            self.done.synchronize()
        count, bad, flag = self.report.tolist()
        self.check(bad, flag)
        return Rows(self.all.index[:count], self.all.y[:count], self.all.facts)

    def check(self, bad: int, flag: int) -> None:
        """Raise for an earlier call's NaN, or for a label outside [0, V)."""
        if self.earlier is not None:
            resolve(self.earlier, flag)
        if bad < self.targets.shape[0]:
            raise label_error(bad, int(self.targets[bad]), self.vocab_size)
