"""Modifiers: change the gate and the value of any objective together (`deft | eos(nll) | mean_one`)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from deftune.objectives.base import Kind, Modifier, Objective, StepStatistic, weighted_nll
from deftune.objectives.catalogue import About, register
from deftune.objectives.family import Alpha, require
from deftune.objectives.stats import NO_CONTEXT, Context, TokenStats

NLL = Alpha(0.0)
Pair = tuple[Tensor, Tensor]  # (gate, loss)


def mix(first: Pair, second: Pair, share: float) -> Pair:
    """(1 - share) first + share second, gates and losses alike, without 0 * inf at the ends."""
    if share <= 0:
        return first
    if share >= 1:
        return second
    return (1 - share) * first[0] + share * second[0], (1 - share) * first[1] + share * second[1]


@register(
    "floor",
    About(
        "... | floor(g)",
        gate="max(gate, g)",
        value="value + sg[max(0, g - gate)] * NLL",
        source="modifier",
        use="every token should keep some gradient",
        hurts="lets some of the noise back in",
    ),
)
@dataclass(frozen=True)
class Floor(Modifier):
    """Gate max(gate, g); value + sg[max(0, g - gate)] * NLL: no token's gate is below g."""

    g: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require(math.isfinite(self.g) and self.g >= 0, "floor", "g must be finite and >= 0", self.g, "e.g. floor(0.1)")

    def evaluate(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Pair:
        gate, loss = self.inner.evaluate(stats, context)
        lift = (self.g - gate).clamp(min=0)
        return gate.clamp(min=self.g), loss + weighted_nll(stats.log_p, lift)


@register(
    "eos",
    About(
        "... | eos(o)",
        gate="gate of o on the special ids",
        value="value of o there",
        source="modifier",
        use="the tuned model does not stop: eos(nll)",
        hurts="format tokens that are wrong in the data are learned fully",
    ),
)
@dataclass(frozen=True)
class Eos(Modifier):
    """Gate and value of another objective on the special ids: end and format tokens keep being learned."""

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

    def evaluate(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Pair:
        chosen = self.chosen(stats, context)
        (gate, loss), (gate_o, loss_o) = self.inner.evaluate(stats, context), self.o.evaluate(stats, context)
        return torch.where(chosen, gate_o, gate), torch.where(chosen, loss_o, loss)


@register(
    "blend",
    About(
        "... | blend(o, w)",
        gate="(1-w) gate + w gate of o",
        value="the same mix",
        source="modifier",
        use="to hedge between two objectives",
        hurts="one more number to tune",
    ),
)
@dataclass(frozen=True)
class Blend(Modifier):
    """(1 - w) self + w o, gate and value."""

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

    def evaluate(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Pair:
        return mix(self.inner.evaluate(stats, context), self.o.evaluate(stats, context), self.w)


@register(
    "warmup",
    About(
        "... | warmup(f)",
        gate="1 until progress f, linear to the gate at 2f",
        value="the same mix",
        source="modifier",
        use="a weak model should first learn as with NLL",
        hurts="conflicts are learned fully meanwhile",
    ),
)
@dataclass(frozen=True)
class Warmup(Modifier):
    """NLL until progress f, then linearly to self at 2f."""

    f: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.f <= 0.5, "warmup", "f is in (0, 1/2], for self is reached at 2f", self.f, "e.g. warmup(0.1)")

    @property
    def requires(self) -> frozenset[str]:
        return super().requires | {"progress"}

    def evaluate(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Pair:
        share = (context.need_progress(self) - self.f) / self.f  # `mix` takes the ends as they are
        return mix(NLL.evaluate(stats, context), self.inner.evaluate(stats, context), share)


@register(
    "mean_one",
    About(
        "... | mean_one",
        gate="gate / its step mean",
        value="value / the same mean",
        source="modifier, last only",
        use="to compare objectives at equal gradient size",
        hurts="if few gates of a step are large, these become very large",
    ),
)
@dataclass(frozen=True)
class MeanOne(Modifier):
    """Gates (and values) divided by the gates' step mean, so that learning rates compare; last only."""

    must_be_last: ClassVar[bool] = True

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

    def evaluate(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Pair:
        gate, loss = self.inner.evaluate(stats, self.unscaled(context))
        if context.step == "deferred" and self.kind == "mass":
            return gate, loss
        mean = self.step_value(self.step_statistics[-1], stats, context)
        # every gate is shut: nothing to scale, and 0/0 must not reach the gradients
        scale = torch.where(mean == 0, 1.0, mean)
        return torch.where(mean == 0, 0.0, gate / scale), torch.where(mean == 0, 0.0, loss / scale)
