"""`deftune completion`: a script that completes commands, options and file names in a shell."""

from __future__ import annotations

import argparse
from typing import Any

from deftune.cli.output import say

EPILOG = """for the shells that you open from now on:
  deftune completion bash >> ~/.bash_completion
  deftune completion zsh > FOLDER/_deftune    with a FOLDER of $fpath"""


def add_to(commands: Any, parser: argparse.ArgumentParser) -> None:
    completion = commands.add_parser(
        "completion", help="print a script that completes deftune's commands in your shell", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    completion.add_argument("shell", choices=["bash", "zsh"], help="your shell")
    completion.set_defaults(run=lambda args: run_completion(parser, args.shell))


def run_completion(parser: argparse.ArgumentParser, shell: str) -> int:
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise ValueError("completion: needs shtab: pip install shtab") from error

    say(shtab.complete(parser, shell))
    return 0
