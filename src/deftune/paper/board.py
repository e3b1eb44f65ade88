"""Scores by setting, case and objective, from the paper's tables or from a comparison of ours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from deftune.comparison.tables import LEVEL
from deftune.paper.printed import HALF_CENT, PaperTable, paper_methods, paper_sets, paper_tables, recomputed

SETTINGS: dict[str, tuple[int, str]] = {
    "strong": (1, "Avg"),
    "intermediate": (2, "Avg"),
    "weak": (3, "Jaro-Winkler"),
    "weak exact": (3, "Exact Match"),
    "mixed": (4, "Total-Avg"),
    "mixed general": (4, "General-Avg"),
    "mixed maths": (4, "MATH-Avg"),
    "ood": (5, "Avg"),
    "epochs": (6, "Avg"),
}
"""The settings that a board may have, each with its table and column of the paper."""

REGIMES = ("strong", "intermediate", "weak")
BASELINES = ("nll", "linear", "eaft")
OURS = ("cayley", "deft")  # the paper's two objectives
TUNED = (*BASELINES, *OURS)


@dataclass(frozen=True)
class Difference:
    """a minus b in points, its standard error (NaN: unknown), and whether it is taken to be more than chance."""

    value: float
    error: float
    decided: bool

    def __str__(self) -> str:
        return f"{self.value:+.2f}" + ("" if self.decided else " (undecided)")


class FocusPath(NamedTuple):
    """DEFT's mean focus in training: at the first step, after ``steps`` steps (the paper says four), at the end."""

    first: float
    early: float
    last: float
    steps: int = 4


class Board(Protocol):
    """Scores in per cent. A setting that a board does not have has no cases; a missing score is None.

    A case is a model, an epoch, or a regime of the study.
    """

    def cases(self, setting: str) -> Sequence[str]: ...

    def score(self, setting: str, case: str, objective: str) -> float | None: ...

    def difference(self, setting: str, case: str, a: str, b: str) -> Difference | None: ...

    def focus(self, setting: str) -> FocusPath | None: ...


# --- the paper's board ------------------------------------------------------------------------------------------------


class PaperBoard:
    """The printed numbers; a printed difference counts as decided, because the paper prints no standard errors.

    An average is the mean of its row, which is not the printed one once (Table 5, EAFT).
    """

    _methods: Mapping[str, str] = {objective: method for method, objective in paper_methods().items()}

    def _table(self, setting: str) -> tuple[PaperTable, str]:
        number, column = SETTINGS[setting]
        return paper_tables()[number], column

    def cases(self, setting: str) -> Sequence[str]:
        table, _ = self._table(setting)
        if setting == "epochs":
            return [f"epoch {n}" for n in dict.fromkeys(cell.epochs for cell in table.cells)]
        return table.models

    def _place(self, setting: str, case: str) -> tuple[str | None, int]:
        return (None, int(case.removeprefix("epoch "))) if setting == "epochs" else (case, 1)

    def score(self, setting: str, case: str, objective: str) -> float | None:
        table, column = self._table(setting)
        model, epochs = self._place(setting, case)
        try:
            cell = table.cell(self._methods[objective], column, model=model, epochs=epochs)
        except KeyError:  # Tables 5 and 6 have no untuned model
            return None
        if column in table.averages and abs(recomputed(table, cell) - cell.value) > HALF_CENT:
            return round(recomputed(table, cell), 2)
        return cell.value

    def difference(self, setting: str, case: str, a: str, b: str) -> Difference | None:
        first, second = self.score(setting, case, a), self.score(setting, case, b)
        if first is None or second is None:
            return None
        value = round(first - second, 2)
        return Difference(value, math.hypot(self._error(setting, case, a), self._error(setting, case, b)), decided=True)

    def _error(self, setting: str, case: str, objective: str) -> float:
        """The standard error, in points, of a macro average over sets of independent items; NaN where unknown."""
        table, column = self._table(setting)
        over = table.averages.get(column, ())
        sets = paper_sets()
        if not over or any(name not in sets for name in over):
            return math.nan
        model, epochs = self._place(setting, case)
        variance = 0.0
        for name in over:
            p = table.cell(self._methods[objective], name, model=model, epochs=epochs).value / 100
            variance += p * (1 - p) / sets[name].items
        return 100 * math.sqrt(variance) / len(over)

    def focus(self, setting: str) -> FocusPath | None:
        return None  # a figure, and some numbers in the text


# --- ours -------------------------------------------------------------------------------------------------------------


_MEASURED = {
    "strong": (("strong", "math", "average"),),
    "intermediate": (("intermediate", "choice", "average"),),
    "weak": (("weak", "figfont", "average"),),
    "weak exact": (("weak", "figfont", "figfont"),),
    "mixed": (("mixed", "choice", "average"), ("mixed", "math", "average")),
    "mixed general": (("mixed", "choice", "average"),),
    "mixed maths": (("mixed", "math", "average"),),
    "ood": (("strong", "choice", "average"),),
    "epochs": (),
}
"""Setting -> (regime, kind of tasks, column): what a comparison must have measured for it."""


class ComparisonBoard:
    """A comparison's summary (`summarize_comparison`): each objective at its own best learning rate and temperature.

    A difference is decided where its Holm-adjusted p-value is below 0.05.
    """

    def __init__(self, summary: Mapping[str, Any]):
        self._regimes: Mapping[str, Any] = summary["regimes"]

    def _views(self, setting: str) -> list[tuple[Mapping[str, Any], str]]:
        """(view, column) of everything that the setting is made of; [] where some of it was not measured."""
        found: list[tuple[Mapping[str, Any], str]] = []
        for regime, kind, column in _MEASURED[setting]:
            for evaluation in self._regimes.get(regime, {}).get("evaluations", []):
                kinds = {evaluation["kinds"][name] for name in evaluation.get("averaged", [])}
                if kinds == {kind} and evaluation["views"]:
                    found.append((evaluation["views"][-1], column))  # the best of a sweep, or the only one
                    break
        return found if len(found) == len(_MEASURED[setting]) else []

    def cases(self, setting: str) -> Sequence[str]:
        regimes = [regime for regime, _, _ in _MEASURED[setting]]
        return [self._regimes[regimes[0]]["model"]] if self._views(setting) else []

    def score(self, setting: str, case: str, objective: str) -> float | None:
        scores: list[float] = []
        for view, column in self._views(setting):
            if objective not in view["rows"] or column not in view["rows"][objective]["columns"]:
                return None
            scores.append(100 * view["rows"][objective]["columns"][column]["value"])
        return math.fsum(scores) / len(scores) if scores else None

    def difference(self, setting: str, case: str, a: str, b: str) -> Difference | None:
        parts: list[Difference] = []
        for view, column in self._views(setting):
            for record in view["differences"]:
                if record["column"] == column and {record["a"], record["b"]} == {a, b}:
                    sign = 1 if record["a"] == a else -1
                    error = record["standard_error"]
                    error = math.nan if error is None else 100 * error
                    parts.append(Difference(sign * 100 * record["difference"], error, record["p_holm"] < LEVEL))
        if not parts or len(parts) < len(_MEASURED[setting]):
            return None
        if len(parts) == 1:
            return parts[0]
        value = math.fsum(part.value for part in parts) / len(parts)
        error = math.sqrt(math.fsum(part.error**2 for part in parts)) / len(parts)
        return Difference(value, error, abs(value) > 1.96 * error)

    def focus(self, setting: str) -> FocusPath | None:
        found = self._regimes.get(setting, {}).get("focus")
        return FocusPath(*found) if found else None
