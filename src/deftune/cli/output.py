"""How a command prints a line; what it may have read from a file or a server cannot steer the terminal."""

from __future__ import annotations

import sys

from deftune.artifacts.terminal import printable


def say(text: str) -> None:
    """A line on stdout."""
    print(printable(text), flush=True)


def notice(text: str) -> None:
    """A line on stderr, beside what a command prints."""
    print(printable(text), file=sys.stderr)
