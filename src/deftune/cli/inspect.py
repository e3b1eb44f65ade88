"""`deftune inspect`: the tokens of a dataset that contradict a model, and each objective's gradient there."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from deftune.artifacts.options import check_counts
from deftune.cli import analyze
from deftune.cli.options import add_data_options, add_model_and_data, data_options, flag, need
from deftune.cli.output import notice
from deftune.cli.progress import Progress, progress


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        help="find tokens that contradict the model, likely label errors, and each objective's gradient there",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  deftune inspect MODEL DATA --html page.html     write a page for the browser\n"
        "  deftune inspect MODEL DATA --export flagged.jsonl --keep rest.jsonl\n"
        "  deftune inspect --tokens tokens.parquet         read a token table again",
    )
    add_model_and_data(parser, optional=True)
    parser.add_argument(
        "--objectives", metavar="A,B", help=f"objectives to show (default: {analyze.OBJECTIVES}, or those of the table)"
    )
    parser.add_argument(
        "--by", metavar="SCORE", help="the score that ranks the rows: answer, conflict, noise, mean_nll, ..."
    )
    parser.add_argument(
        "--top", type=int, metavar="N", default=50, help="most rows to list and to export (default: 50)"
    )
    parser.add_argument(
        "--min-score", type=float, metavar="X", help="only rows with at least this score (of mean_p: at most)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write an HTML page to explore, all in one file")
    parser.add_argument(
        "--export",
        type=Path,
        metavar="FILE",
        help="write the flagged rows (with --min-score: the rows of that score) as JSONL",
    )
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write all other rows of the data as JSONL")
    parser.add_argument("--tokens", type=Path, metavar="FILE", help="read this token table if it exists, else write it")
    add_data_options(parser)
    parser.set_defaults(run=run_inspect)


def run_inspect(args: argparse.Namespace) -> int:
    need()
    from rich.console import Console

    with progress() as shown:
        shown.show("loading the libraries")
        check_arguments(args)
        inspection = inspect(args, shown)
    by = args.by or inspection.default_ranking
    ranked = inspection.ranked_rows(by, args.min_score)
    from deftune.inspection.terminal import render_inspection

    render_inspection(inspection, Console(), ranked[: args.top], by=by)
    with progress() as shown:
        write_files(args, inspection, ranked, by, shown)
    return 0


def inspect(args: argparse.Namespace, shown: Progress) -> Any:
    """The inspection of the table that --tokens names, where that exists, else of the model and the data."""
    from deftune.inspection.inspect import inspect_rows, inspect_table
    from deftune.objectives import objective

    specs = args.objectives and [str(objective(spec)) for spec in analyze.split_specs(args.objectives)]
    if args.tokens is not None and args.tokens.exists():
        shown.show(f"reading {args.tokens.name}")
        inspection = inspect_table(args.tokens, specs)
        check_source(args, inspection.facts)
        return inspection
    return inspect_rows(
        args.model, args.data, tokens=args.tokens, objectives=specs or analyze.OBJECTIVES.split(","),
        bad_rows=bad_rows_path(args), facts={"command": args.line}, display=shown, **data_options(args),
    )  # fmt: skip


def bad_rows_path(args: argparse.Namespace) -> Path | None:
    """Where --skip-bad-rows lists the rows: beside the table, or in the working folder if the table is temporary."""
    if not args.skip_bad_rows:
        return None
    return args.tokens.with_name(f"{args.tokens.stem}.bad_rows.jsonl") if args.tokens else Path("bad_rows.jsonl")


def write_files(args: argparse.Namespace, inspection: Any, ranked: Any, by: str, shown: Progress) -> None:
    """The page and the rows that were asked for."""
    if args.html:
        from deftune.inspection.page import write_page

        shown.show(f"writing {args.html}")
        shown.print(f"{write_page(inspection, args.html)}: open it in a browser")
    if args.export or args.keep:
        shown.show("writing rows")
        from deftune.data.rows import BadRows
        from deftune.inspection.export import source_records, write_export
        from deftune.inspection.inspect import flags

        bad = BadRows(skip=args.skip_bad_rows)
        records = source_records(inspection, args.split, bad)
        suspects = [row for row in ranked.tolist() if args.min_score is not None or flags(inspection, row)]
        done = write_export(inspection, suspects[: args.top], records, by=by, export=args.export, keep=args.keep)
        if args.export:
            shown.print(f"{args.export}: {exported_text(done.flagged, len(suspects), by, args.min_score)}")
        if args.keep:
            rest = f", {done.not_inspected:,} of them not inspected" if done.not_inspected else ""
            shown.print(f"{args.keep}: the other {done.kept:,} rows{rest}")
        if bad.rows:
            notice(f"{bad.summary()}: unreadable, and in neither file")


def exported_text(written: int, suspects: int, by: str, min_score: float | None) -> str:
    """What an export holds: how many rows, and why those."""
    sign = "<=" if by == "mean_p" else ">="
    why = f"with {by} {sign} {min_score:g}" if min_score is not None else "with a reason"
    if not suspects:
        hint = "" if min_score is not None else "; --min-score takes rows by their score alone"
        return f"no row {why}{hint}"
    rows = f"{written:,} row{'s' * (written != 1)}"
    return f"{rows} {why}, by {by}" + (
        f"; {suspects - written:,} more (--top {suspects})" if suspects > written else ""
    )


def check_arguments(args: argparse.Namespace) -> None:
    """What can be known to be wrong before a model is loaded."""
    from deftune.inspection.inspect import ROW_SCORES

    known = [score.name for score in ROW_SCORES]
    if args.by and args.by not in known:
        raise ValueError(f"--by: unknown score {args.by!r}. Known: {', '.join(known)}")
    check_counts(top=args.top)
    if args.tokens is not None and args.tokens.exists():
        for name in data_options(args):  # of no use beside a table that is made
            if name != "split":  # which says what rows are copied
                raise ValueError(
                    f"{flag(name)}: {args.tokens} is made already; leave {flag(name)} out, or name a new table"
                )
        for name in ("split", "skip_bad_rows"):
            if getattr(args, name) and not (args.export or args.keep):
                raise ValueError(f"{flag(name)}: {args.tokens} is made already, and nothing is exported; leave it out")
    elif args.model is None or args.data is None:
        hint = f"; {args.tokens} does not exist" if args.tokens else ""
        raise ValueError(f"inspect: needs a model and data, or --tokens with a table{hint}")
    for path in outputs(args):
        if path.is_dir():
            raise ValueError(f"{path}: is a folder; name a file")
    if len({path.resolve() for path in outputs(args)}) < len(outputs(args)):
        raise ValueError("inspect: two of --html, --export, --keep and --tokens name the same file")
    if args.data:
        refuse_overwriting(args, args.data)


def outputs(args: argparse.Namespace) -> list[Path]:
    """The files that the command may write."""
    return [path for path in (args.html, args.export, args.keep, args.tokens) if path]


def refuse_overwriting(args: argparse.Namespace, data: str) -> None:
    """What is written is neither the data nor, in a folder of data, taken for data the next time."""
    source = Path(data).resolve()
    for path in outputs(args):
        if source.exists() and path.resolve().is_relative_to(source):
            raise ValueError(
                f"{path}: is {'in the data folder' if source.is_dir() else 'the data itself'}; name another file"
            )


def check_source(args: argparse.Namespace, facts: dict[str, Any]) -> None:
    """A table that is reused is of this model and data, and of the data as it is now where rows are copied from it."""
    for name in ("model", "data"):
        given = getattr(args, name)
        if given is not None and given != facts.get(name):
            raise ValueError(
                f"{args.tokens}: was made with {name} {facts.get(name)!r}, not {given!r}; name a new table"
            )
    refuse_overwriting(args, facts.get("data", ""))
    if args.export or args.keep:
        source = Path(facts.get("data", ""))
        if args.tokens and source.is_file() and source.stat().st_mtime > args.tokens.stat().st_mtime:
            raise ValueError(
                f"{source}: changed after {args.tokens} was made, so rows may have moved; make the table anew"
            )
