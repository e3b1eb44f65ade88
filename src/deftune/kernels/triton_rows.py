# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportReturnType=false
"""Triton kernels of the fused linear loss. Functions of tensors only: no kernel knows an objective.

For a chunk of C rows of hidden states x and the head W, with z = softcap(scale (x W^T + bias)), target y, u = z - m:

    1. `target_logits`: z_y by a dot product in fp32, and a reference r, some 40 above it, for the row
    2. `exponentials`: one GEMM whose epilogue turns the fp32 accumulators into E = e^{z - r}, stored once in the
       inputs' dtype, and into per-tile sums of e, e^2 and u e about the tile's own maximum, all without the target
    3. `reduce_tiles`: the tiles' sums to the row's (max, then sums), and those to its statistics in float64
       Rows whose E left its range (log p < -100) are recomputed about their maximum on the way
    4. `finish_rows`: the gate, once an objective has given it, to v and t below, dX, and v X for dW

With v = gate / sum E, the gradients are two more GEMMs on E as it is: dX = v (E W) - t W[y], dW = E^T (v X) - t X
at y, t = gate (1 - p) kept in fp32. E is rounded once, from fp32 accumulators, as a gradient of an fp32 softmax would
be; bf16 has fp32's range, so that E needs no row maximum in advance, only a reference within e^40 above and e^60 below.

The GPU's exponential is that of 2: maxima, references and the u of u e are logits in units of ln 2, for which the
epilogue needs one multiplication less. A reference is a whole number, so that nothing is lost between the two.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from deftune.kernels.head import Head, Slices

# in units of ln 2, as references are
HEADROOM = 58.0  # r = z_y + 40 logits: E of a certain row starts at e^-40, far above bf16's e^-87
OVERFLOW = 86.0  # and at e^60, v = gate / sum E still has room for 1 / num_items above e^-87

# the fastest of 22 measured on an H200, for D = 576 and 1536 alike; float32, without tensor cores, fits less
BLOCK_M, BLOCK_N, BLOCK_K = 128, Slices.multiple, 64
BLOCK_M_FLOAT32, BLOCK_K_FLOAT32 = 32, 32

LEFT_OUT = tl.constexpr(-1e30)  # a logit that counts for nothing
LOG2E = tl.constexpr(1.4426950408889634)
SPARE = 4  # slots beyond the likeliest tokens asked for

# What a call tells the kernels of a graph, by its place in their table: pointers, but for the number of tokens, the
# first row of the next chunk, the first of the one at hand, the stride of the record's planes and the scale
TARGETS, TOKENS, EARLIER, PLACES, LABELS, FACTS, HIDDEN, START = (tl.constexpr(slot) for slot in range(8))
CHUNK, OUT, T, RECORD, PITCH, LIKELIEST, SCALE = (tl.constexpr(slot) for slot in range(8, 15))
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _logit(dot, bias, scale, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    z = dot + bias if HAS_BIAS else dot
    z = z * scale
    if HAS_SOFTCAP:
        # tanh(a) = 1 - 2 / (1 + e^{2a}), but its series where that cancels
        a = z / softcap
        b = a * a
        series = a * (1 + b * (-1 / 3 + b * (2 / 15 + b * (-17 / 315 + b * (62 / 2835)))))
        z = softcap * tl.where(b < 0.0625, series, 1 - 2 / (1 + tl.exp(2 * a)))
    return z


@triton.jit
def _from(table_ptr, slot: tl.constexpr, TYPE: tl.constexpr):
    # a pointer that a call has told; all but the flags are on 16 bytes
    return tl.multiple_of(tl.load(table_ptr + slot).to(tl.pointer_type(TYPE)), 16)


@triton.jit
def _survey(
    targets_ptr, index_ptr, labels_ptr, facts_ptr, told_ptr, earlier_ptr, N, V, ignore,
    EARLIER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    was = tl.load(earlier_ptr) if EARLIER else 0
    _find(targets_ptr, index_ptr, labels_ptr, facts_ptr, told_ptr, was, N, V, ignore, BLOCK)


@triton.jit
def _survey_told(table_ptr, told_ptr, V, ignore, BLOCK: tl.constexpr):
    flag = tl.load(table_ptr + EARLIER)
    was = tl.load(flag.to(tl.pointer_type(tl.int64)), mask=flag != 0, other=0)
    tokens = tl.load(table_ptr + TOKENS).to(tl.int32)
    places = _from(table_ptr, PLACES, tl.int64)
    labels = _from(table_ptr, LABELS, tl.int64)
    facts = _from(table_ptr, FACTS, tl.int64)
    _find(_from(table_ptr, TARGETS, tl.int64), places, labels, facts, told_ptr, was, tokens, V, ignore, BLOCK)


@triton.jit
def _find(
    targets_ptr, index_ptr, labels_ptr, facts_ptr, told_ptr, was, N, V, ignore, BLOCK: tl.constexpr
):  # fmt: skip
    # one program, in order: the supervised tokens' places and labels side by side, how many, the first bad one
    count = 0
    bad = N
    for start in range(0, N, BLOCK):
        at = start + tl.arange(0, BLOCK)
        y = tl.load(targets_ptr + at, mask=at < N, other=ignore).to(tl.int64)
        kept = y != ignore
        to = count + tl.cumsum(kept.to(tl.int32), axis=0) - 1
        wrong = (y < 0) | (y >= V)
        tl.store(index_ptr + to, at.to(tl.int64), mask=kept)
        # kernels may read W[y] before the host has seen that y is wrong
        tl.store(labels_ptr + to, tl.where(wrong, 0, y), mask=kept)
        bad = tl.minimum(bad, tl.min(tl.where(kept & wrong, at, N), axis=0))
        count += tl.sum(kept.to(tl.int32), axis=0)
    for start in range(count, N, BLOCK):  # what is read before the host knows the count
        at = start + tl.arange(0, BLOCK)
        zero = tl.zeros((BLOCK,), dtype=tl.int64)
        tl.store(index_ptr + at, zero, mask=at < N)
        tl.store(labels_ptr + at, zero, mask=at < N)
    tl.store(facts_ptr, count.to(tl.int64))
    tl.store(facts_ptr + 1, 0)
    tl.store(told_ptr, count.to(tl.int64))
    tl.store(told_ptr + 1, bad.to(tl.int64))
    tl.store(told_ptr + 2, was)


@triton.jit
def _take_rows(table_ptr, x_ptr, y_ptr, facts_ptr, C, D, TYPE: tl.constexpr, BLOCK_D: tl.constexpr):
    # rows beyond the count become 0, with label 0: whatever stands in the hidden states is not to be seen
    row = tl.program_id(0)
    first = tl.load(table_ptr + START)
    live = tl.load(_from(table_ptr, FACTS, tl.int64)) - first
    there = row < live
    if row == 0:
        tl.store(table_ptr + CHUNK, first)
        tl.store(facts_ptr, tl.minimum(tl.maximum(live, 0), C))
        if first == 0:
            tl.store(facts_ptr + 1, 0)
    place = tl.load(_from(table_ptr, PLACES, tl.int64) + first + row, mask=there, other=0)
    tl.store(y_ptr + row, tl.load(_from(table_ptr, LABELS, tl.int64) + first + row, mask=there, other=0))
    hidden_ptr = _from(table_ptr, HIDDEN, TYPE)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        x = tl.load(hidden_ptr + place * D + d, mask=there & (d < D), other=0.0)
        tl.store(x_ptr + row.to(tl.int64) * D + d, x.to(x_ptr.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["C"])
def _target_logits(
    x_ptr, w_ptr, bias_ptr, index_ptr, y_ptr, z_ptr, ref_ptr, count_ptr, C, D, scale, softcap, headroom,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = rows < tl.minimum(C, tl.load(count_ptr))
    y = tl.load(y_ptr + rows, mask=live, other=0)
    place = tl.load(index_ptr + rows, mask=live, other=0).to(tl.int64)
    total = tl.zeros((BLOCK_R,), dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        mask = live[:, None] & (d < D)[None, :]
        x = tl.load(x_ptr + place[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + y.to(tl.int64)[:, None] * D + d[None, :], mask=mask, other=0.0)
        total += tl.sum(x * w.to(x_ptr.dtype.element_ty).to(tl.float32), axis=1)
    bias = tl.load(bias_ptr + y, mask=live, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
    z = _logit(total, bias, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
    tl.store(z_ptr + rows, z, mask=live)
    tl.store(ref_ptr + rows, tl.ceil(z * LOG2E) + headroom, mask=live)


@triton.jit(do_not_specialize=["C", "first"])
def _exponentials(
    x_desc, w_desc, e_desc, bias_ptr, y_ptr, ref_ptr, tiles_ptr, count_ptr, plane, pitch, C, first, FROM, V, D, scale,
    softcap, factor, overflow, programs, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, RISING: tl.constexpr,
    STORE: tl.constexpr, EVEN: tl.constexpr, TYPE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # of the C rows from ``first`` on, those that are there: the host may not know yet; classes FROM to V
    C = tl.minimum(C, tl.load(count_ptr) - first).to(tl.int32)
    tiles_m, tiles_n = tl.cdiv(C, BLOCK_M), tl.cdiv(V - FROM, BLOCK_N)
    # rows run fastest: the chunk's hidden states stay in L2 and each tile of W is read from memory once
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, programs, flatten=True):
        row0, col0 = (tile % tiles_m) * BLOCK_M, (tile // tiles_m) * BLOCK_N
        dot = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, tl.cdiv(D, BLOCK_K)):
            x = x_desc.load([row0, k * BLOCK_K])
            w = w_desc.load([col0, k * BLOCK_K])
            dot = tl.dot(x, w.T, dot, input_precision=PRECISION)

        # what follows costs as much as the products at D = 576: every instruction an element counts
        rows, n = row0 + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
        live = rows < C
        y = (tl.load(y_ptr + rows, mask=live, other=0) - (FROM + col0)).to(tl.int32)
        ref = tl.load(ref_ptr + rows, mask=live, other=0.0)
        z = dot
        if not RISING:
            bias = tl.load(bias_ptr + FROM + col0 + n, mask=col0 + n < V - FROM, other=0.0) if HAS_BIAS else 0.0
            z = _logit(dot, bias.to(tl.float32)[None, :] if HAS_BIAS else 0.0, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
        # left out, as a number: with -inf, u e would be NaN
        kept = n[None, :] != y[:, None]
        z = tl.where(kept if EVEN else kept & (n < V - FROM - col0)[None, :], z, LEFT_OUT)

        # sums about the tile's maximum: no logit, however large, overflows them. Where nothing counts, that is above
        # all the same: z factor - top, rounded once, is no 0 at 1e30
        top = tl.maximum(tl.max(z, axis=1), 0.1 * LEFT_OUT) * factor
        u = tl.fma(z, tl.full((BLOCK_M, BLOCK_N), factor, tl.float32), tl.broadcast_to(-top[:, None], z.shape))
        if HAS_BIAS:  # some may be -inf, and u e would be NaN; the bound lets NaN through
            u = tl.maximum(u, LEFT_OUT, propagate_nan=tl.PropagateNan.ALL)
        e = tl.exp2(u)
        part = tiles_ptr + ((FROM + col0) // BLOCK_N).to(tl.int64) * pitch + rows
        sums = tl.join(tl.join(top, tl.sum(e * e, axis=1)), tl.join(tl.sum(e, axis=1), tl.sum(u * e, axis=1)))
        two = tl.arange(0, 2)
        planes = (2 * two[:, None] + two[None, :]) * plane
        tl.store(part[:, None, None] + planes[None], sums, mask=live[:, None, None])
        if STORE:
            # a clamped row is out of range and will be repaired; rows that are not there may be written
            # (not min(top - ref, overflow): a compiler would fuse top's product into that, unrounded)
            e = e * tl.exp2(tl.minimum(top, ref + overflow) - ref)[:, None]
            if HAS_SOFTCAP:
                e = tl.where(z <= LEFT_OUT, 0.0, e * (1 - (z / softcap) * (z / softcap)))
            e_desc.store([row0, FROM + col0], e.to(TYPE))


@triton.jit
def _repair_row(
    x_ptr, w_ptr, bias_ptr, y_ptr, e_ptr, u_ptr, row, ref, V, D, stride_e, scale, softcap, HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, MULTIPLIED: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # one row of E about its maximum, by dot products, and of u = E W, where that was made with E
    row = row.to(tl.int64)
    y = tl.load(y_ptr + row)
    for start in range(0, V, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        total = tl.zeros((BLOCK_V,), dtype=tl.float32)
        for d0 in range(0, D, BLOCK_D):
            d = d0 + tl.arange(0, BLOCK_D)
            x = tl.load(x_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
            mask = (v < V)[:, None] & (d < D)[None, :]
            w = tl.load(w_ptr + v.to(tl.int64)[:, None] * D + d[None, :], mask=mask, other=0.0)
            total += tl.sum(w.to(x_ptr.dtype.element_ty).to(tl.float32) * x[None, :], axis=1)
        bias = tl.load(bias_ptr + v, mask=v < V, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
        z = _logit(total, bias, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
        e = tl.where(v == y, 0.0, tl.exp2(z * LOG2E - ref))
        if HAS_SOFTCAP:
            e = e * (1 - (z / softcap) * (z / softcap))
        low = e.to(e_ptr.dtype.element_ty)
        tl.store(e_ptr + row * stride_e + v, low, mask=v < V)
        if MULTIPLIED:
            low = tl.where(v < V, low.to(tl.float32), 0.0)
            for d0 in range(0, D, BLOCK_D):
                d = d0 + tl.arange(0, BLOCK_D)
                mask = (v < V)[:, None] & (d < D)[None, :]
                w = tl.load(w_ptr + v.to(tl.int64)[:, None] * D + d[None, :], mask=mask, other=0.0)
                more = tl.sum(w.to(x_ptr.dtype.element_ty).to(tl.float32) * low[:, None], axis=0)
                u = u_ptr + row * D + d
                before = tl.load(u, mask=(d < D) & (start > 0), other=0.0)
                tl.store(u, before + more, mask=d < D)


@triton.jit(do_not_specialize=["C", "first"])
def _reduce_tiles(
    tiles_ptr, z_ptr, out_ptr, x_ptr, w_ptr, bias_ptr, y_ptr, ref_ptr, e_ptr, u_ptr, nan_ptr, count_ptr,
    plane, pitch, C, first, TILES, plane_out, V, D, stride_e, scale, softcap, unit, unit_low, overflow,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, STORED: tl.constexpr, MULTIPLIED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = rows < tl.minimum(C, tl.load(count_ptr) - first)
    z_y = tl.load(z_ptr + rows, mask=live, other=0.0).to(tl.float64)
    unit = tl.full((), unit, tl.float64) + unit_low
    leading = tl.full((BLOCK_R,), LEFT_OUT, dtype=tl.float32)
    for start in range(0, TILES, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        at = tiles_ptr + t.to(tl.int64)[:, None] * pitch + rows[None, :]
        top = tl.load(at, mask=(t < TILES)[:, None] & live[None, :], other=LEFT_OUT)
        leading = tl.maximum(leading, tl.max(top, axis=0))
    # a target that leads is its own shift, exactly
    led = leading.to(tl.float64) > z_y / unit
    shift = tl.where(led, leading.to(tl.float64), z_y / unit)
    shifted = tl.where(led, shift * unit, z_y)
    rest = tl.zeros((BLOCK_R,), dtype=tl.float32)
    squares = tl.zeros((BLOCK_R,), dtype=tl.float32)
    moment = tl.zeros((BLOCK_R,), dtype=tl.float32)
    for start in range(0, TILES, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        at = tiles_ptr + t.to(tl.int64)[:, None] * pitch + rows[None, :]
        mask = (t < TILES)[:, None] & live[None, :]
        top = tl.load(at, mask=mask, other=LEFT_OUT)
        s = tl.load(at + plane, mask=mask, other=0.0)
        s2 = tl.load(at + 2 * plane, mask=mask, other=0.0)
        ue = tl.load(at + 3 * plane, mask=mask, other=0.0)
        # a tile without a column that counts is far below; a NaN is in the sums and stays
        lower = tl.maximum((top.to(tl.float64) - shift[None, :]).to(tl.float32), -300.0)
        share = tl.exp2(lower)
        rest += tl.sum(s * share, axis=0)
        squares += tl.sum(s2 * share * share, axis=0)
        moment += tl.sum((ue + lower * s) * share, axis=0)

    # the statistics, as `statistics.stats_columns` has them, in float64
    u_y = z_y - shifted
    e_y = tl.exp(u_y)
    log_sum = _log1p((e_y - 1) + rest.to(tl.float64))
    collision = _log1p((e_y * e_y - 1) + squares.to(tl.float64)) - 2 * log_sum
    own = tl.where(e_y == 0, 0.0, u_y * e_y)  # 0 * -inf = 0
    entropy = log_sum - (own + moment.to(tl.float64) * unit) / tl.exp(log_sum)
    out = out_ptr + rows
    log_p = u_y - log_sum
    if tl.sum((live & (log_p != log_p)).to(tl.int32), axis=0) > 0:
        tl.store(nan_ptr, 1)
    tl.store(out, log_p, mask=live)
    tl.store(out + plane_out, tl.where(entropy < 0, 0.0, entropy), mask=live)
    tl.store(out + 2 * plane_out, tl.where(collision > 0, 0.0, collision), mask=live)
    tl.store(out + 3 * plane_out, log_sum, mask=live)
    tl.store(out + 4 * plane_out, shifted, mask=live)

    if STORED:
        ref = tl.load(ref_ptr + rows, mask=live, other=0.0)
        over = live & (shift - ref > overflow)
        anew = tl.ceil(shift).to(tl.float32)
        if tl.sum(over.to(tl.int32), axis=0) > 0:
            for r in range(BLOCK_R):
                here = tl.arange(0, BLOCK_R) == r
                if tl.sum((over & here).to(tl.int32), axis=0) > 0:
                    _repair_row(
                        x_ptr, w_ptr, bias_ptr, y_ptr, e_ptr, u_ptr, tl.program_id(0) * BLOCK_R + r,
                        tl.sum(tl.where(here, anew, 0.0), axis=0), V, D, stride_e, scale, softcap,
                        HAS_BIAS, HAS_SOFTCAP, MULTIPLIED, BLOCK_V, BLOCK_D,
                    )  # fmt: skip
            tl.store(ref_ptr + rows, anew, mask=over)


@triton.jit
def _log1p(x):
    # log(1 + x) with what rounding 1 + x lost put back
    w = 1 + x
    return tl.log(w) - ((w - 1) - x) / w


@triton.jit
def _finish_rows(
    gate_ptr, columns_ptr, plane, ref_ptr, z_ptr, t_ptr, u_ptr, x_ptr, w_ptr, y_ptr, index_ptr, out_ptr, scaled_ptr,
    v_ptr, D, scale, softcap, unit, unit_low, HAS_SOFTCAP: tl.constexpr, WANT_HIDDEN: tl.constexpr,
    WANT_SCALED: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    _finish(
        row, tl.load(gate_ptr + row).to(tl.float64) * scale, columns_ptr, plane, ref_ptr, z_ptr, t_ptr + row, u_ptr,
        x_ptr, w_ptr, y_ptr, tl.load(index_ptr + row), out_ptr, scaled_ptr, v_ptr, D, softcap, unit, unit_low,
        HAS_SOFTCAP, WANT_HIDDEN, WANT_SCALED, BLOCK_D,
    )  # fmt: skip


@triton.jit
def _finish_told(
    table_ptr, record_ptr, plane, ref_ptr, z_ptr, u_ptr, x_ptr, w_ptr, y_ptr, scaled_ptr, v_ptr, top_ptr, facts_ptr,
    C, D, scale, softcap, unit, unit_low, HAS_SOFTCAP: tl.constexpr, WANT_HIDDEN: tl.constexpr,
    WANT_SCALED: tl.constexpr, TYPE: tl.constexpr, TOP: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # a record is log_p, entropy, log_collision, log_sum, shift, value and gate
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(table_ptr + CHUNK)
    if row == 0:
        tl.store(table_ptr + START, first + C)
        tl.store(_from(table_ptr, FACTS, tl.int64) + 1, tl.load(facts_ptr + 1))
    if row < tl.load(facts_ptr):
        to = first + row
        gate = tl.load(record_ptr + 6 * plane + row) * (tl.load(table_ptr + SCALE).to(tl.float64, bitcast=True) * scale)
        place = tl.load(_from(table_ptr, PLACES, tl.int64) + to)
        out_ptr = _from(table_ptr, OUT, TYPE)
        _finish(
            row, gate, record_ptr, plane, ref_ptr, z_ptr, _from(table_ptr, T, tl.float32) + to, u_ptr, x_ptr, w_ptr,
            y_ptr, place, out_ptr, scaled_ptr, v_ptr, D, softcap, unit, unit_low, HAS_SOFTCAP, WANT_HIDDEN,
            WANT_SCALED, BLOCK_D,
        )  # fmt: skip
        k = tl.arange(0, 8)
        column = tl.load(record_ptr + k * plane + row, mask=k < 6, other=0.0)
        pitch = tl.load(table_ptr + PITCH)
        tl.store(_from(table_ptr, RECORD, tl.float64) + k * pitch + to, column, mask=k < 6)
        if TOP > 0:
            j = tl.arange(0, BLOCK_K)
            log_p = tl.load(top_ptr + row * TOP + j, mask=j < TOP, other=0.0)
            tl.store(_from(table_ptr, LIKELIEST, tl.float64) + to * TOP + j, log_p, mask=j < TOP)


@triton.jit
def _finish(
    row, gate, columns_ptr, plane, ref_ptr, z_ptr, t_ptr, u_ptr, x_ptr, w_ptr, y_ptr, to, out_ptr, scaled_ptr, v_ptr,
    D, softcap, unit, unit_low, HAS_SOFTCAP: tl.constexpr, WANT_HIDDEN: tl.constexpr, WANT_SCALED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    # dz = v E off the target and -t on it, for dz = gate (P - onehot); P = E e^{reference - shift - log_sum}
    log_p = tl.load(columns_ptr + row)
    log_sum = tl.load(columns_ptr + 3 * plane + row)
    shift = tl.load(columns_ptr + 4 * plane + row)
    about = tl.load(ref_ptr + row).to(tl.float64) * (tl.full((), unit, tl.float64) + unit_low)
    factor = gate * tl.exp(about - shift - log_sum)
    # 1 - p, exact for p near 1: (e^x - 1) x / log(e^x)
    p = tl.exp(log_p)
    error = tl.where(p == 1, -log_p, tl.where(p == 0, 1.0, (1 - p) * log_p / tl.log(p)))
    target = gate * error
    if HAS_SOFTCAP:
        z = tl.load(z_ptr + row).to(tl.float64)
        target = target * (1 - (z / softcap) * (z / softcap))
    # a shut gate is 0 whatever stands beside it
    v = tl.where(gate == 0, 0.0, factor).to(tl.float32)
    t = tl.where(gate == 0, 0.0, target).to(tl.float32)
    tl.store(v_ptr + row, v)
    tl.store(t_ptr, t)
    y = tl.load(y_ptr + row).to(tl.int64)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        if WANT_HIDDEN:
            u = tl.load(u_ptr + row * D + d, mask=d < D, other=0.0)
            w = tl.load(w_ptr + y * D + d, mask=d < D, other=0.0).to(x_ptr.dtype.element_ty).to(tl.float32)
            tl.store(out_ptr + to * D + d, (v * u - t * w).to(out_ptr.dtype.element_ty), mask=d < D)
        if WANT_SCALED:
            x = tl.load(x_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
            tl.store(scaled_ptr + row * D + d, (v * x).to(scaled_ptr.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["C"])
def _subtract_targets(
    x_ptr, index_ptr, sorted_ptr, order_ptr, t_ptr, dw_ptr, C, D, SHORT: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    # rows come sorted by target; the first of a run of equal targets adds up the whole run: no atomics
    first = tl.program_id(0)
    y = tl.load(sorted_ptr + first)
    before = tl.load(sorted_ptr + tl.maximum(first - 1, 0))
    if (first == 0) | (before != y):
        d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        total = tl.zeros((BLOCK_D,), dtype=tl.float32)
        start = first
        more = True
        while more:
            at = start + tl.arange(0, BLOCK_R)
            same = (at < C) & (tl.load(sorted_ptr + at, mask=at < C, other=0) == y)
            rows = tl.load(order_ptr + at, mask=same, other=0)
            place = tl.load(index_ptr + rows, mask=same, other=0).to(tl.int64)
            x = tl.load(x_ptr + place[:, None] * D + d[None, :], mask=same[:, None] & (d < D)[None, :], other=0.0)
            t = tl.load(t_ptr + rows, mask=same, other=0.0).to(tl.float32)
            total += tl.sum(x.to(tl.float32) * t[:, None], axis=0)
            start += BLOCK_R
            more = tl.sum(same.to(tl.int32), axis=0) == BLOCK_R
        label = y.to(tl.int64)
        out = dw_ptr + (label & 0xFFFF if SHORT else label) * D + d
        tl.store(out, tl.load(out, mask=d < D, other=0.0) - total, mask=d < D)


@triton.jit
def _ranked(row_ptr, cols, n, V):
    # (E, column) as one integer: E's upper 16 bits, then columns from the left; 0 beyond the last
    e = tl.load(row_ptr + cols, mask=cols < V, other=0.0).to(tl.float32)
    return tl.where(cols < V, (e.to(tl.int32, bitcast=True) & 0x7FFF0000) | (0xFFFF - n), 0)


@triton.jit
def _reaching(row_ptr, words_ptr, tile, bound, stride_e, PAIRS: tl.constexpr, BLOCK_N: tl.constexpr):
    # how many columns of each tile [G, 1] are as large as the bound; what stands beyond the last one may count too
    if PAIRS:  # two of bf16 are one word
        at = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)[None, :]
        word = tl.load(words_ptr + at, mask=at < stride_e // 2, other=0)
        number = tl.sum((word >= bound).to(tl.int32) + ((word << 16) >= bound).to(tl.int32), axis=1)
    else:
        at = tile * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        e = tl.load(row_ptr + at, mask=at < stride_e, other=0.0).to(tl.float32)
        number = tl.sum((e.to(tl.int32, bitcast=True) >= bound).to(tl.int32), axis=1)
    return number


@triton.jit(do_not_specialize=["first"])
def _likeliest(
    tiles_ptr, e_ptr, pairs_ptr, ref_ptr, target_ptr, x_ptr, w_ptr, bias_ptr, columns_ptr, leaders_ptr, out_ptr,
    entropy_ptr, count_ptr, pitch, V, D, TILES, stride_e, plane, first, scale, unit, K: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PAIRS: tl.constexpr, SPARE: tl.constexpr, SLOTS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # The K largest logits but the target's are in the K tiles with the largest maxima. A maximum is known in fp32; the
    # few others that are as large are found on the stored E, and computed anew.
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(count_ptr) - first:
        t, n, slots = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_N), tl.arange(0, SLOTS)
        lead = tl.load(tiles_ptr + t.to(tl.int64) * pitch + row, mask=t < TILES, other=LEFT_OUT)
        # a bound that K tiles or a few more reach, by halving the range
        low = tl.min(tl.where(t < TILES, lead, float("inf")), axis=0)
        high = tl.max(lead, axis=0)
        middle = 0.5 * (low + high)
        leaders = TILES
        while (leaders > K + SPARE // 2) & (middle > low) & (middle < high):
            above = tl.sum((lead >= middle).to(tl.int32), axis=0)
            low, high = tl.where(above >= K, middle, low), tl.where(above >= K, high, middle)
            leaders = tl.where(above >= K, above, leaders)
            middle = 0.5 * (low + high)
        # those above it first: of more that tie with it than there are slots, any will do. Two counts in one sum
        ahead, ties = lead > low, (t < TILES) & (lead == low)
        place = tl.cumsum(ahead.to(tl.int32) + (ties.to(tl.int32) << 16), axis=0)
        to = tl.where(ahead, place & 0xFFFF, tl.sum(ahead.to(tl.int32), axis=0) + (place >> 16)) - 1
        tl.store(leaders_ptr + row * SLOTS + to, t, mask=(ahead | ties) & (to < SLOTS))
        tl.debug_barrier()  # other threads wrote what this one reads
        tile = tl.load(leaders_ptr + row * SLOTS + slots, mask=slots < leaders, other=TILES)
        z = tl.load(tiles_ptr + tile.to(tl.int64) * pitch + row, mask=tile < TILES, other=LEFT_OUT) * unit
        bound = (tl.exp2(low - tl.load(ref_ptr + row)) * 0.99).to(tl.int32, bitcast=True) & 0x7FFF0000
        bound = tl.where(leaders < K, 0, bound)  # too few tiles: any column may be among the largest
        row_ptr = e_ptr + row * stride_e
        # which tiles have more than their maximum above the bound
        grouped = tl.reshape(tile, (SLOTS // GROUP, GROUP))
        group = tl.arange(0, SLOTS // GROUP)[:, None]
        above = tl.zeros((SLOTS // GROUP, GROUP), dtype=tl.int32)
        if SLOTS // GROUP <= 8:  # unrolled, the tiles are read at once
            for g in tl.static_range(SLOTS // GROUP):
                here = tl.sum(tl.where(group == g, grouped, 0), axis=0)[:, None]
                number = _reaching(row_ptr, pairs_ptr + row * (stride_e // 2), here, bound, stride_e, PAIRS, BLOCK_N)
                above = tl.where(group == g, number[None, :], above)
        else:
            for g in range(SLOTS // GROUP):
                here = tl.sum(tl.where(group == g, grouped, 0), axis=0)[:, None]
                number = _reaching(row_ptr, pairs_ptr + row * (stride_e // 2), here, bound, stride_e, PAIRS, BLOCK_N)
                above = tl.where(group == g, number[None, :], above)
        several = (tl.reshape(above, (SLOTS,)) > 1) & (slots < leaders)

        # the next of each such tile; its maximum too, where E cannot tell it from that
        coming = tl.zeros((SLOTS,), dtype=tl.int32)
        slot = tl.min(tl.where(several, slots, SLOTS), axis=0)
        while slot < SLOTS:
            keys = _ranked(row_ptr, tl.sum(tl.where(slots == slot, tile, 0), axis=0) * BLOCK_N + n, n, V)
            first_key = tl.max(keys, axis=0)
            second = tl.max(tl.where(keys < first_key, keys, 0), axis=0)
            tie = ((first_key >> 16) == (second >> 16)) & ((first_key >> 16) != 0)
            coming = tl.where(slots == slot, tl.where(tie, first_key, second), coming)
            z = tl.where((slots == slot) & tie, LEFT_OUT, z)
            slot = tl.min(tl.where(several & (slots > slot), slots, SLOTS), axis=0)
        more = tl.where(slots == K + SPARE, tl.load(target_ptr + row), LEFT_OUT)
        best = tl.max(coming, axis=0)
        taken = 0
        while (best >= bound) & ((best >> 16) != 0) & (taken < K + SPARE):
            mine = slots == tl.min(tl.where(coming == best, slots, SLOTS), axis=0)
            begin = tl.sum(tl.where(mine, tile, 0), axis=0) * BLOCK_N
            col = (begin + (0xFFFF - (best & 0xFFFF))).to(tl.int64)
            dot = tl.zeros((BLOCK_D,), dtype=tl.float32)
            for start in range(0, D, BLOCK_D):
                d = start + tl.arange(0, BLOCK_D)
                x = tl.load(x_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
                w = tl.load(w_ptr + col * D + d, mask=d < D, other=0.0)
                dot += x * w.to(x_ptr.dtype.element_ty).to(tl.float32)
            bias = tl.load(bias_ptr + col).to(tl.float32) if HAS_BIAS else 0.0
            logit = _logit(tl.sum(dot, axis=0), bias, scale, 1.0, HAS_BIAS, HAS_SOFTCAP)
            more = tl.where(slots == taken, logit, more)
            others = _ranked(row_ptr, begin + n, n, V)
            coming = tl.where(mine, tl.max(tl.where(others < best, others, 0), axis=0), coming)
            best = tl.max(coming, axis=0)
            taken += 1

        found = tl.sort(tl.reshape(tl.join(z, more), (2 * SLOTS,)), descending=True)
        j = tl.arange(0, 2 * SLOTS)
        log_sum = tl.load(columns_ptr + 3 * plane + row)
        log_p = found.to(tl.float64) - (log_sum + tl.load(columns_ptr + 4 * plane + row))
        tl.store(out_ptr + row * K + j, log_p, mask=j < K)
        # -sum q log q of the K, q their shares; 0 log 0 = 0
        u = tl.maximum(log_p - tl.max(log_p, axis=0), -800.0)
        e = tl.where(j < K, tl.exp(u), 0.0)
        total = tl.sum(e, axis=0)
        entropy = tl.log(total) - tl.sum(e * u, axis=0) / total
        tl.store(entropy_ptr + row, tl.where(entropy < 0, 0.0, entropy))


@triton.jit
def _scale(
    a_ptr, a_out, a_n, b_ptr, b_out, b_n, factor_ptr, A_IN_PLACE: tl.constexpr, B_IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # two tensors in one launch: the first programs take a, the others b
    factor = tl.load(factor_ptr).to(tl.float32)
    mine = tl.program_id(0)
    programs_a = tl.cdiv(a_n, BLOCK)
    if mine < programs_a:
        if (factor != 1.0) | (not A_IN_PLACE):
            at = mine.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(a_ptr + at, mask=at < a_n, other=0.0)
            tl.store(a_out + at, (x.to(tl.float32) * factor).to(a_out.dtype.element_ty), mask=at < a_n)
    else:
        if (factor != 1.0) | (not B_IN_PLACE):
            at = (mine - programs_a).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(b_ptr + at, mask=at < b_n, other=0.0)
            tl.store(b_out + at, (x.to(tl.float32) * factor).to(b_out.dtype.element_ty), mask=at < b_n)


# --- launches -------------------------------------------------------------------------------------------------------


def _head_options(head: Head) -> dict[str, bool]:
    return {"HAS_BIAS": head.bias is not None, "HAS_SOFTCAP": head.softcap is not None}


class Units(NamedTuple):
    """What the tiles of a head count in: its logits, or where that will do its products, times ``factor``."""

    rising: bool  # the largest product is the largest logit
    factor: float  # a float32
    unit: float  # logits that are one of theirs: two float32 make up a float64
    unit_low: float


def units(head: Head) -> Units:
    rising = head.bias is None and head.softcap is None and head.scale > 0
    return Units(rising, *_units(head.scale if rising else 1.0))


@functools.cache
def _units(scale: float) -> tuple[float, float, float]:
    factor = _float32(scale * math.log2(math.e))
    unit = scale / factor
    return factor, _float32(unit), _float32(unit - _float32(unit))


def _float32(value: float) -> float:
    return ctypes.c_float(value).value


def _head_numbers(head: Head) -> tuple[float, float]:
    return head.scale, head.softcap or 1.0


def aligned(planes: int, rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[planes, rows], each plane on 64 bytes or more: Triton compiles anew for a pointer that is not."""
    return torch.empty(planes, -(-rows // 16) * 16, dtype=dtype, device=device)[:, :rows]


def survey(
    targets: Tensor, vocab_size: int, ignore: int, earlier: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(places, labels, facts, told) of the supervised tokens, in one launch.

    Places and labels are [N], 0 from the count on. Facts, on the device: the count, and a flag that is still 0. Told,
    where the host can read it once the kernel is done: the count, the place of the first label outside [0, V) (N: none;
    the label then stands as 0), and what the flag ``earlier`` said.
    """
    device, rows = targets.device, len(targets)
    places, labels = torch.empty(2, -(-rows // 16) * 16, dtype=torch.int64, device=device).unbind()
    facts = torch.empty(2, dtype=torch.int64, device=device)
    told = torch.empty(3, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    _survey[(1,)](
        targets, places, labels, facts, told, facts if earlier is None else earlier, rows, vocab_size, ignore,
        EARLIER=earlier is not None, BLOCK=4096, num_warps=8,
    )  # fmt: skip
    return places[:rows], labels[:rows], facts, told


def survey_told(table: Tensor, told: Tensor, vocab_size: int, ignore: int) -> None:
    """`survey` of the targets that the table names, into what it names."""
    _survey_told[(1,)](table, told, vocab_size, ignore, BLOCK=4096, num_warps=8)


def take_rows(table: Tensor, dtype: torch.dtype, x: Tensor, y: Tensor, facts: Tensor) -> None:
    """The rows and labels of the table's next chunk into x [C, D] and y [C]; rows beyond the count are 0.

    ``facts`` are those of the C rows, as `survey` makes a call's: how many are there; the flag is 0 from the first on.
    ``dtype`` is that of the hidden states.
    """
    width = x.shape[1]
    _take_rows[(len(x),)](
        table, x, y, facts, len(x), width, TYPE=TYPES[dtype], BLOCK_D=min(1024, triton.next_power_of_2(width))
    )


def target_logits(
    x: Tensor, index: Tensor, y: Tensor, head: Head, count: Tensor, vectors: Tensor | None = None
) -> Tensor:  # fmt: skip
    """[4, rows], fp32: z_y and reference of the rows x[index], as many as ``count`` says; room for v and t."""
    if vectors is None:
        vectors = aligned(4, len(y), torch.float32, x.device)
    z, ref, _, _ = vectors.unbind()
    rows = 4
    _target_logits[(triton.cdiv(len(y), rows),)](
        x, head.weight, head.bias, index, y, z, ref, count, len(y), head.width, *_head_numbers(head), HEADROOM,
        **_head_options(head), BLOCK_R=rows, BLOCK_D=128,
    )  # fmt: skip
    return vectors


def exponentials(
    x: Tensor, y: Tensor, ref: Tensor, head: Head, weights: Slices, e: Tensor | None, count: Tensor, first: int,
    then: Callable[[int, Tensor, bool], None] | None = None,
) -> Tensor:  # fmt: skip
    """E into ``e`` [C, >= V] (None: sums only); returns the tiles' (max, sum e, sum e^2, sum u e): [4, tiles, C].

    The rows are those from ``first`` on; of them, as many as ``count`` [1], on the device, leaves are computed.
    ``then`` is called with the beginning of each slice of the weight, the slice, and whether it is not the first.
    """
    exact = x.dtype == torch.float32
    block_m, block_k = (BLOCK_M_FLOAT32, BLOCK_K_FLOAT32) if exact else (BLOCK_M, BLOCK_K)
    tiles_m, tiles_n = triton.cdiv(len(x), block_m), triton.cdiv(head.vocab_size, BLOCK_N)
    tiles = aligned(4 * tiles_n, len(x), torch.float32, x.device).unflatten(0, (4, tiles_n))
    rising, factor, _, _ = units(head)
    rows = TensorDescriptor(x, x.shape, x.stride(), [block_m, block_k])
    to = rows if e is None else TensorDescriptor(e, [len(x), head.vocab_size], e.stride(), [block_m, BLOCK_N])
    for number, (begin, weight) in enumerate(weights.each()):
        programs = min(tiles_m * triton.cdiv(len(weight), BLOCK_N), processors(x.device))
        _exponentials[(programs,)](
            rows, TensorDescriptor(weight, weight.shape, weight.stride(), [BLOCK_N, block_k]), to, head.bias, y, ref,
            tiles, count, tiles.stride(0), tiles.stride(1), len(x), first, begin, begin + len(weight), head.width,
            *_head_numbers(head), factor, OVERFLOW, programs, **_head_options(head), RISING=rising, STORE=e is not None,
            EVEN=len(weight) % BLOCK_N == 0, TYPE=TYPES[x.dtype], PRECISION="ieee" if exact else "tf32",
            BLOCK_M=block_m, BLOCK_N=BLOCK_N, BLOCK_K=block_k, num_warps=8, num_stages=2 if exact else 3,
        )  # fmt: skip
        if then is not None:
            then(begin, weight, number > 0)
    return tiles


@functools.cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def reduce_tiles(
    tiles: Tensor, z_y: Tensor, out: Tensor, x: Tensor, y: Tensor, ref: Tensor, head: Head, e: Tensor | None,
    u: Tensor | None, nan: Tensor, number: Tensor, first: int,
) -> None:  # fmt: skip
    """log_p, entropy, log_collision, log_sum and shift of each row into ``out`` [5, C], float64, rows adjacent.

    Rows of ``e``, and of ``u`` = E W, that left its range are recomputed about their maximum; ``ref`` then says so. A
    NaN sets ``nan``.
    ``number`` and ``first`` are `exponentials`' count and first.
    """
    _, count, rows = tiles.shape
    block = 16
    _reduce_tiles[(triton.cdiv(rows, block),)](
        tiles, z_y, out, x, head.weight, head.bias, y, ref, x if e is None else e, x if u is None else u, nan, number,
        tiles.stride(0), tiles.stride(1), rows, first, count, out.stride(0), head.vocab_size, head.width,
        0 if e is None else e.stride(0), *_head_numbers(head), *units(head)[2:], OVERFLOW,
        **_head_options(head), STORED=e is not None, MULTIPLIED=u is not None,
        BLOCK_R=block, BLOCK_T=64, BLOCK_V=64, BLOCK_D=64,
    )  # fmt: skip


def finish_rows(
    gate: Tensor, columns: Tensor, ref: Tensor, z_y: Tensor, v: Tensor, t: Tensor, x: Tensor, y: Tensor, index: Tensor,
    head: Head, scale: float, u: Tensor | None, out: Tensor | None, scaled: Tensor | None,
) -> None:  # fmt: skip
    """v and t of a chunk from scale times its gates.

    out[index] = v u - t W[y] and scaled = v x, each rounded once; None: not wanted.
    """
    _finish_rows[(len(x),)](
        gate, columns, columns.stride(0), ref, z_y, t, x if u is None else u, x, head.weight, y, index,
        x if out is None else out, x if scaled is None else scaled, v, x.shape[1], scale * head.scale,
        head.softcap or 1.0, *units(head)[2:],
        HAS_SOFTCAP=head.softcap is not None, WANT_HIDDEN=out is not None,
        WANT_SCALED=scaled is not None, BLOCK_D=1024,
    )  # fmt: skip


def finish_told(
    table: Tensor, record: Tensor, vectors: Tensor, x: Tensor, y: Tensor, facts: Tensor, head: Head, u: Tensor | None,
    dtype: torch.dtype, scaled: Tensor | None, top: Tensor | None,
) -> None:  # fmt: skip
    """`finish_rows` for the chunk that was taken; dX, t, record and likeliest tokens go where the table says.

    ``record`` [7, C] holds the columns, value and gate of its rows; ``dtype`` is that of dX.
    """
    z_y, ref, v, _ = vectors.unbind()
    k = 0 if top is None else top.shape[1]
    _finish_told[(len(x),)](
        table, record, record.stride(0), ref, z_y, x if u is None else u, x, head.weight, y,
        x if scaled is None else scaled, v, record if top is None else top, facts, len(x), x.shape[1], head.scale,
        head.softcap or 1.0, *units(head)[2:], HAS_SOFTCAP=head.softcap is not None, WANT_HIDDEN=u is not None,
        WANT_SCALED=scaled is not None, TYPE=TYPES[dtype], TOP=k, BLOCK_D=1024,
        BLOCK_K=triton.next_power_of_2(max(k, 1)),
    )  # fmt: skip


def sort_targets(y: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """(labels, order): rows with the same label side by side. Two bytes, wrapped around, do in half the passes."""
    return torch.sort(y.to(torch.int16 if vocab_size <= 1 << 16 else torch.int32), stable=True)


def subtract_targets(x: Tensor, index: Tensor, runs: tuple[Tensor, Tensor], t: Tensor, dw: Tensor) -> None:
    """dw[y] -= t x[index], y as `sort_targets` has them; rows of a label are added up by one program: no atomics."""
    ordered, order = runs
    rows, width = len(ordered), x.shape[1]
    block = min(1024, triton.next_power_of_2(width))
    _subtract_targets[(rows, triton.cdiv(width, block))](
        x, index, ordered, order, t, dw, rows, width, SHORT=ordered.dtype == torch.int16, BLOCK_R=4, BLOCK_D=block
    )  # fmt: skip


def likeliest(
    x: Tensor, z_y: Tensor, ref: Tensor, tiles: Tensor, e: Tensor, head: Head, columns: Tensor, number: Tensor,
    first: int, log_p: Tensor, entropy: Tensor,
) -> None:  # fmt: skip
    """log p of the k likeliest tokens of each row, falling, into ``log_p`` [C, k], and the entropy of their shares.

    Where more than k + SPARE columns besides the tiles' own maxima are large enough, those are told apart by E: among
    near-ties (2^-8) one then stands for another of the same probability. ``number`` and ``first`` are `exponentials`'
    count and first, ``columns`` what `reduce_tiles` made.
    """
    tiles_n, k = tiles.shape[1], log_p.shape[1]
    slots = triton.next_power_of_2(k + SPARE + 1)
    leaders = torch.empty(len(x), slots, dtype=torch.int32, device=x.device)
    pairs = e.dtype == torch.bfloat16
    _likeliest[(len(x),)](
        tiles, e, e.view(torch.int32) if pairs else e, ref, z_y, x, head.weight, head.bias, columns, leaders, log_p,
        entropy, number, tiles.stride(1), head.vocab_size, head.width, tiles_n, e.stride(0), columns.stride(0), first,
        head.scale, units(head).unit, k, **_head_options(head), PAIRS=pairs, SPARE=SPARE, SLOTS=slots, GROUP=8,
        BLOCK_T=max(32, triton.next_power_of_2(tiles_n)), BLOCK_N=BLOCK_N, BLOCK_D=512, num_warps=1,
    )  # fmt: skip


def scaled(tensors: list[Tensor], factor: Tensor, dtypes: list[torch.dtype]) -> list[Tensor]:
    """factor x in its dtype for each x, rounded once; in place where that is x's own, and then 1 x costs nothing."""
    outs = [x if x.dtype == dtype else torch.empty_like(x, dtype=dtype) for x, dtype in zip(tensors, dtypes)]
    block = 4096
    for i in range(0, len(tensors), 2):
        a, a_out = tensors[i], outs[i]
        b, b_out, b_n = (tensors[i + 1], outs[i + 1], tensors[i + 1].numel()) if i + 1 < len(tensors) else (a, a_out, 0)
        programs = triton.cdiv(a.numel(), block) + triton.cdiv(b_n, block)
        _scale[(programs,)](
            a, a_out, a.numel(), b, b_out, b_n, factor, A_IN_PLACE=a_out is a, B_IN_PLACE=b_out is b, BLOCK=block
        )  # fmt: skip
    return outs
