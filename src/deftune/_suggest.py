"""The nearest known name to a misspelt one, for error messages; imports nothing of deftune, as the parser needs it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: object, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name that is most like ``name``, or None where none is near; the arguments are `did_you_mean`'s."""
    spelt = {word.lower(): word for word in known}
    close = difflib.get_close_matches(str(name).lower(), spelt, n=1, cutoff=cutoff)
    return spelt[close[0]] if close else None


def did_you_mean(name: object, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """ " Did you mean 'deft'?" with a space before it, or "" where no known name is near.

    Args:
        name: what the user wrote; its case does not matter.
        known: the names that exist.
        cutoff: how alike two names must be, from 0 to 1, as `difflib.get_close_matches` measures it.

    >>> did_you_mean("Defft", ["nll", "deft"])
    " Did you mean 'deft'?"
    >>> did_you_mean("sgd", ["nll", "deft"])
    ''
    """
    near = nearest(name, known, cutoff=cutoff)
    return "" if near is None else f" Did you mean {near!r}?"
