"""The language-model head: the map from hidden states to logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deftune.losses.checks import check_device, check_float, check_number
from deftune.losses.shards import VocabShard


@dataclass(frozen=True)
class Head:
    """z = softcap(scale (x W^T + bias)), softcap(a) = c tanh(a / c).

    With a ``shard``, weight and bias are those of this rank's classes.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    shard: VocabShard | None = None

    @property
    def vocab_size(self) -> int:
        """V, of all ranks."""
        return self.weight.shape[0] if self.shard is None else self.shard.vocab_size

    @property
    def classes(self) -> int:
        """The classes of this rank."""
        return self.weight.shape[0]

    @property
    def most_classes(self) -> int:
        """The classes of the rank that has the most: the sizes of chunks must be the same on all ranks."""
        return max(1, self.weight.shape[0] if self.shard is None else self.shard.largest)

    def columns(self, labels: Tensor) -> Tensor:
        """The rows of this weight that the labels name; below 0: another rank's."""
        return labels if self.shard is None else self.shard.columns(labels, self.classes)

    @property
    def width(self) -> int:
        return self.weight.shape[1]

    def slope(self, z: Tensor) -> Tensor:
        """The derivative of softcap at the logit z = softcap(a): 1 - (z/c)^2."""
        return torch.ones_like(z) if self.softcap is None else 1 - (z / self.softcap) ** 2


class Slices:
    """A weight in the GEMMs' dtype: the weight itself, or a copy; a large one is copied a slice of classes at a time.

    A whole bf16 copy of a float32 weight takes half its size, while every activation of the model is alive.
    """

    multiple = 256  # a slice has a multiple of so many classes: a tile of the kernels
    number = 4  # slices of a large weight
    large = 1 << 26  # up to so many elements a copy is made whole, once

    def __init__(self, weight: Tensor, dtype: torch.dtype):
        classes, width = weight.shape
        self.weight, self.buffer = weight, None
        self.size = max(1, classes)
        if weight.dtype != dtype:
            if weight.numel() > self.large:
                self.size = -(-classes // self.number // self.multiple) * self.multiple
            self.buffer = torch.empty(self.size, width, dtype=dtype, device=weight.device)
        self.held = -1  # the first class of the slice in the buffer
        self.several = self.size < classes

    def each(self) -> Iterator[tuple[int, Tensor]]:
        """(first class, slice), forwards or backwards, such that the slice in the buffer comes first."""
        if self.buffer is None:
            yield 0, self.weight
            return
        begins = list(range(0, len(self.weight), self.size))
        for begin in reversed(begins) if self.held == begins[-1] else begins:
            part = self.weight[begin : begin + self.size]
            if self.held != begin:
                self.buffer[: len(part)].copy_(part)
                self.held = begin
            yield begin, self.buffer[: len(part)]


def check_head(hidden: object, head: Head) -> None:
    """Refuse hidden states and a head that do not fit together."""
    weight, bias, logit_scale, softcap = head.weight, head.bias, head.scale, head.softcap
    check_float(hidden, "hidden")
    check_float(weight, "weight")
    assert isinstance(hidden, Tensor)
    if head.shard is not None and not isinstance(head.shard, VocabShard):  # pyright: ignore
        raise ValueError(
            f"shard: expected a deftune.VocabShard(first, vocab_size, group), got {type(head.shard).__name__}"
        )
    fewest = 1 if head.shard is None else 0
    if weight.dim() != 2 or weight.shape[0] < fewest or weight.shape[1] < 1:
        raise ValueError(f"weight: the head's weight is [V, D], got shape {tuple(weight.shape)}")
    if hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden: last dimension of shape {tuple(hidden.shape)} does not match the weight's width {weight.shape[1]}"
        )
    check_device("weight", weight, "hidden", hidden)
    if bias is not None:
        check_float(bias, "bias")
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias: shape {tuple(bias.shape)} does not match the vocabulary of {weight.shape[0]}")
        check_device("weight", weight, "bias", bias)
    if softcap is not None:
        check_number("softcap", softcap)
        if not 0 < softcap < float("inf"):
            raise ValueError(f"softcap: must be > 0 and finite, got {softcap}; None is no cap")
    check_number("logit_scale", logit_scale)
    if not (logit_scale != 0 and abs(logit_scale) < float("inf")):
        raise ValueError(f"logit_scale: must be finite and not 0, got {logit_scale}")
