"""A causal LM whose forward ends in an objective instead of logits.

Under DDP and FSDP2 a loss must be computed inside the wrapped module's forward, where the head's weight is gathered and
the gradient hooks see it. `attach_objective` therefore gives one model (not its class) a forward that, when called with
``deft_targets``, hands the hidden states to the fused loss; without them it is the model's own, so `generate` is too.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deftune.kernels import linear_loss_with_stats, linear_token_stats
from deftune.kernels.eager import eager
from deftune.objectives import IGNORE_INDEX, Context, Objective, TokenStats


class HeadOptions(NamedTuple):
    """What a model does to h W^T + bias: z = softcap(logit_scale (h W^T + bias))."""

    logit_scale: float
    softcap: float | None


class ObjectiveOutput(NamedTuple):
    """What the forward returns: the loss of this micro-batch and the supervised tokens' statistics (detached)."""

    loss: Tensor | None
    log_p: Tensor
    entropy: Tensor
    log_collision: Tensor
    targets: Tensor
    top: Tensor | None = None


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
    output = model.get_output_embeddings()
    if output is None or not isinstance(getattr(output, "weight", None), Tensor):
        raise ValueError(
            f"{type(model).__name__}: has no linear head of its own (get_output_embeddings() is {output!r})"
        )
    check_plain_linear(model, output)
    check_head(model)
    model.__dict__.pop("forward", None)  # TRL's own fused head, which ours replaces
    model.__class__ = _with_objective(type(model))


def check_plain_linear(model: Any, output: nn.Module) -> None:
    """An adapter or a quantised weight in the head would be left out of h W^T."""
    if type(output) is not nn.Linear:
        raise ValueError(
            f"{type(model).__name__}: the head is a {type(output).__name__}, not a plain Linear, and the fused loss "
            f"would leave out what it adds; keep adapters and quantisation off the head (LoRA: leave lm_head out of "
            f"target_modules; to train it, use modules_to_save)"
        )


@torch.no_grad()
def check_head(model: Any, tolerance: float = 1e-2) -> None:
    """Compare the model's logits with softcap(scale (h W^T + bias)) on four tokens: an unknown head is an error."""
    weight = model.get_output_embeddings().weight
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
    head = model.get_output_embeddings()
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


@functools.cache
def _with_objective(cls: type) -> type:
    """``cls`` with a forward that knows ``deft_targets``; of the same name, so that a saved model names its class."""

    class WithObjective(cls):
        deft_forward = True

        @functools.wraps(cls.forward)  # `generate` checks its arguments against the original's signature
        def forward(self, *args: Any, deft_targets: Tensor | None = None, deft_call: Any = None, **kwargs: Any) -> Any:
            if deft_targets is None:
                return super().forward(*args, **kwargs)
            kwargs["use_cache"] = False
            hidden = self.base_model(*args, **kwargs).last_hidden_state
            return deft_call(self, hidden, deft_targets)

    WithObjective.__name__, WithObjective.__qualname__ = cls.__name__, cls.__qualname__
    WithObjective.__module__ = cls.__module__
    return WithObjective


def gathered(tensor: Any) -> Any:
    """A whole tensor where FSDP2 left a shard of it in place; its gradient finds its way back."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class ObjectiveCall:
    """What a forward does with the hidden states: the loss and its statistics, or the statistics alone."""

    def __init__(
        self, objective: Objective, context: Context, num_items: float | None, *, statistics_only: bool = False
    ):
        self.objective, self.context = objective, context
        self.num_items, self.statistics_only = num_items, statistics_only

    @eager
    def __call__(self, model: Any, hidden: Tensor, targets: Tensor) -> ObjectiveOutput:
        head = model.get_output_embeddings()
        check_plain_linear(model, head)  # PEFT may have replaced it after the objective was attached
        weight, bias = gathered(head.weight), gathered(head.bias)
        options = head_options(model.config)
        targets = targets.to(hidden.device)
        keywords: dict[str, Any] = {"bias": bias, "softcap": options.softcap, "logit_scale": options.logit_scale}
        if not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(weight.dtype)
        if self.statistics_only:
            needs = self.objective.needs
            stats = linear_token_stats(hidden, weight, targets, needs=needs, **keywords)
            return _output(None, stats.detach(), self.objective)
        loss, stats = linear_loss_with_stats(
            hidden, weight, targets, self.objective, num_items=self.num_items, context=self.context, **keywords
        )
        return _output(loss, stats.detach(), self.objective)


def _output(loss: Tensor | None, stats: TokenStats, objective: Objective) -> ObjectiveOutput:
    most = max((need.k for need in objective.needs), default=0)
    top = stats.top_log_p(most) if most else None
    return ObjectiveOutput(loss, stats.log_p, stats.entropy, stats.log_collision, stats.targets, top)


def stats_of(output: ObjectiveOutput, vocab_size: int) -> TokenStats:
    """The record that objectives read, from a forward's output (which distributed wrappers take apart)."""
    from deftune.objectives.stats import columns_of

    top = None if output.top is None else columns_of(output.top, vocab_size)
    return TokenStats(output.log_p, output.entropy, output.log_collision, output.targets, vocab_size, top)


def base_of(model: Any) -> Any:
    """The causal LM inside PEFT's wrappers."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
