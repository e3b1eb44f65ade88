# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportReturnType=false
"""The Triton part of the fused linear loss. Functions of tensors only: no kernel knows an objective.

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

from deftune.losses.head import Head, Slices
from deftune.losses.triton_gradients import (
    add_products_kernel,
    column_sums_kernel,
    finish_rows_kernel,
    finish_told_kernel,
    scale_kernel,
    subtract_targets_kernel,
)
from deftune.losses.triton_statistics import (
    TILE_SUMS,
    exponentials_kernel,
    likeliest_kernel,
    merged_columns_kernel,
    reduce_tiles_kernel,
    rescale_sums_kernel,
    survey_kernel,
    survey_told_kernel,
    take_rows_kernel,
    target_logits_kernel,
)

# in units of ln 2, as references are
HEADROOM = 58.0  # r = z_y + 40 logits: E of a certain row starts at e^-40, far above bf16's e^-87
OVERFLOW = 86.0  # and at e^60, v = gate / sum E still has room for 1 / num_items above e^-87

# the fastest of 22 measured on an H200, for D = 576 and 1536 alike; float32, without tensor cores, fits less
BLOCK_M, BLOCK_N, BLOCK_K = 128, Slices.multiple, 64
BLOCK_M_FLOAT32, BLOCK_K_FLOAT32 = 32, 32

SPARE = 4  # slots beyond the likeliest tokens asked for
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


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
    """(places, labels, facts, report) of the supervised tokens, in one launch.

    Places and labels are [N], 0 from the count on. Facts, on the device: the count, and a flag that is still 0. Report,
    which the host can read once the kernel is done: the count, the place of the first label outside [0, V) (N: none;
    such a label becomes 0), and the value of the flag ``earlier``.
    """
    device, rows = targets.device, len(targets)
    places, labels = torch.empty(2, -(-rows // 16) * 16, dtype=torch.int64, device=device).unbind()
    facts = torch.empty(2, dtype=torch.int64, device=device)
    report = torch.empty(3, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    survey_kernel[(1,)](
        targets, places, labels, facts, report, facts if earlier is None else earlier, rows, vocab_size, ignore,
        EARLIER=earlier is not None, BLOCK=4096, num_warps=8,
    )  # fmt: skip
    return places[:rows], labels[:rows], facts, report


def survey_told(host_table: Tensor, table: Tensor, report: Tensor, vocab_size: int, ignore: int) -> None:
    """`survey` with the addresses of its inputs and outputs in ``host_table``, whose first half goes to ``table``."""
    survey_told_kernel[(1,)](host_table, table, report, vocab_size, ignore, BLOCK=4096, num_warps=8)


def take_rows(table: Tensor, dtype: torch.dtype, x: Tensor, y: Tensor, facts: Tensor) -> None:
    """The rows and labels of the table's next chunk into x [C, D] and y [C]; rows beyond the count are 0.

    ``facts`` are those of the C rows, as `survey` makes a call's: how many are there; the flag is 0 from the first on.
    ``dtype`` is that of the hidden states.
    """
    width = x.shape[1]
    take_rows_kernel[(len(x),)](
        table, x, y, facts, len(x), width, TYPE=TYPES[dtype], BLOCK_D=min(1024, triton.next_power_of_2(width))
    )


def target_logits(
    x: Tensor, index: Tensor, y: Tensor, head: Head, count: Tensor, vectors: Tensor | None = None
) -> Tensor:  # fmt: skip
    """[4, rows], fp32: z_y and reference of the rows x[index], as many as ``count`` says; room for v and t."""
    if vectors is None:
        vectors = aligned(4, len(y), torch.float32, x.device)
    z, ref, _, _ = vectors.unbind()
    if head.shard is not None:  # the kernel leaves out rows beyond the count, which are summed over the ranks below
        z.zero_()
    rows = 4
    target_logits_kernel[(triton.cdiv(len(y), rows),)](
        x, head.weight, head.bias, index, y, z, ref, count, len(y), head.width, *_head_numbers(head), HEADROOM,
        **_head_options(head), BLOCK_R=rows, BLOCK_D=128,
    )  # fmt: skip
    if head.shard is not None:  # one rank has the logit of a target, and all need it
        head.shard.total(z)
        ref.copy_(torch.ceil(z * math.log2(math.e)) + HEADROOM)
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
    tiles_m, tiles_n = triton.cdiv(len(x), block_m), triton.cdiv(head.classes, BLOCK_N)
    tiles = aligned(TILE_SUMS * tiles_n, len(x), torch.float32, x.device).unflatten(0, (TILE_SUMS, tiles_n))
    rising, factor, _, _ = units(head)
    rows = TensorDescriptor(x, x.shape, x.stride(), [block_m, block_k])
    to = rows if e is None else TensorDescriptor(e, [len(x), head.classes], e.stride(), [block_m, BLOCK_N])
    for number, (begin, weight) in enumerate(weights.each()):
        programs = min(tiles_m * triton.cdiv(len(weight), BLOCK_N), processors(x.device))
        exponentials_kernel[(programs,)](
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
    """The `statistics.COLUMNS` of each row into ``out`` [5, C], float64, rows adjacent.

    Rows of ``e``, and of ``u`` = E W, that left its range are recomputed about their maximum; ``ref`` then says so. A
    NaN sets ``nan``.
    ``number`` and ``first`` are `exponentials`' count and first. Of a vocabulary shard, ``out`` is `new_sums`, which
    gets the sums of this rank's classes instead, and ``nan`` stays as it is.
    """
    _, count, rows = tiles.shape
    block = 16
    reduce_tiles_kernel[(triton.cdiv(rows, block),)](
        tiles, z_y, out, x, head.weight, head.bias, y, ref, x if e is None else e, x if u is None else u, nan, number,
        tiles.stride(0), tiles.stride(1), rows, first, count, out.stride(0), head.classes, head.width,
        0 if e is None else e.stride(0), *_head_numbers(head), *units(head)[2:], OVERFLOW,
        0 if head.shard is None else head.shard.first,
        **_head_options(head), STORED=e is not None, MULTIPLIED=u is not None, PARTIAL=head.shard is not None,
        BLOCK_R=block, BLOCK_T=64, BLOCK_V=64, BLOCK_D=64,
    )  # fmt: skip


def new_sums(rows: int, device: torch.device) -> Tensor:
    """Room for what `reduce_tiles` finds of a vocabulary shard: [7, >= rows], float64, each plane on 128 bytes.

    Ranks take the maximum of the planes 0 to 2 (shift, label, -label), and add up 3 to 5 (rest, squares, moment) after
    `rescale_sums`; 6 is this rank's own shift.
    """
    # zeros: the padding goes to the other ranks too, and NCCL may be told to stop at a NaN
    return torch.zeros(7, -(-rows // 16) * 16, dtype=torch.float64, device=device)


def rescale_sums(sums: Tensor) -> None:
    """The sums of this rank's classes about the largest shift of all ranks, which plane 0 has by now."""
    rows, block = sums.shape[1], 128
    rescale_sums_kernel[(triton.cdiv(rows, block),)](sums, sums.stride(0), rows, BLOCK=block)


def merged_columns(sums: Tensor, z_y: Tensor, out: Tensor, nan: Tensor) -> None:
    """The `statistics.COLUMNS` of whole rows into ``out`` [5, C] from the sums of all ranks; a NaN sets ``nan``."""
    rows, block = out.shape[1], 128
    merged_columns_kernel[(triton.cdiv(rows, block),)](
        sums, sums.stride(0), z_y, out, out.stride(0), nan, rows, BLOCK=block
    )


def finish_rows(
    gate: Tensor, columns: Tensor, ref: Tensor, z_y: Tensor, v: Tensor, t: Tensor, x: Tensor, y: Tensor, index: Tensor,
    head: Head, scale: float, u: Tensor | None, out: Tensor | None, scaled: Tensor | None,
) -> None:  # fmt: skip
    """v and t of a chunk from scale times its gates.

    out[index] = v u - t W[y] and scaled = v x, each rounded once; None: not wanted.
    """
    finish_rows_kernel[(len(x),)](
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
    columns = len(record) - 2
    finish_told_kernel[(len(x),)](
        table, record, record.stride(0), ref, z_y, x if u is None else u, x, head.weight, y,
        x if scaled is None else scaled, v, record if top is None else top, facts, len(x), x.shape[1], head.scale,
        head.softcap or 1.0, *units(head)[2:], HAS_SOFTCAP=head.softcap is not None, WANT_HIDDEN=u is not None,
        WANT_SCALED=scaled is not None, TYPE=TYPES[dtype], TOP=k, COLUMNS=columns, BLOCK_D=1024,
        BLOCK_K=triton.next_power_of_2(max(k, 1)), BLOCK_C=triton.next_power_of_2(columns + 1),
    )  # fmt: skip


def sort_targets(y: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """(labels, order): rows with the same label side by side. Two bytes, wrapped around, do in half the passes."""
    return torch.sort(y.to(torch.int16 if vocab_size <= 1 << 16 else torch.int32), stable=True)


def subtract_targets(x: Tensor, index: Tensor, runs: tuple[Tensor, Tensor], t: Tensor, dw: Tensor) -> None:
    """dw[y] -= t x[index], y as `sort_targets` has them; rows of a label are added up by one program: no atomics."""
    ordered, order = runs
    rows, width = len(ordered), x.shape[1]
    block = min(1024, triton.next_power_of_2(width))
    subtract_targets_kernel[(rows, triton.cdiv(width, block))](
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
    likeliest_kernel[(len(x),)](
        tiles, e, e.view(torch.int32) if pairs else e, ref, z_y, x, head.weight, head.bias, columns, leaders, log_p,
        entropy, number, tiles.stride(1), head.classes, head.width, tiles_n, e.stride(0), columns.stride(0), first,
        head.scale, units(head).unit, k, **_head_options(head), PAIRS=pairs, SPARE=SPARE, SLOTS=slots, GROUP=8,
        BLOCK_T=max(32, triton.next_power_of_2(tiles_n)), BLOCK_N=BLOCK_N, BLOCK_D=512, num_warps=1,
    )  # fmt: skip


def column_sums(e: Tensor, v: Tensor, absolute: bool = False) -> Tensor:
    """E^T v, or E^T |v|, in fp32: [V]."""
    rows, classes = e.shape
    out = torch.empty(classes, dtype=torch.float32, device=e.device)
    block = 128
    column_sums_kernel[(triton.cdiv(classes, block),)](
        e, v, out, rows, classes, e.stride(0), ABSOLUTE=absolute, BLOCK_C=16, BLOCK_V=block
    )
    return out


def add_products(to: Tensor, masses: Tensor, means: Tensor) -> Tensor:
    """``to`` [V, D] += masses^T means, of a few rows each; the sum of its squares. One pass over ``to``."""
    classes, width = to.shape
    block = 8
    squares = torch.empty(triton.cdiv(classes, block), dtype=torch.float32, device=to.device)
    add_products_kernel[(len(squares),)](
        to, masses, means, squares, classes, width, len(means), BLOCK_V=block, BLOCK_D=256
    )
    return squares.sum()


def scaled(tensors: list[Tensor], factor: Tensor, dtypes: list[torch.dtype]) -> list[Tensor]:
    """factor x in its dtype for each x, rounded once; in place where that is x's own, and then 1 x costs nothing."""
    outs = [x if x.dtype == dtype else torch.empty_like(x, dtype=dtype) for x, dtype in zip(tensors, dtypes)]
    block = 4096
    for i in range(0, len(tensors), 2):
        a, a_out = tensors[i], outs[i]
        b, b_out, b_n = (tensors[i + 1], outs[i + 1], tensors[i + 1].numel()) if i + 1 < len(tensors) else (a, a_out, 0)
        programs = triton.cdiv(a.numel(), block) + triton.cdiv(b_n, block)
        scale_kernel[(programs,)](
            a, a_out, a.numel(), b, b_out, b_n, factor, A_IN_PLACE=a_out is a, B_IN_PLACE=b_out is b, BLOCK=block
        )  # fmt: skip
    return outs
