"""A comparison's summary as tables, for the terminal, a paper and the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deftune.artifacts.names import shown_model
from deftune.comparison.grid import BASE
from deftune.comparison.summary import BEST
from deftune.comparison.tables import AVERAGE, ResultTable, Score

Record = Mapping[str, Any]


def score_tables(summary: Record) -> list[ResultTable]:
    """A table for every regime, suite and view of a comparison's summary."""
    return [view_table(regime, about["model"], evaluation, view) for regime, about, evaluation, view in views(summary)]


def evaluations(summary: Record) -> Iterator[tuple[str, Record]]:
    """(regime's name, evaluation) of every suite of a summary."""
    for regime, about in summary["regimes"].items():
        for evaluation in about["evaluations"]:
            yield regime, evaluation


def views(summary: Record) -> Iterator[tuple[str, Record, Record, Record]]:
    """(regime's name, the regime, evaluation, view) of every table of a summary."""
    for regime, evaluation in evaluations(summary):
        for view in evaluation["views"]:
            yield regime, summary["regimes"][regime], evaluation, view


def view_table(regime: str, model: str, evaluation: Record, view: Record, rank_base: bool = False) -> ResultTable:
    rows: dict[str, dict[str, Score]] = {}
    for objective, row in view["rows"].items():
        rows[objective] = {
            column: Score(100 * cell["value"], percent(cell["low"]), percent(cell["high"]), cell["items"], row["seeds"])
            for column, cell in row["columns"].items()
        }
    averaged = evaluation["averaged"]
    columns = (*evaluation["columns"], *([AVERAGE] if len(averaged) > 1 else []))
    return ResultTable(
        f"{regime}: {shown_model(model)}, {evaluation['title']}, {view_title(view['name'])}", columns, rows,
        rank_base=rank_base, notes=tuple(view_notes(evaluation, view)),
    )  # fmt: skip


def percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def view_title(name: str) -> str:
    return "each at its best temperature" if name == BEST else name


def view_notes(evaluation: Record, view: Record) -> list[str]:
    notes = [f"{task}: {note}." for task, note in evaluation["notes"].items()]
    if evaluation["missing"]:
        notes.append(f"Without {', '.join(evaluation['missing'])}: no data.")
    if cut := cut_off(evaluation, view["name"]):
        texts = [f"{name} {share:.0%}" for name, share in cut.items()]
        notes.append(f"Answers cut off at the limit of tokens (max_new_tokens): {', '.join(texts)}.")
    if constant := below_constant(evaluation):
        texts = [f"{task} ({text})" for task, text in constant.items()]
        notes.append(f"No tuned model is above a constant answer: {', '.join(texts)}.")
    if (averaged := evaluation["averaged"]) and len(averaged) > 1:
        notes.append(f"The average is over {', '.join(averaged)}.")
    chosen = {name: list(dict.fromkeys(setting_text(*o) for o in row["chosen"])) for name, row in view["rows"].items()}
    if view["name"] == BEST or any(row.get("options", 1) > 1 for row in view["rows"].values()):
        texts = [f"{name} {' and '.join(settings)}" for name, settings in chosen.items()]
        notes.append(f"Each half of the items at what was best on the other half: {'; '.join(texts)}.")
    by_seed = {name: row["by_seed"] for name, row in view["rows"].items() if row["by_seed"]}
    if by_seed:
        seeds = sorted({seed for row in by_seed.values() for seed in row}, key=int)
        texts = [f"{name} {', '.join(f'{100 * row[s]:.2f}' if s in row else '-' for s in seeds)}"
                 for name, row in by_seed.items()]  # fmt: skip
        what = "average" if len(averaged) > 1 else averaged[0]
        notes.append(f"By seed ({', '.join(seeds)}), {what}: {'; '.join(texts)}.")
    return notes


MOST_CUT = 0.1  # of the answers; with more the limit of tokens is measured, not only the model


def cut_off(evaluation: Record, view: str = BEST) -> dict[str, float]:
    """Objective -> the share of its answers that were cut off, at the worst temperature, where it is above a tenth.

    >>> cut_off({"cut_off": {"base": {"T=0": 0.7, "T=1": 0.6}, "nll": {"T=0": 0.02, "T=1": 0.0}}}, "T=1")
    {'base': 0.6}
    """
    shares = {name: max((share for title, share in by.items() if view in (title, BEST)), default=0.0)
              for name, by in evaluation["cut_off"].items()}  # fmt: skip
    return {name: share for name, share in shares.items() if share > MOST_CUT}


def below_constant(evaluation: Record) -> dict[str, str]:
    """Task -> the constant answer that no tuned model is above, each at its best, as "always A: 32.9"."""
    found: dict[str, str] = {}
    for task, constant in evaluation["constant"].items():
        rows = evaluation["views"][-1]["rows"] if evaluation["views"] else {}
        scores = [row["columns"][task]["value"] for name, row in rows.items() if name != BASE]
        if scores and max(scores) <= constant["score"]:
            found[task] = f"always {constant['answer']}: {100 * constant['score']:.1f}"
    return found


def setting_text(temperature: float, rate: float | None) -> str:
    return f"T={temperature:g}" + ("" if rate is None else f", lr {rate:g}")


def difference_lines(evaluation: Record, view: Record) -> list[list[str]]:
    """a - b in points, with interval and Holm's p: rows of text, the header first."""
    lines = [["", "a - b", "points", "95% interval", "p", "p (Holm)"]]
    for record in view["differences"]:
        low, high = record["low"], record["high"]
        interval = "" if low is None or high is None else f"[{100 * low:+.2f}, {100 * high:+.2f}]"
        column = evaluation["averaged"][0] if record["column"] == AVERAGE and len(evaluation["averaged"]) == 1 else (
            record["column"]
        )  # fmt: skip
        lines.append([column, f"{record['a']} - {record['b']}", f"{100 * record['difference']:+.2f}", interval,
                      f"{record['p']:.3g}", f"{record['p_holm']:.3g}"])  # fmt: skip
    return lines


def token_lines(records: Sequence[Record]) -> list[list[str]]:
    """Held-out tokens: means with intervals; rows with another row's answer have a column of their own."""
    lines = [
        ["objective", "lr", "seeds", "tokens", "NLL", "mean p", "sum P^2", "entropy", "p < 0.001", "p > 0.5", "end p"]
    ]
    exchanged = any("exchanged" in record for record in records)
    lines[0] += ["mean p of exchanged answers"] if exchanged else []
    for record in records:
        means = [record[name] for name in ("nll", "p", "concentration", "entropy")]
        means += [record["exchanged"]["p"]] if "exchanged" in record else []
        cells = [f"{mean['mean']:.3f} [{mean['low']:.3f}, {mean['high']:.3f}]" for mean in means]
        rate = "" if record["learning_rate"] is None else f"{record['learning_rate']:g}"
        shares = [f"{record[name]:.1%}" for name in ("share_below_1e-3", "share_above_half")]
        shares.append("-" if record["end_p"] is None else f"{record['end_p']:.3f}")
        lines.append([record["objective"], rate, str(record["seeds"]), f"{record['tokens']:,}", *cells[:4], *shares,
                      *cells[4:]])  # fmt: skip
    return lines


def cost_lines(cost: Mapping[str, Record]) -> list[list[str]]:
    """What training took, a cell on average."""
    lines = [["objective", "cells", "seconds", "tokens", "tokens/s", "peak GiB"]]
    for objective, record in cost.items():
        lines.append([objective, str(record["cells"]), f"{record['seconds']:.1f}", f"{record['tokens']:,.0f}",
                      f"{record['tokens_per_second']:,.0f}", f"{record['memory_gib']:.2f}"])  # fmt: skip
    return lines
