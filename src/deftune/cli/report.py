"""`deftune report`: a comparison as one page."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from deftune.cli.compare import need_comparison
from deftune.cli.output import say


def add_to(commands: Any) -> None:
    report = commands.add_parser("report", help="a comparison as one self-contained HTML page")
    report.add_argument("folder", type=Path, help="a comparison's folder (`deftune compare run` makes one)")
    report.add_argument("--out", type=Path, help="default: FOLDER/report.html")
    report.add_argument("--figures", type=Path, metavar="DIR", help="also save its figures here: PNG, SVG, PDF, tables")
    report.set_defaults(run=run_report)


def read_environment(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: is damaged; restore it, or remove it to leave it out of the report")
    return content  # pyright: ignore[reportUnknownVariableType]


def run_report(args: argparse.Namespace) -> int:
    need_comparison()
    from deftune.artifacts.files import write_atomic
    from deftune.comparison.grid import load_comparison
    from deftune.comparison.report import render_report
    from deftune.comparison.report_figures import gradient_figures, page_figures, report_figures
    from deftune.comparison.summary import summarize_comparison
    from deftune.inspection.style import save_figure
    from deftune.paper.beside import claims_section, tables_beside_paper

    comparison = load_comparison(args.folder)
    summary = summarize_comparison(comparison)
    if not any(cell["state"] == "finished" for cell in summary["cells"].values()):
        raise ValueError(f"{args.folder}: no cell is finished yet; `deftune compare run {args.folder}` goes on")
    out = args.out or Path(comparison.folder) / "report.html"
    environment = read_environment(Path(comparison.folder) / "environment.json")
    drawn = report_figures(comparison, summary)
    page = render_report(
        comparison, summary, page_figures(drawn), environment, out,
        tables=tables_beside_paper(summary), sections={"The paper's claims": claims_section(summary)},
    )  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, page)
    say(str(out))
    if args.figures:
        for one in [*drawn, *gradient_figures(comparison)]:
            say(str(save_figure(one.figure, args.figures / one.name, one.table)[0]))
    return 0
