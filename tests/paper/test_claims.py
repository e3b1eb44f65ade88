"""The claims ledger: every verdict on the paper's own numbers, and how a board of ours is judged."""

import math
import subprocess
import sys

import pytest

from deftune.paper.board import SETTINGS, Difference, FocusPath, PaperBoard
from deftune.paper.checks import best_overall, comparable, consistently, lowest, mostly
from deftune.paper.claims import CLAIMS

PAPER = PaperBoard()
BY_NAME = {claim.name: claim for claim in CLAIMS}

VERDICTS = {
    "all-regimes": "fails",
    "nearly-all-domains": "holds",
    "robust-gains": "in part",
    "forgetting-grows": "not printed",
    "strong-linear": "holds",
    "strong-comparable": "in part",
    "strong-above-nll": "holds",
    "strong-eaft": "holds",
    "multi-epoch": "in part",
    "multi-epoch-order": "holds",
    "intermediate-comparable": "in part",
    "intermediate-above-linear": "holds",
    "intermediate-above-nll": "fails",
    "intermediate-small": "holds",
    "intermediate-math-region": "holds",
    "weak-gaps": "holds",
    "weak-above-linear": "holds",
    "weak-above-nll": "in part",
    "weak-linear-degrades": "holds",
    "weak-overcome": "in part",
    "weak-overall": "holds",
    "mixed-nll-maths": "holds",
    "mixed-linear-general": "holds",
    "mixed-best": "holds",
    "mixed-gains": "holds",
    "gradient-shares": "not printed",
    "tail-and-head": "not printed",
    "focus-trajectory": "not printed",
    "ood": "holds",
}


def test_every_claim_has_its_verdict():
    found = {claim.name: claim.check(PAPER) for claim in CLAIMS}
    assert {name: finding and finding.verdict for name, finding in found.items()} == VERDICTS
    assert len(found) == len(CLAIMS)  # names are unique
    assert all(finding and finding.because for finding in found.values())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("multi-epoch", ["cayley +4.425 on average, +3.62 best epoch", "deft +3.130 on average, +1.46 best epoch"]),
        ("intermediate-above-nll", ["ahead in 2 of 4", "+1.79, -1.12, +1.47, -0.42"]),
        ("mixed-gains", ["+8.0% (relative), +1.78 points", "+3.5% (relative), +0.81 points"]),
        ("ood", ["eaft 44.72", "least lead of cayley +0.14 (s.e. 0.88)"]),  # with the corrected average
        ("all-regimes", ["best in 2 of 6", "nll 40.48, linear 39.62, eaft 40.95, cayley 40.42, deft 40.91"]),
        ("weak-above-nll", ["+12.94, +19.85, +0.01, +46.81"]),
        ("strong-comparable", ["within 2 s.e. in 7 of 8", "Qwen2.5-Math-1.5B cayley - linear -6.13 (s.e. 2.57)"]),
    ],
)
def test_the_reason_gives_the_numbers(name, words):
    finding = BY_NAME[name].check(PAPER)
    assert finding is not None
    for word in words:
        assert word in finding.because


def test_the_papers_board():
    assert list(SETTINGS) == [s for s in SETTINGS if PAPER.cases(s)]
    assert PAPER.score("ood", "LLaMA-3.1-8B", "eaft") == 44.72
    assert PAPER.score("epochs", "epoch 3", "cayley") == 14.02
    assert PAPER.score("ood", "LLaMA-3.1-8B", "base") is None
    # ten sets of one greedy answer each: by hand
    difference = PAPER.difference("intermediate", "Qwen2.5-1.5B", "deft", "nll")
    assert difference is not None
    scores = {
        "deft": (37.84, 41.08, 69.50, 35.44, 34.62, 38.83, 39.61, 32.79, 12.42, 32.34),
        "nll": (38.85, 40.06, 68.80, 35.24, 32.56, 36.89, 36.69, 28.25, 9.94, 32.50),
    }
    sizes = (4183, 1273, 1000, 1535, 390, 412, 308, 308, 1449, 603)
    variance = sum(p / 100 * (1 - p / 100) / n for row in scores.values() for p, n in zip(row, sizes))
    assert math.isclose(difference.error, 10 * math.sqrt(variance))
    assert difference.value == 1.47


class Scores:
    """A board of one setting: scores by case, and whether differences are decided."""

    def __init__(self, cases, decided=True, error=1.0, focus=None):
        self._cases, self._decided, self._error, self._focus = cases, decided, error, focus or {}

    def cases(self, setting):
        return list(self._cases) if setting == "strong" else []

    def score(self, setting, case, objective):
        return self._cases[case].get(objective)

    def difference(self, setting, case, a, b):
        scores = self._cases[case]
        if a not in scores or b not in scores:
            return None
        return Difference(scores[a] - scores[b], self._error, self._decided)

    def focus(self, setting):
        return self._focus.get(setting)


def board(*leads, **options):
    """Cases where deft leads nll by these points."""
    return Scores({f"case {i}": {"nll": 50.0, "deft": 50.0 + lead} for i, lead in enumerate(leads)}, **options)


PAIR = (("strong",), [("deft", "nll")])


@pytest.mark.parametrize(
    ("leads", "decided", "consistent", "most"),
    [
        ((1, 2, 3), True, "holds", "holds"),
        ((1, 2, -3), True, "in part", "holds"),
        ((1, -2), True, "fails", "fails"),
        ((1, 0), True, "fails", "fails"),  # a tie is not ahead
        ((1, 2), False, "undecided", "undecided"),
    ],
)
def test_counting_cases(leads, decided, consistent, most):
    scores = board(*leads, decided=decided)
    assert consistently(*PAIR)(scores).verdict == consistent
    assert mostly(*PAIR)(scores).verdict == most


def test_a_margin_is_asked_for():
    assert consistently(*PAIR, margin=1.0)(board(2.0, 0.5)).verdict == "fails"
    assert consistently(*PAIR, margin=1.0)(board(2.0, 1.5)).verdict == "holds"


def test_comparable_is_within_two_errors():
    assert comparable(*PAIR)(board(1.9, -1.9)).verdict == "holds"
    assert comparable(*PAIR)(board(2.1, 0.0, 0.0)).verdict == "in part"
    assert comparable(*PAIR)(board(1.0, error=math.nan)) is None  # nothing to hold it against


def test_best_overall_is_about_means():
    check = best_overall(("strong",), ("deft",), ("nll",))
    assert check(board(5, -1)).verdict == "holds"
    assert check(board(-5, 1)).verdict == "fails"
    assert check(board(1, decided=False)).verdict == "undecided"
    assert check(board(3, 3, decided=False, error=1.0)).verdict == "holds"  # two cases together decide
    assert check(board(1, 1, decided=False, error=1.0)).verdict == "undecided"


@pytest.mark.parametrize(
    ("nll", "decided", "verdict"), [(40, True, "holds"), (60, True, "fails"), (40, False, "undecided")]
)
def test_the_lowest_is_below_every_other_by_a_decided_difference(nll, decided, verdict):
    scores = {"nll": nll, "linear": 50, "eaft": 51, "cayley": 52, "deft": 53}
    assert lowest("strong", "nll")(Scores({"case": scores}, decided=decided)).verdict == verdict


def test_scores_without_a_difference_decide_nothing():
    """Two objectives without a seed in common have scores, and nothing to compare."""

    class Apart(Scores):
        def difference(self, *_):
            return None

    assert best_overall(("strong",), ("deft",), ("nll",))(Apart({"case": {"nll": 50, "deft": 60}})) is None


def test_what_is_not_measured_has_no_verdict():
    """A board of NLL and DEFT in the strong regime answers what it can; a figure's claim stays open."""
    scores = board(1.0)
    answered = {claim.name for claim in CLAIMS if claim.check(scores) is not None}
    assert answered == set()  # every sentence is about more than this pair in this regime
    wide = Scores({"case": dict.fromkeys(("base", "nll", "linear", "eaft", "cayley", "deft"), 50.0)})
    answered = {claim.name for claim in CLAIMS if claim.check(wide) is not None}
    assert answered == {
        "strong-linear", "strong-comparable", "strong-above-nll", "strong-eaft", "intermediate-math-region"
    }  # fmt: skip


def test_focus_of_our_own_runs():
    claim = BY_NAME["focus-trajectory"]
    weak = FocusPath(0.1, 0.1, 0.4, steps=3)
    rising = claim.check(Scores({}, focus={"strong": FocusPath(0.6, 0.65, 0.8), "weak": weak}))
    falling = claim.check(Scores({}, focus={"strong": FocusPath(0.6, 0.55, 0.8), "weak": weak}))
    assert (rising.verdict, falling.verdict) == ("holds", "fails")
    assert rising.because == (
        "strong 0.60, 0.65 after 4 steps, 0.80 at the end; weak 0.10, 0.10 after 3 steps, 0.40 at the end"
    )
    assert claim.check(Scores({}, focus={"strong": FocusPath(0.6, 0.65, 0.8)})) is None


def test_the_ledger_and_the_printed_tables_need_no_torch():
    """`deftune paper claims` and `table` answer from the core's front door alone, at once."""
    code = (
        "import sys; from deftune.cli import main; main(['paper', 'claims']); main(['paper', 'table', '1']); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
