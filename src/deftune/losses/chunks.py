"""Rows by the chunk: which they are, what is measured of them, where their gradients go; and what a backend does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deftune.losses.sparse import Products, Sparse


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
