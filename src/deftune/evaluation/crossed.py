"""Means over items and seeds, with intervals and p-values for other items and other seeds.

A score of seed s on item i is x_si = mean + seed_s + item_i + rest_si, a two-way layout with random seeds and random
items. Its analysis of variance estimates how much of the variance of the mean comes from seeds and how much from items,
and Student's t with Satterthwaite's degrees of freedom accounts for the small number of seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from deftune.evaluation.statistics import Interval


@dataclass(frozen=True)
class Crossed:
    """A mean over seeds and items: its standard error, Student's degrees of freedom, 95% interval, two-sided p-value.

    All but ``mean`` are NaN where a single item leaves the error unknown.
    """

    mean: float
    standard_error: float
    degrees: float
    interval: Interval
    p_value: float


def crossed(columns: Sequence[Tensor], *, confidence: float = 0.95) -> Crossed:
    """The mean of the means of some columns (tasks), each a ``[seeds, items]`` tensor.

        mean     = 1/K sum_k x_k..
        variance = max(A - sum_k C_k, 0) + sum_k B_k        A: seeds, B: items, C: what is left

    with m_s the mean of seed s over the columns, x_ki. and x_ks. the means of an item and of a seed in a column,

        A   = sum_s (m_s - mean)^2 / (S (S - 1))
        B_k = sum_i (x_ki. - x_k..)^2 / (N_k (N_k - 1) K^2)
        C_k = sum_si (x_ksi - x_ks. - x_ki. + x_k..)^2 / (S N_k (S - 1) (N_k - 1) K^2)

    A and B both contain the variance of what is left, hence - C. The degrees of freedom are Satterthwaite's; where A is
    at most C no difference between seeds is seen, and they are those of B alone. With one seed the result says nothing
    about other seeds.

    >>> import torch
    >>> found = crossed([torch.tensor([[1.0, 0.0, 1.0, 1.0], [1.0, 0.0, 0.0, 1.0]])])
    >>> found.mean, round(found.standard_error, 3)
    (0.625, 0.239)

    Raises:
        ValueError: there is no column, a column is empty, or the columns have different numbers of seeds.
    """
    if not columns or any(column.dim() != 2 or not column.numel() for column in columns):
        raise ValueError("crossed: every column is a [seeds, items] tensor with at least one of each")
    if len({len(column) for column in columns}) > 1:
        raise ValueError(f"crossed: columns have different seeds: {[len(column) for column in columns]}")
    columns = [column.double() for column in columns]
    seeds, weight = len(columns[0]), 1 / len(columns)
    by_seed = torch.stack([column.mean(1) for column in columns]).mean(0)
    mean = float(by_seed.mean())
    items: list[tuple[float, int]] = []  # variance, degrees of freedom
    rest: list[tuple[float, int]] = []
    for column in columns:
        number = column.shape[1]
        if number == 1:
            return Crossed(mean, math.nan, math.nan, Interval(math.nan, math.nan), math.nan)
        of_items = column.mean(0) - column.mean()
        items.append((weight**2 * float(of_items.square().sum()) / (number * (number - 1)), number - 1))
        if seeds > 1:
            left = column - column.mean(1, keepdim=True) - of_items
            degrees = (seeds - 1) * (number - 1)
            rest.append((weight**2 * float(left.square().sum()) / (seeds * number * degrees), degrees))
    variance, parts = math.fsum(part for part, _ in items), items
    if seeds > 1:
        of_seeds = float((by_seed - mean).square().sum()) / (seeds * (seeds - 1))
        excess = of_seeds - math.fsum(part for part, _ in rest)
        if excess > 0:
            variance, parts = variance + excess, [*items, *rest, (of_seeds, seeds - 1)]
    error = math.sqrt(variance)
    if error == 0:
        return Crossed(mean, 0.0, math.inf, Interval(mean, mean), float(mean == 0))
    degrees = variance**2 / math.fsum(part**2 / freedom for part, freedom in parts)
    half = error * student_quantile((1 + confidence) / 2, degrees)
    return Crossed(
        mean, error, degrees, Interval(mean - half, mean + half), 2 * student_tail(abs(mean) / error, degrees)
    )


def student_tail(t: float, degrees: float) -> float:
    """P(T > t) for Student's t, t >= 0: half the regularised incomplete beta function at n / (n + t^2).

    >>> round(student_tail(12.706, 1), 4), round(student_tail(1.96, 1e9), 4)
    (0.025, 0.025)
    """
    from mpmath import betainc  # comes with torch

    return 0.5 * float(betainc(degrees / 2, 0.5, 0, degrees / (degrees + t * t), regularized=True))


@lru_cache(maxsize=4096)
def student_quantile(probability: float, degrees: float) -> float:
    """The t with P(T <= t) = probability, for a probability of at least 0.5; degrees below 1 count as 1.

    >>> round(student_quantile(0.975, 2), 3), round(student_quantile(0.975, 1e9), 3)
    (4.303, 1.96)
    """
    if not 0.5 <= probability < 1:
        raise ValueError(f"student_quantile: a probability from 0.5 to below 1, got {probability}")
    degrees, low, high = max(degrees, 1.0), 0.0, 1.0
    while student_tail(high, degrees) > 1 - probability:
        high *= 2
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(middle, degrees) > 1 - probability else (low, middle)
    return high
