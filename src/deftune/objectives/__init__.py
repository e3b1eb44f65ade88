"""The maths: objectives as gate x error, on the statistics of supervised tokens."""

from deftune.objectives import family as family  # the objectives and modifiers enter the catalogue when imported
from deftune.objectives import modifiers as modifiers
from deftune.objectives.base import Focus, Modifier, Objective, StepStatistic, Weight
from deftune.objectives.catalogue import MODIFIERS, OBJECTIVES, register
from deftune.objectives.grammar import objective
from deftune.objectives.stats import IGNORE_INDEX, Context, StepStats, TokenStats, from_columns
from deftune.objectives.step import step_stats

__all__ = [
    "IGNORE_INDEX",
    "MODIFIERS",
    "OBJECTIVES",
    "Context",
    "Focus",
    "Modifier",
    "Objective",
    "StepStatistic",
    "StepStats",
    "TokenStats",
    "Weight",
    "from_columns",
    "objective",
    "register",
    "step_stats",
]
