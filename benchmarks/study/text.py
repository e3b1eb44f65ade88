"""Words, numbers and tables of the study's pages, as Markdown."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

from .effects import Effect


def code(objective: str) -> str:
    return f"`{objective}`"


def points(effect: Effect | None, *, sign: bool = True) -> str:
    """A value in points with its interval."""
    if effect is None:
        return "-"
    value, low, high = (x + 0.0 for x in (round(p, 1) for p in effect.points))
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]" if sign else f"{value:.1f} [{low:.1f}, {high:.1f}]"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    r"""A Markdown table; a bar inside of a cell is escaped.

    >>> print(table(["a"], [["`deft | floor(0.2)`"]]))
    | a |
    |---|
    | `deft \| floor(0.2)` |
    """
    lines = [[re.sub(r"(?<!\\)\|", r"\|", cell) for cell in row] for row in [header, *rows]]
    texts = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([texts[0], f"|{'---|' * len(header)}", *texts[1:]])


def wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def seeds_text(number: int) -> str:
    return f"{number} seed{'s' * (number != 1)}"


def p_text(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
