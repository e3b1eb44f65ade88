"""Waiting in tests. No test measures time: how long a thing takes is for benchmarks/, on an idle machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

HANG_SECONDS = 900.0
"""When a process or a condition counts as hung. It ends a wait that would never end, whatever the load; nothing that
waits with it takes a hundredth of it on an idle machine."""


def wait_for(condition: Callable[[], object], what: Callable[[], str] = lambda: "") -> None:
    """Until the condition holds; ``what`` describes the state when it never does."""
    end = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < end, f"waited {HANG_SECONDS:.0f} s in vain: {what()}"
        time.sleep(0.01)


def is_dead(pid: int | str) -> bool:
    """Whether a process has ended, reaped or not; it may end while one looks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
