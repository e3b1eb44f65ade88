"""The maths: objectives as gate x error, on the statistics of supervised tokens."""

from deftune.objectives.base import Focus, Objective, StepStatistic, Weight
from deftune.objectives.catalogue import MODIFIERS, OBJECTIVES
from deftune.objectives.grammar import objective
from deftune.objectives.stats import IGNORE_INDEX, Context, StepStats, TokenStats
from deftune.objectives.step import step_stats

__all__ = [
    "IGNORE_INDEX",
    "MODIFIERS",
    "OBJECTIVES",
    "Context",
    "Focus",
    "Objective",
    "StepStatistic",
    "StepStats",
    "TokenStats",
    "Weight",
    "objective",
    "step_stats",
]
