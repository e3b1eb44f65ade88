"""Ranks of a process group, without an import of torch in each of them."""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp


def run_ranks(target: Callable[..., None], args: tuple[Any, ...], ranks: int) -> None:
    """``target(rank, *args)`` in so many processes, to the end; the first error is raised here.

    They are forked from the server that the tests of training use; an environment of the core alone lacks its imports.
    """
    if importlib.util.find_spec("trl") is None:
        mp.spawn(target, args=args, nprocs=ranks)
        return
    from deftune.selftest.process import fork

    fork(abs, (0,)).join()  # starts the server as it must be started
    mp.start_processes(target, args=args, nprocs=ranks, start_method="forkserver")
