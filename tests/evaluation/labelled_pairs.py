"""Labelled (gold, answer) pairs made from the real answers of MATH, for the grader's agreement test.

A positive is a gold answer written differently by a rewrite that cannot change its meaning; a negative is the gold
answer with one number, sign, bracket or coordinate changed, or another problem's answer of the same kind. The label is
true by construction, never by the grader's own parser.
"""

import gzip
import json
import random
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"

INTEGER = re.compile(r"-?\d+")
DECIMAL = re.compile(r"-?\d*\.\d+")
FRACTION = re.compile(r"(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")
LIST = re.compile(r"[^()\[\]{}\\]+(?:,[^()\[\]{}\\]+)+")
PAIR = re.compile(r"(?:\\left)?([(\[])([^()\[\],]+),([^()\[\],]+?)(?:\\right)?([)\]])")
SUM = re.compile(r"(\d+)\s*([+-])\s*(\d*\\sqrt\{\d+\})")
TEXT = re.compile(r"\\text\{([A-Za-z ]+)\}")
UNITS = re.compile(r"(-?\d+(?:\.\d+)?)\s*\\text\{ [a-z ]+\}")
DEGREES = re.compile(r"(-?\d+(?:\.\d+)?)\^\{?\\circ\}?")
THOUSANDS = re.compile(r"-?\d{1,3}(?:,\\!\d{3})+")


def read_answers() -> list[str]:
    answers: set[str] = set()
    for name in ("train", "test"):
        with gzip.open(DATA / "math" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
            answers.update(json.loads(line)["answer"] for line in lines)
    return sorted(answers)


def value(answer: str) -> Fraction | None:
    """The rational an answer is, where that can be read off without a parser."""
    if INTEGER.fullmatch(answer) or DECIMAL.fullmatch(answer):
        return Fraction(answer)
    if match := FRACTION.fullmatch(answer):
        return Fraction(int(match[1] + match[2]), int(match[3])) if int(match[3]) else None
    return Fraction(answer.replace(",\\!", "")) if THOUSANDS.fullmatch(answer) else None


def decimal(number: Fraction) -> str | None:
    """As a terminating decimal of at most six places."""
    for places in range(1, 7):
        scaled = number * 10**places
        if scaled.denominator == 1:
            digits = str(abs(scaled.numerator)).rjust(places + 1, "0")
            return f"{'-' if number < 0 else ''}{digits[:-places]}.{digits[-places:]}"
    return None


def positives(gold: str) -> Iterator[tuple[str, str]]:
    """(rewrite's name, the same answer written differently)."""
    if not gold.endswith("."):
        yield "period", gold + "."
    yield "dollars", f"${gold}$"
    number = value(gold)
    if INTEGER.fullmatch(gold):
        yield "x =", f"x = {gold}"
        yield "point zero", gold + ".0"
        if abs(int(gold)) >= 1000:
            yield "thousands", f"{int(gold):,}"
            yield "thousands in braces", f"{int(gold):,}".replace(",", "{,}")
    if THOUSANDS.fullmatch(gold):
        yield "no thousands", gold.replace(",\\!", "")
        yield "plain thousands", gold.replace("\\!", "")
    if number is not None and number.denominator > 1:
        sign, top, bottom = "-" if number < 0 else "", abs(number.numerator), number.denominator
        yield "slash", f"{sign}{top}/{bottom}"
        yield "dfrac", f"{sign}\\dfrac{{{top}}}{{{bottom}}}"
        yield "tfrac", f"{sign}\\tfrac{{{top}}}{{{bottom}}}"
        yield "not reduced", f"{sign}\\frac{{{2 * top}}}{{{2 * bottom}}}"
        yield "x = fraction", f"x={sign}\\frac{{{top}}}{{{bottom}}}"
        if sign:
            yield "sign inside", f"\\frac{{-{top}}}{{{bottom}}}"
        if top < 10 and bottom < 10:
            yield "short fraction", f"{sign}\\frac{top}{bottom}"
        if (written := decimal(number)) and DECIMAL.fullmatch(written):
            yield "decimal", written
    if DECIMAL.fullmatch(gold):
        yield "trailing zero", gold + "0"
    if match := TEXT.fullmatch(gold):
        yield "bare text", match[1]
        yield "mathrm", f"\\mathrm{{{match[1]}}}"
    if match := UNITS.fullmatch(gold):
        yield "no units", match[1]
    if match := DEGREES.fullmatch(gold):
        yield "no degrees", match[1]
        yield "degrees in braces", f"{match[1]}^{{\\circ}}"
    if match := SUM.fullmatch(gold):
        yield "sum turned round", f"{match[3]}+{match[1]}" if match[2] == "+" else f"-{match[3]}+{match[1]}"
    if LIST.fullmatch(gold) and not re.search(r"[a-zA-Z=:]", gold) and not re.search(r"\d,\s*\d{3}(?!\d)", gold):
        yield "list turned round", ",".join(reversed(gold.split(",")))
        yield "list in braces", "\\{" + gold + "\\}"
        yield "list with and", " \\text{ and } ".join(gold.split(",")) if gold.count(",") == 1 else gold + " "
    if match := PAIR.fullmatch(gold):
        yield "left right", f"\\left{match[1]} {match[2].strip()}, {match[3].strip()} \\right{match[4]}"
        yield "no left right", f"{match[1]}{match[2].strip()},{match[3].strip()}{match[4]}"
    if re.search(r"\\text\{,? ?(?:and|or) ?\}", gold):
        yield "commas for and", re.sub(r",?\s*\\text\{,? ?(?:and|or) ?\}\s*", ", ", gold)
    if gold.count("\\cup") == 1:
        first, second = gold.split("\\cup")
        yield "union turned round", f"{second.strip()} \\cup {first.strip()}"
    if "pmatrix" in gold:
        yield "bmatrix", gold.replace("pmatrix", "bmatrix")
        yield "tight matrix", re.sub(r"\s*(\\\\|&)\s*", r"\1", gold)
    if short := re.fullmatch(r"(.*)\\sqrt\{(\d)\}", gold):
        yield "short root", f"{short[1]}\\sqrt{short[2]}"
    if product := re.fullmatch(r"(\d+)\s*\\(sqrt\{\d+\}|pi)", gold):
        yield "cdot", f"{product[1]} \\cdot \\{product[2]}"
    if re.fullmatch(r"[-+0-9a-z^ ]+", gold) and re.search(r"[a-z]", gold) and re.search(r"[+-]", gold[1:]):
        yield "loose", re.sub(r"\s*([+-])\s*", r" \1 ", gold)
        yield "tight", gold.replace(" ", "")
        yield "braced powers", re.sub(r"\^(\d)", r"^{\1}", gold)


def negatives(gold: str, others: list[str], draw: random.Random) -> Iterator[tuple[str, str]]:
    """(what was changed, a different answer)."""
    number = value(gold)
    literals = [match for match in re.finditer(r"(?<![\d.,])\d+(?![\d.,])", gold) if len(match[0]) < 12]
    if literals and not re.search(r"\\text|mod|_", gold):
        match = draw.choice(literals)
        yield "one more", f"{gold[: match.start()]}{int(match[0]) + 1}{gold[match.end() :]}"
    if number:
        yield "other sign", gold[1:] if gold.startswith("-") else "-" + gold
        yield "ten times", str(int(gold) * 10) if INTEGER.fullmatch(gold) else "10" + gold.lstrip("-0.")
    if match := PAIR.fullmatch(gold):
        if "infty" not in gold:
            if re.sub(r"\s", "", match[2]) != re.sub(r"\s", "", match[3]):
                yield "coordinates swapped", f"{match[1]}{match[3]},{match[2]}{match[4]}"
        if match[1] == "[":
            yield "other bracket", "(" + gold.split("[", 1)[1]
    if LIST.fullmatch(gold) and not re.search(r"[a-zA-Z=:]", gold):
        parts = [part.strip() for part in gold.split(",")]
        if len(set(parts)) == len(parts) and not re.search(r"\d,\s*\d{3}(?!\d)", gold):
            yield "one missing", ",".join(parts[1:])
            yield "one too many", gold + ",91919"
    for other in draw.sample(others, 12):
        theirs = value(other)
        if (number is None) != (theirs is None):
            continue
        if number is not None and number != theirs:
            yield "another number", other
            break
        if number is None and sorted(re.findall(r"\d+", gold)) != sorted(re.findall(r"\d+", other)):
            yield "another answer", other
            break


def labelled_pairs(count: int, *, seed: int) -> list[tuple[str, str, str, bool]]:
    """(gold, answer, what was done, label), half of them correct; each rewrite about as often as it can be."""
    draw = random.Random(seed)
    answers = read_answers()
    made: dict[bool, dict[str, list[tuple[str, str, str, bool]]]] = {True: {}, False: {}}
    for gold in answers:
        for name, answer in positives(gold):
            if answer != gold:
                made[True].setdefault(name, []).append((gold, answer, name, True))
        for name, answer in negatives(gold, answers, draw):
            made[False].setdefault(name, []).append((gold, answer, name, False))
    chosen: list[tuple[str, str, str, bool]] = []
    for kinds in made.values():
        for pairs in kinds.values():
            draw.shuffle(pairs)
        names, taken = sorted(kinds), 0
        while taken < count // 2 and any(kinds.values()):
            name = names[taken % len(names)]
            names = [other for other in names if kinds[other]]
            if kinds[name]:
                chosen.append(kinds[name].pop())
                taken += 1
    draw.shuffle(chosen)
    return chosen
