# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportReturnType=false
"""AdamW for many tensors in one launch: each value that the update needs is read once and written once.

For a float32 parameter p with gradient g (bfloat16 or float32), which a scalar c scales (clipping):

    m <- b1 m + (1 - b1) c g,   v <- b2 v + (1 - b2) (c g)^2
    p <- p - lr wd p - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps),   rounded <- bfloat16(p)

That is 26 bytes a parameter with a bfloat16 gradient and a rounded copy. Torch's parts (the gradient in float32, its
scaling, fused AdamW, the rounding) take 50.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
WIDTHS = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


class Update(NamedTuple):
    """What AdamW does to one parameter; all tensors are contiguous and on one device."""

    parameter: Tensor  # float32, updated in place
    first: Tensor  # m, float32
    second: Tensor  # v, float32
    gradient: Tensor  # bfloat16 or float32
    rounded: Tensor | None  # bfloat16; gets the rounded parameter


@triton.jit
def update_block(
    p_pointer, m_pointer, v_pointer, g_pointer, r_pointer, place, mask, step_size, root, scale, decay, beta1, beta2,
    rest1, rest2, eps, ROUNDS: tl.constexpr,
):  # fmt: skip
    g = tl.load(g_pointer + place, mask=mask).to(tl.float32) * scale
    p = tl.load(p_pointer + place, mask=mask)
    m = beta1 * tl.load(m_pointer + place, mask=mask) + rest1 * g
    v = beta2 * tl.load(v_pointer + place, mask=mask) + rest2 * g * g
    p -= decay * p
    p -= step_size * m / (tl.sqrt(v) / root + eps)
    tl.store(m_pointer + place, m, mask=mask)
    tl.store(v_pointer + place, v, mask=mask)
    tl.store(p_pointer + place, p, mask=mask)
    if ROUNDS:
        tl.store(r_pointer + place, p.to(tl.bfloat16), mask=mask)


@triton.jit(do_not_specialize=["tensors"])
def adamw_kernel(
    addresses, sizes, owners, starts, step_sizes, roots, scale, tensors, decay, beta1, beta2, rest1, rest2, eps,
    GRADIENT: tl.constexpr, ROUNDS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    owner, start = tl.load(owners + program), tl.load(starts + program)
    size, step_size, root = tl.load(sizes + owner), tl.load(step_sizes + owner), tl.load(roots + owner)
    p_pointer = tl.load(addresses + owner).to(tl.pointer_type(tl.float32))
    m_pointer = tl.load(addresses + tensors + owner).to(tl.pointer_type(tl.float32))
    v_pointer = tl.load(addresses + 2 * tensors + owner).to(tl.pointer_type(tl.float32))
    g_pointer = tl.load(addresses + 3 * tensors + owner).to(tl.pointer_type(GRADIENT))
    r_pointer = p_pointer
    if ROUNDS:
        r_pointer = tl.load(addresses + 4 * tensors + owner).to(tl.pointer_type(tl.bfloat16))
    if ALIGNED:  # with whole blocks: loads and stores of 16 bytes
        p_pointer, m_pointer = tl.multiple_of(p_pointer, 16), tl.multiple_of(m_pointer, 16)
        v_pointer, g_pointer = tl.multiple_of(v_pointer, 16), tl.multiple_of(g_pointer, 16)
        r_pointer = tl.multiple_of(r_pointer, 16)
    place = tl.multiple_of(start, BLOCK) + tl.arange(0, BLOCK)
    if start + BLOCK <= size:
        update_block(p_pointer, m_pointer, v_pointer, g_pointer, r_pointer, place, None, step_size, root,
                     tl.load(scale), decay, beta1, beta2, rest1, rest2, eps, ROUNDS)  # fmt: skip
    else:
        update_block(p_pointer, m_pointer, v_pointer, g_pointer, r_pointer, place, place < size, step_size, root,
                     tl.load(scale), decay, beta1, beta2, rest1, rest2, eps, ROUNDS)  # fmt: skip


class Blocks:
    """Which program of a launch updates which values of which tensor, for tensors of these sizes."""

    def __init__(self, sizes: Sequence[int], device: torch.device):
        counts = torch.tensor([triton.cdiv(size, BLOCK) for size in sizes])
        owners = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), counts)
        first = torch.cumsum(counts, 0) - counts
        starts = (torch.arange(len(owners)) - first[owners.long()]) * BLOCK
        self.sizes = torch.tensor(sizes, dtype=torch.int64, device=device)
        self.owners, self.starts = owners.to(device), starts.to(device)
        self.programs = len(owners)


def launch(
    updates: Sequence[Update], blocks: Blocks, step_sizes: Tensor, roots: Tensor, scale: Tensor, skipped: Tensor, *,
    betas: tuple[float, float], decay: float, eps: float,
) -> None:  # fmt: skip
    """Update parameters whose gradients have one dtype, and which all have a rounded copy or all have none.

    Args:
        updates: what is updated.
        blocks: of the parameters' sizes.
        step_sizes: float32 [n], lr / (1 - beta1^t) of each parameter.
        roots: float32 [n], sqrt(1 - beta2^t).
        scale: float32 scalar that multiplies the gradients.
        skipped: float32 scalar; nothing is changed unless it is 0.
        betas: beta1 and beta2.
        decay: lr times the weight decay.
        eps: added to the denominator.
    """
    device, rounds = updates[0].parameter.device, updates[0].rounded is not None
    rows = [[tensor.data_ptr() for tensor in column if tensor is not None] for column in zip(*updates, strict=True)]
    addresses = torch.tensor([address for row in rows for address in row], dtype=torch.int64)
    aligned = not bool((addresses % 16).any())
    if device.type == "cuda":
        addresses = addresses.pin_memory().to(device, non_blocking=True)
    sizes = torch.where(skipped == 0, blocks.sizes, 0)
    adamw_kernel[(blocks.programs,)](
        addresses, sizes, blocks.owners, blocks.starts, step_sizes, roots, scale, len(updates), decay, betas[0],
        betas[1], 1 - betas[0], 1 - betas[1], eps, GRADIENT=WIDTHS[updates[0].gradient.dtype], ROUNDS=rounds,
        ALIGNED=aligned, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
