"""Checks of the arguments, whose errors say what is wrong, where, and what to do."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from deftune.objectives.stats import IGNORE_INDEX, Context

REDUCTIONS = ("mean", "sum", "none")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_targets(targets: object, rows: Tensor, name: str) -> None:
    """``targets`` are integer ids, one per row of ``rows``, which the caller calls ``name``."""
    if not isinstance(targets, Tensor):
        raise ValueError(f"targets: expected a tensor of token ids, got {type(targets).__name__}")
    if targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"targets: token ids must be int64 or int32, got {targets.dtype}; use targets.long()")
    leading = rows.shape[:-1]
    if targets.shape != leading:
        raise ValueError(
            f"targets: shape {tuple(targets.shape)} does not match {name}'s leading shape {tuple(leading)}; "
            f"targets are already shifted and have one id per row"
        )
    check_device("targets", targets, name, rows)


def check_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Both are on one device: a kernel would read another device's memory."""
    if tensor.device != other.device:
        raise ValueError(f"{other_name} is on {other.device} and {name} on {tensor.device}; move them together")


def check_float(value: object, name: str) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: expected a tensor, got {type(value).__name__}")
    if not value.is_floating_point():
        raise ValueError(f"{name}: must be floating point, got {value.dtype}; use {name}.float()")
    if value.dtype not in FLOATS:
        raise ValueError(f"{name}: {value.dtype} has no arithmetic of its own; use {name}.bfloat16() or {name}.float()")


def check_count_option(name: str, value: object, least: int) -> None:
    """An option that is a whole number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < least:
        raise ValueError(f"{name}: a whole number, at least {least}, got {value!r}")


def check_number(name: str, value: object) -> None:
    """An option that is a number of Python, a constant of the loss."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(
            f"{name}: is a constant number and gets no gradient, got {type(value).__name__}; pass float({name})"
        )


def check_context(context: object) -> None:
    if not (context is None or isinstance(context, Context)):
        raise ValueError(f"context: expected a deftune.Context(...), got {type(context).__name__}")


def check_logits(logits: object, targets: object, sharded: bool = False) -> None:
    check_float(logits, "logits")
    assert isinstance(logits, Tensor)
    if logits.dim() < 1 or (logits.shape[-1] < 1 and not sharded):
        raise ValueError(f"logits: need a last dimension of V >= 1 classes, got shape {tuple(logits.shape)}")
    check_targets(targets, logits, "logits")


def readable(tensor: Tensor) -> bool:
    """Whether values can be checked: reading a GPU would wait for it, reading a traced tensor would break the graph."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def check_options(targets: Tensor, reduction: str, num_items: object, weights: object, context: object) -> None:
    """The options that `token_loss` and `linear_loss` share."""
    check_reduction(reduction, num_items)
    check_context(context)
    check_weights(weights, targets)


def check_weights(weights: object, targets: Tensor) -> None:
    if weights is None:
        return
    check_float(weights, "weights")
    assert isinstance(weights, Tensor)
    if weights.shape != targets.shape:
        raise ValueError(
            f"weights: shape {tuple(weights.shape)} does not match the targets' {tuple(targets.shape)}; one weight per "
            f"token"
        )
    check_device("weights", weights, "targets", targets)
    if weights.requires_grad:
        raise ValueError("weights: are constants of the loss and get no gradient; pass weights.detach()")
    if readable(weights):
        bad = ~weights.reshape(-1).isfinite() & (targets.reshape(-1) != IGNORE_INDEX)
        if bool(bad.any()):
            index = int(bad.nonzero()[0, 0])
            value = float(weights.reshape(-1)[index])
            raise ValueError(
                f"weights: token {index} (flat index) has weight {value}; use finite numbers, 0 to leave it out"
            )


def check_reduction(reduction: str, num_items: object) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    if num_items is None:
        return
    if reduction != "mean":
        raise ValueError(
            f"num_items: divides the sum for reduction='mean' and has no place with reduction={reduction!r}"
        )
    if isinstance(num_items, Tensor):
        if num_items.numel() != 1:
            raise ValueError(f"num_items: one count for the step, got a tensor of shape {tuple(num_items.shape)}")
        if not readable(num_items):
            return
        num_items = num_items.item()
    if isinstance(num_items, bool) or not isinstance(num_items, numbers.Real):  # numpy's numbers are Real too
        raise ValueError(f"num_items: a number of supervised tokens, got {type(num_items).__name__}")
    if not 0 < float(num_items) < math.inf:
        raise ValueError(
            f"num_items: the optimizer step has {num_items} supervised tokens; an empty step has no loss, skip it"
        )


def check_count(num_items: Tensor | float | None, count: int) -> None:
    """A step cannot have fewer supervised tokens than one of its calls."""
    on_host = not isinstance(num_items, Tensor) or num_items.device.type == "cpu"
    if num_items is not None and on_host and float(num_items) < count:
        raise ValueError(
            f"num_items: {float(num_items):g} is fewer than this call's {count} supervised tokens; it is the count "
            f"of the whole optimizer step over all micro-batches and ranks, never divided by anything"
        )


def label_error(index: int, label: int, vocab_size: int) -> ValueError:
    remedy = (
        f"a label must be below the vocabulary size {vocab_size}; check the tokenizer against the model"
        if label >= 0
        else f"only {IGNORE_INDEX} marks a token to ignore; replace other negative labels by it"
    )
    return ValueError(f"targets: token {index} (flat index) has label {label}; {remedy}")


def nan_error(index: int, name: str, sharded: bool = False) -> ValueError:
    ranks = ". Or the ranks that share the vocabulary were given different targets" if sharded else ""
    return ValueError(
        f"{name}: token {index} (flat index) has NaN or +inf logits (or nothing but -inf), so it has no distribution; "
        f"do not use its gradients. Look at the inputs of that token, the learning rate and the weights for NaN{ranks}"
    )


def second_derivative_error() -> RuntimeError:
    return RuntimeError(
        "deftune: the loss has a first derivative only (the focus is a stop-gradient quantity); "
        "no second one is defined, so do not use create_graph=True through it"
    )


def first_only(inputs: Sequence[Tensor | None], grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """The gradients of the inputs as they are; under create_graph=True their own derivative is an error.

    Without this a second derivative would be lost silently.
    """
    return _FirstOnly.apply(len(inputs), *inputs, *grads) if torch.is_grad_enabled() else grads  # pyright: ignore


class _FirstOnly(Function):
    """Gradients as they are, whose own derivative is refused; the first tensors are the inputs."""

    @staticmethod
    def forward(ctx: Any, inputs: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore
        return tuple(None if grad is None else grad.view_as(grad) for grad in tensors[inputs:])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:  # pyright: ignore
        raise second_derivative_error()
