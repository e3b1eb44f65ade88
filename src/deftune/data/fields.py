"""Checked access to the fields of a row, of training data and of benchmarks; a wrong field is a `Fault`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from deftune.data.rows import Fault

Fields = Mapping[str, Any]


def name_keys(row: Fields) -> str:
    """The names of a row's fields, a dozen at most, one with a comma in quotes."""
    names = [repr(str(key)[:40]) if "," in str(key) else str(key)[:40] for key in row]
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "") or "none"


def name_type(value: object) -> str:
    """A value's type in a reader's words.

    >>> name_type([]), name_type(1.5), name_type("x")
    ('a list', 'a number', 'a string')
    """
    names = {"dict": "an object", "list": "a list", "NoneType": "null", "int": "a number", "float": "a number"}
    names |= {"str": "a string", "bytes": "bytes that are not UTF-8"}
    return names.get(type(value).__name__, f"a {type(value).__name__}")


def read_field(row: Fields, *names: str) -> Any:
    """The value of the first of ``names`` that the row has."""
    for name in names:
        if row.get(name) is not None:
            return row[name]
    if null := next((name for name in names if name in row), None):
        raise Fault(f"{null!r} is null")
    raise Fault(f"no {names[0]!r}", f"its keys: {name_keys(row)}")


def read_text(row: Fields, *names: str) -> str:
    """The text of the first of ``names`` that the row has."""
    value = read_field(row, *names)
    if not isinstance(value, str):
        raise Fault(f"{names[0]!r} is not text", f"it is {name_type(value)}")
    return value


def as_list(value: object, what: str) -> list[Any]:
    """The value itself, if it is a list."""
    if not isinstance(value, list):
        raise Fault(f"{what} is not a list", f"it is {name_type(value)}")
    return cast("list[Any]", value)


def as_object(value: object, what: str, which: str = "it") -> dict[str, Any]:
    """The value itself, if it is an object; ``which`` names one of several values in the detail of a `Fault`."""
    if not isinstance(value, dict):
        raise Fault(f"{what} is not an object", f"{which} is {name_type(value)}")
    return cast("dict[str, Any]", value)


def read_medmcqa_options(row: Fields) -> dict[str, str]:
    """MedMCQA's opa to opd, by letter."""
    return {letter: read_text(row, f"op{letter.lower()}") for letter in "ABCD"}


def read_pubmedqa_question(row: Fields) -> str:
    """PubMedQA's abstract and question: QUESTION and CONTEXTS as released, question and context.contexts on the hub."""
    contexts = read_field(row, "CONTEXTS", "context")
    contexts = cast("Fields", contexts).get("contexts") if isinstance(contexts, dict) else contexts
    if not all(isinstance(part, str) for part in as_list(contexts, "'CONTEXTS'")):
        raise Fault("'CONTEXTS' is not a list of texts")
    return "\n\n".join([*cast("list[str]", contexts), read_text(row, "QUESTION", "question")])
