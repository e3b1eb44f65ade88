"""Conflicts, row scores and rankings: against the formulas, and against the objectives themselves."""

import math

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from inspect_tables import END, OBJECTIVES, ROWS, make_inspection, make_tables

from deftune.inspection.inspect import (
    flags,
    habits,
    inspect_table,
    margin,
    reasons,
    stated_answer,
    summary,
)
from deftune.tokens.conflict import CONFIDENT, conflict
from deftune.tokens.table import rows_path, write_token_table

RIGHT, WRONG, PROSE = range(3)


def test_conflict_is_what_deft_takes_away(tmp_path, model, tokenizer, rows):
    """On every token of a real forward pass: 1 - gate:deft of the table."""
    path = tmp_path / "tokens.parquet"
    write_token_table(path, model, tokenizer, rows, objectives=["deft"])
    inspection = inspect_table(path)
    gate = pq.read_table(path)["gate:deft"].to_numpy()
    np.testing.assert_allclose(inspection.tokens["conflict"], 1 - gate, atol=1e-6)
    assert np.ptp(inspection.tokens["conflict"]) > 0.01  # they differ far more than the tolerance


def test_conflict_needs_a_sure_model():
    """The same p = 0.001: 0.999 where the rest is on one token, near 0 where it is spread."""
    sure, spread = conflict(torch.tensor([0.001, 0.001]).log(), torch.tensor([0.998, 0.001])).tolist()
    assert sure == pytest.approx(1 - 0.001**0.998) and spread == pytest.approx(1 - 0.001**0.001)


def test_margin_is_never_negative():
    assert margin(np.log([0.1, 0.9]), np.log([0.8, 0.05])).tolist() == pytest.approx([math.log(8), 0])


@pytest.mark.parametrize(
    ("pieces", "answer", "chosen"),
    [
        (["so ", "7", "2", " clips\n", "####", " 7", "2"], "72", [1, 2, 5, 6]),  # wherever it is said, over tokens
        (["17", "2 and ", "72", "\n#### ", "72"], "72", [2, 4]),  # not inside 172
        (["7.5, ", "75", "\n#### ", "7"], "7", [3]),  # nor before its decimals
        (["A is B", "\n\nAnswer: ", "B", ". Iron"], "B", [2]),  # a letter only where it is the answer
        (["x = ", "\\boxed{", "\\frac12", "}", " ok"], "\\frac12", [2]),
        (["Paris", "."], "Paris.", [0, 1]),  # a short line is all answer
        (["word "] * 13, None, []),
        (["a\n", "b"], None, []),
    ],
)
def test_stated_answer(pieces, answer, chosen):
    lengths = np.array([len(piece) for piece in pieces])
    found = stated_answer("".join(pieces), lengths, np.ones(len(pieces), dtype=bool))
    assert (found.answer, found.tokens.nonzero()[0].tolist()) == (answer, chosen)


def test_format_tokens_state_no_answer():
    pieces = ["Yes", "<|im_end|>"]
    found = stated_answer("".join(pieces), np.array([3, 10]), np.array([True, False]))
    assert (found.answer, found.tokens.tolist()) == ("Yes", [True, False])


def test_row_scores_are_their_formulas():
    inspection = make_inspection()
    for row, tokens in enumerate(ROWS):
        p, q = np.array([t[1] for t in tokens]), np.array([t[3] for t in tokens])
        nll, gap = -np.log(p), np.maximum(0, np.log(q / p))
        squares = p**2 + q**2 + (1 - p - q) ** 2 / 1000
        sure = 1 - p**squares >= CONFIDENT
        expected = {
            "conflict": (q * gap).mean(), "noise": nll[sure].sum() / nll.sum(), "mean_nll": nll.mean(),
            "max_nll": nll.max(), "mean_p": p.mean(),
        }  # fmt: skip
        for name, value in expected.items():
            assert inspection.scores[name][row] == pytest.approx(value, rel=1e-5), name
    assert inspection.scores["answer"][:2].tolist() == pytest.approx([0, math.log(0.98 / 0.001)], rel=1e-5)
    assert math.isnan(inspection.scores["answer"][PROSE])


def test_rankings():
    inspection = make_inspection()
    assert inspection.default_ranking == "answer"
    assert inspection.ranked_rows().tolist() == [WRONG, RIGHT, PROSE]  # no stated answer: last
    assert inspection.ranked_rows("max_nll").tolist()[0] == PROSE
    assert inspection.ranked_rows("mean_p").tolist()[0] == int(np.argmin(inspection.scores["mean_p"]))
    assert make_inspection(ROWS[2:]).default_ranking == "conflict"
    # a few short answers among prose: ranked by them, nearly all rows would have no score
    assert make_inspection([*ROWS[:1], *ROWS[2:] * 2]).default_ranking == "conflict"
    with pytest.raises(ValueError, match=r"unknown score 'loss'\. Known: answer, conflict, noise"):
        inspection.ranked_rows("loss")


def check_causes(inspection):
    """The token beside a score is where the score comes from, for every row and score."""
    p, q = np.exp(inspection.tokens["log_p"], dtype=float), np.exp(inspection.tokens["other_log_p"], dtype=float)
    gap, nll = np.maximum(0, np.log(q) - np.log(p)), -np.log(p)
    sure = inspection.tokens["conflict"] >= CONFIDENT
    for row in range(len(inspection.rows)):
        inside = np.arange(inspection.start[row], inspection.start[row + 1])
        tokens = {name: inspection.token_of(row, name) for name in inspection.scores}
        assert set(tokens.values()) <= set(inside.tolist())
        answer = inspection.scores["answer"][row]
        if np.isnan(answer):
            assert tokens["answer"] == tokens["conflict"] and inspection.score_of(row, "answer") == "conflict"
        else:
            assert inspection.answers[tokens["answer"]]
            assert gap[tokens["answer"]] == pytest.approx(answer, rel=1e-5, abs=1e-6)
        assert nll[tokens["max_nll"]] == pytest.approx(inspection.scores["max_nll"][row], rel=1e-5)
        for name, part in {"conflict": q * gap, "noise": nll * sure, "mean_nll": nll, "mean_p": -p}.items():
            assert part[tokens[name]] == pytest.approx(part[inside].max(), rel=1e-5), name


def test_the_token_shown_is_the_one_ranked_by(tmp_path, model, tokenizer, rows):
    louder = ("So", 1e-7, "The", 0.9999)  # a matter of style: it ranks no row by its answer, so it is not shown there
    inspection = make_inspection([[louder, *ROWS[WRONG]], [louder, *ROWS[RIGHT]], *ROWS])
    assert [inspection.texts[inspection.text[inspection.token_of(row, "answer")]] for row in (0, 1)] == ["7", "4"]
    assert inspection.texts[inspection.text[inspection.token_of(0, "max_nll")]] == "So"
    check_causes(inspection)
    write_token_table(tmp_path / "tokens.parquet", model, tokenizer, rows, objectives=["deft"])
    check_causes(inspect_table(tmp_path / "tokens.parquet"))


def test_a_score_without_confidence_is_explained_by_its_own_token():
    """A margin of 3.9 on the answer, no confident conflict there, and a louder token elsewhere."""
    rows = [
        [("So", 1e-7, "The", 0.9999), ("x", 0.9, "y", 0.01), ("\n#### ", 0.9, "\n", 0.05), ("5", 0.01, "4", 0.5), END]
    ]
    inspection = make_inspection(rows)
    assert inspection.scores["answer"][0] == pytest.approx(math.log(50), rel=1e-5)
    assert flags(inspection, 0) == ["noise"]
    assert reasons(inspection, 0, "answer") == [
        "stated answer '5': the model expects '4' (0.5), not '5' (0.01), margin 3.91",
        "77% of its loss sits on 1 confident conflict; the largest: 'The' (1), not 'So' (1e-07)",
    ]


def test_a_score_that_speaks_for_a_row_is_no_reason_against_it():
    """The model expects the stated answer, and half of the loss sits on a conflict elsewhere."""
    inspection = make_inspection([[("So", 1e-7, "The", 0.9999), *ROWS[RIGHT]]])
    assert inspection.scores["answer"][0] == 0 and flags(inspection, 0) == ["noise"]
    (only,) = reasons(inspection, 0, "answer")
    assert only.endswith("of its loss sits on 1 confident conflict; the largest: 'The' (1), not 'So' (1e-07)")


def test_reasons_say_what_is_expected_instead():
    inspection = make_inspection()
    assert reasons(inspection, RIGHT) == []
    assert reasons(inspection, WRONG) == [
        "stated answer '7': the model expects '6' (0.98), not '7' (0.001), margin 6.89",
        "85% of its loss sits on 1 confident conflict; the largest: '6' (0.98), not '7' (0.001)",
    ]
    assert reasons(inspection, PROSE) == []  # one conflict among much that is merely hard


@pytest.mark.parametrize(("row", "by", "text"), [
    (RIGHT, "answer", "stated answer '4': the model expects it; least likely in it: '4' (0.95)"),
    (RIGHT, "noise", "none of its loss sits on confident conflicts"),
    (PROSE, "answer", "states no answer; conflict 0.605; strongest: ' again' (0.99), not ' upon' (0.0005)"),
    (PROSE, "conflict", "conflict 0.605; strongest: ' again' (0.99), not ' upon' (0.0005)"),
    (PROSE, "max_nll", "NLL 7.6: ' again' (0.99), not ' upon' (0.0005)"),
    (PROSE, "mean_nll", "mean NLL 1.85; largest: ' again' (0.99), not ' upon' (0.0005)"),
    (RIGHT, "mean_p", "mean p 0.84; smallest: '2 + 2' (0.4)"),
])  # fmt: skip
def test_every_ranking_has_its_reason_first(row, by, text):
    assert reasons(make_inspection(), row, by)[0] == text


def test_summary_adds_up():
    inspection = make_inspection()
    found = summary(inspection)
    flat = [token for row in ROWS for token in row]
    p, q = np.array([t[1] for t in flat]), np.array([t[3] for t in flat])
    squares = p**2 + q**2 + (1 - p - q) ** 2 / 1000
    sure = 1 - p**squares >= CONFIDENT
    assert (found["rows"], found["tokens"], found["conflicts"]) == (3, len(flat), int(sure.sum())) == (3, 26, 2)
    assert (found["stated_answers"], found["contradicted_answers"], found["noisy_rows"]) == (2, 1, 1)
    gates = {"nll": np.ones_like(p), "linear": p, "deft": p**squares}
    for name, gate in gates.items():
        push = gate * (1 - p)
        assert found["share"][name] == pytest.approx(push[sure].sum() / push.sum(), rel=1e-4)
        assert found["gate"][name] == pytest.approx(gate[sure].mean(), rel=1e-4)
    assert found["share"]["deft"] < 0.01 < found["share"]["nll"]


def test_habits_count_conflicts_by_token():
    often = [("So", 0.001, "The", 0.99), ("x", 0.5, "y", 0.4), ("So", 0.001, "A", 0.99), ("So", 0.001, "The", 0.99)]
    inspection = make_inspection([[*often, ("So", 0.9, "The", 0.05)], [("x", 0.001, "z", 0.99)]])
    assert habits(inspection, 5) == [("So", 3, 4, "The"), ("x", 1, 2, "z")]
    assert habits(inspection, 1) == [("So", 3, 4, "The")]


def test_a_table_of_nothing_is_refused(tmp_path):
    path = tmp_path / "tokens.parquet"
    table, rows = make_tables()
    pq.write_table(table[:0], path)
    pq.write_table(rows[:0], rows_path(path))
    with pytest.raises(ValueError, match="holds no tokens"):
        inspect_table(path)


def test_a_table_without_the_gates_asked_for_is_refused(tmp_path):
    path = tmp_path / "tokens.parquet"
    table, rows = make_tables()
    pq.write_table(table, path)
    pq.write_table(rows, rows_path(path))
    assert inspect_table(path, ["deft"]).objectives == ["deft"]
    assert inspect_table(path).objectives == OBJECTIVES
    with pytest.raises(ValueError, match="has no gates of eaft, only of nll, linear, deft; make the table anew"):
        inspect_table(path, ["deft", "eaft"])


def test_rows_of_another_table_are_refused(tmp_path):
    path = tmp_path / "tokens.parquet"
    pq.write_table(make_tables()[0], path)
    pq.write_table(make_tables(ROWS[:2])[1], rows_path(path))
    with pytest.raises(ValueError, match="its rows' file is of another table"):
        inspect_table(path)


def test_multi_byte_text_keeps_its_places(tmp_path, model, tokenizer, rows):
    """Tokens that spell part of a character have no text; the pieces of a row still join to its answer."""
    path = tmp_path / "tokens.parquet"
    write_token_table(path, model, tokenizer, rows, objectives=["deft"])
    inspection = inspect_table(path)
    for row, line in enumerate(inspection.rows):
        first, last = inspection.start[row], inspection.start[row + 1]
        assert inspection.text_of(first, last) == line["answer"]
        assert inspection.row_of(int(first)) == inspection.row_of(int(last) - 1) == row
