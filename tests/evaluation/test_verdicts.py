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
from deftune.evaluation.answers import Rule, Verdict
from deftune.evaluation.grading import Grader, verdict_of

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
