"""Figures of scores: over the sampling temperature, over the base model's p, over the tuned model's entropy.

Scores come from `deftune eval`'s results, or from a table of one's own with the columns regime, objective, temperature,
score, low, high (a 95% interval).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deftune.evaluation.evaluate import Result, by_item
from deftune.evaluation.statistics import score_interval
from deftune.inspection.style import (
    COLUMN_INCHES,
    PAGE_INCHES,
    Table,
    columns_of,
    distinct,
    legend_below,
    line_style,
    look_of,
    new_figure,
    rows_of,
    styled,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NORMAL_95 = 1.959964


def score_table(
    results: Sequence[tuple[str, str, str | Path]], *, task: str | None = None, metric: str = "score"
) -> list[dict[str, Any]]:
    """Scores with 95% intervals from result folders, (regime, objective, folder): a line per temperature.

    ``task`` is one of the result's tasks; without it, its suite's macro average, or its only task. A task's interval is
    the bootstrap's over items, an average's is 1.96 standard errors. ``metric`` is ``score``, or ``similarity`` where a
    task has one.
    """
    lines: list[dict[str, Any]] = []
    for regime, objective, folder in results:
        for what, row in _scores(Result(Path(folder)), task, metric):
            lines.append({
                "regime": regime, "objective": objective, "result": str(folder), "task": what, "metric": metric,
                "temperature": float(row["temperature"]), "score": row["score"], "low": row["interval"][0],
                "high": row["interval"][1],
            })  # fmt: skip
    return lines


def _scores(result: Result, task: str | None, metric: str) -> list[tuple[str, Mapping[str, Any]]]:
    """(task or average, its rows: temperature, score and interval) of a result."""
    summary = result.summary()
    tasks: list[str] = distinct(row["task"] for row in summary["rows"])
    if task is None and len(tasks) > 1:
        averages = [row for row in summary.get("averages", ()) if "score" in row]
        if not averages or metric != "score":
            raise ValueError(f"{result.folder}: has several tasks and no average; choose a task: {', '.join(tasks)}")
        for row in averages:
            spread = NORMAL_95 * row["standard_error"]
            row["interval"] = row["score"] - spread, row["score"] + spread
        return [(f"{summary['settings']['suite']} ({row['covers']})", row) for row in averages]
    if task is not None and task not in tasks:
        raise ValueError(f"{result.folder}: has no task {task!r}; it has {', '.join(tasks)}")
    chosen = task or tasks[0]
    rows = [row for row in summary["rows"] if row["task"] == chosen]
    if metric != "score":
        if missing := [row for row in rows if metric not in row]:
            raise ValueError(f"{result.folder}: {missing[0]['task']} has no {metric!r}; leave the metric out")
        graded = result.read_graded()
        for row in rows:
            found = score_interval(list(by_item(graded, chosen, row["temperature"], metric).values()))
            row["score"], row["interval"] = row[metric], (found.low, found.high)
    return [(chosen, row) for row in rows]


def _draw(axis: Any, x: Any, part: Mapping[str, np.ndarray], name: str, *, joined: bool, offset: float = 0.0) -> None:
    """An objective's scores with their intervals, drawn ``offset`` points to the right of their place."""
    from matplotlib.transforms import offset_copy

    style = line_style(name)
    if not joined:
        style["ls"] = "none"
    order = np.argsort(x, kind="stable")
    score, low, high = (100 * part[key][order] for key in ("score", "low", "high"))
    errors = np.clip(np.nan_to_num([score - low, high - score]), 0, None)  # 0 where a bound is missing
    bars = axis.errorbar(
        x[order], score, yerr=errors, marker=look_of(name).marker, elinewidth=0.7, capsize=1.5, capthick=0.7, **style
    )
    if offset:
        shifted = offset_copy(axis.transData, axis.figure, x=offset, units="points")
        for artist in bars.get_children():  # the coordinates stay those of the table
            artist.set_transform(shifted)


LEAST_POINTS = 5.0


def _score_axis(axis: Any) -> None:
    """An axis of percent spans at least 5 points and leaves no more below 0 than a marker needs."""
    low, high = axis.get_ylim()
    missing = max(0.0, LEAST_POINTS - (high - low)) / 2
    low, high = low - missing, high + missing
    if low < 0:
        high = max(high, LEAST_POINTS)
        low = -0.03 * high
    axis.set_ylim(low, high)


OFFSET_POINTS = 4.0


def _offsets(names: Sequence[str]) -> dict[str, float]:
    """Points by which each objective is drawn beside its place: intervals at one place would hide each other."""
    return {name: OFFSET_POINTS * (i - (len(names) - 1) / 2) for i, name in enumerate(names)}


SCORE = ("regime", "objective", "temperature", "score", "low", "high")


@styled
def plot_temperatures(table: Table) -> Figure:
    """The score against the sampling temperature, a line per objective with its 95% interval, a panel per regime.

    The ticks are the temperatures of the table. Objectives at one temperature stand side by side, some points apart.
    """
    columns = columns_of(table, SCORE, "temperatures")
    regimes = distinct(columns["regime"].tolist())
    figure, axes = new_figure(1, len(regimes), (min(PAGE_INCHES, COLUMN_INCHES * len(regimes)), 2.6))
    for axis, regime in zip(axes[0], regimes):
        here = rows_of(columns, regime=regime)
        for name, offset in _offsets(distinct(here["objective"].tolist())).items():
            part = rows_of(here, objective=name)
            _draw(axis, part["temperature"], part, name, joined=True, offset=offset)
        measured = sorted(set(here["temperature"].tolist()))
        margin = max(0.15 * (measured[-1] - measured[0]), 0.1)  # for what is drawn beside its place
        axis.set(xlabel="sampling temperature", title=regime, xlim=(measured[0] - margin, measured[-1] + margin))
        axis.set_xticks(measured, [f"{value:g}" for value in measured])
        axis.grid()
        _score_axis(axis)
    axes[0][0].set_ylabel("score (%)")
    legend_below(figure, axes[0])
    return figure


@styled
def plot_rates(table: Table) -> Figure:
    """The score against the learning rate, a line per objective with its 95% interval, a panel per temperature."""
    columns = columns_of(table, ("temperature", "objective", "learning_rate", "score", "low", "high"), "rates")
    temperatures, rates = (sorted(set(columns[name].tolist())) for name in ("temperature", "learning_rate"))
    offsets = _offsets(distinct(columns["objective"].tolist()))
    margin = max((rates[-1] / rates[0]) ** 0.15, 1.1)  # for what is drawn beside its place
    figure, axes = new_figure(1, len(temperatures), (PAGE_INCHES, 3.0), sharey=True)
    for axis, temperature in zip(axes[0], temperatures):
        for name, offset in offsets.items():
            part = rows_of(columns, temperature=temperature, objective=name)
            if len(part["score"]):
                _draw(axis, part["learning_rate"], part, name, joined=True, offset=offset)
        axis.set(xlabel="learning rate", title="greedy" if temperature == 0 else f"T = {temperature:g}", xscale="log")
        axis.set_xlim(rates[0] / margin, rates[-1] * margin)
        axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axis.minorticks_off()
        axis.grid()
    _score_axis(axes[0][0])  # the panels share it
    axes[0][0].set_ylabel("score (%)")
    legend_below(figure, axes[0])
    return figure


def continuum_table(
    scores: Sequence[Mapping[str, Any]], base_p: Mapping[str, float], *, temperature: float | None = None
) -> list[dict[str, Any]]:
    """The scores of one temperature with ``base_p``: regime -> mean p of the base model on that regime's data.

    Where the scores are at several temperatures, one must be chosen.
    """
    have = sorted({line["temperature"] for line in scores})
    known = ", ".join(f"{t:g}" for t in have)
    if temperature is None and len(have) > 1:
        raise ValueError(f"the scores are at several temperatures ({known}); choose one")
    if temperature not in (None, *have):
        raise ValueError(f"no scores at temperature {temperature:g}; there are {known}")
    lines = [{name: line[name] for name in SCORE} for line in scores if temperature in (None, line["temperature"])]
    for line in lines:
        if line["regime"] not in base_p:
            known = ", ".join(base_p) or "none"
            raise ValueError(f"no base model's p for regime {line['regime']!r} (there are: {known})")
        line["base_p"] = base_p[line["regime"]]
    return lines


@styled
def plot_continuum(table: Table) -> Figure:
    """The capability continuum: a panel per regime in the order of the base model's mean p, a score per objective.

    Regimes have tasks and metrics of their own, so each panel has its own axis of scores and no line joins two panels.
    The dotted line is the base model's score.
    """
    columns = columns_of(table, (*SCORE, "base_p"), "continuum")
    base_p = dict(zip(columns["regime"].tolist(), columns["base_p"].tolist()))
    regimes, names = sorted(base_p, key=lambda name: base_p[name]), distinct(columns["objective"].tolist())
    figure, axes = new_figure(1, len(regimes), (min(PAGE_INCHES, max(COLUMN_INCHES, 2.3 * len(regimes))), 2.7))
    for axis, regime in zip(axes[0], regimes):
        for place, name in enumerate(names):
            part = rows_of(columns, regime=regime, objective=name)
            _draw(axis, np.full(len(part["score"]), place), part, name, joined=False)
            if name == "base" and len(part["score"]):
                axis.axhline(100 * float(part["score"][0]), color=look_of(name).colour, ls=":", lw=0.8, zorder=0)
        axis.set_xticks(range(len(names)), names, rotation=90 if max(map(len, names)) > 6 else 45)
        axis.set_xlim(-0.6, len(names) - 0.4)
        axis.set_title(f"{regime}\nbase p = {base_p[regime]:.2g}".strip())
        axis.grid(axis="y")
        _score_axis(axis)
    axes[0][0].set_ylabel("score (%)")
    return figure


def entropy_table(
    scores: Sequence[Mapping[str, Any]], entropies: Mapping[tuple[str, str], float]
) -> list[dict[str, Any]]:
    """The scores with the tuned model's mean entropy, (regime, objective) -> entropy in nats, from its token table."""
    lines = [{name: line[name] for name in SCORE} for line in scores]
    for line in lines:
        key = line["regime"], line["objective"]
        if key not in entropies:
            known = ", ".join("/".join(filter(None, k)) for k in entropies) or "none"
            raise ValueError(f"no token table of {'/'.join(filter(None, key))} (there are: {known})")
        line["entropy"] = entropies[key]
    return lines


LEAST_NATS = 0.05


def _entropy_axis(axis: Any, values: np.ndarray) -> None:
    """An axis of entropies spans at least 0.05 nats and does not go below 0 by more than a marker needs."""
    low, high = float(values.min()), float(values.max())
    margin = max(0.08 * (high - low), (LEAST_NATS - (high - low)) / 2)
    axis.set_xlim(max(low - margin, -0.03 * (high + margin)), high + margin)
    axis.locator_params(axis="x", nbins=4)


@styled
def plot_entropy(table: Table) -> Figure:
    """The score against the model's mean entropy: a row per regime, a panel per sampling temperature."""
    columns = columns_of(table, (*SCORE, "entropy"), "entropy")
    regimes, temperatures = distinct(columns["regime"].tolist()), sorted(set(columns["temperature"].tolist()))
    size = (min(PAGE_INCHES, max(COLUMN_INCHES, 2.3 * len(temperatures))), 0.5 + 2.0 * len(regimes))
    figure, axes = new_figure(len(regimes), len(temperatures), size, sharex="row", sharey="row")
    for row, regime in zip(axes, regimes):
        for axis, temperature in zip(row, temperatures):
            here = rows_of(columns, regime=regime, temperature=temperature)
            for name in distinct(here["objective"].tolist()):
                part = rows_of(here, objective=name)
                _draw(axis, part["entropy"], part, name, joined=False)
            if not len(here["score"]):
                axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", va="center")
            axis.grid()
        _score_axis(row[0])  # the panels of a row share it
        _entropy_axis(row[0], rows_of(columns, regime=regime)["entropy"])
        row[0].set_ylabel(f"{regime}\nscore (%)" if regime else "score (%)")
    for axis, temperature in zip(axes[0], temperatures):
        axis.set_title(f"T = {temperature:g}")
    for axis in axes[-1]:
        axis.set_xlabel("mean entropy (nats)")
    legend_below(figure, axes.flat)
    return figure
