"""Agreement with math-verify's own labelled pairs, read from its sdist at run time; none of them is kept here."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("math_verify")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from published_pairs import agreement, download, make_pair, read_pairs


@pytest.mark.parametrize(
    "gold, text, taken",
    [
        ("4", r"so \boxed{4}", ("4", r"so \boxed{4}", False)),
        ("$x^2$", r"$x^2$.", ("x^2", r"\boxed{x^2}", False)),
        (r"\boxed{1},\boxed{2}", "The answer is 3.", ("1, 2", "The answer is 3.", True)),
        ("1", r"$1$ and $2$", ("1", r"$1$ and $2$", True)),
        ("1", r"\text{no} \frac{1}{2}", ("1", r"\boxed{\text{no} \frac{1}{2}}", False)),
    ],
)
def test_how_a_pair_is_written(gold, text, taken):
    pair = make_pair("here", gold, text, label=False)
    assert (pair.gold, pair.text, pair.prose) == taken


def test_a_pair_is_graded_as_an_answer_is():
    pairs = [make_pair("1", "1,-2", r"$\boxed{1}$ and $\boxed{-2}$", True), make_pair("2", "3", "So it is 4.", False)]
    pairs.append(make_pair("3", "5", "x = 6", True))
    agreed, [(pair, record)] = agreement(pairs)
    assert agreed == 2 and pair.where == "3" and record["score"] == 0.0


@pytest.mark.slow
def test_agreement(tmp_path):
    try:
        sdist = download(tmp_path)
    except ValueError as error:
        pytest.skip(str(error))
    pairs = read_pairs(sdist)
    assert len(pairs) >= 200, "the sdist's tests are written in another way now; read_pairs does not find them"
    _, misses = agreement(pairs)
    stated = [pair for pair in pairs if not pair.prose]
    wrong = [(pair, verdict) for pair, verdict in misses if not pair.prose]
    # docs/evaluation.md lists them: two decimal commas, golds of several boxes or of a whole solution, one wrong label
    assert len(wrong) <= 0.06 * len(stated), wrong
    assert not [pair for pair, _ in wrong if not pair.label], "an answer that is labelled wrong was credited"
