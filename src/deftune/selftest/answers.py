"""Rows about answers: hostile ones, and the same ones for every batch size."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from deftune.evaluation.grading import Grader
from deftune.evaluation.local import TransformersSampler
from deftune.evaluation.sampler import Prompt
from deftune.selftest import tiny
from deftune.selftest.check import Figure, Size

RUNS_CODE = [
    "__import__('os').system('touch {}')", "open('{}', 'w')", "exec(\"open('{}','w')\")",
    "().__class__.__base__.__subclasses__()[-1].__init__.__globals__['os'].system('touch {}')",
    "sympify(\"__import__('os').system('touch {}')\")", "$(touch {})", "`touch {}`", "; touch {} #",
    "\\immediate\\write18{{touch {}}}", "\\openout1={}", "lambdify([], \"open('{}','w')\")()",
]  # fmt: skip
NEVER_ENDS = [
    "9**9**9", "9^{9^{9^{9}}}", "(9^{9^9})!", "100000000!", "((((9!)!)!)!)!", "\\binom{10^{9}}{5 \\cdot 10^{8}}",
    "\\sum_{n=1}^{10^{12}} \\frac{1}{n^2}", "(x+y+z+w)^{500}", "1e999999999", "e^{e^{e^{e^{79}}}}",
    "while True: pass", "__import__('time').sleep(1000)",
]  # fmt: skip
SHAPES = [
    "{" * 100_000, "(" * 4_000 + "1" + ")" * 4_000, "\\boxed{" * 10_000, "\\frac{1}{" * 300 + "2" + "}" * 300,
    "\\sqrt{" * 800 + "2" + "}" * 800, "1" * 1_000_000, "\x00" * 100_000, "\\" * 5_001, "1," * 4_900, "",
    "\ud800", "\u202e1", "NaN", "None", "quit()", "__import__('os')._exit(0)", '[true, "both"]\n',
]  # fmt: skip


def hostile(canary: Path) -> list[str]:
    """Answers that no grader should run; what can leave a trace would leave it at ``canary``."""
    wrapped = ["{}", "x = {}", "\\text{{{}}}"]
    code = [wrapper.format(text.format(canary)) for text in RUNS_CODE for wrapper in wrapped]
    return code + NEVER_ENDS + SHAPES


def hostile_answers(size: Size, more: list[str] | None = None) -> Figure:
    """Row 19: no side effects, every answer ends, no process is left."""
    canary = size.folder / "canary"
    answers = hostile(canary) + (more or [])
    before = children()
    with Grader(workers=2, seconds=0.5, memory_mib=512) as grader:
        verdicts = grader.grade([("31337", answer) for answer in answers])
    credited = [answer[:60] for answer, verdict in zip(answers, verdicts) if verdict.correct]
    left = len(children() - before)
    forced = sum(verdict.how in ("timeout", "crash") for verdict in verdicts)
    text = (
        f"{len(answers)} hostile answers: {int(canary.exists())} side effects, {len(credited)} credited, {forced} "
        f"ended by force, {left} processes left"
    )
    return Figure(text, not canary.exists() and not credited and not left, tuple(credited))


def children() -> set[str]:
    """The processes whose parent is this one, zombies included."""
    found: set[str] = set()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            fields = (place / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[1]) == os.getpid():
            found.add(place.name)
    return found


def same_answers(size: Size) -> Figure:
    """Row 28: greedy and sampled answers of batch sizes 1, 8, 32, and in another order."""
    tokenizer = tiny.make_tokenizer()
    model: Any = tiny.make_model(tokenizer, gain=8.0)
    asked = [Prompt(str(i), f"What is {i} plus {i * 7}?") for i in range(size(24, 96))]
    different, total = 0, 0
    for temperature, samples in ((0.0, 1), (1.0, 2)):
        found = [
            answers(TransformersSampler(model, tokenizer, batch_size=batch), order, temperature, samples)
            for batch, order in ((1, asked), (8, asked), (32, asked), (8, asked[::-1]))
        ]
        total += len(found[0])
        different += sum(other[key] != text for other in found[1:] for key, text in found[0].items())
    text = f"{total} answers at T = 0 and 1, batches of 1, 8, 32 and in another order: {different} differ"
    return Figure(text, different == 0 and total > 0)


def answers(sampler: Any, asked: list[Prompt], temperature: float, samples: int) -> dict[tuple[str, int], str]:
    options = {"temperature": temperature, "samples": samples, "top_p": 1.0, "max_new_tokens": 24, "seed": 0}
    return {(output.id, output.sample): output.text for output in sampler.sample(asked, **options)}
