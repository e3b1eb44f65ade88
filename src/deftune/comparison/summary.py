"""The summary of a comparison: scores with intervals, paired differences, token statistics, cost.

**Choosing without flattering.** Items are split in two halves by a hash of their names. An objective's learning rate
(and, in the view "best", its temperature) is the one with the best average on one half; the other half's items are
scored at it, and the other way round. No item is scored at a setting that it helped to choose. Every objective chooses
from the same settings.

**Intervals.** With several seeds, intervals and p-values are for other items and other seeds
(`deftune.evaluation.crossed`). With one seed they are for other items alone. Differences are paired by item and seed,
on the seeds that both objectives have. p-values are Holm's, over all pairs of objectives for one column of one view.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deftune._version import __version__
from deftune.artifacts.files import write_atomic
from deftune.artifacts.runs import Run
from deftune.comparison.grid import BASE, Cell, Comparison, Evaluation
from deftune.comparison.tables import AVERAGE
from deftune.data.mixing import is_exchanged
from deftune.evaluation.clustered import mean_over_tokens
from deftune.evaluation.crossed import crossed
from deftune.evaluation.evaluate import Result
from deftune.evaluation.statistics import (
    Interval,
    equal_differences_interval,
    half_of,
    holm,
    paired,
    score_interval,
)
from deftune.evaluation.suites import task_named
from deftune.tokens.conflict import is_confident_conflict
from deftune.tokens.passes import entropy_column
from deftune.tokens.table import read_rows_table, read_token_table, token_table_facts

Record = dict[str, Any]
Items = dict[str, float]
BEST = "best"
PERMUTATIONS = 10_000
REVISION = 2  # of the numbers: raise it with a change of how they are computed, so that stored summaries are made anew
TOKEN_COLUMNS = ("nll", "p", "concentration", "entropy")


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


def summarize_evaluation(comparison: Comparison, regime: str, evaluation: Evaluation) -> Record:
    """One suite of a regime: views (each temperature, and the best), their rows and paired differences."""
    scores: dict[str, Scores] = {}
    notes: dict[str, str] = {}
    missing: dict[str, str] = {}
    for cell in comparison.cells():
        folder = cell.folder / f"eval-{evaluation.title}"
        if cell.regime == regime and cell.state()["state"] == "finished":
            with readable(folder / "summary.json", cell):
                summary = Result(folder).summary()
                notes |= {str(row["task"]): str(row["note"]) for row in summary["rows"] if row["note"]}
                missing |= {str(task): str(why) for task, why in summary["missing"].items()}
            with readable(folder / "graded.jsonl", cell):
                scores.setdefault(cell.objective, Scores()).add(cell, Result(folder).read_graded())
    order = [name for name in (BASE, *comparison.objectives) if name in scores]
    if not order:
        return {"title": evaluation.title, "views": [], "notes": notes, "missing": missing}
    columns = list(next(iter(scores[order[0]].values.values())))
    averaged = averaged_columns(evaluation, columns)
    sweep = evaluation.sweep()
    views: list[tuple[str, float | None]] = [(f"T={t:g}", t) for t in sweep]
    if len(sweep) > 1:
        views.append((BEST, None))
    return {
        "title": evaluation.title, "suite": evaluation.suite, "columns": columns, "averaged": averaged,
        "kinds": {column: kind_of(evaluation, column) for column in columns}, "samples": evaluation.samples_each(),
        "notes": notes, "missing": missing,
        "views": [view_record(name, t, order, scores, columns, averaged) for name, t in views],
    }  # fmt: skip


@contextmanager
def readable(path: Path, cell: Cell) -> Generator[None]:
    """Refuse a damaged file; the error names the file and the command that writes it again."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, ValueError) and str(path.parent) in str(error):
            raise  # named already
        raise ValueError(
            f"{path}: is damaged ({type(error).__name__}: {error}); remove it and {cell.folder / 'cell.json'}, and "
            f"`deftune compare run {cell.comparison.folder}` makes it anew"
        ) from error


def kind_of(evaluation: Evaluation, column: str) -> str:
    name = column.removesuffix(" similarity")
    own = {task.name: task.kind for task, _ in evaluation.wanted()}
    return own[name] if name in own else task_named(name).kind


def view_record(
    name: str, temperature: float | None, order: Sequence[str], scores: Mapping[str, Scores], columns: Sequence[str],
    averaged: Sequence[str],
) -> Record:  # fmt: skip
    whole = {objective: common(scores[objective]) for objective in order}
    shown = {objective: show(whole[objective], averaged, temperature, whole[objective].seeds) for objective in order}
    rows: dict[str, Record] = {}
    for objective, mine in shown.items():
        cells = {column: score_record([mine.columns[column]]) for column in columns}
        if averaged:
            cells[AVERAGE] = score_record([mine.columns[column] for column in averaged])
        by_seed: dict[str, float] = {}
        if averaged and len(mine.seeds) > 1:
            for seed in mine.seeds:
                alone = show(whole[objective], averaged, temperature, [seed])
                by_seed[str(seed)] = crossed([alone.columns[column] for column in averaged]).mean
        rows[objective] = {
            "columns": cells, "seeds": len(mine.seeds), "by_seed": by_seed,
            "chosen": [[option.temperature, option.learning_rate] for option in mine.chosen],
        }  # fmt: skip
    differences: list[Record] = []
    for column in ([AVERAGE] if averaged else []) + [c for c in columns if c not in averaged or len(averaged) > 1]:
        over = averaged if column == AVERAGE else [column]
        part = [pair_record(a, b, scores, averaged, over, temperature, column) for a, b in combinations(order[::-1], 2)]
        part = [record for record in part if record]
        for record, adjusted in zip(part, holm([record["p"] for record in part])):
            record["p_holm"] = adjusted
        differences += part
    return {"name": name, "temperature": temperature, "rows": rows, "differences": differences}


def pair_record(
    a: str, b: str, scores: Mapping[str, Scores], averaged: Sequence[str], over: Sequence[str],
    temperature: float | None, column: str,
) -> Record:  # fmt: skip
    """a - b on the cells that both have, of the untuned model on all; {} where they have none in common."""
    if BASE in (a, b):
        mine, theirs = common(scores[a]), common(scores[b])
    else:
        mine, theirs = common(scores[a], scores[b]), common(scores[b], scores[a])
    if not mine.seeds or not theirs.seeds:
        return {}
    sides = [show(side, averaged, temperature, side.seeds) for side in (mine, theirs)]
    return {"a": a, "b": b, "column": column, **difference_record(sides[0], sides[1], over)}


# --- tokens and cost --------------------------------------------------------------------------------------------------


def token_record(cells: Sequence[Cell]) -> Record:
    """Means over held-out tokens with intervals over rows; a token's numbers are means over the cells' seeds."""
    tables = [
        read_token_table(cell.folder / "tokens.parquet", ["row", "log_p", "p", "concentration", "entropy"])
        for cell in cells
    ]

    def column(table: Any, name: str) -> Tensor:
        return torch.from_numpy(table[name].to_numpy().copy())  # Arrow's own memory is read-only

    rows = column(tables[0], "row")
    columns = {
        name: torch.stack([column(table, name).double() for table in tables]).mean(0)
        for name in ("log_p", "p", "concentration", "entropy")
    }
    columns["nll"] = -columns.pop("log_p")
    wrong, record = exchanged_record(cells[0].folder / "tokens.parquet", rows, columns)
    rows, columns = rows[~wrong], {name: values[~wrong] for name, values in columns.items()}
    record |= {"tokens": len(rows), "rows": int(rows.unique().numel()), "seeds": len(cells)}
    for name in TOKEN_COLUMNS:
        record[name] = mean_over_tokens(columns[name], rows)._asdict()
    p = torch.cat([column(table, "p")[~wrong] for table in tables])
    record["share_below_1e-3"] = float((p < 1e-3).double().mean())
    record["share_above_half"] = float((p > 0.5).double().mean())
    return record


def exchanged_record(path: Path, rows: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, Record]:
    """Which tokens of a table are of rows with another row's answer (`exchange` of a source), and their numbers.

    The numbers stand under ``exchanged`` and all others leave these tokens out. Where no row was exchanged, or every
    row was, no token is marked and there is no such record.
    """
    table = read_rows_table(path)
    places = [row for row, where in zip(table["row"].to_pylist(), table["where"].to_pylist()) if is_exchanged(where)]
    wrong = torch.isin(rows, torch.tensor(places, dtype=rows.dtype))
    if not bool(wrong.any()) or bool(wrong.all()):
        return torch.zeros_like(wrong), {}
    means = {name: mean_over_tokens(columns[name][wrong], rows[wrong])._asdict() for name in ("nll", "p")}
    return wrong, {"exchanged": {"tokens": int(wrong.sum()), "rows": len(places), **means}}


def table_record(path: Path) -> Record:
    """The numbers of one token table: means with 95% intervals over rows, confident conflicts by kind, end tokens.

    ``conflicts`` is their share of the tokens, ``conflict_loss`` of the NLL. ``conflict_kinds`` are counts: end tokens,
    other format tokens, blanks and line breaks, and the rest. ``end_rows`` is the share of rows with a supervised end
    token, ``end_p`` the mean p of these tokens (None where there is none), ``top1`` the share of tokens that are the
    model's likeliest. ``exchanged`` has the numbers of rows with another row's answer, where there are any; all others
    leave these rows out. ``entropies`` has the mean entropy at other temperatures, where the table has them.
    """
    names = ["row", "text", "log_p", "p", "concentration", "entropy", "rank", "is_eos", "is_format"]
    entropies = {f"{t:g}": entropy_column(t) for t in token_table_facts(path).get("temperatures", ())}
    names += entropies.values()
    table = read_token_table(path, names)
    if not table.num_rows:
        raise ValueError(f"{path}: holds no tokens; were all rows over the maximum length?")
    columns = {name: torch.from_numpy(table[name].to_numpy().copy()) for name in names if name != "text"}
    double = {"nll": -columns["log_p"].double(), "p": columns["p"].double()}
    wrong, exchanged = exchanged_record(path, columns["row"], double)
    columns = {name: values[~wrong] for name, values in columns.items()}
    rows, ends = columns["row"], columns["is_eos"]
    nll = -columns["log_p"].double()
    confident = is_confident_conflict(columns["log_p"], columns["concentration"])
    blank = torch.tensor([not text.strip() for text in table["text"].to_pylist()])[~wrong]
    means = {"nll": nll, **{name: columns[name].double() for name in ("p", "concentration", "entropy")}}
    means |= {"conflicts": confident.double(), "top1": (columns["rank"] == 0).double()}
    kinds = {"end": ends, "format": columns["is_format"] & ~ends, "blank": blank & ~columns["is_format"] & ~ends}
    counts = {kind: int((confident & mine).sum()) for kind, mine in kinds.items()}
    num_rows = int(rows.unique().numel())
    return {
        "tokens": len(rows), "rows": num_rows,
        **{name: mean_over_tokens(values, rows)._asdict() for name, values in means.items()},
        "conflict_loss": float(nll[confident].sum() / nll.sum()) if nll.sum() > 0 else 0.0,
        "conflict_kinds": counts | {"other": int(confident.sum()) - sum(counts.values())},
        "end_rows": int(rows[ends].unique().numel()) / num_rows,
        "end_p": float(columns["p"][ends].double().mean()) if bool(ends.any()) else None,
        **exchanged,
        **({"entropies": {temperature: mean_over_tokens(columns[name].double(), rows)._asdict()
                          for temperature, name in entropies.items()}} if entropies else {}),
    }  # fmt: skip


def check_rows(cells: Sequence[Cell]) -> None:
    """Refuse token tables of different rows: the held-out rows were changed between two cells."""
    paths = [cell.folder / "tokens.parquet" for cell in cells]
    tables = map(read_rows_table, paths)
    first = next(tables, None)
    for cell, path, table in zip(cells[1:], paths[1:], tables):
        if not table.equals(first):
            raise ValueError(
                f"{path}: is of other rows than {paths[0]}, so the two cannot be compared: the data of `tokens` was "
                f"changed in between; restore it, remove the file and {cell.folder / 'cell.json'}, and `deftune "
                f"compare run {cell.comparison.folder}` measures the cell again"
            )


def summarize_tokens(comparison: Comparison, regime: str) -> list[Record]:
    """A line per objective and learning rate."""
    cells = [cell for cell in comparison.cells() if cell.regime == regime and cell.state()["state"] == "finished"]
    check_rows(cells)
    groups: dict[tuple[str, float | None], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.objective, cell.learning_rate), []).append(cell)
    order = [BASE, *comparison.objectives]
    return [
        {"objective": objective, "learning_rate": rate, **token_record(cells)}
        for (objective, rate), cells in sorted(groups.items(), key=lambda g: (order.index(g[0][0]), g[0][1] or 0.0))
    ]


def summarize_cost(comparison: Comparison, regime: str) -> dict[str, Record]:
    """Means over an objective's finished cells; the peak is the largest."""
    found: dict[str, Record] = {}
    for objective in comparison.objectives:
        costs = [
            cell.state().get("cost")
            for cell in comparison.cells()
            if (cell.regime, cell.objective) == (regime, objective) and cell.state()["state"] == "finished"
        ]
        costs = [cost for cost in costs if cost]
        if costs:
            seconds, tokens = (math.fsum(cost[key] for cost in costs) for key in ("seconds", "tokens"))
            found[objective] = {
                "cells": len(costs), "seconds": seconds / len(costs), "tokens": tokens / len(costs),
                "tokens_per_second": tokens / seconds if seconds else 0.0,
                "memory_gib": max(cost["memory_gib"] for cost in costs),
            }  # fmt: skip
    return found


def focus_record(comparison: Comparison, regime: str) -> list[float] | None:
    """DEFT's mean focus at the first step, after four, and at the last, over its cells; None where it was not run."""
    found: list[list[float]] = []
    for cell in comparison.cells():
        if (cell.regime, cell.objective) == (regime, "deft") and cell.state()["state"] == "finished":
            records = [record for record in Run(cell.folder / "run").read_metrics() if record.get("kind") == "train"]
            values = [float(r["focus"]) for r in records if isinstance(r.get("focus"), int | float)]
            if values:
                found.append([values[0], values[min(4, len(values) - 1)], values[-1]])
    return [math.fsum(column) / len(column) for column in zip(*found)] if found else None


# --- the whole --------------------------------------------------------------------------------------------------------


def cell_states(comparison: Comparison) -> dict[str, Record]:
    return {cell.name: {"folder": str(cell.folder), **cell.state()} for cell in comparison.cells()}


def summarize_comparison(comparison: Comparison) -> Record:
    """Everything, unrounded, from the finished cells; kept in `comparison.json` until a cell changes."""
    path = Path(comparison.folder) / "comparison.json"
    cells = cell_states(comparison)
    config = json.loads(comparison.model_dump_json())
    if (
        (before := read_summary(path))
        and before["cells"] == json.loads(json.dumps(cells))
        and before["config"] == config
    ):
        return before
    regimes: dict[str, Record] = {}
    for name, regime in comparison.regimes.items():
        model = next(cell for cell in comparison.cells() if cell.regime == name).config.model.name
        regimes[name] = {
            "model": model,
            "evaluations": [summarize_evaluation(comparison, name, evaluation) for evaluation in regime.evaluate],
            "tokens": summarize_tokens(comparison, name) if regime.tokens else [],
            "cost": summarize_cost(comparison, name),
            "focus": focus_record(comparison, name),
        }
    summary: Record = {
        "config": config,
        "cells": cells,
        "regimes": regimes,
    }
    write_atomic(path, json.dumps({**summary, "sha256": digest_of(summary)}, indent=1, allow_nan=False))
    return summary


def digest_of(summary: Record) -> str:
    """Of a summary and of the code that made it: other code may compute other numbers."""
    return hashlib.sha256(f"{__version__} {REVISION} {json.dumps(summary, sort_keys=True)}".encode()).hexdigest()


def read_summary(path: Path) -> Record | None:
    """The stored summary; None where there is none, where its file was changed, or where another version wrote it."""
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        digest = summary.pop("sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return summary if digest == digest_of(summary) else None
