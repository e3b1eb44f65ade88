"""Checkpoints that are there as a whole or not at all.

A checkpoint is written into a folder whose name starts with a dot; its files are synced to disk; `manifest.json`, with
the size and sha256 of each, is written last; one rename makes it visible, and the parent folder is synced. A reader
accepts only what its manifest confirms, so a kill at any moment costs at most the checkpoint being written.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deftune.artifacts.files import sync, write_atomic

MANIFEST = "manifest.json"
PREFIX = "checkpoint-"
STAGING = ".saving-"


class CheckpointError(ValueError):
    """A checkpoint that could not be written, or does not verify."""


class UnreadableError(CheckpointError):
    """A checkpoint that may be good, but that this process cannot read: another user's, or a failing disk."""


# what the system says of a file that is not what was written; any other error leaves the question open
DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)


def unverified(path: Path, error: OSError) -> CheckpointError:
    """The error of a file that the system did not let us read."""
    if error.errno in DAMAGE:
        return CheckpointError(f"{path}: is damaged ({error})")
    return UnreadableError(
        f"{error.filename or path}: cannot be read ({error.strerror or error}), so whether it is damaged is not known; "
        f"make it readable to this user, or move it away"
    )


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_of(folder: Path) -> list[Path]:
    """Every file below a folder but its manifest, sorted by name; links, pipes and devices are refused."""
    found: list[Path] = []
    inside = [Path(place) / name for place, folders, files in _walk(folder) for name in (*folders, *files)]
    for path in [folder, *sorted(inside)]:
        if path.is_symlink():
            raise CheckpointError(f"{path}: a link has no place in a checkpoint")
        if path.is_file():
            found.append(path)
        elif not path.is_dir():
            raise CheckpointError(f"{path}: is neither a file nor a folder")
    return [path for path in found if path != folder / MANIFEST]


def _walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """os.walk, which would leave out a folder that it cannot read."""

    def fail(error: OSError) -> None:
        raise error

    return os.walk(folder, onerror=fail)


def seal(folder: Path, **facts: Any) -> None:
    """Sync a folder's files and write its manifest."""
    entries: dict[str, dict[str, Any]] = {}
    for path in files_of(folder):
        sync(path)
        entries[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    for path in folder.rglob("*"):
        if path.is_dir():
            sync(path)
    text = json.dumps({**facts, "files": entries}, indent=1, sort_keys=True)
    write_atomic(folder / MANIFEST, render_manifest(text))


def render_manifest(text: str) -> str:
    """The manifest's content with its own checksum."""
    return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": text})


def read_manifest(path: Path) -> tuple[dict[str, Any], dict[str, tuple[int, str]]]:
    """(facts, {file: (bytes, sha256)}) of a manifest that is as it was written."""
    try:
        raw = path.read_text(encoding="utf-8")
        text = json.loads(raw)["content"]
        if raw != render_manifest(text):
            raise CheckpointError(f"{path}: does not match its own checksum")
        facts = json.loads(text)
        entries = {str(name): (entry["bytes"], entry["sha256"]) for name, entry in facts["files"].items()}
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent}: has no {MANIFEST}; it was not written to the end") from error
    except CheckpointError:
        raise
    except OSError as error:
        raise unverified(path, error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: is damaged ({error})") from error
    return facts, entries


def verify(folder: Path) -> dict[str, Any]:
    """The facts of a folder that is exactly as it was sealed.

    Raises:
        CheckpointError: the folder is not as it was sealed.
        UnreadableError: the system did not let us read it, so that nobody knows.
    """
    facts, entries = read_manifest(folder / MANIFEST)
    try:
        found = {path.relative_to(folder).as_posix() for path in files_of(folder)}
        if found != set(entries):
            odd = ", ".join(sorted(found ^ set(entries))[:3])
            raise CheckpointError(f"{folder}: files missing or too many: {odd}")
        for name, (size, digest) in entries.items():
            path = folder / name
            if path.stat().st_size != size:
                raise CheckpointError(f"{path}: {path.stat().st_size} bytes where {size} were written")
            if sha256(path) != digest:
                raise CheckpointError(f"{path}: is damaged (its sha256 is not the one written)")
    except OSError as error:
        raise unverified(folder, error) from error
    except RecursionError as error:
        raise CheckpointError(f"{folder}: folders too deep for a checkpoint") from error
    return facts


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
        CheckpointError: there are checkpoints, and none of them verifies.
    """
    found = checkpoints(root)
    for folder in reversed(found):
        try:
            if (step := verify(folder).get("step")) != step_of(folder):
                raise CheckpointError(f"{folder}: holds step {step}, not the one in its name")
            return folder
        except UnreadableError:
            raise
        except CheckpointError as error:
            notice(f"passing over a checkpoint: {error}")
    if found:
        raise CheckpointError(
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
def sealed_folder(staging: Path, final: Path, **facts: Any) -> Generator[Path]:
    """A folder to write into. On success it is sealed and becomes ``final``; on failure nothing of it is left."""
    shutil.rmtree(staging, ignore_errors=True)  # of a killed run
    staging.mkdir(parents=True)
    try:
        yield staging
        seal(staging, **facts)
        if final.exists():  # a damaged one, or the same once more
            remove(final)
        os.replace(staging, final)
        sync(final.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


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
            raise CheckpointError(
                f"{root}: the checkpoint of step {step} could not be written ({reason}); {last}. Free some space and "
                f"run the same command again: it resumes"
            ) from error
        raise


def disk_error(error: BaseException) -> str:
    """What a full or failing disk said, through whatever library it came; '' for anything else."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    text = str(error)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS):
        if os.strerror(number) in text:
            return os.strerror(number)
    # torch's writer does not pass on what the system said
    torch_failed = any(words in text for words in ("PytorchStreamWriter", "inline_container.cc", "iostream error"))
    return "torch could not write a file; the disk may be full" if torch_failed else ""


def clear_staging(root: Path) -> None:
    """Remove what a killed run left half-written."""
    for folder in root.glob(f"{STAGING}*"):
        shutil.rmtree(folder, ignore_errors=True)


def remove(folder: Path) -> None:
    """Remove a checkpoint: first its manifest, without which it no longer counts, then the rest."""
    if folder.is_symlink():
        folder.unlink()
        return
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder)


def rotate(root: Path, keep: int | None, best: int | None, newest: int, pinned: Collection[int] = ()) -> None:
    """Remove the oldest checkpoints beyond the ``keep`` newest, of which ``newest`` was just written.

    Those of the ``pinned`` steps stay and are not counted; the ``best`` one stays, however old it is. A checkpoint of
    a later step than ``newest`` was passed over when the run was resumed: it stays until the run has come past its
    step. Without a whole ``newest`` nothing is removed.
    """
    if keep is None or not _is_complete(root / f"{PREFIX}{newest}"):
        return
    found = [folder for folder in checkpoints(root) if (step_of(folder) or 0) <= newest]
    counted = [folder for folder in found if step_of(folder) not in pinned]
    for folder in counted[:-keep]:
        if step_of(folder) == best:
            continue
        with contextlib.suppress(OSError):  # tried again after the next one is written
            remove(folder)


def _is_complete(folder: Path) -> bool:
    """Whether a checkpoint that this process sealed, and so has hashed, is still there with all its files."""
    try:
        _, entries = read_manifest(folder / MANIFEST)
        return all((folder / name).stat().st_size == size for name, (size, _) in entries.items())
    except (CheckpointError, OSError):
        return False
