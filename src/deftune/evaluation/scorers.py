"""From an answer's text to its score, by the kind of its task; which rule found the answer is kept beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from deftune.evaluation.extraction import Rule, extract_choice, extract_final, jaro_winkler, normalize_text
from deftune.evaluation.grading import Grader
from deftune.evaluation.items import Item
from deftune.evaluation.suites import Kind

Record = dict[str, Any]


def take_answer(kind: Kind, item: Item, text: str, choice_rule: str) -> Record:
    """The answer in a text and how it was found; its score too, unless that takes a `Grader` (maths)."""
    if kind == "math":
        final = extract_final(text, several=item.rule.several)
        return {"answer": final.answer, "how": final.how}
    if kind == "figfont":
        exact = normalize_text(text) == normalize_text(item.gold)
        similarity = jaro_winkler(text, item.gold)
        return {"answer": text.strip(), "how": "text", "score": float(exact), "similarity": similarity}
    options = item.options or {}
    found = extract_choice(text, list(options), list(options.values()), rule=cast("Rule", choice_rule))
    return {"answer": found.answer, "how": found.how, "score": float(found.answer == item.gold)}


def score_answers(
    answers: Sequence[tuple[Kind, Item, str]], *, choice_rule: str = "strict", grader: Grader | None = None,
    workers: int = 2,
) -> list[Record]:  # fmt: skip
    """answer, how and score of each (kind, item, text); of maths the verdict too. ``grader`` is used and left open."""
    records = [take_answer(kind, item, text, choice_rule) for kind, item, text in answers]
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
