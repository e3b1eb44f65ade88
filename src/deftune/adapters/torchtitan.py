"""torchtitan's loss with a deftune objective: ``Trainer.Config(loss=ObjectiveLoss.Config(objective="deft"), ...)``."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false
from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import BaseLoss
from torchtitan.distributed.spmd_types import spmd_mesh_size
from torchtitan.distributed.utils import get_spmd_backend

from deftune.losses import token_loss
from deftune.objectives import Context, Objective
from deftune.objectives import objective as parse_objective


def summed_loss(pred: Tensor, labels: Tensor, objective: Objective, context: Context) -> Tensor:
    """The sum of the objective over the supervised tokens; torchtitan divides it by the step's count.

    Args:
        pred: ``[batch, sequence, V]`` logits, whole rows on this rank, any float dtype (no float32 copy is made).
        labels: ``[batch, sequence]`` shifted targets, -100 is ignored.

    Raises:
        ValueError: tensor parallel has divided the vocabulary, so that this rank holds a part of each row.
    """
    if isinstance(pred, DTensor) or (get_spmd_backend() == "spmd_types" and spmd_mesh_size("tp") > 1):
        raise ValueError(
            f"deftune: with tensor parallel torchtitan's logits are divided over the vocabulary, and `{objective}` "
            f"needs whole rows; set parallelism.tensor_parallel_degree=1 (and not spmd_backend=full_dtensor)"
        )
    return token_loss(pred, labels, objective, reduction="sum", context=context)


class ObjectiveLoss(BaseLoss):
    """A deftune objective as torchtitan's loss, plain or as the ``loss_fn`` of `ChunkedLossWrapper.Config`.

    The step's loss is the sum over its supervised tokens / ``global_valid_tokens``, as for torchtitan's cross-entropy.
    ``compile.components`` with "loss" is not needed: the loss is not compiled.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        objective: str = "deft"
        """A spec: "deft | floor(0.2)"."""

        special_ids: tuple[int, ...] = ()
        """The end tokens' ids, for ``| eos(...)``."""

    def __init__(self, config: Config, *, compile_config: Any = None):
        objective = parse_objective(config.objective)
        if objective.kind != "local":
            raise ValueError(
                f"deftune: `{objective}` depends on the whole optimizer step, of which torchtitan's loss sees one "
                f"micro-batch or chunk; use deftune.DeftSFTTrainer"
            )
        if "progress" in objective.requires:
            raise ValueError(
                f"deftune: `{objective}` depends on the progress of the run, which torchtitan's loss is not told; use "
                f"deftune.DeftSFTTrainer"
            )
        if "special_ids" in objective.requires and not config.special_ids:
            raise ValueError(
                f"deftune: `{objective}` needs special_ids=(id of the end token, ...) in the loss's config"
            )
        self.fn = partial(summed_loss, objective=objective, context=Context(special_ids=config.special_ids))
