"""A causal LM whose forward may end in a loss or in token statistics instead of logits.

Under DDP and FSDP2 a loss must be computed inside the forwards of the wrapped modules, where weights are gathered and
gradient hooks see them. `attach_objective` therefore sets an instance attribute ``forward`` on the model and on its
head. Called with ``deft_targets``, the new forward hands the hidden states to ``deft_call``; without them it runs the
class's own forward, so that `generate` and `save_pretrained` work as before. No class changes: the model pickles and
deep-copies. `objective_forward` does the same for the time of a ``with`` block and then restores the model.
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from deftune.losses import Sparse, linear_token_stats
from deftune.losses.dtensors import is_dtensor, local_head
from deftune.losses.eager import eager
from deftune.losses.head import Head
from deftune.losses.linear import fused_loss
from deftune.losses.request import gemm_dtype, make_request
from deftune.objectives import IGNORE_INDEX, Context, Objective, TokenStats

# The loss is computed while all activations are in memory: these chunks are smaller than the fastest ones.
CHUNK_ROWS = 768
# Chunks from this size on keep a GPU busy without CUDA graphs.
LARGE_CHUNK_ROWS = 1024


def chunk_options(hidden: Tensor, weight: Tensor) -> tuple[int, str]:
    """(chunk_rows, backend) of the fused loss in a training step.

    The backward of the final norm needs about four times the memory of the hidden states, after the head's buffers are
    freed. With a large batch the head may therefore use large chunks without raising the peak. The buffers of CUDA
    graphs are never freed, so large chunks run without graphs.
    """
    dtype = gemm_dtype(hidden)
    copies = sum(dtype.itemsize * tensor.numel() for tensor in (hidden, weight) if tensor.dtype != dtype)
    spare = 3 * hidden.numel() * hidden.element_size() - copies
    rows = spare // (dtype.itemsize * max(1, weight.shape[0])) // 128 * 128
    large = dtype == torch.bfloat16 and rows >= LARGE_CHUNK_ROWS  # other dtypes need more than one buffer per chunk
    return (rows, "triton,torch") if large else (CHUNK_ROWS, "auto")


class HeadOptions(NamedTuple):
    """How a model makes its logits from h W^T + bias: z = softcap(logit_scale (h W^T + bias))."""

    logit_scale: float
    softcap: float | None


@dataclass(frozen=True)
class Gated:
    """The gate and the loss of each supervised token, each [M] float64."""

    gate: Tensor
    value: Tensor


class ObjectiveOutput(NamedTuple):
    """The result of a forward with targets: the loss, and the statistics of the supervised tokens (detached).

    Wrappers that cast outputs to another dtype cast the loss alone: to them the statistics and the gates are opaque
    records.
    """

    loss: Tensor | None
    stats: TokenStats
    columns: dict[str, Tensor] | None = None
    gated: Gated | None = None


def shifted(labels: Tensor) -> Tensor:
    """The targets of a causal LM: the label of the next token; the last place has none.

    >>> shifted(torch.tensor([[-100, 5, 6]]))
    tensor([[   5,    6, -100]])
    """
    return nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX)


def head_options(config: Any) -> HeadOptions:
    """The head's scale and softcap from a transformers config; their names differ by architecture."""
    text = config.get_text_config()
    softcap = getattr(text, "final_logit_softcapping", None)
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):  # Cohere; Muse; Falcon-H1
        if (scale := getattr(text, name, None)) is not None:
            return HeadOptions(float(scale), softcap)
    scaling = getattr(text, "logits_scaling", None)  # Granite and MiniCPM3 divide by it, HyperCLOVA X multiplies
    if scaling is not None:
        return HeadOptions(float(scaling) if text.model_type == "hyperclovax" else 1 / float(scaling), softcap)
    return HeadOptions(1.0, softcap)


def attach_objective(model: Any) -> None:
    """Let ``model(..., deft_targets=..., deft_call=...)`` return what ``deft_call`` makes of the hidden states.

    The forward stays on the model for training. An instance-level ``forward`` that is there already, such as TRL's
    fused head, is replaced.

    Args:
        model: a causal LM of transformers, without PEFT's wrapper (`base_of`).

    Raises:
        ValueError: the head is not a plain linear layer, or its logits are not those of `head_options`.
    """
    check_head(model)
    _set_forwards(model)


def detach_objective(model: Any) -> None:
    """Undo `attach_objective`: the model and its head run the forwards of their classes again.

    A forward that was set over the attached one, such as accelerate's autocast, is removed too.
    """
    for module in (model, head_of(model)):
        module.__dict__.pop("forward", None)


@contextlib.contextmanager
def objective_forward(model: Any) -> Generator[None]:
    """`attach_objective` without its checks for the time of a ``with`` block; the model is as before afterwards."""
    before = _set_forwards(model)
    try:
        yield
    finally:
        for module, forward in before:
            module.__dict__.pop("forward")
            if forward is not None:
                module.__dict__["forward"] = forward


def _set_forwards(model: Any) -> list[tuple[Any, Any]]:
    """Set ``forward`` on the model and its head; returns each module with the instance attribute it had before."""
    head = head_of(model)
    before = [(module, module.__dict__.get("forward")) for module in (model, head)]
    if is_dtensor(head.weight) and before[1][1] is not None:  # tensor parallel: its forward gathers the logits
        head.__dict__.setdefault("divided_forward", before[1][1])
    model.__dict__["forward"] = MethodType(_forward_of(type(model)), model)
    head.__dict__["forward"] = MethodType(_head_forward, head)
    return before


@contextlib.contextmanager
def evaluating(model: Any) -> Generator[None]:
    """Evaluation mode and no gradients for the time of a ``with`` block; each module's mode is restored."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


@functools.cache
def _forward_of(cls: Any) -> Any:
    """A forward for instances of ``cls``, with the signature of ``cls.forward``, which `generate` reads."""

    # named "forward": pickle then stores the attribute by this name, and an unpickled model has its class's forward
    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, deft_targets: Any = None, deft_call: Any = None, **kwargs: Any) -> Any:
        if deft_targets is None:
            return cls.forward(self, *args, **kwargs)
        kwargs["use_cache"] = False
        kwargs.pop("labels", None)  # PEFT passes every argument of its own forward
        hidden = self.base_model(*args, **kwargs).last_hidden_state
        return head_of(self)(hidden, deft_targets, deft_call, head_options(self.config))

    return forward


@functools.wraps(nn.Linear.forward)
def _head_forward(
    self: nn.Linear, input: Tensor, targets: Tensor | None = None, call: Any = None, options: Any = None
) -> Any:
    # the head is called as a module, because FSDP2 may shard it as a unit of its own and gather it in its hooks
    if targets is not None:
        return call(self, input, targets, options)
    divided = self.__dict__.get("divided_forward")
    return type(self).forward(self, input) if divided is None else divided(input)


def head_of(model: Any) -> nn.Linear:
    """The linear layer that makes the logits, in PEFT's ``modules_to_save`` the copy that is trained."""
    name, head = type(model).__name__, model.get_output_embeddings()
    if head is None or not isinstance(getattr(head, "weight", None), Tensor):
        raise ValueError(f"{name}: has no linear head of its own (get_output_embeddings() is {head!r})")
    if hasattr(head, "modules_to_save"):
        head = head.modules_to_save[head.active_adapters[0]]
    if not isinstance(head, nn.Linear) or not head.weight.is_floating_point():
        raise ValueError(
            f"{name}: the head is a {type(head).__name__}, not a plain Linear, and the fused loss would leave out what "
            f"it adds; keep adapters and quantisation off the head (LoRA: leave lm_head out of target_modules, and for "
            f"a head that is tied to the embedding trainable_token_indices too; to train it, use modules_to_save)"
        )
    return head


def check_head(model: Any, tolerance: float = 1e-2) -> None:
    """Refuse a head whose logits are not softcap(scale (h W^T + bias)), tried on four tokens."""
    head = head_of(model)
    weight = head.weight
    if weight.is_meta or weight.numel() == 0 or hasattr(weight, "full_tensor"):  # not in memory, or sharded
        return
    with evaluating(model):
        ids = torch.arange(4, device=weight.device)[None] % weight.shape[0]
        expected = model(input_ids=ids, use_cache=False).logits.float()
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        scale, softcap = head_options(model.config)
        z = scale * nn.functional.linear(hidden.to(weight.dtype), weight, head.bias).float()
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    error = _relative_error(z, expected)
    if not error <= tolerance and bool(expected.isfinite().all()):
        raise ValueError(
            f"{type(model).__name__}: its logits are not softcap({scale:g} (h W^T + bias)) with softcap {softcap} "
            f"(relative difference {error:.2g}), so the fused loss would train something else; use "
            f"deftune.hf_loss(...), which starts from the logits"
        )


SAME = 1e-3  # the relative difference of two results of one kernel for one shape, where its sums are in any order
MOST_NOISE = 0.3  # a relative difference that is no rounding any more


def check_packing(
    model: Any, *, attention: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
) -> None:
    """Refuse attention that crosses the boundary of two rows in a pack, tried on two short rows.

    The second row's logits must not change with the first row, and both rows must have the logits that they have alone,
    up to a relative difference of 1e-2. In 16 bits the roundings of a deep model add up: there both bounds grow with
    the noise, the difference between two kernels of torch for single rows. A rounding may also send a token to another
    expert, which changes its logits by some per cent: the bounds of such models are wider.

    Args:
        model: the causal LM, or PEFT's wrapper of one.
        attention: makes a context for the joined rows, whose attention takes their boundaries; the single rows are
            computed outside.
    """
    weight = model.get_input_embeddings().weight
    if weight.is_meta or weight.numel() == 0:
        return
    narrow = weight.element_size() < 4 or torch.is_autocast_enabled(weight.device.type)
    with evaluating(model):
        first = torch.arange(5, device=weight.device)[None] % weight.shape[0]
        second = first.flip(1)[:, :4]
        positions = torch.cat([torch.arange(5), torch.arange(4)]).to(weight.device)[None]
        places = {"input_ids": torch.cat([first, second], 1), "position_ids": positions}
        if attention is not contextlib.nullcontext:
            from deftune.data.packing import row_boundaries  # needs numpy, and `deftune doctor` needs torch alone

            bounds = row_boundaries([5, 4])
            places |= {k: v.to(weight.device) if isinstance(v, Tensor) else v for k, v in bounds.items()}
        other_ids = torch.cat([first + 1, second], 1) % weight.shape[0]
        with attention():
            joined = model(**places, use_cache=False).logits.float()
            other = model(**places | {"input_ids": other_ids}, use_cache=False).logits.float()
        alone = [model(input_ids=ids, use_cache=False).logits for ids in (first, second)]
        expected = torch.cat(alone, 1).float()
        tolerance, same = 1e-2, SAME
        if narrow:
            with sdpa_kernel(SDPBackend.MATH):
                again = [model(input_ids=ids, use_cache=False).logits for ids in (first, second)]
            noise = _relative_error(torch.cat(again, 1).float(), expected)
            least, least_same = (0.1, 5e-2) if has_experts(base_of(model).config) else (5e-2, 1e-2)
            tolerance, same = min(max(least, 4 * noise), MOST_NOISE), min(max(least_same, noise), MOST_NOISE)
    error, crossing = _relative_error(joined, expected), _relative_error(other[:, 5:], joined[:, 5:])
    if not (error <= tolerance and crossing <= same) and bool(expected.isfinite().all()):
        name, how = type(base_of(model)).__name__, getattr(model.config, "_attn_implementation", None)
        raise ValueError(
            f"packing: with attn_implementation={how!r} {name} sees across the rows of a pack (relative difference "
            f"{max(error, crossing):.2g}); use another attn_implementation, or no packing"
        )


def has_experts(config: Any) -> bool:
    """Whether a config of transformers is of a mixture of experts."""
    text = config.get_text_config()
    return any(getattr(text, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts"))


def _relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


class HeadCall(ABC):
    """A ``deft_call``: what a forward with targets makes of the hidden states."""

    @eager
    def __call__(self, layer: nn.Linear, hidden: Tensor, targets: Tensor, options: HeadOptions) -> ObjectiveOutput:
        weight = layer.weight
        hidden, targets = hidden.to(weight.device), targets.to(weight.device)
        if not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(weight.dtype)
        hidden, head = _divided(hidden, Head(weight, layer.bias, options.logit_scale, options.softcap), targets)
        return self.compute(hidden, head, targets)

    @abstractmethod
    def compute(self, hidden: Tensor, head: Head, targets: Tensor) -> ObjectiveOutput:
        """The output for hidden states ``[..., D]`` and targets ``[...]``, on the device of this rank's head."""


class ObjectiveCall(HeadCall):
    """For training: the loss of a micro-batch, the statistics of its tokens, and their gates."""

    def __init__(
        self, objective: Objective, context: Context, num_items: float | None, *, sparse: Sparse | None = None
    ):
        self.objective, self.context, self.num_items, self.sparse = objective, context, num_items, sparse

    def compute(self, hidden: Tensor, head: Head, targets: Tensor) -> ObjectiveOutput:
        chunk_rows, backend = chunk_options(hidden, head.weight)
        request = make_request(
            hidden, head, targets, self.objective, num_items=self.num_items, context=self.context,
            chunk_rows=chunk_rows, sparse=self.sparse, gates=True,
        )  # fmt: skip
        result = fused_loss(request, backend)
        assert result.gate is not None and result.values is not None
        return ObjectiveOutput(result.loss, result.stats, gated=Gated(result.gate, result.values))


class StatisticsCall(HeadCall):
    """To measure: the statistics of the supervised tokens, without a loss."""

    def __init__(self, top_k: int = 0):
        self.top_k = top_k

    def compute(self, hidden: Tensor, head: Head, targets: Tensor) -> ObjectiveOutput:
        stats = linear_token_stats(
            hidden, head.weight, targets, bias=head.bias, softcap=head.softcap, logit_scale=head.scale,
            top_k=self.top_k, chunk_rows=CHUNK_ROWS, shard=head.shard,
        )  # fmt: skip
        return ObjectiveOutput(None, stats.detach())


def _divided(hidden: Tensor, head: Head, targets: Tensor) -> tuple[Tensor, Head]:
    """The states and the head of this rank, where tensor parallelism divides the vocabulary among ranks.

    Such a head's weight is a DTensor, and every rank has the same states. (FSDP2 has gathered its weights here.) The
    gradient of the states is summed over the ranks.
    """
    if not is_dtensor(head.weight):
        return hidden, head
    from torch.distributed.tensor import DTensor, Replicate

    whole: Any = head.weight
    mesh = whole.device_mesh
    same = DTensor.from_local(hidden, mesh, [Replicate()] * mesh.ndim, run_check=False)
    hidden, head, _, _ = local_head(same, head, targets)
    return hidden, head


def base_of(model: Any) -> Any:
    """The causal LM inside PEFT's wrappers."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
