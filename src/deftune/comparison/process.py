"""The processes that run cells, and the requests that they read: both ends of one pipe.

`worker` imports much more than the command that starts it, for 5 to 20 seconds. This module needs the standard library
only, so that a command starts its processes first: they import while the command imports, and reads its comparison.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

COMMAND = ("-m", "deftune", "compare", "run", "-", "--worker")  # "-": the comparison comes with the requests
CLOSE_SECONDS = 60.0  # for a process that has run cells to end, before it is killed


@dataclass(frozen=True)
class Request:
    """Run this cell."""

    time: float  # of the request
    comparison: str  # the comparison's folder
    cell: str  # the cell's name
    trust_remote_code: bool  # whoever started the comparison has allowed the code of its models

    @property
    def log(self) -> Path:
        """The file for the output of the cell."""
        return Path(self.comparison, self.cell, "log.txt")


# --- the process that asks --------------------------------------------------------------------------------------------


class Process:
    """A process that runs cells, and leads a process group: its helpers (data loaders, graders).

    What it prints before it has a cell goes to a nameless file; `take_output` moves that to the log of its first cell.
    """

    def __init__(self) -> None:
        self._output = tempfile.TemporaryFile()  # open as long as the process lives
        self._process = subprocess.Popen(
            [sys.executable, *COMMAND], stdin=subprocess.PIPE, stdout=self._output, stderr=self._output,
            start_new_session=True,  # Ctrl-C reaches it once, from its starter; and it leads its process group
        )  # fmt: skip
        assert self._process.stdin is not None
        self._requests = self._process.stdin
        self._log: Path | None = None  # of the first cell

    @property
    def has_been_asked(self) -> bool:
        return self._log is not None

    @property
    def exit_code(self) -> int | None:
        """None while the process lives, as far as `exits` has seen."""
        return self._process.returncode

    def ask(self, request: Request) -> None:
        self._log = self._log or request.log
        with suppress(BrokenPipeError):  # the process is gone: `exits` sees that
            os.write(self._requests.fileno(), f"{json.dumps(asdict(request))}\n".encode())

    def stop(self) -> None:
        if self.exit_code is None:  # not `send_signal`, which would reap it before its helpers are ended
            os.kill(self._process.pid, signal.SIGTERM)

    def exits(self) -> bool:
        """Whether the process has ended; its remaining child processes are then ended too.

        Helpers of a process that was killed would go on for seconds, and hold the cell's lock.
        """
        if self.exit_code is not None:
            return True
        if hasattr(os, "waitid"):  # the process is looked at before it is reaped: until then its number stays its own
            if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
        elif self._process.poll() is None:
            return False
        self._reap()
        return True

    def _reap(self) -> None:
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._requests.close()
        text = os.pread(self._output.fileno(), os.fstat(self._output.fileno()).st_size, 0)
        self._output.close()
        if text and self._log is not None:  # the process has ended before it has read its first request
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("ab") as log:
                log.write(text)

    def leave(self) -> None:
        """Ask for no other cell: the process ends, and a cell that runs stops as on SIGTERM."""
        self._requests.close()

    def close(self) -> None:
        """End a process that waits for a cell; one that has had none has nothing to finish."""
        if self.exit_code is not None:
            return
        self.leave()
        deadline = time.monotonic() + (CLOSE_SECONDS if self.has_been_asked else 0.0)
        while not self.exits():
            if time.monotonic() > deadline:
                self._reap()
                return
            time.sleep(0.02)


@contextmanager
def started_early(count: int) -> Generator[list[Process]]:
    """Processes for the first cells; at the end those that were asked for none are killed."""
    processes: list[Process] = []
    try:
        for _ in range(count):
            processes.append(Process())
        yield processes
    finally:
        for process in processes:
            if not process.has_been_asked:
                process.close()


def count_unfinished(config: Path, overrides: Sequence[str]) -> int:
    """How many cells `deftune compare run` would run, from the files alone; 0 where they are wrong.

    The error is left to `load_comparison`, which reads the files once more.
    """
    import yaml

    try:
        path = config / "comparison.yaml" if config.is_dir() else config
        content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        if config.is_dir():
            content["folder"] = str(config)
        for key, _, value in (override.partition("=") for override in overrides):
            if "." not in key:  # nothing below decides how many cells there are
                content[key.strip()] = yaml.safe_load(value)
        seeds, rates = (len(content.get(key, [None])) for key in ("seeds", "learning_rates"))
        each = len(content["objectives"]) * seeds * rates + bool(content.get("base", True))
        folder = Path(content.get("folder", "comparisons/first"))
        states = [*folder.glob("*/base/cell.json"), *folder.glob("*/*/*/cell.json")]
        finished = sum(json.loads(state.read_bytes()).get("state") == "finished" for state in states)
        return max(0, each * len(content["regimes"]) - finished)
    except Exception:
        return 0


# --- the process that is asked ----------------------------------------------------------------------------------------


class Requests(queue.Queue[Request | None]):
    """The requests on standard input; None is their end."""

    stop: Callable[[], None] | None = None  # stops a running cell; set after the imports

    def listen(self) -> None:
        """Read from now on, in a thread: the end of standard input also ends a process that is still importing."""
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        """Pass on the requests; at their end stop this process, as on a first SIGTERM if a cell is running."""
        text = b""
        while piece := os.read(0, 4096):  # not sys.stdin: Python could not close it while a thread reads
            *lines, text = (text + piece).split(b"\n")
            for line in lines:
                self.put(Request(**json.loads(line)))
        is_busy = self.unfinished_tasks > 0  # from the request on: the starter may be gone before the imports end
        self.put(None)
        if is_busy:
            (self.stop or _terminate)()
        elif self.stop is None:
            os._exit(0)


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def take_output() -> bytes:
    """What this process has printed to the file that its starter gave it, which is empty then."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        text = os.pread(1, os.fstat(1).st_size, 0)
        os.ftruncate(1, 0)
    except OSError:  # started by hand
        return b""
    return text
