"""What a run shows while it trains: one live line in a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from deftune.artifacts.terminal import line_printer

EVERY = 10.0  # seconds between two lines of a log
SHOWN = {"loss": "loss", "p": "p", "learning_rate": "lr", "eval_loss": "eval", "nll": "nll", "gate": "gate",
         "grad_norm": "norm"}  # fmt: skip
EVALUATED = ("eval_loss", "eval_nll", "eval_p")


def render_step(logs: dict[str, Any], width: int | None = None) -> str:
    """The numbers of a step, the most important first; those that do not fit into ``width`` columns are left out.

    >>> render_step({"loss": 0.3111, "p": 0.5, "learning_rate": 5e-5, "nll": 1.92}, 26)
    'loss 0.311 p 0.5 lr 5e-05'
    """
    parts = [f"{short} {logs[name]:.3g}" for name, short in SHOWN.items() if name in logs]
    if "tokens_per_second" in logs:
        parts.append(f"{logs['tokens_per_second']:,.0f} tok/s")
    text = ""
    for part in parts:
        if width is not None and len(text) + len(part) + bool(text) > width:
            break
        text += f" {part}" if text else part
    return text


def render_evaluation(logs: dict[str, Any], tasks: Sequence[str] = ()) -> str:
    """eval_loss 0.312 | eval_nll 1.41 | eval_p 0.55, and the scores of tasks"""
    names = [*EVALUATED, *(f"eval_{task}" for task in tasks)]
    return " | ".join(f"{name} {logs[name]:.4g}" for name in names if name in logs)


class StepDisplay:
    """The optimizer steps of a run: a bar in a terminal, lines elsewhere. Evaluations are lines that stay."""

    BAR = 8

    def __init__(
        self, console: Console, title: str, tasks: Sequence[str] = (), clock: Callable[[], float] = time.monotonic
    ):
        self.console, self.title, self.tasks, self.clock = console, title, tasks, clock
        self.progress = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(bar_width=self.BAR), MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"), TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=True)),
            console=console,
        )  # fmt: skip
        self.task: Any = None
        self.newest: dict[str, Any] = {}  # evaluation
        self.logs: dict[str, Any] = {}  # of the newest step
        self.started = self.printed = 0.0
        self.first = 0

    def start(self, done: int, total: int) -> None:
        self.task = self.progress.add_task(self.title, total=total, completed=done, left="-:--:--", numbers="")
        self.started = self.printed = self.clock()
        self.first = done
        if self.console.is_terminal:
            self.progress.start()

    def step(self, done: int, total: int, logs: dict[str, Any]) -> None:
        self.logs = logs
        logs, left, now = self.draw(done, total), self.left(done, total), self.clock()
        if not self.console.is_terminal and (done in (self.first + 1, total) or now - self.printed >= EVERY):
            self.say(f"{self.title} {done}/{total}  {left} left  {render_step(logs)}")
            self.printed = now

    def left(self, done: int, total: int) -> timedelta:
        """The time left; rich's own column forgets a step after 30 seconds, and then shows no time at all."""
        seconds = (self.clock() - self.started) / max(1, done - self.first)
        return timedelta(seconds=round(seconds * (total - done)))

    def draw(self, done: int, total: int) -> dict[str, Any]:
        """Update the bar; returns what it shows: the newest step and the newest evaluation."""
        logs = {**{name: self.newest[name] for name in ("eval_loss",) if name in self.newest}, **self.logs}
        left = str(self.left(done, total))
        taken = len(self.title) + self.BAR + len(f"{done}/{total}") + len(left) + 4  # and the spaces between
        numbers = render_step(logs, max(0, self.console.width - taken))
        self.progress.update(self.task, completed=done, left=left, numbers=numbers)
        return logs

    def evaluation(self, done: int, total: int, logs: dict[str, Any], *, final: bool = False) -> None:
        """A line with the numbers of an evaluation; ``final`` is the one of the result."""
        self.newest = logs
        if self.logs and not final:
            self.draw(done, total)
        place = "result" if final else f"{self.title} {done}/{total}"
        self.say(f"{place}  {render_evaluation(logs, self.tasks)}")

    def say(self, text: str) -> None:
        line_printer(self.console)(text)

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
        self.started = self.printed = self.drawn = time.monotonic()
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
        elif now - self.printed >= self.EVERY:
            of = f" of {self.total:,} ({done / self.total:.0%})" if self.total else ""
            self.notice(f"{self.title}: {done:,}{of}, {now - self.started:.0f} s")
            self.printed = now

    def __enter__(self) -> RowProgress:
        return self

    def __exit__(self, *error: object) -> None:
        if self.task is not None:
            self.progress.stop()
