"""The options of commands that send a model over rows once: `analyze tokens`, `inspect` and `advise`."""

from __future__ import annotations

import argparse
from typing import Any

from deftune.cli.train import add_fields, add_trust, parse_fields

NAMES = ("rows", "format", "fields", "split", "template", "mask", "max_length", "batch_tokens", "trust_remote_code")


def add_data_options(parser: Any) -> None:
    """How the data is read and encoded."""
    parser.add_argument(
        "--rows", type=int, metavar="N", help="read the first N rows only (generated:NAME: default 1000)"
    )
    parser.add_argument("--format", help="format of the data (default: by its fields)")
    add_fields(parser)
    parser.add_argument("--split", help="split of a folder, a hub dataset, or generated:NAME")
    parser.add_argument("--template", help="chatml, plain, or a .jinja file (default: the run's, or the tokenizer's)")
    parser.add_argument(
        "--mask",
        choices=["assistant", "completion", "all"],
        help="which tokens are supervised (default: as the run, or assistant)",
    )
    parser.add_argument("--max-length", type=int, help="most tokens of a row (default: as the run, or 2048)")
    parser.add_argument("--batch-tokens", type=int, help="most tokens of a batch, padding included (default: 8192)")
    parser.add_argument(
        "--skip-bad-rows", action="store_true", help="write rows that cannot be read to bad_rows.jsonl and go on"
    )
    add_trust(parser)


def data_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, as `make_token_table` takes them."""
    options = {name: value for name in NAMES if (value := getattr(args, name)) is not None and value is not False}
    return options | ({"fields": parse_fields(args.fields)} if args.fields else {})
