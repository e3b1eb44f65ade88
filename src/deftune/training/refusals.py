"""What `DeftSFTTrainer` refuses: options that it could not honour, and models that it cannot train."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import torch

from deftune.objectives import Objective
from deftune.tokens.head import base_of
from deftune.training.optimizers import FLOAT32, WITH_MASTERS


def check_arguments(objective: Objective, args: Any, extra: dict[str, Any]) -> None:
    """Refuse what would be ignored, before anything is loaded."""
    refuse = partial(_refuse, objective)
    if extra.get("compute_loss_func") is not None:
        refuse("compute_loss_func", "the objective is the loss; drop one of the two")
    for name in ("compute_metrics", "preprocess_logits_for_metrics"):
        if extra.get(name) is not None:
            refuse(name, "the fused head makes no logits; evaluation reports eval_loss, eval_nll and eval_p by itself")
    if extra.get("quantization_config") is not None and extra.get("peft_config") is None:
        refuse("quantization_config", "quantised weights cannot be trained; pass a LoRA peft_config, or leave it out")
    if args is None:
        return
    if getattr(args, "loss_type", "nll") != "nll":
        refuse(f"loss_type={args.loss_type!r}", "name it as the objective instead, e.g. objective='dft'")
    if getattr(args, "label_smoothing_factor", 0):
        refuse("label_smoothing_factor", "a smoothed target is not gate x error; set it to 0")
    if getattr(args, "use_liger_kernel", False):
        config = getattr(args, "liger_kernel_config", None) or {}
        if config.get("fused_linear_cross_entropy", False) or config.get("cross_entropy", False):
            refuse("Liger's cross-entropy", "it would compute plain NLL; leave Liger its layer kernels only")
    if not getattr(args, "average_tokens_across_devices", True):
        refuse("average_tokens_across_devices=False", "ranks with few tokens would weigh as much as full ones")
    if getattr(args, "activation_offloading", False) and not torch.accelerator.is_available():
        refuse("activation_offloading", "it moves activations from a GPU to the CPU, and there is no GPU; leave it out")
    if getattr(args, "deepspeed", None) is not None:
        refuse(
            "DeepSpeed",
            "DeepSpeed updates the weights inside the backward pass, before a gradient can be checked or rescaled, and "
            "ZeRO-3 leaves the head without its weight; use FSDP2 or DDP, or deftune.hf_loss in transformers' Trainer",
        )
    if getattr(args, "n_gpu", 1) > 1:
        refuse("DataParallel", "a process with several GPUs would average unequal shares; start with torchrun")
    check_parallelism(objective, getattr(args, "parallelism_config", None))


def check_parallelism(objective: Objective, parallel: Any) -> None:
    """Refuse ranks that divide the sequences among them; ``parallel`` is accelerate's parallelism config, or None."""
    for name in ("sp", "cp"):
        if getattr(parallel, f"{name}_enabled", False):
            _refuse(objective, f"{name} parallelism", "a rank would see part of a row; use FSDP2 or DDP")


def _refuse(objective: Objective, what: str, why: str) -> NoReturn:
    raise ValueError(f"DeftSFTTrainer: {what} cannot be combined with objective={str(objective)!r}: {why}")


def check_divided(model: Any, objective: Objective, parallel: Any, adapter: Any = None) -> None:
    """Refuse what tensor-parallel ranks, which share the layers of a model and have the same rows, do not train."""
    divided = (getattr(model, "tp_size", None) or 1) > 1
    if not divided and not getattr(parallel, "tp_enabled", False):
        return
    if objective.kind != "local":
        raise ValueError(
            f"DeftSFTTrainer: {str(objective)!r} sums over the rows of all ranks, and tensor-parallel ranks have the "
            f"same rows; use FSDP2 or DDP"
        )
    if not divided or adapter is not None or not hasattr(model.get_output_embeddings().weight, "full_tensor"):
        raise ValueError(
            "DeftSFTTrainer: tensor parallelism needs a model that transformers divided together with its head, "
            "from_pretrained(..., distributed_config=DistributedConfig(tp_size=N)), and no adapter"
        )


def check_model(model: Any, router_loss: bool, objective: Objective) -> None:
    """Refuse what only the loaded model shows."""
    name = type(base_of(model)).__name__
    if router_loss:
        raise ValueError(
            f"DeftSFTTrainer: {name} has a router loss, which objective={str(objective)!r} would leave out; set "
            f"router_aux_loss_coef=0.0 to train without it"
        )
    base, peft = base_of(model), getattr(model, "active_peft_config", None)
    if getattr(base, "is_quantized", False) and (peft is None or not getattr(base, "is_loaded_in_4bit", False)):
        raise ValueError(
            f"DeftSFTTrainer: {name} is quantised; load the original weights, or 4-bit ones (bitsandbytes) under LoRA"
        )
    if peft is not None and peft.is_prompt_learning:
        raise ValueError(
            f"DeftSFTTrainer: {type(peft).__name__} puts virtual tokens before the row, which moves its labels; use "
            f"LoRA or another adapter inside the layers"
        )


def check_masters(weights: str, trainer: Any) -> None:
    """Refuse bfloat16 weights with masters where they were not tested."""
    if weights != WITH_MASTERS:
        raise ValueError(f"DeftSFTTrainer: weights={weights!r} is unknown; one of {FLOAT32}, {WITH_MASTERS}")
    base, args = base_of(trainer.model), trainer.args
    optim = str(getattr(args.optim, "value", args.optim))
    reasons = {
        "several processes": trainer.accelerator.num_processes > 1 or trainer.is_fsdp_enabled,
        "LoRA": base is not trainer.model,
        "a quantised model": getattr(base, "is_quantized", False),
        "weights that are not float32": any(p.dtype != torch.float32 for p in base.parameters()),
        f"optim={optim!r}": optim not in ("adamw_torch", "adamw_torch_fused"),
        "an optimizer of your own": trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None,
        "bf16=False in args": trainer.accelerator.mixed_precision != "bf16",
    }
    for what, given in reasons.items():
        if given:
            raise ValueError(f"DeftSFTTrainer: weights={weights!r} was not tested with {what}; drop one of the two")
