"""Readers turn the rows of a benchmark into questions with gold answers. A row that cannot be read is an error.

Fields differ between the files that a benchmark's authors released (left) and the hub's copies (right); both are read:

    minerva_math    solution with its answer boxed              question, answer
    aime24          answer "033", url                           the same, or the answer boxed in the solution
    amc23           problem and question, answer 27.0           question, answer "27"
    olympiadbench   final_answer, a list of one text            the same
    medmcqa         cop from 1 to 4                             cop from 0 to 3 (told by the whole file)
    mmlu_pro        options by letter, answer_idx               options as a list, answer (a letter), answer_index
    pubmedqa        QUESTION, CONTEXTS                          question, context.contexts
    medxpertqa      label                                       label
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from deftune.data.fields import Fields, read_field, read_medmcqa_options, read_pubmedqa_question, read_text
from deftune.data.rows import Fault, Record, RowError
from deftune.evaluation.answers import EQUAL, Rule
from deftune.evaluation.extraction import extract_boxed

Reader = Callable[[Iterable[Record]], Iterator["Question"]]
MINERVA_TOLERANCE = 1e-4  # of the released evaluation; Minerva's own listing has 1e-5 for most numbers, 1e-2 for some
OLYMPIAD_SLACK = 1.01  # OlympiadBench's judge allows a hundredth more than a row's error
REPAIR = "fix the file; a benchmark with rows left out is another benchmark"


@dataclass(frozen=True)
class Question:
    """The question in a row. ``key`` is the row's own id, or "" if it has none; ``rule`` is how answers are graded."""

    question: str
    gold: str
    options: dict[str, str] | None = None
    key: str = ""
    rule: Rule = EQUAL


@dataclass(frozen=True)
class Item:
    """A question of a task.

    ``prompt`` is the user's message, ``gold`` the correct answer (a letter if there are ``options``), ``rule`` how an
    answer is compared with the gold.
    """

    id: str
    prompt: str
    gold: str
    options: dict[str, str] | None = None
    rule: Rule = EQUAL


# Fields --------------------------------------------------------------------------------------------------------------


def filled(row: Fields, *names: str) -> str:
    """A text that is not blank."""
    value = read_text(row, *names)
    if not value.strip():
        raise Fault(f"{names[0]!r} is not text", "it is empty")
    return value


def key_of(row: Fields, *names: str) -> str:
    """A row's own id: the first of the fields ``names`` that the row has."""
    return str(next((row[name] for name in names if row.get(name) is not None), ""))


def number_text(value: object) -> str:
    """A gold number as people write it; commas stay, since "3,125" may be two answers.

    >>> number_text(27.0), number_text("033"), number_text("-1.50"), number_text("3,125")
    ('27', '33', '-1.50', '3,125')
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value).strip()
    return str(int(text)) if re.fullmatch(r"-?\d+", text) else text


def boxed_gold(row: Fields) -> str:
    if row.get("answer") is not None:
        return number_text(row["answer"])
    gold = extract_boxed(filled(row, "solution"))
    if not gold:
        raise Fault("no gold answer", "no 'answer', and nothing boxed in 'solution'")
    return number_text(gold)


def options_of(value: object) -> dict[str, str]:
    """By letter, in order: {"A": ..}, a list of texts, or a list of {"key": .., "value": ..}; nulls are left out."""
    if isinstance(value, Mapping):
        pairs = list(cast("Mapping[str, Any]", value).items())
    elif isinstance(value, list):
        entries = cast("list[Any]", value)
        if entries and all(isinstance(entry, dict) for entry in entries):
            pairs = [
                (entry.get("key", entry.get("letter")), entry.get("value", entry.get("text"))) for entry in entries
            ]
        else:
            pairs = list(zip(string.ascii_uppercase, entries))
            if len(entries) > len(pairs):
                raise Fault("too many options", f"{len(entries)}, and 26 letters")
    else:
        raise Fault("'options' is neither a list nor an object", type(value).__name__)
    options = {letter: text for letter, text in pairs if text is not None}  # a table has every column in every row
    for letter, text in options.items():
        if not isinstance(letter, str) or not re.fullmatch("[A-Z]", letter):
            raise Fault("an option's name is not a letter", repr(letter)[:40])
        if not isinstance(text, str):
            raise Fault("an option is not text", f"{letter}: {type(text).__name__}")
    if len(options) < 2:
        raise Fault("fewer than two options", ", ".join(options) or "none")
    return dict(sorted(options.items()))


def letter_of(answer: object, options: Mapping[str, str], first: int = 0) -> str:
    """An answer as a letter: a letter itself, an index counted from ``first``, or the text of exactly one option."""
    if isinstance(answer, int) and not isinstance(answer, bool):
        letter = string.ascii_uppercase[answer - first] if 0 <= answer - first < 26 else ""
        if letter not in options:
            raise Fault("answer is no option", f"{answer} counted from {first}, of {', '.join(options)}")
        return letter
    if not isinstance(answer, str):
        raise Fault("answer is neither a letter nor a number", type(answer).__name__)
    if answer.strip() in options:
        return answer.strip()
    same = [letter for letter, text in options.items() if text.strip() == answer.strip()]
    if len(same) != 1:
        raise Fault("answer is no option", f"{answer[:40]!r} is not among {', '.join(options)}")
    return same[0]


# Readers -------------------------------------------------------------------------------------------------------------


def each(read: Callable[[Fields], Question | None]) -> Reader:
    """A reader of a file from a function that reads one row; the function returns None for a row of another task."""

    def read_all(records: Iterable[Record]) -> Iterator[Question]:
        for where, row in records:
            try:
                question = read(row)
            except Fault as fault:
                raise RowError(where, Fault(fault.kind, fault.detail, REPAIR)) from None
            if question is not None:
                yield question

    return read_all


def read_gsm8k(row: Fields) -> Question:
    """Golds are integers. Without ``hedges``: a recorded answer with "approximately 18" in its box keeps its grade."""
    answer = filled(row, "answer")
    _, marker, final = answer.rpartition("#### ")
    if not marker or not final.strip():
        raise Fault("no gold answer", "the answer has no last line '#### N'")
    gold = number_text(final.replace(",", ""))
    return Question(filled(row, "question"), gold, key=key_of(row, "id"), rule=Rule(hedges=False))


def read_math(row: Fields) -> Question:
    """MATH-500, Minerva, AIME, AMC: a problem, an answer (or the one that is boxed in the solution).

    An answer may leave out the percent sign of the gold, as MATH's own grader drops percent signs.
    """
    gold = boxed_gold(row)
    rule = Rule(unit="%") if gold.endswith("%") else Rule()
    return Question(filled(row, "problem", "question"), gold, key=key_of(row, "unique_id", "id", "idx"), rule=rule)


def read_minerva(row: Fields) -> Question:
    """Golds are rounded physical quantities: answers have the relative tolerance of the released grader."""
    question = read_math(row)
    return replace(question, rule=replace(question.rule, relative=MINERVA_TOLERANCE))


def read_olympiad(row: Fields) -> Question:
    """One gold or several, with commas between them; ``error`` is an absolute tolerance, ``unit`` stays unboxed.

    The percent sign of a gold is such a unit, since the benchmark's own grader drops percent signs.
    """
    answers = read_field(row, "final_answer")
    answers = cast("list[Any]", answers) if isinstance(answers, list) else [answers]
    if not answers or not all(isinstance(answer, str) and answer.strip(" $") for answer in answers):
        raise Fault("no gold answer", "'final_answer' holds no text")
    # dollar signs are around each answer, around all of them, or around one side
    gold = ", ".join(answers).replace("$", "").strip()
    error, several = row.get("error") or 0, row.get("is_multiple_answer") is True
    unit = row.get("unit") or ("%" if gold.endswith("%") else "")
    try:
        rule = Rule(absolute=OLYMPIAD_SLACK * float(error), unit=str(unit), several=several)
    except ValueError:
        raise Fault("'error' is no tolerance", repr(error)[:40]) from None
    context = row.get("context")
    question = filled(row, "question")
    whole = f"{context}\n\n{question}" if context else question
    return Question(whole, number_text(gold), key=key_of(row, "id"), rule=rule)


def read_choice(row: Fields) -> Question:
    """A question, its options, and the answer as answer_idx or label (a letter), answer_index, or answer."""
    options = options_of(read_field(row, "options"))
    return Question(
        filled(row, "question").strip(),
        letter_of(read_field(row, "answer_idx", "label", "answer_index", "answer"), options),
        options,
        key_of(row, "id", "idx", "realidx", "question_id"),
    )


def read_mmlu_pro(row: Fields) -> Question | None:
    """The hub has fourteen categories; health and biology together have the paper's 1,535 questions."""
    return read_choice(row) if row.get("category", "health") in ("health", "biology") else None


def read_medmcqa(records: Iterable[Record]) -> Iterator[Question]:
    """``cop`` counts from 1 as released and from 0 on the hub, which only the whole file shows."""
    rows = list(records)
    answers = [row.get("cop") for _, row in rows]
    if (0 in answers) == (4 in answers):
        seen = ", ".join(sorted({str(answer)[:20] for answer in answers})[:8])
        fault = Fault("'cop' cannot be told from 0 to 3 or from 1 to 4", f"the file has {seen}", REPAIR)
        raise RowError(rows[0][0] if rows else "medmcqa", fault)
    first = 1 if 4 in answers else 0

    def read(row: Fields) -> Question:
        options = read_medmcqa_options(row)
        gold = letter_of(read_field(row, "cop"), options, first)
        return Question(filled(row, "question").strip(), gold, options, key_of(row, "id"))

    return each(read)(rows)


_DECISIONS = {"A": "yes", "B": "no", "C": "maybe"}


def read_pubmedqa(row: Fields) -> Question:
    question = read_pubmedqa_question(row)
    gold = letter_of(filled(row, "final_decision"), _DECISIONS)
    return Question(question, gold, dict(_DECISIONS), key_of(row, "pmid", "pubid"))


def read_figfont(row: Fields) -> Question:
    return Question(filled(row, "question"), filled(row, "answer"), key=key_of(row, "index"))
