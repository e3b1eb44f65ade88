"""What a model is asked: the paper's benchmarks as tasks, their data read strictly, and tasks of one's own.

A `Task` says where its data is, how a row becomes a question with a gold answer, and how the question is put. The
prompt is one user message; it goes through the same chat template as training. Nothing is generated or graded here.

Data comes from a folder of files (``read_task(task, data_dir)``) or from the Hugging Face hub. No data is part of this
package. A row that cannot be read is always an error: a benchmark with rows left out is another benchmark. Sizes are
compared with the paper's (`size_note`), and a suite that lacks sets says so (`coverage`).

Fields that differ between the files the authors of a benchmark released and the hub's copies; both are read:

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

import difflib
import hashlib
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from deftune.data.rows import SUFFIXES, BadRows, Fault, Record, RowError, read_records

Kind = Literal["math", "choice", "figfont", "tokens"]
Fields = Mapping[str, Any]

MATH_PROMPT = "{question}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
CHOICE_PROMPT = (
    '{question}\n\n{options}\n\nAnswer with the letter of the correct option, in the form "Answer: <letter>".'
)
FIGFONT_PROMPT = "{question}"  # the regime's own question, letter for letter what training shows
PROMPTS: dict[Kind, str] = {"math": MATH_PROMPT, "choice": CHOICE_PROMPT, "figfont": FIGFONT_PROMPT, "tokens": ""}
MAX_NEW_TOKENS: dict[Kind, int] = {"math": 4096, "choice": 1024, "figfont": 64, "tokens": 0}
_REPAIR = "fix the file; a benchmark with rows left out is another benchmark"


@dataclass(frozen=True)
class Item:
    """One question. ``messages`` is what the model is given; ``gold`` the answer: a letter where there are options."""

    id: str
    messages: tuple[dict[str, Any], ...]
    gold: str
    options: dict[str, str] | None = None
    meta: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Question:
    """What a reader makes of a row; ``key`` is the row's own id, or "" where it has none."""

    question: str
    gold: str
    options: dict[str, str] | None = None
    key: str = ""
    meta: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Source:
    """Where a task's data is.

    ``files`` are names looked for below the data folder, without their suffix, best first; "gsm8k/test" is a file
    test.* in a folder gsm8k. ``hub`` is "org/name" or "org/name:config", None where the hub is not known to have the
    set as the paper used it: it then takes a file. ``path`` is a file that is used whatever the data folder holds.
    ``generator`` is a name for `deftune.data.regimes.generate`: no file at all.
    """

    files: tuple[str, ...] = ()
    hub: str | None = None
    split: str = "test"
    path: Path | None = None
    generator: str | None = None


@dataclass(frozen=True)
class Task:
    """``size``: the number of items behind the paper's numbers, None where the paper has no such set.

    ``version`` changes whenever the same data would give other prompts, golds or ids.
    """

    name: str
    version: str
    kind: Kind
    source: Source
    read: Callable[[Iterable[Record]], Iterator[Question]]
    about: str
    size: int | None = None
    prompt: str = ""
    max_new_tokens: int = 0
    note: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", self.prompt or PROMPTS[self.kind])
        object.__setattr__(self, "max_new_tokens", self.max_new_tokens or MAX_NEW_TOKENS[self.kind])


@dataclass(frozen=True)
class Suite:
    """Tasks that are reported together.

    ``extra`` are shown beside the others and enter no average; ``of`` is how many sets the paper's average has.
    ``samples`` and ``temperature`` are what the released scripts use; they are part of a result.
    """

    name: str
    tasks: tuple[str, ...]
    about: str
    of: int
    extra: tuple[str, ...] = ()
    average: Literal["macro"] = "macro"
    samples: int = 1
    temperature: float = 0.0

    @property
    def averaged(self) -> tuple[str, ...]:
        return tuple(name for name in self.tasks if name not in self.extra)


# Fields --------------------------------------------------------------------------------------------------------------


def _fault(kind: str, detail: str = "") -> Fault:
    return Fault(kind, detail, _REPAIR)


def _first(row: Fields, *names: str) -> Any:
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise _fault(f"no {' or '.join(map(repr, names))}", f"its keys: {', '.join(map(str, list(row)[:12])) or 'none'}")


def _text(row: Fields, *names: str) -> str:
    value = _first(row, *names)
    if not isinstance(value, str) or not value.strip():
        raise _fault(f"{names[0]!r} is not text", f"it is {'empty' if value == '' else type(value).__name__}")
    return value


def _key(row: Fields, *names: str) -> str:
    value = next((row[name] for name in names if row.get(name) is not None), "")
    return str(value)


def _meta(row: Fields, *names: str) -> dict[str, Any]:
    return {name: row[name] for name in names if row.get(name) is not None}


def _number(value: object) -> str:
    """A gold number as people write it; commas stay, since "3,125" may be two answers.

    >>> _number(27.0), _number("033"), _number("-1.50"), _number("3,125")
    ('27', '33', '-1.50', '3,125')
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value).strip()
    return str(int(text)) if re.fullmatch(r"-?\d+", text) else text


def last_boxed(text: str) -> str | None:
    r"""What the last ``\boxed{...}`` holds, braces inside matched; None where there is none that closes.

    >>> last_boxed(r"so \boxed{\frac{1}{2}} \mathrm{~cm}")
    '\\frac{1}{2}'
    """
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    start = text.index("{", start)
    depth, skip = 0, False
    for place in range(start, len(text)):
        char = text[place]
        if skip:  # the character after a backslash: \{ and \} are not braces of TeX's grouping
            skip = False
        elif char == "\\":
            skip = True
        elif char in "{}":
            depth += 1 if char == "{" else -1
            if depth == 0:
                return text[start + 1 : place].strip()
    return None


def _boxed_gold(row: Fields) -> str:
    if row.get("answer") is not None:
        return _number(row["answer"])
    gold = last_boxed(_text(row, "solution"))
    if not gold:
        raise _fault("no gold answer", "no 'answer', and nothing boxed in 'solution'")
    return _number(gold)


def _options(value: object) -> dict[str, str]:
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
                raise _fault("too many options", f"{len(entries)}, and 26 letters")
    else:
        raise _fault("'options' is neither a list nor an object", type(value).__name__)
    options = {letter: text for letter, text in pairs if text is not None}  # a table has every column in every row
    for letter, text in options.items():
        if not isinstance(letter, str) or not re.fullmatch("[A-Z]", letter):
            raise _fault("an option's name is not a letter", repr(letter)[:40])
        if not isinstance(text, str):
            raise _fault("an option is not text", f"{letter}: {type(text).__name__}")
    if len(options) < 2:
        raise _fault("fewer than two options", ", ".join(options) or "none")
    return dict(sorted(options.items()))


def _letter(answer: object, options: Mapping[str, str], first: int = 0) -> str:
    """An answer as a letter: a letter itself, an index counted from ``first``, or the text of exactly one option."""
    if isinstance(answer, int) and not isinstance(answer, bool):
        letter = string.ascii_uppercase[answer - first] if 0 <= answer - first < 26 else ""
        if letter not in options:
            raise _fault("answer is no option", f"{answer} counted from {first}, of {', '.join(options)}")
        return letter
    if not isinstance(answer, str):
        raise _fault("answer is neither a letter nor a number", type(answer).__name__)
    if answer.strip() in options:
        return answer.strip()
    same = [letter for letter, text in options.items() if text.strip() == answer.strip()]
    if len(same) != 1:
        raise _fault("answer is no option", f"{answer[:40]!r} is not among {', '.join(options)}")
    return same[0]


# Readers -------------------------------------------------------------------------------------------------------------


def _each(read: Callable[[Fields], Question | None]) -> Callable[[Iterable[Record]], Iterator[Question]]:
    """A reader of single rows as a reader of a file; None means that a row is not of this task."""

    def read_all(records: Iterable[Record]) -> Iterator[Question]:
        for where, row in records:
            try:
                question = read(row)
            except Fault as fault:
                raise RowError(where, fault) from None
            if question is not None:
                yield question

    return read_all


def _gsm8k(row: Fields) -> Question:
    answer = _text(row, "answer")
    _, marker, final = answer.rpartition("#### ")
    if not marker or not final.strip():
        raise _fault("no gold answer", "the answer has no last line '#### N'")
    return Question(_text(row, "question"), _number(final.replace(",", "")), key=_key(row, "id"))


def _math(row: Fields) -> Question:
    """MATH-500, Minerva, AIME, AMC: a problem, an answer (or the one that is boxed in the solution)."""
    return Question(
        _text(row, "problem", "question"),
        _boxed_gold(row),
        key=_key(row, "unique_id", "id", "idx"),
        meta=_meta(row, "subject", "level", "type", "url"),
    )


def _olympiad(row: Fields) -> Question:
    answers = _first(row, "final_answer")
    answers = cast("list[Any]", answers) if isinstance(answers, list) else [answers]
    if not answers or not all(isinstance(answer, str) and answer.strip() for answer in answers):
        raise _fault("no gold answer", "'final_answer' holds no text")
    gold = ", ".join(answers).strip()
    if gold.count("$") == 2 and gold[0] == gold[-1] == "$":
        gold = gold.strip("$")
    context = row.get("context")
    question = _text(row, "question")
    return Question(
        f"{context}\n\n{question}" if context else question,
        _number(gold),
        key=_key(row, "id"),
        meta=_meta(row, "subfield", "answer_type", "is_multiple_answer", "unit", "error"),
    )


def _choice(row: Fields) -> Question:
    """A question, its options, and the answer as answer_idx or label (a letter), answer_index, or answer."""
    options = _options(_first(row, "options"))
    return Question(
        _text(row, "question").strip(),
        _letter(_first(row, "answer_idx", "label", "answer_index", "answer"), options),
        options,
        _key(row, "id", "idx", "realidx", "question_id"),
        _meta(row, "meta_info", "medical_task", "body_system", "question_type", "category", "src"),
    )


def _mmlu_pro(row: Fields) -> Question | None:
    """The hub has fourteen categories; health and biology together have the paper's 1,535 questions."""
    return _choice(row) if row.get("category", "health") in ("health", "biology") else None


def _medmcqa(records: Iterable[Record]) -> Iterator[Question]:
    """``cop`` counts from 1 as released and from 0 on the hub: only a whole file can tell."""
    rows = list(records)
    answers = {row.get("cop") for _, row in rows}
    if {0, 4} <= answers or not answers & {0, 4}:
        seen = ", ".join(sorted(str(answer)[:20] for answer in answers)[:8])
        fault = _fault("'cop' cannot be told from 0 to 3 or from 1 to 4", f"the file has {seen}")
        raise RowError(rows[0][0] if rows else "medmcqa", fault)
    first = 1 if 4 in answers else 0

    def read(row: Fields) -> Question:
        options = {letter: _text(row, f"op{letter.lower()}") for letter in "ABCD"}
        gold = _letter(_first(row, "cop"), options, first)
        return Question(_text(row, "question").strip(), gold, options, _key(row, "id"), _meta(row, "subject_name"))

    return _each(read)(rows)


_DECISIONS = {"A": "yes", "B": "no", "C": "maybe"}


def _pubmedqa(row: Fields) -> Question:
    contexts = _first(row, "CONTEXTS", "context")
    if isinstance(contexts, Mapping):
        contexts = cast("Fields", contexts).get("contexts")
    if not isinstance(contexts, list) or not all(isinstance(part, str) for part in cast("list[Any]", contexts)):
        raise _fault("'CONTEXTS' is not a list of texts")
    question = "\n\n".join([*cast("list[str]", contexts), _text(row, "QUESTION", "question")])
    gold = _letter(_text(row, "final_decision"), _DECISIONS)
    return Question(question, gold, dict(_DECISIONS), _key(row, "pmid", "pubid"))


def _figfont(row: Fields) -> Question:
    return Question(_text(row, "question"), _text(row, "answer"), key=_key(row, "index"))


# Tasks ---------------------------------------------------------------------------------------------------------------


def _source(*files: str, hub: str | None = None, split: str = "test") -> Source:
    return Source(files, hub, split)


_ALL = [
    Task("gsm8k", "1", "math", _source("gsm8k/test", "gsm8k_test", hub="openai/gsm8k:main"), _each(_gsm8k),
         "grade-school word problems", note="not among the paper's sets"),
    Task("math500", "1", "math", _source("math500", "math500/test", "MATH-500/test", hub="HuggingFaceH4/MATH-500"),
         _each(_math), "500 problems of Hendrycks' MATH test set", 500),
    Task("minerva_math", "1", "math", _source("minerva_math", "minerva_math/test", hub="math-ai/minervamath"),
         _each(_math), "undergraduate science problems of MIT's open courses", 272),
    Task("olympiadbench", "1", "math",
         _source("olympiadbench", "olympiadbench/test", hub="Hothan/OlympiadBench:OE_TO_maths_en_COMP", split="train"),
         _each(_olympiad), "olympiad problems in English with a final answer, no images", 675),
    Task("aime24", "1", "math", _source("aime24", "aime24/test", hub="HuggingFaceH4/aime_2024", split="train"),
         _each(_math), "AIME I and II of 2024", 30),
    Task("amc23", "1", "math", _source("amc23", "amc23/test", hub="math-ai/amc23"), _each(_math),
         "AMC 12 of 2023, answers as numbers", 40),
    Task("medmcqa", "1", "choice",
         _source("medmcqa_validation", "medmcqa/validation", "medmcqa/dev", hub="openlifescienceai/medmcqa",
                 split="validation"),
         _medmcqa, "Indian medical entrance exams, validation (the test set has no answers)", 4183),
    Task("medqa", "1", "choice",
         _source("medqa_usmle_4opt_test", "phrases_no_exclude_test", hub="GBaker/MedQA-USMLE-4-options"),
         _each(_choice), "US medical licensing exam, four options", 1273,
         note="the paper does not say whether four options or five; see medqa_5"),
    Task("medqa_5", "1", "choice", _source("medqa_test", "medqa_5opt_test"), _each(_choice),
         "US medical licensing exam, five options", note="medqa with one more wrong option"),
    Task("pubmedqa", "1", "choice",
         _source("pubmedqa/test", "pubmedqa_test", hub="qiaojin/PubMedQA:pqa_labeled", split="train"),
         _each(_pubmedqa), "yes, no or maybe from an abstract", 1000,
         note="1,000 is all of the expert-labelled part; its official test split has 500"),
    Task("mmlu_pro_health", "1", "choice",
         _source("mmlu_pro_med_test", "mmlu_pro_health", "mmlu_pro/test", hub="TIGER-Lab/MMLU-Pro"),
         _each(_mmlu_pro), "MMLU-Pro, up to ten options: its categories health (818) and, on the hub, biology (717)",
         1535, note="health alone is not the paper's set"),
    Task("gpqa_medical", "1", "choice", _source("gpqa_medical", "gpqa_medical_test"), _each(_choice),
         "the medical part of GPQA", 390, note="gated on the hub and not marked there: it takes a file"),
    Task("lancet", "1", "choice", _source("lancet", "lancet_test"), _each(_choice), "questions of The Lancet", 412),
    Task("medbullets_4", "1", "choice", _source("medbullets_op4", "medbullets_4"), _each(_choice),
         "USMLE-style questions, four options", 308, note="ten questions occur twice in the released file"),
    Task("medbullets_5", "1", "choice", _source("medbullets_op5", "medbullets_5"), _each(_choice),
         "USMLE-style questions, five options", 308, note="ten questions occur twice in the released file"),
    Task("medxpertqa", "1", "choice", _source("MedXpertQA_test", "medxpertqa"), _each(_choice),
         "expert exams, ten options, text only", 1449,
         note="the hub's TsinghuaC3I/MedXpertQA has more rows than the paper's subset: it takes a file"),
    Task("nejm", "1", "choice", _source("nejm", "nejm_test"), _each(_choice), "questions of the NEJM", 603),
    Task("hle_biomed", "1", "choice", _source("HLE_biomed", "hle_biomed"), _each(_choice),
         "Humanity's Last Exam: biology and medicine, multiple choice, text only", 158,
         note="gated on the hub, with images and open answers among it: it takes a file"),
    Task("figfont", "1", "figfont", Source(generator="figlet_font"), _each(_figfont),
         "words drawn in letters of letters: items 40,000 to 44,999", 5000),
    Task("figfont_heldout_words", "1", "figfont", Source(generator="figlet_font", split="heldout_words"),
         _each(_figfont), "the same with words that training never shows"),
    Task("figfont_heldout_fonts", "1", "figfont", Source(generator="figlet_font", split="heldout_fonts"),
         _each(_figfont), "the same in a tenth of the fonts, unseen after training on split train_reduced"),
    Task("heldout", "1", "tokens", Source(), _each(lambda row: None),
         "any rows that training takes: token statistics of their answers, nothing is generated"),
]  # fmt: skip
GENERATED_SIZE = 1000  # of the held-out FigFont splits, which have no end

TASKS: dict[str, Task] = {task.name: task for task in _ALL}

SUITES: dict[str, Suite] = {
    "math": Suite(
        "math",
        ("gsm8k", "math500", "minerva_math", "olympiadbench", "aime24", "amc23"),
        "the paper's five maths sets, avg@16 at temperature 1, and GSM8K beside them",
        of=5,
        extra=("gsm8k",),
        samples=16,
        temperature=1.0,
    ),
    "medical": Suite(
        "medical",
        ("medmcqa", "medqa", "pubmedqa", "mmlu_pro_health", "gpqa_medical", "lancet", "medbullets_4", "medbullets_5",
         "medxpertqa", "nejm", "hle_biomed"),
        "multiple choice, greedy; the paper has eleven sets in all and ten in each table",
        of=11,
    ),
    "figfont": Suite(
        "figfont",
        ("figfont", "figfont_heldout_words", "figfont_heldout_fonts"),
        "the weak regime, greedy: exact match and Jaro-Winkler",
        of=1,
        extra=("figfont_heldout_words", "figfont_heldout_fonts"),
    ),
    "heldout": Suite("heldout", ("heldout",), "token statistics of a dataset, nothing is generated", of=1),
}  # fmt: skip


def task_named(name: str) -> Task:
    """The task of this name, or an error that suggests one."""
    return _known(name, TASKS, "task")


def suite_named(name: str) -> Suite:
    """The suite of this name, or an error that suggests one."""
    return _known(name, SUITES, "suite")


def _known(name: str, table: Mapping[str, Any], what: str) -> Any:
    if name not in table:
        close = difflib.get_close_matches(name.lower(), table, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown {what} {name!r}.{hint} Known: {', '.join(table)}")
    return table[name]


# Data ----------------------------------------------------------------------------------------------------------------


class MissingData(ValueError):
    """A task whose data is not to be had here: which, where it was looked for, and what to do."""


def find_data(task: Task, data_dir: str | Path | None = None) -> Path | None:
    """The file of a task's data, searched by name below ``data_dir``; None says that it comes from the hub.

    With a data folder the hub is never asked: a file that is missing there is an error, not another source.
    """
    source = task.source
    if source.generator is not None:
        return None
    given = source.path if source.path is not None else data_dir
    if given is None:
        if source.hub is None:
            raise MissingData(f"{task.name}: no data: {_looked_for(task)}; pass a folder that holds one (--data DIR)")
        return None
    given = Path(given)
    if given.is_file() and given == source.path:
        return given
    if not given.is_dir():
        raise MissingData(f"{task.name}: {given}: no such {'file' if given == source.path else 'folder'}")
    for name in source.files:
        found = _named_files(given, name)
        if len(found) > 1:
            raise MissingData(f"{task.name}: {found[0]} and {found[1]} could both be it; leave one in the data folder")
        if found:
            return found[0]
    instead = f", or leave --data out to read {source.hub} from the hub" if source.hub else ""
    raise MissingData(f"{task.name}: not below {given}: {_looked_for(task)}; put it there{instead}")


def _looked_for(task: Task) -> str:
    names = ", ".join(f"{name}.jsonl" for name in task.source.files) or "a file of its own"
    hub = f"on the hub it is {task.source.hub}" if task.source.hub else "the hub is not known to have it"
    return f"looked for {names} (or {', '.join(suffix for suffix in SUFFIXES if suffix != '.jsonl')}); {hub}"


def _named_files(folder: Path, name: str) -> list[Path]:
    """Files below ``folder`` whose path ends in ``name`` and a known suffix, whatever the case; hidden ones aside."""
    wanted = name.lower().split("/")
    found: list[Path] = []
    for path in sorted(folder.rglob("*")):
        lower = path.name.lower()
        suffix = next((suffix for suffix in sorted(SUFFIXES, key=len, reverse=True) if lower.endswith(suffix)), None)
        if suffix is None or lower.removesuffix(suffix) != wanted[-1] or not path.is_file():
            continue
        parents = [part.lower() for part in path.resolve().parent.parts]
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not hidden and (len(wanted) == 1 or parents[-len(wanted) + 1 :] == wanted[:-1]):
            found.append(path)
    return found


def available(tasks: Iterable[str], data_dir: str | Path | None = None) -> dict[str, str]:
    """Task name -> why its data is missing; "" where it is there (of the hub: where it would be asked)."""
    reasons: dict[str, str] = {}
    for name in tasks:
        try:
            find_data(task_named(name), data_dir)
        except MissingData as error:
            reasons[name] = str(error)
        else:
            reasons[name] = ""
    return reasons


def coverage(suite: Suite, have: Iterable[str]) -> str:
    """How much of a suite its average covers, in words that stand beside every average.

    >>> coverage(SUITES["math"], ["math500", "aime24", "gsm8k"])
    '2 of 5 (without minerva_math, olympiadbench, amc23)'
    """
    present = set(have)
    missing = [name for name in suite.averaged if name not in present]
    known = len(suite.averaged) - len(missing)
    return f"{known} of {suite.of}" + (f" (without {', '.join(missing)})" if missing else "")


def size_note(task: Task, number: int) -> str:
    """ "" where the items are as many as the paper's, else what stands beside the score.

    >>> size_note(TASKS["pubmedqa"], 500)
    "500 items, the paper's set has 1,000: not comparable with its numbers"
    """
    if task.size is None or number == task.size:
        return ""
    return f"{number:,} items, the paper's set has {task.size:,}: not comparable with its numbers"


def read_task(task: Task, data_dir: str | Path | None = None, *, limit: int | None = None) -> list[Item]:
    """A task's items, in the order of its data. Two with the same id are an error.

    ``limit`` takes that many: of a file those whose ids have the smallest hashes, so that it is a fair sample, and a
    larger limit contains a smaller one; of a generated set the first.
    """
    if task.kind == "tokens":
        raise ValueError(f"{task.name}: has no questions; its rows are scored, read them with read_source")
    if limit is not None and limit < 1:
        raise ValueError(f"limit: at least 1 item, got {limit}; leave it out to take all")
    items: list[Item] = []
    for index, question in enumerate(task.read(_records(task, data_dir, limit))):
        options = question.options
        lines = "\n".join(f"{letter}. {text.strip()}" for letter, text in (options or {}).items())
        content = render_prompt(task.prompt, {"question": question.question, "options": lines})
        key = question.key or str(index)
        items.append(
            Item(f"{task.name}/{key}", ({"role": "user", "content": content},), question.gold, options, question.meta)
        )
    if not items:
        raise MissingData(f"{task.name}: its data has no row of this task")
    seen: set[str] = set()
    for item in items:
        if item.id in seen:
            raise ValueError(f"{item.id}: two rows have this id; fix the file, an answer could not be told to be whose")
        seen.add(item.id)
    if limit is None or len(items) <= limit:
        return items
    chosen = sorted(items, key=lambda item: hashlib.sha256(item.id.encode()).digest())[:limit]
    kept = {item.id for item in chosen}
    return [item for item in items if item.id in kept]


def _records(task: Task, data_dir: str | Path | None, limit: int | None) -> Iterable[Record]:
    source = task.source
    if source.generator is not None:
        from deftune.data.regimes import generate

        size = min(limit or (task.size or GENERATED_SIZE), task.size or limit or GENERATED_SIZE)
        rows = generate(source.generator, split=source.split, size=size)
        return (
            (row.where, {"question": row.messages[0]["content"], "answer": row.messages[1]["content"],
                         "index": row.where.partition("[")[2].rstrip("]")})
            for row in rows
        )  # fmt: skip
    path = find_data(task, data_dir)
    if path is not None:
        return read_records(path, BadRows())
    from deftune.data.sources import _hub  # pyright: ignore[reportPrivateUsage]

    return _hub(cast("str", source.hub), source.split, streaming=False)


# Prompts and tasks of one's own --------------------------------------------------------------------------------------


def render_prompt(template: str, fields: Mapping[str, str]) -> str:
    """``template`` with {name} replaced; doubled braces are braces. Nothing but plain names is understood.

    >>> render_prompt("{question} Box it: \\\\boxed{{}}", {"question": "2 + 2?"})
    '2 + 2? Box it: \\\\boxed{}'
    """
    parts: list[str] = []
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"prompt: {error}; a brace that is meant is written twice, {{{{ or }}}}") from None
    for text, name, spec, conversion in pieces:
        parts.append(text)
        if name is None:
            continue
        if name not in fields or spec or conversion:
            known = ", ".join(f"{{{key}}}" for key in fields)
            raise ValueError(f"prompt: unknown {{{name}}}; known: {known}; a brace that is meant is written twice")
        parts.append(fields[name])
    return "".join(parts)


_FILE_KEYS = ("name", "version", "kind", "data", "split", "fields", "answer_from", "prompt", "max_new_tokens", "about")
_FIELD_KEYS = ("question", "gold", "options", "id")


def load_task_file(path: str | Path) -> Task:
    """A task of one's own, from a small YAML file; nothing in it is ever run.

        name: my_exam
        version: "1"
        kind: choice                  # or math
        data: exam.jsonl              # beside this file; or org/name:config on the hub, with split: test
        fields: {question: q, gold: correct, options: [a, b, c, d], id: number}
        answer_from: 0                # what the first option counts as, where gold is a number
        prompt: "{question}\\n\\n{options}\\n\\nAnswer with the letter."

    ``fields.options`` is one field that holds them, or a list of fields. ``prompt`` may be left out, and ``fields``
    where the data uses the names question, gold, options and id.
    """
    from deftune.training.config import ConfigError, read_yaml

    path = Path(path)

    def wrong(what: str) -> ConfigError:
        return ConfigError(f"{path}: {what}")

    content = read_yaml(path)
    _check_keys(content, _FILE_KEYS, wrong, "")
    for key in ("name", "version", "kind", "data"):
        if not isinstance(content.get(key), str) or not content[key].strip():
            raise wrong(f"{key}: a text is needed{' (in quotes)' if content.get(key) is not None else ''}")
    name, kind = content["name"], content["kind"]
    if not re.fullmatch(r"[\w.-]+", name):
        raise wrong(f"name: letters, digits, _, . and - only, got {name!r}")
    if name in TASKS:
        raise wrong(f"name: {name} is a task already; choose another")
    if kind not in ("math", "choice"):
        raise wrong(f"kind: math or choice, got {kind!r}")
    names = content.get("fields", {})
    if not isinstance(names, dict):
        raise wrong("fields: a mapping such as {question: q, gold: a}")
    _check_keys(cast("dict[str, Any]", names), _FIELD_KEYS, wrong, "fields.")
    fields = {"question": "question", "gold": "gold", "options": "options", "id": "id", **cast("dict[str, Any]", names)}
    for key, value in fields.items():
        several = (
            key == "options" and isinstance(value, list) and all(isinstance(v, str) for v in cast("list[Any]", value))
        )
        if not isinstance(value, str) and not several:
            raise wrong(f"fields.{key}: the name of a field{' or a list of names' if key == 'options' else ''}")
    first: Any = content.get("answer_from", 0)
    if isinstance(first, bool) or first not in (0, 1):
        raise wrong(f"answer_from: 0 or 1, got {first!r}")
    prompt = content.get("prompt", PROMPTS[kind])
    max_new_tokens = content.get("max_new_tokens", MAX_NEW_TOKENS[kind])
    if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
        raise wrong(f"max_new_tokens: a number of at least 1, got {max_new_tokens!r}")
    if not isinstance(prompt, str) or "{question}" not in prompt:
        raise wrong("prompt: a text with {question} in it")
    try:
        render_prompt(prompt, {"question": "", "options": ""})
    except ValueError as error:
        raise wrong(str(error)) from None
    if kind == "choice" and "{options}" not in prompt:
        raise wrong("prompt: a choice needs {options} in it")

    def read(row: Fields) -> Question:
        question, key = _text(row, fields["question"]), _key(row, fields["id"])
        gold = _first(row, fields["gold"])
        if kind == "math":
            return Question(question, _number(gold), key=key)
        where = fields["options"]
        options = _options([row.get(one) for one in where] if isinstance(where, list) else _first(row, where))
        return Question(question, _letter(gold, options, first), options, key)

    data = content["data"]
    beside = path.parent / data
    on_hub = not beside.exists() and not data.endswith(SUFFIXES) and re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", data)
    split = str(content.get("split", "test"))
    source = Source(hub=data, split=split) if on_hub else Source(path=beside)
    about = str(content.get("about", f"from {path.name}"))
    return Task(name, content["version"], kind, source, _each(read), about, None, prompt, max_new_tokens)


def _check_keys(
    content: Mapping[str, Any], known: Sequence[str], wrong: Callable[[str], Exception], prefix: str
) -> None:
    for key in content:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise wrong(f"{prefix}{key}: unknown key.{hint} Known: {', '.join(known)}")


def with_data(task: Task, path: str | Path) -> Task:
    """The same task on a file of the user's: ``path`` is used whatever a data folder holds."""
    return replace(task, source=replace(task.source, path=Path(path), generator=None))
