"""A comparison as one HTML page that loads nothing and runs nothing.

A Content-Security-Policy forbids scripts and requests. The template escapes every text that comes from a config, a
model's name or a result.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from deftune._version import __version__
from deftune.artifacts.files import write_atomic
from deftune.artifacts.names import shown_model, shown_path
from deftune.comparison.grid import CONFIG, Comparison, render_comparison
from deftune.comparison.show import (
    below_constant,
    cost_lines,
    cut_off,
    difference_lines,
    evaluations,
    score_tables,
    token_lines,
    view_title,
)
from deftune.comparison.summary import summarize_comparison
from deftune.comparison.tables import AVERAGE, LEVEL, ResultTable, render_html

Record = Mapping[str, Any]
Beside = Callable[[Record], tuple[Sequence[ResultTable], Mapping[str, Sequence[Sequence[str]] | str]]]
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
FEW_ITEMS, FEW_SEEDS = 100, 3


# --- what it says -----------------------------------------------------------------------------------------------------


def verdicts(summary: Record) -> dict[str, list[tuple[bool, str]]]:
    """Regime and suite -> (decided, sentence) for every objective against the first one, in the last view."""
    found: dict[str, list[tuple[bool, str]]] = {}
    reference = summary["config"]["objectives"][0]
    for regime, evaluation in evaluations(summary):
        for view in evaluation["views"][-1:]:
            where = f"{regime}, {evaluation['title']}, {view_title(view['name'])}"
            lines = [
                verdict(record, reference) for record in view["differences"]
                if record["column"] == AVERAGE and reference in (record["a"], record["b"])
            ]  # fmt: skip
            found |= {where: lines} if lines else {}
    return found


def verdict(record: Record, reference: str) -> tuple[bool, str]:
    """A difference in words: whether it is decided, and the other objective against ``reference``."""
    sign, other = (1, record["a"]) if record["b"] == reference else (-1, record["b"])
    decided = record["p_holm"] < LEVEL
    points = 100 * sign * record["difference"] + 0.0  # no -0.00
    ends = [100 * sign * record[key] + 0.0 for key in ("low", "high") if record[key] is not None]
    interval = f" [{min(ends):+.2f}, {max(ends):+.2f}]" if ends else ""
    how = ("above" if points > 0 else "below") if decided else "not distinguishable from"
    return decided, (
        f"{other} is {how} {reference}: {points:+.2f} points{interval}, p = {record['p_holm']:.2g} after Holm, "
        f"{record['items']:,} items."
    )


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
    versions: dict[str, set[str]] = {}
    for cell in summary["cells"].values():
        for task, version in cell.get("task_versions", {}).items():
            versions.setdefault(task, set()).add(version)
    if mixed := [f"{task} ({', '.join(sorted(each))})" for task, each in versions.items() if len(each) > 1]:
        lines.append(
            f"Cells were graded by different versions of {'; '.join(mixed)}: a difference may be the grading's."
        )
    for regime, evaluation in evaluations(summary):
        if cut := cut_off(evaluation):
            shares = ", ".join(f"{name} ({share:.0%} of the answers)" for name, share in cut.items())
            lines.append(
                f"{regime}, {evaluation['title']}: cut off at the limit of tokens: {shares}. Their scores measure the "
                f"limit, not only the model; raise max_new_tokens."
            )
        if constant := below_constant(evaluation):
            tasks = ", ".join(f"{task} ({text})" for task, text in constant.items())
            lines.append(
                f"{regime}, {evaluation['title']}: no tuned model is above the most frequent right answer, given to "
                f"every question: {tasks}. The scores show no knowledge of the task."
            )
    seeds = len(summary["config"]["seeds"])
    if seeds == 1:
        lines.append(
            "1 seed: intervals and p-values are over items, for this seed; another seed may move a score by more."
        )
    elif seeds < FEW_SEEDS:
        lines.append(
            f"{seeds} seeds: intervals and p-values are for other items and seeds, and {seeds} seeds say little about "
            f"others, so intervals may be wide; {FEW_SEEDS} seeds narrow them most."
        )
    small: list[str] = []
    for regime, evaluation in evaluations(summary):
        for view in evaluation["views"][:1]:
            sizes = {c["items"] for row in view["rows"].values() for c in row["columns"].values() if c["items"]}
            if sizes and min(sizes) < FEW_ITEMS:
                small.append(f"{regime}, {evaluation['title']}: {min(sizes)}")
    if small:
        lines.append(f"Sets with few items, too few to rank by: {'; '.join(small)}.")
    return lines


# --- sections ---------------------------------------------------------------------------------------------------------


def score_sections(summary: Record, tables: Sequence[ResultTable]) -> Iterator[dict[str, Any]]:
    """For every suite: its last view (the best of a sweep), and the earlier views, each with its paired differences."""
    remaining = iter(tables)
    for regime, evaluation in evaluations(summary):
        place = f"{regime}, {evaluation['title']}"
        shown = [
            {
                "title": f"{place}, {view_title(view['name'])}",
                "table": Markup(render_html(next(remaining))),
                "differences": difference_lines(evaluation, view) if view["differences"] else None,
            }
            for view in evaluation["views"]
        ]
        yield {"place": place, "last": shown[-1] if shown else None, "earlier": shown[:-1]}


def cell_rows(comparison: Comparison, page: Path | None) -> Iterator[dict[str, Any]]:
    """Every cell: its state and cost, and a link to its token browser where one lies beside its token table."""
    for cell in comparison.cells():
        state = cell.state()
        cost: Mapping[str, float] = state.get("cost", {})
        numbers = [""] * 3
        if cost:
            numbers = [f"{cost['seconds']:.1f}", f"{cost['tokens_per_second']:,.0f}", f"{cost['memory_gib']:.2f}"]
        browser = cell.folder / "inspect.html"
        yield {
            "texts": [cell.name, state["state"], *numbers, f"{state.get('eval_seconds', 0):.1f}"],
            "link": relative(browser, page.parent) if page is not None and browser.is_file() else None,
        }


def relative(path: Path, start: Path) -> str:
    """A link from one file to another that survives moving both."""
    return quote(os.path.relpath(path, start))


PLACE = re.compile(r"""(?<![\w.:/~<])[~/][^\s'",;=<>]*/""")


def without_folders(text: str) -> str:
    """A text without the folders of this machine: a page is made to be shown to others.

    >>> without_folders("path: /home/me/rows.jsonl, run=~/runs/a, org/model, https://host/page")
    'path: rows.jsonl, run=a, org/model, https://host/page'
    """
    return PLACE.sub("", text)


def reproduce(comparison: Comparison) -> str:
    """The commands, from the config to this page, and one cell's by hand; folders as seen from the comparison's own."""
    folder = shown_path(comparison.folder)
    within = lambda place: shlex.quote(str(Path(folder, place.relative_to(comparison.folder))))  # noqa: E731
    trained = next((cell for cell in comparison.cells() if cell.seed is not None), None)
    lines = [
        f'pip install "deftune[eval]=={__version__}"   # or pip install -e ".[eval]" in a clone at v{__version__}',
        f"deftune compare run {CONFIG}   # the file below; goes on where it was stopped",
        f"deftune compare show {shlex.quote(folder)}",
        f"deftune report {shlex.quote(folder)}",
    ]
    if trained is not None:
        run = trained.folder / "run"
        lines += [
            "# one cell by hand",
            f"deftune train {within(run / 'config.yaml')} --set run=runs/again",
            *(f"deftune eval show {within(trained.result(evaluation).folder)} --wrong"
              for evaluation in trained.section.evaluate),
            f"deftune chat {within(run)}",
        ]  # fmt: skip
        if trained.section.tokens:
            table, browser = within(trained.token_table), within(trained.folder / "inspect.html")
            lines += ["# a page of its held-out tokens; the next report links it",
                      f"deftune inspect --tokens {table} --html {browser}"]  # fmt: skip
    return "\n".join(lines)


# --- the page ---------------------------------------------------------------------------------------------------------


def render_report(
    comparison: Comparison, summary: Record, figures: Mapping[str, str], environment: Record, page: Path | None = None,
    *, tables: Sequence[ResultTable] | None = None, sections: Mapping[str, Sequence[Sequence[str]] | str] | None = None,
) -> str:  # fmt: skip
    """The page's HTML.

    Args:
        comparison: the comparison, for its cells and commands.
        summary: what `summarize_comparison` returns.
        figures: title -> `<svg>`, trusted.
        environment: versions and machine.
        page: where the page will lie, for links.
        tables: score tables; default: `score_tables(summary)`.
        sections: title -> rows of text, the header first, or one paragraph; placed after the results.
    """
    config = summary["config"]
    finished = sum(cell["state"] == "finished" for cell in summary["cells"].values())
    models = dict.fromkeys(about["model"] for about in summary["regimes"].values())
    facts = {
        "objectives": ", ".join(config["objectives"]),
        "model": ", ".join(map(shown_model, models)),
        "regimes": ", ".join(summary["regimes"]),
        "seeds": ", ".join(map(str, config["seeds"])),
        "learning rates": ", ".join(f"{rate:g}" for rate in config["learning_rates"]),
        "cells finished": f"{finished} of {len(summary['cells'])}",
    }
    if started := str(environment.get("started", ""))[:10]:
        facts["started"] = started
    return page_template("report.html").render(
        title=f"{Path(comparison.folder).name}: {', '.join(config['objectives'])}",
        policy=POLICY,
        style=Markup(resources.files("deftune.comparison").joinpath("report.css").read_text(encoding="utf-8")),
        facts=facts,
        cautions=list(map(without_folders, cautions(summary))),
        verdicts=verdicts(summary),
        scores=list(score_sections(summary, score_tables(summary) if tables is None else tables)),
        figures={name: Markup(svg) for name, svg in figures.items()},
        tokens={name: token_lines(about["tokens"]) for name, about in summary["regimes"].items() if about["tokens"]},
        cost={name: cost_lines(about["cost"]) for name, about in summary["regimes"].items() if about["cost"]},
        sections=sections or {},
        commands=reproduce(comparison),
        config=without_folders(render_comparison(comparison)),
        environment=without_folders(json.dumps(environment, indent=1)),
        cells=list(cell_rows(comparison, page)),
        version=__version__,
    )


def page_template(name: str) -> jinja2.Template:
    """A template of this room; every text put into it is escaped unless it is `Markup`."""
    text = resources.files("deftune.comparison").joinpath(name).read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(text)


def write_report(
    comparison: Comparison, out: Path | None = None, *, figures: Path | None = None, beside: Beside | None = None
) -> list[Path]:
    """Write a comparison's page; return its path, then those of the figures.

    Args:
        comparison: what `load_comparison` returns; at least one of its cells has finished.
        out: the page; default: ``report.html`` in the comparison's folder.
        figures: a folder for the figures as PNG, SVG and PDF with their tables; default: none are written.
        beside: from a summary, the score tables and the further sections of the page (`deftune.paper.beside` has one).

    Raises:
        ValueError: no cell has finished, or a file of the comparison is damaged.
    """
    from deftune.comparison.report_figures import gradient_figures, page_figures, report_figures
    from deftune.inspection.style import save_figure

    folder = Path(comparison.folder)
    summary = summarize_comparison(comparison)
    if not any(cell["state"] == "finished" for cell in summary["cells"].values()):
        raise ValueError(f"{folder}: no cell is finished yet; `deftune compare run {folder}` goes on")
    out = out or folder / "report.html"
    environment = read_environment(folder / "environment.json")
    tables, sections = beside(summary) if beside else (None, None)
    drawn = report_figures(comparison, summary)
    page = render_report(comparison, summary, page_figures(drawn), environment, out, tables=tables, sections=sections)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, page)
    if figures is None:
        return [out]
    drawn = [*drawn, *gradient_figures(comparison)]
    return [out, *(save_figure(one.figure, figures / one.name, one.table)[0] for one in drawn)]


def read_environment(path: Path) -> dict[str, Any]:
    """The versions and the machine that a comparison recorded; {} where it recorded none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: is damaged; restore it, or remove it to leave it out of the report")
    return content  # pyright: ignore[reportUnknownVariableType]
