"""Keep NaN out of the weights without making the host wait for the GPU, and find where it came from.

torch's fused Adam skips an update where the device tensor ``found_inf``, which gradient scalers set, is not 0. Here it
is set where the norm of the gradient is not finite; the host reads the norm later.

A NaN may come from damaged weights, from an overflow in one layer, or from a kernel that is wrong for one batch shape.
Each needs another remedy, so `diagnose` runs the micro-batches of the step again, and the advice follows from what the
reruns show.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deftune.losses import raise_pending
from deftune.losses.pending import pending_flags
from deftune.objectives import StepStats
from deftune.training.attention import KERNELS, VARLEN, attention_kernels
from deftune.training.checkpointing import CheckpointingTrainer
from deftune.training.optimizers import MasterAdamW

FINITE, NOT_FINITE, UNAVAILABLE = "finite", "not finite", "unavailable"


# --- the guard --------------------------------------------------------------------------------------------------------


def skip_nonfinite(optimizer: Any, norm: Any) -> Tensor | None:
    """Make the optimizer skip its next update where the gradient, or the log p of a token, is not finite.

    Returns:
        A bool tensor on the device: whether the update is skipped. None where the optimizer cannot skip on the device:
        it is not a fused Adam, or the parameters are FSDP2's.
    """
    clear_skip(optimizer)
    inner: Any = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
    skipping = (torch.optim.Adam, torch.optim.AdamW, MasterAdamW)
    if type(inner) not in skipping or not all(g["fused"] for g in inner.param_groups):
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
    compile_layers: bool = False
    _inputs: StepInputs | None = None  # of the step that is computed
    _inputs_before: StepInputs | None = None
    _unseen: UnseenNorm | None = None

    @property
    def compiles(self) -> bool:
        """Whether torch.compile's code computes the step."""
        return self.compile_layers or self.args.torch_compile

    def _before_clipping(self, model: Any) -> None:
        """For a subclass: change the gradients of a step, which are complete now."""

    def _loss_again(self, model: Any, batch: Any, inputs: StepInputs) -> Tensor:
        """For a subclass: the loss of one micro-batch of a step."""
        raise NotImplementedError

    def _clip_grad_norm(self, model: Any) -> Any:
        trained = self.masters or model
        self._before_clipping(trained)
        if self.masters is not None and self.masters.optimizer is not None:
            return self.masters.clip(self.args.max_grad_norm)
        return super()._clip_grad_norm(trained)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """As in transformers, and have the optimizer skip an update whose gradient is not finite."""
        trained = self.masters or model
        if grad_norm is None:  # clipping is off
            self._before_clipping(trained)
            if self.masters is not None and self.masters.optimizer is not None:
                grad_norm = self.masters.clip(None)
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
        model: Any = self.accelerator.unwrap_model(self.model_wrapped, keep_torch_compile=False)
        model.train()
        self._unseen = None

        def loss_of(batch: Any, autocast: bool) -> Tensor:
            with self.accelerator.autocast() if autocast else own_forward(model):
                loss = self._loss_again(model, batch, inputs)
            raise_pending()
            return loss

        lower = self.accelerator.mixed_precision != "no"
        with self.masters.paused() if self.masters else contextlib.nullcontext():
            # autocast rounds the masters to the weights of the run, and float32 can be tried, too
            with self.whole_weights(), torch.compiler.set_stance("force_eager"):  # compiled code would hide its modules
                found = diagnose(model, inputs.batches, loss_of, attention=self.attention, autocast=lower)
            if found.micro_batch is None and found.weights is None and self.compiles:
                model = self.model_wrapped  # compiled as a whole, if it is; loss_of takes this model now
                with attention_kernels(self.attention, self.model):
                    wrong = (n for n, batch in enumerate(inputs.batches)
                             if not backward(model, partial(loss_of, batch, lower)))  # fmt: skip
                    found = replace(found, compiled=next(wrong, None))
                model.zero_grad(set_to_none=True)
            return found


@contextlib.contextmanager
def own_forward(model: Any) -> Generator[None]:
    """Inside, the model's forward is its own, without the autocast that accelerate wraps around it."""
    wrapped = model.__dict__.get("forward")
    if wrapped is None or "_original_forward" not in model.__dict__:
        yield
        return
    model.forward = model._original_forward
    try:
        yield
    finally:
        model.forward = wrapped


def save_batches(folder: Path, batches: list[Any]) -> Path:
    """Write a step's micro-batches as safetensors files, one each, for a look or a rerun."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for number, batch in enumerate(batches):
        # copies: some are one tensor under two names, which safetensors refuses
        tensors = {name: value.cpu().clone().contiguous() for name, value in batch.items() if isinstance(value, Tensor)}
        save_file(tensors, folder / f"micro-batch-{number + 1}.safetensors")
    return folder


# --- the diagnosis ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Diagnosis:
    """What reruns of the micro-batches showed. Names are those of the model's modules and parameters."""

    micro_batches: int
    micro_batch: int | None = None  # the first that is not finite when it is run again, from 0
    weights: str | None = None  # a parameter that holds NaN or infinity
    forward: str | None = None  # the first module whose output is not finite although its input is
    gradient: str | None = None  # the module nearest to the loss with a gradient that is not finite
    operation: str | None = None  # the autograd function that returned the first NaN
    float32: str | None = None  # the same micro-batch without autocast
    compiled: int | None = None  # the first micro-batch that is not finite in compiled code alone
    attention: str = "auto"  # the choice of kernels that the run had
    kernels: dict[str, str] = field(default_factory=dict)  # attention kernel -> finite, not finite, unavailable

    def __str__(self) -> str:
        return f"{self.findings()} {self.advice()}"

    def findings(self) -> str:
        if self.weights is not None:
            return f"The weight {self.weights} is not finite."
        if self.compiled is not None:
            return (
                f"Micro-batch {self.compiled + 1} of {self.micro_batches}, run again, is not finite in the code of "
                f"torch.compile, and finite without."
            )
        if self.micro_batch is None:
            return f"Run again, each of the step's {self.micro_batches} micro-batches has finite gradients."
        place = f"Micro-batch {self.micro_batch + 1} of {self.micro_batches}, run again"
        if self.forward is not None:
            text = f"{place}: the forward pass is not finite, first in {self.forward}"
        else:
            by = f" ({self.operation})" if self.operation else ""
            text = f"{place}: the forward pass is finite, the backward pass is not, first in {self.gradient}{by}"
        if self.float32 is not None:
            text += f"; in float32 it is {self.float32}"
        if self.kernels:
            tried = ", ".join(f"{name} {result}" for name, result in self.kernels.items())
            text += f"; attention kernels on this micro-batch: {tried}"
        return text + "."

    def advice(self) -> str:
        """What to do, by what was found."""
        good = [name for name, result in self.kernels.items() if result == FINITE]
        wrong = [name for name, result in self.kernels.items() if result == NOT_FINITE]
        if self.weights is not None:
            return "The model was damaged before this step; start from whole weights, or from an earlier checkpoint."
        if self.compiled is not None:
            return "The compiled code is at fault: set train.compile=false."
        if self.micro_batch is None:
            return (
                "The failure did not repeat: suspect a kernel that is not deterministic, or the hardware. The same "
                "command resumes from the last checkpoint."
            )
        if good and wrong:
            if self.attention == "cudnn" and "cudnn" in wrong:
                return "The attention kernel is at fault: set train.attention=auto, which leaves cudnn out."
            return f"The attention kernel is at fault: set train.attention={good[0]}."
        if self.float32 == FINITE:
            return f"bfloat16 overflows there: set train.precision=fp32, or look at what makes {self._place} so large."
        return (
            "No other precision or attention kernel makes it finite: look at the rows of this micro-batch, and whether "
            "the loss rose in the steps before (then lower the learning rate)."
        )

    @property
    def _place(self) -> str:
        return self.forward or self.gradient or "this layer"


def diagnose(
    model: nn.Module, batches: Sequence[Any], loss_of: Callable[[Any, bool], Tensor], *, attention: str = "auto",
    autocast: bool = False,
) -> Diagnosis:  # fmt: skip
    """Run a step's micro-batches again and say where the first value that is not finite appears.

    Args:
        model: the module that is trained; its gradients are overwritten.
        batches: the micro-batches of the step.
        loss_of: ``loss_of(batch, autocast)`` is the loss of one micro-batch, connected to the parameters.
        attention: the run's choice of attention kernels, which the reruns use too.
        autocast: whether the run computes in lower precision; then the micro-batch is tried in float32 too.
    """
    found: dict[str, Any] = {"micro_batches": len(batches), "attention": attention}
    for name, parameter in model.named_parameters():
        if not is_finite(parameter):
            return Diagnosis(**found, weights=name)
    for number, batch in enumerate(batches):
        loss = partial(loss_of, batch, autocast)
        with attention_kernels(attention, model), Watch(model) as watch:
            finite = backward(model, loss)
        if finite:
            continue
        found["micro_batch"] = number
        found["forward"] = watch.forward
        if watch.forward is None:
            found["gradient"] = watch.gradient
            with attention_kernels(attention, model):
                found["operation"] = operation_of_nan(model, loss)
        if autocast:
            with attention_kernels(attention, model):
                found["float32"] = outcome(model, partial(loss_of, batch, False))
        config: Any = getattr(model, "config", None)
        if getattr(config, "_attn_implementation", None) == "sdpa":
            failed = {VARLEN: NOT_FINITE} if attention == VARLEN else {}
            found["kernels"] = failed | {name: try_kernel(model, name, loss) for name in KERNELS}
        break
    model.zero_grad(set_to_none=True)
    return Diagnosis(**found)


class Watch:
    """While it is entered, the first places of a forward and backward pass that are not finite.

    ``forward``: the first module whose output is not finite although its input is.
    ``gradient``: the module of the first parameter whose gradient arrives and is not finite.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.forward: str | None = None
        self.gradient: str | None = None
        self.handles: list[Any] = []

    def __enter__(self) -> Watch:
        for name, module in self.model.named_modules():

            def look(_: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                if self.forward is None and not is_finite(output):
                    if is_finite((args, kwargs.get("hidden_states"))):
                        self.forward = name or type(self.model).__name__

            self.handles.append(module.register_forward_hook(look, with_kwargs=True))
        for name, parameter in self.model.named_parameters():

            def arrived(parameter: Tensor, name: str = name) -> None:
                if self.gradient is None and not is_finite(parameter.grad):
                    self.gradient = module_of(name)

            if parameter.requires_grad:
                self.handles.append(parameter.register_post_accumulate_grad_hook(arrived))
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self.handles:
            handle.remove()


def module_of(parameter: str) -> str:
    """The module that a parameter belongs to; of an attention's projections, the attention.

    >>> module_of("model.layers.15.self_attn.v_proj.weight")
    'model.layers.15.self_attn'
    """
    owner = parameter.rpartition(".")[0]
    attention = re.search(r"^(.*(?:attn|attention))\.", owner)
    return attention.group(1) if attention else owner


def is_finite(value: Any) -> bool:
    """Whether every floating-point tensor in a module's input or output is finite."""
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    if isinstance(value, dict):
        return all(is_finite(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(is_finite(item) for item in value)
    return True


def backward(model: nn.Module, loss: Callable[[], Tensor]) -> bool:
    """Whether the loss and every gradient are finite. A loss that refuses NaN logits counts as not finite."""
    model.zero_grad(set_to_none=True)
    try:
        value = loss()
        value.backward()
    except ValueError as error:
        if "NaN" not in str(error):
            raise
        return False
    return is_finite([value, *(parameter.grad for parameter in model.parameters())])


def operation_of_nan(model: nn.Module, loss: Callable[[], Tensor]) -> str | None:
    """The autograd function that returns the first NaN of the backward pass; None where none does."""
    model.zero_grad(set_to_none=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch prints the forward pass's traceback, 40 lines of library code
            with torch.autograd.detect_anomaly(check_nan=True):
                loss().backward()
    except (RuntimeError, ValueError) as error:
        match = re.search(r"Function '(\w+)' returned nan", str(error))
        return match.group(1) if match else None
    return None


def outcome(model: nn.Module, loss: Callable[[], Tensor]) -> str:
    return FINITE if backward(model, loss) else NOT_FINITE


def try_kernel(model: nn.Module, name: str, loss: Callable[[], Tensor]) -> str:
    """The outcome with one attention kernel; unavailable where torch has none for this batch."""
    try:
        with attention_kernels(name):
            return outcome(model, loss)
    except RuntimeError as error:
        if "No available kernel" in str(error) or "No viable backend" in str(error):
            return UNAVAILABLE
        raise
