"""Progress of a long command: bars on a terminal; elsewhere a line at least every 15 seconds: a log shows life."""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from deftune.artifacts.display import duration
from deftune.artifacts.terminal import printable
from deftune.cli.output import say

QUIET_SECONDS = 15.0


class Progress(ABC):
    """What a command says while it works, on stderr; results go to stdout."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._lock = threading.RLock()
        self._repeated = -QUIET_SECONDS + clock()

    @abstractmethod
    def show(self, label: str, done: int = 0, total: int | None = None) -> None:
        """What is being done, and how much of it is; ``total`` None where that cannot be counted."""

    @abstractmethod
    def say(self, text: str) -> None:
        """A line that stays."""

    def print(self, text: str) -> None:
        """A result, on stdout."""
        say(text)

    def say_seldom(self, text: str) -> None:
        """A line of a kind that may come often, such as a retry: at most one in `QUIET_SECONDS`."""
        with self._lock:
            if self._clock() - self._repeated >= QUIET_SECONDS:
                self._repeated = self._clock()
                self.say(text)


class Lines(Progress):
    """For a file or a pipe. `tick` writes where the work stands if nothing was written for `QUIET_SECONDS`.

    Nothing is written before that: a short command prints its result alone.
    """

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        super().__init__(clock)
        self._write = write
        self._started = self._wrote = clock()
        self._label, self._done, self._total = "starting", 0, None

    def show(self, label: str, done: int = 0, total: int | None = None) -> None:
        with self._lock:
            self._label, self._done, self._total = label, done, total
            self.tick()

    def say(self, text: str) -> None:
        with self._lock:
            self._wrote = self._clock()
            self._write(text)

    def tick(self) -> None:
        with self._lock:
            now = self._clock()
            if now - self._wrote >= QUIET_SECONDS:
                counted = "" if self._total is None else f": {self._done:,} of {self._total:,}"
                self.say(f"{self._label}{counted} ({duration(now - self._started)})")


class Bars(Progress):
    """For a terminal: a bar for each label that can be counted."""

    def __init__(self, bars: Any):
        super().__init__()
        self._bars = bars
        self._tasks: dict[str, Any] = {}

    def show(self, label: str, done: int = 0, total: int | None = None) -> None:
        if total is None:
            return
        if label not in self._tasks:
            self._tasks[label] = self._bars.add_task(label, total=total)
        self._bars.update(self._tasks[label], completed=done)

    def say(self, text: str) -> None:
        self._bars.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def print(self, text: str) -> None:
        self._bars.stop()  # the bars so far stay above the result
        super().print(text)
        for task in self._tasks.values():
            self._bars.remove_task(task)
        self._tasks.clear()
        self._bars.start()


@contextmanager
def progress() -> Generator[Progress]:
    """Bars if stderr is a terminal, else lines, written by a thread of their own: also while nothing moves."""
    if sys.stderr.isatty():
        with _terminal_bars() as bars:
            yield bars
        return
    lines = Lines(lambda text: print(printable(text), file=sys.stderr, flush=True))
    over = threading.Event()

    def watch() -> None:
        while not over.wait(1.0):
            lines.tick()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield lines
    finally:
        over.set()
        thread.join()


@contextmanager
def _terminal_bars() -> Generator[Bars]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    with RichProgress(
        TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), MofNCompleteColumn(),
        TimeRemainingColumn(), console=Console(stderr=True), redirect_stdout=False,
    ) as bars:  # fmt: skip
        yield Bars(bars)
