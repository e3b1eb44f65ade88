"""The opt-in sparse mode of the fused loss: gradients from the few classes that hold most of the probability.

A few classes hold nearly all of a chunk's E [rows, V]: those that some row finds likely. With K the classes of the
largest mass m = E^T v, and q the distribution of the remaining mass over the other classes,

    E W ~ E_K W_K + r (q W)        E^T (v X) ~ E_K^T (v X) at K, and q (r^T v X) at the others,    r = sum E - sum E_K

so that sums over classes and, for all rows together, over rows stay exact. The forward pass, the loss, every statistic
and the target's part of the gradients are exact. The error is measured at every call, on a sample of rows and classes:
`Sparse.report`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

ROWS, EVERY, CLASSES = 64, 4, 256  # the sample that the errors are measured on: rows of every fourth chunk, classes
BLOCK = 8192  # classes of the dense product at a time, if they have to be cast (or added up on a CPU)
MULTIPLE, MANY = 64, 1024  # from 1,024 kept classes on, a multiple of 64: the fast path of tensor cores
MOST_MEANS = 32  # chunks whose means are collected before they are added: each has V numbers


class SparseReport(NamedTuple):
    """The error of one call of `linear_loss` with `Sparse`.

    - ``dropped``: the share of the gradient's mass, sum v E, on classes that were approximated by their mean
    - ``error_hidden``: ||g - exact|| / ||exact|| of the gradient of hidden, on a sample of rows of every fourth chunk
    - ``error_weight``: the same for the gradient of weight, over all chunks, on a sample of the classes that the first
      chunk left out

    An error is NaN if there is nothing to measure: the gradient was not asked for, or all gates of the sample are 0.
    """

    dropped: float
    error_hidden: float
    error_weight: float


@dataclass
class Sparse:
    """An approximation of `linear_loss`: the two gradient products use only a ``share`` of the classes of each chunk.

    Pass a `Sparse` to `linear_loss`; its ``report`` then returns the error of the last call. With a trained language
    model and a share of 0.15 the error is within bfloat16's rounding of the gradients (docs/benchmarks.md). With an
    untrained model every class is likely, so the error is large, and the report shows it.

    Args:
        share: of the classes, above 0 and at most 1.

    Raises:
        ValueError: the share is no share.

    >>> import deftune
    >>> sparse, hidden = Sparse(share=0.5), torch.eye(2, requires_grad=True)
    >>> weight = torch.tensor([[9.0, 0.0], [0.0, 9.0], [4.0, 3.0], [0.0, 1.0]])
    >>> loss = deftune.linear_loss(hidden, weight, torch.tensor([0, 1]), "nll", sparse=sparse)
    >>> round(sparse.report().dropped, 3)
    0.025
    """

    share: float = 0.15
    sums: dict[str, Tensor] = field(default_factory=dict[str, Tensor], repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"sparse: share is that of the classes, above 0 and at most 1, got {self.share!r}")

    def report(self) -> SparseReport:
        """The error of the last call; waits for the device."""
        if not self.sums:
            raise ValueError("sparse: nothing to report, no call with gradients has used it yet")
        found = {name: float(value) for name, value in self.sums.items()}

        def error(name: str) -> float:
            size = found.get(name, 0.0)
            return (found[f"{name} error"] / size) ** 0.5 if size else float("nan")

        dropped = found["left"] / found["mass"] if found["mass"] else 0.0
        return SparseReport(dropped, error("hidden"), error("weight"))


def add_products(to: Tensor, masses: Tensor, means: Tensor) -> Tensor:
    """``to`` += masses^T means; the sum of its squares."""
    return torch.linalg.vector_norm(to.addmm_(masses.T, means)).square()


def kept_of(classes: int, share: float) -> int:
    """How many of the classes a share keeps: at least one, and many by whole 64s."""
    count = max(1, round(share * classes))
    return count if count < MANY else min(classes, -(-count // MULTIPLE) * MULTIPLE)


class Products:
    """E W and E^T (v X) of one call's chunks, over the classes that `Sparse` keeps."""

    def __init__(
        self, sparse: Sparse, weight: Tensor, dtype: torch.dtype, multiply: Callable[[Tensor, Tensor], Tensor],
        add: Callable[[Tensor, Tensor, Tensor], Tensor],
    ):  # fmt: skip
        self.sparse, self.weight, self.dtype, self.multiply, self.add = sparse, weight, dtype, multiply, add
        sparse.sums = {}
        self.count = kept_of(len(weight), sparse.share)
        self.block = BLOCK if weight.dtype != dtype or weight.device.type == "cpu" else len(weight)
        self.chunks = 0
        self.means: list[Tensor] = []  # q and r^T v X of each chunk: what the other classes' rows of dW are made of
        self.masses: list[Tensor] = []
        self.kept: Tensor | None = None  # E at the classes of the chunk at hand
        self.sample = self.off = weight.new_empty(0)
        self.sums: dict[str, Tensor] = {}
        self.dropped: list[tuple[Tensor, Tensor, Tensor]] = []  # r, v and t of each chunk's rows

    def choose(self, e: Tensor, v: Tensor, t: Tensor, mass: Tensor) -> None:
        """The classes of a chunk, from its ``mass`` [V] = E^T |v|; a row's target takes ``t``, v times its sum of E."""
        self.chunks += 1
        self.classes = mass.topk(self.count, sorted=False).indices
        if e.device.type == "cpu":  # gathered faster in order, in which a GPU finds all but ties
            self.classes = self.classes.sort().values
        left = mass.index_fill(0, self.classes, 0)
        self.rest = left / left.sum().clamp(min=torch.finfo(left.dtype).tiny)
        self.kept = None  # freed before the next one is made
        self.kept = e.index_select(1, self.classes)
        self.r = torch.where(v == 0, 0.0, t / v) - self.kept.sum(1, dtype=v.dtype)
        self.dropped.append((self.r, v, t))
        if not len(self.sample):  # every so many classes of those left, by their mass
            order = left.argsort(descending=True)[: len(left) - self.count]
            self.every = max(1, -(-len(order) // CLASSES))
            self.sample = order[:: self.every]

    def count_in(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def over_classes(self, e: Tensor, v: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """E W [C, D]; of some chunks some rows are compared with the whole product."""
        assert self.kept is not None
        u = self.multiply(self.kept, self.weight.index_select(0, self.classes).to(self.dtype))
        rest, largest, some = self.rest, None, None
        if self.dtype == torch.float16:  # where 1 / V is nothing
            largest = rest.amax().clamp(min=torch.finfo(rest.dtype).tiny)
            rest = rest / largest
        rows = rest[None].to(self.dtype)
        if self.chunks % EVERY == 1:
            some = torch.linspace(0, len(e) - 1, min(ROWS, len(e)), device=e.device).long()
            rows = torch.cat([rows, e[some]])
        parts = zip(rows.split(self.block, 1), self.weight.split(self.block))
        whole = functools.reduce(Tensor.add_, (self.multiply(row, part.to(self.dtype)) for row, part in parts))
        u.addr_(self.r.to(u.dtype), whole[0] if largest is None else whole[0] * largest)
        if some is not None:
            exact, factor = whole[1:], v[some, None].to(u.dtype)
            true = factor * exact - t[some, None].to(u.dtype) * self.weight[y[some]].to(u.dtype)
            self.count_in("hidden error", (factor * (u[some] - exact)).square().sum())
            self.count_in("hidden", true.square().sum())
        return u

    def over_rows(self, e: Tensor, scaled: Tensor, to: Tensor) -> None:
        """E^T (v X) onto ``to`` [V, D], which the first chunk clears; the means come in many chunks at a time."""
        if self.chunks == 1:
            to.zero_()
            self.off = to.new_zeros(len(self.sample), to.shape[1])
        elif len(self.means) == MOST_MEANS:
            self.add_means(to)
        size = None
        if scaled.dtype != self.dtype:  # v may be far below float16's range: it goes over its largest
            size = scaled.abs().amax().clamp(min=torch.finfo(scaled.dtype).tiny)
            scaled = (scaled / size).to(self.dtype)

        def over_these_rows(e: Tensor) -> Tensor:
            product = self.multiply(e.T, scaled)
            return product if size is None else product.mul_(size)

        assert self.kept is not None
        to.index_add_(0, self.classes, over_these_rows(self.kept))  # each class once: in any order the same
        mean = self.r.to(to.dtype) @ scaled.to(to.dtype)
        if size is not None:
            mean *= size
        self.means.append(mean)
        self.masses.append(self.rest.to(to.dtype))
        mass = self.masses[-1][self.sample]
        off = over_these_rows(e.index_select(1, self.sample)).addr_(mass, mean, alpha=-1)
        # a class that this chunk keeps is exact in it; one that has no mass is nothing
        self.off += off.masked_fill_((mass == 0)[:, None], 0.0)

    def add_means(self, to: Tensor) -> None:
        """The means of what was left out; the sum of squares of what ``to`` then is."""
        self.squares = self.add(to, torch.stack(self.masses), torch.stack(self.means))
        self.means, self.masses = [], []

    def end(self, to: Tensor | None) -> None:
        """After the last chunk: add the remaining means to ``to`` and give the sums to the caller's `Sparse`."""
        if not self.chunks:
            return
        r, v, t = (torch.cat(each) for each in zip(*self.dropped))
        self.sums["left"], self.sums["mass"] = (r * v).abs().sum(), t.abs().sum()
        if to is not None:
            self.add_means(to)
            self.sums["weight error"], self.sums["weight"] = self.every * self.off.square().sum(), self.squares
        self.sparse.sums = self.sums
