"""Statistics of tokens that come in rows: the row is what is drawn, so the row is what is resampled.

A statistic is a function of sums over rows. ``sums`` is [rows, columns], float64, and ``value`` maps [..., columns] to
[...]: a mean over tokens is ``lambda s: s[..., 1] / s[..., 0]``, the calibration error is not linear and needs this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from deftune.evaluation.statistics import Interval

Value = Callable[[Tensor], Tensor]
_CHUNK = 1 << 22  # draws held in memory at once


def resample(sums: Tensor, *, resamples: int = 2_000, seed: int = 0) -> Tensor:
    """[resamples, columns]: the sums of as many rows, drawn with replacement."""
    rows = len(sums)
    generator = torch.Generator().manual_seed(seed)
    parts: list[Tensor] = []
    for number in _chunks(resamples, rows):
        drawn = torch.randint(rows, (number, rows), generator=generator)
        times = torch.zeros(number, rows, dtype=torch.float64)
        times.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
        parts.append(times @ sums)
    return torch.cat(parts)


def interval_of(values: Tensor, confidence: float = 0.95) -> Interval:
    """The percentile interval of resampled values; resamples without the statistic (0 / 0) are left out.

    >>> interval_of(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), confidence=0.0)
    Interval(low=2.0, high=2.0)
    """
    tails = torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=torch.float64)
    low, high = torch.nanquantile(values, tails).tolist()
    return Interval(low, high)


def swap_p_value(
    a: Tensor, b: Tensor, value: Value, *, permutations: int = 10_000, exact_up_to: int = 12, seed: int = 0
) -> float:
    """Two models on the same rows: the share of ways to swap them, row by row, that part them at least as far.

    Were the two the same, each row's two results would be as likely the other way round. With at most ``exact_up_to``
    rows every way is counted; otherwise ``permutations`` are drawn and p = (r + 1) / (m + 1), never 0.
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
    for number in _chunks(permutations, len(a)):
        signs = torch.randint(2, (number, len(a)), generator=generator).double() * 2 - 1
        extreme += int((apart(signs) >= observed).sum())
    return (extreme + 1) / (permutations + 1)


def _chunks(number: int, width: int) -> Iterator[int]:
    size = max(1, _CHUNK // width)
    yield from (min(size, number - start) for start in range(0, number, size))
