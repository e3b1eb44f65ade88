"""The kinds of questions (`KINDS`): how each is put to a model, and how the text of an answer becomes a score.

To add a kind, add a score function and an entry of `KINDS` here. A YAML task file can then use the kind; a built-in
task needs a `Task` in `suites` too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

from deftune.data.fields import Fields, read_field
from deftune.evaluation.choices import Rule, extract_choice
from deftune.evaluation.extraction import after_reasoning, count_answers, extract_final, jaro_winkler, normalize_text
from deftune.evaluation.grading import Grader
from deftune.evaluation.readers import Item, letter_of, number_text, options_of

Record = dict[str, Any]
Gold = tuple[str, dict[str, str] | None]


@dataclass(frozen=True)
class Kind:
    """A kind of question.

    Args:
        prompt: the default prompt of a task; {question} and {options} are filled in.
        max_new_tokens: the default token limit of an answer.
        score: (item, text, rule, whether the text was cut off at the token limit) -> a record with ``answer``, ``how``
            (which rule found the answer) and ``score``. A record without ``score`` is graded by a `Grader`, which
            compares ``answer`` with the gold as formulas.
        read_gold: (row, field names, number of the first option) -> gold answer and options of a row of a task file;
            None if task files cannot have the kind.
        rules: the extraction rules to choose from, default first.
        columns: further numbers in the record of an answer; a result shows their means beside the score.
    """

    prompt: str
    max_new_tokens: int
    score: Callable[[Item, str, str, bool], Record]
    read_gold: Callable[[Fields, Mapping[str, Any], int], Gold] | None = None
    rules: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


def _take_formula(item: Item, text: str, rule: str, cut_off: bool) -> Record:
    number = count_answers(item.gold, parted=item.rule.several)
    final = extract_final(after_reasoning(text), several=number if number > 1 else item.rule.several, cut_off=cut_off)
    return {"answer": final.answer, "how": final.how}


def _score_choice(item: Item, text: str, rule: str, cut_off: bool) -> Record:
    options = item.options or {}
    said = after_reasoning(text)
    found = extract_choice(said, list(options), list(options.values()), rule=cast("Rule", rule), cut_off=cut_off)
    return {"answer": found.answer, "how": found.how, "score": float(found.answer == item.gold)}


def _score_text(item: Item, text: str, rule: str, cut_off: bool) -> Record:
    exact = normalize_text(text) == normalize_text(item.gold)
    similarity = jaro_winkler(text, item.gold)
    return {"answer": text.strip(), "how": "text", "score": float(exact), "similarity": similarity}


def _read_number(row: Fields, names: Mapping[str, Any], first: int) -> Gold:
    return number_text(read_field(row, names["gold"])), None


def _read_letter(row: Fields, names: Mapping[str, Any], first: int) -> Gold:
    gold, where = read_field(row, names["gold"]), names["options"]
    options = options_of([row.get(one) for one in where] if isinstance(where, list) else read_field(row, where))
    return letter_of(gold, options, first), options


MATH_PROMPT = "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
CHOICE_PROMPT = (
    '{question}\n\n{options}\n\nAnswer with the letter of the correct option, in the form "Answer: <letter>".'
)
KINDS: dict[str, Kind] = {
    "math": Kind(MATH_PROMPT, 4096, _take_formula, _read_number),
    "choice": Kind(CHOICE_PROMPT, 1024, _score_choice, _read_letter, rules=("strict", "lenient")),
    # the prompt is the regime's own question, letter for letter what training shows
    "figfont": Kind("{question}", 64, _score_text, columns=("similarity",)),
}
COLUMNS = tuple(dict.fromkeys(column for kind in KINDS.values() for column in kind.columns))


def score_answers(
    answers: Sequence[tuple[str, Item, str]], *, choice_rule: str = "strict", grader: Grader | None = None,
    workers: int = 2, finishes: Sequence[str] | None = None,
) -> list[Record]:  # fmt: skip
    """Score answers.

    Args:
        answers: (kind, item, text of the answer) each.
        choice_rule: the extraction rule of multiple choice.
        grader: grades formulas, and stays open; by default one of ``workers`` processes is made and closed.
        finishes: why each text ended ("stop", "length", "error"); by default every text is complete. In a text that
            was cut off ("length") only an explicit answer counts.

    Returns:
        ``answer``, ``how``, ``score`` and the kind's columns of each answer; ``verdict`` too where a grader was asked.
    """
    if finishes is not None and len(finishes) != len(answers):
        raise ValueError(f"{len(finishes)} finishes for {len(answers)} answers")
    records = [
        KINDS[kind].score(item, text, choice_rule, finish == "length")
        for (kind, item, text), finish in zip(answers, finishes or ["stop"] * len(answers))
    ]
    formulas = [(record, item) for record, (_, item, _) in zip(records, answers) if "score" not in record]
    if formulas:
        with Grader(workers=workers) if grader is None else nullcontext(grader) as chosen:
            verdicts = chosen.grade(
                [(item.gold, record["answer"]) for record, item in formulas], [item.rule for _, item in formulas]
            )
        for (record, _), verdict in zip(formulas, verdicts):
            record |= {"score": float(verdict.correct), "verdict": verdict.how}
    return records
