"""`DeftSFTTrainer`: TRL's SFTTrainer with any objective, through the fused loss.

The loss of an optimizer step is sum L / (supervised tokens of the step), over all micro-batches and ranks: how the
step is divided does not change it.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import time
from collections.abc import Callable, Collection, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from trl import SFTTrainer  # pyright: ignore[reportPrivateImportUsage]
from trl.trainer import sft_trainer

from deftune.artifacts.models import check_loaded, check_readable
from deftune.data.end_tokens import end_tokens_of
from deftune.data.packing import fill_step
from deftune.losses import Sparse
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
from deftune.training.attention import VARLEN, attention_kernels, kernels_of, why_not_varlen
from deftune.training.checkpointing import unsaved
from deftune.training.compiling import compiled_layers
from deftune.training.nonfinite import GuardedTrainer, StepInputs
from deftune.training.optimizers import FLOAT32, Masters
from deftune.training.recording import StepRecord, input_tokens, scalars
from deftune.training.refusals import check_arguments, check_divided, check_masters, check_model, check_parallelism
from deftune.training.stopping import leave_workers_undisturbed

HISTORY = 20  # log records that a checkpoint's trainer_state.json keeps


@contextlib.contextmanager
def whole_models() -> Generator[None]:
    """SFTTrainer loads a model whose files lack tensors, at random values, with a warning; here that is an error.

    Tensors of the files that the model does not have stay a warning of transformers, as long as none is missing.

    Raises:
        ValueError: the files lack tensors of the model (`deftune.artifacts.models.check_loaded`), or cannot be read.
    """
    module: Any = sft_trainer
    load: Callable[..., Any] | None = getattr(module, "create_model_from_path", None)
    if load is None:  # a TRL that loads models in another way; `tests/training/test_weights.py` fails with it
        yield
        return

    def load_whole(source: str, *args: Any, **options: Any) -> Any:
        if os.path.isdir(source):
            check_readable(Path(source))
        model, report = load(source, *args, **{**options, "output_loading_info": True})
        if report["missing_keys"]:
            check_loaded(source, missing=report["missing_keys"], unexpected=report["unexpected_keys"])
        return (model, report) if options.get("output_loading_info") else model

    module.create_model_from_path = load_whole
    try:
        yield
    finally:
        module.create_model_from_path = load


class DeftSFTTrainer(GuardedTrainer):
    """TRL's SFTTrainer, trained with ``objective`` instead of NLL.

        step loss = sum over the step's supervised tokens of L / their number,  d / d z = gate (P - onehot)

    Everything else is SFTTrainer's: datasets, packing, LoRA, callbacks, distributed launchers. The head never makes
    logits; evaluation reports the objective as ``eval_loss`` and plain NLL as ``eval_nll``. Objectives of a whole step
    cost what `deftune objectives show` says: mass objectives rescale the gradients once, step objectives run one more
    forward pass.

    A gradient that is not finite stops the training before the weights change: the step's micro-batches are run again,
    the error names the first layer and operation that are not finite and what to do, and the batch is saved.

        args = trl.SFTConfig(output_dir="out", bf16=False)  # bf16=False on a CPU
        trainer = deftune.DeftSFTTrainer(
            "HuggingFaceTB/SmolLM2-135M-Instruct", args, train_dataset=dataset, objective="deft"
        )
        trainer.train()

    Args:
        model: a hub id, a folder, or a loaded model, as for SFTTrainer.
        args: a ``trl.SFTConfig``.
        objective: a name, a spec such as ``"deft | floor(0.2)"``, or an `Objective`.
        special_ids: the tokens that end an answer, for ``eos(...)`` and the record ``eos_p``; by default those of the
            tokenizer and its chat template (`deftune.data.end_tokens.end_tokens_of`).
        attention: the kernels that ``scaled_dot_product_attention`` may use: ``auto`` (all but cuDNN's, whose backward
            can return NaN for padded batches), ``flash``, ``efficient``, ``math`` or ``cudnn``; or ``varlen``, for a
            collator that lays rows end to end with their boundaries (`deftune.data.packing.Collator`).
        compile_layers: compile each decoder layer with torch.compile while training; layers of one kind share the code.
        weights: ``float32``, or ``bfloat16_with_masters``: the layers' matrices are bfloat16, and AdamW updates float32
            copies of them (`deftune.training.optimizers`); for full fine-tuning with AdamW in one process,
            ``bf16=True`` in ``args``. What is saved is float32.
        sparse: make the head's gradients from a share of the classes (`deftune.Sparse`), an approximation whose error
            is logged as ``sparse_dropped``, ``sparse_error_hidden`` and ``sparse_error_weight``; not for a head with a
            softcap.
        score_tasks: ``score_tasks(model)`` is {task: score}, measured at every evaluation and logged as
            ``eval_<task>``.
        stop_after: end the training after this many evaluations in a row without a new best
            ``metric_for_best_model``.
        checkpoint_root: write verified checkpoints there.
        keep: how many of the newest checkpoints to keep there (None: all); the best one is kept in addition.
        pinned: steps whose checkpoints are kept in addition.
        distributed_checkpoints: write the weights and the optimizer's state with torch.distributed.checkpoint, each
            rank its shards; such a checkpoint resumes on any number of ranks.
        async_checkpoints: write those shards while training goes on, from a copy in the host's memory; with several
            ranks.
    """

    def __init__(self, model: Any, args: Any = None, *positional: Any, objective: str | Objective = "deft",
                 special_ids: tuple[int, ...] | None = None, attention: str = "auto", compile_layers: bool = False,
                 weights: str = FLOAT32, sparse: Sparse | None = None,
                 score_tasks: Callable[[Any], dict[str, float]] | None = None,
                 stop_after: int | None = None, checkpoint_root: Path | None = None,
                 keep: int | None = None, pinned: Collection[int] = (), distributed_checkpoints: bool = False,
                 async_checkpoints: bool = False, **kwargs: Any):  # fmt: skip
        self.objective = parse_objective(objective)
        kernels_of(attention)  # an unknown name is an error before anything is loaded
        self.attention, self.compile_layers = attention, compile_layers
        given = inspect.signature(SFTTrainer.__init__).bind_partial(self, model, args, *positional, **kwargs)
        check_arguments(self.objective, args, given.arguments)
        adapter = given.arguments.get("peft_config")
        check_divided(model, self.objective, getattr(args, "parallelism_config", None), adapter)
        with whole_models(), unsaved(args if distributed_checkpoints else None):
            super().__init__(model, args, *positional, **kwargs)
        parallel = self.accelerator.parallelism_config  # from an accelerate YAML, of which args know nothing
        check_parallelism(self.objective, parallel)
        check_divided(self.model, self.objective, parallel)
        if self.args.fsdp and not self.accelerator.is_fsdp2:
            raise ValueError(
                f"DeftSFTTrainer: fsdp was asked for, but accelerate runs {self.accelerator.distributed_type.value} "
                f"(it shards over GPUs only, and FSDP1 keeps the head's weight from us); use FSDP2, or DDP"
            )
        plugin: Any = self.accelerator.state.fsdp_plugin if self.accelerator.is_fsdp2 else None
        if plugin is not None and (policy := plugin.mixed_precision_policy) is not None:
            # gradients are summed over the ranks in float32, as DDP does, and a loss is not rounded
            plugin.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32, output_dtype=None)
        self.data_ranks = self.accelerator.num_processes // self.get_tp_size()
        check_model(self.model, self.aux_loss_enabled, self.objective)
        if getattr(base_of(self.model), "is_quantized", False):
            prepare_quantised(self.model)
        self.sparse = sparse
        if sparse is not None and head_options(base_of(self.model).config).softcap is not None:
            raise ValueError(
                f"DeftSFTTrainer: sparse cannot be combined with the softcap of {type(base_of(self.model)).__name__}'s "
                f"head; leave sparse out"
            )
        attach_objective(base_of(self.model))
        if attention == VARLEN:
            if (reason := why_not_varlen(self.model, fast=False)) is not None:
                raise ValueError(f"DeftSFTTrainer: attention='varlen': {reason}; use another attention")
            self.check_varlen()
        elif self.padding_free or getattr(self.data_collator, "padding_free", False):
            check_packing(self.model)
        self.special_ids = special_ids or tuple(sorted(end_tokens_of(self._tokenizer).values()))
        if "special_ids" in self.objective.requires and not self.special_ids:
            raise ValueError(
                f"DeftSFTTrainer: {str(self.objective)!r} needs the tokens that end an answer, and the tokenizer has "
                f"none; pass special_ids=(...)"
            )
        self.records = {
            mode: StepRecord(self.objective, self.special_ids, self.get_tp_size()) for mode in ("train", "eval")
        }
        self.score_tasks, self.stop_after = score_tasks, stop_after
        if stop_after is not None and (self.args.metric_for_best_model is None or self.args.eval_strategy != "steps"):
            raise ValueError(
                "DeftSFTTrainer: stop_after needs metric_for_best_model and eval_strategy='steps', which say what must "
                "improve and how often it is measured"
            )
        self.checkpoint_root, self.keep, self.pinned = checkpoint_root, keep, frozenset(pinned)
        self.distributed_checkpoints, self.async_checkpoints = distributed_checkpoints, async_checkpoints
        self.last_record: dict[str, float | list[int]] = {}
        # what is recorded once the whole step, or evaluation set, is known
        self._held: dict[str, list[tuple[TokenStats, Tensor]]] = {"train": [], "eval": []}
        self._clock = time.perf_counter()
        if weights != FLOAT32:  # after the checks, which run without autocast
            check_masters(weights, self)
            self.masters = Masters(base_of(self.model))

    def check_varlen(self) -> None:
        """Refuse a model whose logits change where ``varlen`` joins two rows."""
        with self.accelerator.autocast():
            check_packing(self.model, attention=lambda: attention_kernels(VARLEN, self.model))

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

    def _call(self, step: StepInputs) -> ObjectiveCall:
        """The objective for a micro-batch of a step."""
        context = self._context("deferred" if self.objective.kind == "mass" else step.stats)
        return ObjectiveCall(self.objective, context, step.num_items, sparse=self.sparse)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """The step's micro-batches; a step without supervised tokens is an error."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches:
            return batches, num_items
        assert num_items is not None, "batches have labels: DeftSFTTrainer's collators make them"
        batches = fill_step(batches, num_batches)
        inputs = StepInputs(self.state.global_step + 1, batches, int(num_items))
        if inputs.num_items == 0:
            raise ValueError(
                f"training step {self.state.global_step + 1}: none of its tokens is supervised, on any rank, so it has "
                f"no loss; check the mask of the data (`deftune data preview`)"
            )
        self._held["train"] = []
        self._inputs_before, self._inputs = self._inputs, inputs
        return batches, num_items

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        dataset: Any = self.train_dataset
        if batch_samples and hasattr(dataset, "__len__") and not self.args.dataloader_drop_last:
            self._mask_repeats(batch_samples[-1], self._train_batch_size, len(dataset))
        return super()._get_num_items_in_batch(batch_samples, device)

    def _mask_repeats(self, batch: dict[str, Any], rows: int, total: int) -> None:
        """Mask the rows that fill up the last batches of an epoch: they are its first rows, trained already."""
        ranks = self.data_ranks
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
        call = self._call(step)
        try:
            output = self._forward(model, inputs, call)
        except ValueError as error:  # on a CPU a NaN is seen at once
            if "NaN" in str(error) and "training step" not in str(error):
                self.state.global_step = step.step - 1
                raise self._explained(step, error) from error
            raise
        assert output.loss is not None
        if self.objective.kind == "mass":
            mass = self.objective.mass(output.stats, call.context).sum()
            step.mass = mass if step.mass is None else step.mass + mass
            step.loss = step.loss + output.loss.detach() * self.data_ranks
            self._held["train"].append((output.stats, input_tokens(inputs)))
        else:
            self.records["train"].add(output.stats, call.context, input_tokens(inputs), output.gated)
        # the mean is over all ranks' tokens, and DDP and FSDP will divide by their number
        return output.loss * self.data_ranks

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
        with attention_kernels(self.attention, self.model):
            return super().training_step(model, inputs, num_items_in_batch)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        inputs = self._prepare_inputs(inputs)
        loader: Any = self.accelerator.gradient_state.active_dataloader
        if loader is not None and hasattr(loader.dataset, "__len__") and not self.args.dataloader_drop_last:
            self._mask_repeats(inputs, self.args.eval_batch_size, len(loader.dataset))
        with torch.no_grad(), self.compute_loss_context_manager(), attention_kernels(self.attention, self.model):
            return self.compute_loss(model, inputs).detach(), None, None

    def _before_clipping(self, model: Any) -> None:
        """A mass objective's gradients and loss are divided by its mass, once."""
        step = self._inputs
        if step is None or step.mass is None:
            return
        self._record_held("train")
        mass, step.mass = step.mass, None
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(mass)
        factor = 0.0 if float(mass) == 0 else step.num_items / float(mass)
        self._tr_loss += (factor - 1) * step.loss  # transformers' sum, of which `train_loss` is made
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _loss_again(self, model: Any, batch: Any, inputs: StepInputs) -> Tensor:
        output = self._forward(model, self._prepare_inputs(dict(batch)), self._call(inputs))
        assert output.loss is not None
        return output.loss

    def layers_compiled(self) -> AbstractContextManager[None]:
        """Inside, the decoder layers are compiled, if they are to be."""
        if not self.compile_layers:
            return nullcontext()
        return compiled_layers(self.model, dynamic=self.attention == VARLEN or None)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with self.layers_compiled():
            return super().train(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; with masters, over them."""
        new = getattr(self, "optimizer", None) is None
        super().create_optimizer(*args, **kwargs)
        if self.masters is not None and new:
            self.optimizer = self.masters.drive(self.optimizer)
        return self.optimizer

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
        # plain layers: the graphs of training do not fit a forward without gradients, nor the sampler of the tasks
        with torch.compiler.set_stance("force_eager") if self.compiles else nullcontext():
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
            plain = torch.compiler.set_stance("force_eager") if self.compiles else nullcontext()
            with torch.random.fork_rng(devices), torch.no_grad(), self.whole_weights(), plain:
                found[0] = self.score_tasks(self.accelerator.unwrap_model(self.model_wrapped, keep_torch_compile=False))
        if self.accelerator.num_processes > 1:
            dist.broadcast_object_list(found)
        self._clock += time.perf_counter() - clock
        return found[0]

    def _determine_best_metric(self, *args: Any, **kwargs: Any) -> bool:
        """As in transformers; the best step so far gets a checkpoint, also between multiples of ``save_steps``."""
        is_best = super()._determine_best_metric(*args, **kwargs)
        stops = self.has_stopped_early
        if (is_best or stops) and self.checkpoint_root is not None:
            self.control.should_save = True
        if stops:
            self.control.should_training_stop = True
        return is_best

    @property
    def has_stopped_early(self) -> bool:
        """Whether ``stop_after`` evaluations have passed since the best one; a checkpoint's state is enough to know."""
        if self.stop_after is None or self.state.best_global_step is None:
            return False
        every = int(self.args.eval_steps or 1)
        evaluations = self.state.global_step // every - self.state.best_global_step // every
        return evaluations >= self.stop_after

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers, without its extra step after resuming from the checkpoint of the last step."""
        if self.state.global_step >= self.state.max_steps or self.has_stopped_early:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """As in SFTTrainer; the data workers ignore SIGTERM and SIGINT, on which this process saves and stops."""
        loader: Any = super().get_train_dataloader()
        inner = getattr(loader, "base_dataloader", loader)  # what accelerate's iterates over
        if inner.num_workers:
            leave_workers_undisturbed(inner)
        return loader


def rows_of(batch: dict[str, Any]) -> Tensor | None:
    """Which row of the batch a token belongs to; None where TRL's collator laid rows end to end without a trace."""
    labels = batch["labels"]
    if "row_of" in batch:
        return batch["row_of"]
    if "position_ids" in batch and "attention_mask" not in batch:
        return None
    return torch.arange(len(labels), device=labels.device)[:, None]


def prepare_quantised(model: Any) -> None:
    """Adapters in float32 over 4-bit layers whose gradients are right on a CPU, too."""
    for parameter in model.parameters():
        if parameter.requires_grad:  # TRL rounds adapters to bfloat16, which rounds most of AdamW's updates to nothing
            parameter.data = parameter.data.float()
    for name, module in model.named_modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # an evaluation would pack the weights for a CPU kernel that has no gradient, and training would go on
            module.support_avx512bf16_for_cpu = False
            if getattr(module.weight.quant_state, "packing_format_for_cpu", False):
                raise ValueError(
                    f"DeftSFTTrainer: bitsandbytes has packed {name} for inference on a CPU, which has no gradient; "
                    f"load the model again and train it before it is evaluated"
                )


def peak_gib(device: torch.device) -> float:
    """The largest memory so far: allocated on a GPU, resident elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource
    import sys

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
