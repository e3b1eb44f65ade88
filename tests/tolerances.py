"""The one tolerance table. A row is never loosened to make a test green: the number says what the code promises."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tolerance(NamedTuple):
    value: float
    reason: str


TOLERANCES: dict[str, Tolerance] = {
    "float32 column": Tolerance(
        5e-7, "four roundings of float32 (2^-24 each) and a library exp or expm1 of 1 ulp, relative to the value"
    ),
    "float64 column": Tolerance(
        1e-12, "a handful of float64 roundings, an exponent |a log p| of up to 1e3 that multiplies them by 1e3"
    ),
    "log p": Tolerance(
        2.4e-7, "two float32 ulps of a sum over the vocabulary, times 1 + max|z| for the rounding of z - max z"
    ),
    "float32 entropy": Tolerance(
        4.8e-7, "as log p, from two sums (log S and sum u E) instead of one, times 1 + max|z|"
    ),
    "offset": Tolerance(1e-6, "logits that are multiples of 2^-10 hold an offset of 1e4 exactly in float32"),
    "closed form": Tolerance(1e-12, "float64 logits to gate x (P - onehot): only roundings in between"),
    "difference quotient": Tolerance(1e-9, "the quotient itself is good to 1e-30; float64 gradients of size 1"),
    "confident gradient": Tolerance(
        1e-6, "1 - p from a float32 sum of the others: its ulps, and none of p's own rounding"
    ),
    "float32 gradient": Tolerance(1e-6, "float32 exp, division and product per entry, relative to the row's norm"),
    "bfloat16 gradient": Tolerance(
        1.001 * 2**-8, "rounded once to 8 bits (half an ulp is 2^-8), from float32's own error"
    ),
    "float16 gradient": Tolerance(
        1.001 * 2**-11, "rounded once to 11 bits (half an ulp is 2^-11), from float32's own error"
    ),
    "fused float64": Tolerance(
        1e-10, "float64 GEMMs of the fused loss against autograd's: sums of up to 1e3 terms, cancellation of 1e2"
    ),
    "fused loss": Tolerance(2e-6, "float32 logits from a GEMM, a loss relative to max(1, its value)"),
    "fused gradient": Tolerance(1e-5, "float32 GEMMs over logits that carry their own float32 error, in norm"),
    "split": Tolerance(1e-12, "the same float64 sums in another order"),
    "twin": Tolerance(1e-13, "float64 softmax sums of a few hundred terms against 50 digits"),
}

SUBNORMAL = {torch.float32: 1.5e-45, torch.float64: 5e-324}  # one ulp below the normal range, where relative error ends


def tolerance(name: str) -> float:
    return TOLERANCES[name].value


def assert_close(
    actual: Tensor, expected: Tensor, name: str, *, condition: Tensor | float = 1.0, what: str = ""
) -> None:
    """|actual - expected| <= tolerance * condition * |expected|; infinities must be the same, NaN is never right."""
    _assert_within(actual, expected, tolerance(name) * condition * expected.double().abs(), f"{what} ({name})")


def assert_near(
    actual: Tensor, expected: Tensor, name: str, *, condition: Tensor | float = 1.0, what: str = ""
) -> None:
    """|actual - expected| <= tolerance * condition."""
    _assert_within(actual, expected, tolerance(name) * condition, f"{what} ({name})")


def _assert_within(actual: Tensor, expected: Tensor, allowed: Tensor | float, what: str) -> None:
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert not expected.isnan().any(), f"{what}: the oracle itself says NaN"
    expected_here = expected.to(actual.dtype)  # a float64 answer beyond float32's range is its infinity
    actual64, expected64 = actual.detach().double(), expected.detach().double()
    gap = (actual64 - expected64).abs()
    slack = SUBNORMAL.get(actual.dtype, 0.0)
    same_infinity = expected_here.isinf() & (actual == expected_here)
    right = same_infinity | (gap <= allowed + slack)
    assert bool(right.all()), (
        f"{what}: {int((~right).sum())} of {right.numel()} entries differ, the first is "
        f"{actual64[~right][0].item()!r} for {expected64[~right][0].item()!r}"
    )
