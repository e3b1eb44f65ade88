"""How a chunk of rows meets the head: `torch` on any device, `triton` on CUDA. Both do the same three GEMMs.

With E = e^{z - r} for a reference r of the row, the target left out, v = gate / sum E and t = gate (1 - p):

    dX = v (E W) - t W[y]        dW = E^T (v X) - t X at y        db = E^T v - t at y

The softmax is never formed and nothing is recomputed: the gate comes in after E was made.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deftune.kernels.head import Head
from deftune.kernels.statistics import RowSums, block_rows, compute_dtype


@dataclass
class Chunk:
    """A chunk of rows after the forward GEMM: its sums, and E [C, V] about ``reference`` (None where not kept)."""

    x: Tensor
    y: Tensor
    sums: RowSums
    reference: Tensor
    e: Tensor | None
    top: Tensor | None  # the largest logits, where they were asked for


@dataclass
class Gradients:
    """Where gradients add up: dX [N, D] in the inputs' dtype, dW and db in float32 or better; None: not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    started: bool = False  # whether weight holds anything yet: the first chunk writes, the others add


class Backend(Protocol):
    """What the driver in `linear` asks of a backend."""

    name: str

    def rows(self, total: int) -> int:
        """Rows of a chunk."""
        ...

    def measure(self, x: Tensor, y: Tensor, keep: bool, top: int) -> Chunk:
        """The forward GEMM and the rows' sums; E where ``keep``, the ``top`` largest logits where > 0."""
        ...

    def add(self, chunk: Chunk, index: Tensor, v: Tensor, t: Tensor, to: Gradients) -> None:
        """A chunk's gradients, for dz = v E off the target and -t on it."""
        ...

    def finish(self, grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        """factor * grad in ``dtype``."""
        ...


def balanced(total: int, limit: int, multiple: int = 1) -> int:
    """Rows per chunk, at most ``limit`` and alike from chunk to chunk."""
    limit = max(1, limit)
    if total <= limit:
        return max(1, total)
    chunks = -(-total // limit)
    return min(limit, -(-total // chunks // multiple) * multiple)


class TorchBackend:
    """Plain PyTorch, any device: float32 logits of one chunk at a time, turned into E in place."""

    name = "torch"

    def __init__(self, head: Head, dtype: torch.dtype):
        weight = head.weight
        self.device = weight.device
        self.dtype = compute_dtype(dtype)
        self.low = weight.device.type == "cuda" and dtype != self.dtype
        # a CPU has no GEMM from half precision to float32: it gets one float32 copy of the weight per call
        self.weight = weight.to(dtype) if self.low else weight.to(self.dtype)
        self.head = head

    def rows(self, total: int) -> int:
        limit = (512 << 20) if self.device.type == "cuda" else (48 << 20)
        return balanced(total, limit // (self.head.vocab_size * self.dtype.itemsize))

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b in float32 or better."""
        if self.low:
            return torch.mm(a.to(self.weight.dtype), b, out_dtype=self.dtype)
        return torch.mm(a.to(self.dtype), b)

    def logits(self, x: Tensor) -> Tensor:
        z = self.matmul(x, self.weight.T)
        if self.head.bias is not None:
            z += self.head.bias
        if self.head.scale != 1:
            z *= self.head.scale
        if self.head.softcap is not None:
            z.div_(self.head.softcap).tanh_().mul_(self.head.softcap)
        return z

    def measure(self, x: Tensor, y: Tensor, keep: bool, top: int) -> Chunk:
        z = self.logits(x)
        largest = z.topk(min(top, z.shape[1]), -1).values if top else None
        sums = torch.empty(5, len(x), dtype=self.dtype, device=self.device)
        size = min(block_rows(z.shape[1], self.dtype, self.device), max(1, len(x)))
        buffer = torch.empty(size, z.shape[1], dtype=self.dtype, device=self.device)
        for start in range(0, len(x), size):
            part = slice(start, start + size)
            self.exponentiate(z[part], y[part], buffer[: len(z[part])], sums[:, part])
        return Chunk(x, y, RowSums(*sums), sums[0], z if keep else None, largest)

    def exponentiate(self, z: Tensor, y: Tensor, u: Tensor, out: Tensor) -> None:
        """z becomes E about its maximum, the target left out, times the softcap's slope; its sums go to ``out``."""
        target = y[:, None]
        shift = z.amax(-1, keepdim=True)
        out[0], out[1] = shift[:, 0], z.gather(-1, target)[:, 0]
        slope = None if self.head.softcap is None else self.head.slope(z)
        torch.sub(z, shift, out=u)
        torch.exp(u, out=z)
        z.scatter_(-1, target, 0)
        torch.sum(z, -1, out=out[2])
        out[3] = torch.linalg.vecdot(z, z)
        out[4] = torch.linalg.vecdot(u, z)
        if z.device.type != "cpu" or bool(out[4].isnan().any()):
            out[4] = torch.linalg.vecdot(u.clamp_(min=-800), z)  # 0 * -inf = 0
        if slope is not None:
            z *= slope

    def add(self, chunk: Chunk, index: Tensor, v: Tensor, t: Tensor, to: Gradients) -> None:
        assert chunk.e is not None
        v, t = v.to(self.dtype), t.to(self.dtype)
        # a gate of 0 has t = 0 too
        chunk.e.scatter_(-1, chunk.y[:, None], torch.where(v == 0, 0.0, -t / v)[:, None])
        self.add_rows(chunk, index, v, to)

    def add_rows(self, chunk: Chunk, index: Tensor, v: Tensor, to: Gradients) -> None:
        """The gradients of dz = v E, the target's entry of E included."""
        e = chunk.e
        assert e is not None
        if self.low:
            e = e.to(self.weight.dtype)
        if to.hidden is not None:
            to.hidden.index_copy_(0, index, (self.matmul(e, self.weight) * v[:, None]).to(to.hidden.dtype))
        if to.weight is not None:
            scaled = chunk.x.to(self.dtype) * v[:, None]
            if self.low:
                to.weight += self.matmul(e.T, scaled.to(e.dtype))
            elif to.started:
                to.weight.addmm_(e.T, scaled)
            else:
                torch.mm(e.T, scaled, out=to.weight)
        if to.bias is not None:
            to.bias += torch.mv(e.T, v.to(e.dtype))
        to.started = True

    def finish(self, grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        return grad.mul_(factor.to(grad.dtype)).to(dtype)


class TritonBackend:
    """CUDA: one GEMM with the statistics in its epilogue, E stored once in the inputs' dtype, two cuBLAS GEMMs."""

    name = "triton"
    max_rows = 4096  # below 1024 the float32 traffic of dW costs 20%
    max_bytes = 5 << 28  # 1.25 GiB of E

    def __init__(self, head: Head, dtype: torch.dtype):
        from deftune.kernels import triton_rows

        self.kernels = triton_rows
        weight = head.weight.to(dtype).contiguous()
        self.head = Head(weight, head.bias, head.scale, head.softcap)
        self.dtype = dtype
        # rows of E start on 128 bytes whatever V is
        self.stride = -(-head.vocab_size // 64) * 64
        self.buffer: Tensor | None = None
        self.wide: Tensor | None = None

    def rows(self, total: int) -> int:
        limit = min(self.max_rows, self.max_bytes // (self.stride * self.dtype.itemsize))
        return balanced(total, max(128, limit // 128 * 128), 128)

    def measure(self, x: Tensor, y: Tensor, keep: bool, top: int) -> Chunk:
        kernels, head = self.kernels, self.head
        x = x.to(self.dtype).contiguous()
        e = None
        if keep or top:
            if self.buffer is None or len(self.buffer) < len(x):
                self.buffer = torch.empty(len(x), self.stride, dtype=self.dtype, device=x.device)
            e = self.buffer[: len(x)]
        z_y, reference = kernels.target_logits(x, y, head)
        tiles = kernels.exponentials(x, y, reference, head, e)
        sums = kernels.reduce_tiles(tiles, z_y)
        largest = None
        if e is not None:
            kernels.repair(x, y, reference, sums, head, e)
            if top:
                largest = kernels.top_logits(x, y, z_y, reference, tiles, e, head, top)
        return Chunk(x, y, RowSums(*sums), reference, None if e is None else e[:, : head.vocab_size], largest)

    def add(self, chunk: Chunk, index: Tensor, v: Tensor, t: Tensor, to: Gradients) -> None:
        kernels, weight, e = self.kernels, self.head.weight, chunk.e
        assert e is not None
        v, t = v.float(), t.float()
        if to.hidden is not None:
            u = self.product(e, weight, None)
            kernels.finish_hidden(u, chunk.y, index, v, t, weight, to.hidden)
        if to.weight is not None:
            scaled = torch.empty_like(chunk.x)
            torch.mul(chunk.x, v[:, None], out=scaled)
            self.product(e.T, scaled, to.weight, add=to.started)
            ordered, order = torch.sort(chunk.y, stable=True)
            kernels.subtract_targets(chunk.x, ordered, order, t, to.weight)
        if to.bias is not None:
            to.bias += torch.mv(e.T, v.to(e.dtype))
            to.bias.index_put_((chunk.y,), -t, accumulate=True)
        to.started = True

    def product(self, a: Tensor, b: Tensor, out: Tensor | None, add: bool = False) -> Tensor:
        """a @ b in float32, into or onto ``out``."""
        if self.dtype == torch.float32:
            out = torch.empty(a.shape[0], b.shape[1], device=a.device) if out is None else out
            return out.addmm_(a, b) if add else torch.mm(a, b, out=out)
        if out is None:
            if self.wide is None or self.wide.shape != (a.shape[0], b.shape[1]):
                self.wide = torch.empty(a.shape[0], b.shape[1], dtype=torch.float32, device=a.device)
            out = self.wide
        if add:
            return torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
        return torch.mm(a, b, out_dtype=torch.float32, out=out)

    def finish(self, grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        return self.kernels.scaled(grad, factor, dtype)


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
    reasons = [
        (device.type != "cuda" and not interpreted(), f"the device is {device.type}, not cuda"),
        (bool(triton_status()), triton_status()),
        (dtype not in (torch.bfloat16, torch.float32), f"{dtype} has not the range that E needs; bfloat16 has"),
        (head.width * dtype.itemsize % 16 != 0, f"a row of the weight ({head.width} x {dtype}) is no multiple of 16 bytes"),
        (bool(top) and head.softcap is not None, "the likeliest tokens under a softcap are found by torch only"),
    ]
    against = next((why for holds, why in reasons if holds), "")
    if wanted == "triton" and against:
        raise ValueError(f"backend='triton' cannot be used here: {against}; use backend='torch' or 'auto'")
    if wanted != "auto":
        return wanted, "asked for"
    if device.type == "cuda" and dtype == torch.float32:
        against = against or "float32 runs through cuBLAS at full precision"
    elif device.type != "cuda":
        against = against or "the interpreter is for tests"
    return ("torch", against) if against else ("triton", "bfloat16 on CUDA")
