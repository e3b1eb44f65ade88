"""Every key of a YAML file, with type, default and meaning: `deftune config keys` and docs/config_keys.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from textwrap import wrap
from typing import Any, NamedTuple

from pydantic import BaseModel

TYPES = {"string": "text", "boolean": "true, false"}
LIMITS = {"exclusiveMinimum": "> {}", "minimum": ">= {}", "exclusiveMaximum": "< {}", "maximum": "<= {}"}
INTRODUCTION = """\
# All config keys

`deftune config keys` prints the keys of a run, and `deftune config keys train` those that begin with `train`.
`deftune config show run.yaml` prints a config with all defaults. Any other key is an error that names the nearest key.

- `--set train.learning_rate=1e-5` overrides a key on the command line; the value is YAML.
- `data.train[]` stands for each entry of a list: `--set data.train.0.limit=100` changes the first entry.
- `regimes.NAME` stands for each name that you choose.

`deftune config keys --markdown > docs/config_keys.md` writes this page, and a test compares it with the code.
"""


class Key(NamedTuple):
    """A key, as the reference shows it."""

    path: str
    type: str
    default: str
    about: str


def keys_of(root: type[BaseModel], seen: dict[str, str] | None = None) -> list[Key]:
    """The keys of a config, sections before their keys. A section that occurs again names its first place instead.

    Args:
        root: the model of the whole file.
        seen: the sections whose keys are listed already, and where; filled in.

    >>> from deftune.artifacts.config import Lora
    >>> keys_of(Lora)[0]
    Key(path='r', type='integer > 0', default='16', about='the rank of the adapters')
    """
    schema = root.model_json_schema()
    found: list[Key] = []
    seen = {} if seen is None else seen

    def add(section: Mapping[str, Any], prefix: str) -> None:
        for name, field in section.get("properties", {}).items():
            path = prefix + name
            about, reference, marks = field.get("description", ""), *_section(field)
            if reference in seen:
                about += f"; the keys of {seen[reference]}"
            default = "required" if name in section.get("required", ()) else "" if reference else _default(field)
            found.append(Key(path, _type(field), default, about))
            if reference and reference not in seen:
                seen[reference] = path + marks
                add(schema["$defs"][reference], path + marks + ".")

    add(schema, "")
    return found


def _choices(field: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [choice for choice in field.get("anyOf", [field]) if choice.get("type") != "null"]


def _section(field: Mapping[str, Any]) -> tuple[str, str]:
    """The section that a key holds, if it holds one, and how the paths of its keys go on."""
    for choice in _choices(field):
        inner, marks = choice, ""
        if "items" in choice:
            inner, marks = choice["items"], "[]"
        elif isinstance(choice.get("additionalProperties"), Mapping):
            inner, marks = choice["additionalProperties"], ".NAME"
        if "$ref" in inner:
            return inner["$ref"].rpartition("/")[2], marks
    return "", ""


def _type(field: Mapping[str, Any]) -> str:
    return " or ".join(dict.fromkeys(_name(choice) for choice in _choices(field)))


def _name(field: Mapping[str, Any]) -> str:
    if "const" in field or "enum" in field:
        return ", ".join(_yaml(value) for value in field.get("enum", [field.get("const")]))
    if "$ref" in field:
        return "section"
    if field.get("type") == "array":
        items = field.get("items") or field["prefixItems"][0]
        count = f"{field['minItems']} of " if "prefixItems" in field else "list of "
        return count + ("sections" if "$ref" in items else _type(items))
    if field.get("type") == "object":
        return "mapping"
    limits = [text.format(_yaml(field[name])) for name, text in LIMITS.items() if name in field]
    return f"{TYPES.get(field['type'], field['type'])} {', '.join(limits)}".strip()


def _default(field: Mapping[str, Any]) -> str:
    return _yaml(field["default"]) if field.get("default") is not None else ""


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def render_keys(keys: list[Key], width: int = 100) -> str:
    """The keys for a terminal: a line with type and default, then the meaning."""
    lines: list[str] = []
    for key in keys:
        default = f" (default: {key.default})" if key.default not in ("", "required") else key.default and " (required)"
        lines += [f"{key.path}: {key.type}{default}"]
        lines += wrap(key.about, width, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def render_page(files: Mapping[str, list[Key]]) -> str:
    """The page docs/config_keys.md: a heading for each kind of file, a table for each of its sections."""
    parts = [INTRODUCTION]
    for title, keys in files.items():
        parts.append(f"## {title}\n")
        groups: dict[str, list[Key]] = {"": []}
        for key in keys:
            if key.type == "section" and "." not in key.path:
                groups[key.path] = []
                continue
            groups.get(key.path.partition(".")[0], groups[""]).append(key)
        for section, inside in groups.items():
            parts += [f"### `{section}`\n"] if section else []
            parts.append("\n".join(["| key | type | meaning |", "|---|---|---|", *map(_line, inside), ""]))
    return "\n".join(parts)


def _line(key: Key) -> str:
    """The key as a line of a Markdown table."""
    note = f"; default `{key.default}`" if key.default not in ("", "required") else key.default and "; required"
    cells = [text.replace("|", "\\|") for text in (f"`{key.path}`", key.type + note, key.about)]
    return f"| {' | '.join(cells)} |"
