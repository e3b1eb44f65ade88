"""Errors about an argument of a library function, which the command line shows with the name of its flag."""

from __future__ import annotations


class OptionError(ValueError):
    """A wrong argument. ``option`` is its name in Python; the command line shows the name of its flag instead."""

    def __init__(self, option: str, problem: str):
        super().__init__(f"{option}: {problem}")
        self.option, self.problem = option, problem


def check_counts(**counts: int | None) -> None:
    """Raise an `OptionError` for a count below 1; None is a count that was not given."""
    for option, count in counts.items():
        if count is not None and count < 1:
            raise OptionError(option, f"at least 1, got {count}")
