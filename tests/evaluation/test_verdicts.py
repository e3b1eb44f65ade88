r"""Which answers are equal, pair by pair: the rules of the grader without its worker processes.

A label is decided from mathematics. Here each pair is a test of its own, in this process, so that
`benchmarks/mutation.py` knows which pairs execute a line; `test_grading` sends the same pairs through workers.
"""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from deftune.evaluation import grading_worker
from deftune.evaluation.answers import Rule, Verdict, drop_unit, join_thousands
from deftune.evaluation.grading import Grader, verdict_of
from deftune.evaluation.units import parse_unit, split_unit

pytest.importorskip("math_verify")
sys.path.insert(0, str(Path(__file__).parent))
from labelled_pairs import DIFFERENT, SAME, VERDICTS


class InThisProcess(Grader):
    """For trusted answers: no worker, no limits."""

    judge = None

    def _in_workers(self, pairs: Sequence[list]) -> list[Verdict]:
        self.judge = self.judge or grading_worker.make_judge()
        return [verdict_of(*self.judge(*pair)) for pair in pairs]


@pytest.fixture(scope="module")
def grader():
    logging.disable(logging.CRITICAL)  # math-verify logs what it parses
    with InThisProcess() as grader:
        yield grader
    logging.disable(logging.NOTSET)


def numbered(pairs):
    """Numbers for names: the LaTeX of a pair is no name that a command line takes."""
    return [pytest.param(*pair, id=str(number)) for number, pair in enumerate(pairs)]


@pytest.mark.parametrize("gold, answer, rule", numbered(DIFFERENT))
def test_different(gold, answer, rule: Rule, grader):
    assert not grader.grade([(gold, answer)], [rule])[0].correct


@pytest.mark.parametrize("gold, answer, rule", numbered(SAME))
def test_same(gold, answer, rule: Rule, grader):
    assert grader.grade([(gold, answer)], [rule])[0].correct


@pytest.mark.parametrize("gold, answer, correct, how", numbered(VERDICTS))
def test_how(gold, answer, correct, how, grader):
    (verdict,) = grader.grade([(gold, answer)])
    assert (verdict.correct, verdict.how) == (correct, how)


@pytest.mark.parametrize("gold, answer", [("2, 3", "2, 3.0001"), ("a=1, b=2", "a=1, b=2.0001"), ("5", "x=5.0004")])
def test_a_tolerance_is_named(gold, answer, grader):
    assert grader.grade([(gold, answer)], [Rule(relative=1e-4)]) == [Verdict(True, "tolerance")]


@pytest.mark.parametrize("tolerance", [{"relative": 1.0}, {"absolute": 1.5}, {"relative": -0.1}])
def test_a_tolerance_is_below_1(tolerance):
    with pytest.raises(ValueError, match="a tolerance is from 0 to below 1"):
        Rule(**tolerance)


@pytest.mark.parametrize(
    ("answer", "other", "joined"),
    [
        ("2,000 and 3,000", "2000, 3000", "2000 and 3000"), ("2,000 and 3,000", "200,300", "2000 and 3000"),
        ("2,000 and 3,000", "2, 0, 3, 0", "2,000 and 3,000"), ("2,000", "2000", "2,000"), ("2,000", "2, 0", "2,000"),
        ("(1,234), x", "x, (1,234)", "(1,234), x"),
    ],
)  # fmt: skip
def test_thousands_are_joined_where_the_other_answer_has_as_many_parts(answer, other, joined):
    assert join_thousands(answer, other) == joined


# --- units -----------------------------------------------------------------------------------------------------------

UNITS = {
    # numbers in words
    "2 hundred": (r"2 \times 10^{2}", ""),
    "7 thousand": (r"7 \times 10^{3}", ""),
    "3 million people": (r"3 \times 10^{6}", "people"),
    "2 billion": (r"2 \times 10^{9}", ""),
    "2 Trillion": (r"2 \times 10^{12}", ""),
    r"2 \text{ million people}": (r"2 \times 10^{6}", "people"),
    r"2 \text{ billion}": (r"2 \times 10^{9}", ""),
    "3million": ("3million", ""),
    "3 million xy": ("3 million xy", ""),
    # known units, with or without a space before them
    "5cm": ("5", "cm"),
    "5cm^2": ("5", "cm^2"),
    "60mph": ("60", "mph"),
    "5 K": ("5", "K"),
    "5K": ("5", "K"),
    "9.8 m s": ("9.8", "m s"),
    "5 kg K": ("5", "kg K"),
    "5 meters squared": ("5", "meters squared"),
    "5 m m": ("5", "m m"),
    # nouns: after a space, and of words that are no abbreviation
    "5 eggs": ("5", "eggs"),
    "5eggs": ("5eggs", ""),
    "5 cups of tea": ("5", "cups of tea"),
    "5 men at sea": ("5", "men at sea"),
    "5 eggs of it": ("5 eggs of it", ""),
    "5 xy": ("5 xy", ""),
    "5 xy/zz": ("5", "xy/zz"),
    "5 dollars a week": ("5", "dollars a week"),
    "5 a": ("5 a", ""),
    "5 x": ("5 x", ""),
    "3 x cm": ("3 x cm", ""),
    "3 x/cm": ("3 x/cm", ""),
    "3 xy cm": ("3 xy cm", ""),
    "5 a week": ("5", "a week"),
    # words that change the number
    "5 squared": ("5 squared", ""),
    "5 eggs squared": ("5 eggs squared", ""),
    "5 dozen eggs": ("5 dozen eggs", ""),
    "5 eggs and": ("5 eggs and", ""),
    "3 million and 4": ("3 million and 4", ""),
    # currencies
    r"\$5": ("5", "dollar"),
    "-$5": ("-5", "dollar"),
    "$-5": ("-5", "dollar"),
    "€5": ("5", "euro"),
    "£5": ("5", "pound"),
}


@pytest.mark.parametrize("answer", UNITS)
def test_units_are_split_off(answer):
    assert split_unit(answer, words=True) == UNITS[answer]


POWERS = {
    "square inches": {"inch": 2}, "sq ft": {"foot": 2}, "cubic metres": {"metre": 3}, "cu ft": {"foot": 3},
    "square feet per second": {"foot": 2, "second": -1}, "dollars a week": {"dollar": 1, "week": -1},
    "kg m^2/s^2": {"kilogram": 1, "metre": 2, "second": -2}, "m^-1": {"metre": -1}, "cm^{2}": {"centimetre": 2},
    "Meters squared": {"metre": 2}, "meters cubed": {"metre": 3}, "mph": {"mile": 1, "hour": -1}, "m²": {"metre": 2},
    "Sec": {"second": 1},
    **dict.fromkeys(["M", "MM", "Km", "m m", "^2", "squared", "square", "five eggs", ""]),
}  # fmt: skip


@pytest.mark.parametrize("unit", POWERS)
def test_units_are_powers_of_known_units(unit):
    assert parse_unit(unit) == POWERS[unit]


@pytest.mark.parametrize(
    ("answer", "unit", "bare"),
    [
        (r"4.2\%", "%", "4.2"), ("4.2%", "%", "4.2"), (r"90^\circ", r"^{\circ}", "90"), ("8 min", "min", "8"),
        (r"\frac{1}{2}", "km", r"\frac{1}{2}"), (r"5\,m", "km", r"5\,m"),
        ("km", "km", ""), ("12", "", "12"), (r"5 \text{ km}", "$km$", "5"),
    ],
)  # fmt: skip
def test_units(answer, unit, bare):
    assert drop_unit(answer, unit) == bare
