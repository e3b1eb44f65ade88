"""Where the time of a training step goes: `deftune train --profile`.

A few steps of a run are timed without a profiler, the next ones are recorded by torch.profiler with a named range
around every part of a step. An operation belongs to the innermost range that it runs in. An operation of the backward
pass belongs to the part of the forward operation whose gradient it computes; autograd numbers both alike.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import statistics
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile
from transformers import TrainerCallback

from deftune.artifacts.files import write_atomic
from deftune.tokens.head import base_of, head_of

WARMUP, TIMED, RECORDED = 2, 3, 3  # optimizer steps: not counted, timed without the profiler, recorded
STEPS = WARMUP + TIMED + RECORDED + 1  # that a run must have: the recording ends when another step begins
PREFIX = "deftune::"  # of the ranges' names
(EMBEDDING, ATTENTION, MLP, NORMS, COMPILED, HEAD, CASTS, GRADIENTS, OPTIMIZER, DATA, RECORDS, WAITING, PAUSES,
 OTHER) = PARTS = (
    "embedding", "attention", "MLP", "norms", "compiled code", "head + loss", "casts", "gradient sums",
    "optimizer + clipping", "data", "records, logging", "waiting for the GPU", "evaluation, checkpoints", "other",
)  # fmt: skip
# what a step spends its time on in matrix products, by operation and by the name of a GPU's kernel
PRODUCTS = re.compile(r"aten::(mm|addmm|bmm|baddbmm|addbmm|mkldnn_linear|.*attention.*)$|.*varlen_attn")
PRODUCT_KERNELS = re.compile(r"gemm|nvjet|cutlass|xmma|cublas|flash|fmha|attention|matmul|wgmma", re.IGNORECASE)
SYNCHRONIZE = re.compile(r"cuda(Stream|Event|Device)Synchronize")
BUSY = 0.85  # a GPU that is busy for less of a step waits for the host
MANY = 0.2  # a share of a step that making the data must not have


@dataclass(frozen=True)
class Part:
    """A part of a step: milliseconds on the host and on the GPU, and its share of the step."""

    part: str
    host_ms: float
    device_ms: float | None  # None on a CPU
    share: float


@dataclass(frozen=True)
class StepProfile:
    """Where the time of a run's steps went. Times are those of one optimizer step, on this rank."""

    machine: str
    torch: str
    dtype: str  # of the computation
    steps: int  # recorded
    step_ms: float  # without the profiler: the median step
    recorded_step_ms: float
    input_tokens: float
    supervised_tokens: float
    tokens_per_second: float  # of input tokens
    gemm_tflops: float  # what the machine sustains on large matrix products in this dtype, measured in the run
    mfu: float  # share of that rate: the operations that the weights need, over the time of a step
    products: float  # share of the recorded time in matrix products and attention: of the GPU's, on a CPU of the step
    gpu_busy: float | None  # None on a CPU
    parts: list[Part]
    bound: str

    def lines(self) -> list[str]:
        """The profile as a table, with a sentence that says what limits the speed."""
        gpu = self.gpu_busy is not None
        head = f"{'part of a step':24}{'host ms':>10}" + (f"{'GPU ms':>10}" if gpu else "") + f"{'share':>8}"
        rows = [
            f"{part.part:24}{part.host_ms:10.1f}"
            + (f"{part.device_ms or 0.0:10.1f}" if gpu else "")
            + f"{part.share:8.1%}"
            for part in self.parts
        ]
        return [
            f"profile of {self.steps} steps on {self.machine}, torch {self.torch}, {self.dtype}",
            head,
            *rows,
            f"a step takes {self.step_ms:,.1f} ms ({self.recorded_step_ms:,.1f} with the profiler): "
            f"{self.tokens_per_second:,.0f} tokens/s",
            f"{self.mfu:.1%} of the {self.gemm_tflops:.3g} TFLOP/s that large matrix products reach here (MFU)",
            f"what limits the speed: {self.bound}",
        ]


# --- the named ranges -------------------------------------------------------------------------------------------------


def part_of(name: str, module: nn.Module) -> str | None:
    """The part that a module of a decoder layer is, by its name and class; None: it is a part of something else.

    >>> part_of("model.layers.0.self_attn", nn.Identity()), part_of("model.layers.0.mlp.up_proj", nn.Identity())
    ('attention', None)
    """
    last, kind = name.rpartition(".")[2].lower(), type(module).__name__.lower()
    if "norm" in kind:
        return NORMS
    if "rotary" in kind or last in ("self_attn", "attn", "attention", "self_attention", "linear_attn"):
        return ATTENTION
    if last in ("mlp", "feed_forward", "ffn", "moe", "block_sparse_moe"):
        return MLP
    return None


def parts_of(trainer: Any) -> list[tuple[nn.Module, str]]:
    """The modules that are parts of a step. Compiled code has no modules inside."""
    base = base_of(trainer.model)
    if trainer.args.torch_compile:
        return []
    found: list[tuple[nn.Module, str]] = [(base.get_input_embeddings(), EMBEDDING), (head_of(base), HEAD)]
    if trainer.compile_layers:
        found.append((base.base_model, COMPILED))
        names = [(name, module) for name, module in base.base_model.named_children()]
    else:
        names = list(base.named_modules())
    return found + [(module, part) for name, module in names if (part := part_of(name, module))]


@contextlib.contextmanager
def named_ranges(trainer: Any) -> Generator[None]:
    """Inside, torch.profiler sees which part of a step runs. Values do not change."""
    handles: list[Any] = []
    wrapped: list[tuple[Any, str]] = []

    def watch(module: nn.Module, part: str) -> None:
        open_ranges: list[Any] = []

        def enter(*_: Any) -> None:
            open_ranges.append(record_function(PREFIX + part))
            open_ranges[-1].__enter__()

        def leave(*_: Any) -> None:
            if open_ranges:
                open_ranges.pop().__exit__(None, None, None)

        handles.append(module.register_forward_pre_hook(enter, prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))

    def wrap(owner: Any, name: str, part: str) -> None:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def ranged(*args: Any, **kwargs: Any) -> Any:
            with record_function(PREFIX + part):
                return inner(*args, **kwargs)

        setattr(owner, name, ranged)
        wrapped.append((owner, name))

    methods = {
        "get_batch_samples": DATA, "_prepare_inputs": DATA, "log": RECORDS, "_clip_grad_norm": OPTIMIZER,
        "_get_grad_norm": OPTIMIZER, "_save_checkpoint": PAUSES, "_evaluate": PAUSES,
    }  # fmt: skip
    try:
        for module, part in parts_of(trainer):
            watch(module, part)
        for name, part in methods.items():
            wrap(trainer, name, part)
        if trainer.args.torch_compile:
            wrap(trainer, "compute_loss", COMPILED)
        wrap(trainer.records["train"], "add", RECORDS)
        yield
    finally:
        for handle in handles:
            handle.remove()
        for owner, name in wrapped:
            delattr(owner, name)  # the class's own


# --- from events to parts ---------------------------------------------------------------------------------------------


class Attribution:
    """Which part of a step each of the profiler's events belongs to."""

    def __init__(self, events: Iterable[Any]):
        # kernels are counted with the operation that launched them
        self.events = [event for event in events if event.device_type == DeviceType.CPU and not event.is_async]
        self.known: dict[int, str] = {}
        self.forward: dict[tuple[int, int], Any] = {}  # (thread, number of autograd) -> the forward operation
        for event in self.events:
            if event.sequence_nr >= 0 and not event.fwd_thread:
                # operations without a node of their own have the number of the next one, which comes later
                key = event.thread, event.sequence_nr
                if key not in self.forward or event.time_range.start >= self.forward[key].time_range.start:
                    self.forward[key] = event

    def part(self, event: Any) -> str:
        """The innermost range around an event, that of its forward operation, or casts."""
        if id(event) not in self.known:
            found = self.own(event) or (OTHER if event.cpu_parent is None else self.part(event.cpu_parent))
            if event.name == "aten::_to_copy" and found in (EMBEDDING, ATTENTION, MLP, NORMS, HEAD, OTHER):
                found = CASTS
            self.known[id(event)] = found
        return self.known[id(event)]

    def own(self, event: Any) -> str | None:
        """The part that an event itself names."""
        if event.name.startswith(PREFIX):
            return event.name.removeprefix(PREFIX)
        if event.name.startswith("Optimizer."):
            return OPTIMIZER
        if SYNCHRONIZE.match(event.name):
            return WAITING
        if "AccumulateGrad" in event.name:
            return GRADIENTS
        if "ToCopyBackward" in event.name:
            return CASTS
        if event.fwd_thread:  # of the backward pass
            forward = self.forward.get((event.fwd_thread, event.sequence_nr))
            return None if forward is None else self.part(forward)
        return None

    def totals(self) -> tuple[dict[str, float], dict[str, float], float, float]:
        """({part: host us}, {part: GPU us}, us in matrix products on the host, and on the GPU)."""
        host: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        device: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        host_products = device_products = 0.0
        for event in self.events:
            part = self.part(event)
            host[part] += event.self_cpu_time_total
            is_product = PRODUCTS.match(event.name) is not None
            host_products += event.self_cpu_time_total * is_product
            for kernel in event.kernels:
                if kernel.name == event.name:  # a range, drawn once more on the GPU's timeline
                    continue
                device[part] += kernel.duration
                device_products += kernel.duration * (is_product or PRODUCT_KERNELS.search(kernel.name) is not None)
        return host, device, host_products, device_products


# --- rates ------------------------------------------------------------------------------------------------------------


def needed_flops(model: Any, tokens: float, supervised: float) -> float:
    """The operations of the products with a model's weights in a training step.

        2 tokens weights (forward) + 2 tokens weights (dX) + 2 tokens (trained weights) (dW)

    The head is counted for the supervised tokens, the others for all tokens. Attention's products of tokens with
    tokens, activations that are computed twice and the experts of a mixture are not counted.

    Args:
        model: the causal LM, or PEFT's wrapper of one.
        tokens: tokens of the step, without padding.
        supervised: the tokens of them that have a loss.
    """
    base = base_of(model)
    head, embedding = head_of(base).weight, base.get_input_embeddings().weight

    def operations(weight: torch.Tensor) -> float:
        quantised: Any = getattr(weight, "quant_state", None)
        size = weight.numel() if quantised is None else quantised.shape.numel()
        return size * (6.0 if weight.requires_grad else 4.0)

    layers = [p for p in base.parameters() if p.dim() == 2 and p is not head and p is not embedding]
    return tokens * sum(map(operations, layers)) + supervised * operations(head)


def sustained_tflops(device: torch.device, dtype: torch.dtype, seconds: float | None = None) -> float:
    """The rate of large matrix products, repeated for some seconds: a GPU at its power limit slows down meanwhile.

    Args:
        device: where to multiply.
        dtype: of the matrices, which are random: products of zeros take less power and are faster.
        seconds: how long (default: 2 on a GPU, 0.5 elsewhere).
    """
    gpu = device.type == "cuda"
    seconds = (2.0 if gpu else 0.5) if seconds is None else seconds
    size = 8192 if gpu else 1024
    if gpu:
        torch.cuda.empty_cache()  # memory that torch holds for the next step
    if gpu and 4 * size * size * dtype.itemsize > torch.cuda.mem_get_info(device)[0]:
        size = 2048
    generator = torch.Generator(device).manual_seed(0)  # its own: the run's random state stays
    a, b = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def repeat(number: int) -> float:
        start = time.perf_counter()
        for _ in range(number):
            torch.mm(a, b, out=out)
        if gpu:
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    repeat(2)
    once = repeat(3) / 3
    number = max(3, round(seconds / once))
    if gpu:
        repeat(number)  # the first second is a burst
    return 2 * size**3 * number / repeat(number) / 1e12


def what_limits(gpu_busy: float | None, products: float, data: float, *, compiled: bool = False) -> str:
    """What limits the speed of a step, in words.

    Args:
        gpu_busy: the share of a step in which the GPU computes; None on a CPU.
        products: the share of the computation that is matrix products and attention.
        data: the share of a step in which the host makes the data.
        compiled: whether the layers, or the whole model, are compiled.
    """
    if data > MANY and (gpu_busy is None or gpu_busy < BUSY):
        return f"making the batches ({data:.0%} of a step); use data workers (train.workers)"
    if gpu_busy is not None and gpu_busy < BUSY:
        return (
            f"the host launches kernels slower than the GPU runs them (the GPU is busy for {gpu_busy:.0%} of a step); "
            f"larger micro-batches{'' if compiled else ' and train.compile=layers'} make fewer launches"
        )
    busy = "" if gpu_busy is None else f"the GPU is busy for {gpu_busy:.0%} of a step; "
    where = "its time" if gpu_busy is not None else "a step"
    if products >= 0.5:
        return f"{busy}matrix products and attention, which take {products:.0%} of {where}"
    return (
        f"{busy}memory bandwidth: matrix products and attention take {products:.0%} of {where}, the rest is small "
        f"operations that move data (norms, casts, activations, the optimizer)"
    )


def compute_dtype(trainer: Any) -> torch.dtype:
    """The dtype of a trainer's matrix products."""
    if trainer.accelerator.mixed_precision == "bf16":
        return torch.bfloat16
    return head_of(base_of(trainer.model)).weight.dtype


# --- a run ------------------------------------------------------------------------------------------------------------


class StepProfiler(TrainerCallback):
    """A callback that profiles steps of a run: `WARMUP` pass, `TIMED` are timed, `RECORDED` are recorded.

    The weights and losses of the run are those of a run without it. Use it as a context, which ends the recording
    where a run stops early.

        profiler = StepProfiler(lambda: trainer, report=lambda found: print("\\n".join(found.lines())))

    Args:
        get_trainer: the `DeftSFTTrainer`, which is made after its callbacks.
        report: called once with the profile.
        path: also write the profile there, as JSON.
    """

    def __init__(self, get_trainer: Callable[[], Any], report: Callable[[StepProfile], None], path: Path | None = None):
        self.get_trainer, self.report, self.path = get_trainer, report, path
        self.first = 0
        self.timed: list[dict[str, float]] = []
        self.recording = contextlib.ExitStack()
        self.profiler: Any = None
        self.started = 0.0

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(self, *error: object) -> None:
        self.recording.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.first = state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "step_seconds" in logs and WARMUP < state.global_step - self.first <= WARMUP + TIMED:
            self.timed.append(logs)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The batches of this step are made, and the step before is logged: from one such moment to another there are
        # as many steps as sets of batches and as records.
        done = state.global_step - self.first
        if done == WARMUP + TIMED:
            self.start()
        elif done == WARMUP + TIMED + RECORDED:
            self.stop()

    def start(self) -> None:
        """Begin to record."""
        trainer = self.get_trainer()
        before = synchronized(trainer.args.device)
        self.recording.enter_context(silent_kineto())
        gpu = trainer.args.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
        self.recording.enter_context(named_ranges(trainer))
        self.profiler = self.recording.enter_context(torch_profile(activities=activities))
        self.started = synchronized(trainer.args.device)
        trainer._clock += self.started - before  # not this step's time

    def stop(self) -> None:
        """End the recording, and report."""
        trainer = self.get_trainer()
        end = synchronized(trainer.args.device)
        self.recording.close()
        found = summarize(trainer, self.profiler.events(), self.timed, end - self.started)
        self.profiler = None
        if self.path is not None:
            write_atomic(self.path, json.dumps(asdict(found), indent=1))
        self.report(found)
        trainer._clock += time.perf_counter() - end  # not the next step's time


@contextlib.contextmanager
def silent_kineto() -> Generator[None]:
    """torch.profiler's library prints a line when it starts and when it stops; not inside."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "99")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


def synchronized(device: torch.device) -> float:
    """The time when the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def summarize(trainer: Any, events: Iterable[Any], timed: list[dict[str, float]], seconds: float) -> StepProfile:
    """The profile of `RECORDED` steps that took ``seconds``; ``timed`` are the records of steps before them."""
    device = trainer.args.device
    gpu = device.type == "cuda"
    host, kernels, host_products, device_products = Attribution(events).totals()
    recorded_ms = seconds * 1e3 / RECORDED
    step_ms = 1e3 * statistics.median(record["step_seconds"] for record in timed)
    host = {part: us / 1e3 / RECORDED for part, us in host.items()}
    kernels = {part: us / 1e3 / RECORDED for part, us in kernels.items()}
    # Python between the operations; while the GPU's backward pass runs in a thread of its own, this thread waits
    host[OTHER] = max(0.0, recorded_ms - sum(ms for part, ms in host.items() if part != OTHER))
    busy_ms = sum(kernels.values())
    busy = min(1.0, busy_ms / step_ms) if gpu else None
    products = (device_products / 1e3 / RECORDED / max(busy_ms, 1e-9)) if gpu else host_products / 1e6 / seconds
    shares = {part: kernels[part] / step_ms if gpu else host[part] / recorded_ms for part in PARTS}
    parts = [
        Part(part, host[part], kernels[part] if gpu else None, shares[part])
        for part in PARTS
        if host[part] or kernels[part]
    ]
    if gpu:
        idle = max(0.0, step_ms - busy_ms)
        parts.append(Part("GPU idle", 0.0, idle, idle / step_ms))
    dtype = compute_dtype(trainer)
    tokens, supervised = (statistics.mean(record[name] for record in timed) for name in ("input_tokens", "tokens"))
    rate = sustained_tflops(device, dtype)
    threads = torch.get_num_threads()
    machine = torch.cuda.get_device_name(device) if gpu else f"a CPU, {threads} thread{'s' * (threads > 1)}"
    return StepProfile(
        machine, torch.__version__, str(dtype).removeprefix("torch."), RECORDED, step_ms, recorded_ms, tokens,
        supervised, 1e3 * tokens / step_ms, rate,
        needed_flops(trainer.model, tokens, supervised) / (step_ms / 1e3) / (rate * 1e12), products, busy, parts,
        what_limits(busy, products, host[DATA] / recorded_ms, compiled=trainer.compiles),
    )  # fmt: skip
