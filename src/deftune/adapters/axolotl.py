"""axolotl with an objective: ``plugins: [deftune.adapters.axolotl.DeftPlugin]`` and ``deft_objective: deft``."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false
from __future__ import annotations

from typing import Any

from pydantic import BaseModel, model_validator

from deftune.adapters.check import TrainerLoss, parse_supported
from deftune.adapters.versions import need_version

need_version("axolotl")
from axolotl.integrations.base import BasePlugin  # noqa: E402

STACK = "axolotl"
# options under which axolotl runs another loss, or shows the loss a part of a row
REFUSED = ("use_dft", "use_eaft", "orpo_alpha", "kd_trainer", "rl", "reward_model", "process_reward_model",
           "cut_cross_entropy", "chunked_cross_entropy", "liger_cross_entropy", "liger_fused_linear_cross_entropy",
           "liger_use_token_scaling")  # fmt: skip
REFUSED_ABOVE_1 = ("context_parallel_size", "sequence_parallel_degree", "tensor_parallel_size")


class DeftArgs(BaseModel):
    """The plugin's key in axolotl's schema."""

    deft_objective: str | None = None

    @model_validator(mode="before")
    @classmethod
    def check_deft_objective(cls, data: Any) -> Any:
        """Refuse a missing or wrong objective, and options that would replace it."""
        spec = data.get("deft_objective")
        if spec is None:
            raise ValueError(f"{STACK}: DeftPlugin needs deft_objective; add deft_objective: deft, or drop the plugin")
        parse_supported(STACK, spec)
        for name in (*REFUSED, *REFUSED_ABOVE_1):
            value = data.get(name)
            if value and (name in REFUSED or value > 1):
                raise ValueError(f"{STACK}: {name}={value} cannot be combined with deft_objective; leave it out")
        return data


class DeftPlugin(BasePlugin):
    """Trains the objective that ``deft_objective`` names."""

    def get_input_args(self) -> str:
        return f"{DeftArgs.__module__}.{DeftArgs.__name__}"

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        return {"average_tokens_across_devices": True}  # axolotl divides each rank's sum by the tokens of that rank

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        TrainerLoss(
            STACK, trainer, cfg.deft_objective, trainer.processing_class, end_tokens=cfg.eot_tokens or (),
            suspects={f"the plugin {name}": not name.endswith(".DeftPlugin") for name in cfg.plugins},
        )  # fmt: skip
