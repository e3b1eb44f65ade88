"""What a run shows while it trains: one live line in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from deftune.artifacts.terminal import line_printer

SHOWN = ("loss", "nll", "p", "focus", "gate", "suppressed", "grad_norm")


def render_step(logs: dict[str, Any]) -> str:
    """The numbers of a step: loss 0.31 | nll 1.92 | p 0.51 | ..."""
    parts = [f"{name} {logs[name]:.3g}" for name in SHOWN if name in logs]
    if "tokens_per_second" in logs:
        parts.append(f"{logs['tokens_per_second']:,.0f} tok/s")
    return " | ".join(parts)


class StepDisplay:
    """A progress bar over the optimizer steps."""

    def __init__(self, console: Console, title: str):
        self.console, self.title = console, title
        self.progress = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), MofNCompleteColumn(),
            TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[numbers]}"), console=console,
        )  # fmt: skip
        self.task: Any = None
        self.last_printed = -1

    def start(self, done: int, total: int) -> None:
        self.task = self.progress.add_task(self.title, total=total, completed=done, numbers="")
        if self.console.is_terminal:
            self.progress.start()

    def step(self, done: int, total: int, logs: dict[str, Any]) -> None:
        self.progress.update(self.task, completed=done, numbers=render_step(logs))
        every = max(1, total // 20)
        if not self.console.is_terminal and (done // every != self.last_printed // every or done in (1, total)):
            line_printer(self.console)(f"{self.title} {done}/{total}  {render_step(logs)}")
            self.last_printed = done

    def stop(self) -> None:
        if self.console.is_terminal:
            self.progress.stop()


class RowProgress:
    """A bar over the rows of a long preparation in a terminal; elsewhere a line to ``notice`` now and then."""

    EVERY = 10.0  # seconds between two lines

    def __init__(self, title: str, total: int | None, notice: Callable[[str], None], *, shown: bool = True):
        self.title, self.total, self.notice, self.shown = title, total, notice, shown
        console = Console(stderr=True)
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), console=console, transient=True,
        )  # fmt: skip
        self.is_terminal = console.is_terminal
        self.started = self.told = self.drawn = time.monotonic()
        self.task: Any = None

    def update(self, done: int) -> None:
        now = time.monotonic()
        if not self.shown or now - self.drawn < 0.2:
            return
        self.drawn = now
        if self.is_terminal:
            if self.task is None:  # not for what takes a moment
                self.task = self.progress.add_task(self.title, total=self.total)
                self.progress.start()
            self.progress.update(self.task, completed=done)
        elif now - self.told >= self.EVERY:
            of = f" of {self.total:,} ({done / self.total:.0%})" if self.total else ""
            self.notice(f"{self.title}: {done:,}{of}, {now - self.started:.0f} s")
            self.told = now

    def __enter__(self) -> RowProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.task is not None:
            self.progress.stop()
