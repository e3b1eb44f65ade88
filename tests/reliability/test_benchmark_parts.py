"""benchmarks/cell_overhead.py and fast_path.py: parts that sum up, and what --parts prints."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def script(name):
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", ROOT / f"benchmarks/{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_parts_of_a_cell_are_its_overhead():
    overhead = script("cell_overhead")
    state = {
        "start_seconds": 15.0, "prepare_seconds": 3.0, "train_seconds": 40.0, "save_seconds": 0.5, "load_seconds": 0.25,
        "overhead_seconds": 21.0, "cost": {"seconds": 39.0}, "eval_seconds": 20.0, "tokens_seconds": 7.0, "time": 0.0,
    }  # fmt: skip
    parts = overhead.parts_of(state)
    assert tuple(parts) == overhead.PARTS and sum(parts.values()) == pytest.approx(21.0)
    assert parts["around steps"] == pytest.approx(1.0) and parts["other"] == pytest.approx(1.25)


def test_the_parts_of_the_fast_path_together_are_the_fast_path():
    fast_path = script("fast_path")
    alone = [options for name, options in fast_path.PARTS.items() if "control" not in name and "," not in name]
    assert {key: value for options in alone for key, value in options.items()} == fast_path.FAST
    one = {"losses": [2.0, 1.0], "tokens_per_second": 10.0}
    other = {"losses": [2.5, 0.5], "tokens_per_second": 20.0}
    lines = fast_path.render_parts({"plain": one, "fast": other, "float32": one, "parts": {"masters": one}})
    assert [line.split(" | ")[0] for line in lines[3:]] == ["| plain", "| masters", "| all three parts"]
    assert lines[-1] == "| all three parts | 2.5e-01 | 4.0e-01 | -1.2e-01 | 5.0e-01 | 4.0e-01 | 20 |"
