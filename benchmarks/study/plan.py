"""The study's plan: tiers of cells, and the description of each regime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from deftune.artifacts.names import shown_model
from deftune.comparison.grid import BASE
from deftune.objectives import objective as parse_objective

from .cells import Record, Study
from .effects import Section

Wanted = tuple[str, str, int | None, float | None]
"""A planned cell: regime, objective, seed, learning rate (None: any, or the untuned model)."""


class Plan:
    """`benchmarks/study/plan.yaml`: what the regimes are, which cells were planned, and their minutes.

    A regime has ``kind`` (the paper's), ``model`` and ``data`` for the page, ``config`` (the comparison's file beside
    the plan; the results file has its name too) and ``seconds`` (expected of a tuned cell, two at a time on one H200).
    ``constant`` has by task what a constant answer would score, per cent.
    ``base`` names a regime whose untuned model counts here too; ``variant_of`` marks a regime that changes one thing
    about another one and is no regime of the paper's.
    """

    def __init__(self, path: Path):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        self.regimes: dict[str, Record] = content["regimes"]
        self.tiers: list[Record] = content["tiers"]
        self.series: dict[str, dict[str, str]] = content.get("series", {})
        for tier in self.tiers:
            tier["objectives"] = [str(parse_objective(spec)) for spec in tier["objectives"]]

    def about(self, section: Section) -> Record:
        """Kind, model and data of a regime; from the comparison where the plan does not name it."""
        if section.regime in self.regimes:
            return self.regimes[section.regime]
        regime = section.study.comparison().regimes[section.regime]
        model = {**section.study.config["model"], **regime.model}
        return {"kind": section.regime, "model": shown_model(str(model["name"])), "data": section.regime}

    def constant_score(self, section: Section) -> float | None:
        """What the most frequent right answer of each task would score, if that is known: 0.386, not 38.6."""
        known = self.regimes.get(section.regime, {}).get("constant", {})
        columns = section.averaged
        return sum(known[c] for c in columns) / len(columns) / 100 if set(columns) <= set(known) else None

    def teaches_nothing(self, section: Section) -> bool:
        """Whether no tuned model scores above a constant answer, so that the scores show no knowledge of the task."""
        constant, scores = self.constant_score(section), section.best_scores
        return constant is not None and bool(scores) and max(scores.values()) <= constant

    def is_variant(self, regime: str) -> bool:
        """Whether the regime changes one thing about another one: noise, epochs, a control."""
        return "variant_of" in self.regimes.get(regime, {})

    def arranged(self, sections: Sequence[Section]) -> list[Section]:
        """The sections in the order of the plan, each with the untuned model of the regime that ``base`` names.

        Sections that hold the untuned model for other regimes alone are left out.
        """
        order = [*self.regimes]
        found = sorted(sections, key=lambda s: order.index(s.regime) if s.regime in order else len(order))
        for section in found:
            source = self.regimes.get(section.regime, {}).get("base")
            for other in found:
                if other.regime == source and other.title == section.title:
                    section.take_base(other)
        return [section for section in found if section.objectives or not self.is_variant(section.regime)]

    def wanted(self, tier: Record) -> Iterator[Wanted]:
        """The planned cells of a tier in the order in which they are run: whole seeds first."""
        for regime in tier["regimes"]:
            if tier.get("base"):
                yield regime, BASE, None, None
            for rate in tier["learning_rates"] or [None]:
                for seed in tier["seeds"]:
                    yield from ((regime, objective, seed, rate) for objective in tier["objectives"])

    def missing(self, tier: Record, studies: Sequence[Study]) -> list[Wanted]:
        """The planned cells of a tier that no results file has."""
        cells = [cell for study in studies for cell in study.cells.values() if cell["state"] == "finished"]
        have = {key for cell in cells for key in plan_keys(cell)}
        return [cell for cell in self.wanted(tier) if cell not in have]

    def tier_of(self, cell: Record) -> str:
        """The first tier that plans the cell; "" for a cell that was not planned."""
        keys = plan_keys(cell)
        return next((tier["name"] for tier in self.tiers if keys & {*self.wanted(tier)}), "")


def plan_keys(cell: Record) -> set[Wanted]:
    """How a plan may name a cell: with its learning rate, or at any rate."""
    return {(cell["regime"], cell["objective"], cell["seed"], rate) for rate in (cell["learning_rate"], None)}


def wanted_text(cell: Wanted) -> str:
    """
    >>> wanted_text(("strong", "deft", 0, 1e-5)), wanted_text(("strong", "base", None, None))
    ('strong deft seed 0 1e-05', 'strong base')
    """
    regime, objective, seed, rate = cell
    return f"{regime} {objective}" + ("" if seed is None else f" seed {seed}") + ("" if rate is None else f" {rate:g}")
