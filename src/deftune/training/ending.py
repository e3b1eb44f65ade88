"""The end of a run: which weights it keeps, and where they go: into memory, a folder, or the hub."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from deftune.artifacts import checkpoints
from deftune.artifacts.config import RunConfig
from deftune.artifacts.folders import FolderError, disk_error, sealed_folder
from deftune.artifacts.runs import Run
from deftune.tokens.head import base_of, detach_objective
from deftune.training.assembly import best_metric
from deftune.training.card import name_base_model, render_card
from deftune.training.machine import is_main
from deftune.training.preparation import Prepared


@dataclass(frozen=True)
class Kept:
    """The step whose weights the run ends with, and by which measure (``train.best``) it was chosen."""

    kept: int
    by: str = "none"
    value: float | None = None
    last: float | None = None  # the measure at the last step
    stopped_early: str | None = None  # why the run ended before its steps were done

    def __str__(self) -> str:
        if self.by == "none":
            return f"the weights of step {self.kept}, the last"
        text = f"the weights of step {self.kept}: best {self.by} {self.value:.4g}"
        if self.value != self.last:
            text += f" (last step: {self.last:.4g})"
        return text + (f"; stopped early: {self.stopped_early}" if self.stopped_early else "")


def keep_best(trainer: Any, config: RunConfig, run: Run) -> Kept:
    """Load the weights that ``train.best`` asks for into the model; by default those of the last step stay."""
    step, best = trainer.state.global_step, trainer.state.best_global_step
    metric = best_metric(config.train.best)
    if metric is None:
        return Kept(step)
    if best is None:
        raise ValueError(
            f"train.best: {config.train.best} was NaN in every evaluation, so no step is the best one; the newest "
            f"checkpoints are in {run.checkpoints}. To keep the last step, train in another folder with train.best=none"
        )
    last = next(r[metric] for r in reversed(trainer.state.log_history) if metric in r)
    if best != step:
        trainer.load_checkpoint_weights(run.checkpoints / f"{checkpoints.PREFIX}{best}")
    early = None
    if trainer.has_stopped_early and step < trainer.state.max_steps:
        number = config.train.stop_after
        early = (
            f"{number} evaluation{'s' * (number != 1)} without improvement at step {step} of {trainer.state.max_steps}"
        )
    return Kept(best, config.train.best, float(trainer.state.best_metric), float(last), early)


@dataclass(frozen=True)
class Untrained:
    """What trainers change in the configs of an untrained model: the cache, and the tokens that end an answer."""

    config: dict[str, Any]
    generation: Any

    @classmethod
    def of(cls, model: Any) -> Untrained:
        names = ("use_cache", "bos_token_id", "eos_token_id", "pad_token_id")
        text = model.config.get_text_config()
        found = {name: getattr(text, name) for name in names if hasattr(text, name)}
        return cls(found, copy.deepcopy(getattr(model, "generation_config", None)))


def take_model(trainer: Any, untrained: Untrained) -> Any:
    """The trained model as `load_result` would load it from the run's folder; the trainer is of no use afterwards.

    The model is in evaluation mode, without the forwards, hooks and checkpointing of the training. The optimizer's
    state and the gradients are freed, so that a GPU has their memory for what follows.
    """
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
    base = base_of(model)
    if trainer.masters is not None:
        trainer.masters.release()
    detach_objective(base)
    for name in ("forward", "_original_forward"):  # accelerate's autocast, around PEFT's wrapper if there is one
        model.__dict__.pop(name, None)
    if any(getattr(module, "gradient_checkpointing", False) for module in base.modules()):
        old, new = "gradient_checkpointing_disable", "activation_checkpointing_disable"  # since transformers 5.23
        getattr(base, new if hasattr(base, new) else old)()
    for module in base.modules():  # TRL and transformers both add this hook, and keep the handle of one
        for key, hook in list(module._forward_hooks.items()):
            if getattr(hook, "__name__", "") == "make_inputs_require_grads":
                del module._forward_hooks[key]
    text = base.config.get_text_config()
    if model is base:  # its own configs are saved with it, but the cache is switched off for the training alone
        if "use_cache" in untrained.config:
            base.config.use_cache = text.use_cache = untrained.config["use_cache"]
    else:  # an adapter is loaded into the untrained model, for inference
        for name, value in untrained.config.items():
            setattr(text, name, value)
        base.generation_config = untrained.generation
        model.requires_grad_(False)
    model.zero_grad(set_to_none=True)
    trainer.optimizer.state.clear()
    trainer.accelerator.free_memory()
    trainer.model = trainer.model_wrapped = trainer.optimizer = trainer.lr_scheduler = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return model.eval()


def save_result(trainer: Any, prepared: Prepared, run: Run, kept: Kept) -> None:
    """The tuned model (or adapter) and its tokenizer, sealed, with a card."""
    trainer.accelerator.wait_for_everyone()
    staging = run.folder / ".model-saving"
    main = is_main()
    try:
        with sealed_folder(staging, run.model) if main else nullcontext():
            trainer.accelerator.wait_for_everyone()
            trainer.save_model(str(staging))
            trainer.accelerator.wait_for_everyone()
            if main:
                prepared.tokenizer.save_pretrained(staging)
                # what the trainer keeps for itself
                (staging / "training_args.bin").unlink(missing_ok=True)
                card = render_card(prepared, run, kept=kept.kept, holds=str(kept))
                (staging / "README.md").write_text(card, encoding="utf-8")
                name_base_model(staging, prepared.config)
    except (OSError, RuntimeError) as error:
        if reason := disk_error(error):
            raise FolderError(f"{run.model}: could not be written ({reason})") from error
        raise
    trainer.accelerator.wait_for_everyone()


def push(run: Run, hub_id: str, say: Callable[[str], None], *, private: bool = False) -> None:
    """Upload the result, on request; ``private`` is for a repository that this call makes."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        api = HfApi()
        api.create_repo(hub_id, private=private, exist_ok=True)
        api.upload_folder(repo_id=hub_id, folder_path=str(run.model))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ValueError(f"push_to_hub: {hub_id}: {error}; the model is safe in {run.model}") from error
    say(f"uploaded to {hub_id}")
