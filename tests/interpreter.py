"""Checks that run in a process of their own, with Triton's interpreter on."""

import os
import subprocess
import sys
from pathlib import Path

from waiting import HANG_SECONDS

TESTS = Path(__file__).parent


def run_checks(folder: str, name: str, marked: str) -> None:
    """Each check of the file that is marked so passes, and none is skipped."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    checks = TESTS / folder / "interpreted" / name
    options = ["-q", "-m", marked, "-p", "no:cacheprovider", "-p", "no:randomly", "-W", "ignore"]
    command = [sys.executable, "-m", "pytest", *options, str(checks)]
    done = subprocess.run(
        command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert done.returncode == 0, f"{done.stdout[-20000:]}\n{done.stderr[-5000:]}"
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-2000:]
