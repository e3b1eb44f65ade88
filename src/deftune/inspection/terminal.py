"""An inspection in a terminal: the summary, the ranked rows, and the first of them token by token."""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from deftune.artifacts.names import shown_model
from deftune.artifacts.terminal import visible
from deftune.inspection.inspect import ROW_SCORES, Inspection, habits, reasons, summary
from deftune.tokens.conflict import CONFIDENT

MARKS = ("⟦", "⟧")  # around a confident conflict, where colours are off
NEAR = 20  # tokens of context to either side, as far as there is room
HABITS = 8  # tokens listed that are conflicts again and again
WIDE = 100  # characters of a row from which on its gates are listed, where there is room for them


def render_inspection(
    inspection: Inspection, console: Console, ranked: np.ndarray, *, by: str, in_full: int = 3
) -> None:
    """Print the summary, the rows ``ranked`` by the score ``by``, and the first ``in_full`` of them coloured."""
    for line in summary_lines(inspection):
        console.print(Text(line), soft_wrap=True)
    console.print(objective_table(inspection))
    if inspection.confident.any():
        console.print(habit_table(inspection))
    if not len(ranked):
        console.print(Text("no row has such a score"))
        return
    console.print(row_table(inspection, ranked, by, width=console.width))
    marked = console.no_color or console.color_system is None
    legend = (
        f"confident conflicts are inside {MARKS[0]} {MARKS[1]}" if marked else "the redder, the surer of another token"
    )
    console.print(Text(f"The first {min(in_full, len(ranked))} in full; {legend}; ↵ is a newline\n"))
    for row in ranked[:in_full].tolist():
        console.print(Text(visible(inspection.rows[row]["where"]), style="bold"))
        for reason in reasons(inspection, row, by):
            console.print(Text(f"  {visible(reason)}", style="yellow"))
        console.print(row_text(inspection, row, marked=marked))


def summary_lines(inspection: Inspection) -> list[str]:
    """The whole in a few sentences."""
    found, facts = summary(inspection), inspection.facts
    ends = found["format_conflicts"]
    lines = [
        f"{shown_model(str(facts.get('model', '?')))} reads {facts.get('data', '?')}: {found['rows']:,} rows, "
        f"{found['tokens']:,} tokens",
        f"{found['conflicts']:,} confident conflicts (conflict >= {CONFIDENT:g}): "
        f"{found['conflicts'] / max(1, found['tokens']):.1%} of the tokens, {found['loss_share']:.0%} of the loss",
        f"{found['contradicted_answers']:,} of {found['stated_answers']:,} stated answers contradict the model; "
        f"rows with most of their loss on conflicts: {found['noisy_rows']:,}",
    ]
    if ends:
        lines.append(
            f"{ends:,} of the conflicts are end or format tokens: a small gate on conflicts may keep the model from "
            f"learning them; `| eos(nll)` gives end tokens NLL's gradient"
        )
    return [visible(line) for line in lines]


def objective_table(inspection: Inspection) -> Table:
    found = summary(inspection)
    table = Table("objective", "mean gate on conflicts", "share of its gradient on conflicts", title_justify="left")
    for name in inspection.objectives:
        gate = found["gate"][name]
        table.add_row(name, "-" if np.isnan(gate) else f"{gate:.3f}", f"{found['share'][name]:.1%}")
    return table


def habit_table(inspection: Inspection) -> Table:
    table = Table(
        "token", "conflicts", "of its places", "model expects", title="conflicts by token", title_justify="left"
    )
    for habit in habits(inspection, HABITS):
        share = f"{habit.conflicts / habit.places:.0%}"
        table.add_row(Text(repr(habit.text)), f"{habit.conflicts:,}", share, Text(repr(habit.expected)))
    return table


def row_table(inspection: Inspection, ranked: np.ndarray, by: str, *, width: int) -> Table:
    """The ranked rows: where, the score, the token that contributes most to it in its context, and the gates."""
    label = next(score.label for score in ROW_SCORES if score.name == by)
    table = Table(title=f"rows by {label}", title_justify="left")
    wheres = [tail(inspection.rows[row]["where"], 28 if width >= WIDE else 16) for row in ranked.tolist()]
    widths = {"": len(str(len(ranked))), "score": 8, "where": max(map(len, wheres)), "p": 7, "model expects": 14}
    gated = inspection.objectives if width >= WIDE + 9 * len(inspection.objectives) else []
    widths |= dict.fromkeys(gated, 6)
    frame = 3 * (len(widths) + 1) + 1
    # rich would squeeze the short columns to nothing for the sake of the long one
    widths["token in context"] = max(16, min(60, width - sum(widths.values()) - frame))
    for name in ("", "score", "where", "token in context", "p", "model expects", *gated):
        right = name in ("", "score", "p", *gated)
        table.add_column(
            name, justify="right" if right else "left", no_wrap=True, overflow="ellipsis", width=widths[name]
        )
    tokens = inspection.tokens
    for place, row in enumerate(ranked.tolist(), 1):
        token = inspection.token_of(row, by)
        score = float(inspection.scores[by][row])
        gates = [f"{tokens[f'gate:{name}'][token]:.2g}" for name in gated]
        table.add_row(
            str(place), "-" if np.isnan(score) else f"{score:.3g}", Text(visible(wheres[place - 1])),
            context(inspection, token, widths["token in context"]), f"{np.exp(tokens['log_p'][token]):.2g}",
            Text(f"{inspection.texts[inspection.other[token]]!r} {np.exp(tokens['other_log_p'][token]):.2g}"), *gates,
        )  # fmt: skip
    return table


def context(inspection: Inspection, token: int, width: int) -> Text:
    """A token between its neighbours, in one line of ``width`` characters."""
    row = inspection.row_of(token)
    first, last = int(inspection.start[row]), int(inspection.start[row + 1])
    spans = [(max(first, token - NEAR), token), (token, token + 1), (token + 1, min(last, token + 1 + NEAR))]
    left, middle, right = (visible(inspection.text_of(*span).replace("\n", " ")) for span in spans)
    room = max(0, width - len(middle) - 2)
    left = left[-(room - min(len(right), room // 2)) :] if room else ""
    return Text.assemble((left, "dim"), (f"{MARKS[0]}{middle}{MARKS[1]}", "bold red"), (right, "dim"))


def row_text(inspection: Inspection, row: int, *, marked: bool) -> Text:
    """A row's answer, each token's background by its conflict; or, if ``marked``, confident conflicts in brackets."""
    text = Text()
    for token in range(int(inspection.start[row]), int(inspection.start[row + 1])):
        piece = visible(inspection.texts[inspection.text[token]])
        value = float(inspection.tokens["conflict"][token])
        if marked:
            text.append(f"{MARKS[0]}{piece}{MARKS[1]}" if value >= CONFIDENT else piece)
        else:
            text.append(piece, style=shade(value))
    return text.append("\n")


def shade(value: float) -> Style:
    """White text on red, as strong as the conflict; none below a fifth, where it would only be noise."""
    if value < 0.2:
        return Style()
    return Style(
        color="white", bgcolor=f"rgb({int(60 + 150 * value)},{int(40 * (1 - value))},20)", bold=value >= CONFIDENT
    )


def tail(where: str, width: int) -> str:
    """The end of a row's place, which distinguishes rows.

    >>> tail("data/gsm8k/train.jsonl.gz:96", 28)
    'train.jsonl.gz:96'
    """
    name = where.rsplit("/", 1)[-1]
    return name if len(name) <= width else "…" + name[-(width - 1) :]
