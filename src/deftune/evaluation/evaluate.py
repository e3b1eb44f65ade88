"""`deftune eval`: a model's answers to a suite, graded, with intervals.

A result is a folder (`results`): a second call goes on where the first was stopped, and asks again what was an error.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from deftune.artifacts.files import write_atomic
from deftune.evaluation.generation import Prompt, Sampler, SamplerError
from deftune.evaluation.items import Item, MissingData, find_data, read_task, with_data
from deftune.evaluation.results import Key, Record, Result, Tasks, describe_data, drop_cut_line
from deftune.evaluation.scorers import score_answers
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
from deftune.evaluation.suites import Kind, Suite, Task, coverage, size_note

PASS_AT = (1, 2, 4, 8, 16, 32, 64)
FIRST_ERRORS = 20  # an endpoint whose first answers are all errors is asked no further: the call is probably wrong


@dataclass(frozen=True)
class Settings:
    """What is asked of a model; part of the result, and refused where a folder holds an answer to something else."""

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
    engine: dict[str, Any] = field(default_factory=lambda: {"name": "transformers", "version": version("transformers")})

    def __post_init__(self) -> None:
        for temperature in self.temperatures:
            if not 0 <= temperature < math.inf:
                raise ValueError(f"temperature: a number from 0 (greedy), got {temperature}")
        if len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError(f"temperature: {max(self.temperatures, key=self.temperatures.count):g} is given twice")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: above 0, at most 1 (all tokens), got {self.top_p}")

    def samples_at(self, temperature: float) -> int:
        """Greedy answers are all the same: one is enough."""
        return 1 if temperature == 0 else self.samples


# --- asking -----------------------------------------------------------------------------------------------------------


def missing_samples(
    recorded: Mapping[Key, Record], name: str, items: Sequence[Item], temperature: float, samples: int
) -> list[Prompt]:
    """What is left to ask: each item with the samples that have no answer. Those that only have errors come last."""
    fresh: list[Prompt] = []
    failed: list[Prompt] = []
    for item in items:
        records = [recorded.get((name, item.id, temperature, i)) for i in range(samples)]
        wanted = tuple(i for i, record in enumerate(records) if record is None or record["finish"] == "error")
        if wanted:
            prompt = Prompt(item.id, list(item.messages), wanted)
            (fresh if any(records[i] is None for i in wanted) else failed).append(prompt)
    return fresh + failed


def answered(result: Result, settings: Settings, tasks: Tasks, *, with_errors: bool = False) -> bool:
    """Whether nothing is left to ask: no model is needed. ``with_errors``: an error counts as an answer."""
    recorded = result.latest_samples()
    if with_errors:
        recorded = {key: {**record, "finish": "stop"} for key, record in recorded.items()}
    return not any(
        missing_samples(recorded, name, items, temperature, settings.samples_at(temperature))
        for name, (_, items) in tasks.items()
        for temperature in settings.temperatures
    )


def ask(
    result: Result, settings: Settings, tasks: Tasks, sampler: Sampler,
    progress: Callable[[str, int, int], None] = lambda *_: None, notice: Callable[[str], None] = lambda _: None,
) -> None:  # fmt: skip
    """Fill `samples.jsonl`: every answer is there once, whatever was there before; an error is asked again.

    ``progress`` is given (task and temperature, answers so far, all of them), ``notice`` the first error of each.
    """
    recorded = result.latest_samples()
    untried = not recorded and settings.engine["name"] == "endpoint"
    drop_cut_line(result.samples)
    for name, (task, items) in tasks.items():
        limit = settings.max_new_tokens or task.max_new_tokens
        for temperature in settings.temperatures:
            number, label, errors = settings.samples_at(temperature), f"{name} T={temperature:g}", 0
            prompts = missing_samples(recorded, name, items, temperature, number)
            total = len(items) * number
            done = total - sum(len(prompt.samples or ()) for prompt in prompts)
            progress(label, done, total)
            if not prompts:
                continue
            with result.samples.open("a", encoding="utf-8") as file:
                for output in sampler.sample(
                    prompts, samples=number, temperature=temperature, top_p=settings.top_p, max_new_tokens=limit,
                    seed=settings.seed,
                ):  # fmt: skip
                    done += 1
                    progress(label, done, total)
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
                    errors += 1
                    if errors == 1:
                        notice(f"{output.id}: {output.note}; recorded as an error, the others are asked")
                    if untried and errors == FIRST_ERRORS:
                        raise SamplerError(f"the first {errors} answers are all errors: {output.id}: {output.note}")


# --- grading ----------------------------------------------------------------------------------------------------------


def grade(result: Result, settings: Settings, tasks: Tasks, *, workers: int = 2) -> list[Record]:
    """Extraction and verdict of every answer, in the order of tasks, items, temperatures and samples."""
    answers = result.latest_samples()
    graded: list[Record] = []
    asked: list[tuple[Kind, Item, str]] = []
    for name, (task, items) in tasks.items():
        for item in items:
            for temperature in settings.temperatures:
                for i in range(settings.samples_at(temperature)):
                    answer = answers.get((name, item.id, temperature, i))
                    if answer is None:
                        raise ValueError(f"{result.samples}: {name} {item.id} has no answer {i} at T={temperature:g}")
                    graded.append({**answer, "prompt": item.messages[-1]["content"], "gold": item.gold})
                    # an error is no answer, whatever came before it: it scores 0 and is counted as an error
                    asked.append((task.kind, item, "" if answer["finish"] == "error" else answer["text"]))
    finishes = [record["finish"] for record in graded]  # a text that was cut off is not graded by its last number
    scores = score_answers(asked, choice_rule=settings.rule, workers=workers, finishes=finishes)
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
    """How many answers are errors, and an example of each kind: notes that differ in numbers alone are of one kind."""
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
            if task.kind == "figfont":
                row["similarity"] = mean_over_items(list(by_item(mine, name, temperature, "similarity").values()))
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


def average(suite: Suite, rows: list[Record], temperature: float) -> Record:
    """The macro average of a suite's tasks, with how much of the suite it covers."""
    mine = [r for r in rows if r["temperature"] == temperature and r["task"] in suite.averaged]
    record: Record = {"temperature": temperature, "covers": coverage(suite, [r["task"] for r in mine])}
    if mine:
        found = macro_average([Estimate(r["score"], r["standard_error"]) for r in mine])
        record |= {"score": found.mean, "standard_error": found.standard_error}
    return record


def load_items(
    names: Iterable[tuple[Task, bool]], data: Path | None, limit: int | None
) -> tuple[Tasks, dict[str, str]]:
    """(tasks with their items, tasks whose data is missing and why); one that was asked for by name must be there."""
    found: Tasks = {}
    missing: dict[str, str] = {}
    for task, asked in names:
        try:
            path = find_data(task, data)
            chosen = task if path is None else with_data(task, path)  # so that a result can say where it was
            found[task.name] = (chosen, read_task(chosen, None, limit=limit))
        except MissingData as error:
            if asked:
                raise
            missing[task.name] = str(error)
    if not found:
        first, *others = missing.values()
        more = f"; nor have {len(others)} others, see `deftune eval list`" if others else ""
        raise ValueError(f"no task has data: {first}{more}")
    return found, missing
