"""The figures of a comparison's report, as SVG texts by title."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deftune.analysis.figures import histogram_table, plot_histograms, plot_progress, progress_table
from deftune.analysis.figures_scores import (
    continuum_table,
    entropy_table,
    plot_continuum,
    plot_entropy,
    plot_temperatures,
)
from deftune.analysis.grid import BASE, Comparison
from deftune.analysis.style import styled
from deftune.analysis.tables import AVERAGE
from deftune.analysis.tokens import read_token_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Record = Mapping[str, Any]
SCALE = 1.8  # pixels of the page for a point of the paper


def report_figures(comparison: Comparison, summary: Record) -> dict[str, str]:
    """Title -> SVG, of whatever the comparison has: a sweep, token tables, runs, several regimes."""
    scores = score_lines(summary)
    drawn: dict[str, Callable[[], Figure | None]] = {
        "Score against sampling temperature": lambda: temperature_figure(scores),
        "Target probabilities on held-out tokens, one seed of each": lambda: histogram_figure(comparison),
        "Probability and concentration while training, one seed of each": lambda: progress_figure(comparison),
        "Score against the untuned model's mean p": lambda: continuum_figure(scores, summary),
        "Score against the tuned model's mean entropy": lambda: entropy_figure(scores, summary),
    }
    found: dict[str, str] = {}
    for title, draw in drawn.items():
        figure = draw()
        if figure is not None:
            found[title] = svg_text(figure, f"figure{len(found) + 1}")
    return found


def score_lines(summary: Record) -> list[dict[str, Any]]:
    """A line per regime, objective and temperature: the average, or the only column, of each suite."""
    lines: list[dict[str, Any]] = []
    for regime, about in summary["regimes"].items():
        for evaluation in about["evaluations"]:
            place = regime if len(about["evaluations"]) == 1 else f"{regime}, {evaluation['title']}"
            for view in evaluation["views"]:
                if view["temperature"] is None or not evaluation["averaged"]:
                    continue
                for objective, row in view["rows"].items():
                    cell = row["columns"][AVERAGE]
                    low, high = (cell["value"] if cell[key] is None else cell[key] for key in ("low", "high"))
                    lines.append({
                        "regime": place, "of": regime, "objective": objective, "temperature": view["temperature"],
                        "score": cell["value"], "low": low, "high": high,
                    })  # fmt: skip
    return lines


def temperature_figure(scores: list[dict[str, Any]]) -> Figure | None:
    swept = {line["regime"] for line in scores if line["temperature"] != scores[0]["temperature"]}
    return plot_temperatures(scores) if swept else None


def histogram_figure(comparison: Comparison) -> Figure | None:
    """The first seed of each objective at the first learning rate: a histogram of one model, not of several."""
    tables: dict[tuple[str, str], Any] = {}
    for cell in comparison.cells():
        path = cell.folder / "tokens.parquet"
        if cell.state()["state"] == "finished" and path.is_file() and (cell.regime, cell.objective) not in tables:
            tables[cell.regime, cell.objective] = read_token_table(path, ["p", "log_p"])
    return plot_histograms(histogram_table(tables)) if tables else None


def progress_figure(comparison: Comparison) -> Figure | None:
    runs: dict[tuple[str, str], tuple[str, Path]] = {}
    for cell in comparison.cells():
        if cell.objective != BASE and cell.state()["state"] == "finished":
            runs.setdefault((cell.regime, cell.objective), (cell.regime, cell.folder / "run"))
    return plot_progress(progress_table(list(runs.values()))) if runs else None


def continuum_figure(scores: list[dict[str, Any]], summary: Record) -> Figure | None:
    base_p = {
        regime: record["p"]["mean"]
        for regime, about in summary["regimes"].items()
        for record in about["tokens"]
        if record["objective"] == BASE
    }
    known = [line for line in scores if line["of"] in base_p]
    if len({line["of"] for line in known}) < 2:
        return None
    lowest = min(line["temperature"] for line in known)
    at = [line for line in known if line["temperature"] == lowest]
    figure = plot_continuum(continuum_table(at, {line["regime"]: base_p[line["of"]] for line in at}))
    figure.axes[0].set_xlabel("mean p of the untuned model on held-out tokens")
    return figure


def entropy_figure(scores: list[dict[str, Any]], summary: Record) -> Figure | None:
    entropies: dict[tuple[str, str], float] = {}
    for regime, about in summary["regimes"].items():
        for record in about["tokens"]:
            entropies.setdefault((regime, record["objective"]), record["entropy"]["mean"])
    known = [line for line in scores if (line["of"], line["objective"]) in entropies]
    if not known:
        return None
    by_place = {(line["regime"], line["objective"]): entropies[line["of"], line["objective"]] for line in known}
    return plot_entropy(entropy_table(known, by_place))


@styled
def svg_text(figure: Figure, prefix: str) -> str:
    """The figure as an `<svg>` element; its ids begin with ``prefix``, so that two on a page do not meet."""
    sink = io.StringIO()
    figure.savefig(sink, format="svg", metadata={"Date": None})
    text = sink.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)  # names of vocabularies, as addresses
    # drawn for a paper's column: on a screen there is room for more
    text = re.sub(
        r'width="([\d.]+)pt" height="[\d.]+pt"', lambda m: f'width="{SCALE * float(m[1]):.0f}"', text, count=1
    )
    text = re.sub(r'(\sid=")', rf"\1{prefix}-", text)
    return re.sub(r'(url\(#|href="#)', rf"\1{prefix}-", text)
