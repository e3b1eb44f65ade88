"""The plugin of ms-swift: it registers ``--loss_type deft``; $DEFTUNE_OBJECTIVE holds the spec (default: deft).

It also registers ``--template deft_tokens``, for the rows of `deftune export swift`, which are tokens already.
"""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false
from __future__ import annotations

import os
from typing import Any

from deftune.adapters.check import TrainerLoss
from deftune.adapters.versions import need_version

need_version("ms-swift")
from swift.loss import loss_map  # noqa: E402
from swift.template import Template, TemplateMeta, register_template  # noqa: E402

STACK = "ms-swift"


def deft_loss(args: Any, trainer: Any) -> TrainerLoss:
    """The objective as the loss of ms-swift's SFT trainer; ``--loss_scale`` weighs its tokens.

    Raises:
        ValueError: an option of ms-swift would replace the loss, or show it a part of a row.
    """
    template, model_info = getattr(trainer, "template", None), getattr(trainer, "model_info", None)
    refused = {
        "Megatron": any(cls.__name__ == "BaseMegatronTrainer" for cls in type(trainer).__mro__),
        "a task that is not causal_lm": getattr(trainer, "task_type", "causal_lm") != "causal_lm",
        "sequence_parallel_size > 1": getattr(template, "sequence_parallel_size", 1) > 1,
        "enable_dft_loss (it is the objective dft)": getattr(args, "enable_dft_loss", False),
        "router_aux_loss_coef > 0": getattr(model_info, "is_moe_model", False) and args.router_aux_loss_coef > 0,
    }
    for what, found in refused.items():
        if found:
            raise ValueError(f"{STACK}: {what} cannot be combined with --loss_type deft; turn it off")
    meta = trainer.template.template_meta
    return TrainerLoss(
        STACK, trainer, os.environ.get("DEFTUNE_OBJECTIVE", "deft"), trainer.template.tokenizer,
        end_tokens=[word for word in meta.stop_words if isinstance(word, str)],
        suspects={"unsloth": args.tuner_backend == "unsloth"},
    )  # fmt: skip


loss_map["deft"] = deft_loss


class TokenTemplate(Template):
    """Takes a row's columns ``deft_input_ids`` and ``deft_labels`` in place of its messages."""

    def _encode(self, inputs: Any) -> dict[str, Any]:
        row = inputs.extra_kwargs
        return {"input_ids": list(row["deft_input_ids"]), "labels": list(row["deft_labels"]), "loss_scale": None}


register_template(
    TemplateMeta("deft_tokens", prefix=[], prompt=["{{QUERY}}"], chat_sep=None, suffix=[], template_cls=TokenTemplate),
    exist_ok=True,
)
