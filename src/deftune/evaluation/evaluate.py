"""`evaluate`: a model's answers to suites of questions, graded, with intervals.

The result of a suite is a folder (`results`). The same call on a stopped result resumes it, and asks again for the
answers that are errors.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deftune.artifacts.display import QUIET, Display
from deftune.artifacts.files import write_atomic
from deftune.artifacts.options import OptionError, check_counts
from deftune.artifacts.results import weights_digest
from deftune.evaluation.engines import Engine, Transformers
from deftune.evaluation.grading import Grader
from deftune.evaluation.items import Item
from deftune.evaluation.kinds import KINDS, score_answers
from deftune.evaluation.questions import Questions, load_questions
from deftune.evaluation.results import Key, Outcome, Record, Result, Tasks, describe_data, drop_cut_line, result_folder
from deftune.evaluation.sampler import Prompt, Sampler, SamplerError, check_chance
from deftune.evaluation.statistics import (
    Estimate,
    best_temperature,
    clustered_standard_error,
    half_of,
    macro_average,
    mean_over_items,
    pass_at_k,
    score_interval,
)
from deftune.evaluation.suites import Suite, coverage, size_note

PASS_AT = (1, 2, 4, 8, 16, 32, 64)
FIRST_ERRORS = 20  # if the first answers of an endpoint are all errors, the call is probably wrong: `ask` stops


@dataclass(frozen=True)
class Settings:
    """What is asked of a model. A result records the settings, and resumes with the same settings only."""

    model: str
    suite: str
    tasks: dict[str, str]  # name -> version
    samples: int
    temperatures: tuple[float, ...]
    top_p: float = 1.0
    seed: int = 0
    limit: int | None = None
    max_new_tokens: int | None = None
    rule: str = "strict"
    encoding: dict[str, Any] = field(default_factory=dict[str, Any])  # template and such; {} of an endpoint
    engine: dict[str, Any] = field(default_factory=lambda: Transformers().describe())

    def __post_init__(self) -> None:
        for temperature in self.temperatures:
            check_chance(temperature, self.top_p)
        if len(set(self.temperatures)) < len(self.temperatures):
            twice = max(self.temperatures, key=self.temperatures.count)
            raise OptionError("temperatures", f"{twice:g} is given twice")

    def samples_at(self, temperature: float) -> int:
        """How many answers each item gets: 1 if greedy, since greedy answers are all the same."""
        return 1 if temperature == 0 else self.samples


# --- asking -----------------------------------------------------------------------------------------------------------


def missing_samples(
    recorded: Mapping[Key, Record], name: str, items: Sequence[Item], temperature: float, samples: int
) -> list[Prompt]:
    """The prompts left to ask: each item with the samples that lack an answer, items that only have errors last."""
    fresh: list[Prompt] = []
    failed: list[Prompt] = []
    for item in items:
        records = [recorded.get((name, item.id, temperature, i)) for i in range(samples)]
        wanted = tuple(i for i, record in enumerate(records) if record is None or record["finish"] == "error")
        if wanted:
            prompt = Prompt(item.id, item.prompt, wanted)
            (fresh if any(records[i] is None for i in wanted) else failed).append(prompt)
    return fresh + failed


def answered(result: Result, settings: Settings, tasks: Tasks, *, with_errors: bool = False) -> bool:
    """Whether every answer is there. ``with_errors``: an error counts as an answer."""
    recorded = result.latest_samples()
    if with_errors:
        recorded = {key: {**record, "finish": "stop"} for key, record in recorded.items()}
    return not any(
        missing_samples(recorded, name, items, temperature, settings.samples_at(temperature))
        for name, (_, items) in tasks.items()
        for temperature in settings.temperatures
    )


def ask(
    result: Result, settings: Settings, tasks: Tasks, sampler: Sampler, display: Display = QUIET
) -> None:  # fmt: skip
    """Append the missing answers to `samples.jsonl`, each as it arrives; errors are asked again.

    A sampler is asked for all temperatures of a task at once, and may mix their answers. ``display`` is shown the
    number of answers for each task and temperature, and the first error of each.
    """
    recorded = result.latest_samples()
    untried = not recorded and settings.engine["name"] == "endpoint"
    drop_cut_line(result.samples)
    for name, (task, items) in tasks.items():
        limit = settings.max_new_tokens or task.max_new_tokens
        asked: dict[float, list[Prompt]] = {}
        done: Counter[float] = Counter()
        errors: Counter[float] = Counter()
        labels = {temperature: f"{name} T={temperature:g}" for temperature in settings.temperatures}
        totals = {temperature: len(items) * settings.samples_at(temperature) for temperature in settings.temperatures}
        for temperature, label in labels.items():
            prompts = missing_samples(recorded, name, items, temperature, settings.samples_at(temperature))
            done[temperature] = totals[temperature] - sum(len(prompt.samples or ()) for prompt in prompts)
            display.show(label, done[temperature], totals[temperature])
            if prompts:
                asked[temperature] = prompts
        if not asked:
            continue
        first = next(iter(asked))  # a sampler that takes one temperature after another begins with it
        display.show(labels[first], done[first], totals[first])
        with result.samples.open("a", encoding="utf-8") as file:
            for temperature, output in sampler.sample_at(
                asked, samples=settings.samples, top_p=settings.top_p, max_new_tokens=limit, seed=settings.seed
            ):
                done[temperature] += 1
                display.show(labels[temperature], done[temperature], totals[temperature])
                key = (name, output.id, temperature, output.sample)
                record = {"task": key[0], "id": key[1], "temperature": key[2], "sample": key[3],
                          "text": output.text, "tokens": output.tokens, "finish": output.finish}  # fmt: skip
                record |= {"note": output.note} if output.note else {}
                if recorded.get(key) != record:  # the same error again needs no second line
                    file.write(json.dumps(record) + "\n")
                    file.flush()
                recorded[key] = record
                if output.finish != "error":
                    untried = False
                    continue
                errors[temperature] += 1
                if errors[temperature] == 1:
                    display.say(f"{output.id}: {output.note}; recorded as an error, the others are asked")
                if untried and errors[temperature] == FIRST_ERRORS:
                    raise SamplerError(f"the first {FIRST_ERRORS} answers are all errors: {output.id}: {output.note}")


# --- grading ----------------------------------------------------------------------------------------------------------


def grade(
    result: Result, settings: Settings, tasks: Tasks, *, workers: int = 2, grader: Grader | None = None
) -> list[Record]:
    """Write `graded.jsonl`: extraction and verdict of every answer, by task, item, temperature and sample.

    ``grader`` stays open; by default one of ``workers`` processes is made and closed.
    """
    answers = result.latest_samples()
    graded: list[Record] = []
    asked: list[tuple[str, Item, str]] = []
    for name, (task, items) in tasks.items():
        for item in items:
            for temperature in settings.temperatures:
                for i in range(settings.samples_at(temperature)):
                    answer = answers.get((name, item.id, temperature, i))
                    if answer is None:
                        raise ValueError(f"{result.samples}: {name} {item.id} has no answer {i} at T={temperature:g}")
                    graded.append({**answer, "prompt": item.prompt, "gold": item.gold})
                    # an error scores 0, whatever text came before it
                    asked.append((task.kind, item, "" if answer["finish"] == "error" else answer["text"]))
    finishes = [record["finish"] for record in graded]  # a text that was cut off is not graded by its last number
    scores = score_answers(asked, choice_rule=settings.rule, workers=workers, grader=grader, finishes=finishes)
    for record, score in zip(graded, scores):
        record |= score
    write_atomic(result.graded, "".join(json.dumps(record) + "\n" for record in graded))
    return graded


# --- summing up -------------------------------------------------------------------------------------------------------


def by_item(graded: Iterable[Record], task: str, temperature: float, column: str = "score") -> dict[str, list[float]]:
    """item -> its samples' scores."""
    scores: dict[str, list[float]] = defaultdict(list)
    for record in graded:
        if record["task"] == task and record["temperature"] == temperature:
            scores[record["id"]].append(float(record[column]))
    return dict(scores)


def error_record(mine: Sequence[Record]) -> Record:
    """The number of errors, with an example of each kind; notes that differ only in numbers are one kind."""
    failed = [r for r in mine if r["finish"] == "error"]
    kinds: dict[str, Record] = {}
    for r in failed:
        note = str(r.get("note") or "no reason recorded")
        kind = kinds.setdefault(re.sub(r"\d+", "#", note.partition(": ")[0]), {"count": 0, "id": r["id"], "note": note})
        kind["count"] += 1
    return {"count": len(failed), "of": len(mine), "kinds": sorted(kinds.values(), key=lambda kind: -kind["count"])}


def describe_errors(row: Record) -> str:
    """`7 of 40 answers are errors and score 0: ...` of a summary's row; "" where there are none, or none were counted.

    >>> kinds = [{"count": 2, "id": "gsm8k/3", "note": "HTTP 400 Bad Request"}]
    >>> describe_errors({"errors": {"count": 2, "of": 40, "kinds": kinds}})
    '2 of 40 answers are errors and score 0: gsm8k/3: HTTP 400 Bad Request (and 1 like it)'
    """
    errors: Record = row.get("errors") or {"count": 0}
    if not errors["count"]:
        return ""
    shown = [f"{k['id']}: {k['note']}" + (f" (and {k['count'] - 1} like it)" if k["count"] > 1 else "")
             for k in errors["kinds"][:3]]  # fmt: skip
    more = f"; and {len(errors['kinds']) - 3} other kinds" if len(errors["kinds"]) > 3 else ""
    return f"{errors['count']} of {errors['of']} answers are errors and score 0: {'; '.join(shown)}{more}"


def summarize(
    settings: Settings, suite: Suite | None, tasks: Tasks, graded: list[Record], missing: dict[str, str]
) -> Record:
    """Scores by task and temperature with standard errors clustered by item and intervals; averages; errors."""
    rows: list[Record] = []
    for name, (task, items) in tasks.items():
        for temperature in settings.temperatures:
            mine = [r for r in graded if r["task"] == name and r["temperature"] == temperature]
            scores = by_item(mine, name, temperature)
            samples = list(scores.values())
            interval = score_interval(samples)
            number = settings.samples_at(temperature)
            row: Record = {
                "task": name, "version": task.version, "temperature": temperature, "items": len(items),
                "samples": number, "score": mean_over_items(samples),
                "standard_error": clustered_standard_error(samples), "interval": [interval.low, interval.high],
                "pass_at": {k: mean_over_items([[pass_at_k(number, round(sum(s)), k)] for s in samples])
                            for k in PASS_AT if k <= number},
                "extracted": dict(Counter(str(r["how"]) for r in mine)),
                "finished": dict(Counter(r["finish"] for r in mine)), "errors": error_record(mine),
                "note": size_note(task, len(items)) if settings.limit is None else f"a sample of {len(items)} items",
            }  # fmt: skip
            if task.kind == "choice":
                row["constant"] = constant_answer(items)
            for column in KINDS[task.kind].columns:
                row[column] = mean_over_items(list(by_item(mine, name, temperature, column).values()))
            if verdicts := Counter(r["verdict"] for r in mine if "verdict" in r):
                row["verdicts"] = dict(verdicts)
            rows.append(row)
    summary: Record = {
        "settings": dataclasses.asdict(settings), "data": describe_data(tasks), "rows": rows, "missing": missing
    }  # fmt: skip
    if len(settings.temperatures) > 1:
        summary["best_temperature"] = {
            name: dataclasses.asdict(best_temperature({t: by_item(graded, name, t) for t in settings.temperatures}))
            for name, (_, items) in tasks.items()
            if len({half_of(item.id) for item in items}) == 2  # a try of a few items may leave a half empty
        }
    if suite is not None:
        summary["averages"] = [average(suite, rows, temperature) for temperature in settings.temperatures]
    return summary


def constant_answer(items: Sequence[Item]) -> Record:
    """The most frequent right answer, and what it would score if it were given to every question."""
    (answer, count), *_ = Counter(item.gold for item in items).most_common(1)
    return {"answer": answer, "score": count / len(items)}


def average(suite: Suite, rows: list[Record], temperature: float) -> Record:
    """The macro average of a suite's tasks, with how much of the suite it covers."""
    mine = [r for r in rows if r["temperature"] == temperature and r["task"] in suite.averaged]
    record: Record = {"temperature": temperature, "covers": coverage(suite, [r["task"] for r in mine])}
    if mine:
        found = macro_average([Estimate(r["score"], r["standard_error"]) for r in mine])
        record |= {"score": found.mean, "standard_error": found.standard_error}
    return record


# --- a whole evaluation -----------------------------------------------------------------------------------------------


def write_summary(
    result: Result, settings: Settings, questions: Questions, *, workers: int = 2, grader: Grader | None = None
) -> Record:
    """Grade the answers of a result (`grade`) and write `summary.json`."""
    graded = grade(result, settings, questions.tasks, workers=workers, grader=grader)
    summary = summarize(settings, questions.suite, questions.tasks, graded, questions.missing)
    write_atomic(result.folder / "summary.json", json.dumps(summary, indent=1))
    return summary


def evaluate(
    model: str, *, suites: Sequence[str] = (), tasks: Sequence[str] = (), task_files: Sequence[str | Path] = (),
    data: str | Path | None = None, limit: int | None = None, engine: Engine | None = None,
    samples: int | None = None, temperatures: Sequence[float] = (), top_p: float | None = None, seed: int | None = None,
    max_new_tokens: int | None = None, rule: str | None = None, template: str | None = None,
    like: str | Path | None = None, trust_remote_code: bool = False, change_endpoint: bool = False, workers: int = 2,
    out: str | Path | None = None, display: Display = QUIET, finished: Callable[[Outcome], None] = lambda _: None,
) -> dict[str, Outcome]:  # fmt: skip
    """Ask a model the questions of suites and tasks, grade the answers, and write a result folder for each suite.

    The same call resumes a stopped evaluation; a model is loaded only if answers are missing.

        outcomes = evaluate("runs/first", suites=["math"], data="benchmarks", temperatures=[0.0])
        outcomes["math"].summary["rows"][0]["score"]

    Args:
        model: a run, a checkpoint (RUN:200), a model that `deftune train` takes, or a server's name of a model.
        suites: names of suites, such as "math".
        tasks: names of single tasks.
        task_files: YAML files with tasks of your own.
        data: the folder with the benchmarks' files (default: the hub).
        limit: a sample of so many items of each task.
        engine: what generates the answers (default: `Transformers()`).
        samples: answers per item at temperatures above 0 (default: the suite's).
        temperatures: 0 is greedy (default: the suite's; for single tasks 0).
        top_p: nucleus sampling (default: 1, all tokens).
        seed: the seed of the sampling (default: 0).
        max_new_tokens: token limit of an answer (default: the task's).
        rule: extraction of multiple-choice answers, "strict" (default) or "lenient".
        template: chatml, plain, or a .jinja file (default: the run's, or the tokenizer's).
        like: encode the prompts as this run does; for the base model of a run.
        trust_remote_code: run the code of the model's repository.
        change_endpoint: resume a result that was started with another server.
        workers: grading processes.
        out: the result's folder (default: results/MODEL-SUITE); with several suites, the folder of their folders.
        display: receives progress and messages.
        finished: is called with the outcome of each suite as soon as it is written.

    Returns:
        suite -> `Outcome`; "" is the key of single tasks.

    Raises:
        OptionError: an argument is wrong, or would have no effect.
        ValueError: the folder holds another evaluation, data is damaged, or the engine stopped.
    """
    display.show("reading the questions")
    engine = engine or Transformers()
    described = engine.describe()
    check_counts(samples=samples, max_new_tokens=max_new_tokens, workers=workers)
    if rule not in (None, "strict", "lenient"):
        raise OptionError("rule", f"strict or lenient, got {rule!r}")
    if engine.local and change_endpoint:
        raise OptionError("change_endpoint", "is for an endpoint; leave it out")
    for name, given in {"template": template, "like": like, "trust_remote_code": trust_remote_code}.items():
        if given and not engine.local:
            raise OptionError(name, "an endpoint loads its own model and renders its own chat template; leave it out")
    encoding = engine.encoding(model, template, like)
    weights = weights_digest(model) if engine.local else None
    jobs: list[tuple[Result, Settings, Questions]] = []
    for questions in load_questions(suites, tasks, task_files, data=data, limit=limit):
        suite = questions.suite
        settings = Settings(
            model=model, suite=suite.name if suite else "",
            tasks={name: task.version for name, (task, _) in questions.tasks.items()},
            samples=samples or (suite.samples if suite else 1),
            temperatures=tuple(temperatures) or (suite.temperature if suite else 0.0,),
            top_p=1.0 if top_p is None else top_p, seed=seed or 0, limit=limit, max_new_tokens=max_new_tokens,
            rule=rule or "strict", encoding=encoding, engine=described,
        )  # fmt: skip
        result = Result(result_folder(out, model, settings.suite or "tasks", among_others=len(suites) > 1))
        result.check(settings, questions.tasks, change_endpoint=change_endpoint, weights=weights)
        jobs.append((result, settings, questions))
    if all(temperature == 0 for _, settings, _ in jobs for temperature in settings.temperatures):
        for name, given in {"samples": samples, "top_p": top_p, "seed": seed}.items():
            if given is not None:
                raise OptionError(name, "has no effect on greedy answers (T = 0); leave it out or raise temperature")
    kinds = {task.kind for _, _, questions in jobs for task, _ in questions.tasks.values()}
    if rule is not None and not any(KINDS[kind].rules for kind in kinds):
        raise OptionError("rule", "is for multiple choice, and none is asked; leave it out")
    outcomes: dict[str, Outcome] = {}
    with ExitStack() as stack:
        # all folders are opened before a model is loaded: one may be locked, or not be writable
        for result, settings, questions in jobs:
            opened = result.writing(
                settings, questions.tasks, change_endpoint=change_endpoint, weights=weights
            )  # fmt: skip
            for note in stack.enter_context(opened):
                display.say(note)
        sampler = None
        if not all(answered(result, settings, questions.tasks) for result, settings, questions in jobs):
            display.show(f"loading {model}")
            sampler = engine.make_sampler(
                model, encoding=encoding, trust_remote_code=trust_remote_code, display=display
            )  # fmt: skip
        for result, settings, questions in jobs:
            for name, why in questions.missing.items():
                display.say(f"left out: {name}: {why}")
            stopped = sampler is not None and not _ask_all(result, settings, questions.tasks, sampler, display)
            display.show("grading the answers")
            summary = write_summary(result, settings, questions, workers=workers)
            all_errors = all(row["errors"]["count"] == row["errors"]["of"] for row in summary["rows"])
            outcomes[settings.suite] = Outcome(result.folder, summary, stopped or all_errors)
            finished(outcomes[settings.suite])
    return outcomes


def _ask_all(result: Result, settings: Settings, tasks: Tasks, sampler: Sampler, display: Display) -> bool:
    """`ask`. False if the engine stopped while it was asked again for errors: these stay errors."""
    try:
        ask(result, settings, tasks, sampler, display)
    except SamplerError as error:
        if not answered(result, settings, tasks, with_errors=True):
            raise ValueError(f"{error}; the same command goes on from there") from error
        display.say(f"deftune: {error}; the other answers stay errors")
        return False
    return True
