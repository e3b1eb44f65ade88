"""Several encoded rows in one sequence, and batches of tensors for a model."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from deftune.data.examples import IGNORE_INDEX, Encoded, Examples
from deftune.data.spool import LazySequence


@dataclass(frozen=True)
class Pack:
    """Several examples in one row; ``position_ids`` restart at each, and no target crosses from one to the next."""

    input_ids: list[int]
    labels: list[int]
    position_ids: list[int]
    lengths: list[int]


class Packs(LazySequence[Pack]):
    """Packs of examples; a pack is joined when it is accessed, so that only the places of its examples are stored."""

    def __init__(self, examples: Sequence[Encoded], members: list[array[int]]):
        self.examples, self.members = examples, members

    def __len__(self) -> int:
        return len(self.members)

    def item(self, place: int) -> Pack:
        return _joined([self.examples[i] for i in self.members[place]])


def pack(encoded: Sequence[Encoded], length: int) -> Packs:
    """Whole examples into rows of at most ``length`` tokens, by best fit, longest first.

    An example goes into the row where it leaves the fewest tokens free. A row keeps its examples in the data's order,
    and rows are ordered by their first example.
    """
    lengths = encoded.sizes if isinstance(encoded, Examples) else [len(example.input_ids) for example in encoded]
    for place, size in enumerate(lengths):
        if size > length:
            raise ValueError(
                f"{encoded[place].where}: {size} tokens do not fit a pack of {length}; "
                f"encode with max_length={length} or pack longer rows"
            )
    bins = _best_fit_decreasing(lengths, length)
    bins.sort(key=min)
    return Packs(encoded, [array("q", sorted(members)) for members in bins])


def _best_fit_decreasing(lengths: Sequence[int], length: int) -> list[array[int]]:
    bins: list[array[int]] = []  # an array takes a fourth of a list's memory
    with_room: dict[int, list[int]] = {}  # by tokens free: a heap of bins, the earliest first
    rooms: list[int] = []  # the keys, ascending; at most ``length`` of them
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(rooms, lengths[i])
        if at == len(rooms):
            bins.append(array("q"))
            free, which = length, len(bins) - 1
        else:
            free = rooms[at]
            which = heappop(with_room[free])
            if not with_room[free]:
                del with_room[free], rooms[at]
        bins[which].append(i)
        left = free - lengths[i]
        if left not in with_room:
            with_room[left] = []
            insort(rooms, left)
        heappush(with_room[left], which)
    return bins


def _joined(examples: Sequence[Encoded | Pack]) -> Pack:
    """Examples and packs end to end, each with its own positions and no label at its start."""
    joined = Pack([], [], [], [])
    for example in examples:
        joined.input_ids.extend(example.input_ids)
        labels = list(example.labels)
        lengths = example.lengths if isinstance(example, Pack) else [len(example.input_ids)]
        start = 0
        for size in lengths:
            labels[start : start + min(size, 1)] = [IGNORE_INDEX] * min(size, 1)
            joined.position_ids.extend(range(size))
            start += size
        joined.labels.extend(labels)
        joined.lengths.extend(lengths)
    return joined


def tensor_of(values: list[int]) -> Tensor:
    """The numbers as a tensor: torch.tensor, which asks each number for its type, takes five times as long."""
    return torch.frombuffer(array("q", values), dtype=torch.int64) if values else torch.empty(0, dtype=torch.int64)


def row_boundaries(lengths: Sequence[int]) -> dict[str, Tensor | int]:
    """Where rows that lie end to end begin and end, as transformers passes it to attention kernels.

    >>> row_boundaries([3, 2])["cu_seq_lens_q"]
    tensor([0, 3, 5], dtype=torch.int32)
    """
    edges = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    longest = max(lengths, default=0)
    return {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": longest, "max_length_k": longest}


class Collator:
    """Examples to a batch of tensors; no target and no attention crosses from one example to the next.

    Examples: padded on the right, ``input_ids``, ``attention_mask`` and ``labels``, [B, T]. Packs: ``input_ids``,
    ``labels`` and ``position_ids`` that restart at each example, [B, T], with no attention mask: the model makes one
    from the positions; what pads a row is a sequence of its own. ``padding_free``: all of it end to end, [1, T], with
    the `row_boundaries`, for attention kernels that take them instead of a mask.
    """

    def __init__(self, pad_token_id: int, *, padding_free: bool):
        self.pad_token_id = pad_token_id
        self.padding_free = padding_free

    def __call__(self, examples: Sequence[Encoded | Pack]) -> dict[str, Any]:
        if self.padding_free:
            joined = _joined(examples)
            return self._packed([joined]) | row_boundaries(joined.lengths)
        if any(isinstance(example, Pack) for example in examples):
            return self._packed([_joined([example]) for example in examples])
        width = max(len(example.input_ids) for example in examples)
        batch: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
        for example in examples:
            size, pad = len(example.input_ids), width - len(example.input_ids)
            batch["input_ids"].append(example.input_ids + [self.pad_token_id] * pad)
            batch["attention_mask"].append([1] * size + [0] * pad)
            batch["labels"].append([IGNORE_INDEX, *example.labels[1:]] + [IGNORE_INDEX] * pad)
        return {name: torch.stack([tensor_of(row) for row in rows]) for name, rows in batch.items()}

    def _packed(self, rows: Sequence[Pack]) -> dict[str, Tensor]:
        width = max(len(row.input_ids) for row in rows)
        pads = [width - len(row.input_ids) for row in rows]
        columns = {
            "input_ids": [row.input_ids + [self.pad_token_id] * pad for row, pad in zip(rows, pads)],
            "labels": [row.labels + [IGNORE_INDEX] * pad for row, pad in zip(rows, pads)],
            "position_ids": [[*row.position_ids, *range(pad)] for row, pad in zip(rows, pads)],
        }
        return {name: torch.stack([tensor_of(row) for row in rows]) for name, rows in columns.items()}


def fill_step(batches: list[Any], number: int) -> list[Any]:
    """The micro-batches of a step, filled up to ``number`` with copies of the last one that have no labels.

    transformers' Trainer updates the weights after ``number`` micro-batches. Where a stream ends before, the Trainer
    would keep the gradients and add them to the next epoch's first step, each divided by its own token count.

    >>> [batch["labels"].tolist() for batch in fill_step([{"labels": torch.tensor([5, 6])}], 2)]
    [[5, 6], [-100, -100]]
    """
    last = batches[-1]
    return batches + [
        {**last, "labels": torch.full_like(last["labels"], IGNORE_INDEX)} for _ in range(number - len(batches))
    ]
