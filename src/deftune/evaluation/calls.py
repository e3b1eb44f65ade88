"""What `evaluate` and `evaluate_heldout` share with their callers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from deftune.artifacts.encodings import encoding_of
from deftune.artifacts.options import OptionError
from deftune.artifacts.results import parse_result
from deftune.artifacts.runs import Run


class Outcome(NamedTuple):
    """A finished evaluation: the folder of its result, and the content of `summary.json`.

    ``failed``: every answer is an error, or the errors of an earlier call could not be asked again.
    """

    folder: Path
    summary: dict[str, Any]
    failed: bool = False


def result_folder(out: str | Path | None, model: str, suite: str, *, among_others: bool = False) -> Path:
    """``out``, by default results/MODEL-SUITE; among other suites OUT/SUITE, by default results/MODEL/SUITE."""
    name = Path(model).name
    if among_others:
        return Path(out or Path("results") / name) / suite
    return Path(out or Path("results") / f"{name}-{suite}")


def encoding_for(model: str, template: str | None = None, like: str | Path | None = None) -> dict[str, Any]:
    """The arguments of `Encoder` in an evaluation: those of the run that is evaluated, or of ``like``, or the defaults.

    Raises:
        OptionError: ``template`` or ``like`` beside a run, whose own options are used.
    """
    own, other = parse_result(model)[0], None if like is None else Run(Path(like))
    run = own or other
    if run is not None and template is not None:
        raise OptionError("template", f"{run.folder} was trained with its own (data.template); leave it out")
    if own is not None and other is not None:
        raise OptionError("like", f"{own.folder} is a run and is encoded as it was trained; leave it out")
    return encoding_of(other or model, template=template)
