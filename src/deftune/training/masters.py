"""bfloat16 weights in the model, float32 copies of them (masters) in the optimizer.

Under autocast every forward pass rounds every float32 weight to bfloat16 again. Here the rounded weights stay in the
model. The optimizer updates the masters, and each update is rounded into the model:

    master <- AdamW(master, gradient),  weight = bfloat16(master)

Small updates are not lost, because they add up in the masters. The gradient of each micro-batch is bfloat16, as under
autocast; the micro-batches are summed in float32.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

FLOAT32, WITH_MASTERS = "float32", "bfloat16_with_masters"  # what `train.weights` may be


class Masters:
    """The float32 masters of a model, whose parameters become bfloat16.

    All parameters are rounded, those of norms too: a norm with float32 weights returns float32 activations, which each
    of the products after it would round again. Buffers (the frequencies of rotary embeddings) stay as they are.

    Args:
        model: a model with float32 (or bfloat16) parameters, on its device. Tied parameters are one.
    """

    def __init__(self, model: nn.Module):
        self.masters: dict[nn.Parameter, nn.Parameter] = {}
        self.rounded: dict[nn.Parameter, Tensor] = {}
        self.hooks: list[Any] = []
        for weight in model.parameters():
            if not weight.is_floating_point():
                raise ValueError(f"masters: a parameter is {weight.dtype}, which is no float; use float32 weights")
            master = nn.Parameter(weight.detach().float(), requires_grad=weight.requires_grad)
            self.masters[weight] = master
            weight.data = self.rounded[weight] = master.detach().bfloat16()
            if weight.requires_grad:
                self.hooks.append(weight.register_post_accumulate_grad_hook(self._take_gradient))

    @torch.no_grad()
    def _take_gradient(self, weight: Any) -> None:
        """Add a micro-batch's gradient to the master's, in float32, and free it."""
        gradient, master = weight.grad, self.masters[weight]
        weight.grad = None
        if gradient is None:
            return
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad.add_(gradient)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The masters: what gradients are clipped and rescaled of."""
        return iter(self.masters.values())

    def drive(self, optimizer: torch.optim.Optimizer) -> None:
        """Have an optimizer that was made for the model's parameters, and has no state yet, update the masters."""
        for group in optimizer.param_groups:
            group["params"] = [self.masters[weight] for weight in group["params"]]
        optimizer.register_step_post_hook(lambda *_: self._after_step())

    def _after_step(self) -> None:
        self.round()
        for master in self.masters.values():
            master.grad = None

    @torch.no_grad()
    def round(self) -> None:
        """Set the model's weights to the rounded masters."""
        rounded, masters = list(self.rounded.values()), [master.data for master in self.masters.values()]
        torch._foreach_copy_(rounded, masters)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]

    @contextmanager
    def in_model(self) -> Generator[None]:
        """Inside, the model's parameters are the masters themselves: to save them, or to load others into them."""
        for weight, master in self.masters.items():
            weight.data = master.data
        try:
            yield
        finally:
            self.round()
            for weight, rounded in self.rounded.items():
                weight.data = rounded

    def release(self) -> None:
        """Leave the masters in the model for good, as its float32 weights."""
        for hook in self.hooks:
            hook.remove()
        for weight, master in self.masters.items():
            weight.data, weight.grad = master.data, None
        self.masters, self.rounded = {}, {}

    @contextmanager
    def paused(self) -> Generator[None]:
        """Inside, gradients stay at the model's parameters: for passes whose gradients are looked at, not applied."""
        for hook in self.hooks:
            hook.remove()
        try:
            yield
        finally:
            self.hooks = [
                weight.register_post_accumulate_grad_hook(self._take_gradient)
                for weight in self.masters
                if weight.requires_grad
            ]
