"""Known label errors, made on purpose: what a ranking of suspicious rows is measured against.

A corruption takes a row's fields as its file has them and gives the same row with a wrong answer, in the same form and
of the same length, so that nothing but the answer's being wrong tells the two apart. A row that a corruption does not
fit gives None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import numpy as np

from deftune.evaluation.statistics import drawn_counts

Fields = Mapping[str, Any]

_FINAL = re.compile(r"(?P<text>.*)\n#### (?P<number>-?[\d,]+)\s*\Z", re.DOTALL)


@dataclass(frozen=True)
class Corruption:
    """``format``: how the rows are read; ``corrupt``: a row with a wrong answer, or None where it does not fit."""

    about: str
    format: str
    corrupt: Callable[[Fields, Random], dict[str, Any] | None]


def wrong_number(number: str, draw: Random) -> str:
    """Another number written as this one is: one of its digits changed, the first never to 0.

    >>> wrong_number("1,072", Random(0))
    '1,077'
    """
    places = [i for i, character in enumerate(number) if character.isdigit()]
    place = draw.choice(places)
    lowest = 1 if place == places[0] and len(places) > 1 else 0
    digits = [str(digit) for digit in range(lowest, 10) if str(digit) != number[place]]
    return number[:place] + draw.choice(digits) + number[place + 1 :]


def corrupt_final(row: Fields, draw: Random) -> dict[str, Any] | None:
    """GSM8K, ``#### 72`` becomes ``#### 42``; the solution above it still says 72."""
    found = _FINAL.match(row["answer"])
    if found is None:
        return None
    return {**row, "answer": f"{found['text']}\n#### {wrong_number(found['number'], draw)}"}


def corrupt_result(row: Fields, draw: Random) -> dict[str, Any] | None:
    """GSM8K, the last line's result too: ``48+24 = 42 clips.\\n#### 42``; to see it, one has to do the sum."""
    found = _FINAL.match(row["answer"])
    if found is None:
        return None
    number = found["number"]
    *before, last = found["text"].split("\n")
    places = [m for m in re.finditer(rf"(?<![\d,.]){re.escape(number)}(?![\d,]|\.\d)", last)]
    if not places:
        return None
    wrong = wrong_number(number, draw)
    start, stop = places[-1].span()
    text = "\n".join([*before, last[:start] + wrong + last[stop:]])
    return {**row, "answer": f"{text}\n#### {wrong}"}


def corrupt_key(row: Fields, draw: Random) -> dict[str, Any] | None:
    """MedMCQA as its authors released it: another of the four options is called correct; the explanation stays."""
    return {**row, "cop": draw.choice([option for option in (1, 2, 3, 4) if option != row["cop"]])}


CORRUPTIONS = {
    "gsm8k-final": Corruption("GSM8K: a digit of the final `#### N` is changed", "gsm8k", corrupt_final),
    "gsm8k-result": Corruption(
        "GSM8K: a digit of the result is changed, in the last line of the solution and in `#### N`",
        "gsm8k",
        corrupt_result,
    ),
    "medmcqa-key": Corruption("MedMCQA: another option is called correct", "medmcqa_1based", corrupt_key),
}


# --- how well a score finds them --------------------------------------------------------------------------------------


class Found(NamedTuple):
    """A ranking against the truth, of each resample: [resamples] each."""

    average_precision: np.ndarray
    auroc: np.ndarray
    precision: dict[float, np.ndarray]  # by the share of rows looked at
    recall: dict[float, np.ndarray]


def ranking_quality(
    score: np.ndarray, corrupted: np.ndarray, weights: np.ndarray, *, shares: Sequence[float] = (0.05, 0.1, 0.2)
) -> Found:
    """How well a score ranks the corrupted rows first, for each row of ``weights``, [resamples, rows].

    A bootstrap resample is a count of how often each row was drawn; ones give the score itself. With w the weights in
    the ranking's order, y the truth:

        average precision = sum_i w_i y_i precision_i / sum_i w_i y_i
        precision_i       = sum_{j<=i} w_j y_j / sum_{j<=i} w_j
        AUROC             = P(a corrupted row ranks before a clean one)

    Rows of equal score are put in an order of their own, drawn once; rows without a score (NaN) come last.

    >>> truth = np.array([True, False, True, False])
    >>> found = ranking_quality(np.array([4.0, 3.0, 2.0, 1.0]), truth, np.ones((1, 4)), shares=[0.5])
    >>> [round(float(x[0]), 3) for x in (found.average_precision, found.auroc, found.precision[0.5], found.recall[0.5])]
    [0.833, 0.75, 0.5, 0.5]
    """
    value = np.where(np.isnan(score), -np.inf, score)
    order = np.lexsort((np.random.default_rng(0).permutation(len(value)), -value))
    w, y = weights[:, order].astype(np.float64), corrupted[order]
    hits, seen = np.cumsum(w * y, axis=1), np.cumsum(w, axis=1)
    positives, total = hits[:, -1], seen[:, -1]
    with np.errstate(invalid="ignore", divide="ignore"):  # a resample may hold no corrupted row: NaN, left out
        precision_at = np.where(seen > 0, hits / seen, 0.0)
        average = (w * y * precision_at).sum(1) / positives
        before = seen - hits  # clean rows ranked so far
        auroc = (w * y * (before[:, -1:] - before)).sum(1) / (positives * (total - positives))
        precision: dict[float, np.ndarray] = {}
        recall: dict[float, np.ndarray] = {}
        for share in shares:
            depth = share * total
            inside = np.clip(depth[:, None] - (seen - w), 0, w)  # of a row that the cut falls into, a part
            precision[share] = (inside * y).sum(1) / depth
            recall[share] = (inside * y).sum(1) / positives
    return Found(average, auroc, precision, recall)


def resamples(rows: int, number: int, seed: int = 0) -> np.ndarray:
    """Bootstrap weights over rows, [1 + number, rows]; the first are the rows as they are.

    >>> resamples(3, 2)[0].tolist()
    [1, 1, 1]
    """
    draws = [part.numpy().astype(np.int64) for part in drawn_counts(rows, number, seed)]
    return np.concatenate([np.ones((1, rows), dtype=np.int64), *draws])
