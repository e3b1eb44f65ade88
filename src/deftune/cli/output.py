"""How a command prints a line; what it may have read from a file or a server cannot steer the terminal."""

from __future__ import annotations

import sys

from deftune.artifacts.options import OptionError
from deftune.artifacts.terminal import printable


def say(text: str) -> None:
    """A line on stdout."""
    print(printable(text), flush=True)


def notice(text: str) -> None:
    """A line on stderr, beside what a command prints."""
    print(printable(text), file=sys.stderr)


# arguments of the library whose flag has another name
FLAGS = {"url": "endpoint", "engine": "engine vllm", "suites": "suite", "tasks": "task", "task_files": "task-file",
         "temperatures": "temperature"}  # fmt: skip


def error_text(error: ValueError) -> str:
    """The text of a user's mistake; an error about an argument of a library function names the flag of the command."""
    if not isinstance(error, OptionError):
        return str(error)
    return f"--{FLAGS.get(error.option, error.option.replace('_', '-'))}: {error.problem}"
