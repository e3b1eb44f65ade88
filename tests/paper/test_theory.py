"""Every statement of the paper as a property test; the docstring names the statement, the body spells it out."""

import math

import mpmath
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from deftune.paper import duality, theory

mpmath.mp.dps = 40

# One tolerance table, a reason per row. All are relative unless the expected value is 0.
ALGEBRA = 1e-12  # a handful of float64 roundings (2.2e-16 each), with room for sums over a few tokens
MPMATH = 1e-13  # against 40 digits: the formula must not cancel anywhere, only round
STEP = 1e-5  # a difference quotient with step 1e-7: its own error is first order in the step, 1e-7 times curvature
SEARCH = 1e-6  # a search by function values finds a smooth maximum only to sqrt(eps), about 1.5e-8 / curvature

properties = settings(deadline=None, max_examples=100, derandomize=True, database=None)

unit = st.floats(1e-6, 1 - 1e-6)
small = st.floats(-300.0, -1.0).map(lambda e: 10.0**e)
probability = st.one_of(unit, small)
alphas = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(1e-3, 3.0))
focuses = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.0, 1.0))
kappas = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-0.99, 20.0))
logits = st.lists(st.floats(-8.0, 8.0), min_size=2, max_size=8)
distributions = logits.map(lambda z: torch.softmax(torch.tensor(z, dtype=torch.float64), -1))

# f and f' for the objectives that the paper names, and one that is neither (a quadratic)
OBJECTIVES = {
    "nll": (lambda p: -torch.log(p), lambda p: -1 / p),
    "linear": (lambda p: 1 - p, lambda p: -torch.ones_like(p)),
    "hellinger": (lambda p: 2 * (1 - torch.sqrt(p)), lambda p: -1 / torch.sqrt(p)),
    "quadratic": (lambda p: (1 - p**2) / 2, lambda p: -p),
    "brier-like": (lambda p: (1 - p) ** 2, lambda p: -2 * (1 - p)),
}


def close(actual: Tensor | float, expected: Tensor | float, tolerance: float = ALGEBRA, floor: float = 0.0) -> None:
    torch.testing.assert_close(
        torch.as_tensor(actual, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        rtol=tolerance,
        atol=floor,
    )


def logit_gradient(loss_of_probs, probs: Tensor) -> Tensor:
    """The gradient by the logits that autograd finds, the referee of every gradient formula below."""
    z = torch.log(probs).requires_grad_()
    loss_of_probs(torch.softmax(z, -1)).backward()
    assert z.grad is not None
    return z.grad


# --- Gradient structure -----------------------------------------------------------------------------------------------


@properties
@given(distributions)
def test_softmax_jacobian(probs):
    """Lemma (Softmax Jacobian), Eq. (app:4)."""
    expected = torch.autograd.functional.jacobian(lambda z: torch.softmax(z, -1), torch.log(probs))
    close(theory.softmax_jacobian(probs), expected, floor=1e-15)


@pytest.mark.parametrize("name", OBJECTIVES)
@properties
@given(distributions, st.integers(0, 7))
def test_objective_gradient_is_gate_times_error(name, probs, target):
    """Eq. (general_grad), Eq. (learning_signal); Lemma (General Objective Gradient), Eq. (app:9), (app:10)."""
    f, f_prime = OBJECTIVES[name]
    y = target % len(probs)
    expected = logit_gradient(lambda p: f(p[y]), probs)
    close(theory.objective_gradient(f_prime, probs, y), expected, floor=1e-14)
    gate = theory.gate_of(f_prime, probs[y])
    assert gate >= 0
    close(theory.signal(gate, probs[y]), -expected[y], floor=1e-14)


@properties
@given(unit, alphas)
def test_gates_of_the_named_objectives(p, alpha):
    """Section "The Dual Nature of Low Probability": s is 1 for NLL, p for 1 - p; p^α for the family, (gate_error)."""
    close(theory.gate_of(OBJECTIVES["nll"][1], p), 1.0)
    close(theory.gate_of(OBJECTIVES["linear"][1], p), p)
    x = torch.tensor(p, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(theory.deformed_log_loss(x, alpha=alpha), x)
    # autograd's expm1 goes back through (result + 1), which is absolute, not relative, to 1e-16
    close(theory.gate_of(lambda _: slope, p), theory.trust_gate(p, alpha=alpha), floor=1e-15)
    close(theory.trust_gate(p, alpha=alpha), p**alpha)


# --- The deformed-log family ------------------------------------------------------------------------------------------


@properties
@given(st.floats(1e-6, 1e6), st.one_of(st.floats(-3.0, 3.0), st.floats(-12.0, -1.0).map(lambda e: 1 + 10.0**e)))
def test_q_log_is_its_definition(x, q):
    """Definition (q-logarithm), Eq. (app:17); relative to 40 digits also where q is near 1 and x^{1-q} - 1 cancels."""
    e = 1 - mpmath.mpf(q)
    expected = mpmath.log(x) if e == 0 else (mpmath.mpf(x) ** e - 1) / e
    close(theory.q_log(x, q=q), float(expected), MPMATH, floor=1e-300)


@properties
@given(st.floats(0.01, 100.0), st.floats(-9.0, -2.0), st.sampled_from([-1.0, 1.0]))
def test_q_log_tends_to_the_logarithm(x, exponent, side):
    """Proposition (Continuity and limit properties of ln_q), 1: the gap is the Taylor remainder, O(1 - q)."""
    assert theory.q_log(x, q=1.0).item() == torch.log(torch.tensor(x, dtype=torch.float64)).item()
    e = side * 10.0**exponent
    gap = abs(theory.q_log(x, q=1 - e).item() - math.log(x))
    assert gap <= abs(e) / 2 * math.log(x) ** 2 * max(1.0, x**e) * (1 + 1e-6) + 1e-14


@properties
@given(st.floats(1e-3, 1e3), st.floats(1.001, 10.0), st.floats(-3.0, 3.0))
def test_q_log_is_increasing(x, ratio, q):
    """Proposition (Continuity and limit properties of ln_q), 2."""
    assert theory.q_log(x, q=q) < theory.q_log(x * ratio, q=q)


@properties
@given(st.floats(1e-3, 1e3), st.one_of(st.just(1.0), st.floats(-3.0, 3.0)))
def test_q_log_derivative(x, q):
    """Proposition (Continuity and limit properties of ln_q), 3, Eq. (app:21)."""
    at = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(theory.q_log(at, q=q), at)
    close(theory.q_log_derivative(x, q=q), expected, floor=1e-15 / x)  # autograd's expm1, as above, over x


@properties
@given(distributions, st.integers(0, 7))
def test_named_members_of_the_family(probs, target):
    """Eq. (example_alpha): NLL at 0, 1 - p at 1, the squared Hellinger distance to the one-hot target at 1/2."""
    y = target % len(probs)
    p = probs[y]
    close(theory.deformed_log_loss(p, alpha=0.0), -torch.log(p))
    close(theory.deformed_log_loss(p, alpha=1.0), 1 - p, floor=1e-15)
    hot = torch.nn.functional.one_hot(torch.tensor(y), len(probs)).double()
    hellinger = (torch.sqrt(hot) - torch.sqrt(probs)).square().sum()
    close(theory.deformed_log_loss(p, alpha=0.5), hellinger, floor=1e-14)


@properties
@given(probability, st.one_of(st.sampled_from([1 / 152064, 1e-9, 1e-300, 5e-324]), st.floats(1e-6, 3.0)))
def test_deformed_log_loss_is_exact_for_every_focus(p, alpha):
    """Eq. (example_alpha) to 40 digits, down to α -> 0: neither an epsilon nor exp(x) - 1 survives this."""
    with mpmath.workdps(700):  # 1 - p^α at α = 1e-300 needs the digits
        expected = float((1 - mpmath.mpf(p) ** mpmath.mpf(alpha)) / mpmath.mpf(alpha))
    close(theory.deformed_log_loss(p, alpha=alpha), expected, MPMATH)


def test_deformed_log_loss_at_the_ends():
    """Eq. (example_alpha) at p = 0 and p = 1; α per token, with the α = 0 branch beside others."""
    assert theory.deformed_log_loss(0.0, alpha=0.0) == math.inf
    assert theory.deformed_log_loss(0.0, alpha=0.5) == 2.0
    losses = theory.deformed_log_loss(torch.tensor([0.25, 0.25, 1.0]), alpha=torch.tensor([0.0, 0.5, 0.0]))
    close(losses, torch.tensor([math.log(4.0), 1.0, 0.0], dtype=torch.float64))


@properties
@given(distributions, st.integers(0, 7), alphas)
def test_family_gradient_decomposes(probs, target, alpha):
    """Section "Trust Gating via the Deformed-Log Family": dL_α/dz_y = -p^α (1 - p), Eq. (gate_error)."""
    y = target % len(probs)
    gradient = logit_gradient(lambda p: theory.deformed_log_loss(p[y], alpha=alpha), probs)
    close(-gradient[y], theory.signal(theory.trust_gate(probs[y], alpha=alpha), probs[y]), floor=1e-14)


@properties
@given(unit, focuses, focuses)
def test_no_gate_pushes_harder_than_nll(p, a, b):
    """The gate is at most 1, so p^α (1 - p) <= 1 - p; a greater focus only ever takes signal away."""
    low, high = sorted((a, b))
    w_low, w_high = (theory.signal(theory.trust_gate(p, alpha=x), p) for x in (low, high))
    assert w_high <= w_low <= 1 - p


@properties
@given(unit, unit, st.floats(0.0, 0.9), st.floats(0.01, 1.0))
def test_sharpening_is_a_matter_of_share(p, q, alpha, more):
    """The share of the more likely of two tokens in their common signal grows with the focus."""
    low, high = sorted((p, q))
    assume(high > low * 1.01)

    def share(a: float) -> float:
        w = [theory.signal(theory.trust_gate(x, alpha=a), x).item() for x in (low, high)]
        return w[1] / sum(w)

    assert share(alpha + more) > share(alpha)


# --- Entropy duality --------------------------------------------------------------------------------------------------


@properties
@given(distributions, st.one_of(st.sampled_from([0.5, 2.0, 1 + 1e-9]), st.floats(0.05, 5.0)))
def test_tsallis_entropy_is_its_definition(r, q):
    """Definition (Tsallis entropy), Eq. (app:34), normalised exactly before comparing with 40 digits."""
    weights = [mpmath.mpf(x) for x in r.tolist()]
    # r sums to 1 only to 1e-16; near q = 1 that error is divided by q - 1, so compare term by term: sum r (1-r^{q-1})
    e = mpmath.mpf(q) - 1
    expected = sum(-x * mpmath.log(x) if e == 0 else x * (1 - x**e) / e for x in weights)
    close(duality.tsallis_entropy(r, q=q), float(expected), 1e-12)


@properties
@given(distributions)
def test_tsallis_entropy_at_named_orders(r):
    """Definition (Tsallis entropy): Shannon's at q = 1, 1 - sum r^2 at q = 2, and 0 * log 0 = 0."""
    close(duality.tsallis_entropy(r, q=1.0), torch.special.entr(r).sum())
    close(duality.tsallis_entropy(r, q=2.0), 1 - r.square().sum(), floor=1e-15)
    padded = torch.cat([r, torch.zeros(1, dtype=torch.float64)])
    for q in (0.5, 1.0, 2.0):
        close(duality.tsallis_entropy(padded, q=q), duality.tsallis_entropy(r, q=q))


def test_tsallis_entropy_refuses_other_orders():
    """Definition (Tsallis entropy) is for q > 0."""
    with pytest.raises(ValueError, match="q > 0, got q=0"):
        duality.tsallis_entropy(torch.tensor([0.5, 0.5]), q=0)


@properties
@given(distributions, distributions, st.floats(0.01, 3.0))
def test_expected_one_term_score(p_hat, r, alpha):
    """Theorem (Optimization-entropy duality), main text: the second display, and E S_α(r, y) = S_{1+α}(r)."""
    n = min(len(p_hat), len(r))
    p_hat, r = p_hat[:n] / p_hat[:n].sum(), r[:n] / r[:n].sum()
    by_hand = sum(r[y] * duality.one_term_score(p_hat, y, alpha=alpha) for y in range(n))
    close(duality.expected_one_term_score(p_hat, r, alpha=alpha), by_hand)
    # 1 - sum(...) cancels, so the printed form is compared with an absolute floor
    close(duality.expected_one_term_score(p_hat, r, alpha=alpha), (1 - (r * p_hat**alpha).sum()) / alpha, floor=1e-13)
    close(duality.expected_one_term_score(r, r, alpha=alpha), duality.tsallis_entropy(r, q=1 + alpha), floor=1e-13)


@properties
@given(distributions, distributions, st.one_of(st.just(0.0), st.floats(0.01, 3.0)))
def test_one_term_score_is_least_at_the_sharpened_prediction(p_hat, r, alpha):
    """What holds instead of the main text's first display: argmin ∝ r^{1/(1-α)} (α < 1), the mode (α >= 1)."""
    n = min(len(p_hat), len(r))
    p_hat, r = p_hat[:n] / p_hat[:n].sum(), r[:n] / r[:n].sum()
    best = duality.one_term_minimiser(r, alpha=alpha)
    risk = duality.expected_one_term_score(best, r, alpha=alpha)
    close(risk, duality.one_term_bayes_risk(r, alpha=alpha), floor=1e-13)
    assert risk <= duality.expected_one_term_score(p_hat, r, alpha=alpha) + 1e-13
    if 0 < alpha < 1:  # proportional to r^{1/(1-α)}, spelled out
        power = r ** (1 / (1 - alpha))
        close(best, power / power.sum(), floor=1e-15)


def test_one_term_minimiser_is_r_at_zero_and_the_mode_from_one_on():
    """NLL (α = 0) is proper; from α = 1 on the best prediction is the mode."""
    r = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    close(duality.one_term_minimiser(r, alpha=0.0), r)
    for alpha in (1.0, 2.0):
        assert duality.one_term_minimiser(r, alpha=alpha).tolist() == [0.0, 1.0, 0.0]


@properties
@given(distributions, distributions, st.floats(0.01, 3.0))
def test_tsallis_score_is_proper(p_hat, r, alpha):
    """Theorem (Optimization-Entropy Duality, restating), Eq. (app:22), (app:23): least at r, where it is S_{1+α}(r)."""
    n = min(len(p_hat), len(r))
    p_hat, r = p_hat[:n] / p_hat[:n].sum(), r[:n] / r[:n].sum()
    scores = torch.stack([duality.tsallis_score(p_hat, y, alpha=alpha) for y in range(n)])
    printed = (1 - (1 + alpha) * p_hat**alpha + alpha * (p_hat ** (1 + alpha)).sum()) / alpha
    close(scores, printed, floor=1e-12)  # 1/α amplifies the printed form's own cancellation
    expected = duality.expected_tsallis_score(p_hat, r, alpha=alpha)
    close(expected, (r * scores).sum(), floor=1e-13)
    bayes = duality.expected_tsallis_score(r, r, alpha=alpha)
    close(bayes, duality.tsallis_entropy(r, q=1 + alpha), floor=1e-13)
    assert expected >= bayes - 1e-13
    if (p_hat - r).abs().max() > 1e-2:  # the minimiser is unique
        assert expected > bayes


@properties
@given(distributions, st.integers(0, 7), alphas)
def test_tsallis_score_gradient(probs, target, alpha):
    """The logit gradient of the appendix's score, Theorem (Optimization-Entropy Duality, restating); NLL's at α = 0."""
    y = target % len(probs)
    expected = logit_gradient(lambda p: duality.tsallis_score(p, y, alpha=alpha), probs)
    close(duality.tsallis_score_gradient(probs, y, alpha=alpha), expected, floor=1e-14)
    close(duality.tsallis_score(probs, y, alpha=0.0), -torch.log(probs[y]))


@properties
@given(st.floats(0.0, 3.0))
def test_indices_add_to_two(alpha):
    """Theorem (Optimization-Entropy Duality), Eq. (app:38): q_loss + q_ent = 2, and they name these two functions."""
    assert math.isclose(duality.loss_index(alpha) + duality.entropy_index(alpha), 2.0, rel_tol=1e-15)
    p = 0.3
    close(-theory.q_log(p, q=duality.loss_index(alpha)), theory.deformed_log_loss(p, alpha=alpha))
    r = torch.tensor([0.3, 0.7], dtype=torch.float64)
    expected = duality.expected_one_term_score(r, r, alpha=alpha)
    close(duality.tsallis_entropy(r, q=duality.entropy_index(alpha)), expected)


# --- Cayley -----------------------------------------------------------------------------------------------------------


@properties
@given(st.one_of(st.floats(1e-9, 1 - 1e-6), st.floats(-15.0, -6.0).map(lambda e: 1 - 10.0**e)))
def test_fisher_rao_distance_is_the_integral(p):
    """Proposition (Fisher-Rao distance to certainty for Bernoulli), Eq. (app:39c), to 40 digits, also beside p = 1."""
    close(theory.fisher_rao_distance(p), float(2 * mpmath.acos(mpmath.sqrt(mpmath.mpf(p)))), MPMATH)
    at = torch.tensor(p, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(theory.fisher_rao_distance(at), at)
    fisher_information = 1 / p + 1 / (1 - p)  # E[(d log Bern/dp)^2] = p/p^2 + (1-p)/(1-p)^2, Eq. (app:39b)
    close(slope, -math.sqrt(fisher_information))


@pytest.mark.parametrize("p", [0.01, 0.25, 0.5, 0.9])
def test_fisher_rao_distance_by_quadrature(p):
    """Eq. (app:39c): the line element integrated numerically (tanh-sinh takes the singular end)."""
    integral = mpmath.quad(lambda u: 1 / mpmath.sqrt(u * (1 - u)), [p, 1])
    close(theory.fisher_rao_distance(p), float(integral), 1e-12)  # the quadrature's own accuracy at a singular end


@properties
@given(probability)
def test_fisher_rao_radius_is_the_sine_of_half_the_distance(p):
    """Definition (Fisher-Rao radius), Eq. (app:39), (app:39d)."""
    close(theory.fisher_rao_radius(p), math.sqrt(1 - p))
    close(theory.fisher_rao_radius(p), torch.sin(theory.fisher_rao_distance(p) / 2))


@properties
@given(kappas)
def test_boundary_anchors(kappa):
    """Proposition (Boundary conditions for coverage and sharpening); Eq. (app:40): the ends swap, for every κ."""
    assert theory.cayley_focus(0.0, kappa=kappa) == 0.0
    assert theory.cayley_focus(1.0, kappa=kappa) == 1.0
    assert theory.moebius_focus(1.0, kappa=kappa) == 0.0
    assert theory.moebius_focus(0.0, kappa=kappa) == 1.0


@properties
@given(st.floats(0.05, 2.0), st.floats(-300.0, -1.0))
def test_gate_limit(power, exponent):
    """Lemma (When does p^{α(p)} -> 1 as p -> 0?), Eq. (app:39f): 1 - p^α <= α |ln p|, here with α = p^c."""
    p = 10.0**exponent
    alpha = p**power
    gate = theory.trust_gate(p, alpha=alpha).item()
    assert 0 <= 1 - gate <= alpha * abs(math.log(p)) * (1 + 1e-12) + 1e-15


def test_gate_limit_needs_its_second_hypothesis():
    """Lemma (When does p^{α(p)} -> 1?): with α = 1/|ln p| -> 0 alone the gate stays at 1/e."""
    for p in (1e-10, 1e-100, 1e-300):
        close(theory.trust_gate(p, alpha=1 / abs(math.log(p))), math.exp(-1))


@properties
@given(st.floats(0.0, 1.0), kappas)
def test_moebius_focus_is_an_involution(z, kappa):
    """Theorem (The Cayley Transform Solution), Eq. (app:40b): self-dual for every κ > -1."""
    once = theory.moebius_focus(z, kappa=kappa)
    # near κ = -1 the map is steep: its slope (1+κ)/(1+κz)^2 carries the rounding of the first application
    slope = (1 + kappa) / (1 + kappa * once.item()) ** 2
    close(theory.moebius_focus(once, kappa=kappa), z, floor=1e-14 * (1 + slope))


@properties
@given(st.floats(0.1, 5.0), st.floats(-20.0, 0.09), st.floats(0.0, 1.0))
def test_moebius_maps_that_swap_the_ends_are_this_family(a, c, z):
    """Theorem (The Cayley Transform Solution), Eq. (app:43) -> (app:45): b = -a, d = -a, κ = -c/a."""
    close((a * z - a) / (c * z - a), theory.moebius_focus(z, kappa=-c / a), floor=1e-15)


@properties
@given(unit, kappas)
def test_moebius_slope(z, kappa):
    """Theorem (The Cayley Transform Solution), Eq. (app:45c): decreasing, with slope -(1+κ)/(1+κz)^2."""
    at = torch.tensor(z, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(theory.moebius_focus(at, kappa=kappa), at)
    close(slope, -(1 + kappa) / (1 + kappa * z) ** 2, 1e-10)  # autograd adds two terms that nearly cancel at κ = -0.99
    assert slope < 0


@properties
@given(kappas)
def test_cayley_is_the_only_surprisal_linear_member(kappa):
    """Theorem (The Cayley Transform Solution), Eq. (app:41b): arctanh α_κ is affine in ln z only for κ = 1."""
    assume(kappa == 1.0 or abs(kappa - 1.0) > 0.01)
    z = torch.exp(-torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    y = torch.atanh(theory.moebius_focus(z, kappa=kappa))
    close(y, 0.5 * torch.log((2 + (kappa - 1) * z) / ((kappa + 1) * z)))
    bend = (y[0] - 2 * y[1] + y[2]).item()  # 1/2 ln(2 + (κ-1) e^t) is convex for κ > 1, concave for κ < 1
    if kappa == 1.0:
        assert abs(bend) < 1e-14
    else:
        assert math.copysign(1.0, bend) == math.copysign(1.0, kappa - 1) and abs(bend) > 1e-5


@properties
@given(probability, kappas)
def test_cayley_focus_is_exact(p, kappa):
    """Eq. (app:42), Eq. (alpha_star) and the Moebius family, relative to 40 digits down to p = 1e-300."""
    with mpmath.workdps(340):
        z = mpmath.sqrt(1 - mpmath.mpf(p))
        expected = float((1 - z) / (1 + mpmath.mpf(kappa) * z))
    # 1 + κz cancels near κ = -1: its condition number is at most 1/(1+κ)
    close(theory.cayley_focus(p, kappa=kappa), expected, MPMATH / min(1.0, 1 + kappa))


@pytest.mark.parametrize("kappa", [-1.0, -2.0, math.nan])
def test_kappa_out_of_range_is_named(kappa):
    """Theorem (The Cayley Transform Solution) needs κ > -1."""
    with pytest.raises(ValueError, match=f"kappa={kappa}"):
        theory.moebius_focus(0.5, kappa=kappa)
    with pytest.raises(ValueError, match=f"kappa={kappa}"):
        theory.cayley_focus(0.5, kappa=kappa)


@properties
@given(st.floats(-6.0, math.log10(0.5)).map(lambda e: 10.0**e))
def test_cayley_asymptotics_near_zero(p):
    """Proposition (Asymptotics of α*(p)), Eq. (app:47b): α* - p/4 is p^2/8 to p^2/4 on (0, 1/2]."""
    remainder = (theory.cayley_focus(p) - theory.cayley_focus_near_zero(p)).item()
    assert p**2 / 8 * (1 - 1e-6) <= remainder <= p**2 / 4


@properties
@given(st.floats(-8.0, math.log10(0.25)).map(lambda e: 10.0**e))
def test_cayley_asymptotics_near_one(error):
    """Proposition (Asymptotics of α*(p)), Eq. (app:47b): the remainder is 2(1-p)/(1+z), 4/3 to 2 times 1 - p."""
    p = 1 - error
    remainder = (theory.cayley_focus(p) - theory.cayley_focus_near_one(p)).item()
    assert 4 / 3 * (1 - p) * (1 - 1e-6) <= remainder <= 2 * (1 - p) * (1 + 1e-6)


@properties
@given(unit, st.floats(1e-9, 1.0))
def test_cayley_focus_is_increasing_in_the_unit_interval(p, step):
    """Proposition (Asymptotics of α*(p)): in [0, 1], strictly increasing, slope 1/(z (1+z)^2)."""
    higher = p + step * (1 - p)
    assert 0 <= theory.cayley_focus(p) < theory.cayley_focus(higher) <= 1
    at = torch.tensor(p, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(theory.cayley_focus(at), at)
    z = math.sqrt(1 - p)
    close(slope, 1 / (z * (1 + z) ** 2))


@properties
@given(st.floats(-300.0, -1.0), st.floats(-12.0, -1.0))
def test_cayley_gate_limits(low, high):
    """Corollary (Endpoint-consistent gate limits), Eq. (app:47c), with rates: p|ln p| and (1-p)^{3/2}."""
    p = 10.0**low
    gate = theory.trust_gate(p, alpha=theory.cayley_focus(p)).item()
    assert 0 <= 1 - gate <= p / 3.5 * abs(math.log(p)) + 1e-15
    p = 1 - 10.0**high
    ratio = (theory.trust_gate(p, alpha=theory.cayley_focus(p)) / p).item()
    assert 0 <= ratio - 1 <= 3 * (1 - p) ** 1.5 + 1e-15


@properties
@given(probability)
def test_normalised_surprisal(p):
    """Proposition (Normalized Surprisal Gating), Eq. (app:48): α* = tanh(I_err/4), arctanh α* = -ln(1-p)/4."""
    close(theory.error_surprisal(p), -float(mpmath.log1p(-mpmath.mpf(p))), MPMATH)
    close(theory.cayley_focus_from_surprisal(p), theory.cayley_focus(p))
    close(torch.atanh(theory.cayley_focus(min(p, 0.99))), theory.error_surprisal(min(p, 0.99)) / 4)


# --- DEFT -------------------------------------------------------------------------------------------------------------


@properties
@given(distributions)
def test_deft_focus_range(probs):
    """Proposition (Range and extremizers of α_DEFT): 1/V <= sum P^2 <= 1, strictly inside unless extreme."""
    focus = theory.deft_focus(probs).item()
    assert 1 / len(probs) - 1e-15 <= focus <= 1 + 1e-15
    # sum P^2 - 1/V = sum (P - 1/V)^2 and 1 - sum P^2 = 2 sum_{u<v} P_u P_v: the two proofs of the paper, as identities
    close(focus - 1 / len(probs), (probs - 1 / len(probs)).square().sum(), floor=1e-15)
    cross = torch.outer(probs, probs).triu(diagonal=1).sum()
    close(1 - focus, 2 * cross, floor=1e-15)


@pytest.mark.parametrize("size", [1, 2, 7, 50257])
def test_deft_focus_extremisers(size):
    """Proposition (Range and extremizers of α_DEFT): uniform gives 1/V, a point mass 1."""
    close(theory.deft_focus(torch.full((size,), 1 / size, dtype=torch.float64)), 1 / size)
    point = torch.zeros(size, dtype=torch.float64)
    point[-1] = 1.0
    assert theory.deft_focus(point) == 1.0


@properties
@given(distributions, distributions)
def test_deft_focus_is_renyi_2(first, second):
    """Proposition (Equivalence to Rényi-2 (collision) entropy): α = exp(-H_2), strictly decreasing in H_2."""
    close(theory.renyi2_entropy(first), -math.log(sum(x * x for x in first.tolist())), floor=1e-15)
    close(theory.deft_focus(first), torch.exp(-theory.renyi2_entropy(first)))
    focus = theory.deft_focus(first) - theory.deft_focus(second)
    entropy = theory.renyi2_entropy(first) - theory.renyi2_entropy(second)
    assume(abs(focus) > 1e-9)
    assert torch.sign(focus) == -torch.sign(entropy)


@properties
@given(probability, focuses, focuses, distributions)
def test_gate_interpolates(p, a, b, probs):
    """Proposition (Gate interpolation between coverage and sharpening): g(0) = 1, g(1) = p, p <= p^α <= 1."""
    assert theory.trust_gate(p, alpha=0.0) == 1.0
    assert theory.trust_gate(p, alpha=1.0) == p
    low, high = sorted((a, b))
    assert theory.trust_gate(p, alpha=high) <= theory.trust_gate(p, alpha=low)
    assert p <= theory.trust_gate(p, alpha=theory.deft_focus(probs).clamp(max=1.0)) <= 1


@properties
@given(distributions, st.integers(0, 7))
def test_deft_decomposition_and_bounds(probs, target):
    """Proposition (General decomposition and bounds linking α_DEFT to target probability), Eq. (deft_general_*)."""
    y = target % len(probs)
    p, size = probs[y], len(probs)
    tail = theory.tail_concentration(probs, y)
    by_hand = sum((probs[v] / (1 - p)) ** 2 for v in range(size) if v != y)
    close(tail, by_hand, 1e-12 / (1 - p).item())  # the printed form divides by 1 - p, whose rounding is 1e-16 absolute
    assert 1 / (size - 1) - 1e-14 <= tail <= 1 + 1e-14
    close(theory.deft_decomposition(p, tail), theory.deft_focus(probs))
    low, high = theory.deft_bounds(p, vocabulary=size)
    assert low - 1e-14 <= theory.deft_focus(probs) <= high + 1e-14


@properties
@given(unit, st.integers(2, 50))
def test_deft_bounds_are_attained(p, size):
    """Eq. (deft_general_bounds): a uniform tail attains the lower bound, a one-token tail the upper one."""
    low, high = theory.deft_bounds(p, vocabulary=size)
    uniform = torch.full((size,), (1 - p) / (size - 1), dtype=torch.float64)
    uniform[0] = p
    close(theory.deft_focus(uniform), low)
    single = torch.zeros(size, dtype=torch.float64)
    single[0], single[1] = p, 1 - p
    close(theory.deft_focus(single), high)


@properties
@given(st.integers(2, 1000), st.floats(0.0, 1.0), st.floats(0.01, 1.0))
def test_spike_and_uniform_tail(size, at, step):
    """Remark (Connection to the stylized "spike + uniform tail" case and Cayley): increasing from 1/V on, as Cayley."""
    p = 1 / size + at * (1 - 1 / size) * 0.98
    higher = p + step * (1 - p)
    assert theory.spike_and_tail_focus(p, vocabulary=size) < theory.spike_and_tail_focus(higher, vocabulary=size)
    assert theory.cayley_focus(p) < theory.cayley_focus(higher)
    close(theory.spike_and_tail_focus(p, vocabulary=size), p**2 + (1 - p) ** 2 / (size - 1))
    below = at * 0.9 / size  # and falling before 1/V, so the remark's condition is needed
    assert theory.spike_and_tail_focus(below, vocabulary=size) > theory.spike_and_tail_focus(1 / size, vocabulary=size)


@properties
@given(st.floats(0.01, 0.99), st.floats(0.0, 1.0), st.floats(-300.0, -0.1), st.integers(3, 9))
def test_deft_suppresses_conflicts(epsilon, extra, exponent, size):
    """Proposition (Conflict suppression under confidently misaligned predictive states): α >= (1-ε)^2 and the bound."""
    wrong = 1 - epsilon * extra  # some other token holds at least 1 - ε
    p = (1 - wrong) * 10.0**exponent
    assume(p > 0)
    tail = (1 - wrong - p) / (size - 2)
    probs = torch.tensor([p, wrong] + [tail] * (size - 2), dtype=torch.float64)
    assert theory.deft_focus(probs) >= (1 - epsilon) ** 2 * (1 - 1e-14)
    expected = p ** theory.deft_focus(probs).item() * (1 - p)
    close(theory.deft_signal(probs, 0), expected)
    assert theory.deft_signal(probs, 0) <= theory.conflict_bound(p, epsilon=epsilon) * (1 + 1e-12)
    close(theory.conflict_bound(p, epsilon=epsilon), p ** ((1 - epsilon) ** 2) * (1 - p))


@properties
@given(st.floats(0.01, 0.9), st.floats(-300.0, -2.0))
def test_conflict_bound_vanishes_where_cayley_does_not(epsilon, exponent):
    """Proposition (Conflict suppression ...): the bound tends to 0 with p, W_Cayley to 1."""
    p = 10.0**exponent
    assert theory.conflict_bound(p * 1e-3, epsilon=epsilon) < theory.conflict_bound(p, epsilon=epsilon)
    assert theory.conflict_bound(p, epsilon=epsilon) <= 10.0 ** (exponent * (1 - epsilon) ** 2) * (1 + 1e-12)
    close(theory.cayley_signal(p), p ** theory.cayley_focus(p).item() * (1 - p))
    assert 1 - theory.cayley_signal(p) <= p * (1 + abs(math.log(p)) / 3.5) + 1e-15


def test_arguments_out_of_range_are_named():
    """Proposition (Conflict suppression ...) needs 0 < ε < 1; a tail needs two tokens."""
    with pytest.raises(ValueError, match="epsilon=1"):
        theory.conflict_bound(0.5, epsilon=1.0)
    with pytest.raises(ValueError, match="vocabulary=1"):
        theory.spike_and_tail_focus(0.5, vocabulary=1)


# --- Additional results -----------------------------------------------------------------------------------------------

coefficients = st.lists(st.floats(0.0, 5.0), min_size=1, max_size=4)


@settings(properties, max_examples=30)
@given(coefficients, st.floats(0.1, 2.0), st.booleans())
def test_peak_location(coefficients, constant, convex):
    """Proposition (Convex vs. Concave Objectives): the peak lies in [0, 1/2] for convex f, in [1/2, 1] for concave."""

    def f_prime(p: Tensor) -> Tensor:  # -f' is a polynomial with nonnegative coefficients in 1 - p (convex) or p
        base = 1 - p if convex else p
        return -(constant + sum(c * base ** (k + 1) for k, c in enumerate(coefficients)))

    peak = theory.peak_location(f_prime)
    assert 0 < peak <= 0.5 + SEARCH if convex else 0.5 - SEARCH <= peak < 1
    grid = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    top = theory.signal(theory.gate_of(f_prime, torch.tensor(peak).double()), torch.tensor(peak).double())
    assert top >= theory.signal(theory.gate_of(f_prime, grid), grid).max() * (1 - 1e-6)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0, 2.0, 5.0])
def test_peak_of_the_family(alpha):
    """Proposition (Convex vs. Concave Objectives) on L_α, whose p^α (1 - p) peaks at α/(1+α): 1/2 at α = 1."""
    peak = theory.peak_location(lambda p: -(p ** (alpha - 1)))
    assert math.isclose(peak, alpha / (1 + alpha), abs_tol=SEARCH)


def test_peak_of_nll_is_at_the_open_end():
    """Proposition (Convex vs. Concave Objectives): -log p is convex, and 1 - p is greatest as p -> 0."""
    assert 0 < theory.peak_location(lambda p: -1 / p) < 1e-6


RISKS = {"error": (lambda q: 1 - q, lambda q: -torch.ones_like(q)), "nll": (lambda q: -torch.log(q), lambda q: -1 / q)}


@pytest.mark.parametrize("risk", RISKS)
@pytest.mark.parametrize("name", OBJECTIVES)
@settings(properties, max_examples=30)
@given(distributions, st.integers(0, 7), st.integers(0, 7))
def test_gradient_flow_rate(risk, name, q, true, label):
    """Definition (Gradient Flow Rate), Eq. (app:61): the inner product of the two gradients that autograd finds."""
    f, f_prime = OBJECTIVES[name]
    g, g_prime = RISKS[risk]
    true, label = true % len(q), label % len(q)
    product = logit_gradient(lambda p: g(p[true]), q) @ logit_gradient(lambda p: f(p[label]), q)
    rate = theory.gradient_flow_rate(q, true=true, label=label, f_prime=f_prime, risk_prime=g_prime)
    close(rate, product, floor=1e-14)


@pytest.mark.parametrize("label", [0, 1])
def test_gradient_flow_rate_is_the_limit_of_a_step(label):
    """Definition (Gradient Flow Rate), Eq. (app:61): (R(z) - R(z - η∇L))/η as η -> 0, with R = 1 - q_true."""
    q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    eta = 1e-7
    stepped = torch.softmax(torch.log(q) - eta * theory.objective_gradient(lambda p: -1 / p, q, label), -1)
    rate = theory.gradient_flow_rate(q, true=0, label=label, f_prime=lambda p: -1 / p)
    close(rate, (stepped[0] - q[0]) / eta, STEP)


@properties
@given(distributions, st.integers(0, 7), st.integers(0, 7))
def test_objective_ordering_formula(q, true, label):
    """Theorem (Sufficient Condition for Objective Ordering), Eq. (app:62): the difference of two printed rates."""
    true, label = true % len(q), label % len(q)
    slopes = OBJECTIVES["linear"][1], OBJECTIVES["nll"][1]
    r1, r2 = (theory.gradient_flow_rate_as_printed(q, true=true, label=label, f_prime=s) for s in slopes)
    d = slopes[1](q[label]) - slopes[0](q[label])
    assert d <= 0
    e = torch.eye(len(q), dtype=torch.float64)
    inner = (e[true] - q) @ (e[label] - q)
    close(r2 - r1, q[true] * q[label] * d * inner, floor=1e-14)
    if true == label:  # Eq. (app:63)
        close(inner, (e[true] - q).square().sum())
        assert inner > 0


@pytest.mark.parametrize("size", [2, 3, 1000])
def test_uniform_inner_product(size):
    """Theorem (Sufficient Condition for Objective Ordering), Eq. (app:64): exactly -1/V for a uniform q, y* != y~."""
    q = torch.full((size,), 1 / size, dtype=torch.float64)
    rate = theory.gradient_flow_rate(q, true=0, label=1, f_prime=lambda p: -torch.ones_like(p))
    close(rate, -1 / size**3)  # q_y* q_y~ (-1/V)
