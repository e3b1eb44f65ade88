"""Run the cells of a comparison in processes of their own, several at a time: a crash costs one cell.

A finished cell is never run again. A stopped or killed cell resumes. The error of a failed cell is recorded in its
folder, the other cells go on, and the next call runs the failed cell again. Where cells of different objectives fail
with the same error and no cell has finished, the remaining cells are not started.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deftune.artifacts.display import quiet
from deftune.comparison.cells import Say, evaluation_items
from deftune.comparison.grid import (
    BASE,
    COMPARISON,
    Cell,
    Comparison,
    Evaluation,
    load_comparison,
    open_comparison,
)
from deftune.comparison.process import Process, Request
from deftune.comparison.summary import summarize_comparison
from deftune.comparison.worker import needs_liger
from deftune.evaluation.results import Tasks, describe_data
from deftune.evaluation.statistics import half_of
from deftune.training.preparation import prepare


@dataclass
class GridOutcome:
    """How a call ended."""

    finished: list[str] = field(default_factory=list[str])
    failed: dict[str, str] = field(default_factory=dict[str, str])
    not_started: list[str] = field(default_factory=list[str])  # after failures that they would have repeated
    stopped: bool = False
    signal: int = signal.SIGTERM  # the signal that stopped the call

    @property
    def exit_code(self) -> int:
        return 128 + self.signal if self.stopped else 1 if self.failed else 0

    def pass_on_stop(self) -> None:
        """Raise what the signal that stopped the call raises by default: `KeyboardInterrupt`, or `SystemExit`."""
        if self.stopped:
            raise KeyboardInterrupt if self.signal == signal.SIGINT else SystemExit(self.exit_code)


class Failures:
    """Failures of one call, and the regimes whose other cells would only repeat them.

    A regime is given up when two of its cells, of different objectives if it has several (the untuned model counts as
    one), failed with the same error and none of its tuned cells has finished. Once cells of two regimes failed with
    the same error and no tuned cell has finished at all, every regime is given up.
    """

    def __init__(self, cells: Sequence[Cell]):
        self.cells = cells
        self.failed: list[tuple[Cell, str]] = []
        self.succeeded: set[str] = set()  # regimes with a tuned cell that finished
        self.given_up: set[str] = set()  # regimes

    def finish(self, cell: Cell) -> None:
        if cell.objective != BASE:
            self.succeeded.add(cell.regime)

    def add(self, cell: Cell, error: str) -> bool:
        """Record a failure; whether an earlier cell failed with the same error."""
        error = error.replace(str(cell.folder), "CELL").replace(cell.name, "CELL")
        alike = [other for other, text in self.failed if text == error]
        self.failed.append((cell, error))
        objectives = {other.objective for other in self.cells if other.regime == cell.regime}
        here = [other for other in alike if other.regime == cell.regime]
        if any(len(objectives) == 1 or other.objective != cell.objective for other in here):
            self.given_up |= {cell.regime} - self.succeeded
        if len(here) < len(alike) and not self.succeeded:
            self.given_up |= {other.regime for other in self.cells}
        return bool(alike)


def check_comparison(comparison: Comparison, say: Say) -> None:
    """Check the data: every task has items, the items of the cells that have finished, and items in both halves.

    A learning rate or temperature is chosen on one half of the items and scored on the other.
    """
    for name, regime in comparison.regimes.items():
        for evaluation in regime.evaluate:
            tasks, missing = evaluation_items(evaluation)
            for task, why in missing.items():
                say(f"regimes.{name}, {evaluation.title}: left out: {task}: {why}")
            check_same_items(comparison, name, evaluation, tasks)
            if len(comparison.learning_rates) * len(evaluation.sweep()) == 1:
                continue
            for task, (_, items) in tasks.items():
                if len({half_of(item.id) for item in items}) < 2:
                    raise ValueError(
                        f"regimes.{name}, {evaluation.title}: {task} has {len(items)} items, all in one half; a "
                        f"learning rate or temperature is chosen on one half and scored on the other: ask more items"
                    )


def check_same_items(comparison: Comparison, regime: str, evaluation: Evaluation, tasks: Tasks) -> None:
    """Refuse to run cells with other items than the finished cells were asked: scores are paired by item."""
    cells = [cell for cell in comparison.cells() if cell.regime == regime]
    if all(cell.is_finished for cell in cells):
        return
    now = describe_data(tasks)
    for cell in cells:
        if not cell.is_finished:
            continue
        result = cell.result(evaluation)
        if not (result.folder / "settings.json").is_file():
            continue  # lost: the summary says what to do
        before = result.settings().get("data", {})
        for task, about in now.items():
            if task in before and before[task]["hash"] != about["hash"]:
                raise ValueError(
                    f"regimes.{regime}, {evaluation.title}: {task} has other items than {result.folder} was asked, so "
                    f"the cells could not be compared; restore its data, or choose another folder with "
                    f"{COMPARISON.option}"
                )


Begin = Callable[[Cell], bool]  # called before a cell starts; False: do not start it
Runner = Callable[[Sequence[Cell], Begin], Iterator[tuple[Cell, str]]]  # runs cells; each with its state, as they end
Watch = Callable[[Sequence[Cell]], None]  # called every few seconds with the running cells


def compare(
    config: str | Path, overrides: Sequence[str] = (), *, jobs: int = 1, keep_going: bool = False, say: Say = print
) -> dict[str, Any]:
    """Train and measure every cell of a comparison, and summarise it; the same call resumes.

        summary = deftune.compare("compare.yaml", ["seeds=[0, 1, 2]"])

    Args:
        config: a comparison's YAML file (`deftune compare init` writes one), or its folder.
        overrides: values of the file to replace, as ``"a.b=c"``.
        jobs: cells at a time, in as many processes.
        keep_going: start every cell even if two objectives fail with the same error and none succeeds.
        say: called with each message.

    Returns:
        The summary: scores with intervals, paired differences, token statistics and cost. `deftune report` draws it.

    Raises:
        ValueError: the file is wrong, or no cell has finished; the message has the first error.
        KeyboardInterrupt: Ctrl-C; the running cells have saved, and the same call goes on (SIGTERM: `SystemExit`).
    """
    comparison = load_comparison(Path(config), overrides)
    outcome = run_grid(comparison, Children(jobs), say, keep_going=keep_going)
    outcome.pass_on_stop()
    if not outcome.finished:
        raise ValueError(f"{comparison.folder}: no cell has finished: {next(iter(outcome.failed.values()))}")
    return summarize_comparison(comparison)


def run_grid(comparison: Comparison, runner: Runner, say: Say, *, keep_going: bool = False) -> GridOutcome:
    """Every cell that is not finished; ``keep_going``: also those that would only repeat a failure."""
    check_comparison(comparison, say)
    open_comparison(comparison)
    cells = comparison.cells()
    places = {cell.name: f"[{number}/{len(cells)}]" for number, cell in enumerate(cells, 1)}
    outcome = GridOutcome(finished=[cell.name for cell in cells if cell.is_finished])
    waiting = [cell for cell in cells if cell.name not in outcome.finished]
    failures, unannounced = Failures(cells), set(comparison.regimes)

    def begin(cell: Cell) -> bool:
        if cell.regime in failures.given_up:
            outcome.not_started.append(cell.name)
            return False
        say(f"{places[cell.name]} {cell.name}")
        return True

    for cell, state in runner(waiting, begin):
        if state == "stopped":
            outcome.stopped = True
        elif state == "finished":
            outcome.finished.append(cell.name)
            failures.finish(cell)
        elif state == CROWDED:
            say(f"  {cell.name} {RUNS_AGAIN}")
        else:
            error = outcome.failed[cell.name] = str(cell.state().get("error", "no reason recorded"))
            alike = failures.add(cell, error) and not keep_going
            say(f"  {cell.name} failed{' in the same way' if alike else f': {error}'}")
            if keep_going:
                failures.given_up.clear()
            if failures.given_up & unannounced:
                say(f"  {', '.join(sorted(failures.given_up & unannounced))}: no tuned cell has finished and cells of "
                    f"different objectives fail alike, so no other cell is started; remove the cause and run the same "
                    f"command, or pass --keep-going to start them all")  # fmt: skip
                unannounced -= failures.given_up
    asked_to_stop: int | None = getattr(runner, "signal", None)
    over = len(outcome.finished) + len(outcome.failed) + len(outcome.not_started)
    outcome.stopped |= asked_to_stop is not None and over < len(cells)  # a signal between two cells stops none
    if outcome.stopped:
        outcome.signal = asked_to_stop or signal.SIGTERM
        say("stopped; the same command goes on")
    if outcome.not_started:
        say(f"not started: {', '.join(outcome.not_started)}")
    return outcome


WATCH_SECONDS = 5.0
OUT_OF_MEMORY = "OutOfMemoryError"  # the name of torch's error, as a cell records it
CROWDED = "crowded"  # the state of such a cell beside others, until it runs again
RUNS_AGAIN = "ran out of GPU memory beside other cells; it runs again, with fewer cells at a time"


class Children:
    """Runs cells in processes, ``jobs`` at a time; a process runs one cell after the other (`worker`).

    SIGTERM and SIGINT are passed on as SIGTERM to each process that runs a cell, which finishes its step, saves and
    stops. To that process alone: its helpers (data loaders, graders) would die of the signal before it has saved. They
    go with it.

    A cell that runs out of GPU memory beside other cells runs again next, and from then on one cell fewer runs at a
    time: with too little memory for ``jobs`` cells, others would fail in the same way. Alone it runs once.

    ``early``: processes that were started before (`started_early`); they get the first cells.
    """

    def __init__(
        self, jobs: int, watch: Watch = lambda _: None, clock: Callable[[], float] = time.monotonic,
        early: Sequence[Process] = (),
    ):  # fmt: skip
        self.jobs, self.watch, self.clock = jobs, watch, clock
        self.room = jobs  # cells that may run at a time: fewer after one ran out of memory
        self.signal: int | None = None  # that asked to stop
        self.running: list[Child] = []
        self.idle = [Child(process) for process in early]  # processes that wait for a cell

    def stop(self, number: int = signal.SIGTERM, frame: Any = None) -> None:
        """Start no other cell, and stop those that run, as on a signal; a second call ends them while they save."""
        self.signal = self.signal or number
        for child in self.running:
            child.process.stop()

    def __call__(self, cells: Sequence[Cell], begin: Begin) -> Iterator[tuple[Cell, str]]:
        waiting, self.room = list(cells), self.jobs
        before = {number: signal.signal(number, self.stop) for number in (signal.SIGTERM, signal.SIGINT)}
        watched = self.clock()
        try:
            while self.running or (waiting and not self.signal):
                # idle processes would keep memory from the cells that run
                self._close_idle(keep=self.room - len(self.running) if waiting else 0)
                if waiting and not self.signal and len(self.running) < self.room:
                    cell = waiting.pop(0)
                    if begin(cell):
                        self._start(cell)
                    continue
                ended = [child for child in self.running if child.is_over()]
                for child in ended:
                    self.running.remove(child)
                    cell, state = child.cell, child.end(asked_to_stop=self.signal is not None)
                    if child.process.exit_code is None:
                        self.idle.append(child)
                    if state == "failed" and child.shared and OUT_OF_MEMORY in str(cell.state().get("error")):
                        if child.room == self.room:  # cells that fail together count once
                            self.room = max(1, self.room - 1)
                        waiting.insert(0, cell)
                        state = CROWDED
                    yield cell, state
                if self.clock() - watched >= WATCH_SECONDS:
                    watched = self.clock()
                    self.watch([child.cell for child in self.running])
                if self.running and not ended:
                    time.sleep(0.1)
        finally:
            while self.running:  # the caller has given up: they stop, as if this process were gone
                self.running.pop().process.leave()
            self._close_idle()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(self, cell: Cell) -> None:
        """Start a cell in an idle process that suits, else in a new one."""
        child = next((child for child in self.idle if child.suits(cell)), None)
        if child is not None:
            self.idle.remove(child)
        self._close_idle(keep=self.room - len(self.running) - 1)
        child = child or Child(Process())
        child.room = self.room
        self.running.append(child)
        child.start(cell)
        for other in self.running:
            other.shared = other.shared or len(self.running) > 1
        if self.signal:  # while it started
            child.process.stop()

    def _close_idle(self, keep: int = 0) -> None:
        while len(self.idle) > max(0, keep):
            self.idle.pop().process.close()


class Child:
    """A process, and the cell that it runs or ran last."""

    cell: Cell  # from `start` on

    def __init__(self, process: Process):
        self.process, self.folder = process, ""  # folder: of the comparison whose config the process has read
        self.shared = self.liger = False  # shared: another cell ran at the same time
        self.room = 1  # `Children.room` when its cell started

    def suits(self, cell: Cell) -> bool:
        """Whether the process, which waits, can run the cell as a new process would."""
        same = self.folder in ("", cell.comparison.folder)
        return same and needs_liger(cell) >= self.liger and not self.process.exits()

    def start(self, cell: Cell) -> None:
        """Ask for a cell."""
        self.cell, self.shared, self.liger = cell, False, self.liger or needs_liger(cell)
        self.folder = cell.comparison.folder
        # whoever started the comparison has passed it
        trusted = any(other.config.model.trust_remote_code for other in cell.comparison.cells())
        self.process.ask(Request(time.time(), self.folder, cell.name, trusted))

    def is_over(self) -> bool:
        """Whether the cell has finished, or its process has ended."""
        return self.cell.is_finished or self.process.exits()

    def end(self, *, asked_to_stop: bool) -> str:
        """The state of a cell that is over; ``asked_to_stop``: its process was."""
        code, about = self.process.exit_code or 0, self.cell.state()
        if about["state"] == "finished":  # whatever came after that
            return "finished"
        if asked_to_stop or about["state"] == "stopped":
            if about["state"] != "failed":
                self.cell.set_state("stopped", **{key: value for key, value in about.items() if key != "state"})
            return "stopped"
        if about["state"] != "failed":  # it had no time to record it
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            self.cell.set_state("failed", error=f"{how}; see {self.cell.folder / 'log.txt'}")
        return "failed"


def cell_progress(cell: Cell) -> str:
    """The progress of a cell from its files: the training step, or the number of answers."""
    if cell.state().get("stage") == "measure":
        samples = cell.folder.glob("eval-*/samples.jsonl")
        answers = sum(path.read_bytes().count(b"\n") for path in samples)
        return f"{cell.name}: measuring, {answers:,} answers"
    steps = [record["step"] for record in cell.run.read_metrics()]
    return f"{cell.name}: training, step {steps[-1]}" if steps else f"{cell.name}: preparing"


# --- before running ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimated:
    """What a cell of a regime takes: tokens trained on, and answers with the most tokens that they may have."""

    trained: int
    steps: int
    answers: int
    answer_tokens: int


def estimate_regime(comparison: Comparison, name: str, say: Say) -> Estimated:
    """The cost of a regime from its data, read, masked and packed; no weights are loaded."""
    cell = next(cell for cell in comparison.cells() if cell.regime == name and cell.objective != BASE)
    with quiet():
        prepared = prepare(cell.config, say)
    answers = tokens = 0
    for evaluation in comparison.regimes[name].evaluate:
        tasks, _ = evaluation_items(evaluation)
        each = sum(1 if temperature == 0 else evaluation.samples_each() for temperature in evaluation.sweep())
        for task, items in tasks.values():
            answers += len(items) * each
            tokens += len(items) * each * (evaluation.max_new_tokens or task.max_new_tokens)
    per_epoch = -(-len(prepared.sequences) // cell.config.train.batch_size)
    trained = round(prepared.train.examples.num_tokens * prepared.steps / per_epoch)
    return Estimated(trained, prepared.steps, answers, tokens)


def dry_run_grid(comparison: Comparison, say: Say) -> None:
    """Print the cells, their states, and what each would cost."""
    check_comparison(comparison, say)
    found = {name: estimate_regime(comparison, name, say) for name in comparison.regimes}
    cells = comparison.cells()
    width = max(len(cell.name) for cell in cells) + 2
    say(f"{'cell':{width}}{'state':10}{'steps':>7}{'tokens trained':>16}{'answers':>9}{'tokens, at most':>17}")
    trained = answered = 0
    for cell in cells:
        about, state = found[cell.regime], cell.state()["state"]
        tuned = cell.objective != BASE
        steps, tokens = (about.steps, about.trained) if tuned else (0, 0)
        say(f"{cell.name:{width}}{state:10}{steps:>7,}{tokens:>16,}{about.answers:>9,}{about.answer_tokens:>17,}")
        if state != "finished":
            trained += tokens
            answered += about.answer_tokens
    left = sum(not cell.is_finished for cell in cells)
    say(f"{left} of {len(cells)} cells to run: {trained:,} tokens to train on, at most {answered:,} to generate")
