"""Megatron-core's language-model loss with a deftune objective, on logits whose vocabulary is divided among ranks.

from deftune.adapters import megatron
megatron.use_objective(model, "deft")             # model(ids, positions, mask, labels=labels) returns its losses
losses = megatron.token_losses(logits, labels, "deft", loss_mask=mask)  # or from the logits of parallel_output=True
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deftune.adapters.logits import check_first_loss
from deftune.adapters.versions import need_version
from deftune.losses import VocabShard, token_loss
from deftune.objectives import IGNORE_INDEX, Context, Objective
from deftune.objectives import objective as parse_objective

need_version("megatron-core")
from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel.utils import VocabUtility  # noqa: E402


def token_losses(
    logits: Tensor,
    labels: Tensor,
    objective: str | Objective = "deft",
    *,
    loss_mask: Tensor | None = None,
    special_ids: tuple[int, ...] = (),
    group: Any = None,
) -> Tensor:
    """The objective's loss of each token, in place of ``vocab_parallel_cross_entropy``.

        d loss / d z_i = gate (P_i - [i = y]),  P over the vocabulary of all tensor-parallel ranks

    Args:
        logits: ``[..., V / tp]``, of a model with ``parallel_output=True``.
        labels: ``[...]`` shifted targets, ids of the whole vocabulary; -100 is ignored.
        objective: a spec such as ``"deft | floor(0.2)"``, or an `Objective`.
        loss_mask: ``[...]``; tokens with 0 are ignored, and the others' losses multiplied by it.
        special_ids: the end tokens' ids, for ``| eos(...)``.
        group: the tensor-parallel group; default: Megatron's.

    Returns:
        ``[...]`` losses, 0 at ignored tokens. Divide their sum by the supervised tokens of the optimizer step.

    Raises:
        ValueError: the objective depends on the whole step or on the progress, or ``eos(...)`` lacks its ids.
    """
    objective = supported(objective, special_ids)
    group = parallel_state.get_tensor_model_parallel_group() if group is None else group
    return _losses(logits, labels, objective, Context(special_ids=special_ids), loss_mask, vocab_shard(logits, group))


def use_objective(model: Any, objective: str | Objective = "deft", *, special_ids: tuple[int, ...] = ()) -> None:
    """Let ``model(..., labels=labels)`` return the objective's losses ``[batch, sequence]`` instead of cross-entropy.

    Megatron's ``loss_func`` multiplies them by the loss mask, sums them and divides by the count, as before; for the
    mean over the tokens of the whole step set ``calculate_per_token_loss=True``. The first losses are compared with
    the objective of the gathered logits; a difference stops the training before the weights change.

    Args:
        model: a GPTModel or another LanguageModule, also inside Megatron's DDP and Float16Module.
        objective: a spec such as ``"deft | floor(0.2)"``, or an `Objective`.
        special_ids: the end tokens' ids, for ``| eos(...)``.

    Raises:
        ValueError: the model has options that replace the loss, or the objective needs more than a micro-batch.
    """
    objective = supported(objective, special_ids)
    while hasattr(model, "module"):
        model = model.module
    if not hasattr(model, "compute_language_model_loss"):
        raise ValueError(
            f"megatron: {type(model).__name__} has no compute_language_model_loss to replace; use token_losses on its "
            f"logits"
        )
    config = model.config
    if config.cross_entropy_loss_fusion:
        raise ValueError(
            f"megatron: cross_entropy_loss_fusion computes another loss than `{objective}`; set it to False"
        )
    if config.mtp_num_layers:
        raise ValueError(
            f"megatron: mtp_num_layers={config.mtp_num_layers}: the layers for further tokens would train "
            f"`{objective}` too, which was never tried; set it to None"
        )
    model.compute_language_model_loss = ModelLoss(model, objective, Context(special_ids=special_ids))


class ModelLoss:
    """A model's ``compute_language_model_loss(labels [b, s], logits [s, b, V / tp])``; returns losses ``[b, s]``."""

    def __init__(self, model: Any, objective: Objective, context: Context):
        self.group, self.whole = model.pg_collection.tp, not model.parallel_output
        self.objective, self.context, self.checked = objective, context, False

    def __call__(self, labels: Tensor, logits: Tensor) -> Tensor:
        labels = labels.transpose(0, 1)
        shard = None if self.whole else vocab_shard(logits, self.group)
        losses = _losses(logits, labels, self.objective, self.context, None, shard)
        if not self.checked and bool((labels != IGNORE_INDEX).any()):
            with torch.no_grad():
                total = losses.detach().sum()
                check_first_loss("megatron", self.objective, total, logits.detach(), labels, self.context, shard)
            self.checked = True
        return losses.transpose(0, 1).contiguous()


def vocab_shard(logits: Tensor, group: Any) -> VocabShard | None:
    """The classes of this tensor-parallel rank: Megatron pads the vocabulary, so that all ranks have equally many."""
    return _shard(logits.shape[-1], group) if dist.get_world_size(group) > 1 else None


@functools.lru_cache(maxsize=64)
def _shard(classes: int, group: Any) -> VocabShard:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    first, _ = VocabUtility.vocab_range_from_per_partition_vocab_size(classes, rank, ranks)
    return VocabShard(first, classes * ranks, group)


def _losses(
    logits: Tensor, labels: Tensor, objective: Objective, context: Context, mask: Tensor | None,
    shard: VocabShard | None,
) -> Tensor:  # fmt: skip
    if mask is not None:
        labels = labels.masked_fill(mask == 0, IGNORE_INDEX)
    weights = None if mask is None or mask.dtype == torch.bool else mask.to(torch.float32)
    return token_loss(logits, labels, objective, reduction="none", context=context, weights=weights, shard=shard)


def supported(spec: str | Objective, special_ids: tuple[int, ...]) -> Objective:
    """The objective, if a micro-batch is enough to compute it."""
    objective = parse_objective(spec)
    if objective.kind != "local" or "progress" in objective.requires:
        what = "progress of the run" if objective.kind == "local" else "whole optimizer step"
        raise ValueError(
            f"megatron: `{objective}` depends on the {what}, and the model's loss sees one micro-batch; use an "
            f"objective of the token alone (`deftune objectives` lists them), or `deftune train`"
        )
    if "special_ids" in objective.requires and not special_ids:
        raise ValueError(f"megatron: `{objective}` needs special_ids=(id of the end token, ...)")
    return objective
