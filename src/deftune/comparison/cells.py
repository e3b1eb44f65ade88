"""Run one cell of a comparison: train its model, measure the model, record the result in the cell's folder.

A stopped or killed cell resumes: its training from the newest checkpoint, its evaluation after the last recorded
answer. Where `keep_models` is false, the trained model is measured in memory and its weights are never written; such a
cell, killed while it is measured, starts again from the beginning.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from deftune.artifacts.display import quiet
from deftune.artifacts.folders import locked
from deftune.artifacts.models import load_tokenizer, resolve_model
from deftune.artifacts.names import shown_model
from deftune.artifacts.results import encoder_options, load_result, prompt_options
from deftune.artifacts.runs import Run
from deftune.artifacts.terminal import line_printer
from deftune.comparison.grid import BASE, Cell, Evaluation
from deftune.data.encoding import Encoder
from deftune.data.rows import BadRows
from deftune.evaluation.evaluate import Settings, ask, write_summary
from deftune.evaluation.grading import Grader
from deftune.evaluation.in_training import task_scorer
from deftune.evaluation.local import TransformersSampler
from deftune.evaluation.questions import Questions, load_items
from deftune.evaluation.results import Tasks
from deftune.evaluation.sampler import with_date
from deftune.objectives import objective as parse_objective
from deftune.tokens.passes import token_context, why_not_computable
from deftune.tokens.table import token_table_facts, write_token_table
from deftune.training.assembly import base_options
from deftune.training.preparation import data_key, read_mixture
from deftune.training.reuse import Reuse
from deftune.training.train import Outcome, fits_in_memory, train_run

Say = Callable[[str], None]
PARTS = ("prepare", "train", "save")  # of a run, in `Outcome.seconds`


class Shared(Reuse):
    """What the cells of one process share: data, model, questions, and the processes that grade."""

    def __init__(self) -> None:
        super().__init__()
        self._questions: dict[str, tuple[Tasks, dict[str, str]]] = {}

    def questions(self, evaluation: Evaluation) -> tuple[Tasks, dict[str, str]]:
        """`evaluation_items`, read once."""
        key = evaluation.model_dump_json()
        if key not in self._questions:
            self._questions[key] = evaluation_items(evaluation)
        return self._questions[key]

    @cached_property
    def grader(self) -> Grader:
        """Grades the answers of every cell: its processes take seconds to start."""
        return Grader()


def run_cell(
    cell: Cell, console: Console | None = None, *, shared: Shared | None = None, start_seconds: float = 0.0
) -> str:
    """Train and measure a cell, or resume it; returns its state, which is also in `cell.json`.

    Args:
        cell: the cell.
        console: where progress is shown; standard error by default.
        shared: what earlier cells of this process have left for this one.
        start_seconds: how long the cell has waited for this process, recorded as part of the overhead.
    """
    console, shared = console or Console(stderr=True), shared or Shared()
    say, begin, stage, outcome = line_printer(console), time.perf_counter() - start_seconds, "train", None
    with locked(cell.folder, "running this cell"):
        if cell.is_finished:
            return "finished"
        cell.set_state("running", stage=stage)
        try:
            if cell.objective != BASE:
                save = cell.comparison.keep_models or not fits_in_memory(cell.config)
                if not cell.run.has_result():
                    remove_measurements(cell, say)
                scorer = task_scorer(cell.config)
                outcome = train_run(
                    cell.config, console, title=cell.name, score_tasks=scorer, save=save, reuse=shared,
                    alike=runs_alike(cell),
                )  # fmt: skip
                if outcome.state != "finished":
                    cell.set_state("stopped", stage=stage, step=outcome.step)
                    return "stopped"
            stage = "measure"
            cell.set_state("running", stage=stage)
            measured = measure_cell(cell, say, shared, outcome and outcome.model, outcome and outcome.tokenizer)
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
        clock = cell_seconds(cell, outcome, measured, start_seconds, time.perf_counter() - begin)
        cell.set_state("finished", time=time.time(), cost=training_cost(cell), task_versions=task_versions(cell),
                       **measured, **clock)  # fmt: skip
    return "finished"


def runs_alike(cell: Cell) -> list[Run]:
    """The runs of the comparison that have the same data by their config."""
    tuned = [other for other in cell.comparison.cells() if other.objective != BASE and other.name != cell.name]
    return [other.run for other in tuned if data_key(other.config) == data_key(cell.config)]


def remove_measurements(cell: Cell, say: Say) -> None:
    """Remove the measurements of weights that were not kept: training again may give other weights on a GPU."""
    folders = [cell.result(evaluation).folder for evaluation in cell.section.evaluate]
    made = [path for path in (cell.token_table, cell.folder / "bad_rows.jsonl", *folders) if path.exists()]
    for path in made:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if made:
        say(f"removed {', '.join(path.name for path in made)}: the weights they were measured with were not kept")


def cell_seconds(
    cell: Cell, outcome: Outcome | None, measured: dict[str, Any], start: float, whole: float
) -> dict[str, float]:
    """Wall seconds of the call that finished a cell, by part.

    ``overhead_seconds`` is all but the training steps, the token table and the answers.
    """
    parts = {f"{part}_seconds": (outcome.seconds if outcome else {}).get(part, 0.0) for part in PARTS}
    first = outcome.start_step if outcome else 0
    steps = sum(float(record.get("step_seconds", 0.0)) for record in cell.train_records() if record["step"] > first)
    parts["start_seconds"] = start
    return parts | {"overhead_seconds": whole - steps - measured["tokens_seconds"] - measured["eval_seconds"]}


def training_cost(cell: Cell) -> dict[str, float]:
    """Seconds, tokens and peak memory of a cell's run, from what it recorded at every step; {} for the base model."""
    records = cell.train_records()
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


def measure_cell(cell: Cell, say: Say, shared: Shared, model: Any = None, tokenizer: Any = None) -> dict[str, Any]:
    """Measure token statistics and answers of a cell's model; finished measurements are kept.

    Args:
        cell: the cell.
        say: called with each message.
        shared: the untuned model of the cell "base", and the grader.
        model: the tuned model; None: the cell's model is loaded from its folder.
        tokenizer: its tokenizer.

    Returns:
        The seconds of loading, token table and answers, and under ``left_out`` what could not be computed.
    """
    import torch

    seconds: dict[str, float] = {"load_seconds": 0.0, "tokens_seconds": 0.0, "eval_seconds": 0.0}

    @contextmanager
    def timed(part: str) -> Generator[None]:
        start = time.perf_counter()
        yield
        seconds[part] = time.perf_counter() - start

    waiting = [e for e in cell.section.evaluate if not (cell.result(e).folder / "summary.json").is_file()]
    needs_tokens = bool(cell.section.tokens) and not cell.token_table.is_file()
    if waiting or needs_tokens:
        with quiet():
            with timed("load_seconds"):
                if model is None:
                    model, tokenizer = load_cell(cell, say, shared)
                if torch.cuda.is_available():
                    model = model.to("cuda")
            if needs_tokens:
                with timed("tokens_seconds"):
                    write_tokens(cell, model, tokenizer, say)
            if torch.cuda.is_available():
                model = model.to(torch.bfloat16)
            with timed("eval_seconds"):
                for evaluation in waiting:
                    evaluate_cell(cell, evaluation, model, tokenizer, say, shared)
    facts = token_table_facts(cell.token_table) if cell.token_table.is_file() else {}
    return {**seconds, "left_out": list(facts.get("left_out", []))}


def task_versions(cell: Cell) -> dict[str, str]:
    """The versions of the tasks that graded a cell's answers."""
    results = [cell.result(evaluation) for evaluation in cell.section.evaluate]
    return {task: str(version) for result in results for task, version in result.settings()["tasks"].items()}


def load_cell(cell: Cell, say: Say, shared: Shared) -> tuple[Any, Any]:
    if cell.objective != BASE:
        return load_result(str(cell.run.folder), say, trust_remote_code=cell.config.model.trust_remote_code)
    model = cell.config.model
    source = resolve_model(model.name, say, revision=model.revision)
    plain = {"dtype": "float32", "quantization": None, "attention": "auto"}  # as `load_result` loads a tuned model
    tokenizer = load_tokenizer(source, revision=model.revision, trust_remote_code=model.trust_remote_code)
    return shared.load(source, **base_options(cell.config) | plain), tokenizer


def write_tokens(cell: Cell, model: Any, tokenizer: Any, say: Say) -> None:
    """`tokens.parquet`: every supervised token of the held-out rows, with the gates of the comparison's objectives.

    The entropy is also measured at the temperatures of the regime's evaluations, so that models can be compared at the
    temperature where their entropies are equal. An objective that cannot be computed here fails in its own cell, not
    in all others: its columns are left out, and the table records which, and why.
    """
    bad = BadRows(skip=cell.config.data.skip_bad_rows)
    rows = [row for source in cell.section.tokens for row in read_mixture([source], cell.config, bad, say)]
    chosen = [parse_objective(spec) for spec in dict.fromkeys(["nll", *cell.comparison.objectives])]
    # what needs a whole optimizer step has no gate in a table of single tokens
    single = [objective for objective in chosen if objective.kind == "local" and "progress" not in objective.requires]
    encoder = Encoder(tokenizer, **with_date(encoder_options(cell.config.data)))
    context = token_context(encoder)
    reasons = {objective: why_not_computable(objective, context) for objective in single}
    left_out = [f"the columns of `{objective}`: {reason}" for objective, reason in reasons.items() if reason]
    for line in left_out:
        say(f"left out: {line}")
    written = write_token_table(
        cell.token_table, model, tokenizer, rows, encoder=encoder,
        objectives=[objective for objective, reason in reasons.items() if not reason], bad=bad,
        temperatures=sorted({t for evaluation in cell.section.evaluate for t in evaluation.sweep()} - {0.0, 1.0}),
        facts={"cell": cell.name, "model": cell_title(cell), "left_out": left_out, **data_fact(cell)},
    )  # fmt: skip
    say(f"{written.tokens}: {written.num_tokens:,} tokens")
    if bad.rows:
        bad.write(cell.folder / "bad_rows.jsonl")
        say(f"{bad.summary()}; see {cell.folder / 'bad_rows.jsonl'}")


def cell_title(cell: Cell) -> str:
    """The name of a cell's model on the pages that show its tokens."""
    base = shown_model(cell.config.model.name)
    return base if cell.objective == BASE else f"{cell.name}, tuned from {base}"


def data_fact(cell: Cell) -> dict[str, str]:
    """Where a cell's held-out rows come from, as `inspect` takes it; nothing for a mixture."""
    if len(cell.section.tokens) != 1:
        return {}
    (source,) = cell.section.tokens
    return {"data": source.place, **({"split": source.split} if source.split else {})}


def evaluate_cell(
    cell: Cell, evaluation: Evaluation, model: Any, tokenizer: Any, say: Say, shared: Shared
) -> None:  # fmt: skip
    """Evaluate a cell's model as `deftune eval` does; recorded answers are kept."""
    tasks, missing = shared.questions(evaluation)
    encoding = prompt_options(encoder_options(cell.config.data))
    settings = Settings(
        model=cell.name, suite=evaluation.suite or "", tasks={name: task.version for name, (task, _) in tasks.items()},
        samples=evaluation.samples_each(), temperatures=evaluation.sweep(), top_p=evaluation.top_p,
        seed=evaluation.seed, limit=evaluation.limit, max_new_tokens=evaluation.max_new_tokens, rule=evaluation.rule,
        encoding=encoding,
    )  # fmt: skip
    result = cell.result(evaluation)
    result.open(settings, tasks)
    sampler = TransformersSampler(model, tokenizer, batch_size=evaluation.batch_size, encoder_options=encoding)
    ask(result, settings, tasks, sampler)
    summary = write_summary(result, settings, Questions(evaluation.whole_suite, tasks, missing), grader=shared.grader)
    say(f"{result.folder}: {sum(row['items'] * row['samples'] for row in summary['rows']):,} answers")


def evaluation_items(evaluation: Evaluation) -> tuple[Tasks, dict[str, str]]:
    """The tasks with their items, and the tasks that lack data."""
    return load_items(evaluation.wanted(), Path(evaluation.data) if evaluation.data else None, evaluation.limit)
