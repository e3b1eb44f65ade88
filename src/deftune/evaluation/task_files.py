"""A task of the user's own, from a small YAML file; nothing in the file is ever executed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StrictInt, ValidationError, field_validator, model_validator

from deftune.artifacts.config import ConfigError, Positive, Section, explain, read_yaml
from deftune.data.fields import Fields, read_field
from deftune.data.files import SUFFIXES
from deftune.evaluation.items import render_prompt
from deftune.evaluation.readers import Question, each, filled, key_of, letter_of, number_text, options_of
from deftune.evaluation.suites import MAX_NEW_TOKENS, PROMPTS, TASKS, Source, Task

Text = Annotated[str, Field(min_length=1, pattern=r"\S")]


class FieldNames(Section):
    """The names that the data's fields have."""

    question: Text = "question"
    gold: Text = "gold"
    options: Text | list[Text] = "options"  # one field that holds all options, or a field for each
    id: Text = "id"


class TaskFile(Section):
    """The keys of a task file."""

    name: str
    version: Text
    kind: Literal["math", "choice"]
    data: Text
    split: Text = "test"
    fields: FieldNames = FieldNames()
    answer_from: Annotated[StrictInt, Field(ge=0, le=1)] = 0
    prompt: str | None = None
    max_new_tokens: Positive | None = None
    about: str | None = None

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not re.fullmatch(r"[\w.-]+", value):
            raise ValueError("letters, digits, _, . and - only")
        if value in TASKS:
            raise ValueError(f"{value} is a task already; choose another")
        return value

    @model_validator(mode="after")
    def _prompt(self) -> TaskFile:
        prompt = self.whole_prompt
        if "{question}" not in prompt:
            raise ValueError("prompt: a text with {question} in it")
        render_prompt(prompt, {"question": "", "options": ""})
        if self.kind == "choice" and "{options}" not in prompt:
            raise ValueError("prompt: a choice needs {options} in it")
        return self

    @property
    def whole_prompt(self) -> str:
        return PROMPTS[self.kind] if self.prompt is None else self.prompt

    def read_row(self, row: Fields) -> Question:
        names = self.fields
        question, key = filled(row, names.question), key_of(row, names.id)
        gold = read_field(row, names.gold)
        if self.kind == "math":
            return Question(question, number_text(gold), key=key)
        where = names.options
        options = options_of([row.get(name) for name in where] if isinstance(where, list) else read_field(row, where))
        return Question(question, letter_of(gold, options, self.answer_from), options, key)


def load_task_file(path: str | Path) -> Task:
    """Read a task from a YAML file.

        name: my_exam
        version: "1"
        kind: choice                  # or math
        data: exam.jsonl              # beside this file; or org/name:config on the hub, with split: test
        fields: {question: q, gold: correct, options: [a, b, c, d], id: number}
        answer_from: 0                # the number of the first option, where gold is a number
        prompt: "{question}\\n\\n{options}\\n\\nAnswer with the letter."

    ``fields.options`` is one field that holds all options, or a list of fields. ``prompt`` may be left out, and
    ``fields`` where the data uses the names question, gold, options and id.

    Raises:
        ConfigError: the file is not there, is not YAML, or has a wrong key or value.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; docs/evaluation.md has an example of a task file")
    try:
        task = TaskFile.model_validate(read_yaml(path, TaskFile))
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in explain(error, TaskFile))) from None
    beside = path.parent / task.data
    hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", task.data) and not task.data.endswith(SUFFIXES)
    on_hub = hub_id and not beside.exists()
    source = Source(hub=task.data, split=task.split) if on_hub else Source(path=beside)
    about, most = task.about or f"from {path.name}", task.max_new_tokens or MAX_NEW_TOKENS[task.kind]
    return Task(task.name, task.version, task.kind, source, each(task.read_row), about, None, task.whole_prompt, most)
