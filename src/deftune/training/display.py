"""What a run shows while it trains: one live line in a terminal, a line now and then elsewhere."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from deftune.data.terminal import line_printer

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
