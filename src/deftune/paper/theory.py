"""The paper's definitions and results as small functions, in float64.

Every function is one statement of *Gradients Must Earn Their Influence: Unifying SFT with Generalized Entropic
Objectives* (arXiv 2602.11424), cited by its title and, where it has one, by its LaTeX label. Nothing here is made for
training: these are the formulas that the objectives are tested against. `docs/theory.md` maps statement -> function ->
test; `docs/errata.md` says where the printed statement and the mathematics differ.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = [
    "cayley_focus",
    "cayley_focus_from_surprisal",
    "cayley_focus_near_one",
    "cayley_focus_near_zero",
    "cayley_signal",
    "conflict_bound",
    "deformed_log_loss",
    "deft_bounds",
    "deft_decomposition",
    "deft_focus",
    "deft_signal",
    "entropy_index",
    "error_surprisal",
    "expected_one_term_score",
    "expected_tsallis_score",
    "fisher_rao_distance",
    "fisher_rao_radius",
    "gate_of",
    "gradient_flow_rate",
    "gradient_flow_rate_as_printed",
    "loss_index",
    "moebius_focus",
    "objective_gradient",
    "one_term_bayes_risk",
    "one_term_minimiser",
    "one_term_score",
    "peak_location",
    "q_log",
    "q_log_derivative",
    "renyi2_entropy",
    "signal",
    "softmax_jacobian",
    "spike_and_tail_focus",
    "tail_concentration",
    "trust_gate",
    "tsallis_entropy",
    "tsallis_score",
    "tsallis_score_gradient",
]

Real = float | Tensor
Derivative = Callable[[Tensor], Tensor]


def _f64(x: Real) -> Tensor:
    return torch.as_tensor(x, dtype=torch.float64)


def _expm1_over(exponent: Real, log_x: Tensor) -> Tensor:
    """(x^e - 1)/e, and ln x at e = 0: the exact branch comes before e * ln x, where 0 * -inf would be NaN."""
    e = _f64(exponent)
    divisor = torch.where(e == 0, torch.ones_like(e), e)
    t = divisor * log_x
    # below 1e-17 the factor (e^t - 1)/t = 1 + t/2 + ... rounds to 1, and a subnormal t would lose digits
    return torch.where((e == 0) | (t.abs() < 1e-17), log_x, torch.expm1(t) / divisor)


def _one_hot(index: int, like: Tensor) -> Tensor:
    hot = torch.zeros_like(like)
    hot[index] = 1.0
    return hot


# --- Gradient structure -----------------------------------------------------------------------------------------------


def softmax_jacobian(probs: Tensor) -> Tensor:
    """The derivative of a softmax by its logits.

    dp_i/dz_j = p_i (δ_ij - p_j)

    >>> softmax_jacobian(torch.tensor([0.75, 0.25])).tolist()
    [[0.1875, -0.1875], [-0.1875, 0.1875]]

    Lemma (Softmax Jacobian), Eq. (app:4).
    """
    p = _f64(probs)
    return torch.diag(p) - torch.outer(p, p)


def gate_of(f_prime: Derivative, p: Real) -> Tensor:
    """The gate of an objective f: what multiplies the error.

    s_f(p) = -f'(p) p

    >>> gate_of(lambda p: -1 / p, 0.25).item(), gate_of(lambda p: -torch.ones_like(p), 0.25).item()
    (1.0, 0.25)

    Lemma (General Objective Gradient), Eq. (app:9).
    """
    x = _f64(p)
    return -f_prime(x) * x


def signal(gate: Real, p: Real) -> Tensor:
    """The size of the learning signal on the target's logit: gate x error.

    W_f(p) = s_f(p) (1 - p)

    >>> signal(0.5, 0.25).item()
    0.375

    Eq. (learning_signal); Lemma (General Objective Gradient), Eq. (app:10).
    """
    return _f64(gate) * (1 - _f64(p))


def objective_gradient(f_prime: Derivative, probs: Tensor, target: int) -> Tensor:
    """The logit gradient of f(p_target): gate x error, for every logit.

    dL_f/dz_i = s_f(p) (p_i - δ_iy)

    >>> objective_gradient(lambda p: -1 / p, torch.tensor([0.75, 0.25]), 1).tolist()
    [0.75, -0.75]

    Eq. (general_grad); Lemma (General Objective Gradient), Eq. (app:9).
    """
    p = _f64(probs)
    return gate_of(f_prime, p[target]) * (p - _one_hot(target, p))


# --- The deformed-log family and entropy ------------------------------------------------------------------------------


def q_log(x: Real, *, q: Real) -> Tensor:
    """The q-logarithm, the ordinary one at q = 1.

    ln_q(x) = (x^{1-q} - 1)/(1 - q)

    >>> q_log(4.0, q=0.5).item(), round(q_log(4.0, q=1.0).item(), 6)
    (2.0, 1.386294)

    Definition (q-logarithm), Eq. (app:17).
    """
    return _expm1_over(1 - _f64(q), torch.log(_f64(x)))


def q_log_derivative(x: Real, *, q: Real) -> Tensor:
    """The derivative of the q-logarithm.

    d ln_q(x)/dx = x^{-q}

    >>> q_log_derivative(4.0, q=0.5).item()
    0.5

    Proposition (Continuity and limit properties of ln_q), Eq. (app:21).
    """
    return _f64(x) ** -_f64(q)


def deformed_log_loss(p: Real, *, alpha: Real) -> Tensor:
    """The negative q-log likelihood with q = 1 - α; NLL at α = 0, 1 - p at α = 1.

    L_α(p) = (1 - p^α)/α

    >>> [round(deformed_log_loss(0.25, alpha=a).item(), 6) for a in (0.0, 0.5, 1.0)]
    [1.386294, 1.0, 0.75]

    Eq. (example_alpha).
    """
    return -_expm1_over(alpha, torch.log(_f64(p)))  # not -q_log(p, q=1-α): 1 - (1 - α) would lose a small α


def trust_gate(p: Real, *, alpha: Real) -> Tensor:
    """The gate of the deformed-log family.

    G(p) = p^α

    >>> trust_gate(0.25, alpha=0.5).item()
    0.5

    Eq. (gate_error), Eq. (app:39e); Proposition (Gate interpolation between coverage and sharpening).
    """
    return _f64(p) ** _f64(alpha)


def loss_index(alpha: float) -> float:
    """The index of the loss, q_loss = 1 - α.

    >>> loss_index(0.25) + entropy_index(0.25)
    2.0

    Theorem (Optimization-Entropy Duality), Eq. (app:38).
    """
    return 1.0 - alpha


def entropy_index(alpha: float) -> float:
    """The index of the entropy, q_ent = 1 + α = 2 - q_loss.

    >>> entropy_index(1.0)
    2.0

    Theorem (Optimization-Entropy Duality), Eq. (app:38).
    """
    return 1.0 + alpha


def _excess_entropy(r: Tensor, excess: float) -> Tensor:
    """S_{1+e}(r) = sum r L_e(r), from e itself so that a small e is not rounded away in 1 + e."""
    terms = r * -_expm1_over(excess, torch.log(r))
    return torch.where(r > 0, terms, torch.zeros_like(r)).sum()  # 0 * inf = 0


def tsallis_entropy(r: Tensor, *, q: float) -> Tensor:
    """The Tsallis entropy of order q > 0, Shannon's at q = 1.

    S_q(r) = (1 - sum_y r(y)^q)/(q - 1)

    >>> r = torch.tensor([0.75, 0.25])
    >>> tsallis_entropy(r, q=2.0).item(), round(tsallis_entropy(r, q=1.0).item(), 6)
    (0.375, 0.562335)

    Definition (Tsallis entropy), Eq. (app:34).
    """
    if not q > 0:
        raise ValueError(f"the Tsallis entropy needs q > 0, got q={q}")
    return _excess_entropy(_f64(r), q - 1)


def one_term_score(p_hat: Tensor, y: int, *, alpha: float) -> Tensor:
    """The score of the main text's theorem, which is the loss itself; improper for every α > 0.

    S_α(p̂, y) = (1 - p̂(y)^α)/α

    >>> one_term_score(torch.tensor([0.75, 0.25]), 1, alpha=0.5).item()
    1.0

    Theorem (Optimization-entropy duality), main text.
    """
    return deformed_log_loss(_f64(p_hat)[y], alpha=alpha)


def expected_one_term_score(p_hat: Tensor, r: Tensor, *, alpha: float) -> Tensor:
    """The expectation of the one-term score for targets drawn from r.

    E_{y~r} S_α(p̂, y) = (1 - sum_y r(y) p̂(y)^α)/α

    >>> r = torch.tensor([0.6, 0.4], dtype=torch.float64)
    >>> round(expected_one_term_score(r, r, alpha=0.5).item(), 5)
    0.56452

    Theorem (Optimization-entropy duality), main text, second display.
    """
    r = _f64(r)
    terms = r * deformed_log_loss(p_hat, alpha=alpha)
    return torch.where(r > 0, terms, torch.zeros_like(r)).sum()


def one_term_minimiser(r: Tensor, *, alpha: float) -> Tensor:
    """The prediction that minimises the expected one-term score: sharper than r, so the score is improper.

    p̂ ∝ r^{1/(1-α)} for α < 1; the mode of r for α >= 1 (the first of several)

    >>> one_term_minimiser(torch.tensor([0.6, 0.4], dtype=torch.float64), alpha=0.5).round(decimals=5).tolist()
    [0.69231, 0.30769]

    From the first-order condition r p̂^{α-1} = λ; for α >= 1 the expected score is concave, so a vertex wins.
    """
    r = _f64(r)
    if alpha >= 1:
        return _one_hot(int(r.argmax()), r)
    return torch.softmax(torch.log(r) / (1 - alpha), dim=-1)


def one_term_bayes_risk(r: Tensor, *, alpha: float) -> Tensor:
    """The least expected one-term score, by Hölder's inequality.

    min_p̂ E S_α = (1 - ||r||_{1/(1-α)})/α for α < 1, (1 - max r)/α for α >= 1; Shannon's entropy at α = 0

    >>> round(one_term_bayes_risk(torch.tensor([0.6, 0.4], dtype=torch.float64), alpha=0.5).item(), 5)
    0.55778

    What takes the place of the Tsallis entropy in the main text's theorem.
    """
    r = _f64(r)
    if alpha == 0:
        return tsallis_entropy(r, q=1.0)
    if alpha >= 1:
        return (1 - r.max()) / alpha
    log_norm = (1 - alpha) * torch.logsumexp(torch.log(r) / (1 - alpha), dim=-1)
    return -torch.expm1(log_norm) / alpha


def tsallis_score(p_hat: Tensor, y: int, *, alpha: float) -> Tensor:
    """The appendix's score, which is proper; NLL at α = 0.

    S_α(p̂, y) = (1 - (1+α) p̂(y)^α + α sum_y' p̂(y')^{1+α})/α = (1+α) L_α(p̂(y)) - α S_{1+α}(p̂)

    >>> round(tsallis_score(torch.tensor([0.75, 0.25]), 0, alpha=1.0).item(), 6)
    0.125

    Theorem (Optimization-Entropy Duality, restating), appendix. Its gradient is not gate x error.
    """
    p = _f64(p_hat)
    return (1 + alpha) * deformed_log_loss(p[y], alpha=alpha) - alpha * _excess_entropy(p, alpha)


def expected_tsallis_score(p_hat: Tensor, r: Tensor, *, alpha: float) -> Tensor:
    """The expectation of the appendix's score; its minimum, at p̂ = r, is the Tsallis entropy of order 1 + α.

    E_{y~r} S_α(p̂, y) = 1/α - (1+α)/α sum_y r(y) p̂(y)^α + sum_y p̂(y)^{1+α}

    >>> r = torch.tensor([0.75, 0.25])
    >>> expected_tsallis_score(r, r, alpha=1.0).item(), tsallis_entropy(r, q=2.0).item()
    (0.375, 0.375)

    Eq. (app:23), Eq. (app:22).
    """
    one_term = expected_one_term_score(p_hat, r, alpha=alpha)
    return (1 + alpha) * one_term - alpha * _excess_entropy(_f64(p_hat), alpha)


def tsallis_score_gradient(probs: Tensor, target: int, *, alpha: float) -> Tensor:
    """The logit gradient of the appendix's score: gate x error plus a term that does not see the target.

    dS_α/dz_i = (1+α) [p_y^α (p_i - δ_iy) + p_i (p_i^α - sum_j p_j^{1+α})]

    >>> tsallis_score_gradient(torch.tensor([0.5, 0.25, 0.25]), 0, alpha=1.0).tolist()
    [-0.375, 0.1875, 0.1875]

    Derived here from Lemma (Softmax Jacobian); the paper does not give it.
    """
    p = _f64(probs)
    target_term = trust_gate(p[target], alpha=alpha) * (p - _one_hot(target, p))
    powers = p ** (1 + alpha)
    return (1 + alpha) * (target_term + powers - p * powers.sum())


# --- Cayley: from geometry to the focus -------------------------------------------------------------------------------


def fisher_rao_radius(p: Real) -> Tensor:
    """The intrinsic uncertainty radius.

    z = sqrt(1 - p) = sin(d_FR(p, 1)/2)

    >>> fisher_rao_radius(0.75).item()
    0.5

    Definition (Fisher-Rao radius), Eq. (app:39) and (app:39d).
    """
    return torch.sqrt(1 - _f64(p))


def fisher_rao_distance(p: Real) -> Tensor:
    """The Fisher-Rao distance of Bern(p) to certainty.

    d_FR(p, 1) = ∫_p^1 du/sqrt(u(1-u)) = 2 arccos(sqrt p)

    >>> round(fisher_rao_distance(0.25).item(), 6) == round(2 * math.pi / 3, 6)
    True

    Proposition (Fisher-Rao distance to certainty for Bernoulli), Eq. (app:39c).
    """
    # arccos(sqrt p) as an angle of (sqrt p, z): arccos itself loses half the digits near p = 1
    return 2 * torch.atan2(fisher_rao_radius(p), torch.sqrt(_f64(p)))


def _check_kappa(kappa: float) -> None:
    if not kappa > -1:
        raise ValueError(f"kappa must be > -1 for a map of [0, 1] onto itself, got kappa={kappa}")


def moebius_focus(z: Real, *, kappa: float) -> Tensor:
    """The Moebius maps of [0, 1] that swap its ends; each is its own inverse, κ = 1 is the Cayley transform.

    α_κ(z) = (1 - z)/(1 + κ z), κ > -1

    >>> moebius_focus(0.5, kappa=0.0).item(), moebius_focus(0.6, kappa=1.0).item()
    (0.5, 0.25)

    Theorem (The Cayley Transform Solution), Eq. (app:45).
    """
    _check_kappa(kappa)
    x = _f64(z)
    return (1 - x) / (1 + kappa * x)


def cayley_focus(p: Real, *, kappa: float = 1.0) -> Tensor:
    """The focus along the Cayley trajectory (or its Moebius relatives), exact for small p too.

    α*(p) = (1 - z)/(1 + κ z) = p / ((1 + z)(1 + κ z)), z = sqrt(1 - p)

    >>> cayley_focus(0.75).item() == 1 / 3, cayley_focus(1e-20).item()
    (True, 2.5e-21)

    Theorem (The Cayley Transform Solution), Eq. (app:42), Eq. (alpha_star).
    """
    _check_kappa(kappa)
    z = fisher_rao_radius(p)
    return _f64(p) / ((1 + z) * (1 + kappa * z))  # 1 - z = p/(1 + z): 1 - z itself cancels to 0 below p = 1e-16


def error_surprisal(p: Real) -> Tensor:
    """The information content of a prediction error.

    I_err = -ln(1 - p)

    >>> round(error_surprisal(0.5).item(), 6)
    0.693147

    Proposition (Normalized Surprisal Gating), Eq. (app:48).
    """
    return -torch.log1p(-_f64(p))


def cayley_focus_from_surprisal(p: Real) -> Tensor:
    """The Cayley focus as a normalised error surprisal.

    α*(p) = tanh(I_err/4)

    >>> round(cayley_focus_from_surprisal(0.75).item(), 12)
    0.333333333333

    Proposition (Normalized Surprisal Gating), Eq. (app:48), Eq. (alpha_tanh).
    """
    return torch.tanh(error_surprisal(p) / 4)


def cayley_focus_near_zero(p: Real) -> Tensor:
    """The Cayley focus of an unlikely target, up to O(p^2).

    α*(p) = p/4 + O(p^2)

    >>> cayley_focus_near_zero(0.5).item()
    0.125

    Proposition (Asymptotics of α*(p)), Eq. (app:47b).
    """
    return _f64(p) / 4


def cayley_focus_near_one(p: Real) -> Tensor:
    """The Cayley focus of a near-certain target, up to O(1 - p).

    α*(p) = 1 - 2 sqrt(1 - p) + O(1 - p)

    >>> cayley_focus_near_one(0.9375).item()
    0.5

    Proposition (Asymptotics of α*(p)), Eq. (app:47b).
    """
    return 1 - 2 * fisher_rao_radius(p)


def cayley_signal(p: Real) -> Tensor:
    """The learning signal along the Cayley trajectory; it tends to 1 as p -> 0.

    W_Cayley(p) = p^{α*(p)} (1 - p)

    >>> round(cayley_signal(1e-9).item(), 6)
    1.0

    Proposition (Conflict suppression under confidently misaligned predictive states), second part.
    """
    return signal(trust_gate(p, alpha=cayley_focus(p)), p)


# --- DEFT: from concentration to the focus ----------------------------------------------------------------------------


def deft_focus(probs: Tensor) -> Tensor:
    """DEFT's focus: the concentration of the whole prediction, in [1/V, 1].

    α_DEFT(c) = sum_v P(v)^2

    >>> deft_focus(torch.tensor([0.5, 0.25, 0.25])).item()
    0.375

    Eq. (deft_alpha); Proposition (Range and extremizers of α_DEFT).
    """
    return _f64(probs).square().sum(dim=-1)


def renyi2_entropy(probs: Tensor) -> Tensor:
    """The order-2 Rényi (collision) entropy; DEFT's focus is exp(-H2).

    H_2(P) = -ln sum_v P(v)^2

    >>> round(renyi2_entropy(torch.full((4,), 0.25)).item(), 6)
    1.386294

    Proposition (Equivalence to Rényi-2 (collision) entropy).
    """
    return -torch.log(deft_focus(probs))


def tail_concentration(probs: Tensor, target: int) -> Tensor:
    """The concentration of what the target leaves over, renormalised; in [1/(V-1), 1] and defined for p < 1.

    S_tail(c) = sum_{v != y} (P(v)/(1 - p))^2

    >>> tail_concentration(torch.tensor([0.5, 0.25, 0.25]), 0).item()
    0.5

    Proposition (General decomposition and bounds linking α_DEFT to target probability).
    """
    p = _f64(probs)
    tail = torch.cat([p[:target], p[target + 1 :]])
    # the tail's own sum, not 1 - p: with p near 1 the rounding of p would dwarf the tail
    return (tail / tail.sum()).square().sum()


def deft_decomposition(p: Real, tail: Real) -> Tensor:
    """DEFT's focus from the target's probability and the shape of the tail.

    α_DEFT = p^2 + (1 - p)^2 S_tail

    >>> deft_decomposition(0.5, 0.5).item()
    0.375

    Eq. (deft_general_decomp).
    """
    return _f64(p) ** 2 + (1 - _f64(p)) ** 2 * _f64(tail)


def deft_bounds(p: Real, *, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The least and greatest focus DEFT can have at a target probability: uniform tail, one-token tail.

    p^2 + (1 - p)^2/(V - 1) <= α_DEFT <= p^2 + (1 - p)^2

    >>> [bound.item() for bound in deft_bounds(0.5, vocabulary=3)]
    [0.375, 0.5]

    Eq. (deft_general_bounds).
    """
    return spike_and_tail_focus(p, vocabulary=vocabulary), deft_decomposition(p, 1.0)


def spike_and_tail_focus(p: Real, *, vocabulary: int) -> Tensor:
    """DEFT's focus for a spike on the target and a uniform tail; increasing in p from 1/V on.

    α_DEFT = p^2 + (1 - p)^2/(V - 1)

    >>> spike_and_tail_focus(0.5, vocabulary=3).item()
    0.375

    Remark (Connection to the stylized "spike + uniform tail" case and Cayley).
    """
    if vocabulary < 2:
        raise ValueError(f"a tail needs vocabulary >= 2, got vocabulary={vocabulary}")
    return deft_decomposition(p, 1 / (vocabulary - 1))


def deft_signal(probs: Tensor, target: int) -> Tensor:
    """The learning signal of DEFT on the target's logit.

    W_DEFT(p, c) = p^{α_DEFT(c)} (1 - p)

    >>> deft_signal(torch.tensor([0.25, 0.25, 0.25, 0.25]), 0).item() == 0.25**0.25 * 0.75
    True

    Proposition (Conflict suppression under confidently misaligned predictive states).
    """
    p = _f64(probs)[target]
    return signal(trust_gate(p, alpha=deft_focus(probs)), p)


def conflict_bound(p: Real, *, epsilon: float) -> Tensor:
    """The most DEFT can push when some other token holds at least 1 - ε; it vanishes as p -> 0.

    W_DEFT(p, c) <= p^{(1-ε)^2} (1 - p)

    >>> conflict_bound(0.0625, epsilon=0.5).item()
    0.46875

    Proposition (Conflict suppression under confidently misaligned predictive states).
    """
    if not 0 < epsilon < 1:
        raise ValueError(f"epsilon must lie in (0, 1), got epsilon={epsilon}")
    return signal(trust_gate(p, alpha=(1 - epsilon) ** 2), p)


# --- Additional results -----------------------------------------------------------------------------------------------

_GOLDEN = (math.sqrt(5.0) - 1) / 2


def peak_location(f_prime: Derivative, *, grid: int = 4096) -> float:
    """Where the learning signal of an objective is greatest, found numerically on (0, 1).

    argmax_p W_f(p), W_f(p) = -f'(p) p (1 - p); >= 1/2 for concave f, <= 1/2 for convex f

    >>> round(peak_location(lambda p: -torch.ones_like(p)), 6), round(peak_location(lambda p: -2 * p), 6)
    (0.5, 0.666667)

    Proposition (Convex vs. Concave Objectives). A supremum at an open end (NLL: p -> 0) returns a point beside it.
    """
    cells = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
    best = cells[int(signal(gate_of(f_prime, cells), cells).argmax())].item()
    low, high = max(0.0, best - 1 / grid), min(1.0, best + 1 / grid)

    def height(p: float) -> float:
        return signal(gate_of(f_prime, p), p).item()

    # golden section: 60 steps shrink 2/grid below float64's resolution of the argument
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    for _ in range(60):
        if height(left) < height(right):
            low, left, right = left, right, left + _GOLDEN * (high - left)
        else:
            high, right, left = right, left, right - _GOLDEN * (right - low)
    return (low + high) / 2


def gradient_flow_rate(
    q: Tensor, *, true: int, label: int, f_prime: Derivative, risk_prime: Derivative = lambda q: -torch.ones_like(q)
) -> Tensor:
    """How fast one step on f at the label lowers the risk g(q_true) at the true token; larger is faster.

    <∇R, ∇L_f> = g'(q_y*) q_y* f'(q_y~) q_y~ <e_y* - q, e_y~ - q>, by default with g(q) = 1 - q

    >>> q = torch.tensor([0.75, 0.25])
    >>> gradient_flow_rate(q, true=0, label=0, f_prime=lambda p: -1 / p).item()
    0.09375

    Definition (Gradient Flow Rate), Eq. (app:61), for one context with orthonormal features; g nonincreasing.
    """
    p = _f64(q)
    toward_true, toward_label = _one_hot(true, p) - p, _one_hot(label, p) - p
    gates = gate_of(risk_prime, p[true]) * gate_of(f_prime, p[label])
    return gates * (toward_true * toward_label).sum()


def gradient_flow_rate_as_printed(q: Tensor, *, true: int, label: int, f_prime: Derivative) -> Tensor:
    """The same rate with the paper's v_* = +q_y*(e_y* - q), which is the gradient of *minus* the risk 1 - q_y*.

    q_y* q_y~ f'(q_y~) <e_y* - q, e_y~ - q>

    >>> q = torch.tensor([0.75, 0.25])
    >>> gradient_flow_rate_as_printed(q, true=0, label=0, f_prime=lambda p: -1 / p).item()
    -0.09375

    Eq. (app:67), (app:69); Theorem (Sufficient Condition for Objective Ordering). See `docs/errata.md`.
    """
    return gradient_flow_rate(q, true=true, label=label, f_prime=f_prime, risk_prime=torch.ones_like)
