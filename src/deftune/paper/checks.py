"""Readings of the paper's sentences that numbers can decide: functions of a board that return a verdict.

"Consistently": in every case; more than half is "in part". Where the paper says "comparable" without a threshold, two
averages are called so when they are within twice the standard error that the sets' sizes leave them (answers to
different items independent, the two models unpaired, which is generous).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from deftune.paper.board import BASELINES, OURS, REGIMES, TUNED, Board, Difference, PaperBoard
from deftune.paper.printed import HALF_CENT

Verdict = Literal["holds", "in part", "fails", "undecided", "not printed"]
Pair = tuple[str, str]
"""Two objectives a and b: a claim is about a minus b."""
Check = Callable[[Board], "Finding | None"]
"""None: the board lacks what the claim is about."""


@dataclass(frozen=True)
class Finding:
    verdict: Verdict
    because: str


# --- counting cases ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tally:
    """How often a was ahead of b, over cases and pairs."""

    ahead: int
    behind: int
    undecided: int
    details: tuple[str, ...]

    @property
    def cases(self) -> int:
        return self.ahead + self.behind + self.undecided

    def __str__(self) -> str:
        undecided = f", {self.undecided} undecided" if self.undecided else ""
        return f"ahead in {self.ahead} of {self.cases}{undecided}: {'; '.join(self.details)}"


def tally(board: Board, settings: Sequence[str], pairs: Sequence[Pair], *, margin: float = 0.0) -> Tally | None:
    """Every pair (a, b) in every case of the settings; None where the board lacks one of them.

    Ahead: a decided difference of more than ``margin`` points.
    """
    ahead = behind = undecided = 0
    details: list[str] = []
    for setting in settings:
        cases = board.cases(setting)
        if not cases:
            return None
        for a, b in pairs:
            found: list[str] = []
            for case in cases:
                difference = board.difference(setting, case, a, b)
                if difference is None:
                    return None
                if not difference.decided:
                    undecided += 1
                elif difference.value > margin:
                    ahead += 1
                else:
                    behind += 1
                found.append(f"{difference}")
            details.append(f"{setting}, {a} - {b}: {', '.join(found)}")
    return Tally(ahead, behind, undecided, tuple(details))


def verdict_of(ahead: int, behind: int, undecided: int, *, most: bool = False) -> Verdict:
    """Holds where every case is ahead, in part where more than half are; undecided where the open cases could do so.

    With ``most`` more than half are enough to hold.
    """
    half = (ahead + behind + undecided) / 2
    if (most and ahead > half) or behind == undecided == 0:
        return "holds"
    if behind == 0:
        return "undecided"
    if ahead > half:
        return "in part"
    return "undecided" if ahead + undecided > half else "fails"


def consistently(
    settings: Sequence[str], pairs: Sequence[Pair], *, margin: float = 0.0, most: bool = False
) -> Check:  # fmt: skip
    """Holds where a is ahead of b in every case; in part where in more than half of them."""

    def check(board: Board) -> Finding | None:
        found = tally(board, settings, pairs, margin=margin)
        return found and Finding(verdict_of(found.ahead, found.behind, found.undecided, most=most), str(found))

    return check


def mostly(settings: Sequence[str], pairs: Sequence[Pair]) -> Check:
    """Holds where a is ahead of b in more than half of the cases."""
    return consistently(settings, pairs, most=True)


def comparable(settings: Sequence[str], pairs: Sequence[Pair]) -> Check:
    """Holds where every difference is within twice its standard error; in part where more than half are."""

    def check(board: Board) -> Finding | None:
        details: list[str] = []
        near: list[bool] = []
        for setting, (a, b) in product(settings, pairs):
            for case in board.cases(setting):
                difference = board.difference(setting, case, a, b)
                if difference is None or math.isnan(difference.error):
                    return None
                near.append(abs(difference.value) <= 2 * difference.error)
                details.append(f"{case} {a} - {b} {difference.value:+.2f} (s.e. {difference.error:.2f})")
        if not near:
            return None
        verdict: Verdict = "holds" if all(near) else "in part" if sum(near) > len(near) / 2 else "fails"
        return Finding(verdict, f"within 2 s.e. in {sum(near)} of {len(near)}: {'; '.join(details)}")

    return check


def means(board: Board, setting: str, objectives: Iterable[str] = TUNED) -> dict[str, float] | None:
    """The mean over a setting's cases of each objective's score."""
    found: dict[str, float] = {}
    cases = board.cases(setting)
    for objective in objectives:
        scores = [board.score(setting, case, objective) for case in cases]
        known = [score for score in scores if score is not None]
        if not cases or len(known) < len(scores):
            return None
        found[objective] = math.fsum(known) / len(known)
    return found


def best_overall(settings: Sequence[str], objectives: Sequence[str], rivals: Sequence[str] = BASELINES) -> Check:
    """Holds where the mean over cases of each objective is above that of every rival, in every setting."""

    def check(board: Board) -> Finding | None:
        places: list[str] = []
        details: list[str] = []
        for setting in settings:
            scores = means(board, setting, dict.fromkeys([*rivals, *objectives]))
            if scores is None:
                return None
            details.append(f"{setting}: " + ", ".join(f"{name} {score:.2f}" for name, score in scores.items()))
            for objective in objectives:
                found = leads(board, setting, [(objective, rival) for rival in rivals])
                if found is None:
                    return None
                least = min(found, key=lambda lead: lead.value)
                error = "" if math.isnan(least.error) else f" (s.e. {least.error:.2f})"
                details.append(f"least lead of {objective} {least}{error}")
                places.append(place_of(found))
        won, lost, total = places.count("ahead"), places.count("behind"), len(places)
        return Finding(
            verdict_of(won, lost, total - won - lost), f"best in {won} of {total}; means {'; '.join(details)}"
        )

    return check


def leads(board: Board, setting: str, pairs: Iterable[Pair]) -> list[Difference] | None:
    """The mean over cases of a - b of every pair (a, b); None where a case lacks a difference.

    A mean is decided where it is for the only case, or by its errors for several.
    """
    means: list[Difference] = []
    for a, b in pairs:
        found = [board.difference(setting, case, a, b) for case in board.cases(setting)]
        known = [difference for difference in found if difference is not None]
        if not known or len(known) < len(found):
            return None
        value = math.fsum(d.value for d in known) / len(known)
        error = math.sqrt(math.fsum(d.error**2 for d in known)) / len(known)
        chance = not all(d.decided for d in known) and not abs(value) > 1.96 * error
        means.append(known[0] if len(known) == 1 else Difference(value, error, not chance))
    return means


def place_of(found: Sequence[Difference]) -> Literal["ahead", "behind", "open"]:
    """Ahead by all differences, behind by at least one, or neither is decided."""
    if all(lead.decided and lead.value > 0 for lead in found):
        return "ahead"
    return "behind" if any(lead.decided and lead.value <= 0 for lead in found) else "open"


def spreads(board: Board, setting: str) -> list[float] | None:
    """Best minus worst tuned objective, by case."""
    found: list[float] = []
    for case in board.cases(setting):
        scores = [board.score(setting, case, objective) for objective in TUNED]
        known = [score for score in scores if score is not None]
        if len(known) < len(scores):
            return None
        found.append(max(known) - min(known))
    return found or None


# --- claims with a check of their own ---------------------------------------------------------------------------------


def nearly_all_domains(board: Board) -> Finding | None:
    found = tally(board, ("strong", "intermediate", "weak", "mixed", "ood"), [("deft", "nll")])
    if found is None:
        return None
    margins: dict[str, float] = {}
    for regime in REGIMES:
        scores = means(board, regime, ("nll", "deft"))
        assert scores is not None  # the tally has them all
        margins[regime] = scores["deft"] - scores["nll"]
    order = min(margins["strong"], margins["weak"]) > margins["intermediate"]
    why = ", ".join(f"{name} {value:+.2f}" for name, value in margins.items())
    nearly = found.ahead > 0.8 * found.cases
    verdict: Verdict = "holds" if nearly and order else "in part" if order or nearly else "fails"
    if verdict != "holds" and found.undecided:
        verdict = "undecided"
    return Finding(verdict, f"{found}; mean margins {why}")


GAINS: dict[str, Verdict] = {"ahead": "in part", "behind": "fails", "open": "undecided"}
"""The verdict on gains that are not as large as stated, by `place_of`."""


def multi_epoch_gains(board: Board) -> Finding | None:
    cases = board.cases("epochs")
    averages = {name: [board.score("epochs", case, name) for case in cases] for name in ("nll", *OURS)}
    found = leads(board, "epochs", [(name, "nll") for name in OURS])
    if found is None or any(score is None for scores in averages.values() for score in scores):
        return None
    known = {name: [score for score in scores if score is not None] for name, scores in averages.items()}
    best = {name: max(known[name]) - max(known["nll"]) for name in OURS}
    mean = {name: (math.fsum(known[name]) - math.fsum(known["nll"])) / len(cases) for name in OURS}
    stated = {"cayley": 3.62, "deft": 1.46}
    as_means = all(abs(mean[name] - stated[name]) <= HALF_CENT for name in OURS)
    shown = "; ".join(
        f"{name} {mean[name]:+.3f} on average, {best[name]:+.2f} best epoch to best epoch" for name in OURS
    )
    return Finding("holds" if as_means else GAINS[place_of(found)], shown)


def small_differences(board: Board) -> Finding | None:
    strong, intermediate = spreads(board, "strong"), spreads(board, "intermediate")
    if strong is None or intermediate is None:
        return None
    why = (
        f"best minus worst average: intermediate {min(intermediate):.2f} to {max(intermediate):.2f}, "
        f"strong {min(strong):.2f} to {max(strong):.2f}"
    )
    return Finding("holds" if max(intermediate) < min(strong) else "fails", why)


def widening_gaps(board: Board) -> Finding | None:
    found = {regime: spreads(board, regime) for regime in REGIMES}
    known = {regime: math.fsum(values) / len(values) for regime, values in found.items() if values is not None}
    if len(known) < len(REGIMES):
        return None
    why = "mean of best minus worst: " + ", ".join(f"{regime} {value:.2f}" for regime, value in known.items())
    return Finding("holds" if known["weak"] > max(known["strong"], known["intermediate"]) else "fails", why)


def mixed_gains(board: Board) -> Finding | None:
    scores = means(board, "mixed", ("nll", "linear", "deft"))
    found = leads(board, "mixed", [("deft", "nll"), ("deft", "linear")])
    if scores is None or found is None:
        return None
    gains = {rival: 100 * (scores["deft"] / scores[rival] - 1) for rival in ("nll", "linear")}
    points = {rival: scores["deft"] - scores[rival] for rival in gains}
    stated = {"nll": 8.0, "linear": 3.5}
    agrees = all(abs(gains[rival] - stated[rival]) <= 0.05 + 1e-9 for rival in gains)
    verdict = "holds" if agrees else GAINS[place_of(found)]
    shown = "; ".join(f"over {rival} {gains[rival]:+.1f}% (relative), {points[rival]:+.2f} points" for rival in gains)
    return Finding(verdict, shown)


def lowest(setting: str, objective: str) -> Check:
    """Holds where the mean of every other tuned objective is above the objective's."""

    def check(board: Board) -> Finding | None:
        scores = means(board, setting)
        found = leads(board, setting, [(other, objective) for other in TUNED if other != objective])
        if scores is None or found is None:
            return None
        verdicts: dict[str, Verdict] = {"ahead": "holds", "behind": "fails", "open": "undecided"}
        return Finding(verdicts[place_of(found)], ", ".join(f"{name} {score:.2f}" for name, score in scores.items()))

    return check


def focus_while_training(board: Board) -> Finding | None:
    strong, weak = board.focus("strong"), board.focus("weak")
    if isinstance(board, PaperBoard):
        return Finding("not printed", "a figure; of the weak start the text says 0.04 and the caption 0.05")
    if strong is None or weak is None:
        return None
    rises = strong.first < strong.early < strong.last and weak.first < weak.last
    why = "; ".join(
        f"{name} {path.first:.2f}, {path.early:.2f} after {path.steps} steps, {path.last:.2f} at the end"
        for name, path in (("strong", strong), ("weak", weak))
    )
    return Finding("holds" if rises and strong.first > weak.first else "fails", why)


def a_figure(board: Board) -> Finding | None:
    return Finding("not printed", "a figure without numbers") if isinstance(board, PaperBoard) else None
