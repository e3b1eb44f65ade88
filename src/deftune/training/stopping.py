"""SIGTERM and SIGINT: a run finishes its step, saves and stops."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from deftune.training.machine import has_ranks, is_main

STOPS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """SIGTERM and SIGINT: finish the step, save, stop.

    A second SIGINT is the usual sudden end. A second SIGTERM changes nothing: Slurm sends one to torchrun and to its
    ranks, and torchrun sends it on to them.
    """

    last: ClassVar[StopSignal | None] = None  # the newest one that has handled signals in this process

    def __init__(self) -> None:
        self.received = self.active = False
        self.number: int = signal.SIGTERM  # the signal, if one was received

    def _receive(self, number: int, frame: Any) -> None:
        self.received, self.number = True, number
        if number == signal.SIGINT and is_main():
            with suppress(OSError):  # not print: the signal may have come in the middle of a print
                os.write(2, b"\nfinishing the step, then saving; Ctrl-C again stops without saving\n")
        signal.signal(number, signal.SIG_IGN if number == signal.SIGTERM else signal.default_int_handler)

    @contextmanager
    def handling(self) -> Generator[None]:
        """Handle the signals inside; in a thread, as in Ray Train's workers, Python does not allow it."""
        allowed = threading.current_thread() is threading.main_thread()
        numbers = STOPS if allowed else ()
        before = {number: signal.signal(number, self._receive) for number in numbers}
        StopSignal.last, self.active = self, True
        try:
            yield
        finally:
            self.active = False
            for number, handler in before.items():
                signal.signal(number, handler)

    def received_anywhere(self, device: Any) -> bool:
        """Whether any rank received the signal; all ranks stop at the same step."""
        if not has_ranks():
            return self.received
        flag = torch.tensor(int(self.received), device=device)
        dist.all_reduce(flag)
        return bool(flag)


def ask_to_stop() -> None:
    """Stop this process as a first SIGTERM does; a run that has been asked already goes on to save."""
    last = StopSignal.last
    if last is not None and (last.active or last.received):
        last.received = True
    else:
        os.kill(os.getpid(), signal.SIGTERM)


class Undisturbed:
    """Start a data worker that ignores SIGTERM and SIGINT; the worker ends when its parent process is gone."""

    def __init__(self, then: Callable[[int], None] | None):
        self.then = then

    def __call__(self, worker: int) -> None:
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        if self.then is not None:
            self.then(worker)


def leave_workers_undisturbed(loader: Any) -> None:
    """Let the data workers of a torch DataLoader ignore SIGTERM and SIGINT.

    They start with both blocked: a signal before their first line of Python would end them, and the run with them.
    """
    loader.worker_init_fn = Undisturbed(loader.worker_init_fn)
    start = loader._get_iterator  # torch has no public hook here

    def start_blocked() -> Any:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            return start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    loader._get_iterator = start_blocked
