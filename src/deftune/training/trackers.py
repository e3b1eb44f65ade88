"""Start and close tensorboard, trackio and wandb, which transformers' callbacks do only in part."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deftune.artifacts.config import ConfigError
from deftune.artifacts.runs import Run

TENSORBOARD_FOLDER = "TENSORBOARD_LOGGING_DIR"  # transformers has no argument for it any more


def check_trackers(names: Sequence[str]) -> None:
    """Refuse a tracker that is not installed. A bare folder of its name, as wandb leaves one behind, is none."""
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ConfigError(f"train.report_to: {name} is not installed; pip install {name}")


def tracker_name(run: Run) -> str:
    """The name of a run for trackers, with its start time: trackio would append to an earlier run of the same name."""
    try:
        started = json.loads((run.folder / "environment.json").read_text(encoding="utf-8"))["started"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return str(run.folder)
    return f"{run.folder} {started}"


@contextmanager
def tracking(names: Sequence[str], logs: Path) -> Generator[None]:
    """Close what the callbacks open: they leave it to the process's end, and the next run would write into it.

    TensorBoard's events go to ``logs``.
    """
    trackio: Any = importlib.import_module("trackio") if "trackio" in names else None
    wandb: Any = importlib.import_module("wandb") if "wandb" in names else None
    failures: tuple[type[Exception], ...] = (wandb.Error,) if wandb else ()
    theirs = wandb and wandb.run  # opened by the user, who closes it
    exit_code = 1
    before = os.environ.get(TENSORBOARD_FOLDER)
    os.environ[TENSORBOARD_FOLDER] = str(logs)
    try:
        yield
        exit_code = 0
    except failures as error:
        reason = f"{str(error).splitlines()[0].rstrip('.')}; WANDB_MODE=offline keeps the run on this machine"
        raise ValueError(f"train.report_to: wandb: {reason}") from error
    finally:
        if before is None:
            os.environ.pop(TENSORBOARD_FOLDER, None)
        else:
            os.environ[TENSORBOARD_FOLDER] = before
        if wandb and wandb.run and not theirs:
            wandb.finish(exit_code=exit_code)
        if trackio and trackio.context_vars.current_run.get() is not None:
            trackio.finish()
