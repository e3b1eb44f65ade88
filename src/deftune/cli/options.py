"""Options that several commands have, and checks of what they need."""

from __future__ import annotations

import argparse
import re
from importlib.util import find_spec
from typing import Any

PACKAGES = {
    "train": ("trl", "transformers", "datasets", "pydantic", "yaml", "rich"),
    "eval": ("pyarrow", "math_verify", "rapidfuzz"),
}
# what `data_options` reads, under the names of `make_token_table`'s arguments
DATA = ("rows", "format", "fields", "split", "template", "mask", "max_length", "batch_tokens", "trust_remote_code")


def need(*extras: str) -> None:
    """Check that the packages for training, and those of further extras, are installed.

    Raises:
        ValueError: a package is missing; the text says what to install, with and without a clone.
    """
    for extra in ("train", *extras):
        if missing := [name for name in PACKAGES[extra] if find_spec(name) is None]:
            raise ValueError(
                f"this command needs {', '.join(missing)}; pip install 'deftune[{extra}]' (in a clone: -e '.[{extra}]')"
            )


def add_set(parser: Any) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=c",
        help="override a key (`deftune config keys` lists them); repeatable",
    )  # fmt: skip


def add_trust(parser: Any) -> None:
    """The one way, beside a config of one's own, to let the code of a model's repository run."""
    parser.add_argument(
        "--trust-remote-code", action="store_true",
        help="run the Python code in the model's repository; read that code first",
    )  # fmt: skip


def add_model_and_data(parser: Any, optional: bool = False) -> None:
    """The two arguments of commands that send a model over rows once."""
    nargs = "?" if optional else None
    parser.add_argument("model", nargs=nargs, help="a run's folder, RUN:STEP, or any model that `train` takes")
    parser.add_argument("data", nargs=nargs, help="a file, a folder, a hub id, or generated:NAME")


def add_row_options(parser: Any, rows: str = "read the first N rows only") -> None:
    """How the rows of a dataset are read."""
    parser.add_argument("--rows", type=int, metavar="N", help=rows)
    parser.add_argument("--format", help="format of the data (default: by its fields)")
    parser.add_argument(
        "--fields", metavar="A=B,C=D", help="the format's fields and their names in your data: prompt=q,completion=a"
    )
    parser.add_argument("--split", help="split of a folder, a hub dataset, or generated:NAME")
    parser.add_argument(
        "--skip-bad-rows", action="store_true", help="write rows that cannot be read to bad_rows.jsonl and go on"
    )


def add_encoding_options(parser: Any, source: str = "the run's, or ") -> None:
    """How rows become tokens."""
    parser.add_argument("--template", help=f"chatml, plain, or a .jinja file (default: {source}the tokenizer's)")
    parser.add_argument(
        "--mask", choices=["assistant", "completion", "all"],
        help=f"supervised tokens: every answer, the last answer, or all tokens (default: {source}assistant)",
    )  # fmt: skip
    parser.add_argument("--max-length", type=int, metavar="N", help=f"most tokens of a row (default: {source}2048)")
    add_trust(parser)


def add_data_options(parser: Any) -> None:
    """How commands that send a model over rows once read and encode them."""
    add_row_options(parser, "read the first N rows only (generated:NAME: default 1000)")
    add_encoding_options(parser)
    parser.add_argument(
        "--batch-tokens", type=int, metavar="N", help="most tokens of a batch, padding included (default: 8192)"
    )


def data_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options about data that were given, as `make_token_table` takes them."""
    given = {name: getattr(args, name, None) for name in DATA}
    options = {name: value for name, value in given.items() if value is not None and value is not False}
    return options | ({"fields": parse_fields(args.fields)} if args.fields else {})


def parse_fields(text: str | None) -> dict[str, str]:
    """The mapping that ``--fields`` writes.

    >>> parse_fields("prompt=q,completion=a")
    {'prompt': 'q', 'completion': 'a'}
    >>> parse_fields("prompt=Question, as asked,completion=a")  # a comma divides only where NAME= follows it
    {'prompt': 'Question, as asked', 'completion': 'a'}
    """
    pairs = [pair.partition("=") for pair in re.split(r",(?=\s*\w+\s*=)|,\s*$", text)] if text else []
    if not all(name.strip() and own.strip() for name, _, own in pairs):
        raise ValueError(f"--fields: write NAME=NAME_IN_THE_DATA, with commas between; got {text!r}")
    return {name.strip(): own.strip() for name, _, own in pairs}


def flag(name: str) -> str:
    """
    >>> flag("max_length")
    '--max-length'
    """
    return f"--{name.replace('_', '-')}"


class Renamed(argparse.Action):
    """An option that has another name now: the error names it."""

    def __init__(self, option_strings: list[str], dest: str, now: str) -> None:
        hidden = argparse.SUPPRESS
        super().__init__(option_strings, hidden, nargs="?", default=hidden, help=hidden)
        self.now = now

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.exit(2, f"{parser.prog}: {self.option_strings[0]} is now {self.now}\n")
