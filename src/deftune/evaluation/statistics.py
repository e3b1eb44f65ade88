r"""Means of scores, standard errors, intervals, paired tests and the choice of a temperature.

``samples[i][j]`` is the score of sample j of item i. Samples of one item are not independent, so the item is the unit:
a score is a mean over items of means over samples, and every standard error and interval is over items. Nothing is
rounded. Random draws come from a seed and are the same on every run.

The tokens of a row are not independent either, so statistics of tokens resample rows. Such a statistic is a function of
sums over rows: ``sums`` is [rows, columns], float64, and a `Value` maps [..., columns] to [...]. A mean over tokens is
``lambda s: s[..., 1] / s[..., 0]``; the calibration error has this form too.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

Samples = Sequence[Sequence[float]]
Value = Callable[[Tensor], Tensor]
_CHUNK = 1 << 22  # draws held in memory at once


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error; the error is NaN where a single item leaves it unknown."""

    mean: float
    standard_error: float


@dataclass(frozen=True)
class Interval:
    low: float
    high: float


def item_means(samples: Samples) -> list[float]:
    """The mean over the samples of each item.

    >>> item_means([[1, 0], [1, 1]])
    [0.5, 1.0]
    """
    if not samples:
        raise ValueError("no items: a mean over nothing")
    for index, scores in enumerate(samples):
        if not scores:
            raise ValueError(f"item {index} has no samples")
        if not all(map(math.isfinite, scores)):
            raise ValueError(f"item {index} has a score that is not finite: {list(scores)}")
    return [math.fsum(scores) / len(scores) for scores in samples]


def mean_over_items(samples: Samples) -> float:
    """avg@n: the mean over samples, then over items, so that an item counts once however often it was sampled.

        mean = 1/N sum_i ( 1/n_i sum_j s_ij )

    >>> mean_over_items([[1, 0, 0, 0], [1]])
    0.625
    """
    means = item_means(samples)
    return math.fsum(means) / len(means)


def clustered_standard_error(samples: Samples) -> float:
    """The standard error of `mean_over_items`, clustered by item.

        se^2 = sum_i (m_i - mean)^2 / (N (N - 1))        m_i the mean of item i

    It does not shrink with samples that agree with each other. NaN for one item.

    >>> clustered_standard_error([[1, 1], [0, 0]])
    0.5
    >>> clustered_standard_error([[1] * 100, [0] * 100])
    0.5
    """
    return estimate(item_means(samples)).standard_error


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of independent values and its standard error.

    >>> estimate([0.0, 1.0])
    Estimate(mean=0.5, standard_error=0.5)
    """
    if not values:
        raise ValueError("no values: a mean over nothing")
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, math.nan)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return Estimate(mean, math.sqrt(squares / (count * (count - 1))))


def wilson_interval(share: float, items: float, *, confidence: float = 0.95) -> Interval:
    """Wilson's interval of a proportion: 0 of n and n of n have one too.

        (p + z^2/2n -+ z sqrt(p (1 - p)/n + z^2/4n^2)) / (1 + z^2/n)        z the normal quantile of the confidence

    >>> round(wilson_interval(0.0, 10).high, 4), round(wilson_interval(1.0, 10).low, 4)
    (0.2775, 0.7225)
    """
    if not 0 <= share <= 1 or not items > 0:
        raise ValueError(f"a share lies in [0, 1] and is of more than 0 items, got {share} of {items}")
    square = _z(confidence) ** 2 / items
    middle, half = share + square / 2, math.sqrt(square * (share * (1 - share) + square / 4))
    low = 0.0 if share == 0 else (middle - half) / (1 + square)
    high = 1.0 if share == 1 else (middle + half) / (1 + square)
    return Interval(low, high)


def _z(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: between 0 and 1, got {confidence}")
    return NormalDist().inv_cdf((1 + confidence) / 2)


def score_interval(samples: Samples, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0) -> Interval:
    """The interval of `mean_over_items` for scores from 0 to 1.

    Where each item is right or wrong (one sample, or samples that all agree) the score is a proportion of items, and
    the interval is `wilson_interval`. Otherwise it is `bootstrap_interval`, unless all items have the same mean: the
    bootstrap would then have the width 0, so the interval is Wilson's, with n the number of items. Samples of an item
    are not counted as further items, because such scores do not show how far they agree.

    >>> score_interval([[0.0]] * 10) == wilson_interval(0.0, 10)
    True
    """
    means = item_means(samples)
    whole = all(mean in (0, 1) for mean in means)
    if (whole or len(set(means)) == 1) and all(0 <= mean <= 1 for mean in means):
        return wilson_interval(math.fsum(means) / len(means), len(means), confidence=confidence)
    return bootstrap_interval(samples, confidence=confidence, resamples=resamples, seed=seed)


def equal_differences_interval(difference: float, items: int, *, confidence: float = 0.95) -> Interval:
    """The interval of a mean of ``items`` paired differences, from -1 to 1, that are all the same.

    Resampling them says that nothing else is possible. Where all are 0 the interval is Tango's score interval for
    paired proportions without a discordant pair, -+ z^2/(n + z^2): Wilson's bound of 0 of n on either side. Elsewhere
    it is Wilson's of (d + 1)/2, moved back.

    >>> round(equal_differences_interval(0.0, 10).high, 4)
    0.2775
    """
    if difference == 0:
        bound = wilson_interval(0.0, items, confidence=confidence).high
        return Interval(-bound, bound)
    share = wilson_interval((difference + 1) / 2, items, confidence=confidence)
    return Interval(2 * share.low - 1, 2 * share.high - 1)


def bootstrap_interval(
    samples: Samples, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """The percentile bootstrap interval of `mean_over_items`: items are drawn with replacement, whole.

    >>> bootstrap_interval([[1.0]] * 5)
    Interval(low=1.0, high=1.0)
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: between 0 and 1, got {confidence}")
    if resamples < 100:
        raise ValueError(f"resamples: at least 100, got {resamples}")
    means = torch.tensor(item_means(samples), dtype=torch.float64)
    return interval_of(resample(means[:, None], resamples=resamples, seed=seed)[:, 0] / len(means), confidence)


def drawn_counts(rows: int, resamples: int, seed: int = 0) -> Iterator[Tensor]:
    """How often each of ``rows`` rows is drawn in each bootstrap resample: parts of ``[resamples, rows]``, float64.

    Every bootstrap of the package draws here.

    >>> [part.sum(1).tolist() for part in drawn_counts(5, 3)]
    [[5.0, 5.0, 5.0]]
    """
    generator = torch.Generator().manual_seed(seed)
    for number in chunks(resamples, rows):
        drawn = torch.randint(rows, (number, rows), generator=generator)
        counts = torch.zeros(number, rows, dtype=torch.float64)
        yield counts.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))


def resample(sums: Tensor, *, resamples: int = 2_000, seed: int = 0) -> Tensor:
    """``[resamples, columns]``: the column sums of as many rows as ``sums`` has, drawn with replacement."""
    return torch.cat([counts @ sums for counts in drawn_counts(len(sums), resamples, seed)])


def interval_of(values: Tensor, confidence: float = 0.95) -> Interval:
    """The percentile interval of resampled values; resamples where the statistic is 0 / 0 are left out.

    >>> interval_of(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), confidence=0.0)
    Interval(low=2.0, high=2.0)
    """
    tails = torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=torch.float64)
    low, high = torch.nanquantile(values, tails).tolist()
    return Interval(low, high)


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


def chunks(rows: int, width: int) -> list[int]:
    """How many of ``rows`` resamples of ``width`` draws to hold in memory at a time."""
    size = max(1, _CHUNK // width)
    return [min(size, rows - start) for start in range(0, rows, size)]


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate of P(at least one of k samples is correct), from n samples of which c are.

        pass@k = 1 - C(n - c, k) / C(n, k)

    In exact integers, rounded once.

    >>> pass_at_k(16, 4, 1), pass_at_k(2, 1, 2)
    (0.25, 1.0)
    """
    if not 0 <= c <= n:
        raise ValueError(f"{c} correct of {n} samples")
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs 1 to {n} of the {n} samples; draw more or lower k")
    every = math.comb(n, k)
    return (every - math.comb(n - c, k)) / every


@dataclass(frozen=True)
class Paired:
    """a minus b on the same items; ``exact`` says whether every sign pattern was counted."""

    difference: float
    standard_error: float
    interval: Interval
    p_value: float
    num_items: int
    exact: bool


def paired(
    a: Samples,
    b: Samples,
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    permutations: int = 100_000,
    exact_up_to: int = 16,
    seed: int = 0,
) -> Paired:
    """Two runs on the same items, in the same order: their difference, its interval and a two-sided p-value.

        d_i = mean_j a_ij - mean_j b_ij        difference = mean_i d_i

    The p-value is the sign-flip test's: were the two runs the same, each d_i would be as likely as -d_i, so p is the
    share of sign patterns whose |sum| is at least the observed one. With at most ``exact_up_to`` nonzero d_i all
    patterns are counted; otherwise ``permutations`` of them are drawn and p = (r + 1) / (m + 1), never 0. The interval
    is the bootstrap's over items; `equal_differences_interval` where all d_i are the same.

    >>> paired([[1], [1], [1], [0]], [[0], [0], [0], [0]]).p_value
    0.25
    """
    if len(a) != len(b):
        raise ValueError(f"paired runs need the same items: {len(a)} against {len(b)}")
    differences = [x - y for x, y in zip(item_means(a), item_means(b))]
    whole = estimate(differences)
    nonzero = torch.tensor([d for d in differences if d != 0], dtype=torch.float64)
    # equal sums, added in another order, must tie
    least = abs(math.fsum(nonzero.tolist())) - 1e-9 * math.fsum(nonzero.abs().tolist())
    p_value = _as_extreme(
        lambda signs: (signs @ nonzero).abs(), len(nonzero), least,
        permutations=permutations, exact_up_to=exact_up_to, seed=seed,
    )  # fmt: skip
    if len(set(differences)) == 1 and abs(differences[0]) <= 1:
        interval = equal_differences_interval(differences[0], len(differences), confidence=confidence)
    else:
        single = [[difference] for difference in differences]
        interval = bootstrap_interval(single, confidence=confidence, resamples=resamples, seed=seed)
    exact = len(nonzero) <= exact_up_to
    return Paired(whole.mean, whole.standard_error, interval, p_value, len(differences), exact)


def _as_extreme(
    statistic: Callable[[Tensor], Tensor], items: int, least: float, *, permutations: int, exact_up_to: int, seed: int
) -> float:
    """The share of sign patterns [patterns, items], +1 or -1 each, whose statistic is at least ``least``.

    With at most ``exact_up_to`` items all patterns are counted; otherwise m = ``permutations`` of them are drawn, and
    the share is (r + 1) / (m + 1) for r such patterns.
    """
    if items <= exact_up_to:
        bits = torch.arange(2**items)[:, None] >> torch.arange(items)
        return int((statistic((bits & 1).double() * 2 - 1) >= least).sum()) / 2**items
    if permutations < 100:
        raise ValueError(f"permutations: at least 100, got {permutations}")
    generator = torch.Generator().manual_seed(seed)
    extreme = 0
    for number in chunks(permutations, items):
        signs = torch.randint(2, (number, items), generator=generator).double() * 2 - 1
        extreme += int((statistic(signs) >= least).sum())
    return (extreme + 1) / (permutations + 1)


def swap_p_value(
    a: Tensor, b: Tensor, value: Value, *, permutations: int = 10_000, exact_up_to: int = 12, seed: int = 0
) -> float:
    """The p-value of the difference of two models on the same rows, by swapping their results row by row.

    If the two models were equal, each row's two results could be swapped. The p-value is the share of swaps whose
    difference is at least the observed one. With at most ``exact_up_to`` rows every swap is counted; otherwise
    m = ``permutations`` swaps are drawn, and with r such swaps p = (r + 1) / (m + 1), never 0.

    Args:
        a: sums over the rows of one model, ``[rows, columns]``, float64.
        b: those of the other model.
        value: the statistic, from sums ``[..., columns]`` to ``[...]``.
    """
    middle, half = (a + b).sum(0) / 2, (a - b) / 2

    def apart(signs: Tensor) -> Tensor:
        moved = signs @ half
        return (value(middle + moved) - value(middle - moved)).abs()

    observed = float(apart(torch.ones(1, len(a), dtype=torch.float64)))
    least = observed * (1 - 1e-9)  # equal sums, added in another order, must tie
    return _as_extreme(apart, len(a), least, permutations=permutations, exact_up_to=exact_up_to, seed=seed)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment of m p-values, in the order given: compare with the level itself.

        adjusted_(j) = max over i <= j of min(1, (m - i + 1) p_(i))        p_(1) <= ... <= p_(m)

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    for p in p_values:
        if not 0 <= p <= 1:
            raise ValueError(f"a p-value lies in [0, 1], got {p}")
    adjusted = [0.0] * len(p_values)
    reached = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        reached = max(reached, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = reached
    return adjusted


@dataclass(frozen=True)
class Half:
    """One direction of `best_temperature`: chosen on the other half's items, scored on these."""

    temperature: float
    score: Estimate
    num_items: int


@dataclass(frozen=True)
class BestTemperature:
    """``score``: every item at the temperature the other half chose. ``in_sample``: best and chosen on all items."""

    halves: tuple[Half, Half]
    score: Estimate
    in_sample: tuple[float, float]  # temperature, score; too high by the luck of choosing among temperatures

    @property
    def agreed(self) -> bool:
        return self.halves[0].temperature == self.halves[1].temperature


@lru_cache(maxsize=1 << 16)  # every temperature, rate and seed of a comparison asks for the same items
def half_of(item: str, *, seed: int = 0) -> int:
    """0 or 1, by a hash of the item's name: the same on every machine, whatever the other items are.

    >>> [half_of(f"item {n}") for n in range(8)]
    [0, 1, 0, 0, 1, 0, 0, 0]
    """
    return hashlib.sha256(f"{seed}:{item}".encode("utf-8", "surrogatepass")).digest()[0] & 1


def best_temperature(
    scores_by_temperature: Mapping[float, Mapping[str, Sequence[float]]], *, seed: int = 0
) -> BestTemperature:
    """A method at its own best temperature, without the optimism of choosing and scoring on the same items.

    ``scores_by_temperature[t][item]`` are the item's sample scores at temperature t. Items are split by `half_of`; the
    temperature with the best mean on one half (the lower one of equals) is scored on the other, and the other way
    round. ``score`` is the mean over all items of these held-out scores.

        score = 1/N sum_i m_i(t*_(other half of i))        t*_h = argmax_t mean over i in h of m_i(t)

    The two halves' scores share no item, but each is scored at a temperature the other chose: the standard error is
    that of the items and leaves out the choice.

    >>> found = best_temperature({0.0: {str(n): [1] for n in range(9)}, 1.0: {str(n): [0, 1] for n in range(9)}})
    >>> found.halves[0].temperature, found.score.mean, found.agreed
    (0.0, 1.0, True)
    """
    if not scores_by_temperature:
        raise ValueError("no temperatures to choose from")
    temperatures = sorted(scores_by_temperature)
    items = sorted(scores_by_temperature[temperatures[0]])
    for temperature in temperatures[1:]:
        differing = set(items) ^ set(scores_by_temperature[temperature])
        if differing:
            raise ValueError(
                f"temperatures {temperatures[0]} and {temperature} were not run on the same items: "
                f"{len(differing)} differ, such as {min(differing)!r}"
            )
    halves = [[item for item in items if half_of(item, seed=seed) == half] for half in (0, 1)]
    if not all(halves):
        raise ValueError(f"{len(items)} items leave one half empty; choose a temperature on more items")
    means = {
        temperature: dict(zip(items, item_means([scores_by_temperature[temperature][item] for item in items])))
        for temperature in temperatures
    }

    def best(chosen_on: Sequence[str]) -> float:
        return max(temperatures, key=lambda t: (math.fsum(means[t][item] for item in chosen_on), -t))

    chosen = [best(halves[1]), best(halves[0])]
    held_out = [[means[chosen[half]][item] for item in halves[half]] for half in (0, 1)]
    first, second = (Half(chosen[half], estimate(held_out[half]), len(halves[half])) for half in (0, 1))
    best_of_all = best(items)
    in_sample = math.fsum(means[best_of_all].values()) / len(items)
    return BestTemperature((first, second), estimate(held_out[0] + held_out[1]), (best_of_all, in_sample))


def macro_average(scores: Sequence[Estimate]) -> Estimate:
    """The mean over suites, each counting once, with the error of independent suites.

        mean = 1/K sum_k mean_k        se = 1/K sqrt(sum_k se_k^2)

    >>> macro_average([Estimate(0.5, 0.03), Estimate(0.7, 0.04)])
    Estimate(mean=0.6, standard_error=0.025)
    """
    if not scores:
        raise ValueError("no suites: a mean over nothing")
    count = len(scores)
    mean = math.fsum(score.mean for score in scores) / count
    return Estimate(mean, math.sqrt(math.fsum(score.standard_error**2 for score in scores)) / count)
