"""A run's folder: its config, where it ran, what it recorded, its checkpoints and its result.

config.yaml  environment.json  data.json  metrics.jsonl  bad_rows.jsonl  checkpoints/  model/  status.json
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import re
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from deftune.artifacts.checkpoints import checkpoints
from deftune.artifacts.config import ConfigError, RunConfig, parse_yaml, render_yaml
from deftune.artifacts.files import write_atomic

PACKAGES = ("deftune", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "triton", "reasoning-gym")

LOCK = ".lock"
# what a run that was killed while it began may have left
BEGINNING = {LOCK, "environment.json", ".environment.json.writing", ".config.yaml.writing"}


@dataclass(frozen=True)
class Run:
    """A run's folder and the places in it."""

    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def status(self) -> dict[str, Any]:
        """{"state": "new" | "running" | "stopped" | "failed" | "finished", "step": ..., ...}"""
        path = self.folder / "status.json"
        try:
            status = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}  # a pipe would block
            return {**status, "state": str(status["state"]), "step": int(status["step"])}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return {"state": "new", "step": 0}

    def set_status(self, state: str, **facts: Any) -> None:
        write_atomic(self.folder / "status.json", json.dumps({"state": state, "time": time.time(), **facts}))

    def read_config(self) -> RunConfig:
        from deftune.artifacts.config import load_config

        if not self.config.is_file():
            raise ValueError(f"{self.folder}: is no run (it has no config.yaml)")
        return load_config(self.config)

    def read_metrics(self) -> list[dict[str, Any]]:
        """The records, oldest first; a last line cut off by a kill is left out."""
        if not self.metrics.is_file():
            return []
        records: list[dict[str, Any]] = []
        for line in self.metrics.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):  # pyright: ignore
                records.append(record)  # pyright: ignore[reportUnknownArgumentType]
        return records


def find_run(config: RunConfig) -> Run:
    """The place of the run; another run's folder is refused. Nothing is made."""
    run = Run(Path(config.run))
    if run.config.exists():
        try:
            before = parse_yaml(run.config.read_text(encoding="utf-8"))
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{run.config}: is damaged; restore it, or choose another folder with --set run=..."
            ) from error
        with suppress(ValidationError):  # a key that came later has its default
            before = yaml.safe_load(render_yaml(RunConfig.model_validate(before)))
        now = yaml.safe_load(render_yaml(config))
        for content in (before, now):  # a folder that was moved is the same run
            if isinstance(content, dict):
                content.pop("run", None)  # pyright: ignore[reportUnknownMemberType]
        if changed := differences(before, now):
            raise ConfigError(
                f"{run.folder}: holds a run with another config ({'; '.join(changed[:4])}); choose another folder with "
                f"--set run=..., or remove it"
            )
    elif run.folder.is_dir():
        if {path.name for path in run.folder.iterdir()} - BEGINNING:
            raise ConfigError(f"{run.folder}: is not empty and no run; choose another folder with --set run=...")
    elif run.folder.exists():
        raise ConfigError(f"{run.folder}: is not a folder; choose another with --set run=...")
    return run


def open_run(config: RunConfig) -> Run:
    """The run's folder, made or continued; another run's folder is refused."""
    run = find_run(config)
    if not run.config.exists():
        run.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(run.folder / "environment.json", json.dumps(environment(), indent=1))
        write_atomic(run.config, render_yaml(config))
    return run


def differences(before: Any, now: Any, place: str = "") -> list[str]:
    """What changed between two configs, as `key: old -> new`."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = dict.fromkeys([*before, *now])
        return [d for key in keys for d in differences(before.get(key), now.get(key), f"{place}.{key}".lstrip("."))]
    return [] if before == now else [f"{place}: {before} -> {now}"]


LOCK_SECONDS = 1.0  # how long to wait for a lock: `deftune runs` holds it for a moment to see whether it is free
_held: set[int] = set()  # descriptors of the locks that this process holds


def _close_held() -> None:
    """In a forked process, such as a data worker: a descriptor left open would keep the lock of a killed parent."""
    while _held:
        with suppress(OSError):
            os.close(_held.pop())


os.register_at_fork(after_in_child=_close_held)


@contextmanager
def locked(run: Run) -> Generator[None]:
    """No second process in the same run. The lock is the process's: those that it forks do not hold it."""
    run.folder.mkdir(parents=True, exist_ok=True)
    path = run.folder / LOCK
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path}: is a link; a run's lock is a file of its own. Remove the link") from error
        raise
    _held.add(handle)
    try:
        end = time.monotonic() + LOCK_SECONDS
        while not _lock(path, handle, fcntl.LOCK_EX):
            if time.monotonic() > end:
                raise ValueError(f"{run.folder}: another process is training this run")
            time.sleep(0.02)
        yield
    finally:
        if handle in _held:  # not in a forked process, which has closed it
            _held.remove(handle)
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)  # for a process forked this moment, too
            os.close(handle)


def _lock(path: Path, handle: int, kind: int) -> bool:
    """Whether the lock could be had at once."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        raise OSError(error.errno, f"cannot be locked ({error.strerror})", str(path)) from error


def environment() -> dict[str, Any]:
    """Where a run happens: versions, machine, the working tree's commit."""
    import torch

    versions: dict[str, str] = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": gpus,
        "versions": versions,
        "git": git_state(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


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
    return head if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", head) else None


def _line(path: Path) -> str:
    """The text of a file of one short line; a pipe or a device is not waited for."""
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    with path.open(encoding="utf-8") as file:
        return file.read(4096).strip()


def cut_metrics(run: Run, step: int) -> None:
    """Drop the records after ``step``, and the result's: a resumed run writes them again."""
    records = [r for r in run.read_metrics() if r["step"] <= step and not r.get("final")]
    write_atomic(run.metrics, "".join(json.dumps(record) + "\n" for record in records))


def find_runs(root: Path) -> list[Run]:
    """The runs below a folder, by name."""
    return [
        Run(path.parent) for path in sorted(root.rglob("config.yaml")) if (path.parent / "environment.json").exists()
    ]


def summary(run: Run) -> dict[str, Any]:
    """One line of `deftune runs`. Nothing is written."""
    state = run.status()["state"]
    last: dict[str, Any] = {}
    objective = model = None
    kept = 0
    try:
        if state == "running" and not is_locked(run):  # killed, or the power went
            state = "interrupted"
        last = next((record for record in reversed(run.read_metrics()) if "nll" in record), {})
        kept = len(checkpoints(run.checkpoints))
        config = run.read_config()
        objective, model = config.objective, config.model.name
    except ValueError:
        state = "damaged"
    except OSError:
        state = "unreadable"
    return {
        "run": str(run.folder),
        "state": state,
        "step": last.get("step", 0),
        "kept": run.status().get("kept"),
        "objective": objective,
        "model": model,
        "loss": last.get("loss"),
        "nll": last.get("nll"),
        "p": last.get("p"),
        "checkpoints": kept,
    }


def is_locked(run: Run) -> bool:
    """Whether a process is training this run now. The folder is not written to, and no link is followed."""
    path = run.folder / LOCK
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return False
        raise
    try:
        return not _lock(path, handle, fcntl.LOCK_SH)
    finally:
        os.close(handle)
