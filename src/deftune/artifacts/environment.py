"""Where a run happens: versions of the packages, the machine, the commit of the working tree."""

from __future__ import annotations

import errno
import functools
import os
import platform
import re
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

COMMIT = "DEFTUNE_COMMIT"  # names the commit of a folder that was copied without its repository
HASH = r"[0-9a-f]{40}|[0-9a-f]{64}"
PACKAGES = ("deftune", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "triton", "reasoning-gym")


@functools.cache
def versions() -> dict[str, str]:
    """The versions of the packages that are installed; read once, since each is a file to parse."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def environment() -> dict[str, Any]:
    """Where a run happens: versions, machine, the working tree's commit."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": gpus,
        "versions": versions(),
        "git": named_commit() or git_state(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def named_commit() -> dict[str, Any] | None:
    """{"commit": ...} of the environment variable DEFTUNE_COMMIT, which overrules git; None if it is not set.

    Raises:
        ValueError: its value is no commit.
    """
    commit = os.environ.get(COMMIT)
    if commit and not re.fullmatch(HASH, commit):
        raise ValueError(f"{COMMIT}: a whole commit hash, 40 or 64 digits of 0-9a-f; got {commit!r}")
    return {"commit": commit} if commit else None


def git_state(folder: Path | None = None) -> dict[str, Any] | None:
    """{"commit": ...} of the repository that ``folder`` (default: the current one) is in; None outside of one.

    Git's files are read and git is not run: it executes programs that the repository's own config names (fsmonitor,
    filters, hooks), and the working folder may be somebody else's.
    """
    place = (folder or Path.cwd()).absolute()
    try:
        for parent in (place, *place.parents):
            found = parent / ".git"
            if found.is_file():  # of a worktree or a submodule
                found = parent / _line(found).removeprefix("gitdir:").strip()
            if found.is_dir():
                commit = _commit(found)
                return {"commit": commit} if commit else None
    except (OSError, ValueError):
        return None
    return None


def _commit(git: Path) -> str | None:
    """HEAD of a git folder, through at most one branch name."""
    common = git / _line(git / "commondir") if (git / "commondir").is_file() else git
    head = _line(git / "HEAD")
    name = head.removeprefix("ref:").strip()
    if name != head:
        if not name.startswith("refs/") or ".." in name:
            return None
        head = next((_line(root / name) for root in (git, common) if (root / name).is_file()), "")
        if not head and (common / "packed-refs").is_file():
            packed = (line.split() for line in (common / "packed-refs").read_text(encoding="utf-8").splitlines())
            head = next((parts[0] for parts in packed if parts[1:] == [name]), "")
    return head if re.fullmatch(HASH, head) else None


def _line(path: Path) -> str:
    """The text of a file of one short line; a pipe or a device is not waited for."""
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    with path.open(encoding="utf-8") as file:
        return file.read(4096).strip()
