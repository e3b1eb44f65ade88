"""How a long function reports its progress, and silence for the libraries that it calls."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol


def duration(seconds: float) -> str:
    """
    >>> duration(0.42), duration(45.2), duration(200), duration(7384)
    ('420 ms', '45 s', '3 min 20 s', '2 h 3 min')
    """
    whole = int(seconds)
    if whole < 1:
        return f"{1000 * seconds:.0f} ms"
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


class Display(Protocol):
    """Receives the progress of a long function; `deftune.cli.progress.Progress` is one."""

    def show(self, label: str, done: int = 0, total: int | None = None) -> None:
        """The current step, with ``done`` of ``total`` if the step can be counted."""

    def say(self, text: str) -> None:
        """A message."""

    def say_seldom(self, text: str) -> None:
        """A message of a kind that may be frequent, such as a retry: a display may leave some out."""


class _Quiet(Display):
    pass


QUIET: Display = _Quiet()  # shows nothing


@contextmanager
def quiet() -> Generator[None]:
    """Turn off progress bars and notes of transformers and datasets, which would break up a progress line.

    Their FutureWarnings are turned off too: they announce that names will go which TRL uses, not the user. Afterwards
    the libraries show what they showed before.
    """
    import datasets
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    dataset_bars = not datasets.are_progress_bars_disabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl|peft|accelerate)\b")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
        if dataset_bars:
            datasets.enable_progress_bars()
