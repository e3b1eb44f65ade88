"""A decorator for functions that torch.compile does not trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Run ``function`` outside the graph when the caller is being compiled.

    The decorator torch.compiler.disable does the same, but imports the compiler and triton together with deftune.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            outside: Any = torch.compiler.disable(function)
            return outside(*args, **kwargs)
        return function(*args, **kwargs)

    return run
