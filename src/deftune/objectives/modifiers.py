"""Modifiers: change the gate and the value of any objective together (`deft | eos(nll) | mean_one`)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from deftune.objectives.base import Kind, Objective, StepStatistic, render_value, weighted_nll
from deftune.objectives.family import Alpha, require
from deftune.objectives.stats import NO_CONTEXT, Context, TokenStats

NLL = Alpha(0.0)


def mix(first: Tensor, second: Tensor, share: float) -> Tensor:
    """(1 - share) first + share second, without 0 * inf at the ends."""
    if share <= 0:
        return first
    if share >= 1:
        return second
    return (1 - share) * first + share * second


@dataclass(frozen=True)
class Modifier(Objective):
    """An objective around another one. Subclasses define ``gate`` and ``loss``; the focus stays the inner one's."""

    inner: Objective

    def __post_init__(self) -> None:
        for part in self.parts:
            if isinstance(part, MeanOne):
                raise ValueError(
                    f"{self.name}: mean_one must come last, it stands inside of it here; write it at the end"
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


@dataclass(frozen=True)
class Floor(Modifier):
    """Gate max(gate, g); value + sg[max(0, g - gate)] * NLL: no token's voice falls below g."""

    name: ClassVar[str] = "floor"
    g: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require(math.isfinite(self.g) and self.g >= 0, "floor", "g must be finite and >= 0", self.g, "e.g. floor(0.1)")

    def gate(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Tensor:
        return self.inner.gate(stats, context).clamp(min=self.g)

    def loss(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Tensor:
        lift = (self.g - self.inner.gate(stats, context)).clamp(min=0)
        return self.inner.loss(stats, context) + weighted_nll(stats.log_p, lift)


@dataclass(frozen=True)
class Eos(Modifier):
    """Gate and value of another objective on the special ids: end and format tokens keep being learned."""

    name: ClassVar[str] = "eos"
    o: Objective

    @property
    def requires(self) -> frozenset[str]:
        return super().requires | {"special_ids"}

    def chosen(self, stats: TokenStats, context: Context) -> Tensor:
        ids = context.need_special_ids(self)
        if len(ids) > 8:
            return torch.isin(stats.targets, torch.tensor(ids, device=stats.targets.device, dtype=stats.targets.dtype))
        # a copy of the ids to a GPU would wait for it, at every call
        return functools.reduce(torch.logical_or, [stats.targets == i for i in ids])

    def focus(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Tensor:
        chosen = self.chosen(stats, context)
        return torch.where(chosen, self.o.focus(stats, context), self.inner.focus(stats, context))

    def gate(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Tensor:
        chosen = self.chosen(stats, context)
        return torch.where(chosen, self.o.gate(stats, context), self.inner.gate(stats, context))

    def loss(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Tensor:
        chosen = self.chosen(stats, context)
        return torch.where(chosen, self.o.loss(stats, context), self.inner.loss(stats, context))


@dataclass(frozen=True)
class Blend(Modifier):
    """(1 - w) self + w o, gate and value."""

    name: ClassVar[str] = "blend"
    o: Objective
    w: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            0 <= self.w <= 1,
            "blend",
            "the share w of the second objective is in [0, 1]",
            self.w,
            "e.g. blend(nll, 0.1)",
        )

    def gate(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Tensor:
        return mix(self.inner.gate(stats, context), self.o.gate(stats, context), self.w)

    def loss(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Tensor:
        return mix(self.inner.loss(stats, context), self.o.loss(stats, context), self.w)


@dataclass(frozen=True)
class Warmup(Modifier):
    """NLL until progress f, then linearly to self at 2f."""

    name: ClassVar[str] = "warmup"
    f: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.f <= 0.5, "warmup", "f is in (0, 1/2], for self is reached at 2f", self.f, "e.g. warmup(0.1)")

    @property
    def requires(self) -> frozenset[str]:
        return super().requires | {"progress"}

    def share(self, context: Context) -> float:
        return min(1.0, max(0.0, (context.need_progress(self) - self.f) / self.f))

    def gate(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Tensor:
        return mix(NLL.gate(stats, context), self.inner.gate(stats, context), self.share(context))

    def loss(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Tensor:
        return mix(NLL.loss(stats, context), self.inner.loss(stats, context), self.share(context))


@dataclass(frozen=True)
class MeanOne(Modifier):
    """Gates (and values) divided by the gates' step mean, so that learning rates compare; last only."""

    name: ClassVar[str] = "mean_one"

    @property
    def kind(self) -> Kind:
        return "step" if self.inner.kind == "step" else "mass"

    @property
    def step_statistics(self) -> tuple[StepStatistic, ...]:
        inner = self.inner.step_statistics if self.inner.kind == "step" else ()
        return (*inner, StepStatistic(f"mass of {self}", self.mass, "mean"))

    def unscaled(self, context: Context) -> Context:
        # the scale of an inner mass objective cancels: its unnormalised gate will do
        return replace(context, step="deferred") if self.inner.kind == "mass" else context

    def mass(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Tensor:
        return self.inner.gate(stats, self.unscaled(context))

    def over_mean(self, column: Tensor, stats: TokenStats, context: Context) -> Tensor:
        if context.step == "deferred" and self.kind == "mass":
            return column
        mean = self.step_value(self.step_statistics[-1], stats, context)
        # every gate is shut: nothing to scale, and 0/0 must not reach the gradients
        return torch.where(mean == 0, 0.0, column / torch.where(mean == 0, 1.0, mean))

    def gate(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Tensor:
        return self.over_mean(self.inner.gate(stats, self.unscaled(context)), stats, context)

    def loss(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Tensor:
        return self.over_mean(self.inner.loss(stats, self.unscaled(context)), stats, context)
