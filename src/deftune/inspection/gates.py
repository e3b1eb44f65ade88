"""Gate curves and signal maps: what an objective does with a token, from the objective itself.

A table function makes the figures' numbers through the same statistics as training; a plot function turns a table
into a figure. Nothing here knows an objective's formula.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deftune.inspection.style import COLOUR_MAP, PAGE_INCHES, distinct, line_style, new_figure, styled
from deftune.losses import token_stats
from deftune.objectives import Objective, TokenStats
from deftune.objectives import objective as parse_objective

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT = ("nll", "linear", "hellinger", "cayley", "deft", "eaft")
"""The default curves: the paper's objectives and the middle of the family."""

STATES = {
    "spread": "the rest spread evenly over the vocabulary",
    "conflict": "the rest on one other token",
}


def state_logits(p: Tensor, state: str, vocab_size: int) -> Tensor:
    """Rows whose target (id 0) has probability ``p``: the rest spread evenly, or all on token 1."""
    others = vocab_size - 1 if state == "spread" else 1
    rows = torch.full((len(p), vocab_size), -math.inf, dtype=torch.float64)
    rows[:, 0] = p.log()
    rows[:, 1 : 1 + others] = (torch.log1p(-p) - math.log(others))[:, None]
    return rows


def gate_table(
    objectives: Iterable[str | Objective] = DEFAULT, *, vocab_size: int = 1000, points: int = 201
) -> list[dict[str, Any]]:
    """Gate, signal W = gate (1-p) and focus over p in (0, 1), in both predictive states, one row per point.

    >>> rows = gate_table(["linear"], points=3)
    >>> [(row["state"], round(row["p"], 3), round(row["gate"], 3)) for row in rows[:3]]
    [('spread', 0.001, 0.001), ('spread', 0.5, 0.5), ('spread', 0.999, 0.999)]
    """
    p = torch.linspace(1e-3, 1 - 1e-3, points, dtype=torch.float64)
    rows: list[dict[str, Any]] = []
    for state in STATES:
        stats = token_stats(state_logits(p, state, vocab_size), torch.zeros(points, dtype=torch.long))
        for objective in map(parse_objective, objectives):
            gate = objective.gate(stats)
            columns = {"p": p, "focus": objective.focus(stats), "gate": gate, "signal": gate * stats.error}
            rows += lines(columns, state=state, objective=str(objective))
    return rows


def lines(columns: Mapping[str, Tensor], **same: str) -> list[dict[str, Any]]:
    """A line per token of some columns, with ``same`` in each line."""
    return [same | dict(zip(columns, values)) for values in zip(*(column.tolist() for column in columns.values()))]


def map_stats(points: int, vocab_size: int) -> TokenStats:
    """Synthetic tokens on a grid of p by tail concentration: the tail's masses fall as rank^-beta, beta from 0 up."""
    p = torch.linspace(0.005, 0.995, points, dtype=torch.float64)
    beta = torch.linspace(0, 1, points, dtype=torch.float64) ** 2 * 8
    tail = torch.log_softmax(-beta[:, None] * torch.arange(1, vocab_size, dtype=torch.float64).log(), -1)
    logits = torch.empty(points, points, vocab_size, dtype=torch.float64)
    logits[..., 0] = p.log()
    logits[..., 1:] = torch.log1p(-p)[:, None] + tail[:, None]
    return token_stats(logits, torch.zeros(points, points, dtype=torch.long))


def map_table(
    objectives: Iterable[str | Objective] = DEFAULT, *, vocab_size: int = 1000, points: int = 60
) -> list[dict[str, Any]]:
    """The logit-gradient norm s ||P - e_y|| over (p, entropy) on synthetic distributions, one row per token.

    ||P - e_y||^2 = sum P^2 - 2p + 1. ``share`` is the norm over the largest of the same objective.
    """
    stats = map_stats(points, vocab_size)
    error_norm = (stats.concentration - 2 * stats.p + 1).clamp(min=0).sqrt()
    rows: list[dict[str, Any]] = []
    for objective in map(parse_objective, objectives):
        norm = objective.gate(stats) * error_norm
        columns = {
            "p": stats.p, "entropy": stats.entropy, "gradient_norm": norm, "share": norm / norm.max().clamp(min=1e-300)
        }  # fmt: skip
        rows += lines(columns, objective=str(objective))
    return rows


@styled
def plot_gates(table: list[dict[str, Any]]) -> Figure:
    """Gate, signal and focus against p, a row per predictive state, from `gate_table`'s rows."""
    figure, axes = new_figure(len(STATES), 3, (PAGE_INCHES, 4.0), sharex=True)
    titles = {"gate": "gate s", "signal": "signal W = s (1 - p)", "focus": "focus a"}
    for row, (state, caption) in enumerate(STATES.items()):
        for column, (key, title) in enumerate(titles.items()):
            axis = axes[row][column]
            for name in distinct(r["objective"] for r in table):
                points = [r for r in table if r["objective"] == name and r["state"] == state]
                axis.plot([r["p"] for r in points], [r[key] for r in points], **line_style(name))
            axis.set_ylim(-0.03, max(1.03, 1.03 * max(r[key] for r in table if math.isfinite(r[key]))))
            axis.grid()
            axis.set_title(title if row == 0 else "")
            if row == len(STATES) - 1:
                axis.set_xlabel("target probability p")
        axes[row][0].set_ylabel("\n".join(textwrap.wrap(caption, 22)))
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return figure


@styled
def plot_maps(table: list[dict[str, Any]]) -> Figure:
    """A panel per objective: p against entropy, colour = gradient norm over its largest, from `map_table`'s rows."""
    names = distinct(r["objective"] for r in table)
    width = min(3, len(names))
    height = math.ceil(len(names) / width)
    figure, axes = new_figure(height, width, (PAGE_INCHES * width / 3 + 0.4, 1.9 * height), sharex=True, sharey=True)
    mesh: Any = None
    for axis, name in zip(axes.flat, names):
        points = [r for r in table if r["objective"] == name]
        side = math.isqrt(len(points))
        grid = {key: torch.tensor([r[key] for r in points]).view(side, side) for key in ("p", "entropy", "share")}
        mesh = axis.pcolormesh(
            grid["p"].numpy(), grid["entropy"].numpy(), grid["share"].numpy(),
            cmap=COLOUR_MAP, vmin=0, vmax=1, shading="gouraud", rasterized=True,
        )  # fmt: skip
        axis.set_title(name)
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("target probability p")
    for row in axes:
        row[0].set_ylabel("entropy (nats)")
    figure.colorbar(mesh, ax=axes, label="gradient norm / its largest", shrink=0.8)
    return figure
