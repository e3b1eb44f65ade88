"""`deftune train`, or the ranks of a script, in processes forked from one that has torch and TRL imported already."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import resource
import runpy
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from waiting import HANG_SECONDS, wait_for

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


def rank_main(script: str, arguments: list[str], output: str, variables: dict[str, str]) -> None:
    """A script as one rank of several, as torchrun would start it."""
    import torch

    torch.set_num_threads(1)
    os.environ.update(variables)
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    faulthandler.enable()
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def run_ranks(ranks: int, script: Path, *arguments: object, output: Path) -> None:
    """The script over so many ranks, to the end. When one fails, the others are ended and its output is the error."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    started: list[Started] = []
    for rank in range(ranks):
        text = output.with_name(f"{output.name}-{rank}")
        variables = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = FORKS.Process(target=rank_main, args=(str(script), [*map(str, arguments)], str(text), variables))
        process.start()
        started.append(Started(process, text))
    try:
        wait_for(lambda: any(s.process.exitcode for s in started) or all(s.process.exitcode == 0 for s in started))
    finally:
        for one in started:
            one.process.kill()
            one.process.join()
    for one in started:
        assert one.process.exitcode == 0, one.output.read_text()[-6000:]
