"""Conversations as text, by a chat template; `deftune.data.sandbox` bounds the work of the template.

The result is what transformers' `apply_chat_template` renders; `tests/data/test_rendering.py` compares the two.
"""

from __future__ import annotations

import copy
import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from deftune.data.sandbox import Environment

_REASONING = ("reasoning_content", "thinking", "reasoning")
_SCALARS = (str, int, float, bool)


class Template:
    """A chat template, compiled once. Not for several threads at once: they would share an allowance.

    ``now``: the time that ``strftime_now`` writes; None: that of each call.
    """

    def __init__(self, text: str, now: datetime.datetime | None = None):
        self.text, self.now = text, now
        self.environment = Environment()
        self.environment.globals["strftime_now"] = self._strftime_now
        self._compiled = self.environment.from_string(text)

    def __reduce__(self) -> tuple[type[Template], tuple[str, datetime.datetime | None]]:
        return Template, (self.text, self.now)

    def _strftime_now(self, format: str) -> str:
        return (self.now or datetime.datetime.now()).strftime(format[:100])

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation's text. ``variables``: special tokens by name, and options such as ``enable_thinking``.

        Raises:
            TemplateLimitError: the template does more work than its allowance.
            Exception: whatever else the template raises.
        """
        if not messages:
            raise ValueError("a conversation without messages")
        size = [0]
        # keys without a value are left out, as transformers does from 5.23 on: OpenAI writes "content": null in a call,
        # which many templates would write as "None"
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        chat = [_with_reasoning(_plain(message, size)) for message in given]
        offered = _plain(list(tools), size) if tools is not None else None
        options = {"tools": offered, "documents": None, "add_generation_prompt": add_generation_prompt}
        self.environment.allow(len(chat), size[0])
        try:
            return self._compiled.render(messages=chat, **options, **(variables or {}))
        except TypeError:
            if not any(_has_objects(message) for message in chat):
                raise
        self.environment.allow(len(chat), size[0])  # DeepSeek's templates join the arguments of a call to text
        return self._compiled.render(messages=[_written(message) for message in chat], **options, **(variables or {}))


def _plain(value: Any, size: list[int]) -> Any:
    """The value rebuilt of JSON's types, as transformers does: other objects have methods a template must not reach."""
    kind = type(value)
    if kind is str:
        size[0] += len(value)
        return value
    if value is None or kind in _SCALARS:
        return value
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {_plain(key, size): _plain(item, size) for key, item in items}
    if isinstance(value, list | tuple):
        return [_plain(item, size) for item in cast("Sequence[Any]", value)]
    if isinstance(value, str):  # a subclass may carry methods of its own
        return str.__str__(value)
    if isinstance(value, int | float):
        return int.__int__(value) if isinstance(value, int) else float.__float__(value)
    return f"<{kind.__name__}>"


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A message's reasoning under each of the names that templates read it by."""
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The functions that a message calls."""
    return [call["function"] for call in message.get("tool_calls") or () if isinstance(call.get("function"), dict)]


def _has_objects(message: dict[str, Any]) -> bool:
    return any(isinstance(function.get("arguments"), dict) for function in _calls(message))


def _written(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls have their arguments as JSON text."""
    if not _has_objects(message):
        return message
    calls = copy.deepcopy(message["tool_calls"])
    for call in calls:
        arguments = call["function"].get("arguments")
        if isinstance(arguments, dict):
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return {**message, "tool_calls": calls}
