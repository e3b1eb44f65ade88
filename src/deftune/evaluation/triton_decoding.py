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

TILE_BYTES, WARPS, STAGES = 8192, 4, 3  # of keys, and as much of values, in flight in a stage
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
def _rotated(x, half, cos, sin, sign):
    # x cos + rotate_half(x) sin, each product and the sum rounded to x's dtype
    one = (x.to(tl.float32) * cos.to(tl.float32)).to(x.dtype).to(tl.float32)
    other = (half.to(tl.float32) * sign * sin.to(tl.float32)).to(x.dtype).to(tl.float32)
    return (one + other).to(x.dtype)


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, keys_ptr, values_ptr, lengths_ptr, out_ptr, stride_q, stride_qh, stride_k, stride_kh, stride_v,
    stride_vh, stride_s, stride_sh, cos_ptr, sin_ptr, scale, softcap, window, heads,
    ROTATES: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    g, d, n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    live_d = d < D
    length = tl.load(lengths_ptr + row).to(tl.int32)
    q_at = q_ptr + row * stride_q + (head * G + g)[:, None] * stride_qh
    k_at = k_ptr + row * stride_k + head * stride_kh
    live_GD = (g < G)[:, None] & live_d[None, :]
    q_GD = tl.load(q_at + d[None, :], mask=live_GD, other=0.0)
    k_D = tl.load(k_at + d, mask=live_d, other=0.0)
    if ROTATES:
        cos_D = tl.load(cos_ptr + row * D + d, mask=live_d, other=0.0)
        sin_D = tl.load(sin_ptr + row * D + d, mask=live_d, other=0.0)
        half = tl.where(d < D // 2, d + D // 2, d - D // 2)
        q_half = tl.load(q_at + half[None, :], mask=live_GD, other=0.0)
        k_half = tl.load(k_at + half, mask=live_d, other=0.0)
        sign_D = tl.where(d < D // 2, -1.0, 1.0)
        q_GD = _rotated(q_GD, q_half, cos_D[None, :], sin_D[None, :], sign_D[None, :])
        k_D = _rotated(k_D, k_half, cos_D, sin_D, sign_D)

    # 1. the new entry: into the cache, and the start of the softmax, so that nothing written here is read here
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
    tl.store(out_at, (acc_GD / l_G[:, None]).to(out_ptr.dtype.element_ty), mask=live_GD)


def attend(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, *, scale: float,
    window: int | None = None, softcap: float | None = None, rotation: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """`slots.attend_plain` in one launch; ``rotation``: cosines and sines [rows, D] for the query and the key."""
    rows, heads, width = key.shape
    query, key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in (query, key, value))
    group = query.shape[1] // heads
    out = torch.empty(rows, heads * group, width, dtype=query.dtype, device=query.device)
    cos, sin = rotation or (query, query)
    block_d = max(16, triton.next_power_of_2(width))
    block_n = max(16, min(128, TILE_BYTES // (block_d * keys.element_size())))
    _attend[(rows * heads,)](
        query, key, value, keys, values, lengths, out, query.stride(0), query.stride(1), key.stride(0), key.stride(1),
        value.stride(0), value.stride(1), keys.stride(0), keys.stride(1), cos, sin, scale, softcap or 0.0, window or 0,
        heads, ROTATES=rotation is not None, HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", G=group, D=width,
        BLOCK_G=max(16, triton.next_power_of_2(group)), BLOCK_N=block_n, BLOCK_D=block_d,
        num_warps=WARPS, num_stages=STAGES,
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
    z_ptr, keys_ptr, steps_ptr, temperatures_ptr, token_ptr, finite_ptr, stride_z, V,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    key0 = tl.load(keys_ptr + 2 * row).to(tl.uint32, bitcast=True)
    key1 = tl.load(keys_ptr + 2 * row + 1).to(tl.uint32, bitcast=True)
    step = tl.load(steps_ptr + row).to(tl.uint32, bitcast=True)
    temperature = tl.load(temperatures_ptr + row)
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
        if temperature > 0:
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


def draw(logits: Tensor, keys: Tensor, steps: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """[rows] the tokens that `chance.draw` draws at top_p 1, and whether the logits are finite.

    ``temperatures`` [rows] float32; a row whose temperature is 0 is greedy.
    """
    rows, size = logits.shape
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
    _draw[(rows,)](
        logits, keys.contiguous(), steps.contiguous(), temperatures.contiguous(), token, finite, logits.stride(0), size,
        BLOCK=DRAW_BLOCK, num_warps=8,
    )  # fmt: skip
    return token, finite


@triton.jit
def _add_norm(
    x_ptr, more_ptr, weight_ptr, sum_ptr, out_ptr, D, eps, ADDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * D
    d = tl.arange(0, BLOCK)
    live = d < D
    x = tl.load(x_ptr + row + d, mask=live, other=0.0)
    if ADDS:
        x = (x.to(tl.float32) + tl.load(more_ptr + row + d, mask=live, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row + d, x, mask=live)
    wide = x.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / D + eps)).to(x.dtype)
    weight = tl.load(weight_ptr + d, mask=live, other=0.0)
    tl.store(out_ptr + row + d, (weight.to(tl.float32) * normed.to(tl.float32)).to(x.dtype), mask=live)


def add_norm(x: Tensor, more: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """s = x + more (x alone if that is None) and weight * s / sqrt(mean s^2 + eps), for [tokens, D]."""
    tokens, width = x.shape
    x, more = x.contiguous(), None if more is None else more.contiguous()
    total = x if more is None else torch.empty_like(x)
    out = torch.empty_like(x)
    _add_norm[(tokens,)](
        x, x if more is None else more, weight, total, out, width, eps,
        ADDS=more is not None, BLOCK=triton.next_power_of_2(width), num_warps=4 if width <= 4096 else 8,
    )  # fmt: skip
    return total, out


@triton.jit
def _rotate(
    x_ptr, cos_ptr, sin_ptr, out_ptr, stride_x, positions, N,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    live = at < N
    d = at % D
    first = d < D // 2
    turn = (row % positions) * D + d
    x = tl.load(x_ptr + row * stride_x + at, mask=live, other=0.0)
    half = tl.load(x_ptr + row * stride_x + tl.where(first, at + D // 2, at - D // 2), mask=live, other=0.0)
    cos, sin = tl.load(cos_ptr + turn, mask=live, other=0.0), tl.load(sin_ptr + turn, mask=live, other=0.0)
    tl.store(out_ptr + row * N + at, _rotated(x, half, cos, sin, tl.where(first, -1.0, 1.0)), mask=live)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x cos + rotate_half(x) sin for [tokens, heads, D], token i at position i modulo their number."""
    tokens, heads, width = x.shape
    x = x if x.stride(-1) == 1 and x.stride(-2) == width else x.contiguous()
    out = torch.empty(tokens, heads, width, dtype=x.dtype, device=x.device)
    size = heads * width
    _rotate[(tokens,)](
        x, cos, sin, out, x.stride(0), len(cos), size, D=width, BLOCK=triton.next_power_of_2(size), num_warps=4
    )
    return out


@triton.jit
def _silu_times(gate_ptr, up_ptr, out_ptr, N, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + at, mask=at < N, other=0.0)
    up = tl.load(up_ptr + at, mask=at < N, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    silu = (wide / (1 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + at, (silu * up).to(gate.dtype), mask=at < N)


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    _silu_times[(triton.cdiv(gate.numel(), 1024),)](gate, up, out, gate.numel(), BLOCK=1024, num_warps=4)
    return out
