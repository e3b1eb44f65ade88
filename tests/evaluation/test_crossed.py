"""Means over items and seeds: the analysis of variance written out, Student's t, and how often the intervals hold."""

import math

import mpmath
import pytest
import torch

from deftune.evaluation.crossed import crossed, student_quantile, student_tail
from deftune.evaluation.statistics import estimate


def drawn(seeds: int, items: int, *, spread: float, generator: torch.Generator) -> torch.Tensor:
    """Scores of mean 0: seeds and items have effects of their own, and so has each pair."""
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return spread * normal(seeds, 1) + 0.3 * normal(1, items) + 0.5 * normal(seeds, items)


def test_the_variance_is_the_analysis_of_variance():
    """Mean squares of a two-way layout, summed over elements: (MS seeds + MS items - MS rest) / (S N)."""
    x = drawn(3, 7, spread=0.4, generator=torch.Generator().manual_seed(0))
    mean, of_seeds, of_items = x.mean().item(), x.mean(1).tolist(), x.mean(0).tolist()
    seeds = 7 * sum((m - mean) ** 2 for m in of_seeds) / 2
    items = 3 * sum((m - mean) ** 2 for m in of_items) / 6
    rest = sum((x[s, i].item() - of_seeds[s] - of_items[i] + mean) ** 2 for s in range(3) for i in range(7)) / 12
    assert seeds > rest
    found = crossed([x])
    assert found.mean == pytest.approx(mean)
    assert found.standard_error == pytest.approx(math.sqrt((seeds + items - rest) / 21))
    degrees = (seeds + items - rest) ** 2 / (seeds**2 / 2 + items**2 / 6 + rest**2 / 12)
    assert found.degrees == pytest.approx(degrees)
    half = student_quantile(0.975, degrees) * found.standard_error
    assert (found.interval.low, found.interval.high) == pytest.approx((mean - half, mean + half))


def test_one_seed_is_the_standard_error_over_items():
    x = drawn(1, 9, spread=0.0, generator=torch.Generator().manual_seed(1))
    found, expected = crossed([x]), estimate(x[0].tolist())
    assert found.standard_error == pytest.approx(expected.standard_error) and found.degrees == pytest.approx(8)


def test_seeds_that_agree_leave_the_error_over_items():
    row = drawn(1, 9, spread=0.0, generator=torch.Generator().manual_seed(2))
    found, expected = crossed([row.expand(4, 9)]), crossed([row])
    assert found.standard_error == pytest.approx(expected.standard_error) and found.degrees == pytest.approx(8)


def test_seeds_move_all_columns_together():
    """A seed's effect does not average out over tasks; the items' effects do."""
    shifts = torch.tensor([[-0.3], [0.0], [0.3]], dtype=torch.float64)
    one, two = (shifts + 0.01 * drawn(3, 50, spread=0.0, generator=torch.Generator().manual_seed(n)) for n in (3, 4))
    apart = crossed([one, two])
    assert apart.standard_error == pytest.approx(0.3 / math.sqrt(3), rel=0.05)
    against = crossed([one, two - 2 * shifts])  # the effects of the two columns cancel
    assert against.standard_error < 0.01


def test_the_p_value_and_the_interval_agree():
    generator = torch.Generator().manual_seed(5)
    decided = 0
    for _ in range(200):
        found = crossed([0.15 + drawn(3, 30, spread=0.05, generator=generator)])
        assert (found.p_value < 0.05) == (not found.interval.low <= 0 <= found.interval.high)
        decided += found.p_value < 0.05
    assert 20 < decided < 180  # both kinds occur


@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize("spread", [0.0, 0.05, 0.3])
def test_intervals_hold_the_true_mean(seeds, spread):
    """95% intervals hold in at least 90% of the simulated comparisons, however far the seeds are apart.

    With two seeds, whose spread one difference has to tell, in at least 85%.
    """
    generator = torch.Generator().manual_seed(6)
    held = 0
    for _ in range(400):
        interval = crossed([drawn(seeds, 60, spread=spread, generator=generator)]).interval
        held += interval.low <= 0 <= interval.high
    assert held >= 400 * (0.85 if seeds == 2 else 0.9)


@pytest.mark.parametrize("degrees", [1.0, 1.7, 2.0, 5.5, 30.0, 1318.0, 1e6])
@pytest.mark.parametrize("t", [0.0, 0.5, 1.96, 12.706, 60.0])
def test_students_tail_is_the_integral_of_the_density(degrees, t):
    with mpmath.workdps(40):
        n = mpmath.mpf(degrees)
        scale = mpmath.exp(mpmath.loggamma((n + 1) / 2) - mpmath.loggamma(n / 2)) / mpmath.sqrt(n * mpmath.pi)
        inside = mpmath.quad(lambda x: (1 + x * x / n) ** (-(n + 1) / 2), mpmath.linspace(0, t, 13)) if t else 0
        expected = float(mpmath.mpf(1) / 2 - scale * inside)
    assert student_tail(t, degrees) == pytest.approx(expected, rel=1e-9, abs=1e-14)


@pytest.mark.parametrize("degrees, expected", [(1, 12.7062), (2, 4.3027), (4, 2.7764), (10, 2.2281), (120, 1.9799)])
def test_students_quantile_is_the_table_of_the_textbooks(degrees, expected):
    assert student_quantile(0.975, degrees) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("columns", [[], [torch.zeros(0, 3)], [torch.zeros(3)], [torch.zeros(2, 0)]])
def test_nothing_to_average_is_refused(columns):
    with pytest.raises(ValueError, match=r"every column is a \[seeds, items\] tensor"):
        crossed(columns)


def test_columns_of_different_seeds_are_refused():
    with pytest.raises(ValueError, match=r"columns have different seeds: \[2, 3\]"):
        crossed([torch.zeros(2, 4), torch.zeros(3, 4)])
