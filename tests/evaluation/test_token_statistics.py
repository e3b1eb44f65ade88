"""Statistics over rows of tokens: against closed forms, and never as if the tokens were independent."""

import itertools

import pytest
import torch

from deftune.evaluation.statistics import interval_of, mean_over_tokens, resample, swap_p_value


def mean(sums):
    return sums[..., 1] / sums[..., 0]


def table(values: list[list[float]]) -> torch.Tensor:
    """[rows, (tokens, sum)]"""
    return torch.tensor([[len(row), sum(row)] for row in values], dtype=torch.float64)


def test_rows_are_drawn_whole():
    one = table([[1.0, 2.0, 3.0]])
    assert torch.equal(resample(one, resamples=100), one.expand(100, 2))
    two = table([[0.0] * 50, [1.0] * 50])
    drawn = mean(resample(two, resamples=4000))
    assert set(drawn.tolist()) == {0.0, 0.5, 1.0}  # as 100 independent tokens it would be near 0.5
    assert (drawn == 0.5).double().mean().item() == pytest.approx(0.5, abs=0.03)
    interval = interval_of(drawn)
    assert (interval.low, interval.high) == (0.0, 1.0)


def test_a_mean_over_tokens_resamples_rows_not_tokens():
    generator = torch.Generator().manual_seed(0)
    levels = torch.randn(40, generator=generator)
    rows = torch.arange(40).repeat_interleave(50)
    values = levels[rows] + 0.01 * torch.randn(2000, generator=generator)
    found = mean_over_tokens(values, rows)
    # the standard error of 40 row means, not of 2000 tokens
    assert found.high - found.low == pytest.approx(2 * 1.96 * float(levels.std()) / 40**0.5, rel=0.2)
    assert found.low < found.mean < found.high and found.mean == pytest.approx(float(values.double().mean()))
    assert mean_over_tokens(values, rows) == found


def test_a_resample_is_the_same_on_every_run():
    sums = table([[0.1 * i] * (i + 1) for i in range(7)])
    whole = resample(sums, resamples=500, seed=3)
    assert torch.equal(whole, resample(sums, resamples=500, seed=3))
    assert not torch.equal(whole, resample(sums, resamples=500, seed=4))


def test_the_interval_covers_the_mean_of_rows_that_differ():
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for trial in range(200):
        centres = torch.randn(40, generator=generator, dtype=torch.float64)
        sums = torch.stack([torch.full((40,), 20.0, dtype=torch.float64), 20 * centres], 1)
        interval = interval_of(mean(resample(sums, resamples=400, seed=trial)))
        covered += interval.low <= 0 <= interval.high
    assert 0.88 <= covered / 200 <= 0.99


def test_a_statistic_that_a_resample_lacks_is_left_out():
    sums = torch.tensor([[1.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    interval = interval_of(mean(resample(sums, resamples=200)))  # a quarter of them have no tokens
    assert (interval.low, interval.high) == (1.0, 1.0)


def test_exact_p_values_count_every_swap():
    a, b = table([[1.0], [1.0], [1.0]]), table([[0.0], [0.0], [0.0]])
    assert swap_p_value(a, b, mean) == 2 / 8
    a, b = table([[0.9, 0.2], [0.4], [0.8, 0.1, 0.3]]), table([[0.1, 0.3], [0.5], [0.2, 0.2, 0.2]])
    differences = (a - b)[:, 1].tolist()
    patterns = [abs(sum(s * d for s, d in zip(signs, differences))) for signs in itertools.product((1, -1), repeat=3)]
    expected = sum(value >= abs(sum(differences)) - 1e-12 for value in patterns) / 8
    assert swap_p_value(a, b, mean) == expected
    assert swap_p_value(a, a, mean) == 1.0


def test_drawn_p_values_agree_with_exact_ones_and_are_never_zero():
    generator = torch.Generator().manual_seed(1)
    rows = torch.rand(12, generator=generator, dtype=torch.float64)
    a, b = (torch.stack([torch.ones(12, dtype=torch.float64), x], 1) for x in (rows, rows.flip(0) - 0.2))
    exact = swap_p_value(a, b, mean)
    assert swap_p_value(a, b, mean, exact_up_to=0) == pytest.approx(exact, abs=0.02)
    far = torch.stack([torch.ones(40, dtype=torch.float64), torch.ones(40, dtype=torch.float64)], 1)
    assert swap_p_value(far, far * torch.tensor([1.0, 0.0]), mean, permutations=999) == 1 / 1000
