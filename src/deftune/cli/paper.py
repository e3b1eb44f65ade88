"""`deftune paper`: the paper's training runs, printed tables and claims."""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

from deftune.cli.compare import FORMATS
from deftune.cli.options import need


def add_to(commands: Any) -> None:
    paper = commands.add_parser("paper", help="the paper's training runs, printed tables and claims")
    actions = paper.add_subparsers(metavar="ACTION", required=True)

    recipes = actions.add_parser("recipes", help="the paper's training runs, one for each cell of its tables")
    recipes.set_defaults(run=run_recipes)

    table = actions.add_parser("table", help="one of the paper's Tables 1 to 8, best and second marked")
    table.add_argument("number", type=int, metavar="1..8", help="number of the table")
    table.add_argument(
        "--format", choices=FORMATS[:-1], default="markdown", help="format of the table (default: markdown)"
    )
    table.set_defaults(run=run_table)

    claims = actions.add_parser("claims", help="the paper's sentences about results, checked against its tables")
    claims.add_argument(
        "config",
        type=Path,
        nargs="?",
        help="show the verdicts of this comparison beside the paper's (default: the study's)",
    )
    claims.add_argument("--json", action="store_true", help="print the claims as JSON")
    claims.set_defaults(run=run_claims)


def run_recipes(args: argparse.Namespace) -> int:
    need()
    from deftune.paper.recipes import recipes

    width = max(len(r.name) for r in recipes()) + 2
    for r in recipes():
        config = r.config()
        print(f"{r.name:{width}}{r.table:10}{config['model']['name']:36}{config['objective']}")
    print("\ndeftune init --recipe NAME writes one as a file")
    return 0


def run_claims(args: argparse.Namespace) -> int:
    from deftune.paper.board import ComparisonBoard
    from deftune.paper.claims import claim_records

    board = None
    if args.config is not None:
        need("eval")
        from deftune.comparison.grid import load_comparison
        from deftune.comparison.summary import summarize_comparison

        board = ComparisonBoard(summarize_comparison(load_comparison(args.config)))
    records = claim_records(board)
    if args.json:
        print(json.dumps(records, indent=1))
        return 0
    for record in records:
        print(f"{record['name']} ({record['where']})")
        print(textwrap.fill(f'"{record["quote"]}"', 118, initial_indent="  ", subsequent_indent="  "))
        for label, text in (
            ("read as", f"{record['reading']} [{record['rests_on']}]"),
            ("paper", f"{record['paper'].upper()}: {record['paper_because']}"),
            ("ours", f"{record['ours'].upper()}: {record['ours_because']}" if record["ours"] else not_measured(record)),
            ("at best", record["ours_best"]),
            ("differs", record["ours_differs"] if record["ours"] else ""),
        ):
            if not text:
                continue
            print(textwrap.fill(f"{label:8} {text}", 118, initial_indent="  ", subsequent_indent=" " * 11))
        print()
    counts: dict[str, int] = {}
    for record in records:
        counts[record["paper"]] = counts.get(record["paper"], 0) + 1
    print(f"{len(records)} claims; by the paper's own tables: " + ", ".join(f"{n} {v}" for v, n in counts.items()))
    return 0


def not_measured(record: dict[str, str]) -> str:
    return f"not measured ({record['ours_because']})" if record["ours_because"] else "not measured"


def run_table(args: argparse.Namespace) -> int:
    from deftune.comparison.tables import render
    from deftune.paper.printed import printed_tables

    print(render(printed_tables(args.number), args.format), end="")
    return 0
