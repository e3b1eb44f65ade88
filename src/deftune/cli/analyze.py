"""`deftune analyze`: token tables, and the figures made from them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from deftune.artifacts.terminal import align
from deftune.cli.data_options import add_data_options, data_options
from deftune.cli.output import say
from deftune.cli.progress import progress
from deftune.cli.train import need_training

OBJECTIVES = "nll,linear,cayley,deft,eaft"


def add_to(commands: Any) -> None:
    analyze = commands.add_parser("analyze", help="make token tables, and draw figures from tables, runs and results")
    actions = analyze.add_subparsers(metavar="ACTION", required=True)

    tokens = actions.add_parser(
        "tokens", help="a table of every supervised token: p, entropy, rank, and each objective's gate"
    )
    tokens.add_argument("model", help="a run's folder, RUN:STEP, or any model that `train` takes")
    tokens.add_argument("data", help="a file, a folder, a hub id, or generated:NAME")
    tokens.add_argument("--out", type=Path, default=Path("tokens.parquet"), help="default: tokens.parquet")
    tokens.add_argument(
        "--objectives", default=OBJECTIVES, metavar="A,B", help=f"columns for these (default: {OBJECTIVES})"
    )
    add_data_options(tokens)
    tokens.set_defaults(run=run_tokens)

    conflicts = figure(
        actions, "conflicts", "tokens learned and forgotten between two checkpoints", "BEFORE AFTER", "TABLE",
        "token tables of the same rows; more pairs make more panels",
    )  # fmt: skip
    conflicts.add_argument(
        "--objective", default="nll", help="the objective whose change of loss is drawn (default: nll)"
    )
    conflicts.add_argument(
        "--threshold", type=float, default=0.01, help="a smaller change of p counts as no change (default: 0.01)"
    )
    conflicts.set_defaults(run=run_conflicts)

    gradients = figure(
        actions, "gradients", "gradient norms over p and entropy, a panel per objective", "REGIME=TABLE", "TABLE",
        "token tables, a row of panels each; REGIME= is optional for one table",
    )  # fmt: skip
    gradients.add_argument("--objectives", metavar="A,B", help="objectives to draw (default: all in the tables)")
    gradients.set_defaults(run=run_gradients)

    histograms = figure(
        actions, "histograms", "target probabilities, base against tuned models", "[REGIME/]MODEL=TABLE", "TABLE",
        "token tables; MODEL is base, or the objective a model was tuned with",
    )  # fmt: skip
    histograms.set_defaults(run=run_histograms)

    progress = figure(
        actions,
        "progress",
        "p and concentration over training",
        "REGIME=RUN",
        "RUN",
        "runs' folders; a regime may have several",
    )
    progress.set_defaults(run=run_progress)

    results = "[REGIME/]OBJECTIVE=RESULT"
    temperatures = figure(
        actions, "temperatures", "scores against the sampling temperature", results, "RESULT", RESULTS
    )
    continuum = figure(actions, "continuum", "scores against the base model's mean p", results, "RESULT", RESULTS)
    continuum.add_argument(
        "--base", action="append", default=[], metavar="REGIME=TABLE", help="the base model's token table of a regime"
    )
    continuum.add_argument("--temperature", type=float, help="the temperature to draw, if the results have several")
    entropy = figure(actions, "entropy", "scores against the tuned model's mean entropy", results, "RESULT", RESULTS)
    entropy.add_argument(
        "--tokens",
        action="append",
        default=[],
        metavar="[REGIME/]OBJECTIVE=TABLE",
        help="the tuned model's token table",
    )
    for parser, run in ((temperatures, run_temperatures), (continuum, run_continuum), (entropy, run_entropy)):
        parser.add_argument("--task", help="a task of the results (default: the suite's average)")
        parser.add_argument("--metric", choices=["score", "similarity"], help="default: score")
        parser.set_defaults(run=run)


RESULTS = "folders that `deftune eval` wrote"


def figure(actions: Any, name: str, about: str, metavar: str, kind: str, what: str) -> Any:
    """The parser of a figure's command: its inputs, or the table beside an earlier figure, and where to."""
    parser = actions.add_parser(name, help=f"figure: {about}")
    parser.add_argument("inputs", nargs="*", metavar=metavar, help=what)
    parser.add_argument("--table", type=Path, help=f"draw this table (CSV or Parquet) instead of {kind}s")
    parser.set_defaults(figure=name)
    parser.add_argument("--out", type=Path, default=Path("figures") / name, help=f"default: figures/{name}.png, ...")
    return parser


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
    with progress() as shown:
        shown.show("loading the libraries")
        from deftune.tokens.table import make_token_table

        bad_rows = args.out.with_name(f"{args.out.stem}.bad_rows.jsonl") if args.skip_bad_rows else None
        written = make_token_table(
            args.out, args.model, args.data, objectives=split_specs(args.objectives), bad_rows=bad_rows,
            facts={"command": args.line}, display=shown, **data_options(args),
        )  # fmt: skip
        shown.print(f"{written.tokens}: {written.num_tokens:,} tokens; {written.rows}: their rows")
    return 0


# --- figures ----------------------------------------------------------------------------------------------------------


def parse_named(text: str, *, need_name: bool = False) -> tuple[str, str, str]:
    """(regime, name, path) of ``regime/name=path``, ``name=path`` or ``path``.

    >>> parse_named("strong/deft=runs/a.parquet"), parse_named("a.parquet")
    (('strong', 'deft', 'runs/a.parquet'), ('', '', 'a.parquet'))
    """
    name, equals, path = text.rpartition("=")
    if need_name and not name:
        raise ValueError(f"{text}: name its model or objective, as in deft={text}")
    if not path or (equals and not name):
        raise ValueError(f"{text}: write it as NAME=PATH")
    regime, _, last = name.rpartition("/")
    return regime, last, path


def parse_regimes(inputs: list[str]) -> dict[str, str]:
    """Regime -> path of ``regime=path`` or ``path``.

    >>> parse_regimes(["strong=a.parquet"]), parse_regimes(["a.parquet"])
    ({'strong': 'a.parquet'}, {'': 'a.parquet'})
    """
    for regime, name, path in map(parse_named, inputs):
        if regime:
            raise ValueError(f"{regime}/{name}={path}: write it as REGIME=PATH, without a /")
    return {regime: path for (_, regime), path in parse_each(inputs).items()}


def parse_each(inputs: list[str], **options: Any) -> dict[tuple[str, str], str]:
    """(regime, name) -> path; a name given twice would hide one of the two."""
    found: dict[tuple[str, str], str] = {}
    for text in inputs:
        regime, name, path = parse_named(text, **options)
        if (regime, name) in found:
            raise ValueError(
                f"{text}: {'/'.join(filter(None, (regime, name))) or 'a table without a name'} is given twice"
            )
        found[regime, name] = path
    return found


def need_inputs(args: argparse.Namespace, example: str) -> None:
    """A figure is made from its inputs or from a table, not from both, nor from nothing."""
    if bool(args.inputs) == (args.table is not None):
        raise ValueError(f"analyze {args.figure}: give either inputs ({example}) or --table")


def draw(args: argparse.Namespace, plot: Any, table: Any) -> int:
    from deftune.inspection.style import save_figure

    for path in save_figure(plot(table), args.out, table):
        print(path)
    return 0


def given_table(args: argparse.Namespace, *unused: str) -> Any:
    """The table of --table; options that only make a table are refused beside it."""
    from deftune.inspection.style import read_table

    for name in unused:
        if getattr(args, name) not in (None, []):
            raise ValueError(f"--{name}: has no effect on a table that is made; leave it out")
    return read_table(args.table)


def print_lines(lines: list[dict[str, Any]]) -> None:
    """A small table on the terminal, numbers to three digits."""
    cells = [[f"{v:.3f}" if isinstance(v, float) else str(v) for v in line.values()] for line in lines]
    say(align([list(lines[0]), *cells]))


def run_conflicts(args: argparse.Namespace) -> int:
    need_training()
    from deftune.paper.conflicts import NEEDED, conflict_shares, conflict_tables, plot_conflicts
    from deftune.tokens.table import read_token_table

    need_inputs(args, "A.parquet B.parquet")
    if args.table is not None:
        table = given_table(args)
    else:
        tables = [read_token_table(path, NEEDED) for path in args.inputs]
        table = conflict_tables(tables, objective=args.objective, threshold=args.threshold)
    print_lines(conflict_shares(table))
    return draw(args, plot_conflicts, table)


def run_gradients(args: argparse.Namespace) -> int:
    need_training()
    from deftune.inspection.figures import gradient_map_table, plot_gradient_maps
    from deftune.tokens.table import read_token_table

    need_inputs(args, "strong=tokens.parquet")
    if args.table is not None:
        return draw(args, plot_gradient_maps, given_table(args, "objectives"))
    tables = {regime: read_token_table(path) for regime, path in parse_regimes(args.inputs).items()}
    return draw(
        args, plot_gradient_maps, gradient_map_table(tables, split_specs(args.objectives) if args.objectives else None)
    )


def run_histograms(args: argparse.Namespace) -> int:
    need_training()
    from deftune.inspection.figures import histogram_table, plot_histograms, probability_shares
    from deftune.tokens.table import read_token_table

    need_inputs(args, "strong/base=base.parquet strong/deft=deft.parquet")
    if args.table is not None:
        table = given_table(args)
    else:
        named = parse_each(args.inputs, need_name=True)
        table = histogram_table({key: read_token_table(path, ["p"]) for key, path in named.items()})
    print_lines(probability_shares(table))
    return draw(args, plot_histograms, table)


def run_progress(args: argparse.Namespace) -> int:
    need_training()
    from deftune.inspection.figures import focus_anchors, plot_progress, progress_table

    need_inputs(args, "strong=runs/first")
    if args.table is not None:
        table = given_table(args)
    else:
        table = progress_table([(name, path) for _, name, path in map(parse_named, args.inputs)])
    if anchors := focus_anchors(table):
        print_lines(anchors)
    return draw(args, plot_progress, table)


def read_scores(args: argparse.Namespace) -> list[dict[str, Any]]:
    from deftune.comparison.figures import score_table

    named = parse_each(args.inputs, need_name=True)
    return score_table(
        [(regime, name, path) for (regime, name), path in named.items()], task=args.task, metric=args.metric or "score"
    )


def run_temperatures(args: argparse.Namespace) -> int:
    need_training()
    from deftune.comparison.figures import plot_temperatures

    need_inputs(args, "deft=results/deft-math")
    return draw(args, plot_temperatures, read_scores(args) if args.inputs else given_table(args, "task", "metric"))


def mean_of(path: str, column: str) -> float:
    """The mean of a token table's column."""
    import numpy as np

    from deftune.tokens.table import read_token_table

    return float(np.mean(np.asarray(read_token_table(path, [column])[column], dtype=np.float64)))


def run_continuum(args: argparse.Namespace) -> int:
    need_training()
    from deftune.comparison.figures import continuum_table, plot_continuum

    need_inputs(args, "weak/deft=results/deft-figfont")
    if args.table is not None:
        return draw(args, plot_continuum, given_table(args, "task", "metric", "base", "temperature"))
    scores = read_scores(args)
    base_p = {regime: mean_of(path, "p") for regime, path in parse_regimes(args.base).items()}
    return draw(args, plot_continuum, continuum_table(scores, base_p, temperature=args.temperature))


def run_entropy(args: argparse.Namespace) -> int:
    need_training()
    from deftune.comparison.figures import entropy_table, plot_entropy

    need_inputs(args, "deft=results/deft-math --tokens deft=deft.parquet")
    if args.table is not None:
        return draw(args, plot_entropy, given_table(args, "task", "metric", "tokens"))
    scores = read_scores(args)
    entropies = {key: mean_of(path, "entropy") for key, path in parse_each(args.tokens, need_name=True).items()}
    return draw(args, plot_entropy, entropy_table(scores, entropies))
