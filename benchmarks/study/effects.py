"""Accuracies and differences from NLL of the committed cells, with items and seeds as levels.

A setting (learning rate, and temperature where none is given) is chosen on one half of the items and scored on the
other half, as in `deftune.comparison.scores`. Two objectives are compared on the cells that both have: the same seeds,
the same rates to choose from. An interval is the percentile bootstrap's: items and seeds are drawn with replacement,
independently of each other. The p-value comes from the same resamples. With two or three seeds the bootstrap leaves
out a half or a third of their variance. So a difference also has the p-value of an analysis of variance, which counts
all of it (`deftune.evaluation.crossed`), and is decided where both are small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from deftune.comparison.grid import BASE, Evaluation
from deftune.comparison.scores import Scores, Shown, averaged_columns, common, show
from deftune.comparison.show import MOST_CUT
from deftune.comparison.tables import LEVEL
from deftune.evaluation.crossed import crossed
from deftune.evaluation.statistics import drawn_counts, holm, interval_of

from .cells import Record, Study

REFERENCE = "nll"
ORDER = (REFERENCE, "deft", "deft | floor(0.2)", "linear", "eaft", "cayley")  # others follow by name
RESAMPLES = 10_000


@dataclass(frozen=True)
class Effect:
    """A mean over items, seeds and tasks, with its 95% interval; of a difference, also its two-sided p-values.

    ``p`` is the bootstrap's, ``p_variance`` that of the analysis of variance (1 where it has none).
    """

    value: float
    low: float
    high: float
    p: float
    p_variance: float
    seeds: int
    items: int

    @property
    def points(self) -> tuple[float, float, float]:
        """Value, low and high in points, as they are shown."""
        return in_points(self.value), in_points(self.low), in_points(self.high)


def in_points(share: float) -> float:
    """A share in percentage points, to one decimal, without -0.0.

    >>> in_points(0.12345), in_points(-0.0001)
    (12.3, 0.0)
    """
    return round(100 * share, 1) + 0.0


@lru_cache(maxsize=4)
def _draws(number: int, seed: int) -> Tensor:
    return torch.cat(list(drawn_counts(number, RESAMPLES, seed)))


def effect_of(columns: Sequence[Tensor]) -> Effect:
    """The mean of the columns' means, each ``[seeds, items]``, by the bootstrap over items and seeds.

        m* = 1/K sum_k sum_s sum_i a_s b_ki x_ksi / (S N_k)      a, b: how often seed s and item i were drawn

    With one seed the interval says nothing about other seeds.

    >>> effect_of([torch.tensor([[1.0, 1.0, 1.0]])])
    Effect(value=1.0, low=1.0, high=1.0, p=0.0002, p_variance=0.0, seeds=1, items=3)
    """
    seeds = len(columns[0])
    drawn = torch.zeros(RESAMPLES, dtype=torch.float64)
    value = 0.0
    for column in columns:
        by_seed = _draws(column.shape[1], 0) @ column.double().T  # [resamples, seeds]
        drawn += (by_seed * _draws(seeds, 1)).sum(1) / (column.numel() * len(columns))
        value += float(column.double().mean()) / len(columns)
    interval = interval_of(drawn)
    beyond = min(int((drawn <= 0).sum()), int((drawn >= 0).sum()))
    p = min(1.0, 2 * (beyond + 1) / (RESAMPLES + 1))
    p_variance = crossed(columns).p_value
    return Effect(
        value, interval.low, interval.high, round(p, 6), 1.0 if math.isnan(p_variance) else round(p_variance, 6), seeds,
        sum(c.shape[1] for c in columns),
    )  # fmt: skip


def share(answers: Iterable[Record], key: str, kinds: Sequence[str]) -> float | None:
    """The share of the answers whose count under ``key`` is of these kinds; None without answers.

    >>> share([{"finished": {"stop": 3, "length": 1}}], "finished", ("length",))
    0.25
    """
    counts = [answer[key] for answer in answers]
    total = sum(sum(count.values()) for count in counts)
    return sum(count.get(kind, 0) for count in counts for kind in kinds) / total if total else None


class Section:
    """One evaluation of one regime: the scores of every objective, and their differences.

    Where a method takes a ``temperature``, None is the temperature that the other half of the items chose.

    The untuned model has no score where more than a tenth of its answers were cut off: the limit of tokens would be
    measured, not the model.
    """

    def __init__(self, study: Study, regime: str, title: str):
        self.study, self.regime, self.title = study, regime, title
        self.scores = study.scores(regime, title)
        answers = [answer for cell in self.cells(BASE) for task in cell["scores"][title].values()
                   for answer in task.values()]  # fmt: skip
        self.base_cut = share(answers, "finished", ("length",)) or 0.0  # of the untuned model's answers
        self.left_out = self.scores.pop(BASE, None) if self.base_cut > MOST_CUT else None  # of the untuned model
        self.base_section: Section = self  # whose cell the untuned model's scores are from
        self._accuracies: dict[tuple[str, float | None, float | None], Effect | None] = {}
        self._differences: dict[tuple[str, str, float | None, float | None], Effect | None] = {}

    def take_base(self, other: Section) -> None:
        """Take the untuned model's scores from another regime that asks it the same items (with more tokens)."""
        same = self.study.items[self.regime][self.title] == other.study.items[other.regime].get(self.title)
        if not same or not other.cells(BASE):
            return
        self.base_cut, self.left_out, self.base_section = other.base_cut, other.left_out, other
        self.scores.pop(BASE, None)
        if BASE in other.scores:
            asked = {option.temperature for scores in self.scores.values() for _, option in scores.values}
            mine = self.scores[BASE] = Scores()
            known = other.scores[BASE].values
            mine.values = {key: known[key] for key in known if not asked or key[1].temperature in asked}

    @cached_property
    def best_scores(self) -> dict[str, float]:
        """The score of each tuned objective at the temperature and rate that suit it."""
        found = {name: self.accuracy(name, None) for name in self.objectives}
        return {name: effect.value for name, effect in found.items() if effect}

    @property
    def evaluation(self) -> Evaluation:
        return next(e for e in self.study.comparison().regimes[self.regime].evaluate if e.title == self.title)

    @cached_property
    def averaged(self) -> list[str]:
        columns = list(dict.fromkeys(c for s in self.scores.values() for by in s.values.values() for c in by))
        return averaged_columns(self.evaluation, columns)

    @cached_property
    def objectives(self) -> list[str]:
        """The tuned objectives, NLL first."""
        names = [name for name in self.scores if name != BASE]
        return sorted(names, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))

    @cached_property
    def temperatures(self) -> list[float]:
        return sorted({option.temperature for scores in self.scores.values() for _, option in scores.values})

    @cached_property
    def rates(self) -> list[float]:
        found = {option.learning_rate for name in self.objectives for _, option in self.scores[name].values}
        return sorted(rate for rate in found if rate is not None)

    @cached_property
    def reference_rate(self) -> float | None:
        """The rate of most cells; of equals the one nearest to the middle of the rates."""
        found = [option.learning_rate for name in self.objectives for _, option in self.scores[name].values]
        middle = (len(self.rates) - 1) / 2
        key = lambda rate: (found.count(rate), -abs(self.rates.index(rate) - middle))  # noqa: E731
        return max(self.rates, key=key, default=None)

    def chosen(self, objective: str, temperature: float | None, rate: float | None = None) -> Shown | None:
        """The objective at its best setting; None where no cell has one."""
        return self._best(common(self.scores[objective], rate=rate), temperature)

    def _best(self, scores: Scores, temperature: float | None) -> Shown | None:
        seeds = sorted(scores.seeds, key=str)
        if not seeds or not scores.options(seeds, temperature):
            return None
        return show(scores, self.averaged, temperature, seeds)

    def left_out_score(self, temperature: float) -> Effect | None:
        """The untuned model's score that is left out because too many answers were cut off; None where none is."""
        found = self.left_out and self._best(self.left_out, temperature)
        return found and effect_of([found.columns[column] for column in self.averaged])

    def accuracy(self, objective: str, temperature: float | None, rate: float | None = None) -> Effect | None:
        """The score of an objective, at one learning rate or at the rate that the other half of the items chose."""
        key = objective, temperature, rate
        if key not in self._accuracies:
            found = self.chosen(objective, temperature, rate)
            self._accuracies[key] = found and effect_of([found.columns[column] for column in self.averaged])
        return self._accuracies[key]

    @cached_property
    def open_rates(self) -> list[float]:
        """The rates that NLL's scores are chosen from."""
        return self.rates_of(REFERENCE) if REFERENCE in self.scores else self.rates

    def rates_of(self, objective: str) -> list[float]:
        """The rates that an objective's scores are chosen from: those that all of its shown seeds have."""
        known = common(self.scores[objective])
        options = known.options(sorted(known.seeds, key=str), None)
        return sorted({option.learning_rate for option in options if option.learning_rate is not None})

    def pair(
        self, objective: str, temperature: float | None, against: str = REFERENCE, rate: float | None = None
    ) -> tuple[Shown, Shown] | None:
        """Two objectives on the cells that both have (at one rate); the untuned model has one cell for all."""
        if objective == against or not {objective, against} <= self.scores.keys():
            return None
        if BASE in (objective, against):
            a, b = self.chosen(objective, temperature), self.chosen(against, temperature)
        else:
            mine, theirs = self.scores[objective], self.scores[against]
            a = self._best(common(mine, theirs, rate=rate), temperature)
            b = self._best(common(theirs, mine, rate=rate), temperature)
        return (a, b) if a and b else None

    def difference(
        self, objective: str, temperature: float | None, against: str = REFERENCE, rate: float | None = None
    ) -> Effect | None:
        """An objective minus another one, at one learning rate or each at the rate that the other half chose."""
        key = objective, against, temperature, rate
        if key not in self._differences:
            found = self.pair(objective, temperature, against, rate)
            self._differences[key] = found and effect_of(found[0].minus(found[1], self.averaged))
        return self._differences[key]

    def by_seed(self, objective: str) -> list[float]:
        """An objective minus NLL at the chosen temperature and rate, for each seed of its own."""
        found = self.pair(objective, None)
        if not found:
            return []
        return torch.stack([column.mean(1) for column in found[0].minus(found[1], self.averaged)]).mean(0).tolist()

    def fall(self, objective: str) -> Effect | None:
        """The score at the chosen temperature minus the score at T = 1, each at its chosen rate."""
        best, hot = self.chosen(objective, None), self.chosen(objective, 1.0)
        return effect_of(best.minus(hot, self.averaged)) if best and hot and best.seeds == hot.seeds else None

    @cached_property
    def primary(self) -> dict[str, Effect]:
        """Each objective minus NLL at the chosen temperature and rate: the family of tests."""
        found = {name: self.difference(name, None) for name in self.objectives}
        return {name: effect for name, effect in found.items() if effect}

    def decided(self, objective: str, temperature: float | None = None) -> bool:
        """Whether an objective differs from NLL by both tests: Holm's p-value, and the analysis of variance."""
        effect = self.difference(objective, temperature)
        return bool(effect) and self.holm(temperature)[objective] < LEVEL and effect.p_variance < LEVEL

    def holm(self, temperature: float | None = None) -> dict[str, float]:
        """Holm's p-values of all objectives minus NLL, by the bootstrap."""
        found = {name: self.difference(name, temperature) for name in self.primary}
        effects = {name: effect for name, effect in found.items() if effect}
        return dict(zip(effects, holm([effect.p for effect in effects.values()])))

    def cells(self, objective: str, rate: float | None = None) -> list[Record]:
        """The finished cells of an objective, at one rate or at any."""
        return [
            cell for cell in self.study.finished(self.regime)
            if cell["objective"] == objective and rate in (None, cell["learning_rate"])
        ]  # fmt: skip


def sections(studies: Sequence[Study]) -> list[Section]:
    """Every evaluation of every regime that has finished cells."""
    found: list[Section] = []
    for study in studies:
        for regime, tasks in study.items.items():
            if any(regime == section.regime and study is not section.study for section in found):
                raise ValueError(f"regime {regime!r} is in two results files; give the regimes different names")
            found += [Section(study, regime, title) for title in tasks]
    return found
