"""What a check gets and gives: a size and a scratch folder in, a measured figure out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Figure:
    """What was measured, and whether it keeps the promise. ``misses`` name what does not."""

    text: str
    holds: bool
    misses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Size:
    """How much to measure: ``size(20, 500)`` is 20 in the small run and 500 in the full one."""

    full: bool
    folder: Path

    def __call__(self, small: int, full: int) -> int:
        return full if self.full else small


class NotHere(Exception):
    """A check that this machine cannot run, and why."""


def refusal(call: Callable[[], object]) -> str:
    """The text of the ValueError that a call raises; empty if the call raises none."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def counted(what: str, total: int, misses: list[str]) -> Figure:
    """`40 of 40 refused`; holds when nothing is missed."""
    return Figure(f"{total - len(misses)} of {total} {what}", not misses and total > 0, tuple(misses))
