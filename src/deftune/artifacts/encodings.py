"""How a model's rows and prompts become tokens: the options of an `Encoder`, as its training run had them."""

from __future__ import annotations

from typing import Any

from deftune.artifacts.config import Data
from deftune.artifacts.results import parse_result
from deftune.artifacts.runs import Run

OPTIONS = ("template", "template_options", "end_tokens", "bos", "mask", "max_length", "overlong")  # of an Encoder


def encoder_options(data: Data) -> dict[str, Any]:
    """The arguments of `Encoder` in a config's `data` section."""
    return {name: getattr(data, name) for name in OPTIONS}


def encoding_of(model: str | Run, **given: Any) -> dict[str, Any]:
    """The arguments of `Encoder` for a model: those of its training where ``model`` is a run, else the defaults.

    >>> encoding_of("smollm2", max_length=512, template=None)["max_length"]
    512

    Args:
        model: a `Run`, a run's folder, ``RUN:STEP``, or any other name of a model.
        given: arguments that replace those of the run or the defaults; None replaces nothing.
    """
    run = model if isinstance(model, Run) else parse_result(model)[0]
    data = Data.model_construct() if run is None else run.read_config().data
    return encoder_options(data) | {name: value for name, value in given.items() if value is not None}


def prompt_options(encoding: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `Encoder` that the tokens of a prompt depend on."""
    return {name: encoding[name] for name in OPTIONS[:4]}
