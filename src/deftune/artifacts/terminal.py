"""Text from data, models, folders and servers, shown so that it cannot steer the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def visible(text: str) -> str:
    """Newlines and tabs marked, and every other character that is not printable written out."""
    return "".join({"\n": "↵\n", "\t": "→\t"}.get(character) or _written_out(character) for character in text)


def printable(text: str) -> str:
    """Text as it is, but for characters that could steer the terminal, which are written out.

    >>> print(printable("two\\nlines, \\x1b[2J none of them cleared"))
    two
    lines, \\x1b[2J none of them cleared
    """
    return "".join(character if character in "\n\t" else _written_out(character) for character in text)


def one_line(text: str) -> str:
    """``printable``, with newlines and tabs written out too: a cell of a table.

    >>> print(one_line("a\\nb"))
    a\\nb
    """
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def align(lines: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Rows of text in columns; a row that is longer than ``width`` is cut.

    >>> print(align([["run", "state"], ["first", "finished"]], 10))
    run    st…
    first  fi…
    """
    widths = [max(map(len, column)) for column in zip(*lines)]
    rows = ["  ".join(cell.ljust(size) for cell, size in zip(line, widths)).rstrip() for line in lines]
    return "\n".join(row if width is None or len(row) <= width else row[: width - 1] + "…" for row in rows)


def line_printer(console: Any) -> Callable[[str], None]:
    """A function that prints a line on a rich console as it is: brackets are no markup, control characters are written
    out."""
    from rich.text import Text

    return lambda text: console.print(Text(printable(text)), highlight=False, soft_wrap=True)


def _written_out(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()
