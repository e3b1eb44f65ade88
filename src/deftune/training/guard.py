"""No NaN reaches the weights, and the host need not wait to see that.

torch's own fused Adam leaves parameters and state as they are where a tensor on the device, ``found_inf``, says so:
that is how a gradient scaler tells it. We tell it whether the gradient's norm is a number; the host reads it later.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from deftune.losses import raise_pending
from deftune.losses.pending import pending_flags


def tell(optimizer: Any, norm: Any) -> Tensor | None:
    """Whether the step is to be left out, for a gradient or a token without a number; the optimizer has been told.

    None where it would not listen: another optimizer, a device whose fused Adam may not look, FSDP2's parameters.
    """
    forget(optimizer)
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


def forget(optimizer: Any) -> None:
    """What it was told is of one step."""
    inner: Any = getattr(optimizer, "optimizer", optimizer)
    if hasattr(inner, "found_inf"):
        del inner.found_inf


class UnseenNorm:
    """The norm of a step's gradient, and whether it, or a token, had no number: on its way to the host."""

    def __init__(self, step: int, norm: Any, bad: Tensor | None):
        self.step, self.norm, self.there, self.done = step, norm, bad, None
        self.told = bad is not None
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
