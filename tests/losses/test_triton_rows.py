"""The Triton kernels on the CPU: `interpreted/check_*.py`, in processes that start with Triton's interpreter on.

Triton decides at its import whether it interprets, and this process may have imported it long ago.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from interpreter import run_checks
from waiting import HANG_SECONDS

CHECKS = ("check_launches.py", "check_losses.py", "check_programs.py", "check_shards.py")

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("numpy") is None, reason="Triton's interpreter needs numpy"),
]


@pytest.mark.long
@pytest.mark.parametrize("name", CHECKS)
def test_kernels_in_the_interpreter(name):
    run_checks("losses", name, "not slow")


@pytest.mark.long
def test_kernels_compile_for_an_h100(tmp_path):
    """Without a GPU: types, layouts and shared memory, which the interpreter does not check."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).parent / "compile_kernels.py"
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert "merged_columns_kernel" in done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_the_whole_grid_in_the_interpreter(name):
    run_checks("losses", name, "slow")
