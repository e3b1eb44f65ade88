"""Extract the letter that a text answers a multiple-choice question with, and record which rule found it."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from deftune.evaluation.extraction import Extraction, extract_boxed, normalize_text

Rule = Literal["strict", "lenient"]
"""strict: a letter that is stated. lenient: also an option whose text occurs, else the most similar option."""


def extract_choice(
    text: str, letters: Sequence[str], options: Sequence[str], *, rule: Rule = "strict", cut_off: bool = False
) -> Extraction:
    r"""The letter a text answers with; ``options`` are the texts of the ``letters``, in the same order.

    ``strict`` credits a letter that is stated, by the first of these that finds any:

        boxed    \boxed{B}, \boxed{(B)}, \boxed{\text{B. Iron}}
        stated   "Answer: <B>", "the answer must be (B)", "the answer is not A but B", "Option B is correct", "I choose
                 B", "so B.", a heading "Answer" with B below it, "<answer>B</answer>": the last one, for a text may
                 correct itself
        lone     the whole text is B, (B), B., **B** or "Option B"
        bold     **B** or **B. Iron**
        edge     the first or the last line is B, begins with "B.", "B)", "(B)" or "B:", or with B and its option's text
                 ("B - Iron"), or the text ends with "(B)"

    Where that rule finds two different letters at once ("A or B", \boxed{A, C}, two bold letters, lines "Answer: A" and
    "Answer: B"), or the options are only listed, the answer is None, ``how`` is ``ambiguous``, and no later rule is
    asked. A letter that is denied ("the incorrect answer is B", "(A) is wrong", "it is not (B)"), asked ("the answer is
    A?"), supposed ("the answer would be A if"), that others are said to give ("many think the answer is A"), or that
    abbreviates a name ("C. difficile") does not count. Lower-case letters count in brackets or quotes, in
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
    instead: re.Pattern[str]  # "not A but", before the letter that is meant
    alone: re.Pattern[str]  # the whole of a piece is a letter, perhaps in brackets or quotes
    titled: re.Pattern[str]  # the whole of a piece is a letter, a mark and perhaps its option's text
    stated: re.Pattern[str]
    more: re.Pattern[str]  # directly after a letter: "or B", ", C"
    bold: re.Pattern[str]
    begins: re.Pattern[str]  # a line that begins with a letter and a mark
    titles: re.Pattern[str]  # a line that begins with a letter and, perhaps, its option's text
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
    noun = r"(?=[aoclAOCL])(?i:answer|option|choice|letter|ans)"  # the first letter first: looked for at every word
    # possessive (*+ and ++ never give back), here and below: or a long run of spaces would cost its square
    between = r"(?:[\s:*_$\uff1a]|\\[(\[])*+"
    sure = r"(?i:most\s++likely|likely|probably|clearly|therefore|thus|definitely|indeed|simply|to\s++be|the|letter)"
    # "not A but B": the letter that is denied is no group
    instead = (
        rf"(?i:not)\s++(?:{noun}\s++)?[(\[<\"'`*]*+{either}\b[)\]>\"'`*]*+,?\s++(?i:but)\s++"
        rf"(?:(?i:rather|instead)\s++)?"
    )
    filler = (
        rf"(?:{instead})?(?:{sure}\b{between}){{0,2}}(?:{noun}\b{between})?"
        r"(?:<letter>\s*+|\{|\\(?:text|textbf|mathrm|mathbf)\{)?"
    )
    be = (
        r"(?:is|are|would\s++be|must\s++be|should\s++be|has\s++to\s++be|will\s++be|must\s++then\s++be|seems\s++to\s++be"
        r"|appears\s++to\s++be)"
    )
    about = r"(?:\s++(?i:(?:to|for)\s++(?:the|this)\s++question|here|choice|option|letter))?+"
    so = r"(?i:so|thus|hence|therefore|however|instead|actually|reflection)"
    choose = r"(?:choose|chose|pick|picked|select|selected|go\s++with|going\s++with|opt\s++for|answer)"
    praise = r"(?i:to\s++be|clearly|therefore|thus|the|most|single|indeed|definitely|a)"
    stated = (
        # "the answer is B", "**Answer**: B", "Answer - B"
        rf"\b{noun}\b{about}(?:[*_]*+\s*+(?:[:=\uff1a]|(?i:{be})\b)|\s++[-\u2013\u2014](?=\s)){between}{filler}{letter}",
        rf"(?i:<answer>){between}{filler}{letter}",
        # a heading, and the letter below it
        rf"(?m:^)[#*_ \t]*+(?i:(?:final|correct|my|the)[ \t]++){{0,2}}(?i:answer)[*_: \t]*+\n\s*+[*_]*+{letter}"
        rf"(?=[).\]*_]*+[ \t]*+(?:\n|\Z)|[.):])",
        # "Option B is correct", "(B) is the best answer"
        rf"(?:\b{noun}\s++[*_]*+{letter}|(?:\A|(?<=[.;:!?\n])|\b{so}\b,?+)[ \t]*+[*_]*+{letter})[*_]*+"
        rf"(?:\s*+\([^()\n]{{0,80}}\))?+\s++(?i:is|seems|appears|would\s++be)\s++(?:{praise}\s++){{0,4}}(?i:correct|right|best|answer|appropriate)\b(?!-)",
        rf"\bI(?:\s++(?i:would|will)|['\u2019](?:d|ll|m))?(?:\s++(?i:therefore|thus|have\s++to|must))?"
        rf"\s++(?i:{choose})\b{between}{filler}{letter}",
        # "it is B" or "so B", at the end of a line
        rf"\b(?:(?i:it|this)(?:\s++(?i:is|must\s++be|should\s++be)|['\u2019]s)\b|(?i:so|thus|hence|therefore)\b,?+)"
        rf"{between}{filler}{letter}"
        rf"(?=[*_.!)\]\"'>]*+\s*+(?:\Z|\n))",
    )
    return _Patterns(
        letters=frozenset(letters),
        instead=re.compile(rf"\A{instead}"),
        alone=re.compile(rf"[\s(\[<\"'`*]*+({either})[\s)\]>\"'`*.,:;]*+"),
        titled=re.compile(rf"[\s(\[<\"'`*]*+({either})[)*]*[.:)].*", re.DOTALL),
        stated=re.compile("|".join(stated)),
        more=re.compile(
            rf"[\s)\]>\"'`*_}}$]*+(?:(?:,\s*+(?:and|or)\b|[,/&]|\b(?:and|or)\b)"
            rf"\s*+(?:(?:possibly|perhaps|maybe|also|even)\s++)?(?:{noun}\s++)?[*_]*+{letter}|(?<=\s)({upper})(?=\s|\Z))"
        ),
        bold=re.compile(rf"\*\*\s*+\(?({upper})\)?(?:\s*+|[.:)][^*\n]*+)\*\*"),
        begins=re.compile(rf"[*\s]*+(?:\(({either})\)|({upper})\**+[.):]|({upper})\**+\s*+\Z)(?!\w)"),
        titles=re.compile(rf"[*\s]*+({upper})\**+(?:\s*+[-\u2013\u2014,]\s*+|(?<!A)\s++)"),
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
    r"\b(?:think|thinks|say|says|believe|assume|argue|claim|guess|suppose|tempted|expect)\b(?:(?!\bbut\b)[^.;!?\n])*\Z"
    r"|\b(?:if|unless|whether|suppose|had)\b[^,.;!?\n]*\Z",
    re.IGNORECASE,
)
_SUPPOSED = re.compile(r"\b(?:if|unless|had)\b[^.;!?\n]*\Z", re.IGNORECASE)  # before "would be B"
_IF_AFTER = re.compile(r"[)\]*_.]*+\s++if\b", re.IGNORECASE)
_WRONG = r"(?:wrong|incorrect|false|unlikely|ruled|eliminated|excluded)\b"
_IS_WRONG = rf"(?:is|are|was|would\s++be)\s++(?:{_WRONG}|not\s++(?:the\s++)?(?:correct|right|best|answer)\b)"
_TAKEN_BACK = re.compile(  # after a statement, and perhaps its option's text
    rf"[)\]*_\"'>]*+(?:\?|\s++{_IS_WRONG})", re.IGNORECASE
)
_NOT_AFTER = re.compile(r"[)\]*_\"'>]*+\s++(?:is|are|was|would\s++be)\s++not\b", re.IGNORECASE)
_NOT_BEFORE = re.compile(r"(?:\bnot|n['\u2019]t|\bnever|\bexcept|\bthan|\bexclud\w+|\beliminat\w+|\brul\w+\s+out)"
                         r"\s+(?:be\s+)?(?:option\s+|choice\s+|the\s+)*\Z", re.IGNORECASE)  # fmt: skip
_DENIED_AFTER = re.compile(
    r"[)\]*_.:,\s]*+(?:(?:is|are|was|would|can|could)(?:\s+be)?\s*+)?"
    rf"(?:not\b|n['\u2019]t\b|cannot\b|{_WRONG})|[^.\n]{{0,80}}\b{_IS_WRONG}",
    re.IGNORECASE,
)
_ABBREVIATION = re.compile(r"\.[ ]([a-z]{3,})")
_CONNECTIVES = frozenset("because since which this that the therefore thus and but explanation reason".split())
_WINDOW = 80  # characters: the whole text before each of many letters would cost its square


def _before(text: str, start: int) -> str:
    return text[max(0, start - _WINDOW) : start]


def _is_denied(text: str, start: int, end: int) -> bool:
    return bool(_NOT_BEFORE.search(_before(text, start)) or _DENIED_AFTER.match(text, end))


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
    piece, patterns = _TEXT_COMMAND.sub(r"\1", boxed).strip("$ "), question.patterns
    if found := _lone_or_list(piece, patterns):
        return found
    titled = patterns.titled.fullmatch(piece)
    if titled is None or _abbreviates(piece, titled.end(1), titled[1].upper(), question.options):
        return set()
    return _letters_of(titled) | {mark[1] for mark in patterns.marks.finditer(piece)}


_WORD_OR_MARK = re.compile(r"\w+|[^\w\s]")
_LIST_WORDS = frozenset(("and", "or", *"(),/&*.;"))


def _lone_or_list(piece: str, patterns: _Patterns) -> set[str]:
    """The letters of a piece that is nothing but a letter, or a list of different letters."""
    words = _WORD_OR_MARK.findall(piece)
    named = {word.upper() for word in words} & patterns.letters
    if len(named) > 1 and all(word.upper() in named or word in _LIST_WORDS for word in words):
        return named
    return _letters_of(patterns.alone.fullmatch(piece))


def _stated_letters(text: str, question: _Question) -> set[str]:
    patterns = question.patterns
    statements = list(patterns.stated.finditer(text))
    for n, last in reversed(list(enumerate(statements))):
        found, position = _letters_of(last), last.end()
        if len(found) == 1 and _abbreviates(text, position, next(iter(found)), question.options):
            continue
        before = _before(text, last.start())
        if _NOT_MEANT.search(before) or _is_taken_back(text, last, question):
            continue
        supposed = _SUPPOSED.search(before) or _IF_AFTER.match(text, last.end())
        if supposed and "would" in last[0].lower():
            continue
        while more := patterns.more.match(text, position):
            found |= _letters_of(more)
            position = more.end()
        return found | _stated_above(text, statements[: n + 1])
    return set()


def _is_taken_back(text: str, statement: re.Match[str], question: _Question) -> bool:
    """Whether "is wrong" or a question mark follows a statement, directly or after its option's text."""
    if _TAKEN_BACK.match(text, statement.end()) or _NOT_AFTER.match(text, statement.end()):
        return True
    letters = _letters_of(statement)
    words = question.options[next(iter(letters))].split() if len(letters) == 1 else []
    named = re.compile(r"\W{1,6}" + r"\s+".join(map(re.escape, words)), re.IGNORECASE).match(text, statement.end())
    return bool(words and named and _TAKEN_BACK.match(text, named.end()))


def _stated_above(text: str, statements: Sequence[re.Match[str]]) -> set[str]:
    """The letters of lines "Answer: A", "Answer: B" directly above a last line of this form: a list, no correction."""
    found: set[str] = set()
    for above, below in zip(reversed(statements[:-1]), reversed(statements)):
        same = above[0].split(":")[0] == below[0].split(":")[0]
        if not same or not _NEXT_LINE.fullmatch(text, above.end(), below.start()):
            break
        found |= _letters_of(above)
    return found


_NEXT_LINE = re.compile(r"[^\n]{0,200}\n\s*+[*_#]*+")


def _lone_letters(text: str, question: _Question) -> set[str]:
    text = question.patterns.instead.sub("", _BEFORE_LONE.sub("", text.strip()))
    return _lone_or_list(text, question.patterns)


_BEFORE_LONE = re.compile(r"\A(?:[#>*\s-]|(?:the|final|correct|answer|option|choice)\s)*", re.IGNORECASE)


def _bold_letters(text: str, question: _Question) -> set[str]:
    found: set[str] = set()
    for match in question.patterns.bold.finditer(text):
        if match.group(1) not in found and not _is_denied(text, match.start(), match.end()):
            found.add(match.group(1))
    return found


def _edge_letters(text: str, question: _Question) -> set[str]:
    """Of the first and the last line, unless they are the first and the last of a list of options."""
    patterns = question.patterns
    lines = [line for line in text.strip().split("\n") if line.strip()]
    begins = {n: match for n, line in enumerate(lines) if (match := _letter_before(line, question))}
    letters = [_letters_of(match).pop() for match in begins.values()]
    edges = {0: letters[:2]}  # the edge's letter and the letter next to it, from top to bottom
    if not question.cut_off:
        edges[len(lines) - 1] = letters[-2:]
    found: set[str] = set()
    listed: set[str] = set()
    for n, pair in edges.items():
        if n not in begins:
            continue
        line, match = lines[n], begins[n]
        (letter,) = _letters_of(match)
        in_line = {mark[1] for mark in patterns.marks.finditer(line)} | {letter}
        if len(in_line) > 1 or pair[0] < pair[-1]:
            listed |= in_line | set(pair)
        elif not _DENIED_AFTER.match(line, match.end()):
            if not _abbreviates(line, match.end() - 1, letter, question.options):
                found.add(letter)
    ending = None if question.cut_off else patterns.ends.search(text)
    if ending and not _is_denied(text, ending.start(), ending.end()):
        found |= _letters_of(ending)
    return found or listed


def _letter_before(line: str, question: _Question) -> re.Match[str] | None:
    """The letter that a line begins with: with a mark, alone, or before its option's text ("B - Iron", "B, iron")."""
    if match := question.patterns.begins.match(line):
        return match
    match = question.patterns.titles.match(line)
    text = question.options[match[1]].strip().lower() if match else ""
    return match if match and text and line[match.end() :].lower().startswith(text) else None


_NO_IDEA = re.compile(
    r"\b(?:(?:do|does|did|can|could)\s*(?:not|n['\u2019]t)|cannot|unable\s+to|unsure|uncertain)\b"
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
    if len(longest) == 1 and named <= {letters[longest[0]]}:
        return Extraction(letters[longest[0]], "option_text")
    if named:  # a letter is named, if not as the answer: no other one is guessed
        return Extraction(None, "none")
    from rapidfuzz import fuzz

    near = [fuzz.ratio(option, said) for option in wanted]
    best = max(near)
    if near.count(best) == 1:
        return Extraction(letters[near.index(best)], "similar")
    return Extraction(None, "none")
