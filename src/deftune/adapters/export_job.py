"""What the exports share: the keys of a run, its rows as tokens, and arguments of transformers' Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from deftune.artifacts.config import ConfigError, Lora, Model, RunConfig, Train
from deftune.objectives import objective as parse_objective
from deftune.training.assembly import save_first_adapter
from deftune.training.preparation import Prepared


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
        problems = [*self.problems, *(f"{name}: is not exported to {self.stack}; leave it out" for name in untaken)]
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
    def model(self) -> str:
        """What from_pretrained takes; a folder by its absolute path, because the stack may be started elsewhere."""
        source = self.prepared.source
        return str(Path(source).absolute()) if Path(source).is_dir() else source

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
        header = f"# deftune export {self.keys.stack}: `{config.objective}` on {config.model.name}\n"
        path.write_text(header + yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8")
        self.files.append(path)
        return path


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


def uses_checkpointing(job: Job) -> bool:
    """auto is decided by the memory of the GPU that trains, which is not here."""
    chosen = job.keys.take("train.gradient_checkpointing")
    if chosen == "auto":
        job.keys.notes.append(
            "train.gradient_checkpointing: auto is written as false; set it to true if memory is short (`deftune plan`)"
        )
    return chosen is True


def check_common(job: Job) -> None:
    """What no stack but `deftune train` has."""
    keys, config = job.keys, job.prepared.config
    keys.refuse("data.packing", f"{keys.stack} packs rows in another way, so that steps would hold other rows; "
                "--set data.packing=false")  # fmt: skip
    keys.refuse("train.sparse", f"{keys.stack} has no sparse head gradients; leave it out")
    if keys.take("train.weights") not in ("auto", "float32"):
        keys.problems.append(f"train.weights: {keys.stack} has no masters; leave it out")
    keys.refuse("train.best", "an exported run ends with its last step; --set train.best=none")
    keys.note("train.save_at", f"not exported; {keys.stack} saves every train.save_steps steps")
    keys.note("train.async_checkpoints", f"not exported; {keys.stack} saves in its own way")
    keys.note("train.push_to_hub", "not exported; upload the result yourself")
    keys.note("train.push_private", "not exported; upload the result yourself")
    keys.note("train.attention", f"not exported; {keys.stack} lets torch choose among its attention kernels")
    keys.note("data.tasks", f"not exported; score the result with `deftune eval`: {keys.stack} trains only")
    needs_ends = "special_ids" in parse_objective(config.objective).requires
    if needs_ends and (config.data.template is not None or config.data.end_tokens):
        keys.problems.append(
            f"objective: `{config.objective}` takes its end tokens from data.template and data.end_tokens, which "
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
        "torch_compile": take("train.compile") not in (False, "auto"),  # these stacks compile the whole model
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


def first_adapter(job: Job) -> tuple[Lora, str] | None:
    """The adapters of the run, and the folder of their random start, with which `deftune train` begins too."""
    lora: Lora | None = job.keys.take("model.lora")
    if lora is None:
        return None
    folder = job.out / "adapter"
    job.files.append(folder)  # before it is there: a failure removes what was written
    save_first_adapter(job.prepared, folder)
    if lora.dropout:
        job.keys.notes.append(
            f"model.lora.dropout: {job.keys.stack} draws which values to drop; steps differ from `deftune train` as "
            f"those of another seed do"
        )
    return lora, str(folder)


def listed(modules: str | list[str]) -> list[str]:
    return [modules] if isinstance(modules, str) else modules
