"""The cells of a grid without processes of their own."""

from collections.abc import Iterator, Sequence

from deftune.comparison.cells import run_cell
from deftune.comparison.grid import Cell
from deftune.comparison.schedule import Begin


def run_here(cells: Sequence[Cell], begin: Begin) -> Iterator[tuple[Cell, str]]:
    """Cells in this process, one after the other."""
    for cell in cells:
        if not begin(cell):
            continue
        try:
            state = run_cell(cell)
        except Exception:
            state = "failed"  # recorded
        yield cell, state
        if state == "stopped":
            return
