"""The Triton kernels on the CPU: `interpreted/check_*.py`, in processes that start with Triton's interpreter on.

Triton decides at its import whether it interprets, and this process may have imported it long ago.
"""

import importlib.util

import pytest

from interpreter import run_checks

CHECKS = ("check_launches.py", "check_losses.py", "check_programs.py", "check_shards.py")

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("numpy") is None, reason="Triton's interpreter needs numpy"),
]


@pytest.mark.long
@pytest.mark.parametrize("name", CHECKS)
def test_kernels_in_the_interpreter(name):
    run_checks("losses", name, "not slow")


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_the_whole_grid_in_the_interpreter(name):
    run_checks("losses", name, "slow")
