"""What a run is made of, before there is a model: the config checked, the data read, masked and packed."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from deftune.data.encoding import EncodedRows, Encoder, encode_rows
from deftune.data.packing import pack
from deftune.data.regimes import generate
from deftune.data.rows import BadRows, Row
from deftune.data.sources import mix, read_source, split_rows
from deftune.data.templates import set_template
from deftune.objectives import objective as parse_objective
from deftune.training.config import ConfigError, Data, RunConfig, Source
from deftune.training.model_names import shown_model
from deftune.training.models import load_tokenizer, resolve_model
from deftune.training.trackers import check_trackers

MOST_WORKERS = 16  # data workers of a machine with few cores; with more, four for each


@dataclass
class Prepared:
    """Everything but the model: what `--dry-run` looks at."""

    config: RunConfig
    tokenizer: Any
    source: str  # what from_pretrained takes
    train: EncodedRows
    eval: EncodedRows | None
    bad: BadRows
    sequences: list[Any]  # what a micro-batch is made of: rows, or packs of them

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        train = self.config.train
        per_epoch = -(-len(self.sequences) // train.batch_size)
        return min(train.max_steps or per_epoch * 10**9, max(1, round(per_epoch * train.epochs)))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def can_shard() -> bool:
    """Whether accelerate would heed fsdp: without GPUs it runs DDP and says nothing."""
    return torch.accelerator.is_available()


def check_config(config: RunConfig) -> None:
    """What is wrong with a config that only the machine can tell."""
    train, ranks = config.train, world_size()
    if train.batch_size % (train.micro_batch_size * ranks):
        raise ConfigError(
            f"train.batch_size: {train.batch_size} rows a step cannot be {ranks} ranks x {train.micro_batch_size} rows "
            f"x a whole number; change batch_size or micro_batch_size"
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if train.workers * here > max(MOST_WORKERS, 4 * cores):
        raise ConfigError(
            f"train.workers: {train.workers} processes for each of {here} rank{'s' * (here > 1)} are too many for "
            f"{cores} cores; at most {max(MOST_WORKERS, 4 * cores) // here}"
        )
    check_trackers(train.report_to)
    if config.model.lora is not None and importlib.util.find_spec("peft") is None:
        raise ConfigError("model.lora: peft is not installed; pip install peft")
    if train.precision == "bf16" and torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
        raise ConfigError("train.precision: this GPU has no bfloat16; use fp32")
    if train.fsdp and not can_shard():
        raise ConfigError("train.fsdp: accelerate shards over GPUs only and would run DDP here; leave it out")
    if train.fsdp and ranks == 1:
        raise ConfigError(
            "train.fsdp: needs several ranks; start with `torchrun --nproc-per-node N -m deftune train ...`"
        )


def read_rows(sources: list[Source], config: RunConfig, bad: BadRows, notice: Callable[[str], None]) -> list[Row]:
    """The rows of the sources, mixed by their weights."""
    read: list[tuple[list[Row], float]] = []
    for source in sources:
        if source.generate is not None:
            assert source.limit is not None
            rows = generate(source.generate, split=source.split or "train", size=source.limit)
            notice(f"{source.generate}: {len(rows):,} rows generated")
        else:
            assert source.path is not None
            rows = read_source(source.path, format=source.format, split=source.split, limit=source.limit, bad=bad)
            notice(f"{source.path}: {len(rows):,} rows")
        read.append((rows, source.weight))
    if len(read) == 1 and config.data.total is None:
        return read[0][0]
    return mix(read, total=config.data.total, seed=config.train.seed)


def prepare(config: RunConfig, notice: Callable[[str], None]) -> Prepared:
    """Read, mix, mask and pack the data; the model's weights are not touched."""
    check_config(config)
    data = config.data
    bad = BadRows(skip=data.skip_bad_rows)
    rows = read_rows(data.train, config, bad, notice)
    held = read_rows(data.eval, config, bad, notice) if data.eval else []
    if data.holdout:
        rows, held = split_rows(rows, data.holdout, config.train.seed)
        notice(f"{len(held):,} rows held out")
    source = resolve_model(config.model.name, notice, revision=config.model.revision)
    options: dict[str, Any] = {"revision": config.model.revision, "trust_remote_code": config.model.trust_remote_code}
    tokenizer = load_tokenizer(source, **options)
    encoder = make_encoder(data, tokenizer)
    set_template(tokenizer, data.template)  # saved with the model
    train = encode_rows(rows, encoder, skip_bad_rows=data.skip_bad_rows)
    evaluation = encode_rows(held, encoder, skip_bad_rows=data.skip_bad_rows) if held else None
    sequences: list[Any] = pack(train.examples, data.max_length) if data.packing else list(train.examples)
    prepared = Prepared(config, tokenizer, source, train, evaluation, bad, sequences)
    late = [step for step in config.train.save_at if step > prepared.steps]
    if late and sequences:
        raise ConfigError(f"train.save_at: step {late[0]} never comes, the run has {prepared.steps}; leave it out")
    return prepared


def make_encoder(data: Data, tokenizer: Any) -> Encoder:
    """What turns a row into tokens and a mask, as the config says."""
    return Encoder(
        tokenizer, template=data.template, mask=data.mask, max_length=data.max_length, overlong=data.overlong,
        end_tokens=data.end_tokens, template_options=data.template_options, bos=data.bos,
    )  # fmt: skip


def facts(prepared: Prepared) -> list[str]:
    """What follows from the config and the data, as a reader would want to check it."""
    config, ranks = prepared.config, world_size()
    train = config.train
    micro = train.micro_batch_size
    unit = "packed sequences" if config.data.packing else "rows"
    model = shown_model(config.model.name)
    lines = [
        f"objective {config.objective} ({parse_objective(config.objective).kind}); model {model}"
        + (f" with LoRA r={config.model.lora.r}" if config.model.lora else ""),
        *[f"train: {line}" for line in prepared.train.facts()],
        *([f"eval: {line}" for line in prepared.eval.facts()] if prepared.eval else []),
        f"{train.batch_size} {unit}/step = {ranks} rank{'s' * (ranks > 1)} x {micro} x "
        f"{train.batch_size // (micro * ranks)}; {len(prepared.sequences):,} {unit}; {prepared.steps:,} steps",
    ]
    if train.max_steps is not None and train.max_steps > prepared.steps:
        lines.append(
            f"train.max_steps {train.max_steps:,} is more than train.epochs {train.epochs:g} allows: the run has "
            f"{prepared.steps:,} steps; raise train.epochs for more"
        )
    if len(prepared.sequences) < train.batch_size:
        lines.append(
            f"a step takes all {len(prepared.sequences)} {unit}: fewer than train.batch_size {train.batch_size}"
        )
    if prepared.bad.skip and prepared.bad.rows:
        lines.append(prepared.bad.summary())
    return lines


def fingerprint(prepared: Prepared) -> str:
    """Of the token ids and masks: a resumed run must see the same."""
    digest = hashlib.sha256()
    for sequence in [*prepared.sequences, *(prepared.eval.examples if prepared.eval else [])]:
        digest.update(json.dumps([sequence.input_ids, sequence.labels]).encode())
    return digest.hexdigest()
