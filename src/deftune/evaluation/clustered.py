"""Statistics of tokens that come in rows: rows are independent, the tokens of a row are not, so rows are resampled.

A statistic is a function of sums over rows. ``sums`` is [rows, columns], float64, and ``value`` maps [..., columns] to
[...]: a mean over tokens is ``lambda s: s[..., 1] / s[..., 0]``. The calibration error has this form too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from deftune.evaluation.statistics import chunks, interval_of, resample

Value = Callable[[Tensor], Tensor]


class TokenMean(NamedTuple):
    """A mean over tokens and its 95% interval over rows."""

    mean: float
    low: float
    high: float


def mean_over_tokens(values: Tensor, rows: Tensor, *, seed: int = 0) -> TokenMean:
    """The mean over tokens and its percentile bootstrap interval, for which rows are resampled.

    >>> mean_over_tokens(torch.ones(4), torch.tensor([0, 0, 1, 1]))
    TokenMean(mean=1.0, low=1.0, high=1.0)

    Args:
        values: one number per token, ``[tokens]``.
        rows: the row of each token, ``[tokens]``.
    """
    index = rows.unique(return_inverse=True)[1]
    columns = torch.stack([torch.ones_like(values, dtype=torch.float64), values.double()], 1)
    sums = torch.zeros(int(index.max()) + 1, 2, dtype=torch.float64).index_add_(0, index, columns)
    mean: Value = lambda s: s[..., 1] / s[..., 0]  # noqa: E731
    interval = interval_of(mean(resample(sums, seed=seed)))
    return TokenMean(float(mean(sums.sum(0))), interval.low, interval.high)


def swap_p_value(
    a: Tensor, b: Tensor, value: Value, *, permutations: int = 10_000, exact_up_to: int = 12, seed: int = 0
) -> float:
    """The p-value of the difference of two models on the same rows, by swapping their results row by row.

    If the two models were equal, each row's two results could be swapped. The p-value is the share of swaps whose
    difference is at least the observed one. With at most ``exact_up_to`` rows every swap is counted; otherwise
    m = ``permutations`` swaps are drawn, and with r such swaps p = (r + 1) / (m + 1), never 0.
    """
    middle, half = (a + b).sum(0) / 2, (a - b) / 2

    def apart(signs: Tensor) -> Tensor:
        moved = signs @ half
        return (value(middle + moved) - value(middle - moved)).abs()

    observed = apart(torch.ones(1, len(a), dtype=torch.float64))
    observed = observed * (1 - 1e-9)  # equal sums, added in another order, must tie
    if len(a) <= exact_up_to:
        ways = torch.arange(2 ** len(a))
        signs = ((ways[:, None] >> torch.arange(len(a))) & 1).double() * 2 - 1
        return int((apart(signs) >= observed).sum()) / len(ways)
    generator = torch.Generator().manual_seed(seed)
    extreme = 0
    for number in chunks(permutations, len(a)):
        signs = torch.randint(2, (number, len(a)), generator=generator).double() * 2 - 1
        extreme += int((apart(signs) >= observed).sum())
    return (extreme + 1) / (permutations + 1)
