"""`deftune analyze`: token tables, and the figures made from them."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from deftune.cli.train import need_training

OBJECTIVES = "nll,linear,cayley,deft,eaft"


def add_to(commands: Any) -> None:
    analyze = commands.add_parser("analyze", help="token tables and figures: what a model thinks, what a gate does")
    actions = analyze.add_subparsers(metavar="ACTION", required=True)

    tokens = actions.add_parser(
        "tokens", help="a table of every supervised token: p, entropy, rank, and each objective's gate"
    )
    tokens.add_argument("model", help="a run's folder, RUN:STEP, or what `train` takes as a model")
    tokens.add_argument("data", help="a file, a folder, a hub id, or generated:NAME")
    tokens.add_argument("--out", type=Path, default=Path("tokens.parquet"), help="default: tokens.parquet")
    tokens.add_argument(
        "--objectives", default=OBJECTIVES, metavar="A,B", help=f"columns for these (default: {OBJECTIVES})"
    )
    tokens.add_argument("--rows", type=int, help="the first rows only (of generated:NAME: how many; default 1000)")
    tokens.add_argument("--format", default="auto")
    tokens.add_argument("--split")
    tokens.add_argument("--template", help="chatml, plain, or a .jinja file (default: the run's, or the tokenizer's)")
    tokens.add_argument("--mask", choices=["assistant", "completion", "all"], help="default: the run's, or assistant")
    tokens.add_argument("--max-length", type=int, help="default: the run's, or 2048")
    tokens.add_argument("--batch-tokens", type=int, default=8192, help="places of a batch, padding included")
    tokens.add_argument(
        "--skip-bad-rows", action="store_true", help="leave out rows that cannot be read, and name them"
    )
    tokens.set_defaults(run=run_tokens)


def notice(text: str) -> None:
    print(text, file=sys.stderr)


def split_specs(text: str) -> list[str]:
    """The specs of a list: commas inside parentheses are a spec's own.

    >>> split_specs("nll, top(0.1, of=linear)")
    ['nll', 'top(0.1, of=linear)']
    """
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def run_tokens(args: argparse.Namespace) -> int:
    need_training()
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from deftune.analysis.tokens import encoder_for, parse_objectives, write_token_table
    from deftune.data.regimes import generate
    from deftune.data.rows import BadRows
    from deftune.data.sources import read_source
    from deftune.training.results import load_result
    from deftune.training.train import quiet

    if args.out.suffix != ".parquet":
        raise ValueError(f"--out: {args.out} is not named .parquet, which it would be")
    if args.batch_tokens < 1:
        raise ValueError(f"--batch-tokens: at least 1, got {args.batch_tokens}")
    objectives = parse_objectives(split_specs(args.objectives))
    bad = BadRows(skip=args.skip_bad_rows)
    if args.data.startswith("generated:"):
        if args.format != "auto":
            raise ValueError("--format: generated rows have none; leave it out")
        rows = generate(args.data.removeprefix("generated:"), split=args.split or "train", size=args.rows or 1000)
    else:
        rows = read_source(args.data, format=args.format, split=args.split, limit=args.rows, bad=bad)
    import torch

    with quiet():
        model, tokenizer = load_result(args.model, notice)
        encoder = encoder_for(args.model, tokenizer, template=args.template, mask=args.mask, max_length=args.max_length)
        if torch.cuda.is_available():
            model = model.to("cuda")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("rows", total=len(rows))
            written = write_token_table(
                args.out, model, tokenizer, rows, encoder=encoder, objectives=objectives,
                batch_tokens=args.batch_tokens, skip_bad_rows=args.skip_bad_rows,
                facts={"model": args.model, "data": args.data, "command": shlex.join(["deftune", *sys.argv[1:]])},
                progress=lambda done: bar.advance(task, done),
            )  # fmt: skip
    for line in [*written.facts, *([bad.summary()] if bad.rows else [])]:
        notice(line)
    print(f"{written.tokens}: {written.num_tokens:,} tokens; {written.rows}: their rows")
    return 0
