"""Measured figures in a JSON file: each with its row, command, date and machine."""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "trl")


@dataclass(frozen=True)
class Record:
    """One figure. ``row`` is the scoreboard's, None for a measurement beside it; ``details`` are for those who ask."""

    row: int | None
    test: str
    figure: str
    passed: bool
    seconds: float
    command: str
    date: str
    machine: str
    details: dict[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, row: int | None, test: str, figure: str, passed: bool, seconds: float, command: str,
           details: dict[str, Any] | None = None) -> Record:  # fmt: skip
        """A figure of this machine, today."""
        date = time.strftime("%Y-%m-%d")
        return cls(row, test, figure, passed, round(seconds, 1), command, date, machine(), details or {})


def machine() -> str:
    """Processor, cores, memory, GPU and versions, in one line."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts = [f"{os.cpu_count()} cores {processor()}, {gib:.0f} GiB"]
    import torch

    if torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name())
    versions: list[str] = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join([*parts, f"Python {platform.python_version()}", *versions])


def processor() -> str:
    """The processor's name; the architecture if the system does not state it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def read_records(path: Path) -> list[Record]:
    return [Record(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


def write_records(path: Path, records: list[Record]) -> None:
    """Add figures to a file; a figure of the same row and test replaces the older one."""
    known = {(record.row, record.test): record for record in (read_records(path) if path.is_file() else [])}
    known |= {(record.row, record.test): record for record in records}
    ordered = sorted(known.values(), key=lambda record: (record.row or 99, record.test))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(record) for record in ordered], indent=1) + "\n", encoding="utf-8")
