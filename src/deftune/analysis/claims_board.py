"""Who is ahead, where: scores by setting, case and objective, from the paper's tables or from a comparison of ours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from deftune.analysis.paper import HALF_CENT, PaperTable, paper_methods, paper_sets, paper_tables, recomputed

SETTINGS: dict[str, str] = {
    "strong": "Table 1, averages by model",
    "intermediate": "Table 2, averages by model",
    "weak": "Table 3, Jaro-Winkler similarity by model",
    "weak exact": "Table 3, exact match by model",
    "mixed": "Table 4, Total-Avg",
    "mixed general": "Table 4, General-Avg",
    "mixed maths": "Table 4, MATH-Avg",
    "ood": "Table 5, averages recomputed from their rows",
    "epochs": "Table 6, averages by epoch",
}
"""What a board is asked about, and where the paper has it."""

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


class Board(Protocol):
    """Scores in per cent. What a board does not have is an empty list or None."""

    def cases(self, setting: str) -> Sequence[str]: ...

    def score(self, setting: str, case: str, objective: str) -> float | None: ...

    def difference(self, setting: str, case: str, a: str, b: str) -> Difference | None: ...

    def focus(self, setting: str) -> tuple[float, float, float] | None:
        """DEFT's mean focus in training: at the first step, after four, at the end."""
        ...


# --- the paper's board ------------------------------------------------------------------------------------------------

_COLUMNS = {
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


class PaperBoard:
    """The printed numbers, each difference taken as it stands.

    An average is the mean of its row, which is not the printed one once (Table 5, EAFT).
    """

    _methods: Mapping[str, str] = {objective: method for method, objective in paper_methods().items()}

    def _table(self, setting: str) -> tuple[PaperTable, str]:
        number, column = _COLUMNS[setting]
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

    def focus(self, setting: str) -> tuple[float, float, float] | None:
        return None  # a figure, and some numbers in the text
