"""Where a page of the documentation is: in the checkout, or on the web for an installed package."""

from __future__ import annotations

from pathlib import Path

CHECKOUT = Path(__file__).parents[3]
WEB = "https://github.com/deftune/deftune/blob/main"


def page(name: str, *, checkout: Path = CHECKOUT) -> str:
    """The path of a page in a checkout, else its address.

    >>> page("docs/evaluation.md", checkout=Path("/nowhere"))
    'https://github.com/deftune/deftune/blob/main/docs/evaluation.md'
    """
    return name if (checkout / name).is_file() else f"{WEB}/{name}"
