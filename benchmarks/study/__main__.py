"""The study as commands, run in a checkout of the repository.

    python -m benchmarks.study run --minutes 25 --jobs 2     # the cells that are missing, in the plan's order
    python -m benchmarks.study collect comparisons/study-strong --out benchmarks/study/results/strong.json
    python -m benchmarks.study report            # pages, figures and evidence from the committed results
    python -m benchmarks.study report --check    # say which of them do not agree with the results

`run` runs cells on the machine's GPU and merges each one into the committed file of its comparison as it ends;
`collect` does the same for folders of comparisons. `report` reads all committed files and needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from deftune.artifacts.files import write_atomic

from .cells import collect, read_study
from .claims import ledger, ledger_block
from .effects import sections
from .evidence import evidence
from .figures import draw, figure_names
from .plan import Plan
from .report import readme_block, results_page
from .run import Planned, missing_cells, run_queue

FOLDER = Path("benchmarks/study")
IMAGES = Path("docs/images")
PAGES = {"results": Path("docs/study/results.md"), "study": Path("README.md"), "ledger": Path("docs/claims.md")}
"""By marker, the page that has it."""
EVIDENCE = Path("src/deftune/comparison/evidence.json")
LEDGER = Path("src/deftune/paper/ledger.json")


def put_between(text: str, marker: str, block: str, where: Path) -> str:
    """The text with ``block`` between ``<!-- marker -->`` and ``<!-- /marker -->``.

    >>> put_between("a <!-- x -->old<!-- /x --> b", "x", "new", Path("page.md"))
    'a <!-- x -->\\nnew\\n<!-- /x --> b'
    """
    first, last = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    if text.count(first) != 1 or text.count(last) != 1:
        raise ValueError(f"{where}: needs {first} and {last}, once each; the report is written between them")
    head, _, rest = text.partition(first)
    _, _, tail = rest.partition(last)
    return f"{head}{first}\n{block}\n{last}{tail}"


def report(root: Path, *, check: bool = False) -> list[Path]:
    """Write the study's pages, figures and evidence table below ``root``, the checkout.

    Args:
        root: the checkout of the repository.
        check: write nothing.

    Returns:
        The files that were not what the committed results say, and now are (with ``check``: still are not). Figures are
        drawn anew by each call without ``check``, and with it they must exist.
    """
    studies = [read_study(path) for path in sorted((root / FOLDER / "results").glob("*.json"))]
    plan = Plan(root / FOLDER / "plan.yaml")
    found = plan.arranged(sections(studies))
    changed: list[Path] = []
    figures: list[str] = []
    for section in found:
        if check:
            wanted = [name for (name, _), more in zip(figure_names(section), (section.temperatures, section.rates))
                      if len(more) > 1]  # fmt: skip
            changed += [IMAGES / name for name in wanted if not (root / IMAGES / name).is_file()]
            figures += wanted
        else:
            figures += draw(section, plan, root / IMAGES)
    earlier = yaml.safe_load((root / FOLDER / "earlier.yaml").read_text(encoding="utf-8"))
    claims = ledger(found, plan)
    files = {EVIDENCE: evidence(found, plan, earlier), LEDGER: claims}
    texts = {path: json.dumps(content, indent=1) + "\n" for path, content in files.items()}
    blocks = {"results": results_page(studies, found, plan, figures), "study": readme_block(found, plan, figures),
              "ledger": ledger_block(claims)}  # fmt: skip
    for marker, page in PAGES.items():
        texts[page] = put_between((root / page).read_text(encoding="utf-8"), marker, blocks[marker], page)
    for path, text in texts.items():
        if not (root / path).is_file() or (root / path).read_text(encoding="utf-8") != text:
            changed.append(path)
            if not check:
                write_atomic(root / path, text)
    return changed


def run_cells(args: argparse.Namespace) -> int:
    """`run`: exit code 1 where a cell failed, 128 + the signal where one stopped it."""
    if args.minutes <= 0 or args.jobs < 1:
        raise ValueError("--minutes is above 0 and --jobs at least 1")
    plan = Plan(FOLDER / "plan.yaml")
    if args.dry_run:
        missing = missing_cells(plan, FOLDER, args.results)
        width = max((len(one.cell.name) for one in missing), default=0) + 2
        for one in missing:
            print(f"{one.cell.name:{width}}tier {one.tier:16}{one.seconds:>5.0f} s")
        print(left_text(missing, args.jobs))
        return 0
    outcome = run_queue(
        plan, FOLDER, args.results, minutes=args.minutes, jobs=args.jobs, say=lambda text: print(text, flush=True)
    )
    print(f"{len(outcome.finished)} cells finished, {len(outcome.failed)} failed; {left_text(outcome.left, args.jobs)}")
    return 128 + outcome.signal if outcome.signal else 1 if outcome.failed else 0


def left_text(left: Sequence[Planned], jobs: int) -> str:
    minutes = sum(one.seconds for one in left) / 60 / jobs
    return f"{len(left)} planned cells are missing, about {minutes:.0f} minutes with {jobs} at a time"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.study", description="the study: run, collect, report")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    zero = actions.add_parser("run", help="run the missing cells of the plan, and merge each one as it ends")
    zero.add_argument("--minutes", type=float, required=True, help="start no cell that would not end within so many")
    zero.add_argument("--jobs", type=int, default=1, help="cells at a time")
    zero.add_argument("--results", type=Path, default=FOLDER / "results", metavar="FOLDER",
                      help="results files to go on from and to write (default: the committed ones)")  # fmt: skip
    zero.add_argument("--dry-run", action="store_true", help="list the missing cells and their expected seconds")
    one = actions.add_parser("collect", help="merge the cells of comparisons into a results file")
    one.add_argument("folders", type=Path, nargs="*", help="folders of the same comparison")
    one.add_argument("--rerun", type=Path, action="append", default=[], metavar="FOLDER",
                     help="cells that were run again on purpose; repeatable")  # fmt: skip
    one.add_argument("--out", type=Path, required=True, help="results file; the cells that it has are kept")
    one.add_argument("--config", metavar="FILE", help="YAML file of the comparison, for the printed commands "
                     "(default: benchmarks/study/NAME.yaml, NAME from --out)")  # fmt: skip
    two = actions.add_parser("report", help="write pages, figures and evidence from the committed results")
    two.add_argument("--root", type=Path, default=Path(), help="the checkout (default: the working folder)")
    two.add_argument("--check", action="store_true", help="write nothing; exit code 1 where something disagrees")
    args = parser.parse_args(argv)
    try:
        if args.action == "run":
            return run_cells(args)
        if args.action == "collect":
            study, said = collect(args.folders, args.out, reruns=args.rerun, file=args.config)
            for line in said:
                print(line, file=sys.stderr)
            done = sum(cell["state"] == "finished" for cell in study.cells.values())
            print(f"{args.out}: {done} cells, {args.out.stat().st_size / 1e6:.2f} MB")
            return 0
        changed = report(args.root, check=args.check)
    except (ValueError, OSError) as error:
        print(f"study: {error}", file=sys.stderr)
        return 2
    for path in changed:
        print(f"{path}: {'does not agree with the committed results' if args.check else 'written'}")
    return 1 if args.check and changed else 0


if __name__ == "__main__":
    raise SystemExit(main())
