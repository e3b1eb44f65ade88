# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportReturnType=false
"""The Triton kernels from gates to gradients; `triton_rows` launches them and says what for."""

from __future__ import annotations

import triton
import triton.language as tl

from deftune.losses.triton_table import (
    CHUNK,
    FACTS,
    LIKELIEST,
    OUT,
    PITCH,
    PLACES,
    RECORD,
    SCALE,
    START,
    T,
    told_pointer,
)


@triton.jit
def finish_rows_kernel(
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
def finish_told_kernel(
    table_ptr, record_ptr, plane, ref_ptr, z_ptr, u_ptr, x_ptr, w_ptr, y_ptr, scaled_ptr, v_ptr, top_ptr, facts_ptr,
    C, D, scale, softcap, unit, unit_low, HAS_SOFTCAP: tl.constexpr, WANT_HIDDEN: tl.constexpr,
    WANT_SCALED: tl.constexpr, TYPE: tl.constexpr, TOP: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    # a record is the columns, the value and the gate
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(table_ptr + CHUNK)
    if row == 0:
        tl.store(table_ptr + START, first + C)
        tl.store(told_pointer(table_ptr, FACTS, tl.int64) + 1, tl.load(facts_ptr + 1))
    if row < tl.load(facts_ptr):
        to = first + row
        factor = tl.load(table_ptr + SCALE).to(tl.float64, bitcast=True) * scale
        gate = tl.load(record_ptr + (COLUMNS + 1) * plane + row) * factor
        place = tl.load(told_pointer(table_ptr, PLACES, tl.int64) + to)
        out_ptr = told_pointer(table_ptr, OUT, TYPE)
        _finish(
            row, gate, record_ptr, plane, ref_ptr, z_ptr, told_pointer(table_ptr, T, tl.float32) + to, u_ptr, x_ptr,
            w_ptr, y_ptr, place, out_ptr, scaled_ptr, v_ptr, D, softcap, unit, unit_low, HAS_SOFTCAP, WANT_HIDDEN,
            WANT_SCALED, BLOCK_D,
        )  # fmt: skip
        k = tl.arange(0, BLOCK_C)
        column = tl.load(record_ptr + k * plane + row, mask=k <= COLUMNS, other=0.0)
        pitch = tl.load(table_ptr + PITCH)
        tl.store(told_pointer(table_ptr, RECORD, tl.float64) + k * pitch + to, column, mask=k <= COLUMNS)
        if TOP > 0:
            j = tl.arange(0, BLOCK_K)
            log_p = tl.load(top_ptr + row * TOP + j, mask=j < TOP, other=0.0)
            tl.store(told_pointer(table_ptr, LIKELIEST, tl.float64) + to * TOP + j, log_p, mask=j < TOP)


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
    y = tl.load(y_ptr + row).to(tl.int64)  # below 0: another rank's
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        if WANT_HIDDEN:
            u = tl.load(u_ptr + row * D + d, mask=d < D, other=0.0)
            w = tl.load(w_ptr + y * D + d, mask=(d < D) & (y >= 0), other=0.0).to(x_ptr.dtype.element_ty).to(tl.float32)
            tl.store(out_ptr + to * D + d, (v * u - t * w).to(out_ptr.dtype.element_ty), mask=d < D)
        if WANT_SCALED:
            x = tl.load(x_ptr + row * D + d, mask=d < D, other=0.0).to(tl.float32)
            tl.store(scaled_ptr + row * D + d, (v * x).to(scaled_ptr.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["C"])
def subtract_targets_kernel(
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
def scale_kernel(
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


@triton.jit(do_not_specialize=["C"])
def column_sums_kernel(
    e_ptr, v_ptr, out_ptr, C, V, stride, ABSOLUTE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    total = tl.zeros((BLOCK_C, BLOCK_V), dtype=tl.float32)  # threads need each other's at the end only
    for start in range(0, C, BLOCK_C):
        rows = start + tl.arange(0, BLOCK_C)
        v = tl.load(v_ptr + rows, mask=rows < C, other=0.0)
        v = tl.abs(v) if ABSOLUTE else v
        at = rows.to(tl.int64)[:, None] * stride + n[None, :]
        e = tl.load(e_ptr + at, mask=(rows < C)[:, None] & (n < V)[None, :], other=0.0)
        total += e.to(tl.float32) * v[:, None]
    tl.store(out_ptr + n, tl.sum(total, axis=0), mask=n < V)


@triton.jit(do_not_specialize=["K"])
def add_products_kernel(
    to_ptr, masses_ptr, means_ptr, squares_ptr, V, D, K, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    there = rows < V
    squares = tl.zeros((BLOCK_V, BLOCK_D), dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        at = rows.to(tl.int64)[:, None] * D + d[None, :]
        mask = there[:, None] & (d < D)[None, :]
        x = tl.load(to_ptr + at, mask=mask, other=0.0)
        for k in range(0, K):
            mass = tl.load(masses_ptr + k * V + rows, mask=there, other=0.0)
            x += mass[:, None] * tl.load(means_ptr + k * D + d, mask=d < D, other=0.0)[None, :]
        tl.store(to_ptr + at, x, mask=mask)
        squares += x * x
    tl.store(squares_ptr + tl.program_id(0), tl.sum(squares))
