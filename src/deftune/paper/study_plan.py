"""The study's plan: tiers of cells, and what is said of a regime."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml

from deftune.artifacts.names import shown_model
from deftune.comparison.grid import BASE
from deftune.objectives import objective as parse_objective
from deftune.paper.study_cells import Record, Study
from deftune.paper.study_effects import REFERENCE, Section

HEADLINE = (REFERENCE, "deft", "deft | floor(0.2)")


class Plan:
    """`benchmarks/study/plan.yaml`: what the regimes are, which cells were planned, and their minutes."""

    def __init__(self, path: Path):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        self.regimes: dict[str, dict[str, str]] = content["regimes"]
        self.tiers: list[Record] = content["tiers"]
        for tier in self.tiers:
            tier["objectives"] = [str(parse_objective(spec)) for spec in tier["objectives"]]

    def about(self, section: Section) -> dict[str, str]:
        """Kind, model and data of a regime; from the comparison where the plan does not name it."""
        if section.regime in self.regimes:
            return self.regimes[section.regime]
        regime = section.study.comparison().regimes[section.regime]
        model = {**section.study.config["model"], **regime.model}
        return {"kind": section.regime, "model": shown_model(str(model["name"])), "data": section.regime}

    def missing(self, tier: Record, studies: Sequence[Study]) -> list[str]:
        """The planned cells of a tier that no results file has."""
        have = {
            (cell["regime"], cell["objective"], cell["seed"], rate)
            for study in studies
            for cell in study.cells.values()
            if cell["state"] == "finished"
            for rate in (cell["learning_rate"], None)
        }
        wanted: list[tuple[str, str, int | None, float | None]] = []
        for regime in tier["regimes"]:
            wanted += [(regime, BASE, None, None)] if tier.get("base") else []
            for rate in tier["learning_rates"] or [None]:
                wanted += [(regime, o, seed, rate) for o in tier["objectives"] for seed in tier["seeds"]]
        return [
            f"{regime} {objective}" + ("" if seed is None else f" seed {seed}") + ("" if rate is None else f" {rate:g}")
            for regime, objective, seed, rate in wanted
            if (regime, objective, seed, rate) not in have
        ]

    def tier_of(self, cell: Record) -> str:
        """The first tier that plans the cell; "" for a cell that was not planned."""
        for tier in self.tiers:
            if cell["regime"] in tier["regimes"]:
                if cell["objective"] == BASE and tier.get("base"):
                    return tier["name"]
                rates = tier["learning_rates"]
                if (cell["objective"] in tier["objectives"] and cell["seed"] in tier["seeds"]
                        and (not rates or cell["learning_rate"] in rates)):  # fmt: skip
                    return tier["name"]
        return ""


def rates_text(rates: Iterable[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates)


def rate_text(section: Section) -> str:
    """The rate at which all objectives are shown together."""
    return "untuned" if section.reference_rate is None else f"learning rate {section.reference_rate:g}"
