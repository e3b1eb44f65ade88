"""`deftune objectives`: the catalogue as a table, one objective in full, and the gate curves."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from pathlib import Path
from typing import Any

COLUMNS = {
    "name": "usage",
    "gate": "gate",
    "value": "value",
    "from": "source",
    "use when": "use",
    "hurts when": "hurts",
}
NARROW = ("name", "gate", "use when", "hurts when")  # of them, in a terminal of less than 100 columns


def add_to(commands: Any) -> None:
    parser = commands.add_parser("objectives", help="list the objectives, show one in full, or plot gate curves")
    parser.set_defaults(run=run_table)
    actions = parser.add_subparsers(metavar="ACTION")
    show = actions.add_parser("show", help="one objective in full, with its gate at some tokens")
    show.add_argument("spec", help="a name or spec, e.g. deft, 'alpha(0.3)', 'deft | eos(nll)'")
    show.set_defaults(run=run_show)
    plot = actions.add_parser("plot", help="draw gate, signal and focus against p, and the (p, entropy) maps")
    plot.add_argument("specs", nargs="*", help="objectives to draw (default: the paper's)")
    plot.add_argument(
        "--out", type=Path, default=Path("objectives"), help="folder for the figures (default: objectives/)"
    )
    plot.set_defaults(run=run_plot)


def render_table(rows: list[list[str]], header: list[str], width: int) -> str:
    """Text columns that share ``width``, each in proportion to what it holds, wrapped."""
    longest = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    room = max(width, 72) - 2 * (len(header) - 1)
    # the first column keeps its length; the others share the rest by the root of theirs
    first = min(longest[0], 24)
    weights = [length**0.5 for length in longest[1:]]
    widths = [first] + [min(n, int((room - first) * w / sum(weights))) for n, w in zip(longest[1:], weights)]
    lines: list[str] = []
    for row in [header, ["-" * w for w in widths], *rows]:
        cells = [textwrap.wrap(text, w) or [""] for text, w in zip(row, widths)]
        for i in range(max(map(len, cells))):
            lines.append(
                "  ".join((cell[i] if i < len(cell) else "").ljust(w) for cell, w in zip(cells, widths)).rstrip()
            )
    return "\n".join(lines)


def run_table(args: argparse.Namespace) -> int:
    from deftune.objectives.catalogue import ABOUT

    width = shutil.get_terminal_size((160, 24)).columns
    columns = COLUMNS if width >= 100 else {title: COLUMNS[title] for title in NARROW}
    rows = [[getattr(about, field) for field in columns.values()] for about in ABOUT.values()]
    print(render_table(rows, list(columns), width))
    if columns is not COLUMNS:
        print("\nA wider terminal has value and source, too; so has: deftune objectives show deft")
    print("\nCompose with '|': deftune objectives show 'deft | eos(nll) | mean_one'")
    return 0


def run_show(args: argparse.Namespace) -> int:
    import torch

    from deftune.inspection.gates import STATES, state_logits
    from deftune.losses import token_stats
    from deftune.objectives import Context, objective
    from deftune.objectives.base import Modifier
    from deftune.objectives.catalogue import ABOUT, MODIFIERS

    if args.spec in MODIFIERS:
        for title, field in COLUMNS.items():
            print(f"{title:12} {getattr(ABOUT[args.spec], field)}")
        return 0
    chosen = base = objective(args.spec)
    modifiers: list[Modifier] = []
    while isinstance(base, Modifier):
        modifiers.insert(0, base)
        base = base.inner
    print(f"{'spec':12} {chosen}")
    if about := ABOUT.get(str(base).split("(")[0]):
        for title, field in list(COLUMNS.items())[1:]:
            print(f"{title:12} {getattr(about, field)}")
    for line in evidence_lines(str(chosen)):
        print(line)
    for modifier in modifiers:
        print(f"{'| ' + modifier.name:12} gate: {ABOUT[modifier.name].gate}; value: {ABOUT[modifier.name].value}")
    kinds = {
        "local": "local: a token's own statistics are enough",
        "mass": "mass: step loss = sum of loss / sum of mass; micro-batches are rescaled once",
        "step": "step: needs deftune.step_stats, a no-grad pass over the step, where a call is not the whole step",
    }
    print(f"{'kind':12} {kinds[chosen.kind]}")
    print(f"{'needs':12} {f'the top {chosen.top_k} log p' if chosen.top_k else 'log p, entropy, sum P^2 only'}")
    if chosen.requires:
        print(f"{'context':12} {', '.join(sorted(chosen.requires))} (below: progress 1, no special token)")
    p = torch.tensor([1e-4, 1e-2, 0.1, 0.5, 0.9, 0.99], dtype=torch.float64)
    for state, caption in STATES.items():
        stats = token_stats(state_logits(p, state, 1000), torch.zeros(len(p), dtype=torch.long))
        context = Context(progress=1.0, special_ids=(999,))  # the targets are 0
        columns = [chosen.focus(stats, context), chosen.gate(stats, context), chosen.loss(stats, context)]
        print(f"\n{caption} (V = 1000)\n       p    focus     gate   W = gate (1-p)     value")
        for x, focus, gate, loss in zip(p.tolist(), *(column.tolist() for column in columns)):
            print(f"{x:8.4g} {focus:8.4f} {gate:8.4f} {gate * (1 - x):16.4f} {loss:9.4f}")
    return 0


def evidence_lines(spec: str) -> list[str]:
    """Where an objective was measured above or below another one, where that is open, and the paper's averages."""
    from deftune.comparison.evidence import evidence

    rows = [row for row in evidence() if row.objective == spec]
    labels = {1: "helped", -1: "hurt", 0: "undecided"}
    lines = [f"{labels[row.decided]:12} {row.short}" for row in rows if row.measured]
    if claimed := [row for row in rows if not row.measured]:
        texts = ", ".join(f"{row.regime} {row.difference:+.1f}" for row in claimed)
        lines.append(f"{'the paper':12} minus {claimed[0].against}, in points: {texts} (means over models)")
    return lines or [f"{'evidence':12} none measured; `deftune compare` measures it on your data"]


def run_plot(args: argparse.Namespace) -> int:
    from deftune.inspection import gates
    from deftune.inspection.style import save_figure
    from deftune.objectives import objective

    chosen = list(dict.fromkeys(objective(spec) for spec in args.specs or gates.DEFAULT))
    for unmet in (o for o in chosen if o.requires):
        raise ValueError(f"objectives plot: `{unmet}` depends on {', '.join(unmet.requires)}; use 'objectives show'")
    for stem, table, plot in (
        ("gates", gates.gate_table(chosen), gates.plot_gates),
        ("signal_maps", gates.map_table(chosen), gates.plot_maps),
    ):
        for path in save_figure(plot(table), args.out / stem, table):
            print(path)
    return 0
