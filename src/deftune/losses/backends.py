"""How a chunk of rows meets the head: `torch` on any device, `triton` on CUDA. Both do the same three GEMMs.

With E = e^{z - r} for a reference r of the row, the target left out, v = gate / sum E and t = gate (1 - p):

    dX = v (E W) - t W[y]        dW = E^T (v X) - t X at y        db = E^T v - t at y

The softmax is never formed and nothing is recomputed: the gate comes in after E was made.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from deftune.losses.head import Head
from deftune.losses.torch_backend import TorchBackend
from deftune.losses.triton_backend import TritonBackend

BACKENDS = {"torch": TorchBackend, "triton": TritonBackend}


@functools.cache
def triton_status() -> str:
    """'' where Triton can be used, else why not."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return ""


def interpreted() -> bool:
    """Whether Triton kernels run in the interpreter, on the CPU: slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def choose_backend(wanted: str, device: torch.device, dtype: torch.dtype, head: Head, top: int = 0) -> tuple[str, str]:
    """(backend, why): what ``auto`` takes, or the one asked for; an error where that one cannot do it."""
    if wanted not in ("auto", *BACKENDS):
        raise ValueError(f"backend: one of auto, {', '.join(BACKENDS)}, got {wanted!r}")
    against = _against_triton(device, dtype, head, top)
    if wanted == "triton" and against:
        raise ValueError(f"backend='triton' cannot be used here: {against}; use backend='torch' or 'auto'")
    if wanted != "auto":
        return wanted, "asked for"
    if device.type != "cuda":
        against = against or "the interpreter is for tests"
    elif dtype == torch.float32:
        against = against or "float32 goes through cuBLAS (as precise as torch.set_float32_matmul_precision says)"
    return ("torch", against) if against else ("triton", "bfloat16 on CUDA")


def _against_triton(device: torch.device, dtype: torch.dtype, head: Head, top: int) -> str:
    """Why the triton backend cannot be used, '' if it can."""
    if device.type != "cuda" and not interpreted():
        return f"the device is {device.type}, not cuda"
    if triton_status():
        return triton_status()
    if dtype not in (torch.bfloat16, torch.float32):
        return f"{dtype} has not the range that E needs; bfloat16 has"
    if head.width * dtype.itemsize % 16:
        return f"a row of the weight, {head.width} of {dtype}, is no multiple of 16 bytes"
    if top and head.softcap is not None:
        return "the likeliest tokens under a softcap are found by torch only"
    return ""
