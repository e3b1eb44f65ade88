"""Labelled (gold, answer) pairs made from the real answers of MATH, for the grader's agreement test.

`DIFFERENT` and `SAME` are pairs written by hand, for what graders get wrong; `wrong_answers` and `right_answers` are
made from a gold answer of any form.

A positive is a gold answer written differently by a rewrite that cannot change its meaning; a negative is the gold
answer with one number, sign, bracket or coordinate changed, or another problem's answer of the same kind. The label is
true by construction, never by the grader's own parser.
"""

import gzip
import json
import random
import re
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from pathlib import Path

from deftune.evaluation.answers import Rule

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
    yield "displaystyle", f"\\displaystyle {gold}"
    yield "markdown", f"**{gold}**"
    number = value(gold)
    if number is not None:
        yield "bold", f"\\mathbf{{{gold}}}"
        yield "pounds", f"\N{POUND SIGN}{gold}"
    if INTEGER.fullmatch(gold):
        yield "x =", f"x = {gold}"
        yield "point zero", gold + ".0"
        if abs(int(gold)) >= 1000:
            yield "thousands", f"{int(gold):,}"
            yield "thousands in braces", f"{int(gold):,}".replace(",", "{,}")
            yield "x = thousands", f"x = {int(gold):,}"
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
        yield "degrees as a letter", f"{match[1]}^{{o}}"
    if match := SUM.fullmatch(gold):
        yield "sum turned round", f"{match[3]}+{match[1]}" if match[2] == "+" else f"-{match[3]}+{match[1]}"
    if LIST.fullmatch(gold) and not re.search(r"[a-zA-Z=:]", gold) and not re.search(r"\d,\s*\d{3}(?!\d)", gold):
        yield "list turned round", ",".join(reversed(gold.split(",")))
        yield "list in braces", "\\{" + gold + "\\}"
        yield "list with and", " \\text{ and } ".join(gold.split(",")) if gold.count(",") == 1 else gold + " "
    if match := PAIR.fullmatch(gold):
        yield "left right", f"\\left{match[1]} {match[2].strip()}, {match[3].strip()} \\right{match[4]}"
        yield "no left right", f"{match[1]}{match[2].strip()},{match[3].strip()}{match[4]}"
        yield "big", f"\\big{match[1]} {match[2].strip()}, {match[3].strip()} \\big{match[4]}"
        if match[1] + match[4] != "()" and "infty" not in gold:
            low, high = (r"\leq" if bracket in "[]" else "<" for bracket in (match[1], match[4]))
            yield "inequality", f"{match[2].strip()} {low} x {high} {match[3].strip()}"
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
        yield "root sign", f"{short[1]}\N{SQUARE ROOT}{short[2]}"
    if product := re.fullmatch(r"(\d+)\s*\\(sqrt\{\d+\}|pi)", gold):
        yield "cdot", f"{product[1]} \\cdot \\{product[2]}"
    if re.fullmatch(r"[-+0-9a-z^ ]+", gold) and re.search(r"[a-z]", gold) and re.search(r"[+-]", gold[1:]):
        yield "loose", re.sub(r"\s*([+-])\s*", r" \1 ", gold)
        yield "tight", gold.replace(" ", "")
        yield "braced powers", re.sub(r"\^(\d)", r"^{\1}", gold)
        yield "starred powers", re.sub(r"\^(\d)", r"**\1", gold)


def negatives(gold: str, others: list[str], draw: random.Random) -> Iterator[tuple[str, str]]:
    """(what was changed, a different answer)."""
    number = value(gold)
    literals = [match for match in re.finditer(r"(?<![\d.,])\d+(?![\d.,])", gold) if len(match[0]) < 12]
    if literals and not re.search(r"\\text|mod|_", gold):
        match = draw.choice(literals)
        yield "one more", f"{gold[: match.start()]}{int(match[0]) + 1}{gold[match.end() :]}"
    if INTEGER.fullmatch(gold):
        yield "upright i", f"{gold}\\mathrm{{i}}" if int(gold) else "i"
    if re.fullmatch(r"[1-9][0-8]+", gold):
        yield "in base nine", f"{gold}_{{9}}"
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


# --- by hand ---------------------------------------------------------------------------------------------------------

EXACT, NEAR, SEVERAL = Rule(), Rule(relative=1e-4), Rule(several=True)

DIFFERENT = [
    ("3<x<4", r"x \in (3,5)", EXACT),
    ("x=3", r"x \in (3,4)", EXACT),
    (r"x \in (3,4]", "x=3", EXACT),
    (r"(3,\infty)", "x=4", EXACT),
    (r"(3,\infty)", r"x \neq 3", EXACT),
    ("(3,4]", "x>3, x=4", EXACT),
    ("(2e-9, 1)", "(3e-9, 1)", EXACT),
    ("(1, 2)", "3", EXACT),
    ("3", "(1,2)", EXACT),
    (r"\begin{pmatrix} 2e-9 \\ 1 \end{pmatrix}", r"\begin{pmatrix} 3e-9 \\ 1 \end{pmatrix}", EXACT),
    (r"\begin{pmatrix} 1 & 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", EXACT),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "3", EXACT),
    ("(3,4]", "3<x<y", EXACT),
    ("(1, 2)", "2, 1", EXACT),
    ("1, 2", "(1, 3)", EXACT),
    ("E=9", "E = m c^2 = 8", EXACT),
    ("2x>6", "x<3", EXACT),
    ("x>y", "xz>yz", EXACT),
    ("2x>6", "-x>-3", EXACT),
    ("x^2=4", "x=2", EXACT),
    ("x^2=4", "x^3=8", EXACT),
    ("x=2", "x^2=4", EXACT),
    ("x = x", "y = y", EXACT),
    (r"\frac{1}{0}", "5", EXACT),
    ("5", r"\frac{1}{0}", EXACT),
    ("1", "1.0000006", EXACT),
    ("2", "2.00021", NEAR),
    ("100 = 1", "x", EXACT),
    (r"\{1,2\}", "(1,2)", EXACT),
    ("10^{60}", "10^{60}+1", EXACT),
    ("2^{2008}-2", "2^{2008}-3", EXACT),
    (r"\frac{1}{3^{2007}}", r"\frac{1}{3^{2007}+1}", EXACT),
    (r"\pi^{100}", r"\pi^{100}+10^{-5}", EXACT),
    ("ABC", "CBA", EXACT),
    ("2000, 3000", "2,000 and 4,000", EXACT),
    ("2000", "2,000 and 3,000", EXACT),
    ("2, 3000", "2,000 and 3,000", EXACT),
    *[(r"50\%", answer, EXACT) for answer in ("5000", "5", "0.05")],
    *[(gold, r"50\%", EXACT) for gold in ("5000", "5", "0.05")],
    *[("5", answer, EXACT) for answer in ("500", "0.05")],
    ("AB = 5, CD = 7", "5", EXACT),
    ("AB = 5, CD = 7", "5, 8", EXACT),
    *[("1,234", answer, EXACT) for answer in ("234,1", "1")],
    # a tolerance does not read the right-hand side of just any relation
    *[("x>3", answer, NEAR) for answer in ("x<3", "3")],
    (r"x \ne 3", "3", NEAR),
    ("3x+2y=6", "6", NEAR),
    ("3x+2y=6", "5x=6", NEAR),
    ("x^2+y^2=4", "z=4", NEAR),
    ("a=1,b=2", "b=1,a=2", NEAR),
    *[
        (gold, answer, NEAR)
        for gold in (r"y^{\prime}+r y-r x(t)=0", r"x^{\prime}+\frac{r}{V} x-r c=0", "y'+ry-rx(t)=0")
        for answer in ("0", "x=0", r"\text{banana}=0")
    ],
    # tiny numbers are not equal to each other
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}", EXACT),
    (r"\frac{1}{52!}", r"\frac{4}{52!}", EXACT),
    (r"\left(\frac12\right)^{100}", r"\left(\frac13\right)^{100}", EXACT),
    (r"\frac{1}{26^{12}}", r"\frac{1}{26^{13}}", EXACT),
    (r"1-\frac{1}{2^{100}}", r"1-\frac{1}{2^{99}}", EXACT),
    (r"\sqrt{2}+10^{-30}", r"\sqrt{2}", EXACT),
    *[
        ("2.88e-19", answer, rule)
        for answer in ("2.88e-18", "1e-30", "-2.88e-19", "0", "0.0")
        for rule in (EXACT, NEAR)
    ],
    *[("5.89e-7", answer, NEAR) for answer in ("0.000001178", "0.0", "0", r"5.95 \times 10^{-7}")],
    (r"10^{-20} x", r"2 \cdot 10^{-20} x", EXACT),
    (r"(10^{-20}, 1)", r"(2 \cdot 10^{-20}, 1)", EXACT),
    (r"10^{-20} + i", r"2 \cdot 10^{-20} + 2 i", EXACT),
    ("123456.7", "123456.8", EXACT),
    ("1000000", "1000001.0", EXACT),
    # relations are not equal because both have no solution, or none was found
    ("I=5", "I=6", EXACT),
    ("I_p=5t", "I_p=6t", EXACT),
    (r"\frac{dy}{dx}=2x", r"\frac{dy}{dx}=3x", EXACT),
    ("x^2+50=0", "x^2+49=0", EXACT),
    (r"\sin x=2", r"\sin x=3", EXACT),
    ("0=1", "0=2", EXACT),
    ("|A|=-2", "|A|=7", EXACT),
    (r"y=c\binom{1}{2}e^t", r"y=c\binom{1}{3}e^{2t}", EXACT),
    ("x^2=x", "x=1", EXACT),
    ("xy=6", "6", EXACT),
    *[
        (r"\frac{d x}{d t}=k x-a", answer, NEAR)
        for answer in (r"\frac{d x}{d t}=a-kx", r"\frac{d x}{d t}=2kx-2a", "kx=a", "k x-a")
    ],
    (r"m \frac{d v}{d t}+b v=f", "bv=f", NEAR),
    (r"m \frac{d v}{d t}+b v=f", r"-m \frac{d v}{d t}+b v=f", NEAR),
    (r"I \frac{d \omega}{d t}+2 B \omega=T", r"2B\omega=T", NEAR),
    ("SRAC=LRAC", "CARS=LRAC", NEAR),
    ("y'=2y", "y=2y", EXACT),
    (r"m\left(\gamma^{2}-1\right)", r"m\left(\gamma^{3}-1\right)", EXACT),
    ("x<3", "x>3", EXACT),
    ("x<3", r"x\leq 3", EXACT),
    ("2x<6", "x>3", EXACT),
    ("x=1,y=2", "x=2,y=1", EXACT),
    ("x=5", "y=5", EXACT),
    ("x=10^{-20}", r"x=2 \cdot 10^{-20}", EXACT),
    ("x^2-y^2=0", "x-y=0", EXACT),
    # a last variable is no unit
    ("6m", "6", EXACT),
    (r"\frac{1}{m} t", r"\frac{1}{m}", NEAR),
    ("-9.8 t", "-9.8", EXACT),
    ("v t", "v", EXACT),
    ("m g h", "m g", EXACT),
    ("2m", "2g", EXACT),
    ("3s^2", "3", EXACT),
    ("3s^2", "3s^3", EXACT),
    (r"\frac{37}{4} m", r"\frac{37}{4}", NEAR),
    # lists are no sets, a set is no pair
    ("16,3,1,1", "16,3,1", SEVERAL),
    ("16,3,1,1", "16,3,3,1", SEVERAL),
    ("-2,-2", "-2", SEVERAL),
    ("1,2", "1,2,2", EXACT),
    ("(0,1)", r"\{0,1\}", EXACT),
    (r"\{0,1\}", "(0,1)", EXACT),
    ("[0,1]", r"\left\{0,1\right\}", EXACT),
    # units
    ("5 cm", "5 m", EXACT),
    (r"12:30 \text{ p.m.}", r"12:30 \text{ a.m.}", EXACT),
    (r"4:30\text{ p.m.}", "4:30 AM", EXACT),
    (r"4\text{ PM}", r"4\text{ a.m.}", EXACT),
    ("3 hours", "3 minutes", EXACT),
    ("15 cm^2", "15 cm^3", EXACT),
    (r"15\mbox{ cm}^2", r"15\text{ cm}^3", EXACT),
    (r"\$5", "5 cents", EXACT),
    ("3:30", "0.1", EXACT),
    ("3:30", "3:31", EXACT),
    *[(gold, answer, EXACT) for gold, answer in (("3:05", "3:5"), ("3:5", "3:05"), ("3:04", "3:4"), ("3:05", "6:10"))],
    *[("3:05", answer, EXACT) for answer in ("3:06", r"\frac{3}{5}", "0.6")],
    *[(gold, "3:05", EXACT) for gold in (r"\frac{3}{5}", "0.6", "6:10")],
    # a percent sign of the gold is a factor of 1/100
    *[(r"5\%", answer, EXACT) for answer in ("5", "5.0", "x=5", "500", "0.5", "0.0005")],
    *[(r"x=5\%", answer, EXACT) for answer in ("5", "x=5", "x=0.5")],
    (r"\frac{1}{3}\%", r"\frac{1}{3}", EXACT),
    # approximately
    ("59", "approximately 58", EXACT),
    ("59", r"\text{about } 590", EXACT),
    ("59", "approximately", EXACT),
    ("59", "about x", EXACT),
    ("59", "whereabouts 59", EXACT),
    ("59", "approximately 59", Rule(hedges=False)),
    # the solutions of a gold equation
    ("x^2=4", r"x=\pm 3", EXACT),
    ("x^2=4", r"y=\pm 2", EXACT),
    ("x^2=4", "x=2, x=2", EXACT),
    ("x^2=4", "x=2, x=-2, x=3", EXACT),
    ("x^3=x", r"x=\pm 1", EXACT),
    ("x=2", r"x=\pm 2", EXACT),
    (r"x=\pm 2", "x=2", EXACT),
    (r"x=2 \text{ or } x=-2", "x^2=4", EXACT),
    ("x^2+y=4", r"x=\pm 2", EXACT),
    *[(gold, r"x=\pm 2", EXACT) for gold in ("x<4", "x^2<4", r"x^2 \ne 4")],
    ("18", "18 million", EXACT),
    ("18", "18 halves", EXACT),
    ("18", "18 squared", EXACT),
    ("2", "2xy", EXACT),
    ("50", r"0.4\%", EXACT),
    ("50", r"51.0\%", EXACT),
    # an upright i is no unit
    ("3", r"3\mathrm{i}", EXACT),
    ("6-5", r"6-5\mathrm{i}", EXACT),
    # a numeral with a base
    ("100", "100_{9}", EXACT),
    ("81", "100_9", EXACT),
    ("-50", "-50_{9}", EXACT),
    ("0.0011_{2}", "0.0011_{3}", EXACT),
    ("52_8", "(52)_{9}", EXACT),
    # intervals and inequalities
    ("(3,4]", "3<x<4", EXACT),
    ("(3,4]", r"3 \leq x \leq 4", EXACT),
    (r"(2,\infty)", "x<2", EXACT),
    (r"(2,\infty)", "x>y", EXACT),
    ("[-2,7]", r"x \neq 7", EXACT),
    # other typography, another number
    (r"3\sqrt{13}", "3\u221a14", EXACT),
    (r"90^\circ", "91^o", EXACT),
    ("(6,31,-1)", r"\Bigl(6, 31, 1\Bigr)", EXACT),
    ("30", r"\boldsymbol{31}", EXACT),
    ("14000", "x = 14, 000", EXACT),
    ("221,8", "x = 221,800", SEVERAL),
    # an equation between two numbers must hold
    ("3", "2=3", EXACT),
    # other notations, another answer
    *[("5", answer, EXACT) for answer in ("**6**", "**-5**", "**Answer**", r"\phantom{5}", r"\phantom 5")],
    *[("12", answer, EXACT) for answer in ("**1** **2**", "**1****2**", "**1**2")],
    ("Tuesday", "**Monday**", EXACT),
    (r"10\%", "**11%**", EXACT),
    ("16", "2**3", EXACT),
    ("8", "2**4", EXACT),
    ("24", "2**3**4", EXACT),
    ("x^2", "x**3", EXACT),
    ("x^2", "x³", EXACT),
    ("x^2", "x*2", EXACT),
    ("2^{-3}", "2^-4", EXACT),
    *[
        ("3.2e-5", f"3.2{power}", NEAR)
        for power in ("*10^5", "*10^-4", r"\times 10^{-6}", " x 10^-6", " \u00d7 10⁵", "*10-5")
    ],
    *[(r"3.2 \times 10^{-5}", answer, EXACT) for answer in ("3.2e-6", "-3.2e-5", "3.2*10^5")],
    ("2000", "2 x 10^2", EXACT),
    ("2000", "2x", EXACT),
    *[(r"\emptyset", answer, EXACT) for answer in (r"\{0\}", "0", r"\{\varnothing\}", "x")],
    (r"\{\emptyset\}", r"\emptyset", EXACT),
    *[("(2,3)", answer, EXACT) for answer in (r"\langle 3,2\rangle", r"\langle 2,-3\rangle", r"\langle 2,3,0\rangle")],
    *[(gold, r"\langle 2,3\rangle", EXACT) for gold in (r"\{2,3\}", "[2,3]", "5")],
    ("-5", r"\phantom{-}5", EXACT),
    ("51", r"5\phantom{1}", EXACT),
    (r"\begin{pmatrix} 1 & \phantom -1 \end{pmatrix}", r"\begin{pmatrix} 1 & -1 \end{pmatrix}", EXACT),
    ("30", r"\textcolor{red}{31}", EXACT),
    ("30", r"\underline{3}", EXACT),
    (r"\sqrt{2}+1", "sqrt(2+1)", EXACT),
    (r"\ln 2", "ln 3", EXACT),
    (r"\sin x", "cos x", EXACT),
    (r"\sin x", "sin y", EXACT),
    ("5 sec", "5 min", EXACT),
    *[
        (r"\frac13", answer, EXACT)
        for answer in (r"0.\overline{34}", r"-0.\overline{3}", r"0.0\overline{3}", r"1,000.\bar{3}")
    ],
    (r"m_{\max}=n^2-n", r"m_{\min}=n^2-n", EXACT),
    (r"m_{\max}=n^2-n", r"m_{\max}=n^2+n", EXACT),
    (r"\infty", "-∞", EXACT),
    (r"90^\circ, 60^\circ", r"90\text{ degrees}, 61\text{ degrees}", EXACT),
    *[("(1,2),(3,4)", rf"\{{{pairs}\}}", EXACT) for pairs in ("(1,2),(4,3)", "(1,2)", "1,2,3,4")],
    ("[0,1)", r"\{0,1\}", EXACT),
    # inequalities that a word joins
    *[
        (r"(-\infty,2)\cup(3,\infty)", answer, EXACT)
        for answer in (
            r"x<2 \text{ and } x>3",
            r"x<3 \text{ or } x>2",
            r"x \le 2 \text{ or } x>3",
            r"x<2 \text{ or } y>3",
            r"x<2 \text{ or } x=3",
            "x<2, x>3",
            "x<2",
            "2<x<3",
            r"x \ne 2",
        )
    ],
    *[(r"(-\infty,2)\cup(2,\infty)", answer, EXACT) for answer in (r"x \ne 3", "x=2", r"x<2 \text{ and } x>2")],
    (r"(-\infty,2)\cup(2,3)\cup(3,\infty)", r"x \ne 2 \text{ or } x \ne 3", EXACT),
    *[("x<2 or x>3", answer, EXACT) for answer in ("x<2 and x>3", "x<2", "y<2 or y>3", "(2,3)")],
    (r"(2,3]", r"x>2 \text{ or } x \le 3", EXACT),
    *[
        (r"(-\infty,2)", rf"\{{x {condition}\}}", EXACT)
        for condition in (r"\mid x>2", r"\mid y<2", r"\in \mathbb{Z} \mid x<2", ": x=2")
    ],
    # a set, and the inequalities that state it
    *[
        ("[a +b, b]", answer, EXACT)
        for answer in (
            r"a+b < x \leq b",
            r"a+b \leq x < b",
            r"a+b \leq x \leq a",
            r"b \leq x \leq a+b",
            r"a+b \leq b",
            r"a+b \leq x \leq y \leq b",
            r"a+b \leq x \leq b+x",
            r"a+b \leq x",
        )
    ],
    *[(r"[a,\infty)", answer, EXACT) for answer in ("x > a", r"x \ge 2a", r"x \le a", r"a \ge x", r"x \ge a, x \ge b")],
    (r"(a,\infty)", "x > a > b", EXACT),
    (r"(-\infty,a)\cup(a,\infty)", r"x \ne b", EXACT),
    (r"(-\infty,a]", r"x \ne a", EXACT),
    *[
        (rf"{name} \in {values}", answer, EXACT)
        for name, values, answer in (
            ("x", "[-2,7]", r"-2 \le y \le 7"),
            ("y", "[-2,7]", r"-2 \le f(x) \le 7"),
            ("x", "[-a,a]", r"-a \le y \le a"),
            ("x", r"\mathbb{R} \setminus \{2\}", r"y \ne 2"),
        )
    ],
    *[
        (gold, answer, EXACT)
        for gold, answer in (
            ("3<x<4", r"y \in (3,4)"),
            ("x>3", r"y \in (3,\infty)"),
            (r"-a \le x \le a", r"y \in [-a,a]"),
            (r"-a \le x \le a", "[-a,2a]"),
        )
    ],
    *[("[0,1]", rf"0 \le f(x) \le {bound}", EXACT) for bound in ("x", "g(x)", "2")],
    (r"\mathbb{R} \setminus \{2\}", r"x \ne 3", EXACT),
    ("x>y", "(3,4)", EXACT),
    *[(gold, "(-2,2)", EXACT) for gold in ("x^2=4", "x=2", "x+y=0")],
    (r"(3,4]", r"3<|x| \le 4", EXACT),
    ("5", "x>5", EXACT),
    # a point, and the equations of its coordinates
    *[("(1,2)", answer, EXACT) for answer in ("y=1, x=2", "x=2, y=1", "x=1, y=3")],
    *[("x=1, y=2", answer, EXACT) for answer in ("(2,1)", "(1,3)", "(1,2,3)")],
    ("z=3, x=1, y=2", "(3,1,2)", EXACT),
    ("m=1, b=2", "(2,1)", EXACT),
    *[("(x,y)=(1,2)", answer, EXACT) for answer in ("x=2, y=1", "x=1, y=2, z=3", "x=1", "x=1, z=2")],
    ("x=1, y=2", "(x,y)=(2,1)", EXACT),
    ("x=1, y=2", "(x,z)=(1,2)", EXACT),
    # a vector as a column
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "(2,1)", EXACT),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "(1,2,0)", EXACT),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "(1,2,3,4)", EXACT),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \\ 3 \\ 4 \end{pmatrix}", EXACT),
    # the imaginary unit
    *[("3+4i", answer, EXACT) for answer in ("(2-i)^2", "(2+i)^3", "3+4x", "-3-4i")],
    ("-1", r"e^{2i\pi}", EXACT),
    ("i", "1", EXACT),
    # times of day
    *[("4:30 p.m.", answer, EXACT) for answer in ("4:30 a.m.", "4:30 AM", "4:03 p.m.")],
    # ratios of several terms
    *[("1:2:3", answer, EXACT) for answer in ("3:2:1", "2:4:3", "1:6", "1:2:3:1", "1:2", "2:4:5")],
    ("1:2", "1:2:1", EXACT),
    # inequalities with other solutions
    *[("|x|<2", answer, EXACT) for answer in ("-2<x<3", r"-2 \le x \le 2", "-2<y<2", "x<2", "|x|>2")],
    ("x^2<-1", "x^2<-2", EXACT),
    ("x^2>-1", "x^4>-1", EXACT),
    ("x>y", "y>z", EXACT),
    # the real cube root of a negative number
    *[(gold, r"\sqrt[3]{-8}", EXACT) for gold in ("2", r"1+i\sqrt3", "-2i")],
    ("-4", r"(-8)^{\frac23}", EXACT),
    ("2", r"\sqrt{-4}", EXACT),
    ("0.01", "0.01000015", EXACT),
    ("(1,2)", r"\{(2,1)\}", EXACT),
    ("(1,2)", r"\{(1,2),(2,1)\}", EXACT),
    (r"\{(1,2)\}", "(2,1)", EXACT),
    (r"\{0,1\}", r"[0,1]", EXACT),
    ("1, 2", r"\{1\} \cup \{3\}", EXACT),
    ("1, 2", r"[1,2]", EXACT),
    # each decides a line of equality.py
    (r"\sqrt2", r"\sqrt2+10^{-150}", EXACT),
    ("x>3", "x>3.0001", NEAR),
    ("3x+2y=6", "3x+2y=6.0003", NEAR),
    ("x^2=-1,-4", "x^2=-1,-9", EXACT),
    ("x>y", "x(x-1)>y(x-1)", EXACT),
    ("x=0", "e^x=2", EXACT),
    ("e^x=2", "x=0", EXACT),
    ("6", "A = 5 < 6", EXACT),
    ("6", "5 = x < 6", EXACT),
    (r"1000 \cdot 10^{-23} x", r"1001 \cdot 10^{-23} x", EXACT),
    (r"\frac{x}{3}", "0.3333x", EXACT),
    ("10^{-20} x", "10^{-20} x y", EXACT),
    ("10^{-20} x y", r"2 \cdot 10^{-20} x y", EXACT),
    (r"\sum_{k=1}^{n} k", r"\sum_{k=1}^{n} 2k", EXACT),
    ("x=1", "(x+1)^2=x^2+2x+1", EXACT),
    ("(x+1)^2=x^2+2x+1", "x=1", EXACT),
    ("x=1, y=2, z=3", "(1,2,4)", EXACT),
    ("x>1", r"x \ge 1", EXACT),
    ("f(3)", "3f(1)", EXACT),
    (r"x \ne 3", r"x^2 \ne 9", EXACT),
    ("a=1,b=2", "a=1,b=2.0003", NEAR),
    (r"A=2\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"A=3\begin{pmatrix} 1 \\ 2 \end{pmatrix}", EXACT),
    ("a<b<c<d", "a<b<c", EXACT),
    (r"\infty", "5", EXACT),
    ("x, y", "x", EXACT),
    ("x", "x, y", EXACT),
    ("5", "x=5.0006", NEAR),
    # each decides a condition of equality.py
    ("0", r"\sqrt{2} \cdot 10^{-300}", EXACT),
    *[("E=9", answer, EXACT) for answer in ("E > m = 9", r"E \le 9 = 9")],
    ("x=z", "x=y=z+1", EXACT),
    ("x=y=z", "x=z", EXACT),
    (r"x=\sqrt{2} \cdot 10^{-20}", r"x=\sqrt{3} \cdot 10^{-20}", EXACT),
    ("x>y", r"\frac{1}{x-y}>0", EXACT),
    ("x>y", r"-2x \le -2y", EXACT),
    (r"[a,\infty)", r"x \ne a", EXACT),
    (r"\begin{pmatrix} x \\ y+1 \end{pmatrix} = \begin{pmatrix} 1 \\ 2 \end{pmatrix}", "(1,2)", EXACT),
    ("[a,b)", "a=x<b", EXACT),
    *[("0", rf"\frac{{dy}}{{dx}}{end}", EXACT) for end in ("", "+0")],
    ("3", "3.0003000000000000000000001", NEAR),
    ("1", "1.00000050000000000000000001", EXACT),
    # math-verify drops numbers below 1e-15
    (r"10^{-20}+10^{-20} x", r"2 \cdot 10^{-20}+10^{-20} x", EXACT),
    ("x^2+i", "x^2+i+10^{-20}", EXACT),
    *[("x^2", f"x^2+{rest}", EXACT) for rest in ("10^{-20}", "10^{-20} y", r"25 \cdot 10^{-27}")],
    (r"x+\frac{1}{y}", r"x+\frac{1}{y}+10^{-20}", EXACT),
    ("a+b+c+d+f+g+h+k", "a+b+c+d+f+g+h+k+10^{-20}", EXACT),
    # each decides a condition of units.py, notation.py or answers.py
    *[(gold, r"52\text{ (base 9)}", EXACT) for gold in ("52_8", "52")],
    *[("5", rf"5\text{{ {word}}}", EXACT) for word in ("dozen", "halves")],
    ("x", r"\langle x \rangle", EXACT),  # its mean
    ("3:30", "1:10", EXACT),
]

SAME = [
    ("10", r"\binom{5}{2}", EXACT),
    ("1", r"\binom{3}{3}", EXACT),
    ("AB", "BA", EXACT),  # two letters are a product, three are a name
    *[("AB = 5, CD = 7", answer, EXACT) for answer in ("5, 7", "7, 5", "AB = 5, CD = 7")],
    *[("AB = 1,000", answer, EXACT) for answer in ("1,000", "1000")],
    ("5 men", "5", EXACT),
    *[(r"50\%", answer, EXACT) for answer in ("0.5", "1/2", "50 percent", r"x=50\%", "x=0.5")],
    *[(r"50\%", answer, Rule(unit="%")) for answer in ("50", "0.5", "50%", "50 percent")],
    *[(r"x=5\%", answer, EXACT) for answer in ("x=0.05", "0.05", r"5\%", r"x=\frac{1}{20}")],
    *[(gold, r"50\%", EXACT) for gold in ("50", "0.5")],
    ("221,8", "8,221", SEVERAL),
    *[("2000, 3000", r"3{,}000, 2,\!000", rule) for rule in (EXACT, SEVERAL)],
    *[("x = 14000", answer, EXACT) for answer in ("x = 14,000", r"x = 14{,}000", r"x=14\,000", r"x = \$14,\!000")],
    *[("x = 14,000", answer, EXACT) for answer in ("14000", "x = 14000", "x = 14,000 eggs")],
    *[
        ("18", answer, EXACT)
        for answer in (
            "18 dollars",
            "18 eggs",
            "18 people",
            r"\text{18 dollars}",
            r"18\text{ dollars}",
            r"\$18",
            "18.0 dollars",
            "18 dollars per week",
            "x = 18 dollars",
            "18 km/h",
            r"18\,\mathrm{m}/\mathrm{s}^{2}",
            "18=x",
        )
    ],
    *[("18", answer, EXACT) for answer in ("\u00a318", r"\pounds 18", r"\mathbf{(18)}", r"\displaystyle \approx 18")],
    ("-50", "\u20ac-50", EXACT),
    (r"\frac{1}{2}", r"\$\dfrac{1}{2}", EXACT),
    (r"\{-1\} \cup [0,7)", r"[0,7) \cup \{-1\}", EXACT),
    ("14000", "x = 14,000", EXACT),
    ("14000", r"\text{Total} = \$14{,}000", EXACT),
    *[(r"3\sqrt{13}", answer, EXACT) for answer in ("3\u221a13", "3\u221a(13)", r"3\,\sqrt{13}")],
    *[(r"288\pi", answer, EXACT) for answer in ("288*pi", "288 pi", "288\u03c0")],
    *[(r"90^\circ", answer, EXACT) for answer in ("90^{o}", "90^o", r"90^\text{o}", r"\angle ABC = 90^{\circ}")],
    ("(6,31,-1)", r"\big(6, 31, -1\big)", EXACT),
    ("6-5i", r"6 - 5\mathrm{i}", EXACT),
    *[
        ("52_8", answer, EXACT)
        for answer in ("(52)_{8}", "52_{(8)}", r"52\text{ (base 8)}", r"52_{\text{base }8}", "52")
    ],
    ("100", "100_{10}", EXACT),
    ("3s^2", r"3 \cdot s^2", EXACT),
    (r"\text{Evelyn}", r"\operatorname{Evelyn}", EXACT),
    ("(3,4]", r"3 < x \le 4", EXACT),
    (r"(2,\infty)", "x > 2", EXACT),
    (r"(-\infty,0]", r"0 \geq x", EXACT),
    (r"x \in [-2,7]", r"-2 \le x \le 7", EXACT),
    *[("50", answer, EXACT) for answer in (r"50.0\%", r"50\%", "50%", "50 percent", r"50\text{ percent}")],
    ("12.5", r"12.5\%", EXACT),
    ("0.125", r"12.5\%", EXACT),
    (r"12.5\%", "0.125", EXACT),
    ("62.5%", "0.625", EXACT),
    (r"\frac{1}{2}", r"50\%", EXACT),
    ("185", "185\\", EXACT),
    ("59", "59 miles/hour", EXACT),
    ("2000000", "2 million", EXACT),
    ("5", "5 cm", EXACT),
    ("5 cm", "5", EXACT),
    ("5 cm", "5 centimeters", EXACT),
    (r"4:30\text{ p.m.}", r"4:30 \text{ PM}", EXACT),
    (r"4:30\text{ p.m.}", "4:30 PM", EXACT),
    (r"864 \mbox{ inches}^2", "864 in^2", EXACT),
    (r"864 \mbox{ inches}^2", r"864 \text{ square inches}", EXACT),
    (r"90^\circ", "90 degrees", EXACT),
    (r"\$18.90", "18.90 dollars", EXACT),
    (r"\$18.90", r"\$18.9", EXACT),
    ("3:30", "03:30", EXACT),
    *[("3:05", answer, EXACT) for answer in ("03:05", "3:05 p.m.", r"3:05\text{ PM}")],
    # approximately
    *[
        ("59", answer, EXACT)
        for answer in (
            "approximately 59",
            "Approximately $59$",
            r"\text{approximately } 59",
            r"\text{about 59}",
            r"\text{about 59 miles}",
            "approx. 59",
            r"\text{roughly}~59 \text{ miles}",
            r"x=59",
            r"around \$59",
            "about 59.0",
        )
    ],
    (r"\frac{59}{2}", r"\text{approximately } \frac{59}{2}", EXACT),
    ("-5", "about -5", EXACT),
    # the solutions of a gold equation
    *[("x^2=4", answer, EXACT) for answer in (r"x=\pm 2", r"x=\pm2", "x=2, x=-2", r"x=-2 \text{ or } x=2")],
    *[(gold, r"x=\pm 2", EXACT) for gold in (r"x=2 \text{ or } x=-2", r"\pm 2", "2,-2", r"\{-2,2\}", "2x^2-8=0")],
    ("x^4=16", r"x=\pm 2", EXACT),  # the real ones
    ("7:32", r"\frac{7}{32}", EXACT),
    (r"\frac{1}{3}", "0.333333", EXACT),
    ("1/6", "0.166667", EXACT),
    (r"\sqrt{3+2\sqrt{2}}", r"1+\sqrt{2}", EXACT),
    (r"\frac{1}{2^{99}}", "2^{-99}", EXACT),
    ("4.5e33", r"4.5003\times 10^{33}", NEAR),
    ("2.88e-19", r"288 \cdot 10^{-21}", NEAR),
    ("2^{2008}-2", r"2(4^{1003} \cdot 2-1)", EXACT),
    ("x=5", "5", EXACT),
    ("5", "x=5", EXACT),
    ("3", "1+2=3", EXACT),
    ("X_d=4", "X_d=4.0001", NEAR),
    ("x=4", "4.0001", NEAR),
    ("3x+2y=6", "6x+4y=12", EXACT),
    ("3x+2y=6", r"y=3-\frac{3}{2}x", EXACT),
    ("x=5", "2x=10", EXACT),
    ("y=e^x", r"\ln y = x", EXACT),
    (r"\frac{d x}{d t}=k x-a", r"\frac{dx}{dt}+a=kx", NEAR),
    (r"\frac{d x}{d t}=k x-a", r"\dot{x}=kx-a", NEAR),
    (r"y^{\prime}+r y-r x(t)=0", "y' = r(x(t)-y)", NEAR),
    (r"m \frac{d v}{d t}+b v=f", r"\frac{dv}{dt}=\frac{f-bv}{m}", NEAR),
    (r"\frac{d^{2} v_{o}}{d t^{2}}+\frac{v_{o}}{L C}=\frac{v_{i}}{L C}", r"LC\frac{d^2 v_o}{dt^2}+v_o=v_i", NEAR),
    (r"I \frac{d \omega}{d t}+2 B \omega=T", r"T = I\frac{d\omega}{dt}+2B\omega", NEAR),
    ("SRAC=LRAC", "LRAC=SRAC", NEAR),
    ("I=5", "5=I", EXACT),
    ("I(0)", "I(0)+0", EXACT),
    ("f(x)=x+1", "x+1", EXACT),
    ("f(x)=x+1", "f(x)=1+x", EXACT),
    ("x>3", "3<x", EXACT),
    ("2x>6", "x>3", EXACT),
    ("1<x<2", "2>x>1", EXACT),
    ("x>3", r"(3,\infty)", EXACT),
    (r"x \in [-2,7]", "[-2,7]", EXACT),
    ("(x,y)=(1,2)", "(1,2)", EXACT),
    ("AB=4,CD=5", "4, 5", EXACT),
    ("|AB|=1", "1", EXACT),
    ("6m", "6 m", EXACT),
    ("6m", "3m+3m", EXACT),
    ("-9.8 t", "-9.8t+0", EXACT),
    ("x^5 - x^4", "x^4(x-1)", EXACT),
    ("3<x<4", r"x \in (3,4)", EXACT),
    ("x>3", r"x \in (3,\infty)", EXACT),
    (r"x \in (3,4]", r"3<x \le 4", EXACT),
    ("(2e-9, 1)", "(2e-9, 1.0)", EXACT),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 1+1 \end{pmatrix}", EXACT),
    ("1, 2", "(1, 2)", EXACT),
    ("1, 2", "(2, 1)", EXACT),
    ("(1, 2)", "1, 2", EXACT),
    ("E=9", "E = m c^2 = 9", EXACT),
    ("x=5", "3x=15", EXACT),
    ("2x>6", "-x<-3", EXACT),
    ("x^2+y^2=1", "x^2=1-y^2", EXACT),
    ("2x-1=5", "4x-2=10", EXACT),
    ("e^x=1", "x=0", EXACT),
    ("1000000.0", "1000000.0000004", EXACT),
    ("1", "1.0000005", EXACT),
    ("0.00001", "0.0000100001", EXACT),
    ("2", "2.0002", NEAR),
    ("a=1,b=2", "b=2,a=1", EXACT),
    (r"\sqrt{3+2\sqrt2}", r"1.0+\sqrt{2}", EXACT),
    ("2000, 3000", "2,000 and 3,000", EXACT),
    ("2000, 3000", r"3,000 \text{ and } 2,000", EXACT),
    ("2000, 3000", "2,000, 3,000", SEVERAL),
    ("864, 2,400", "2400, 864", EXACT),
    ("2, 0, 3, 0", "2,000 and 3,000", SEVERAL),
    ("1,-2", "-2, 1", EXACT),
    ("16,3,1,1", "1,16,1,3", SEVERAL),
    ("-2,-2", "-2, -2", SEVERAL),
    (r"\{1,2\}", "2,1", EXACT),
    ("1,2", r"\{1,2\}", EXACT),
    ("(1,2)", "1,2", EXACT),
    (r"1 \pm \sqrt{19}", r"1-\sqrt{19}, 1+\sqrt{19}", EXACT),
    ("-2,2", r"x=\pm 2", EXACT),
    (r"x=1 \text{ or } x=2", "x=2,x=1", EXACT),
    ("E_{1},E_{2}", "E_2, E_1", EXACT),
    ("np.arcsin(10/13)", r"\arcsin(10/13)", NEAR),
    ("np.arcsin(10/13)", "0.87758", NEAR),
    ("-1./3", "-0.33333", NEAR),
    # markdown
    *[
        ("5", answer, EXACT)
        for answer in ("**5**", "**5.**", "**5**.", "**$5$**", r"**\(5\)**", "x = **5**", "**5** cm")
    ],
    (r"\frac12", "**0.5**", EXACT),
    (r"\text{even}", "**even**", EXACT),
    ("1,2", "**1** and **2**", EXACT),
    (r"10\%", "**10%**", EXACT),
    # powers, and numbers in scientific notation
    ("x^2", "x**2", EXACT),
    ("x^2+1", "x²+1", EXACT),
    ("2^{-3}", "2^-3", EXACT),
    ("2^{-3}", "2**-3", EXACT),
    ("5 cm^2", r"5\text{ cm²}", EXACT),
    *[
        (gold, answer, EXACT)
        for gold in ("3.2e-5", r"3.2 \times 10^{-5}")
        for answer in ("3.2*10^-5", r"3.2 \times 10^-5", "3.2 \u00d7 10⁻⁵", "3.2 x 10^{-5}", "3.2*10**-5", "3.2e-05")
    ],
    ("2000", "2x10^3", EXACT),
    # characters, commands and functions
    *[(r"\emptyset", answer, EXACT) for answer in (r"\varnothing", "∅", r"\{\}")],
    *[("(2,3)", answer, EXACT) for answer in (r"\langle 2,3\rangle", r"\left\langle 2, 3\right\rangle", "⟨2, 3⟩")],
    ("9", r"\phantom{-}9", EXACT),
    (r"\begin{pmatrix} 1 & \phantom -1 \end{pmatrix}", r"\begin{bmatrix} 1 & 1 \end{bmatrix}", EXACT),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\[4pt] 2 \end{pmatrix}", EXACT),
    *[
        ("30", answer, EXACT)
        for answer in (r"30 \\", r"30\hspace{2pt}", r"\textcolor{red}{30}", r"\color{red}{30}", r"\underline{30}")
    ],
    (r"\frac12", r"\[0.5\]", EXACT),
    ("2x-1", "2x\u20131", EXACT),
    (r"(2,\infty)", "(2,∞)", EXACT),
    ("6", "2·3", EXACT),
    (r"x \ge 5", "x ⩾ 5", EXACT),
    (r"\{1,2\}", r"\lbrace 1, 2 \rbrace", EXACT),
    (r"70\sqrt{2}", "70 sqrt(2)", EXACT),
    (r"\sqrt{2}", r"\sqrt(2)", EXACT),
    (r"2\sqrt{2}\pi", "2*np.sqrt(2)*np.pi", EXACT),
    (r"\ln 2", "ln(2)", EXACT),
    (r"\sin x", r"\operatorname{sin}(x)", EXACT),
    (r"e^{2x}", "exp(2x)", EXACT),
    ("5 sec", "5 seconds", EXACT),
    ("2+3i", r"2+3\text{i}", EXACT),
    (r"\frac13", r"0.\overline{3}", EXACT),
    (r"2.1\bar{6}", r"\frac{13}{6}", EXACT),
    (r"m_{\max}=n^2-n", r"m_{\max}=n(n-1)", EXACT),
    (r"90^\circ, 60^\circ", r"90\text{ degrees}, 60\text{ degrees}", EXACT),
    (r"11,\! 111,\! 100", r"x = 11,\! 111,\! 100", EXACT),
    ("(1,2),(3,4)", r"\{(3,4),(1,2)\}", EXACT),
    # inequalities that a word joins
    *[
        (r"(-\infty,2)\cup(3,\infty)", answer, EXACT)
        for answer in (
            r"x<2 \text{ or } x>3",
            "x > 3 or x < 2",
            r"x<2 \lor x>3",
            r"x<2 \quad\text{or}\quad 3<x",
            r"\{x \mid x<2 \text{ or } x>3\}",
        )
    ],
    (r"(-\infty,2)\cup(3,5]", r"x<2 \text{ or } 3 < x \le 5", EXACT),
    (r"(-\infty,2)\cup(2,\infty)", r"x \ne 2", EXACT),
    (r"(-\infty,2)\cup(2,3)\cup(3,\infty)", r"x \ne 2 \text{ and } x \ne 3", EXACT),
    *[("x<2 or x>3", answer, EXACT) for answer in (r"(-\infty,2)\cup(3,\infty)", "x>3 or x<2", "x>3, x<2")],
    (r"\sin x<\frac12 or \sin x>\frac34", r"\sin x>\frac34 or \sin x<\frac12", EXACT),
    *[("(2,3]", rf"x>2 {word} x \le 3", EXACT) for word in (r"\text{ and }", r"\land")],
    *[
        (r"(-\infty,\frac12)", rf"\{{x {condition} x < \frac{{1}}{{2}}\}}", EXACT)
        for condition in (r"\mid", ":", r"\in \mathbb{R} \mid")
    ],
    # a set, and the inequalities that state it
    *[("[a +b, b]", answer, EXACT) for answer in (r"a +b \leq x \leq b", r"b \ge y \ge b+a", r"x \in [a+b,b]")],
    *[(r"[a,\infty)", answer, EXACT) for answer in (r"x \ge a", r"a \le x", r"f(x) \ge a")],
    (r"(-\infty,a)", "x<a", EXACT),
    ("(a,b]", r"a<x \le b", EXACT),
    (r"x \in [-a,a]", r"-a \le x \le a", EXACT),
    *[(r"-a \le x \le a", answer, EXACT) for answer in (r"x \in [-a,a]", "[-a,a]")],
    *[("(3,4]", answer, EXACT) for answer in (r"3 < f(x) \le 4", r"4 \ge y > 3")],
    (r"3 < f(x) \le 4", "(3,4]", EXACT),
    *[(gold, r"x \ne 2", EXACT) for gold in (r"\mathbb{R} \setminus \{2\}", r"x \in \mathbb{R} \setminus \{2\}")],
    (r"x \ne 2", r"\mathbb{R} \setminus \{2\}", EXACT),
    ("x+1>4", r"(3,\infty)", EXACT),
    # a point, and the equations of its coordinates
    *[("(1,2)", answer, EXACT) for answer in ("x=1, y=2", "y=2, x=1", "(x,y)=(1,2)")],
    ("x=1, y=2", "(1,2)", EXACT),
    ("z=3, x=1, y=2", "(1,2,3)", EXACT),
    ("m=1, b=2", "(1,2)", EXACT),
    ("x=1, x=2", "(2,1)", EXACT),  # as for the answers 1, 2
    *[("(x,y)=(1,2)", answer, EXACT) for answer in ("x=1, y=2", "y=2, x=1", "1, 2")],
    *[("x=1, y=2", answer, EXACT) for answer in ("(x,y)=(1,2)", "(y,x)=(2,1)")],
    # a vector as a column
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "(1,2)", EXACT),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\langle 1, 2\rangle", EXACT),
    ("(1,2)", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", EXACT),
    # the imaginary unit
    *[("3+4i", answer, EXACT) for answer in ("(2+i)^2", "4i+3", "-4i^3+3")],
    *[("-1", answer, EXACT) for answer in (r"e^{i\pi}", "i^2")],
    ("i", r"\sqrt{-1}", EXACT),
    (r"\frac12+\frac{\sqrt3}{2}i", r"e^{\frac{i\pi}{3}}", EXACT),
    # times of day
    *[("4:30 PM", answer, EXACT) for answer in ("4:30 p.m.", "4:30 pm", "4:30 P.M.", "4:30p.m.", "4:30")],
    *[("12:30 p.m.", answer, EXACT) for answer in ("12:30 PM", r"12:30 \text{ p.m.}", "12:30")],
    # ratios of several terms
    *[("1:2:3", answer, EXACT) for answer in ("2:4:6", "1 : 2 : 3")],
    ("2:4:6", "1:2:3", EXACT),
    ("1:2", "2:4", EXACT),
    # inequalities with the same solutions
    ("|x|<2", "-2<x<2", EXACT),
    ("-2<x<2", "|x|<2", EXACT),
    (r"x^2 \ge 4", r"x \le -2 \text{ or } x \ge 2", EXACT),
    ("x^2<4", "-2<x<2", EXACT),
    # the real cube root of a negative number
    ("-2", r"\sqrt[3]{-8}", EXACT),
    ("4", r"(-8)^{\frac23}", EXACT),
    (r"-\sqrt[3]{5}", r"\sqrt[3]{-5}", EXACT),
    ("x-2", r"x+\sqrt[3]{-8}", EXACT),
    ("2i", r"\sqrt{-4}", EXACT),
    ("-8", "(-2)^3", EXACT),
    ("(1,2)", r"\{(1,2)\}", EXACT),
    (r"\{(1,2)\}", "(1,2)", EXACT),
    (r"\{(1,2)\}", r"\left\{\left(1,2\right)\right\}", EXACT),
    ("1, 2", r"\{1\} \cup \{2\}", EXACT),
    (r"\{1\} \cup \{2\}", "1, 2", EXACT),
    # each decides a line of equality.py
    ("0", r"\sqrt{3+2\sqrt2}-1-\sqrt2", EXACT),
    ("x^2 = -1", "x^2 = y = -1", EXACT),
    ("x^2=-1,-4", "x^2=-4,-1", EXACT),
    ("(x^2,y)=(-1,2)", "x^2=-1, y=2", EXACT),
    ("x^2>-1", "-1<x^2", EXACT),
    ("x=0", "e^x=1", EXACT),
    ("2", "2 = 2x^0", EXACT),
    (r"\sqrt{x^2}", "|x|", EXACT),
    (r"\sqrt{f(x)^2}", "|f(x)|", EXACT),
    ("0", "x-x", EXACT),
    (r"\sum_{k=1}^{n} k", r"\sum_{j=1}^{n} j", EXACT),
    (", ".join(f"x_{{{n}}}" for n in range(64)), ", ".join(f"x_{{{n}}}" for n in reversed(range(64))), EXACT),
    (r"x \ne 3", r"2x-1 \ne 5", EXACT),
    (r"x \ne 0", r"e^x \ne 1", EXACT),
    ("a=1,b=2", "a=1,b=2.0001", NEAR),
    ("2, 3", "2, 3.0001", NEAR),
    (r"2\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 2 \\ 4 \end{pmatrix}", EXACT),
    (r"\begin{pmatrix} x \\ y \end{pmatrix} = \begin{pmatrix} 1 \\ 2 \end{pmatrix}", "(1,2)", EXACT),
    ("a<b<c<d", "d>c>b>a", EXACT),
    ("x=5", "5", NEAR),
    ("5", "x=5.0004", NEAR),
    (r"\frac{1}{x}=2", "1=2x", EXACT),
    ("x^2=1", "x^4=1", EXACT),
    ("xy=1", r"y=\frac1x", EXACT),
    # each decides a condition of equality.py
    *[(r"\text{even}", answer, EXACT) for answer in ("{even}", "e v e n")],
    ("{even}", r"\text{even}", EXACT),
    *[("2, x=1", answer, EXACT) for answer in ("(1,2)", "(2,1)")],
    *[("x>y", answer, EXACT) for answer in ("2x>2y", "-x<-y")],
    (r"\ln y = x", "y=e^x", EXACT),
    ("1, 2", r"x=1 \text{ and } x=2", EXACT),
    *[(r"A=\frac{bh}{2}=6", answer, EXACT) for answer in ("A=6", "6")],
    *[("E=mc^2=kT=9", answer, EXACT) for answer in ("E=9", "9")],
    *[("x", answer, EXACT) for answer in (r"1 \cdot x", r"x \cdot 1", r"\frac{xy}{y}")],
    *[
        (rf"A={one}, {other}", rf"{other}, A={one}", EXACT)
        for one in (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"2\begin{pmatrix} 1 \\ 2 \end{pmatrix}")
        for other in ("x=3", r"B=3\begin{pmatrix} 1 \\ 2 \end{pmatrix}")
    ],
    ("0." + "0" * 5000 + "1", r"1.0 \cdot 10^{-5001}", EXACT),
    (r"\frac{3}{11}", r"0.\overline{27}", EXACT),
    ("[1,200],[a,b]", r"\{[1,200],[a,b]\}", EXACT),
    (r"\frac{41}{333}", r"0.\overline{123}", EXACT),
]

VERDICTS = [
    # gold, answer, correct, how
    ("7", "7", True, "exact"),
    ("7", " 7. ", True, "exact"),
    ("7", "$7$", True, "exact"),
    ("7", "= 7", True, "exact"),
    ("7", r"\approx 7", True, "exact"),
    ("7", "8", False, "math_verify"),
    ("\\frac{1}{2}", "\\dfrac12", True, "exact"),
    ("\\frac{1}{2}", "0.5", True, "math_verify"),
    ("1 1/2", "11/2", False, "math_verify"),  # a space between digits is not typography
    ("1 1/2", "1.5", True, "math_verify"),
    ("1,2", "2,1", True, "math_verify"),
    ("(1,2)", "(2,1)", False, "math_verify"),
    ("(5,3)", "(7,2)", False, "math_verify"),  # not two empty intervals
    ("x=5", "5", True, "math_verify"),
    ("5", "x=5", True, "math_verify"),
    ("x>3", "(3,\\infty)", True, "math_verify"),
    ("(3,\\infty)", "x>3", True, "math_verify"),
    ("(3,\\infty)", "x\\geq 3", False, "math_verify"),
    ("(2,4)", "2<x<4", False, "math_verify"),  # perhaps a point
    ("6,8\\text{, and }10", "10,8,6", True, "math_verify"),
    ("\\text{Evelyn}", "Evelyn", True, "exact"),
    ("\\text{east}", "seat", False, "math_verify"),
    ("4.5e33", "4.5 \\times 10^{33}", True, "math_verify"),
    ("32349", "32,349", True, "exact"),
    ("32349", "32, 349", False, "math_verify"),  # two numbers
    ("1000", r"1\,000", True, "exact"),
    (r"1-\frac{1}{\mathrm{e}}", "1-1/e", True, "math_verify"),
    (r"1-\frac{1}{\mathrm{e}}", "1+1/e", False, "math_verify"),
    (r"x \geq 5", "x >= 5", True, "math_verify"),
    (r"x \leq 5", "x >= 5", False, "math_verify"),
    ("42_7", "42_{7}", True, "exact"),
    ("42_7", "42_8", False, "exact"),
    ("5", "### 7 # = 5", False, "unparsed"),  # a number is not picked out of what cannot be read
    ("5", "7}\\boxed{5", False, "unparsed"),  # nor a second box opened
    ("5", r"7. The final answer is \(5\). I hope", False, "unparsed"),  # nor a phrase that math-verify looks for
    ("5", "1 or 2 or 5", False, "math_verify"),
    ("5", "", False, "unparsed"),
    ("5", "5" + " " * 9_999, True, "exact"),
    ("5", "5" + " " * 10_000, False, "unparsed"),
]


# --- from any gold answer --------------------------------------------------------------------------------------------

FACTORS = ("0.5", "2", "1.01", "10", "-1", "1000")


def as_decimal(gold: str) -> Decimal | None:
    try:
        return Decimal(gold)
    except InvalidOperation:
        return None


def notations(number: Decimal) -> list[str]:
    digits, _, exponent = f"{number:e}".partition("e")
    return [f"{number:f}", rf"{digits} \times 10^{{{int(exponent or 0)}}}", f"{digits}e{int(exponent or 0)}"]


def wrong_answers(gold: str) -> Iterator[str]:
    """Answers that cannot be the gold one: a number times a factor, another literal, a side left out or changed."""
    number = as_decimal(gold)
    if number is not None:
        for factor in FACTORS if number else ():
            yield from notations(number * Decimal(factor))
        yield from ("0", "0.0", "1e-30") if number else ("1", "0.01", "-1")
        return
    for literal in re.finditer(r"(?<![\d.])\d+(?![\d.])", gold):
        yield f"{gold[: literal.start()]}{int(literal[0]) + 1}{gold[literal.end() :]}"
    if "=" in gold:
        left, right = (side.strip() for side in gold.rsplit("=", 1))
        yield from ("0", "1", "x=0", r"\text{banana}=0", f"{left}+1={right}")
        if right != "0":
            yield from (rf"{left}=2\left({right}\right)", f"-({left})={right}")
    elif "," not in gold:
        yield from (rf"2\left({gold}\right)", rf"-\left({gold}\right)", rf"\left({gold}\right)+1", "0", "1")
        if re.search(r"[\d}\s][A-Za-z]$", gold) and not gold.endswith("i"):
            yield gold[:-1].strip()


def right_answers(gold: str) -> Iterator[str]:
    """The gold answer, and simple rewrites of it."""
    yield from (gold, f"${gold}$", f"{gold}.")
    number = as_decimal(gold)
    if number is not None:
        yield from notations(number)
        yield from (f"x = {gold}", rf"{gold} \text{{ m}}", rf"{gold} \mathrm{{~cm}}^{{3}}", f"{gold} units")
    elif "=" in gold:
        left, right = gold.rsplit("=", 1)
        yield from (f"{right}={left}", f"{left}-({right})=0", f"{left}+1={right}+1")
    elif "," not in gold:
        yield from (
            rf"\left({gold}\right)",
            f"{gold}+0",
            f"0+{gold}",
            f"y = {gold}",
            rf"\frac{{2\left({gold}\right)}}{{2}}",
        )
