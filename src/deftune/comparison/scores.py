"""Scores of a comparison: settings chosen without flattering, intervals, paired differences.

**Choosing without flattering.** Items are split in two halves by a hash of their names. An objective's learning rate
(and, in the view "best", its temperature) is the one with the best average on one half; the other half's items are
scored at it, and the other way round. No item is scored at a setting that it helped to choose. Every objective chooses
from the same settings.

**Intervals.** With several seeds, intervals and p-values are for other items and other seeds
(`deftune.evaluation.crossed`). With one seed they are for other items alone. Differences are paired by item and seed,
on the seeds that both objectives have. p-values are Holm's, over all pairs of objectives for one column of one view.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from deftune.comparison.grid import BASE, Cell, Evaluation
from deftune.comparison.tables import AVERAGE
from deftune.evaluation.crossed import crossed
from deftune.evaluation.statistics import (
    Interval,
    equal_differences_interval,
    half_of,
    holm,
    paired,
    score_interval,
)

Record = dict[str, Any]
Items = dict[str, float]
PERMUTATIONS = 10_000


@dataclass(frozen=True)
class Option:
    """A setting that an objective may be shown at; the untuned model has no learning rate."""

    temperature: float
    learning_rate: float | None


class Scores:
    """Item scores of one objective: (seed, option) -> column -> item -> mean over samples.

    A column is a task, or a task's similarity where there is one; that is then what settings are chosen by.
    """

    def __init__(self) -> None:
        self.values: dict[tuple[int | None, Option], dict[str, Items]] = {}

    def add(self, cell: Cell, graded: Iterable[Record]) -> None:
        sums: dict[tuple[Option, str], dict[str, list[float]]] = {}
        for record in graded:
            option = Option(float(record["temperature"]), cell.learning_rate)
            columns = {record["task"]: record["score"]}
            if "similarity" in record:
                columns[f"{record['task']} similarity"] = record["similarity"]
            for column, value in columns.items():
                sums.setdefault((option, column), {}).setdefault(record["id"], []).append(float(value))
        for (option, column), items in sums.items():
            means = {item: math.fsum(values) / len(values) for item, values in items.items()}
            self.values.setdefault((cell.seed, option), {})[column] = means

    @property
    def seeds(self) -> list[int | None]:
        return list(dict.fromkeys(seed for seed, _ in self.values))

    def options(self, seeds: Sequence[int | None], temperature: float | None) -> list[Option]:
        """The options that all of these seeds have, at one temperature or at any; lowest first."""
        found = dict.fromkeys(option for _, option in self.values)
        return sorted(
            (o for o in found if temperature in (None, o.temperature) and all((s, o) in self.values for s in seeds)),
            key=lambda option: (option.temperature, option.learning_rate or 0.0),
        )

    def at(self, seeds: Sequence[int | None], chosen: tuple[Option, Option]) -> Shown:
        """The scores of some seeds, each half of the items at its option of ``chosen``."""
        items = {column: sorted(values) for column, values in self.values[seeds[0], chosen[0]].items()}
        columns: dict[str, Tensor] = {}
        for column, names in items.items():
            rows = [[self.values[seed, chosen[half_of(item)]][column][item] for item in names] for seed in seeds]
            columns[column] = torch.tensor(rows, dtype=torch.float64)
        return Shown(columns, items, chosen, tuple(seeds))


@dataclass(frozen=True)
class Shown:
    """An objective in a view."""

    columns: dict[str, Tensor]  # ``[seeds, items]`` each
    items: dict[str, list[str]]  # the names of a column's items, in order
    chosen: tuple[Option, Option]  # of the two halves of the items
    seeds: tuple[int | None, ...]

    def minus(self, other: Shown, columns: Sequence[str]) -> list[Tensor]:
        """The differences of some columns, paired by item and seed; the untuned model has one seed for all."""
        for column in columns:
            if self.items[column] != other.items[column]:
                raise ValueError(f"{column}: the two results are of different items, so they cannot be compared")
        return [self.columns[column] - other.columns[column] for column in columns]


def common(scores: Scores, *others: Scores, rate: float | None = None) -> Scores:
    """The scores of the cells that all have (at one rate), for the option that most seeds have, and of these seeds.

    In an unfinished comparison seeds differ in the learning rates that are there.

    >>> common(Scores()).values
    {}
    """
    keys = [
        (seed, option) for seed, option in scores.values
        if all((seed, option) in other.values for other in others) and rate in (None, option.learning_rate)
    ]  # fmt: skip
    by_option: dict[Option, list[int | None]] = {}
    for seed, option in keys:
        by_option.setdefault(option, []).append(seed)
    seeds = max(by_option.values(), key=len, default=[])
    found = Scores()
    found.values = {key: scores.values[key] for key in keys if key[0] in seeds}
    return found


def show(scores: Scores, averaged: Sequence[str], temperature: float | None, seeds: Sequence[int | None]) -> Shown:
    """Each item at the option that is best on the other half; at the only one where there is one."""
    options = scores.options(seeds, temperature)
    if not options:
        raise ValueError(f"no option that seeds {list(seeds)} all have")

    def merit(option: Option, half: int) -> float:
        means: list[float] = []
        for column in averaged:
            values = [
                value for seed in seeds for item, value in scores.values[seed, option][column].items()
                if half_of(item) == half
            ]  # fmt: skip
            means += [math.fsum(values) / len(values)] if values else []
        return math.fsum(means) / len(means) if means else 0.0

    if len(options) == 1:
        chosen = options[0], options[0]
    else:  # the lowest of equals
        chosen = (max(options, key=lambda o: merit(o, half=1)), max(options, key=lambda o: merit(o, half=0)))
    return scores.at(seeds, chosen)


def known(value: float) -> float | None:
    """None for NaN, which JSON does not have: a single item leaves an error unknown."""
    return None if math.isnan(value) else value


def score_record(columns: Sequence[Tensor]) -> Record:
    """The mean of the columns' scores with its 95% interval.

    One column of one seed has the interval of an evaluation, and so has each column whose scores are all the same.
    """
    found = crossed(columns)
    if (len(columns) == 1 and len(columns[0]) == 1) or found.standard_error == 0:
        own = [score_interval(column.mean(0)[:, None].tolist()) for column in columns]
        low, high = mean_of(own)
    else:
        low, high = max(found.interval.low, 0.0), min(found.interval.high, 1.0)  # NaN stays NaN
    return {
        "value": found.mean, "low": known(low), "high": known(high), "standard_error": known(found.standard_error),
        "items": columns[0].shape[1] if len(columns) == 1 else None,
    }  # fmt: skip


def mean_of(intervals: Sequence[Interval]) -> tuple[float, float]:
    return (
        math.fsum(each.low for each in intervals) / len(intervals),
        math.fsum(each.high for each in intervals) / len(intervals),
    )


def difference_record(a: Shown, b: Shown, columns: Sequence[str]) -> Record:
    """a - b over some columns, each counting once: the mean of their paired differences.

    With several seeds the p-value is Student's (`crossed`). With one seed, or differences that are all the same, it is
    the sign-flip test's on the items' differences, weighted so that they add up to the mean.
    """
    parts = a.minus(b, columns)
    total, found = sum(part.shape[1] for part in parts), crossed(parts)
    low, high, p = max(found.interval.low, -1.0), min(found.interval.high, 1.0), found.p_value
    if found.standard_error == 0:
        low, high = mean_of([equal_differences_interval(float(part.mean()), part.shape[1]) for part in parts])
    if len(parts[0]) == 1 or not found.standard_error > 0:
        weighted = [[total * d / (part.shape[1] * len(parts))] for part in parts for d in part.mean(0).tolist()]
        p = paired(weighted, [[0.0]] * total, permutations=PERMUTATIONS, resamples=100).p_value
    return {"difference": found.mean, "standard_error": known(found.standard_error), "low": known(low),
            "high": known(high), "p": p, "items": total, "seeds": len(parts[0])}  # fmt: skip


def averaged_columns(evaluation: Evaluation, columns: Sequence[str]) -> list[str]:
    """The columns that count in the average: the suite's, or all tasks'; similarity where a task has one."""
    suite = evaluation.whole_suite
    tasks = [c for c in columns if not c.endswith(" similarity")]
    own = [task for task in tasks if suite is None or task in suite.averaged or task in evaluation.tasks]
    return [f"{task} similarity" if f"{task} similarity" in columns else task for task in own]


def view_record(
    name: str, temperature: float | None, scores: Mapping[str, Scores], columns: Sequence[str], averaged: Sequence[str]
) -> Record:
    """The rows of a view (score, interval, chosen settings of each objective) and the differences of all pairs."""
    whole = {objective: common(own) for objective, own in scores.items()}
    shown = {objective: show(own, averaged, temperature, own.seeds) for objective, own in whole.items()}
    rows: dict[str, Record] = {}
    for objective, mine in shown.items():
        cells = {column: score_record([mine.columns[column]]) for column in columns}
        if averaged:
            cells[AVERAGE] = score_record([mine.columns[column] for column in averaged])
        by_seed: dict[str, float] = {}
        if averaged and len(mine.seeds) > 1:
            for place, seed in enumerate(mine.seeds):  # at the settings that all seeds chose together
                by_seed[str(seed)] = crossed([mine.columns[column][place : place + 1] for column in averaged]).mean
        rows[objective] = {
            "columns": cells, "seeds": len(mine.seeds), "by_seed": by_seed,
            "options": len(whole[objective].options(mine.seeds, temperature)),
            "chosen": [[option.temperature, option.learning_rate] for option in mine.chosen],
        }  # fmt: skip
    pairs: dict[tuple[str, str], tuple[Shown, Shown]] = {}
    for a, b in combinations([*scores][::-1], 2):
        if BASE in (a, b):
            pairs[a, b] = shown[a], shown[b]
        elif (mine := common(scores[a], scores[b])).seeds:  # the cells that both have
            theirs = common(scores[b], scores[a])
            pairs[a, b] = (
                show(mine, averaged, temperature, mine.seeds),
                show(theirs, averaged, temperature, theirs.seeds),
            )
    differences: list[Record] = []
    for column in ([AVERAGE] if averaged else []) + [c for c in columns if c not in averaged or len(averaged) > 1]:
        over = averaged if column == AVERAGE else [column]
        part: list[Record] = [
            {"a": a, "b": b, "column": column, **difference_record(mine, theirs, over)}
            for (a, b), (mine, theirs) in pairs.items()
        ]
        for record, adjusted in zip(part, holm([record["p"] for record in part])):
            record["p_holm"] = adjusted
        differences += part
    return {"name": name, "temperature": temperature, "rows": rows, "differences": differences}
