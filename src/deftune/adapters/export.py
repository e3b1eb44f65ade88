"""`deftune export`: a run as the config and data files of another training stack.

The rows are exported as tokens and labels, so that every stack trains on what `deftune train` would train on. A key of
the run that a stack cannot honour is an error, or a note that says what differs; none is left out unnoticed.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from deftune.artifacts.config import ConfigError, Lora, Model, RunConfig, Train
from deftune.objectives import IGNORE_INDEX
from deftune.objectives import objective as parse_objective
from deftune.objectives.suggest import did_you_mean
from deftune.training.preparation import Prepared, facts, prepare


@dataclass(frozen=True)
class Exported:
    """What was written, the command that trains it, and what differs from `deftune train`."""

    stack: str
    files: list[Path]
    command: str
    notes: list[str] = field(default_factory=list[str])


class Keys:
    """The values of a run's config, which remember what was asked for: a value that nobody asked for is an error."""

    def __init__(self, config: RunConfig, stack: str):
        self.stack = stack
        self.values: dict[str, Any] = {"run": config.run, "objective": config.objective}
        self.defaults: dict[str, Any] = {}
        for section, cls in (("model", Model), ("train", Train)):
            for name, info in cls.model_fields.items():
                self.values[f"{section}.{name}"] = getattr(getattr(config, section), name)
                default = info.get_default(call_default_factory=True) if not info.is_required() else None
                self.defaults[f"{section}.{name}"] = default
        self.values |= {f"data.{name}": getattr(config.data, name) for name in ("tasks", "packing", "end_tokens")}
        self.defaults |= {"data.tasks": [], "data.packing": False, "data.end_tokens": []}
        self.left = set(self.values)
        self.notes: list[str] = []
        self.problems: list[str] = []

    def take(self, name: str) -> Any:
        """The value of a key that the stack honours."""
        self.left.discard(name)
        return self.values[name]

    def note(self, name: str, text: str) -> None:
        """The key is left out, and a note says so where its value is not the default."""
        if self.take(name) != self.defaults.get(name):
            self.notes.append(f"{name}: {text}")

    def refuse(self, name: str, text: str) -> None:
        """The key is an error where its value is not the default."""
        if self.take(name) != self.defaults.get(name):
            self.problems.append(f"{name}: {text}")

    def check(self) -> None:
        """Raise every problem at once.

        Raises:
            ConfigError: keys that were refused, and keys that nobody took.
        """
        untaken = sorted(name for name in self.left if self.values[name] != self.defaults.get(name))
        problems = [*self.problems, *(f"{name}: {self.stack} has no counterpart; leave it out" for name in untaken)]
        if problems:
            raise ConfigError("\n".join(f"export {self.stack}: {problem}" for problem in problems))


@dataclass
class Job:
    """An export that is under way."""

    keys: Keys
    prepared: Prepared
    out: Path
    ranks: int
    files: list[Path] = field(default_factory=list[Path])

    @property
    def accumulation(self) -> int:
        train = self.prepared.config.train
        return train.batch_size // (train.micro_batch_size * self.ranks)

    @property
    def warmup_steps(self) -> int:
        return round(self.keys.take("train.warmup_ratio") * self.prepared.steps)

    @property
    def result(self) -> str:
        """The stack's output folder: not the run's own, which `deftune train` may be writing."""
        self.keys.take("run")
        return str(self.out / "result")

    def write_yaml(self, name: str, content: dict[str, Any]) -> Path:
        path = self.out / name
        config = self.prepared.config
        header = f"# deftune export {self.keys.stack}: {shown(config.objective)} on {config.model.name}\n"
        path.write_text(header + yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
        self.files.append(path)
        return path


def shown(spec: str) -> str:
    return f"`{spec}`"


# --- the rows ---------------------------------------------------------------------------------------------------------


def token_columns(examples: Sequence[Any]) -> dict[str, list[list[int]]]:
    """Rows as the columns that stacks on transformers take: input_ids, attention_mask, labels."""
    return {
        "input_ids": [list(example.input_ids) for example in examples],
        "attention_mask": [[1] * len(example.input_ids) for example in examples],
        "labels": [list(example.labels) for example in examples],
    }


def write_parquet(path: Path, columns: dict[str, Any]) -> Path:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def permuted(examples: Sequence[Any], seed: int) -> list[Any]:
    """The rows in places from which torch's DistributedSampler (seed 0) draws them in the run's first order.

    Both orders are torch.randperm: of ``seed`` in `deftune train`, of 0 in verl.
    """

    def order(seed: int) -> list[int]:
        return torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed)).tolist()

    places: list[Any] = [None] * len(examples)
    for place, row in zip(order(0), order(seed)):
        places[place] = examples[row]
    return places


# --- what the stacks on transformers' Trainer share -------------------------------------------------------------------


def uses_bf16(job: Job) -> bool:
    """auto is for the machine that trains, which is taken to have bfloat16."""
    precision = job.keys.take("train.precision")
    if precision == "auto":
        job.keys.notes.append(
            "train.precision: auto is written as bf16, for a GPU; --set train.precision=fp32 for none"
        )
    return precision != "fp32"


def check_common(job: Job) -> None:
    """What no stack but `deftune train` has."""
    keys, config = job.keys, job.prepared.config
    keys.refuse("data.packing", f"{keys.stack} packs rows in another way, so that steps would hold other rows; "
                "--set data.packing=false")  # fmt: skip
    keys.refuse("train.sparse", f"{keys.stack} has no sparse head gradients; leave it out")
    keys.refuse("train.best", f"{keys.stack} ends with the last step; --set train.best=none")
    keys.note("train.save_at", f"not exported; {keys.stack} saves every train.save_steps steps")
    keys.note("train.push_to_hub", "not exported; upload the result yourself")
    keys.note("train.attention", f"not exported; {keys.stack} lets torch choose among its attention kernels")
    keys.note("data.tasks", f"not exported; score the result with `deftune eval`: {keys.stack} trains only")
    needs_ends = "special_ids" in parse_objective(config.objective).requires
    if needs_ends and (config.data.template is not None or config.data.end_tokens):
        keys.problems.append(
            f"objective: {shown(config.objective)} takes its end tokens from data.template and data.end_tokens, which "
            f"{keys.stack} does not read; save them in the model's tokenizer, and leave them out of the run"
        )
    keys.take("data.end_tokens")
    if config.data.template is not None:
        keys.notes.append(
            f"data.template: its tokens are in the exported rows; {keys.stack} saves the model's own tokenizer, "
            f"without this template"
        )
    left = len(job.prepared.sequences) % (config.train.micro_batch_size * job.ranks)
    if job.ranks > 1 and left:
        keys.notes.append(
            f"the last step of an epoch: {keys.stack} fills its micro-batches up with rows of the epoch's beginning; "
            f"`deftune train` leaves those out of the loss"
        )
    keys.take("objective")
    keys.take("model.name")


def trainer_arguments(job: Job) -> dict[str, Any]:
    """The run as arguments of transformers' Trainer."""
    keys, prepared = job.keys, job.prepared
    take, train = keys.take, prepared.config.train
    schedule = {"constant": "constant_with_warmup"}.get(train.schedule, train.schedule)
    for name in ("batch_size", "schedule", "max_steps"):
        take(f"train.{name}")
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": take("train.micro_batch_size"),
        "per_device_eval_batch_size": train.micro_batch_size,
        "gradient_accumulation_steps": job.accumulation,
        "learning_rate": take("train.learning_rate"),
        "num_train_epochs": take("train.epochs"),
        "max_steps": prepared.steps,
        "lr_scheduler_type": schedule,
        "warmup_steps": job.warmup_steps,
        "optim": "adamw_torch_fused",
        "weight_decay": take("train.weight_decay"),
        "adam_beta1": take("train.betas")[0],
        "adam_beta2": train.betas[1],
        "max_grad_norm": take("train.clip"),
        "seed": take("train.seed"),
        "data_seed": train.seed,
        "torch_compile": take("train.compile"),
        "dataloader_num_workers": take("train.workers"),
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": take("train.save_steps"),
        "save_total_limit": take("train.keep"),
        "report_to": list(take("train.report_to")) or "none",
        "output_dir": job.result,
    }
    every = take("train.eval_steps")
    if prepared.eval is not None and every is not None:
        arguments |= {"eval_strategy": "steps", "eval_steps": every}
    if take("train.fsdp"):
        arguments |= {
            "fsdp": "full_shard auto_wrap",
            "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True},
        }
    return arguments


def note_lora(job: Job) -> Lora | None:
    lora: Lora | None = job.keys.take("model.lora")
    if lora is not None:
        job.keys.notes.append(
            f"model.lora: the adapter's random start is drawn by {job.keys.stack}; steps differ from `deftune train` "
            f"as those of another seed do"
        )
    return lora


def listed(modules: str | list[str]) -> list[str]:
    return [modules] if isinstance(modules, str) else modules


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
        "model_name_or_path": prepared.source,
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset": "deftune",  # a name must be given; the rows come from tokenized_path
        "tokenized_path": str(tokens),
        "template": "empty",
        "cutoff_len": prepared.config.data.max_length,
        "disable_gradient_checkpointing": not keys.take("train.gradient_checkpointing"),
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
    if (lora := note_lora(job)) is not None:
        modules = lora.target_modules
        content |= {
            "finetuning_type": "lora", "lora_rank": lora.r, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout,
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
        "micro_batch_size": "per_device_train_batch_size", "eval_batch_size": "per_device_eval_batch_size",
        "gradient_accumulation_steps": "gradient_accumulation_steps", "learning_rate": "learning_rate",
        "num_epochs": "num_train_epochs", "max_steps": "max_steps", "lr_scheduler": "lr_scheduler_type",
        "warmup_steps": "warmup_steps", "optimizer": "optim", "weight_decay": "weight_decay",
        "adam_beta1": "adam_beta1", "adam_beta2": "adam_beta2", "max_grad_norm": "max_grad_norm", "seed": "seed",
        "torch_compile": "torch_compile", "dataloader_num_workers": "dataloader_num_workers",
        "logging_steps": "logging_steps", "save_strategy": "save_strategy", "save_steps": "save_steps",
        "save_total_limit": "save_total_limit", "eval_strategy": "eval_strategy", "eval_steps": "eval_steps",
        "output_dir": "output_dir",
    }  # fmt: skip
    content: dict[str, Any] = {
        "plugins": ["deftune.adapters.axolotl.DeftPlugin"],
        "deft_objective": prepared.config.objective,
        "base_model": prepared.source,
        "datasets": [axolotl_rows(job, "train", prepared.train.examples)],
        "dataset_prepared_path": str(job.out / "prepared"),
        "shuffle_merged_datasets": False,
        "sequence_len": prepared.config.data.max_length,
        "sample_packing": False,
        "pad_to_sequence_len": False,
        "val_set_size": 0,
        "special_tokens": {"pad_token": prepared.tokenizer.pad_token},
        "attn_implementation": "sdpa",
        "gradient_checkpointing": keys.take("train.gradient_checkpointing"),
        "bf16": bf16,
        "fp16": False,
        "tf32": False,
        **{name: arguments[own] for name, own in renamed.items() if own in arguments},
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
    if (lora := note_lora(job)) is not None:
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
        "model": prepared.source,
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
        "gradient_checkpointing": keys.take("train.gradient_checkpointing"),
        **arguments,
    }
    if os.path.isdir(prepared.source):  # ms-swift knows hub ids by name; a folder may fit several of its types
        content["model_type"] = json.loads(Path(prepared.source, "config.json").read_text("utf-8"))["model_type"]
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
    if (lora := note_lora(job)) is not None:
        modules = lora.target_modules
        content |= {"tuner_type": "lora", "lora_rank": lora.r, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout,
                    "target_modules": listed(modules)}  # fmt: skip
    path = job.write_yaml("swift.yaml", content)
    launcher = f"NPROC_PER_NODE={job.ranks} " if job.ranks > 1 else ""
    return f"{launcher}swift sft {shlex.quote(str(path))} --external_plugins $(python -m deftune.adapters.swift)"


def swift_rows(job: Job, name: str, examples: Sequence[Any]) -> str:
    from datasets import Dataset

    columns = token_columns(examples)
    folder = job.out / name
    # ms-swift wants messages, which the template of these rows does not read
    said = [{"role": "user", "content": "tokens"}, {"role": "assistant", "content": "tokens"}]
    rows = {
        "messages": [said] * len(examples),
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
    keys.refuse("train.compile", "verl does not compile the model; leave it out")
    take("train.fsdp")  # verl always shards
    take("train.epochs")
    take("train.max_steps")
    trackers = list(take("train.report_to"))
    if "trackio" in trackers:
        keys.problems.append("train.report_to: verl has no trackio; use wandb or tensorboard")
    precision = "bf16" if uses_bf16(job) else "fp32"
    model: dict[str, Any] = {
        "path": prepared.source,
        "trust_remote_code": take("model.trust_remote_code"),
        "enable_gradient_checkpointing": take("train.gradient_checkpointing"),
        "use_remove_padding": False,
        "override_config": {"attn_implementation": "sdpa"},
    }
    if (lora := note_lora(job)) is not None:
        if lora.dropout:
            keys.problems.append("model.lora.dropout: verl has none; set it to 0")
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
    if train.weight_decay:
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


def export_run(
    config: RunConfig, stack: str, out: Path, *, ranks: int = 1, notice: Callable[[str], None] = lambda _: None
) -> Exported:
    """Write the files with which another stack trains the run: its config, and the rows as tokens and labels.

    Args:
        config: the run, as `deftune train` takes it.
        stack: a name of `STACKS`.
        out: a new folder.
        ranks: processes that will train; ``train.batch_size`` is divided among them.
        notice: gets a line about each thing that is read.

    Returns:
        The files, the command that trains them, and notes on what differs from `deftune train`.

    Raises:
        ConfigError: the stack cannot honour a key of the run, or the rows do not divide among the ranks.
        ValueError: an unknown stack, an objective that the stack cannot train, or a folder that has files in it.

    Example:
        ``export_run(load_config(Path("run.yaml")), "axolotl", Path("exported")).command``
    """
    if stack == "torchtitan":
        raise ValueError(
            "export torchtitan: its configs are Python modules, its models are its own definitions, and its loader "
            "packs rows into sequences, so that no file of it is the same run; docs/stacks/torchtitan.md has a config"
        )
    if stack not in STACKS:
        raise ValueError(f"export: unknown stack {stack!r}.{did_you_mean(stack, STACKS)} Known: {', '.join(STACKS)}")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"export: {out} is not empty; name another folder")
    objective = parse_objective(config.objective)
    if stack != "verl" and objective.kind != "local":
        raise ValueError(
            f"export {stack}: {shown(config.objective)} depends on the whole optimizer step, and the loss of a "
            f"micro-batch cannot see it; verl and `deftune train` can train it"
        )
    train = config.train
    if train.batch_size % (train.micro_batch_size * ranks):
        raise ConfigError(
            f"export: train.batch_size {train.batch_size} cannot be {ranks} ranks x {train.micro_batch_size} rows x a "
            f"whole number; change batch_size, micro_batch_size or --ranks"
        )
    out = out.absolute()
    prepared = prepare(config, notice, here=False)
    if not prepared.train.examples:
        raise ValueError("export: no row is left to train on; `deftune data preview` shows why")
    for line in facts(prepared)[:2]:
        notice(line)
    return export_prepared(prepared, stack, out, ranks)


def export_prepared(prepared: Prepared, stack: str, out: Path, ranks: int = 1) -> Exported:
    """`export_run` of data that is read already."""
    job = Job(Keys(prepared.config, stack), prepared, out, ranks)
    check_common(job)
    out.mkdir(parents=True, exist_ok=True)
    try:
        command = STACKS[stack](job)
        job.keys.check()
    except BaseException:
        remove_written(job)
        raise
    record = {"stack": stack, "command": command, "notes": job.keys.notes}
    (out / "export.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return Exported(stack, [*job.files, out / "export.json"], command, job.keys.notes)


def remove_written(job: Job) -> None:
    import shutil

    for path in job.files:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    if job.out.is_dir() and not any(job.out.iterdir()):
        job.out.rmdir()
