"""What a rendered conversation must contain: every text of its row, and a turn's whole text in the turn's span."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from deftune.data.rows import Row


class EncodingError(ValueError):
    """A row whose mask cannot be verified; ``where`` names the row."""

    def __init__(self, where: str, problem: str):
        super().__init__(where, problem)  # both, so that the error survives pickling between processes
        self.where, self.problem = where, problem

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


_REASONING = ("reasoning_content", "reasoning", "thinking")
_THINK_TAGS = re.compile(r"</?think>")
_OTHER = "fix the row or set data.template to one that writes it"


def check_written(row: Row, whole: str, spans: Mapping[int, tuple[int, int]]) -> None:
    """Every text of the row is in the render, and a supervised turn's whole text in its span, but for whitespace."""
    rendered = _squeezed(whole)
    for tool in row.tools or ():
        if _function_name(tool) not in whole:
            raise EncodingError(row.where, f"the template leaves out the tool {_function_name(tool)!r}; {_OTHER}")
    for i, message in enumerate(row.messages):
        role = message["role"]
        if role == "tool":  # results are rewritten freely, as JSON for one, and never supervised
            continue
        parts = [part for text in _texts(message) for part in _THINK_TAGS.split(text)]
        inside = rendered
        if i in spans:
            inside = _squeezed(whole[slice(*spans[i])])
            parts += [message[key] for key in _REASONING if isinstance(message.get(key), str)]
            parts += [_function_name(call) for call in message.get("tool_calls") or ()]
        elif role == "assistant":
            parts = parts[-1:]  # reasoning may be left out of what is only context
        for part in parts:
            if _squeezed(part) not in inside:
                raise EncodingError(
                    row.where, f"the template leaves out {snippet(part)} of turn {i} ({role}); {_OTHER}"
                )


def _texts(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    blocks: list[Any] = list(content or ())
    return [block["text"] for block in blocks if isinstance(block, dict) and isinstance(block.get("text"), str)]


def _function_name(tool: Mapping[str, Any]) -> str:
    return str((tool.get("function") or tool).get("name", ""))


def _squeezed(text: str) -> str:
    return "".join(text.split())


def strings_in(values: list[Any]) -> Iterable[str]:
    """Every string inside, at any depth."""
    while values:
        value = values.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            values.extend(value.values())
        elif isinstance(value, list | tuple):
            values.extend(value)


def divergence(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def snippet(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")
