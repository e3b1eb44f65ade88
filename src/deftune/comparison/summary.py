"""The summary of a comparison: scores (`scores`), token statistics, cost."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deftune._version import __version__
from deftune.artifacts.files import write_atomic
from deftune.comparison.grid import Cell, Comparison, Evaluation
from deftune.comparison.scores import Scores, averaged_columns, view_record
from deftune.data.mixing import is_exchanged
from deftune.evaluation.statistics import mean_over_tokens
from deftune.evaluation.suites import task_named
from deftune.tokens.conflict import is_confident_conflict
from deftune.tokens.passes import entropy_column
from deftune.tokens.table import read_rows_table, read_token_table, token_table_facts

Record = dict[str, Any]
BEST = "best"
REVISION = 4  # of the numbers: raise it with a change of how they are computed, so that stored summaries are made anew
TOKEN_COLUMNS = ("nll", "p", "concentration", "entropy")


Finished = Mapping[str, Sequence[Cell]]  # `Comparison.finished_cells` of one regime


def summarize_evaluation(finished: Finished, evaluation: Evaluation) -> Record:
    """One suite of a regime: views (each temperature, and the best), their rows and paired differences."""
    scores: dict[str, Scores] = {}
    notes: dict[str, str] = {}
    missing: dict[str, str] = {}
    cut: dict[str, dict[str, float]] = {}
    constant: dict[str, Record] = {}
    for objective, cells in finished.items():
        scores[objective] = Scores()
        rows: list[Record] = []
        for cell in cells:
            result = cell.result(evaluation)
            with readable(result.folder / "summary.json", cell):
                summary = result.summary()
                notes |= {str(row["task"]): str(row["note"]) for row in summary["rows"] if row["note"]}
                rows += summary["rows"]
                constant |= {str(row["task"]): row["constant"] for row in summary["rows"] if "constant" in row}
                missing |= {str(task): str(why) for task, why in summary["missing"].items()}
            with readable(result.graded, cell):
                scores[objective].add(cell, result.read_graded())
        cut[objective] = {f"T={t:g}": cut_share(row for row in rows if row["temperature"] == t)
                          for t in evaluation.sweep()}  # fmt: skip
    if not scores:
        return {"title": evaluation.title, "views": [], "notes": notes, "missing": missing, "cut_off": cut,
                "constant": constant}  # fmt: skip
    columns = list(next(iter(next(iter(scores.values())).values.values())))
    averaged = averaged_columns(evaluation, columns)
    sweep = evaluation.sweep()
    views: list[tuple[str, float | None]] = [(f"T={t:g}", t) for t in sweep]
    if len(sweep) > 1:
        views.append((BEST, None))
    return {
        "title": evaluation.title, "suite": evaluation.suite, "columns": columns, "averaged": averaged,
        "kinds": {column: kind_of(evaluation, column) for column in columns}, "samples": evaluation.samples_each(),
        "notes": notes, "missing": missing, "cut_off": cut, "constant": constant,
        "views": [view_record(name, t, scores, columns, averaged) for name, t in views],
    }  # fmt: skip


def cut_share(rows: Iterable[Record]) -> float:
    """The share of the answers that ended at the limit of tokens; 0 without answers.

    >>> cut_share([{"finished": {"stop": 1, "length": 3}}])
    0.75
    """
    counts = [row.get("finished", {}) for row in rows]
    total = sum(sum(count.values()) for count in counts)
    return sum(count.get("length", 0) for count in counts) / total if total else 0.0


@contextmanager
def readable(path: Path, cell: Cell) -> Generator[None]:
    """Refuse a damaged file; the error names the file and the command that writes it again."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, ValueError) and str(path.parent) in str(error):
            raise  # named already
        raise ValueError(
            f"{path}: is damaged ({type(error).__name__}: {error}); remove it and {cell.folder / 'cell.json'}, and "
            f"`deftune compare run {cell.comparison.folder}` makes it anew"
        ) from error


def kind_of(evaluation: Evaluation, column: str) -> str:
    name = column.removesuffix(" similarity")
    own = {task.name: task.kind for task, _ in evaluation.wanted()}
    return own[name] if name in own else task_named(name).kind


# --- tokens and cost --------------------------------------------------------------------------------------------------


def token_columns(cells: Sequence[Cell]) -> tuple[Tensor, dict[str, Tensor]]:
    """The row of every held-out token, and each token's numbers: means over the cells, which are of several seeds."""
    found: dict[str, list[Tensor]] = {}
    for cell in cells:
        table = read_token_table(cell.token_table, ["row", "log_p", "p", "concentration", "entropy", "rank", "is_eos"])
        columns = {name: tensor_of(table, name) for name in table.column_names}
        columns |= {"nll": -columns.pop("log_p"), "top1": columns.pop("rank") == 0}
        columns |= {"share_below_1e-3": columns["p"] < 1e-3, "share_above_half": columns["p"] > 0.5}
        for name, values in columns.items():
            found.setdefault(name, []).append(values)
    rows = found.pop("row")[0]
    return rows, {name: torch.stack(parts).double().mean(0) for name, parts in found.items()}


def tensor_of(table: Any, name: str) -> Tensor:
    return torch.from_numpy(table[name].to_numpy().copy())  # Arrow's own memory is read-only


def token_record(cells: Sequence[Cell]) -> Record:
    """Means over held-out tokens with intervals over rows; ``end_p``: mean p of end tokens, None without any."""
    rows, columns = token_columns(cells)
    wrong, record = exchanged_record(cells[0].token_table, rows, columns)
    rows, columns = rows[~wrong], {name: values[~wrong] for name, values in columns.items()}
    record |= {"tokens": len(rows), "rows": int(rows.unique().numel()), "seeds": len(cells)}
    record |= {name: mean_over_tokens(columns[name], rows)._asdict() for name in TOKEN_COLUMNS}
    ends = columns["p"][columns["is_eos"] > 0]
    record["end_p"] = float(ends.mean()) if len(ends) else None
    return record | {name: float(columns[name].mean()) for name in ("share_below_1e-3", "share_above_half")}


def exchanged_record(path: Path, rows: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, Record]:
    """Which tokens of a table are of rows with another row's answer (`exchange` of a source), and their numbers.

    The numbers stand under ``exchanged`` and all others leave these tokens out. Where no row was exchanged, or every
    row was, no token is marked and there is no such record.
    """
    table = read_rows_table(path)
    places = [row for row, where in zip(table["row"].to_pylist(), table["where"].to_pylist()) if is_exchanged(where)]
    wrong = torch.isin(rows, torch.tensor(places, dtype=rows.dtype))
    if not bool(wrong.any()) or bool(wrong.all()):
        return torch.zeros_like(wrong), {}
    means = {name: mean_over_tokens(columns[name][wrong], rows[wrong])._asdict() for name in ("nll", "p")}
    return wrong, {"exchanged": {"tokens": int(wrong.sum()), "rows": len(places), **means}}


def table_record(path: Path) -> Record:
    """The numbers of one token table: means with 95% intervals over rows, confident conflicts by kind, end tokens.

    ``conflicts`` is their share of the tokens, ``conflict_loss`` of the NLL. ``conflict_kinds`` are counts: end tokens,
    other format tokens, blanks and line breaks, and the rest. ``end_rows`` is the share of rows with a supervised end
    token, ``end_p`` the mean p of these tokens (None where there is none), ``top1`` the share of tokens that are the
    model's likeliest. ``exchanged`` has the numbers of rows with another row's answer, where there are any; all others
    leave these rows out. ``entropies`` has the mean entropy at other temperatures, where the table has them.
    """
    names = ["row", "text", "log_p", "p", "concentration", "entropy", "rank", "is_eos", "is_format"]
    entropies = {f"{t:g}": entropy_column(t) for t in token_table_facts(path).get("temperatures", ())}
    names += entropies.values()
    table = read_token_table(path, names)
    if not table.num_rows:
        raise ValueError(f"{path}: holds no tokens; were all rows over the maximum length?")
    columns = {name: tensor_of(table, name) for name in names if name != "text"}
    columns["nll"] = -columns["log_p"].double()
    wrong, exchanged = exchanged_record(path, columns["row"], columns)
    columns = {name: values[~wrong] for name, values in columns.items()}
    rows, ends, nll = columns["row"], columns["is_eos"], columns["nll"]
    confident = is_confident_conflict(columns["log_p"], columns["concentration"])
    blank = torch.tensor([not text.strip() for text in table["text"].to_pylist()])[~wrong]
    means = {name: columns[name] for name in TOKEN_COLUMNS} | {"conflicts": confident, "top1": columns["rank"] == 0}
    kinds = {"end": ends, "format": columns["is_format"] & ~ends, "blank": blank & ~columns["is_format"] & ~ends}
    counts = {kind: int((confident & mine).sum()) for kind, mine in kinds.items()}
    num_rows = int(rows.unique().numel())
    return {
        "tokens": len(rows), "rows": num_rows,
        **{name: mean_over_tokens(values, rows)._asdict() for name, values in means.items()},
        "conflict_loss": float(nll[confident].sum() / nll.sum()) if nll.sum() > 0 else 0.0,
        "conflict_kinds": counts | {"other": int(confident.sum()) - sum(counts.values())},
        "end_rows": int(rows[ends].unique().numel()) / num_rows,
        "end_p": float(columns["p"][ends].double().mean()) if bool(ends.any()) else None,
        **exchanged,
        **({"entropies": {temperature: mean_over_tokens(columns[name], rows)._asdict()
                          for temperature, name in entropies.items()}} if entropies else {}),
    }  # fmt: skip


def check_rows(first: Cell, *others: Cell) -> None:
    """Refuse token tables of different rows: the held-out rows were changed between two cells."""
    rows = read_rows_table(first.token_table)
    for cell in others:
        if not read_rows_table(cell.token_table).equals(rows):
            raise ValueError(
                f"{cell.token_table}: is of other rows than {first.token_table}, so the two cannot be compared: the "
                f"data of `tokens` was changed in between; restore it, remove the file and {cell.folder / 'cell.json'}"
                f", and `deftune compare run {cell.comparison.folder}` measures the cell again"
            )


def summarize_tokens(finished: Finished) -> list[Record]:
    """A line per objective and learning rate."""
    if finished:
        check_rows(*(cell for cells in finished.values() for cell in cells))
    lines: list[Record] = []
    for objective, cells in finished.items():
        for rate in sorted({cell.learning_rate for cell in cells}, key=lambda rate: rate or 0.0):
            record = token_record([cell for cell in cells if cell.learning_rate == rate])
            lines.append({"objective": objective, "learning_rate": rate, **record})
    return lines


def summarize_cost(finished: Finished) -> dict[str, Record]:
    """Means over an objective's cells; the peak is the largest."""
    found: dict[str, Record] = {}
    for objective, cells in finished.items():
        if costs := [cost for cell in cells if (cost := cell.state().get("cost"))]:  # the untuned model has none
            seconds, tokens = (math.fsum(cost[key] for cost in costs) for key in ("seconds", "tokens"))
            found[objective] = {
                "cells": len(costs), "seconds": seconds / len(costs), "tokens": tokens / len(costs),
                "tokens_per_second": tokens / seconds if seconds else 0.0,
                "memory_gib": max(cost["memory_gib"] for cost in costs),
            }  # fmt: skip
    return found


def focus_record(finished: Finished) -> list[float] | None:
    """DEFT's mean focus at the first step, after four, and at the last, over its cells; None where it was not run."""
    found: list[list[float]] = []
    for cell in finished.get("deft", ()):
        records = cell.train_records()
        if values := [float(r["focus"]) for r in records if isinstance(r.get("focus"), int | float)]:
            found.append([values[0], values[min(4, len(values) - 1)], values[-1]])
    return [math.fsum(column) / len(column) for column in zip(*found)] if found else None


# --- the whole --------------------------------------------------------------------------------------------------------


def summarize_comparison(comparison: Comparison) -> Record:
    """Everything, unrounded, from the finished cells; kept in `comparison.json` until a cell changes."""
    path = Path(comparison.folder) / "comparison.json"
    cells = {cell.name: {"folder": str(cell.folder), **cell.state()} for cell in comparison.cells()}
    config = json.loads(comparison.model_dump_json())
    before = read_summary(path)
    if before and before["cells"] == json.loads(json.dumps(cells)) and before["config"] == config:
        return before
    regimes: dict[str, Record] = {}
    for name, regime in comparison.regimes.items():
        finished = comparison.finished_cells(name)
        regimes[name] = {
            "model": next(cell for cell in comparison.cells() if cell.regime == name).config.model.name,
            "evaluations": [summarize_evaluation(finished, evaluation) for evaluation in regime.evaluate],
            "tokens": summarize_tokens(finished) if regime.tokens else [],
            "cost": summarize_cost(finished),
            "focus": focus_record(finished),
        }
    summary: Record = {"config": config, "cells": cells, "regimes": regimes}
    write_atomic(path, json.dumps({**summary, "sha256": digest_of(summary)}, indent=1, allow_nan=False))
    return summary


def digest_of(summary: Record) -> str:
    """Of a summary and of the code that made it: other code may compute other numbers."""
    return hashlib.sha256(f"{__version__} {REVISION} {json.dumps(summary, sort_keys=True)}".encode()).hexdigest()


def read_summary(path: Path) -> Record | None:
    """The stored summary; None where there is none, where its file was changed, or where another version wrote it."""
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        digest = summary.pop("sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return summary if digest == digest_of(summary) else None
