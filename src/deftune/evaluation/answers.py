"""Answers as text: normalisation, units, and the verdicts that need no mathematics; `grading` decides the others."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from deftune.evaluation.extraction import count_answers
from deftune.evaluation.notation import tidy_answer, trimmed
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
    boxes. ``hedges``: an answer may begin with "approximately" or the like.
    """

    relative: float = 0.0
    absolute: float = 0.0
    unit: str = ""
    several: bool = False
    hedges: bool = True

    def __post_init__(self) -> None:
        for name, value in (("relative", self.relative), ("absolute", self.absolute)):
            if not 0 <= value < 1:
                raise ValueError(f"{name}: a tolerance is from 0 to below 1, got {value}")


EQUAL = Rule()


# --- equal text ------------------------------------------------------------------------------------------------------

_FORMULAS = [
    re.compile(pattern, re.DOTALL) for pattern in (r"\$\$(.+)\$\$", r"\$(.+)\$", r"\\\((.+)\\\)", r"\\\[(.+)\\\]")
]
_SPACING = re.compile(r"\\[!,;: ]|\\(?:quad|qquad|left|right|displaystyle|limits)(?![A-Za-z])|~")
_FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_SHORT_FRACTION = re.compile(r"\\frac\s*([0-9])\s*([0-9])(?![0-9])")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_SPACES = re.compile(r"\s+")
_SPACE_TO_DROP = re.compile(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])")
_THOUSANDS = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+")
_DEGREES = re.compile(r"\^\s*\\circ(?![A-Za-z])|\^\s*\{\s*\\circ\s*\}|°")
_GROUPED_NUMBER = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})++(?!,?[0-9])")
_STATED_THOUSANDS = re.compile(r"(=\s*(?:\\?\$)?-?)([0-9]{1,3}(?:,[0-9]{3})++)(?![0-9,])")


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
    answer = trimmed(answer)
    for pattern in _FORMULAS:
        if formula := pattern.fullmatch(answer):
            answer = formula[1].strip().removesuffix(".")
    answer = answer.replace("{,}", ",").replace(r"\$", "").replace("\N{MINUS SIGN}", "-")
    listed = re.search(r",\s", answer)  # "32, 349" is two numbers, "32,349" is one
    answer = _DEGREES.sub("", _SPACING.sub(" ", answer.replace(r"\!", "")))
    answer = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", _FRACTION.sub(r"\\frac", answer))
    answer = _TEXT.sub(r" \1 ", answer)
    answer = _SPACE_TO_DROP.sub("", _SPACES.sub(" ", answer)).strip()
    if _THOUSANDS.fullmatch(answer.lstrip("+-")) and not listed:
        answer = answer.replace(",", "").replace(" ", "")
    return answer


def join_thousands(answer: str, other: str) -> str:
    """A list without thousands separators, if it then has as many answers as ``other``, and has not with them.

    >>> join_thousands("2,000 and 3,000", "2000, 3000"), join_thousands("2,000 and 3,000", "2, 0, 3, 0")
    ('2000 and 3000', '2,000 and 3,000')
    """
    number, joined = count_answers(other, parted=True), _GROUPED_NUMBER.sub(lambda m: m[0].replace(",", ""), answer)
    fits = count_answers(answer, parted=True) != number == count_answers(joined)
    return joined if number > 1 and fits else answer


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


_IN_BASE = re.compile(r"\(?(-?[0-9A-Za-z.]++)\)?\s?(?:_\{?\(?(?:base\s?)?|\(?base\s?)([0-9]+)\)?\}?")
_INTEGER = re.compile(r"-?[0-9]+")
_CLOCK = re.compile(r"0*([0-9]{1,2}):([0-5][0-9])")
_RATIO = re.compile(r"[1-9][0-9]{0,40}(?::[1-9][0-9]{0,40})*")
_BRACKETS = re.compile(r"(?:\\left)?\s*(\\\{|[(\[]).*(\\\}|[)\]])", re.DOTALL)


def _lowest(ratio: str) -> list[int]:
    """The terms of 2:4:6 without their common divisor: 1, 2, 3."""
    terms = [int(term) for term in ratio.split(":")]
    return [term // math.gcd(*terms) for term in terms]


def _is_time(clock: re.Match[str]) -> bool:
    """Whether 3:30 or 3:05 is a time of day: a ratio is in lowest terms, and without zeros before its numbers."""
    return clock[2].startswith("0") or math.gcd(int(clock[1]), int(clock[2])) != 1


def decide_by_text(gold: str, answer: str) -> Verdict | None:
    """The verdict on answers that math-verify reads incompletely: numerals with a base, times of day, sets."""
    if gold == answer:
        return Verdict(True, "exact")
    ours, theirs = _IN_BASE.fullmatch(gold), _IN_BASE.fullmatch(answer)
    if ours and theirs:  # 42_7 would be 42_8
        return Verdict(ours.groups() == theirs.groups(), "exact", "numerals with a base")
    if theirs and _INTEGER.fullmatch(gold):  # a gold without a base is decimal
        return Verdict((theirs[1], theirs[2]) == (gold, "10"), "exact", "a numeral with a base")
    if _RATIO.fullmatch(gold) and _RATIO.fullmatch(answer) and (gold + answer).count(":") > 2:  # 1:2:3 would be 1/6
        return Verdict(_lowest(gold) == _lowest(answer), "exact", "ratios")
    clock, other = _CLOCK.fullmatch(gold), _CLOCK.fullmatch(answer)
    if clock and _is_time(clock):
        return Verdict(other is not None and other.groups() == clock.groups(), "exact", "times of day")
    if other and other[2].startswith("0") and not _INTEGER.fullmatch(gold):  # 3:05 would be 3/5
        return Verdict(False, "exact", "a time of day")
    ours, theirs = _BRACKETS.fullmatch(gold), _BRACKETS.fullmatch(answer)
    points = r"\{(" in gold + answer  # {(1,2)} is the point (1,2)
    if ours and theirs and (ours[1] == r"\{") != (theirs[1] == r"\{") and r"\cup" not in gold + answer and not points:
        if count_answers(gold if theirs[1] == r"\{" else answer, parted=True) == 1:  # not (1,2),(3,4)
            return Verdict(False, "exact", "a set, and a pair or an interval")
    return None


_MIXED = re.compile(r"(-?[0-9]+) ([0-9]+)/([0-9]+)")
_AND = re.compile(r",?\s*\\text\s*\{\s*,?\s*(?:and|or)\s*\}\s*")
_EXPONENT = re.compile(r"(?<![\w\\.])([0-9]+(?:\.[0-9]+)?)[eE]([+-]?[0-9]+)(?![\w.])")
_LONE_POINT = re.compile(r"(?<=[0-9])\.(?=[/)\s]|$)")
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


def for_math_verify(answer: str, gold: str) -> str:
    r"""The answer as math-verify reads it: one \boxed{...}, a list with commas, and 4.5e33 as a power of ten.

    Without this it reads 4.5e33 as 4.5 e 33, 1 1/2 as 11/2, y' as y, a column \binom{1}{2} as 0, \gamma^2 - 1 as the
    Gamma function of -1, and, where the gold has them, a variable I as the imaginary unit and a name SRAC as a
    product. It gives up on a \text{ and } between two answers, on >=, on E_1, on 1./3 and on
    np.arcsin.
    """
    answer = trimmed(answer)
    answer = _EXPONENT.sub(r"\1 \\times 10^{\2}", _AND.sub(", ", answer))
    answer = _LONE_POINT.sub("", answer).replace(r"\odot", "sun")
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


# --- pairs ------------------------------------------------------------------------------------------------------------

_NOT_VARIABLES = re.compile(
    r"\\(?:text(?:rm|bf|it|sf|normal)?|mathrm|mbox|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+|(?<=[0-9])[eE](?=[-+]?[0-9])"
)
_PERCENT = re.compile(
    r"(?<!\s)\s*+(?:\\?%|\\text\s*\{\s*\\?%\s*\}|(?:\\text\s*\{)?\s*\b(?:percent|percentage|pct)\b\s*\}?)\s*$"
)
_ABOUT = re.compile(r"\s*(?:=|\\(?:approx|simeq|sim)(?![A-Za-z])|\N{ALMOST EQUAL TO})")
_HEDGE = re.compile(
    r"(\\(?:text|textrm|mathrm|mbox)\s*\{\s*)?(?:approximately|approx|about|around|roughly)\b\.?[\s~]*+(\})?[\s~]*+"
    r"(?=[-+]?\s?(?:\.?[0-9]|\\(?:[dtc]?frac|sqrt|pi)(?![A-Za-z])|\\\$))",
    re.IGNORECASE,
)
_IN_DOLLARS = re.compile(r"(?<!\\)\$([^$]*)(?<!\\)\$")
# what a figure calls the value that is asked for: AB, |AB|, S_1 : S_2, \frac{AB}{CD}, \angle ABC
_LABEL = r"(?:\\(?:angle|triangle|overline)\s*)?\{?[A-Z]{1,6}(?:_(?:\w|\{\w+\}))?\}?"
_LABELLED = re.compile(
    rf"(^\s*|,\s*)(?:\\frac\s*\{{\s*{_LABEL}\s*\}}\s*\{{\s*{_LABEL}\s*\}}|\|\s*{_LABEL}\s*\||{_LABEL}(?:\s*[:/]\s*{_LABEL})?)"
    r"\s*=\s*(?=[^=<>,]*[0-9][^=<>,]*(?:,|\Z))"
)


def _has_variables(gold: str) -> bool:
    """Whether a gold (of x = 5 the 5) has variables, so that a letter at the end of an answer may not be a unit."""
    value = re.split(r"(?<![<>!\\])=", gold)[-1]
    return bool(set(re.findall(r"[A-Za-z]", _NOT_VARIABLES.sub(" ", value))) - {"e", "i"})


@dataclass(frozen=True)
class Pair:
    """Two answers ready to be compared: their units split off, and which of them is a percentage.

    ``percentage``: "" where both have a percent sign or none has. "answer": for a gold 5 or 0.05, 5% is right. "gold":
    for a gold 5%, 0.05 is right, and 5 is not. "unit": for a gold 5% whose sign stands outside the box, 5 is, too.
    """

    gold: str
    answer: str
    percentage: str = ""
    differ: str = ""  # why they are different whatever their numbers are


def prepare_pair(gold: str, answer: str, rule: Rule) -> Pair:
    gold, answer = (tidy_answer(_IN_DOLLARS.sub(r"\1", text)) for text in (gold, answer))
    if about := _ABOUT.match(answer):
        answer = answer[about.end() :].strip()
    if rule.hedges and (hedge := _HEDGE.match(answer)):
        answer = (hedge[1] if hedge[1] and not hedge[2] else "") + answer[hedge.end() :]
    if "=" not in answer:
        gold = _LABELLED.sub(r"\1", gold)
    gold, answer = join_thousands(gold, answer), join_thousands(answer, gold)
    if rule.several:  # "8,221" beside "221,8" is no number of thousands
        gold, answer = (re.sub(r",(?=[0-9])", ", ", text) for text in (gold, answer))
    else:  # x = 14,000
        gold, answer = (_STATED_THOUSANDS.sub(lambda m: m[1] + m[2].replace(",", ""), text) for text in (gold, answer))
    value, unit = split_unit(gold, words=True)
    letter = re.fullmatch(r"[A-Za-z](?:\s?\^.*)?", unit)
    if _has_variables(value) or (unit and parse_unit(unit) is None and len(unit) < 3) or letter:
        value, unit = split_unit(gold, words=False)  # the m of 6m is a variable, and the s of 3s^2
    named, said = _has_variables(value), drop_unit(answer, rule.unit)
    theirs, other = split_unit(said, words=not named)
    percents: list[str] = []
    if percent := _PERCENT.search(value):
        value, percents = value[: percent.start()].strip(), ["unit" if rule.unit == "%" else "gold"]
    if percent := _PERCENT.search(theirs):
        theirs, percents = theirs[: percent.start()].strip(), [*percents, "answer"]
    unit = unit or rule.unit
    differ = f"the units differ: {unit} and {other}" if units_differ(unit, other) else ""
    return Pair(value, theirs, percents[0] if len(percents) == 1 else "", differ)
