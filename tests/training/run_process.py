"""`deftune train` in a process of its own, forked from one that has torch and TRL imported already."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import resource
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from waiting import HANG_SECONDS

# for the server that is forked: an allocator or a pool of threads of its own does not survive it
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
os.environ.setdefault("OMP_NUM_THREADS", "1")
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["deftune.cli", "deftune.training.train", "deftune.training.trainer", "peft"])
EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree")


def main(arguments: list[str], output: str, kill_at: int | None, count_in: str | None, file_limit: int | None) -> None:
    """The command line; its output goes to a file, SIGKILL may come at an event on the file system."""
    import torch

    from deftune import cli

    torch.set_num_threads(1)
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    faulthandler.enable()  # says where, should a library crash
    if file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, resource.RLIM_INFINITY))
    if kill_at is not None or count_in is not None:
        folder, seen = str(Path(arguments[1]).with_suffix("")), 0

        def hear(event: str, details: tuple[Any, ...]) -> None:
            nonlocal seen
            if event in EVENTS and details and str(details[0]).startswith(folder + "/"):
                seen += 1
                if seen == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hear)
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

    def ended(self) -> int:
        """Its exit code; minus the signal that ended it."""
        self.process.join(HANG_SECONDS)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"did not end: {self.output.read_text()}")
        return self.process.exitcode


def start(
    *arguments: Any, kill_at: int | None = None, count_in: Path | None = None, file_limit: int | None = None
) -> Started:
    """`deftune train` begun. ``kill_at``: which change below the run's folder (named as the config) is its last."""
    output = Path(str(arguments[0])).with_suffix(".out")
    process = FORKS.Process(
        target=main,
        args=(["train", *map(str, arguments)], str(output), kill_at, str(count_in) if count_in else None, file_limit),
    )
    process.start()
    return Started(process, output)
