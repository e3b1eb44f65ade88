"""Keep NaN out of the weights without making the host wait for the GPU.

torch's fused Adam skips an update where the device tensor ``found_inf``, which gradient scalers set, is not 0. Here it
is set where the norm of the gradient is not finite; the host reads the norm later.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from deftune.losses import raise_pending
from deftune.losses.pending import pending_flags


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
