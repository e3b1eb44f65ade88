"""A vocabulary that the ranks of a process group share: the classes of each rank, and the reductions over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabShard:
    """The classes ``first``, ``first + 1``, ... of a vocabulary that the ranks of a process group share.

    Every rank of the group calls the loss with the same rows and targets (ids of the whole vocabulary). A rank passes
    the weight of its own classes to `linear_loss`, or their logits to `token_loss`, and gets the loss of the whole
    vocabulary. A pass over rows takes one MAX reduction of three numbers a row and one SUM reduction of four;
    objectives that read the k likeliest tokens gather k numbers a row from each rank. The gradients of weight, bias and
    logits belong to the rank's own classes and are not reduced.

    Shards may have different sizes, in any order of the ranks. At its first use a shard gathers the classes of all
    ranks and refuses a gap or an overlap. Keep the object, so that this happens only once.

    Args:
        first: the id of the rank's first class.
        vocab_size: the classes of all ranks together.
        group: the process group; None: all ranks.
        reduce_hidden: True (for replicated hidden states): sum the gradient of the hidden states over the ranks.
            False: leave each rank its part of the sum, because a later operation sums the parts, such as the
            reduce-scatter in the backward of sequence parallelism's all-gather. `token_loss` ignores this option.

    >>> shard = VocabShard(first=50, vocab_size=101)
    >>> shard.columns(torch.tensor([3, 50, 99]), 51)
    tensor([-4,  0, 49])
    """

    first: int
    vocab_size: int
    group: Any = None
    reduce_hidden: bool = True
    # (first, size) of each rank where that is known to be so on all ranks; else `checked` asks them
    layout: tuple[tuple[int, int], ...] | None = field(default=None, repr=False)
    _found: dict[int, VocabShard] = field(default_factory=dict[int, Any], init=False, repr=False, compare=False)

    @classmethod
    def chunked(cls, vocab_size: int, group: Any = None, *, reduce_hidden: bool = True) -> VocabShard:
        """The shard of this rank where a vocabulary is divided as by torch.chunk and by DTensor's ``Shard(0)``.

        The first ranks have ceil(V / ranks) classes each, the last ones the rest, which may be nothing.
        """
        check_ranks()
        first, _ = chunks_of(vocab_size, dist.get_world_size(group))[dist.get_rank(group)]
        return cls(first, vocab_size, group, reduce_hidden)

    @property
    def largest(self) -> int:
        """The classes of the largest shard: all ranks choose the sizes of their chunks by it."""
        assert self.layout is not None
        return max(size for _, size in self.layout)

    @property
    def smallest(self) -> int:
        """The classes of the smallest shard, which may be none."""
        assert self.layout is not None
        return min(size for _, size in self.layout)

    def columns(self, labels: Tensor, classes: int) -> Tensor:
        """The targets' columns among this rank's ``classes``; -1 - label where another rank has the target."""
        column = labels - self.first
        return torch.where((column >= 0) & (column < classes), column, -1 - labels)

    def labels(self, columns: Tensor) -> Tensor:
        """The labels that `columns` was given."""
        return torch.where(columns >= 0, columns + self.first, -1 - columns)

    def checked(self, classes: int, device: torch.device, name: str) -> VocabShard:
        """The shard with the layout of all ranks, if this rank's ``classes`` and those of the others fit together.

        Raises:
            ValueError: the shards overlap or leave a gap, or differ in their vocabulary; on every rank.
        """
        if classes in self._found:
            return self._found[classes]
        check_ranks()
        ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        if rank < 0:
            raise ValueError("shard: this rank is not in the shard's process group; pass the group that it belongs to")
        mine = (self.first, classes)
        if self.layout is None:
            given = [torch.zeros(3, dtype=torch.long, device=device) for _ in range(ranks)]
            dist.all_gather(given, torch.tensor([*mine, self.vocab_size], device=device), group=self.group)
            shards = [tuple(one.tolist()) for one in given]
            layout = tuple((first, size) for first, size, _ in shards)
            check_layout(layout, [total for *_, total in shards])
        else:
            layout = self.layout
            if len(layout) != ranks or layout[rank] != mine:
                raise ValueError(f"{name}: has {classes} classes from {self.first} on, which is not in {layout}")
        found = VocabShard(self.first, self.vocab_size, self.group, self.reduce_hidden, layout)
        found._found[classes] = self._found[classes] = found
        return found

    def maximum(self, column: Tensor) -> Tensor:
        """The largest of all ranks, entry by entry; writes to ``column``."""
        dist.all_reduce(column, dist.ReduceOp.MAX, group=self.group)
        return column

    def total(self, sums: Tensor) -> Tensor:
        """The sum over all ranks, entry by entry; writes to ``sums``."""
        dist.all_reduce(sums, group=self.group)
        return sums

    def likeliest(self, top: Tensor, k: int) -> Tensor:
        """The ``k`` largest of all ranks' numbers in each row, from the largest of each rank: [rows, <= k] each."""
        k = min(k, self.vocab_size)
        mine = top.new_full((len(top), k), -torch.inf)
        mine[:, : top.shape[1]] = top
        given = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(given, mine, group=self.group)
        return torch.cat(given, 1).topk(k, -1).values


def chunks_of(vocab_size: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """(first, size) of each rank's part of a vocabulary, divided as by torch.chunk.

    >>> chunks_of(9, 4)
    ((0, 3), (3, 3), (6, 3), (9, 0))
    """
    size = -(-vocab_size // ranks)
    firsts = [min(vocab_size, number * size) for number in range(ranks + 1)]
    return tuple((first, then - first) for first, then in pairwise(firsts))


def check_ranks() -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "shard: a vocabulary is divided among the ranks of torch.distributed, which is not initialised; call "
            "torch.distributed.init_process_group first, or pass the whole vocabulary without a shard"
        )


def check_layout(layout: Sequence[tuple[int, int]], totals: list[int]) -> None:
    """Refuse shards that do not make up one vocabulary; all ranks see the same layout, and raise the same error."""
    if len(set(totals)) > 1:
        raise ValueError(f"shard: the ranks differ in vocab_size: {', '.join(map(str, totals))} (rank 0, 1, ...)")
    shown = ", ".join(f"rank {rank}: [{first}, {first + size})" for rank, (first, size) in enumerate(layout))
    at = 0
    for first, size in sorted(layout):
        if size and first != at:
            what = "overlap" if first < at else "leave a gap"
            raise ValueError(
                f"shard: the shards {what} at class {min(first, at)}: {shown}; together they must be the "
                f"{totals[0]} classes of the vocabulary, each once"
            )
        at += size
    if at != totals[0]:
        raise ValueError(
            f"shard: the shards have {at} classes and vocab_size is {totals[0]}: {shown}; pass the size of the whole "
            f"vocabulary (with its padding), and the process group that shares it"
        )
