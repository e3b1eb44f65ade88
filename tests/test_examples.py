"""Every example runs as it is, in a process of its own; every doctest holds."""

import doctest
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import deftune

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
MODULES = [m.name for m in pkgutil.walk_packages(deftune.__path__, "deftune.") if not m.name.endswith("__main__")]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(example: Path):
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("name", ["deftune", *MODULES])
def test_doctests(name: str):
    adapter = name.startswith("deftune.adapters.")  # some need the stack that they adapt to
    failed, _ = doctest.testmod(pytest.importorskip(name) if adapter else importlib.import_module(name))
    assert failed == 0
