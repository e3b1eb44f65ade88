"""The rows of `deftune.comparison.evidence`: differences of the study, those from before it, and the paper's."""

from __future__ import annotations

from collections.abc import Sequence

from deftune.comparison.evidence import BEST, GREEDY, HOT
from deftune.comparison.grid import BASE
from deftune.paper.board import REGIMES, TUNED, PaperBoard

from .cells import Record
from .effects import REFERENCE, Section
from .plan import Plan


def evidence(found: Sequence[Section], plan: Plan, earlier: Sequence[Record]) -> list[Record]:
    """The rows of `deftune.comparison.evidence`: the study's, those from before it, and the paper's."""
    rows: list[Record] = []
    regimes = {section.regime for section in found if section.primary}
    for section in found:
        if plan.is_variant(section.regime):  # says nothing about a user's data
            continue
        about = plan.about(section)
        base = next((cell["held_out"] for cell in section.cells(BASE) if "held_out" in cell), None)
        measures = [(BEST, None), (GREEDY, 0.0), (HOT, 1.0)]
        for name in section.primary:
            for measure, temperature in measures:
                found_pair = section.pair(name, temperature)
                effect = section.difference(name, temperature)
                if effect is None or found_pair is None:
                    continue
                value, low, high = (round(point, 1) + 0.0 for point in effect.points)
                rates = sorted({o.learning_rate for o in found_pair[0].chosen if o.learning_rate is not None})
                rows.append({
                    "regime": about["kind"], "model": about["model"], "data": about["data"],
                    "task": ", ".join(section.averaged), "base_p": base and round(base["p"][0], 2),
                    "base_concentration": base and round(base["concentration"][0], 2), "objective": name,
                    "against": REFERENCE, "measure": measure, "difference": value, "low": low, "high": high,
                    "p_holm": section.holm_at(temperature)[name], "seeds": effect.seeds,
                    "learning_rates": rates, "source": "study", "where": "docs/study/results.md",
                })  # fmt: skip
    rows += [
        {key: value for key, value in row.items() if key != "until"}
        for row in earlier
        if row.get("until") not in regimes
    ]
    board = PaperBoard()
    for regime in REGIMES:
        for name in TUNED[1:]:
            pairs = [board.difference(regime, case, name, REFERENCE) for case in board.cases(regime)]
            values = [pair.value for pair in pairs if pair]
            ahead = sum(value > 0 for value in values)
            rows.append({
                "regime": regime, "model": f"{len(values)} models", "objective": name, "against": REFERENCE,
                "measure": "the paper's average", "difference": round(sum(values) / len(values), 1), "seeds": 1,
                "learning_rates": [5e-5, 2e-5], "source": "paper", "where": f"Table {REGIMES.index(regime) + 1}",
                "note": f"ahead on {ahead} of {len(values)} models",
            })  # fmt: skip
    return rows
