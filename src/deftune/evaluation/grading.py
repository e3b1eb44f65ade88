r"""`Grader`: compares answers with golds, by equal text or by math-verify in worker processes that can be killed.

A model's text may be hostile: ``9^{9^{9^9}}`` fills the memory, a deep fraction never ends, and sympy evaluates some of
what it parses. So the parent never imports sympy: it compares normalised text, and sends other pairs to workers:

    a fresh interpreter (not a fork), its own session, empty working directory, no environment, stdin and stdout null
    limits: address space, cpu time per answer, 32 open files, no written byte, no core, no new process
    an audit hook that ends the worker on sockets, subprocesses, files written, or files read outside its libraries
    a new one after a time-out, a crash, or ``tasks_per_worker`` answers; a crash counts when it happens twice

The time limit is cpu time, so that a verdict does not depend on how busy the machine is or on how many workers share
it; the wall clock is a backstop, enforced by the parent. `math_verify`'s own alarms are off. The hash seed is fixed.

Not covered: a sandbox against native code. The workers run as the same user, and the hook sees what Python does.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from deftune.evaluation import grading_worker
from deftune.evaluation.grading_worker import REFUSED
from deftune.evaluation.units import parse_unit, split_unit, units_differ

How = Literal["exact", "math_verify", "tolerance", "timeout", "crash", "unparsed"]


@dataclass(frozen=True)
class Verdict:
    """``how``: by equal text, by math-verify, by the tolerance of a `Rule`, or not decided (``detail`` says why)."""

    correct: bool
    how: How
    detail: str = ""


@dataclass(frozen=True)
class Rule:
    """The tolerance of a benchmark's own grader; by default none.

        |answer - gold| <= max(relative |gold|, absolute)

    For numbers, and for lists of numbers in any order. ``unit``: the gold's unit, which the benchmark writes outside
    the box; it is removed from the end of an answer. ``several``: the gold is a list, and an answer may have several
    boxes.
    """

    relative: float = 0.0
    absolute: float = 0.0
    unit: str = ""
    several: bool = False

    def __post_init__(self) -> None:
        for name, value in (("relative", self.relative), ("absolute", self.absolute)):
            if not 0 <= value < 1:
                raise ValueError(f"{name}: a tolerance is from 0 to below 1, got {value}")


EQUAL = Rule()


# --- equal text ------------------------------------------------------------------------------------------------------

_SPACING = re.compile(r"\\[!,;: ]|\\(?:quad|qquad|left|right|displaystyle|limits)(?![A-Za-z])|~")
_FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_SHORT_FRACTION = re.compile(r"\\frac\s*([0-9])\s*([0-9])(?![0-9])")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_SPACES = re.compile(r"\s+")
_SPACE_TO_DROP = re.compile(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])")
_THOUSANDS = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+")
_DEGREES = re.compile(r"\^\s*\\circ(?![A-Za-z])|\^\s*\{\s*\\circ\s*\}|°")


def normalize_answer(answer: str) -> str:
    r"""An answer without its typography; equal results mean equal answers, different results mean nothing.

    Removed: dollars and \( \) around it, a final period, \left and \right, thin spaces, \text{} around words,
    thousands separators, degree signs, and spaces except between two letters or digits ("1 1/2" is not "11/2").
    \dfrac, \tfrac and \frac12 become \frac{1}{2}. Case, order, units and percent signs stay.

    >>> normalize_answer(r"$\left( \dfrac12,\, 1{,}000 \right)$.")
    '(\\frac{1}{2},1,000)'
    >>> normalize_answer(r"12,\!345"), normalize_answer("1 1/2")
    ('12345', '1 1/2')
    """
    answer = _trimmed(answer)
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if len(answer) > len(opening + closing) and answer.startswith(opening) and answer.endswith(closing):
            answer = answer[len(opening) : -len(closing)].strip().removesuffix(".")
    answer = answer.replace("{,}", ",").replace(r"\$", "").replace("\N{MINUS SIGN}", "-")
    listed = re.search(r",\s", answer)  # "32, 349" is two numbers, "32,349" is one
    answer = _DEGREES.sub("", _SPACING.sub(" ", answer.replace(r"\!", "")))
    answer = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", _FRACTION.sub(r"\\frac", answer))
    answer = _TEXT.sub(r" \1 ", answer)
    answer = _SPACE_TO_DROP.sub("", _SPACES.sub(" ", answer)).strip()
    if _THOUSANDS.fullmatch(answer.lstrip("+-")) and not listed:
        answer = answer.replace(",", "").replace(" ", "")
    return answer


def _trimmed(answer: str) -> str:
    """Without spaces, period and single backslash at its end."""
    answer = answer.strip().removesuffix(".").rstrip()
    return answer[:-1].rstrip() if answer.endswith("\\") and not answer.endswith("\\\\") else answer


def drop_unit(answer: str, unit: str) -> str:
    r"""An answer without the unit it ends in, however the unit is set.

    >>> drop_unit(r"4.2\%", "%"), drop_unit(r"166 \mathrm{~cm}^{2}", "$cm^2$"), drop_unit("90^{\\circ}", r"^{\circ}")
    ('4.2', '166', '90')
    >>> drop_unit(r"\frac{1}{2}", "km")
    '\\frac{1}{2}'
    """

    def plain(text: str) -> str:
        text = _SPACING.sub(" ", _TEXT.sub(r" \1", text.strip().strip("$").removesuffix(".")))
        return re.sub(r"\^\{(\w+)\}", r"^\1", text.replace(r"^\circ", r"^{\circ}").replace(r"\%", "%")).strip()

    bare, ending = plain(answer), plain(unit)
    return bare.removesuffix(ending).strip() if ending and bare.endswith(ending) else answer


_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)


def _balanced(text: str) -> bool:
    depth = 0
    for token in _BRACES.finditer(text):
        depth += {"{": 1, "}": -1}.get(token.group(), 0)
        if depth < 0:
            return False
    return depth == 0


_IN_BASE = re.compile(r"([0-9A-Za-z]+)_\{?([0-9]+)\}?")
_CLOCK = re.compile(r"0*([0-9]{1,2}):([0-5][0-9])")
_BRACKETS = re.compile(r"(?:\\left)?\s*(\\\{|[(\[]).*(\\\}|[)\]])", re.DOTALL)


def _decide_by_text(gold: str, answer: str) -> Verdict | None:
    """The verdict on answers that math-verify reads incompletely: numerals with a base, times of day, sets."""
    if gold == answer:
        return Verdict(True, "exact")
    ours, theirs = _IN_BASE.fullmatch(gold), _IN_BASE.fullmatch(answer)
    if ours and theirs:  # 42_7 would be 42_8
        return Verdict(ours.groups() == theirs.groups(), "exact", "numerals with a base")
    if (clock := _CLOCK.fullmatch(gold)) and math.gcd(int(clock[1]), int(clock[2])) != 1:  # no ratio is written 3:30
        other = _CLOCK.fullmatch(answer)
        return Verdict(other is not None and other.groups() == clock.groups(), "exact", "times of day")
    shapes = [match and match[1] == r"\{" for match in (_BRACKETS.fullmatch(gold), _BRACKETS.fullmatch(answer))]
    if None not in shapes and shapes[0] != shapes[1]:
        return Verdict(False, "exact", "a set, and a pair or an interval")
    return None


_MIXED = re.compile(r"(-?[0-9]+) ([0-9]+)/([0-9]+)")
_UPRIGHT = re.compile(r"\\mathrm\s*\{\s*([ei])\s*\}")
_AND = re.compile(r",?\s*\\text\s*\{\s*,?\s*(?:and|or)\s*\}\s*")
_EXPONENT = re.compile(r"(?<![\w\\.])([0-9]+(?:\.[0-9]+)?)[eE]([+-]?[0-9]+)(?![\w.])")
_LONE_POINT = re.compile(r"(?<=[0-9])\.(?=[/)\s]|$)")
_NUMPY = re.compile(r"\bnp\.(arcsin|arccos|arctan|sin|cos|tan|sqrt|exp|log|pi)\b")
_NAME = r"([A-Za-z]|\\(?:alpha|beta|gamma|theta|phi|psi|omega|rho|sigma|tau|xi|eta|mu)\b)\s*+((?:_\{\w+\}|_\w)?)"
_BY_TIME = re.compile(rf"\\frac\s*\{{\s*d\s*{_NAME}\s*\}}\s*\{{\s*d\s*t\s*\}}")
_TWICE_BY_TIME = re.compile(
    rf"\\frac\s*\{{\s*d\s*\^\s*\{{?\s*2\s*\}}?\s*{_NAME}\s*\}}\s*\{{\s*d\s*t\s*\^\s*\{{?\s*2\s*\}}?\s*\}}"
)
_PRIMES = re.compile(rf"{_NAME}\s*(?:('{{1,2}})(?!')|\^\s*\{{?\s*((?:\\prime\s*){{1,2}})\}}?)")
_COLUMN = re.compile(r"\\binom\s*\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}")
_CAPITALS = re.compile(r"(?<![A-Za-z\\{])[A-Z]{2,}(?![A-Za-z}])")
_CAPITAL_E = re.compile(r"(?<![A-Za-z\\])E(?=\s*_)")
_LOWER_GAMMA = re.compile(r"\\gamma(?![A-Za-z])")
_CAPITAL_I = re.compile(r"(?<![A-Za-z\\])I(?![A-Za-z])")


def _for_math_verify(answer: str, gold: str) -> str:
    r"""The answer as math-verify reads it: one \boxed{...}, a list with commas, and 4.5e33 as a power of ten.

    Without this it reads 4.5e33 as 4.5 e 33, 1 1/2 as 11/2, y' as y, a column \binom{1}{2} as 0, \gamma^2 - 1 as the
    Gamma function of -1, and, where the gold has them, a variable I as the imaginary unit and a name SRAC as a
    product. It gives up on a \text{ and } between two answers, on an upright e or i, on >=, on E_1, on 1./3 and on
    np.arcsin.
    """
    answer = _trimmed(answer)
    answer = _EXPONENT.sub(r"\1 \\times 10^{\2}", _AND.sub(", ", _UPRIGHT.sub(r"\1", answer)))
    answer = _NUMPY.sub(r"\\\1", _LONE_POINT.sub("", answer)).replace(r"\odot", "sun")
    answer = answer.replace(">=", r"\geq ").replace("<=", r"\leq ").replace("!=", r"\neq ")
    answer = _TWICE_BY_TIME.sub(r"\\ddot{\1}\2", _BY_TIME.sub(r"\\dot{\1}\2", answer))
    answer = _PRIMES.sub(lambda m: rf"\{'d' * (len(m[3] or '') or m[4].count('prime'))}ot{{{m[1]}}}{m[2]}", answer)
    answer = _LOWER_GAMMA.sub(r"\\mathcal{g}", _CAPITAL_E.sub(r"\\mathcal{E}", answer))
    answer = _COLUMN.sub(lambda m: m[0] if int(m[1]) >= int(m[2]) else
                         rf"\begin{{pmatrix}} {m[1]} \\ {m[2]} \end{{pmatrix}}", answer)  # fmt: skip
    if any(len(word) > 2 for word in _CAPITALS.findall(gold)):
        answer = _CAPITALS.sub(r"\\text{\g<0>}", answer)
    if _CAPITAL_I.search(gold):
        answer = _CAPITAL_I.sub(r"\\iota ", answer)
    if mixed := _MIXED.fullmatch(answer):
        answer = rf"{mixed[1]}\frac{{{mixed[2]}}}{{{mixed[3]}}}"
    return rf"\boxed{{{answer}}}"


# --- the parent ------------------------------------------------------------------------------------------------------


_Asked = tuple[str, str | None, Rule]
_Task = list[str | float]  # a line for a worker: gold, answer, relative, absolute, percentage
_NOT_VARIABLES = re.compile(
    r"\\(?:text(?:rm|bf|it|sf|normal)?|mathrm|mbox|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+|(?<=[0-9])[eE](?=[-+]?[0-9])"
)
_PERCENT = re.compile(
    r"\s*+(?:\\?%|\\text\s*\{\s*\\?%\s*\}|(?:\\text\s*\{)?\s*\b(?:percent|percentage|pct)\b\s*\}?)\s*$"
)
_ABOUT = re.compile(r"\s*(?:\\(?:approx|simeq|sim)(?![A-Za-z])|\N{ALMOST EQUAL TO})")
_IN_DOLLARS = re.compile(r"(?<!\\)\$([^$]*)(?<!\\)\$")
# what a figure calls the value that is asked for: AB, |AB|, S_1 : S_2, \frac{AB}{CD}, \angle ABC
_LABEL = r"(?:\\(?:angle|triangle|overline)\s*)?\{?[A-Z]{1,6}(?:_(?:\w|\{\w+\}))?\}?"
_LABELLED = re.compile(
    rf"(?:\\frac\s*\{{\s*{_LABEL}\s*\}}\s*\{{\s*{_LABEL}\s*\}}|\|\s*{_LABEL}\s*\||{_LABEL}(?:\s*[:/]\s*{_LABEL})?)"
    r"\s*=\s*(?=[^=<>]*[0-9])"
)


def _has_variables(gold: str) -> bool:
    """Whether a gold (of x = 5 the 5) has variables, so that a letter at the end of an answer may not be a unit."""
    value = re.split(r"(?<![<>!\\])=", gold)[-1]
    return bool(set(re.findall(r"[A-Za-z]", _NOT_VARIABLES.sub(" ", value))) - {"e", "i"})


@dataclass(frozen=True)
class _Pair:
    """Two answers ready to be compared: their units split off, and which of them is a percentage."""

    gold: str
    answer: str
    percentage: str = ""  # "gold" or "answer", where only one of them is
    differ: str = ""  # why they are different whatever their numbers are


def _prepare(gold: str, answer: str, rule: Rule) -> _Pair:
    gold, answer = (_trimmed(_IN_DOLLARS.sub(r"\1", text)) for text in (gold, answer))
    if about := _ABOUT.match(answer):
        answer = answer[about.end() :].strip()
    if "=" in gold and "=" not in answer:
        parts = gold.split(",")
        if all(_LABELLED.match(part.strip()) for part in parts):
            gold = ", ".join(_LABELLED.sub("", part.strip(), count=1) for part in parts)
    if rule.several and answer.count(",") == gold.count(","):  # "8,221" beside "221,8" is no number of thousands
        gold, answer = (re.sub(r",(?=[0-9])", ", ", text) for text in (gold, answer))
    value, unit = split_unit(gold, words=True)
    if _has_variables(value) or (unit and parse_unit(unit) is None and len(unit) < 3) or len(unit) == 1:
        value, unit = split_unit(gold, words=False)  # the m of 6m is a variable
    named, said = _has_variables(value), drop_unit(answer, rule.unit)
    theirs, other = split_unit(said, words=not named)
    percents: list[str] = []
    if percent := _PERCENT.search(value, max(0, len(value) - 32)):
        value, percents = value[: percent.start()].strip(), ["gold"]
    if percent := _PERCENT.search(theirs, max(0, len(theirs) - 32)):
        theirs, percents = theirs[: percent.start()].strip(), [*percents, "answer"]
    unit = unit or rule.unit
    differ = f"the units differ: {unit} and {other}" if units_differ(unit, other) else ""
    return _Pair(value, theirs, percents[0] if len(percents) == 1 else "", differ)


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    tasks: int  # file descriptors
    results: int
    ready: bool = False
    received: bytes = b""
    task: int | None = None
    graded: int = 0
    deadline: float = 0.0


class Grader:
    """Grades (gold, answer) pairs; a context manager, and safe to close at any point.

    ``workers``: processes; they start when first needed. Verdicts do not depend on their number.
    ``seconds``: cpu time per answer. ``wall_seconds``: the wall clock's backstop, 60 times that unless told.
    ``memory_mib``: address space per worker; sympy takes about 100.
    ``max_characters``: a longer gold or answer is ``unparsed`` without being looked at.
    ``counts``: how many verdicts of each kind so far.

        with Grader(workers=4) as grader:
            verdicts = grader.grade([(r"\\frac{1}{2}", "0.5"), ("7", "8")])
            print(grader.counts)
    """

    def __init__(
        self,
        workers: int = 2,
        seconds: float = 5.0,
        memory_mib: int = 1024,
        *,
        wall_seconds: float | None = None,
        max_characters: int = 10_000,
        tasks_per_worker: int = 2_000,
    ):
        if os.name != "posix":
            raise OSError("grading needs process limits, which only POSIX systems have; grade on Linux or macOS")
        if importlib.util.find_spec("math_verify") is None:
            raise ModuleNotFoundError("grading needs math-verify: pip install math-verify")
        for name, value, least in (
            ("workers", workers, 1),
            ("seconds", seconds, 0.01),
            ("memory_mib", memory_mib, 256),
            ("max_characters", max_characters, 1),
            ("tasks_per_worker", tasks_per_worker, 1),
        ):
            if value < least:
                raise ValueError(f"{name}: at least {least}, got {value}")
        self.workers = workers
        self.seconds = seconds
        self.memory_mib = memory_mib
        self.wall_seconds = 60 * seconds if wall_seconds is None else wall_seconds
        self.max_characters = max_characters
        self.tasks_per_worker = tasks_per_worker
        self.counts: dict[How, int] = {how: 0 for how in get_args(How)}
        self._folder = tempfile.mkdtemp(prefix="deftune-grading-")
        self._running: list[_Worker] = []
        self._finalizer = weakref.finalize(self, _close, self._running, self._folder)

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every worker and wait for it; closing again does nothing."""
        self._finalizer()

    def grade(self, pairs: Sequence[tuple[str, str | None]], rules: Sequence[Rule] | None = None) -> list[Verdict]:
        """A verdict per (gold, answer), in order; an answer of None is ``unparsed``. Equal pairs are graded once.

        ``rules`` has one `Rule` per pair. Not for two threads at once. A bare string is read as LaTeX: extract the
        answer from its text first.
        """
        if not self._finalizer.alive:
            raise ValueError("this grader is closed; make another")
        if rules is not None and len(rules) != len(pairs):
            raise ValueError(f"{len(rules)} rules for {len(pairs)} pairs")
        asked: list[_Asked] = [
            (gold, answer, rule) for (gold, answer), rule in zip(pairs, rules or [EQUAL] * len(pairs))
        ]
        verdicts: dict[_Asked, Verdict] = {}
        hard: dict[_Asked, _Task] = {}
        for key in dict.fromkeys(asked):
            found = self._at_sight(*key)
            if isinstance(found, Verdict):
                verdicts[key] = found
            else:
                hard[key] = found
        try:
            verdicts.update(zip(hard, self._in_workers(list(hard.values()))))
        except BaseException:  # a worker may be in the middle of an answer that nobody waits for any more
            _stop_all(self._running)
            raise
        for key in asked:
            self.counts[verdicts[key].how] += 1
        return [verdicts[key] for key in asked]

    def _at_sight(self, gold: str, answer: str | None, rule: Rule) -> Verdict | _Task:
        if answer is None:
            return Verdict(False, "unparsed", "no answer")
        for name, text in (("gold", gold), ("answer", answer)):
            if len(text) > self.max_characters:
                return Verdict(False, "unparsed", f"{name} of {len(text)} characters, over {self.max_characters}")
            if not text.strip():
                return Verdict(False, "unparsed", f"empty {name}")
            if not _balanced(text):  # it would end the box it is put in, and say the rest outside
                return Verdict(False, "unparsed", f"unbalanced braces in the {name}")
        if normalize_answer(gold) == normalize_answer(answer):
            return Verdict(True, "exact")
        pair = _prepare(gold, answer, rule)
        if pair.differ:
            return Verdict(False, "exact", pair.differ)
        if not pair.percentage and (verdict := _decide_by_text(*map(normalize_answer, (pair.gold, pair.answer)))):
            return verdict
        return [
            _for_math_verify(pair.gold, pair.gold), _for_math_verify(pair.answer, pair.gold),
            rule.relative, rule.absolute, pair.percentage,
        ]  # fmt: skip

    def _in_workers(self, pairs: Sequence[_Task]) -> list[Verdict]:
        verdicts: list[Verdict | None] = [None] * len(pairs)
        waiting = list(range(len(pairs) - 1, -1, -1))
        left = len(pairs)
        crashed: set[int] = set()
        with selectors.DefaultSelector() as selector:
            for worker in self._running:
                selector.register(worker.results, selectors.EVENT_READ, worker)
            while left:
                while len(self._running) < min(self.workers, left):
                    worker = self._start()
                    selector.register(worker.results, selectors.EVENT_READ, worker)
                for worker in list(self._running):
                    if worker.ready and worker.task is None and waiting and not self._send(worker, waiting, pairs):
                        self._end(worker, selector)  # it died between two answers: the answer is still waiting
                now = time.monotonic()
                busy = [worker.deadline for worker in self._running if worker.task is not None or not worker.ready]
                for key, _ in selector.select(max(0.0, min(busy, default=now) - now)):
                    worker: _Worker = key.data
                    task = worker.task
                    verdict = self._receive(worker)
                    if verdict is not None and task is not None and verdict.how == "crash" and task not in crashed:
                        crashed.add(task)  # perhaps not the answer's fault: once more, in a fresh worker
                        waiting.append(task)
                    elif verdict is not None and task is not None:
                        verdicts[task] = verdict
                        left -= 1
                    if worker.process.returncode is not None or worker.graded >= self.tasks_per_worker:
                        self._end(worker, selector)
                now = time.monotonic()
                for worker in list(self._running):
                    if worker.deadline < now and not worker.ready:
                        raise RuntimeError("a grading worker did not start within 5 minutes")
                    if worker.deadline < now and worker.task is not None:
                        verdicts[worker.task] = Verdict(False, "timeout", f"{self.wall_seconds} s by the clock")
                        left -= 1
                        self._end(worker, selector)
        return [verdict for verdict in verdicts if verdict is not None]

    def _start(self) -> _Worker:
        task_in, task_out = os.pipe()
        result_in, result_out = os.pipe()
        folder = tempfile.mkdtemp(dir=self._folder)
        inherited = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "SYSTEMROOT") if name in os.environ}
        paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        # -P: the worker's own folder, with its statistics.py, must not come before the standard library
        command = [sys.executable, "-P", "-s", os.path.abspath(grading_worker.__file__), str(task_in), str(result_out)]
        try:
            process = subprocess.Popen(
                [*command, str(self.seconds), str(self.memory_mib)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(task_in, result_out),
                cwd=folder,
                env={**inherited, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(paths), "HOME": folder},
                start_new_session=True,
            )
        except BaseException:
            os.close(task_out)
            os.close(result_in)
            raise
        finally:
            os.close(task_in)
            os.close(result_out)
        worker = _Worker(process, task_out, result_in, deadline=time.monotonic() + 300)
        self._running.append(worker)
        return worker

    def _send(self, worker: _Worker, waiting: list[int], pairs: Sequence[_Task]) -> bool:
        message = json.dumps(pairs[waiting[-1]]).encode() + b"\n"
        try:
            while message:
                message = message[os.write(worker.tasks, message) :]
        except BrokenPipeError:
            return False
        worker.task = waiting.pop()
        worker.deadline = time.monotonic() + self.wall_seconds
        return True

    def _receive(self, worker: _Worker) -> Verdict | None:
        """The verdict that a worker sent, or that follows from its exit; None if there is none yet."""
        piece = os.read(worker.results, 65536)
        worker.received += piece
        if not piece:  # it is gone
            worker.process.wait()
            return self._of_the_dead(worker)
        if not worker.received.endswith(b"\n"):
            return None
        message, worker.received = worker.received, b""
        said = json.loads(message)
        if not worker.ready:
            if said != "ready":
                raise RuntimeError(f"a grading worker could not start: {said}")
            worker.ready = True
            return None
        worker.task = None
        worker.graded += 1
        found, parsed = said
        if found == "close":
            return Verdict(True, "tolerance")
        if found == "equal" or parsed == "both":
            return Verdict(found == "equal", "math_verify")
        return Verdict(False, "unparsed", f"math-verify cannot read the {parsed}")

    def _of_the_dead(self, worker: _Worker) -> Verdict | None:
        code = worker.process.returncode
        if not worker.ready:
            raise RuntimeError(f"a grading worker ended while starting ({_ending(code)}); is memory_mib too small?")
        if worker.task is None:
            return None
        if code in (-signal.SIGPROF, -signal.SIGXCPU):
            return Verdict(False, "timeout", f"{self.seconds} s of cpu time")
        return Verdict(False, "crash", _ending(code))

    def _end(self, worker: _Worker, selector: selectors.BaseSelector) -> None:
        selector.unregister(worker.results)
        self._running.remove(worker)
        _stop(worker)


def _ending(code: int | None) -> str:
    if code == REFUSED:
        return "it tried something that grading never needs"
    return f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"


def _stop(worker: _Worker) -> None:
    if worker.process.poll() is None:
        try:
            os.killpg(worker.process.pid, signal.SIGKILL)  # its session: it, and whatever it might have started
        except (ProcessLookupError, PermissionError):  # between the fork and setsid there is no such group yet
            worker.process.kill()
        worker.process.wait()
    os.close(worker.tasks)
    os.close(worker.results)


def _stop_all(running: list[_Worker]) -> None:
    while running:
        _stop(running.pop())


def _close(running: list[_Worker], folder: str) -> None:
    _stop_all(running)
    shutil.rmtree(folder, ignore_errors=True)
