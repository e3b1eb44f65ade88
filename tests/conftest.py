"""Found by pytest before any test: its folder (the oracle, the battery, the tolerances) becomes importable.

Tests run in any order (pytest-randomly draws one and prints its seed): each begins with the same random numbers and
leaves the process as it found it.
"""

import contextlib
import gc
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch

os.environ["DEFTUNE_DATA_CACHE_GB"] = "0"  # no test finds what another one encoded; the cache's own turn it on
# torch's compiler keeps its code on disk without the CPU's capability in the key: code compiled for AVX-512 gives wrong
# values in a process that runs with ATEN_CPU_CAPABILITY=avx2, so each capability gets its own folder
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(
    Path(tempfile.gettempdir(), f"deftune-inductor-{os.getuid()}-{torch.backends.cpu.get_cpu_capability()}")
)
torch.set_num_threads(1)  # the tests are many and small, and run beside each other
with contextlib.suppress(ImportError):  # the environments of other stacks lack it
    from hypothesis import settings

    if settings.get_current_profile_name() in ("default", "ci"):  # benchmarks/mutation.py has its own
        settings.register_profile("any machine", deadline=None)  # on a loaded machine an example may take long
        settings.load_profile("any machine")

# files whose tests train, draw, or start processes and browsers: more than a few seconds of cpu time each
HEAVY = {
    "adapters": (
        "axolotl",
        "deepspeed",
        "export",
        "export_gguf",
        "llamafactory",
        "megatron",
        "reference",
        "swift",
        "torchtitan",
        "transformers",
        "trl",
        "verl",
    ),
    "artifacts": ("checkpoints", "results"),
    "cli": ("doctor_command", "long_commands", "objectives_command", "output"),
    "comparison": (
        "cells_in_memory",
        "grid",
        "grid_failures",
        "grid_processes",
        "quickstart",
        "report",
        "score_figures",
        "worker",
    ),
    "data": ("generated", "parallel", "rendering", "spawned"),
    "evaluation": (
        "decoding",
        "evaluate",
        "generation",
        "grading",
        "in_training",
        "result_folder",
        "rules",
        "verdicts",
        "vllm",
        "vllm_engine",
    ),
    "inspection": ("figures", "inspect_command", "inspect_page", "real", "style"),
    "losses": ("context_parallel", "triton_rows", "vocab_shards"),
    "objectives": ("step_ranks",),
    "paper": ("conflicts", "recipes", "theory"),
    "reliability": ("gpu_jobs",),
    "study": ("study", "study_queue"),
    "tokens": ("definitions",),
    "training": (
        "attacks",
        "bases",
        "distributed",
        "faults",
        "hf",
        "masters",
        "preparation",
        "profiling",
        "resume",
        "runs",
        "second_start",
        "trackers",
        "trainer",
        "varlen",
        "weights",
    ),
}
# pytest, torch's compiler, Triton and OpenMP write these into the environment when they are first used
LIBRARIES_OWN = ("PYTEST_CURRENT", "TORCHINDUCTOR", "_TORCHINDUCTOR", "TRITON", "KMP", "CUDA_MODULE_LOADING")
NOT_FAST = ("heavy", "long", "slow", "reliability", "gpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--scoreboard", metavar="FILE", help="with -m reliability: add the figures to this JSON file")


def is_heavy(path: Path) -> bool:
    return path.stem.removeprefix("test_") in HEAVY.get(path.parent.name, ())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m fast` imports no file that it would deselect whole."""
    return True if config.option.markexpr == "fast" and is_heavy(collection_path) else None


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_heavy(item.path):
            item.add_marker("heavy")
        if not any(item.get_closest_marker(name) for name in NOT_FAST):
            item.add_marker("fast")


def pytest_collection() -> None:
    """No collection of garbage while hundreds of modules are imported: they are there to stay."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def imported():
    """Set aside the objects of the modules that were imported by now.

    Every run of a trainer ends with a full collection of garbage, which would go through all of them: half a second.
    """
    gc.collect()
    gc.freeze()


def library_output() -> dict[str, object]:
    """What transformers and datasets print, as far as they were imported."""
    found: dict[str, object] = {}
    if logging := sys.modules.get("transformers.utils.logging"):
        found["transformers' progress bars"] = logging.is_progress_bar_enabled()
        found["transformers' verbosity"] = logging.get_verbosity()
    if datasets := sys.modules.get("datasets"):
        found["datasets' progress bars"] = not datasets.are_progress_bars_disabled()
    return found


def state() -> dict[str, object]:
    """What one test could change under another, but for variables that libraries set for themselves."""
    return {
        **{f"${name}": value for name, value in os.environ.items() if not name.startswith(LIBRARIES_OWN)},
        "working directory": os.getcwd(),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }


@pytest.fixture(autouse=True)
def independent():
    """The same seed before every test; the same process after it."""
    torch.manual_seed(0)
    before, printed = state(), library_output()
    yield
    after = state()
    before |= printed
    after |= {name: value for name, value in library_output().items() if name in printed}  # not of a fresh import
    changed = {
        name: (before.get(name), after.get(name)) for name in before | after if before.get(name) != after.get(name)
    }
    assert not changed, f"the test leaves the process changed: {changed}"
