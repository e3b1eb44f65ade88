"""The parts of the package that the study writes: the ledger of `deftune paper claims`, the rows of `deftune advise`.

The ledger judges the paper's sentences by the study's cells, with the functions that judge the paper's tables. The
study's data, models and sets are not the paper's, so that a verdict is about the sentence, never a check of the paper's
number; the ledger names the differences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from deftune.comparison.evidence import BEST, GREEDY, HOT
from deftune.comparison.grid import BASE
from deftune.comparison.tables import LEVEL
from deftune.paper.board import REGIMES, TUNED, Difference, FocusPath, PaperBoard
from deftune.paper.claims import CLAIMS

from .cells import Record
from .effects import REFERENCE, Section, in_points
from .plan import Plan
from .tables import seeds_text, table

PAPERS = {
    "strong": "NuminaMath, asked five sets, four models",
    "intermediate": "m23k, asked ten sets, four models",
    "weak": "FigFont, 5,000 items, four models",
    "weak exact": "FigFont, 5,000 items, four models",
    "mixed": "Tulu 3, asked medicine and mathematics",
    "mixed general": "Tulu 3, asked medicine",
    "mixed maths": "Tulu 3, asked five sets",
    "ood": "NuminaMath, asked ten medical sets",
    "epochs": "NuminaMath, asked five sets",
}
"""By setting of a board: what the paper trains on and asks, which is not what we do."""
SAMPLED = ("strong", "mixed maths", "epochs")
"""Settings whose answers the released code samples at T = 1; those of all others are greedy."""
KINDS = {"strong": "strong", "intermediate": "intermediate", "weak": "weak", "mixed maths": "mixed"}  # setting -> kind


class StudyBoard:
    """The committed cells as a board: each objective at its own best learning rate.

    A case is a regime of the study. The temperature is the one at which the paper's numbers were sampled, or with
    ``best`` the objective's own best one. A difference is decided where the p-values of the bootstrap (of a difference
    from NLL Holm's) and of the analysis of variance are below 0.05.
    """

    def __init__(self, found: Sequence[Section], plan: Plan, *, best: bool = False):
        self.plan, self.best = plan, best
        self.asked: list[str] = []  # settings, in the order of the questions
        self._sections: dict[str, dict[str, Section]] = {}
        for section in found:
            kind = str(plan.about(section)["kind"])
            for setting, wanted in KINDS.items():
                if kind == wanted and not plan.is_variant(section.regime):
                    self._sections.setdefault(setting, {})[section.regime] = section
            if section.regime == "forgetting" and section.title == "medicine":
                self._sections.setdefault("ood", {})[section.regime] = section
        epochs = plan.series.get("epochs", {})
        by_regime = {section.regime: section for section in found}
        if all(regime in by_regime for regime in epochs) and epochs:
            self._sections["epochs"] = {f"epoch {label}": by_regime[regime] for regime, label in epochs.items()}

    def cases(self, setting: str) -> Sequence[str]:
        self.asked.append(setting)
        return [case for case, section in self._sections.get(setting, {}).items() if section.primary]

    def temperature(self, setting: str) -> float | None:
        return None if self.best else 1.0 if setting in SAMPLED else 0.0

    def differs(self, setting: str) -> str:
        """Why our numbers of a setting cannot stand beside the paper's as equals: data, items, model and seeds."""
        ours: list[str] = []
        for case in self.cases(setting):
            section = self._sections[setting][case]
            about, seeds = self.plan.about(section), sorted(effect.seeds for effect in section.primary.values())
            number = f"{seeds[0]} to {seeds[-1]} seeds" if seeds[0] < seeds[-1] else seeds_text(seeds[0])
            model = str(about["model"]).split(" (")[0]
            ours.append(f"{about['data']}, asked {', '.join(section.averaged)}, {model}, {number}")
        return f"{setting}: {' and '.join(ours)}; the paper: {PAPERS[setting]}"

    def score(self, setting: str, case: str, objective: str) -> float | None:
        section = self._sections[setting][case]
        temperature = self.temperature(setting)
        effect = section.accuracy(objective, temperature) if objective in section.scores else None
        return 100 * effect.value if effect else None

    def difference(self, setting: str, case: str, a: str, b: str) -> Difference | None:
        section = self._sections[setting][case]
        temperature = self.temperature(setting)
        effect = section.difference(a, temperature, against=b)
        if effect is None:
            return None
        if REFERENCE in (a, b) and BASE not in (a, b):
            decided = section.decided(a if b == REFERENCE else b, temperature)
        else:
            decided = max(effect.p, effect.p_variance) < LEVEL
        error = 100 * (effect.high - effect.low) / (2 * 1.96)
        return Difference(100 * effect.value, error, decided)

    def focus(self, setting: str) -> FocusPath | None:
        """A results file keeps some steps of a run: the early one is the kept step nearest to the fifth."""
        self.asked.append(setting)
        for section in self._sections.get(setting, {}).values():
            records = [cell["training"] for cell in section.cells("deft") if "focus" in cell.get("training", {})]
            steps: list[float] = records[0]["step"] if records else []
            if len(steps) > 2:
                means = [math.fsum(values) / len(records) for values in zip(*(record["focus"] for record in records))]
                early = min(range(1, len(steps) - 1), key=lambda place: abs(steps[place] - 5))
                return FocusPath(means[0], means[early], means[-1], steps=round(steps[early]) - 1)
        return None


def ledger(found: Sequence[Section], plan: Plan) -> dict[str, dict[str, str]]:
    """By claim: our verdict and its numbers ("" where nothing was measured), and why it is not the paper's number.

    ``best`` is the verdict with each objective at its own best temperature.
    """
    entries: dict[str, dict[str, str]] = {}
    for claim in CLAIMS:
        board = StudyBoard(found, plan)
        finding = claim.check(board)
        asked = list(dict.fromkeys(board.asked))
        lacking = [setting for setting in asked if not board.cases(setting)]
        differs = ". ".join(board.differs(setting) for setting in asked if setting not in lacking)
        if finding is None:
            why = (
                f"no cells yet: {', '.join(lacking)}"
                if lacking
                else ("an objective of the sentence has no cells yet, or its score is left out")
            )
            if not asked:
                why = "rests on token tables, which are not among the committed results"
            entries[claim.name] = {"verdict": "", "because": why, "best": "", "differs": differs}
        else:
            other = claim.check(StudyBoard(found, plan, best=True))
            best = f"{other.verdict}: {other.because}" if other else ""
            entries[claim.name] = {"verdict": finding.verdict, "because": finding.because, "best": best,
                                   "differs": differs}  # fmt: skip
    return entries


def ledger_block(entries: Mapping[str, Mapping[str, str]]) -> str:
    """The generated part of docs/claims.md: every claim with the paper's verdict and ours."""
    rows: list[list[str]] = []
    paper = PaperBoard()
    for claim in CLAIMS:
        printed, ours = claim.check(paper), entries[claim.name]
        assert printed is not None
        mine = f"**{ours['verdict']}**: {ours['because']}" if ours["verdict"] else f"not measured ({ours['because']})"
        verdict, _, because = ours["best"].partition(": ")
        rows.append([
            f"`{claim.name}`: {claim.reading}", f"**{printed.verdict}**: {printed.because}", mine,
            f"**{verdict}**: {because}" if verdict else "", ours["differs"] if ours["verdict"] else "",
        ])  # fmt: skip
    done = sum(bool(entry["verdict"]) for entry in entries.values())
    header = ["claim, as it is read", "the paper's numbers", "ours, at the paper's temperature",
              "ours, each at its best temperature", "not comparable because"]  # fmt: skip
    return f"{done} of {len(CLAIMS)} claims have cells in the study so far.\n\n{table(header, rows)}"


# --- evidence ---------------------------------------------------------------------------------------------------------


def evidence(found: Sequence[Section], plan: Plan, earlier: Sequence[Record]) -> list[Record]:
    """The rows of `deftune.comparison.evidence`: the study's, those from before it, and the paper's.

    A row from before the study has ``until``, the regime of the study that replaces the row.
    """
    regimes = {section.regime for section in found if section.primary}
    rows = [row for section in found if not plan.is_variant(section.regime) for row in section_rows(section, plan)]
    for row in earlier:
        if row.get("until") not in regimes:
            rows.append({key: value for key, value in row.items() if key != "until"})
    return rows + paper_rows()


MEASURES = (BEST, None), (GREEDY, 0.0), (HOT, 1.0)
LEAST_SEEDS = 2  # of a row at one learning rate
BELOW_UNTUNED = "all tuned models were below the untuned model"


def section_rows(section: Section, plan: Plan) -> Iterator[Record]:
    about = plan.about(section)
    tuned = [effect.value for name in section.objectives if (effect := section.accuracy(name, None))]
    untuned = section.accuracy(BASE, None) if BASE in section.scores else None
    note: Record = {"note": BELOW_UNTUNED} if untuned and untuned.value > max(tuned, default=0.0) else {}
    more: Record = {}
    if plan.teaches_nothing(section):
        note, more = {"note": "no tuned model was above a constant answer"}, {"counts": False}
    base = next((cell["held_out"] for cell in section.cells(BASE) if "held_out" in cell), None)
    about_all: Record = {
        "regime": about["kind"], "model": about["model"], "data": about["data"], "task": ", ".join(section.averaged),
        "base_p": base and round(base["p"][0], 2),
        "base_concentration": base and round(base["concentration"][0], 2), "against": REFERENCE, "source": "study",
        "where": "docs/study/results.md",
    }  # fmt: skip
    for name in section.primary:
        for measure, temperature, rate in shown_differences(section):
            pair = section.pair(name, temperature, rate=rate)
            effect = section.difference(name, temperature, rate=rate)
            if not pair or not effect or (rate is not None and effect.seeds < LEAST_SEEDS):
                continue
            mine = pair[0]
            rates = sorted({option.learning_rate for option in mine.chosen if option.learning_rate is not None})
            value, low, high = effect.points
            score = sum(float(mine.columns[column].mean()) for column in section.averaged) / len(section.averaged)
            yield {
                **about_all, "objective": name, "measure": measure, "difference": value, "low": low, "high": high,
                "score": in_points(score), "seeds": effect.seeds, "learning_rates": rates,
                **({"p_holm": section.holm(temperature)[name]} if rate is None else {}),
                "p_variance": round(effect.p_variance, 4), **(note if measure == BEST else {}), **more,
            }  # fmt: skip


def shown_differences(section: Section) -> Iterator[tuple[str, float | None, float | None]]:
    """(measure, temperature, learning rate) of the rows of each objective; the rate is None where it is chosen.

    With several rates to choose from only the best temperature has a chosen one: greedy answers and those at T = 1 are
    compared at each rate. Rows at one rate are no tests of the plan, so they have no p-value after Holm.
    """
    several = len(section.open_rates) > 1
    for measure, temperature in MEASURES[:1] if several else MEASURES:
        yield measure, temperature, None
    for rate in section.rates:
        if several or rate not in section.open_rates:
            yield from ((measure, temperature, rate) for measure, temperature in MEASURES[1:])


def paper_rows() -> list[Record]:
    rows: list[Record] = []
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
