"""`deftune eval`: a model's answers to a suite, graded, with intervals.

A result is a folder: `settings.json` (what was asked), `samples.jsonl` (every answer, appended as it is made: a second
call goes on where the first was stopped), `graded.jsonl` (extraction and verdict of each), `summary.json` (unrounded).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from deftune._version import __version__
from deftune.data.files import write_atomic
from deftune.evaluation.generation import Prompt, Sampler
from deftune.evaluation.items import Item, MissingData, read_task
from deftune.evaluation.scorers import score_answers
from deftune.evaluation.statistics import (
    Estimate,
    best_temperature,
    bootstrap_interval,
    clustered_standard_error,
    half_of,
    macro_average,
    mean_over_items,
    pass_at_k,
)
from deftune.evaluation.suites import Kind, Suite, Task, coverage, size_note
from deftune.training.runs import differences

Record = dict[str, Any]
PASS_AT = (1, 2, 4, 8, 16, 32, 64)


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


class Result:
    """A result's folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.samples = folder / "samples.jsonl"
        self.graded = folder / "graded.jsonl"

    def check(self, settings: Any) -> None:
        """Refuse a folder that holds something else: before a model is loaded, and without writing anything."""
        path = self.folder / "settings.json"
        now = json.loads(json.dumps(dataclasses.asdict(settings)))
        held = sorted(entry.name for entry in self.folder.iterdir()) if self.folder.exists() else []
        if held in ([], [path.name]):  # no answer yet: begun, but nothing came of it
            return
        if path.is_file():
            before = json.loads(path.read_text(encoding="utf-8"))
            before.pop("deftune", None)
            if "engine" in now:
                # older results name none: an endpoint's has no encoding, and vLLM could not be asked for
                before.setdefault("engine", {"name": "transformers" if before.get("encoding") else "endpoint"})
                for content in (before, now):  # recorded as deftune's own is: an upgrade goes on
                    content["engine"].pop("version", None)
            if changed := differences(before, now):
                raise ValueError(
                    f"{self.folder}: holds another evaluation ({'; '.join(changed[:4])}); choose another "
                    f"folder with --out"
                )
            return
        raise ValueError(f"{self.folder}: is not empty and no result; choose another folder with --out")

    def open(self, settings: Any) -> None:
        """Begin, or go on; another evaluation's folder is refused."""
        self.check(settings)
        self.folder.mkdir(parents=True, exist_ok=True)
        if [entry.name for entry in self.folder.iterdir()] in ([], ["settings.json"]):
            now = {"deftune": __version__, **dataclasses.asdict(settings)}
            write_atomic(self.folder / "settings.json", json.dumps(now, indent=1))

    def settings(self) -> Record:
        try:
            return json.loads((self.folder / "settings.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self.folder}: is no result (no settings.json); `deftune eval MODEL` makes one"
            ) from error

    def read_samples(self) -> list[Record]:
        """Every answer so far; a line cut off by a kill is asked for again."""
        return list(read_lines(self.samples))

    def read_graded(self) -> list[Record]:
        if not self.graded.is_file():
            raise ValueError(f"{self.folder}: is not graded yet; run the same `deftune eval` again, it goes on")
        return list(read_lines(self.graded))

    def summary(self) -> Record:
        path = self.folder / "summary.json"
        if not path.is_file():
            self.settings()  # or an error that says it is no result
            raise ValueError(f"{self.folder}: has no summary yet; run the same `deftune eval` again, it goes on")
        return json.loads(path.read_text(encoding="utf-8"))


def read_lines(path: Path) -> Iterator[Record]:
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="surrogatepass").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record  # pyright: ignore[reportUnknownVariableType]


Key = tuple[str, str, float, int]  # task, item, temperature, sample: what makes an answer one


# --- asking -----------------------------------------------------------------------------------------------------------


def missing_items(have: Container[Key], name: str, items: list[Item], temperature: float, samples: int) -> list[Item]:
    """The items of which an answer is not there."""
    return [item for item in items if any((name, item.id, temperature, i) not in have for i in range(samples))]


def answers_in(result: Result) -> set[Key]:
    return {(r["task"], r["id"], r["temperature"], r["sample"]) for r in result.read_samples()}


def answered(result: Result, settings: Settings, tasks: dict[str, tuple[Task, list[Item]]]) -> bool:
    """Whether nothing is left to ask: no model is needed."""
    have = answers_in(result)
    return not any(
        missing_items(have, name, items, temperature, settings.samples_at(temperature))
        for name, (_, items) in tasks.items()
        for temperature in settings.temperatures
    )


def ask(
    result: Result, settings: Settings, tasks: dict[str, tuple[Task, list[Item]]], sampler: Sampler,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> None:  # fmt: skip
    """Fill `samples.jsonl`: every answer is there once, whatever was there before."""
    have = answers_in(result)
    drop_cut_line(result.samples)
    for name, (task, items) in tasks.items():
        limit = settings.max_new_tokens or task.max_new_tokens
        for temperature in settings.temperatures:
            number = settings.samples_at(temperature)
            missing = missing_items(have, name, items, temperature, number)
            total, done = len(items) * number, (len(items) - len(missing)) * number
            progress(f"{name} T={temperature:g}", done, total)
            prompts = [Prompt(item.id, list(item.messages)) for item in missing]
            if not prompts:
                continue
            with result.samples.open("a", encoding="utf-8") as file:
                for output in sampler.sample(
                    prompts, samples=number, temperature=temperature, top_p=settings.top_p, max_new_tokens=limit,
                    seed=settings.seed,
                ):  # fmt: skip
                    done += 1
                    progress(f"{name} T={temperature:g}", min(done, total), total)
                    key = (name, output.id, temperature, output.sample)
                    if key in have:  # of an item that was half done; it is the same answer
                        continue
                    have.add(key)
                    record = {"task": key[0], "id": key[1], "temperature": key[2], "sample": key[3],
                              "text": output.text, "tokens": output.tokens, "finish": output.finish}  # fmt: skip
                    file.write(json.dumps(record | ({"note": output.note} if output.note else {})) + "\n")
                    file.flush()


def drop_cut_line(path: Path) -> None:
    """A kill may leave half a line; the next answer must not be glued to it."""
    if path.is_file() and (content := path.read_bytes()) and not content.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)


# --- grading ----------------------------------------------------------------------------------------------------------


def grade(
    result: Result, settings: Settings, tasks: dict[str, tuple[Task, list[Item]]], *, workers: int = 2
) -> list[Record]:
    """Extraction and verdict of every answer, in the order of tasks, items, temperatures and samples."""
    answers = {(r["task"], r["id"], r["temperature"], r["sample"]): r for r in result.read_samples()}
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
                    asked.append((task.kind, item, answer["text"]))
    for record, score in zip(graded, score_answers(asked, choice_rule=settings.rule, workers=workers)):
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


def summarize(
    settings: Settings, suite: Suite | None, tasks: dict[str, tuple[Task, list[Item]]], graded: list[Record],
    missing: dict[str, str],
) -> Record:  # fmt: skip
    """Scores by task and temperature with standard errors clustered by item and bootstrap intervals; averages."""
    rows: list[Record] = []
    for name, (task, items) in tasks.items():
        for temperature in settings.temperatures:
            mine = [r for r in graded if r["task"] == name and r["temperature"] == temperature]
            scores = by_item(mine, name, temperature)
            samples = list(scores.values())
            interval = bootstrap_interval(samples)
            number = settings.samples_at(temperature)
            row: Record = {
                "task": name, "version": task.version, "temperature": temperature, "items": len(items),
                "samples": number, "score": mean_over_items(samples),
                "standard_error": clustered_standard_error(samples), "interval": [interval.low, interval.high],
                "pass_at": {k: mean_over_items([[pass_at_k(number, round(sum(s)), k)] for s in samples])
                            for k in PASS_AT if k <= number},
                "extracted": dict(Counter(str(r["how"]) for r in mine)),
                "finished": dict(Counter(r["finish"] for r in mine)),
                "note": size_note(task, len(items)) if settings.limit is None else f"a sample of {len(items)} items",
            }  # fmt: skip
            if task.kind == "figfont":
                row["similarity"] = mean_over_items(list(by_item(mine, name, temperature, "similarity").values()))
            if verdicts := Counter(r["verdict"] for r in mine if "verdict" in r):
                row["verdicts"] = dict(verdicts)
            rows.append(row)
    summary: Record = {"settings": dataclasses.asdict(settings), "rows": rows, "missing": missing}
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
) -> tuple[dict[str, tuple[Task, list[Item]]], dict[str, str]]:
    """(tasks with their items, tasks whose data is missing and why); one that was asked for by name must be there."""
    found: dict[str, tuple[Task, list[Item]]] = {}
    missing: dict[str, str] = {}
    for task, asked in names:
        try:
            found[task.name] = (task, read_task(task, data, limit=limit))
        except MissingData as error:
            if asked:
                raise
            missing[task.name] = str(error)
    if not found:
        first, *others = missing.values()
        more = f"; nor have {len(others)} others, see `deftune eval list`" if others else ""
        raise ValueError(f"no task has data: {first}{more}")
    return found, missing
