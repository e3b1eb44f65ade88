"""The fused loss in plain PyTorch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from deftune.losses.chunks import Backend, Chunk, Supervised, balanced, bounded
from deftune.losses.head import Head
from deftune.losses.request import Gradients
from deftune.losses.sparse import Products, Sparse, add_products
from deftune.losses.statistics import (
    ENTROPY,
    LOG_P,
    LOG_SUM,
    SHIFT,
    RowSums,
    block_rows,
    block_sums,
    compute_dtype,
    log_p_of,
    merge_ranks,
    stats_columns,
    wide,
)


def column_sums(e: Tensor, v: Tensor) -> Tensor:
    """E^T v in the precision of v; for half-precision E, v is split into a sum of two half-precision vectors."""
    if e.dtype == v.dtype:
        return torch.mv(e.T, v)
    size = v.abs().amax().clamp(min=torch.finfo(v.dtype).tiny)
    high = (v / size).to(e.dtype)
    low = (v / size - high).to(e.dtype)
    return torch.mm(e.T, torch.stack([high, low], 1), out_dtype=v.dtype).sum(1) * size


def add_rows_at(to: Tensor, index: Tensor, rows: Tensor) -> None:
    """to[index] += rows, in the same order at every call, so that equal calls give equal bits.

    On a GPU ``index_put_`` sorts the rows by index and ``index_add_`` uses atomics; on a CPU with several threads
    ``index_put_`` uses atomics and ``index_add_`` adds one row after the other.
    """
    if to.is_cuda:
        to.index_put_((index,), rows, accumulate=True)
    else:
        to.index_add_(0, index, rows)


class TorchBackend(Backend):
    """Plain PyTorch, any device: float32 logits of one chunk at a time, turned into E in place."""

    name = "torch"

    def __init__(self, head: Head, dtype: torch.dtype, rows: Supervised):
        weight = head.weight
        self.device = weight.device
        self.dtype = compute_dtype(dtype)
        self.low = weight.device.type == "cuda" and dtype != self.dtype
        # a CPU has no GEMM from half precision to float32: one float32 copy of the weight per pass
        self.weight = weight.to(dtype) if self.low else weight.to(self.dtype)
        self.head = head
        self.all = rows

    def use_sparse(self, sparse: Sparse) -> None:
        self.sparse = Products(sparse, self.weight, self.weight.dtype, self.matmul, add_products)

    def rows(self, total: int, bound: int | None) -> int:
        limit = (512 << 20) if self.device.type == "cuda" else (48 << 20)
        if self.sparse is not None and self.device.type != "cuda":
            limit *= 4  # the weights of the kept classes are gathered for every chunk
        return bounded(balanced(total, limit // (self.head.most_classes * self.dtype.itemsize)), bound)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b in float32 or better."""
        if self.low:
            return torch.mm(a.to(self.weight.dtype), b, out_dtype=self.dtype)
        return torch.mm(a.to(self.dtype), b)

    def over_classes(self, e: Tensor) -> Tensor:
        """e @ W. A CPU's GEMM adds V products in sequence; partial sums of blocks keep the rounding error small."""
        if self.device.type != "cpu":
            return self.matmul(e, self.weight)
        total = torch.zeros(len(e), self.head.width, dtype=self.dtype, device=e.device)
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
        sums = torch.empty(len(RowSums._fields), len(x), dtype=self.dtype, device=self.device)
        size = min(block_rows(z.shape[1], self.dtype, self.device), max(1, len(x)))
        buffer = torch.empty(size, z.shape[1], dtype=self.dtype, device=self.device)
        for start in range(0, len(x), size):
            some = slice(start, start + size)
            self.exponentiate(z[some], y[some], buffer[: len(z[some])], sums[:, some])
        whole, shard = RowSums(*sums), self.head.shard
        if shard is not None:
            whole = merge_ranks(whole, y, shard)
            largest = None if largest is None else shard.likeliest(largest, top)
        for column, values in zip(columns, stats_columns(whole)):
            column.copy_(values)
        top_log_p = None if largest is None else log_p_of(largest, columns)
        return Chunk(part, x, y, index, columns, whole.target, z if keep else None, top_log_p, reference=sums[0])

    def exponentiate(self, z: Tensor, y: Tensor, u: Tensor, out: Tensor) -> None:
        """Turn z into E relative to its maximum, 0 at the target, times the softcap's slope; the sums go to ``out``."""
        slope = None if self.head.softcap is None else self.head.slope(z)
        block_sums(z, y, u, z, out, partial=self.head.shard is not None)
        if slope is not None:
            z *= slope

    def log_factor(self, chunk: Chunk) -> Tensor:
        """log (P / E): E is relative to the maximum of this rank's classes."""
        log_sum, shift = chunk.columns[LOG_SUM], chunk.columns[SHIFT]
        if self.head.shard is None:
            return -log_sum
        assert chunk.reference is not None
        return wide(chunk.reference) - shift - log_sum

    def target_slope(self, chunk: Chunk) -> Tensor:
        """The softcap's slope at the target."""
        return wide(self.head.slope(chunk.target))

    def add(self, chunk: Chunk, gate: Tensor, scale: Tensor | float, to: Gradients) -> None:
        log_p = chunk.columns[LOG_P]
        gate = gate * scale
        # a gate of 0 gives 0, also times inf
        v = torch.where(gate == 0, 0.0, gate * torch.exp(self.log_factor(chunk)))
        t = torch.where(gate == 0, 0.0, gate * -torch.expm1(log_p) * self.target_slope(chunk))
        self.add_rows(chunk, v, t, to)
        chunk.e = None  # freed before the next chunk's E is made

    def add_rows(self, chunk: Chunk, v: Tensor, t: Tensor, to: Gradients) -> None:
        """The gradients of dz = v E off the target and -t on it; the target's part stays in float32."""
        e, y = chunk.e, chunk.y
        assert e is not None
        v, t = ((factor * self.head.scale).to(self.dtype)[:, None] for factor in (v, t))
        if self.low:
            e = e.to(self.weight.dtype)
        sparse, at_target = self.sparse, True
        if self.head.shard is not None:  # the targets of other ranks' classes have no part in this rank's gradients
            t, y, at_target = torch.where(y[:, None] >= 0, t, 0.0), y.clamp(min=0), self.head.classes > 0
        if sparse is not None:
            sparse.choose(e, v[:, 0], t[:, 0], column_sums(e, v[:, 0].abs()))
        if to.hidden is not None:
            u = self.over_classes(e) if sparse is None else sparse.over_classes(e, v[:, 0], t[:, 0], y)
            rows = u * v - t * self.weight[y] if at_target else u
            to.hidden.index_copy_(0, chunk.index, rows.to(to.hidden.dtype))
        if to.weight is not None:
            scaled = chunk.x.to(self.dtype) * v
            if sparse is not None:
                sparse.over_rows(e, scaled, to.weight)
            elif self.low:
                # v may be far below float16's range: divide by the largest before rounding
                size = v.abs().amax().clamp(min=torch.finfo(v.dtype).tiny)
                product = self.matmul(e.T, (scaled / size).to(e.dtype)) * size
                to.weight = to.weight.add_(product) if self.started else to.weight.copy_(product)
            elif self.started:
                to.weight.addmm_(e.T, scaled)
            else:
                torch.mm(e.T, scaled, out=to.weight)
            if at_target:
                add_rows_at(to.weight, y, -t * chunk.x)
        if to.bias is not None:
            to.bias += column_sums(e, v[:, 0])
            if at_target:
                add_rows_at(to.bias, y, -t[:, 0])
        self.started = True

    def end(self, to: Gradients) -> None:
        if not self.started and to.weight is not None:
            to.weight.zero_()
        if self.sparse is not None:
            self.sparse.end(to.weight)

    def add_entropy(self, chunk: Chunk, gate: Tensor, grad_entropy: Tensor, to: Gradients) -> None:
        """dz_i = P_i (gate - h H - h log P_i), and at the target P_y (...) - gate, each times the softcap's slope.

        h is ``grad_entropy``. dH/dz_i = -P_i (log P_i + H) is not gate x error, so it is written into the float32 E.
        """
        h = grad_entropy
        log_p, entropy, log_sum, shift = (chunk.columns[i] for i in (LOG_P, ENTROPY, LOG_SUM, SHIFT))
        e, log_factor = chunk.e, self.log_factor(chunk)
        assert e is not None
        # E has the slope as a factor already, which log P must not have
        if self.head.softcap is None:
            log_probs = e.log() + log_factor[:, None].to(e.dtype)
        else:
            log_probs = self.logits(chunk.x) - shift[:, None].to(e.dtype) - log_sum[:, None].to(e.dtype)
        log_probs = torch.where(e == 0, 0.0, log_probs)
        e *= (gate - h * entropy)[:, None].to(e.dtype) - h[:, None].to(e.dtype) * log_probs
        p_term = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * (log_p + entropy))
        at_target = gate * torch.expm1(log_p) - h * p_term
        self.add_rows(chunk, torch.exp(log_factor), -at_target * self.target_slope(chunk), to)

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
