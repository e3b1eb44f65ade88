"""Every objective of the battery against the oracle: value, gate, focus, extremes, kinds, the step and the mass."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import deftune
import oracle as exact
from battery import CASES, CONTEXT, SETTING, V_EXTREME, Case, extreme_columns, names_in, of_kind, sample_logits
from deftune import Context, TokenStats, token_loss, token_stats
from deftune.objectives.base import deformed
from deftune.objectives.stats import from_columns
from tolerances import assert_close, assert_near

properties = settings(deadline=None, derandomize=True, max_examples=60, database=None)
every_case = pytest.mark.parametrize("case", CASES, ids=str)

FOCUSES = [0.0, 1e-40, 1e-30, 1 / V_EXTREME, 1e-3, 0.5, 1.0, 2.0]  # 1e-40 is subnormal in float32
LOG_PS = [0.0, -1e-38, -1e-30, -1e-7, -1e-3, -0.1, -0.7, -1.0, -5.0, -11.93, -30.0, -80.0, -87.5, -1e3, -1e4, -math.inf]


def columns(dtype: torch.dtype = torch.float64) -> tuple[TokenStats, list[exact.Row]]:
    """Statistics of a step, as an engine would report them, and the oracle's rows of the very same numbers."""
    logits, targets = sample_logits(18, 11)
    stats = token_stats(logits, targets)
    tops = stats.top_log_p(11).to(dtype)
    given = [column.to(dtype) for column in (stats.log_p, stats.entropy, stats.log_collision)]
    stats = from_columns(*given, vocab_size=11, targets=targets, top_log_p=tops)
    points = zip(*(column.tolist() for column in (*given, targets, tops)))
    step = [
        exact.row_from_columns(log_p, h, c, target=y, vocab_size=11, top_log_p=top) for log_p, h, c, y, top in points
    ]
    return stats, step


def test_battery_covers_the_catalogue():
    used = set().union(*(names_in(case.spec) for case in CASES))
    assert set(deftune.OBJECTIVES) | set(deftune.MODIFIERS) <= used
    for case in CASES:
        assert case.objective.kind == case.kind, case.spec
    assert {case.kind for case in CASES} == {"local", "mass", "step"}


# --- the deformed logarithm -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("a", FOCUSES)
def test_deformed_log_float32_grid(a):
    """Given float32 (a, log p): the loss to 5e-7, the gate to 5e-7 (1 + |a log p|)."""
    log_p = torch.tensor(LOG_PS, dtype=torch.float32)
    focus = torch.full_like(log_p, a)
    check_deformed(log_p, focus, "float32 column")


@properties
@given(
    st.lists(st.floats(-1e4, 0, width=32), min_size=1, max_size=8),
    st.one_of(st.floats(0, 2, width=32), st.floats(0, 2**-126, width=32)),
)
def test_deformed_log_float32_property(log_ps, a):
    log_p = torch.tensor(log_ps, dtype=torch.float32)
    check_deformed(log_p, torch.full_like(log_p, a), "float32 column")


@properties
@given(st.floats(-1e4, 0), st.one_of(st.floats(0, 4), st.floats(0, 1e-300)))
def test_deformed_log_float64_property(log_p, a):
    column = torch.tensor([log_p], dtype=torch.float64)
    check_deformed(column, torch.full_like(column, a), "float64 column")


def check_deformed(log_p, focus, tolerance):
    rows = [
        exact.row_from_columns(x, 0.0, 0.0, target=0, vocab_size=2, top_log_p=[0.0]) for x in log_p.double().tolist()
    ]
    tokens = [exact.deformed(row, exact.number(a)) for row, a in zip(rows, focus.double().tolist())]
    value = exact.column([token.value_at(row.log_p) for row, token in zip(rows, tokens)])
    gate = exact.column([token.gate for token in tokens])
    power = torch.where(focus == 0, 0.0, focus * log_p).double().abs()
    power = power.clamp(max=1e3)  # beyond it the gate is 0 in either precision
    found_gate, found_value = deformed(log_p, focus)
    assert_close(found_value, value, tolerance, what="loss")
    assert_close(found_gate, gate, tolerance, condition=1 + power, what="gate")


@properties
@given(st.floats(-50, 0), st.floats(0, 1), st.floats(0, 1))
def test_more_focus_is_less_gate_and_less_value(log_p, a, b):
    """p^a and (1 - p^a)/a both fall as a grows: nothing of the family pushes harder than NLL."""
    low, high = sorted((a, b))
    column = torch.tensor([log_p, log_p], dtype=torch.float64)
    focus = torch.tensor([low, high], dtype=torch.float64)
    gate, loss = deformed(column, focus)
    rounding = 1 + 1e-14
    assert gate[1] <= gate[0] * rounding and gate[0] <= 1
    assert loss[1] <= loss[0] * rounding and loss[0] <= -log_p * rounding


# --- the entropy of the likeliest tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("k", [2, 3, 20])
def test_top_entropy_keeps_its_digits_on_confident_rows(k, dtype):
    """The second likeliest e^-g below the first: an entropy of about (1 + g) e^-g, relative to its own size.

    u = log P_2 - log P_1 = -g is rounded once, which e^u multiplies by g: the condition. log sum P of a row that is
    nearly 1 would leave none of these digits in float32 from g = 17, in float64 from g = 37.
    """
    gaps = [0.0, 0.01, 1.0, 5.0, 10.0, 16.0, 20.0, 40.0, 80.0]
    rows = [[0.0, *(-gap - 0.3 * i for i in range(k - 1))] for gap in gaps]
    tops = torch.tensor(rows, dtype=torch.float64).log_softmax(-1).to(dtype)
    nothing = torch.zeros(len(gaps), dtype=dtype)
    stats = from_columns(nothing, nothing, nothing, vocab_size=50, top_log_p=tops)
    shares = [[exact.mp.exp(exact.number(x)) for x in row] for row in tops.tolist()]
    expected = exact.column([exact.top_entropy(row, k) for row in shares])
    name = "float64 column" if dtype == torch.float64 else "float32 column"
    assert_close(stats.top_entropy(k), expected, name, condition=1 + torch.tensor(gaps))


# --- every objective against the oracle -------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_focus_gate_and_loss_match_the_oracle(case: Case, dtype):
    stats, step = columns(dtype)
    expected = exact.answer(case.oracle, step, SETTING)
    objective = case.objective
    # a = exp(log collision) and p = exp(log p) carry their exponents' rounding, p^a that of a log p
    condition = (1 + stats.log_p.double().abs()) * (1 + stats.log_collision.double().abs())
    name = "float64 column" if dtype == torch.float64 else "float32 column"
    for what, got, want in (
        ("focus", objective.focus(stats, CONTEXT), expected.focus),
        ("gate", objective.gate(stats, CONTEXT), expected.gate),
        ("loss", objective.loss(stats, CONTEXT), expected.value),
    ):
        assert got.dtype == dtype, what
        assert_close(got, want, name, condition=condition, what=what)


@every_case
def test_extreme_tokens(case: Case):
    """log p from 0 to -inf at every focus: gates finite, values infinite only where the mathematics says so."""
    stats, step = extreme_columns()
    expected = exact.answer(case.oracle, step, SETTING)
    gate, loss = case.objective.gate(stats, CONTEXT), case.objective.loss(stats, CONTEXT)
    assert gate.isfinite().all() and (gate >= 0).all()
    assert torch.equal(loss.isinf(), expected.value.isinf())
    assert_close(gate, expected.gate, "float64 column", condition=1 + expected.gate, what="gate")
    assert_close(loss, expected.value, "float64 column", what="loss")


def test_extreme_values_are_infinite_for_open_gates_only():
    stats, _ = extreme_columns()
    impossible = stats.log_p == -math.inf
    for spec, infinite in {
        "nll": True,
        "cayley": True,
        "deft": False,
        "linear": False,
        "dft": False,
        "clip": False,
    }.items():
        loss = deftune.objective(spec).loss(stats)
        assert bool(loss[impossible].isinf().all()) == infinite, spec
        assert loss[~impossible].isfinite().all(), spec


@pytest.mark.parametrize("log_p", [-600.0, -740.0])
@pytest.mark.parametrize("spec", ["linear | mean_one", "dft | mean_one", "deft | mean_one", "hellinger | mean_one"])
def test_mean_one_of_equal_tiny_gates_is_one(spec, log_p):
    """Gates that are equal have mean-one gates of 1, also where they are subnormal (e^-740 = 4e-322)."""
    stats = from_columns([log_p] * 3, [0.0] * 3, [0.0] * 3, vocab_size=8)
    assert_near(deftune.objective(spec).gate(stats), torch.ones(3, dtype=torch.float64), "float64 column")


@every_case
def test_autograd_of_the_loss_is_minus_the_gate(case: Case):
    """A focus, weight or step statistic that leaks a gradient fails here."""
    stats, _ = columns()
    stats = replace(stats, **{f: getattr(stats, f).requires_grad_() for f in ("log_p", "entropy", "log_collision")})
    loss = case.objective.loss(stats, CONTEXT)
    log_p, entropy, log_collision = torch.autograd.grad(
        loss.sum(), (stats.log_p, stats.entropy, stats.log_collision), allow_unused=True
    )
    gate = case.objective.gate(stats, CONTEXT).detach()
    assert_near(log_p, -gate, "float64 column", what="d loss / d log p")
    assert entropy is None and log_collision is None, "a stop-gradient quantity carries a gradient"


@every_case
def test_autograd_at_the_extremes_is_finite(case: Case):
    stats, _ = extreme_columns()
    stats = replace(stats, log_p=stats.log_p.requires_grad_())
    (gradient,) = torch.autograd.grad(case.objective.loss(stats, CONTEXT).sum(), stats.log_p)
    # at p = 0 clip has its value only: there the derivative of a constant is 0, as is its gate
    gate = case.objective.gate(stats, CONTEXT).detach()
    assert_near(gradient, -gate, "float64 column", condition=1 + gate)


# a square root of an entropy has no condition number at 0, so one case stays out
SMOOTH = [case for case in of_kind("local") if case.spec != "eaft(5, 0.5, none)"]


@properties
@given(st.lists(st.floats(-20, 20), min_size=2, max_size=9), st.integers(0, 8), st.sampled_from(SMOOTH))
def test_local_objectives_property(logits, target, case):
    """Random distributions through every local objective, from logits to value, against 50 digits."""
    z, y = torch.tensor([logits], dtype=torch.float64), torch.tensor([target % len(logits)])
    stats = token_stats(z, y)
    # on a threshold's edge either side is right
    assume(all(abs(stats.p.item() - t) > 1e-9 for t in (0.1, 0.3, 0.7)))
    expected = exact.answer(case.oracle, exact.rows(z, y), SETTING)
    for what, want in (("focus", expected.focus), ("gate", expected.gate), ("loss", expected.value)):
        # an entropy near 0 is a difference of rounded numbers: near, not close
        got = getattr(case.objective, what)(stats, CONTEXT)
        assert_near(got, want, "float64 column", condition=1 + stats.nll, what=what)


@pytest.mark.parametrize("case", [case for case in CASES if case.make is None], ids=str)
def test_a_focus_is_a_stop_gradient_quantity(case: Case):
    stats, _ = columns()
    stats = replace(stats, **{f: getattr(stats, f).requires_grad_() for f in ("log_p", "entropy", "log_collision")})
    assert not case.objective.focus(stats, CONTEXT).requires_grad


@every_case
def test_a_gate_is_never_negative(case: Case):
    stats, _ = columns()
    gate = case.objective.gate(stats, CONTEXT)
    assert (gate >= 0).all() and gate.shape == stats.log_p.shape


@pytest.mark.parametrize("log_p", [-14.0, -1e4, -math.inf])
def test_released_cayley_is_clamped_from_below(log_p):
    """A step in which the model knows nothing: f and p/(2-p) are below 1e-3, the focus is not."""
    stats = from_columns([log_p] * 2, [0.1] * 2, [-0.1] * 2, vocab_size=4)
    assert deftune.objective("cayley-released").focus(stats).tolist() == [1e-3, 1e-3]


# --- modifiers, by their definitions ----------------------------------------------------------------------------------


def gate_and_loss(spec: str, stats: TokenStats, context: Context = CONTEXT):
    objective = deftune.objective(spec)
    return objective.gate(stats, context), objective.loss(stats, context)


@properties
@given(st.floats(0, 1.5))
def test_floor_lifts_gate_and_value_together(g):
    stats, _ = columns()
    gate, loss = gate_and_loss("linear", stats)
    floored_gate, floored_loss = gate_and_loss(f"linear | floor({g!r})", stats)
    assert torch.equal(floored_gate, torch.maximum(gate, torch.tensor(g, dtype=torch.float64)))
    assert_near(floored_loss, loss + (g - gate).clamp(min=0) * stats.nll, "float64 column", condition=10)


def test_eos_takes_over_on_the_special_ids_only():
    stats, _ = columns()
    special = (stats.targets == 1) | (stats.targets == 3)
    assert special.any() and not special.all()
    gate, loss = gate_and_loss("linear | eos(nll)", stats)
    assert torch.equal(gate, torch.where(special, 1.0, stats.p))
    assert torch.equal(loss, torch.where(special, stats.nll, stats.error))


@pytest.mark.parametrize("number", [1, 8, 9, 300])
def test_eos_with_many_special_ids(number):
    """Few are compared one by one, many in one search; order, repetition and ids that do not occur change nothing."""
    targets = torch.arange(12).repeat(2)
    stats = replace(from_columns(*-torch.rand(3, 24, dtype=torch.float64), vocab_size=400), targets=targets)
    ids = (399, 5, 0, 5, 398, 11, *range(100, 394))[:number]
    special = torch.tensor([y in ids for y in targets.tolist()])
    assert special.any() == (number > 1)
    gate, loss = gate_and_loss("linear | eos(nll)", stats, Context(special_ids=ids))
    assert torch.equal(gate, torch.where(special, 1.0, stats.p))
    assert torch.equal(loss, torch.where(special, stats.nll, stats.error))


@properties
@given(st.floats(0, 1), st.floats(0.01, 0.5))
def test_warmup_goes_from_nll_to_self(progress, f):
    stats, _ = columns()
    gate, _ = gate_and_loss(f"linear | warmup({f!r})", stats, Context(progress=progress))
    share = min(1.0, max(0.0, progress / f - 1))
    assert_near(gate, (1 - share) + share * stats.p, "float64 column")
    if progress <= f:
        assert (gate == 1).all()
    if progress >= 2 * f:
        assert torch.equal(gate, stats.p)


@pytest.mark.parametrize("case", [case for case in CASES if case.spec.endswith("mean_one")], ids=str)
def test_mean_one_gates_have_mean_one(case):
    stats, _ = columns()
    mean = case.objective.gate(stats, CONTEXT).mean()
    assert_near(mean, torch.ones((), dtype=torch.float64), "float64 column")


def test_mean_one_of_shut_gates_is_shut():
    stats = from_columns([-5.0, -6.0], [0.1, 0.1], [-0.1, -0.1], vocab_size=4)
    gate, loss = gate_and_loss("top(0.9) | mean_one", stats)
    assert (gate == 0).all() and (loss == 0).all()


def test_thresholds_split_every_token():
    """p >= t belongs to top, also where they are equal; top and bottom add up to the whole."""
    z, y = torch.zeros(1, 4, dtype=torch.float64), torch.tensor([2])
    stats = token_stats(z, y)
    assert deftune.objective("top(0.25)").gate(stats).item() == 1
    assert deftune.objective("bottom(0.25)").gate(stats).item() == 0
    stats, _ = columns()
    for of in ("nll", "linear"):
        both = [deftune.objective(f"{side}(0.3, of={of})").gate(stats) for side in ("top", "bottom")]
        assert torch.equal(both[0] + both[1], deftune.objective(of).gate(stats))
        assert (both[0] > 0).any() and (both[1] > 0).any()
    ends = from_columns([0.0, -1e-9, -math.inf], [0.0] * 3, [0.0] * 3, vocab_size=4)
    for spec, gate in {
        "top(0)": [1, 1, 1],
        "bottom(0)": [0, 0, 0],
        "top(1)": [1, 0, 0],
        "bottom(1)": [0, 1, 1],
    }.items():
        assert deftune.objective(spec).gate(ends).tolist() == gate, spec


def test_eaft_divisor_is_the_asked_k_even_beyond_the_vocabulary():
    stats = token_stats(torch.zeros(1, 4, dtype=torch.float64), torch.tensor([0]))
    gates = {spec: deftune.objective(spec).gate(stats).item() for spec in ("eaft", "eaft(k=4)", "eaft(norm=full)")}
    assert gates["eaft"] == pytest.approx(math.log(4) / math.log(20), rel=1e-14)
    assert gates["eaft(k=4)"] == pytest.approx(1, rel=1e-14)
    assert gates["eaft(norm=full)"] == pytest.approx(1, rel=1e-14)


def test_eaft_divides_by_the_entropy_of_two_classes():
    stats = token_stats(torch.tensor([[0.0, math.log(3)]], dtype=torch.float64), torch.tensor([0]))
    share = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) / math.log(2)
    assert deftune.objective("eaft(norm=full)").gate(stats).item() == pytest.approx(share, rel=1e-14)


def test_clip_median_averages_the_two_middle_values():
    stats = from_columns([-1.0, -2.0, -4.0, -40.0], [0.0] * 4, [0.0] * 4, vocab_size=4)
    assert deftune.objective("clip(k=2)").loss(stats).tolist() == [1.0, 2.0, 4.0, 6.0]
    assert deftune.objective("clip(k=2)").gate(stats).tolist() == [1.0, 1.0, 1.0, 6.0 / 40.0]


# --- gradients through statistics -------------------------------------------------------------------------------------


@every_case
def test_focus_and_gate_are_constants_of_the_gradient(case):
    """With statistics that carry gradients, d loss / d log p = -gate, and nothing flows through the others."""
    stats, _ = columns()
    leaves = [getattr(stats, name).clone().requires_grad_() for name in ("log_p", "entropy", "log_collision")]
    given = replace(stats, **dict(zip(("log_p", "entropy", "log_collision"), leaves)))
    if case.kind == "mass":
        assert not case.objective.mass(given, CONTEXT).requires_grad
    together = case.objective.evaluate(given, CONTEXT)
    apart = case.objective.gate(given, CONTEXT), case.objective.loss(given, CONTEXT)
    for gate, loss in (together, apart):
        assert not gate.requires_grad
        log_p, *others = torch.autograd.grad(loss.sum(), leaves, allow_unused=True)
        torch.testing.assert_close(log_p, -gate, rtol=1e-12, atol=1e-14)
        assert all(other is None or not other.any() for other in others)


def test_a_step_whose_gates_are_all_shut_has_gradients_of_zero():
    log_p = torch.tensor([-1e4, -2e4], dtype=torch.float64, requires_grad=True)  # p^a is 0
    stats = from_columns([-1e4, -2e4], [0.5, 0.5], [-0.1, -0.1], vocab_size=4)
    loss = deftune.objective("deft | mean_one").loss(replace(stats, log_p=log_p))
    assert loss.tolist() == [0, 0]
    assert torch.autograd.grad(loss.sum(), log_p)[0].tolist() == [0, 0]


@pytest.mark.parametrize("progress", [0.2, 0.5, 1.0])
def test_a_warmup_stays_at_its_objective_after_its_end(progress):
    stats, _ = columns()
    after = deftune.objective("deft | warmup(0.1)").evaluate(stats, Context(progress=progress))
    for found, expected in zip(after, deftune.objective("deft").evaluate(stats)):
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)


def test_statistics_are_shown_and_compared_without_their_sources():
    stats = token_stats(torch.zeros(1, 4, dtype=torch.float64), torch.tensor([0]))
    assert "_top" not in repr(stats)
    assert stats == replace(stats, _top_source=None, _top_entropy=(2, torch.zeros(1)))


def test_detached_statistics_carry_no_gradients():
    vectors = {name: torch.tensor([-1.0, -2.0], requires_grad=True) for name in ("log_p", "entropy", "log_collision")}
    cut = from_columns(**vectors, vocab_size=4).detach()
    for name, vector in vectors.items():
        assert not getattr(cut, name).requires_grad and torch.equal(getattr(cut, name), vector)


def test_mapped_statistics_keep_the_likeliest_tokens_that_are_asked_for():
    stats, _ = columns()
    second = stats.map(lambda vector: vector[1:2])
    assert second.nll.tolist() == stats.nll[1:2].tolist() and second.targets.tolist() == stats.targets[1:2].tolist()
    with pytest.raises(ValueError, match="these statistics hold no likeliest tokens, but the top 1 were asked for"):
        second.top_log_p(1)
    kept = stats.map(lambda vector: vector[1:2], top_k=3)
    assert torch.equal(kept.top_log_p(3), stats.top_log_p(3)[1:2])
    with pytest.raises(ValueError, match=r"the top 4 were asked for, but these statistics were made with top_k=3"):
        kept.top_log_p(4)


def test_an_entropy_that_a_kernel_measured_is_taken_for_its_k_alone():
    stats = token_stats(torch.tensor([[0.0, 1.0, 2.0, 3.0]], dtype=torch.float64), torch.tensor([0]))
    measured = torch.tensor([0.25], dtype=torch.float64)
    assert replace(stats, _top_entropy=(3, measured)).top_entropy(3) is measured
    assert replace(stats, _top_entropy=(4, measured)).top_entropy(20) is measured  # of four tokens
    other = replace(stats, _top_entropy=(3, measured)).top_entropy(2)
    assert torch.equal(other, stats.top_entropy(2)) and not torch.equal(other, measured)


# --- what objectives need ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "top_k"),
    [("deft", 0), ("eaft", 20), ("eaft(norm=full)", 0), ("eaft(k=3) | blend(eaft(k=5), 0.5)", 5)],
)
def test_the_likeliest_tokens_are_declared(spec, top_k):
    assert deftune.objective(spec).top_k == top_k


@pytest.mark.parametrize(
    ("spec", "requires"),
    [
        ("deft", set()),
        ("deft | warmup(0.1)", {"progress"}),
        ("deft | eos(nll)", {"special_ids"}),
        ("deft | blend(nll | eos(nll), 0.5) | warmup(0.1) | mean_one", {"progress", "special_ids"}),
    ],
)
def test_requirements_are_declared(spec, requires):
    assert deftune.objective(spec).requires == requires


@pytest.mark.parametrize(
    ("spec", "context", "text"),
    [
        ("deft | warmup(0.1)", Context(), r"`deft \| warmup\(0\.1\)` needs the training progress.*Context\(progress="),
        ("deft | eos(nll)", Context(), r"`deft \| eos\(nll\)` needs the ids.*Context\(special_ids="),
        ("deft | eos(nll)", Context(special_ids=()), r"needs the ids of the end and format tokens"),
        ("clip", Context(step="deferred"), r"`clip` needs .* of the whole step.*step_stats"),
    ],
)
def test_missing_context_is_named(spec, context, text):
    stats, _ = columns()
    for method in ("gate", "loss"):
        with pytest.raises(ValueError, match=text):
            getattr(deftune.objective(spec), method)(stats, context)
    logits, targets = sample_logits(6, 5)
    with pytest.raises(ValueError, match=text):
        token_loss(logits, targets, spec, context=context)


def test_missing_context_is_an_error_without_tokens_too():
    with pytest.raises(ValueError, match="training progress"):
        token_loss(torch.zeros(2, 3), torch.full((2,), -100), "deft | warmup(0.1)")


@pytest.mark.parametrize("progress", [-0.1, 1.1, math.nan, math.inf])
def test_progress_is_a_share(progress):
    with pytest.raises(ValueError, match=r"progress is the share of training done, from 0 to 1, got"):
        Context(progress=progress)


def test_statistics_without_top_tokens_say_so():
    stats = from_columns([-1.0], [0.5], [-0.3], vocab_size=9)
    with pytest.raises(ValueError, match=r"no likeliest tokens, but the top 20 were asked for; set `top_k = 20`"):
        deftune.objective("eaft").gate(stats)
    stats = from_columns([-1.0], [0.5], [-0.3], vocab_size=9, top_log_p=torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"the top 3 were asked for.*top_k=2"):
        deftune.objective("eaft(k=3)").gate(stats)


def test_foreign_step_statistics_are_refused():
    stats, _ = columns()
    context = Context(step=deftune.step_stats("clip", [stats]))
    with pytest.raises(ValueError, match=r"lack 'mean p', which `cayley-released` needs.*median nll"):
        deftune.objective("cayley-released").gate(stats, context)


# --- the whole step from its parts ------------------------------------------------------------------------------------


def split(stats: TokenStats, cuts: list[int]) -> list[TokenStats]:
    """Micro-batches; equal cuts make empty ones."""
    edges = [0, *sorted(cuts), len(stats)]
    tops = stats.top_log_p(stats.vocab_size)
    return [
        from_columns(
            stats.log_p[a:b],
            stats.entropy[a:b],
            stats.log_collision[a:b],
            vocab_size=stats.vocab_size,
            targets=stats.targets[a:b],
            top_log_p=tops[a:b],
        )
        for a, b in pairwise(edges)
    ]


@properties
@given(st.lists(st.integers(0, 18), max_size=5), st.sampled_from(of_kind("mass", "step")))
def test_step_stats_do_not_depend_on_the_split(cuts, case):
    whole, _ = columns()
    parts = split(whole, cuts)
    step = deftune.step_stats(case.objective, parts, context=CONTEXT)
    assert step.num_items == len(whole)
    context = replace(CONTEXT, step=step)
    for method in ("focus", "gate", "loss"):
        together = getattr(case.objective, method)(whole, CONTEXT)  # the call covers the step: no context needed
        pieces = torch.cat([getattr(case.objective, method)(part, context) for part in parts])
        assert_near(pieces, together, "split", condition=1 + together.abs(), what=method)


def test_step_statistics_carry_no_gradients():
    log_p = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    stats = from_columns(log_p, torch.ones(2), torch.ones(2), vocab_size=4)
    for spec in ("cayley-released", "clip", "mile", "deft | mean_one"):
        values = deftune.step_stats(spec, [stats]).values
        assert values and not any(value.requires_grad for value in values.values()), spec


def test_local_objectives_need_no_step_statistics():
    stats, _ = columns()
    for case in of_kind("local"):
        assert deftune.step_stats(case.objective, [stats], context=CONTEXT).values == {}


def test_an_empty_step_is_an_error():
    stats, _ = columns()
    with pytest.raises(ValueError, match=r"step_stats: the step has no supervised token"):
        deftune.step_stats("clip", split(stats, [0])[:1])
    with pytest.raises(ValueError, match=r"nothing to join"):
        deftune.step_stats("clip", [])


@properties
@given(st.lists(st.integers(0, 15), max_size=4), st.sampled_from(of_kind("mass")))
def test_deferred_mass_rescales_to_the_whole_step(cuts, case):
    """Micro-batches with num_items, then gradient * num_items / mass: the gradient of one call over the step."""
    logits, targets = sample_logits(15, 7)
    whole = logits.clone().requires_grad_()
    token_loss(whole, targets, case.objective, context=CONTEXT).backward()
    deferred = replace(CONTEXT, step="deferred")
    edges = [0, *sorted(cuts), 15]
    parts = logits.clone().requires_grad_()
    mass = 0.0
    for a, b in pairwise(edges):
        token_loss(parts[a:b], targets[a:b], case.objective, num_items=15, context=deferred).backward()
        mass += case.objective.mass(token_stats(logits[a:b], targets[a:b]), deferred).sum().item()
    assert_near(parts.grad * 15 / mass, whole.grad, "split")


def test_mass_of_other_objectives_is_the_token_count():
    stats, _ = columns()
    assert torch.equal(deftune.objective("deft").mass(stats), torch.ones_like(stats.log_p))


def test_cat_joins_in_order_and_refuses_other_vocabularies():
    whole, _ = columns()
    again = TokenStats.cat(split(whole, [3, 3, 11]))
    assert torch.equal(again.log_p, whole.log_p) and torch.equal(again.targets, whole.targets)
    assert torch.equal(again.top_log_p(4), whole.top_log_p(4))
    other = from_columns([-1.0], [0.0], [0.0], vocab_size=5)
    with pytest.raises(ValueError, match=r"different vocabularies, \[5, 11\]"):
        TokenStats.cat([whole, other])


def test_columns_of_other_shapes_are_refused():
    for wrong in ([[-1.0, -2.0], [0.0], [0.0, 0.0]], [torch.zeros(2, 3)] * 3):
        with pytest.raises(ValueError, match=r"from_columns: the columns must be flat and equally long, got shapes \["):
            from_columns(*wrong, vocab_size=4)


# --- the oracle's own check -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [1, 2, 30, 200])
def test_float64_twin_agrees_with_the_oracle(vocab_size):
    logits, targets = sample_logits(5, vocab_size)
    twin, rows = exact.twin(logits, targets), exact.rows(logits, targets)
    assert_near(twin.log_p, exact.column([row.log_p for row in rows]), "twin", condition=10)
    assert_near(twin.entropy, exact.column([row.entropy for row in rows]), "twin", condition=10)
    assert_near(twin.collision, exact.column([row.collision for row in rows]), "twin")
    assert_near(
        twin.top_entropy, exact.column([exact.top_entropy(row.likeliest, 20) for row in rows]), "twin", condition=10
    )


def test_oracle_by_hand():
    """p = 3/4 of (3/4, 1/4): every number of this token can be written down."""
    row = exact.row([math.log(3.0), 0.0], 0)
    step = [row]
    assert float(row.p) == pytest.approx(0.75, rel=1e-15)
    assert float(row.collision) == pytest.approx(0.625, rel=1e-15)
    expected = {
        exact.nll: (0, 1, -math.log(0.75)),
        exact.linear: (1, 0.75, 0.25),
        exact.hellinger: (0.5, math.sqrt(0.75), 2 * (1 - math.sqrt(0.75))),
        exact.cayley(): (1 / 3, 0.75 ** (1 / 3), 3 * (1 - 0.75 ** (1 / 3))),
        exact.deft: (0.625, 0.75**0.625, (1 - 0.75**0.625) / 0.625),
        exact.dft: (1, 0.75, -0.75 * math.log(0.75)),
    }
    for oracle, numbers in expected.items():
        answer = exact.answer(oracle, step, SETTING)
        assert [answer.focus.item(), answer.gate.item(), answer.value.item()] == pytest.approx(numbers, rel=1e-14)
        assert answer.gradient.tolist()[0] == pytest.approx([-0.25 * numbers[1], 0.25 * numbers[1]], rel=1e-14)


@pytest.mark.parametrize(
    "spec", ["mile(100)", "mile(-100)", "eaft(norm=none, power=100)", "eaft(norm=full, power=100)"]
)
def test_the_largest_powers_of_an_entropy_stay_in_range(spec):
    """Rows from a single class to a flat vocabulary of 151,936."""
    entropy = torch.tensor([0.0, 1e-9, 0.7, math.log(151_936)], dtype=torch.float64)
    top = torch.full((4, 20), -math.log(20), dtype=torch.float64)
    stats = from_columns(-entropy, entropy, -entropy, vocab_size=151_936, top_log_p=top)
    gate, value = deftune.objective(spec).evaluate(stats)
    assert gate.isfinite().all() and value.isfinite().all()


def test_columns_of_another_length_are_refused():
    one = [-1.0, -2.0], [0.5, 0.5], [-0.5, -0.5]
    with pytest.raises(ValueError, match="targets has 3 rows for 2 tokens"):
        from_columns(*one, vocab_size=4, targets=[0, 1, 2])
    with pytest.raises(ValueError, match="top_log_p has 1 rows for 2 tokens"):
        from_columns(*one, vocab_size=4, top_log_p=torch.zeros(1, 4))


def test_an_objective_defines_gate_and_loss_or_both_together():
    class Neither(deftune.Objective):
        pass

    class OnlyGate(deftune.Objective):
        def gate(self, stats, context=CONTEXT):
            return stats.p

    class Together(deftune.Objective):
        def evaluate(self, stats, context=CONTEXT):
            return stats.p, 1 - stats.p

    stats = from_columns([-1.0], [0.5], [-0.5], vocab_size=4)
    for unfinished in (Neither(), OnlyGate()):
        for method in (unfinished.loss, unfinished.evaluate):
            with pytest.raises(NotImplementedError, match="define gate and loss, or evaluate, which returns both"):
                method(stats)
    linear, own = deftune.objective("linear"), Together()
    assert_close(own.gate(stats), linear.gate(stats), "float64 column")
    assert_close(own.loss(stats), linear.loss(stats), "float64 column")
