r"""Extract the answer from the text of a model, and record which rule found it.

    maths             boxed, else "#### N", else "the answer is ...", else the last number
    multiple choice   `deftune.evaluation.choices`
    figfont           `normalize_text`, then equality; or `jaro_winkler`

All rules are string operations in time linear in the text: nothing here parses or evaluates mathematics.
`deftune.evaluation.grading` decides whether two answers are equal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

How = Literal[
    "boxed",  # the last \boxed{...}
    "marked",  # a line "#### 42", as GSM8K writes it
    "stated",  # "the answer is ..."
    "last_number",
    "lone",  # the whole text is a letter
    "bold",  # **B**
    "edge",  # the first or the last line begins with "B." or ends with "(B)"
    "option_text",  # lenient: the text of one option occurs
    "similar",  # lenient: the most similar option
    "ambiguous",  # two different letters, neither stated after the other
    "none",
]


@dataclass(frozen=True)
class Extraction:
    """``answer`` is None exactly when ``how`` is ``none`` or ``ambiguous``."""

    answer: str | None
    how: How


def after_reasoning(text: str) -> str:
    """The text after the last ``</think>``, where anything follows it: reasoning is no answer.

    >>> after_reasoning("<think>A is tempting.</think> Answer: B"), after_reasoning("<think>so B</think> ")
    (' Answer: B', '<think>so B</think> ')
    """
    answer = text.rpartition("</think>")[2]
    return answer if answer.strip() else text


# --- maths -----------------------------------------------------------------------------------------------------------

_BRACES = re.compile(r"(\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)


def extract_boxed(text: str, *, several: int = False) -> str | None:
    r"""The content of the last complete, non-blank ``\boxed{...}`` or ``\fbox{...}``; None where there is none.

        box      = ("\boxed" | "\fbox") space* "{" balanced "}"
        balanced = ("\" any | "{" balanced "}" | box | any but "\{}")*

    "Last" is by where the box opens, so of two nested boxes it is the inner one. A box that is never closed (the text
    was cut off) is no box. One pass with a stack: linear in the text.

    ``several``: the question has several answers (their number, or True), so boxes that only a comma, "and" or "or"
    parts are one list, also as "x = " boxes. Equal boxes are one answer unless there are as many boxes as answers. (Of
    a question with one answer several boxes are two spellings of it, or a change of mind: the last one counts.)

    >>> extract_boxed(r"so \boxed{1}, or rather \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    >>> extract_boxed(r"\boxed{\{1, 2\}} and the unfinished \boxed{3")
    '\\{1, 2\\}'
    >>> extract_boxed(r"\boxed{2} and $\boxed{3}$"), extract_boxed(r"\boxed{2} and $\boxed{3}$", several=True)
    ('3', '2, 3')
    """
    opened: list[int | None] = []  # per open brace: where its box's content starts, None for a plain brace
    found: list[tuple[int, int]] = []  # contents, in the order in which the boxes close
    for token in _BRACES.finditer(text):
        piece = token.group()
        if piece == "{":
            opened.append(None)
        elif piece == "}":
            start = opened.pop() if opened else None
            if start is not None and not _blank(text, start, token.start()):
                found.append((start, token.start()))
        elif token[1]:  # \boxed{
            opened.append(token.end())
    if not found:
        return None
    row = [max(found)]
    for start, end in sorted(found, reverse=True)[1:] if several else ():
        if not _LISTED.fullmatch(text, end + 1, row[-1][0]):
            break
        row.append((start, end))
    boxes = [text[start:end].strip() for start, end in reversed(row)]
    return ", ".join(boxes if len(boxes) == several else dict.fromkeys(boxes))


# between two boxes of a list: a comma or a word, with spacing and dollars around it, up to where the next one opens
_SPACING = r"(?:\s|\$|\\[(),;!\[\] ]|\\quad|\\qquad)*+"
_LISTED = re.compile(
    rf"{_SPACING}(?:,{_SPACING}|(?=and|or|\\text))(?:(?:and|or)\b|\\text\s*\{{\s*(?:and|or)\s*\}})?"
    rf"{_SPACING}(?:[A-Za-z](?:_\w|_\{{\w+\}})?{_SPACING}={_SPACING})?\\(?:boxed|fbox)\s*\{{"
)
_NOT_SPACE = re.compile(r"\S")


def _blank(text: str, start: int, end: int) -> bool:
    return _NOT_SPACE.search(text, start, end) is None


_WORD_BETWEEN = re.compile(r"(?:(?<!\s)\s++|,\s*+)?(?:\\text\s*+\{\s*+,?\s*+(?:and|or)\s*+\}|\b(?:and|or)\b)")
_BRACKET_OR_COMMA = re.compile(r"\\[{}]|[()\[\]{},]")
_THOUSANDS = re.compile(r"\D*[0-9]{1,3}(?:,(?:\\!)?\s?[0-9]{3})+(?:\.[0-9]+)?\D*")


def count_answers(gold: str, *, parted: bool = False) -> int:
    r"""How many answers a gold answer lists: parts between commas, "and" or "or" outside brackets; ``\pm`` is two.

    ``parted``: every comma parts two answers; otherwise 58,500 is one number.

    >>> count_answers("1,-2"), count_answers("58,500"), count_answers("(1,2)"), count_answers(r"1 \pm \sqrt{19}")
    (2, 1, 1, 2)
    >>> count_answers("69,84", parted=True), count_answers("3, 5, 7"), count_answers(r"6,8\text{, and }10")
    (2, 3, 3)
    """
    if not parted and _THOUSANDS.fullmatch(gold):
        return 1
    if braced := re.fullmatch(r"\s*\\?\{([^{}]*|.*\\)\}\s*", gold, re.DOTALL):
        gold = braced[1]
    gold = _WORD_BETWEEN.sub(",", gold)
    depth, parts = 0, 1
    for token in _BRACKET_OR_COMMA.findall(gold):
        if token == ",":
            parts += depth == 0
        else:
            depth = max(0, depth + (1 if token[-1] in "([{" else -1))
    return parts + 1 if parts == 1 and r"\pm" in gold else parts


_MARKED = re.compile(r"^[ \t]*+####(?!#)[ \t]*+(\S[^\n]*+)$", re.MULTILINE)
_STATED = re.compile(
    r"\banswer(?:\s+(?:is|(?:would|must|should|will)\s+be|equals)|\s*\**\s*[:=])(?!\w)"
    r"|^[ \t]*+[#*]++[ \t]*+(?:(?:the|my|final|correct)[ \t]++){0,3}answer[*# \t]*+$"  # a heading
    r"|<answer>",
    re.IGNORECASE | re.MULTILINE,
)
_NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:/[0-9]+)?"
_LAST_NUMBER = re.compile(rf"(?<![0-9.,])(?:(?<![\w)\]}}])[-\u2212])?\$?{_NUMBER}")
_DENIED_BEFORE = re.compile(r"(?:\bnot|n['\u2019]t|\bcannot|\bnever)\s+(?:be\s+|equal\s+(?:to\s+)?)?\Z", re.IGNORECASE)
_BEGINS_WITH_NUMBER = re.compile(rf"[-\u2212]?\$?{_NUMBER}")
_HEDGES = re.compile(
    r"(?:(?:therefore|thus|hence|then|so|now|just|simply|clearly|indeed|actually|approximately|approx\.?|about|roughly|"
    r"around|nearly|almost|exactly|equal\s+to|given\s+by)(?:[:,]|(?=\s))\s*+|[=:\u2248~]\s*+|\\approx\b\s*+)++",
    re.IGNORECASE,
)
_WORDS_AFTER = re.compile(r"(?:\s+|\s*[/-]\s*)([A-Za-z]{2,})[^,;(]*+")  # a number's unit, or what is said about it
_CHANGES_NUMBER = frozenset(
    "and or plus minus times over to pi sqrt squared cubed hundred thousand million billion trillion percent".split()
)
_TALK = frozenset("because since as so which where for given after when".split())
_AND = re.compile(r"\b(?:and|or)\b", re.IGNORECASE)
_DIGIT = re.compile(r"[0-9]")
_WORD_OR_BRACE = re.compile(r"[{}]|(?<![\\A-Za-z])[A-Za-z]{2,}")
_FORMULA = r"(?:\$\$((?:\\.|[^$\\])+)\$\$|\$((?:\\.|[^$\\\n])+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\])"
_MATHS_FIRST = re.compile(_FORMULA, re.DOTALL)
_MATHS_NEXT = re.compile(rf"\s*+(?:,\s*+(?:(?:and|or)\b)?|\b(?:and|or)\b)\s*+{_FORMULA}", re.DOTALL)
_SENTENCE_END = re.compile(r"[.;!?](?=\s|$)")


def extract_final(text: str, *, several: int = False, cut_off: bool = False) -> Extraction:
    r"""The final answer of a solution in prose, by the first of four rules that finds one.

    ``boxed``: `extract_boxed`. ``marked``: the last line "#### ...". ``stated``: what follows the last "answer is",
    "answer must be", "answer:" or "<answer>", up to the end of its sentence, without "therefore" or "approximately"; a
    formula that begins it is taken without its dollars, and words after a number are dropped ("18 dollars" and "18,
    since ..." are 18, unless they join another number with "and" or "or"); of a whole sentence its last number is
    taken.
    ``last_number``: the last number in the text, with its sign and its "/n", unless "not" stands before it.

    ``cut_off``: the text ended at the token limit. Its last number is then one of a derivation, and no answer; a marked
    or stated answer counts if something follows it.

    >>> extract_final(r"Hence $x = \boxed{3}$.")
    Extraction(answer='3', how='boxed')
    >>> extract_final("16 - 7 = 9\n#### 9")
    Extraction(answer='9', how='marked')
    >>> extract_final(r"The answer is $\frac{1}{2}$, because ...")
    Extraction(answer='\\frac{1}{2}', how='stated')
    >>> extract_final("She has 4 + 3 = 7 eggs left"), extract_final("She has 4 + 3 = 7 eggs", cut_off=True)
    (Extraction(answer='7', how='last_number'), Extraction(answer=None, how='none'))
    >>> extract_final("I do not know")
    Extraction(answer=None, how='none')
    """
    boxed = extract_boxed(text, several=several)
    if boxed is not None:
        return Extraction(boxed, "boxed")
    marked = _last(_MARKED, text)
    if marked is not None and not (cut_off and marked.end() == len(text)):
        return Extraction(marked.group(1).strip(), "marked")
    stated = _last(_STATED, text)
    if stated is not None:
        answer = _phrase(text, stated.end())
        if answer and not (cut_off and text.endswith(answer)):
            return Extraction(answer, "stated")
    number = None if cut_off else _last(_LAST_NUMBER, text)
    if number is not None and not _DENIED_BEFORE.search(text[: number.start()]):
        return Extraction(number.group().replace("$", ""), "last_number")
    return Extraction(None, "none")


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    last = None
    for match in pattern.finditer(text):
        last = match
    return last


def _phrase(text: str, start: int) -> str:
    """What a statement states: the formula or formulas it begins with, else its line up to the end of the sentence."""
    rest = text[start:].partition("</answer>")[0].lstrip(" \t\r\n:*")
    if hedges := _HEDGES.match(rest):
        rest = rest[hedges.end() :]
    formula = _MATHS_FIRST.match(rest)
    if formula and not (rest.startswith("$") and _prose_words(_content(formula))):  # "$59, which is $2 more" has none
        contents, end = [_content(formula)], formula.end()
        while following := _MATHS_NEXT.match(rest, end):  # "$3$ and $5$" is a list
            contents.append(_content(following))
            end = following.end()
        return ", ".join(contents)
    line = rest.partition("\n")[0].replace("**", "")
    end = _SENTENCE_END.search(line)
    phrase = (line[: end.start()] if end else line).strip().strip("*").strip()
    if re.match(r"not\b", phrase, re.IGNORECASE):
        return ""
    if number := _BEGINS_WITH_NUMBER.match(phrase):
        phrase = _number_of(number.group(), phrase[number.end() :]) or phrase
    elif _prose_words(phrase) > 2 and (last := _last(_LAST_NUMBER, phrase)):  # "the volume of the box is 120"
        phrase = last.group()
    return phrase.replace(r"\$", "").replace("$", "").strip()


def _content(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None).strip()


def _prose_words(text: str) -> int:
    """Words outside braces. Read backwards: a lookahead for the next brace at every word would be quadratic."""
    count, inside = 0, False
    for token in reversed(_WORD_OR_BRACE.findall(text)):
        if token in "{}":
            inside = token == "}"
        else:
            count += not inside
    return count


def _names_another_number(text: str) -> bool:
    """Whether a number follows an "and" or "or"."""
    first = _AND.search(text)
    return first is not None and _DIGIT.search(text, first.end()) is not None


def _number_of(number: str, rest: str) -> str:
    """The number that a phrase begins with, where the rest is a unit or talk; "" where it belongs to the answer."""
    words = _WORDS_AFTER.match(rest)
    if words and words.group(1).lower() in _TALK:
        return number
    if words:
        if words.group(1).lower() in _CHANGES_NUMBER or _names_another_number(words.group()):
            return ""
        rest = rest[words.end() :]
    return number if re.match(r"\s*(?:\Z|[,;(]\s*(?!and\b|or\b)[A-Za-z]|(?<=\s)\()", rest) else ""


# --- figfont ---------------------------------------------------------------------------------------------------------


def normalize_text(text: str) -> str:
    """Stripped and lower-cased: what figfont's exact match and `jaro_winkler` compare.

    >>> normalize_text("  Hello World\\n")
    'hello world'
    """
    return text.strip().lower()


def jaro_winkler(a: str, b: str) -> float:
    """The Jaro-Winkler similarity of two normalised texts, in [0, 1]; prefix weight 0.1, four characters at most.

        jaro = (m/|a| + m/|b| + (m - t)/m) / 3        m matching characters, t half the transposed ones
        similarity = jaro + 0.1 l (1 - jaro)          l the common prefix, only where jaro > 0.7

    Two empty texts are equal: 1.0. An empty text against any other: 0.0. Libraries disagree on the first; an empty
    gold answer does not occur in the data, so no score depends on it.

    >>> round(jaro_winkler("MARTHA", " marhta"), 6)
    0.961111
    >>> jaro_winkler("", ""), jaro_winkler("", "a")
    (1.0, 0.0)
    """
    from rapidfuzz.distance import JaroWinkler

    a, b = normalize_text(a), normalize_text(b)
    if a == b:
        return 1.0
    return JaroWinkler.similarity(a, b, prefix_weight=0.1)
