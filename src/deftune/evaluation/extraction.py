r"""The answer a model gave, taken out of the text it wrote; every answer says by which rule it was found.

    maths             boxed, else "#### N", else "the answer is ...", else the last number
    multiple choice   strict: a letter that is stated. lenient: also an option whose text occurs, else the most similar
    figfont           `normalize_text`, then equality; or `jaro_winkler`

All of it is plain string work in time linear in the text: nothing here parses or evaluates mathematics. Whether two
answers mean the same is `deftune.evaluation.grading`'s business.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

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
Rule = Literal["strict", "lenient"]


@dataclass(frozen=True)
class Extraction:
    """``answer`` is None exactly when ``how`` is ``none`` or ``ambiguous``."""

    answer: str | None
    how: How


# --- maths -----------------------------------------------------------------------------------------------------------

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)


def extract_boxed(text: str, *, several: bool = False) -> str | None:
    r"""The content of the last complete, non-blank ``\boxed{...}`` or ``\fbox{...}``; None where there is none.

        box      = ("\boxed" | "\fbox") space* "{" balanced "}"
        balanced = ("\" any | "{" balanced "}" | box | any but "\{}")*

    "Last" is by where the box opens, so of two nested boxes it is the inner one. A box that is never closed (the text
    was cut off) is no box. One pass with a stack: linear in the text.

    ``several``: the question has several answers, so boxes that only a comma, "and" or "or" parts are one list. (Of a
    question with one answer they are two spellings of it, or a change of mind: the last one counts.)

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
        elif piece[-1] == "{" and len(piece) > 2:  # \boxed{; the escaped brace \{ has two characters
            opened.append(token.end())
    if not found:
        return None
    row = [max(found)]
    for start, end in sorted(found, reverse=True)[1:] if several else ():
        if not _LISTED.fullmatch(text, end + 1, row[-1][0]):
            break
        row.append((start, end))
    return ", ".join(dict.fromkeys(text[start:end].strip() for start, end in reversed(row)))


# between two boxes of a list: a comma or a word, with spacing and dollars around it, up to where the next one opens
_SPACING = r"(?:\s|\$|\\[(),;!\[\] ]|\\quad|\\qquad)*+"
_LISTED = re.compile(
    rf"{_SPACING}(?:,{_SPACING}|(?=and|or|\\text))(?:(?:and|or)\b|\\text\s*\{{\s*(?:and|or)\s*\}})?"
    rf"{_SPACING}\\(?:boxed|fbox)\s*\{{"
)
_NOT_SPACE = re.compile(r"\S")


def _blank(text: str, start: int, end: int) -> bool:
    return _NOT_SPACE.search(text, start, end) is None


_MARKED = re.compile(r"^[ \t]*+####(?!#)[ \t]*+(\S[^\n]*+)$", re.MULTILINE)
_STATED = re.compile(r"\banswer(?:\s+is|\s+would\s+be|\s*[:=])(?!\w)", re.IGNORECASE)
_NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:/[0-9]+)?"
_LAST_NUMBER = re.compile(rf"(?<![0-9.,])(?:(?<![\w)\]}}])-)?\$?{_NUMBER}")
_NUMBER_OF = re.compile(rf"(-?\$?{_NUMBER})\s+[A-Za-z][A-Za-z ]*")
_MATHS_FIRST = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_SENTENCE_END = re.compile(r"[.;!?](?=\s|$)")


def extract_final(text: str, *, several: bool = False) -> Extraction:
    r"""The final answer of a solution in prose, by the first of four rules that finds one.

    ``boxed``: `extract_boxed`. ``marked``: the last line "#### ...". ``stated``: what follows the last "answer is",
    "answer would be" or "answer:", up to the end of its sentence; a formula that begins it is taken without its
    dollars, and words after a number are dropped ("18 dollars" is 18, unless they say "and" or "or").
    ``last_number``: the last number in the text, with its sign and its "/n".

    >>> extract_final(r"Hence $x = \boxed{3}$.")
    Extraction(answer='3', how='boxed')
    >>> extract_final("16 - 7 = 9\n#### 9")
    Extraction(answer='9', how='marked')
    >>> extract_final(r"The answer is $\frac{1}{2}$, because ...")
    Extraction(answer='\\frac{1}{2}', how='stated')
    >>> extract_final("She has 4 + 3 = 7 eggs left")
    Extraction(answer='7', how='last_number')
    >>> extract_final("I do not know")
    Extraction(answer=None, how='none')
    """
    boxed = extract_boxed(text, several=several)
    if boxed is not None:
        return Extraction(boxed, "boxed")
    marked = _last(_MARKED, text)
    if marked is not None:
        return Extraction(marked.group(1).strip(), "marked")
    stated = _last(_STATED, text)
    if stated is not None:
        answer = _phrase(text, stated.end())
        if answer:
            return Extraction(answer, "stated")
    number = _last(_LAST_NUMBER, text)
    if number is not None:
        return Extraction(number.group().replace("$", ""), "last_number")
    return Extraction(None, "none")


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = deque(pattern.finditer(text), maxlen=1)
    return found.pop() if found else None


def _phrase(text: str, start: int) -> str:
    """What a statement states: the formula it begins with, else its line up to the end of the sentence."""
    line = text[start:].lstrip(" \t\r\n:*").split("\n", 1)[0]
    formula = _MATHS_FIRST.match(line)
    if formula:
        return next(group for group in formula.groups() if group is not None).strip()
    end = _SENTENCE_END.search(line)
    phrase = (line[: end.start()] if end else line).strip().strip("*").strip()
    counted = _NUMBER_OF.fullmatch(phrase)
    if counted and not re.search(r"\b(?:and|or)\b", phrase):
        phrase = counted.group(1)
    return phrase.replace("$", "").strip()


# --- multiple choice -------------------------------------------------------------------------------------------------


def extract_choice(text: str, letters: Sequence[str], options: Sequence[str], *, rule: Rule = "strict") -> Extraction:
    r"""The letter a text answers with; ``options`` are the texts of the ``letters``, in the same order.

    ``strict`` credits a letter that is stated, by the first of these that finds any:

        boxed    \boxed{B}, \boxed{(B)}, \boxed{\text{B. Iron}}
        stated   "answer is (B)", "Answer: B", "correct option is B": the last one, for a text may correct itself
        lone     the whole text is B, (B), B. or **B**
        bold     **B** or **B. Iron**
        edge     the first or the last line begins with "B.", "B)", "(B)" or "B:", or the text ends with "(B)"

    Where that rule finds two different letters at once ("A or B", \boxed{A, C}, two bold letters) the answer is None,
    ``how`` is ``ambiguous``, and no later rule is asked. Lower-case letters count in parentheses, in a box, or alone;
    a bare "a" in a sentence is an article.

    ``lenient`` also asks, where nothing is stated at all: ``option_text``, the one option whose text occurs (inside a
    longer option's text does not count); ``similar``, the option nearest to the text by normalised edit similarity,
    unless two are equally near. This hands a guess to a model that gave no answer; name the rule beside the score.

    >>> extract_choice("The answer is (B).", "AB", ["iron", "zinc"])
    Extraction(answer='B', how='stated')
    >>> extract_choice("It must be zinc", "AB", ["iron", "zinc"])
    Extraction(answer=None, how='none')
    >>> extract_choice("It must be zinc", "AB", ["iron", "zinc"], rule="lenient")
    Extraction(answer='B', how='option_text')
    """
    if rule not in get_args(Rule):
        raise ValueError(f"unknown rule {rule!r}. Known: {', '.join(get_args(Rule))}")
    if any(len(letter) != 1 or not letter.isupper() for letter in letters) or len(set(letters)) != len(letters):
        raise ValueError(f"letters: distinct single capitals, got {list(letters)}")
    if len(options) != len(letters):
        raise ValueError(f"{len(letters)} letters for {len(options)} options")
    if not letters:
        return Extraction(None, "none")
    patterns = _choice_patterns("".join(letters))
    rules = (_boxed_letters, _stated_letters, _lone_letters, _bold_letters, _edge_letters)
    for how, find in zip(("boxed", "stated", "lone", "bold", "edge"), rules):
        found = find(text, patterns)
        if len(found) == 1:
            return Extraction(found.pop(), how)
        if found:
            return Extraction(None, "ambiguous")
    return Extraction(None, "none") if rule == "strict" else _lenient(text, letters, options)


@dataclass(frozen=True)
class _Patterns:
    letters: frozenset[str]
    wrapped: re.Pattern[str]  # the whole of a piece is a letter, perhaps with its option's text
    stated: re.Pattern[str]
    more: re.Pattern[str]  # directly after a letter: "or B", ", C"
    bold: re.Pattern[str]
    begins: re.Pattern[str]  # a line that begins with a letter and a mark
    ends: re.Pattern[str]


_known_patterns: dict[str, _Patterns] = {}


def _choice_patterns(letters: str) -> _Patterns:
    if letters in _known_patterns:
        return _known_patterns[letters]
    upper, either = f"[{re.escape(letters)}]", f"[{re.escape(letters + letters.lower())}]"
    # a letter in parentheses, or a bare capital that is not the beginning of a word
    letter = rf"(?:\(\s*+({either})\s*+\)|({upper})(?![\w'\u2019\-]))"
    noun = r"(?i:answer|option|choice)"
    # possessive (*+ and ++ never give back), here and below: or a long run of spaces would cost its square
    between = r"[\s:*$]*+"
    filler = rf"(?:(?i:most\s++likely|probably|clearly|therefore|thus|the)\b{between})?(?:{noun}\b{between})?"
    built = _Patterns(
        letters=frozenset(letters),
        wrapped=re.compile(rf"[\s(*]*+({either})(?:[\s)*.]*+|[)*]*[.:)].*)", re.DOTALL),
        stated=re.compile(
            rf"\b{noun}(?i:\s++(?:is|would\s++be)\b|\s*+[:=]){between}{filler}"
            rf"(?:\\(?:text|textbf|mathrm|mathbf)\{{)?{letter}"
        ),
        more=re.compile(rf"[\s)*}}$]*+(?:,\s*+(?:and|or)\b|[,/&]|\b(?:and|or)\b)\s*+(?:{noun}\s++)?\**+{letter}"),
        bold=re.compile(rf"\*\*\s*+\(?({upper})\)?(?:\s*+|[.:)][^*\n]*+)\*\*"),
        begins=re.compile(rf"[*\s]*+(?:\(({either})\)|({upper})\**+[.):])(?!\w)"),
        ends=re.compile(rf"(?<!\w)\(({upper})\)[*.\s]*+\Z"),
    )
    _known_patterns[letters] = built
    return built


def _letters_of(match: re.Match[str] | None) -> set[str]:
    return {group.upper() for group in match.groups() if group} if match else set()


_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")


def _boxed_letters(text: str, patterns: _Patterns) -> set[str]:
    boxed = extract_boxed(text)
    if boxed is None:
        return set()
    return _whole(_TEXT_COMMAND.sub(r"\1", boxed).strip("$ "), patterns)


_WORD_OR_MARK = re.compile(r"\w+|[^\w\s]")


def _whole(piece: str, patterns: _Patterns) -> set[str]:
    """The letters of a piece that is nothing but a letter, a letter and its option's text, or a list of letters."""
    words = _WORD_OR_MARK.findall(piece)
    named = {word.upper() for word in words} & patterns.letters
    if len(named) > 1 and all(word.upper() in named or word in _LIST_WORDS for word in words):
        return named
    return _letters_of(patterns.wrapped.fullmatch(piece))


_LIST_WORDS = frozenset(("and", "or", *"(),/&*.;"))


def _stated_letters(text: str, patterns: _Patterns) -> set[str]:
    last = _last(patterns.stated, text)
    if last is None:
        return set()
    found, position = _letters_of(last), last.end()
    while more := patterns.more.match(text, position):
        found |= _letters_of(more)
        position = more.end()
    return found


def _lone_letters(text: str, patterns: _Patterns) -> set[str]:
    text = text.strip()
    return _whole(text, patterns) if len(text) < 40 and not re.search(r"[.:)]\s*\w{2}", text) else set()


def _bold_letters(text: str, patterns: _Patterns) -> set[str]:
    return {match.group(1) for match in patterns.bold.finditer(text)}


def _edge_letters(text: str, patterns: _Patterns) -> set[str]:
    lines = text.strip().split("\n")
    found = _letters_of(patterns.begins.match(lines[0])) | _letters_of(patterns.begins.match(lines[-1]))
    return found | _letters_of(patterns.ends.search(text[-64:]))


def _lenient(text: str, letters: Sequence[str], options: Sequence[str]) -> Extraction:
    said = " ".join(normalize_text(text).split())
    if not said:
        return Extraction(None, "none")
    wanted = [" ".join(normalize_text(option).split()) for option in options]
    occurs = [n for n, option in enumerate(wanted) if option and re.search(rf"(?<!\w){re.escape(option)}(?!\w)", said)]
    longest = [n for n in occurs if not any(n != m and wanted[n] in wanted[m] for m in occurs)]
    if len(longest) == 1:
        return Extraction(letters[longest[0]], "option_text")
    from rapidfuzz import fuzz

    near = [fuzz.ratio(option, said) for option in wanted]
    best = max(near)
    if best > 0 and near.count(best) == 1:
        return Extraction(letters[near.index(best)], "similar")
    return Extraction(None, "none")


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
    if not a or not b:
        return float(a == b)
    return JaroWinkler.similarity(a, b, prefix_weight=0.1)
