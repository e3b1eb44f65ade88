"""The study as commands, run in a checkout of the repository.

    python -m benchmarks.study run --minutes 25 --jobs 2     # the cells that are missing, in the plan's order
    python -m benchmarks.study collect comparisons/study-strong --out benchmarks/study/results/strong.json
    python -m benchmarks.study report            # pages, figures and evidence from the committed results
    python -m benchmarks.study report --check    # say which of them do not agree with the results

`run` runs cells on the machine's GPU and merges each one into the committed file of its comparison as it ends;
`collect` does the same for folders of comparisons. `report` reads all committed files and needs no GPU.

Nothing here imports torch before a command that needs it runs: `run` starts the processes of its cells first.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deftune.comparison.process import Process, started_early

from . import FOLDER

if TYPE_CHECKING:
    from .run import Planned


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.study", description="the study: run, collect, report")
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    run = actions.add_parser("run", help="run the missing cells of the plan, and merge each one as it ends")
    run.add_argument("--minutes", type=float, required=True, help="start no cell that would not end within so many")
    run.add_argument("--jobs", type=int, default=1, help="cells at a time")
    run.add_argument("--only", default="", metavar="EXPRESSION", help="cells whose name this regular expression finds")
    run.add_argument("--results", type=Path, default=FOLDER / "results", metavar="FOLDER",
                     help="results files to go on from and to write (default: the committed ones)")  # fmt: skip
    run.add_argument("--dry-run", action="store_true", help="list the missing cells and their expected seconds")
    run.set_defaults(run=run_cells)

    merge = actions.add_parser("collect", help="merge the cells of comparisons into a results file")
    merge.add_argument("folders", type=Path, nargs="*", help="folders of the same comparison")
    merge.add_argument("--rerun", type=Path, action="append", default=[], metavar="FOLDER",
                       help="cells that were run again on purpose; repeatable")  # fmt: skip
    merge.add_argument("--out", type=Path, required=True, help="results file; the cells that it has are kept")
    merge.add_argument("--config", metavar="FILE", help="YAML file of the comparison, for the printed commands "
                       "(default: benchmarks/study/NAME.yaml, NAME from --out)")  # fmt: skip
    merge.set_defaults(run=collect_cells)

    write = actions.add_parser("report", help="write pages, figures and evidence from the committed results")
    write.add_argument("--root", type=Path, default=Path(), help="the checkout (default: the working folder)")
    write.add_argument("--check", action="store_true", help="write nothing; exit code 1 where something disagrees")
    write.set_defaults(run=write_report)

    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, OSError) as error:
        print(f"study: {error}", file=sys.stderr)
        return 2


def run_cells(args: argparse.Namespace) -> int:
    """Exit code 1 if a cell failed, 128 + the signal if a signal stopped the cells."""
    if args.minutes <= 0 or args.jobs < 1:
        raise ValueError("--minutes is above 0 and --jobs at least 1")
    try:
        re.compile(args.only)
    except re.error as error:
        raise ValueError(f"--only: {args.only!r} is no regular expression: {error}") from None
    with started_early(0 if args.dry_run else args.jobs) as early:
        return run_missing(args, early)


def run_missing(args: argparse.Namespace, early: Sequence[Process]) -> int:
    from .plan import Plan
    from .run import missing_cells, run_queue

    plan = Plan(FOLDER / "plan.yaml")
    if args.dry_run:
        missing = missing_cells(plan, FOLDER, args.results, args.only)
        width = max((len(one.cell.name) for one in missing), default=0) + 2
        for one in missing:
            print(f"{one.cell.name:{width}}tier {one.tier:16}{one.seconds:>5.0f} s")
        print(left_text(missing, args.jobs))
        return 0
    outcome = run_queue(
        plan, FOLDER, args.results, minutes=args.minutes, jobs=args.jobs, only=args.only,
        say=lambda text: print(text, flush=True), early=early,
    )  # fmt: skip
    print(f"{len(outcome.finished)} cells finished, {len(outcome.failed)} failed; {left_text(outcome.left, args.jobs)}")
    return 128 + outcome.signal if outcome.signal else 1 if outcome.failed else 0


def left_text(left: Sequence[Planned], jobs: int) -> str:
    minutes = sum(one.seconds for one in left) / 60 / jobs
    return f"{len(left)} planned cells are missing, about {minutes:.0f} minutes with {jobs} at a time"


def collect_cells(args: argparse.Namespace) -> int:
    from .cells import collect

    study, messages = collect(args.folders, args.out, reruns=args.rerun, file=args.config)
    for line in messages:
        print(line, file=sys.stderr)
    done = sum(cell["state"] == "finished" for cell in study.cells.values())
    print(f"{args.out}: {done} cells, {args.out.stat().st_size / 1e6:.2f} MB")
    return 0


def write_report(args: argparse.Namespace) -> int:
    from .pages import report

    changed = report(args.root, check=args.check)
    for path in changed:
        print(f"{path}: {'does not agree with the committed results' if args.check else 'written'}")
    return 1 if args.check and changed else 0


if __name__ == "__main__":
    raise SystemExit(main())
