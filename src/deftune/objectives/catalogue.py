"""The catalogue: every objective and modifier by name. `family` and `modifiers` enter theirs with `register`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from deftune.objectives.base import Modifier, Objective

OBJECTIVES: dict[str, Callable[..., Objective]] = {}
"""Objectives by name; `register` adds one."""

MODIFIERS: dict[str, Callable[..., Objective]] = {}
"""Modifiers by name; each takes the objective before it."""


class About(NamedTuple):
    """A row of the table of `deftune objectives`: how a spec writes the objective, its maths, and when to use it."""

    usage: str
    gate: str
    value: str
    source: str
    use: str
    hurts: str


ABOUT: dict[str, About] = {}
"""The table's rows by name; an objective that was registered without one is not in the table."""

T = TypeVar("T", bound=Callable[..., Objective])


def register(name: str, about: About | None = None) -> Callable[[T], T]:
    """Add an objective or a modifier of your own to the catalogue, so that specs can name it.

    >>> from dataclasses import dataclass
    >>> from deftune import Focus, objective
    >>> @register("half-deft")
    ... @dataclass(frozen=True)
    ... class HalfDeft(Focus):
    ...     scale: float = 0.5
    ...     def focus(self, stats, context=None):
    ...         return self.scale * stats.concentration
    >>> objective("half-deft(scale=0.25) | floor(0.1)").inner, str(HalfDeft(0.25))
    (HalfDeft(scale=0.25), 'half-deft(scale=0.25)')
    >>> _ = OBJECTIVES.pop("half-deft")

    Args:
        name: the name in specs: letters, digits, ``_`` and ``-``, beginning with a letter.
        about: the row of the table that `deftune objectives` prints; None: no row.

    Returns:
        A decorator for a class, or for a function that returns an `Objective`. A subclass of `Modifier` becomes a
        modifier, everything else an objective.

    Raises:
        ValueError: the name cannot be written in a spec or is taken, or the class has another ``name``.
    """
    if not re.fullmatch(r"[A-Za-z][\w-]*", name):
        raise ValueError(f"register: {name!r} is no name; use letters, digits, _ and -, beginning with a letter")
    if name in OBJECTIVES or name in MODIFIERS:
        raise ValueError(f"register: {name!r} is in the catalogue already; choose another name")

    def add(factory: T) -> T:
        made: object = factory
        if isinstance(made, type) and issubclass(made, Objective):
            if made.name not in ("", name):
                raise ValueError(f"register: the class's own name is {made.name!r}, not {name!r}; make them the same")
            made.name = name  # so that str() of an instance is a spec again
        modifier = isinstance(made, type) and issubclass(made, Modifier)
        (MODIFIERS if modifier else OBJECTIVES)[name] = factory
        if about is not None:
            ABOUT[name] = about
        return factory

    return add
