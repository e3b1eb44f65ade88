"""`DeftSFTTrainer`: TRL's SFTTrainer with any objective, through the fused loss.

The loss of an optimizer step is sum L / (supervised tokens of the step), over all micro-batches and ranks: how the
step is divided does not change it.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from trl import SFTTrainer  # pyright: ignore[reportPrivateImportUsage]

from deftune.artifacts import checkpoints
from deftune.data.encoding import end_tokens_of
from deftune.losses import Sparse, raise_pending
from deftune.objectives import IGNORE_INDEX, Context, Objective, StepStats, TokenStats
from deftune.objectives import objective as parse_objective
from deftune.objectives.step import step_stats
from deftune.tokens.head import (
    ObjectiveCall,
    ObjectiveOutput,
    StatisticsCall,
    attach_objective,
    base_of,
    check_packing,
    head_options,
    shifted,
)
from deftune.training import sharded
from deftune.training.attention import attention_kernels, kernels_of
from deftune.training.guard import UnseenNorm, clear_skip, skip_nonfinite
from deftune.training.nonfinite import diagnose
from deftune.training.recording import StepRecord, scalars

HISTORY = 20  # log records that a checkpoint's trainer_state.json keeps


@dataclass
class StepInputs:
    """The micro-batches of an optimizer step, kept until its gradient is known to be finite."""

    step: int
    batches: list[Any]
    num_items: int
    stats: StepStats | None = None  # of the whole step, for objectives that need them


def check_arguments(objective: Objective, args: Any, extra: dict[str, Any]) -> None:
    """Refuse what would be ignored, before anything is loaded."""

    def refuse(what: str, why: str) -> None:
        raise ValueError(f"DeftSFTTrainer: {what} cannot be combined with objective={str(objective)!r}: {why}")

    if extra.get("compute_loss_func") is not None:
        refuse("compute_loss_func", "the objective is the loss; drop one of the two")
    for name in ("compute_metrics", "preprocess_logits_for_metrics"):
        if extra.get(name) is not None:
            refuse(name, "the fused head makes no logits; evaluation reports eval_loss, eval_nll and eval_p by itself")
    if extra.get("quantization_config") is not None:
        refuse("quantization_config", "a quantised head has no weight to multiply; load the original weights")
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
    if getattr(args, "deepspeed", None) is not None:
        refuse(
            "DeepSpeed",
            "DeepSpeed updates the weights inside the backward pass, before a gradient can be checked or rescaled, and "
            "ZeRO-3 leaves the head without its weight; use FSDP2 or DDP, or deftune.hf_loss in transformers' Trainer",
        )
    if getattr(args, "n_gpu", 1) > 1:
        refuse("DataParallel", "a process with several GPUs would average unequal shares; start with torchrun")
    parallel = getattr(args, "parallelism_config", None)
    for name in ("sp_enabled", "cp_enabled", "tp_enabled"):
        if parallel is not None and getattr(parallel, name, False):
            refuse(name.removesuffix("_enabled") + " parallelism", "a rank would see part of a row; use FSDP2 or DDP")


class DeftSFTTrainer(SFTTrainer):
    """TRL's SFTTrainer, trained with ``objective`` instead of NLL.

        step loss = sum over the step's supervised tokens of L / their number,  d / d z = gate (P - onehot)

    Everything else is SFTTrainer's: datasets, packing, LoRA, callbacks, distributed launchers. The head never makes
    logits; evaluation reports the objective as ``eval_loss`` and plain NLL as ``eval_nll``. Objectives of a whole step
    cost what `deftune objectives show` says: mass objectives rescale the gradients once, step objectives run one more
    forward pass.

    A gradient that is not finite stops the training before the weights change: the step's micro-batches are run again,
    the error names the first layer and operation that are not finite and what to do, and the batch is saved.

        trainer = deftune.DeftSFTTrainer("HuggingFaceTB/SmolLM2-135M", objective="deft", train_dataset=dataset)

    Args:
        objective: a name, a spec such as ``"deft | floor(0.2)"``, or an `Objective`.
        special_ids: the tokens that end an answer, for ``eos(...)`` and the record ``eos_p``; by default those of the
            tokenizer and its chat template (`deftune.data.encoding.end_tokens_of`).
        attention: the kernels that ``scaled_dot_product_attention`` may use: ``auto`` (all but cuDNN's, whose backward
            can return NaN for padded batches), ``flash``, ``efficient``, ``math`` or ``cudnn``.
        sparse: make the head's gradients from a share of the classes (`deftune.Sparse`), an approximation whose error
            is logged as ``sparse_dropped``, ``sparse_error_hidden`` and ``sparse_error_weight``; not for a head with a
            softcap.
        score_tasks: ``score_tasks(model)`` is {task: score}, measured at every evaluation and logged as
            ``eval_<task>``.
        checkpoint_root: write verified checkpoints there.
        keep: how many of the newest checkpoints to keep there (None: all); the best one stays besides.
        pinned: steps whose checkpoints stay, too.
        distributed_checkpoints: write the weights and the optimizer's state with torch.distributed.checkpoint, each
            rank its shards; such a checkpoint resumes on any number of ranks.
    """

    def __init__(self, model: Any, args: Any = None, *positional: Any, objective: str | Objective = "deft",
                 special_ids: tuple[int, ...] | None = None, attention: str = "auto",
                 sparse: Sparse | None = None, score_tasks: Callable[[Any], dict[str, float]] | None = None,
                 checkpoint_root: Path | None = None,
                 keep: int | None = None, pinned: Collection[int] = (), distributed_checkpoints: bool = False,
                 **kwargs: Any):  # fmt: skip
        self.objective = parse_objective(objective)
        kernels_of(attention)  # an unknown name is an error before anything is loaded
        self.attention = attention
        given = inspect.signature(SFTTrainer.__init__).bind_partial(self, model, args, *positional, **kwargs)
        check_arguments(self.objective, args, given.arguments)
        super().__init__(model, args, *positional, **kwargs)
        parallel = self.accelerator.parallelism_config  # from an accelerate YAML, of which args know nothing
        check_arguments(self.objective, type("_", (), {"parallelism_config": parallel}), {})
        if self.args.fsdp and not self.accelerator.is_fsdp2:
            raise ValueError(
                f"DeftSFTTrainer: fsdp was asked for, but accelerate runs {self.accelerator.distributed_type.value} "
                f"(it shards over GPUs only, and FSDP1 keeps the head's weight from us); use FSDP2, or DDP"
            )
        plugin: Any = self.accelerator.state.fsdp_plugin if self.accelerator.is_fsdp2 else None
        if plugin is not None and (policy := plugin.mixed_precision_policy) is not None:
            # gradients are summed over the ranks in float32, as DDP does, and a loss is not rounded
            plugin.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32, output_dtype=None)
        check_model(self.model, self.aux_loss_enabled, self.objective)
        self.sparse = sparse
        if sparse is not None and head_options(base_of(self.model).config).softcap is not None:
            raise ValueError(
                f"DeftSFTTrainer: sparse cannot be combined with the softcap of {type(base_of(self.model)).__name__}'s "
                f"head; leave sparse out"
            )
        attach_objective(base_of(self.model))
        if self.padding_free or getattr(self.data_collator, "padding_free", False):
            check_packing(self.model)
        self.special_ids = special_ids or tuple(sorted(end_tokens_of(self._tokenizer).values()))
        if "special_ids" in self.objective.requires and not self.special_ids:
            raise ValueError(
                f"DeftSFTTrainer: {str(self.objective)!r} needs the tokens that end an answer, and the tokenizer has "
                f"none; pass special_ids=(...)"
            )
        self.records = {mode: StepRecord(self.objective, self.special_ids) for mode in ("train", "eval")}
        self.score_tasks = score_tasks
        self.checkpoint_root, self.keep, self.pinned = checkpoint_root, keep, frozenset(pinned)
        self.distributed_checkpoints = distributed_checkpoints
        self.last_record: dict[str, float | list[int]] = {}
        self._staging: Path | None = None
        self._inputs: StepInputs | None = None
        self._inputs_before: StepInputs | None = None
        # what is recorded once the whole step, or evaluation set, is known
        self._held: dict[str, list[tuple[TokenStats, Tensor]]] = {"train": [], "eval": []}
        self._mass: Tensor | None = None
        self._unseen: UnseenNorm | None = None
        self._clock = time.perf_counter()

    # --- the loss -----------------------------------------------------------------------------------------------------

    @property
    def model_accepts_loss_kwargs(self) -> bool:
        """The token count of the step is always made, and the loss divides by it."""
        return True

    @model_accepts_loss_kwargs.setter
    def model_accepts_loss_kwargs(self, value: bool) -> None:
        pass

    def _context(self, step: Any = None) -> Context:
        progress = None
        if "progress" in self.objective.requires:
            progress = min(1.0, self.state.global_step / max(1, self.state.max_steps))
        return Context(progress=progress, special_ids=self.special_ids, step=step)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """The step's micro-batches; a step without supervised tokens is an error."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches:
            return batches, num_items
        assert num_items is not None, "batches have labels: DeftSFTTrainer's collators make them"
        inputs = StepInputs(self.state.global_step + 1, batches, int(num_items))
        if inputs.num_items == 0:
            raise ValueError(
                f"training step {self.state.global_step + 1}: none of its tokens is supervised, on any rank, so it has "
                f"no loss; check the mask of the data (`deftune data preview`)"
            )
        self._mass, self._held["train"] = None, []
        self._inputs_before, self._inputs = self._inputs, inputs
        return batches, num_items

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        dataset: Any = self.train_dataset
        if batch_samples and hasattr(dataset, "__len__") and not self.args.dataloader_drop_last:
            self._mask_repeats(batch_samples[-1], self._train_batch_size, len(dataset))
        return super()._get_num_items_in_batch(batch_samples, device)

    def _mask_repeats(self, batch: dict[str, Any], rows: int, total: int) -> None:
        """Mask the rows that fill up the last batches of an epoch: they are its first rows, trained already."""
        ranks = self.accelerator.num_processes
        left = total % (rows * ranks)
        if ranks == 1 or left == 0 or not self.accelerator.gradient_state.end_of_dataloader:
            return
        own = min(max(left - self.accelerator.process_index * rows, 0), rows)
        row_of = rows_of(batch)
        if row_of is not None:
            batch["labels"] = batch["labels"].masked_fill(row_of >= own, IGNORE_INDEX)

    @torch.no_grad()
    def _pre_pass(self, model: Any, batches: list[Any]) -> StepStats:
        """The step statistics that the objective needs, by one more forward pass over the micro-batches."""
        found: list[TokenStats] = []
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices):  # its dropout is that of the pass that follows
            for batch in batches:
                inputs = self._prepare_inputs(dict(batch))
                found.append(self._forward(model, inputs, StatisticsCall(self.objective.top_k)).stats)
        return step_stats(self.objective, found, context=self._context())

    def _forward(self, model: Any, inputs: dict[str, Any], call: ObjectiveCall | StatisticsCall) -> ObjectiveOutput:
        inputs = {name: value for name, value in inputs.items() if name not in ("labels", "row_of", "places")} | {
            "deft_targets": shifted(inputs["labels"]),
            "deft_call": call,
        }
        try:
            output = model(**inputs)
        except ValueError as error:  # the head may raise for a NaN of the step before
            self._look_back(error)
            raise
        self._look_back()  # the head has waited for the step before; all ranks stop here, before they wait for another
        return output

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if return_outputs:
            raise ValueError("DeftSFTTrainer: the fused head makes no logits, so there are no outputs to return")
        inner: Any = self.model
        if not (inner.training and torch.is_grad_enabled()):
            return self._evaluation_loss(model, inputs)
        step = self._inputs
        assert step is not None, "get_batch_samples comes before the losses of its micro-batches"
        if self.objective.kind == "step" and step.stats is None:
            step.stats = self._pre_pass(model, step.batches)
        context = self._context("deferred" if self.objective.kind == "mass" else step.stats)
        try:
            output = self._forward(
                model, inputs, ObjectiveCall(self.objective, context, step.num_items, sparse=self.sparse)
            )
        except ValueError as error:  # on a CPU a NaN is seen at once
            if "NaN" in str(error) and "training step" not in str(error):
                self.state.global_step = step.step - 1
                raise self._explained(step, error) from error
            raise
        if self.objective.kind == "mass":
            mass = self.objective.mass(output.stats, context).sum()
            self._mass = mass if self._mass is None else self._mass + mass
            self._held["train"].append((output.stats, input_tokens(inputs)))
        else:
            self.records["train"].add(output.stats, context, input_tokens(inputs), output.gated)
        assert output.loss is not None
        # the mean is over all ranks' tokens, and DDP and FSDP will divide by their number
        return output.loss * self.accelerator.num_processes

    def _evaluation_loss(self, model: Any, inputs: Any) -> Tensor:
        """The mean objective of one batch; `evaluation_loop` takes the mean of the whole set from the record."""
        stats, context = self._forward(model, inputs, StatisticsCall(self.objective.top_k)).stats, self._context()
        if self.objective.kind == "local":
            self.records["eval"].add(stats, context, input_tokens(inputs))
        else:
            self._held["eval"].append((stats, input_tokens(inputs)))
            if len(stats):
                context = replace(context, step=step_stats(self.objective, [stats], context=context, local=True))
        return self.objective.loss(stats, context).mean() if len(stats) else stats.log_p.sum()

    def _record_held(self, mode: str) -> None:
        """Record the batches of a step, or of an evaluation, now that its statistics can be known."""
        held, self._held[mode] = self._held[mode], []
        if held:
            context = self._context()
            step = step_stats(self.objective, [stats for stats, _ in held], context=context)
            for stats, tokens in held:
                self.records[mode].add(stats, replace(context, step=step), tokens)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        self.loss_is_scaled_for_ga = True
        with attention_kernels(self.attention):
            return super().training_step(model, inputs, num_items_in_batch)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        inputs = self._prepare_inputs(inputs)
        loader: Any = self.accelerator.gradient_state.active_dataloader
        if loader is not None and hasattr(loader.dataset, "__len__") and not self.args.dataloader_drop_last:
            self._mask_repeats(inputs, self.args.eval_batch_size, len(loader.dataset))
        with torch.no_grad(), self.compute_loss_context_manager(), attention_kernels(self.attention):
            return self.compute_loss(model, inputs).detach(), None, None

    def _before_clipping(self, model: Any) -> None:
        """A mass objective's gradients are divided by its mass, once."""
        if self._mass is None:
            return
        self._record_held("train")
        mass, self._mass = self._mass, None
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(mass)
        assert self._inputs is not None
        factor = 0.0 if float(mass) == 0 else self._inputs.num_items / float(mass)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _clip_grad_norm(self, model: Any) -> Any:
        self._before_clipping(model)
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """As in transformers, and have the optimizer skip an update whose gradient is not finite."""
        if grad_norm is None:  # clipping is off
            self._before_clipping(model)
        norm = super()._get_grad_norm(model, grad_norm)
        if self.accelerator.scaler is not None:  # float16's skips such a step by itself
            raise_pending()
            return norm
        self._unseen = UnseenNorm(self.state.global_step + 1, norm, skip_nonfinite(self.optimizer, norm))
        if not self._unseen.skips:
            self._look_back()
        return norm

    def _look_back(self, met: ValueError | None = None) -> None:
        """Raise an error if the last update was skipped; ``met`` is an error that the step has already raised."""
        unseen, self._unseen = self._unseen, None
        if unseen is None:
            return
        try:
            if not unseen.bad():
                return
            raise_pending()
        except ValueError as error:
            met = met or error
        self.state.global_step = unseen.step - 1
        why = met or ValueError(f"the gradient's norm is {float(unseen.norm)}")
        inputs = next((i for i in (self._inputs, self._inputs_before) if i is not None and i.step == unseen.step), None)
        if inputs is None or "NaN" not in str(met or "NaN"):
            raise ValueError(f"training step {unseen.step}: {why}") from met
        raise self._explained(inputs, why) from met

    def _explained(self, inputs: StepInputs, why: ValueError) -> ValueError:
        """The error of a step that was not finite: what reruns of its micro-batches show, and where they are saved."""
        text = f"training step {inputs.step}: {why}; the weights were not changed."
        folder = (self.checkpoint_root or Path(self.args.output_dir or ".") / "checkpoints").parent / "nonfinite"
        name = f"step-{inputs.step}" + (f"-rank{dist.get_rank()}" if self.accelerator.num_processes > 1 else "")
        try:
            saved = save_batches(folder / name, inputs.batches)
            text += f" Its micro-batches are in {saved}."
        except OSError as error:
            text += f" Its micro-batches could not be saved ({error})."
        if self.accelerator.is_fsdp2:
            return ValueError(text + " They were not run again: the model is sharded.")
        try:
            found = self._diagnose(inputs)
        except Exception as error:  # the reruns must not hide what they were to explain
            return ValueError(f"{text} Running them again failed ({type(error).__name__}: {error}).")
        with contextlib.suppress(OSError):
            (folder / name / "diagnosis.json").write_text(json.dumps(asdict(found), indent=1), encoding="utf-8")
        return ValueError(f"{text} {found}")

    def _diagnose(self, inputs: StepInputs) -> Any:
        """Run the micro-batches of a step again, on this rank alone."""
        model = self.accelerator.unwrap_model(self.model_wrapped, keep_torch_compile=False)
        model.train()
        self._unseen = None
        context = self._context("deferred" if self.objective.kind == "mass" else inputs.stats)
        call = ObjectiveCall(self.objective, context, inputs.num_items, sparse=self.sparse)

        def loss_of(batch: Any, autocast: bool) -> Tensor:
            with self.accelerator.autocast() if autocast else contextlib.nullcontext():
                output = self._forward(model, self._prepare_inputs(dict(batch)), call)
            assert output.loss is not None
            raise_pending()
            return output.loss

        lower = self.accelerator.mixed_precision != "no"
        return diagnose(model, inputs.batches, loss_of, attention=self.attention, autocast=lower)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_log or self.control.should_evaluate or self.control.should_save:
            self._look_back()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        # a NaN is an error here: nothing to filter, and to look at the loss after every backward is to wait for it
        filtered, self.args.logging_nan_inf_filter = self.args.logging_nan_inf_filter, False
        try:
            output = super().train(*args, **kwargs)
            self._look_back()
            return output
        finally:
            self.args.logging_nan_inf_filter = filtered
            self._unseen = None
            clear_skip(self.optimizer)

    # --- the records --------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As in SFTTrainer, with statistics of the gate; ``loss`` is the objective, and NLL is logged beside it."""
        mode = "eval" if any(key.startswith("eval_") for key in logs) else "train"
        if mode == "train" and "loss" in logs:
            record = self.last_record = self.records["train"].take()
            logs["loss"] = float(record["objective"])  # pyright: ignore[reportArgumentType]
            logs.update({name: value for name, value in scalars(record).items() if name != "objective"})
            if self.sparse is not None and self.sparse.sums:  # of the last micro-batch, on this rank
                found = self.sparse.report()._asdict()
                logs.update({f"sparse_{name}": value for name, value in found.items() if math.isfinite(value)})
            now = time.perf_counter()
            seconds = max(now - self._clock, 1e-9)
            logs["step_seconds"], self._clock = seconds, now
            logs["tokens_per_second"] = float(self.last_record.get("input_tokens", 0)) / seconds  # pyright: ignore
            logs["clipped"] = float(logs.get("grad_norm", 0.0) > self.args.max_grad_norm > 0)
            logs["memory_gib"] = peak_gib(self.accelerator.device)
        super().log(logs, start_time)
        if self.checkpoint_root is not None:  # metrics.jsonl has all records; the history would grow without bound
            del self.state.log_history[:-HISTORY]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The means over tokens, not over batches: ``eval_loss`` is the objective's, ``eval_nll`` is plain."""
        self.records["eval"].sums, self._held["eval"] = None, []
        clock = time.perf_counter()
        output = super().evaluation_loop(*args, **kwargs)
        self._clock += time.perf_counter() - clock  # not the next training step's
        prefix = kwargs.get("metric_key_prefix", args[4] if len(args) > 4 else "eval")
        self._record_held("eval")
        record = self.records["eval"].take()
        if not record.get("tokens"):
            raise ValueError("evaluation: none of its tokens is supervised; check the mask of the data")
        if output.metrics is not None:
            output.metrics[f"{prefix}_loss"] = float(record["objective"])  # pyright: ignore[reportArgumentType]
            output.metrics.update({f"{prefix}_{k}": v for k, v in scalars(record).items() if k != "objective"})
            if self.score_tasks is not None:
                output.metrics.update({f"{prefix}_{task}": score for task, score in self._task_scores().items()})
        return output

    def _task_scores(self) -> dict[str, float]:
        """The tasks' scores, answered by the main process; every rank gets them, and no rank's random state moves."""
        assert self.score_tasks is not None
        found: list[Any] = [None]
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        clock = time.perf_counter()
        if self.accelerator.is_main_process:
            with torch.random.fork_rng(devices), torch.no_grad():
                found[0] = self.score_tasks(self.accelerator.unwrap_model(self.model_wrapped, keep_torch_compile=False))
        if self.accelerator.num_processes > 1:
            dist.broadcast_object_list(found)
        self._clock += time.perf_counter() - clock
        return found[0]

    def _determine_best_metric(self, *args: Any, **kwargs: Any) -> bool:
        """As in transformers; the best step so far gets a checkpoint, also between multiples of ``save_steps``."""
        is_best = super()._determine_best_metric(*args, **kwargs)
        if is_best and self.checkpoint_root is not None:
            self.control.should_save = True
        return is_best

    def load_checkpoint_weights(self, folder: Path) -> None:
        """Replace the weights (or the adapter) by those of a verified checkpoint."""
        checkpoints.verify(folder)
        if sharded.is_sharded(folder):
            sharded.load(folder, self.model)
            return
        self.state.best_model_checkpoint = str(folder)
        super()._load_best_model()

    # --- the checkpoints ----------------------------------------------------------------------------------------------

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """The run writes its own card."""
        if self.checkpoint_root is None:
            super().create_model_card(*args, **kwargs)

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._staging is None else str(self._staging.parent)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """TRL's checkpoint; below ``checkpoint_root`` it is written under a temporary name, sealed and renamed."""
        if self.checkpoint_root is None:
            super()._save_checkpoint(model, trial)
            return
        root, step = self.checkpoint_root, self.state.global_step
        main = self.accelerator.is_main_process
        # every rank writes into the staging folder of the main one, which seals it when all are done
        staging = root / f"{checkpoints.STAGING}{step}" / f"{checkpoints.PREFIX}{step}"
        with checkpoints.staged(root, step) if main else contextlib.nullcontext():
            self.accelerator.wait_for_everyone()
            self._staging = staging
            clock = time.perf_counter()
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._staging = None
            self.accelerator.wait_for_everyone()
            if main:
                self._flatten(staging, root)
        self._clock += time.perf_counter() - clock
        if main:
            self.rotate_checkpoints()
        self.accelerator.wait_for_everyone()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.distributed_checkpoints:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        sharded.save(Path(output_dir), self.model, self.optimizer)
        scheduler: Any = self.lr_scheduler
        if self.args.should_save:
            torch.save(scheduler.state_dict(), Path(output_dir, "scheduler.pt"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not sharded.is_sharded(Path(resume_from_checkpoint)):  # otherwise together with the optimizer's state
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not sharded.is_sharded(Path(checkpoint)):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        sharded.load(Path(checkpoint), self.model, self.optimizer)
        scheduler: Any = self.lr_scheduler
        scheduler.load_state_dict(torch.load(Path(checkpoint, "scheduler.pt"), weights_only=True))

    def rotate_checkpoints(self) -> None:
        """Remove the checkpoints below ``checkpoint_root`` that are not to be kept."""
        assert self.checkpoint_root is not None
        step, best = self.state.global_step, self.state.best_global_step
        checkpoints.rotate(self.checkpoint_root, self.keep, best, newest=step, pinned=self.pinned)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """As in transformers; the path of the best checkpoint follows a run's folder that was moved."""
        epochs, skipped = super()._init_training_state(*args, **kwargs)
        if self.checkpoint_root is not None and (best := self.state.best_global_step) is not None:
            self.state.best_model_checkpoint = str(self.checkpoint_root / f"{checkpoints.PREFIX}{best}")
        return epochs, skipped

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers, without its extra step after resuming from the checkpoint of the last step."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """As in SFTTrainer; the data workers ignore SIGTERM and SIGINT, on which this process saves and stops."""
        loader: Any = super().get_train_dataloader()
        inner = getattr(loader, "base_dataloader", loader)  # what accelerate's iterates over
        if inner.num_workers:
            inner.worker_init_fn = Undisturbed(inner.worker_init_fn)
        return loader

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """As in transformers; tied weights, which FSDP gathers twice, are written once."""
        if state_dict is not None:
            tied: dict[str, str] = getattr(base_of(self.model), "all_tied_weights_keys", {})
            state_dict = {k: v for k, v in state_dict.items() if tied.get(k) not in state_dict}
        super()._save(output_dir, state_dict=state_dict)

    def _flatten(self, written: Path, root: Path) -> None:
        """The checkpoint's files one level up, where the sealed folder wants them; the state names final places."""
        if (best := self.state.best_global_step) is not None:
            self.state.best_model_checkpoint = str(root / f"{checkpoints.PREFIX}{best}")
        self.state.save_to_json(str(written / "trainer_state.json"))
        for path in list(written.iterdir()):
            path.rename(written.parent / path.name)
        written.rmdir()


class Undisturbed:
    """Start a data worker that ignores SIGTERM and SIGINT; the worker ends when its parent process is gone."""

    def __init__(self, then: Callable[[int], None] | None):
        self.then = then

    def __call__(self, worker: int) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if self.then is not None:
            self.then(worker)


def check_model(model: Any, router_loss: bool, objective: Objective) -> None:
    """Refuse what only the loaded model shows."""
    name = type(base_of(model)).__name__
    if router_loss:
        raise ValueError(
            f"DeftSFTTrainer: {name} has a router loss, which objective={str(objective)!r} would leave out; set "
            f"router_aux_loss_coef=0.0 to train without it"
        )
    if getattr(base_of(model), "is_quantized", False):
        raise ValueError(f"DeftSFTTrainer: {name} is quantised; load the original weights")
    peft = getattr(model, "active_peft_config", None)
    if peft is not None and peft.is_prompt_learning:
        raise ValueError(
            f"DeftSFTTrainer: {type(peft).__name__} puts virtual tokens before the row, which moves its labels; use "
            f"LoRA or another adapter inside the layers"
        )


def save_batches(folder: Path, batches: list[Any]) -> Path:
    """Write a step's micro-batches as safetensors files, one each, for a look or a rerun."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for number, batch in enumerate(batches):
        tensors = {name: value.contiguous().cpu() for name, value in batch.items() if isinstance(value, Tensor)}
        save_file(tensors, folder / f"micro-batch-{number + 1}.safetensors")
    return folder


def rows_of(batch: dict[str, Any]) -> Tensor | None:
    """Which row of the batch a token belongs to; None where TRL's collator laid rows end to end without a trace."""
    labels = batch["labels"]
    if "row_of" in batch:
        return batch["row_of"]
    if "position_ids" in batch and "attention_mask" not in batch:
        return None
    return torch.arange(len(labels), device=labels.device)[:, None]


def input_tokens(inputs: dict[str, Any]) -> Tensor:
    """How many tokens went into the model, padding left out."""
    mask = inputs["row_of"] >= 0 if "row_of" in inputs else inputs.get("attention_mask")
    ids = inputs["input_ids"]
    return torch.full((), ids.numel(), device=ids.device) if mask is None else mask.sum()  # made there: no waiting


def peak_gib(device: torch.device) -> float:
    """The largest memory so far: allocated on a GPU, resident elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource
    import sys

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
