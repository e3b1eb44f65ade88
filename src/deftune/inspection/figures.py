"""The paper's figures of tokens and of training: gradient maps, probability histograms, focus over training.

A ``*_table`` function makes a figure's numbers, a ``plot_*`` function turns them into the figure; `save_figure` keeps
both. Tables are named by regime (strong, intermediate, weak, or whatever the reader calls his data).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from deftune.inspection.style import (
    COLOUR_MAP,
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
from deftune.tokens.table import table_objectives

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMALLEST_P = 1e-8  # what is below is counted with it
TAIL_P, HEAD_P = 1e-3, 0.5
"""Where the paper looks at the two ends of p: the suppressed tail and the sharpened head. It prints no shares."""

PAPER_FOCUS: dict[str, tuple[tuple[int | None, float], ...]] = {
    "strong": ((0, 0.65), (4, 0.75), (None, 0.95)),
    "weak": ((0, 0.04), (None, 0.45)),
}
"""(step, focus) as printed in the paper's text for Llama-3.1-8B under DEFT; None is the end of training. The caption of
its figure has 0.05 for the weak start."""


def p_edges(per_decade: int) -> np.ndarray:
    """Bins of p: even in log p from 1e-8 to 1; the edge nearest to 1/2 is moved to 1/2.

    >>> p_edges(3)[-5:]
    array([0.04641589, 0.1       , 0.21544347, 0.5       , 1.        ])
    """
    edges = 10.0 ** (np.arange(round(np.log10(SMALLEST_P)) * per_decade, 1) / per_decade)
    edges[np.abs(np.log(edges / HEAD_P)).argmin()] = HEAD_P
    return edges


def bin_of(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Which (low, high] a value falls into; values outside the edges count in the first or last bin."""
    return np.clip(np.searchsorted(edges, values, side="left") - 1, 0, len(edges) - 2)


# --- gradient maps ----------------------------------------------------------------------------------------------------


def gradient_map_table(
    tables: Mapping[str, pa.Table], objectives: Sequence[str] | None = None, *, per_decade: int = 6,
    entropy_bins: int = 32,
) -> list[dict[str, Any]]:  # fmt: skip
    """The logit-gradient norm s ||P - e_y|| of real tokens over (p, entropy), a line per bin that has tokens.

    ``tables``: regime -> token table. ``gradient`` is the bin's mean, ``normalised`` that over the largest token of the
    same regime and objective, ``mass`` the bin's share of the whole gradient.
    """
    chosen = list(objectives or distinct(name for table in tables.values() for name in table_objectives(table)))
    for table in tables.values():
        have = table_objectives(table)
        if unknown := [name for name in chosen if name not in have]:
            raise ValueError(
                f"gradient map: a table has no gradients of {unknown[0]}, only of {', '.join(have)}; name it when the "
                f"table is made (`deftune analyze tokens --objectives`)"
            )
    parts = {
        regime: columns_of(
            table, ["p", "entropy", *(f"gradient:{name}" for name in chosen)], f"gradient map{regime and f', {regime}'}"
        )
        for regime, table in tables.items()
    }
    highest = max(float(part["entropy"].max()) for part in parts.values())
    p_bins, h_bins = p_edges(per_decade), np.linspace(0, max(highest, 1e-6), entropy_bins + 1)
    lines: list[dict[str, Any]] = []
    for regime, part in parts.items():
        place = bin_of(part["p"], p_bins) * entropy_bins + bin_of(part["entropy"], h_bins)
        size = (len(p_bins) - 1) * entropy_bins
        tokens = np.bincount(place, minlength=size)
        for name in chosen:
            norms = part[f"gradient:{name}"].astype(np.float64)
            sums = np.bincount(place, weights=norms, minlength=size)
            total, largest = float(norms.sum()), float(norms.max())
            for i in np.flatnonzero(tokens).tolist():
                column, row = divmod(i, entropy_bins)
                mean = float(sums[i] / tokens[i])
                lines.append({
                    "regime": regime, "objective": name,
                    "p_low": float(p_bins[column]), "p_high": float(p_bins[column + 1]),
                    "entropy_low": float(h_bins[row]), "entropy_high": float(h_bins[row + 1]),
                    "tokens": int(tokens[i]), "gradient": mean,
                    "normalised": mean / largest if largest else 0.0, "mass": float(sums[i]) / total if total else 0.0,
                })  # fmt: skip
    return lines


@styled
def plot_gradient_maps(table: Table) -> Figure:
    """A row per regime, a panel per objective: p and entropy, colour = gradient norm over the panel's largest.

    Above a panel are the shares of the whole gradient that tokens with p <= 1e-3 and with p > 1/2 get.
    """
    names = ("regime", "objective", "p_low", "p_high", "entropy_low", "entropy_high", "normalised", "mass")
    columns = columns_of(table, names, "gradients")
    regimes, objectives = distinct(columns["regime"].tolist()), distinct(columns["objective"].tolist())
    p_bins = np.unique([*columns["p_low"], *columns["p_high"]])
    h_bins = np.unique([*columns["entropy_low"], *columns["entropy_high"]])
    size = (PAGE_INCHES, 0.6 + 1.45 * len(regimes))
    figure, axes = new_figure(len(regimes), len(objectives), size, sharex=True, sharey=True)
    mesh: Any = None
    for row, regime in zip(axes, regimes):
        for axis, name in zip(row, objectives):
            part = rows_of(columns, regime=regime, objective=name)
            grid = np.full((len(h_bins) - 1, len(p_bins) - 1), np.nan)
            places = np.searchsorted(h_bins, part["entropy_low"]), np.searchsorted(p_bins, part["p_low"])
            grid[places] = part["normalised"]
            mesh = axis.pcolormesh(p_bins, h_bins, grid, cmap=COLOUR_MAP, vmin=0, vmax=1, rasterized=True)
            axis.set_xscale("log")
            axis.set_xlim(p_bins[0], 1)
            tail = part["mass"][part["p_high"] <= TAIL_P * (1 + 1e-9)].sum()
            head = part["mass"][part["p_low"] >= HEAD_P].sum()
            axis.set_title(f"≤10⁻³: {tail:.0%}   >½: {head:.0%}", fontsize=6, pad=2)
        row[0].set_ylabel(f"{regime}\nentropy (nats)" if regime else "entropy (nats)")
    above = {"xycoords": "axes fraction", "xytext": (0, 11), "textcoords": "offset points", "ha": "center"}
    for top, bottom, name in zip(axes[0], axes[-1], objectives):
        top.annotate(name, (0.5, 1), **above)
        bottom.set_xlabel("p")
    figure.colorbar(mesh, ax=axes, label="gradient / its largest", pad=0.01)
    return figure


# --- probability histograms -------------------------------------------------------------------------------------------


def histogram_table(tables: Mapping[tuple[str, str], Table], *, per_decade: int = 4) -> list[dict[str, Any]]:
    """How the target probabilities are spread: (regime, model) -> token table, a line per bin.

    ``share`` is the bin's share of the tokens, ``density`` that over the bin's width in decades of p.
    """
    edges = p_edges(per_decade)
    widths = np.diff(np.log10(edges))
    lines: list[dict[str, Any]] = []
    for (regime, model), table in tables.items():
        what = f"histogram, {regime}/{model}" if regime else f"histogram, {model}"
        p = columns_of(table, ["p"], what)["p"].astype(np.float64)
        counts = np.bincount(bin_of(p, edges), minlength=len(edges) - 1)
        for i, count in enumerate(counts.tolist()):
            share = count / len(p)
            lines.append({
                "regime": regime, "model": model, "p_low": float(edges[i]), "p_high": float(edges[i + 1]),
                "tokens": count, "share": share, "density": share / float(widths[i]),
            })  # fmt: skip
    return lines


def probability_shares(table: Table) -> list[dict[str, Any]]:
    """The two ends of each histogram: the shares of tokens with p <= 1e-3 and with p > 1/2."""
    columns = columns_of(table, ("regime", "model", "p_low", "p_high", "tokens", "share"), "histograms")
    lines: list[dict[str, Any]] = []
    for regime, model in distinct(zip(columns["regime"].tolist(), columns["model"].tolist())):
        mine = rows_of(columns, regime=regime, model=model)
        lines.append({
            "regime": regime, "model": model, "tokens": int(mine["tokens"].sum()),
            "p<=1e-3": float(mine["share"][mine["p_high"] <= TAIL_P * (1 + 1e-9)].sum()),
            "p>0.5": float(mine["share"][mine["p_low"] >= HEAD_P].sum()),
        })  # fmt: skip
    return lines


@styled
def plot_histograms(table: Table) -> Figure:
    """A panel per regime: the density of log p, a line per model, with each one's shares at both ends of p.

    The density has a logarithmic axis too: what objectives do to the tail could not be seen beside the head.
    """
    columns = columns_of(table, ("regime", "model", "p_low", "p_high", "tokens", "share", "density"), "histograms")
    ends = {(line["regime"], line["model"]): line for line in probability_shares(table)}
    regimes = distinct(columns["regime"].tolist())
    size = (min(PAGE_INCHES, 3.4 * len(regimes)), 3.0)
    figure, axes = new_figure(1, len(regimes), size, sharex=True, sharey=True)
    for axis, regime in zip(axes[0], regimes):
        models = distinct(rows_of(columns, regime=regime)["model"].tolist())
        for model in models:
            mine = rows_of(columns, regime=regime, model=model)
            edges = [*mine["p_low"], mine["p_high"][-1]]
            look = look_of(model)
            axis.stairs(
                mine["density"], edges, color=look.colour, ls=look.line, lw=1.1, label=model,
                fill=model == "base", alpha=0.35 if model == "base" else 1.0,
            )  # fmt: skip
        for x in (TAIL_P, HEAD_P):
            axis.axvline(x, color="black", lw=0.5, ls=":")
        axis.set(xscale="log", yscale="log", xlabel="target probability p", title=regime, xlim=(SMALLEST_P, 1))
        axis.set_xticks([1e-8, 1e-6, 1e-4, 1e-2, 1])
        width = max(map(len, models))
        rows = [f"{'':{width}} ≤10⁻³   >½", *(
            f"{model:{width}} {ends[regime, model]['p<=1e-3']:>5.0%} {ends[regime, model]['p>0.5']:>4.0%}"
            for model in models
        )]  # fmt: skip
        shares = "\n".join(rows).replace(" ", "\N{NO-BREAK SPACE}")  # SVG joins several spaces to one
        axis.text(0.03, 0.97, shares, transform=axis.transAxes, va="top", family="monospace", fontsize=5.5)
    axes[0][0].set_ylabel("share of tokens per decade of p")
    legend_below(figure, axes[0])
    return figure


# --- training ---------------------------------------------------------------------------------------------------------


def progress_table(runs: Sequence[tuple[str, str | Path]]) -> list[dict[str, Any]]:
    """p and focus over training from the runs' metrics.jsonl: (regime, run's folder), a line per optimizer step.

    ``updates`` is the number of updates before the step's tokens were seen: 0 is the base model.
    """
    from deftune.artifacts.runs import Run

    lines: list[dict[str, Any]] = []
    for regime, folder in runs:
        run = Run(Path(folder))
        objective = run.read_config().objective
        records = [r for r in run.read_metrics() if r.get("kind") == "train" and "p" in r]
        if not records:
            raise ValueError(f"{folder}: has recorded no training steps (metrics.jsonl)")
        lines += [
            {"regime": regime, "run": str(folder), "objective": objective, "updates": r["step"] - 1,
             **{key: r[key] for key in ("p", "focus", "concentration", "entropy", "nll")}}
            for r in records
        ]  # fmt: skip
    return lines


def focus_anchors(table: Table) -> list[dict[str, Any]]:
    """The paper's printed focus beside each run's mean sum P^2 after as many updates; NaN where a run is shorter."""
    columns = columns_of(table, ("regime", "run", "objective", "updates", "concentration"), "progress")
    lines: list[dict[str, Any]] = []
    for run in distinct(zip(*(columns[name].tolist() for name in ("regime", "run", "objective")))):
        regime, folder, objective = run
        mine = rows_of(columns, regime=regime, run=folder)
        for step, paper in PAPER_FOCUS.get(regime, ()):
            found = rows_of(mine, updates=mine["updates"].max() if step is None else step)["concentration"]
            lines.append({
                "regime": regime, "run": folder, "objective": objective, "updates": "end" if step is None else step,
                "ours": float(found[0]) if len(found) else float("nan"), "paper": paper,
            })  # fmt: skip
    return lines


@styled
def plot_progress(table: Table) -> Figure:
    """Mean p above and mean sum P^2, DEFT's focus a, below, while training: a column of panels per regime.

    An objective has its colour, line and marker. Empty grey diamonds are the paper's printed values of a, where the
    regime has its name; the last of them stands at the end.
    """
    from matplotlib.ticker import MaxNLocator

    columns = columns_of(table, ("regime", "run", "objective", "updates", "p", "concentration"), "progress")
    regimes = distinct(columns["regime"].tolist())
    size = (min(PAGE_INCHES, 3.35 * len(regimes)), 4.2)
    figure, axes = new_figure(2, len(regimes), size, sharex="col", sharey="row")
    for column, regime in enumerate(regimes):
        here = rows_of(columns, regime=regime)
        runs = distinct(here["run"].tolist())
        for number, run in enumerate(runs):
            mine = rows_of(here, run=run)
            name = str(mine["objective"][0])
            every = max(1, len(mine["updates"]) // 8)  # staggered: runs that agree do not hide each other's markers
            markers = {"marker": look_of(name).marker, "markevery": (number * every // len(runs), every)}
            for row, metric in enumerate(("p", "concentration")):
                axes[row][column].plot(mine["updates"], mine[metric], **line_style(name), **markers)
        last = float(here["updates"].max())
        anchors = [(last if step is None else step, focus) for step, focus in PAPER_FOCUS.get(regime, ())]
        if anchors := [(step, focus) for step, focus in anchors if step <= last]:  # a short run has not come so far
            axes[1][column].plot(*zip(*anchors), "D", mfc="none", mec="#7F7F7F", label="paper's a, Llama-3.1-8B")
        axes[0][column].set_title(regime)
        axes[1][column].set_xlabel("optimizer updates")
        axes[1][column].xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    for row, label in zip(axes, ("mean p of the step's tokens", "mean ΣP², DEFT's focus")):
        for axis in row:
            axis.grid()
        row[0].set_ylim(0, min(1.02, 1.1 * row[0].get_ylim()[1]))
        row[0].set_ylabel(label)
    legend_below(figure, axes.flat)
    return figure
