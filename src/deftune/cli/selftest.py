"""`deftune selftest`: the scoreboard of what must hold, measured on this machine and installation."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "selftest",
        help="check deftune's promises on this machine: losses, resuming, kills, hostile files and answers",
        description="Measure the promises of docs/reliability.md on this machine, at small sizes: a few minutes, no "
        "network. Exit code 1 if a promise is not kept.",
    )
    parser.add_argument("--row", action="append", type=int, metavar="N", help="only this row of the table; repeatable")
    parser.add_argument("--full", action="store_true", help="the full sizes: an hour")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the figures to a file, with date and machine")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from deftune.selftest.board import NUMBERS, SMALL, Row, run_rows
    from deftune.selftest.records import machine, write_records

    if unknown := sorted(set(args.row or []) - set(NUMBERS)):
        raise ValueError(f"--row: {unknown[0]} is no row of the table, which has {NUMBERS[0]} to {NUMBERS[-1]}")

    def show(row: Row, text: str, seconds: float) -> None:
        took = f"  [{seconds:.0f} s]" if seconds else ""
        print(f"{row.number:2}  {row.test}\n    promised: {row.promise}   peers: {row.peers}", flush=True)
        print("\n".join(f"    {line}" for line in text.splitlines()) + took + "\n", flush=True)

    print(f"{machine()}\n")
    command = SMALL + (" --full" if args.full else "")
    records = run_rows(args.row or NUMBERS, args.full, show, command)
    failed = [record for record in records if not record.passed]
    print(
        f"{len(records) - len(failed)} of {len(records)} rows hold; {len(args.row or NUMBERS) - len(records)} not run"
    )
    if args.json:
        write_records(args.json, records)
    return 1 if failed else 0
