"""`deftune advise`: which objective the evidence supports for a model and data of the user's."""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deftune.artifacts.terminal import align
from deftune.cli.options import add_data_options, add_model_and_data, data_options, flag, need
from deftune.cli.output import say
from deftune.cli.progress import progress

PROBE_OPTIONS = ("out", "steps", "seeds", "learning_rate")


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "advise",
        help="recommend an objective and learning rates for your model and data, with the evidence",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  deftune advise MODEL DATA --rows 100          one pass over the rows\n"
        "  deftune advise MODEL DATA --rows 100 --probe  also train three objectives",
    )
    add_model_and_data(parser)
    add_data_options(parser)
    parser.add_argument(
        "--probe", action="store_true", help="also train nll, deft and deft | floor(0.2) for some steps"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="with --probe: its folder (default: advise-probe)")
    parser.add_argument(
        "--steps", type=int, metavar="N", help="with --probe: optimizer steps of each run (default: 20)"
    )
    parser.add_argument("--seeds", metavar="A,B", help="with --probe: seeds of the runs (default: 0)")
    parser.add_argument(
        "--learning-rate",
        type=float,
        metavar="RATE",
        help="with --probe: learning rate (default: the lowest one of the advice)",
    )
    parser.add_argument("--json", action="store_true", help="print the advice as JSON")
    parser.set_defaults(run=run_advise)


def run_advise(args: argparse.Namespace) -> int:
    need("eval")
    if not args.probe and (given := [name for name in PROBE_OPTIONS if getattr(args, name) is not None]):
        raise ValueError(f"{flag(given[0])}: is for --probe; add --probe, or leave it out")
    seeds = parse_seeds(args.seeds or "0")
    from deftune.comparison.advise import advise, probe

    bad = Path("bad_rows.jsonl") if args.skip_bad_rows else None
    options = data_options(args)
    with progress() as shown:
        shown.show("loading the libraries")
        advice = advise(args.model, args.data, bad_rows=bad, display=shown, **options)
        lines: list[dict[str, Any]] = []
        if args.probe:
            rate = args.learning_rate
            if rate is None:
                rate = advice.learning_rates[0] if advice.learning_rates else 1e-5
            options.pop("batch_tokens", None)  # of the pass alone
            lines = probe(
                args.model, args.data, args.out or Path("advise-probe"), steps=20 if args.steps is None else args.steps,
                seeds=seeds, learning_rate=rate, skip_bad_rows=args.skip_bad_rows, display=shown, **options,
            )  # fmt: skip
    if args.json:
        print(json.dumps(dataclasses.asdict(advice) | ({"probe": lines} if lines else {}), indent=1))
        return 0
    for line in advice_lines(advice):
        say(line)
    if lines:
        for line in probe_text(lines):
            say(line)
    return 0


def parse_seeds(text: str) -> list[int]:
    """
    >>> parse_seeds("0,1")
    [0, 1]
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--seeds: whole numbers with commas, got {text!r}") from None


def paragraph(label: str, text: str) -> str:
    return textwrap.fill(f"{label:14}{text}", 110, subsequent_indent=" " * 14, break_long_words=False,
                         break_on_hyphens=False)  # fmt: skip


def advice_lines(advice: Any) -> list[str]:
    """The advice as text: what was measured, what follows, the evidence, what to watch."""
    from deftune.comparison.evidence import grouped, together

    m = advice.measured
    kinds = m["conflict_kinds"]
    end = "none supervised" if m["end_p"] is None else f"in {m['end_rows']:.0%} of the rows, mean p {m['end_p']:.2g}"
    objective = advice.objective
    if advice.sampled:
        objective += f" for greedy or cold answers; {advice.sampled} for answers sampled at T = 1"
    rates = ", ".join(f"{rate:g}" for rate in advice.learning_rates)
    rate = f"{rates} (used in the measured cells, full fine-tuning)" if rates else "none measured"
    lines = [
        f"{advice.model} reads {advice.data}: {m['rows']:,} rows, {m['tokens']:,} tokens, before training",
        paragraph("p, sum P^2", f"{interval(m['p'])}, {interval(m['concentration'])}"),
        paragraph("conflicts", f"{m['conflicts']['mean']:.1%} of the tokens, {m['conflict_loss']:.0%} of the loss: "
                  + ", ".join(f"{number:,} {kind}" for kind, number in kinds.items())),
        paragraph("end tokens", end),
        "",
        paragraph("regime", advice.place),
        paragraph("objective", objective),
        paragraph("because", "; ".join(advice.because)),
        paragraph("learning rate", rate),
        paragraph("evidence", advice.strength),
    ]  # fmt: skip
    measured = grouped(row for row in advice.evidence if row.measured)
    lines += [paragraph("  measured", together(rows)) for rows in measured]
    if claimed := [row for row in advice.evidence if not row.measured]:
        differences = ", ".join(f"{row.objective} {row.difference:+.1f}" for row in claimed)
        where = f"{claimed[0].where}, mean of {claimed[0].model}"
        lines.append(paragraph("  the paper", f"minus nll, in points: {differences} ({where}; not measured here)"))
    return lines + [paragraph("watch", line) for line in advice.watch]


def interval(record: Mapping[str, float]) -> str:
    mean, low, high = (round(record[key], 3) + 0.0 for key in ("mean", "low", "high"))  # no -0.000
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def probe_text(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = {"nll": "NLL", "p": "mean p", "concentration": "sum P^2", "top1": "likeliest"}
    table = [["objective", *columns.values()]]
    table += [[line["objective"], *(interval(line[key]) for key in columns)] for line in lines]
    for line in (line for line in lines if line["minus_nll"]):
        table.append([f"{line['objective']} - nll", *(interval(line["minus_nll"][key]) for key in columns)])
    rows, seeds = lines[0]["rows"], max(line["seeds"] for line in lines)
    return [
        f"\nProbe: tokens of {rows:,} held-out rows, {seeds} seed{'s' * (seeds > 1)}, [95% interval over rows, not "
        f"over seeds]; minus NLL is paired by token",
        align(table),
        "NLL is expected to win on NLL. A probe does not generate answers; `deftune compare` does.",
    ]
