"""The name under which a model is shown in results, with a note if its weights were quantised.

A dequantised 4-bit copy gives other numbers than the original model, so its name says that it is a copy.
"""

from __future__ import annotations

import re
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from deftune.artifacts.models import PACKAGED
from deftune.artifacts.runs import Run

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
NOT_QUANTISED = ("F32", "F16", "BF16")


def shown_model(name: str) -> str:
    """The name to show for `model.name` or a command's MODEL, without the folders of this machine.

    >>> shown_model("smollm2"), shown_model("org/model"), shown_model("/home/me/models/mine")
    ('SmolLM2-135M-Instruct (Q4_1, dequantised)', 'org/model', 'mine')
    """
    if packaged := PACKAGED.get(name):
        return f"{packaged.model} ({packaged.quantisation}, dequantised)"
    folder, _, step = name.rpartition(":")
    for place in (folder, name):  # RUN:STEP, or RUN
        if place and Run(Path(place)).config.is_file():
            label = shown_path(place) + (f":{step}" if place != name else "")
            return f"{label}, tuned from {_tuned_from(Run(Path(place)))}"
    if name.endswith(".gguf"):
        return f"{shown_path(name)}{_quantised(Path(name).expanduser())}"
    return shown_path(name)


def shown_path(name: str) -> str:
    """A path without the folders of this machine; a relative one and a hub id as they are.

    >>> shown_path("/home/me/data/train.jsonl"), shown_path("data/train.jsonl"), shown_path("runs/a/model")
    ('train.jsonl', 'data/train.jsonl', 'runs/a/model')
    """
    path = Path(name)
    if not is_local(name):
        return name
    return "/".join(path.parts[-2:]) if path.name in ("model", "merged") else path.name


def is_local(text: str) -> bool:
    """Whether a text is a path that shows folders of this machine."""
    return text.startswith(("/", "~", "./", "../")) or ".." in Path(text).parts or Path(text).is_absolute()


def hub_model(name: str) -> str | None:
    """The model's id on the Hugging Face hub, None where it has none or none is known."""
    if packaged := PACKAGED.get(name):
        return packaged.hub
    return name if HUB_ID.fullmatch(name) and not name.endswith(".gguf") and not Path(name).exists() else None


def model_license(name: str) -> str | None:
    """The model's licence as the hub spells it: of a packaged model, a GGUF file, or a folder whose card has one."""
    if packaged := PACKAGED.get(name):
        return packaged.license
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        found = gguf_facts(path).get("general.license")
    else:
        found = front_matter(path / "README.md").get("license")
    return found if isinstance(found, str) and re.fullmatch(r"[\w.-]+", found) else None


def front_matter(path: Path) -> dict[str, Any]:
    """The YAML at the head of a card; {} where there is none that can be read."""
    try:
        text = path.read_text(encoding="utf-8")
        head = yaml.safe_load(text.split("---\n", 2)[1]) if text.startswith("---\n") else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, IndexError, RecursionError):
        return {}
    return head if isinstance(head, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def _tuned_from(run: Run) -> str:
    try:
        return shown_model(run.read_config().model.name)
    except ValueError:
        return "an unknown model"


def _quantised(path: Path) -> str:
    kind = gguf_facts(path).get("general.file_type")
    if not isinstance(kind, int):
        return " (dequantised)"
    label = quantisation_label(kind)
    return f" ({label})" if label in NOT_QUANTISED else f" ({label}, dequantised)"


def quantisation_label(kind: int) -> str:
    """The name of a GGUF file's `general.file_type`.

    >>> quantisation_label(3), quantisation_label(1), quantisation_label(15)
    ('Q4_1', 'F16', 'Q4_K_M')
    """
    from gguf import LlamaFileType

    try:
        return LlamaFileType(kind).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return f"file type {kind}"


# --- GGUF headers -----------------------------------------------------------------------------------------------------

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
WANTED = ("general.file_type", "general.license")
LONGEST = 1 << 24  # bytes of one text, entries of one array: more is a damaged file


def gguf_facts(path: Path) -> dict[str, Any]:
    """What a GGUF file's header says under `WANTED`; {} where it cannot be read."""
    try:
        about = path.stat()
    except OSError:
        return {}
    return _gguf_facts(path, about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=16)
def _gguf_facts(path: Path, changed: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                return {}
            version, _, count = _numbers(file, "<IQQ")
            if version < 2 or count > LONGEST:
                return {}
            for _ in range(count):
                key = _text(file)
                value = _value(file, _numbers(file, "<I")[0])
                if key in WANTED:
                    found[key] = value
                if len(found) == len(WANTED):
                    break
    except (OSError, ValueError, struct.error):  # a damaged header is named where the model is loaded
        pass
    return found


def _numbers(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def _text(file: BinaryIO) -> str:
    (length,) = _numbers(file, "<Q")
    if length > LONGEST:
        raise ValueError("a text of impossible length")
    return file.read(length).decode("utf-8", "replace")


def _value(file: BinaryIO, kind: int) -> Any:
    """A value; of an array None, its entries are passed over."""
    if kind == TEXT:
        return _text(file)
    if kind != ARRAY:
        return _numbers(file, f"<{_layout(kind)}")[0]
    entries, count = _numbers(file, "<IQ")
    if count > LONGEST:
        raise ValueError("an array of impossible length")
    if entries == TEXT:
        for _ in range(count):
            (length,) = _numbers(file, "<Q")
            file.seek(length, 1)
    else:
        file.seek(count * struct.calcsize(f"<{_layout(entries)}"), 1)
    return None


def _layout(kind: int) -> str:
    if kind not in SCALARS:
        raise ValueError(f"unknown type {kind}")
    return SCALARS[kind]
