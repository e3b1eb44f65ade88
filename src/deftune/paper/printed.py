"""The paper's Tables 1 to 8 as data, digit by digit as printed.

`printed.json` holds every number of the tables of arXiv 2602.11424 with its bold and underline marks (the paper's TeX
source keeps all of them). Tables 3 and 4 print methods across; here, as everywhere, a row is a method. Sizes of the
sets are those that the printed scores imply: every score of a single greedy run is some k/n.

>>> cell = paper_tables()[5].cell("DEFT", "Avg")
>>> cell.printed, cell.value, cell.mark
('45.35', 45.35, 'bold')
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from deftune.comparison.tables import BASE, ResultTable, Score

Mark = Literal["bold", "underline"]

HALF_CENT = 0.005 + 1e-9  # half a unit of the second printed decimal, with room for binary fractions


@dataclass(frozen=True)
class PaperSet:
    """A column of scores: the task it is here, and the items behind the paper's numbers."""

    name: str
    task: str
    items: int

    @property
    def column(self) -> str:
        """What a column of our results is called: the task, or the task's similarity."""
        return f"{self.task} similarity" if self.name == "Jaro-Winkler" else self.task


@dataclass(frozen=True)
class Cell:
    """One printed number."""

    table: int
    model: str
    method: str
    epochs: int
    column: str
    printed: str
    mark: Mark | None

    @property
    def value(self) -> float:
        return float(self.printed)

    def __str__(self) -> str:
        epochs = f", epoch {self.epochs}" if self.table == 6 else ""
        return f"Table {self.table}, {self.model}, {self.method}{epochs}, {self.column}: {self.printed}"


@dataclass(frozen=True)
class PaperTable:
    """A table: cells by (model, method, epochs, column).

    ``averages``: average column -> the columns it is said to average. ``samples``: answers per item, None where the
    table prints averages only. ``as_printed``: what its lettering has otherwise.
    """

    number: int
    title: str
    regime: str
    suite: str | None
    samples: int | None
    columns: tuple[str, ...]
    averages: dict[str, tuple[str, ...]]
    cells: tuple[Cell, ...]
    as_printed: str = ""

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.model for cell in self.cells))

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.method for cell in self.cells))

    def cell(self, method: str, column: str, *, model: str | None = None, epochs: int = 1) -> Cell:
        """The cell; ``model`` may be left out of a table that has one."""
        if model is None:
            model, *others = self.models
            if others:
                raise ValueError(f"Table {self.number} has {len(self.models)} models: name one of {self.models}")
        for cell in self.cells:
            if (cell.model, cell.method, cell.epochs, cell.column) == (model, method, epochs, column):
                return cell
        raise KeyError(f"Table {self.number} has no cell {model}, {method}, epoch {epochs}, {column}")


@cache
def _content() -> dict[str, Any]:
    return json.loads(resources.files("deftune.paper").joinpath("printed.json").read_text(encoding="utf-8"))


def paper_sets() -> dict[str, PaperSet]:
    """The columns that are scores on a set, by their printed name."""
    return {name: PaperSet(name, **about) for name, about in _content()["sets"].items()}


def paper_methods() -> dict[str, str]:
    """A method as the paper writes it -> the objective here; the untuned model is "base"."""
    return dict(_content()["methods"])


@cache
def paper_tables() -> dict[int, PaperTable]:
    """The eight tables, by number."""
    tables: dict[int, PaperTable] = {}
    for raw in _content()["tables"]:
        columns = tuple(raw["columns"])
        cells = tuple(
            Cell(raw["number"], row["model"], row["method"], row["epochs"], column, printed,
                 row.get("marks", {}).get(column))
            for row in raw["rows"]
            for column, printed in zip(columns, row["cells"], strict=True)
        )  # fmt: skip
        averages = {name: tuple(over) for name, over in raw["averages"].items()}
        tables[raw["number"]] = PaperTable(
            raw["number"], raw["title"], raw["regime"], raw["suite"], raw["samples"], columns, averages, cells,
            raw.get("as_printed", ""),
        )  # fmt: skip
    return tables


# --- averages ---------------------------------------------------------------------------------------------------------


def recomputed(table: PaperTable, average: Cell) -> float:
    """The mean of the cells that a printed average is over."""
    over = table.averages[average.column]
    cells = [table.cell(average.method, column, model=average.model, epochs=average.epochs) for column in over]
    return math.fsum(cell.value for cell in cells) / len(cells)


def wrong_averages() -> list[tuple[Cell, float]]:
    """Printed averages that are not the mean of their row to the last digit, and that mean."""
    return [
        (cell, recomputed(table, cell))
        for table in paper_tables().values()
        for cell in table.cells
        if cell.column in table.averages and abs(recomputed(table, cell) - cell.value) > HALF_CENT
    ]


# --- as tables of results ---------------------------------------------------------------------------------------------


def printed_tables(number: int) -> list[ResultTable]:
    """A table of the paper, one for each model, or for each epoch; the marks are by our rule, not as printed."""
    if number not in paper_tables():
        raise ValueError(f"the paper has Tables 1 to 8, no Table {number}")
    table = paper_tables()[number]
    groups: dict[str, dict[str, dict[str, Score]]] = {}
    for cell in table.cells:
        group = cell.model + (f", epoch {cell.epochs}" if number == 6 else "")
        size = paper_sets()[cell.column].items if cell.column in paper_sets() else None
        method = BASE if cell.method == "Base" else cell.method
        groups.setdefault(group, {}).setdefault(method, {})[cell.column] = Score(cell.value, items=size)
    return [
        ResultTable(f"Table {number} of the paper: {table.title}, {group}", table.columns, rows)
        for group, rows in groups.items()
    ]
