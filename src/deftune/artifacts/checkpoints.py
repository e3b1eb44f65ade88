"""The checkpoints of a run: sealed folders named by their step; finding the newest whole one, removing old ones."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from deftune.artifacts.files import sync
from deftune.artifacts.folders import FolderError, UnreadableError, disk_error, remove, sealed_folder, verify

PREFIX = "checkpoint-"
STAGING = ".saving-"


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint's name; None for anything else."""
    number = folder.name.removeprefix(PREFIX)
    return int(number) if folder.name.startswith(PREFIX) and number.isdecimal() and folder.is_dir() else None


def checkpoints(root: Path) -> list[Path]:
    """The checkpoints below ``root``, oldest first, verified or not."""
    if not root.is_dir():
        return []
    steps = {folder: step for folder in root.iterdir() if (step := step_of(folder)) is not None}
    return sorted(steps, key=lambda folder: steps[folder])


def latest(root: Path, notice: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that verifies; None where there is no checkpoint at all.

    ``notice`` is called with a line for each damaged checkpoint that is passed over.

    Raises:
        UnreadableError: one that is newer than those that verify cannot be read. To go on from an older one, or from
            the beginning, could replace good work.
        FolderError: there are checkpoints, and none of them verifies.
    """
    found = checkpoints(root)
    for folder in reversed(found):
        try:
            if (step := verify(folder).get("step")) != step_of(folder):
                raise FolderError(f"{folder}: holds step {step}, not the one in its name")
            return folder
        except UnreadableError:
            raise
        except FolderError as error:
            notice(f"passing over a checkpoint: {error}")
    if found:
        raise FolderError(
            f"{root}: none of its checkpoints ({len(found)}) is as it was written, so the run cannot go on; restore "
            f"one, or train from the beginning with --restart, which moves them to another folder"
        )
    return None


def set_aside(root: Path) -> Path | None:
    """Rename the folder of checkpoints to the first of ROOT.old-1, ROOT.old-2, ... that is free; None if it is empty.

    Nothing is read or removed.
    """
    if not checkpoints(root):
        return None
    number = 1
    while os.path.lexists(place := root.with_name(f"{root.name}.old-{number}")):
        number += 1
    os.rename(root, place)
    sync(root.parent)
    return place


@contextmanager
def staged(root: Path, step: int) -> Generator[Path]:
    """A folder to write a checkpoint into, which becomes ``checkpoint-<step>``; a full disk is named as such."""
    root.mkdir(parents=True, exist_ok=True)
    clear_staging(root)
    try:
        with sealed_folder(root / f"{STAGING}{step}", root / f"{PREFIX}{step}", step=step) as folder:
            yield folder
    except BaseException as error:
        if reason := disk_error(error):
            kept = checkpoints(root)
            last = f"the last one, {kept[-1].name}, is untouched" if kept else "there was none before"
            raise FolderError(
                f"{root}: the checkpoint of step {step} could not be written ({reason}); {last}. Free some space and "
                f"run the same command again: it resumes"
            ) from error
        raise


def clear_staging(root: Path) -> None:
    """Remove what a killed run left half-written."""
    for folder in root.glob(f"{STAGING}*"):
        shutil.rmtree(folder, ignore_errors=True)


def rotate(root: Path, keep: int | None, best: int | None, newest: int, pinned: Collection[int] = ()) -> None:
    """Remove the oldest checkpoints beyond the ``keep`` newest, of which ``newest`` was just written.

    Those of the ``pinned`` steps stay and are not counted; the ``best`` one stays, however old it is. A checkpoint of
    a later step than ``newest`` was passed over when the run was resumed: it stays until the run has come past its
    step. Without a whole ``newest`` nothing is removed.
    """
    if keep is None:
        return
    try:
        verify(root / f"{PREFIX}{newest}", hashes=False)  # this process has hashed the files when it wrote them
    except FolderError:
        return
    found = [folder for folder in checkpoints(root) if (step_of(folder) or 0) <= newest]
    counted = [folder for folder in found if step_of(folder) not in pinned]
    for folder in counted[:-keep]:
        if step_of(folder) == best:
            continue
        with suppress(OSError):  # tried again after the next one is written
            remove(folder)
