"""What this machine has for a run, and whether the parts that a run cannot do without work here."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import warnings
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deftune.losses import linear_loss, raise_pending
from deftune.losses.backends import choose
from deftune.losses.head import Head
from deftune.losses.request import make_request
from deftune.objectives import objective
from deftune.training.attention import (
    AUTO,
    KERNELS,
    VARLEN,
    attend_rows,
    attention_kernels,
    auto_precision,
    why_no_varlen_kernel,
)
from deftune.training.compiling import why_no_compiler
from deftune.training.host_memory import memory_limit

PACKAGES = ("torch", "triton", "numpy", "matplotlib", "transformers", "trl", "peft", "accelerate", "datasets",
            "liger-kernel", "bitsandbytes", "flash-attn", "vllm")  # fmt: skip
EXTRA = ("transformers", "trl", "datasets", "pydantic")  # what training needs beside torch
WORKS = "works"


class Tried(NamedTuple):
    """A part that was tried: where, what was taken and why, and ``works`` or what went wrong."""

    place: str
    name: str
    why: str
    verdict: str


@dataclass
class Checkup:
    """What `checkup` found; ``broken`` names what a run needs and does not work."""

    packages: dict[str, str | None]
    machine: dict[str, str]
    run: dict[str, str] = field(default_factory=dict[str, str])
    attention: list[Tried] = field(default_factory=list[Tried])
    loss: list[Tried] = field(default_factory=list[Tried])
    broken: list[str] = field(default_factory=list[str])


def checkup() -> Checkup:
    """Look at the packages and the machine, and try attention kernels and the fused loss on small inputs.

    A part that a run may use is compared with float64 arithmetic, forward and backward. Takes seconds.

    Returns:
        The findings. ``broken`` is empty if a run can start here.

    Example::

        found = checkup()
        assert not found.broken, found.broken
    """
    found = Checkup({name: version(name) for name in PACKAGES}, machine_facts())
    devices = [torch.device("cpu")]
    trouble = why_gpu_fails()
    if trouble is not None:
        found.broken.append(f"the GPU cannot be used: {trouble}")
    elif torch.cuda.is_available():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    found.loss = [try_loss(device, dtype) for device in devices
                  for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)]  # fmt: skip
    found.broken += [f"fused loss on {one.place}: {one.verdict}" for one in found.loss if one.verdict != WORKS]
    precision = auto_precision() if trouble is None else "fp32"
    device, dtype = devices[-1], torch.bfloat16 if precision == "bf16" else torch.float32
    lacks = (
        "the GPU cannot be used"
        if trouble
        else why_no_varlen_kernel() or (None if precision == "bf16" else "the run computes in float32")
    )
    found.attention = [try_kernel(name, device, dtype) for name in KERNELS]
    if lacks is None:
        found.attention.append(try_kernel(VARLEN, device, dtype))
    wrong = {one.name: one.verdict for one in found.attention if one.verdict.startswith("WRONG")}
    usable = [one.name for one in found.attention if one.name in AUTO and one.verdict == WORKS]
    found.broken += [
        f"attention kernel {name}: {verdict}" for name, verdict in wrong.items() if name in (*AUTO, VARLEN)
    ]
    if not usable:
        found.broken.append("attention: no kernel of train.attention=auto works on a padded batch")
    without = why_no_compiler() if lacks is None else f"no {VARLEN} attention"
    found.run = {
        "compute dtype": f"{precision}: " + (
            "the GPU has bfloat16" if precision == "bf16" else
            "no GPU with bfloat16 is visible" if trouble is None else "the GPU cannot be used"
        ),
        "train.attention: auto": (
            f"{VARLEN}, if the model allows it; else {', '.join(usable)}" if lacks is None
            else f"sdpa with {', '.join(usable) or 'nothing'} (no {VARLEN}: {lacks})"
        ),
        "train.weights: auto": (
            "bfloat16_with_masters for full fine-tuning with adamw, else float32" if precision == "bf16" else "float32"
        ),
        "train.compile: auto": (
            "layers for full fine-tuning from 300 micro-batches on, else false" if without is None
            else f"false ({without})"
        ),
    }  # fmt: skip
    if missing := [name for name in EXTRA if find_spec(name) is None]:
        found.run["training"] = f'not installed: {", ".join(missing)}; pip install "deftune[train]"'
    return found


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def why_gpu_fails() -> str | None:
    """Why the GPU that a run would take computes nothing: it is full, or another process has it to itself; else None.

    The first use of a GPU reserves memory there, so that a full one fails at whatever comes first.
    """
    if not torch.cuda.is_available():
        return None
    try:
        torch.zeros(1, device="cuda").add_(1).item()
    except Exception as error:  # a diagnosis reports whatever it meets
        return one_line(error)
    return None


def one_line(error: Exception) -> str:
    """The first line of an error, which has its class in front; CUDA's errors go on with advice."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".removesuffix(": ")


def machine_facts() -> dict[str, str]:
    """Processors, memory of the machine or its container, GPUs, and the cache with the space left on its disk."""
    gib = 2**30
    facts = {"cpu": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads for torch"}
    facts["memory"] = f"{memory_limit() / gib:.1f} GiB"
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        try:
            free, total = torch.cuda.mem_get_info(number)
            major, minor = torch.cuda.get_device_capability(number)
            facts[f"gpu {number}"] = (
                f"{torch.cuda.get_device_name(number)}, {free / gib:.1f} of {total / gib:.1f} GiB free, "
                f"compute capability {major}.{minor}, CUDA {torch.version.cuda}"
            )
        except Exception as error:  # a full one, or one that another process has to itself
            facts[f"gpu {number}"] = f"cannot be used: {one_line(error)}"
    if "gpu 0" not in facts:
        facts["gpu"] = "none that torch can use" + ("" if torch.version.cuda else "; this torch is built without CUDA")
    if find_spec("pydantic") is not None:
        from deftune.artifacts.files import cache_folder

        folder = cache_folder()
        there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        facts["cache"] = f"{folder}, {shutil.disk_usage(there).free / gib:.1f} GiB free"
    facts["this folder"] = f"{shutil.disk_usage(Path.cwd()).free / gib:.1f} GiB free"
    return facts


# --- attention --------------------------------------------------------------------------------------------------------

LENGTHS = (24, 17)  # of the rows; the second is padded
HEADS, KEY_HEADS, WIDTH = 4, 2, 32


def attention_result(name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Output and gradients of causal attention over two rows, real tokens only; as float64 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    longest = max(LENGTHS)
    rows = [torch.randn(len(LENGTHS), heads, longest, WIDTH, generator=generator)
            for heads in (HEADS, KEY_HEADS, KEY_HEADS)]  # fmt: skip
    upstream = torch.randn(len(LENGTHS), HEADS, longest, WIDTH, generator=generator)
    real = torch.arange(longest)[None] < torch.tensor(LENGTHS)[:, None]  # [B, T]
    upstream = upstream * real[:, None, :, None]  # padding has no loss
    query, key, value = (row.to(torch.bfloat16).to(device, dtype).requires_grad_() for row in rows)
    upstream = upstream.to(torch.bfloat16).to(device, dtype)  # the same numbers in every dtype
    if name == VARLEN:
        places = real.to(device)
        bounds = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32, device=device)
        flat_query, flat_key, flat_value = (tensor.transpose(1, 2)[places] for tensor in (query, key, value))
        out = attend_rows(flat_query, flat_key, flat_value, bounds, longest, None, None)
        out.backward(upstream.transpose(1, 2)[places])
        shown = out
    else:
        causal = torch.ones(longest, longest, dtype=torch.bool).tril()
        mask = (causal & real[:, None, None, :]).to(device)  # [B, 1, T, T]
        with attention_kernels(name):
            # as transformers does it: repeated key heads, and a mask where rows are padded
            repeated = (tensor.repeat_interleave(HEADS // KEY_HEADS, 1) for tensor in (key, value))
            out = torch.nn.functional.scaled_dot_product_attention(query, *repeated, attn_mask=mask)
            out.backward(upstream)
        shown = out.transpose(1, 2)[real.to(device)]
    gradients = [tensor.grad.transpose(1, 2)[real.to(device)] for tensor in (query, key, value)]  # pyright: ignore[reportOptionalMemberAccess]
    return torch.cat([part.detach().double().cpu().flatten() for part in (shown, *gradients)])


def try_kernel(name: str, device: torch.device, dtype: torch.dtype) -> Tried:
    """A padded batch through one kernel, forward and backward, against float64 attention on the CPU."""
    place = f"{device.type} {str(dtype).removeprefix('torch.')}"
    why = "asked for only" if name not in (*AUTO, VARLEN) else ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of every kernel that it cannot take
            got = attention_result(name, device, dtype)
    except Exception as error:  # a diagnosis reports whatever it meets
        unfit = "No viable backend" in str(error) or "No available kernel" in str(error)
        reason = "for this device, dtype and mask" if unfit else one_line(error)
        return Tried(place, name, why, f"not available {reason}")
    if not bool(got.isfinite().all()):
        return Tried(place, name, why, "WRONG: output or gradients are not finite")
    want = attention_result("math", torch.device("cpu"), torch.float64)
    return Tried(place, name, why, compared(got, want, dtype, "attention"))


def compared(got: Tensor, want: Tensor, dtype: torch.dtype, what: str) -> str:
    off = float((got - want).norm() / want.norm())
    limit = 8 * torch.finfo(dtype).eps
    return WORKS if off < limit else f"WRONG: {what} off by {off:.1e}, at most {limit:.1e} expected"


# --- the fused loss ---------------------------------------------------------------------------------------------------


def try_loss(device: torch.device, dtype: torch.dtype) -> Tried:
    """A small loss and its gradient against float64, on the backend that ``auto`` takes."""
    place = f"{device.type} {str(dtype).removeprefix('torch.')}"
    try:
        hidden, weight = (torch.empty(rows, 64, dtype=dtype, device=device) for rows in (48, 300))
        targets = torch.zeros(48, dtype=torch.int64, device=device)
        request = make_request(hidden, Head(weight), targets, objective("deft"), wanted=(True, True, False))
        backend, why = choose("auto", request)
    except Exception as error:  # a diagnosis reports whatever it meets
        return Tried(place, "-", "", f"FAILED: {one_line(error)}")
    return Tried(place, backend.name, why, self_test(device, dtype))


def self_test(device: Any, dtype: Any) -> str:
    """Compare a small loss and its gradient with float64: 'works', or the error."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(48, 64, generator=generator), torch.randn(300, 64, generator=generator) / 8
    targets = torch.randint(300, (48,), generator=generator)

    def gradient(of: Any, head: Any, where: Any) -> Any:
        of = of.to(where).detach().clone().requires_grad_()
        linear_loss(of, head.to(where), targets.to(where), "deft").backward()
        return of.grad.double().cpu()

    try:
        got = gradient(hidden.to(dtype), weight.to(dtype), device)
        raise_pending()
    except Exception as error:  # a diagnosis reports whatever it meets
        return f"FAILED: {one_line(error)}"
    want = gradient(hidden.to(dtype).double(), weight.to(dtype).double(), torch.device("cpu"))
    return compared(got, want, dtype, "gradient")
