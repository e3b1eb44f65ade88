"""The parser of every command: for a misspelt command, option or choice the error names the nearest known one."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable
from typing import Any, NoReturn


def hint(word: str, known: Iterable[str]) -> str:
    """A suggestion after an error's text; `deftune.objectives.suggest` would import torch for it.

    >>> hint("trian", ["train", "eval"]), hint("x", ["train", "eval"])
    (". Did you mean 'train'?", '')
    """
    near = difflib.get_close_matches(word, list(known), n=1)
    return f". Did you mean {near[0]!r}?" if near else ""


class Parser(argparse.ArgumentParser):
    """argparse's parser with suggestions; the parsers of its commands are of this class, too."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        raise argparse.ArgumentError(
            action, f"invalid choice: {value!r}{hint(str(value), choices)} (choose from {', '.join(choices)})"
        )

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]  # its overloads
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """As argparse's, but arguments that a command does not know are an error of that command.

        argparse hands them up to the first parser, whose usage has none of the command's options.
        """
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint(unknown[0].partition('=')[0], known)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """As argparse's, but a missing command is named by its choices."""
        if message == "the following arguments are required: ACTION":
            choices = next(action.choices for action in self._actions if isinstance(action.choices, dict))
            message += f", one of {', '.join(map(str, choices))}"
        super().error(message)
