"""Learning conflicts: which tokens a model learns between two checkpoints, and which it forgets for them.

For a token with target probability p and loss L at two checkpoints:

    dP = p_after - p_before,   dL = L_after - L_before

    Q2  dP < 0, dL > 0   forgotten (upper left)    Q1  dP > 0, dL > 0
    Q3  dP < 0, dL < 0                             Q4  dP > 0, dL < 0   learned (lower right)

The paper names the axes, Q2, Q4 and "high and low confidence", and leaves the rest open. Here: the axes are dP and dL
in this order, since it finds the forgotten tokens in the upper left; a token whose p moved by no more than
``threshold`` (0.01) is unchanged and in no quadrant, else rounding would share out all tokens between learned and
forgotten; a token is confident where p_before > 0.5, which is what the paper calls high confidence elsewhere. With
L = -log p, as in the paper's figure, dL is negative where dP is positive: Q1 and Q3 are empty by definition. The loss
of an objective with a focus can rise while p rises; ``objective`` shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from deftune.inspection.style import PAGE_INCHES, columns_of, distinct, new_figure, styled
from deftune.objectives import Focus, Objective
from deftune.objectives import objective as parse_objective
from deftune.objectives.stats import from_columns
from deftune.tokens.table import table_facts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONFIDENT_P = 0.5
THRESHOLD = 0.01
DRAWN_POINTS = 4000  # points of a panel: more would overlap and make the file large
KEY = ("row", "position", "token_id")
NEEDED = (*KEY, "text", "log_p", "concentration", "entropy")
"""The columns of a token table that this needs."""

FORGOTTEN, LEARNED, UNCHANGED = "#882255", "#56B4E9", "#BBBBBB"
SHARES = {
    "learned": "learned\nof all",
    "forgotten": "forgot\nof all",
    "forgotten_confident": "high\nof Q2",
    "forgotten_unsure": "low\nof Q2",
    "learned_confident": "high\nof Q4",
    "learned_unsure": "low\nof Q4",
}


def conflict_table(
    before: pa.Table, after: pa.Table, *, pair: str = "", objective: str | Objective = "nll",
    threshold: float = THRESHOLD,
) -> pa.Table:  # fmt: skip
    """dP, dL and the quadrant of every token, from two token tables of the same rows.

    Columns: pair, row, position, token_id, text, p_before, p_after, d_p, d_l, quadrant (0 where unchanged), confident.
    """
    if not 0 <= threshold < 1:
        raise ValueError(f"threshold: the smallest change of p that counts, from 0 to 1, got {threshold}")
    check_same_tokens(before, after)
    objective = parse_objective(objective)
    p_before, loss_before = p_and_loss(before, objective)
    p_after, loss_after = p_and_loss(after, objective)
    d_p, d_l = p_after - p_before, loss_after - loss_before
    quadrant = np.select(
        [(d_p > 0) & (d_l > 0), (d_p < 0) & (d_l > 0), (d_p < 0) & (d_l < 0), (d_p > 0) & (d_l < 0)], [1, 2, 3, 4], 0
    )
    quadrant[np.abs(d_p) <= threshold] = 0
    columns: dict[str, Any] = {
        "pair": pa.array([pair] * before.num_rows, pa.string()),
        **{name: before[name] for name in (*KEY, "text")},
        "p_before": p_before, "p_after": p_after, "d_p": d_p, "d_l": d_l,
        "quadrant": quadrant.astype(np.int8), "confident": p_before > CONFIDENT_P,
    }  # fmt: skip
    return pa.table(columns)


def conflict_tables(
    tables: Sequence[pa.Table], *, objective: str | Objective = "nll", threshold: float = THRESHOLD
) -> pa.Table:
    """`conflict_table` of one or more pairs: before, after, before, after, ..., each named by `pair_name`."""
    if len(tables) % 2:
        raise ValueError(f"conflicts: tables come in pairs, BEFORE AFTER; got {len(tables)}")
    pairs: dict[str, pa.Table] = {}
    for before, after in zip(tables[::2], tables[1::2]):
        name = pair_name(before, after)
        if name in pairs:
            raise ValueError(f"conflicts: two pairs are called {name!r}; draw them in two figures")
        pairs[name] = conflict_table(before, after, pair=name, objective=objective, threshold=threshold)
    return pa.concat_tables(pairs.values())


def check_same_tokens(before: pa.Table, after: pa.Table) -> None:
    """Refuse tables whose lines are not about the same tokens."""
    advice = "make both with the same data, --rows, --template and --max-length"
    if before.num_rows != after.num_rows:
        raise ValueError(f"the two tables have {before.num_rows:,} and {after.num_rows:,} tokens; {advice}")
    for name in KEY:
        one, other = (np.asarray(table[name]) for table in (before, after))
        if len(different := np.flatnonzero(one != other)):
            at = int(different[0])
            row, position = int(before["row"][at].as_py()), int(before["position"][at].as_py())
            raise ValueError(
                f"the two tables are not about the same tokens: they differ first at row {row}, position {position} "
                f"({name} {one[at]} and {other[at]}); {advice}"
            )


def p_and_loss(table: pa.Table, objective: Objective) -> tuple[np.ndarray, np.ndarray]:
    """(p, the objective's loss) of a token table, in float64."""
    log_p, concentration, entropy = (
        torch.from_numpy(np.array(table[name], dtype=np.float64)) for name in ("log_p", "concentration", "entropy")
    )
    if not isinstance(objective, Focus) or objective.kind != "local":
        raise ValueError(f"conflicts: the loss of `{objective}` cannot be had from a token table; use nll or deft")
    # a loss with a focus does not depend on V
    stats = from_columns(log_p, entropy, concentration.log(), vocab_size=1)
    return log_p.exp().numpy(), objective.loss(stats).numpy()


def pair_name(before: pa.Table, after: pa.Table) -> str:
    """What a pair of token tables is called: the run and its steps, or the two models."""
    models = [str(table_facts(table).get("model", name)) for name, table in (("before", before), ("after", after))]
    runs, steps = zip(
        *(name.rsplit(":", 1) if name.rsplit(":", 1)[-1].isdecimal() else (name, "end") for name in models)
    )
    if runs[0] == runs[1]:
        return f"{Path(runs[0]).name}, steps {steps[0]} to {steps[1]}"
    # a tuned model's description may end in the model it was tuned from, which is the other one
    return " to ".join(model.partition(", tuned from ")[0] for model in models)


def conflict_shares(table: Any) -> list[dict[str, Any]]:
    """The bars of each pair: learned and forgotten among all tokens, high and low confidence within Q2 and Q4.

    The shares within a quadrant are NaN where it is empty.
    """
    columns = columns_of(table, ("pair", "d_p", "quadrant", "confident"), "conflicts")
    lines: list[dict[str, Any]] = []
    for pair in distinct(columns["pair"].tolist()):
        mine = columns["pair"] == pair
        quadrant, confident, d_p = (columns[name][mine] for name in ("quadrant", "confident", "d_p"))
        confident = confident.astype(bool)
        line: dict[str, Any] = {"pair": pair, "tokens": len(quadrant)}
        line["learned"] = float(np.mean((quadrant != 0) & (d_p > 0)))
        line["forgotten"] = float(np.mean((quadrant != 0) & (d_p < 0)))
        line |= {f"q{number}": float(np.mean(quadrant == number)) for number in (1, 2, 3, 4)}
        for name, number in (("forgotten", 2), ("learned", 4)):
            inside = confident[quadrant == number]
            line[f"{name}_confident"] = float(np.mean(inside)) if len(inside) else float("nan")
            line[f"{name}_unsure"] = 1 - line[f"{name}_confident"]
        lines.append(line)
    return lines


@styled
def plot_conflicts(table: Any) -> Figure:
    """Above, dP against dL, a panel per pair of checkpoints; below, the bars of `conflict_shares`, confident hatched.

    Of more than 4,000 tokens a panel shows a sample, and says so; the bars count all.
    """
    columns = columns_of(table, ("pair", "d_p", "d_l", "quadrant", "confident"), "conflicts")
    shares = conflict_shares(table)
    width = min(PAGE_INCHES, max(3.35, 2.3 * len(shares)))
    figure, axes = new_figure(2, len(shares), (width, 3.9), height_ratios=(1.5, 1), sharey="row")
    finite = np.abs(columns["d_l"][np.isfinite(columns["d_l"])])
    limit = 1.05 * max(float(finite.max(initial=0.0)), 0.1)  # smaller changes are seen to be small
    for place, line in enumerate(shares):
        mine = np.flatnonzero(columns["pair"] == line["pair"])
        drawn = np.sort(np.random.default_rng(0).permutation(mine)[:DRAWN_POINTS])
        _scatter(axes[0][place], columns["d_p"][drawn], columns["d_l"][drawn], columns["quadrant"][drawn], limit)
        note = (
            f"\n{len(drawn):,} of {len(mine):,} tokens drawn" if len(drawn) < len(mine) else f"\n{len(mine):,} tokens"
        )
        characters = int(16 * width / len(shares))  # of a title above a panel
        axes[0][place].set_title("\n".join(wrap(str(line["pair"]), characters)) + note)
        _bars(axes[1][place], line)
    axes[0][0].set_ylabel("change of loss, dL")
    axes[1][0].set_ylabel("share")
    return figure


def _scatter(axis: Any, d_p: np.ndarray, d_l: np.ndarray, quadrant: np.ndarray, limit: float) -> None:
    axis.axhline(0, color="black", lw=0.5)
    axis.axvline(0, color="black", lw=0.5)
    for chosen, colour, marker in (
        (quadrant == 0, UNCHANGED, "o"),
        ((quadrant != 0) & (d_p > 0), LEARNED, "o"),
        ((quadrant != 0) & (d_p < 0), FORGOTTEN, "^"),
    ):
        axis.scatter(d_p[chosen], d_l[chosen], s=3, c=colour, marker=marker, lw=0, alpha=0.6, rasterized=True)
    axis.set(xlim=(-1.03, 1.03), ylim=(-limit, limit), xlabel="change of probability, dP")
    axis.set_xticks([-0.5, 0, 0.5])
    for name, x, y in (("Q1", 0.97, 0.97), ("Q2", 0.03, 0.97), ("Q3", 0.03, 0.03), ("Q4", 0.97, 0.03)):
        side = {"ha": "right" if x > 0.5 else "left", "va": "top" if y > 0.5 else "bottom"}
        axis.text(x, y, name, transform=axis.transAxes, fontsize=7, **side)


def _bars(axis: Any, line: dict[str, Any]) -> None:
    for place, name in enumerate(SHARES):
        height = 0.0 if np.isnan(line[name]) else line[name]
        colour = LEARNED if name.startswith("learned") else FORGOTTEN
        hatch = "////" if name.endswith("_confident") else ""
        axis.bar(place, height, color=colour, edgecolor="white" if hatch else colour, hatch=hatch, width=0.75)
        axis.text(place, height + 0.02, "-" if np.isnan(line[name]) else f"{height:.0%}", ha="center", fontsize=6)
    axis.set_xticks(range(len(SHARES)), list(SHARES.values()), fontsize=5.5)
    axis.set_ylim(0, 1.12)
    axis.set_yticks([0, 0.5, 1], ["0%", "50%", "100%"])
    axis.spines[["top", "right"]].set_visible(False)
