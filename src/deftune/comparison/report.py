"""`deftune report`: a comparison as one HTML page that needs nothing else, and that no text in it can take over.

No script, no request: a Content-Security-Policy says so to the browser. Everything that comes from a config, a model's
name or a result is escaped. The figures come in as SVG by title (`page_figures` makes them).
"""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from deftune._version import __version__
from deftune.artifacts.names import shown_model
from deftune.comparison.grid import CONFIG, Comparison, render_comparison
from deftune.comparison.show import cost_lines, difference_lines, score_tables, token_lines, view_title
from deftune.comparison.tables import AVERAGE, LEVEL, ResultTable, render_html

Record = Mapping[str, Any]
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
FEW_ITEMS, FEW_SEEDS = 100, 3


def escape(text: object) -> str:
    return html.escape(str(text))


def text_table(lines: Sequence[Sequence[str]], *, words: bool = False) -> str:
    """Rows of text, the header first."""
    header, *body = lines
    heads = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    rows = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in body)
    kind = ' class="words"' if words else ""
    return (
        f'<div class="wide"><table{kind}>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>\n'
    )


def folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>\n{content}</details>\n"


# --- what it says -----------------------------------------------------------------------------------------------------


def verdicts(summary: Record) -> list[tuple[str, bool, str]]:
    """(where, decided, sentence) for every objective against the first one, by regime and suite, in the last view."""
    found: list[tuple[str, bool, str]] = []
    reference = summary["config"]["objectives"][0]
    for regime, about in summary["regimes"].items():
        for evaluation in about["evaluations"]:
            if not evaluation["views"]:
                continue
            view = evaluation["views"][-1]
            for record in view["differences"]:
                if record["column"] != AVERAGE or reference not in (record["a"], record["b"]):
                    continue
                sign = 1 if record["b"] == reference else -1
                other = record["a"] if sign > 0 else record["b"]
                decided = record["p_holm"] < LEVEL
                points = 100 * sign * record["difference"] + 0.0  # no -0.00
                ends = [100 * sign * record[key] + 0.0 for key in ("low", "high") if record[key] is not None]
                interval = f" [{min(ends):+.2f}, {max(ends):+.2f}]" if ends else ""
                how = (
                    f"{'above' if points > 0 else 'below'} {reference}"
                    if decided
                    else f"not told apart from {reference}"
                )
                where = f"{regime}, {evaluation['title']}, {view_title(view['name'])}"
                found.append((where, decided, (
                    f"{other} is {how}: {points:+.2f} points{interval}, p = {record['p_holm']:.2g} after Holm, "
                    f"{record['items']:,} items."
                )))  # fmt: skip
    return found


def cautions(summary: Record) -> list[str]:
    """What a reader should know before the numbers."""
    lines: list[str] = []
    unfinished = {name: cell for name, cell in summary["cells"].items() if cell["state"] != "finished"}
    failed = [f"{name} ({cell.get('error', 'no reason recorded')})" for name, cell in unfinished.items()
              if cell["state"] == "failed"]  # fmt: skip
    if failed:
        lines.append(f"Failed: {'; '.join(failed)}.")
    if waiting := [name for name, cell in unfinished.items() if cell["state"] != "failed"]:
        lines.append(f"Not finished: {', '.join(waiting)}.")
    left_out = dict.fromkeys(line for cell in summary["cells"].values() for line in cell.get("left_out", ()))
    if left_out:
        lines.append(f"Token tables lack {'; '.join(left_out)}.")
    seeds = len(summary["config"]["seeds"])
    if seeds < FEW_SEEDS:
        lines.append(
            f"{seeds} seed{'s' * (seeds > 1)}: intervals and p-values are over items, for these seeds; another seed "
            f"may move a score by more."
        )
    small: list[str] = []
    for regime, about in summary["regimes"].items():
        for evaluation in about["evaluations"]:
            for view in evaluation["views"][:1]:
                sizes = {c["items"] for row in view["rows"].values() for c in row["columns"].values() if c["items"]}
                if sizes and min(sizes) < FEW_ITEMS:
                    small.append(f"{regime}, {evaluation['title']}: {min(sizes)}")
    if small:
        lines.append(f"Sets with few items, too few to rank by: {'; '.join(small)}.")
    return lines


# --- sections ---------------------------------------------------------------------------------------------------------


def score_section(summary: Record, tables: Sequence[ResultTable]) -> Iterator[str]:
    """The last view of every suite (the best of a sweep) in full, the others folded; the differences under each."""
    remaining = iter(tables)
    for regime, about in summary["regimes"].items():
        for evaluation in about["evaluations"]:
            views = [(view, next(remaining)) for view in evaluation["views"]]
            if not views:
                yield f"<p>{escape(regime)}, {escape(evaluation['title'])}: no finished cell yet.</p>"
                continue
            view, table = views[-1]
            yield f'<div class="wide">{render_html(table)}</div>'
            if view["differences"]:
                yield folded("Differences, paired by item", text_table(difference_lines(evaluation, view)))
            for view, table in views[:-1]:
                inner = f'<div class="wide">{render_html(table)}</div>'
                if view["differences"]:
                    inner += text_table(difference_lines(evaluation, view))
                yield folded(f"{regime}, {evaluation['title']}, {view_title(view['name'])}", inner)


def says_section(summary: Record) -> Iterator[str]:
    before = ""
    for where, decided, text in verdicts(summary):
        if where != before:
            yield ("</ul>" if before else "") + f'<h3>{escape(where)}</h3>\n<ul class="says">'
            before = where
        yield f'<li class="decided">{escape(text)}</li>' if decided else f"<li>{escape(text)}</li>"
    yield "</ul>" if before else "<p>No two objectives have finished yet.</p>"


def cells_table(comparison: Comparison, page: Path | None) -> str:
    """Every cell: its state and cost, and its token browser where one was made beside its token table."""
    rows: list[str] = []
    for cell in comparison.cells():
        state = cell.state()
        cost: Mapping[str, float] = state.get("cost", {})
        numbers = (
            [f"{cost['seconds']:.1f}", f"{cost['tokens_per_second']:,.0f}", f"{cost['memory_gib']:.2f}"]
            if cost
            else [""] * 3
        )
        browser = cell.folder / "inspect.html"
        link = ""
        if page is not None and browser.is_file():
            link = f'<a href="{escape(relative(browser, page.parent))}">tokens</a>'
        cells = [cell.name, state["state"], *numbers, f"{state.get('eval_seconds', 0):.1f}"]
        rows.append(f"<tr>{''.join(f'<td>{escape(c)}</td>' for c in cells)}<td>{link}</td></tr>")
    heads = "".join(f'<th scope="col">{escape(h)}</th>' for h in
                    ("cell", "state", "train s", "tokens/s", "peak GiB", "eval s", ""))  # fmt: skip
    body = "\n".join(rows)
    return f'<div class="wide"><table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>\n'


def relative(path: Path, start: Path) -> str:
    """A link from one file to another that survives moving both."""
    import os
    from urllib.parse import quote

    return quote(os.path.relpath(path, start))


def reproduce(comparison: Comparison) -> str:
    """The commands, from the config to this page, and one cell's by hand."""
    folder = comparison.folder
    trained = next((cell for cell in comparison.cells() if cell.seed is not None), None)
    lines = [
        f'pip install "deftune[eval]=={__version__}"',
        f"deftune compare run {shlex.quote(CONFIG)}            # the file below; goes on where it was stopped",
        f"deftune compare show {shlex.quote(folder)}",
        f"deftune report {shlex.quote(folder)}",
    ]
    if trained is not None:
        run = shlex.quote(str(trained.folder / "run"))
        lines += [
            "# one cell by hand",
            f"deftune train {shlex.quote(str(trained.folder / 'run' / 'config.yaml'))} --set run=runs/again",
            *(f"deftune eval show {shlex.quote(str(trained.folder / f'eval-{evaluation.title}'))} --wrong"
              for evaluation in trained.section.evaluate),
            f"deftune chat {run}",
        ]  # fmt: skip
        if trained.section.tokens:
            table, browser = (shlex.quote(str(trained.folder / name)) for name in ("tokens.parquet", "inspect.html"))
            lines.append(f"deftune inspect --tokens {table} --html {browser}   # the next report links it")
    return "\n".join(lines)


# --- the page ---------------------------------------------------------------------------------------------------------


def render_report(
    comparison: Comparison, summary: Record, figures: Mapping[str, str], environment: Record, page: Path | None = None,
    *, tables: Sequence[ResultTable] | None = None, sections: Mapping[str, str] | None = None,
) -> str:  # fmt: skip
    """The page's HTML.

    Args:
        comparison: the comparison, for its cells and commands.
        summary: what `summarize_comparison` returns.
        figures: title -> `<svg>`, trusted.
        environment: versions and machine.
        page: where the page will lie, for links.
        tables: score tables; default: `score_tables(summary)`.
        sections: title -> HTML, trusted; placed after the results.
    """
    config = summary["config"]
    finished = sum(cell["state"] == "finished" for cell in summary["cells"].values())
    models = dict.fromkeys(about["model"] for about in summary["regimes"].values())
    title = f"{Path(comparison.folder).name}: {', '.join(config['objectives'])}"
    facts = {
        "objectives": ", ".join(config["objectives"]),
        "model": ", ".join(map(shown_model, models)),
        "regimes": ", ".join(summary["regimes"]),
        "seeds": ", ".join(map(str, config["seeds"])),
        "learning rates": ", ".join(f"{rate:g}" for rate in config["learning_rates"]),
        "cells finished": f"{finished} of {len(summary['cells'])}",
    }
    parts = [
        f"<h1>{escape(title)}</h1>",
        '<p class="lead">Every objective saw the same rows in the same order for a seed, the same number of steps and '
        "the same learning rates to choose from.</p>",
        '<dl class="facts">',
        *(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items()),
        "</dl>",
        *(f'<p class="warn">{escape(line)}</p>' for line in cautions(summary)),
        "<h2>What it says</h2>",
        *says_section(summary),
        "<h2>Scores</h2>",
        *score_section(summary, score_tables(summary) if tables is None else tables),
    ]
    if figures:
        parts.append("<h2>Figures</h2>")
        parts += [
            f'<figure><h3>{escape(name)}</h3><div class="drawing">{svg}</div></figure>' for name, svg in figures.items()
        ]
    for regime, about in summary["regimes"].items():
        name = escape(regime)
        if about["tokens"]:
            parts.append(
                f"<h2>Held-out tokens: {name}</h2>\n<p class=soft>Means over tokens with 95% intervals over rows; a "
                f"token's numbers are means over the seeds.</p>\n{text_table(token_lines(about['tokens']))}"
            )
        if about["cost"]:
            parts.append(
                f"<h2>Cost: {name}</h2>\n<p class=soft>Training only, a cell on average; the peak is the largest.</p>\n"
                f"{text_table(cost_lines(about['cost']))}"
            )
    parts += [
        *(f"<h2>{escape(name)}</h2>\n{content}" for name, content in (sections or {}).items()),
        "<h2>How to reproduce it</h2>", f"<pre><code>{escape(reproduce(comparison))}</code></pre>",
        folded("Configuration", f"<pre><code>{escape(render_comparison(comparison))}</code></pre>"),
        folded("Environment", f"<pre><code>{escape(json.dumps(environment, indent=1))}</code></pre>"),
        folded("Cells", cells_table(comparison, page)),
        f'<p class="soft">Made by deftune {escape(__version__)}. Nothing on this page is loaded from elsewhere.</p>',
    ]  # fmt: skip
    style = resources.files("deftune.comparison").joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )
