"""Specs: `deft`, `alpha(0.5)`, `cayley(kappa=1)`, `deft | eos(nll) | mean_one`. Parsed by a grammar.

spec  := term ("|" term)*            the first term is an objective, the others are modifiers
term  := NAME [ "(" [arg ("," arg)*] ")" ]
arg   := [NAME "="] (NUMBER | spec)  a bare word is a choice (norm=lnk) or an objective (eos(nll))
"""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from deftune._suggest import did_you_mean
from deftune.objectives.base import Objective
from deftune.objectives.catalogue import MODIFIERS, OBJECTIVES

MAX_SPEC_LENGTH = 1000  # without spaces, which the canonical form adds
MAX_DEPTH = 30
_TOKEN = re.compile(
    r"\s*(?:(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?P<name>[A-Za-z][\w-]*)|(?P<sign>[(),=|]))"
)


@dataclass(frozen=True)
class _Term:
    name: str
    positional: list[_Value]
    named: dict[str, _Value]


@dataclass(frozen=True)
class _Value:
    """An argument as written: a number's text, or a pipeline of terms."""

    text: str
    number: bool
    terms: list[_Term]


class _Parser:
    def __init__(self, spec: str):
        self.spec = spec
        self.tokens: list[tuple[str, str, int]] = []
        at = 0
        while spec[at:].strip():
            match = _TOKEN.match(spec, at)
            if match is None:
                raise self.error(f"unexpected {spec[at:].strip()[0]!r}", at)
            kind = match.lastgroup or ""
            text = match[kind]
            self.tokens.append((text if kind == "sign" else kind, text, match.start(kind)))
            at = match.end()
        self.tokens.append(("end", "", len(spec)))
        self.next = 0
        self.depth = 0

    def error(self, what: str, at: int) -> ValueError:
        return ValueError(
            f"objective spec {self.spec!r}, column {at + 1}: {what}; a spec looks like 'deft | eos(nll) | mean_one'"
        )

    def peek(self) -> tuple[str, str, int]:
        """(kind, text, column) of the next token; a sign's kind is the sign."""
        return self.tokens[self.next]

    def comes(self, kind: str) -> bool:
        return self.peek()[0] == kind

    def take(self, kind: str) -> str:
        found, text, at = self.peek()
        if found != kind:
            wanted = "a name" if kind == "name" else repr(kind)
            raise self.error(f"expected {wanted}, found {repr(text) if text else 'the end'}", at)
        self.next += 1
        return text

    def pipeline(self) -> list[_Term]:
        terms = [self.term()]
        while self.comes("|"):
            self.take("|")
            terms.append(self.term())
        return terms

    def term(self) -> _Term:
        term = _Term(self.take("name"), [], {})
        if not self.comes("("):
            return term
        self.take("(")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error(f"nested deeper than {MAX_DEPTH} levels", self.peek()[2])
        while not self.comes(")"):
            self.argument(term)
            if not self.comes(")"):
                self.take(",")
        self.take(")")
        self.depth -= 1
        return term

    def argument(self, term: _Term) -> None:
        if self.comes("name") and self.tokens[self.next + 1][0] == "=":
            key, at = self.take("name"), self.peek()[2]
            self.take("=")
            if key in term.named:
                raise self.error(f"{term.name}: {key} is given twice", at)
            term.named[key] = self.value()
        elif term.named:
            raise self.error(f"{term.name}: a value without a name after one with a name", self.peek()[2])
        else:
            term.positional.append(self.value())

    def value(self) -> _Value:
        if self.comes("number"):
            return _Value(self.take("number"), True, [])
        at = self.peek()[2]
        terms = self.pipeline()
        return _Value(self.spec[at : self.peek()[2]].strip(), False, terms)


def _unknown(what: str, word: str, known: Iterable[str]) -> ValueError:
    known = list(known)
    return ValueError(f"unknown {what} {word!r}.{did_you_mean(word, known)} Known: {', '.join(known)}")


def _convert(where: str, wanted: object, value: _Value) -> object:
    """An argument as the factory's annotation asks for it."""
    if isinstance(wanted, type) and issubclass(wanted, Objective):
        if value.number:
            raise ValueError(f"{where} is an objective, got the number {value.text}; write e.g. nll")
        return _build(value.terms)
    if typing.get_origin(wanted) is typing.Literal:
        choices = [str(choice) for choice in typing.get_args(wanted)]
        if value.text not in choices:
            raise ValueError(
                f"{where} is one of {', '.join(choices)}, got {value.text!r}.{did_you_mean(value.text, choices)}"
            )
        return value.text
    if wanted in (int, float):
        if not value.number:
            raise ValueError(f"{where} is a number, got {value.text!r}")
        if wanted is int:
            if not re.fullmatch(r"[+-]?\d+", value.text):
                raise ValueError(f"{where} is a whole number, got {value.text}")
            return int(value.text)
        return float(value.text)
    if wanted is str:
        return value.text
    raise ValueError(f"{where} has the type {wanted}, which a spec cannot express; build the objective in Python")


def _hints(factory: Callable[..., Objective]) -> dict[str, object]:
    """The types of a factory's parameters: of a class, a function, or a partial of one."""
    while isinstance(factory, functools.partial):
        factory = factory.func
    return typing.get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)


def _call(name: str, factory: Callable[..., Objective], term: _Term, first: list[Objective]) -> Objective:
    """The factory's objective for one term; a modifier takes the objective before it as ``first``."""
    hints, signature = _hints(factory), inspect.signature(factory)
    parameters = list(signature.parameters)[len(first) :]
    if len(term.positional) > len(parameters):
        takes = f"takes {', '.join(parameters)}" if parameters else "takes no values"
        number = len(term.positional)
        raise ValueError(f"{name}: {number} value{'s' if number > 1 else ''} given, it {takes}")
    given = dict(zip(parameters, term.positional))
    for key, value in term.named.items():
        if key not in parameters:
            raise _unknown(f"parameter of {name}", key, parameters)
        if key in given:
            raise ValueError(f"{name}: {key} is given twice")
        given[key] = value
    kwargs = {key: _convert(f"{name}: {key}", hints.get(key, str), value) for key, value in given.items()}
    required = [key for key in parameters if signature.parameters[key].default is inspect.Parameter.empty]
    missing = [key for key in required if key not in kwargs]
    if missing:
        raise ValueError(
            f"{name}: {', '.join(missing)} is missing; write e.g. {name}({', '.join(f'{m}=...' for m in missing)})"
        )
    return factory(*first, **kwargs)


def _build(terms: list[_Term]) -> Objective:
    head, *rest = terms
    if head.name not in OBJECTIVES:
        if head.name in MODIFIERS:
            raise ValueError(f"{head.name!r} is a modifier and needs an objective before it: 'deft | {head.name}...'")
        raise _unknown("objective", head.name, OBJECTIVES)
    built = _call(head.name, OBJECTIVES[head.name], head, [])
    for term in rest:
        if term.name not in MODIFIERS:
            if term.name in OBJECTIVES:
                raise ValueError(
                    f"{term.name!r} is an objective, not a modifier; '|' is followed by one of {', '.join(MODIFIERS)} "
                    f"(to mix two objectives: blend({term.name}, 0.5))"
                )
            raise _unknown("modifier", term.name, MODIFIERS)
        built = _call(term.name, MODIFIERS[term.name], term, [built])
    return built


def objective(spec: str | Objective) -> Objective:
    """The objective that a spec names, with its parameters and modifiers.

    Args:
        spec: a name with its parameters, and modifiers after bars: ``"deft"``, ``"alpha(0.3)"``,
            ``"deft | eos(nll) | mean_one"``. An `Objective` is returned unchanged.

    Returns:
        The objective; ``str()`` of it is a canonical spec, which parses back to the same objective.

    Raises:
        ValueError: the spec is wrong; the message names the position and, for an unknown name, the nearest known one.

    >>> str(objective("cayley(kappa=1)")), str(objective("deft|eos( nll )|mean_one"))
    ('cayley', 'deft | eos(nll) | mean_one')
    """
    if isinstance(spec, Objective):
        return spec
    if not isinstance(spec, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"an objective is a spec such as 'deft' or an Objective, got {type(spec).__name__}")
    # parsed specs are cached, for a training loop parses one at every step; a change of the catalogue empties the cache
    global _catalogue
    catalogue = _catalogue
    if catalogue.objectives != OBJECTIVES or catalogue.modifiers != MODIFIERS:
        catalogue = _catalogue = _Catalogue(dict(OBJECTIVES), dict(MODIFIERS))
    return _parse(spec, catalogue)


@dataclass(frozen=True, eq=False)
class _Catalogue:
    """The catalogue that specs were parsed with; a part of the key of the cache of specs."""

    objectives: dict[str, Callable[..., Objective]]
    modifiers: dict[str, Callable[..., Objective]]


_catalogue = _Catalogue({}, {})


@functools.lru_cache(maxsize=256)
def _parse(spec: str, _: _Catalogue) -> Objective:
    if (length := len("".join(spec.split()))) > MAX_SPEC_LENGTH:
        raise ValueError(f"objective spec of {length} characters: at most {MAX_SPEC_LENGTH} are read")
    if not spec.strip():
        raise ValueError("objective spec is empty; write e.g. 'deft'")
    parser = _Parser(spec)
    terms = parser.pipeline()
    kind, text, at = parser.peek()
    if kind != "end":
        raise parser.error(f"unexpected {text!r}", at)
    return _build(terms)
