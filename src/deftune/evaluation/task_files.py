"""Tasks of a user's own, from small YAML files; nothing in a file is executed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator, model_validator

from deftune.artifacts.config import ConfigError, Section, explain, read_yaml
from deftune.artifacts.pages import page
from deftune.data.fields import Fields
from deftune.data.files import SUFFIXES
from deftune.evaluation.items import render_prompt
from deftune.evaluation.kinds import KINDS
from deftune.evaluation.readers import Question, each, filled, key_of
from deftune.evaluation.suites import TASKS, Source, Task

OWN_KINDS = {name: kind for name, kind in KINDS.items() if kind.read_gold is not None}


class FieldNames(Section):
    """The names of a row's fields; ``options`` is one field that holds all options, or a field for each."""

    question: str = Field("question", description="the field with the question")
    gold: str = Field("gold", description="the field with the right answer")
    options: str | list[str] = Field("options", description="kind choice: one field with all options, or a field each")
    id: str = Field("id", description="the field with the id of an item, if the data has one")


class TaskFile(Section):
    """The content of a task file."""

    name: str = Field(description="the name of the task; not one of `deftune eval list`")
    version: str = Field(description="a text of yours; change it whenever the questions or the grading change")
    kind: str = Field(description="how answers are graded: math or choice")
    data: str = Field(description="the file with the items, relative to this file, or a hub id")
    split: str = Field("test", description="the split of a hub id")
    fields: FieldNames = Field(FieldNames(), description="the names of the fields in your data")  # pyright: ignore[reportCallIssue]
    answer_from: int = Field(0, strict=True, ge=0, le=1, description="kind choice: the number of the first option")
    prompt: str = Field("", description="the prompt, with {question} and {options} (default: the kind's)")
    max_new_tokens: int | None = Field(
        None, strict=True, gt=0, description="the most tokens of an answer (default: the kind's)"
    )
    about: str = Field("", description="a line for `deftune eval list`")

    @field_validator("name", "version", "kind", "data", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        if not isinstance(value, str) or not value.strip():
            raise ValueError("a text is needed (in quotes)")
        return value

    @field_validator("name")
    @classmethod
    def _new_name(cls, value: str) -> str:
        if not re.fullmatch(r"[\w.-]+", value):
            raise ValueError("letters, digits, _, . and - only")
        if value in TASKS:
            raise ValueError(f"{value} is a task already; choose another name")
        return value

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, value: str) -> str:
        if value not in OWN_KINDS:
            raise ValueError(" or ".join(OWN_KINDS))
        return value

    @model_validator(mode="after")
    def _prompt_of_the_kind(self) -> TaskFile:
        wanted = [name for name in ("{question}", "{options}") if name in OWN_KINDS[self.kind].prompt]
        if self.prompt:
            render_prompt(self.prompt, {"question": "", "options": ""})
            if missing := [name for name in wanted if name not in self.prompt]:
                raise ValueError(f"prompt: a {self.kind} needs {missing[0]} in it")
        return self


def load_task_file(path: str | Path) -> Task:
    """Read a task file.

        name: my_exam
        version: "1"
        kind: choice                  # or math
        data: exam.jsonl              # beside this file; or org/name:config on the hub, with split: test
        fields: {question: q, gold: correct, options: [a, b, c, d], id: number}
        answer_from: 0                # the number of the first option, if gold is a number
        prompt: "{question}\\n\\n{options}\\n\\nAnswer with the letter."

    ``prompt`` may be left out, and ``fields`` if the data has the fields question, gold, options and id.
    """
    path = Path(path)
    if not path.is_file():
        example = page("docs/evaluation.md")
        raise ConfigError(f"{path}: no such file; a task of your own is a small YAML file: {example} has one")
    try:
        file = TaskFile.model_validate(read_yaml(path, TaskFile))
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain(error, TaskFile)[0].removeprefix('config: ')}") from None
    names, read_gold = file.fields.model_dump(), OWN_KINDS[file.kind].read_gold
    assert read_gold is not None

    def read(row: Fields) -> Question:
        question = filled(row, file.fields.question)
        return Question(question, *read_gold(row, names, file.answer_from), key_of(row, file.fields.id))

    beside = path.parent / file.data
    hub = re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", file.data) and not file.data.endswith(SUFFIXES)
    source = Source(hub=file.data, split=file.split) if hub and not beside.exists() else Source(path=beside)
    return Task(
        file.name, file.version, file.kind, source, each(read), file.about or f"from {path.name}",
        prompt=file.prompt, max_new_tokens=file.max_new_tokens or 0,
    )  # fmt: skip
