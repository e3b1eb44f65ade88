"""One test per entry of `docs/errata.md`: what the paper or its released code says, and what holds instead.

The printed numbers are those of `deftune.paper.printed`.
"""

import math

import pytest
import torch
from printed_shares import on_grid, truncated_on_grid
from torch import Tensor

from deftune.paper import duality, theory
from deftune.paper.printed import HALF_CENT, paper_sets, paper_tables

# --- Printed numbers --------------------------------------------------------------------------------------------------

METHODS = ("-logp", "-p", "EAFT", "Cayley", "DEFT")
TABLES = paper_tables()
MATH_SETS = {name: paper_sets()[name].items for name in TABLES[1].columns[:-1]}
MEDICAL_SETS = {name: paper_sets()[name].items for name in TABLES[2].columns[:-1]}


def rows_of(number: int) -> dict[tuple[str, str, int], tuple[float, ...]]:
    """(model, method, epochs) -> the printed row; the columns of the mathematical tables are in Table 1's order."""
    columns = TABLES[1].columns if number in (6, 8) else TABLES[number].columns
    found: dict[tuple[str, str, int], dict[str, float]] = {}
    for cell in TABLES[number].cells:
        method = cell.method.removesuffix("-Trans")
        found.setdefault((cell.model, method, cell.epochs), {})[cell.column] = cell.value
    return {key: tuple(row[column] for column in columns) for key, row in found.items()}


def marks_of(number: int, model: str, column: str) -> tuple[str | None, str | None]:
    """The (bold, underlined) methods of a column."""
    cells = [cell for cell in TABLES[number].cells if (cell.model, cell.column) == (model, column)]
    by_mark = {cell.mark: cell.method.removesuffix("-Trans") for cell in cells if cell.mark}
    return by_mark.get("bold"), by_mark.get("underline")


TABLE_1 = {(model, method): row for (model, method, _), row in rows_of(1).items()}
TABLE_2 = {(model, method): row for (model, method, _), row in rows_of(2).items() if method != "Base"}
TABLE_2_MARKS = {model: marks_of(2, model, "Avg") for model in TABLES[2].models}
TABLE_3_EXACT, TABLE_3_JARO_WINKLER = (  # Base, then the five methods
    {model: tuple(rows_of(3)[model, method, 1][place] for method in ("Base", *METHODS)) for model in TABLES[3].models}
    for place in (0, 1)
)
TABLE_3_MARKS = {model: marks_of(3, model, "Jaro-Winkler") for model in TABLES[3].models}
MIXED = "Qwen2.5-1.5B"
TABLE_4 = {
    name: tuple(rows_of(4)[MIXED, method, 1][place] for method in METHODS)
    for place, name in enumerate(("General", "MATH", "Total"))
}
TABLE_4_MARKS = {name: marks_of(4, MIXED, f"{name}-Avg") for name in TABLE_4}
TABLE_5, TABLE_7, TABLE_8 = ({method: row for (_, method, _), row in rows_of(n).items()} for n in (5, 7, 8))
TABLE_6 = {(method, epochs): row for (_, method, epochs), row in rows_of(6).items()}
MATH_ROWS = [*TABLE_1.values(), *TABLE_6.values(), *TABLE_8.values()]


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
