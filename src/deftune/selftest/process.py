"""`deftune` commands in processes of their own, forked from one that has torch and TRL imported already.

A command can be killed at its nth change of the file system, or by whoever started it at any moment; a limit on the
size of files stands for a full disk.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import resource
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# of the server that is forked: an allocator or a pool of threads of its own does not survive it
SERVER_VARIABLES = {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"}
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([
    __name__, "deftune.cli", "deftune.training.train", "deftune.training.trainer", "peft", "deftune.comparison.cells",
])  # fmt: skip
HANG_SECONDS = 900.0  # ends a wait that would never end, whatever the load
EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree")


def run_command(
    arguments: list[str], output: str, watched: str, kill_at: int | None, count_in: str | None, file_limit: int | None
) -> None:
    """The command line; its output goes to a file, SIGKILL may come at an event on the file system."""
    import torch

    gc.freeze()  # what the server imported: every collection would go through it, and copy its pages
    cli = importlib.import_module("deftune.cli")  # run as a user runs it; no import of a later room
    os.setsid()  # a group of its own: its data workers can be killed with it
    torch.set_num_threads(1)
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    faulthandler.enable()  # says where, should a library crash
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, resource.RLIM_INFINITY))
    seen = 0
    if kill_at is not None or count_in is not None:

        def count(event: str, details: tuple[Any, ...]) -> None:
            nonlocal seen
            if event in EVENTS and details and str(details[0]).startswith(watched + "/"):
                seen += 1
                if seen == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
    try:
        code = cli.main(arguments)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    if count_in is not None:
        Path(count_in).write_text(str(seen))
    sys.exit(code)


@dataclass
class Started:
    """A process under way."""

    process: Any
    output: Path

    def ended(self, seconds: float = HANG_SECONDS) -> int:
        """Its exit code; minus the signal that ended it."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"did not end: {self.output.read_text()}")
        return self.process.exitcode


def fork(target: Any, args: tuple[Any, ...]) -> Any:
    """A process forked from the server, which the first call starts; this process's variables stay as they are."""
    process = FORKS.Process(target=target, args=args)
    before = {name: os.environ.get(name) for name in SERVER_VARIABLES}
    os.environ.update({name: value for name, value in SERVER_VARIABLES.items() if before[name] is None})
    try:
        process.start()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
    return process


def start(
    *arguments: Any,
    output: Path,
    watched: Path | None = None,
    kill_at: int | None = None,
    count_in: Path | None = None,
    file_limit: int | None = None,
) -> Started:
    """Start `deftune ARGUMENTS`. ``kill_at``: which change below the ``watched`` folder is its last."""
    details = (str(output), str(watched), kill_at, str(count_in) if count_in else None, file_limit)
    return Started(fork(run_command, ([*map(str, arguments)], *details)), output)
