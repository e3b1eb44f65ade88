"""Keep NaN out of the weights without making the host wait for the GPU, and say where it came from.

torch's fused Adam skips an update where the device tensor ``found_inf``, which gradient scalers set, is not 0. Here it
is set where the norm of the gradient is not finite; the host reads the norm later.
"""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deftune.losses import raise_pending
from deftune.losses.pending import pending_flags
from deftune.objectives import StepStats
from deftune.training.batches import save_batches
from deftune.training.checkpointing import CheckpointingTrainer
from deftune.training.nonfinite import Diagnosis, diagnose


def skip_nonfinite(optimizer: Any, norm: Any) -> Tensor | None:
    """Make the optimizer skip its next update where the gradient, or the log p of a token, is not finite.

    Returns:
        A bool tensor on the device: whether the update is skipped. None where the optimizer cannot skip on the device:
        it is not a fused Adam, or the parameters are FSDP2's.
    """
    clear_skip(optimizer)
    inner: Any = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
    if type(inner) not in (torch.optim.Adam, torch.optim.AdamW) or not all(g["fused"] for g in inner.param_groups):
        return None
    sharded = any(hasattr(p, "full_tensor") for group in inner.param_groups for p in group["params"])
    if sharded or not isinstance(norm, Tensor) or norm.device.type not in ("cuda", "cpu"):
        return None
    flags = pending_flags(norm.device)
    if flags is None:
        return None
    bad = torch.cat([~norm.isfinite().reshape(1), *[flag.reshape(-1) != 0 for flag in flags]]).any()
    inner.found_inf = bad.float()
    return bad


def clear_skip(optimizer: Any) -> None:
    """Remove ``found_inf``, which is of one step."""
    inner: Any = getattr(optimizer, "optimizer", optimizer)
    if hasattr(inner, "found_inf"):
        del inner.found_inf


class UnseenNorm:
    """The norm of a step's gradient, and whether the step was skipped: not yet copied to the host."""

    def __init__(self, step: int, norm: Any, bad: Tensor | None):
        self.step, self.norm, self.there, self.done = step, norm, bad, None
        self.skips = bad is not None  # on the device; else the host must look before the update
        if bad is not None and bad.is_cuda:
            self.there = bad.to("cpu", non_blocking=True)
            self.done = torch.cuda.current_stream(bad.device).record_event()

    def bad(self) -> bool:
        if self.done is not None:
            self.done.synchronize()
        if self.there is not None:
            return bool(self.there)
        raise_pending()  # the optimizer has not stepped yet
        return not math.isfinite(float(self.norm))


@dataclass
class StepInputs:
    """The micro-batches of an optimizer step, kept until its gradient is known to be finite."""

    step: int
    batches: list[Any]
    num_items: int
    stats: StepStats | None = None  # of the whole step, for objectives that need them
    mass: Tensor | None = None  # of a mass objective: the sum over this rank's micro-batches, until it is applied
    loss: Tensor | float = 0.0  # of a mass objective: the sum of losses, not yet divided by the mass


class GuardedTrainer(CheckpointingTrainer):
    """Stops before a gradient that is not finite changes the weights; the error says what reruns of the step show."""

    attention: str = "auto"  # the kernels that the reruns use, too
    _inputs: StepInputs | None = None  # of the step that is computed
    _inputs_before: StepInputs | None = None
    _unseen: UnseenNorm | None = None

    def _before_clipping(self, model: Any) -> None:
        """For a subclass: change the gradients of a step, which are complete now."""

    def _loss_again(self, model: Any, batch: Any, inputs: StepInputs) -> Tensor:
        """For a subclass: the loss of one micro-batch of a step."""
        raise NotImplementedError

    def _clip_grad_norm(self, model: Any) -> Any:
        trained = self.masters or model
        self._before_clipping(trained)
        return super()._clip_grad_norm(trained)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """As in transformers, and have the optimizer skip an update whose gradient is not finite."""
        trained = self.masters or model
        if grad_norm is None:  # clipping is off
            self._before_clipping(trained)
        norm = super()._get_grad_norm(trained, grad_norm)
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

    def _explained(self, inputs: StepInputs, why: ValueError) -> ValueError:
        """The error of a step that was not finite: what reruns of its micro-batches show, and where they are saved."""
        text = f"training step {inputs.step}: {why}; the weights were not changed."
        folder = (self.checkpoint_root or Path(self.args.output_dir or ".") / "checkpoints").parent / "nonfinite"
        name = f"step-{inputs.step}" + (f"-rank{dist.get_rank()}" if self.accelerator.num_processes > 1 else "")
        try:
            saved = save_batches(folder / name, inputs.batches)
            text += f" Its micro-batches are in {saved}."
        except Exception as error:  # a full disk, of which safetensors has a class of its own
            text += f" Its micro-batches could not be saved ({error})."
        if self.accelerator.is_fsdp2 or self.get_tp_size() > 1:
            return ValueError(text + " They were not run again: the model is sharded.")
        try:
            found = self._diagnose(inputs)
        except Exception as error:  # the reruns must not hide what they were to explain
            return ValueError(f"{text} Running them again failed ({type(error).__name__}: {error}).")
        with contextlib.suppress(OSError):
            (folder / name / "diagnosis.json").write_text(json.dumps(asdict(found), indent=1), encoding="utf-8")
        return ValueError(f"{text} {found}")

    def _diagnose(self, inputs: StepInputs) -> Diagnosis:
        """Run the micro-batches of a step again, on this rank alone."""
        model = self.accelerator.unwrap_model(self.model_wrapped, keep_torch_compile=False)
        model.train()
        self._unseen = None

        def loss_of(batch: Any, autocast: bool) -> Tensor:
            # bfloat16 weights take no float32 states: without autocast they could not be run at all
            with self.accelerator.autocast() if autocast or self.masters else contextlib.nullcontext():
                loss = self._loss_again(model, batch, inputs)
            raise_pending()
            return loss

        lower = self.accelerator.mixed_precision != "no" and self.masters is None
        with self.masters.paused() if self.masters else contextlib.nullcontext():
            return diagnose(model, inputs.batches, loss_of, attention=self.attention, autocast=lower)
