"""The oracle: every statistic, focus, gate and value spelled out in 50-digit arithmetic, from the equations alone.

A step is a list of `Row`s, one per supervised token. An oracle maps the whole step to one `Token` per row; its
``value_at`` is the loss as a function of log p with everything that carries a stop-gradient frozen at the row, so that
a difference quotient of it is the gradient that the objective claims to have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mpmath
import torch
from torch import Tensor

mp = mpmath.MPContext()  # our own context: its precision is nobody else's
mp.dps = 50
DEEP = 800  # digits where 1 - x cancels: x differs from 1 by a product of two floats, 5e-324 the least of them

Number = mpmath.mpf
ZERO, ONE = mp.mpf(0), mp.mpf(1)


def number(x: float) -> Number:
    return mp.mpf(float(x))


# --- a token's distribution -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What the mathematics knows of one supervised token; ``probabilities`` is empty for a row given by its columns."""

    log_p: Number
    entropy: Number
    collision: Number
    target: int
    vocab_size: int
    likeliest: tuple[Number, ...]  # probabilities (up to a common factor), largest first
    probabilities: tuple[Number, ...] = ()

    @property
    def p(self) -> Number:
        return mp.exp(self.log_p)

    @property
    def log_collision(self) -> Number:
        return mp.log(self.collision)

    def error_vector(self) -> list[Number]:
        """P - onehot."""
        return [p - (i == self.target) for i, p in enumerate(self.probabilities)]


def softmax(logits: Sequence[float]) -> list[Number]:
    e = [mp.exp(number(z)) for z in logits]
    total = mp.fsum(e)
    return [x / total for x in e]


def entropy(probabilities: Sequence[Number]) -> Number:
    return -mp.fsum(p * mp.log(p) for p in probabilities if p > 0)


def top_entropy(probabilities: Sequence[Number], k: int) -> Number:
    """The entropy of the min(k, V) likeliest, renormalised."""
    top = sorted(probabilities, reverse=True)[:k]
    total = mp.fsum(top)
    return entropy([p / total for p in top])


def row(logits: Sequence[float], target: int) -> Row:
    """A row from its logits, python floats that hold the tensor's values exactly."""
    P = softmax(logits)
    return Row(
        log_p=mp.log(P[target]) if P[target] > 0 else mp.mpf("-inf"),
        entropy=entropy(P),
        collision=mp.fsum(p * p for p in P),
        target=target,
        vocab_size=len(P),
        likeliest=tuple(sorted(P, reverse=True)),
        probabilities=tuple(P),
    )


def rows(logits: Tensor, targets: Tensor) -> list[Row]:
    """The supervised rows of ``[..., V]`` logits, in order."""
    flat = zip(logits.detach().double().reshape(-1, logits.shape[-1]).tolist(), targets.reshape(-1).tolist())
    return [row(z, y) for z, y in flat if y != -100]


def row_from_columns(
    log_p: float, entropy: float, log_collision: float, *, target: int, vocab_size: int, top_log_p: Sequence[float]
) -> Row:
    """A row of which only the statistics are given."""
    top = tuple(mp.exp(number(x)) for x in top_log_p)
    return Row(number(log_p), number(entropy), mp.exp(number(log_collision)), target, vocab_size, top)


class Columns(NamedTuple):
    """The float64 twin's statistics, one entry per row."""

    log_p: Tensor
    entropy: Tensor
    collision: Tensor
    top_entropy: Tensor


def twin(logits: Tensor, targets: Tensor, *, k: int = 20) -> Columns:
    """The same statistics in float64, for vocabularies where 50 digits take too long; flat targets, none ignored."""
    z = logits.detach().double().reshape(-1, logits.shape[-1])
    P = torch.softmax(z, -1)
    top = P.topk(min(k, P.shape[-1]), -1).values
    top = top / top.sum(-1, keepdim=True)
    log_p = z.gather(-1, targets.reshape(-1, 1))[:, 0] - torch.logsumexp(z, -1)
    return Columns(log_p, -torch.xlogy(P, P).sum(-1), (P * P).sum(-1), -torch.xlogy(top, top).sum(-1))


# --- objectives: gate x error -----------------------------------------------------------------------------------------


class Token(NamedTuple):
    focus: Number
    gate: Number
    value_at: Callable[[Number], Number]


@dataclass(frozen=True)
class Setting:
    """What a token's own statistics do not tell."""

    progress: float = 0.0
    special_ids: tuple[int, ...] = ()


Oracle = Callable[[Sequence[Row], Setting], list[Token]]


def deformed(row: Row, a: Number) -> Token:
    """L_a(p) = (1 - p^a)/a, gate p^a; a = 0 is -log p, gate 1."""

    def value_at(log_p: Number) -> Number:
        if a == 0:
            return -log_p
        with mp.workdps(DEEP):
            return (1 - mp.exp(a * log_p)) / a

    with mp.workdps(DEEP):
        return Token(a, ONE if a == 0 else mp.exp(a * row.log_p), value_at)


def weighted(row: Row, weight: Number, focus: Number = ZERO) -> Token:
    """sg[w] * -log p, gate w; a token of weight 0 costs nothing, also at p = 0."""
    return Token(focus, weight, lambda log_p: ZERO if weight == 0 else -weight * log_p)


def local(token: Callable[[Row], Token]) -> Oracle:
    return lambda step, setting: [token(row) for row in step]


def alpha(a: float) -> Oracle:
    return local(lambda row: deformed(row, number(a)))


nll, hellinger, linear = alpha(0), alpha(0.5), alpha(1)
dft = local(lambda row: weighted(row, row.p, focus=ONE))
deft = local(lambda row: deformed(row, row.collision))


def cayley(kappa: float = 1.0) -> Oracle:
    def token(row: Row) -> Token:
        with mp.workdps(DEEP):
            z = mp.sqrt(1 - mp.exp(row.log_p))
            a = (1 - z) / (1 + number(kappa) * z)
        return deformed(row, a)

    return local(token)


def cayley_released(step: Sequence[Row], setting: Setting) -> list[Token]:
    f = mp.fsum(row.p for row in step) / len(step) / 2
    return [deformed(row, min(max(f + (1 - f) * row.p / (2 - row.p), number(1e-3)), ONE)) for row in step]


def eaft(k: int = 20, power: float = 1.0, norm: str = "lnk") -> Oracle:
    def weight(row: Row) -> Number:
        if norm == "full":
            return (row.entropy / mp.log(row.vocab_size) if row.vocab_size > 1 else ZERO) ** number(power)
        divisor = {"lnk": mp.log(k), "3": mp.mpf(3), "none": ONE}[norm]
        return (top_entropy(row.likeliest, k) / divisor) ** number(power)

    return local(lambda row: weighted(row, weight(row)))


def threshold(t: float, of: str, above: bool) -> Oracle:
    def token(row: Row) -> Token:
        base = deformed(row, mp.mpf(0 if of == "nll" else 1))
        if (row.p >= number(t)) == above:
            return base
        return Token(base.focus, ZERO, lambda log_p: ZERO)

    return local(token)


def top(t: float, of: str = "nll") -> Oracle:
    return threshold(t, of, above=True)


def bottom(t: float, of: str = "nll") -> Oracle:
    return threshold(t, of, above=False)


def mile(gamma: float = 1.0) -> Oracle:
    def tokens(step: Sequence[Row], setting: Setting) -> list[Token]:
        raw = [(1 + row.entropy) ** number(gamma) for row in step]
        mean = mp.fsum(raw) / len(raw)
        return [weighted(row, w / mean) for row, w in zip(step, raw)]

    return tokens


def median(values: Sequence[Number]) -> Number:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def clip(k: float = 3.0) -> Oracle:
    """min(NLL, k median): the gate k median / NLL is frozen, so that beyond the cap the value stays the cap."""

    def tokens(step: Sequence[Row], setting: Setting) -> list[Token]:
        cap = number(k) * median([-row.log_p for row in step])

        def token(row: Row) -> Token:
            if -row.log_p <= cap:
                return weighted(row, ONE)
            gate = cap / -row.log_p
            return Token(ZERO, gate, lambda log_p: cap if gate == 0 else -gate * log_p)

        return [token(row) for row in step]

    return tokens


# --- modifiers --------------------------------------------------------------------------------------------------------


def floor(inner: Oracle, g: float) -> Oracle:
    def raised(row: Row, token: Token) -> Token:
        lift = max(ZERO, number(g) - token.gate)
        extra = weighted(row, lift).value_at
        return Token(token.focus, max(token.gate, number(g)), lambda log_p: token.value_at(log_p) + extra(log_p))

    return lambda step, setting: [raised(row, token) for row, token in zip(step, inner(step, setting))]


def eos(inner: Oracle, other: Oracle) -> Oracle:
    def tokens(step: Sequence[Row], setting: Setting) -> list[Token]:
        both = zip(step, inner(step, setting), other(step, setting))
        return [theirs if row.target in setting.special_ids else ours for row, ours, theirs in both]

    return tokens


def mixed(ours: Token, theirs: Token, share: Number) -> Token:
    """(1 - share) ours + share theirs; a share of 0 or 1 leaves one of them alone."""
    if share == 0:
        return Token(ours.focus, ours.gate, ours.value_at)
    if share == 1:
        return Token(ours.focus, theirs.gate, theirs.value_at)
    return Token(
        ours.focus,
        (1 - share) * ours.gate + share * theirs.gate,
        lambda log_p: (1 - share) * ours.value_at(log_p) + share * theirs.value_at(log_p),
    )


def blend(inner: Oracle, other: Oracle, w: float) -> Oracle:
    return lambda step, setting: [
        mixed(ours, theirs, number(w)) for ours, theirs in zip(inner(step, setting), other(step, setting))
    ]


def warmup(inner: Oracle, f: float) -> Oracle:
    """NLL until progress f, linear to self at 2f; the focus is the inner one's throughout."""

    def tokens(step: Sequence[Row], setting: Setting) -> list[Token]:
        share = min(ONE, max(ZERO, number(setting.progress) / number(f) - 1))
        pairs = zip(inner(step, setting), nll(step, setting))
        return [mixed(ours, plain, 1 - share) for ours, plain in pairs]

    return tokens


def mean_one(inner: Oracle) -> Oracle:
    def tokens(step: Sequence[Row], setting: Setting) -> list[Token]:
        inside = inner(step, setting)
        mean = mp.fsum(token.gate for token in inside) / len(inside)
        return [scaled(token, mean) for token in inside]

    def scaled(token: Token, mean: Number) -> Token:
        return Token(token.focus, token.gate / mean, lambda log_p: token.value_at(log_p) / mean)

    return tokens


# --- what tests compare with ------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """The oracle's columns in float64; ``gradient`` is gate x (P - onehot) of each token's own loss."""

    focus: Tensor
    gate: Tensor
    value: Tensor
    gradient: Tensor


def column(values: Sequence[Number]) -> Tensor:
    return torch.tensor([float(v) for v in values], dtype=torch.float64)


def answer(oracle: Oracle, step: Sequence[Row], setting: Setting) -> Answer:
    tokens = oracle(step, setting)
    gradient = [[float(token.gate * e) for e in row.error_vector()] for row, token in zip(step, tokens)]
    return Answer(
        column([token.focus for token in tokens]),
        column([token.gate for token in tokens]),
        column([token.value_at(row.log_p) for row, token in zip(step, tokens)]),
        torch.tensor(gradient, dtype=torch.float64),
    )


def difference_quotient(token: Token, logits: Sequence[float], target: int) -> list[float]:
    """d value_at(log p(z)) / d z_i by central differences in 50 digits: no stop-gradient quantity moves."""
    h = mp.mpf(10) ** -15  # the error is h^2 = 1e-30, the cancellation leaves 35 digits

    def value(i: int, shift: Number) -> Number:
        z = [number(x) + (shift if i == j else 0) for j, x in enumerate(logits)]
        return token.value_at(z[target] - mp.log(mp.fsum(mp.exp(x) for x in z)))

    return [float((value(i, h) - value(i, -h)) / (2 * h)) for i in range(len(logits))]
