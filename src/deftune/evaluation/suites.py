"""The tasks (`TASKS`), among them the paper's benchmarks, and the suites in which they are reported (`SUITES`).

A `Task` says where its data is and how a row becomes a question; `deftune.evaluation.items` reads the data, which is
not part of this package.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deftune._suggest import did_you_mean
from deftune.evaluation.kinds import KINDS
from deftune.evaluation.readers import (
    Reader,
    each,
    read_choice,
    read_figfont,
    read_gsm8k,
    read_math,
    read_medmcqa,
    read_minerva,
    read_mmlu_pro,
    read_olympiad,
    read_pubmedqa,
)


@dataclass(frozen=True)
class Source:
    """Where the data of a task is.

    ``files``: file names to search below the data folder, without suffix, best first; "gsm8k/test" is a file test.* in
    a folder gsm8k. ``hub``: "org/name" or "org/name:config"; None if the hub is not known to have the set as the paper
    used it. ``path``: a file to use instead of searching. ``generator``: a name for `deftune.data.generated.generate`,
    which needs no file.
    """

    files: tuple[str, ...] = ()
    hub: str | None = None
    split: str = "test"
    path: Path | None = None
    generator: str | None = None


@dataclass(frozen=True)
class Task:
    """A set of questions of one kind.

    ``size``: the number of items behind the paper's numbers; None if the paper does not use the set. ``version``
    changes whenever the same data would give other prompts, golds, ids or verdicts. ``prompt`` and ``max_new_tokens``
    are by default those of the kind.
    """

    name: str
    version: str
    kind: str  # of `KINDS`
    source: Source
    read: Reader
    about: str
    size: int | None = None
    prompt: str = ""
    max_new_tokens: int = 0
    note: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", self.prompt or KINDS[self.kind].prompt)
        object.__setattr__(self, "max_new_tokens", self.max_new_tokens or KINDS[self.kind].max_new_tokens)


@dataclass(frozen=True)
class Suite:
    """Tasks that are reported together.

    ``extra``: tasks that are shown but not averaged. ``of``: the number of sets in the paper's average. ``samples`` and
    ``temperature``: the sampling of the paper's released scripts.
    """

    name: str
    tasks: tuple[str, ...]
    about: str
    of: int
    extra: tuple[str, ...] = ()
    samples: int = 1
    temperature: float = 0.0

    @property
    def averaged(self) -> tuple[str, ...]:
        return tuple(name for name in self.tasks if name not in self.extra)


# Tasks ---------------------------------------------------------------------------------------------------------------


def _source(*files: str, hub: str | None = None, split: str = "test") -> Source:
    return Source(files, hub, split)


_ALL = [
    Task("gsm8k", "5", "math", _source("gsm8k/test", "gsm8k_test", hub="openai/gsm8k:main"), each(read_gsm8k),
         "grade-school word problems", note="not among the paper's sets"),
    Task("math500", "7", "math", _source("math500", "math500/test", "MATH-500/test", hub="HuggingFaceH4/MATH-500"),
         each(read_math), "500 problems of Hendrycks' MATH test set", 500),
    Task("minerva_math", "8", "math", _source("minerva_math", "minerva_math/test", hub="math-ai/minervamath"),
         each(read_minerva), "undergraduate science problems of MIT's open courses", 272),
    Task("olympiadbench", "8", "math",
         _source("olympiadbench", "olympiadbench/test", hub="Hothan/OlympiadBench:OE_TO_maths_en_COMP", split="train"),
         each(read_olympiad), "olympiad problems in English with a final answer, no images", 675),
    Task("aime24", "6", "math", _source("aime24", "aime24/test", hub="HuggingFaceH4/aime_2024", split="train"),
         each(read_math), "AIME I and II of 2024", 30),
    Task("amc23", "6", "math", _source("amc23", "amc23/test", hub="math-ai/amc23"), each(read_math),
         "AMC 12 of 2023, answers as numbers", 40),
    Task("medmcqa", "5", "choice",
         _source("medmcqa_validation", "medmcqa/validation", "medmcqa/dev", hub="openlifescienceai/medmcqa",
                 split="validation"),
         read_medmcqa, "Indian medical entrance exams, validation (the test set has no answers)", 4183),
    Task("medqa", "5", "choice",
         _source("medqa_usmle_4opt_test", "phrases_no_exclude_test", hub="GBaker/MedQA-USMLE-4-options"),
         each(read_choice), "US medical licensing exam, four options", 1273,
         note="the paper does not say whether four options or five; see medqa_5"),
    Task("medqa_5", "5", "choice", _source("medqa_test", "medqa_5opt_test"), each(read_choice),
         "US medical licensing exam, five options", note="medqa with one more wrong option"),
    Task("pubmedqa", "5", "choice",
         _source("pubmedqa/test", "pubmedqa_test", hub="qiaojin/PubMedQA:pqa_labeled", split="train"),
         each(read_pubmedqa), "yes, no or maybe from an abstract", 1000,
         note="1,000 is all of the expert-labelled part; its official test split has 500"),
    Task("mmlu_pro_health", "5", "choice",
         _source("mmlu_pro_med_test", "mmlu_pro_health", "mmlu_pro/test", hub="TIGER-Lab/MMLU-Pro"),
         each(read_mmlu_pro), "MMLU-Pro, up to ten options: its categories health (818) and, on the hub, biology (717)",
         1535, note="health alone is not the paper's set"),
    Task("gpqa_medical", "5", "choice", _source("gpqa_medical", "gpqa_medical_test"), each(read_choice),
         "the medical part of GPQA", 390, note="gated on the hub and not marked there: it takes a file"),
    Task("lancet", "5", "choice", _source("lancet", "lancet_test"), each(read_choice), "questions of The Lancet", 412),
    Task("medbullets_4", "5", "choice", _source("medbullets_op4", "medbullets_4"), each(read_choice),
         "USMLE-style questions, four options", 308, note="ten questions occur twice in the released file"),
    Task("medbullets_5", "5", "choice", _source("medbullets_op5", "medbullets_5"), each(read_choice),
         "USMLE-style questions, five options", 308, note="ten questions occur twice in the released file"),
    Task("medxpertqa", "5", "choice", _source("MedXpertQA_test", "medxpertqa"), each(read_choice),
         "expert exams, ten options, text only", 1449,
         note="the hub's TsinghuaC3I/MedXpertQA has more rows than the paper's subset: it takes a file"),
    Task("nejm", "5", "choice", _source("nejm", "nejm_test"), each(read_choice), "questions of the NEJM", 603),
    Task("hle_biomed", "5", "choice", _source("HLE_biomed", "hle_biomed"), each(read_choice),
         "Humanity's Last Exam: biology and medicine, multiple choice, text only", 158,
         note="gated on the hub, with images and open answers among it: it takes a file"),
    Task("figfont", "1", "figfont", Source(generator="figlet_font"), each(read_figfont),
         "words drawn in letters of letters: items 40,000 to 44,999", 5000),
    Task("figfont_heldout_words", "1", "figfont", Source(generator="figlet_font", split="heldout_words"),
         each(read_figfont), "the same with words that training never shows"),
    Task("figfont_heldout_fonts", "1", "figfont", Source(generator="figlet_font", split="heldout_fonts"),
         each(read_figfont), "the same in a tenth of the fonts, unseen after training on split train_reduced"),
]  # fmt: skip
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
}  # fmt: skip


def task_named(name: str) -> Task:
    """The task of this name, or an error that suggests one."""
    return _known(name, TASKS, "task")


def suite_named(name: str) -> Suite:
    """The suite of this name, or an error that suggests one."""
    return _known(name, SUITES, "suite", "; token statistics of a dataset: `deftune eval heldout MODEL --data FILE`")


def _known(name: str, table: Mapping[str, Any], what: str, more: str = "") -> Any:
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}.{did_you_mean(name, table)} Known: {', '.join(table)}{more}")
    return table[name]


def coverage(suite: Suite, have: Iterable[str]) -> str:
    """How many of the sets of the paper's average are among ``have``; shown beside every average.

    >>> coverage(SUITES["math"], ["math500", "aime24", "gsm8k"])
    '2 of 5 (without minerva_math, olympiadbench, amc23)'
    """
    present = set(have)
    missing = [name for name in suite.averaged if name not in present]
    known = len(suite.averaged) - len(missing)
    return f"{known} of {suite.of}" + (f" (without {', '.join(missing)})" if missing else "")


def size_note(task: Task, number: int) -> str:
    """A note beside the score if the number of items is not the paper's; else "".

    >>> size_note(TASKS["pubmedqa"], 500)
    "500 items, the paper's set has 1,000: not comparable with its numbers"
    """
    if task.size is None or number == task.size:
        return ""
    return f"{number:,} items, the paper's set has {task.size:,}: not comparable with its numbers"
