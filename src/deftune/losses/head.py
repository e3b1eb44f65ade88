"""The language-model head: how logits come of hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deftune.losses.checks import check_float


@dataclass(frozen=True)
class Head:
    """z = softcap(scale (x W^T + bias)), softcap(a) = c tanh(a / c)."""

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    @property
    def width(self) -> int:
        return self.weight.shape[1]

    def slope(self, z: Tensor) -> Tensor:
        """d softcap at a logit z that it returned: 1 - (z/c)^2."""
        return torch.ones_like(z) if self.softcap is None else 1 - (z / self.softcap) ** 2


class Slices:
    """A weight in the GEMMs' dtype: as it is, or copied, a large one a slice of classes at a time.

    A float32 weight under bf16 would have half its size beside it while every activation of a model is alive.
    """

    multiple = 256  # classes of a slice: of the kernels' tiles
    number = 4  # slices of a large weight
    large = 1 << 26  # elements of a copy that is made whole, once

    def __init__(self, weight: Tensor, dtype: torch.dtype):
        classes, width = weight.shape
        self.weight, self.buffer = weight, None
        self.size = max(1, classes)
        if weight.dtype != dtype:
            if weight.numel() > self.large:
                self.size = -(-classes // self.number // self.multiple) * self.multiple
            self.buffer = torch.empty(self.size, width, dtype=dtype, device=weight.device)
        self.held = -1  # where the slice in the buffer begins
        self.several = self.size < classes

    def each(self) -> Iterator[tuple[int, Tensor]]:
        """(first class, slice), forwards or backwards: the one that is there comes first."""
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


def check_head(hidden: object, weight: object, bias: object, logit_scale: float, softcap: float | None) -> None:
    check_float(hidden, "hidden")
    check_float(weight, "weight")
    assert isinstance(hidden, Tensor) and isinstance(weight, Tensor)
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if hasattr(tensor, "full_tensor"):
            raise ValueError(
                f"{name}: is a DTensor, a shard of it only is here. Call the loss inside the forward of the module "
                f"that FSDP wraps, where the parameter is gathered and its gradient will be reduced"
            )
    if weight.dim() != 2 or weight.shape[0] < 1 or weight.shape[1] < 1:
        raise ValueError(f"weight: the head's weight is [V, D], got shape {tuple(weight.shape)}")
    if hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden: last dimension of shape {tuple(hidden.shape)} does not match the weight's width {weight.shape[1]}"
        )
    if hidden.device != weight.device:
        raise ValueError(f"hidden is on {hidden.device} and weight on {weight.device}; move them together")
    if bias is not None:
        check_float(bias, "bias")
        assert isinstance(bias, Tensor)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias: shape {tuple(bias.shape)} does not match the vocabulary of {weight.shape[0]}")
        if bias.device != weight.device:
            raise ValueError(f"bias is on {bias.device} and weight on {weight.device}; move them together")
    if softcap is not None and not 0 < softcap < float("inf"):
        raise ValueError(f"softcap: must be > 0 and finite, got {softcap}; None is no cap")
    if not (logit_scale != 0 and abs(logit_scale) < float("inf")):
        raise ValueError(f"logit_scale: must be finite and not 0, got {logit_scale}")


def check_together(hidden: Tensor, targets: Tensor) -> None:
    """Kernels read both: a pointer to another device's memory is no tensor there."""
    if hidden.device != targets.device:
        raise ValueError(f"hidden is on {hidden.device} and targets on {targets.device}; move them together")
