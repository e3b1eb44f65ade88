"""What is known about objectives: measured differences from NLL, and the paper's, by regime.

The rows are in ``evidence.json``, which `python -m benchmarks.study report` writes from the committed results of the
study, from earlier measurements and from the paper's tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from deftune.comparison.tables import LEVEL

NLL = "nll"
BEST, GREEDY, HOT = "best temperature", "greedy", "T = 1"  # measures


@dataclass(frozen=True)
class Evidence:
    """A difference of two objectives in points, with its 95% interval where one was recorded.

    ``score`` is the objective's own, in per cent. ``p_holm`` is the bootstrap's p-value after Holm, ``p_variance`` that
    of an analysis of variance. ``base_p`` and ``base_concentration`` are the untuned model's means on the data.
    ``source`` is study, comparison, first look, or paper. ``counts``: False where the scores show no knowledge of the
    task, so that no advice rests on the row.
    """

    regime: str
    model: str
    objective: str
    against: str
    measure: str
    difference: float
    seeds: int
    source: str
    where: str
    learning_rates: tuple[float, ...] = ()
    data: str = ""
    task: str = ""
    low: float | None = None
    high: float | None = None
    score: float | None = None
    p_holm: float | None = None
    p_variance: float | None = None
    base_p: float | None = None
    base_concentration: float | None = None
    note: str = ""
    counts: bool = True

    @property
    def measured(self) -> bool:
        """Whether the row was measured with deftune; otherwise it is the paper's claim."""
        return self.source != "paper"

    @property
    def cells(self) -> tuple[str, ...]:
        """Model, data, task and source: rows that agree in them can be compared."""
        return self.model, self.data, self.task, self.source

    @property
    def decided(self) -> int:
        """1: above, -1: below, 0: the interval holds 0, or a p-value is 0.05 or more, or there is no interval."""
        if self.low is None or self.high is None or any(p is not None and p >= LEVEL for p in self._p_values):
            return 0
        return 1 if self.low > 0 else -1 if self.high < 0 else 0

    @property
    def _p_values(self) -> tuple[float | None, float | None]:
        return self.p_holm, self.p_variance

    @property
    def interval(self) -> str:
        """The interval, and the p-value that leaves a difference undecided which the interval would decide."""
        if self.low is None or self.high is None:
            return ""
        text = f" [{self.low:+.1f}, {self.high:+.1f}]"
        if self.decided or self.low <= 0 <= self.high:
            return text
        names = ("after Holm", "by the analysis of variance")
        reasons = [f"p = {p:.2g} {name}" for p, name in zip(self._p_values, names) if p is not None and p >= LEVEL]
        return f"{text} ({', '.join(reasons)})"

    @property
    def short(self) -> str:
        """
        >>> Evidence("weak", "tiny (Q4)", "deft", "nll", HOT, 2.0, 1, "study", "here", data="FigFont").short
        'weak: +2.0 points from nll, T = 1 (tiny on FigFont, 1 seed)'
        """
        seeds = f"{self.seeds} seed{'s' * (self.seeds != 1)}"
        where = f"{self.model.split(' (')[0]} on {self.data}, {seeds}"
        points = f"{self.difference:+.1f} points{self.interval}"
        return f"{self.regime}: {points} from {self.against}, {self.measure} ({where})"

    def __str__(self) -> str:
        """
        >>> str(Evidence("weak", "tiny", "deft", "nll", HOT, 2.0, 1, "paper", "Table 3", low=1.0, high=3.0))
        'deft - nll: +2.0 points [+1.0, +3.0], T = 1; tiny; the paper, Table 3'
        """
        return together([self])

    @property
    def points(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"{self.difference:+.1f} points{self.interval}, {self.measure}{note}"

    @property
    def about(self) -> str:
        data = f" on {self.data}" if self.data else ""
        task = f", asked {self.task}" if self.task else ""
        rates = f", learning rate {', '.join(f'{rate:g}' for rate in self.learning_rates)}" if self.measured else ""
        seeds = f", {self.seeds} seed{'s' * (self.seeds != 1)}" if self.measured else ""
        source = f"the paper, {self.where}" if not self.measured else f"{self.source}: {self.where}"
        return f"{self.model}{data}{task}{seeds}{rates}; {source}"


def together(rows: Sequence[Evidence]) -> str:
    """Rows of two objectives that differ in their measure alone, as one text."""
    first = rows[0]
    return f"{first.objective} - {first.against}: {'; '.join(row.points for row in rows)}; {first.about}"


def grouped(rows: Iterable[Evidence]) -> list[list[Evidence]]:
    """The rows by what `together` says once, in their order."""
    found: dict[tuple[str, str, str], list[Evidence]] = {}
    for row in rows:
        found.setdefault((row.objective, row.against, row.about), []).append(row)
    return list(found.values())


@cache
def evidence() -> tuple[Evidence, ...]:
    """All rows, the measured ones first."""
    text = resources.files("deftune.comparison").joinpath("evidence.json").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = json.loads(text)
    for row in rows:
        row["learning_rates"] = tuple(row["learning_rates"])
    return tuple(Evidence(**row) for row in rows)
