"""Jinja's sandbox for chat templates, with limits.

A template comes with somebody else's model. Jinja's sandbox keeps it from running code, not from looping for hours or
from making a string of gigabytes. Here every loop round, macro call, string operation, filter, comparison and piece of
output is charged before it happens, and a template that exceeds its allowance ends in a `TemplateLimitError`. The
allowance is a count of work, not of seconds, so the same row gives the same result on a slow machine:

    rounds       1,000,000 + 100,000 for each message
    characters   16,000,000 + 64 for each character of the conversation
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.nodes as nodes
import jinja2.sandbox
import jinja2.utils
from jinja2.visitor import NodeTransformer

BASE_ROUNDS, ROUNDS_PER_MESSAGE = 1_000_000, 100_000
BASE_CHARACTERS, CHARACTERS_PER_CHARACTER = 16_000_000, 64
CHARACTERS_PER_ROUND = 64  # looking at a string of so many characters costs about as much as a loop round
MAX_BITS = 4096  # of an integer
MAX_WIDTH = 16  # of an indentation of JSON, and of a rounding
# Their cost is not in proportion to their text, and no chat template needs them.
_REMOVED_FILTERS = ("urlize", "striptags", "xmlattr", "forceescape", "pprint")
_WIDENING = ("center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes", "indent", "batch", "slice")
_NUMBERS = re.compile(r"\d+")


class TemplateLimitError(ValueError):
    """A chat template that does more work than any conversation needs."""


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})  # the operators whose result can be larger than its parts

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self.allow(0, 0)
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        self.filters["tojson"] = _tojson
        self.filters = {name: self._charged(name, filter) for name, filter in self.filters.items()}
        self.tests = {name: self._compared(name, test) for name, test in self.tests.items()}
        self.filters |= {
            "_round": self._round, "_written": self._written, "_emit": self._emit, "_scan": self._scan,
            "_concat": self._concat,
        }  # fmt: skip
        self.globals: dict[str, Any] = {
            "range": jinja2.sandbox.safe_range, "cycler": jinja2.utils.Cycler, "joiner": jinja2.utils.Joiner,
            "namespace": _Namespace, "dict": _Dict(), "raise_exception": _raise_exception,
        }  # fmt: skip

    def allow(self, num_messages: int, num_characters: int) -> None:
        self.rounds_left = self.max_rounds = BASE_ROUNDS + ROUNDS_PER_MESSAGE * num_messages
        self.characters_left = self.max_characters = BASE_CHARACTERS + CHARACTERS_PER_CHARACTER * num_characters

    def spend_rounds(self, count: int) -> None:
        self.rounds_left -= count
        if self.rounds_left < 0:
            raise TemplateLimitError(f"more than {self.max_rounds:,} loop rounds and comparisons")

    def spend_characters(self, count: int) -> None:
        self.characters_left -= count
        if self.characters_left < 0:
            raise TemplateLimitError(f"more than {self.max_characters:,} characters of text")

    def size(self, value: Any) -> int:
        """The characters of a value written out; a list that holds one string a hundred times counts it as often."""
        if type(value) is str:
            return len(value)
        total, left = 0, [value]
        while left:
            item = left.pop()
            if isinstance(item, str | bytes):
                total += len(item)
            elif isinstance(item, Mapping):
                left += [*cast("Mapping[Any, Any]", item), *cast("Mapping[Any, Any]", item).values()]
            elif isinstance(item, list | tuple | set):
                left += cast("list[Any]", item)
            total += 8
            if total > self.characters_left or len(left) > self.characters_left:
                break
        return total

    # what the compiled template calls; a filter that takes the context is never computed ahead of the rendering

    # (a template can call them too, and gains nothing by it: no charge is negative)

    @jinja2.pass_context
    def _round(self, context: Any, _: Any) -> bool:
        self.rounds_left -= 1
        if self.rounds_left < 0:
            self.spend_rounds(0)
        return True

    @jinja2.pass_context
    def _written(self, context: Any, count: int) -> str:
        self.spend_characters(abs(count))
        return ""

    @jinja2.pass_context
    def _emit(self, context: Any, value: Any) -> Any:
        self.spend_characters(len(value) if type(value) is str else self.size(value))
        return value

    @jinja2.pass_context
    def _scan(self, context: Any, value: Any) -> Any:
        if type(value) is str:
            if len(value) > CHARACTERS_PER_ROUND:
                self.spend_rounds(len(value) // CHARACTERS_PER_ROUND)
        elif isinstance(value, list | tuple | dict):
            self.spend_characters(self.size(value))
        return value

    @jinja2.pass_context
    def _concat(self, context: Any, values: list[Any]) -> str:
        self.spend_characters(sum(self.size(value) for value in values))
        return "".join(map(str, values))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if type(left) is int and type(right) is int:
            if operator == "*" and left.bit_length() + right.bit_length() > MAX_BITS:
                raise TemplateLimitError(f"an integer of more than {MAX_BITS} bits")
            if operator == "**" and left.bit_length() * abs(right) > MAX_BITS:
                raise TemplateLimitError(f"an integer of more than {MAX_BITS} bits")
        elif operator == "+":
            if not isinstance(left, int | float):
                self.spend_characters(_length(left) + _length(right))
        elif operator == "*":
            times, repeated = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(times, int):
                self.spend_characters(max(times, 0) * _length(repeated))
        elif operator == "%" and isinstance(left, str):
            self._charge_format(left, right if isinstance(right, tuple) else (right,))
        return self.binop_table[operator](left, right)

    def _charge_format(self, text: str, values: Sequence[Any]) -> None:
        """'%9d' and '{:9}' are as wide as the numbers in them, or among the values, say."""
        widths = [min(int(digits[-9:]), 10**9) if len(digits) < 10 else 10**9 for digits in _NUMBERS.findall(text)]
        widths += [abs(value) for value in values if type(value) is int and ("*" in text or "{" in text)]
        fields = text.count("%") + text.count("{")
        self.spend_characters(len(text) + fields * max(widths, default=0) + fields * self.size(list(values)))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        environment = __self
        method = getattr(__obj, "__wrapped__", __obj)  # of str.format the sandbox calls a copy
        name, owner = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        if isinstance(owner, str | bytes):
            environment._charge(name, owner, args, kwargs)
            result = super().call(__context, __obj, *args, **kwargs)
            environment.spend_characters(_length(result))
            return result
        if isinstance(owner, int | list | tuple | dict):
            environment._charge(name, owner, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def _charge(self, name: str, subject: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a method or a filter runs: for its subject, and where its result can be much larger for that too."""
        length = _length(subject)
        if length > CHARACTERS_PER_ROUND:
            self.spend_rounds(length // CHARACTERS_PER_ROUND)
        if name in ("strip", "trim", "get", "startswith", "endswith", "split"):  # the usual ones: nothing grows
            return
        given = [*args, *kwargs.values()]
        if name in _WIDENING:
            width = max((abs(value) if type(value) is int else _length(value) for value in given), default=0)
            lines = 1
            if isinstance(subject, str | bytes):
                breaks = ("\n", "\t") if isinstance(subject, str) else (b"\n", b"\t")
                lines += sum(subject.count(mark) for mark in breaks)  # type: ignore[arg-type]
            self.spend_characters(length + width * lines)
        elif name in ("format", "format_map") and isinstance(subject, str):
            self._charge_format(subject, given)
        elif name == "replace" and isinstance(subject, str) and len(given) > 1:
            old, new = str(given[0]), str(given[1])
            self.spend_characters(length + subject.count(old) * len(new))
        elif name == "join":
            items, separator = (given[0] if given else (), subject) if isinstance(subject, str) else (subject, given)
            self.spend_characters(self.size(items) + _length(items) * self.size(separator))
        elif name in ("tojson", "round"):
            for value in given:
                for part in value if isinstance(value, list | tuple) else (value,):
                    if (part if type(part) is int else _length(part)) > MAX_WIDTH:
                        raise TemplateLimitError(f"{name} with a width of more than {MAX_WIDTH}")
            self.spend_characters(MAX_WIDTH * self.size(subject) if kwargs.get("indent") else self.size(subject))
        elif name == "wordwrap":
            self.spend_characters(length * (1 + self.size(given)))
        elif name == "sum" and any(isinstance(value, list) for value in given):  # each sum is a new list
            self.spend_characters(self.size(subject) * (1 + length // CHARACTERS_PER_ROUND))
        elif name == "translate":
            raise TemplateLimitError("str.translate, which no chat template needs")
        elif name in ("string", "list", "sort", "unique", "format"):
            self.spend_characters(self.size(subject))

    def _charged(self, name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that charges for its subject before it runs and for its result after."""
        at = 0 if getattr(filter, "jinja_pass_arg", None) is None else 1

        @functools.wraps(filter)
        def charged(*args: Any, **kwargs: Any) -> Any:
            subject = args[at] if len(args) > at else None
            if name == "join" and not isinstance(subject, str | list | tuple | dict):
                subject = list(cast("Any", subject))
                args = (*args[:at], subject, *args[at + 1 :])
            self._charge(name, subject, args[at + 1 :], kwargs)
            result = filter(*args, **kwargs)
            if type(result) is str:
                self.spend_characters(len(result))
            return result

        return charged

    def _compared(self, name: str, test: Callable[..., Any]) -> Callable[..., Any]:
        """A test of two values (`is in`, `is eq`, ...) that charges for both; the others look at one value's type."""
        if name not in ("in", "eq", "==", "equalto", "ne", "!=", "lt", "<", "le", "<=", "gt", ">", "ge", ">=",
                        "lessthan", "greaterthan", "upper", "lower"):  # fmt: skip
            return test

        @functools.wraps(test)
        def compared(*values: Any) -> Any:
            for value in values:
                self._scan(None, value)
            return test(*values)

        return compared

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return cast("nodes.Template", _Charging().visit(super()._parse(source, name, filename)))


class _Charging(NodeTransformer):
    """A template's tree, with a charge in every loop, macro, output, comparison, slice and `~`."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.visit_Macro(node)
        if node.test is not None:  # a round that the condition passes over is a round too
            node.test = nodes.And(_count_round(node), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_count_round(node), lineno=node.lineno))
        return node

    visit_CallBlock = visit_Macro

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        written = sum(len(part.data) for part in node.nodes if isinstance(part, nodes.TemplateData))
        node.nodes = [
            part if isinstance(part, nodes.TemplateData) else _charge(node, "_emit", part) for part in node.nodes
        ]
        if written:
            node.nodes.append(_charge(node, "_written", nodes.Const(written)))
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        contains = any(operand.op in ("in", "notin") for operand in node.ops)
        if contains or not any(_is_short(side) for side in sides):  # to compare with a short constant costs nothing
            node.expr = _charge(node, "_scan", node.expr)
            for operand in node.ops:
                operand.expr = _charge(node, "_scan", operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _charge(node, "_emit", node.node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return _charge(node, "_concat", nodes.List(node.nodes, lineno=node.lineno))


def _charge(at: nodes.Node, name: str, value: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=at.lineno)


def _count_round(at: nodes.Node) -> nodes.Filter:
    return _charge(at, "_round", nodes.Const(None))


def _is_short(node: nodes.Expr) -> bool:
    return isinstance(node, nodes.Const) and _length(node.value) <= CHARACTERS_PER_ROUND


def _length(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return 8 * len(cast("list[Any]", value)) if isinstance(value, list | tuple | dict | set) else 0


# What transformers gives a template besides Jinja's own ---------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks an answer in some templates. The encoder finds answers itself; the mark is ignored."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's attribute

    def parse(self, parser: Any) -> nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body, lineno=line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that begin with an underscore: templates reached Python's internals by them."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as Jinja's, so that namespace(self=...) works
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace holds no name that begins with an underscore: {name!r}")


class _Dict:
    """``dict(...)`` in a template: no class, whose attributes could be reached."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
            sort_keys: bool = False) -> str:  # fmt: skip
    """Jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
