"""Statistics: each against its definition spelled out, or against what it promises over many draws."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deftune.evaluation.statistics import (
    Estimate,
    Interval,
    best_temperature,
    bootstrap_interval,
    clustered_standard_error,
    equal_differences_interval,
    half_of,
    holm,
    item_means,
    macro_average,
    mean_over_items,
    paired,
    pass_at_k,
    score_interval,
    wilson_interval,
)

scores = st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=5), min_size=1, max_size=8)


def coin(draw: random.Random, items: int, samples: int, p: float) -> list[list[float]]:
    return [[float(draw.random() < p) for _ in range(samples)] for _ in range(items)]


# --- means and their errors ------------------------------------------------------------------------------------------


def test_a_mean_is_over_samples_then_items():
    assert mean_over_items([[1, 0, 0, 0], [1]]) == (1 / 4 + 1) / 2  # not 2/5
    assert mean_over_items([[0.1] * 3] * 10) == pytest.approx(0.1, abs=1e-16)


def test_nothing_has_no_mean():
    with pytest.raises(ValueError, match="no items"):
        mean_over_items([])
    with pytest.raises(ValueError, match="item 1 has no samples"):
        mean_over_items([[1], []])
    with pytest.raises(ValueError, match="item 0 has a score that is not finite"):
        mean_over_items([[math.nan]])


@given(scores)
def test_the_order_of_items_and_samples_does_not_matter(samples):
    turned = [scores[::-1] for scores in samples[::-1]]
    assert mean_over_items(turned) == pytest.approx(mean_over_items(samples), abs=1e-12)


def test_the_clustered_error_is_the_sandwich_over_items():
    samples = [[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]]
    mean = mean_over_items(samples)
    # cluster-robust variance of an intercept: sum over clusters of (sum of residuals)^2 / n^2, times N / (N - 1)
    meat = sum(sum(score - mean for score in item) ** 2 for item in samples) / 12**2
    assert clustered_standard_error(samples) == pytest.approx(math.sqrt(meat * 4 / 3), rel=1e-12)
    assert clustered_standard_error([item * 7 for item in samples]) == pytest.approx(math.sqrt(meat * 4 / 3), rel=1e-12)
    assert math.isnan(clustered_standard_error([[1, 0]]))


def test_the_clustered_error_is_the_spread_of_the_mean():
    draw = random.Random(0)
    means, errors = [], []
    for _ in range(400):
        items = [draw.random() for _ in range(50)]
        samples = [[float(draw.random() < p) for _ in range(4)] for p in items]
        means.append(mean_over_items(samples))
        errors.append(clustered_standard_error(samples))
    centre = sum(means) / 400
    spread = math.sqrt(sum((mean - centre) ** 2 for mean in means) / 399)
    assert sum(errors) / 400 == pytest.approx(spread, rel=0.12)


def test_bootstrap_coverage():
    draw = random.Random(1)
    covered = 0
    for n in range(300):
        interval = bootstrap_interval(coin(draw, 60, 1, 0.3), confidence=0.9, resamples=400, seed=n)
        covered += interval.low <= 0.3 <= interval.high
    assert 0.84 <= covered / 300 <= 0.95  # 0.9, with the binomial's own error of 0.017


@pytest.mark.parametrize(
    ("right", "items", "low", "high"),
    [  # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilsons_interval_is_the_published_one(right, items, low, high):
    found = wilson_interval(right / items, items)
    assert (round(found.low, 4), round(found.high, 4)) == (low, high)
    mirrored = wilson_interval(1 - right / items, items)
    assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx((found.low, found.high), abs=1e-12)


@pytest.mark.parametrize(("share", "items"), [(-0.1, 5), (1.1, 5), (0.5, 0)])
def test_a_share_of_nothing_has_no_interval(share, items):
    with pytest.raises(ValueError, match="a share lies in"):
        wilson_interval(share, items)


def test_a_score_of_none_or_all_is_not_certain():
    for samples in (1, 16):
        none, every = score_interval([[0.0] * samples] * 40), score_interval([[1.0] * samples] * 40)
        assert none == wilson_interval(0.0, 40) and every == wilson_interval(1.0, 40)  # items count, not samples
        assert none.low == 0 and 0.08 < none.high < 0.09 and every.high == 1 and 0.91 < every.low < 0.92
    assert score_interval([[0.0]] * 400).high < score_interval([[0.0]] * 40).high


def test_a_score_is_a_proportion_of_items_or_a_mean():
    right = [[1.0]] * 3 + [[0.0]] * 7
    assert score_interval(right) == wilson_interval(0.3, 10) == score_interval([s * 4 for s in right])
    mixed = [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [1.0, 0.0]]
    assert score_interval(mixed) == bootstrap_interval(mixed)
    assert score_interval([[1.0, 0.0]] * 8) == wilson_interval(0.5, 8)  # all alike: resampling sees no other items
    assert score_interval([[0.25]]) == wilson_interval(0.25, 1)


def test_score_interval_coverage():
    """Of a rare success, where the bootstrap's interval is often [0, 0]."""
    draw, covered = random.Random(5), [0, 0]
    for n in range(400):
        samples = coin(draw, 40, 1, 0.02)
        for i, found in enumerate((score_interval(samples), bootstrap_interval(samples, resamples=200, seed=n))):
            covered[i] += found.low <= 0.02 <= found.high
    assert covered[0] >= 0.93 * 400 and covered[1] < 0.6 * 400


def test_equal_differences_are_not_certain():
    same = paired([[1.0], [0.0]] * 20, [[1.0], [0.0]] * 20)
    assert same.difference == 0 and same.interval == equal_differences_interval(0.0, 40)
    assert same.interval.high == -same.interval.low == wilson_interval(0.0, 40).high
    better = paired([[1.0]] * 40, [[0.0]] * 40).interval
    assert better.high == 1 and better.low == pytest.approx(2 * wilson_interval(1.0, 40).low - 1)
    assert equal_differences_interval(-1.0, 40).low == -1


def test_bootstrap_is_seeded_and_as_wide_as_the_error_says():
    samples = coin(random.Random(2), 400, 4, 0.5)
    interval = bootstrap_interval(samples)
    assert interval == bootstrap_interval(samples) != bootstrap_interval(samples, seed=1)
    half_width = 1.96 * clustered_standard_error(samples)
    assert interval.high - interval.low == pytest.approx(2 * half_width, rel=0.05)
    narrow = bootstrap_interval(samples, confidence=0.5)
    assert interval.low < narrow.low < mean_over_items(samples) < narrow.high < interval.high
    assert bootstrap_interval([[0.25]]) == Interval(0.25, 0.25)


@pytest.mark.parametrize("options", [{"confidence": 1.0}, {"confidence": 0.0}, {"resamples": 10}])
def test_bootstrap_arguments_are_checked(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        bootstrap_interval([[1.0], [0.0]], **options)


# --- pass@k ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(n):
    for c in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == sum(map(any, subsets)) / len(subsets)


@given(st.integers(1, 3000).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_of_many_samples(args):
    n, c, k = args
    product = math.prod(1 - k / i for i in range(n - c + 1, n + 1)) if n - c >= k else 0.0
    assert pass_at_k(n, c, k) == pytest.approx(1 - product, abs=1e-9)
    assert pass_at_k(n, c, 1) == c / n


def test_pass_at_k_is_exact_where_a_subtraction_would_cancel():
    assert pass_at_k(10**6, 1, 1) == 1e-6
    assert pass_at_k(10**4, 0, 10**4) == 0.0 and pass_at_k(10**4, 1, 10**4) == 1.0


@pytest.mark.parametrize("args", [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_arguments_are_checked(args):
    with pytest.raises(ValueError, match="of"):
        pass_at_k(*args)


# --- pairs -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=9))
@settings(deadline=None, max_examples=60)
def test_the_exact_p_value_counts_every_sign_pattern(pairs):
    a, b = [[x / 3] for x, _ in pairs], [[y / 3] for _, y in pairs]
    differences = [x - y for x, y in pairs]  # in integers: no ties lost to rounding
    sums = [abs(sum(s * d for s, d in zip(signs, differences))) for signs in itertools.product((1, -1), repeat=len(a))]
    expected = sum(total >= abs(sum(differences)) for total in sums) / len(sums)
    result = paired(a, b, resamples=100)
    assert result.exact and result.p_value == expected
    assert result.difference == pytest.approx(sum(differences) / 3 / len(pairs), abs=1e-12)
    other = paired(b, a, resamples=100)
    assert other.p_value == result.p_value and other.difference == pytest.approx(-result.difference, abs=1e-15)


def test_drawn_patterns_agree_with_counted_ones_and_are_never_zero():
    draw = random.Random(3)
    a, b = coin(draw, 14, 4, 0.6), coin(draw, 14, 4, 0.4)
    counted, drawn = paired(a, b), paired(a, b, exact_up_to=0)
    assert counted.exact and not drawn.exact
    assert drawn.p_value == pytest.approx(counted.p_value, abs=0.01)
    ahead = paired([[1.0]] * 200, [[0.0]] * 200, permutations=999)
    assert ahead.p_value == 1 / 1000 and ahead.interval.high == 1.0 and 0.9 < ahead.interval.low < 1


def test_the_p_value_is_uniform_when_there_is_nothing():
    draw = random.Random(4)
    values = sorted(
        paired(
            [[draw.gauss(0, 1)] for _ in range(30)],
            [[draw.gauss(0, 1)] for _ in range(30)],
            permutations=500,
            resamples=100,
            seed=n,
        ).p_value
        for n in range(400)
    )
    distance = max(abs(p - (rank + 0.5) / 400) for rank, p in enumerate(values))
    assert distance < 1.63 / math.sqrt(400)  # Kolmogorov-Smirnov at 1%
    assert sum(p <= 0.05 for p in values) / 400 == pytest.approx(0.05, abs=0.03)


def test_pairing_sees_what_two_separate_scores_do_not():
    draw = random.Random(5)
    hard = [draw.random() for _ in range(200)]
    a, b = [[p + 0.02 + draw.gauss(0, 0.02)] for p in hard], [[p] for p in hard]
    result = paired(a, b)
    assert result.p_value < 0.001 and result.interval.low > 0
    assert result.standard_error < clustered_standard_error(a) / 5
    assert result.num_items == 200


def test_two_equal_runs_do_not_differ():
    result = paired([[1, 0], [1, 1]], [[0, 1], [1, 1]])
    assert (result.difference, result.p_value, result.exact) == (0.0, 1.0, True)
    with pytest.raises(ValueError, match="the same items: 1 against 2"):
        paired([[1]], [[1], [0]])
    with pytest.raises(ValueError, match="permutations"):
        paired([[1.0]] * 30, [[0.0]] * 30, permutations=1)


# --- many comparisons ------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1), max_size=12))
def test_holm_is_monotone_and_between_the_value_and_bonferroni(p_values):
    adjusted = holm(p_values)
    assert len(adjusted) == len(p_values)
    for p, q in zip(p_values, adjusted):
        assert p <= q <= min(1.0, len(p_values) * p) or p == q == 0
    for (p, q), (other_p, other_q) in itertools.combinations(zip(p_values, adjusted), 2):
        assert (p - other_p) * (q - other_q) >= 0
        assert p != other_p or q == other_q


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0.001, 0.5))
def test_holm_rejects_what_the_step_down_procedure_rejects(p_values, level):
    rejected = set()
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if (len(p_values) - rank) * p_values[index] > level:
            break
        rejected.add(index)
    assert {index for index, p in enumerate(holm(p_values)) if p <= level} == rejected


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    with pytest.raises(ValueError, match=r"lies in \[0, 1\], got 1.5"):
        holm([1.5])


# --- temperature -----------------------------------------------------------------------------------------------------


def test_the_temperature_is_chosen_on_one_half_and_scored_on_the_other():
    items = [f"item {n}" for n in range(200)]
    # each temperature is best on its own half, and worthless on the other: choosing on all items would hide that
    table = {t: {item: [float(half_of(item) == half)] for item in items} for half, t in enumerate((0.0, 1.0))}
    found = best_temperature(table)
    assert [half.temperature for half in found.halves] == [1.0, 0.0] and not found.agreed
    assert [half.score.mean for half in found.halves] == [0.0, 0.0] and found.score.mean == 0.0
    assert found.in_sample[1] >= 0.5
    assert sum(half.num_items for half in found.halves) == 200


def test_the_in_sample_best_is_optimistic_and_the_held_out_score_is_not():
    draw = random.Random(6)
    optimism, held_out = [], []
    for _ in range(60):
        items = [str(draw.random()) for _ in range(40)]
        found = best_temperature({t: {item: [float(draw.random() < 0.5)] for item in items} for t in range(8)})
        optimism.append(found.in_sample[1] - 0.5)
        held_out.append(found.score.mean - 0.5)
    assert sum(optimism) / 60 > 0.07
    assert abs(sum(held_out) / 60) < 0.03


def test_equal_temperatures_choose_the_lower_and_the_error_is_that_of_the_items():
    items = {str(n): [float(n % 3 == 0), float(n % 2)] for n in range(50)}
    found = best_temperature({1.0: items, 0.3: items})
    assert found.agreed and found.halves[0].temperature == found.in_sample[0] == 0.3
    assert found.score.standard_error == pytest.approx(clustered_standard_error(list(items.values())), rel=1e-12)
    assert found.score.mean == pytest.approx(found.in_sample[1], rel=1e-12)


def test_halves_depend_on_the_item_alone():
    halves = [half_of(f"math500/{n}") for n in range(2_000)]
    assert sum(halves) == pytest.approx(1_000, abs=100)
    assert halves != [half_of(f"math500/{n}", seed=1) for n in range(2_000)]


def test_temperatures_are_checked():
    with pytest.raises(ValueError, match="no temperatures"):
        best_temperature({})
    with pytest.raises(ValueError, match=r"0.0 and 1.0 were not run on the same items: 1 differ, such as 'b'"):
        best_temperature({0.0: {"a": [1]}, 1.0: {"a": [1], "b": [0]}})
    with pytest.raises(ValueError, match="1 items leave one half empty"):
        best_temperature({0.0: {"a": [1]}})


# --- averages --------------------------------------------------------------------------------------------------------


def test_the_macro_average_counts_each_suite_once():
    average = macro_average([Estimate(0.2, 0.3), Estimate(0.6, 0.4), Estimate(1.0, 0.0)])
    assert average.mean == pytest.approx(0.6) and average.standard_error == pytest.approx(0.5 / 3)
    assert math.isnan(macro_average([Estimate(1.0, math.nan), Estimate(0.0, 0.1)]).standard_error)
    with pytest.raises(ValueError, match="no suites"):
        macro_average([])


def test_item_means_are_not_rounded():
    assert item_means([[1, 0, 0]]) == [1 / 3]
