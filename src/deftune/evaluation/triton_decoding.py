# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportReturnType=false
"""Triton kernels of a decoding step: attention of one query a slot, and the draw of a token. Functions of tensors only.

`attend`: a program for each slot and key head, with the G query heads that share it. It adds the slot's new key and
    value to the cache, begins the online softmax with them, and goes through the slot's own entries, no further
`draw`: a program for each row of logits: hash, exponential, score and maximum in one pass over the vocabulary
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deftune.evaluation.chance import GOLDEN

TILE_BYTES = 8192  # of keys, and as much of values, in flight in a stage
DRAW_BLOCK = 2048
LOG2_E = tl.constexpr(1.4426950408889634)
STEP = tl.constexpr(GOLDEN & 0xFFFFFFFF)


@triton.jit
def _scores(dot, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    # in powers of 2; tanh(a) = 1 - 2 / (1 + e^{2a})
    s = dot * scale
    if HAS_SOFTCAP:
        s = softcap * (1 - 2 / (1 + tl.exp(2 * s / softcap)))
    return s * LOG2_E


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, keys_ptr, values_ptr, lengths_ptr, out_ptr, stride_q, stride_qh, stride_k, stride_kh, stride_v,
    stride_vh, stride_s, stride_sh, scale, softcap, window, heads,
    G: tl.constexpr, D: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    g, d, n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    live_d = d < D
    length = tl.load(lengths_ptr + row).to(tl.int32)
    q_at = q_ptr + row * stride_q + (head * G + g)[:, None] * stride_qh + d[None, :]
    q_GD = tl.load(q_at, mask=(g < G)[:, None] & live_d[None, :], other=0.0)

    # 1. the new entry: into the cache, and the start of the softmax, so that nothing written here is read here
    k_D = tl.load(k_ptr + row * stride_k + head * stride_kh + d, mask=live_d, other=0.0)
    v_D = tl.load(v_ptr + row * stride_v + head * stride_vh + d, mask=live_d, other=0.0)
    base = row * stride_s + head.to(tl.int64) * stride_sh
    new = base + length.to(tl.int64) * D + d
    tl.store(keys_ptr + new, k_D, mask=live_d)
    tl.store(values_ptr + new, v_D, mask=live_d)
    dot_G = tl.sum(q_GD.to(tl.float32) * k_D.to(tl.float32)[None, :], axis=1)
    m_G = _scores(dot_G, scale, softcap, HAS_SOFTCAP)
    l_G = tl.full((BLOCK_G,), 1.0, tl.float32)
    acc_GD = tl.zeros((BLOCK_G, BLOCK_D), tl.float32) + v_D.to(tl.float32)[None, :]

    # 2. the entries before it, those in the window
    begin = tl.maximum(0, length - window + 1) if HAS_WINDOW else 0
    for start in range(begin, length, BLOCK_N):
        at = start + n
        live = at < length
        k_DN = tl.load(
            keys_ptr + base + at[None, :].to(tl.int64) * D + d[:, None],
            mask=live[None, :] & live_d[:, None], other=0.0,
        )  # fmt: skip
        v_ND = tl.load(
            values_ptr + base + at[:, None].to(tl.int64) * D + d[None, :],
            mask=live[:, None] & live_d[None, :], other=0.0,
        )  # fmt: skip
        s_GN = _scores(tl.dot(q_GD, k_DN, input_precision=PRECISION), scale, softcap, HAS_SOFTCAP)
        s_GN = tl.where(live[None, :], s_GN, float("-inf"))
        top_G = tl.maximum(m_G, tl.max(s_GN, axis=1))
        p_GN = tl.exp2(s_GN - top_G[:, None])
        shrink_G = tl.exp2(m_G - top_G)
        l_G = l_G * shrink_G + tl.sum(p_GN, axis=1)
        # the weights go into the product in the values' dtype, as flash attention's do; sums stay in float32
        acc_GD = acc_GD * shrink_G[:, None] + tl.dot(p_GN.to(v_ND.dtype), v_ND, input_precision=PRECISION)
        m_G = top_G
    out_at = out_ptr + (row * heads * G + head * G + g)[:, None] * D + d[None, :]
    tl.store(out_at, (acc_GD / l_G[:, None]).to(out_ptr.dtype.element_ty), mask=(g < G)[:, None] & live_d[None, :])


def attend(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, *, scale: float,
    window: int | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """`slots.attend_plain` in one launch."""
    rows, heads, width = key.shape
    query, key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in (query, key, value))
    group = query.shape[1] // heads
    out = torch.empty(rows, heads * group, width, dtype=query.dtype, device=query.device)
    block_d = max(16, triton.next_power_of_2(width))
    block_n = max(16, min(128, TILE_BYTES // (block_d * keys.element_size())))
    _attend[(rows * heads,)](
        query, key, value, keys, values, lengths, out, query.stride(0), query.stride(1), key.stride(0), key.stride(1),
        value.stride(0), value.stride(1), keys.stride(0), keys.stride(1), scale, softcap or 0.0, window or 0, heads,
        G=group, D=width, HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        BLOCK_G=max(16, triton.next_power_of_2(group)), BLOCK_N=block_n, BLOCK_D=block_d, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@triton.jit
def _mix(x):
    # `chance._mix`, on unsigned numbers, whose shifts are logical
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _draw(
    z_ptr, keys_ptr, steps_ptr, token_ptr, finite_ptr, stride_z, V, temperature,
    SAMPLES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    key0 = tl.load(keys_ptr + 2 * row).to(tl.uint32, bitcast=True)
    key1 = tl.load(keys_ptr + 2 * row + 1).to(tl.uint32, bitcast=True)
    step = tl.load(steps_ptr + row).to(tl.uint32, bitcast=True)
    start = _mix(key0 + step * STEP)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = tl.zeros((BLOCK,), tl.int32)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    broken = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, V, BLOCK):
        v = first + lane
        z = tl.load(z_ptr + row * stride_z + v, mask=v < V, other=float("-inf")).to(tl.float32)
        broken = tl.maximum(broken, (z != z).to(tl.int32))
        top = tl.maximum(top, z)
        score = z
        if SAMPLES:
            bits = _mix(_mix(v.to(tl.uint32) ^ start) + key1)
            u = ((bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10
            u = tl.minimum(u, 1 - 5.960464477539063e-08)
            # log1p(-u) = log(w) (-u) / (w - 1) with w = 1 - u as rounded, where w is not 1; there it is -u
            w = 1 - u
            e = tl.where(w == 1, u, -tl.log(w) * (u / tl.where(w == 1, 1.0, 1 - w)))
            score = z / temperature - tl.log(e)
        better = score > best  # strictly, so that a lane keeps its first of several
        best = tl.where(better, score, best)
        place = tl.where(better, v, place)
    most = tl.max(best, axis=0)
    token = tl.min(tl.where(best == most, place, V), axis=0)
    highest = tl.max(top, axis=0)
    finite = (tl.max(broken, axis=0) == 0) & (highest > float("-inf")) & (highest < float("inf"))
    tl.store(token_ptr + row, tl.where(finite, token, 0).to(tl.int64))
    tl.store(finite_ptr + row, finite)


def draw(logits: Tensor, keys: Tensor, steps: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """[rows] the tokens that `chance.draw` draws at top_p 1, and whether the logits are finite."""
    rows, size = logits.shape
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
    _draw[(rows,)](
        logits, keys.contiguous(), steps.contiguous(), token, finite, logits.stride(0), size, temperature or 1.0,
        SAMPLES=temperature > 0, BLOCK=DRAW_BLOCK, num_warps=8,
    )  # fmt: skip
    return token, finite
