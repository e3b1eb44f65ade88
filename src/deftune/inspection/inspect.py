r"""A dataset through a model's eyes: which tokens contradict what the model is sure of, and which rows they spoil.

Token by token, with p the target's probability and q that of the likeliest other token:

    conflict = 1 - p^(sum P^2)              in [0, 1]: near 1 where the model is sure, of something else
    margin   = max(0, log q - log p)        in nats: how much rather the model would have written the other token

``conflict`` is 1 - gate of DEFT: the part of NLL's gradient that DEFT takes away. An undecided model (small sum P^2)
leaves it near 0 however small p is, so it separates *confident conflicts* from what is merely hard. For any other
objective the same reading holds of its own gate. It saturates, so it cannot order the strongest cases; ``margin``
does.

A row is scored by where its conflicts sit (`row_scores`). What each score is worth for finding wrong labels was
measured: benchmarks/noise.py.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from deftune.artifacts.display import QUIET, Display
from deftune.evaluation.extraction import extract_final
from deftune.objectives import Objective
from deftune.tokens.conflict import CONFIDENT, conflict
from deftune.tokens.passes import parse_objectives
from deftune.tokens.table import (
    DEFAULT,
    make_token_table,
    read_rows_table,
    read_token_table,
    table_facts,
    table_objectives,
)

MOSTLY = 0.5
"""A row's signal is mostly noise where confident conflicts hold at least this share of its NLL."""

SHORT_ANSWER = 12  # tokens: an answer of one short line is all answer


class Score(NamedTuple):
    """A score of a row: its name, its label in the output, and its meaning."""

    name: str
    label: str
    about: str


ROW_SCORES = (
    Score("answer", "answer margin", "Nats by which the model prefers another token where the row states its answer"),
    Score("conflict", "conflict", "Mean over tokens of q log(q/p): how surely and how much the model disagrees"),
    Score("noise", "loss on conflicts", "Share of the row's NLL that sits on confident conflicts"),
    Score("mean_nll", "mean NLL", "Mean of -log p: the row's loss"),
    Score("max_nll", "max NLL", "The largest -log p of its tokens"),
    Score("mean_p", "mean p", "Mean probability of its tokens"),
)


def margin(log_p: np.ndarray, other_log_p: np.ndarray) -> np.ndarray:
    """Nats by which the model prefers another token, 0 where it prefers none: max(0, log q - log p).

    >>> margin(np.log([0.01, 0.9]), np.log([0.9, 0.05])).round(2)
    array([4.5, 0. ])
    """
    return np.maximum(0.0, other_log_p - log_p)


@dataclass(frozen=True)
class Inspection:
    """A token table, its rows, and the scores of both.

    Tokens stand in the rows' order; row i has the tokens ``start[i]`` to ``start[i + 1]``. ``texts`` are the distinct
    pieces of text, ``text[t]`` and ``other[t]`` the places in it of a token and of the likeliest other one.
    """

    tokens: dict[str, np.ndarray]  # the table's numbers, and conflict and margin
    texts: list[str]
    text: np.ndarray
    other: np.ndarray
    start: np.ndarray  # [rows + 1]
    rows: list[dict[str, Any]]
    scores: dict[str, np.ndarray]
    answers: np.ndarray  # bool, [tokens]: where a row states its answer
    stated: list[str | None]  # [rows]: that answer
    causes: dict[str, np.ndarray]  # by score, [rows]: the token that contributes most to the row's score
    objectives: list[str]
    facts: dict[str, Any]

    @property
    def num_tokens(self) -> int:
        return int(self.start[-1])

    @property
    def confident(self) -> np.ndarray:
        return self.tokens["conflict"] >= CONFIDENT

    def row_of(self, token: int) -> int:
        return int(np.searchsorted(self.start, token, side="right")) - 1

    def text_of(self, first: int, last: int) -> str:
        return "".join(self.texts[i] for i in self.text[first:last])

    def ranked_rows(self, by: str | None = None, min_score: float | None = None) -> np.ndarray:
        """Rows, the most suspicious first. Rows that have no such score (no stated answer) follow, by conflict.

        ``min_score`` leaves the rows of at least this score; of ``mean_p``, whose low values are suspicious, at most.
        """
        by = by or self.default_ranking
        if by not in self.scores:
            raise ValueError(f"unknown score {by!r}. Known: {', '.join(self.scores)}")
        key = self.scores[by] if by == "mean_p" else -self.scores[by]  # the least probable row first
        ranked = np.lexsort((-self.scores["conflict"], key))  # NaN sorts last
        if min_score is None:
            return ranked
        return ranked[key[ranked] <= (min_score if by == "mean_p" else -min_score)]

    def score_of(self, row: int, by: str) -> str:
        """The score that ranks a row in the ranking ``by``: rows without that score follow by conflict."""
        return "conflict" if np.isnan(self.scores[by][row]) else by

    def token_of(self, row: int, by: str) -> int:
        """The token that contributes most to the score that ranks the row."""
        return int(self.causes[by][row])

    @property
    def default_ranking(self) -> str:
        """``answer`` where at least half of the rows state one, else ``conflict``."""
        stated = np.isfinite(self.scores["answer"])
        return "answer" if stated.any() and stated.mean() >= 0.5 else "conflict"


def inspect_rows(
    model: str, data: str, *, tokens: str | Path | None = None, objectives: Iterable[str | Objective] = DEFAULT,
    display: Display = QUIET, **options: Any,
) -> Inspection:  # fmt: skip
    """Inspect a dataset with a model: which tokens contradict the model, and which rows hold them.

        from deftune.inspection.inspect import reasons

        inspection = deftune.inspect_rows("smollm2", "train.jsonl", rows=100)
        for row in inspection.ranked_rows()[:10]:
            print(inspection.rows[row]["where"], reasons(inspection, row))

    Model and data are named, as on the command line; `deftune.score_rows` takes a loaded model and rows.

    Args:
        model: a run, ``RUN:STEP``, or any model that `deftune train` takes.
        data: a file, a folder, a hub id, or ``generated:NAME``.
        tokens: where to keep the token table (Parquet); by default it is temporary.
        objectives: objectives whose gates are shown beside each token.
        display: receives the progress.
        options: further arguments of `make_token_table` (rows, format, split, template, mask, max_length, ...).

    Returns:
        An `Inspection`: scores and reasons of every row, and the statistics of every token.
    """
    if not (isinstance(model, str) and isinstance(data, str)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError("inspect_rows: model and data are names or paths; deftune.score_rows takes loaded ones")
    chosen = parse_objectives(objectives)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(tokens) if tokens is not None else Path(folder) / "tokens.parquet"
        make_token_table(path, model, data, objectives=chosen, display=display, **options)
        display.show("ranking the rows")
        return inspect_table(path, list(map(str, chosen)))


def inspect_table(path: str | Path, objectives: Sequence[str] | None = None) -> Inspection:
    """Inspect a token table that `deftune analyze tokens` wrote; ``objectives`` selects among those of the table."""
    table, rows = read_token_table(path), read_rows_table(path)
    have = table_objectives(table)
    if missing := [name for name in objectives or () if name not in have]:
        raise ValueError(
            f"{path}: has no gates of {', '.join(missing)}, only of {', '.join(have)}; make the table anew"
        )
    if table.num_rows != int(rows["num_supervised"].to_numpy().sum()):
        raise ValueError(f"{path}: its rows' file is of another table; write both again with `deftune analyze tokens`")
    if not table.num_rows:
        raise ValueError(f"{path}: holds no tokens; were all rows over the maximum length?")
    return inspect_tables(table, rows, list(objectives or have))


def inspect_tables(table: pa.Table, rows: pa.Table, objectives: list[str]) -> Inspection:
    """The inspection of a token table and its rows."""
    names = ["position", "log_p", "entropy", "concentration", "rank", "other_log_p", "is_eos", "is_format"]
    tokens = {name: table[name].to_numpy() for name in [*names, *(f"gate:{name}" for name in objectives)]}
    tokens["conflict"] = conflict(*(torch.tensor(tokens[name]) for name in ("log_p", "concentration"))).numpy()
    tokens["margin"] = margin(tokens["log_p"], tokens["other_log_p"])
    start = np.concatenate([[0], np.cumsum(rows["num_supervised"].to_numpy())])
    pieces = pa.chunked_array([*table["text"].chunks, *table["other_text"].chunks], pa.string())
    coded = pieces.dictionary_encode().unify_dictionaries().combine_chunks()
    texts: list[str] = coded.dictionary.to_pylist()
    places = coded.indices.to_numpy()
    text, other = places[: table.num_rows], places[table.num_rows :]
    lengths = np.array([len(piece) for piece in texts], dtype=np.int64)
    lines = rows.to_pylist()
    found = [
        stated_answer(line["answer"], lengths[text[first:last]], ~tokens["is_format"][first:last])
        for line, (first, last) in zip(lines, pairwise(start))
    ]
    answers = np.concatenate([np.zeros(0, dtype=bool), *(one.tokens for one in found)])
    scores, causes = row_scores(tokens, start, answers)
    return Inspection(
        tokens=tokens, texts=texts, text=text, other=other, start=start, rows=lines, scores=scores, answers=answers,
        stated=[one.answer for one in found], causes=causes, objectives=objectives,
        facts=table_facts(table),
    )  # fmt: skip


class Stated(NamedTuple):
    """A row's answer, None where it states none, and which of its tokens say it."""

    answer: str | None
    tokens: np.ndarray


def stated_answer(text: str, lengths: np.ndarray, content: np.ndarray) -> Stated:
    r"""The answer that a row states; ``lengths`` are its tokens' in characters, ``content`` those that are no format.

    The answer is what ``\boxed{}``, ``####`` or "the answer is" mark, wherever the text says it; or all of a single
    short line. Running prose states none.

    >>> pieces = ["48+24", " = ", "72", " clips\n", "#### ", "72"]
    >>> lengths = np.array([len(piece) for piece in pieces])
    >>> stated_answer("".join(pieces), lengths, np.ones(6, bool))
    Stated(answer='72', tokens=array([False, False,  True, False, False,  True]))
    """
    ends = np.cumsum(lengths)
    starts = ends - lengths
    content_text = "".join(text[a:b] for a, b, kept in zip(starts, ends, content) if kept)
    found = extract_final(content_text)
    if found.answer and found.how in ("boxed", "marked", "stated"):
        places = [m.span() for m in re.finditer(rf"(?<![\w.,]){re.escape(found.answer)}(?!\w|[.,]\d)", text)]
        if re.fullmatch("[A-Za-z]", found.answer):  # an option's letter means something only where it is the answer
            places = places[-1:]
        chosen = np.zeros(len(lengths), dtype=bool)
        for first, last in places:
            chosen |= (starts < last) & (ends > first)
        if (chosen & content).any():
            return Stated(found.answer, chosen & content)
    elif 0 < content.sum() <= SHORT_ANSWER and "\n" not in content_text.strip():
        return Stated(content_text.strip(), content.copy())
    return Stated(None, np.zeros(len(lengths), dtype=bool))


def row_scores(
    tokens: dict[str, np.ndarray], start: np.ndarray, answers: np.ndarray
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """`ROW_SCORES` of each row, float64, and for every score each row's token that contributes most to it.

    answer   = max over its answer's tokens of margin; NaN where a row states none
    conflict = mean over its tokens of q margin
    noise    = sum of NLL over its confident conflicts / sum of NLL

    A row that states no answer is ranked by conflict, and so is its token. Equals are settled by NLL.
    """
    first, count = start[:-1], np.diff(start)
    nll, margins = -tokens["log_p"].astype(np.float64), tokens["margin"].astype(np.float64)
    pull = np.exp(tokens["other_log_p"], dtype=np.float64) * margins
    on_conflicts = nll * (tokens["conflict"] >= CONFIDENT)
    at_answers = np.where(answers, margins, -np.inf)
    answer, total = np.maximum.reduceat(at_answers, first), np.add.reduceat(nll, first)
    states_none = np.isinf(answer)
    scores = {
        "answer": np.where(states_none, np.nan, answer),
        "conflict": np.add.reduceat(pull, first) / count,
        "noise": np.add.reduceat(on_conflicts, first) / np.where(total > 0, total, 1.0),
        "mean_nll": total / count,
        "max_nll": np.maximum.reduceat(nll, first),
        "mean_p": np.add.reduceat(np.exp(-nll), first) / count,
    }
    row = np.repeat(np.arange(len(count)), count)
    parts = {
        "answer": np.where(states_none[row], pull, at_answers), "conflict": pull, "noise": on_conflicts,
        "mean_nll": nll, "max_nll": nll, "mean_p": nll,
    }  # fmt: skip
    return scores, {name: np.lexsort((nll, part, row))[start[1:] - 1] for name, part in parts.items()}


# --- in words and numbers ---------------------------------------------------------------------------------------------


def flags(inspection: Inspection, row: int) -> list[str]:
    """The scores by which a row is suspicious; none where it is not.

    ``answer`` where a confident conflict is on its stated answer, ``noise`` where conflicts hold most of its loss.
    """
    inside = slice(int(inspection.start[row]), int(inspection.start[row + 1]))
    contradicted = bool((inspection.answers[inside] & inspection.confident[inside]).any())
    noisy = bool(inspection.scores["noise"][row] >= MOSTLY)
    return [name for name, flagged in (("answer", contradicted), ("noise", noisy)) if flagged]


def reasons(inspection: Inspection, row: int, by: str | None = None) -> list[str]:
    """Why a row is suspicious, in words; none where it is not. With ``by``, why that ranking has it where it is, first.

    The numbers of a reason are those of the score: the token it names is the one that the score comes from. A score of
    0 speaks for a row, and is left out where something else speaks against it.
    """
    names = flags(inspection, row)
    if by is not None and not (names and inspection.scores[by][row] == 0):
        names = [by, *(name for name in names if name != by)]
    return [reason(inspection, row, name) for name in names]


def reason(inspection: Inspection, row: int, by: str) -> str:
    """A row's score ``by`` and the token that contributes most to it, in words."""
    if by == "answer" and inspection.score_of(row, by) != by:
        return f"states no answer; {reason(inspection, row, 'conflict')}"
    score, at = float(inspection.scores[by][row]), expectation(inspection, inspection.token_of(row, by))
    if by == "answer":
        stated = f"stated answer {_short(inspection.stated[row] or '')}: the model expects"
        return f"{stated} {at}, margin {score:.3g}" if score > 0 else f"{stated} it; least likely in it: {at}"
    if by == "noise":
        number = int(inspection.confident[inspection.start[row] : inspection.start[row + 1]].sum())
        if not number:
            return "none of its loss sits on confident conflicts"
        share = f"{score:.0%} of its loss sits on {number} confident conflict{'s' if number > 1 else ''}"
        return f"{share}; the largest: {at}"
    if by == "max_nll":
        return f"NLL {score:.3g}: {at}"
    label, extreme = {
        "conflict": ("conflict", "strongest"), "mean_nll": ("mean NLL", "largest"), "mean_p": ("mean p", "smallest"),
    }[by]  # fmt: skip
    return f"{label} {score:.3g}; {extreme}: {at}"


def expectation(inspection: Inspection, token: int) -> str:
    """What the model expects at a token, and what the data has: ``'6' (0.98), not '7' (0.001)``."""
    tokens = inspection.tokens
    target = f"{_short(inspection.texts[inspection.text[token]])} ({np.exp(tokens['log_p'][token]):.2g})"
    if tokens["margin"][token] <= 0:
        return target
    other = _short(inspection.texts[inspection.other[token]])
    return f"{other} ({np.exp(tokens['other_log_p'][token]):.2g}), not {target}"


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


class Habit(NamedTuple):
    """A token that is a confident conflict again and again: in how many of its places, and what is expected there."""

    text: str
    conflicts: int
    places: int
    expected: str  # most often


def habits(inspection: Inspection, top: int) -> list[Habit]:
    """The tokens that are most often confident conflicts: habits of the data rather than label errors."""
    confident = inspection.confident
    size = len(inspection.texts)
    conflicts = np.bincount(inspection.text[confident], minlength=size)
    places = np.bincount(inspection.text, minlength=size)
    found: list[Habit] = []
    for piece in np.argsort(-conflicts, kind="stable")[:top].tolist():
        if conflicts[piece]:
            others = np.bincount(inspection.other[confident & (inspection.text == piece)])
            expected = inspection.texts[int(np.argmax(others))]
            found.append(Habit(inspection.texts[piece], int(conflicts[piece]), int(places[piece]), expected))
    return found


def summary(inspection: Inspection) -> dict[str, Any]:
    """The numbers of the whole: conflicts, the loss on them, and the share of each objective's gradient there.

    ``share[S]`` = sum over confident conflicts of gate (1-p) / sum over all tokens of gate (1-p);
    ``gate[S]`` the mean gate over confident conflicts.
    """
    tokens, confident = inspection.tokens, inspection.confident
    nll, error = -tokens["log_p"].astype(np.float64), -np.expm1(tokens["log_p"].astype(np.float64))
    share: dict[str, float] = {}
    gates: dict[str, float] = {}
    for name in inspection.objectives:
        gate = tokens[f"gate:{name}"].astype(np.float64)
        whole = float((gate * error).sum())
        share[name] = float((gate * error)[confident].sum()) / whole if whole > 0 else 0.0
        gates[name] = float(gate[confident].mean()) if confident.any() else float("nan")
    first = inspection.start[:-1]
    return {
        "rows": len(inspection.rows),
        "tokens": inspection.num_tokens,
        "conflicts": int(confident.sum()),
        "format_conflicts": int((confident & tokens["is_format"]).sum()),
        "loss_share": float(nll[confident].sum() / nll.sum()) if nll.sum() > 0 else 0.0,
        "stated_answers": int(np.isfinite(inspection.scores["answer"]).sum()),
        "contradicted_answers": int(np.logical_or.reduceat(confident & inspection.answers, first).sum()),
        "noisy_rows": int((inspection.scores["noise"] >= MOSTLY).sum()),
        "share": share,
        "gate": gates,
    }
