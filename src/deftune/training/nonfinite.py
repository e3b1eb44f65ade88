"""Why a gradient was not finite: the step's micro-batches are run again, and the first layer and operation are named.

A NaN may come from damaged weights, from an overflow in one layer, or from a kernel that is wrong for one batch shape.
Each wants another remedy, so the advice follows from reruns of the very micro-batch, not from a guess.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from deftune.training.attention import KERNELS, VARLEN, attention_kernels

FINITE, NOT_FINITE, UNAVAILABLE = "finite", "not finite", "unavailable"


@dataclass(frozen=True)
class Diagnosis:
    """What reruns of the micro-batches showed. Names are those of the model's modules and parameters."""

    micro_batches: int
    micro_batch: int | None = None  # the first that is not finite when it is run again, from 0
    weights: str | None = None  # a parameter that holds NaN or infinity
    forward: str | None = None  # the first module whose output is not finite although its input is
    gradient: str | None = None  # the module nearest to the loss with a gradient that is not finite
    operation: str | None = None  # the autograd function that returned the first NaN
    float32: str | None = None  # the same micro-batch without autocast
    attention: str = "auto"  # the choice of kernels that the run had
    kernels: dict[str, str] = field(default_factory=dict)  # attention kernel -> finite, not finite, unavailable

    def __str__(self) -> str:
        return f"{self.findings()} {self.advice()}"

    def findings(self) -> str:
        if self.weights is not None:
            return f"The weight {self.weights} is not finite."
        if self.micro_batch is None:
            return f"Run again, each of the step's {self.micro_batches} micro-batches has finite gradients."
        place = f"Micro-batch {self.micro_batch + 1} of {self.micro_batches}, run again"
        if self.forward is not None:
            text = f"{place}: the forward pass is not finite, first in {self.forward}"
        else:
            by = f" ({self.operation})" if self.operation else ""
            text = f"{place}: the forward pass is finite, the backward pass is not, first in {self.gradient}{by}"
        if self.float32 is not None:
            text += f"; in float32 it is {self.float32}"
        if self.kernels:
            tried = ", ".join(f"{name} {result}" for name, result in self.kernels.items())
            text += f"; attention kernels on this micro-batch: {tried}"
        return text + "."

    def advice(self) -> str:
        """What to do, by what was found."""
        good = [name for name, result in self.kernels.items() if result == FINITE]
        wrong = [name for name, result in self.kernels.items() if result == NOT_FINITE]
        if self.weights is not None:
            return "The model was damaged before this step; start from whole weights, or from an earlier checkpoint."
        if self.micro_batch is None:
            return (
                "The failure did not repeat: suspect a kernel that is not deterministic, or the hardware. The same "
                "command resumes from the last checkpoint."
            )
        if good and wrong:
            if self.attention == "cudnn" and "cudnn" in wrong:
                return "The attention kernel is at fault: set train.attention=auto, which leaves cudnn out."
            return f"The attention kernel is at fault: set train.attention={good[0]}."
        if self.float32 == FINITE:
            return f"bfloat16 overflows there: set train.precision=fp32, or look at what makes {self._place} so large."
        return (
            "No other precision or attention kernel makes it finite: look at the rows of this micro-batch, and whether "
            "the loss rose in the steps before (then lower the learning rate)."
        )

    @property
    def _place(self) -> str:
        return self.forward or self.gradient or "this layer"


def diagnose(
    model: nn.Module, batches: Sequence[Any], loss_of: Callable[[Any, bool], Tensor], *, attention: str = "auto",
    autocast: bool = False,
) -> Diagnosis:  # fmt: skip
    """Run a step's micro-batches again and say where the first value that is not finite appears.

    Args:
        model: the module that is trained; its gradients are overwritten.
        batches: the micro-batches of the step.
        loss_of: ``loss_of(batch, autocast)`` is the loss of one micro-batch, connected to the parameters.
        attention: the run's choice of attention kernels, which the reruns use too.
        autocast: whether the run computes in lower precision; then the micro-batch is tried in float32 too.
    """
    found: dict[str, Any] = {"micro_batches": len(batches), "attention": attention}
    for name, parameter in model.named_parameters():
        if not bool(local(parameter).isfinite().all()):
            return Diagnosis(**found, weights=name)
    for number, batch in enumerate(batches):
        watch = Watch(model)
        with attention_kernels(attention, model), watch:
            finite = backward(model, lambda batch=batch: loss_of(batch, autocast))
        if finite:
            continue
        found["micro_batch"] = number
        found["forward"] = watch.forward
        if watch.forward is None:
            found["gradient"] = watch.gradient
            with attention_kernels(attention, model):
                found["operation"] = operation_of_nan(model, lambda batch=batch: loss_of(batch, autocast))
        if autocast:
            with attention_kernels(attention, model):
                found["float32"] = outcome(model, lambda batch=batch: loss_of(batch, False))
        if uses_sdpa(model):
            failed = {VARLEN: NOT_FINITE} if attention == VARLEN else {}
            found["kernels"] = failed | {
                name: try_kernel(model, name, lambda batch=batch: loss_of(batch, autocast)) for name in KERNELS
            }
        break
    model.zero_grad(set_to_none=True)
    return Diagnosis(**found)


class Watch:
    """While it is entered, the first places of a forward and backward pass that are not finite.

    ``forward``: the first module whose output is not finite although its input is.
    ``gradient``: the module of the first parameter whose gradient arrives and is not finite.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.forward: str | None = None
        self.gradient: str | None = None
        self.handles: list[Any] = []

    def __enter__(self) -> Watch:
        for name, module in self.model.named_modules():

            def look(_: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                if self.forward is None and not is_finite(output):
                    if is_finite((args, kwargs.get("hidden_states"))):
                        self.forward = name or type(self.model).__name__

            self.handles.append(module.register_forward_hook(look, with_kwargs=True))
        for name, parameter in self.model.named_parameters():

            def arrived(parameter: Tensor, name: str = name) -> None:
                if self.gradient is None and parameter.grad is not None and not is_finite(local(parameter.grad)):
                    self.gradient = module_of(name)

            if parameter.requires_grad:
                self.handles.append(parameter.register_post_accumulate_grad_hook(arrived))
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self.handles:
            handle.remove()


def module_of(parameter: str) -> str:
    """The module that a parameter belongs to; of an attention's projections, the attention.

    >>> module_of("model.layers.15.self_attn.v_proj.weight")
    'model.layers.15.self_attn'
    """
    owner = parameter.rpartition(".")[0]
    attention = re.search(r"^(.*(?:attn|attention))\.", owner)
    return attention.group(1) if attention else owner


def is_finite(value: Any) -> bool:
    """Whether every floating-point tensor in a module's input or output is finite."""
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    if isinstance(value, dict):
        return all(is_finite(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(is_finite(item) for item in value)
    return True


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; a plain tensor itself."""
    to_local: Any = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor


def backward(model: nn.Module, loss: Callable[[], Tensor]) -> bool:
    """Whether the loss and every gradient are finite. A loss that refuses NaN logits counts as not finite."""
    model.zero_grad(set_to_none=True)
    try:
        value = loss()
        value.backward()
    except ValueError as error:
        if "NaN" not in str(error):
            raise
        return False
    gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
    return bool(value.isfinite()) and is_finite(gradients)


def operation_of_nan(model: nn.Module, loss: Callable[[], Tensor]) -> str | None:
    """The autograd function that returns the first NaN of the backward pass; None where none does."""
    model.zero_grad(set_to_none=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch prints the forward pass's traceback, 40 lines of library code
            with torch.autograd.detect_anomaly(check_nan=True):
                loss().backward()
    except (RuntimeError, ValueError) as error:
        match = re.search(r"Function '(\w+)' returned nan", str(error))
        return match.group(1) if match else None
    return None


def outcome(model: nn.Module, loss: Callable[[], Tensor]) -> str:
    return FINITE if backward(model, loss) else NOT_FINITE


def try_kernel(model: nn.Module, name: str, loss: Callable[[], Tensor]) -> str:
    """The outcome with one attention kernel; unavailable where torch has none for this batch."""
    try:
        with attention_kernels(name):
            return outcome(model, loss)
    except RuntimeError as error:
        if "No available kernel" in str(error) or "No viable backend" in str(error):
            return UNAVAILABLE
        raise


def uses_sdpa(model: nn.Module) -> bool:
    config: Any = getattr(model, "config", None)
    return getattr(config, "_attn_implementation", None) == "sdpa"
