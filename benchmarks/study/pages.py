"""The study's pages: the generated parts of docs/study/results.md, README.md and docs/claims.md, figures and evidence.

Every number comes from the committed results (`cells`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from deftune.artifacts.files import write_atomic
from deftune.comparison.figures import plot_rates, plot_temperatures
from deftune.comparison.grid import BASE
from deftune.comparison.show import MOST_CUT
from deftune.comparison.tables import LEVEL, escape_markdown
from deftune.evaluation.crossed import crossed

from . import FOLDER
from .cells import Record, Study, read_study, seconds_of
from .effects import ORDER, REFERENCE, Effect, Section, in_points, sections
from .ledger import evidence, ledger, ledger_block
from .plan import Plan, wanted_text
from .tables import (
    code,
    cost_tables,
    entropy_text,
    form_table,
    points,
    primary_table,
    rate_differences,
    rate_table,
    rate_text,
    rerun_difference,
    rerun_table,
    seeds_text,
    series_table,
    table,
    temperature_table,
    token_table,
    verdict,
    wrapped,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IMAGES = Path("docs/images")
PAGES = {"results": Path("docs/study/results.md"), "study": Path("README.md"), "ledger": Path("docs/claims.md")}
"""By marker, the page that has it."""
EVIDENCE = Path("src/deftune/comparison/evidence.json")
LEDGER = Path("src/deftune/paper/ledger.json")
HEADLINE = (REFERENCE, "deft", "deft | floor(0.2)")
GREEDY_WITHIN, HOT_ABOVE = 1.0, 5.0  # points: question 4 of the plan


# --- answers ----------------------------------------------------------------------------------------------------------


def answers(section: Section, plan: Plan) -> list[str]:
    """The answers of a regime in sentences: what is decided, then the objectives of the plan's first tier."""
    if not section.primary:
        return [f"**{section.regime}**: no cell to compare with NLL yet."]
    by: dict[str, list[str]] = {}
    for name, effect in section.primary.items():
        by.setdefault(verdict(section, name), []).append(f"{code(name)} {points(effect)}")
    seeds = max(effect.seeds for effect in section.primary.values())
    verdicts = {"above NLL": "Above NLL", "below NLL": "Below NLL",
                "not decided": "Not decided"}  # fmt: skip
    texts = [f"{title}: {', '.join(by[key])}" for key, title in verdicts.items() if key in by]
    several = len(section.open_rates) > 1
    rates = f"learning rate{'s' * several} {', '.join(f'{rate:g}' for rate in section.open_rates)}"
    lines = [
        f"**{section.regime}, each at its best temperature{' and learning rate' * several}** "
        f"({plan.about(section)['model']}, up to {seeds_text(seeds)}, {rates}), minus NLL in points. "
        f"{'. '.join(texts)}."
    ]
    if plan.teaches_nothing(section):
        lines.append(f"**{section.regime}: no knowledge shown**: {constant_text(section, plan)} A difference at T = 1 "
                     "tells how often a sampled answer keeps its form.")  # fmt: skip
    for title, temperature in (("greedy", 0.0), ("T = 1", 1.0)):
        if temperature in section.temperatures:
            shown = [name for name in ORDER if name in section.primary]
            found = [(name, section.difference(name, temperature)) for name in shown]
            if texts := [f"{code(name)} {points(effect)}" for name, effect in found if effect]:
                lines.append(f"**{section.regime}, {title}**, minus NLL: {', '.join(texts)}.")
    for rate in section.rates:
        if rate not in section.open_rates and (text := rate_answer(section, rate, ORDER)):
            lines.append(f"**{section.regime}, learning rate {rate:g}**: {text}")
    return lines


def rate_answer(section: Section, rate: float, names: Sequence[str], least: int = 1) -> str:
    """Objectives minus NLL at a learning rate that not all seeds have; "" where none has ``least`` seeds there."""
    texts: list[str] = []
    seeds = set[int]()
    for name in names:
        found = [(section.difference(name, t, rate=rate), how) for how, t in (("greedily", 0.0), ("at T = 1", 1.0))]
        if shown := [f"{points(effect)} {how}" for effect, how in found if effect and effect.seeds >= least]:
            texts.append(f"{code(name)} {', '.join(shown)}")
            seeds |= {effect.seeds for effect, _ in found if effect}
    if not texts:
        return ""
    many = seeds_text(min(seeds)) if len(seeds) == 1 else f"{min(seeds)} to {seeds_text(max(seeds))}"
    return f"minus NLL at the same rate, {many}: {'; '.join(texts)}."


def constant_text(section: Section, plan: Plan) -> str:
    """That the tuned models are no better than a constant answer."""
    constant, best = plan.constant_score(section), max(section.best_scores.values())
    assert constant is not None
    return (f"the most frequent right answer of each task, given to every question, would score {100 * constant:.1f}; "
            f"the best tuned objective scores {100 * best:.1f}.")  # fmt: skip


def meets(section: Section, objective: str) -> tuple[bool, bool]:
    """Whether an objective meets question 4 in a regime: by its estimates, and with its intervals included."""
    cold, hot = section.difference(objective, 0.0), section.difference(objective, 1.0)
    if cold is None or hot is None:
        return False, False
    first = 100 * cold.value >= -GREEDY_WITHIN and 100 * hot.value >= HOT_ABOVE
    return first, 100 * cold.low >= -GREEDY_WITHIN and 100 * hot.low >= HOT_ABOVE


def helped(section: Section) -> tuple[Effect, Effect] | None:
    """The scores of the best tuned objective and of the untuned model; None where one is missing."""
    base = section.accuracy(BASE, None) if BASE in section.scores else None
    found = [effect for name in section.objectives if (effect := section.accuracy(name, None))]
    return (max(found, key=lambda effect: effect.value), base) if base and found else None


def left_out_text(section: Section) -> str:
    """What the untuned model scores where that is left out: " (48.8 greedily, 53.5 at T = 1)"; else ""."""
    kinds = (("greedily", 0.0), ("at T = 1", 1.0))
    texts = [f"{100 * effect.value:.1f} {how}" for how, t in kinds if (effect := section.left_out_score(t))]
    return f" ({', '.join(texts)})" if texts else ""


def tokens_text(section: Section) -> str:
    """The limits of tokens, where the untuned model had another one; else ""."""
    theirs, ours = section.base_section.evaluation.max_new_tokens, section.evaluation.max_new_tokens
    if BASE not in section.scores or theirs == ours:
        return ""
    return f"the untuned model's answers had at most {theirs:,} tokens, those of the tuned models {ours:,}."


def cut_text(section: Section) -> str:
    return f"{section.base_cut:.0%} of its answers were cut off at the limit of tokens"


def default_answer(sections: Sequence[Section], plan: Plan) -> list[str]:
    """Question 4: an objective within 1 point of NLL greedily and 5 points above NLL at T = 1, in every regime."""
    rule = f"within {GREEDY_WITHIN:g} point of NLL greedily and at least {HOT_ABOVE:g} points above NLL at T = 1"
    judged = [s for s in sections if s.primary and {0.0, 1.0} <= set(s.temperatures)]
    if not judged:
        return [f"**Default** ({rule}): no regime has greedy answers and answers at T = 1 yet."]
    lines: list[str] = []
    counted: list[set[str]] = []
    for section in judged:
        found = {name: meets(section, name) for name in section.primary}
        names = [f"{code(name)} ({'intervals included' if sure else 'by the estimates alone'})"
                 for name, (yes, sure) in found.items() if yes]  # fmt: skip
        scores = helped(section)
        trained = "the untuned model was not measured"
        if section.base_cut > MOST_CUT:
            trained = f"the untuned model's score is left out ({cut_text(section)})"
        if plan.teaches_nothing(section):
            trained = f"training is not shown to help: {constant_text(section, plan)[:-1]}"
        elif scores:
            better = scores[0].value > scores[1].value
            trained = (f"training {'helps' if better else 'does not help'}: {points(scores[0], sign=False)} with the "
                       f"best objective, {points(scores[1], sign=False)} untuned")  # fmt: skip
        if scores and scores[0].value > scores[1].value and not plan.teaches_nothing(section):
            counted.append({name for name, (yes, _) in found.items() if yes})
        lines.append(f"**Default, {section.regime}** ({rule}): {', '.join(names) or 'no objective'}; {trained}.")
    if not counted:
        lines.append("**Default**: in no regime here is training known to help, so the plan's rule recommends nothing.")
    else:
        common = set[str].intersection(*counted)
        named = dict.fromkeys(name for section in judged for name in section.primary)
        names = ", ".join(code(name) for name in named if name in common)
        lines.append(f"**Default**, over the {len(counted)} regime{'s' * (len(counted) > 1)} where training helps: "
                     f"{names or 'no objective meets the rule'}.")  # fmt: skip
    return lines


# --- limits -----------------------------------------------------------------------------------------------------------


def environment_text(about: Mapping[str, Any]) -> str:
    """GPU or CPU, versions and commit of a cell's environment."""
    versions: Mapping[str, str] = about.get("versions", {})
    where = [", ".join(about.get("gpus", [])) or "CPU"]
    where += [f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions]
    return ", ".join([*where, f"commit {((about.get('git') or {}).get('commit') or 'not recorded')[:12]}"])


def environments_text(study: Study) -> str:
    """What the cells of one comparison were run with, where they differ: such cells are paired with each other."""
    counts = Counter(cell["environment"] for cell in study.cells.values() if cell["state"] == "finished")
    if len(counts) < 2:
        return ""
    parts = [f"{number} with {environment_text(study.environments[place])}" for place, number in sorted(counts.items())]
    return f"- {', '.join(study.config['regimes'])}: cells of different environments are paired: {'; '.join(parts)}."


def rates_text(study: Study) -> str:
    """Where the cells of different learning rates have different environments, so that a version may act as a rate."""
    used: dict[float, Counter[int]] = {}
    for cell in study.cells.values():
        if cell["state"] == "finished" and cell["learning_rate"] is not None:
            used.setdefault(cell["learning_rate"], Counter())[cell["environment"]] += 1
    usual = {rate: counts.most_common(1)[0][0] for rate, counts in sorted(used.items())}
    if len(set(usual.values())) < 2:
        return ""
    parts = [f"{rate:g} ({environment_text(study.environments[place])})" for rate, place in usual.items()]
    return (
        f"- {', '.join(study.config['regimes'])}: learning rates were run with different versions, so that a "
        f"difference between two rates may be one between versions; most cells of each: {'; '.join(parts)}."
    )


def versions_text(study: Study) -> str:
    """The versions of the tasks that graded the answers, where they differ: another version may give other verdicts."""
    finished = [cell for cell in study.cells.values() if cell["state"] == "finished"]
    counts = Counter(
        ", ".join(f"{task} {version}" for task, version in sorted(cell.get("task_versions", {}).items()))
        for cell in finished
    )
    if len(counts) < 2:
        return ""
    parts = [
        f"{number} by {versions or 'a version that was not recorded'}" for versions, number in sorted(counts.items())
    ]
    return f"- {', '.join(study.config['regimes'])}: cells graded by different versions are paired: {'; '.join(parts)}."


def variance_intervals(found: Sequence[Section]) -> list[str]:
    """The interval of each primary difference of several seeds by the analysis of variance, in points."""
    lines: list[str] = []
    for section in found:
        for name, effect in section.primary.items():
            if effect.seeds > 1 and (pair := section.pair(name, None)):
                interval = crossed(pair[0].minus(pair[1], section.averaged)).interval
                low, high = in_points(interval.low), in_points(interval.high)
                lines.append(f"{section.regime} {code(name)} [{low:+.1f}, {high:+.1f}] ({effect.seeds} seeds)")
    return lines


def limits(studies: Sequence[Study], found: Sequence[Section], plan: Plan) -> str:
    lines = [f"- {plan.about(s)['model']} only, in the regime {s.regime}." for s in found]
    lines += [f"- {s.regime}: the untuned model's score{left_out_text(s)} is left out: {cut_text(s)}."
              for s in found if s.base_cut > MOST_CUT]  # fmt: skip
    lines += [f"- {s.regime}: {tokens_text(s)}" for s in found if tokens_text(s)]
    lines += [
        line
        for study in studies
        for line in (environments_text(study), rates_text(study), versions_text(study))
        if line
    ]
    few = [f"{s.regime} {code(n)}" for s in found for n, e in s.primary.items() if e.seeds < 3]
    if few:
        lines.append(f"- Fewer than 3 seeds, so that the interval says little about other seeds: {', '.join(few)}.")
    for tier in plan.tiers:
        missing = [wanted_text(cell) for cell in plan.missing(tier, studies)]
        total = missing and (", ".join(missing[:6]) + (f" and {len(missing) - 6} more" if len(missing) > 6 else ""))
        if missing:
            lines.append(f"- Tier {tier['name']}, cells missing: {escape_markdown(str(total))}.")
    lines.append("- The intervals hold for the seeds that were drawn more than for others: with S seeds the bootstrap "
                 "counts (S - 1) / S of their variance, so a third is missing with 3 and half with 2.")  # fmt: skip
    if intervals := variance_intervals(found):
        lines.append("- An analysis of variance, as in `deftune compare`, counts all of the variance of seeds. With it "
                     f"the differences at the best temperature are in {'; '.join(intervals)}.")  # fmt: skip
    lines.append("- The choice of temperature and rate is not drawn again in a resample.")
    return "\n".join(lines)


def cell_list(studies: Sequence[Study]) -> str:
    """Every cell with its environment, cost and command."""
    lines: list[str] = []
    for study in studies:
        for name, cell in sorted(study.cells.items()):
            about = study.environments[cell["environment"]] if study.environments else {}
            spent = f", {seconds_of(cell):.0f} s" if "cost" in cell else ""
            chosen = "".join(f", {key} {value}" for key, value in cell.get("train", {}).items())
            lines.append(f"# {name}: {cell['state']}{spent}; {environment_text(about)}{chosen}\n{cell['command']}")
    return (
        "<details><summary>The command of every cell</summary>\n\n```bash\n" + "\n".join(lines) + "\n```\n\n</details>"
    )


# --- figures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Picture:
    """A figure of a section: file, caption, title, and the function that draws the figure."""

    file: str
    caption: str
    title: str
    plot: Callable[[], Figure]

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        figure = self.plot()
        figure.suptitle(self.title, fontsize=8)
        figure.savefig(folder / self.file, dpi=200, facecolor="white", metadata={"Software": None})


def pictures(section: Section, plan: Plan) -> list[Picture]:
    """The score against temperature, and against learning rate, where there are several."""
    about, stem, rate = plan.about(section), f"study_{section.regime}_{section.title}", rate_text(section)
    title = f"{about['model']}, {about['data']}"
    found: list[Picture] = []
    if len(section.temperatures) > 1:
        caption = f"Score against sampling temperature, {rate}"
        found.append(Picture(f"{stem}_temperature.png", caption, f"{title}; {rate}", lambda: temperature_plot(section)))
    if len(section.rates) > 1:
        caption = "Score against learning rate, greedy and at temperature 1"
        found.append(Picture(f"{stem}_rate.png", caption, title, lambda: plot_rates(rate_lines(section))))
    return found


def temperature_plot(section: Section) -> Figure:
    """The panels of `temperature_lines` with one scale."""
    figure = plot_temperatures(temperature_lines(section))
    ends = [end for axis in figure.axes for end in axis.get_ylim()]
    for axis in figure.axes:
        axis.set_ylim(min(ends), max(ends))
    return figure


def temperature_lines(section: Section) -> list[Record]:
    """The lines of the temperature figure: panel, objective, temperature, score and interval, at one rate."""
    lines: list[Record] = []
    rest = [name for name in section.objectives if name not in HEADLINE]
    panels = {
        "NLL, DEFT, DEFT with a floor": [BASE, *HEADLINE],
        "other objectives of the paper": [REFERENCE, *(name for name in rest if name in ORDER)],
        "candidates and controls": [REFERENCE, *(name for name in rest if name not in ORDER)],
    }
    for panel, names in panels.items():
        for name in names if len(names) > 1 else ():
            for temperature in section.temperatures:
                rate = None if name == BASE else section.reference_rate
                effect = section.accuracy(name, temperature, rate) if name in section.scores else None
                if effect:
                    lines.append({"regime": panel, "objective": name, "temperature": temperature,
                                  "score": effect.value, "low": effect.low, "high": effect.high})  # fmt: skip
    return lines


def rate_lines(section: Section) -> list[Record]:
    """The lines of the learning-rate figure: a panel for each temperature."""
    lines: list[Record] = []
    for temperature in (t for t in (0.0, 1.0) if t in section.temperatures):
        for name in section.objectives:
            for rate in section.rates:
                if effect := section.accuracy(name, temperature, rate):
                    lines.append({"temperature": temperature, "objective": name, "learning_rate": rate,
                                  "score": effect.value, "low": effect.low, "high": effect.high})  # fmt: skip
    return lines


# --- pages ------------------------------------------------------------------------------------------------------------

NONE_YET = "No cell of the study is committed yet; the [plan](plan.md) says which will be run."


def heading(section: Section, plan: Plan) -> str:
    about = plan.about(section)
    tasks = ", ".join(escape_markdown(column) for column in section.averaged)
    return f"{section.regime}: {about['model']} tuned on {about['data']}, asked {tasks}"


def results_page(studies: Sequence[Study], found: Sequence[Section], plan: Plan) -> str:
    """The generated part of docs/study/results.md."""
    if not found:
        return NONE_YET
    regimes = [section for section in found if not plan.is_variant(section.regime)]
    sentences = [line for section in found for line in answers(section, plan)] + default_answer(regimes, plan)
    planned = sum(len(list(plan.wanted(tier))) for tier in plan.tiers)
    missing = sum(len(plan.missing(tier, studies)) for tier in plan.tiers)
    pages = [
        f"{planned - missing} of {planned} planned cells are finished; [Limits](#limits) has the missing ones by tier.",
        "## Answers", "\n".join(wrapped(f"- {line}", "  ") for line in sentences), wrapped(READING),
    ]  # fmt: skip
    for section in found:
        at = rate_text(section)
        if len(section.open_rates) > 1:
            at = "each objective at its own learning rate (chosen on the other half of the items)"
        pages += [f"## {heading(section, plan)}", primary_table(section),
                  f"Score and difference from NLL at each temperature, {at}:", temperature_table(section)]  # fmt: skip
        pages += [f"![{picture.caption}](../images/{picture.file})" for picture in pictures(section, plan)]
        if len(section.rates) > 1:
            pages += ["Score by learning rate, each at its best temperature:", rate_table(section),
                      "Minus NLL at the same learning rate, with the number of seeds that both have there:",
                      rate_differences(section)]  # fmt: skip
        if tokens := token_table(section):
            pages += [f"Held-out tokens, {rate_text(section)}, means over seeds:", tokens]
            pages += [text] if (text := entropy_text(section, found, plan)) else []
        form = "; ".join(filter(None, [f"Form of the answers, {rate_text(section)}", tokens_text(section).rstrip(".")]))
        pages += [wrapped(f"{form}:"), form_table(section)]
    for title, regimes_of in plan.series.items():
        if text := series_table(found, regimes_of):
            pages += [f"## By {title}", text]
    if again := rerun_table(found):
        pages += ["## Cells that were run again", again]
    pages += ["## Cost", cost_tables(studies, plan), "## Limits", limits(studies, found, plan), "## Cells",
              cell_list(studies)]  # fmt: skip
    return "\n\n".join(pages)


READING = (
    "Numbers are per cent or points with 95% intervals in brackets, by a bootstrap over items and seeds. *Score* is at "
    "the temperature and learning rate that were chosen on the other half of the items. *Minus NLL* is paired by item "
    "and seed, on the cells that both objectives have; *by seed* has its value for each seed. *p (Holm)* is over the "
    f"objectives of a regime, by the bootstrap; a difference is decided if it is below {LEVEL:g}, and so is the "
    "p-value of an analysis of variance, which counts all of the variance of seeds. *Fall* is the score minus the "
    "score at T = 1. *Explicit* answers state their result "
    "(boxed, marked or in words). *Conflicts* are confident conflicts, a share of the held-out tokens; *likeliest* is "
    "the share of tokens that are the model's first choice."
)
README_NONE = (
    "A [study](docs/study/plan.md) will decide. Until then, test on your own data with "
    "[`deftune compare`](docs/compare.md)."
)


def readme_block(found: Sequence[Section], plan: Plan) -> str:
    """The generated part of README.md: the picture of the first regime, and its numbers."""
    section = next((s for s in found if s.primary and len(s.temperatures) > 1), None)
    if section is None:
        return README_NONE
    shown = [name for name in HEADLINE[1:] if name in section.primary]
    image = pictures(section, plan)[0].file
    lines = [f"![Accuracy against sampling temperature for {', '.join(HEADLINE)}](docs/images/{image})", ""]
    every = [s for s in found if s.primary and not plan.is_variant(s.regime)]
    regimes = [s for s in every if s is section or (BASE in s.scores and not plan.teaches_nothing(s))]
    rows: list[list[str]] = []
    for one in regimes:
        for title, temperature in (("greedy", 0.0), ("T = 1", 1.0)):
            if temperature in one.temperatures:
                plain = [one.accuracy(name, temperature) if name in one.scores else None for name in (BASE, REFERENCE)]
                differences = [one.difference(name, temperature) for name in shown]
                rows.append([f"{plan.about(one)['data']}, {title}", *(points(effect, sign=False) for effect in plain),
                             *(points(effect) for effect in differences)])  # fmt: skip
    lines += [table(["", "untuned", code(REFERENCE), *(f"{code(name)} minus NLL" for name in shown)], rows), ""]
    models = [f"{plan.about(one)['data']}: {plan.about(one)['model']}, {', '.join(one.averaged)}, {spread(one)}"
              for one in regimes]  # fmt: skip
    limits = [f"{plan.about(one)['data']}: {text}" for one in regimes if (text := tokens_text(one))]
    for one in regimes:
        for rate in one.rates:
            if rate not in one.open_rates and (text := rate_answer(one, rate, shown, least=2)):
                limits.append(f"{plan.about(one)['data']}, learning rate {rate:g}: {text}")
        if effect := rerun_difference(one, REFERENCE, 1.0):
            limits.append(f"{plan.about(one)['data']}: a cell of NLL that was run again, by a newer version, differs "
                          f"from the first run by {points(effect)} at T = 1.")  # fmt: skip
    lines.append(wrapped(
        f"*{'. '.join(models)}. Points, {readme_rates(regimes)}. The 95% intervals are over items and seeds; "
        f"they leave out half (two seeds) or a third (three) of the variance between seeds. A difference is on the "
        f"seeds that both have.*"
    ))  # fmt: skip
    if others := [f"{plan.about(s)['data']} with {str(plan.about(s)['model']).split(' (')[0]}" for s in every
                  if s not in regimes]:  # fmt: skip
        limits.append(f"{' and '.join(others)}: no tuned model is shown to have learnt the task, so that the scores "
                      "decide little ([why](docs/choosing.md)).")  # fmt: skip
    lines += ["", *(wrapped(f"- {text[0].upper()}{text[1:]}", "  ") for text in limits), ""]
    lines.append(wrapped(
        "[All results](docs/study/results.md) of the [study](docs/study/plan.md); [`deftune advise MODEL "
        "DATA`](docs/advise.md) applies them to your data."
    ))  # fmt: skip
    return "\n".join(lines)


def readme_rates(regimes: Sequence[Section]) -> str:
    """The learning rates of the headline's scores: "learning rate 1e-05", or those that are chosen from."""
    rates = sorted({rate for section in regimes for rate in section.open_rates})
    if len(rates) == 1:
        return f"learning rate {rates[0]:g}"
    several = any(len(section.open_rates) > 1 for section in regimes)
    shown = ", ".join(f"{rate:g}" for rate in rates)
    return f"learning rate chosen from {shown}" if several else f"one learning rate for each model ({shown})"


def spread(section: Section) -> str:
    """The seeds of the differences from NLL of `HEADLINE`: "2 seeds", or "2 to 3 seeds"."""
    seeds = sorted({section.primary[name].seeds for name in HEADLINE if name in section.primary})
    return seeds_text(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds_text(seeds[-1])}"


# --- files ------------------------------------------------------------------------------------------------------------


def put_between(text: str, marker: str, block: str, where: Path) -> str:
    """The text with ``block`` between ``<!-- marker -->`` and ``<!-- /marker -->``.

    >>> put_between("a <!-- x -->old<!-- /x --> b", "x", "new", Path("page.md"))
    'a <!-- x -->\\nnew\\n<!-- /x --> b'
    """
    first, last = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    if text.count(first) != 1 or text.count(last) != 1:
        raise ValueError(f"{where}: needs {first} and {last}, once each; the report is written between them")
    head, _, rest = text.partition(first)
    _, _, tail = rest.partition(last)
    return f"{head}{first}\n{block}\n{last}{tail}"


def report(root: Path, *, check: bool = False) -> list[Path]:
    """Write the study's pages, figures and evidence table below ``root``, the checkout.

    Args:
        root: the checkout of the repository.
        check: write nothing.

    Returns:
        The files that were not what the committed results say, and now are (with ``check``: still are not). Figures are
        drawn anew by each call without ``check``, and with it they must exist.
    """
    studies = [read_study(path) for path in sorted((root / FOLDER / "results").glob("*.json"))]
    plan = Plan(root / FOLDER / "plan.yaml")
    found = plan.arranged(sections(studies))
    changed: list[Path] = []
    for picture in (picture for section in found for picture in pictures(section, plan)):
        if not check:
            picture.write(root / IMAGES)
        elif not (root / IMAGES / picture.file).is_file():
            changed.append(IMAGES / picture.file)
    earlier = yaml.safe_load((root / FOLDER / "earlier.yaml").read_text(encoding="utf-8"))
    claims = ledger(found, plan)
    blocks = {
        "results": results_page(studies, found, plan), "study": readme_block(found, plan),
        "ledger": ledger_block(claims),
    }  # fmt: skip
    files = {EVIDENCE: evidence(found, plan, earlier), LEDGER: claims}
    texts = {path: json.dumps(content, indent=1) + "\n" for path, content in files.items()}
    for marker, page in PAGES.items():
        texts[page] = put_between((root / page).read_text(encoding="utf-8"), marker, blocks[marker], page)
    for path, text in texts.items():
        if not (root / path).is_file() or (root / path).read_text(encoding="utf-8") != text:
            changed.append(path)
            if not check:
                write_atomic(root / path, text)
    return changed
