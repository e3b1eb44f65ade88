r"""Extract the answer from the text of a model, and record which rule found it.

    maths             boxed, else "#### N", else "the answer is ...", else the last number
    multiple choice   strict: a letter that is stated. lenient: also an option whose text occurs, else the most similar
    figfont           `normalize_text`, then equality; or `jaro_winkler`

All rules are string operations in time linear in the text: nothing here parses or evaluates mathematics.
`deftune.evaluation.grading` decides whether two answers are equal.
"""

from __future__ import annotations

import functools
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
        elif piece[-1] == "{" and len(piece) > 2:  # \boxed{; the escaped brace \{ has two characters
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


_ENCLOSED = re.compile(r"\\[{}]|[()\[\]{}]")
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
    gold = re.sub(r",?\s*(?:\\text\s*\{\s*,?\s*(?:and|or)\s*\}|\b(?:and|or)\b)", ",", gold)
    depth, outside, start = 0, "", 0
    for token in _ENCLOSED.finditer(gold):
        if depth == 0:
            outside += gold[start : token.start()]
        depth = max(0, depth + (1 if token.group()[-1] in "([{" else -1))
        start = token.end()
    outside += gold[start:] if depth == 0 else ""
    parts = outside.count(",") + 1
    return parts + 1 if parts == 1 and r"\pm" in gold else parts


_MARKED = re.compile(r"^[ \t]*+####(?!#)[ \t]*+(\S[^\n]*+)$", re.MULTILINE)
_STATED = re.compile(r"\banswer(?:\s+(?:is|(?:would|must|should|will)\s+be|equals)|\s*\**\s*[:=])(?!\w)", re.IGNORECASE)
_NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:/[0-9]+)?"
_LAST_NUMBER = re.compile(rf"(?<![0-9.,])(?:(?<![\w)\]}}])-)?\$?{_NUMBER}")
_DENIED_BEFORE = re.compile(r"(?:\bnot|n['\u2019]t|\bcannot|\bnever)\s+(?:be\s+|equal\s+(?:to\s+)?)?\Z", re.IGNORECASE)
_BEGINS_WITH_NUMBER = re.compile(rf"-?\$?{_NUMBER}")
_HEDGES = re.compile(
    r"(?:(?:therefore|thus|hence|then|so|now|just|simply|clearly|indeed|actually|approximately|approx\.?|about|roughly|"
    r"around|nearly|almost|exactly|equal\s+to|given\s+by|indeed)(?:[:,]|(?=\s))\s*+|[=:\u2248~]\s*+|\\approx\b\s*+)++",
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
_MATHS_FIRST = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_SENTENCE_END = re.compile(r"[.;!?](?=\s|$)")


def extract_final(text: str, *, several: int = False, cut_off: bool = False) -> Extraction:
    r"""The final answer of a solution in prose, by the first of four rules that finds one.

    ``boxed``: `extract_boxed`. ``marked``: the last line "#### ...". ``stated``: what follows the last "answer is",
    "answer must be" or "answer:", up to the end of its sentence, without "therefore" or "approximately"; a formula that
    begins it is taken without its dollars, and words after a number are dropped ("18 dollars" and "18, since ..." are
    18, unless they join another number with "and" or "or"); of a whole sentence its last number is taken.
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
    if number is not None and not _DENIED_BEFORE.search(text, max(0, number.start() - 32), number.start()):
        return Extraction(number.group().replace("$", ""), "last_number")
    return Extraction(None, "none")


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = deque(pattern.finditer(text), maxlen=1)
    return found.pop() if found else None


def _phrase(text: str, start: int) -> str:
    """What a statement states: the formula it begins with, else its line up to the end of the sentence."""
    line = text[start:].lstrip(" \t\r\n:*").split("\n", 1)[0].replace("**", "")
    if hedges := _HEDGES.match(line):
        line = line[hedges.end() :]
    formula = _MATHS_FIRST.match(line)
    if formula:
        content = next(group for group in formula.groups() if group is not None).strip()
        if not (line.startswith("$") and _prose_words(content)):  # "$59, which is $2 more" has no formula
            return content
    end = _SENTENCE_END.search(line)
    phrase = (line[: end.start()] if end else line).strip().strip("*").strip()
    if re.match(r"not\b", phrase, re.IGNORECASE):
        return ""
    if number := _BEGINS_WITH_NUMBER.match(phrase):
        phrase = _number_of(number.group(), phrase[number.end() :]) or phrase
    elif _prose_words(phrase) > 2 and (last := _last(_LAST_NUMBER, phrase)):  # "the volume of the box is 120"
        phrase = last.group()
    return phrase.replace("$", "").strip()


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


# --- multiple choice -------------------------------------------------------------------------------------------------


def extract_choice(
    text: str, letters: Sequence[str], options: Sequence[str], *, rule: Rule = "strict", cut_off: bool = False
) -> Extraction:
    r"""The letter a text answers with; ``options`` are the texts of the ``letters``, in the same order.

    ``strict`` credits a letter that is stated, by the first of these that finds any:

        boxed    \boxed{B}, \boxed{(B)}, \boxed{\text{B. Iron}}
        stated   "Answer: <B>", "the answer must be (B)", "Option B is correct", "I choose B", a heading "Answer" with B
                 below it: the last one, for a text may correct itself
        lone     the whole text is B, (B), B. or **B**
        bold     **B** or **B. Iron**
        edge     the first or the last line begins with "B.", "B)", "(B)" or "B:", or the text ends with "(B)"

    Where that rule finds two different letters at once ("A or B", \boxed{A, C}, two bold letters), or the options are
    only listed, the answer is None, ``how`` is ``ambiguous``, and no later rule is asked. A letter that is denied ("the
    incorrect answer is B", "(A) is wrong", "it is not (B)"), that others are said to give ("many think the answer is
    A"), or that abbreviates a name ("C. difficile") does not count. Lower-case letters count in brackets or quotes, in
    a box, alone, or at the end of a line; a bare "a" in a sentence is an article.

    ``lenient`` also asks, where no letter is named at all: ``option_text``, the one option whose text occurs (inside a
    longer option's text does not count); ``similar``, the option nearest to the text by normalised edit similarity,
    unless two are equally near or the text says that it does not know. This hands a guess to a model that gave no
    answer; name the rule beside the score.

    ``cut_off``: the text ended at the token limit, so its last line and its end say nothing, and nothing is guessed.

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
    question = _Question(_choice_patterns("".join(letters)), dict(zip(letters, options)), cut_off)
    rules = (_boxed_letters, _stated_letters, _lone_letters, _bold_letters, _edge_letters)
    for how, find in zip(("boxed", "stated", "lone", "bold", "edge"), rules):
        found = find(text, question)
        if len(found) == 1:
            return Extraction(found.pop(), how)
        if found:
            return Extraction(None, "ambiguous")
    return Extraction(None, "none") if rule == "strict" or cut_off else _lenient(text, question)


@dataclass(frozen=True)
class _Patterns:
    letters: frozenset[str]
    wrapped: re.Pattern[str]  # the whole of a piece is a letter, perhaps with its option's text
    stated: re.Pattern[str]
    more: re.Pattern[str]  # directly after a letter: "or B", ", C"
    bold: re.Pattern[str]
    begins: re.Pattern[str]  # a line that begins with a letter and a mark
    marks: re.Pattern[str]  # a letter and a mark anywhere in a line
    ends: re.Pattern[str]
    named: re.Pattern[str]  # a letter that is meant as one, whatever is said of it


@dataclass(frozen=True)
class _Question:
    patterns: _Patterns
    options: dict[str, str]
    cut_off: bool


@functools.cache
def _choice_patterns(letters: str) -> _Patterns:
    upper, either = f"[{re.escape(letters)}]", f"[{re.escape(letters + letters.lower())}]"
    lower = f"[{re.escape(letters.lower())}]"
    # a letter in brackets or quotes, a bare capital that does not begin a word, or a small letter that ends a line
    letter = (
        rf"(?:[(\[<\"'`\u201c]\s*+({either})\s*+[)\]>\"'`\u201d]|({upper})(?![\w'\u2019\-])"
        rf"|({lower})(?=[.)]?[*_]*+[ \t]*+(?:\n|\Z)|[.)]\s))"
    )
    noun = r"(?=[aocAOC])(?i:answer|option|choice)"  # the first letter first: it is looked for at every word
    # possessive (*+ and ++ never give back), here and below: or a long run of spaces would cost its square
    between = r"[\s:*_$]*+"
    sure = r"(?i:most\s++likely|probably|clearly|therefore|thus|definitely|indeed|simply|the|letter)"
    filler = rf"(?:{sure}\b{between}){{0,2}}(?:{noun}\b{between})?(?:\\(?:text|textbf|mathrm|mathbf)\{{)?"
    be = r"(?:is|are|would\s++be|must\s++be|should\s++be|has\s++to\s++be|will\s++be|must\s++then\s++be)"
    about = r"(?:\s++(?i:to\s++(?:the|this)\s++question|here|choice|option|letter))?+"
    choose = r"(?:choose|chose|pick|picked|select|selected|go\s++with|going\s++with|opt\s++for|answer)"
    praise = r"(?i:to\s++be|clearly|therefore|thus|the|most|single|indeed|definitely|a)"
    stated = (
        # "the answer is B", "**Answer**: B", "Answer - B"
        rf"\b{noun}\b{about}(?:[*_]*+\s*+(?:[:=]|(?i:{be})\b)|\s++[-\u2013\u2014](?=\s)){between}{filler}{letter}",
        # a heading, and the letter below it
        rf"(?m:^)[#*_ \t]*+(?i:(?:final|correct|my|the)[ \t]++){{0,2}}(?i:answer)[*_: \t]*+\n\s*+[*_]*+{letter}"
        rf"(?=[).\]*_]*+[ \t]*+(?:\n|\Z)|[.):])",
        # "Option B is correct", "(B) is the best answer"
        rf"(?:\b{noun}\s++[*_]*+{letter}|(?:\A|(?<=[.;:!?\n]))[ \t]*+[*_]*+{letter})[*_]*+(?:\s*+\([^()\n]{{0,80}}\))?+"
        rf"\s++(?i:is|seems|appears|would\s++be)\s++(?:{praise}\s++){{0,4}}(?i:correct|right|best|answer|appropriate)\b",
        rf"\bI(?:\s++(?i:would|will)|['\u2019](?:d|ll|m))?(?:\s++(?i:therefore|thus|have\s++to|must))?"
        rf"\s++(?i:{choose})\b{between}{filler}{letter}",
        # "it is B", at the end of a line
        rf"\b(?i:it|this)(?:\s++(?i:is|must\s++be|should\s++be)|['\u2019]s)\b{between}{filler}{letter}"
        rf"(?=[*_.!)\]\"'>]*+\s*+(?:\Z|\n))",
    )
    return _Patterns(
        letters=frozenset(letters),
        wrapped=re.compile(rf"[\s(\[<\"'`*]*+({either})(?:[\s)\]>\"'`*.]*+|[)*]*[.:)].*)", re.DOTALL),
        stated=re.compile("|".join(stated)),
        more=re.compile(
            rf"[\s)\]>\"'`*_}}$]*+(?:,\s*+(?:and|or)\b|[,/&]|\b(?:and|or)\b)\s*+(?:{noun}\s++)?[*_]*+{letter}"
        ),
        bold=re.compile(rf"\*\*\s*+\(?({upper})\)?(?:\s*+|[.:)][^*\n]*+)\*\*"),
        begins=re.compile(rf"[*\s]*+(?:\(({either})\)|({upper})\**+[.):])(?!\w)"),
        marks=re.compile(rf"(?:(?<=\s)|\A)\(?({upper})[.):](?=\s)"),
        ends=re.compile(rf"(?<!\w)\(({upper})\)[*.\s]*+\Z"),
        named=re.compile(
            rf"\b{noun}\s*+(?:(?i:is|:)\s*+)?[(\[<\"'`*]*+({upper})(?![\w'\u2019\-])"
            rf"|[(\[<\"`]\s*+({upper})\s*+[)\]>\"`]|(?<!\w)(?!A\s)({upper})(?![\w'\u2019\-]|\.\s[a-z])"
        ),
    )


def _letters_of(match: re.Match[str] | None) -> set[str]:
    return {group.upper() for group in match.groups() if group} if match else set()


# before a statement, in its own sentence: it is denied, or somebody else's, or only supposed
_NOT_MEANT = re.compile(
    r"\b(?:incorrect|wrong|false|worst|(?:not|n['\u2019]t)\s+(?:the|a|an|that\s+the))\s+(?:correct\s+|right\s+|best\s+)?\Z"
    r"|\b(?:many|some|others?|people|students?|one|you|they|most)\b[^.;!?\n]*"
    r"\b(?:think|thinks|say|says|believe|assume|argue|claim|guess|suppose|tempted|expect)\b[^.;!?\n]*\Z"
    r"|\b(?:if|unless|whether|suppose|had)\b[^,.;!?\n]*\Z",
    re.IGNORECASE,
)
_NOT_BEFORE = re.compile(r"(?:\bnot|n['\u2019]t|\bnever|\bexcept|\bthan|\bexclud\w+|\beliminat\w+|\brul\w+\s+out)"
                         r"\s+(?:be\s+)?(?:option\s+|choice\s+|the\s+)*\Z", re.IGNORECASE)  # fmt: skip
_DENIED_AFTER = re.compile(
    r"[)\]*_.:,\s]*+(?:(?:is|are|was|would|can|could)(?:\s+be)?\s*+)?"
    r"(?:not\b|n['\u2019]t\b|cannot\b|wrong\b|incorrect\b|false\b|unlikely\b|(?:ruled|eliminated|excluded)\b)"
    r"|[^.\n]{0,80}\b(?:is|are|was)\s+(?:wrong|incorrect|false|not\s+(?:the\s+)?(?:correct|right|best|answer))\b",
    re.IGNORECASE,
)
_ABBREVIATION = re.compile(r"\.[ ]([a-z]{3,})")
_CONNECTIVES = frozenset("because since which this that the therefore thus and but explanation reason".split())
_WINDOW = 80


def _is_denied(text: str, start: int, end: int) -> bool:
    return bool(_NOT_BEFORE.search(text, max(0, start - 40), start) or _DENIED_AFTER.match(text, end))


def _abbreviates(text: str, end: int, letter: str, options: dict[str, str]) -> bool:
    """Whether a letter before a period belongs to a name, as in C. difficile, and not to its option's text."""
    after = _ABBREVIATION.match(text, end)
    if after is None or after[1] in _CONNECTIVES:
        return False
    return not options[letter].strip().lower().startswith(after[1])


_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")


def _boxed_letters(text: str, question: _Question) -> set[str]:
    boxed = extract_boxed(text)
    if boxed is None:
        return set()
    piece = _TEXT_COMMAND.sub(r"\1", boxed).strip("$ ")
    found = _whole(piece, question.patterns)
    if len(found) == 1 and (first := re.search(r"\w", piece)):
        (letter,) = found
        return set() if _abbreviates(piece, first.end(), letter, question.options) else found
    return found


_WORD_OR_MARK = re.compile(r"\w+|[^\w\s]")


def _whole(piece: str, patterns: _Patterns) -> set[str]:
    """The letters of a piece that is nothing but a letter, a letter and its option's text, or a list of letters."""
    words = _WORD_OR_MARK.findall(piece)
    named = {word.upper() for word in words} & patterns.letters
    if len(named) > 1 and all(word.upper() in named or word in _LIST_WORDS for word in words):
        return named
    return _letters_of(patterns.wrapped.fullmatch(piece))


_LIST_WORDS = frozenset(("and", "or", *"(),/&*.;"))


def _stated_letters(text: str, question: _Question) -> set[str]:
    patterns = question.patterns
    for last in reversed(list(patterns.stated.finditer(text))):
        found, position = _letters_of(last), last.end()
        if len(found) == 1 and _abbreviates(text, position, next(iter(found)), question.options):
            continue
        if _NOT_MEANT.search(text, max(0, last.start() - _WINDOW), last.start()):
            continue
        while more := patterns.more.match(text, position):
            found |= _letters_of(more)
            position = more.end()
        return found
    return set()


def _lone_letters(text: str, question: _Question) -> set[str]:
    text = text.strip()
    return _whole(text, question.patterns) if len(text) < 40 and not re.search(r"[.:)]\s*\w{2}", text) else set()


def _bold_letters(text: str, question: _Question) -> set[str]:
    found: set[str] = set()
    for match in question.patterns.bold.finditer(text):
        if match.group(1) not in found and not _is_denied(text, match.start(), match.end()):
            found.add(match.group(1))
    return found


def _edge_letters(text: str, question: _Question) -> set[str]:
    """Of the first and the last line, unless they are the first and the last of a list of options."""
    patterns, options = question.patterns, question.options
    lines = [line for line in text.strip().split("\n") if line.strip()]
    begins = [(n, match) for n, line in enumerate(lines) if (match := patterns.begins.match(line))]
    letters = [_letters_of(match).pop() for _, match in begins]
    found: set[str] = set()
    listed: set[str] = set()
    edges = [(0, letters[1:2], 1), (-1, letters[-2:-1], -1)] if begins else []
    for place, neighbour, order in edges:
        (n, match), letter = begins[place], letters[place]
        if n != (0 if order > 0 else len(lines) - 1) or (order < 0 and question.cut_off and len(lines) > 1):
            continue
        in_line = {mark.group(1) for mark in patterns.marks.finditer(lines[n])} | {letter}
        if len(in_line) > 1 or (neighbour and order * (ord(neighbour[0]) - ord(letter)) > 0):
            listed |= in_line | set(neighbour)
        elif not _is_denied(lines[n], 0, match.end()) and not _abbreviates(lines[n], match.end() - 1, letter, options):
            found.add(letter)
    ending = None if question.cut_off else patterns.ends.search(text[-64:])
    if ending and not _is_denied(text[-64:], ending.start(), ending.end()):
        found |= _letters_of(ending)
    return found or listed


_NO_IDEA = re.compile(
    r"\b(?:(?:do|does|did|can|could)\s*(?:not|n['\u2019]t)|cannot|unable\s+to|no\s+idea|not\s+sure|unsure|uncertain)\b"
    r"[^.\n]*(?:\b(?:know|determine|answer|say|tell|decide|provide|help)\b|\Z)|\bno\s+idea\b|\bnot\s+sure\b",
    re.IGNORECASE,
)


def _lenient(text: str, question: _Question) -> Extraction:
    letters, options = list(question.options), list(question.options.values())
    said = " ".join(normalize_text(text).split())
    if not said or _NO_IDEA.search(text):
        return Extraction(None, "none")
    wanted = [" ".join(normalize_text(option).split()) for option in options]
    occurs = [n for n, option in enumerate(wanted) if option and re.search(rf"(?<!\w){re.escape(option)}(?!\w)", said)]
    longest = [n for n in occurs if not any(n != m and wanted[n] in wanted[m] for m in occurs)]
    bare = text
    for option in sorted((option for option in options if option.strip()), key=len, reverse=True):
        bare = re.sub(r"\s+".join(map(re.escape, option.split())), " ", bare, flags=re.IGNORECASE)
    named = {letter for match in question.patterns.named.finditer(bare) for letter in _letters_of(match)}
    if named:  # a letter is named, if not as the answer: no other one is guessed
        kept = [n for n in longest if named == {letters[n]}]
        return Extraction(letters[kept[0]], "option_text") if len(longest) == 1 and kept else Extraction(None, "none")
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
