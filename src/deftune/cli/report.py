"""`deftune report`: a comparison as one page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from deftune.cli.compare import need_comparison
from deftune.cli.output import say


def add_to(commands: Any) -> None:
    report = commands.add_parser("report", help="a comparison as one self-contained HTML page")
    report.add_argument("folder", type=Path, help="a comparison's folder (`deftune compare run` makes one)")
    report.add_argument("--out", type=Path, help="the page (default: FOLDER/report.html)")
    report.add_argument("--figures", type=Path, metavar="DIR", help="also save its figures here: PNG, SVG, PDF, tables")
    report.set_defaults(run=run_report)


def run_report(args: argparse.Namespace) -> int:
    need_comparison()
    from deftune.comparison.grid import load_comparison
    from deftune.comparison.report import write_report
    from deftune.paper.beside import report_additions

    comparison = load_comparison(args.folder)
    for path in write_report(comparison, args.out, figures=args.figures, beside=report_additions):
        say(str(path))
    return 0
