"""Result tables in the paper's form: a row per objective, a column per set, best bold, second underlined.

The marks follow two rules, which every rendering states below the table. What counts is the number as it is shown, so
that equal-looking cells are equal: all that share the best are bold, all that share the second are underlined, and
where all are equal nothing is. The untuned model is left out of the ranking, as in the paper, unless ``rank_base``.

A cell of the paper stands beside one of ours only as far as it may: without remark where the set has the paper's size,
with a dagger and a footnote where it is another set.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from deftune.artifacts.terminal import align

BASE = "base"
AVERAGE = "average"
DECIMALS = 2
LEVEL = 0.05  # of a test: a difference is decided where its p-values are below (after Holm, for a family of tests)


@dataclass(frozen=True)
class Score:
    """A score in per cent, with a 95% interval where there is one."""

    value: float
    low: float | None = None
    high: float | None = None
    items: int | None = None
    seeds: int = 1

    @property
    def shown(self) -> str:
        return f"{self.value:.{DECIMALS}f}"

    @property
    def interval(self) -> str:
        if self.low is None or self.high is None:
            return ""
        return f"[{self.low:.{DECIMALS}f}, {self.high:.{DECIMALS}f}]"


@dataclass(frozen=True)
class Printed:
    """What the paper prints for a cell; ``differs`` says in what its set is another one, "" where it is not."""

    text: str
    differs: str = ""


@dataclass(frozen=True)
class ResultTable:
    """``rows``: objective (or "base") -> column -> score. ``paper``: the same -> what the paper prints there."""

    caption: str
    columns: tuple[str, ...]
    rows: Mapping[str, Mapping[str, Score]]
    paper: Mapping[str, Mapping[str, Printed]] = field(default_factory=dict[str, dict[str, Printed]])
    rank_base: bool = False
    notes: tuple[str, ...] = ()

    def marks(self) -> dict[tuple[str, str], str]:
        """(row, column) -> "bold" or "underline"."""
        found: dict[tuple[str, str], str] = {}
        for column in self.columns:
            scores = {
                name: float(row[column].shown)
                for name, row in self.rows.items()
                if column in row and (self.rank_base or name != BASE)
            }
            best, second = best_and_second(scores)
            found |= {(name, column): "bold" for name in best} | {(name, column): "underline" for name in second}
        return found

    def footnotes(self, marks: str = "Best bold, second underlined", printed: str = "italics") -> list[str]:
        """Notes on how to read the table, and on cells whose set differs from the paper's."""
        base = "the untuned model is ranked too" if self.rank_base else "the untuned model is not ranked"
        lines = [f"{marks}, ties alike; {base}."]
        if any(score.interval for row in self.rows.values() for score in row.values()):
            seeds = any(score.seeds > 1 for row in self.rows.values() for score in row.values())
            lines.append(f"In brackets: 95% interval over items{' and seeds' * seeds}.")
        if self.paper:
            lines.append(f"In {printed}: the paper's printed number.")
        differing = dict.fromkeys(
            f"{column}: {cell.differs}" for row in self.paper.values() for column, cell in row.items() if cell.differs
        )
        lines += [f"† {text}; not comparable with the paper's number." for text in differing]
        return [*lines, *self.notes]


def best_and_second(scores: dict[str, float]) -> tuple[set[str], set[str]]:
    """The names with the highest score and those with the second highest; none where all scores are equal.

    >>> best_and_second({"a": 2.0, "b": 1.0, "c": 2.0}) == ({"a", "c"}, {"b"})
    True
    """
    values = sorted(set(scores.values()), reverse=True)
    if len(values) < 2:
        return set(), set()
    first, second = ({name for name, score in scores.items() if score == value} for value in values[:2])
    return first, second


# --- rendering --------------------------------------------------------------------------------------------------------

Style = Callable[[str], str]


def _cells(table: ResultTable, escape: Style, bold: Style, underline: Style, small: Style, italic: Style):
    """The header and the body as texts of one language; rows are labels, scores, and the number of seeds."""
    marks = table.marks()
    body: list[list[str]] = []
    for name, row in table.rows.items():
        cells = [escape(name)]
        for column in table.columns:
            score, parts = row.get(column), list[str]()
            if score is not None:
                mark = {"bold": bold, "underline": underline}.get(marks.get((name, column), ""), lambda text: text)
                parts.append(mark(escape(score.shown)))
                if score.interval:
                    parts.append(small(escape(score.interval)))
            printed = table.paper.get(name, {}).get(column)
            if printed is not None:
                parts.append(italic(escape(printed.text + ("†" if printed.differs else ""))))
            cells.append(" ".join(parts) or escape("-"))
        seeds = sorted({score.seeds for score in row.values()})
        cells.append("-".join(map(str, dict.fromkeys([seeds[0], seeds[-1]]))) if seeds else "")
        body.append(cells)
    header = ["", *map(escape, table.columns), "seeds"]
    if all(row[-1] in ("1", "") for row in body):  # the number of seeds is left out where it is always 1
        return header[:-1], [row[:-1] for row in body]
    return header, body


def _same(text: str) -> str:
    return text


def render_text(table: ResultTable) -> str:
    """A table for the terminal: columns of text, in which nothing is escaped."""
    header, body = _cells(
        table, lambda text: text.replace("\n", " "), lambda text: f"{text}*", lambda text: f"{text}+", _same,
        lambda text: f"({text})",
    )  # fmt: skip
    notes = table.footnotes("* best, + second", "parentheses")
    return "\n".join([table.caption, align([header, *body]), *notes]) + "\n"


def escape_markdown(text: str) -> str:
    r"""Text that Markdown shows as it is, in a table too.

    >>> escape_markdown("deft | eos(nll)_*")
    'deft \\| eos(nll)\\_\\*'
    """
    return re.sub(r"([\\`*_\[\]<>|~])", r"\\\1", text).replace("\n", " ")


_INTERVAL = re.compile(r"\[[\d.+-]+, [\d.+-]+\]")


def render_markdown(table: ResultTable) -> str:
    """A Markdown table; underlining is HTML's, which Markdown has no sign for."""
    # a bracket after a number starts no link: intervals need no backslashes
    header, body = _cells(
        table, lambda text: text if _INTERVAL.fullmatch(text) else escape_markdown(text), lambda text: f"**{text}**",
        lambda text: f"<u>{text}</u>", _same, lambda text: f"*{text}*",
    )  # fmt: skip
    lines = [
        escape_markdown(table.caption), "",
        f"| {' | '.join(header)} |", f"|{'---|' * len(header)}",
        *(f"| {' | '.join(row)} |" for row in body),
        "", *(f"{escape_markdown(line)}  " for line in table.footnotes()),
    ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "^": r"\textasciicircum{}",
    "_": r"\_", "~": r"\textasciitilde{}", "%": r"\%", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "†": r"\textsuperscript{\textdagger}", "\n": " ",
}  # fmt: skip


def escape_latex(text: str) -> str:
    r"""Text that TeX prints as it is.

    >>> escape_latex("50% of top_k & more")
    '50\\% of top\\_k \\& more'
    """
    return "".join(_LATEX.get(char, char) for char in text)


def render_latex(table: ResultTable) -> str:
    r"""A booktabs table (`\usepackage{booktabs}`)."""
    header, body = _cells(
        table, escape_latex, lambda text: rf"\textbf{{{text}}}", lambda text: rf"\underline{{{text}}}",
        lambda text: rf"{{\scriptsize {text}}}", lambda text: rf"\textit{{{text}}}",
    )  # fmt: skip
    lines = [
        r"\begin{table}[t]", r"\centering", rf"\caption{{{escape_latex(table.caption)}}}",
        rf"\begin{{tabular}}{{l{'c' * (len(header) - 1)}}}", r"\toprule", " & ".join(header) + r" \\", r"\midrule",
        *(" & ".join(row) + r" \\" for row in body), r"\bottomrule", r"\end{tabular}", "",
        *(rf"{{\footnotesize {escape_latex(line)}}}\\" for line in table.footnotes()), r"\end{table}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def render_html(table: ResultTable) -> str:
    """A `<table>` with its notes; nothing in it is taken for markup."""
    header, body = _cells(
        table, html.escape, lambda text: f"<strong>{text}</strong>", lambda text: f"<u>{text}</u>",
        lambda text: f"<small>{text}</small>", lambda text: f"<i>{text}</i>",
    )  # fmt: skip
    heads = "".join(f'<th scope="col">{cell}</th>' if cell else "<td></td>" for cell in header)
    rows = "\n".join(
        f'<tr><th scope="row">{label}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        for label, *cells in body
    )
    notes = "\n".join(f"<p>{html.escape(line)}</p>" for line in table.footnotes())
    return (
        f"<figure>\n<table>\n<caption>{html.escape(table.caption)}</caption>\n<thead><tr>{heads}</tr></thead>\n"
        f"<tbody>\n{rows}\n</tbody>\n</table>\n<figcaption>{notes}</figcaption>\n</figure>\n"
    )


RENDERERS: dict[str, Callable[[ResultTable], str]] = {
    "text": render_text,
    "markdown": render_markdown,
    "latex": render_latex,
    "html": render_html,
}


def render(tables: Sequence[ResultTable], form: str) -> str:
    """Several tables, one after another."""
    return "\n".join(RENDERERS[form](table) for table in tables)
