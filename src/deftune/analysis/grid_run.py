"""Running a comparison: cell by cell, each in a process of its own; a crash costs one cell, its memory is its own.

A finished cell is never touched again. A stopped or killed one goes on: its run from the newest checkpoint, its answers
from the last one written. A failure is recorded in the cell and the others go on; the next call tries it again.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from deftune.analysis.grid import BASE, Cell, Comparison, Evaluation, open_comparison
from deftune.analysis.tokens import write_token_table
from deftune.data.files import write_atomic
from deftune.data.rows import BadRows
from deftune.evaluation.encodings import PROMPT_OPTIONS
from deftune.evaluation.evaluate import Result, Settings, ask, grade, load_items, summarize
from deftune.evaluation.generation import TransformersSampler
from deftune.evaluation.items import Item
from deftune.evaluation.statistics import half_of
from deftune.evaluation.suites import Task
from deftune.objectives import objective as parse_objective
from deftune.training.models import load_model, load_tokenizer, resolve_model
from deftune.training.preparation import Prepared, make_encoder, prepare, read_rows
from deftune.training.results import load_result
from deftune.training.runs import Run, locked
from deftune.training.train import quiet, train_run

Say = Callable[[str], None]
FOLLOW_STDIN = "DEFTUNE_STOP_WITH_STDIN"  # set for a cell's process: it stops when whoever started it is gone


# --- one cell ---------------------------------------------------------------------------------------------------------


def run_cell(cell: Cell, console: Console | None = None) -> str:
    """Train and measure a cell, or go on with it; its state at the end, which `cell.json` has too."""
    console = console or Console(stderr=True)
    stage = "train"
    with locked(Run(cell.folder)):
        if cell.state()["state"] == "finished":
            return "finished"
        cell.set_state("running", stage=stage)
        try:
            if cell.objective != BASE:
                outcome = train_run(cell.config, console, title=cell.name)
                if outcome.state != "finished":
                    cell.set_state("stopped", stage=stage, step=outcome.step)
                    return "stopped"
            stage = "measure"
            cell.set_state("running", stage=stage)
            seconds = measure_cell(cell, lambda text: console.print(text, highlight=False, soft_wrap=True))
        except KeyboardInterrupt:
            cell.set_state("stopped", stage=stage)
            raise
        except Exception as error:
            text = next((line for line in str(error).splitlines() if line.strip()), "")
            cell.set_state("failed", stage=stage, error=f"{type(error).__name__}: {text}"[:500])
            raise
        shutil.rmtree(Run(cell.folder / "run").checkpoints, ignore_errors=True)  # the result is in run/model
        if not cell.comparison.keep_models:
            shutil.rmtree(Run(cell.folder / "run").model, ignore_errors=True)
        cell.set_state("finished", time=time.time(), cost=training_cost(cell), **seconds)
    return "finished"


def training_cost(cell: Cell) -> dict[str, float]:
    """Seconds, tokens and peak memory of a cell's run, from what it recorded at every step; {} for the base model."""
    records = [record for record in Run(cell.folder / "run").read_metrics() if record.get("kind") == "train"]
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


def measure_cell(cell: Cell, say: Say) -> dict[str, float]:
    """Token statistics and answers of a cell's model; what is there already is not made again."""
    import torch

    section, seconds = cell.section, {"tokens_seconds": 0.0, "eval_seconds": 0.0}
    tokens = cell.folder / "tokens.parquet"
    waiting = [e for e in section.evaluate if not (cell.folder / f"eval-{e.title}" / "summary.json").is_file()]
    if not waiting and (tokens.is_file() or not section.tokens):
        return seconds
    with quiet():
        model, tokenizer = load_cell(cell, say)
        if torch.cuda.is_available():
            model = model.to("cuda")
        if section.tokens and not tokens.is_file():
            start = time.perf_counter()
            write_tokens(cell, model, tokenizer, say)
            seconds["tokens_seconds"] = time.perf_counter() - start
        if torch.cuda.is_available():
            model = model.to(torch.bfloat16)
        start = time.perf_counter()
        for evaluation in waiting:
            evaluate_cell(cell, evaluation, model, tokenizer, say)
        seconds["eval_seconds"] = time.perf_counter() - start
    return seconds


def load_cell(cell: Cell, say: Say) -> tuple[Any, Any]:
    if cell.objective != BASE:
        return load_result(str(cell.folder / "run"), say)
    model = cell.config.model
    source = resolve_model(model.name, say)
    options: dict[str, Any] = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
    return load_model(source, **options), load_tokenizer(source, **options)


def write_tokens(cell: Cell, model: Any, tokenizer: Any, say: Say) -> None:
    """`tokens.parquet`: every supervised token of the held-out rows, with the gates of the comparison's objectives."""
    bad = BadRows(skip=cell.config.data.skip_bad_rows)
    rows = [row for source in cell.section.tokens for row in read_rows([source], cell.config, bad, say)]
    chosen = [parse_objective(spec) for spec in dict.fromkeys(["nll", *cell.comparison.objectives])]
    # what needs a whole optimizer step has no gate in a table of single tokens
    single = [objective for objective in chosen if objective.kind == "local" and "progress" not in objective.requires]
    written = write_token_table(
        cell.folder / "tokens.parquet", model, tokenizer, rows, encoder=make_encoder(cell.config.data, tokenizer),
        objectives=single, bad=bad, facts={"cell": cell.name},
    )  # fmt: skip
    say(f"{written.tokens}: {written.num_tokens:,} tokens")
    if bad.rows:
        bad.write(cell.folder / "bad_rows.jsonl")
        say(f"{bad.summary()}; see {cell.folder / 'bad_rows.jsonl'}")


def evaluate_cell(cell: Cell, evaluation: Evaluation, model: Any, tokenizer: Any, say: Say) -> None:
    """A `deftune eval` result in the cell; answers that are there are not asked for again."""
    tasks, missing = evaluation_items(evaluation)
    encoding = {name: getattr(cell.config.data, name) for name in PROMPT_OPTIONS}
    settings = Settings(
        model=cell.name, suite=evaluation.suite or "", tasks={name: task.version for name, (task, _) in tasks.items()},
        samples=evaluation.samples_each(), temperatures=evaluation.sweep(), top_p=evaluation.top_p,
        seed=evaluation.seed, limit=evaluation.limit, max_new_tokens=evaluation.max_new_tokens, rule=evaluation.rule,
        encoding=encoding,
    )  # fmt: skip
    result = Result(cell.folder / f"eval-{evaluation.title}")
    result.open(settings, tasks)
    options = dict(encoding)
    template = options.pop("template")
    sampler = TransformersSampler(
        model, tokenizer, template=template, batch_size=evaluation.batch_size, encoder_options=options
    )
    ask(result, settings, tasks, sampler)
    graded = grade(result, settings, tasks)
    summary = summarize(settings, evaluation.whole_suite, tasks, graded, missing)
    write_atomic(result.folder / "summary.json", json.dumps(summary, indent=1))
    say(f"{result.folder}: {len(graded):,} answers")


def evaluation_items(evaluation: Evaluation) -> tuple[dict[str, tuple[Task, list[Item]]], dict[str, str]]:
    """The tasks with their items, and the tasks that lack data."""
    return load_items(evaluation.wanted(), Path(evaluation.data) if evaluation.data else None, evaluation.limit)


# --- all of them ------------------------------------------------------------------------------------------------------


@dataclass
class GridOutcome:
    """How a call ended."""

    finished: list[str] = field(default_factory=list[str])
    failed: dict[str, str] = field(default_factory=dict[str, str])
    stopped: bool = False

    @property
    def exit_code(self) -> int:
        return 143 if self.stopped else 1 if self.failed else 0


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


Begin = Callable[[Cell], None]
Runner = Callable[[Sequence[Cell], Begin], Iterator[tuple[Cell, str]]]  # runs cells; each with its state, as they end


def run_grid(comparison: Comparison, runner: Runner, say: Say) -> GridOutcome:
    """Every cell that is not finished."""
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
    for cell, state in runner(waiting, lambda cell: say(f"{places[cell.name]} {cell.name}")):
        if state == "stopped":
            outcome.stopped = True
        elif state == "finished":
            outcome.finished.append(cell.name)
        else:
            outcome.failed[cell.name] = str(cell.state().get("error", "no reason recorded"))
            say(f"  {cell.name} failed: {outcome.failed[cell.name]}")
    if outcome.stopped:
        say("stopped; the same command goes on")
    return outcome


def run_here(cells: Sequence[Cell], begin: Begin) -> Iterator[tuple[Cell, str]]:
    """Cells in this process, one after the other."""
    for cell in cells:
        begin(cell)
        try:
            state = run_cell(cell)
        except Exception:
            state = "failed"  # recorded
        yield cell, state
        if state == "stopped":
            return


def run_in_children(jobs: int) -> Runner:
    """Cells in processes of their own, ``jobs`` at a time; a signal to stop is passed on to all of them."""

    def run(cells: Sequence[Cell], begin: Begin) -> Iterator[tuple[Cell, str]]:
        waiting, running, told = list(cells), dict[str, Child](), False

        def stop(number: int, frame: Any) -> None:
            nonlocal told
            told = True
            for child in running.values():
                child.process.send_signal(signal.SIGTERM)

        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            while running or (waiting and not told):
                while waiting and len(running) < jobs and not told:
                    cell = waiting.pop(0)
                    begin(cell)
                    running[cell.name] = Child(cell)
                    if told:  # while it started
                        running[cell.name].process.send_signal(signal.SIGTERM)
                ended = [child for child in running.values() if child.process.poll() is not None]
                for child in ended:
                    del running[child.cell.name]
                    yield child.cell, child.end(told)
                if not ended:
                    time.sleep(0.1)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    return run


class Child:
    """A cell in a process of its own, its output in `log.txt`."""

    def __init__(self, cell: Cell):
        self.cell = cell
        cell.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "deftune", "compare", "run", cell.comparison.folder, "--cell", cell.name]
        with (cell.folder / "log.txt").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env={**os.environ, FOLLOW_STDIN: "1"},
                start_new_session=True,  # Ctrl-C reaches it once, from here
            )  # fmt: skip

    def end(self, told: bool) -> str:
        """The state of the cell whose process is over; ``told``: it was asked to stop."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        code, state = self.process.returncode, self.cell.state()["state"]
        if code == 0 and state == "finished":
            return "finished"
        if told or state == "stopped":
            return "stopped"
        if state != "failed":  # it had no time to say so
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            self.cell.set_state("failed", error=f"{how}; see {self.cell.folder / 'log.txt'}")
        return "failed"


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
