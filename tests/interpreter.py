"""Checks that run in a process of their own, with Triton's interpreter on."""

import os
import select
import subprocess
import sys
from pathlib import Path

from waiting import HANG_SECONDS

TESTS = Path(__file__).parent


def run_checks(folder: str, name: str, marked: str) -> None:
    """Each check of the file that is marked so passes, and none is skipped. Silence for long is a hang."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    checks = TESTS / folder / "interpreted" / name
    options = ["-q", "-m", marked, "-p", "no:cacheprovider", "-p", "no:randomly", "-W", "ignore"]
    command = [sys.executable, "-m", "pytest", *options, str(checks)]
    said, piece = b"", b"-"
    with subprocess.Popen(
        command, cwd=TESTS.parent, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        while piece:
            if not select.select([process.stdout], [], [], HANG_SECONDS)[0]:
                process.kill()
                raise AssertionError(f"{name} said nothing for {HANG_SECONDS:.0f} s after: {said.decode()[-20000:]}")
            piece = os.read(process.stdout.fileno(), 65536)
            said += piece
    text = said.decode()
    assert process.returncode == 0, text[-20000:]
    assert " passed" in text and "skipped" not in text, text[-2000:]
