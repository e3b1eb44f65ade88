"""The encoder's options of a run, so that an evaluation encodes rows and prompts as training did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deftune.artifacts.config import Data
from deftune.artifacts.results import parse_result
from deftune.artifacts.runs import Run

OPTIONS = ("template", "template_options", "end_tokens", "bos", "mask", "max_length", "overlong")  # of an Encoder
PROMPT_OPTIONS = OPTIONS[:4]  # those that a prompt depends on


def encoder_options(data: Data) -> dict[str, Any]:
    """The arguments of `Encoder` that a config's `data` section states."""
    return {name: getattr(data, name) for name in OPTIONS}


def encoding_of(model: str, *, template: str | None = None, like: Path | None = None) -> dict[str, Any]:
    """The `Encoder`'s options for a model.

    Args:
        model: a run or ``RUN:200`` (its config has the options), or any other model (the defaults of `Data`).
        template: the chat template of a model that is no run.
        like: a run whose options a model that is no run gets, so that the two can be compared.
    """
    own, other = parse_result(model)[0], Run(like) if like is not None else None
    run = own or other
    if run is None:
        fields = Data.model_fields
        options = {name: fields[name].get_default(call_default_factory=True) for name in OPTIONS}
        return {**options, "template": template}
    if template is not None:
        raise ValueError(f"--template: {run.folder} was trained with its own (data.template); leave it out")
    if run is own and other is not None:
        raise ValueError(f"--like: {run.folder} is a run and is encoded as it was trained; leave it out")
    return encoder_options(run.read_config().data)
