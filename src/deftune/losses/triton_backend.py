"""The fused loss by the kernels in `triton_rows`, on CUDA."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from deftune.losses.chunks import Chunk, Gradients, Supervised, balanced, bounded
from deftune.losses.head import Head, Slices
from deftune.losses.sparse import Products, Sparse


def product(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
    """a @ b in float32, into or onto ``out``."""
    if a.dtype == torch.float32:
        out.addmm_(a, b, beta=1.0 if add else 0.0)
    elif add:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)


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
        from deftune.losses import triton_rows

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
        from deftune.losses import triton_rows

        return triton_rows.scaled(grads, factor, dtypes)
