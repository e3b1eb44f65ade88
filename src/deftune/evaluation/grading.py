r"""`Grader`: compares answers with golds, by equal text or by math-verify in worker processes that can be killed.

A model's text may be hostile: ``9^{9^{9^9}}`` fills the memory, a deep fraction never ends, and sympy evaluates some of
what it parses. So the parent never imports sympy: it compares normalised text, and sends other pairs to workers:

    a fresh interpreter (not a fork), its own session, empty working directory, no environment, stdin and stdout null
    limits: address space, cpu time per answer, 32 open files, no written byte, no core, no new process
    an audit hook that ends the worker on sockets, subprocesses, files written, or files read outside its libraries
    a new one after a time-out, a crash, or ``tasks_per_worker`` answers; a crash counts when it happens twice

The time limit is cpu time, so that a verdict does not depend on how busy the machine is or on how many workers share
it; the wall clock is a backstop, enforced by the parent. `math_verify`'s own alarms are off. The hash seed is fixed.

Not covered: a sandbox against native code. The workers run as the same user, and the hook sees what Python does.
"""

from __future__ import annotations

import importlib.util
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from deftune.evaluation import grading_worker
from deftune.evaluation.answers import (
    EQUAL,
    How,
    Rule,
    Verdict,
    decide_by_text,
    for_math_verify,
    normalize_answer,
    prepare_pair,
)
from deftune.evaluation.grading_worker import REFUSED
from deftune.evaluation.notation import is_balanced, joining_words

_Asked = tuple[str, str | None, Rule]
_Task = list[str | float | tuple[str, str]]  # a line for a worker; `grading_worker` says of what


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    tasks: int  # file descriptors
    results: int
    deadline: float  # until it must be ready, or done with its task
    ready: bool = False
    received: bytes = b""
    task: int | None = None
    graded: int = 0


class Grader:
    """Grades (gold, answer) pairs; a context manager, and safe to close at any point.

    ``workers``: processes; they start when first needed. Verdicts do not depend on their number.
    ``seconds``: cpu time per answer. ``wall_seconds``: the wall clock's backstop, 60 times that unless told.
    ``memory_mib``: address space per worker; sympy takes about 100.
    ``max_characters``: a longer gold or answer is ``unparsed`` without being looked at.
    ``counts``: how many verdicts of each kind so far.

        with Grader(workers=4) as grader:
            verdicts = grader.grade([(r"\\frac{1}{2}", "0.5"), ("7", "8")])
            print(grader.counts)
    """

    def __init__(
        self,
        workers: int = 2,
        seconds: float = 5.0,
        memory_mib: int = 1024,
        *,
        wall_seconds: float | None = None,
        max_characters: int = 10_000,
        tasks_per_worker: int = 2_000,
    ):
        if os.name != "posix":
            raise OSError("grading needs process limits, which only POSIX systems have; grade on Linux or macOS")
        if importlib.util.find_spec("math_verify") is None:
            raise ModuleNotFoundError("grading needs math-verify: pip install math-verify")
        for name, value, least in (
            ("workers", workers, 1),
            ("seconds", seconds, 0.01),
            ("memory_mib", memory_mib, 256),
            ("max_characters", max_characters, 1),
            ("tasks_per_worker", tasks_per_worker, 1),
        ):
            if value < least:
                raise ValueError(f"{name}: at least {least}, got {value}")
        self.workers = workers
        self.seconds = seconds
        self.memory_mib = memory_mib
        self.wall_seconds = 60 * seconds if wall_seconds is None else wall_seconds
        self.max_characters = max_characters
        self.tasks_per_worker = tasks_per_worker
        self.counts: dict[How, int] = {how: 0 for how in get_args(How)}
        self._folder = tempfile.mkdtemp(prefix="deftune-grading-")
        self._running: list[_Worker] = []
        self._finalizer = weakref.finalize(self, _close, self._running, self._folder)

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every worker and wait for it; closing again does nothing."""
        self._finalizer()

    def grade(self, pairs: Sequence[tuple[str, str | None]], rules: Sequence[Rule] | None = None) -> list[Verdict]:
        """A verdict per (gold, answer), in order; an answer of None is ``unparsed``. Equal pairs are graded once.

        ``rules`` has one `Rule` per pair. Not for two threads at once. A bare string is read as LaTeX: extract the
        answer from its text first.
        """
        if not self._finalizer.alive:
            raise ValueError("this grader is closed; make another")
        if rules is not None and len(rules) != len(pairs):
            raise ValueError(f"{len(rules)} rules for {len(pairs)} pairs")
        asked: list[_Asked] = [
            (gold, answer, rule) for (gold, answer), rule in zip(pairs, rules or [EQUAL] * len(pairs))
        ]
        verdicts: dict[_Asked, Verdict] = {}
        hard: dict[_Asked, _Task] = {}
        for key in dict.fromkeys(asked):
            found = self._at_sight(*key)
            if isinstance(found, Verdict):
                verdicts[key] = found
            else:
                hard[key] = found
        try:
            verdicts.update(zip(hard, self._in_workers(list(hard.values()))))
        except BaseException:  # a worker may be in the middle of an answer that nobody waits for any more
            _stop_all(self._running)
            raise
        for key in asked:
            self.counts[verdicts[key].how] += 1
        return [verdicts[key] for key in asked]

    def _at_sight(self, gold: str, answer: str | None, rule: Rule) -> Verdict | _Task:
        if answer is None:
            return Verdict(False, "unparsed", "no answer")
        for name, text in (("gold", gold), ("answer", answer)):
            if len(text) > self.max_characters:
                return Verdict(False, "unparsed", f"{name} of {len(text)} characters, over {self.max_characters}")
            if not text.strip():
                return Verdict(False, "unparsed", f"empty {name}")
            if not is_balanced(text):  # it would end the box it is put in, and say the rest outside
                return Verdict(False, "unparsed", f"unbalanced braces in the {name}")
        if normalize_answer(gold) == normalize_answer(answer):
            return Verdict(True, "exact")
        pair = prepare_pair(gold, answer, rule)
        if pair.differ:
            return Verdict(False, "exact", pair.differ)
        if not pair.percentage and (verdict := decide_by_text(*map(normalize_answer, (pair.gold, pair.answer)))):
            return verdict
        return [
            for_math_verify(pair.gold, pair.gold), for_math_verify(pair.answer, pair.gold),
            rule.relative, rule.absolute, pair.percentage, joining_words(pair.gold, pair.answer),
        ]  # fmt: skip

    def _in_workers(self, pairs: Sequence[_Task]) -> list[Verdict]:
        verdicts: list[Verdict | None] = [None] * len(pairs)
        waiting = list(reversed(range(len(pairs))))
        left = len(pairs)
        crashed: set[int] = set()
        with selectors.DefaultSelector() as selector:
            for worker in self._running:
                selector.register(worker.results, selectors.EVENT_READ, worker)
            while left:
                while len(self._running) < min(self.workers, left):
                    worker = self._start()
                    selector.register(worker.results, selectors.EVENT_READ, worker)
                for worker in self._running:
                    if worker.ready and worker.task is None and waiting:
                        self._send(worker, waiting, pairs)
                now = time.monotonic()
                busy = [worker.deadline for worker in self._running if worker.task is not None or not worker.ready]
                for key, _ in selector.select(min(busy, default=now) - now):
                    worker: _Worker = key.data
                    task = worker.task
                    verdict = self._receive(worker)
                    if verdict is not None:
                        assert task is not None
                        if verdict.how == "crash" and task not in crashed:
                            crashed.add(task)  # perhaps not the answer's fault: once more, in a fresh worker
                            waiting.append(task)
                        else:
                            verdicts[task] = verdict
                            left -= 1
                    if worker.process.returncode is not None or worker.graded >= self.tasks_per_worker:
                        self._end(worker, selector)
                now = time.monotonic()
                for worker in [worker for worker in self._running if worker.deadline < now]:
                    if not worker.ready:
                        raise RuntimeError("a grading worker did not start within 5 minutes")
                    if worker.task is not None:
                        verdicts[worker.task] = Verdict(False, "timeout", f"{self.wall_seconds} s by the clock")
                        left -= 1
                        self._end(worker, selector)
        return [verdict for verdict in verdicts if verdict is not None]

    def _start(self) -> _Worker:
        task_in, task_out = os.pipe()
        result_in, result_out = os.pipe()
        folder = tempfile.mkdtemp(dir=self._folder)
        inherited = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "SYSTEMROOT") if name in os.environ}
        paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        # -P: the worker's own folder, with its statistics.py, must not come before the standard library
        command = [sys.executable, "-P", "-s", "-B", os.path.abspath(grading_worker.__file__)]
        try:
            process = subprocess.Popen(
                [*command, *map(str, (task_in, result_out, self.seconds, self.memory_mib))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(task_in, result_out),
                cwd=folder,
                env={**inherited, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(paths), "HOME": folder},
                start_new_session=True,
            )
        except BaseException:
            os.close(task_out)
            os.close(result_in)
            raise
        finally:
            os.close(task_in)
            os.close(result_out)
        worker = _Worker(process, task_out, result_in, deadline=time.monotonic() + 300)
        self._running.append(worker)
        return worker

    def _send(self, worker: _Worker, waiting: list[int], pairs: Sequence[_Task]) -> None:
        """Send the next task. It stays waiting if the worker has died, which its results' end will show."""
        message = json.dumps(pairs[waiting[-1]]).encode() + b"\n"
        try:
            while message:
                message = message[os.write(worker.tasks, message) :]
        except BrokenPipeError:
            return
        worker.task = waiting.pop()
        worker.deadline = time.monotonic() + self.wall_seconds

    def _receive(self, worker: _Worker) -> Verdict | None:
        """The verdict that a worker sent, or that follows from its exit; None if there is none yet."""
        piece = os.read(worker.results, 65536)
        worker.received += piece
        if not piece:  # it is gone
            return self._of_the_dead(worker, worker.process.wait())
        if not worker.received.endswith(b"\n"):
            return None
        message, worker.received = worker.received, b""
        said = json.loads(message)
        if not worker.ready:
            if said != "ready":
                raise RuntimeError(f"a grading worker could not start: {said}")
            worker.ready = True
            return None
        worker.task = None
        worker.graded += 1
        return verdict_of(*said)

    def _of_the_dead(self, worker: _Worker, code: int) -> Verdict | None:
        if not worker.ready:
            raise RuntimeError(f"a grading worker ended while starting ({_ending(code)}); is memory_mib too small?")
        if worker.task is None:
            return None
        if code == -signal.SIGPROF:
            return Verdict(False, "timeout", f"{self.seconds} s of cpu time")
        return Verdict(False, "crash", _ending(code))

    def _end(self, worker: _Worker, selector: selectors.BaseSelector) -> None:
        selector.unregister(worker.results)
        self._running.remove(worker)
        _stop(worker)


def verdict_of(found: str, parsed: str) -> Verdict:
    """What a worker said of a task."""
    if found == "close":
        return Verdict(True, "tolerance")
    if found == "equal" or parsed == "both":
        return Verdict(found == "equal", "math_verify")
    return Verdict(False, "unparsed", f"math-verify cannot read the {parsed}")


def _ending(code: int) -> str:
    if code == REFUSED:
        return "it tried something that grading never needs"
    return f"signal {-code}" if code < 0 else f"exit status {code}"


def _stop(worker: _Worker) -> None:
    if worker.process.poll() is None:
        try:
            os.killpg(worker.process.pid, signal.SIGKILL)  # its session: it, and whatever it might have started
        except (ProcessLookupError, PermissionError):  # between the fork and setsid there is no such group yet
            worker.process.kill()
        worker.process.wait()
    os.close(worker.tasks)
    os.close(worker.results)


def _stop_all(running: list[_Worker]) -> None:
    while running:
        _stop(running.pop())


def _close(running: list[_Worker], folder: str) -> None:
    _stop_all(running)
    shutil.rmtree(folder, ignore_errors=True)
