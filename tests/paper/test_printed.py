"""The paper's tables: complete, as printed, and the exact list of what is wrong in them."""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache

import pytest
from printed_shares import on_grid, truncated_on_grid

from deftune.comparison.tables import best_and_second
from deftune.evaluation.suites import TASKS
from deftune.paper.printed import (
    HALF_CENT,
    Cell,
    Mark,
    PaperTable,
    paper_methods,
    paper_sets,
    paper_tables,
    wrong_averages,
)
from deftune.paper.recipes import CELLS, METHODS

TABLES = paper_tables()
TUNED = ("-logp", "-p", "EAFT", "Cayley-Trans", "DEFT")  # what the paper's marks rank: not the untuned model
CELLS_PRINTED = [cell for table in TABLES.values() for cell in table.cells]


@cache
def _rounded_runs(items: int, samples: int) -> frozenset[int]:
    """The sums that ``samples`` runs can have, each k/items in per cent rounded to 0.1, in tenths."""
    runs = sorted({round(1000 * k / items) for k in range(items + 1)})
    sums = 1
    for _ in range(samples):
        reached = 0
        for run in runs:
            reached |= sums << run  # a set of sums as the bits of one number
        sums = reached
    return frozenset(i for i in range(sums.bit_length()) if sums >> i & 1)


def from_rounded_runs(value: float, items: int, samples: int) -> bool:
    """Whether the mean of so many runs, each rounded to 0.1 first, prints as this value."""
    near = range(math.floor((value - 0.01) * 10 * samples), math.ceil((value + 0.01) * 10 * samples) + 1)
    sums = _rounded_runs(items, samples)
    return any(s in sums and abs(s / (10 * samples) - value) <= HALF_CENT for s in near)


GRIDS = {
    "rounded": "k/n to two decimals",
    "rounded runs": "a mean of 16 runs that were rounded to 0.1 first",
    "cut": "k/n cut after two decimals",
    "one decimal": "k/n to, or cut after, one decimal; a zero is printed behind it",
    "none": "no score of this set",
}


def grid_of(cell: Cell) -> str | None:
    """How a printed score comes from k correct answers: a key of `GRIDS`, the first that explains it.

    None for what is no count: averages and similarities. n is items x samples.
    """
    table, found = paper_tables()[cell.table], paper_sets().get(cell.column)
    if found is None or table.samples is None or cell.column == "Jaro-Winkler":
        return None
    value, total = cell.value, found.items * table.samples
    if on_grid(value, total):
        return "rounded"
    if table.samples > 1 and from_rounded_runs(value, found.items, table.samples):
        return "rounded runs"
    if truncated_on_grid(value, total):
        return "cut"
    if cell.printed.endswith("0") and (
        on_grid(value, found.items, decimals=1) or truncated_on_grid(value, found.items, decimals=1)
    ):
        return "one decimal"
    return "none"


@dataclass(frozen=True)
class MarkMismatch:
    """A column of a model's block whose marks are not its two best tuned methods."""

    table: int
    model: str
    column: str
    printed: dict[Mark, tuple[str, ...]]
    expected: dict[Mark, tuple[str, ...]]


def wrong_marks() -> list[MarkMismatch]:
    """Where bold is not the best, or underlined not the second best, of the tuned methods.

    Columns without any mark are left alone, and so is a second place shared by several: the paper marks neither.
    Table 6 marks the best average of all epochs only, and is checked for that.
    """
    found: list[MarkMismatch] = []
    for table in paper_tables().values():
        for model in table.models:
            for column in table.columns:
                cells = [c for c in table.cells if (c.model, c.column) == (model, column) and c.method in TUNED]
                printed = {c: c.mark for c in cells if c.mark}
                if not printed:
                    continue
                best, second = best_and_second({f"{c.method}/{c.epochs}": c.value for c in cells})
                if len(second) > 1 or table.number == 6:
                    second = set[str]()
                expected = {("bold", name) for name in best} | {("underline", name) for name in second}
                if expected != {(mark, f"{c.method}/{c.epochs}") for c, mark in printed.items()}:
                    shown: dict[Mark, tuple[str, ...]] = {
                        mark: tuple(c.method for c, m in printed.items() if m == mark) for mark in ("bold", "underline")
                    }
                    right: dict[Mark, tuple[str, ...]] = {
                        mark: tuple(c.method for c in cells if (mark, f"{c.method}/{c.epochs}") in expected)
                        for mark in ("bold", "underline")
                    }
                    found.append(MarkMismatch(table.number, model, column, shown, right))
    return found


def rows_of(table: PaperTable) -> list[tuple[Cell, ...]]:
    """The rows of a table, in the printed order."""
    width = len(table.columns)
    return [table.cells[start : start + width] for start in range(0, len(table.cells), width)]


def test_every_table_is_whole():
    """(models, rows, columns) of each table, and 734 numbers in all, each with two decimals."""
    shapes = {n: (len(t.models), len(rows_of(t)), len(t.columns)) for n, t in TABLES.items()}
    assert shapes == {
        1: (4, 24, 6), 2: (4, 24, 11), 3: (4, 24, 2), 4: (1, 6, 3),
        5: (1, 5, 11), 6: (1, 20, 6), 7: (1, 5, 11), 8: (1, 5, 6),
    }  # fmt: skip
    assert len(CELLS_PRINTED) == 734
    assert all(cell.printed == f"{cell.value:.2f}" and 0 <= cell.value <= 100 for cell in CELLS_PRINTED)
    keys = {(c.table, c.model, c.method, c.epochs, c.column) for c in CELLS_PRINTED}
    assert len(keys) == 734


def test_rows_are_methods_of_one_model_in_order():
    for table in TABLES.values():
        assert set(table.methods) - {"Base"} == set(TUNED)
        for row in rows_of(table):
            assert tuple(cell.column for cell in row) == table.columns
            assert len({(cell.model, cell.method, cell.epochs) for cell in row}) == 1


def test_marks_are_counted():
    marks = Counter((cell.table, cell.mark) for cell in CELLS_PRINTED if cell.mark)
    assert marks == {
        (1, "bold"): 4, (1, "underline"): 9, (2, "bold"): 4, (2, "underline"): 4, (3, "bold"): 7, (3, "underline"): 6,
        (4, "bold"): 2, (4, "underline"): 1, (5, "bold"): 1, (5, "underline"): 1, (6, "bold"): 1,
        (7, "bold"): 1, (7, "underline"): 1, (8, "bold"): 1, (8, "underline"): 1,
    }  # fmt: skip


def test_names_agree_with_the_rest_of_the_package():
    """Methods are the recipes' methods, columns our tasks; sizes the tasks', but FigFont's, which the grid refutes."""
    assert {method: name for method, name in paper_methods().items() if name != "base"} == {
        paper: objective for objective, paper in METHODS.items()
    }
    assert {f"Table {n}" for n in TABLES} == set(CELLS)
    for table in TABLES.values():
        assert len(table.models) == len(CELLS[f"Table {table.number}"].backbones)
        assert table.regime == CELLS[f"Table {table.number}"].regime
    differing = {s.name for s in paper_sets().values() if TASKS[s.task].size != s.items}
    assert differing == {"Exact Match", "Jaro-Winkler"}


def test_a_cell_is_found_or_named():
    assert TABLES[2].cell("DEFT", "Avg", model="LLaMA-3.1-8B").printed == "52.00"
    assert TABLES[6].cell("Cayley-Trans", "Avg", epochs=3).mark == "bold"
    with pytest.raises(ValueError, match="Table 2 has 4 models: name one of"):
        TABLES[2].cell("DEFT", "Avg")
    with pytest.raises(KeyError, match=r"Table 5 has no cell LLaMA-3\.1-8B, Base"):
        TABLES[5].cell("Base", "Avg")


def test_one_average_is_wrong():
    """All 89 averages recomputed: Table 5's EAFT is printed 41.92, its row averages 44.72."""
    averages = [cell for table in TABLES.values() for cell in table.cells if cell.column in table.averages]
    assert len(averages) == 24 + 24 + 6 + 5 + 20 + 5 + 5
    assert [(str(cell), round(mean, 2)) for cell, mean in wrong_averages()] == [
        ("Table 5, LLaMA-3.1-8B, EAFT, Avg: 41.92", 44.72)
    ]


def test_table_4_repeats_table_8_and_not_table_7():
    for method in TUNED:
        assert TABLES[4].cell(method, "MATH-Avg").printed == TABLES[8].cell(method, "Avg").printed
        assert TABLES[4].cell(method, "General-Avg").printed != TABLES[7].cell(method, "Avg").printed


def test_the_wrong_marks():
    found = [(m.table, m.model, m.column, m.printed, m.expected) for m in wrong_marks()]
    sets = ("Math500", "Minerva Math", "Olympiad Bench", "AIME24", "AMC23")
    assert found == [
        *[
            (1, "Qwen2.5-Math-1.5B", name, {"bold": (), "underline": ("DEFT",)},
             {"bold": ("-p",), "underline": ("DEFT",)})
            for name in sets
        ],
        (2, "Qwen2.5-1.5B", "Avg", {"bold": ("DEFT",), "underline": ("EAFT",)},
         {"bold": ("EAFT",), "underline": ("DEFT",)}),
        (4, "Qwen2.5-1.5B", "General-Avg", {"bold": ("DEFT",), "underline": ()},
         {"bold": ("DEFT",), "underline": ("-logp",)}),
        (4, "Qwen2.5-1.5B", "MATH-Avg", {"bold": (), "underline": ("DEFT",)},
         {"bold": ("-p",), "underline": ("DEFT",)}),
        (4, "Qwen2.5-1.5B", "Total-Avg", {"bold": ("DEFT",), "underline": ()},
         {"bold": ("DEFT",), "underline": ("-p",)}),
    ]  # fmt: skip


def test_base_is_the_best_of_one_marked_column():
    """The marks rank tuned models; counting the untuned one too, one of the 32 marked columns changes hands."""
    changed: list[tuple[int, str, str]] = []
    for table in TABLES.values():
        for model in table.models:
            for column in table.columns:
                cells = [c for c in table.cells if (c.model, c.column) == (model, column)]
                best = max(cells, key=lambda c: c.value)
                if any(c.mark for c in cells) and best.method == "Base":
                    changed.append((table.number, model, column))
    assert changed == [(3, "Qwen2.5-1.5B", "Jaro-Winkler")]


def test_scores_lie_on_their_sets_grid():
    """Every one of 609 scores is explained by k right answers of n, but three."""
    by_grid: dict[str, list[str]] = {}
    for cell in CELLS_PRINTED:
        if (how := grid_of(cell)) is not None:
            by_grid.setdefault(how, []).append(str(cell))
    assert by_grid["none"] == [
        "Table 2, LLaMA-3.1-8B, -p, MedQA: 53.62",
        "Table 3, LLaMA-3.1-8B, Cayley-Trans, Exact Match: 0.01",
        "Table 8, Qwen2.5-1.5B, -p, AMC23: 17.53",
    ]
    assert {how: len(cells) for how, cells in by_grid.items()} == {
        "rounded": 543, "rounded runs": 49, "cut": 8, "one decimal": 6, "none": 3,
    }  # fmt: skip
    cut = [cell for cell in by_grid["cut"] if not cell.startswith("Table 2, LLaMA-3.1-8B")]
    assert cut == [
        "Table 1, DeepseekMath-7B, -p, AMC23: 17.18",
        "Table 6, LLaMA-3.1-8B, -p, epoch 2, AMC23: 11.40",
    ]
    assert {name.split(", ")[-1].split(":")[0] for name in by_grid["rounded runs"]} == {"AIME24", "Minerva Math"}


def test_no_other_size_of_figfont_fits():
    """Table 3's exact matches are multiples of 1/128; of 5,000 items 3.91 and 42.97 could not come."""
    values = {c.value for c in TABLES[3].cells if c.column == "Exact Match"} - {0.01}
    assert {v for v in values if abs(v / 100 * 5000 - round(v / 100 * 5000)) > 0.26} == {3.91, 42.97}


def test_means_of_rounded_runs():
    assert from_rounded_runs(0.41, 30, 16)  # 2 of 480 is 0.4167; two runs of 3.3 over 16 are 0.4125
    assert not from_rounded_runs(0.50, 30, 16)  # between 6.7 and 9.9 there is no sum
    assert from_rounded_runs(100.0, 30, 16)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ({"a": 3.0, "b": 2.0, "c": 1.0}, ({"a"}, {"b"})),
        ({"a": 3.0, "b": 3.0, "c": 1.0}, ({"a", "b"}, {"c"})),
        ({"a": 3.0, "b": 1.0, "c": 1.0}, ({"a"}, {"b", "c"})),
        ({"a": 1.0, "b": 1.0}, (set(), set())),
    ],
)
def test_best_and_second(scores, expected):
    assert best_and_second(scores) == expected
