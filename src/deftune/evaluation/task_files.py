"""A task of one's own, from a small YAML file; nothing in it is ever run."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from deftune.data.fields import Fields
from deftune.data.rows import SUFFIXES
from deftune.evaluation.items import render_prompt
from deftune.evaluation.kinds import KINDS
from deftune.evaluation.readers import Question, each, filled, key_of
from deftune.evaluation.suites import TASKS, Source, Task

_FILE_KEYS = ("name", "version", "kind", "data", "split", "fields", "answer_from", "prompt", "max_new_tokens", "about")
_FIELD_KEYS = ("question", "gold", "options", "id")


def load_task_file(path: str | Path) -> Task:
    """A task of one's own, from a small YAML file; nothing in it is ever run.

        name: my_exam
        version: "1"
        kind: choice                  # or math
        data: exam.jsonl              # beside this file; or org/name:config on the hub, with split: test
        fields: {question: q, gold: correct, options: [a, b, c, d], id: number}
        answer_from: 0                # what the first option counts as, where gold is a number
        prompt: "{question}\\n\\n{options}\\n\\nAnswer with the letter."

    ``fields.options`` is one field that holds them, or a list of fields. ``prompt`` may be left out, and ``fields``
    where the data uses the names question, gold, options and id.
    """
    from deftune.artifacts.config import ConfigError, read_yaml

    path = Path(path)

    def wrong(what: str) -> ConfigError:
        return ConfigError(f"{path}: {what}")

    if not path.is_file():
        raise wrong("no such file; a task of your own is a small YAML file: docs/evaluation.md has one")
    content = read_yaml(path)
    _check_keys(content, _FILE_KEYS, wrong, "")
    for key in ("name", "version", "kind", "data"):
        if not isinstance(content.get(key), str) or not content[key].strip():
            raise wrong(f"{key}: a text is needed{' (in quotes)' if content.get(key) is not None else ''}")
    name, kind = content["name"], content["kind"]
    if not re.fullmatch(r"[\w.-]+", name):
        raise wrong(f"name: letters, digits, _, . and - only, got {name!r}")
    if name in TASKS:
        raise wrong(f"name: {name} is a task already; choose another")
    read_gold = KINDS[kind].read_gold if kind in KINDS else None
    if read_gold is None:
        known = " or ".join(name for name, one in KINDS.items() if one.read_gold is not None)
        raise wrong(f"kind: {known}, got {kind!r}")
    names = content.get("fields", {})
    if not isinstance(names, dict):
        raise wrong("fields: a mapping such as {question: q, gold: a}")
    _check_keys(cast("dict[str, Any]", names), _FIELD_KEYS, wrong, "fields.")
    fields = {"question": "question", "gold": "gold", "options": "options", "id": "id", **cast("dict[str, Any]", names)}
    for key, value in fields.items():
        several = (
            key == "options" and isinstance(value, list) and all(isinstance(v, str) for v in cast("list[Any]", value))
        )
        if not isinstance(value, str) and not several:
            raise wrong(f"fields.{key}: the name of a field{' or a list of names' if key == 'options' else ''}")
    first: Any = content.get("answer_from", 0)
    if isinstance(first, bool) or first not in (0, 1):
        raise wrong(f"answer_from: 0 or 1, got {first!r}")
    prompt = content.get("prompt", KINDS[kind].prompt)
    max_new_tokens = content.get("max_new_tokens", KINDS[kind].max_new_tokens)
    if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
        raise wrong(f"max_new_tokens: a number of at least 1, got {max_new_tokens!r}")
    if not isinstance(prompt, str) or "{question}" not in prompt:
        raise wrong("prompt: a text with {question} in it")
    try:
        render_prompt(prompt, {"question": "", "options": ""})
    except ValueError as error:
        raise wrong(str(error)) from None
    if "{options}" in KINDS[kind].prompt and "{options}" not in prompt:
        raise wrong(f"prompt: a {kind} needs {{options}} in it")

    def read(row: Fields) -> Question:
        question, key = filled(row, fields["question"]), key_of(row, fields["id"])
        return Question(question, *read_gold(row, fields, first), key)

    data = content["data"]
    beside = path.parent / data
    on_hub = not beside.exists() and not data.endswith(SUFFIXES) and re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", data)
    split = str(content.get("split", "test"))
    source = Source(hub=data, split=split) if on_hub else Source(path=beside)
    about = str(content.get("about", f"from {path.name}"))
    return Task(name, content["version"], kind, source, each(read), about, None, prompt, max_new_tokens)


def _check_keys(
    content: Mapping[str, Any], known: Sequence[str], wrong: Callable[[str], Exception], prefix: str
) -> None:
    for key in content:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise wrong(f"{prefix}{key}: unknown key.{hint} Known: {', '.join(known)}")
