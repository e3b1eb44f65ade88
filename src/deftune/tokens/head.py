"""A causal LM whose forward ends in an objective instead of logits.

Under DDP and FSDP2 a loss must be computed inside the wrapped modules' forwards, where weights are gathered and the
gradient hooks see them. `attach_objective` therefore gives one model (not its class) and its head a forward that, when
called with ``deft_targets``, hands the hidden states to the fused loss; without them each is its own, so `generate` is
too. The head is called as a module because FSDP2 may shard it as a unit of its own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deftune.losses import Sparse, linear_token_stats
from deftune.losses.eager import eager
from deftune.losses.head import Head
from deftune.losses.linear import fused_loss
from deftune.losses.request import gemm_dtype, make_request
from deftune.objectives import IGNORE_INDEX, Context, Objective, TokenStats

# The loss is made while all activations are alive: smaller chunks than the fastest, which a step does not notice.
CHUNK_ROWS = 768
# Chunks of so many rows keep a GPU busy; below that, those of small heads run as CUDA graphs.
LARGE_CHUNK_ROWS = 1024


def chunk_options(hidden: Tensor, weight: Tensor) -> tuple[int, str]:
    """(chunk_rows, backend) of a step's loss: how many tokens the head works on at a time.

    The backward of the final norm takes about four times the hidden states; these, and the head's buffers, are free by
    then. So with a large batch the head's chunks can be large, but not in CUDA graphs, whose buffers stay allocated.
    """
    dtype = gemm_dtype(hidden)
    copies = sum(dtype.itemsize * tensor.numel() for tensor in (hidden, weight) if tensor.dtype != dtype)
    spare = 3 * hidden.numel() * hidden.element_size() - copies
    rows = spare // (dtype.itemsize * max(1, weight.shape[0])) // 128 * 128
    large = dtype == torch.bfloat16 and rows >= LARGE_CHUNK_ROWS  # E takes more than its dtype says of any other
    return (rows, "triton,torch") if large else (CHUNK_ROWS, "auto")


class HeadOptions(NamedTuple):
    """What a model does to h W^T + bias: z = softcap(logit_scale (h W^T + bias))."""

    logit_scale: float
    softcap: float | None


@dataclass(frozen=True)
class Gated:
    """What an objective did to the supervised tokens, each [M] float64: the gate, and the loss."""

    gate: Tensor
    value: Tensor


class ObjectiveOutput(NamedTuple):
    """The forward's result: the loss of this micro-batch, and the supervised tokens' statistics (detached).

    ``gated`` is the (gate, loss) of each supervised token. Wrappers that cast outputs to bfloat16 see the loss alone:
    the statistics are one opaque record, and so are the gates.
    """

    loss: Tensor | None
    stats: TokenStats
    gated: Gated | None = None


def shifted(labels: Tensor) -> Tensor:
    """Targets of a causal LM: the next token's label, nothing after the last.

    >>> shifted(torch.tensor([[-100, 5, 6]]))
    tensor([[   5,    6, -100]])
    """
    return nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORE_INDEX)


def head_options(config: Any) -> HeadOptions:
    """The head's scale and softcap from a transformers config, whose name for them differs by architecture."""
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
    """Let ``model(..., deft_targets=...)`` return an `ObjectiveOutput`; refuse a head that we would compute wrongly."""
    if getattr(type(model), "deft_forward", False):
        return
    head = head_of(model)
    check_head(model)
    model.__dict__.pop("forward", None)  # TRL's own fused head, which ours replaces
    model.__class__ = _with_objective(type(model))
    head.__class__ = _head_with_objective(type(head))


def head_of(model: Any) -> Any:
    """The linear layer that makes the logits; an adapter or a quantised weight in it would be left out of h W^T."""
    name, head = type(model).__name__, model.get_output_embeddings()
    if head is None or not isinstance(getattr(head, "weight", None), Tensor):
        raise ValueError(f"{name}: has no linear head of its own (get_output_embeddings() is {head!r})")
    if hasattr(head, "modules_to_save"):  # PEFT's copy of the head, which is trained whole
        head = head.modules_to_save[head.active_adapters[0]]
    if type(head) is not nn.Linear and not getattr(type(head), "deft_forward", False):
        raise ValueError(
            f"{name}: the head is a {type(head).__name__}, not a plain Linear, and the fused loss would leave out what "
            f"it adds; keep adapters and quantisation off the head (LoRA: leave lm_head out of target_modules; to "
            f"train it, use modules_to_save)"
        )
    return head


@torch.no_grad()
def check_head(model: Any, tolerance: float = 1e-2) -> None:
    """Compare the model's logits with softcap(scale (h W^T + bias)) on four tokens: an unknown head is an error."""
    head = head_of(model)
    weight = head.weight
    if weight.is_meta or weight.numel() == 0:
        return
    training = model.training
    model.eval()
    try:
        ids = torch.arange(4, device=weight.device)[None] % weight.shape[0]
        expected = model(input_ids=ids, use_cache=False).logits.float()
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        model.train(training)
    scale, softcap = head_options(model.config)
    z = scale * nn.functional.linear(hidden.to(weight.dtype), weight, head.bias).float()
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    error = float((z - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    if not error <= tolerance and bool(expected.isfinite().all()):
        raise ValueError(
            f"{type(model).__name__}: its logits are not softcap({scale:g} (h W^T + bias)) with softcap {softcap} "
            f"(relative difference {error:.2g}), so the fused loss would train something else; use "
            f"deftune.hf_loss(...), which starts from the logits"
        )


@torch.no_grad()
def check_packing(model: Any, tolerance: float = 1e-2) -> None:
    """Compare two rows end to end with each by itself: attention that crosses their boundary is an error."""
    weight = model.get_input_embeddings().weight
    if weight.is_meta or weight.numel() == 0:
        return
    training = model.training
    model.eval()
    try:
        first = torch.arange(5, device=weight.device)[None] % weight.shape[0]
        second = first.flip(1)[:, :4]
        positions = torch.cat([torch.arange(5), torch.arange(4)]).to(weight.device)[None]
        joined = model(input_ids=torch.cat([first, second], 1), position_ids=positions, use_cache=False).logits
        alone = [model(input_ids=ids, use_cache=False).logits for ids in (first, second)]
    finally:
        model.train(training)
    expected = torch.cat(alone, 1).float()
    error = float((joined.float() - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    if not error <= tolerance and bool(expected.isfinite().all()):
        attention = getattr(model.config, "_attn_implementation", None)
        raise ValueError(
            f"packing: with attn_implementation={attention!r} {type(base_of(model)).__name__} sees across the rows of "
            f"a pack (relative difference {error:.2g}); use another attn_implementation, or no packing"
        )


@functools.cache
def _with_objective(cls: type) -> type:
    """``cls`` with a forward that knows ``deft_targets``; of the same name, so that a saved model names its class."""

    class WithObjective(cls):  # pyright: ignore[reportUntypedBaseClass]
        deft_forward = True

        @functools.wraps(cls.forward)  # `generate` checks its arguments against the original's signature
        def forward(self, *args: Any, deft_targets: Tensor | None = None, deft_call: Any = None, **kwargs: Any) -> Any:
            if deft_targets is None:
                return super().forward(*args, **kwargs)
            kwargs["use_cache"] = False
            kwargs.pop("labels", None)  # PEFT hands on every argument of its own forward
            hidden = self.base_model(*args, **kwargs).last_hidden_state
            return head_of(self)(hidden, deft_targets, deft_call, head_options(self.config))

    return _named_as(cls, WithObjective)


@functools.cache
def _head_with_objective(cls: type) -> type:
    """A linear layer that ends in the loss when it is given targets."""

    class HeadWithObjective(cls):  # pyright: ignore[reportUntypedBaseClass]
        deft_forward = True

        def forward(self, input: Tensor, targets: Tensor | None = None, call: Any = None, options: Any = None) -> Any:
            return super().forward(input) if targets is None else call(self, input, targets, options)

    return _named_as(cls, HeadWithObjective)


def _named_as(cls: type, ours: type) -> type:
    ours.__name__, ours.__qualname__, ours.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    return ours


class ObjectiveCall:
    """The head's computation on the hidden states: the loss and its statistics, or the statistics alone."""

    def __init__(
        self,
        objective: Objective,
        context: Context,
        num_items: float | None,
        *,
        statistics_only: bool = False,
        top_k: int = 0,
        sparse: Sparse | None = None,
    ):
        self.objective, self.context, self.sparse = objective, context, sparse
        self.num_items, self.statistics_only = num_items, statistics_only
        self.top_k = max(objective.top_k, top_k)  # of the statistics alone: a loss takes its objective's

    @eager
    def __call__(self, head: Any, hidden: Tensor, targets: Tensor, options: HeadOptions) -> ObjectiveOutput:
        targets = targets.to(hidden.device)
        if not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(head.weight.dtype)
        if self.statistics_only:
            stats = linear_token_stats(
                hidden, head.weight, targets, bias=head.bias, softcap=options.softcap, logit_scale=options.logit_scale,
                top_k=self.top_k, chunk_rows=CHUNK_ROWS,
            )  # fmt: skip
            return ObjectiveOutput(None, stats.detach())
        chunk_rows, backend = chunk_options(hidden, head.weight)
        request = make_request(
            hidden, Head(head.weight, head.bias, options.logit_scale, options.softcap), targets, self.objective,
            num_items=self.num_items, context=self.context, chunk_rows=chunk_rows, sparse=self.sparse, gates=True,
        )  # fmt: skip
        result = fused_loss(request, backend)
        assert result.gate is not None and result.values is not None
        return ObjectiveOutput(result.loss, result.stats, Gated(result.gate, result.values))


def base_of(model: Any) -> Any:
    """The causal LM inside PEFT's wrappers."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
