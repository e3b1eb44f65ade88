"""The paper's definitions and results as small functions, in float64.

Every function is one statement of *Gradients Must Earn Their Influence: Unifying SFT with Generalized Entropic
Objectives* (arXiv 2602.11424), cited by its title and, where it has one, by its LaTeX label. Nothing here is made for
training: these are the formulas that the objectives are tested against. `docs/theory.md` maps statement -> function ->
test; `docs/errata.md` says where the printed statement and the mathematics differ. The duality of loss and entropy is
in `deftune.paper.duality`.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Real = float | Tensor
Derivative = Callable[[Tensor], Tensor]


def f64(x: Real) -> Tensor:
    return torch.as_tensor(x, dtype=torch.float64)


def expm1_over(exponent: Real, log_x: Tensor) -> Tensor:
    """(x^e - 1)/e, and ln x at e = 0: the exact branch comes before e * ln x, where 0 * -inf would be NaN."""
    e = f64(exponent)
    divisor = torch.where(e == 0, torch.ones_like(e), e)
    t = divisor * log_x
    # below 1e-17 the factor (e^t - 1)/t = 1 + t/2 + ... rounds to 1, and a subnormal t would lose digits
    return torch.where((e == 0) | (t.abs() < 1e-17), log_x, torch.expm1(t) / divisor)


def one_hot(index: int, like: Tensor) -> Tensor:
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
    p = f64(probs)
    return torch.diag(p) - torch.outer(p, p)


def gate_of(f_prime: Derivative, p: Real) -> Tensor:
    """The gate of an objective f: what multiplies the error.

    s_f(p) = -f'(p) p

    >>> gate_of(lambda p: -1 / p, 0.25).item(), gate_of(lambda p: -torch.ones_like(p), 0.25).item()
    (1.0, 0.25)

    Lemma (General Objective Gradient), Eq. (app:9).
    """
    x = f64(p)
    return -f_prime(x) * x


def signal(gate: Real, p: Real) -> Tensor:
    """The size of the learning signal on the target's logit: gate x error.

    W_f(p) = s_f(p) (1 - p)

    >>> signal(0.5, 0.25).item()
    0.375

    Eq. (learning_signal); Lemma (General Objective Gradient), Eq. (app:10).
    """
    return f64(gate) * (1 - f64(p))


def objective_gradient(f_prime: Derivative, probs: Tensor, target: int) -> Tensor:
    """The logit gradient of f(p_target): gate x error, for every logit.

    dL_f/dz_i = s_f(p) (p_i - δ_iy)

    >>> objective_gradient(lambda p: -1 / p, torch.tensor([0.75, 0.25]), 1).tolist()
    [0.75, -0.75]

    Eq. (general_grad); Lemma (General Objective Gradient), Eq. (app:9).
    """
    p = f64(probs)
    return gate_of(f_prime, p[target]) * (p - one_hot(target, p))


# --- The deformed-log family ------------------------------------------------------------------------------------------


def q_log(x: Real, *, q: Real) -> Tensor:
    """The q-logarithm, the ordinary one at q = 1.

    ln_q(x) = (x^{1-q} - 1)/(1 - q)

    >>> q_log(4.0, q=0.5).item(), round(q_log(4.0, q=1.0).item(), 6)
    (2.0, 1.386294)

    Definition (q-logarithm), Eq. (app:17).
    """
    return expm1_over(1 - f64(q), torch.log(f64(x)))


def q_log_derivative(x: Real, *, q: Real) -> Tensor:
    """The derivative of the q-logarithm.

    d ln_q(x)/dx = x^{-q}

    >>> q_log_derivative(4.0, q=0.5).item()
    0.5

    Proposition (Continuity and limit properties of ln_q), Eq. (app:21).
    """
    return f64(x) ** -f64(q)


def deformed_log_loss(p: Real, *, alpha: Real) -> Tensor:
    """The negative q-log likelihood with q = 1 - α; NLL at α = 0, 1 - p at α = 1.

    L_α(p) = (1 - p^α)/α

    >>> [round(deformed_log_loss(0.25, alpha=a).item(), 6) for a in (0.0, 0.5, 1.0)]
    [1.386294, 1.0, 0.75]

    Eq. (example_alpha).
    """
    return -expm1_over(alpha, torch.log(f64(p)))  # not -q_log(p, q=1-α): 1 - (1 - α) would lose a small α


def trust_gate(p: Real, *, alpha: Real) -> Tensor:
    """The gate of the deformed-log family.

    G(p) = p^α

    >>> trust_gate(0.25, alpha=0.5).item()
    0.5

    Eq. (gate_error), Eq. (app:39e); Proposition (Gate interpolation between coverage and sharpening).
    """
    return f64(p) ** f64(alpha)


# --- Cayley: from geometry to the focus -------------------------------------------------------------------------------


def fisher_rao_radius(p: Real) -> Tensor:
    """The intrinsic uncertainty radius.

    z = sqrt(1 - p) = sin(d_FR(p, 1)/2)

    >>> fisher_rao_radius(0.75).item()
    0.5

    Definition (Fisher-Rao radius), Eq. (app:39) and (app:39d).
    """
    return torch.sqrt(1 - f64(p))


def fisher_rao_distance(p: Real) -> Tensor:
    """The Fisher-Rao distance of Bern(p) to certainty.

    d_FR(p, 1) = ∫_p^1 du/sqrt(u(1-u)) = 2 arccos(sqrt p)

    >>> round(fisher_rao_distance(0.25).item(), 6) == round(2 * math.pi / 3, 6)
    True

    Proposition (Fisher-Rao distance to certainty for Bernoulli), Eq. (app:39c).
    """
    # arccos(sqrt p) as an angle of (sqrt p, z): arccos itself loses half the digits near p = 1
    return 2 * torch.atan2(fisher_rao_radius(p), torch.sqrt(f64(p)))


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
    x = f64(z)
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
    return f64(p) / ((1 + z) * (1 + kappa * z))  # 1 - z = p/(1 + z): 1 - z itself cancels to 0 below p = 1e-16


def error_surprisal(p: Real) -> Tensor:
    """The information content of a prediction error.

    I_err = -ln(1 - p)

    >>> round(error_surprisal(0.5).item(), 6)
    0.693147

    Proposition (Normalized Surprisal Gating), Eq. (app:48).
    """
    return -torch.log1p(-f64(p))


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
    return f64(p) / 4


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
    return f64(probs).square().sum(dim=-1)


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
    p = f64(probs)
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
    return f64(p) ** 2 + (1 - f64(p)) ** 2 * f64(tail)


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
    p = f64(probs)[target]
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
    p = f64(q)
    toward_true, toward_label = one_hot(true, p) - p, one_hot(label, p) - p
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
