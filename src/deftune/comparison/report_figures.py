"""The figures of a comparison's report, each with its table."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from deftune.comparison.figures import (
    continuum_table,
    plot_continuum,
    plot_entropy,
    plot_temperatures,
)
from deftune.comparison.grid import BASE, Cell, Comparison
from deftune.comparison.show import views
from deftune.comparison.tables import AVERAGE
from deftune.inspection.figures import (
    gradient_map_table,
    histogram_table,
    plot_gradient_maps,
    plot_histograms,
    plot_progress,
    progress_table,
)
from deftune.inspection.style import styled
from deftune.tokens.table import read_token_table, table_objectives

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Record = Mapping[str, Any]
FIRST = "the first seed and learning rate of each objective"
SCALE = 1.8  # pixels of the page for a point of the paper


class Drawn(NamedTuple):
    """A figure of the report, and the table it was drawn from."""

    name: str
    title: str
    figure: Figure
    table: Any


def report_figures(comparison: Comparison, summary: Record) -> list[Drawn]:
    """Of whatever the comparison has: a sweep, token tables, runs, several regimes."""
    scores = score_lines(summary)
    tables: list[tuple[str, str, Callable[[Any], Figure], Any]] = [
        ("temperatures", "Score against sampling temperature", plot_temperatures, swept(scores)),
        ("histograms", f"Target probabilities on held-out tokens, {FIRST}", plot_histograms, shares(comparison)),
        ("progress", f"Probability and concentration while training, {FIRST}", plot_progress, runs(comparison)),
        ("continuum", "Scores by regime, in the order of the untuned model's mean p on held-out tokens",
         plot_continuum, by_p(scores, summary)),
        ("entropy", "Score against the model's mean entropy on held-out tokens", plot_entropy,
         by_entropy(scores, summary)),
    ]  # fmt: skip
    return [Drawn(name, title, plot(table), table) for name, title, plot, table in tables if table is not None]


def page_figures(drawn: Sequence[Drawn]) -> dict[str, str]:
    """Title -> SVG."""
    return {one.title: svg_text(one.figure, f"figure{number}") for number, one in enumerate(drawn, 1)}


def gradient_figures(comparison: Comparison) -> list[Drawn]:
    """The gradient maps of the untuned model, not for the page: they are images, which its policy does not allow.

    Of the objectives that every regime's table has: a comparison may have grown by others since.
    """
    untuned = {regime: table for (regime, name), table in first_tables(comparison, None).items() if name == BASE}
    named = [table_objectives(table) for table in untuned.values()]
    shared = [name for name in (named[0] if named else []) if all(name in names for names in named)]
    if not shared:
        return []
    table = gradient_map_table(untuned, shared)
    return [Drawn("gradients", "Gradient norms on held-out tokens, before tuning", plot_gradient_maps(table), table)]


def score_lines(summary: Record) -> list[dict[str, Any]]:
    """A line per regime, objective and temperature: the average, or the only column, of each suite.

    ``learning_rates`` are those that the two halves of the items were scored at.
    """
    lines: list[dict[str, Any]] = []
    for regime, about, evaluation, view in views(summary):
        place = regime if len(about["evaluations"]) == 1 else f"{regime}, {evaluation['title']}"
        if view["temperature"] is None or not (averaged := evaluation["averaged"]):
            continue
        for objective, row in view["rows"].items():
            cell = row["columns"][AVERAGE if len(averaged) > 1 else averaged[0]]  # as in the table
            low, high = (cell["value"] if cell[key] is None else cell[key] for key in ("low", "high"))
            lines.append({
                "regime": place, "of": regime, "objective": objective, "temperature": view["temperature"],
                "score": cell["value"], "low": low, "high": high,
                "learning_rates": tuple(rate for _, rate in row["chosen"]),
            })  # fmt: skip
    return lines


def swept(scores: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    return scores if len({line["temperature"] for line in scores}) > 1 else None


def first_cells(comparison: Comparison) -> dict[tuple[str, str], Cell]:
    """The first finished cell of each (regime, objective): tokens of one model, not of several."""
    return {
        (regime, objective): cells[0]
        for regime in comparison.regimes
        for objective, cells in comparison.finished_cells(regime).items()
    }


def first_tables(comparison: Comparison, columns: Sequence[str] | None) -> dict[tuple[str, str], Any]:
    """The token tables of `first_cells`, where they have one."""
    return {
        place: read_token_table(cell.token_table, columns)
        for place, cell in first_cells(comparison).items()
        if cell.token_table.is_file()
    }


def shares(comparison: Comparison) -> Any:
    tables = first_tables(comparison, ["p", "log_p"])
    return histogram_table(tables) if tables else None


def runs(comparison: Comparison) -> list[dict[str, Any]] | None:
    first = [(regime, cell.run.folder) for (regime, name), cell in first_cells(comparison).items() if name != BASE]
    return progress_table(first) if first else None


def by_p(scores: list[dict[str, Any]], summary: Record) -> list[dict[str, Any]] | None:
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
    return continuum_table(at, {line["regime"]: base_p[line["of"]] for line in at})


def by_entropy(scores: list[dict[str, Any]], summary: Record) -> list[dict[str, Any]] | None:
    """The scores with the mean entropy at the learning rates of each score; None where no tokens were measured."""
    entropies: dict[tuple[str, str, float | None], float] = {
        (regime, record["objective"], record["learning_rate"]): record["entropy"]["mean"]
        for regime, about in summary["regimes"].items()
        for record in about["tokens"]
    }
    lines: list[dict[str, Any]] = []
    for line in scores:
        keys = [(line["of"], line["objective"], rate) for rate in line["learning_rates"]]
        if all(key in entropies for key in keys):
            lines.append({**line, "entropy": sum(entropies[key] for key in keys) / len(keys)})
    return lines or None


READABLE = 0.18  # relative luminance that a line needs on the dark page


def page_colour(colour: str) -> str:
    """A colour of a drawing as the page shows it, in light and in dark mode.

    Black is the page's own colour of text, white its ground; a colour that is too dark for the dark page is lightened
    there.

    >>> page_colour("#000000"), page_colour("#ffffff"), page_colour("#e69f00"), page_colour("#882255")
    ('currentColor', 'transparent', '#e69f00', 'light-dark(#882255, #c797af)')
    """
    if colour in ("#000000", "#ffffff"):
        return "currentColor" if colour == "#000000" else "transparent"
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    linear = [(part / 255) ** 2.2 for part in parts]
    if 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] >= READABLE:
        return colour
    lighter = "".join(f"{round(0.47 * part + 0.53 * 255):02x}" for part in parts)
    return f"light-dark({colour}, #{lighter})"


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
    text = re.sub(r"#[0-9a-f]{6}\b", lambda m: page_colour(m[0]), text)
    text = re.sub(r'(\sid=")', rf"\1{prefix}-", text)
    return re.sub(r'(url\(#|href="#)', rf"\1{prefix}-", text)
