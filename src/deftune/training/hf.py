"""One line for transformers' own Trainer: ``Trainer(..., compute_loss_func=deftune.hf_loss("deft"))``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from deftune.artifacts.pages import page
from deftune.losses import token_loss
from deftune.objectives import Context, Objective
from deftune.objectives import objective as parse_objective
from deftune.tokens.head import shifted


def hf_loss(
    objective: str | Objective = "deft", *, special_ids: tuple[int, ...] | None = None
) -> Callable[..., Tensor]:
    """An objective for ``transformers.Trainer(compute_loss_func=...)``.

        loss = (1 / num_items_in_batch) sum_t L(p_t),  d loss / d z = gate (P - onehot) / num_items_in_batch

    The function reads the model's logits, shifts the labels, and divides by the number of supervised tokens that the
    Trainer counts over all micro-batches and ranks of the optimizer step. `DeftSFTTrainer` uses the fused loss instead
    and needs no logits.

        trainer = transformers.Trainer(model, args, train_dataset=dataset, data_collator=collator,
                                       compute_loss_func=deftune.hf_loss("deft"))

    Args:
        objective: a spec such as ``"deft | floor(0.1)"``, or an `Objective`.
        special_ids: the end tokens, for ``| eos(...)``: ``(tokenizer.eos_token_id,)``.

    Returns:
        A function of (outputs, labels, num_items_in_batch); the labels are not shifted.

    Raises:
        ValueError: the objective depends on the whole step (`mile`, `clip`, ``| mean_one``) or on progress
            (``| warmup``), which the Trainer does not pass on; `DeftSFTTrainer` trains these.

    >>> hf_loss("deft")                               # doctest: +ELLIPSIS
    <function hf_loss.<locals>.loss at ...>
    """
    objective = parse_objective(objective)
    if objective.kind != "local":
        raise ValueError(
            f"hf_loss: `{objective}` depends on the whole optimizer step, of which compute_loss_func sees one "
            f"micro-batch; use deftune.DeftSFTTrainer"
        )
    if "progress" in objective.requires:
        raise ValueError(
            f"hf_loss: `{objective}` depends on the progress of the run, which compute_loss_func does not get; use "
            f"deftune.DeftSFTTrainer"
        )
    if "special_ids" in objective.requires and special_ids is None:
        raise ValueError(f"hf_loss: `{objective}` needs special_ids=(tokenizer.eos_token_id, ...)")
    context = Context(special_ids=special_ids)

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        check_whole_rows()
        logits = outputs.get("logits") if isinstance(outputs, dict) else getattr(outputs, "logits", None)
        if logits is None:
            raise ValueError(
                f"hf_loss: the model returned a {type(outputs).__name__} without logits; leave return_dict=False out"
            )
        targets = shifted(labels).to(logits.device)  # device_map may put the head on another GPU than the labels
        return token_loss(logits, targets, objective, num_items=num_items_in_batch, context=context)

    return loss


def check_whole_rows() -> None:
    """Refuse context parallelism: the Trainer hands this hook a rank's labels, without the target of their last place.

    Raises:
        ValueError: accelerate divides the sequences of this process among ranks.
    """
    state: Any = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    config = None if state is None else state._shared_state.get("parallelism_config")
    if config is not None and config.cp_enabled:
        raise ValueError(
            "hf_loss: context parallelism divides each row among ranks, and compute_loss_func gets labels that are not "
            "shifted across them, so targets would be lost or wrong; call deftune.token_loss with the Trainer's "
            f"shift_labels in a compute_loss of your own ({page('docs/other_trainers.md')}, Context parallel)"
        )
