"""The command line. Nothing here imports torch before a command that needs it runs."""

from __future__ import annotations

import argparse
import os
import runpy
import shlex
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deftune._version import __version__
from deftune.cli import (
    advise,
    analyze,
    compare,
    completion,
    doctor,
    evaluate,
    export,
    inspect,
    objectives,
    paper,
    plan,
    results,
    selftest,
    train,
    watch,
)
from deftune.cli.interrupts import hold_interrupts_of
from deftune.cli.output import error_text, notice, say
from deftune.cli.parser import Parser

IMPORTS = "DEFTUNE_IMPORT"  # files of --import, for the processes of a comparison's cells


FIRST_STEPS = """first steps:
  deftune quickstart                     compare two losses on a small model
  deftune init                           write a config, run.yaml
  deftune train run.yaml                 train on your data
  deftune inspect runs/first rows.jsonl  see where data and model disagree
  deftune advise smollm2 rows.jsonl      see which objective suits your data
  deftune compare run compare.yaml       compare objectives at the same seeds
  deftune eval run runs/first --task gsm8k
                                         evaluate a model or a run"""
GREETING = f"""deftune {__version__}: fine-tune language models with losses that scale each
token's gradient

{FIRST_STEPS}

deftune --help lists all commands; deftune doctor checks this installation."""


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="deftune", description="Fine-tune language models with losses that scale each token's gradient.",
        epilog=FIRST_STEPS, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"deftune {__version__}")
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="FILE",
        help="run a Python file of yours first, which registers objectives; repeatable",
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    objectives.add_to(commands)
    results.add_to(commands)
    train.add_to(commands)
    watch.add_to(commands)
    plan.add_to(commands)
    export.add_to(commands)
    evaluate.add_to(commands)
    compare.add_to(commands)
    inspect.add_to(commands)
    advise.add_to(commands)
    analyze.add_to(commands)
    paper.add_to(commands)
    doctor.add_to(commands)
    selftest.add_to(commands)
    completion.add_to(commands, parser)
    describe(commands)
    return parser


def describe(commands: Any) -> None:
    """Give each command's own help page the line that the list of commands has for it."""
    lines = {action.dest: action.help for action in commands._get_subactions()}
    for name, parser in commands.choices.items():
        described = parser.description or sentence(lines[name])
        if parser.formatter_class is argparse.RawDescriptionHelpFormatter:  # which keeps the lines as they are
            described = textwrap.fill(described, 78)
        parser.description = described
        for action in parser._actions:
            if isinstance(action.choices, dict):  # its own commands
                describe(action)


def sentence(text: str) -> str:
    """The text as a sentence.

    >>> sentence("write a config to start from")
    'Write a config to start from.'
    """
    return f"{text[:1].upper()}{text[1:]}."


def run_imports(files: Sequence[str]) -> None:
    """Run the files of --import here, and name them to the commands that this process starts."""
    inherited = filter(None, os.environ.get(IMPORTS, "").split(os.pathsep))
    paths = list(dict.fromkeys([*inherited, *(str(Path(file).absolute()) for file in files)]))
    for path in paths:
        if not Path(path).is_file():
            raise ValueError(f"--import: {path}: no such file")
        runpy.run_path(path)
    if paths:
        os.environ[IMPORTS] = os.pathsep.join(paths)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; a user's mistake is one line on stderr and exit code 2."""
    args = build_parser().parse_args(argv)
    args.line = shlex.join(["deftune", *(sys.argv[1:] if argv is None else argv)])  # for what records it
    hold_interrupts_of("torch")
    try:
        if args.command is None:
            say(GREETING)
            return 0
        run_imports(args.imports)
        return args.run(args)
    except BrokenPipeError:  # `deftune ... | head`
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        print("deftune: interrupted", file=sys.stderr)
        return 130
    except OSError as error:  # a file that cannot be read or written
        what = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else error
        hint = "; change its permissions, or name another place" if isinstance(error, PermissionError) else ""
        notice(f"deftune: {what}{hint}")
        return 2
    except ValueError as error:
        notice(f"deftune: {error_text(error)}")
        return 2
