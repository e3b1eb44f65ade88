"""The parser of every command: for a misspelt command, option or choice the error names the nearest known one."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from deftune._suggest import did_you_mean, nearest


class Parser(argparse.ArgumentParser):
    """argparse's parser with suggestions; the parsers of its commands are of this class, too."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        raise argparse.ArgumentError(
            action, f"invalid choice: {value!r}.{did_you_mean(value, choices)} Choose from {', '.join(choices)}"
        )

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]  # its overloads
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """As argparse's, but arguments that a command does not know are an error of that command.

        argparse hands them up to the first parser, whose usage has none of the command's options.
        """
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = {option.lstrip("-"): option for action in self._actions for option in action.option_strings}
            near = nearest(unknown[0].partition("=")[0].lstrip("-"), known)  # two dashes alone make nothing alike
            hint = "" if near is None else f" Did you mean {known[near]!r}?"
            self.error(f"unrecognized arguments: {' '.join(unknown)}{'.' if hint else ''}{hint}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """As argparse's, but a missing command is named by its choices."""
        if message == "the following arguments are required: ACTION":
            choices = next(action.choices for action in self._actions if isinstance(action.choices, dict))
            message += f", one of {', '.join(map(str, choices))}"
        super().error(message)
