"""bfloat16 weights in the model, float32 copies of them (masters) in the optimizer.

Under autocast every forward pass rounds every float32 weight to bfloat16 again. Here the rounded weights stay in the
model. The optimizer updates the masters, and each update is rounded into the model:

    master <- AdamW(master, gradient),  weight = bfloat16(master)

Small updates are not lost, because they add up in the masters. The rest of the computation is that of autocast, which
stays on: a forward pass has the same values, and each micro-batch the same bfloat16 gradient, summed in float32.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

FLOAT32, WITH_MASTERS = "float32", "bfloat16_with_masters"  # what `train.weights` may be


class Masters:
    """The float32 masters of a model's linear layers, whose parameters become bfloat16.

    Embeddings, norms and the head stay float32: autocast does not round the first two, so that the layers pass float32
    to each other, and the fused loss has a float32 gradient of the head.

    Args:
        model: a causal LM with float32 parameters, on its device.
    """

    def __init__(self, model: Any):
        self.masters: dict[nn.Parameter, nn.Parameter] = {}
        self.rounded: dict[nn.Parameter, Tensor] = {}
        self.hooks: list[Any] = []
        ends = {id(p) for m in (model.get_input_embeddings(), model.get_output_embeddings()) for p in m.parameters()}
        linear = [p for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters() if id(p) not in ends]
        for weight in dict.fromkeys(linear):
            master = nn.Parameter(weight.detach().float(), requires_grad=weight.requires_grad)
            self.masters[weight] = master
            weight.data = self.rounded[weight] = master.detach().bfloat16()
            if weight.requires_grad:
                self.hooks.append(weight.register_post_accumulate_grad_hook(self._take_gradient))
        # in the model's order: a norm summed in another one differs in its last bit
        weights: Iterator[nn.Parameter] = model.parameters()
        self.trained: list[nn.Parameter] = [self.masters.get(weight, weight) for weight in weights]

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
        """The masters and the float32 parameters, in the model's order: what gradients are clipped and rescaled of."""
        return iter(self.trained)

    def drive(self, optimizer: torch.optim.Optimizer) -> None:
        """Have an optimizer that was made for the model's parameters, and has no state yet, update the masters."""
        for group in optimizer.param_groups:
            group["params"] = [self.masters.get(weight, weight) for weight in group["params"]]
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
        self.masters, self.rounded, self.trained = {}, {}, []

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
