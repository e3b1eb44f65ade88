"""One test per entry of `docs/errata.md`: what the paper or its released code says, and what holds instead.

The printed numbers below are copied from the tables of arXiv 2602.11424 as they stand there.
"""

import math

import pytest
import torch
from printed_shares import on_grid, truncated_on_grid
from torch import Tensor

from deftune.paper import duality, theory

# --- Printed numbers --------------------------------------------------------------------------------------------------

METHODS = ("-logp", "-p", "EAFT", "Cayley", "DEFT")

# Table 1 (model-strong): Math500, Minerva, OlympiadBench, AIME24, AMC23, Avg
MATH_SETS = {"Math500": 500, "Minerva": 272, "OlympiadBench": 675, "AIME24": 30, "AMC23": 40}
TABLE_1 = {
    ("LLaMA-3.1-8B", "Base"): (1.76, 0.68, 0.86, 0.00, 1.25, 0.91),
    ("LLaMA-3.1-8B", "-logp"): (17.58, 6.15, 3.11, 0.00, 5.63, 6.49),
    ("LLaMA-3.1-8B", "-p"): (23.91, 9.91, 5.69, 0.62, 10.00, 10.03),
    ("LLaMA-3.1-8B", "EAFT"): (16.84, 6.20, 3.44, 0.00, 7.34, 6.76),
    ("LLaMA-3.1-8B", "Cayley"): (25.99, 10.46, 6.18, 0.21, 9.06, 10.38),
    ("LLaMA-3.1-8B", "DEFT"): (26.26, 10.21, 6.43, 1.03, 12.81, 11.35),
    ("DeepseekMath-7B", "Base"): (5.70, 2.89, 1.51, 0.00, 2.34, 2.49),
    ("DeepseekMath-7B", "-logp"): (28.48, 9.91, 6.65, 0.21, 8.75, 10.80),
    ("DeepseekMath-7B", "-p"): (39.52, 19.28, 14.51, 1.03, 17.18, 18.30),
    ("DeepseekMath-7B", "EAFT"): (27.70, 9.26, 6.96, 0.21, 11.09, 11.04),
    ("DeepseekMath-7B", "Cayley"): (39.03, 13.78, 12.26, 0.41, 16.72, 16.44),
    ("DeepseekMath-7B", "DEFT"): (40.90, 15.48, 12.63, 1.65, 20.31, 18.19),
    ("Qwen2.5-Math-1.5B", "Base"): (30.71, 8.81, 14.88, 2.49, 17.97, 14.97),
    ("Qwen2.5-Math-1.5B", "-logp"): (41.70, 11.81, 11.39, 1.45, 17.66, 16.80),
    ("Qwen2.5-Math-1.5B", "-p"): (63.48, 25.14, 26.37, 6.47, 39.22, 32.14),
    ("Qwen2.5-Math-1.5B", "EAFT"): (40.48, 11.86, 11.50, 0.41, 14.53, 15.76),
    ("Qwen2.5-Math-1.5B", "Cayley"): (56.04, 21.75, 21.96, 1.86, 28.44, 26.01),
    ("Qwen2.5-Math-1.5B", "DEFT"): (61.41, 24.13, 24.96, 5.63, 35.63, 30.35),
    ("Qwen2.5-Math-7B", "Base"): (40.38, 13.66, 16.36, 6.04, 24.69, 20.23),
    ("Qwen2.5-Math-7B", "-logp"): (52.93, 19.17, 17.75, 2.90, 24.53, 23.46),
    ("Qwen2.5-Math-7B", "-p"): (67.98, 28.46, 32.12, 9.38, 41.25, 35.84),
    ("Qwen2.5-Math-7B", "EAFT"): (51.53, 20.36, 17.54, 2.08, 25.47, 23.40),
    ("Qwen2.5-Math-7B", "Cayley"): (66.16, 31.70, 30.25, 7.09, 39.53, 34.95),
    ("Qwen2.5-Math-7B", "DEFT"): (68.78, 30.68, 32.19, 8.14, 42.97, 36.55),
}

# Table 2 (model-intermediate). The sizes are those that the printed scores imply.
MEDICAL_SETS = {
    "MedMc": 4183,
    "MedQA": 1273,
    "PubMed": 1000,
    "MMLU-P": 1535,
    "GPQA": 390,
    "Lancet": 412,
    "MedB(4)": 308,
    "MedB(5)": 308,
    "MedX": 1449,
    "NEJM": 603,
}
TABLE_2 = {
    ("LLaMA-3.1-8B", "-logp"): (55.08, 60.10, 72.70, 52.38, 36.66, 62.60, 46.75, 43.50, 15.87, 56.50, 50.21),
    ("LLaMA-3.1-8B", "-p"): (53.62, 53.62, 75.60, 53.74, 44.10, 58.25, 47.07, 40.26, 13.18, 58.21, 49.77),
    ("LLaMA-3.1-8B", "EAFT"): (55.13, 61.12, 75.10, 54.20, 34.62, 57.77, 53.25, 45.78, 16.91, 57.88, 51.18),
    ("LLaMA-3.1-8B", "Cayley"): (54.63, 62.14, 75.10, 54.59, 38.46, 57.52, 51.62, 45.78, 15.73, 59.20, 51.48),
    ("LLaMA-3.1-8B", "DEFT"): (54.77, 60.57, 76.00, 54.07, 44.87, 59.70, 50.97, 47.72, 14.08, 57.21, 52.00),
    ("LLaMA-3.2-3B", "-logp"): (42.22, 48.86, 66.60, 35.44, 32.82, 44.90, 45.13, 37.34, 12.56, 44.44, 41.03),
    ("LLaMA-3.2-3B", "-p"): (40.09, 43.36, 65.60, 34.07, 38.72, 42.72, 35.71, 33.44, 11.18, 38.31, 38.32),
    ("LLaMA-3.2-3B", "EAFT"): (43.61, 48.70, 68.20, 36.42, 36.15, 41.50, 36.69, 31.49, 11.46, 42.79, 39.70),
    ("LLaMA-3.2-3B", "Cayley"): (42.67, 46.43, 66.80, 37.65, 32.56, 45.63, 41.56, 35.71, 10.63, 39.30, 39.89),
    ("LLaMA-3.2-3B", "DEFT"): (42.31, 46.27, 66.20, 36.35, 33.08, 47.33, 39.94, 33.44, 11.73, 42.45, 39.91),
    ("Qwen2.5-1.5B", "-logp"): (38.85, 40.06, 68.80, 35.24, 32.56, 36.89, 36.69, 28.25, 9.94, 32.50, 35.98),
    ("Qwen2.5-1.5B", "-p"): (37.39, 39.75, 66.90, 35.70, 27.69, 41.75, 32.79, 31.17, 11.73, 38.97, 36.38),
    ("Qwen2.5-1.5B", "EAFT"): (39.85, 39.91, 68.90, 36.03, 40.77, 39.08, 35.06, 29.87, 10.70, 34.49, 37.47),
    ("Qwen2.5-1.5B", "Cayley"): (39.23, 39.75, 67.10, 35.44, 28.72, 39.56, 34.42, 26.30, 11.25, 32.17, 35.39),
    ("Qwen2.5-1.5B", "DEFT"): (37.84, 41.08, 69.50, 35.44, 34.62, 38.83, 39.61, 32.79, 12.42, 32.34, 37.45),
    ("Qwen2.5-Math-7B", "-logp"): (36.60, 34.96, 71.70, 36.35, 35.90, 37.14, 27.27, 29.22, 11.59, 26.30, 34.70),
    ("Qwen2.5-Math-7B", "-p"): (35.48, 33.54, 72.50, 39.15, 26.92, 39.32, 31.49, 23.05, 10.77, 28.03, 34.03),
    ("Qwen2.5-Math-7B", "EAFT"): (35.98, 35.19, 72.90, 37.39, 35.38, 37.14, 32.47, 30.19, 10.63, 27.36, 35.46),
    ("Qwen2.5-Math-7B", "Cayley"): (37.49, 33.62, 72.00, 37.52, 33.59, 39.56, 31.82, 25.65, 10.84, 27.03, 34.91),
    ("Qwen2.5-Math-7B", "DEFT"): (35.96, 33.70, 69.50, 35.60, 33.59, 36.65, 31.17, 31.17, 9.52, 25.90, 34.28),
}
TABLE_2_MARKS = {  # (bold, underlined) in the Avg column
    "LLaMA-3.1-8B": ("DEFT", "Cayley"),
    "LLaMA-3.2-3B": ("-logp", "DEFT"),
    "Qwen2.5-1.5B": ("DEFT", "EAFT"),
    "Qwen2.5-Math-7B": ("EAFT", "Cayley"),
}

# Table 3 (model-weak): Base, -logp, -p, EAFT, Cayley, DEFT
TABLE_3_EXACT = {
    "LLaMA-3.1-8B": (0.00, 0.00, 0.00, 0.00, 0.01, 1.56),
    "LLaMA-3.2-3B": (0.00, 0.00, 0.00, 0.00, 0.00, 3.91),
    "Qwen2.5-1.5B": (0.00, 0.00, 0.00, 0.00, 0.00, 0.00),
    "Qwen2.5-7B": (0.00, 0.78, 0.00, 47.66, 0.00, 42.97),
}
TABLE_3_JARO_WINKLER = {
    "LLaMA-3.1-8B": (30.17, 33.40, 14.26, 42.71, 36.95, 46.34),
    "LLaMA-3.2-3B": (41.89, 40.37, 7.68, 39.15, 46.55, 60.22),
    "Qwen2.5-1.5B": (35.32, 33.65, 28.13, 31.01, 34.21, 33.66),
    "Qwen2.5-7B": (44.92, 40.01, 27.13, 89.09, 34.41, 86.82),
}
TABLE_3_MARKS = {  # (bold, underlined) in the Jaro-Winkler rows
    "LLaMA-3.1-8B": ("DEFT", "EAFT"),
    "LLaMA-3.2-3B": ("DEFT", "Cayley"),
    "Qwen2.5-1.5B": ("Cayley", "DEFT"),
    "Qwen2.5-7B": ("EAFT", "DEFT"),
}

# Table 4 (mixed), without Base, and the marks that are printed
TABLE_4 = {
    "General": (34.79, 33.37, 34.52, 34.34, 35.98),
    "MATH": (9.73, 13.09, 10.34, 11.02, 12.09),
    "Total": (22.26, 23.23, 22.43, 22.68, 24.04),
}
TABLE_4_MARKS = {"General": ("DEFT", None), "MATH": (None, "DEFT"), "Total": ("DEFT", None)}

# Table 5 (out of domain): MedMc, MedQA, PubMed, MedX, MMLU-P, GPQA, Lancet, MedB(4), MedB(5), NEJM, Avg
TABLE_5 = {
    "-logp": (41.45, 50.51, 71.40, 13.18, 43.26, 42.56, 40.29, 43.83, 36.36, 48.59, 43.14),
    "-p": (46.31, 54.05, 74.20, 12.63, 43.06, 35.90, 47.82, 41.88, 33.12, 51.58, 44.06),
    "EAFT": (45.92, 52.08, 74.00, 12.22, 48.40, 39.49, 47.33, 43.51, 36.69, 47.60, 41.92),
    "Cayley": (45.49, 53.02, 77.50, 13.46, 45.67, 41.03, 48.54, 41.88, 32.79, 49.25, 44.86),
    "DEFT": (45.90, 53.57, 75.60, 13.94, 46.06, 43.59, 45.87, 45.13, 36.04, 47.76, 45.35),
}

# Table 6 (LLaMA-3.1-8B, epochs 1-4), columns put in Table 1's order
TABLE_6 = {
    ("-logp", 1): (17.58, 6.15, 3.11, 0.00, 5.63, 6.49),
    ("-logp", 2): (20.40, 9.20, 5.30, 0.00, 2.50, 7.48),
    ("-logp", 3): (27.20, 8.10, 6.70, 0.00, 10.00, 10.40),
    ("-logp", 4): (26.00, 7.70, 8.30, 0.00, 5.00, 9.40),
    ("-p", 1): (23.91, 9.90, 5.69, 0.62, 10.00, 10.02),
    ("-p", 2): (24.94, 8.21, 5.97, 0.00, 11.40, 10.10),
    ("-p", 3): (25.50, 8.72, 7.06, 0.41, 12.34, 10.81),
    ("-p", 4): (25.90, 8.74, 7.42, 0.00, 11.72, 10.76),
    ("EAFT", 1): (16.84, 6.20, 3.44, 0.00, 7.34, 6.76),
    ("EAFT", 2): (23.25, 8.78, 4.68, 0.00, 7.19, 8.78),
    ("EAFT", 3): (27.23, 10.46, 6.02, 0.41, 8.59, 10.54),
    ("EAFT", 4): (28.26, 10.59, 6.54, 0.41, 8.75, 10.91),
    ("Cayley", 1): (25.99, 10.46, 6.18, 0.21, 9.06, 10.38),
    ("Cayley", 2): (31.49, 12.27, 8.38, 0.83, 12.50, 13.09),
    ("Cayley", 3): (34.73, 13.76, 9.34, 0.41, 11.88, 14.02),
    ("Cayley", 4): (34.74, 13.70, 9.13, 0.62, 11.72, 13.98),
    ("DEFT", 1): (26.26, 10.21, 6.43, 1.03, 12.81, 11.35),
    ("DEFT", 2): (28.86, 10.40, 7.46, 0.62, 9.38, 11.34),
    ("DEFT", 3): (30.61, 9.81, 7.87, 1.03, 10.00, 11.86),
    ("DEFT", 4): (30.83, 10.23, 7.79, 0.62, 9.22, 11.74),
}

# Table 7 (mixed, General): HLE, MMLU-P, GPQA, MedMC, MedQA, PubMed, MedX, Lancet, MedB(4), MedB(5), Avg
TABLE_7 = {
    "-logp": (15.82, 33.94, 42.31, 40.09, 40.69, 65.00, 9.45, 38.83, 33.44, 25.97, 34.55),
    "-p": (17.09, 31.79, 24.87, 42.43, 39.12, 58.60, 10.28, 41.02, 35.06, 27.92, 32.82),
    "EAFT": (15.82, 35.57, 26.41, 41.45, 41.79, 65.40, 9.66, 43.45, 33.77, 25.32, 33.86),
    "Cayley": (16.46, 35.70, 34.36, 40.50, 41.24, 64.20, 9.94, 38.35, 35.39, 24.35, 34.05),
    "DEFT": (18.35, 35.77, 35.38, 40.14, 39.83, 64.90, 12.49, 45.39, 36.36, 30.52, 35.91),
}

# Table 8 (mixed, MATH), columns as in Table 1
TABLE_8 = {
    "-logp": (24.92, 8.06, 5.89, 0.41, 9.38, 9.73),
    "-p": (29.61, 10.33, 7.79, 0.21, 17.53, 13.09),
    "EAFT": (26.00, 6.20, 7.00, 0.00, 12.50, 10.34),
    "Cayley": (29.80, 11.00, 6.80, 0.00, 7.50, 11.02),
    "DEFT": (29.10, 9.79, 7.71, 0.41, 13.44, 12.09),
}
MATH_ROWS = [*TABLE_1.values(), *TABLE_6.values(), *TABLE_8.values()]

HALF_CENT = 0.005 + 1e-9  # half a unit of the second printed decimal, with room for binary fractions


def row_mean(row: tuple[float, ...]) -> float:
    return sum(row[:-1]) / len(row[:-1])


def best_two(scores: dict[str, float]) -> tuple[str, ...]:
    return tuple(sorted(scores, key=scores.__getitem__, reverse=True)[:2])


# --- Theorems ---------------------------------------------------------------------------------------------------------


def test_duality_is_false_for_the_one_term_score():
    """Theorem (Optimization-entropy duality), main text: the minimum is not at r and is not S_{1+α}(r)."""
    r = torch.tensor([0.6, 0.4], dtype=torch.float64)
    best = duality.one_term_minimiser(r, alpha=0.5)
    least = duality.expected_one_term_score(best, r, alpha=0.5)
    claimed = duality.tsallis_entropy(r, q=1.5)
    assert [round(x, 5) for x in (least.item(), claimed.item())] == [0.55778, 0.56452]
    assert torch.allclose(best, torch.tensor([9 / 13, 4 / 13], dtype=torch.float64), rtol=1e-14)  # r^2, normalised
    for alpha in (0.1, 0.5, 0.9, 1.0, 2.0):
        sharper = duality.expected_one_term_score(duality.one_term_minimiser(r, alpha=alpha), r, alpha=alpha)
        assert sharper < duality.expected_one_term_score(r, r, alpha=alpha) - 1e-4


def test_appendix_proves_it_for_another_score():
    """The restated theorem holds, for the three-term score: it differs from the loss and is least at r."""
    r = torch.tensor([0.6, 0.4], dtype=torch.float64)
    assert abs(duality.tsallis_score(r, 0, alpha=0.5) - duality.one_term_score(r, 0, alpha=0.5)) > 0.05
    for first in (0.3, 0.55, 0.59, 0.61, 0.65, 9 / 13, 0.9):
        p_hat = torch.tensor([first, 1 - first], dtype=torch.float64)
        assert duality.expected_tsallis_score(p_hat, r, alpha=0.5) > duality.tsallis_entropy(r, q=1.5)


def test_appendix_score_is_not_gate_times_error():
    """Its logit gradient over P_i - [i = y] would be one number, the gate, for every i; it is not."""
    probs = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    error = probs - torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    of_score = duality.tsallis_score_gradient(probs, 0, alpha=0.5) / error
    assert of_score.max() - of_score.min() > 0.1
    of_loss = theory.objective_gradient(lambda p: -(p**-0.5), probs, 0) / error
    assert of_loss.max() - of_loss.min() < 1e-15


def nll(p: Tensor) -> Tensor:
    return -1 / p


def linear(p: Tensor) -> Tensor:
    return -torch.ones_like(p)


STRONG = torch.tensor([0.9, 0.05, 0.05], dtype=torch.float64)  # confident, and right: y* = y~ = 0
WEAK = torch.full((3,), 1 / 3, dtype=torch.float64)


def rate_gain(rate, q: Tensor, *, true: int, label: int) -> float:
    """Rate of f_2 = -log p minus rate of f_1 = -p; d = f_2' - f_1' = 1 - 1/p <= 0 as the theorem supposes."""
    assert nll(q[label]) - linear(q[label]) <= 0
    first, second = (rate(q, true=true, label=label, f_prime=f) for f in (linear, nll))
    return (second - first).item()


def test_objective_ordering_flips_as_printed():
    """Eq. (app:67) is the gradient of q_y*, not of a risk: with it both inequalities of the theorem are reversed."""
    assert rate_gain(theory.gradient_flow_rate_as_printed, STRONG, true=0, label=0) < 0  # printed: >= 0
    assert rate_gain(theory.gradient_flow_rate_as_printed, WEAK, true=1, label=0) > 0  # printed: <= 0


def test_objective_ordering_corrected_favours_nll_at_the_strong_end():
    """With ∇R of a risk (1 - q or -log q) the printed inequalities hold, and they put NLL ahead at the strong end."""
    for risk_prime in (linear, nll):

        def rate(q: Tensor, *, true: int, label: int, f_prime, g=risk_prime) -> Tensor:
            return theory.gradient_flow_rate(q, true=true, label=label, f_prime=f_prime, risk_prime=g)

        assert rate_gain(rate, STRONG, true=0, label=0) > 0
        assert rate_gain(rate, WEAK, true=1, label=0) < 0


def test_objective_ordering_weak_flip_needs_wrong_labels():
    """With clean labels (y* = y~) NLL is faster at the weak end as well: the flip is about label noise."""
    assert rate_gain(theory.gradient_flow_rate, WEAK, true=0, label=0) > 0
    for p in torch.linspace(0.01, 0.99, 50, dtype=torch.float64):
        q = torch.stack([p, (1 - p) / 2, (1 - p) / 2])
        assert rate_gain(theory.gradient_flow_rate, q, true=0, label=0) > 0


def test_flow_rate_of_several_contexts_needs_orthogonal_features():
    """Eq. (app:69) takes <E v_*, E v_i> for E <v_*, v_i>; Φ(c)^T Φ(c) = I for each c does not give that."""
    q = [torch.tensor(x, dtype=torch.float64) for x in ([0.9, 0.1], [0.2, 0.8])]
    gradients = [theory.objective_gradient(nll, x, 0) for x in q]  # Φ(c) = I for both contexts: bias only
    of_means = torch.stack(gradients).mean(0).square().sum()
    mean_of = torch.stack([g.square().sum() for g in gradients]).mean()
    assert mean_of - of_means > 0.2


def test_sharpening_anchor_does_not_raise_pressure():
    """The "maximal gradient pressure" at α(1) = 1: p^α (1 - p) <= 1 - p for every α >= 0; only shares change."""
    p = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    for alpha in (0.0, 0.25, 1.0, 2.0):
        assert (theory.signal(theory.trust_gate(p, alpha=alpha), p) <= 1 - p).all()
    assert (theory.cayley_signal(p) < 1 - p).all()
    # at p = 0.99 the linear loss pushes less than NLL, and its share beside a token at 0.5 is larger all the same
    w = {a: [theory.signal(theory.trust_gate(x, alpha=a), x).item() for x in (0.5, 0.99)] for a in (0.0, 1.0)}
    assert w[1.0][1] < w[0.0][1]
    assert w[1.0][1] / sum(w[1.0]) > w[0.0][1] / sum(w[0.0])


# --- Tables -----------------------------------------------------------------------------------------------------------


def test_printed_averages_that_agree():
    """The control: every average of Tables 1, 2, 6, 7, 8 and the other rows of Table 5 is the mean of its row."""
    rows = [*MATH_ROWS, *TABLE_2.values(), *TABLE_7.values(), *(TABLE_5[m] for m in METHODS if m != "EAFT")]
    for row in rows:
        assert abs(row_mean(row) - row[-1]) <= HALF_CENT, row


def test_table_5_average_of_eaft():
    """Table 5: EAFT's ten scores average 44.72, printed 41.92; it comes third, not last."""
    assert round(row_mean(TABLE_5["EAFT"]), 2) == 44.72
    assert TABLE_5["EAFT"][-1] == min(row[-1] for row in TABLE_5.values())
    averages = {method: row_mean(row) for method, row in TABLE_5.items()}
    assert sorted(averages, key=averages.__getitem__, reverse=True) == ["DEFT", "Cayley", "EAFT", "-p", "-logp"]


def test_table_2_marks_are_swapped_for_qwen():
    """Table 2, Qwen2.5-1.5B: EAFT 37.47 beats DEFT 37.45, which is the bold one; the other models' marks are right."""
    wrong = set()
    for model, marks in TABLE_2_MARKS.items():
        if best_two({method: TABLE_2[model, method][-1] for method in METHODS}) != marks:
            wrong.add(model)
    assert wrong == {"Qwen2.5-1.5B"}


def test_table_2_medqa_repeats_medmc():
    """Table 2, LLaMA-3.1-8B, -p: MedQA 53.62 equals MedMc and is no k/1273, neither rounded nor truncated."""
    unexplained = []
    for (model, method), row in TABLE_2.items():
        for (name, size), value in zip(MEDICAL_SETS.items(), row):
            shown = (1, 2) if round(value, 1) == value else (2,)  # some cells carry one decimal and a zero
            if not any(on_grid(value, size, decimals=d) or truncated_on_grid(value, size, decimals=d) for d in shown):
                unexplained.append((model, method, name, value))
    assert unexplained == [("LLaMA-3.1-8B", "-p", "MedQA", 53.62)]
    assert TABLE_2["LLaMA-3.1-8B", "-p"][0] == 53.62


def test_table_2_deft_exceeds_nll_in_two_of_four():
    """Caption, "exceeds -log p in most cases": on two of the four models. "Consistently outperforms -p" holds."""
    models = list(TABLE_2_MARKS)
    ahead = [m for m in models if TABLE_2[m, "DEFT"][-1] > TABLE_2[m, "-logp"][-1]]
    assert ahead == ["LLaMA-3.1-8B", "Qwen2.5-1.5B"]
    assert all(TABLE_2[m, "DEFT"][-1] > TABLE_2[m, "-p"][-1] for m in models)


def test_table_3_marks_ignore_the_base_model():
    """Table 3: the marks rank the tuned models only; on Qwen2.5-1.5B the untuned one is best (35.32)."""
    for model, row in TABLE_3_JARO_WINKLER.items():
        assert best_two(dict(zip(METHODS, row[1:]))) == TABLE_3_MARKS[model]
    best = {model: max(range(6), key=row.__getitem__) for model, row in TABLE_3_JARO_WINKLER.items()}
    assert [model for model, column in best.items() if column == 0] == ["Qwen2.5-1.5B"]


def test_table_3_cayley_is_off_the_grid():
    """Table 3: exact-match scores are multiples of 1/128 in per cent, except Cayley's 0.01."""
    off = [(model, v) for model, row in TABLE_3_EXACT.items() for v in row if not on_grid(v, 128)]
    assert off == [("LLaMA-3.1-8B", 0.01)]


def test_table_4_marks():
    """Table 4: -p's MATH 13.09 is best and not bold; the second-best General (-logp) and Total (-p) carry no mark."""
    missing = {}
    for name, row in TABLE_4.items():
        for printed, true, kind in zip(TABLE_4_MARKS[name], best_two(dict(zip(METHODS, row))), ("best", "second")):
            if printed != true:
                missing[name, kind] = (printed, true)
    assert missing == {
        ("General", "second"): (None, "-logp"),
        ("MATH", "best"): (None, "-p"),
        ("Total", "second"): (None, "-p"),
    }


def test_table_4_general_averages_differ_from_table_7():
    """Table 4's General averages are not Table 7's; an eleventh set between 36 and 42 explains all five."""
    implied = []
    for general, method in zip(TABLE_4["General"], METHODS):
        assert abs(general - TABLE_7[method][-1]) > 0.06
        implied.append(11 * general - sum(TABLE_7[method][:-1]))
    assert [round(x, 2) for x in implied] == [37.15, 38.89, 41.08, 37.25, 36.65]
    for general, math_average, total in zip(*TABLE_4.values()):  # Total is the mean of Table 4's own two rows
        assert abs((general + math_average) / 2 - total) <= HALF_CENT


def test_tables_1_and_6_differ_in_one_row():
    """Tables 1 and 6: the first epoch of -p differs by 0.01 in Minerva and in the average; the other four agree."""
    for method in METHODS:
        once, epochs = TABLE_1["LLaMA-3.1-8B", method], TABLE_6[method, 1]
        changed = {i: round(a - b, 2) for i, (a, b) in enumerate(zip(once, epochs)) if a != b}
        assert changed == ({1: 0.01, 5: 0.01} if method == "-p" else {})


def test_table_8_amc_is_off_the_grid():
    """AMC23 has 40 questions, so avg@16 is some k/640: 17.53 (Table 8, -p) is none, neither rounded nor truncated."""
    values = [row[4] for row in MATH_ROWS]
    rounded = {v for v in values if on_grid(v, 640)}
    truncated = {v for v in values if v not in rounded and truncated_on_grid(v, 640)}
    assert truncated == {17.18, 11.40}  # Table 1, DeepSeekMath, -p; Table 6, -p, epoch 2
    assert set(values) - rounded - truncated == {17.53}


def test_aime_values_are_means_of_rounded_runs():
    """AIME24 has 30 questions: ten of 18 printed values are no k/480; all are means of 16 runs rounded to 0.1."""
    values = sorted({row[3] for row in MATH_ROWS})
    off = [v for v in values if not on_grid(v, 480)]
    assert off == [0.41, 1.03, 1.45, 1.65, 1.86, 2.49, 2.90, 6.47, 7.09, 8.14]
    runs = [round(1000 * k / 30) for k in range(12)]  # one run in tenths of a per cent: 0, 33, 67, 100, ...
    sums = {0}
    for _ in range(16):
        sums = {s + run for s in sums for run in runs if s + run <= 1600}
    assert all(any(abs(s / 160 - v) <= HALF_CENT for s in sums) for v in values)


def test_some_rows_are_single_runs():
    """Tables 6 and 8: five rows have one decimal throughout and lie on the grid of one run, beside avg@16 rows."""
    single = {}
    for label, table in (("Table 6", TABLE_6), ("Table 8", TABLE_8)):
        single[label] = [
            key
            for key, row in table.items()
            if all(round(v, 1) == v and on_grid(v, n, decimals=1) for v, n in zip(row, MATH_SETS.values()))
        ]
    assert single == {"Table 6": [("-logp", 2), ("-logp", 3), ("-logp", 4)], "Table 8": ["EAFT", "Cayley"]}


def test_average_improvement_compares_best_epochs():
    """The "average performance improvements of 3.62 and 1.46" compare best epochs; the means give 4.43 and 3.13."""
    averages = {m: [TABLE_6[m, epoch][-1] for epoch in (1, 2, 3, 4)] for m in METHODS}
    best = [round(max(averages[m]) - max(averages["-logp"]), 2) for m in ("Cayley", "DEFT")]
    assert best == [3.62, 1.46]
    means = [sum(a - b for a, b in zip(averages[m], averages["-logp"])) / 4 for m in ("Cayley", "DEFT")]
    assert [math.floor(100 * x + 0.5 + 1e-9) / 100 for x in means] == [4.43, 3.13]


# --- Released code ----------------------------------------------------------------------------------------------------


def released_cayley_focus(p: Tensor) -> Tensor:
    """The authors' `Cayley_Trans` on one micro-batch (without its 1e-8): z = 1 - p, half the mean as floor, a clamp."""
    floor = 0.5 * p.mean()
    z = 1 - p
    return (floor + (1 - floor) * (1 - z) / (1 + z)).clamp(1e-3, 1.0)


def test_released_cayley_is_not_the_papers():
    """Without the square root the focus is p/(2 - p), asymptotically p/2; with the floor α(0) is not 0."""
    p = torch.tensor([1e-6, 0.1, 0.5, 0.9], dtype=torch.float64)
    without_root = theory.moebius_focus(1 - p, kappa=1.0)
    assert torch.allclose(without_root, p / (2 - p), rtol=1e-9)
    assert math.isclose((without_root[0] / theory.cayley_focus(p[0])).item(), 2.0, rel_tol=1e-5)
    assert (without_root > theory.cayley_focus(p) + 1e-7).all()
    released = released_cayley_focus(p)
    assert released[0] > 0.18 and theory.cayley_focus(p[0]) < 1e-6  # the coverage anchor is given up ...
    assert theory.trust_gate(p[0], alpha=released[0]) < 0.1  # ... and the gate closes on an unlikely token
    assert theory.trust_gate(p[0], alpha=theory.cayley_focus(p[0])) > 0.99


def test_released_floor_depends_on_the_micro_batch():
    """The floor is a mean over the micro-batch: the same tokens split otherwise have other gates."""
    p = torch.tensor([0.05, 0.1, 0.8, 0.9], dtype=torch.float64)
    whole = released_cayley_focus(p)
    split = torch.cat([released_cayley_focus(half) for half in p.split(2)])
    gap = (theory.trust_gate(p, alpha=whole) - theory.trust_gate(p, alpha=split)).abs()
    assert gap.max() > 0.2


def test_released_epsilon_biases_loss_and_gate():
    """DEFT divides by α + 1e-6: at the least α of a 152,064-token vocabulary loss and gradient lose 13%."""
    alpha, p = 1 / 152064, torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    released = -(torch.exp(alpha * torch.log(p)) - 1) / (alpha + 1e-6)
    exact = theory.deformed_log_loss(p, alpha=alpha)
    assert 0.13 < 1 - (released / exact).item() < 0.14
    (g_released,), (g_exact,) = torch.autograd.grad(released, p), torch.autograd.grad(exact, p)
    assert 0.13 < 1 - (g_released / g_exact).item() < 0.14


def clipped(gradient: Tensor, limit: float = 1.0) -> Tensor:
    return gradient * min(1.0, limit / gradient.norm().item())


def test_released_gradients_are_summed_then_clipped():
    """Summed over M micro-batches the clip at 1.0 is one at 1/M: steps lose their relative size, and so their mean."""
    steps = [torch.tensor([0.8, 0.0]), torch.tensor([0.0, 0.2])]  # two steps' mean gradients, both below the limit
    averaged = sum(clipped(g) for g in steps)
    summed = sum(clipped(16 * g) for g in steps)  # M = 16 micro-batches per step
    assert torch.equal(averaged, torch.tensor([0.8, 0.2]))
    assert torch.allclose(summed, torch.tensor([1.0, 1.0]))  # both cut to length 1
    assert torch.cosine_similarity(averaged, summed, dim=0) < 0.9


def test_released_micro_batch_means_weight_tokens_unequally():
    """Each micro-batch is divided by its own token count: a token in a short one counts for more."""
    errors = torch.tensor([1.0, 0.0, 0.0, 0.0])
    sizes = [1, 3]
    mean_of_means = sum(part.mean() for part in errors.split(sizes)) / len(sizes)
    assert mean_of_means == 0.5 and errors.mean() == 0.25


@pytest.mark.parametrize(("dtype", "moves"), [(torch.bfloat16, False), (torch.float32, True)])
def test_released_bf16_adamw_loses_updates(dtype, moves):
    """A bf16 weight of 0.02 does not move under AdamW steps of 5e-5, the paper's rate; a float32 one does."""
    weight = torch.nn.Parameter(torch.full((4,), 0.02, dtype=dtype))
    start = weight.detach().clone()
    optimizer = torch.optim.AdamW([weight], lr=5e-5, betas=(0.9, 0.95), weight_decay=0.01)
    for _ in range(20):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert torch.equal(weight.detach(), start) is not moves
