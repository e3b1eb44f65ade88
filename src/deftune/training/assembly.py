"""From a config and its data to a trainer: transformers' arguments, batches, the base model, its attention."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import ConcatDataset

from deftune._suggest import did_you_mean
from deftune.artifacts.config import RunConfig
from deftune.artifacts.models import cannot_load, load_model
from deftune.artifacts.runs import Run
from deftune.data.end_tokens import end_tokens_of
from deftune.data.packing import Collator
from deftune.losses import Sparse
from deftune.tokens.head import check_packing
from deftune.training.attention import VARLEN, attention_kernels, why_not_varlen
from deftune.training.compiling import why_not_compiled
from deftune.training.machine import (
    base_dtype,
    data_ranks,
    earns_compiling,
    precision_of,
    tensor_ranks,
    weights_of,
    world_size,
)
from deftune.training.optimizers import NAMES, muon_factory
from deftune.training.preparation import Prepared
from deftune.training.trackers import tracker_name

NO_LIGER_LOSS = {"cross_entropy": False, "fused_linear_cross_entropy": False}
ScoreTasks = Callable[[Any, Any], dict[str, float]]  # (model, tokenizer) -> {task: score}


def checkpointing_argument(on: bool) -> dict[str, Any]:
    """The argument of `SFTConfig` that recomputes activations: transformers 5.23 has renamed it."""
    from trl import SFTConfig  # pyright: ignore[reportPrivateImportUsage]

    new = "activation_checkpointing"
    return {new if new in {field.name for field in fields(SFTConfig)} else "gradient_checkpointing": on}


def make_arguments(prepared: Prepared, run: Run) -> Any:
    """The config as TRL's SFTConfig."""
    from trl import SFTConfig  # pyright: ignore[reportPrivateImportUsage]

    config = prepared.config
    train = config.train
    evaluating = prepared.eval is not None and train.eval_steps is not None
    options: dict[str, Any] = {}
    if train.fsdp and world_size() > 1:
        options["fsdp"] = True
        options["fsdp_config"] = {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "reshard_after_forward": True,
            "state_dict_type": "FULL_STATE_DICT",  # of the saved model; the state to resume from is in shards
        }
        if train.shard_size is not None:
            from accelerate import ParallelismConfig

            copies = world_size() // train.shard_size
            options["parallelism_config"] = ParallelismConfig(dp_replicate_size=copies, dp_shard_size=train.shard_size)
    return SFTConfig(
        output_dir=str(run.checkpoints),
        per_device_train_batch_size=train.micro_batch_size,
        per_device_eval_batch_size=train.micro_batch_size,
        gradient_accumulation_steps=train.batch_size // (train.micro_batch_size * data_ranks(config)),
        learning_rate=train.learning_rate,
        num_train_epochs=train.epochs,
        max_steps=prepared.steps,  # as printed: alone, transformers' max_steps would overrule the epochs
        weight_decay=train.weight_decay,
        optim=NAMES.get(train.optimizer, NAMES["adamw"]),
        adam_beta1=train.betas[0],
        adam_beta2=train.betas[1],
        lr_scheduler_type={"constant": "constant_with_warmup"}.get(train.schedule, train.schedule),
        warmup_steps=round(train.warmup_ratio * prepared.steps),
        max_grad_norm=train.clip,
        seed=train.seed,
        data_seed=train.seed,
        bf16=precision_of(config) == "bf16",
        use_cpu=not torch.cuda.is_available(),
        neftune_noise_alpha=train.neftune_alpha,
        use_liger_kernel=train.liger,
        liger_kernel_config=NO_LIGER_LOSS if train.liger else None,
        torch_compile=train.compile is True,
        dataloader_num_workers=train.workers,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=train.save_steps,
        save_total_limit=None,  # DeftSFTTrainer rotates: transformers would drop the last one for the best
        eval_strategy="steps" if evaluating else "no",
        eval_steps=train.eval_steps,
        metric_for_best_model=best_metric(train.best),
        greater_is_better=train.best not in ("eval_loss", "eval_nll"),
        prediction_loss_only=True,
        report_to=list(train.report_to),
        run_name=tracker_name(run),
        disable_tqdm=True,
        remove_unused_columns=False,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        ddp_find_unused_parameters=False,
        **checkpointing_argument(prepared.checkpointing.on),
        **options,
    )


def best_metric(best: str) -> str | None:
    """The name under which an evaluation reports what ``train.best`` chooses by."""
    return None if best == "none" else best if best.startswith("eval_") else f"eval_{best}"


def lora_config(config: RunConfig, model: Any) -> Any:
    """The run's adapters as PEFT's config; a target that names no module of the model is an error.

    PEFT itself leaves such a target out, as long as another one names a module.
    """
    from peft import LoraConfig

    lora = config.model.lora
    assert lora is not None
    targets = [] if lora.target_modules == "all-linear" else lora.target_modules
    patterns = {targets: targets} if isinstance(targets, str) else {t: rf"(.*\.)?{re.escape(t)}" for t in targets}
    modules = dict(model.named_modules())
    for target, pattern in patterns.items():
        if not any(re.fullmatch(pattern, name) for name in modules):
            linear = {name.split(".")[-1] for name, module in modules.items() if isinstance(module, torch.nn.Linear)}
            known = sorted(linear - {"lm_head"})
            raise ValueError(
                f"model.lora.target_modules: no module of the model is named {target!r}.{did_you_mean(target, known)} "
                f"Linear layers: {', '.join(known)}"
            )
    return LoraConfig(
        r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=lora.target_modules,
        task_type="CAUSAL_LM", revision=None,
    )  # fmt: skip


def save_first_adapter(prepared: Prepared, folder: Path) -> None:
    """Save the adapter that a LoRA run begins with, which its seed draws, as peft's files.

    The base model's weights are not read: the adapter depends on the names and shapes of the layers alone.

    Args:
        prepared: a run with ``model.lora``.
        folder: gets `adapter_config.json` and `adapter_model.safetensors`.

    Raises:
        ValueError: the model's config cannot be read.
    """
    import transformers
    from peft import get_peft_model

    model = prepared.config.model
    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    try:
        config = transformers.AutoConfig.from_pretrained(prepared.source, revision=model.revision, **options)
        with torch.device("meta"):
            base: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)
    except Exception as error:
        raise cannot_load(prepared.source, error) from error
    base.to_empty(device="cpu")  # memory that is never written takes no room
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(prepared.config.train.seed)  # where SFTTrainer seeds: after the model, before the adapter
        adapted = get_peft_model(base, lora_config(prepared.config, base))
    # save_embedding_layers: otherwise peft looks the base model up on the hub
    adapted.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # peft's form of a model card, not filled in


def load_base(prepared: Prepared) -> Any:
    """The model that the run begins with."""
    return load_model(prepared.source, **base_options(prepared.config))


def base_options(config: RunConfig) -> dict[str, Any]:
    """How the model that a run begins with is loaded: the arguments of `load_model`."""
    model = config.model
    return {
        "revision": model.revision, "trust_remote_code": model.trust_remote_code, "dtype": base_dtype(config),
        "tensor_parallel": tensor_ranks(config), "quantization": model.quantization,
        "attention": model.attention_implementation,
    }  # fmt: skip


def chosen_attention(config: RunConfig, model: Any) -> str:
    """The attention of a run: ``auto`` is ``varlen`` in bfloat16 on a GPU, if the model allows it.

    The model is tried where it is: float32 weights on a GPU take the exact path, row by row.
    """
    if config.train.attention != "auto" or precision_of(config) != "bf16" or why_not_varlen(model) is not None:
        return config.train.attention
    if config.train.tensor_parallel > 1:  # not tried
        return "auto"
    autocast = partial(torch.autocast, model.device.type, torch.bfloat16)  # as in the run
    for context in (nullcontext, autocast):
        try:
            with context():
                check_packing(model, attention=lambda: attention_kernels(VARLEN, model))
        except ValueError:  # the model adds something to its attention that the kernel would leave out
            return "auto"
    return VARLEN


def compiles_layers(prepared: Prepared, model: Any, attention: str) -> bool:
    """Whether the run compiles its decoder layers.

    ``auto`` compiles them in full fine-tuning on one GPU with rows end to end, where that was measured, if the run is
    long enough to earn back the seconds of compiling.
    """
    config, train = prepared.config, prepared.config.train
    if train.compile != "auto":
        return train.compile == "layers"
    suits = attention == VARLEN and not prepared.checkpointing.on and earns_compiling(config, prepared.micro_batches)
    return suits and why_not_compiled(model) is None


class Batches:
    """A collator for datasets of places in one list: the examples stay as they are, whatever a dataset would make of
    them."""

    def __init__(self, sequences: Sequence[Any] | ConcatDataset[Any], collator: Collator):
        self.sequences, self.collator = sequences, collator

    def __call__(self, rows: list[dict[str, int]]) -> dict[str, torch.Tensor]:
        sequences = [self.sequences[row["place"]] for row in rows]
        batch = self.collator(sequences)
        batch["places"] = torch.tensor([row["place"] for row in rows])  # names the rows of a batch that is not finite
        if "attention_mask" not in batch:  # the batch itself does not show where a sequence ends: -1 is padding
            lengths = [len(sequence.input_ids) for sequence in sequences]
            batch["row_of"] = torch.full_like(batch["labels"], -1)
            places = batch["row_of"].view(-1).split(lengths) if self.collator.padding_free else batch["row_of"]
            for row, (place, length) in enumerate(zip(places, lengths)):
                place[:length] = row
        return batch


def make_dataset(places: range) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"place": np.arange(places.start, places.stop)})  # no list of Python's integers


def make_trainer(prepared: Prepared, run: Run, score_tasks: ScoreTasks | None = None, model: Any = None) -> Any:
    """A trainer for the run's model, which is loaded unless ``model`` is given."""
    from transformers import PrinterCallback

    from deftune.training.trainer import DeftSFTTrainer

    config = prepared.config
    arguments = make_arguments(prepared, run)  # before the model: it starts torch.distributed
    if model is None:
        model = load_base(prepared)
    evaluated = prepared.eval.examples if prepared.eval else []
    total = len(prepared.sequences)
    if not config.train.fsdp and config.model.quantization is None:
        model.to(arguments.device)  # the trainer would move it anyway; checks of a large model are quick on a GPU
    attention = chosen_attention(config, model)
    # end to end, packs would need a mask over all of them, unless the attention takes the boundaries without one
    flat = attention == VARLEN or (config.data.packing and "flash" in str(model.config._attn_implementation))
    collator = Collator(prepared.tokenizer.pad_token_id, padding_free=flat)
    compiled = compiles_layers(prepared, model, attention)
    if prepared.checkpointing.needs_compiled and not (compiled and attention == VARLEN):
        for name, value in checkpointing_argument(True).items():
            setattr(arguments, name, value)
    train = config.train
    muon = muon_factory(train.learning_rate, train.betas, train.weight_decay) if train.optimizer == "muon" else None
    trainer = DeftSFTTrainer(
        model,
        arguments,
        objective=config.objective,
        data_collator=Batches(ConcatDataset(cast("Any", [prepared.sequences, evaluated])), collator),
        train_dataset=make_dataset(range(total)),
        eval_dataset=make_dataset(range(total, total + len(evaluated))) if evaluated else None,
        processing_class=prepared.tokenizer,
        peft_config=lora_config(config, model) if config.model.lora else None,
        optimizer_cls_and_kwargs=muon,
        special_ids=tuple(sorted(end_tokens_of(prepared.tokenizer, declared=config.data.end_tokens).values())),
        attention=attention,
        compile_layers=compiled,
        weights=weights_of(config),
        sparse=None if config.train.sparse is None else Sparse(config.train.sparse),
        score_tasks=score_tasks and (lambda model: score_tasks(model, prepared.tokenizer)),
        stop_after=config.train.stop_after,
        checkpoint_root=run.checkpoints,
        keep=config.train.keep,
        pinned=config.train.save_at,
        distributed_checkpoints=config.train.fsdp or config.train.tensor_parallel > 1,
        async_checkpoints=config.train.async_checkpoints,
    )
    if config.data.packing and attention != VARLEN:
        with trainer.whole_weights():
            check_packing(trainer.model)
    trainer.remove_callback(PrinterCallback)
    return trainer
