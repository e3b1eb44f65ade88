"""`deftune train`, or the ranks of a script, in processes forked from one that has torch and TRL imported already."""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

from deftune.selftest import process
from deftune.selftest.process import Started, fork
from waiting import wait_for


def start(
    *arguments: Any, kill_at: int | None = None, count_in: Path | None = None, file_limit: int | None = None
) -> Started:
    """`deftune train` begun. ``kill_at``: which change below the run's folder (named as the config) is its last."""
    config = Path(str(arguments[0]))
    return process.start(
        "train", *arguments, output=config.with_suffix(".out"), watched=config.with_suffix(""), kill_at=kill_at,
        count_in=count_in, file_limit=file_limit,
    )  # fmt: skip


def rank_main(script: str, arguments: list[str], output: str, variables: dict[str, str]) -> None:
    """A script as one rank of several, as torchrun would start it."""
    import torch

    gc.freeze()  # what the server imported
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


def free_port() -> int:
    """A port below those that the system gives to others, from the part of this process of the tests."""
    first = 20_000 + 1000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    for port in random.SystemRandom().sample(range(first, first + 1000), 1000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free port from {first} on")


def start_ranks(ranks: int, script: Path, *arguments: object, output: Path) -> list[Started]:
    """The script begun over so many ranks."""
    port = free_port()
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    started: list[Started] = []
    for rank in range(ranks):
        text = output.with_name(f"{output.name}-{rank}")
        variables = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = fork(rank_main, (str(script), [*map(str, arguments)], str(text), variables))
        started.append(Started(process, text))
    return started


def run_ranks(ranks: int, script: Path, *arguments: object, output: Path) -> None:
    """The script over so many ranks, to the end. When one fails, the others are ended and its output is the error."""
    started = start_ranks(ranks, script, *arguments, output=output)
    try:
        wait_for(lambda: any(s.process.exitcode for s in started) or all(s.process.exitcode == 0 for s in started))
    finally:
        for one in started:
            one.process.kill()
            one.process.join()
    for one in started:
        assert one.process.exitcode == 0, one.output.read_text()[-6000:]
