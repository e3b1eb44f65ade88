# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportReturnType=false
"""The Triton kernels from labels and hidden states to statistics; `triton_rows` launches them and says what for."""

from __future__ import annotations

import triton
import triton.language as tl

from deftune.losses.triton_table import (
    CHUNK,
    EARLIER,
    FACTS,
    HIDDEN,
    LABELS,
    PLACES,
    START,
    TARGETS,
    TOKENS,
    told_pointer,
)

LEFT_OUT = tl.constexpr(-1e30)  # a logit that counts for nothing
LOG2E = tl.constexpr(1.4426950408889634)
TILE_SUMS = 4  # what `exponentials_kernel` stores of a tile: its maximum, sum e, sum e^2, sum u e


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
def survey_kernel(
    targets_ptr, index_ptr, labels_ptr, facts_ptr, told_ptr, earlier_ptr, N, V, ignore,
    EARLIER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    was = tl.load(earlier_ptr) if EARLIER else 0
    _find(targets_ptr, index_ptr, labels_ptr, facts_ptr, told_ptr, was, N, V, ignore, BLOCK)


@triton.jit
def survey_told_kernel(here_ptr, table_ptr, told_ptr, V, ignore, BLOCK: tl.constexpr):
    # the table's first half comes from the host's memory: the other kernels, with many programs, read it here
    slots = tl.arange(0, CHUNK)
    tl.store(table_ptr + slots, tl.load(here_ptr + slots))
    flag = tl.load(here_ptr + EARLIER)
    was = tl.load(flag.to(tl.pointer_type(tl.int64)), mask=flag != 0, other=0)
    tokens = tl.load(here_ptr + TOKENS).to(tl.int32)
    places = told_pointer(here_ptr, PLACES, tl.int64)
    labels = told_pointer(here_ptr, LABELS, tl.int64)
    facts = told_pointer(here_ptr, FACTS, tl.int64)
    _find(told_pointer(here_ptr, TARGETS, tl.int64), places, labels, facts, told_ptr, was, tokens, V, ignore, BLOCK)


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
def take_rows_kernel(table_ptr, x_ptr, y_ptr, facts_ptr, C, D, TYPE: tl.constexpr, BLOCK_D: tl.constexpr):
    # rows beyond the count become 0, with label 0: whatever stands in the hidden states is not to be seen
    row = tl.program_id(0)
    first = tl.load(table_ptr + START)
    live = tl.load(told_pointer(table_ptr, FACTS, tl.int64)) - first
    there = row < live
    if row == 0:
        tl.store(table_ptr + CHUNK, first)
        tl.store(facts_ptr, tl.minimum(tl.maximum(live, 0), C))
        if first == 0:
            tl.store(facts_ptr + 1, 0)
    place = tl.load(told_pointer(table_ptr, PLACES, tl.int64) + first + row, mask=there, other=0)
    tl.store(y_ptr + row, tl.load(told_pointer(table_ptr, LABELS, tl.int64) + first + row, mask=there, other=0))
    hidden_ptr = told_pointer(table_ptr, HIDDEN, TYPE)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        x = tl.load(hidden_ptr + place * D + d, mask=there & (d < D), other=0.0)
        tl.store(x_ptr + row.to(tl.int64) * D + d, x.to(x_ptr.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["C"])
def target_logits_kernel(
    x_ptr, w_ptr, bias_ptr, index_ptr, y_ptr, z_ptr, ref_ptr, count_ptr, C, D, scale, softcap, headroom,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = rows < tl.minimum(C, tl.load(count_ptr))
    y = tl.load(y_ptr + rows, mask=live, other=0)
    place = tl.load(index_ptr + rows, mask=live, other=0).to(tl.int64)
    here = live & (y >= 0)  # else another rank's
    total = tl.zeros((BLOCK_R,), dtype=tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        mask = here[:, None] & (d < D)[None, :]
        x = tl.load(x_ptr + place[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + y.to(tl.int64)[:, None] * D + d[None, :], mask=mask, other=0.0)
        total += tl.sum(x * w.to(x_ptr.dtype.element_ty).to(tl.float32), axis=1)
    bias = tl.load(bias_ptr + y, mask=here, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
    z = _logit(total, bias, scale, softcap, HAS_BIAS, HAS_SOFTCAP)
    tl.store(z_ptr + rows, z, mask=live)
    tl.store(ref_ptr + rows, tl.ceil(z * LOG2E) + headroom, mask=live)


@triton.jit(do_not_specialize=["C", "first"])
def exponentials_kernel(
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

        # what follows can cost as much as the products at D = 576: every instruction an element counts
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


@triton.jit(do_not_specialize=["C", "first", "begin"])
def reduce_tiles_kernel(
    tiles_ptr, z_ptr, out_ptr, x_ptr, w_ptr, bias_ptr, y_ptr, ref_ptr, e_ptr, u_ptr, nan_ptr, count_ptr,
    plane, pitch, C, first, TILES, plane_out, V, D, stride_e, scale, softcap, unit, unit_low, overflow, begin,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, STORED: tl.constexpr, MULTIPLIED: tl.constexpr,
    PARTIAL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
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

    moments = moment.to(tl.float64) * unit
    out = out_ptr + rows
    if PARTIAL:  # of this rank's classes: the planes of `triton_rows.new_sums`
        y = tl.load(y_ptr + rows, mask=live, other=0)
        label = tl.where(y >= 0, y + begin, -1 - y).to(tl.float64)
        tl.store(out, shifted, mask=live)
        tl.store(out + plane_out, label, mask=live)
        tl.store(out + 2 * plane_out, -label, mask=live)
        tl.store(out + 3 * plane_out, rest.to(tl.float64), mask=live)
        tl.store(out + 4 * plane_out, squares.to(tl.float64), mask=live)
        tl.store(out + 5 * plane_out, moments, mask=live)
        tl.store(out + 6 * plane_out, shifted, mask=live)
    else:
        _store_columns(
            out, plane_out, nan_ptr, live, z_y, shifted, rest.to(tl.float64), squares.to(tl.float64), moments
        )

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


@triton.jit(do_not_specialize=["C"])
def rescale_sums_kernel(sums_ptr, plane, C, BLOCK: tl.constexpr):
    # rest, squares and moment about the largest shift of all ranks, as `statistics.rescaled` has them
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live, at = rows < C, sums_ptr + rows
    lower = tl.load(at + 6 * plane, mask=live, other=0.0) - tl.load(at, mask=live, other=0.0)
    factor = tl.exp(lower)
    rest = tl.load(at + 3 * plane, mask=live, other=0.0)
    squares = tl.load(at + 4 * plane, mask=live, other=0.0)
    moment = tl.load(at + 5 * plane, mask=live, other=0.0)
    tl.store(at + 3 * plane, rest * factor, mask=live)
    tl.store(at + 4 * plane, squares * factor * factor, mask=live)
    tl.store(at + 5 * plane, tl.where(factor == 0, 0.0, (moment + lower * rest) * factor), mask=live)


@triton.jit(do_not_specialize=["C"])
def merged_columns_kernel(sums_ptr, plane, z_ptr, out_ptr, plane_out, nan_ptr, C, BLOCK: tl.constexpr):
    # the statistics of whole rows; a row whose target differs among the ranks becomes NaN
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live, at = rows < C, sums_ptr + rows
    most = tl.load(at + plane, mask=live, other=0.0)
    least = tl.load(at + 2 * plane, mask=live, other=0.0)
    z_y = tl.load(z_ptr + rows, mask=live, other=0.0).to(tl.float64)
    _store_columns(
        out_ptr + rows, plane_out, nan_ptr, live, tl.where(most == -least, z_y, float("nan")),
        tl.load(at, mask=live, other=0.0), tl.load(at + 3 * plane, mask=live, other=0.0),
        tl.load(at + 4 * plane, mask=live, other=0.0), tl.load(at + 5 * plane, mask=live, other=0.0),
    )  # fmt: skip


@triton.jit
def _store_columns(out, plane, nan_ptr, live, z_y, shift, rest, squares, moment):
    # the statistics, as `statistics.stats_columns` has them, in float64
    u_y = z_y - shift
    e_y = tl.exp(u_y)
    log_sum = _log1p((e_y - 1) + rest)
    collision = _log1p((e_y * e_y - 1) + squares) - 2 * log_sum
    own = tl.where(e_y == 0, 0.0, u_y * e_y)  # 0 * -inf = 0
    entropy = log_sum - (own + moment) / tl.exp(log_sum)
    log_p = u_y - log_sum
    if tl.sum((live & (log_p != log_p)).to(tl.int32), axis=0) > 0:
        tl.store(nan_ptr, 1)
    tl.store(out, log_p, mask=live)
    tl.store(out + plane, tl.where(entropy < 0, 0.0, entropy), mask=live)
    tl.store(out + 2 * plane, tl.where(collision > 0, 0.0, collision), mask=live)
    tl.store(out + 3 * plane, log_sum, mask=live)
    tl.store(out + 4 * plane, shift, mask=live)


@triton.jit
def _log1p(x):
    # log(1 + x) with what rounding 1 + x lost put back
    w = 1 + x
    return tl.log(w) - ((w - 1) - x) / w


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
def likeliest_kernel(
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
        # -sum q log q of the K, q their shares, as `TokenStats.top_entropy` has it; 0 log 0 = 0
        u = tl.maximum(log_p - tl.max(log_p, axis=0), -800.0)
        e = tl.where((j > 0) & (j < K), tl.exp(u), 0.0)
        rest = tl.sum(e, axis=0)
        tl.store(entropy_ptr + row, _log1p(rest) - tl.sum(e * u, axis=0) / (1 + rest))
