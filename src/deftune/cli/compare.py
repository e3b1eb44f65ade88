"""`deftune compare` and `report`: objectives against each other on the same data, seeds and budget."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deftune.artifacts.options import check_counts
from deftune.artifacts.terminal import align
from deftune.cli.options import add_trust, need
from deftune.cli.output import notice, say
from deftune.cli.progress import Progress, progress
from deftune.cli.train import refuse_recorded_trust, write_starter

FORMATS = ("text", "markdown", "latex", "html", "json")


def add_to(commands: Any) -> None:
    compare = commands.add_parser(
        "compare", help="train and measure several objectives with the same data, seeds and learning rates"
    )
    actions = compare.add_subparsers(metavar="ACTION", required=True)

    init = actions.add_parser("init", help="write a comparison to start from")
    init.add_argument(
        "file", type=Path, nargs="?", default=Path("compare.yaml"), help="the file to write (default: compare.yaml)"
    )
    init.set_defaults(run=run_init)

    run = actions.add_parser(
        "run", help="train and measure every cell (objective, data, learning rate, seed); the same command resumes"
    )
    run.add_argument("config", type=Path, help="a YAML file (`deftune compare init` writes one), or its folder")
    run.add_argument(
        "--set", action="append", default=[], metavar="a.b=c", help="override a key of the file; repeatable"
    )
    run.add_argument(
        "--dry-run", action="store_true", help="list the cells, and the tokens they would train on and generate"
    )
    run.add_argument("--cell", metavar="NAME", help="run only this cell, in this process (for job arrays)")
    run.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)  # started by `process.Process`
    run.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="cells at a time, on the same device (default: 1); with more, measured times are longer",
    )
    add_trust(run)
    run.add_argument(
        "--keep-going",
        action="store_true",
        help="start every cell even if two objectives fail with the same error and none succeeds",
    )
    run.set_defaults(run=run_run)

    show = actions.add_parser("show", help="scores, differences, token statistics and cost of what is finished")
    show.add_argument("config", type=Path, help="a comparison's folder, or its YAML file")
    show.add_argument("--format", choices=FORMATS, default="text", help="format of the tables (default: text)")
    show.add_argument("--beside", metavar="MODEL", help="print the paper's numbers for this model beside yours")
    show.add_argument(
        "--rank-base", action="store_true", help="rank the untuned model too (best bold, second underlined)"
    )
    show.set_defaults(run=run_show)

    report = commands.add_parser("report", help="write a comparison as one self-contained HTML page")
    report.add_argument("folder", type=Path, help="a comparison's folder (`deftune compare run` makes one)")
    report.add_argument("--out", type=Path, help="the page (default: FOLDER/report.html)")
    report.add_argument("--figures", type=Path, metavar="DIR", help="also save its figures here: PNG, SVG, PDF, tables")
    report.set_defaults(run=run_report)


def run_init(args: argparse.Namespace) -> int:
    need("eval")
    from deftune.comparison.grid import STARTER

    return write_starter(args.file, STARTER, "deftune compare run")


def run_run(args: argparse.Namespace) -> int:
    from deftune.comparison.process import count_unfinished, started_early

    need("eval")
    check_counts(jobs=args.jobs)
    if args.dry_run and args.cell:
        raise ValueError("--cell: a dry run lists all cells; leave it out")
    if args.cell or args.dry_run:
        why = "--cell runs one" if args.cell else "a dry run runs none"
        for option, given in {"--jobs": args.jobs is not None, "--keep-going": args.keep_going}.items():
            if given:
                raise ValueError(f"{option}: {why}; leave it out")
    if args.worker:
        return run_worker()
    if args.cell and sys.stderr.isatty():  # training has a display of its own
        return run_one(args)
    early = 0 if args.cell or args.dry_run else min(args.jobs or 1, count_unfinished(args.config, args.set))
    with started_early(early) as processes, progress() as shown:
        shown.show(f"running {args.cell}" if args.cell else "reading the comparison and its data")
        return run_one(args) if args.cell else run_all(args, shown, processes)


def run_one(args: argparse.Namespace) -> int:
    from deftune.comparison.cells import run_cell
    from deftune.comparison.grid import load_comparison, open_comparison
    from deftune.comparison.schedule import check_comparison

    comparison = load_comparison(args.config, args.set)
    check_trust(args.config, comparison, args.trust_remote_code)
    check_comparison(comparison, notice)
    open_comparison(comparison)
    return 0 if run_cell(comparison.cell(args.cell)) == "finished" else 143


def run_worker() -> int:
    from deftune.comparison.process import Request, Requests

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the starter may ignore them
    signal.signal(signal.SIGINT, signal.default_int_handler)
    requests = Requests()
    requests.listen()
    from deftune.comparison.grid import load_comparison
    from deftune.comparison.worker import serve

    def load(request: Request) -> Any:
        comparison = load_comparison(Path(request.comparison))
        check_trust(Path(request.comparison), comparison, request.trust_remote_code)
        return comparison

    return serve(requests, load)


def run_all(args: argparse.Namespace, shown: Progress, early: Sequence[Any]) -> int:
    from deftune.comparison.grid import load_comparison
    from deftune.comparison.schedule import Children, dry_run_grid, run_grid
    from deftune.comparison.summary import summarize_comparison

    comparison = load_comparison(args.config, args.set)
    check_trust(args.config, comparison, args.trust_remote_code)
    if args.dry_run:
        dry_run_grid(comparison, shown.print)
        return 0

    def watch(running: Sequence[Any]) -> None:
        show_cells(shown, comparison, running)

    children = Children(args.jobs or 1, watch, early=early)
    outcome = run_grid(comparison, children, shown.print, keep_going=args.keep_going)
    if outcome.finished and not outcome.stopped:
        shown.show("summarising")
        summarize_comparison(comparison)
    skipped = f", {len(outcome.not_started)} not started" if outcome.not_started else ""
    total = len(comparison.cells())
    shown.print(f"{len(outcome.finished)} of {total} cells finished, {len(outcome.failed)} failed{skipped}")
    if not outcome.stopped and outcome.finished:
        shown.print(f"next:\n  deftune compare show {comparison.folder}\n  deftune report {comparison.folder}")
    return outcome.exit_code


def check_trust(config: Path, comparison: Any, trusted: bool) -> None:
    """Refuse a flag that no cell needs, and code of a model that only the comparison's own folder asks to run."""
    asking = [cell for cell in comparison.cells() if cell.config.model.trust_remote_code]
    if trusted and not asking:
        raise ValueError("--trust-remote-code: no cell asks for it; set model.trust_remote_code in the file")
    if asking and not trusted:
        refuse_recorded_trust(config, "comparison", asking[0].config.model.name)


def show_cells(shown: Progress, comparison: Any, running: Sequence[Any]) -> None:
    """A bar over the cells in a terminal; in a log where each running cell stands."""
    from deftune.comparison.schedule import cell_progress

    if sys.stderr.isatty():
        cells = comparison.cells()
        shown.show("cells", sum(cell.is_finished for cell in cells), len(cells))
    else:
        shown.show("; ".join(cell_progress(cell) for cell in running) or "waiting")


def shown_state(cell: dict[str, Any]) -> str:
    """A cell's state; one that says "running" while no process has it was killed."""
    from deftune.artifacts.folders import is_locked

    if cell["state"] == "running" and not is_locked(Path(cell["folder"])):
        return "interrupted"
    return cell["state"]


def run_show(args: argparse.Namespace) -> int:
    need("eval")
    from deftune.comparison.grid import load_comparison
    from deftune.comparison.show import cost_lines, difference_lines, token_lines
    from deftune.comparison.summary import summarize_comparison
    from deftune.comparison.tables import escape_markdown, render
    from deftune.paper.beside import tables_beside_paper

    if args.format == "json" and (args.beside or args.rank_base):
        option = "--beside" if args.beside else "--rank-base"
        raise ValueError(f"{option}: is for tables; JSON has the comparison's own numbers: leave it out")
    comparison = load_comparison(args.config)
    summary = summarize_comparison(comparison)
    if args.format == "json":
        print(json.dumps(summary, indent=1))
        return 0
    unfinished = {name: shown_state(cell) for name, cell in summary["cells"].items() if cell["state"] != "finished"}
    tables = tables_beside_paper(summary, beside=args.beside, rank_base=args.rank_base)
    if args.format not in ("text", "markdown"):
        say(render(tables, args.format).rstrip("\n"))
        return 0
    for table in tables:
        say(render([table], args.format))
    for regime, about in summary["regimes"].items():
        for evaluation in about["evaluations"]:
            for view in evaluation["views"]:
                if view["differences"]:
                    say(f"{regime}, {evaluation['title']}, {view['name']}: paired by item")
                    say(align(difference_lines(evaluation, view)) + "\n")
        if about["tokens"]:
            say(f"{regime}: held-out tokens\n{align(token_lines(about['tokens']))}\n")
        if about["cost"]:
            say(f"{regime}: training, a cell on average\n{align(cost_lines(about['cost']))}\n")
    plain = escape_markdown if args.format == "markdown" else lambda text: text.replace("\n", " ")
    for line in dict.fromkeys(line for cell in summary["cells"].values() for line in cell.get("left_out", ())):
        say(plain(f"left out of the token tables: {line}"))
    for name, state in unfinished.items():
        error = summary["cells"][name].get("error", "no reason recorded")
        say(plain(f"{state}: {name}" + (f": {error}" if state == "failed" else "")))
    return 0


def run_report(args: argparse.Namespace) -> int:
    need("eval")
    from deftune.comparison.grid import load_comparison
    from deftune.comparison.report import write_report
    from deftune.paper.beside import report_additions

    comparison = load_comparison(args.folder)
    for path in write_report(comparison, args.out, figures=args.figures, beside=report_additions):
        say(str(path))
    return 0
