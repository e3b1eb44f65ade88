"""The paper's duality of loss and entropy: Tsallis entropies, the one-term score and the proper score, in float64.

The main text's theorem is about the one-term score, which is the loss itself and improper; the appendix's is about a
proper score whose gradient is not gate x error. `docs/errata.md` says what follows.
"""

import torch
from torch import Tensor

from deftune.paper.theory import deformed_log_loss, expm1_over, f64, one_hot, trust_gate


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
    terms = r * -expm1_over(excess, torch.log(r))
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
    return _excess_entropy(f64(r), q - 1)


def one_term_score(p_hat: Tensor, y: int, *, alpha: float) -> Tensor:
    """The score of the main text's theorem, which is the loss itself; improper for every α > 0.

    S_α(p̂, y) = (1 - p̂(y)^α)/α

    >>> one_term_score(torch.tensor([0.75, 0.25]), 1, alpha=0.5).item()
    1.0

    Theorem (Optimization-entropy duality), main text.
    """
    return deformed_log_loss(f64(p_hat)[y], alpha=alpha)


def expected_one_term_score(p_hat: Tensor, r: Tensor, *, alpha: float) -> Tensor:
    """The expectation of the one-term score for targets drawn from r.

    E_{y~r} S_α(p̂, y) = (1 - sum_y r(y) p̂(y)^α)/α

    >>> r = torch.tensor([0.6, 0.4], dtype=torch.float64)
    >>> round(expected_one_term_score(r, r, alpha=0.5).item(), 5)
    0.56452

    Theorem (Optimization-entropy duality), main text, second display.
    """
    r = f64(r)
    terms = r * deformed_log_loss(p_hat, alpha=alpha)
    return torch.where(r > 0, terms, torch.zeros_like(r)).sum()


def one_term_minimiser(r: Tensor, *, alpha: float) -> Tensor:
    """The prediction that minimises the expected one-term score: sharper than r, so the score is improper.

    p̂ ∝ r^{1/(1-α)} for α < 1; the mode of r for α >= 1 (the first of several)

    >>> one_term_minimiser(torch.tensor([0.6, 0.4], dtype=torch.float64), alpha=0.5).round(decimals=5).tolist()
    [0.69231, 0.30769]

    From the first-order condition r p̂^{α-1} = λ; for α >= 1 the expected score is concave, so a vertex wins.
    """
    r = f64(r)
    if alpha >= 1:
        return one_hot(int(r.argmax()), r)
    return torch.softmax(torch.log(r) / (1 - alpha), dim=-1)


def one_term_bayes_risk(r: Tensor, *, alpha: float) -> Tensor:
    """The least expected one-term score, by Hölder's inequality.

    min_p̂ E S_α = (1 - ||r||_{1/(1-α)})/α for α < 1, (1 - max r)/α for α >= 1; Shannon's entropy at α = 0

    >>> round(one_term_bayes_risk(torch.tensor([0.6, 0.4], dtype=torch.float64), alpha=0.5).item(), 5)
    0.55778

    What takes the place of the Tsallis entropy in the main text's theorem.
    """
    r = f64(r)
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
    p = f64(p_hat)
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
    return (1 + alpha) * one_term - alpha * _excess_entropy(f64(p_hat), alpha)


def tsallis_score_gradient(probs: Tensor, target: int, *, alpha: float) -> Tensor:
    """The logit gradient of the appendix's score: gate x error plus a term that does not see the target.

    dS_α/dz_i = (1+α) [p_y^α (p_i - δ_iy) + p_i (p_i^α - sum_j p_j^{1+α})]

    >>> tsallis_score_gradient(torch.tensor([0.5, 0.25, 0.25]), 0, alpha=1.0).tolist()
    [-0.375, 0.1875, 0.1875]

    Derived here from Lemma (Softmax Jacobian); the paper does not give it.
    """
    p = f64(probs)
    target_term = trust_gate(p[target], alpha=alpha) * (p - one_hot(target, p))
    powers = p ** (1 + alpha)
    return (1 + alpha) * (target_term + powers - p * powers.sum())
