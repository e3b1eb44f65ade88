"""How a chunk of rows meets the head: `torch` on any device, `triton` on CUDA. Both do the same three GEMMs.

With E = e^{z - r} for a reference r of the row, the target left out, v = gate / sum E and t = gate (1 - p):

    dX = v (E W) - t W[y]        dW = E^T (v X) - t X at y        db = E^T v - t at y

The softmax is never formed and nothing is recomputed: the gate comes in after E was made.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from deftune.kernels.head import Head, Slices
from deftune.kernels.sparse import Products, Sparse, add_products
from deftune.kernels.statistics import (
    RowSums,
    block_rows,
    block_sums,
    compute_dtype,
    log_p_of,
    stats_columns,
    wide,
)


@dataclass
class Supervised:
    """The supervised rows of a call: x = hidden[index], targets y."""

    hidden: Tensor  # [N, D]
    index: Tensor  # [M]
    y: Tensor  # [M]
    facts: Tensor | None = None  # on the device: their number, and a flag that a row without a distribution sets
    known: bool = True  # False: index and y are [N], and only ``facts`` knows M

    def __post_init__(self) -> None:
        self.count = self.index.shape[0]
        self.dense = self.known and self.count == self.hidden.shape[0]

    def take(self, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        """(x, y, places) of some rows."""
        index, y = self.index[part], self.y[part]
        return self.hidden[part] if self.dense else self.hidden.index_select(0, index), y, index


@dataclass
class Chunk:
    """A chunk of the rows after the forward GEMM.

    ``columns`` are its log_p, entropy, log_collision, log_sum = log sum e^u and shift = max z, [5, C] in float64;
    ``e`` is E [C, V], where it was kept; ``top`` log p of the likeliest tokens, where they were asked for, and
    ``top_entropy`` that of their shares, where it was measured with them.
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


@dataclass
class Gradients:
    """Where gradients add up: dX [N, D] in the inputs' dtype, dW and db in float32 or better; None: not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    factor: Tensor | None = None  # what they are still to be multiplied with


class Backend(Protocol):
    """What the driver in `linear` asks of a backend; one is made for each call."""

    begun: int  # rows of the first chunk, where its forward GEMM is under way already

    def rows(self, total: int, bound: int | None) -> int:
        """Rows of a chunk of so many, at most the caller's bound."""
        ...

    def measure(self, part: slice, columns: Tensor, keep: bool, top: int) -> Chunk:
        """The forward GEMM and the statistics of some rows, into ``columns`` [5, C]."""
        ...

    def add(self, chunk: Chunk, gate: Tensor, scale: Tensor | float, to: Gradients) -> None:
        """The gradients of dz = scale gate (P - onehot) of a chunk."""
        ...

    def end(self, to: Gradients) -> None:
        """What is left to do once, after the last chunk."""
        ...

    sparse: Products | None

    def thin(self, sparse: Sparse) -> None:
        """From here on the gradients are those of the classes that ``sparse`` keeps, and the others' mean."""
        ...

    @staticmethod
    def finish(grads: list[Tensor], factor: Tensor, dtypes: list[torch.dtype]) -> list[Tensor]:
        """factor * grad in its dtype for each; the gradients may be written to."""
        ...


def balanced(total: int, limit: int, multiple: int = 1) -> int:
    """Rows per chunk, at most ``limit`` and alike from chunk to chunk."""
    limit = max(1, limit)
    if total <= limit:
        return max(1, total)
    chunks = -(-total // limit)
    return min(limit, -(-total // chunks // multiple) * multiple)


def bounded(rows: int, bound: int | None) -> int:
    return rows if bound is None else min(rows, bound)


def column_sums(e: Tensor, v: Tensor) -> Tensor:
    """E^T v in v's precision; for half-precision E, v goes as a sum of two."""
    if e.dtype == v.dtype:
        return torch.mv(e.T, v)
    size = v.abs().amax().clamp(min=torch.finfo(v.dtype).tiny)
    high = (v / size).to(e.dtype)
    low = (v / size - high).to(e.dtype)
    return torch.mm(e.T, torch.stack([high, low], 1), out_dtype=v.dtype).sum(1) * size


def product(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
    """a @ b in float32, into or onto ``out``."""
    if a.dtype == torch.float32:
        out.addmm_(a, b, beta=1.0 if add else 0.0)
    elif add:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)


class TorchBackend:
    """Plain PyTorch, any device: float32 logits of one chunk at a time, turned into E in place."""

    def __init__(self, head: Head, dtype: torch.dtype, rows: Supervised):
        weight = head.weight
        self.device = weight.device
        self.dtype = compute_dtype(dtype)
        self.low = weight.device.type == "cuda" and dtype != self.dtype
        # a CPU has no GEMM from half precision to float32: it gets one float32 copy of the weight per call
        self.weight = weight.to(dtype) if self.low else weight.to(self.dtype)
        self.head = head
        self.all = rows
        self.begun = 0
        self.started = False  # whether dW holds anything yet: the first chunk writes, the others add
        self.sparse: Products | None = None

    def thin(self, sparse: Sparse) -> None:
        self.sparse = Products(sparse, self.weight, self.weight.dtype, self.matmul, add_products)

    def rows(self, total: int, bound: int | None) -> int:
        limit = (512 << 20) if self.device.type == "cuda" else (48 << 20)
        if self.sparse is not None and self.device.type != "cuda":
            limit *= 4  # the kept classes' weights are gathered for every chunk
        return bounded(balanced(total, limit // (self.head.vocab_size * self.dtype.itemsize)), bound)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b in float32 or better."""
        if self.low:
            return torch.mm(a.to(self.weight.dtype), b, out_dtype=self.dtype)
        return torch.mm(a.to(self.dtype), b)

    def over_classes(self, e: Tensor) -> Tensor:
        """e @ W. A CPU's GEMM adds V products one after the other; by sums of blocks the error stays small."""
        if self.device.type != "cpu":
            return self.matmul(e, self.weight)
        total = torch.zeros(len(e), self.head.width, dtype=self.dtype)
        for columns, classes in zip(e.split(4096, 1), self.weight.split(4096)):
            total += columns @ classes
        return total

    def logits(self, x: Tensor) -> Tensor:
        z = self.matmul(x, self.weight.T)
        if self.head.bias is not None:
            z += self.head.bias
        if self.head.scale != 1:
            z *= self.head.scale
        if self.head.softcap is not None:
            z.div_(self.head.softcap).tanh_().mul_(self.head.softcap)
        return z

    def measure(self, part: slice, columns: Tensor, keep: bool, top: int) -> Chunk:
        x, y, index = self.all.take(part)
        z = self.logits(x)
        largest = z.topk(min(top, z.shape[1]), -1).values if top else None
        sums = torch.empty(5, len(x), dtype=self.dtype, device=self.device)
        size = min(block_rows(z.shape[1], self.dtype, self.device), max(1, len(x)))
        buffer = torch.empty(size, z.shape[1], dtype=self.dtype, device=self.device)
        for start in range(0, len(x), size):
            some = slice(start, start + size)
            self.exponentiate(z[some], y[some], buffer[: len(z[some])], sums[:, some])
        columns[0], columns[1], columns[2], columns[3] = stats_columns(RowSums(*sums))
        columns[4] = sums[0]
        top_log_p = None if largest is None else log_p_of(largest, columns)
        return Chunk(part, x, y, index, columns, sums[1], z if keep else None, top_log_p)

    def exponentiate(self, z: Tensor, y: Tensor, u: Tensor, out: Tensor) -> None:
        """z becomes E about its maximum, the target left out, times the softcap's slope; its sums go to ``out``."""
        slope = None if self.head.softcap is None else self.head.slope(z)
        block_sums(z, y, u, z, out)
        if slope is not None:
            z *= slope

    def target_slope(self, chunk: Chunk) -> Tensor:
        """The softcap's slope at the target."""
        return wide(self.head.slope(chunk.target))

    def add(self, chunk: Chunk, gate: Tensor, scale: Tensor | float, to: Gradients) -> None:
        log_p, _, _, log_sum, _ = chunk.columns
        gate = gate * scale
        # E is about the shift: P = E / sum e^u. A shut gate is 0 whatever stands beside it
        v = torch.where(gate == 0, 0.0, gate * torch.exp(-log_sum))
        t = torch.where(gate == 0, 0.0, gate * -torch.expm1(log_p) * self.target_slope(chunk))
        self.add_rows(chunk, v, t, to)
        chunk.e = None  # not to stand beside the next chunk's

    def add_rows(self, chunk: Chunk, v: Tensor, t: Tensor, to: Gradients) -> None:
        """The gradients of dz = v E off the target and -t on it; the target's part stays in float32."""
        e, y = chunk.e, chunk.y
        assert e is not None
        v, t = ((factor * self.head.scale).to(self.dtype)[:, None] for factor in (v, t))
        if self.low:
            e = e.to(self.weight.dtype)
        sparse = self.sparse
        if sparse is not None:
            sparse.choose(e, v[:, 0], t[:, 0], column_sums(e, v[:, 0].abs()))
        if to.hidden is not None:
            u = self.over_classes(e) if sparse is None else sparse.over_classes(e, v[:, 0], t[:, 0], y)
            rows = u * v - t * self.weight[y]
            to.hidden.index_copy_(0, chunk.index, rows.to(to.hidden.dtype))
        if to.weight is not None:
            scaled = chunk.x.to(self.dtype) * v
            if sparse is not None:
                sparse.over_rows(e, scaled, to.weight)
            elif self.low:
                # v may be far below float16's range: it goes over its largest
                size = v.abs().amax().clamp(min=torch.finfo(v.dtype).tiny)
                product = self.matmul(e.T, (scaled / size).to(e.dtype)) * size
                to.weight = to.weight.add_(product) if self.started else to.weight.copy_(product)
            elif self.started:
                to.weight.addmm_(e.T, scaled)
            else:
                torch.mm(e.T, scaled, out=to.weight)
            # accumulate=True sorts the rows by target: no atomics
            to.weight.index_put_((y,), -t * chunk.x, accumulate=True)
        if to.bias is not None:
            to.bias += column_sums(e, v[:, 0])
            to.bias.index_put_((y,), -t[:, 0], accumulate=True)
        self.started = True

    def end(self, to: Gradients) -> None:
        if not self.started and to.weight is not None:
            to.weight.zero_()
        if self.sparse is not None:
            self.sparse.end(to.weight)

    @staticmethod
    def finish(grads: list[Tensor], factor: Tensor, dtypes: list[torch.dtype]) -> list[Tensor]:
        done: list[Tensor] = []
        for grad, dtype in zip(grads, dtypes):
            full = compute_dtype(grad.dtype)
            if grad.dtype == dtype == full:
                done.append(grad.mul_(factor.to(full)))
            else:
                done.append((grad.to(full) * factor.to(full)).to(dtype))
        return done


class TritonBackend:
    """CUDA: one GEMM with the statistics in its epilogue, E stored once in the inputs' dtype, two cuBLAS GEMMs."""

    # each chunk reads and writes a float32 dW: 4% of the time at 4096 rows, 20% below 1024
    min_rows, max_rows = 1024, 4096
    # of E, of what a chunk takes besides, and of the tokens: an eighth of what a compiled loss keeps, or less
    max_e_bytes, max_bytes = 31 << 25, 17 << 26
    max_share = 15 / 64

    def __init__(
        self,
        head: Head,
        dtype: torch.dtype,
        rows: Supervised,
        vectors: Tensor | None = None,
        likeliest: Tensor | None = None,
    ):
        """``vectors`` and ``likeliest`` are room for z_y and its like, and for the likeliest tokens of a chunk."""
        from deftune.kernels import triton_rows

        self.kernels = triton_rows
        self.head = Head(head.weight.contiguous(), head.bias, head.scale, head.softcap)
        self.weights = Slices(self.head.weight, dtype)
        self.dtype = dtype
        device = rows.hidden.device
        facts = torch.tensor([rows.count, 0], device=device) if rows.facts is None else rows.facts
        self.number, self.nan = facts[:1], facts[1:]
        self.all = replace(rows, hidden=rows.hidden.to(dtype).contiguous())
        # rows of E start on 128 bytes whatever V is
        self.stride = -(-head.vocab_size // 64) * 64
        self.e = self.u = self.scaled = torch.empty(0, dtype=dtype, device=device)
        self.begun = 0
        self.first: tuple[Tensor, Tensor | None, Tensor] | None = None
        self.multiplied = False  # whether u of the chunk at hand is E W already
        self.started = False
        self.sparse: Products | None = None
        self.likeliest = likeliest
        if rows.count:
            given = self.all.hidden, rows.index, rows.y
            self.vectors = triton_rows.target_logits(*given, self.head, self.number, vectors)

    def thin(self, sparse: Sparse) -> None:
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
        """Rows of the first chunk, before it is known how many of the tokens are supervised: the most of any."""
        e = -(-head.vocab_size // 64) * 64 * dtype.itemsize
        row = e + head.vocab_size // 16 + 2 * head.width * (dtype.itemsize + 2)  # its sums by tile; x, v X and E W
        limit = min(cls.max_rows, cls.max_e_bytes // e, cls.max_bytes // row)
        if bound is None:
            limit = min(limit, max(cls.min_rows, int(cls.max_share * tokens)))
        return bounded(min(tokens, max(128, limit // 128 * 128)), bound)

    def begin(self, rows: int, keep: bool, top: int) -> None:
        """Start the forward GEMM of the first ``rows`` rows, as many of them as there will turn out to be."""
        self.begun = rows
        # not multiplied yet: rows that are not there would be too
        self.first = self.exponentials(slice(0, rows), keep, top, multiply=False)

    def settle(self, count: int) -> None:
        """Only the first ``count`` rows are there."""
        self.all = replace(self.all, index=self.all.index[:count], y=self.all.y[:count], known=True)

    def exponentials(self, part: slice, keep: bool, top: int, multiply: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        """(x, E, tiles) of some rows; E W as well if they are to be multiplied, slice by slice while each is there."""
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
        """u = E W, or its part of some classes added."""
        product(e[:, begin : begin + len(classes)], classes, u, add)

    def measure(self, part: slice, columns: Tensor, keep: bool, top: int) -> Chunk:
        kernels, head, rows = self.kernels, self.head, part.stop - part.start
        self.multiplied = keep and self.weights.several and self.first is None and self.sparse is None
        x, e, tiles = self.first or self.exponentials(part, keep, top, self.multiplied)
        self.first = None  # not to stand beside the next one's
        x, e, tiles = x[:rows], None if e is None else e[:rows], tiles[:, :, :rows]
        y, index = self.all.y[part], self.all.index[part]
        z_y, reference, _, _ = self.vectors[:, part].unbind()
        u = self.u if self.multiplied else None
        kernels.reduce_tiles(tiles, z_y, columns, x, y, reference, head, e, u, self.nan, self.number, part.start)
        found = None, None
        if e is not None and top:
            into = self.likeliest
            if into is None:
                into = columns.new_empty(rows, min(top, head.vocab_size))
            found = into, columns.new_empty(rows)
            kernels.likeliest(x, z_y, reference, tiles, e, head, columns, self.number, part.start, *found)
        return Chunk(part, x, y, index, columns, z_y, None if e is None else e[:, : head.vocab_size], *found)

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
        """v and t of a chunk, its rows of dX into ``hidden``, and, for dW, v X."""
        e, u, scaled = chunk.e, None, None
        assert e is not None
        rows = e.shape[0]
        if weight:
            if self.scaled.shape[0] != rows:
                self.scaled = torch.empty_like(chunk.x)
            scaled = self.scaled
        z_y, reference, v, t = self.vectors[:, chunk.part].unbind()
        given = gate, chunk.columns, reference, z_y, v, t, chunk.x, chunk.y, chunk.index, self.head, scale
        if self.sparse is not None:  # whose classes are chosen by v, before there is a u
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
        rows, t = self.all, self.vectors[3]
        runs = self.kernels.sort_targets(rows.y, self.head.vocab_size)
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
        from deftune.kernels import triton_rows

        return triton_rows.scaled(grads, factor, dtypes)


BACKENDS = {"torch": TorchBackend, "triton": TritonBackend}


@functools.cache
def triton_status() -> str:
    """'' where Triton can be used, else why not."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return ""


def interpreted() -> bool:
    """Whether Triton kernels run in the interpreter, on the CPU: slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def choose_backend(wanted: str, device: torch.device, dtype: torch.dtype, head: Head, top: int = 0) -> tuple[str, str]:
    """(backend, why): what ``auto`` takes, or the one asked for; an error where that one cannot do it."""
    if wanted not in ("auto", *BACKENDS):
        raise ValueError(f"backend: one of auto, {', '.join(BACKENDS)}, got {wanted!r}")
    against = _against_triton(device, dtype, head, top)
    if wanted == "triton" and against:
        raise ValueError(f"backend='triton' cannot be used here: {against}; use backend='torch' or 'auto'")
    if wanted != "auto":
        return wanted, "asked for"
    if device.type != "cuda":
        against = against or "the interpreter is for tests"
    elif dtype == torch.float32:
        against = against or "float32 goes through cuBLAS (as precise as torch.set_float32_matmul_precision says)"
    return ("torch", against) if against else ("triton", "bfloat16 on CUDA")


def _against_triton(device: torch.device, dtype: torch.dtype, head: Head, top: int) -> str:
    """Why the triton backend cannot be used, '' if it can."""
    if device.type != "cuda" and not interpreted():
        return f"the device is {device.type}, not cuda"
    if triton_status():
        return triton_status()
    if dtype not in (torch.bfloat16, torch.float32):
        return f"{dtype} has not the range that E needs; bfloat16 has"
    if head.width * dtype.itemsize % 16:
        return f"a row of the weight, {head.width} of {dtype}, is no multiple of 16 bytes"
    if top and head.softcap is not None:
        return "the likeliest tokens under a softcap are found by torch only"
    return ""
