"""The paper beside a comparison: its printed numbers, and its claims with our verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from deftune.comparison.show import view_table, views
from deftune.comparison.tables import AVERAGE, Printed, ResultTable
from deftune.paper.board import ComparisonBoard
from deftune.paper.claims import claim_records
from deftune.paper.printed import paper_methods, paper_sets, paper_tables
from deftune.paper.recipes import BACKBONES

Record = Mapping[str, Any]

# (regime, kind of the tasks) -> number of the paper's table
PAPER_TABLES = {
    ("strong", "math"): 1,
    ("intermediate", "choice"): 2,
    ("weak", "figfont"): 3,
    ("strong", "choice"): 5,
    ("mixed", "choice"): 7,
    ("mixed", "math"): 8,
}


def paper_model(name: str) -> str | None:
    """The paper's spelling of a model that it uses, by its hub id."""
    spellings = {model.lower(): model for table in paper_tables().values() for model in table.models}
    for key, backbone in BACKBONES.items():
        if backbone.hub == name:
            return spellings.get(key) or spellings.get(key.replace("deepseek-math", "deepseekmath"))
    return None


def tables_beside_paper(summary: Record, *, beside: str | None = None, rank_base: bool = False) -> list[ResultTable]:
    """The tables of a comparison's summary, with the paper's numbers where the paper has the same model and sets.

    Args:
        summary: what `summarize_comparison` returns.
        beside: a model of the paper; default: the comparison's own model, if the paper has it.
        rank_base: whether the untuned model can be best or second.

    Raises:
        ValueError: no table of the paper has ``beside`` and a set of this comparison.
    """
    found: list[ResultTable] = []
    for regime, about, evaluation, view in views(summary):
        table = view_table(regime, about["model"], evaluation, view, rank_base)
        kinds = {evaluation["kinds"][name] for name in evaluation["averaged"]}
        number = PAPER_TABLES.get((regime, next(iter(kinds)))) if len(kinds) == 1 else None
        model = beside or paper_model(about["model"])
        if number is not None and model is not None and model in paper_tables()[number].models:
            table = beside_paper(table, number, model=model, averaged=evaluation["averaged"])
        found.append(table)
    if beside is not None and not any(table.paper for table in found):
        raise ValueError(f"no table of the paper has {beside!r} and a set of this comparison")
    return found


def beside_paper(table: ResultTable, number: int, *, model: str, averaged: Sequence[str] | None = None) -> ResultTable:
    """``table``, whose columns are tasks and "average", with the cells of the paper's Table ``number``.

    A cell is comparable where our set has the paper's number of items; an average where all its sets are, and it is
    over the same ones. ``averaged``: the columns that ours is over (default: all).
    """
    source = paper_tables()[number]
    if model not in source.models:
        raise ValueError(f"Table {number} has no model {model!r}. Known: {', '.join(source.models)}")
    methods = {objective: method for method, objective in paper_methods().items()}
    columns = {about.column: name for name, about in paper_sets().items() if name in source.columns}
    paper: dict[str, dict[str, Printed]] = {}
    for objective, row in table.rows.items():
        if (method := methods.get(objective)) not in source.methods:
            continue
        assert method is not None
        cells: dict[str, Printed] = {}
        for task, name in columns.items():
            if task in row:
                printed = source.cell(method, name, model=model).printed
                cells[task] = Printed(printed, size_difference(row[task].items, paper_sets()[name].items))
        if AVERAGE in row and "Avg" in source.columns:
            over = [task for task, name in columns.items() if name in source.averages["Avg"]]
            ours = [column for column in averaged or table.columns if column in row and column != AVERAGE]
            parts = {
                "without": [task for task in over if task not in ours],
                "also over": [task for task in ours if task not in over],
                "other items in": [task for task in over if task in ours and cells[task].differs],
            }
            differs = "; ".join(f"{how} {', '.join(tasks)}" for how, tasks in parts.items() if tasks)
            cells[AVERAGE] = Printed(source.cell(method, "Avg", model=model).printed, differs)
        paper[objective] = cells
    note = f"The paper's numbers are of {model} (Table {number})."
    if source.samples is not None and source.samples > 1:
        note += f" They are means of {source.samples} answers to each item, at a temperature it does not state."
    return replace(table, paper=paper, notes=(*table.notes, note))


def size_difference(items: int | None, printed: int) -> str:
    """In what a set differs from the paper's; "" where it has as many items."""
    if items == printed:
        return ""
    return f"{'an unknown number of' if items is None else f'{items:,}'} items, the paper's set has {printed:,}"


def report_additions(summary: Record) -> tuple[list[ResultTable], dict[str, list[list[str]] | str]]:
    """The paper's part of a comparison's report: its numbers beside ours, and the claims that ours can decide."""
    records = [record for record in claim_records(ComparisonBoard(summary)) if record["ours"]]
    lines = [["claim", "read as", "paper's tables", "here"]]
    lines += [[f"“{r['quote']}” ({r['where']})", r["reading"], r["paper"], f"{r['ours']}: {r['ours_because']}"]
              for r in records]  # fmt: skip
    undecided = (
        "This comparison lacks the regimes or objectives of the paper's claims, so it decides none of them. "
        "`deftune paper claims` lists them."
    )
    return tables_beside_paper(summary), {"The paper's claims": lines if records else undecided}
