"""A run's folder: its config, where it ran, what it recorded, its checkpoints and its result.

config.yaml  environment.json  data.json  metrics.jsonl  bad_rows.jsonl  checkpoints/  model/  status.json
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import subprocess
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

from deftune.data.files import write_atomic
from deftune.training.checkpoints import checkpoints
from deftune.training.config import ConfigError, RunConfig, render_yaml

PACKAGES = ("deftune", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "triton", "reasoning-gym")

# what a run that was killed while it began may have left
BEGINNING = {".lock", "environment.json", ".environment.json.writing", ".config.yaml.writing"}


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
        try:
            status = json.loads((self.folder / "status.json").read_text(encoding="utf-8"))
            return {**status, "state": str(status["state"]), "step": int(status["step"])}
        except (OSError, ValueError, KeyError, TypeError):
            return {"state": "new", "step": 0}

    def set_status(self, state: str, **facts: Any) -> None:
        write_atomic(self.folder / "status.json", json.dumps({"state": state, "time": time.time(), **facts}))

    def read_config(self) -> RunConfig:
        from deftune.training.config import load_config

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
            except ValueError:
                continue
            if isinstance(record, dict) and "step" in record:
                records.append(record)  # pyright: ignore[reportUnknownArgumentType]
        return records


def find_run(config: RunConfig) -> Run:
    """The place of the run; another run's folder is refused. Nothing is made."""
    run = Run(Path(config.run))
    if run.config.exists():
        try:
            before = yaml.safe_load(run.config.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
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


@contextmanager
def locked(run: Run) -> Generator[None]:
    """No second process in the same run."""
    run.folder.mkdir(parents=True, exist_ok=True)
    with (run.folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{run.folder}: another process is training this run") from None
        yield


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


def git_state() -> dict[str, Any] | None:
    """The commit of the folder the command ran in, and whether it was changed; None outside a repository."""

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


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
    """One line of `deftune runs`."""
    state = run.status()["state"]
    if state == "running" and not is_locked(run):  # killed, or the power went
        state = "interrupted"
    records = [record for record in run.read_metrics() if "nll" in record]
    last = records[-1] if records else {}
    try:
        config = run.read_config()
        objective, model = config.objective, config.model.name
    except ValueError:
        state, objective, model = "damaged", None, None
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
        "checkpoints": len(checkpoints(run.checkpoints)),
    }


def is_locked(run: Run) -> bool:
    """Whether a process is training this run now."""
    try:
        with locked(run):
            return False
    except ValueError:
        return True
