r"""The notations of one answer: markdown, unicode, programming languages and typography, in the LaTeX that is compared.

Both answers of a pair are written in the same way here, before `answers` splits off units and math-verify parses.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

# a model's markdown; 2**3**4 and 2 ** 3 ** 4 are powers
_MARKDOWN = re.compile(r"(?<![\w)}\]*])\*\*(?=[^\s*])((?:[^*]|\*(?!\*))++)(?<!\s)\*\*(?![\w(*])")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)


def is_balanced(text: str) -> bool:
    depth = 0
    for token in _BRACES.finditer(text):
        depth += {"{": 1, "}": -1}.get(token.group(), 0)
        if depth < 0:
            return False
    return depth == 0


def trimmed(answer: str) -> str:
    r"""Without markdown's bold, and without spaces, a period and backslashes at its end.

    >>> trimmed("**5.**"), trimmed("2**3**4"), trimmed(r"**1** and **2**\\")
    ('5', '2**3**4', '1 and 2')
    """
    return _MARKDOWN.sub(r"\1", answer).strip().removesuffix(".").rstrip().rstrip("\\").rstrip()


# --- one notation -----------------------------------------------------------------------------------------------------

_CHARACTERS = str.maketrans(
    {"\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "∞": r"\infty ", "·": r"\cdot ", "⋅": r"\cdot ", "⩽": r"\leq ",
     "⩾": r"\geq ", "⟨": r"\langle ", "⟩": r"\rangle "}
)  # fmt: skip
_ARGUMENT = r"\s*(?:\{(?:[^{}]++|\{[^{}]*+\})*+\}|\\[A-Za-z]++|[^\s\\{}])"  # what TeX takes: a group or one token
_UNSEEN = re.compile(
    rf"\\(?:(?:big|Big|bigg|Bigg)[lrm]?|displaystyle|textstyle)(?![A-Za-z])|\\[hv]?phantom(?![A-Za-z]){_ARGUMENT}"
    r"|\\[hv]space\*?\s*\{[^{}]*\}|\\color\s*\{\w+\}|(?<=\\\\)\[\s*-?[0-9.]+\s*(?:pt|em|ex|mm)\s*\]|(?<!\\)\\[\[\]]"
)
_BOLD = re.compile(r"\\(?:mathbf|boldsymbol|bm|underline|textcolor\s*\{\w+\})\s*\{(.*)\}", re.DOTALL)
_FUNCTIONS = "(arc(?:sin|cos|tan)|(?:sin|cos|tan)h?|cot|csc|exp|log|ln)"  # sec is a unit too
_RAISED = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789", "⁺")


def _power(match: re.Match[str]) -> str:
    digits = match[0].translate(_RAISED)
    return f"^{digits}" if len(digits) == 1 else f"^{{{digits}}}"


def _repeating(match: re.Match[str]) -> str:
    whole, first, again = match.groups()
    period = Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(first))
    number = period + Fraction(int(whole + first), 10 ** len(first))
    return rf"\frac{{{number.numerator}}}{{{number.denominator}}}"


def _angled(match: re.Match[str]) -> str:
    return f"({match[1]})" if "," in match[1] else match[0]


_NOTATIONS: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset "),
        (r"\\([lr])brace(?![A-Za-z])", lambda m: r"\{" if m[1] == "l" else r"\}"),
        (r"\\langle(?![A-Za-z])((?:(?!\\[lr]angle).)*+)\\rangle(?![A-Za-z])", _angled),
        # powers: x**2, x², 10^-5; and 3.2 x 10^5
        (r"(?<=[\w)}\]])\s?\*\*\s?(?=[\w({\\-])", "^"),
        (r"(?<=[\w)}\]|])[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]++(?!√)", _power),
        (r"\^\s?(-\s?(?:[0-9]+(?:\.[0-9]+)?|[A-Za-z]))", r"^{\1}"),
        (r"(?<=[0-9])\s?[xX]\s?(?=10\s?\^)", r" \\times "),
        # √3, sqrt(3), \sqrt(3), np.sqrt(3)
        (r"(?:√|(?<![A-Za-z\\])(?:np\.)?sqrt(?![A-Za-z])|\\sqrt(?=\s?\())\s?"
         r"(?:\(([^()]*)\)|\{([^{}]*)\}|([0-9]++|[A-Za-z]))", lambda m: rf"\sqrt{{{m[1] or m[2] or m[3]}}}"),
        (rf"\\(?:operatorname|mathrm|text)\s*\{{\s*{_FUNCTIONS}\s*\}}", r"\\\1 "),
        (rf"(?<![A-Za-z\\])(?:np\.)?{_FUNCTIONS}(?![A-Za-z])", r"\\\1 "),
        (r"(?<![A-Za-z\\])(?:np\.)?pi(?![A-Za-z])", r"\\pi "),
        (r"_\s*\{\s*\\(max|min)\s*\}", r"_{\\text{\1}}"),
        (r"(?<![0-9.,])([0-9]{1,20})\.([0-9]{0,20})\\(?:overline|bar)\s*\{([0-9]{1,20})\}", _repeating),
        (r"\\(?:mathrm|text)\s*\{\s*([ei])\s*\}", r"\1"),
        (r"(?<=[0-9])\s*(?:\^\s*(?:\{\s*o\s*\}|o\b|\{?\s*\\text\s*\{\s*o\s*\}\s*\}?)|\\text\s*\{\s*degrees?\s*\})",
         r"^{\\circ}"),
        (r"(?<=[0-9])\s*([AaPp])\.\s?[Mm]\.?\Z", lambda m: f" {m[1].lower()}m"),
        # {x | x < 2}: what a condition says of a real number
        (r"\A(?:\\left)?\\\{\s*([A-Za-z])\s*(?:\\in\s*\\mathbb\s*\{?\s*R\s*\}?\s*)?(?:\\mid(?![A-Za-z])|[:|])"
         r"((?=.*\1)(?=.*(?:[<>≤≥]|\\[gl]e|\\ne)).*?)(?:\\right)?\\\}\Z", r"\2"),
        (r"\\(?:lor|vee)(?![A-Za-z])", r"\\text{ or }"),
        (r"\\(?:land|wedge)(?![A-Za-z])", r"\\text{ and }"),
    )
]  # fmt: skip
_SET_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|,?\\!\s?|\\,)(?=[0-9]{3}(?![0-9]))")


def tidy_answer(answer: str) -> str:
    r"""An answer in the commands that the later rules and math-verify know.

    >>> tidy_answer(r"\displaystyle \big(3√13, 2*pi\big)"), tidy_answer(r"\mathbf{90^{o}}")
    ('(3\\sqrt{13}, 2*\\pi )', '90^{\\circ}')
    >>> tidy_answer("**3.2 x 10⁻⁵**"), tidy_answer(r"\langle 1, \phantom{-}x**2 \rangle"), tidy_answer(r"0.1\bar{6}")
    ('3.2 \\times 10^{-5}', '( 1, x^2 )', '\\frac{1}{6}')
    """
    answer = _UNSEEN.sub("", _SET_THOUSANDS.sub("", trimmed(answer).translate(_CHARACTERS))).strip()
    while (bold := _BOLD.fullmatch(answer)) and is_balanced(bold[1]):
        answer = bold[1].strip()
    for pattern, new in _NOTATIONS:
        answer = pattern.sub(new, answer)
    return trimmed(answer)


_WORD_BETWEEN = re.compile(r"(?:\\text\s*+\{\s*+,?\s*+|(?<![A-Za-z\\]))(and|or)(?![A-Za-z])")


def joining_words(gold: str, answer: str) -> tuple[str, str]:
    """The word between the parts of each answer: "and", "or", or "" for none or both.

    Where only one answer has a word, a comma in the other means it.

    >>> joining_words("x<2 or x>3", r"x>3 \\text{ and } x<2"), joining_words("x<2 or x>3", "x<2, x>3")
    (('or', 'and'), ('or', 'or'))
    """
    ours, theirs = (words.pop() if len(words := set(_WORD_BETWEEN.findall(one))) == 1 else "" for one in (gold, answer))
    return ours or theirs, theirs or ours
