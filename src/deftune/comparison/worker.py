"""A process that runs cells one after the other: imports, the GPU's start, data and the untrained model are paid once.

A line on standard input asks for a cell (`process.Request`); the first one names the comparison, whose config is read
then. The output of a cell goes to its `log.txt`, its state to its `cell.json`. A cell that does not finish ends the
process, so nothing of a failure reaches another cell. When standard input ends, a running cell stops as on SIGTERM.

Every cell begins as in a new process: `ProcessState.restore` undoes what the one before it has changed. Liger's kernels
cannot be undone; `schedule` gives a process that has used them no cell without them. Compiled layers are kept for the
cells of a regime, which share a model and the kind of its batches: a cell with the same kind of layer would compile the
same code again, for 10 to 15 seconds on a GPU.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from deftune.comparison.cells import Shared, run_cell
from deftune.comparison.grid import Cell, Comparison
from deftune.comparison.process import Request, Requests, take_output
from deftune.losses import graphs, pending
from deftune.training.stopping import ask_to_stop

STOPPED = 143  # the exit code of a process whose cell was stopped


def needs_liger(cell: Cell) -> bool:
    """Whether a cell replaces functions of transformers by Liger's, for as long as its process lives."""
    return cell.learning_rate is not None and cell.config.train.liger


Flag = tuple[Callable[[], Any], Callable[[Any], object]]  # (read, write)


def _attribute(place: Any, name: str) -> Flag:
    return lambda: getattr(place, name), lambda value: setattr(place, name, value)


SDP = torch.backends.cuda
FLAGS: dict[str, Flag] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "deterministic algorithms": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "anomaly detection": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "flash attention": (SDP.flash_sdp_enabled, SDP.enable_flash_sdp),
    "efficient attention": (SDP.mem_efficient_sdp_enabled, SDP.enable_mem_efficient_sdp),
    "plain attention": (SDP.math_sdp_enabled, SDP.enable_math_sdp),
    "cuDNN attention": (SDP.cudnn_sdp_enabled, SDP.enable_cudnn_sdp),
    "cuDNN": _attribute(torch.backends.cudnn, "enabled"),
    "cuDNN benchmark": _attribute(torch.backends.cudnn, "benchmark"),
    "cuDNN deterministic": _attribute(torch.backends.cudnn, "deterministic"),
    "working folder": (os.getcwd, os.chdir),
}
"""The state of a process that torch and the trainers may change."""


class ProcessState:
    """The state of this process before its first cell: flags, environment, and the seed that torch starts with."""

    def __init__(self) -> None:
        importlib.import_module("deftune.training.trainer")  # its libraries set variables when they are imported
        self.environment = dict(os.environ)
        self.flags = {name: read() for name, (read, _) in FLAGS.items()}
        self.seed = torch.initial_seed()

    def restore(self, *, keep_compiled: bool = False) -> None:
        """Begin anew: the state as it was, no compiled code, no memory of the cell before, and its peak forgotten."""
        from accelerate.state import AcceleratorState, GradientState

        for name in set(os.environ) - set(self.environment):
            del os.environ[name]
        for name, value in self.environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        for name, (read, write) in FLAGS.items():
            if read() != self.flags[name]:
                write(self.flags[name])
        AcceleratorState._reset_state(reset_partial_state=True)  # pyright: ignore[reportPrivateUsage]
        GradientState._reset_state()  # pyright: ignore[reportPrivateUsage]
        if not keep_compiled and (dynamo := sys.modules.get("torch._dynamo")):
            dynamo.reset()
        graphs.clear()
        pending.clear()
        torch.manual_seed(self.seed)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with suppress(AttributeError):  # glibc only: freed memory between living objects goes back to the system
            ctypes.CDLL(None).malloc_trim(0)
        with suppress(OSError):  # Linux only: the largest resident size, which a run on a CPU records
            Path("/proc/self/clear_refs").write_text("5")


def serve(requests: Requests, load: Callable[[Request], Comparison]) -> int:
    """Run the cells that are asked for; returns the exit code of the process.

    Args:
        requests: cells of one comparison.
        load: reads the comparison of the first request.
    """
    state, shared = ProcessState(), Shared()
    gc.collect()
    gc.freeze()  # the objects of the imported modules: every later collection would go through them, for 0.3 s
    requests.stop = ask_to_stop
    cells, regime = dict[str, Cell](), None
    while (request := requests.get()) is not None:
        write_to(request.log, b"" if cells else take_output())
        cells = cells or {cell.name: cell for cell in load(request).cells()}
        cell = cells[request.cell]
        state.restore(keep_compiled=cell.regime == regime)
        regime = cell.regime
        if run_cell(cell, shared=shared, start_seconds=max(0.0, time.time() - request.time)) != "finished":
            return STOPPED
        requests.task_done()
    return 0


def write_to(log: Path, text: bytes = b"") -> None:
    """Send everything that this process and its libraries print to a file, at its end, after ``text``."""
    sys.stdout.flush()
    sys.stderr.flush()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        file.write(text)
