"""Known label errors, made on purpose: what a ranking of suspicious rows is measured against.

A corruption takes a row's fields as its file has them and gives the same row with a wrong answer, in the same form and
of the same length, so that nothing but the answer's being wrong tells the two apart. A row that a corruption does not
fit gives None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

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
    '1,472'
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
