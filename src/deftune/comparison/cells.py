"""Running a comparison: cell by cell, each in a process of its own; a crash costs one cell, its memory is its own.

A finished cell is never touched again. A stopped or killed one goes on: its run from the newest checkpoint, its answers
from the last one written. Where `keep_models` is false, the trained model is measured in memory and its weights are
never written: such a cell, killed while it measures, trains again and is measured from the beginning. A failure is
recorded in the cell and the others go on; the next call tries it again. Where cells of different objectives fail alike
and none succeeds, the rest would too: it is not started.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from deftune.artifacts.display import quiet
from deftune.artifacts.folders import locked
from deftune.artifacts.models import load_model, load_tokenizer, resolve_model
from deftune.artifacts.names import shown_model
from deftune.artifacts.results import encoder_options, load_result, prompt_options
from deftune.artifacts.terminal import line_printer
from deftune.comparison.grid import BASE, Cell, Comparison, Evaluation, load_comparison, open_comparison
from deftune.comparison.summary import summarize_comparison
from deftune.data.encoding import Encoder
from deftune.data.rows import BadRows
from deftune.evaluation.evaluate import Result, Settings, ask, write_summary
from deftune.evaluation.in_training import task_scorer
from deftune.evaluation.items import Item
from deftune.evaluation.local import TransformersSampler
from deftune.evaluation.questions import Questions, load_items
from deftune.evaluation.statistics import half_of
from deftune.evaluation.suites import Task
from deftune.objectives import objective as parse_objective
from deftune.tokens.passes import token_context, why_not_computable
from deftune.tokens.table import token_table_facts, write_token_table
from deftune.training.preparation import Prepared, prepare, read_mixture
from deftune.training.train import Outcome, fits_in_memory, train_run

Say = Callable[[str], None]
PARTS = ("prepare", "train", "save")  # of a run, in `Outcome.seconds`
FOLLOW_STDIN = "DEFTUNE_STOP_WITH_STDIN"  # set for a cell's process: it stops when whoever started it is gone


# --- one cell ---------------------------------------------------------------------------------------------------------


def run_cell(cell: Cell, console: Console | None = None) -> str:
    """Train and measure a cell, or go on with it; its state at the end, which `cell.json` has too."""
    console = console or Console(stderr=True)
    say, begin, stage, outcome = line_printer(console), time.perf_counter(), "train", None
    with locked(cell.folder, "running this cell"):
        if cell.state()["state"] == "finished":
            return "finished"
        cell.set_state("running", stage=stage)
        try:
            if cell.objective != BASE:
                save = cell.comparison.keep_models or not fits_in_memory(cell.config)
                if not save and not cell.run.has_result():
                    remove_measurements(cell, say)
                scorer = task_scorer(cell.config)
                outcome = train_run(cell.config, console, title=cell.name, score_tasks=scorer, save=save)
                if outcome.state != "finished":
                    cell.set_state("stopped", stage=stage, step=outcome.step)
                    return "stopped"
            stage = "measure"
            cell.set_state("running", stage=stage)
            measured = measure_cell(cell, say, outcome and outcome.model, outcome and outcome.tokenizer)
        except KeyboardInterrupt:
            cell.set_state("stopped", stage=stage)
            raise
        except Exception as error:
            text = next((line for line in str(error).splitlines() if line.strip()), "")
            cell.set_state("failed", stage=stage, error=f"{type(error).__name__}: {text}"[:500])
            raise
        shutil.rmtree(cell.run.checkpoints, ignore_errors=True)  # the result is in run/model
        if not cell.comparison.keep_models:
            shutil.rmtree(cell.run.model, ignore_errors=True)
        clock = cell_seconds(cell, outcome, measured, time.perf_counter() - begin)
        cell.set_state("finished", time=time.time(), cost=training_cost(cell), **measured, **clock)
    return "finished"


def remove_measurements(cell: Cell, say: Say) -> None:
    """Remove what was measured of weights that are lost: the next ones may differ, on a GPU in the last digits."""
    names = ["tokens.parquet", "bad_rows.jsonl", *(f"eval-{evaluation.title}" for evaluation in cell.section.evaluate)]
    found = [cell.folder / name for name in names if (cell.folder / name).exists()]
    for path in found:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if found:
        say(f"removed {', '.join(path.name for path in found)}: the weights they were measured with were not kept")


def cell_seconds(cell: Cell, outcome: Outcome | None, measured: dict[str, Any], whole: float) -> dict[str, float]:
    """Wall seconds of the call that finished a cell, by part.

    ``overhead_seconds`` is all but the training steps, the token table and the answers.
    """
    parts = {f"{part}_seconds": (outcome.seconds if outcome else {}).get(part, 0.0) for part in PARTS}
    begun = outcome.begun if outcome else 0
    steps = sum(float(record.get("step_seconds", 0.0)) for record in train_records(cell) if record["step"] > begun)
    return parts | {"overhead_seconds": whole - steps - measured["tokens_seconds"] - measured["eval_seconds"]}


def train_records(cell: Cell) -> list[dict[str, Any]]:
    """What a cell's run recorded at each of its steps; nothing for the base model."""
    return [record for record in cell.run.read_metrics() if record.get("kind") == "train"]


def training_cost(cell: Cell) -> dict[str, float]:
    """Seconds, tokens and peak memory of a cell's run, from what it recorded at every step; {} for the base model."""
    records = train_records(cell)
    if not records:
        return {}
    seconds = sum(float(record.get("step_seconds", 0.0)) for record in records)
    tokens = sum(float(record.get("input_tokens", 0)) for record in records)
    return {
        "steps": len(records),
        "seconds": seconds,
        "tokens": tokens,
        "supervised": sum(float(record.get("tokens", 0)) for record in records),
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "memory_gib": max(float(record.get("memory_gib", 0.0)) for record in records),
    }


def measure_cell(cell: Cell, say: Say, model: Any = None, tokenizer: Any = None) -> dict[str, Any]:
    """Token statistics and answers of a cell's model; what is there already is not made again.

    Args:
        cell: the cell.
        say: called with each message.
        model: the tuned model; None: the cell's model is loaded from its folder.
        tokenizer: its tokenizer.

    Returns:
        The seconds of loading, token table and answers, and under ``left_out`` what could not be computed.
    """
    import torch

    section = cell.section
    found: dict[str, Any] = dict.fromkeys(("load_seconds", "tokens_seconds", "eval_seconds"), 0.0)
    found["left_out"] = read_left_out(cell)
    tokens = cell.folder / "tokens.parquet"
    waiting = [e for e in section.evaluate if not (cell.folder / f"eval-{e.title}" / "summary.json").is_file()]
    if not waiting and (tokens.is_file() or not section.tokens):
        return found
    with quiet():
        start = time.perf_counter()
        if model is None:
            model, tokenizer = load_cell(cell, say)
        if torch.cuda.is_available():
            model = model.to("cuda")
        found["load_seconds"] = time.perf_counter() - start
        if section.tokens and not tokens.is_file():
            start = time.perf_counter()
            found["left_out"] = write_tokens(cell, model, tokenizer, say)
            found["tokens_seconds"] = time.perf_counter() - start
        if torch.cuda.is_available():
            model = model.to(torch.bfloat16)
        start = time.perf_counter()
        for evaluation in waiting:
            evaluate_cell(cell, evaluation, model, tokenizer, say)
        found["eval_seconds"] = time.perf_counter() - start
    return found


def read_left_out(cell: Cell) -> list[str]:
    """What the cell's token table lacks, as the table says it."""
    path = cell.folder / "tokens.parquet"
    return list(token_table_facts(path).get("left_out", [])) if path.is_file() else []


def load_cell(cell: Cell, say: Say) -> tuple[Any, Any]:
    if cell.objective != BASE:
        return load_result(str(cell.run.folder), say, trust_remote_code=cell.config.model.trust_remote_code)
    model = cell.config.model
    source = resolve_model(model.name, say, revision=model.revision)
    options: dict[str, Any] = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
    return load_model(source, **options), load_tokenizer(source, **options)


def write_tokens(cell: Cell, model: Any, tokenizer: Any, say: Say) -> list[str]:
    """`tokens.parquet`: every supervised token of the held-out rows, with the gates of the comparison's objectives.

    An objective that cannot be computed here fails in its own cell, not in all others: its columns are left out.
    Returns which, and why.
    """
    bad = BadRows(skip=cell.config.data.skip_bad_rows)
    rows = [row for source in cell.section.tokens for row in read_mixture([source], cell.config, bad, say)]
    chosen = [parse_objective(spec) for spec in dict.fromkeys(["nll", *cell.comparison.objectives])]
    # what needs a whole optimizer step has no gate in a table of single tokens
    single = [objective for objective in chosen if objective.kind == "local" and "progress" not in objective.requires]
    encoder = Encoder(tokenizer, **encoder_options(cell.config.data))
    context = token_context(encoder)
    reasons = {objective: why_not_computable(objective, context) for objective in single}
    left_out = [f"the columns of `{objective}`: {reason}" for objective, reason in reasons.items() if reason]
    for line in left_out:
        say(f"left out: {line}")
    written = write_token_table(
        cell.folder / "tokens.parquet", model, tokenizer, rows, encoder=encoder,
        objectives=[objective for objective, reason in reasons.items() if not reason], bad=bad,
        facts={"cell": cell.name, "model": cell_title(cell), "left_out": left_out, **data_fact(cell)},
    )  # fmt: skip
    say(f"{written.tokens}: {written.num_tokens:,} tokens")
    if bad.rows:
        bad.write(cell.folder / "bad_rows.jsonl")
        say(f"{bad.summary()}; see {cell.folder / 'bad_rows.jsonl'}")
    return left_out


def cell_title(cell: Cell) -> str:
    """What a cell's model is called where its tokens are shown."""
    base = shown_model(cell.config.model.name)
    return base if cell.objective == BASE else f"{cell.name}, tuned from {base}"


def data_fact(cell: Cell) -> dict[str, str]:
    """Where a cell's held-out rows come from, as `inspect` takes it; nothing for a mixture."""
    if len(cell.section.tokens) != 1:
        return {}
    (source,) = cell.section.tokens
    return {"data": source.place}


def evaluate_cell(cell: Cell, evaluation: Evaluation, model: Any, tokenizer: Any, say: Say) -> None:
    """A `deftune eval` result in the cell; answers that are there are not asked for again."""
    tasks, missing = evaluation_items(evaluation)
    encoding = prompt_options(encoder_options(cell.config.data))
    settings = Settings(
        model=cell.name, suite=evaluation.suite or "", tasks={name: task.version for name, (task, _) in tasks.items()},
        samples=evaluation.samples_each(), temperatures=evaluation.sweep(), top_p=evaluation.top_p,
        seed=evaluation.seed, limit=evaluation.limit, max_new_tokens=evaluation.max_new_tokens, rule=evaluation.rule,
        encoding=encoding,
    )  # fmt: skip
    result = Result(cell.folder / f"eval-{evaluation.title}")
    result.open(settings, tasks)
    sampler = TransformersSampler(model, tokenizer, batch_size=evaluation.batch_size, encoder_options=encoding)
    ask(result, settings, tasks, sampler)
    summary = write_summary(result, settings, Questions(evaluation.whole_suite, tasks, missing))
    say(f"{result.folder}: {sum(row['items'] * row['samples'] for row in summary['rows']):,} answers")


def evaluation_items(evaluation: Evaluation) -> tuple[dict[str, tuple[Task, list[Item]]], dict[str, str]]:
    """The tasks with their items, and the tasks that lack data."""
    return load_items(evaluation.wanted(), Path(evaluation.data) if evaluation.data else None, evaluation.limit)


# --- all of them ------------------------------------------------------------------------------------------------------


@dataclass
class GridOutcome:
    """How a call ended."""

    finished: list[str] = field(default_factory=list[str])
    failed: dict[str, str] = field(default_factory=dict[str, str])
    not_started: list[str] = field(default_factory=list[str])  # after failures that they would have repeated
    stopped: bool = False
    signal: int = signal.SIGTERM  # that stopped it

    @property
    def exit_code(self) -> int:
        return 128 + self.signal if self.stopped else 1 if self.failed else 0


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
        """Whether the cell failed as one before it did."""
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
    """What only the data can tell: that there are items, and enough of them where something is chosen on a half."""
    for name, regime in comparison.regimes.items():
        for evaluation in regime.evaluate:
            tasks, missing = evaluation_items(evaluation)
            for task, why in missing.items():
                say(f"regimes.{name}, {evaluation.title}: left out: {task}: {why}")
            if len(comparison.learning_rates) * len(evaluation.sweep()) == 1:
                continue
            for task, (_, items) in tasks.items():
                if len({half_of(item.id) for item in items}) < 2:
                    raise ValueError(
                        f"regimes.{name}, {evaluation.title}: {task} has {len(items)} items, all in one half; a "
                        f"learning rate or temperature is chosen on one half and scored on the other: ask more items"
                    )


Begin = Callable[[Cell], bool]  # before a cell starts: whether it is to be started at all
Runner = Callable[[Sequence[Cell], Begin], Iterator[tuple[Cell, str]]]  # runs cells; each with its state, as they end
Watch = Callable[[Sequence[Cell]], None]  # hears now and then which cells are running


def compare(
    config: str | Path, overrides: Sequence[str] = (), *, jobs: int = 1, keep_going: bool = False, say: Say = print
) -> dict[str, Any]:
    """Train and measure every cell of a comparison, and summarise it; the same call resumes.

        summary = deftune.compare("compare.yaml", ["seeds=[0, 1, 2]"])

    Args:
        config: a comparison's YAML file (`deftune compare init` writes one), or its folder.
        overrides: values of the file to replace, as ``"a.b=c"``.
        jobs: cells at a time, each in a process of its own.
        keep_going: start every cell, also where objectives fail alike and none succeeds.
        say: called with each message.

    Returns:
        The summary: scores with intervals, paired differences, token statistics and cost. `deftune report` draws it.

    Raises:
        ValueError: the file is wrong, or no cell has finished; the message has the first error.
    """
    comparison = load_comparison(Path(config), overrides)
    outcome = run_grid(comparison, Children(jobs), say, keep_going=keep_going)
    if not outcome.finished:
        error = next(iter(outcome.failed.values()), "it was stopped")
        raise ValueError(f"{comparison.folder}: no cell has finished: {error}")
    return summarize_comparison(comparison)


def run_grid(comparison: Comparison, runner: Runner, say: Say, *, keep_going: bool = False) -> GridOutcome:
    """Every cell that is not finished; ``keep_going``: also those that would only repeat a failure."""
    check_comparison(comparison, say)
    open_comparison(comparison)
    outcome = GridOutcome()
    cells = comparison.cells()
    places = {cell.name: f"[{number}/{len(cells)}]" for number, cell in enumerate(cells, 1)}
    waiting: list[Cell] = []
    for cell in cells:
        if cell.state()["state"] == "finished":
            outcome.finished.append(cell.name)
        else:
            waiting.append(cell)
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
    if outcome.stopped:
        outcome.signal = getattr(runner, "signal", None) or signal.SIGTERM
        say("stopped; the same command goes on")
    if outcome.not_started:
        say(f"not started: {', '.join(outcome.not_started)}")
    return outcome


WATCH_SECONDS = 5.0


class Children:
    """Runs cells in processes of their own, ``jobs`` at a time.

    SIGTERM and SIGINT are passed on as SIGTERM to each cell's own process, which finishes its step, saves and stops.
    It alone: its helpers (data loaders, graders) would die of the signal before it has saved. They go with it.
    """

    def __init__(self, jobs: int, watch: Watch = lambda _: None, clock: Callable[[], float] = time.monotonic):
        self.jobs, self.watch, self.clock = jobs, watch, clock
        self.signal: int | None = None  # that asked to stop

    def __call__(self, cells: Sequence[Cell], begin: Begin) -> Iterator[tuple[Cell, str]]:
        waiting, running = list(cells), dict[str, Child]()

        def stop(number: int, frame: Any) -> None:
            self.signal = self.signal or number
            for child in running.values():
                child.stop()

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        watched = self.clock()
        try:
            while running or (waiting and not self.signal):
                while waiting and len(running) < self.jobs and not self.signal:
                    cell = waiting.pop(0)
                    if begin(cell):
                        running[cell.name] = Child(cell)
                        if self.signal:  # while it started
                            running[cell.name].stop()
                ended = [child for child in running.values() if child.is_over()]
                for child in ended:
                    del running[child.cell.name]
                    yield child.cell, child.end(told=self.signal is not None)
                if self.clock() - watched >= WATCH_SECONDS:
                    watched = self.clock()
                    self.watch([child.cell for child in running.values()])
                if running and not ended:
                    time.sleep(0.1)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Child:
    """A cell in a process of its own, its output in `log.txt`."""

    def __init__(self, cell: Cell):
        self.cell = cell
        cell.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "deftune", "compare", "run", cell.comparison.folder, "--cell", cell.name]
        if cell.config.model.trust_remote_code:  # whoever started the comparison has said so
            command.append("--trust-remote-code")
        with (cell.folder / "log.txt").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env={**os.environ, FOLLOW_STDIN: "1"},
                start_new_session=True,  # Ctrl-C reaches it once, from here; and it leads its helpers' process group
            )  # fmt: skip

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def is_over(self) -> bool:
        """Whether the cell's process is over; whatever it left running is then ended with it.

        Helpers of a process that was killed would go on for seconds, and hold the cell's lock.
        """
        if hasattr(os, "waitid"):  # the process is looked at before it is reaped: until then its number stays its own
            if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
        elif self.process.poll() is None:
            return False
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return True

    def end(self, *, told: bool) -> str:
        """The state of the cell whose process is over; ``told``: it was asked to stop."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        code, about = self.process.returncode, self.cell.state()
        if code == 0 and about["state"] == "finished":
            return "finished"
        if told or about["state"] == "stopped":
            if about["state"] != "failed":
                self.cell.set_state("stopped", **{key: value for key, value in about.items() if key != "state"})
            return "stopped"
        if about["state"] != "failed":  # it had no time to record it
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            self.cell.set_state("failed", error=f"{how}; see {self.cell.folder / 'log.txt'}")
        return "failed"


def cell_progress(cell: Cell) -> str:
    """Where a cell stands, from what it has written so far: its step, or how many answers it has."""
    if cell.state().get("stage") == "measure":
        samples = cell.folder.glob("eval-*/samples.jsonl")
        answers = sum(path.read_bytes().count(b"\n") for path in samples)
        return f"{cell.name}: measuring, {answers:,} answers"
    steps = [record["step"] for record in cell.run.read_metrics()]
    return f"{cell.name}: training, step {steps[-1]}" if steps else f"{cell.name}: preparing"


def follow_starter() -> None:
    """In a cell's process: stop, as on SIGTERM, when the one that started it is gone."""
    if not os.environ.get(FOLLOW_STDIN):
        return

    def watch() -> None:
        os.read(0, 1)  # not sys.stdin: Python could not close it while a thread reads
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


# --- before running ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimated:
    """What a cell of a regime takes: tokens trained on, and answers with the most tokens that they may have."""

    trained: int
    steps: int
    answers: int
    answer_tokens: int


def estimate_regime(comparison: Comparison, name: str, say: Say) -> Estimated:
    """From the data itself: read, masked and packed, the model's weights untouched."""
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
    return Estimated(trained_tokens(prepared), prepared.steps, answers, tokens)


def trained_tokens(prepared: Prepared) -> int:
    """Input tokens of the whole run."""
    per_epoch = -(-len(prepared.sequences) // prepared.config.train.batch_size)
    tokens = sum(len(sequence.input_ids) for sequence in prepared.sequences)
    return round(tokens * prepared.steps / per_epoch)


def dry_run_grid(comparison: Comparison, say: Say) -> None:
    """The cells, what became of them so far, and what each would take."""
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
    left = sum(cell.state()["state"] != "finished" for cell in cells)
    say(f"{left} of {len(cells)} cells to run: {trained:,} tokens to train on, at most {answered:,} to generate")
