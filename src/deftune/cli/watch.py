"""`deftune watch`: the curves of a run in the terminal, from its records."""

from __future__ import annotations

import argparse
import math
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from deftune.artifacts.terminal import printable
from deftune.cli.options import need

BARS = "▁▂▃▄▅▆▇█"
CURVES = ("loss", "nll", "p", "gate", "grad_norm", "learning_rate", "eval_loss", "eval_nll", "eval_p")
SECONDS = 5.0  # between two looks at the records


def add_to(commands: Any) -> None:
    parser = commands.add_parser("watch", help="draw the curves of a run in the terminal, until it ends")
    parser.add_argument("folder", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument(
        "--once", action="store_true", help="print the curves once and exit (default if stdout is no terminal)"
    )
    parser.set_defaults(run=run_watch)


def curve(values: list[float], width: int) -> str:
    """Values as bars from the lowest to the highest; more values than ``width`` are averaged.

    >>> curve([0, 1, 2, 3, 4, 5, 6, 7], 8)
    '▁▂▃▄▅▆▇█'
    """
    number = min(width, len(values))
    cuts = [round(i * len(values) / number) for i in range(number + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    return "".join(BARS[round((len(BARS) - 1) * (value - low) / ((high - low) or 1))] for value in means)


def render(records: list[dict[str, Any]], state: str, tasks: list[str], width: int) -> str:
    """A line for each number that the run records: first value, curve, last value, and the range if there is room."""
    curves: dict[str, list[float]] = {}
    for name in (*CURVES, *(f"eval_{task}" for task in tasks)):
        found = [r[name] for r in records if isinstance(r.get(name), int | float) and not r.get("final")]
        values = [float(value) for value in found if math.isfinite(value)]  # a skipped step may record NaN
        if values:
            curves[name] = values
    head = f"{state}, step {max((record['step'] for record in records), default=0)}"
    if not curves:
        return printable(f"{head}: no records yet")
    ranges = [f" ({min(values):.4g} to {max(values):.4g})" for values in curves.values()]
    room = width - 37 - max(map(len, ranges))
    if room < 8:
        ranges, room = [""] * len(ranges), max(4, width - 37)
    rows = zip(curves.items(), ranges)
    return printable("\n".join([head, *(
        f"{name:<14}{values[0]:>10.4g} {curve(values, room):<{room}} {values[-1]:<10.4g}{span}".rstrip()
        for (name, values), span in rows
    )]))  # fmt: skip


def run_watch(args: argparse.Namespace) -> int:
    need()
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from deftune.artifacts.runs import Run, summary

    run, console = Run(args.folder), Console()
    tasks = [task.name for task in run.read_config().data.tasks]

    def now() -> tuple[str, str]:
        state = summary(run)["state"]
        return state, render(run.read_metrics(), state, tasks, console.width)

    if args.once or not sys.stdout.isatty():
        print(now()[1])
        return 0
    with Live(console=console, auto_refresh=False) as live:
        while True:
            state, text = now()
            live.update(Text(text), refresh=True)
            if state not in ("new", "running"):
                return 0
            time.sleep(SECONDS)
