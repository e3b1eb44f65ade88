"""An objective: gate x error, as a value.

dL/dz_i = s (P_i - [i = y]): the gate s and the loss's value are functions of a token's statistics, and nothing else
of an objective is ever asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from deftune.objectives.stats import NO_CONTEXT, Context, TokenStats

Kind = Literal["local", "mass", "step"]


class StepStatistic(NamedTuple):
    """A number about the whole optimizer step that an objective needs: the mean or median of a column of the tokens.

    - ``key``: its name in `StepStats.values`, such as ``median nll``
    - ``column``: a function of (`TokenStats`, `Context`) that returns ``[tokens]``
    - ``reduce``: ``mean`` or ``median`` over all tokens of the step
    """

    key: str
    column: Callable[[TokenStats, Context], Tensor]
    reduce: Literal["mean", "median"]


def reduce_step(column: Tensor, how: Literal["mean", "median"]) -> Tensor:
    """Mean, or the median with the two middle values averaged; an empty column has neither: NaN."""
    if column.numel() == 0:
        return column.new_full((), math.nan)
    if how == "mean":
        return column.mean()
    ordered = column.sort().values
    low, high = (len(ordered) - 1) // 2, len(ordered) // 2
    return ordered[low] if low == high else (ordered[low] + ordered[high]) / 2


def deformed(log_p: Tensor, focus: Tensor) -> tuple[Tensor, Tensor]:
    """(p^a, (1 - p^a) / a): the gate and the value for a focus a. At a = 0 they are 1 and -log p, also for p = 0.

    >>> deformed(torch.tensor([-2.0, -2.0]), torch.tensor([1.0, 0.0]))
    (tensor([0.1353, 1.0000]), tensor([0.8647, 2.0000]))
    """
    power = (focus * log_p).nan_to_num(nan=0.0, neginf=-math.inf)  # x = a log p, with 0 * -inf = 0
    # (1 - e^x)/a = -log p (1 + x/2 + ...): above -eps/4 the first term is the rounded value, also for subnormal a
    tiny = power > -torch.finfo(power.dtype).eps / 4
    value = -torch.where(tiny, log_p, torch.expm1(power) / torch.where(tiny, 1.0, focus))
    return power.detach().exp(), value


def weighted_nll(log_p: Tensor, weight: Tensor) -> Tensor:
    """w * -log p, with 0 * inf = 0: a token whose weight is 0 costs nothing."""
    return torch.where(weight == 0, 0.0, weight * -log_p)


@dataclass(frozen=True)
class Objective:
    """The base class of all objectives. Most objectives extend `Focus` or `Weight`; extend this class for other losses.

    A subclass defines ``gate`` and ``loss``, or ``evaluate``, which returns both; d loss / d log_p must be -gate.
    ``name`` is its name in specs and tables. ``kind`` says what the gate of a token depends on:

    - ``local``: the token's own statistics
    - ``mass``: also the sum of masses of the optimizer step; step loss = sum of losses / sum of masses
    - ``step``: also another statistic of the whole optimizer step, such as a median
    """

    name: ClassVar[str] = ""

    def focus(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Tensor:
        """The focus a per token (stop-gradient); 0 for weighted NLL."""
        raise NotImplementedError

    def gate(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Tensor:
        """The gate s per token: the factor of the error P - onehot in the gradient."""
        return self.evaluate(stats, context)[0]

    def loss(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Tensor:
        """The loss per token; under autograd d loss / d log_p = -gate."""
        return self.evaluate(stats, context)[1]

    def evaluate(self, stats: TokenStats, context: Context = NO_CONTEXT) -> tuple[Tensor, Tensor]:
        """(gate, loss)."""
        if type(self).gate is Objective.gate or type(self).loss is Objective.loss:
            raise NotImplementedError(f"{type(self).__name__}: define gate and loss, or evaluate, which returns both")
        return self.gate(stats, context), self.loss(stats, context)

    def mass(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Tensor:
        """What a token adds to the denominator of the step's loss: 1, except in mass objectives."""
        return torch.ones_like(stats.log_p)

    @property
    def kind(self) -> Kind:
        """``local``, ``mass`` or ``step``: what a gate depends on."""
        return "step" if self.step_statistics else "local"

    @property
    def top_k(self) -> int:
        """How many of the largest log-probabilities the objective reads (`TokenStats.top_log_p`); 0: none."""
        return 0

    @property
    def step_statistics(self) -> tuple[StepStatistic, ...]:
        """Numbers about the whole step that the gate needs, in the order in which they can be computed."""
        return ()

    @property
    def requires(self) -> frozenset[str]:
        """Fields of the context without which the objective is undefined: 'progress', 'special_ids'."""
        return frozenset()

    def step_value(self, statistic: StepStatistic, stats: TokenStats, context: Context) -> Tensor:
        """A step statistic from the context; without one there, ``stats`` is taken as the whole step."""
        if context.step == "deferred":
            raise ValueError(
                f"`{self}` needs {statistic.key!r} of the whole step before the backward; a deferred mass "
                f"cannot replace it. Pass context=Context(step=deftune.step_stats(...))"
            )
        if context.step is not None:
            return context.step.get(statistic.key, self)
        return reduce_step(statistic.column(stats, context), statistic.reduce)

    def __str__(self) -> str:
        name = self.name or type(self).__name__.lower()
        shown = [
            f"{f.name}={render_value(getattr(self, f.name))}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        ]
        return f"{name}({', '.join(shown)})" if shown else name


def render_value(value: object) -> str:
    """A parameter as the grammar reads it back: 0.5, 20, lnk, deft | floor(0.1)."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return repr(value) if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Focus(Objective):
    """An objective given by its focus: L = (1 - p^a)/a, gate p^a. Subclasses define ``focus``.

    >>> @dataclass(frozen=True)
    ... class Half(Focus):
    ...     def focus(self, stats, context=NO_CONTEXT):
    ...         return stats.concentration / 2
    >>> str(Half())
    'half'
    """

    def evaluate(self, stats: TokenStats, context: Context = NO_CONTEXT) -> tuple[Tensor, Tensor]:
        return deformed(stats.log_p, self.focus(stats, context).detach())


@dataclass(frozen=True)
class Weight(Objective):
    """An objective given by a weight per token, a constant for the gradient: L = -w log p, gate w.

    Subclasses define ``weight``.

    >>> @dataclass(frozen=True)
    ... class Likely(Weight):
    ...     def weight(self, stats, context=NO_CONTEXT):
    ...         return (stats.p >= 0.1).double()
    >>> str(Likely())
    'likely'
    """

    def weight(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Tensor:
        """The weight w per token, at least 0."""
        raise NotImplementedError

    def focus(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Tensor:
        return torch.zeros_like(stats.log_p)

    def evaluate(self, stats: TokenStats, context: Context = NO_CONTEXT) -> tuple[Tensor, Tensor]:
        weight = self.weight(stats, context).detach()
        return weight, weighted_nll(stats.log_p, weight)


@dataclass(frozen=True)
class Modifier(Objective):
    """An objective that wraps another one, ``inner``, as ``floor(0.2)`` does in ``deft | floor(0.2)``.

    Subclasses define ``evaluate``, or ``gate`` and ``loss``; d loss / d log_p must be -gate. The focus is that of
    ``inner``.

    >>> @dataclass(frozen=True)
    ... class Half(Modifier):
    ...     name: ClassVar[str] = "half"
    ...     def evaluate(self, stats, context=NO_CONTEXT):
    ...         gate, loss = self.inner.evaluate(stats, context)
    ...         return gate / 2, loss / 2
    >>> from deftune import objective
    >>> str(Half(objective("deft")))
    'deft | half'
    """

    must_be_last: ClassVar[bool] = False
    inner: Objective

    def __post_init__(self) -> None:
        for part in self.parts:
            if isinstance(part, Modifier) and part.must_be_last:
                raise ValueError(
                    f"{self.name}: {part.name} must come last, not inside another modifier; write it at the end"
                )

    @property
    def parts(self) -> tuple[Objective, ...]:
        """The objectives this one is made of."""
        return tuple(v for f in fields(self) if isinstance(v := getattr(self, f.name), Objective))

    @property
    def top_k(self) -> int:
        return max(part.top_k for part in self.parts)

    @property
    def requires(self) -> frozenset[str]:
        return frozenset(name for part in self.parts for name in part.requires)

    @property
    def step_statistics(self) -> tuple[StepStatistic, ...]:
        return tuple(statistic for part in self.parts for statistic in part.step_statistics)

    def focus(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Tensor:
        return self.inner.focus(stats, context)

    def __str__(self) -> str:
        own = [render_value(getattr(self, f.name)) for f in fields(self) if f.name != "inner"]
        return f"{self.inner} | {self.name}" + (f"({', '.join(own)})" if own else "")
