"""A griffe extension: doctests in the text of a docstring become code blocks.

Markdown reads a line that starts with `>>>` as a quotation. The extension puts a code fence around each doctest that
stands outside an "Examples" section; griffe handles those in such a section itself.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"(?m)^>>> .*(?:\n(?!\s*\n).+)*")


class Doctests(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
