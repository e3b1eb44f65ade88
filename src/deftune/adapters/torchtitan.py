"""torchtitan's loss with a deftune objective: ``Trainer.Config(loss=ObjectiveLoss.Config(objective="deft"), ...)``."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from deftune.adapters.logits import check_first_loss
from deftune.adapters.versions import need_version
from deftune.losses import VocabShard, token_loss
from deftune.losses.dtensors import local_logits
from deftune.objectives import IGNORE_INDEX, Context
from deftune.objectives import objective as parse_objective

need_version("torchtitan")
import spmd_types as spmd  # noqa: E402
from torchtitan.components.loss import BaseLoss  # noqa: E402
from torchtitan.distributed.spmd_types import current_spmd_mesh, spmd_mesh_size  # noqa: E402
from torchtitan.distributed.utils import get_spmd_backend  # noqa: E402


class ObjectiveLoss(BaseLoss):
    """A deftune objective as torchtitan's loss, plain or as the ``loss_fn`` of `ChunkedLossWrapper.Config`.

        loss = (1 / global_valid_tokens) sum_t L(p_t),  as for torchtitan's cross-entropy

    With tensor parallel each rank has the logits of its part of the vocabulary (a DTensor, or a plain tensor under
    ``spmd_backend="spmd_types"``), and the sums over the vocabulary are reduced over the ranks. The loss of the first
    micro-batch or chunk with a supervised token is compared with the objective of the gathered logits; a difference
    stops the training before the weights change. ``compile.components`` with "loss" is not needed: the loss is not
    compiled.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        objective: str = "deft"
        """A spec: "deft | floor(0.2)"."""

        special_ids: tuple[int, ...] = ()
        """The end tokens' ids, for ``| eos(...)``."""

        global_vocab_size: int | None = None
        """The size of the whole vocabulary, as in CrossEntropyLoss.Config; for tensor parallel under spmd_types."""

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
        self.objective, self.context = objective, Context(special_ids=config.special_ids)
        self.vocab_size, self.shard, self.checked = config.global_vocab_size, None, False
        self.fn = self.summed_loss

    def summed_loss(self, pred: Tensor, labels: Tensor) -> Tensor:
        """The sum of the objective over the supervised tokens; torchtitan divides it by the step's count.

        Args:
            pred: ``[batch, sequence, V]`` logits, whole rows or this rank's part of the vocabulary, any float dtype (no
                float32 copy is made).
            labels: ``[batch, sequence]`` shifted targets, -100 is ignored.
        """
        with spmd.no_typecheck():  # collectives on the tensor-parallel group are the loss's own
            shard = self.shard_of(pred)
            loss = token_loss(pred, labels, self.objective, reduction="sum", context=self.context, shard=shard)
            if not self.checked:
                self.check(loss.detach(), pred.detach(), labels, shard)
        if isinstance(pred, DTensor) and isinstance(labels, DTensor):
            rows = [p.is_shard() and not is_last(p, pred.dim()) for p in pred.placements]
            placements = [Partial() if divided else Replicate() for divided in rows]
            return DTensor.from_local(loss, pred.device_mesh, placements, run_check=False)
        return loss

    def shard_of(self, pred: Tensor) -> VocabShard | None:
        """The shard of a plain tensor of logits; a DTensor has its own."""
        if isinstance(pred, DTensor) or get_spmd_backend() != "spmd_types" or spmd_mesh_size("tp") <= 1:
            return None
        if self.vocab_size is None:
            raise ValueError(
                f"deftune: with tensor parallel a rank has a part of the logits ({pred.shape[-1]} classes); set "
                f"ObjectiveLoss.Config(global_vocab_size=decoder_vocab_size(model_spec)), as for CrossEntropyLoss"
            )
        if self.shard is None:
            mesh = current_spmd_mesh()
            assert mesh is not None
            self.shard = VocabShard.chunked(self.vocab_size, mesh.get_group("tp"))
        return self.shard

    @torch.no_grad()
    def check(self, loss: Tensor, pred: Tensor, labels: Tensor, shard: VocabShard | None) -> None:
        """Compare a loss with the objective of the gathered logits, until one with a supervised token is checked."""
        logits, targets, _, shard = local_logits(pred, labels, None, shard)
        if bool((targets != IGNORE_INDEX).any()):
            check_first_loss("torchtitan", self.objective, loss, logits, targets, self.context, shard)
            self.checked = True


def is_last(placement: Any, dims: int) -> bool:
    return placement.dim % dims == dims - 1
