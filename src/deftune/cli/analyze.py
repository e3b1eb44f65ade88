"""`deftune analyze`: token tables, and the figures made from them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from deftune.artifacts.terminal import align
from deftune.cli.options import add_data_options, add_model_and_data, data_options, flag, need
from deftune.cli.output import say
from deftune.cli.progress import progress

OBJECTIVES = "nll,linear,cayley,deft,eaft"


def add_to(commands: Any) -> None:
    analyze = commands.add_parser("analyze", help="make token tables, and draw figures from tables, runs and results")
    actions = analyze.add_subparsers(metavar="ACTION", required=True)

    tokens = actions.add_parser(
        "tokens", help="a table of every supervised token: p, entropy, rank, and each objective's gate"
    )
    add_model_and_data(tokens)
    tokens.add_argument(
        "--out", type=Path, default=Path("tokens.parquet"), help="the file to write (default: tokens.parquet)"
    )
    tokens.add_argument(
        "--objectives", default=OBJECTIVES, metavar="A,B", help=f"columns for these (default: {OBJECTIVES})"
    )
    add_data_options(tokens)
    tokens.set_defaults(run=run_tokens)

    table = {"action": "append", "default": []}
    scores = {
        "--task": {"help": "a task of the results (default: the suite's average)"},
        "--metric": {"choices": ["score", "similarity"], "help": "what is drawn (default: score)"},
    }
    results = {"inputs": "[REGIME/]OBJECTIVE=RESULT", "what": "folders that `deftune eval` wrote"}
    add_figure(
        actions, "conflicts", conflicts, "tokens learned and forgotten between two checkpoints", "BEFORE AFTER",
        "token tables of the same rows; more pairs make more panels", "A.parquet B.parquet", {
            "--objective": {"help": "the objective whose change of loss is drawn (default: nll)"},
            "--threshold": {"type": float, "help": "a smaller change of p counts as no change (default: 0.01)"},
        },
    )  # fmt: skip
    add_figure(
        actions, "gradients", gradients, "gradient norms over p and entropy, a panel per objective", "REGIME=TABLE",
        "token tables, a row of panels each; REGIME= is optional for one table", "strong=tokens.parquet",
        {"--objectives": {"metavar": "A,B", "help": "objectives to draw (default: all in the tables)"}},
    )  # fmt: skip
    add_figure(
        actions, "histograms", histograms, "target probabilities, base against tuned models", "[REGIME/]MODEL=TABLE",
        "token tables; MODEL is base, or the objective a model was tuned with",
        "strong/base=base.parquet strong/deft=deft.parquet",
    )  # fmt: skip
    add_figure(
        actions, "progress", training_progress, "p and concentration over training", "REGIME=RUN",
        "runs' folders; a regime may have several", "strong=runs/first",
    )  # fmt: skip
    add_figure(
        actions, "temperatures", temperatures, "scores against the sampling temperature", **results,
        example="deft=results/deft-math", options=scores,
    )  # fmt: skip
    add_figure(
        actions, "continuum", continuum, "scores against the base model's mean p", **results,
        example="weak/deft=results/deft-figfont", options={
            "--base": {**table, "metavar": "REGIME=TABLE", "help": "the base model's token table of a regime"},
            "--temperature": {"type": float, "help": "the temperature to draw, if the results have several"}, **scores,
        },
    )  # fmt: skip
    add_figure(
        actions, "entropy", entropy, "scores against the tuned model's mean entropy", **results,
        example="deft=results/deft-math --tokens deft=deft.parquet", options={
            "--tokens": {**table, "metavar": "[REGIME/]OBJECTIVE=TABLE", "help": "the tuned model's token table"},
            **scores,
        },
    )  # fmt: skip


def add_figure(
    actions: Any, name: str, parts: Callable[[argparse.Namespace], Figure], about: str, inputs: str, what: str,
    example: str, options: dict[str, dict[str, Any]] | None = None,
) -> None:  # fmt: skip
    """The command of a figure.

    Args:
        actions: of the parser of `deftune analyze`.
        name: of the command.
        parts: gives the figure's functions; it imports them.
        about: what the figure shows.
        inputs: how an input is written.
        what: what the inputs are.
        example: inputs, for an error.
        options: flags that only the making of the table reads, and their settings in argparse.
    """
    parser = actions.add_parser(name, help=f"figure: {about}")
    parser.add_argument("inputs", nargs="*", metavar=inputs, help=what)
    parser.add_argument("--table", type=Path, help="draw this table (CSV or Parquet) instead of making one")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("figures") / name,
        help=f"the files to write (default: figures/{name}.png, .svg, .pdf, and the table)",
    )
    names = [parser.add_argument(option, **settings).dest for option, settings in (options or {}).items()]
    parser.set_defaults(run=run_figure, figure=name, parts=parts, example=example, options=names)


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
    need()
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


class Figure(NamedTuple):
    """The functions of a figure: its table from the command's inputs, its picture, and lines to print with it."""

    make: Callable[[], Any]
    plot: Callable[[Any], Any]
    lines: Callable[[Any], list[dict[str, Any]]] | None = None


def run_figure(args: argparse.Namespace) -> int:
    """Draw a figure from the command's inputs, or from a table that an earlier figure was saved with."""
    need()
    if bool(args.inputs) == (args.table is not None):
        raise ValueError(f"analyze {args.figure}: give either inputs ({args.example}) or --table")
    if args.table is not None and (given := [name for name in args.options if getattr(args, name) not in (None, [])]):
        raise ValueError(f"{flag(given[0])}: has no effect on a table that is made; leave it out")
    from deftune.inspection.style import read_table, save_figure

    figure = args.parts(args)
    table = figure.make() if args.table is None else read_table(args.table)
    if lines := figure.lines(table) if figure.lines else []:
        cells = [
            [f"{value:.3f}" if isinstance(value, float) else str(value) for value in line.values()] for line in lines
        ]
        say(align([list(lines[0]), *cells]))
    for path in save_figure(figure.plot(table), args.out, table):
        print(path)
    return 0


def conflicts(args: argparse.Namespace) -> Figure:
    from deftune.paper.conflicts import NEEDED, conflict_shares, conflict_tables, plot_conflicts
    from deftune.tokens.table import read_token_table

    def make() -> Any:
        tables = [read_token_table(path, NEEDED) for path in args.inputs]
        threshold = 0.01 if args.threshold is None else args.threshold
        return conflict_tables(tables, objective=args.objective or "nll", threshold=threshold)

    return Figure(make, plot_conflicts, conflict_shares)


def gradients(args: argparse.Namespace) -> Figure:
    from deftune.inspection.figures import gradient_map_table, plot_gradient_maps
    from deftune.tokens.table import read_token_table

    def make() -> Any:
        tables = {regime: read_token_table(path) for regime, path in parse_regimes(args.inputs).items()}
        return gradient_map_table(tables, split_specs(args.objectives) if args.objectives else None)

    return Figure(make, plot_gradient_maps)


def histograms(args: argparse.Namespace) -> Figure:
    from deftune.inspection.figures import histogram_table, plot_histograms, probability_shares
    from deftune.tokens.table import read_token_table

    def make() -> Any:
        named = parse_each(args.inputs, need_name=True)
        return histogram_table({key: read_token_table(path, ["p"]) for key, path in named.items()})

    return Figure(make, plot_histograms, probability_shares)


def training_progress(args: argparse.Namespace) -> Figure:
    from deftune.inspection.figures import focus_anchors, plot_progress, progress_table

    def make() -> Any:
        return progress_table([(name, path) for _, name, path in map(parse_named, args.inputs)])

    return Figure(make, plot_progress, focus_anchors)


def read_scores(args: argparse.Namespace) -> list[dict[str, Any]]:
    from deftune.comparison.figures import score_table

    named = parse_each(args.inputs, need_name=True)
    folders = [(regime, name, path) for (regime, name), path in named.items()]
    return score_table(folders, task=args.task, metric=args.metric or "score")


def mean_of(path: str, column: str) -> float:
    """The mean of a token table's column."""
    import numpy as np

    from deftune.tokens.table import read_token_table

    return float(np.mean(np.asarray(read_token_table(path, [column])[column], dtype=np.float64)))


def temperatures(args: argparse.Namespace) -> Figure:
    from deftune.comparison.figures import plot_temperatures

    return Figure(lambda: read_scores(args), plot_temperatures)


def continuum(args: argparse.Namespace) -> Figure:
    from deftune.comparison.figures import continuum_table, plot_continuum

    def make() -> Any:
        scores = read_scores(args)
        base_p = {regime: mean_of(path, "p") for regime, path in parse_regimes(args.base).items()}
        return continuum_table(scores, base_p, temperature=args.temperature)

    return Figure(make, plot_continuum)


def entropy(args: argparse.Namespace) -> Figure:
    from deftune.comparison.figures import entropy_table, plot_entropy

    def make() -> Any:
        scores, tables = read_scores(args), parse_each(args.tokens, need_name=True)
        return entropy_table(scores, {key: mean_of(path, "entropy") for key, path in tables.items()})

    return Figure(make, plot_entropy)
