r"""Split off the unit or noun at the end of an answer: "18 dollars", `15\mbox{ cm}^2`, "59 miles/hour", "\$18".

Units decide against an answer only if both units are known here and differ (`5 cm` and `5 m`, `15 cm^2` and `15 cm^3`).
Nothing is converted, and an unknown noun ("eggs") decides nothing.
"""

from __future__ import annotations

import re

# Every alias of a unit that is never anything else at the end of a number. "pound" is left out (weight or money).
_NAMES = {
    "metre": "m meter meters metre metres", "centimetre": "cm centimeter centimeters centimetre centimetres",
    "millimetre": "mm millimeter millimeters millimetre millimetres", "nanometre": "nm nanometer nanometers",
    "kilometre": "km kms kilometer kilometers kilometre kilometres", "mile": "mi mile miles",
    "inch": "in inch inches", "foot": "ft foot feet", "yard": "yd yard yards",
    "second": "s sec secs second seconds", "minute": "min mins minute minutes", "hour": "h hr hrs hour hours",
    "day": "day days", "week": "week weeks", "month": "month months", "year": "yr yrs year years",
    "gram": "g gram grams", "kilogram": "kg kgs kilogram kilograms", "milligram": "mg milligram milligrams",
    "ounce": "oz ounce ounces", "litre": "l L liter liters litre litres", "millilitre": "ml mL milliliter milliliters",
    "gallon": "gal gallon gallons", "quart": "quart quarts", "pint": "pint pints", "cup": "cup cups",
    "dollar": "dollar dollars USD", "cent": "cent cents", "euro": "euro euros EUR",
    "degree": "degree degrees deg", "radian": "radian radians rad", "hertz": "Hz hertz", "joule": "J joule joules",
    "newton": "N newton newtons", "watt": "W watt watts", "volt": "V volt volts", "pascal": "Pa pascal pascals",
    "electronvolt": "eV", "before noon": "am AM", "after noon": "pm PM",
}  # fmt: skip
_KNOWN = {alias: name for name, aliases in _NAMES.items() for alias in aliases.split()}
_SHORTHANDS = {"mph": "mile/hour", "kmh": "km/hour", "kph": "km/hour", "kmph": "km/hour"}
_LETTERS = frozenset("msghlLJNWVKACFc")  # single letters that are a unit where the gold answer has no variable
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
# words after a number that change it or join another one to it
_NOT_UNITS = frozenset(
    """and or plus minus times over mod choose to through is are not below under negative squared cubed factorial half
    halves third thirds fourth fourths fifth fifths sixth sixths eighth eighths tenth tenths hundredth hundredths
    thousandth thousandths dozen dozens score pi sqrt sin cos tan log ln exp infinity inf percent percentage pct
    hundred thousand million billion trillion hundreds thousands millions billions""".split()
)

_SPACE = r"(?:\s|~|\\[,;:! ]|\\q?quad(?![A-Za-z]))"
_GROUP = r"\\(?:text(?:rm|bf|it|sf|normal)?|mathrm|mathbf|mathsf|mbox|operatorname)\s*\{[^{}]*\}"
_POWER = r"(?:\s*\^\s*(?:\{\s*-?\d+\s*\}|-?\d))?"
_CIRCLE = r"(?:\^\s*\\circ(?![A-Za-z])|\^\s*\{\s*\\circ\s*\}|°)"
_PIECE = rf"{_SPACE}|/|\.|\\cdot(?![A-Za-z])|{_GROUP}{_POWER}|\\(?:mu|Omega|AA|degree)(?![A-Za-z]){_POWER}|{_CIRCLE}"
_SET_TAIL = re.compile(rf"(?:{_PIECE})++$")
_WORD = r"[A-Za-z]+(?:\s?\^\s*(?:\{\s*-?\d+\s*\}|-?\d)|[²³])?"
_WORD_TAIL = re.compile(rf"(?:(?<=[\d)}}])|(?<=\\pi)(?=\s))({_SPACE}*+)({_WORD}(?:(?:{_SPACE}|[/.-])++{_WORD})*+)\.?$")
_HAS_GROUP = re.compile(rf"{_GROUP}|\\(?:Omega|AA|degree)|{_CIRCLE}")
_GROUP_CONTENT = re.compile(r"\\[a-z]+\s*\{([^{}]*)\}")
_WHOLE_GROUP = re.compile(r"\\(?:text(?:rm|bf|it|sf|normal)?|mathrm|mbox)\s*\{(\s*\\?\$?-?\d[^{}]*)\}")
_CURRENCY = re.compile(r"(-?)\s*(?:(\\\$|\$)|(€)|\\?£|\\pounds(?![A-Za-z]))\s*(-?)(?=[\d.]|\\[dtc]?frac(?![A-Za-z]))")
_TAIL_CHARACTERS = 200


def split_unit(answer: str, *, words: bool) -> tuple[str, str]:
    r"""(the answer without the unit it ends in or the currency sign it begins with, that unit or "").

    A unit set upright (``\text{...}``, ``\mathrm{...}``) is always one. ``words``: so are plain words after a number;
    not to be asked where the gold answer has variables, since the t of "-9.8 t" may be one of them. "million" and the
    like become powers of ten.

    >>> split_unit("18 dollars", words=True), split_unit(r"15\mbox{ cm}^2", words=False)
    (('18', 'dollars'), ('15', 'cm^2'))
    >>> split_unit("-9.8 t", words=True), split_unit("3 and 4", words=True), split_unit("2 million people", words=True)
    (('-9.8 t', ''), ('3 and 4', ''), ('2 \\times 10^{6}', 'people'))
    """
    if whole := _WHOLE_GROUP.fullmatch(answer.strip()):  # \text{18 dollars}
        answer, words = whole[1], True
    answer = answer.strip()
    if currency := _CURRENCY.match(answer):
        rest, unit = split_unit(currency[1] + currency[4] + answer[currency.end() :], words=words)
        return rest, unit or ("dollar" if currency[2] else "euro" if currency[3] else "pound")
    tail = _SET_TAIL.search(answer, len(answer) - _TAIL_CHARACTERS)
    if tail and tail.start() and _HAS_GROUP.search(tail[0]) and not _joins(tail[0]):
        value = answer[: tail.start()].strip()
        scale = re.fullmatch(r"(?i)[\s~]*(hundred|thousand|million|billion|trillion)\b(.*)", _plain(tail[0]))
        return (f"{value} \\times 10^{{{_SCALES[scale[1].lower()]}}}", scale[2].strip()) if scale else (
            value, _plain(tail[0]))  # fmt: skip
    if words and (found := _WORD_TAIL.search(answer, len(answer) - _TAIL_CHARACTERS)):
        value, unit = answer[: found.start()].rstrip(), found[2]
        first, _, rest = unit.partition(" ")
        if found[1] and first.lower() in _SCALES and (not rest or _is_noun(rest, spaced=True)):
            return f"{value} \\times 10^{{{_SCALES[first.lower()]}}}", rest
        if _is_noun(unit, spaced=bool(found[1])):
            return value, unit
    return answer, ""


def _joins(tail: str) -> bool:
    """Whether upright words do more than name a unit: they join two answers, or hold a number."""
    for content in _GROUP_CONTENT.findall(tail):
        if re.search(r"(?<!\^)(?<![A-Za-z^])\d|[()=:?]", content):
            return True
        if set(re.findall(r"[a-z]+", content.lower())) & (_NOT_UNITS - set(_SCALES) - {"is", "to"}):
            return True
    return False


def _is_noun(unit: str, *, spaced: bool) -> bool:
    """Whether plain words after a number are a unit or a noun: attached to it only a known unit is."""
    words = re.findall(r"[A-Za-z]+", unit)
    if any(word.lower() in _NOT_UNITS for word in words):
        return words[-1].lower() in ("squared", "cubed") and parse_unit(unit) is not None
    if any(len(word) == 1 and word not in _LETTERS and not (word == "a" and len(words) > 1) for word in words):
        return False
    if parse_unit(unit) is not None or all(word in _KNOWN or word in _LETTERS for word in words):
        return True
    return spaced and all(len(word) > 2 or word in _KNOWN or word in ("of", "a", "in", "at", "on", "by") or
                          re.search(r"[/.]", unit) for word in words)  # fmt: skip


def _plain(tail: str) -> str:
    r"""``\mathrm{~cm}^{2}`` as "cm^2"."""
    text = _GROUP_CONTENT.sub(r" \1", re.sub(_CIRCLE, " degree", tail))
    text = re.sub(r"\\cdot|\\q?quad|\\[,;:! ]|~|\\(?=[A-Za-z])", " ", text)
    text = re.sub(r"\s*\^\s*\{?\s*(-?\d+)\s*\}?", r"^\1", text)
    return " ".join(text.split()).strip(". ")


def parse_unit(unit: str) -> dict[str, int] | None:
    """A unit as powers of known units; None where a part of it is unknown.

    >>> parse_unit("square inches"), parse_unit("miles per hour"), parse_unit("m/s^2"), parse_unit("eggs")
    ({'inch': 2}, {'mile': 1, 'hour': -1}, {'metre': 1, 'second': -2}, None)
    """
    text = re.sub(r"\b([AaPp])\.\s?([Mm])\b", r"\1\2", unit)  # p.m.
    text = text.replace("²", "^2").replace("³", "^3").replace(".", " ").strip()
    for short, long in _SHORTHANDS.items():
        text = re.sub(rf"\b{short}\b", long, text)
    parts = re.findall(r"/|\^\s*\{?\s*-?\d+|[A-Za-z]+", text)
    powers: dict[str, int] = {}
    sign, next_power, last = 1, 1, ""
    for part in parts:
        if part == "/" or part.lower() in ("per", "a"):
            sign = -1
        elif part.startswith("^"):
            if not last:
                return None
            powers[last] *= int(re.sub(r"[^\d-]", "", part))
        elif part.lower() in ("squared", "cubed") and last:
            powers[last] *= 2 if part.lower() == "squared" else 3
        elif part.lower() in ("square", "sq", "cubic", "cu"):
            next_power = 2 if part.lower() in ("square", "sq") else 3
        else:
            name = _KNOWN.get(part) or _KNOWN.get(part.lower() if len(part) > 2 else part)
            if name is None or name in powers:
                return None
            powers[name], last, next_power = sign * next_power, name, 1
    return powers or None


def units_differ(gold: str, answer: str) -> bool:
    """Whether both units are known, have as many parts, and are not the same.

    "dollars" beside "dollars per week" decides nothing: one of them may say less.

    >>> units_differ("cm", "m"), units_differ("cm^2", "square centimeters"), units_differ("cm", "eggs")
    (True, False, False)
    """
    one, other = parse_unit(gold), parse_unit(answer)
    return one is not None and other is not None and len(one) == len(other) and one != other
