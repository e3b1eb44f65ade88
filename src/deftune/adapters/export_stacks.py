"""A run as the files of each stack: every function writes them and returns the command that trains."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deftune.adapters.export_job import (
    Job,
    first_adapter,
    listed,
    permuted,
    token_columns,
    trainer_arguments,
    uses_bf16,
    uses_checkpointing,
    write_parquet,
)
from deftune.objectives import IGNORE_INDEX

# --- LLaMA-Factory ----------------------------------------------------------------------------------------------------


def export_llamafactory(job: Job) -> str:
    from datasets import Dataset, DatasetDict

    keys, prepared = job.keys, job.prepared
    sides = {"train": prepared.train.examples}
    if prepared.eval is not None:
        sides["validation"] = prepared.eval.examples
    tokens = job.out / "tokens"
    DatasetDict({name: Dataset.from_dict(token_columns(rows)) for name, rows in sides.items()}).save_to_disk(tokens)
    job.files.append(tokens)
    content: dict[str, Any] = {
        "deft_objective": prepared.config.objective,
        "model_name_or_path": job.model,
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset": "deftune",  # a name must be given; the rows come from tokenized_path
        "tokenized_path": str(tokens),
        "template": "empty",
        "cutoff_len": prepared.config.data.max_length,
        "disable_gradient_checkpointing": not uses_checkpointing(job),
        "bf16": uses_bf16(job),
        "plot_loss": False,
        **trainer_arguments(job),
    }
    if prepared.eval is not None:
        content |= {"do_eval": True, "eval_dataset": "deftune"}
    if (revision := keys.take("model.revision")) is not None:
        content["model_revision"] = revision
    if keys.take("model.trust_remote_code"):
        content["trust_remote_code"] = True
    if (start := first_adapter(job)) is not None:
        lora, adapter = start
        modules = lora.target_modules
        content |= {
            "finetuning_type": "lora", "adapter_name_or_path": adapter, "lora_rank": lora.r, "lora_alpha": lora.alpha,
            "lora_dropout": lora.dropout,
            "lora_target": "all" if modules == "all-linear" else ",".join(listed(modules)),
        }  # fmt: skip
    path = job.write_yaml("llamafactory.yaml", content)
    launcher = f"FORCE_TORCHRUN=1 NPROC_PER_NODE={job.ranks} " if job.ranks > 1 else ""
    return f"{launcher}deftune-llamafactory train {shlex.quote(str(path))}"


# --- axolotl ----------------------------------------------------------------------------------------------------------


def export_axolotl(job: Job) -> str:
    keys, prepared = job.keys, job.prepared
    arguments = trainer_arguments(job)
    if arguments["warmup_steps"] == 1:
        keys.problems.append("train.warmup_ratio: one step of warm-up; axolotl takes two instead; use none, or two")
    bf16 = uses_bf16(job)
    if bf16:
        keys.notes.append(
            "train.precision: axolotl holds the weights in bfloat16; `deftune train` computes in bfloat16 over float32 "
            "weights"
        )
    renamed = {
        "per_device_train_batch_size": "micro_batch_size", "per_device_eval_batch_size": "eval_batch_size",
        "num_train_epochs": "num_epochs", "lr_scheduler_type": "lr_scheduler", "optim": "optimizer",
    }  # fmt: skip
    other = ("data_seed", "report_to", "fsdp", "fsdp_config")  # axolotl has no such key, or other values of it
    content: dict[str, Any] = {
        "plugins": ["deftune.adapters.axolotl.DeftPlugin"],
        "deft_objective": prepared.config.objective,
        "base_model": job.model,
        "datasets": [axolotl_rows(job, "train", prepared.train.examples)],
        "dataset_prepared_path": str(job.out / "prepared"),
        "shuffle_merged_datasets": False,
        "sequence_len": prepared.config.data.max_length,
        "sample_packing": False,
        "pad_to_sequence_len": False,
        "val_set_size": 0,
        "special_tokens": {"pad_token": prepared.tokenizer.pad_token},
        "attn_implementation": "sdpa",
        "gradient_checkpointing": uses_checkpointing(job),
        "bf16": bf16,
        "fp16": False,
        "tf32": False,
        **{renamed.get(name, name): value for name, value in arguments.items() if name not in other},
    }
    if prepared.eval is not None:
        content["test_datasets"] = [axolotl_rows(job, "eval", prepared.eval.examples)]
        if "eval_steps" not in arguments:
            content["eval_strategy"] = "no"
            keys.notes.append("data.eval: axolotl evaluates during training only; --set train.eval_steps=N")
    if (revision := keys.take("model.revision")) is not None:
        content["revision_of_model"] = revision
    if keys.take("model.trust_remote_code"):
        content["trust_remote_code"] = True
    trackers = prepared.config.train.report_to
    content |= {f"use_{name}": True for name in trackers}
    if "fsdp" in arguments:
        content |= {
            "fsdp_version": 2,
            "fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True,
                            "state_dict_type": "FULL_STATE_DICT"},
        }  # fmt: skip
    if (start := first_adapter(job)) is not None:
        lora, content["lora_model_dir"] = start
        content |= {"adapter": "lora", "lora_r": lora.r, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout}
        if lora.target_modules == "all-linear":
            content["lora_target_linear"] = True
        else:
            modules = lora.target_modules
            content["lora_target_modules"] = listed(modules)
    path = job.write_yaml("axolotl.yaml", content)
    launcher = f" --launcher torchrun -- --nproc_per_node={job.ranks}" if job.ranks > 1 else ""
    return f"axolotl train {shlex.quote(str(path))}{launcher}"


def axolotl_rows(job: Job, name: str, examples: Sequence[Any]) -> dict[str, Any]:
    path = write_parquet(job.out / f"{name}.parquet", token_columns(examples))
    job.files.append(path)
    # rows with input_ids, attention_mask and labels are taken as they are, whatever the type
    return {"path": str(path), "ds_type": "parquet", "type": "completion", "split": "train"}


# --- ms-swift ---------------------------------------------------------------------------------------------------------


def export_swift(job: Job) -> str:
    keys, prepared = job.keys, job.prepared
    arguments = trainer_arguments(job)
    if "fsdp" in arguments:
        del arguments["fsdp_config"]
        arguments["fsdp"] = "fsdp2"
    content: dict[str, Any] = {
        "loss_type": "deft",
        "ENV": {"DEFTUNE_OBJECTIVE": prepared.config.objective},
        "model": job.model,
        "template": "deft_tokens",
        "tuner_type": "full",
        "torch_dtype": "float32",
        "bf16": uses_bf16(job),
        "fp16": False,
        "attn_impl": "sdpa",
        "cached_dataset": [swift_rows(job, "train", prepared.train.examples)],
        "max_length": prepared.config.data.max_length,
        "truncation_strategy": "right",
        "strict": True,
        "split_dataset_ratio": 0.0,
        "add_version": False,
        "gradient_checkpointing": uses_checkpointing(job),
        **arguments,
    }
    if os.path.isdir(job.model):  # ms-swift knows hub ids by name; a folder may fit several of its types
        content["model_type"] = json.loads(Path(job.model, "config.json").read_text("utf-8"))["model_type"]
        content["check_model"] = False
    else:
        content["use_hf"] = True
    if prepared.eval is not None:
        content["cached_val_dataset"] = [swift_rows(job, "eval", prepared.eval.examples)]
    if "eval_strategy" not in arguments:
        content["eval_strategy"] = "no"
        if prepared.eval is not None:
            keys.notes.append("data.eval: ms-swift evaluates during training only; --set train.eval_steps=N")
    if (revision := keys.take("model.revision")) is not None:
        content["model_revision"] = revision
    keys.refuse("model.trust_remote_code", "ms-swift runs a model's code without asking; leave the key out")
    if (start := first_adapter(job)) is not None:
        lora, adapter = start
        modules = lora.target_modules
        content |= {"tuner_type": "lora", "adapters": [adapter], "lora_rank": lora.r, "lora_alpha": lora.alpha,
                    "lora_dropout": lora.dropout, "target_modules": listed(modules)}  # fmt: skip
    path = job.write_yaml("swift.yaml", content)
    launcher = f"NPROC_PER_NODE={job.ranks} " if job.ranks > 1 else ""
    return f"{launcher}swift sft {shlex.quote(str(path))} --external_plugins $(python -m deftune.adapters.swift)"


def swift_rows(job: Job, name: str, examples: Sequence[Any]) -> str:
    from datasets import Dataset

    columns = token_columns(examples)
    folder = job.out / name
    # ms-swift wants messages, which the template of these rows does not read
    messages = [{"role": "user", "content": "tokens"}, {"role": "assistant", "content": "tokens"}]
    rows = {
        "messages": [messages] * len(examples),
        "deft_input_ids": columns["input_ids"],
        "deft_labels": columns["labels"],
        "lengths": [len(ids) for ids in columns["input_ids"]],
    }
    Dataset.from_dict(rows).save_to_disk(folder)
    job.files.append(folder)
    return str(folder)


# --- verl -------------------------------------------------------------------------------------------------------------


def export_verl(job: Job) -> str:
    keys, prepared = job.keys, job.prepared
    take, config = keys.take, prepared.config
    train, steps, rows = config.train, prepared.steps, len(prepared.train.examples)
    per_epoch = rows // take("train.batch_size")
    if per_epoch == 0:
        keys.problems.append(
            f"train.batch_size: {train.batch_size} is more than the {rows} rows; verl drops a batch that is not full"
        )
    elif per_epoch * train.batch_size < rows and steps > per_epoch:
        steps = min(steps, max(1, round(per_epoch * train.epochs)))
        keys.notes.append(
            f"train.batch_size: verl drops the last {rows % train.batch_size} rows of an epoch, which do not fill a "
            f"batch: {steps} steps instead of {prepared.steps}"
        )
    epochs = -(-steps // max(1, per_epoch))
    if epochs > 1:
        keys.notes.append("train.seed: verl draws the order of rows with its own seed after the first epoch")
    if take("train.schedule") == "linear":
        keys.problems.append("train.schedule: verl has cosine and constant; use one of them")
    if config.train.clip == 0:
        keys.problems.append("train.clip: verl clips always; give a largest norm")
    keys.refuse("model.revision", "verl loads the newest revision; download this one, and name its folder")
    if take("train.compile") not in (False, "auto"):
        keys.problems.append("train.compile: verl does not compile the model; leave it out")
    take("train.fsdp")  # verl always shards
    take("train.epochs")
    take("train.max_steps")
    trackers = list(take("train.report_to"))
    if "trackio" in trackers:
        keys.problems.append("train.report_to: verl has no trackio; use wandb or tensorboard")
    precision = "bf16" if uses_bf16(job) else "fp32"
    model: dict[str, Any] = {
        "path": job.model,
        "trust_remote_code": take("model.trust_remote_code"),
        "enable_gradient_checkpointing": uses_checkpointing(job),
        "use_remove_padding": False,
        "override_config": {"attn_implementation": "sdpa"},
    }
    if (start := first_adapter(job)) is not None:
        lora, model["lora_adapter_path"] = start
        model |= {"lora_rank": lora.r, "lora_alpha": lora.alpha, "target_modules": lora.target_modules}
    data: dict[str, Any] = {
        "train_files": str(verl_rows(job, "train", permuted(prepared.train.examples, train.seed))),
        "val_files": None,
        "custom_cls": {"path": "pkg://deftune.adapters.verl_rows", "name": "TokenRows"},
        "train_batch_size": train.batch_size,
        "micro_batch_size_per_gpu": take("train.micro_batch_size"),
        "use_dynamic_bsz": False,
        "max_length": config.data.max_length,
        "truncation": "error",
        "pad_mode": "no_padding",
        "num_workers": take("train.workers"),
    }
    held = 0 if prepared.eval is None else len(prepared.eval.examples)
    if held % train.batch_size:
        keys.notes.append(f"data.eval: verl leaves out the last {held % train.batch_size} rows: not a whole batch")
    if prepared.eval is not None and held >= train.batch_size:
        data["val_files"] = str(verl_rows(job, "eval", prepared.eval.examples))
    seed = take("train.seed")
    if train.weight_decay and start is None:
        keys.notes.append("train.weight_decay: verl decays all weights; `deftune train` leaves out norms and biases")
    content: dict[str, Any] = {
        "defaults": ["sft_trainer_engine", "_self_"],
        "hydra": {"searchpath": ["pkg://verl.trainer.config"]},
        "deft": {"objective": config.objective, "ray": False},
        "data": data,
        "model": model,
        "engine": {
            "strategy": "fsdp2",
            "model_dtype": "fp32",
            "mixed_precision": {"param_dtype": precision, "reduce_dtype": "fp32"},
            "use_torch_compile": False,
            "seed": seed,
        },
        "optim": {
            "lr": take("train.learning_rate"),
            "lr_scheduler_type": train.schedule,
            "lr_warmup_steps": job.warmup_steps,
            "lr_warmup_steps_ratio": 0.0,
            "min_lr_ratio": 0.0,
            "weight_decay": take("train.weight_decay"),
            "betas": list(take("train.betas")),
            "clip_grad": take("train.clip"),
        },
        "trainer": {
            "total_epochs": epochs,
            "total_training_steps": steps,
            "seed": seed,
            "save_freq": take("train.save_steps"),
            "max_ckpt_to_keep": take("train.keep"),
            "test_freq": take("train.eval_steps") or -1,
            "logger": ["console", *trackers],
            "project_name": "deftune",
            "experiment_name": Path(config.run).name,
            "default_local_dir": job.result,
            "n_gpus_per_node": job.ranks,
        },
    }
    path = job.write_yaml("verl.yaml", content)
    folder = shlex.quote(str(path.parent.absolute()))
    return (
        f"torchrun --standalone --nproc_per_node={job.ranks} -m deftune.adapters.verl --config-path {folder} "
        f"--config-name {path.stem}"
    )


def verl_rows(job: Job, name: str, examples: Sequence[Any]) -> Path:
    masks = [[int(label != IGNORE_INDEX) for label in example.labels] for example in examples]
    columns = {"input_ids": [list(example.input_ids) for example in examples], "loss_mask": masks}
    path = write_parquet(job.out / f"{name}.parquet", columns)
    job.files.append(path)
    return path


STACKS: dict[str, Callable[[Job], str]] = {
    "verl": export_verl,
    "axolotl": export_axolotl,
    "llamafactory": export_llamafactory,
    "swift": export_swift,
}
