"""Triton kernels of the fused linear loss. Functions of tensors only: no kernel knows an objective.

For a chunk of C rows of hidden states x and the head W, with z = softcap(scale (x W^T + bias)), target y and u = z - m:

    1. `target_logits`: z_y by a dot product in fp32, and a reference r = z_y + 40 for the row
    2. `exponentials`: one GEMM whose epilogue turns the fp32 accumulators into E = e^{z - r}, stored once in the inputs'
       dtype, and into per-tile sums of e, e^2 and u e about the tile's own maximum. The target is left out of all of them
    3. `reduce_tiles`: the tiles' sums to the row's (max, then sums)
    4. `repair`: rows whose E left the range of the dtype (log p < -125) are recomputed about their maximum; others exit

With v = gate / sum E, the gradients are two more GEMMs on E as it is: dX = v (E W) - t W[y], dW = E^T (v X) - t X at y,
t = gate (1 - p) kept in fp32. E is rounded once, from fp32 accumulators, as a gradient of an fp32 softmax would be; bf16
has fp32's range, so that E needs no row maximum in advance, only a reference within e^40 above and e^85 below it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

HEADROOM = 40.0  # r = z_y + 40: E of a certain row starts at e^-40, far above bf16's e^-87
OVERFLOW = 85.0  # e^85 < 3e38, with room for the GEMMs' sums

BLOCK_M, BLOCK_N, BLOCK_K = 128, 256, 64


@triton.jit
def _logit(dot, bias, scale, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    z = dot + bias if HAS_BIAS else dot
    z = z * scale
    if HAS_SOFTCAP:
        # tanh(a) = 1 - 2 / (1 + e^{2a}), exact at both ends
        z = softcap * (1 - 2 / (1 + tl.exp(2 * z / softcap)))
    return z


@triton.jit
def _target_logits(
    x_ptr, w_ptr, bias_ptr, y_ptr, z_ptr, ref_ptr, C, D, scale, softcap, headroom,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = rows < C
    y = tl.load(y_ptr + rows, mask=live, other=0)
    total = tl.zeros((BLOCK_R,), dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        mask = live[:, None] & (d < D)[None, :]
        x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + y.to(tl.int64)[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(x * w, axis=1)
    bias = tl.load(bias_ptr + y, mask=live, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
    z = _logit(total, bias, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
    tl.store(z_ptr + rows, z, mask=live)
    tl.store(ref_ptr + rows, z + headroom, mask=live)


@triton.jit
def _exponentials(
    x_desc, w_desc, bias_ptr, y_ptr, ref_ptr, e_ptr, tiles_ptr, C, V, D, stride_e, scale, softcap, overflow, programs,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, STORE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(C, BLOCK_M), tl.cdiv(V, BLOCK_N)
    # rows run fastest: the chunk's hidden states stay in L2 and each tile of W is read from memory once
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, programs, flatten=FLATTEN):
        row0, col0 = (tile % tiles_m) * BLOCK_M, (tile // tiles_m) * BLOCK_N
        dot = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, tl.cdiv(D, BLOCK_K)):
            x = x_desc.load([row0, k * BLOCK_K])
            w = w_desc.load([col0, k * BLOCK_K])
            dot = tl.dot(x, w.T, dot, input_precision=PRECISION)

        rows, cols = row0 + tl.arange(0, BLOCK_M), col0 + tl.arange(0, BLOCK_N)
        live = rows < C
        y = tl.load(y_ptr + rows, mask=live, other=0)
        ref = tl.load(ref_ptr + rows, mask=live, other=0.0)
        bias = tl.load(bias_ptr + cols, mask=cols < V, other=0.0).to(tl.float32)[None, :] if HAS_BIAS else 0.0
        z = _logit(dot, bias, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
        z = tl.where((cols < V)[None, :] & (cols[None, :] != y[:, None]), z, float("-inf"))

        # sums about the tile's maximum: no logit, however large, overflows them
        top = tl.max(z, axis=1)
        shift = tl.where(top == float("-inf"), 0.0, top)
        # below -200 e is 0 in fp32; the bound keeps 0 * -inf out of the moment
        u = tl.maximum(z - shift[:, None], -200.0)
        e = tl.exp(u)
        part = tiles_ptr + (tile // tiles_m).to(tl.int64) * C + rows
        plane = tiles_n.to(tl.int64) * C
        tl.store(part, top, mask=live)
        tl.store(part + plane, tl.sum(e, axis=1), mask=live)
        tl.store(part + 2 * plane, tl.sum(e * e, axis=1), mask=live)
        tl.store(part + 3 * plane, tl.sum(u * e, axis=1), mask=live)
        if STORE:
            # a clamped row is out of range and will be repaired
            e = e * tl.exp(tl.minimum(shift - ref, overflow))[:, None]
            if HAS_SOFTCAP:
                e = e * tl.where(z == float("-inf"), 0.0, 1 - (z / softcap) * (z / softcap))
            at = e_ptr + rows.to(tl.int64)[:, None] * stride_e + cols[None, :]
            tl.store(at, e.to(e_ptr.dtype.element_ty), mask=live[:, None] & (cols < V)[None, :])


@triton.jit
def _reduce_tiles(
    tiles_ptr, z_ptr, sums_ptr, C, TILES, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = rows < C
    z_y = tl.load(z_ptr + rows, mask=live, other=0.0)
    plane = TILES.to(tl.int64) * C
    shift = z_y
    for start in range(0, TILES, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        at = tiles_ptr + t.to(tl.int64)[:, None] * C + rows[None, :]
        top = tl.load(at, mask=(t < TILES)[:, None] & live[None, :], other=float("-inf"))
        # tl.max drops NaN; a row with a NaN logit must come out as NaN, which its sums of e do
        shift = tl.maximum(shift, tl.max(top, axis=0))
    safe = tl.where(shift == float("-inf"), 0.0, shift)
    rest = tl.zeros((BLOCK_R,), dtype=tl.float32)
    squares = tl.zeros((BLOCK_R,), dtype=tl.float32)
    moment = tl.zeros((BLOCK_R,), dtype=tl.float32)
    for start in range(0, TILES, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        at = tiles_ptr + t.to(tl.int64)[:, None] * C + rows[None, :]
        mask = (t < TILES)[:, None] & live[None, :]
        top = tl.load(at, mask=mask, other=float("-inf"))
        s = tl.load(at + plane, mask=mask, other=0.0)
        s2 = tl.load(at + 2 * plane, mask=mask, other=0.0)
        ue = tl.load(at + 3 * plane, mask=mask, other=0.0)
        lower = tl.maximum(top - safe[None, :], -200.0)  # an empty tile has top = -inf and sums of 0
        factor = tl.exp(lower)
        empty = top == float("-inf")
        rest += tl.sum(tl.where(empty, 0.0, s * factor), axis=0)
        squares += tl.sum(tl.where(empty, 0.0, s2 * factor * factor), axis=0)
        moment += tl.sum(tl.where(empty, 0.0, (ue + lower * s) * factor), axis=0)
    out = sums_ptr + rows
    tl.store(out, shift, mask=live)
    tl.store(out + C, z_y, mask=live)
    tl.store(out + 2 * C, rest, mask=live)
    tl.store(out + 3 * C, squares, mask=live)
    tl.store(out + 4 * C, moment, mask=live)


@triton.jit
def _repair(
    x_ptr, w_ptr, bias_ptr, y_ptr, ref_ptr, sums_ptr, e_ptr, V, D, stride_e, scale, softcap, overflow,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    shift = tl.load(sums_ptr + row)
    if shift - tl.load(ref_ptr + row) > overflow:
        y = tl.load(y_ptr + row)
        for start in range(0, V, BLOCK_V):
            v = start + tl.arange(0, BLOCK_V)
            total = tl.zeros((BLOCK_V,), dtype=tl.float32)
            for d0 in range(0, D, BLOCK_D):
                d = d0 + tl.arange(0, BLOCK_D)
                x = tl.load(x_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
                mask = (v < V)[:, None] & (d < D)[None, :]
                w = tl.load(w_ptr + v.to(tl.int64)[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
                total += tl.sum(w * x[None, :], axis=1)
            bias = tl.load(bias_ptr + v, mask=v < V, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
            z = _logit(total, bias, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
            e = tl.where(v == y, 0.0, tl.exp(z - shift))
            if HAS_SOFTCAP:
                e = e * (1 - (z / softcap) * (z / softcap))
            tl.store(e_ptr + row * stride_e + v, e.to(e_ptr.dtype.element_ty), mask=v < V)
        tl.store(ref_ptr + row, shift)


@triton.jit
def _finish_hidden(
    u_ptr, w_ptr, y_ptr, index_ptr, v_ptr, t_ptr, out_ptr, D, BLOCK_D: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    y = tl.load(y_ptr + row).to(tl.int64)
    to = tl.load(index_ptr + row).to(tl.int64)
    v = tl.load(v_ptr + row)
    t = tl.load(t_ptr + row)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        u = tl.load(u_ptr + row * D + d, mask=d < D, other=0.0)
        w = tl.load(w_ptr + y * D + d, mask=d < D, other=0.0).to(tl.float32)
        tl.store(out_ptr + to * D + d, (v * u - t * w).to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def _subtract_targets(
    x_ptr, y_ptr, order_ptr, t_ptr, dw_ptr, C, D, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    # rows come sorted by target; the first of a run of equal targets adds up the whole run: no atomics
    first = tl.program_id(0)
    row = tl.load(order_ptr + first)
    y = tl.load(y_ptr + row)
    before = tl.load(y_ptr + tl.load(order_ptr + tl.maximum(first - 1, 0)))
    if (first == 0) | (before != y):
        d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        total = tl.zeros((BLOCK_D,), dtype=tl.float32)
        start = first
        more = True
        while more:
            at = start + tl.arange(0, BLOCK_R)
            rows = tl.load(order_ptr + at, mask=at < C, other=0).to(tl.int64)
            same = (at < C) & (tl.load(y_ptr + rows) == y)
            x = tl.load(x_ptr + rows[:, None] * D + d[None, :], mask=same[:, None] & (d < D)[None, :], other=0.0)
            t = tl.load(t_ptr + rows, mask=same, other=0.0)
            total += tl.sum(x.to(tl.float32) * t[:, None], axis=0)
            start += BLOCK_R
            more = tl.sum(same.to(tl.int32), axis=0) == BLOCK_R
        out = dw_ptr + y.to(tl.int64) * D + d
        tl.store(out, tl.load(out, mask=d < D, other=0.0) - total, mask=d < D)


@triton.jit
def _scale(x_ptr, factor_ptr, n, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < n, other=0.0)
        tl.store(x_ptr + at, (x.to(tl.float32) * factor).to(x_ptr.dtype.element_ty), mask=at < n)
