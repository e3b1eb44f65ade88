"""From an answer's text to its score, by the kind of its task; which rule found the answer is kept beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from deftune.evaluation.extraction import (
    Rule,
    count_answers,
    extract_choice,
    extract_final,
    jaro_winkler,
    normalize_text,
)
from deftune.evaluation.grading import Grader
from deftune.evaluation.items import Item
from deftune.evaluation.suites import Kind

Record = dict[str, Any]


def take_answer(kind: Kind, item: Item, text: str, choice_rule: str, finish: str = "stop") -> Record:
    """The answer in a text and how it was found; its score too, unless that takes a `Grader` (maths).

    ``finish`` "length": the text was cut off at the token limit, and only an explicit answer counts.
    """
    cut_off = finish == "length"
    if kind == "math":
        number = count_answers(item.gold, parted=item.rule.several)
        final = extract_final(text, several=number if number > 1 else item.rule.several, cut_off=cut_off)
        return {"answer": final.answer, "how": final.how}
    if kind == "figfont":
        exact = normalize_text(text) == normalize_text(item.gold)
        similarity = jaro_winkler(text, item.gold)
        return {"answer": text.strip(), "how": "text", "score": float(exact), "similarity": similarity}
    options = item.options or {}
    rule = cast("Rule", choice_rule)
    found = extract_choice(text, list(options), list(options.values()), rule=rule, cut_off=cut_off)
    return {"answer": found.answer, "how": found.how, "score": float(found.answer == item.gold)}


def score_answers(
    answers: Sequence[tuple[Kind, Item, str]], *, choice_rule: str = "strict", grader: Grader | None = None,
    workers: int = 2, finishes: Sequence[str] | None = None,
) -> list[Record]:  # fmt: skip
    """answer, how and score of each (kind, item, text); of maths the verdict too. ``grader`` is used and left open.

    ``finishes`` has why each text ended ("stop", "length", "error"); without it all of them are taken to be complete.
    """
    if finishes is not None and len(finishes) != len(answers):
        raise ValueError(f"{len(finishes)} finishes for {len(answers)} answers")
    records = [
        take_answer(kind, item, text, choice_rule, finish)
        for (kind, item, text), finish in zip(answers, finishes or ["stop"] * len(answers))
    ]
    hard = [(record, item) for record, (_, item, _) in zip(records, answers) if "score" not in record]
    if hard:
        own = Grader(workers=workers) if grader is None else None
        try:
            verdicts = (own or cast("Grader", grader)).grade(
                [(item.gold, record["answer"]) for record, item in hard], [item.rule for _, item in hard]
            )
        finally:
            if own is not None:
                own.close()
        for (record, _), verdict in zip(hard, verdicts):
            record |= {"score": float(verdict.correct), "verdict": verdict.how}
    return records
