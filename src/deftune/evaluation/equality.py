r"""Decide whether two parsed answers are equal. Only `grading_worker` loads this file: the parent never imports sympy.

math-verify parses the answers. These are compared here, in this order, because math-verify is too tolerant:

    lists        as many answers, each equal to one of the other list's; the order does not matter, repetition does
    relations    the same sides, or one relation times a non-zero constant, or the same single solution
    numbers      exact numbers exactly; where one is a written decimal, by `DECIMAL_DISTANCE`; then the tolerance
    pairs        and intervals and matrices, element by element
    the rest     math-verify, where both have the same values at two points

math-verify alone rounds to six places and drops terms below 1e-15, so all tiny numbers are equal to it; and it compares
relations by their solution sets, which are equal where both are empty or were not found.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

sympy: Any = importlib.import_module("sympy")
_applied: Any = importlib.import_module("sympy.core.function").AppliedUndef
_unequal: Any = importlib.import_module("sympy.core.relational")

EQUAL, CLOSE, DIFFERENT = 2, 1, 0
# (absolute, relative to the gold): 0.333333 is 1/3, and 2e-7 is not 3e-7; both must hold
DECIMAL_DISTANCE = (sympy.Rational(5, 10**7), sympy.Rational(1, 10**5))
_MANY_DIGITS = 400  # to which exact irrational numbers are compared
_NOTHING = sympy.Float("1e-300")  # of such a number: equal ones are found to differ by about 1e-400
_LONGEST_LIST = 64  # of answers that are not numbers: each is compared with each

Verify = Callable[[Any, Any], bool]


class Comparison:
    """Compares parsed answers; ``verify`` is math-verify's, for two expressions."""

    def __init__(self, verify: Verify, relative: float = 0.0, absolute: float = 0.0):
        self.verify = verify
        self.relative = sympy.Rational(repr(relative))
        self.absolute = sympy.Rational(repr(absolute))

    def without_tolerance(self) -> Comparison:
        return Comparison(self.verify)

    def compare(self, gold: Any, answer: Any) -> int:
        """`EQUAL`, `CLOSE` (within the tolerance) or `DIFFERENT`."""
        golds, answers = _items(gold), _items(answer)
        if golds is not None or answers is not None:
            return self._lists(gold, golds or _coordinates(gold), answer, answers or _coordinates(answer))
        stated, given = _relations(gold), _relations(answer)
        if stated is not None and given is not None:
            for set_of, others in ((stated, given), (given, stated)):  # x in (3, 4), and 3 < x < 4
                if _is_equation(set_of[0]) and isinstance(set_of[0].rhs, sympy.Set) and _are_unequal(others):
                    return self._by_inequalities(set_of[0].rhs, others, of=set_of[0].lhs)
            return self._all_relations(stated, given)
        if stated is not None:
            if len(stated) == 1 and _is_equation(stated[0]) and _is_name(stated[0].lhs):
                return self.compare(stated[0].rhs, answer)
            is_set = isinstance(answer, sympy.Set) and _are_unequal(stated)
            return self._by_inequalities(answer, stated) if is_set else DIFFERENT
        if given is not None:
            if _is_surely_set(gold) and _are_unequal(given):
                return self._by_inequalities(gold, given)
            value = self._stated_value(given)
            return DIFFERENT if value is None else self.compare(gold, value)
        return self._values(gold, answer)

    # --- values -------------------------------------------------------------------------------------------------

    def _values(self, gold: Any, answer: Any) -> int:
        one, other = _number(gold), _number(answer)
        if one is not None and other is not None:
            return self._numbers(one, other, decimal=_has_decimal(gold) or _has_decimal(answer))
        if isinstance(gold, sympy.Interval) and isinstance(answer, sympy.Interval):
            if (gold.left_open, gold.right_open) != (answer.left_open, answer.right_open):
                return DIFFERENT
            return self._each((gold.start, gold.end), (answer.start, answer.end))
        parts, others = _ordered(gold), _ordered(answer)
        if parts is not None and others is not None:
            return self._each(parts, others)
        if isinstance(gold, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase):
            return self._each(list(gold), list(answer)) if gold.shape == answer.shape else DIFFERENT
        return self._by_math_verify(gold, answer)

    def _by_inequalities(self, numbers: Any, relations: list[Any], of: Any = None) -> int:
        """An interval or another set of numbers, and the inequalities that state it: 3 < x <= 4, a <= x < b.

        ``of``: the unknown, where it is named beside the set.
        """
        unknown, found = _between(relations, numbers.free_symbols) if numbers.free_symbols else _held(relations)
        return DIFFERENT if found is None or of not in (None, unknown) else self._values(numbers, found)

    def _each(self, golds: Sequence[Any], answers: Sequence[Any]) -> int:
        """Compare in order, without tolerance, which is for numbers and lists of numbers, not for coordinates."""
        exactly = self.without_tolerance()
        same = len(golds) == len(answers) and all(exactly.compare(g, a) == EQUAL for g, a in zip(golds, answers))
        return EQUAL if same else DIFFERENT

    def _numbers(self, gold: Any, answer: Any, *, decimal: bool) -> int:
        apart = answer - gold
        if apart == 0:
            return EQUAL
        distance, size = _size(apart), _size(gold)
        if decimal and distance <= DECIMAL_DISTANCE[0] and distance <= DECIMAL_DISTANCE[1] * size:
            return EQUAL
        if not apart.is_Rational and distance <= (size or 1) * _NOTHING:
            return EQUAL
        return CLOSE if distance <= max(self.relative * size, self.absolute) else DIFFERENT

    def _by_math_verify(self, gold: Any, answer: Any) -> int:
        word = _spells(gold, answer) or _spells(answer, gold)
        if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr) and not word:
            gold, answer = (_plain(side).subs(_LETTER_I, sympy.I) for side in (gold, answer))
        if gold.has(sympy.zoo, sympy.nan) or answer.has(sympy.zoo, sympy.nan):
            return DIFFERENT  # 1/0 and the like: nothing can be said about their values
        if not word and _values_differ(gold, answer):  # first: it takes a fraction of the time
            return DIFFERENT
        return EQUAL if self.verify(gold, answer) else DIFFERENT

    # --- lists --------------------------------------------------------------------------------------------------

    def _lists(self, gold: Any, golds: list[Any] | None, answer: Any, answers: list[Any] | None) -> int:
        if golds is not None and answers is not None:
            return self._match(golds, answers)
        if golds is not None:
            parts = _ordered(answer)
            if parts is not None and len(golds) > 1:  # (1, 2) for the answers 1 and 2, in order for x = 1, y = 2
                named = all(map(_is_equation, golds)) and len({gold.lhs for gold in golds}) == len(golds)
                return self._each(_by_name(golds), parts) if named else self._match(golds, list(parts))
            if len(golds) == 1:
                return self.compare(golds[0], answer)
            return self._by_math_verify(gold, answer) if isinstance(answer, sympy.Set) else DIFFERENT
        assert answers is not None
        parts = _ordered(gold)
        if parts is not None and len(answers) > 1:  # 1, 2 for the pair (1, 2)
            return self._each(parts, _by_name(answers))
        if (solved := _solved(gold, answers)) is not None:  # x = 2, x = -2 for x^2 = 4
            return self.without_tolerance()._match(solved, [answer.rhs for answer in answers])
        if len(answers) == 1:
            return self.compare(gold, answers[0])
        return self._by_math_verify(gold, answer) if isinstance(gold, sympy.Set) else DIFFERENT

    def _match(self, golds: list[Any], answers: list[Any]) -> int:
        """Every answer is one of the golds, and every gold is used once."""
        if len(golds) != len(answers):
            return DIFFERENT
        ours, theirs = [_number(gold) for gold in golds], [_number(answer) for answer in answers]
        if None not in ours and None not in theirs:  # numbers: by size, so that a tolerance pairs them up well
            golds = [golds[n] for n in sorted(range(len(golds)), key=ours.__getitem__)]
            answers = [answers[n] for n in sorted(range(len(answers)), key=theirs.__getitem__)]
            return min(self._values(gold, answer) for gold, answer in zip(golds, answers))
        if len(golds) > _LONGEST_LIST:
            return DIFFERENT
        return _pair_up(golds, answers, self.compare)

    def _stated_value(self, relations: list[Any]) -> Any:
        """The value that equations state: the right-hand side. None for an inequality, and for 2 = 3."""
        if not all(_is_equation(relation) for relation in relations):
            return None
        first, last = relations[0].lhs, relations[-1].rhs
        if isinstance(last, sympy.Symbol) and not _is_name(first):
            return first  # 5 = x
        untrue = _number(first) is not None and self.without_tolerance().compare(first, last) == DIFFERENT
        return None if untrue else last

    # --- relations ----------------------------------------------------------------------------------------------

    def _all_relations(self, golds: list[Any], answers: list[Any]) -> int:
        if len(golds) == 1 and all(_is_equation(answer) for answer in answers):
            answers = [sympy.Eq(answers[0].lhs, answers[-1].rhs, evaluate=False)]  # E = m c^2 = 9, for E = 9
        found = _pair_up(golds, answers, self._relation) if len(golds) == len(answers) else DIFFERENT
        if found == DIFFERENT and _are_unequal([*golds, *answers]):  # |x| < 2 and -2 < x < 2
            (unknown, numbers), (other, held) = _held(golds), _held(answers)
            if unknown is not None and unknown == other and numbers not in (sympy.S.EmptySet, sympy.S.Reals):
                return self._values(numbers, held)
        return found

    def _relation(self, gold: Any, answer: Any) -> int:
        turned = _turned(answer)
        exactly = self.without_tolerance()
        for other in (answer, turned):
            if type(other) is type(gold) and exactly.compare(gold.lhs, other.lhs) == EQUAL:
                named = _is_equation(gold) and isinstance(gold.lhs, sympy.Symbol)
                found = (self if named else exactly).compare(gold.rhs, other.rhs)
                if found != DIFFERENT:
                    return found
        sides = [_plain(side) for side in (gold.lhs, gold.rhs, answer.lhs, answer.rhs) if isinstance(side, sympy.Expr)]
        if len(sides) < 4 or any(isinstance(side, sympy.MatrixExpr) for side in sides):
            return DIFFERENT
        ours, theirs = sides[0] - sides[1], sides[2] - sides[3]
        if not ours.free_symbols or ours.free_symbols != theirs.free_symbols:
            return DIFFERENT  # of 0 = 1 and 0 = 2 only the sides can say whether they are the same
        if type(gold) not in (sympy.Eq, sympy.Ne):
            factor = sympy.cancel(theirs / ours)
            if factor.free_symbols:  # x^2 + 1 < 0 times (x^2 + 2) / (x^2 + 1)
                return DIFFERENT
            if type(answer) is type(gold):
                return EQUAL if factor.is_positive else DIFFERENT
            return EQUAL if type(turned) is type(gold) and factor.is_negative else DIFFERENT
        if type(answer) is not type(gold):
            return DIFFERENT
        if _constant_factor(ours, theirs):
            return EQUAL
        return EQUAL if _is_equation(gold) and exactly._same_solution(sides, ours, theirs) else DIFFERENT

    def _same_solution(self, sides: list[Any], ours: Any, theirs: Any) -> bool:
        """Whether one equation names the only solution of the other (x = 3, 2x - 1 = 5), or both have the same ones."""
        for symbol, value, other in ((sides[0], sides[1], theirs), (sides[2], sides[3], ours)):
            if isinstance(symbol, sympy.Symbol) and not value.has(symbol):
                found = _solutions(other, symbol)
                return len(found) == 1 and self.compare(value, found[0]) == EQUAL
        if len(ours.free_symbols) != 1:
            return False
        (unknown,) = ours.free_symbols
        golds, answers = _solutions(ours, unknown), _solutions(theirs, unknown)
        return bool(golds) and self._match(golds, answers) == EQUAL


def _items(expression: Any) -> list[Any] | None:
    """The answers of a list as they were written, with repetitions; of x = {1, 2} the equations x = 1 and x = 2."""
    if isinstance(expression, sympy.FiniteSet) and expression.args != (sympy.S.EmptySet,):
        written = getattr(expression, "_unsorted_args", None) or expression.args
        nested = [_items(item) or [item] for item in written]
        return [item for items in nested for item in items]
    if _is_equation(expression) and isinstance(expression.rhs, sympy.FiniteSet):
        return [sympy.Eq(expression.lhs, item, evaluate=False) for item in _items(expression.rhs) or []]
    return None


def _coordinates(expression: Any) -> list[Any] | None:
    """Of (x, y) = (1, 2) the equations x = 1 and y = 2."""
    names, values = (_ordered(expression.lhs), _ordered(expression.rhs)) if _is_equation(expression) else (None, None)
    if names is None or values is None or len(names) != len(values):
        return None
    return [sympy.Eq(name, value, evaluate=False) for name, value in zip(names, values)]


def _by_name(answers: list[Any]) -> list[Any]:
    """Equations for x, y and z in this order, in which a point has the values; other answers as they are."""
    names = [str(answer.lhs) if _is_equation(answer) else "" for answer in answers]
    return [answers[names.index(name)] for name in sorted(names)] if set(names) <= {"x", "y", "z"} else answers


def hundredth(expression: Any) -> Any:
    """Of 5 and of x = 5, read from 5% and x = 5%, the number 5/100."""
    if _is_equation(expression):
        return sympy.Eq(expression.lhs, expression.rhs / 100)
    return expression / 100


def joined(expression: Any, word: str) -> Any:
    """Of inequalities of one unknown between which "and" or "or" stands, the set: x in (-oo, 2) or (3, oo)."""
    parts = [_relations(item) or [] for item in _items(expression) or []] if word else []
    held = [_held(part) for part in parts if part and _are_unequal(part)]
    if len(held) < 2 or len(held) < len(parts) or None in (names := {name for name, _ in held}) or len(names) > 1:
        return expression
    found = (sympy.Union if word == "or" else sympy.Intersection)(*(values for _, values in held))
    return sympy.Eq(names.pop(), found, evaluate=False)


def _held(relations: list[Any]) -> tuple[Any, Any]:
    """(the one unknown of some inequalities, the real numbers for which all hold); (None, None) where unknown."""
    name, relations = _one_unknown(relations, set())
    if name is None:
        return None, None
    try:
        return name, sympy.Intersection(*(relation.as_set() for relation in relations))
    except NotImplementedError:  # sin x < 1/2
        return None, None


def _one_unknown(relations: list[Any], names: set[Any]) -> tuple[Any, list[Any]]:
    """(the one symbol or f(x) beside ``names``, or None; the relations with a symbol for f(x))."""
    values = set[Any]().union(*(relation.atoms(_applied) for relation in relations))
    swaps = {value: sympy.Symbol(str(value)) for value in values}
    relations = [relation.xreplace(swaps) for relation in relations]
    unknowns = set[Any]().union(*(relation.free_symbols for relation in relations)) - names
    return (unknowns.pop() if len(unknowns) == 1 else None), relations


def _between(relations: list[Any], names: set[Any]) -> tuple[Any, Any]:
    """(x, the interval) of a <= x < b or x > a, where a and b may have ``names``; (None, None) of anything else."""
    unknown, relations = _one_unknown(relations, names)
    bounds: dict[bool, Any] = {}  # (whether it is the upper one): the bound
    left_out: set[bool] = set()
    for relation in relations:
        other = relation if relation.lhs == unknown else _turned(relation)
        if other.lhs != unknown or other.rhs.has(unknown) or isinstance(other, sympy.Ne):
            return None, None
        upper = isinstance(other, sympy.Lt | sympy.Le)
        if upper in bounds:  # x > a and x > b
            return None, None
        bounds[upper] = other.rhs
        if isinstance(other, sympy.Lt | sympy.Gt):
            left_out.add(upper)
    low, high = bounds.get(False, -sympy.oo), bounds.get(True, sympy.oo)
    return unknown, sympy.Interval(low, high, False in left_out, True in left_out)


def _relations(expression: Any) -> list[Any] | None:
    """A relation, or the parts of a chain; A = b h / 2 = 6 is A = 6."""
    if isinstance(expression, _unequal.Relational):
        return [expression]
    if not isinstance(expression, sympy.And):
        return None
    parts = list(getattr(expression, "_unsorted_args", expression.args))
    if all(_is_equation(part) for part in parts) and _is_name(parts[0].lhs) and _number(parts[-1].rhs) is not None:
        return [sympy.Eq(parts[0].lhs, parts[-1].rhs)]
    return parts


def _pair_up(golds: Sequence[Any], answers: Sequence[Any], compare: Callable[[Any, Any], int]) -> int:
    """Pair each gold with the best remaining answer, and return the worst verdict; as many golds as answers."""
    left, worst = list(answers), EQUAL
    for gold in golds:
        found = [compare(gold, answer) for answer in left]
        best = max(found)
        if best == DIFFERENT:
            return DIFFERENT
        left.pop(found.index(best))
        worst = min(worst, best)
    return worst


def _turned(relation: Any) -> Any:
    """The same relation read from the right."""
    kinds = {sympy.Gt: sympy.Lt, sympy.Lt: sympy.Gt, sympy.Ge: sympy.Le, sympy.Le: sympy.Ge}
    return kinds.get(type(relation), type(relation))(relation.rhs, relation.lhs, evaluate=False)


def _is_equation(expression: Any) -> bool:
    return isinstance(expression, sympy.Eq)


def _is_name(expression: Any) -> bool:
    """A symbol, f(x), or (x, y): a name to which an equation gives a value. A derivative is none."""
    if isinstance(expression, sympy.Symbol | _applied):
        return "dot{" not in str(expression)
    parts = _ordered(expression)
    return parts is not None and all(isinstance(part, sympy.Symbol) for part in parts)


def _ordered(expression: Any) -> tuple[Any, ...] | None:
    """The coordinates of a point or of a column; math-verify reads (1, 2) as an open interval."""
    if isinstance(expression, sympy.Tuple):
        return tuple(expression.args)
    if isinstance(expression, sympy.MatrixBase) and expression.shape[1] == 1:
        return tuple(expression)
    if isinstance(expression, sympy.Interval) and expression.left_open and expression.right_open:
        return (expression.start, expression.end)
    return None


def _are_unequal(relations: list[Any]) -> bool:
    """Whether all are inequalities."""
    return not any(_is_equation(relation) for relation in relations)


def _is_surely_set(expression: Any) -> bool:
    """Whether an expression is a set of numbers and no point: (1, 2) may be one, (1, 2] and (1, oo) may not."""
    if not isinstance(expression, sympy.Interval):
        return isinstance(expression, sympy.Set)
    return _ordered(expression) is None or not (expression.start.is_finite and expression.end.is_finite)


# --- numbers ------------------------------------------------------------------------------------------------------


def _has_decimal(expression: Any) -> bool:
    return bool(expression.atoms(sympy.Float))


def _number(expression: Any) -> Any:
    """The real number that an expression is, without rounding: 0.1 is 1/10. None where it is anything else."""
    if not isinstance(expression, sympy.Expr) or expression.free_symbols or expression.atoms(_applied, sympy.I):
        return None
    try:
        exact = _exact(expression).doit()
        value = exact.evalf()
        return exact if value.is_Number and value.is_finite else None
    except (TypeError, ValueError, AttributeError, OverflowError, ZeroDivisionError):
        return None


def _exact(expression: Any) -> Any:
    """With fractions for decimals, and the real one of the odd roots of a negative number."""
    swaps: dict[Any, Any] = {decimal: sympy.Rational(str(decimal)) for decimal in expression.atoms(sympy.Float)}
    for power in expression.atoms(sympy.Pow):
        if power.base.is_negative and power.exp.is_Rational and power.exp.q % 2:
            swaps[power] = (-1) ** power.exp.p * (-power.base) ** power.exp
    return expression.xreplace(swaps) if swaps else expression


def _size(number: Any) -> Any:
    """|number|, exactly where it is a fraction; else to 15 digits, as long as `_MANY_DIGITS` suffice for that."""
    return abs(number) if number.is_Rational else abs(number.evalf(maxn=_MANY_DIGITS))


# --- expressions --------------------------------------------------------------------------------------------------


def _plain(expression: Any) -> Any:
    """One symbol for each name, each f(x) and each derivative (of x by t it would be 0), fractions for decimals."""
    swaps: dict[Any, Any] = {
        part: sympy.Symbol(f"({part})", real=True) for part in expression.atoms(sympy.Derivative, _applied)
    }
    for symbol in expression.atoms(sympy.Symbol):
        swaps[symbol] = sympy.Symbol(symbol.name, real=True)
    return _exact(expression.xreplace(swaps))


_LETTER_I = sympy.Symbol("i", real=True)  # as `_plain` writes it; math-verify reads an i as a variable
_POINTS = ((3, 7), (11, 13))  # symbols have multiples of these fractions
_ROUNDING = sympy.Rational(1, 10**25)  # of values that are computed to 30 digits, relative to them


def _values_differ(gold: Any, answer: Any) -> bool:
    """Whether two expressions have different values somewhere; False where they cannot be evaluated."""
    names = sorted(gold.free_symbols | answer.free_symbols, key=str)
    try:
        for top, bottom in _POINTS:
            at = {name: sympy.Rational(top * (n + 1), bottom + n) for n, name in enumerate(names)}
            one, other = (sympy.N(side.subs(at), 30) for side in (gold, answer))
            if abs(one - other) > _ROUNDING * abs(one):
                return True
    except Exception:
        return False  # sympy cannot evaluate them, or has no distance of sets; math-verify's verdict is kept
    return False


def _spells(word: Any, product: Any) -> bool:
    """Whether a product of letters may spell a word; `_plain` would sort the letters."""
    letters = product.args if isinstance(product, sympy.Mul) else ()
    return isinstance(word, sympy.Symbol) and bool(letters) and all(
        isinstance(letter, sympy.Symbol) or letter == sympy.E for letter in letters
    )  # fmt: skip


def _constant_factor(ours: Any, theirs: Any) -> bool:
    """Whether two equations are the same up to a non-zero number, once denominators are cleared."""
    one, other = (sympy.fraction(sympy.together(side))[0] for side in (ours, theirs))
    factor = sympy.cancel(other / one)
    if factor.free_symbols:
        factor = sympy.simplify(factor)
    return not factor.free_symbols and factor.is_finite is not False and factor != 0


def _solved(gold: Any, answers: list[Any]) -> list[Any] | None:
    """The real solutions of a gold equation of one unknown, where answers state values of it; else None."""
    if not all(_is_equation(one) and isinstance(one.lhs, sympy.Expr) for one in (gold, *answers)):
        return None
    equation = _plain(gold.lhs - gold.rhs)
    names = {answer.lhs for answer in answers}
    if len(equation.free_symbols) != 1 or {_plain(name) for name in names} != equation.free_symbols:
        return None
    return _solutions(equation, equation.free_symbols.pop()) or None


def _solutions(equation: Any, symbol: Any) -> list[Any]:
    """What sympy solves an expression = 0 to; [] where it finds nothing."""
    try:
        return sympy.solve(equation, symbol)
    except Exception:  # sympy raises whatever its solvers raise where they know no method
        return []
