"""What this machine can run: the ranks of a run, its precision, and the configs that are refused here."""

from __future__ import annotations

import gc
import importlib.util
import os
from typing import Any, Literal

import torch
import torch.distributed as dist

from deftune.artifacts.config import ConfigError, RunConfig
from deftune.artifacts.models import check_bitsandbytes, quantized_dtype
from deftune.data.parallel import num_cores
from deftune.training.attention import VARLEN, auto_precision, why_no_varlen_kernel
from deftune.training.compiling import why_no_compiler
from deftune.training.trackers import check_trackers

EARNS_COMPILING = 300  # micro-batches: compiling takes 10 to 15 s, and saves 0.06 to 0.1 s of each (8k to 32k tokens)
FLASH = ("flash_attn", "flash_attn_interface", "kernels")  # packages with transformers' flash attention, any of them
MOST_WORKERS = 16  # data workers of a machine with few cores; with more, four for each


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def tensor_ranks(config: RunConfig) -> int:
    """How many ranks share the layers of the model; a single process holds them all."""
    return config.train.tensor_parallel if world_size() > 1 else 1


def data_ranks(config: RunConfig) -> int:
    """How many ranks have rows of their own; those that share a model have the same rows."""
    return world_size() // tensor_ranks(config)


def is_main() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def has_ranks() -> bool:
    """Whether torch.distributed runs, with several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def from_main(value: Any) -> Any:
    """The value that rank 0 has; every rank calls this once torch.distributed runs."""
    if not has_ranks():
        return value
    holder = [value]
    dist.broadcast_object_list(holder, src=0)
    return holder[0]


def leave_ranks() -> None:
    """Leave the process group and end its threads before exit.

    A thread of gloo that still holds a tensor while Python exits may abort the process. The threads end with the last
    reference to the group, and the trainer's model, which is part of a cycle, has one.
    """
    if dist.is_available() and dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


# --- precision --------------------------------------------------------------------------------------------------------


def precision_of(config: RunConfig) -> str:
    """auto: bfloat16 compute where the GPU has it, float32 elsewhere."""
    if config.train.precision != "auto":
        return config.train.precision
    return auto_precision()


def base_dtype(config: RunConfig) -> Literal["float32", "bfloat16"]:
    """The dtype in which the model is loaded; auto is bfloat16 for the frozen weights of a LoRA run on a GPU.

    With 4-bit layers this is the dtype of what is not quantised, and of the computation in the layers.
    """
    if config.model.quantization is not None:
        return quantized_dtype(config.model)
    if config.model.dtype != "auto":
        return config.model.dtype
    frozen = config.model.lora is not None and not config.train.fsdp
    return "bfloat16" if frozen and torch.cuda.is_available() and precision_of(config) == "bf16" else "float32"


def weights_of(config: RunConfig) -> str:
    """auto: bfloat16 with float32 masters for full fine-tuning with AdamW in bfloat16 on one GPU, else float32."""
    train, model = config.train, config.model
    if train.weights != "auto":
        return train.weights
    whole = model.lora is None and model.quantization is None and base_dtype(config) == "float32"
    alone = world_size() == 1 and not train.fsdp and train.tensor_parallel == 1
    on_gpu = torch.cuda.is_available() and precision_of(config) == "bf16"
    return "bfloat16_with_masters" if whole and alone and on_gpu and train.optimizer == "adamw" else "float32"


def earns_compiling(config: RunConfig, micro_batches: int) -> bool:
    """Whether compiled layers were measured for such runs, and the run is long enough to earn back their seconds.

    They were measured in full fine-tuning on one GPU, with bfloat16 weights and without Liger's layers.
    """
    long = config.train.compile == "layers" or micro_batches >= EARNS_COMPILING
    return long and weights_of(config) != "float32" and not config.train.liger


def expects_compiled(config: RunConfig, micro_batches: int) -> bool:
    """Whether a run will compile its layers, as far as its config and the machine tell: the model may still refuse."""
    train = config.train
    asked = train.compile in ("auto", "layers") and train.attention in ("auto", VARLEN)
    able = why_no_varlen_kernel() is None and why_no_compiler() is None
    return asked and able and earns_compiling(config, micro_batches)


def base_name(config: RunConfig) -> str:
    """The frozen weights in words: float32, bfloat16, or 4-bit and bfloat16."""
    return ("4-bit and " if config.model.quantization else "") + base_dtype(config)


# --- what cannot run here ---------------------------------------------------------------------------------------------


def can_shard() -> bool:
    """Whether accelerate would heed fsdp: without GPUs it runs DDP and says nothing."""
    return torch.accelerator.is_available()


def check_token() -> None:
    """Refuse an upload that would fail after training."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise ConfigError(
            "train.push_to_hub: this machine has no token of the hub, so that the upload would fail after training; "
            "log in with `hf auth login`, or set HF_TOKEN"
        )


def check_config(config: RunConfig) -> None:
    """Refuse a config that this machine cannot run."""
    train, ranks, with_rows = config.train, world_size(), data_ranks(config)
    if ranks > 1 and train.tensor_parallel not in (1, ranks):
        raise ConfigError(
            f"train.tensor_parallel: {train.tensor_parallel} ranks share the model, and torchrun started {ranks}; "
            f"start as many, or one"
        )
    if train.batch_size % (train.micro_batch_size * with_rows):
        raise ConfigError(
            f"train.batch_size: {train.batch_size} rows a step cannot be {with_rows} ranks x {train.micro_batch_size} "
            f"rows x a whole number; change batch_size or micro_batch_size"
        )
    cores, here = num_cores(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if train.workers * here > max(MOST_WORKERS, 4 * cores):
        raise ConfigError(
            f"train.workers: {train.workers} processes for each of {here} rank{'s' * (here > 1)} are too many for "
            f"{cores} cores; at most {max(MOST_WORKERS, 4 * cores) // here}"
        )
    check_trackers(train.report_to)
    if train.push_to_hub:
        check_token()
    if config.model.lora is not None and importlib.util.find_spec("peft") is None:
        raise ConfigError("model.lora: peft is not installed; pip install peft")
    if config.model.attention_implementation.startswith("flash") and not torch.cuda.is_available():
        raise ConfigError("model.attention_implementation: flash attention needs a GPU; leave it out")
    if config.model.attention_implementation.startswith("flash") and not any(map(importlib.util.find_spec, FLASH)):
        raise ConfigError(
            "model.attention_implementation: neither flash-attn nor kernels is installed; pip install one of them, or "
            "leave it out: train.attention has torch's own flash kernels"
        )
    if train.liger and importlib.util.find_spec("liger_kernel") is None:
        raise ConfigError("train.liger: liger-kernel is not installed; pip install liger-kernel")
    if train.liger and not torch.cuda.is_available():
        raise ConfigError("train.liger: Liger's kernels need a GPU; leave it out")
    if train.optimizer == "adamw_8bit":
        check_bitsandbytes("train.optimizer")
        if not torch.cuda.is_available():
            raise ConfigError("train.optimizer: adamw_8bit needs a GPU; use adamw, or adafactor to save memory")
    if train.optimizer == "muon" and not hasattr(torch.optim, "Muon"):
        raise ConfigError(f"train.optimizer: torch {torch.__version__} has no Muon; take torch 2.9 or newer, or adamw")
    if config.model.quantization is not None:
        check_bitsandbytes("model.quantization")
    if train.weights == "bfloat16_with_masters" and ranks > 1:
        raise ConfigError(f"train.weights: {train.weights} was not tested with several ranks; leave it out")
    if train.weights == "bfloat16_with_masters" and precision_of(config) != "bf16":
        raise ConfigError(f"train.weights: {train.weights} computes in bfloat16; set train.precision=bf16")
    if train.precision == "bf16" and torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
        raise ConfigError("train.precision: this GPU has no bfloat16; use fp32")
    if base_dtype(config) == "bfloat16" and torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
        raise ConfigError("model.dtype: this GPU has no bfloat16; use float32")
    if train.fsdp and ranks > 1 and not can_shard():
        raise ConfigError("train.fsdp: accelerate shards over GPUs only and would run DDP here; leave it out")
    if tensor_ranks(config) > 1 and not can_shard():
        raise ConfigError("train.tensor_parallel: accelerate divides models among GPUs only; leave it out")
    if train.shard_size is not None and ranks > 1 and ranks % train.shard_size:
        raise ConfigError(
            f"train.shard_size: {ranks} ranks cannot be divided into groups of {train.shard_size}; use a divisor, or "
            f"leave it out"
        )
