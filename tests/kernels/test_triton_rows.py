"""The Triton kernels on the CPU: `interpreted/check_triton.py`, in a process that starts with Triton's interpreter on.

Triton decides at its import whether it interprets, and this process may have imported it long ago.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).parent / "interpreted" / "check_triton.py"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(importlib.util.find_spec("numpy") is None, reason="Triton's interpreter needs numpy")
def test_kernels_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", str(CHECKS)],
        cwd=CHECKS.parents[3],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout[-20000:]}\n{done.stderr[-5000:]}"
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-2000:]
