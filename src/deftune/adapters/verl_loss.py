"""An objective as verl's loss function, from verl's logits or from the columns of its model output."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from deftune.losses import columns_read, loss_from_log_probs, token_loss, token_stats
from deftune.objectives import IGNORE_INDEX, Context, Objective, StepStats, TokenStats, step_stats
from deftune.objectives.stats import from_columns

Source = Literal["logits", "columns"]
ENGINES = ("fsdp", "fsdp2", "megatron")


def aligned(data: Any) -> tuple[Tensor, Tensor]:
    """(targets, mask) of a micro-batch, each ``[tokens]``, as verl packs its rows: position t predicts token t + 1.

    The mask of each row's last position is 0, because verl never supervises the first token of a row.
    """
    mask = torch.roll(data["loss_mask"].values(), -1)
    return torch.roll(data["input_ids"].values(), -1).masked_fill(mask == 0, IGNORE_INDEX), mask


def choose_source(config: Any, objective: Objective) -> Source:
    """Whether the loss reads verl's logits or the columns (log_probs, entropy, sum_pi_squared) of its model output.

    The logits are the better source: float32 statistics without verl's extra ``[tokens, V]`` tensors, and the likeliest
    tokens. verl has no whole logits with fused kernels, sequence parallel, padded packs, and Megatron.

    Args:
        config: verl's SFT config.
        objective: the objective to train.

    Raises:
        ValueError: verl cannot give what the objective reads with this config, or would train another loss beside it.
    """
    engine, model = config.engine, config.model
    if engine.strategy not in ENGINES:
        raise ValueError(
            f"deftune: engine.strategy={engine.strategy} is not supported; its engine does not return what an "
            f"objective reads. Use one of {', '.join(ENGINES)}"
        )
    if model.get("mtp") and model.mtp.get("enable_train"):
        raise ValueError(
            "deftune: model.mtp.enable_train trains the multi-token heads with NLL beside the objective; turn it off"
        )
    if engine.get("dynamic_context_parallel"):
        raise ValueError(
            "deftune: engine.dynamic_context_parallel divides rows among ranks anew for each batch, which was never "
            "tried with an objective; turn it off"
        )
    reasons = [
        reason
        for holds, reason in (
            (engine.strategy == "megatron", "engine.strategy=megatron"),
            (model.use_fused_kernels, "model.use_fused_kernels=True"),
            (engine.get("ulysses_sequence_parallel_size", 1) > 1, "engine.ulysses_sequence_parallel_size > 1"),
            (engine.get("pad_to_length"), "engine.pad_to_length=True"),
        )
        if holds
    ]
    if not reasons:
        return "logits"
    read = columns_read(objective)
    if "top_log_p" in read:
        raise ValueError(
            f"deftune: `{objective}` reads the likeliest tokens of each row, and verl has no whole logits with "
            f"{' and '.join(reasons)}; turn that off, or use eaft(norm=full), which reads the entropy"
        )
    if "log_collision" in read and model.use_fused_kernels:
        raise ValueError(
            f"deftune: `{objective}` reads sum P^2, which verl's fused kernels do not return; "
            f"set model.use_fused_kernels=False"
        )
    return "columns"


class ObjectiveLoss:
    """An objective as verl's loss function: sum of token losses / batch_num_tokens x dp_size.

    verl calls it in two ways. With ``student_logits`` (verl's hook for losses on logits) it returns the token losses,
    which verl gathers into the model output; with ``model_output`` it returns the loss of the micro-batch. Ray
    pickles it to the workers.

    Args:
        objective: the objective to train.
        source: from `choose_source`.
        special_ids: the end tokens of ``| eos(...)``.
        vocab_size: V, for the source "columns".
    """

    def __init__(self, objective: Objective, source: Source, special_ids: tuple[int, ...], vocab_size: int):
        self.objective, self.source, self.special_ids, self.vocab_size = objective, source, special_ids, vocab_size
        self.measured: list[TokenStats] = []  # of the no-grad pass over a step
        self.step: StepStats | None = None
        self.group: Any = None

    def switches(self) -> dict[str, Any]:
        """The keys of a batch that make verl hand over what the objective reads."""
        if self.source == "logits":
            return {"distillation_use_topk": True, "distillation_only": True}  # without verl's own log_probs
        read = columns_read(self.objective)
        return {"calculate_entropy": "entropy" in read, "calculate_sum_pi_squared": "log_collision" in read}

    def __call__(
        self, model_output: Any = None, data: Any = None, dp_group: Any = None, student_logits: Tensor | None = None
    ) -> Any:
        targets, mask = aligned(data)
        phase: str = data["deft_phase"]
        if student_logits is not None:
            return self._on_logits(student_logits, targets[None], phase, data)
        if phase == "measure":
            self.group = dp_group
            if self.source == "columns":
                self.measured.append(self._stats(model_output, targets))
            return torch.zeros((), device=mask.device), {}
        if self.source == "logits":
            losses = model_output["deft_loss"].values()
        else:
            chosen = targets != IGNORE_INDEX
            mask, stats = mask[chosen], self._stats(model_output, targets)
            losses = loss_from_log_probs(
                model_output["log_probs"].values()[chosen], self.objective, vocab_size=self.vocab_size,
                entropy=stats.entropy, log_collision=stats.log_collision, targets=stats.targets,
                context=self.context(data),
            )  # fmt: skip
        loss = (losses * mask).sum() / data["batch_num_tokens"] * data["dp_size"]
        return loss, self._report(loss, model_output, targets, data) if phase == "first" else {}

    def _on_logits(self, logits: Tensor, targets: Tensor, phase: str, data: Any) -> dict[str, Tensor]:
        if phase == "measure":
            # map: without the logits, which the record of token_stats keeps
            self.measured.append(token_stats(logits, targets).map(lambda vector: vector, self.objective.top_k))
            return {}
        losses = token_loss(logits, targets, self.objective, reduction="none", context=self.context(data))
        if phase != "first":
            return {"deft_loss": losses}
        return {"deft_loss": losses, "deft_nll": token_loss(logits.detach(), targets, "nll", reduction="none")}

    def _stats(self, model_output: Any, targets: Tensor) -> TokenStats:
        chosen = targets != IGNORE_INDEX

        def column(name: str) -> Tensor:
            if name not in model_output:
                return torch.full_like(log_p, torch.nan)
            values = model_output[name].values().detach()[chosen]
            if values.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"deftune: verl computed {name} in {values.dtype}, too coarse for a gate; "
                    f"use an engine that computes it in float32"
                )
            return values

        log_p = model_output["log_probs"].values().detach()[chosen]
        log_collision = column("sum_pi_squared").log().clamp(max=0)
        return from_columns(
            log_p, column("entropy"), log_collision, vocab_size=self.vocab_size, targets=targets[chosen]
        )

    def context(self, data: Any) -> Context:
        """The progress of a step, the end tokens, and the step's statistics if the objective needs them."""
        context = Context(progress=data["deft_progress"], special_ids=self.special_ids)
        if self.measured:
            self.step = step_stats(self.objective, self.measured, context=context, group=self.group)
            self.measured = []
        return Context(context.progress, self.special_ids, self.step)

    def _report(self, loss: Tensor, model_output: Any, targets: Tensor, data: Any) -> dict[str, float]:
        """A micro-batch's part of the step's loss and NLL, which `first_step_line` prints."""
        nll = model_output["deft_nll"] if self.source == "logits" else -model_output["log_probs"].detach()
        return {
            "deft/loss": float(loss.detach()) / data["dp_size"],
            "deft/nll": float(nll.values()[targets != IGNORE_INDEX].sum()) / data["batch_num_tokens"],
        }
