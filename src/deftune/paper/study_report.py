"""The study's report: tables and sentences for docs/study/results.md and README.md, figures, and the evidence table.

Every number comes from the committed results (`deftune.paper.study_cells`).
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deftune.comparison.grid import BASE
from deftune.comparison.tables import LEVEL, escape_markdown
from deftune.paper.board import REGIMES, TUNED, PaperBoard
from deftune.paper.study_cells import Record, Study
from deftune.paper.study_effects import MOST_CUT, ORDER, REFERENCE, Effect, Section, effect_of, subtract
from deftune.paper.study_figures import figure_names
from deftune.paper.study_plan import HEADLINE, Plan, rate_text, rates_text, wanted_text

GREEDY_WITHIN, HOT_ABOVE = 1.0, 5.0  # points: question 4 of the plan
EXPLICIT = ("boxed", "marked", "stated", "text")  # how an answer that states itself is found


# --- text -------------------------------------------------------------------------------------------------------------


def code(objective: str) -> str:
    return f"`{objective}`"


def points(effect: Effect | None, *, sign: bool = True) -> str:
    """A value in points with its interval."""
    if effect is None:
        return "-"
    value, low, high = (x + 0.0 for x in (round(p, 1) for p in effect.points))
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]" if sign else f"{value:.1f} [{low:.1f}, {high:.1f}]"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    r"""A Markdown table; a bar inside of a cell is escaped.

    >>> print(table(["a"], [["`deft | floor(0.2)`"]]))
    | a |
    |---|
    | `deft \| floor(0.2)` |
    """
    lines = [[re.sub(r"(?<!\\)\|", r"\|", cell) for cell in row] for row in [header, *rows]]
    texts = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([texts[0], f"|{'---|' * len(header)}", *texts[1:]])


def wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def seeds_text(number: int) -> str:
    return f"{number} seed{'s' * (number != 1)}"


def p_text(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def heading(section: Section, plan: Plan) -> str:
    about = plan.about(section)
    tasks = ", ".join(escape_markdown(column) for column in section.averaged)
    return f"{section.regime}: {about['model']} tuned on {about['data']}, asked {tasks}"


def verdict(section: Section, objective: str) -> str:
    """above / below / not decided, by the primary measure."""
    effect = section.primary[objective]
    if section.holm[objective] >= LEVEL:
        return "not decided"
    return "above NLL" if effect.value > 0 else "below NLL"


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
                "not decided": f"Not decided (p of Holm at least {LEVEL:g})"}  # fmt: skip
    texts = [f"{title}: {', '.join(by[key])}" for key, title in verdicts.items() if key in by]
    lines = [
        f"**{section.regime}, each at its best temperature and learning rate** ({plan.about(section)['model']}, up to "
        f"{seeds_text(seeds)}, learning rates {rates_text(section.rates)}), minus NLL in points. {'. '.join(texts)}."
    ]
    for title, temperature in (("greedy", 0.0), ("T = 1", 1.0)):
        if temperature in section.temperatures:
            shown = [name for name in ORDER if name in section.primary]
            found = [(name, section.difference(name, temperature)) for name in shown]
            texts = [f"{code(name)} {points(effect)}" for name, effect in found if effect]
            lines.append(f"**{section.regime}, {title}**, minus NLL: {', '.join(texts)}.")
    return lines


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


def cut_text(section: Section) -> str:
    return f"{section.base_cut:.0%} of its answers were cut off at the limit of tokens"


def default_answer(sections: Sequence[Section]) -> list[str]:
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
            trained = f"the untuned model's score is not known ({cut_text(section)})"
        if scores:
            better = scores[0].value > scores[1].value
            trained = (f"training {'helps' if better else 'does not help'}: {points(scores[0], sign=False)} with the "
                       f"best objective, {points(scores[1], sign=False)} untuned")  # fmt: skip
        if scores and scores[0].value > scores[1].value:
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


# --- tables -----------------------------------------------------------------------------------------------------------


def seed_values(section: Section, objective: str) -> str:
    """The difference from NLL of every seed, in points."""
    return ", ".join(f"{round(100 * value, 1) + 0.0:+.1f}" for value in section.by_seed(objective))


def primary_table(section: Section) -> str:
    header = ["objective", "seeds", "rates", "chosen", "score", "minus NLL", "by seed", "p (Holm)", "", "fall to T = 1"]
    rows: list[list[str]] = []
    for name in [BASE, *section.objectives] if BASE in section.scores else section.objectives:
        chosen, score = section.chosen(name, None), section.accuracy(name, None)
        if chosen is None or score is None:
            continue
        options = dict.fromkeys(
            f"T={o.temperature:g}" + ("" if o.learning_rate is None else f", {o.learning_rate:g}")
            for o in chosen.options
        )
        rates = {option.learning_rate for _, option in section.scores[name].values} - {None}
        effect = section.primary.get(name)
        rows.append([
            code(name), str(len(chosen.seeds)) if name != BASE else "", str(len(rates)) if name != BASE else "",
            " and ".join(options), points(score, sign=False), points(effect), seed_values(section, name) or "-",
            p_text(section.holm[name]) if effect else "-", verdict(section, name) if effect else "",
            points(section.fall(name)),
        ])  # fmt: skip
    return table(header, rows)


def temperature_table(section: Section) -> str:
    names = [BASE, *section.objectives] if BASE in section.scores else section.objectives
    header = ["objective"]
    for temperature in section.temperatures:
        header += [f"T = {temperature:g}", "minus NLL"]
    rows: list[list[str]] = []
    for name in names:
        row = [code(name)]
        for temperature in section.temperatures:
            row.append(points(section.accuracy(name, temperature), sign=False))
            row.append(points(section.difference(name, temperature)) if name != BASE else "-")
        rows.append(row)
    return table(header, rows)


def rate_table(section: Section) -> str:
    """Score at each learning rate (best temperature of each), largest difference, and the mean over rates."""
    header = ["objective", *(f"{rate:g}" for rate in section.rates), "mean", "best - worst"]
    rows: list[list[str]] = []
    for name in section.objectives:
        found = [section.accuracy(name, None, rate) for rate in section.rates]
        values = [100 * effect.value for effect in found if effect]
        whole = len(values) == len(section.rates)
        ends = [f"{sum(values) / len(values):.1f}", f"{max(values) - min(values):.1f}"] if whole else ["-", "-"]
        rows.append([code(name), *(points(effect, sign=False) for effect in found), *ends])
    return table(header, rows)


def mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def token_table(section: Section) -> str:
    """Held-out tokens at the rate of most cells: means over seeds."""
    header = ["objective", "seeds", "NLL", "mean p", "sum P²", "entropy", "likeliest", "conflicts", "p of end tokens"]
    wrong = any("exchanged" in cell.get("held_out", {}) for cell in section.study.finished(section.regime))
    header += ["p of exchanged answers"] if wrong else []
    rows: list[list[str]] = []
    for name in [BASE, *section.objectives]:
        cells = section.cells(name, None if name == BASE else section.reference_rate)
        found = [cell["held_out"] for cell in cells if "held_out" in cell]
        if found:
            means = [mean(one[key][0] for one in found) for key in ("nll", "p", "concentration", "entropy")]
            shares = [mean(one[key][0] for one in found) for key in ("top1", "conflicts")]
            numbers = [*(number(v, ".3f") for v in means), *(number(v, ".1%") for v in shares)]
            end = number(mean(one["end_p"] for one in found), ".3f")
            last = [number(exchanged_p(cells), ".3f")] if wrong else []
            rows.append([code(name), str(len(found)) if name != BASE else "", *numbers, end, *last])
    return table(header, rows) if rows else ""


def entropy_curve(cells: Iterable[Mapping[str, Any]]) -> dict[float, float]:
    """Mean entropy of the held-out tokens by sampling temperature, over the cells that measured it; 0 at T = 0."""
    found = [cell["held_out"] for cell in cells if "entropies" in cell.get("held_out", {})]
    if not found:
        return {}
    temperatures = set[str].intersection(*(set(one["entropies"]) for one in found))
    curve = {float(t): statistics.mean(one["entropies"][t][0] for one in found) for t in temperatures}
    return dict(sorted({0.0: 0.0, **curve, 1.0: statistics.mean(one["entropy"][0] for one in found)}.items()))


def entropy_text(section: Section, found: Sequence[Section], plan: Plan) -> str:
    """NLL's entropy by temperature, and where it is DEFT's at T = 1; "" where it was not measured."""
    curve = entropy_curve(section.cells(REFERENCE, section.reference_rate))
    of = plan.regimes.get(section.regime, {}).get("variant_of")
    places = [section, *(other for other in found if other.regime == of)]  # where the regime has no DEFT: the other one
    cells = [[c for c in one.cells("deft", section.reference_rate) if "held_out" in c] for one in places]
    tuned = next(filter(None, cells), [])
    if not curve or not tuned:
        return ""
    entropy = statistics.mean(cell["held_out"]["entropy"][0] for cell in tuned)
    text = ", ".join(f"{value:.3f} at T = {t:g}" for t, value in curve.items() if t)
    pairs = itertools.pairwise(curve.items())
    between = [f"between T = {cold:g} and T = {hot:g}" for (cold, low), (hot, high) in pairs if low <= entropy <= high]
    where = next(iter(between), "at no T up to 1")
    return wrapped(f"Mean entropy of the held-out tokens with `nll`: {text}. It is that of `deft` at T = 1 "
                   f"({entropy:.3f}) {where}.")  # fmt: skip


def series_table(found: Sequence[Section], labels: Mapping[str, str]) -> str:
    """Scores over regimes that change one thing, such as the number of epochs; "" while fewer than two have cells."""
    parts = {s.regime: s for regime in labels for s in found if s.regime == regime and s.objectives}
    if len(parts) < 2:
        return ""
    rates = [set(section.rates) for section in parts.values()]
    rate = next(iter(sorted(set[float].intersection(*rates))), None)
    wrong = {r for r, s in parts.items() if any("exchanged" in c.get("held_out", {}) for c in s.study.finished(r))}
    header = ["objective"]
    for regime in parts:
        header += [f"{labels[regime]}: greedy", "T = 1", *(["p of exchanged answers"] if regime in wrong else [])]
    names = dict.fromkeys(name for section in parts.values() for name in section.objectives)
    rows: list[list[str]] = []
    for name in names:
        row = [code(name)]
        for regime, section in parts.items():
            for temperature in (0.0, 1.0):
                known = name in section.scores and temperature in section.temperatures
                row.append(points(section.accuracy(name, temperature, rate) if known else None, sign=False))
            if regime in wrong:
                row.append(number(exchanged_p(section.cells(name, rate)), ".3f"))
        rows.append(row)
    return table(header, rows)


def exchanged_p(cells: Iterable[Mapping[str, Any]]) -> float | None:
    """The mean p of the answers that were exchanged on purpose, over cells."""
    found = [cell.get("held_out", {}).get("exchanged") for cell in cells]
    return mean(one["p"][0] for one in found if one)


def form_table(section: Section) -> str:
    """Form of the answers at the rate of most cells: explicit answers, answers cut off, tokens."""
    header = ["objective"]
    for temperature in section.temperatures:
        header += [f"explicit, T = {temperature:g}", "cut off", "tokens"]
    rows: list[list[str]] = []
    for name in [BASE, *section.objectives] if section.cells(BASE) else section.objectives:
        row = [code(name)]
        cells = section.cells(name, None if name == BASE else section.reference_rate)
        for temperature in section.temperatures:
            found = [
                task[f"{temperature:g}"] for cell in cells for task in cell["scores"][section.title].values()
                if f"{temperature:g}" in task
            ]  # fmt: skip
            shares: list[float | None] = []
            for key, wanted in (("extracted", EXPLICIT), ("finished", ("length",))):
                total = sum(sum(one[key].values()) for one in found)
                shares.append(sum(one[key].get(how, 0) for one in found for how in wanted) / total if total else None)
            row += [number(share, ".1%") for share in shares]
            row.append(number(mean(one["answer_tokens"] for one in found), ".0f"))
        rows.append(row)
    return table(header, rows)


def rerun_table(found: Sequence[Section]) -> str:
    """Cells that were run a second time: their scores, and the difference of the two runs with its interval."""
    rows: list[list[str]] = []
    for section in found:
        for name, cell in section.study.cells.items():
            if cell["regime"] != section.regime:
                continue
            for again in cell.get("reruns", ()):
                twins = [
                    Section(Study(section.study.config, [], section.study.items, {name: one}), section.regime,
                            section.title) for one in (cell, again)
                ]  # fmt: skip
                for temperature in section.temperatures:
                    first, second = (twin.chosen(cell["objective"], temperature) for twin in twins)
                    if first and second:
                        rows.append([
                            escape_markdown(name), f"{temperature:g}",
                            *(points(twin.accuracy(cell["objective"], temperature), sign=False) for twin in twins),
                            points(effect_of(subtract(second, first))),
                        ])  # fmt: skip
    return table(["cell", "T", "first", "again", "difference"], rows) if rows else ""


# --- cost -------------------------------------------------------------------------------------------------------------


def seconds_of(cell: Record) -> float:
    """Wall seconds of a cell: training steps, token table, answers, and the rest."""
    cost = cell["cost"]
    return sum(cost[name] for name in ("steps_seconds", "tokens_seconds", "eval_seconds", "overhead_seconds"))


def wall_seconds(cells: Iterable[Record]) -> float:
    """Seconds in which at least one of the cells ran.

    >>> cost = {"steps_seconds": 6, "tokens_seconds": 1, "eval_seconds": 2, "overhead_seconds": 1}
    >>> wall_seconds([{"time": 10, "cost": cost}, {"time": 14, "cost": cost}, {"time": 40, "cost": cost}])
    24.0
    """
    total, end = 0.0, float("-inf")
    for start, stop in sorted((cell["time"] - seconds_of(cell), cell["time"]) for cell in cells):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def first_sentence(text: str) -> str:
    """
    >>> first_sentence("OutOfMemoryError: CUDA out of memory. Tried to allocate 44.00 MiB.")
    'OutOfMemoryError: CUDA out of memory.'
    """
    head, stop, _ = text.partition(". ")
    return head + stop.strip()


def cost_tables(studies: Sequence[Study], plan: Plan) -> str:
    """Planned and actual minutes of each tier, then the seconds of a cell on average."""
    done = [cell for study in studies for cell in study.cells.values() if cell["state"] == "finished"]
    rows: list[list[str]] = []
    for tier in plan.tiers:
        mine = [cell for cell in done if plan.tier_of(cell) == tier["name"]]
        missing = len(plan.missing(tier, studies))
        rows.append(
            [tier["name"], f"{tier['minutes']}", str(len(mine)), str(missing), f"{wall_seconds(mine) / 60:.1f}"]
        )
    if beside := [cell for cell in done if not plan.tier_of(cell)]:
        rows.append(["not planned", "", str(len(beside)), "", f"{wall_seconds(beside) / 60:.1f}"])
    first = table(["tier", "minutes planned", "cells", "cells missing", "minutes"], rows)
    names = ("steps_seconds", "eval_seconds", "tokens_seconds", "overhead_seconds")
    parts: dict[str, list[Record]] = {}
    for cell in done:
        parts.setdefault(cell["regime"], []).append(cell)
    each = [
        [regime, str(len(cells)), *(f"{sum(c['cost'][n] for c in cells) / len(cells):.0f}" for n in names),
         f"{max(c['cost']['memory_gib'] for c in cells):.1f}"] for regime, cells in parts.items()
    ]  # fmt: skip
    second = table(["regime", "cells", "steps, s", "answers, s", "token table, s", "overhead, s", "peak GiB"], each)
    failed = [
        f"- {escape_markdown(name)}: {escape_markdown(first_sentence(str(failure.get('error', ''))))}"
        + ("" if cell["state"] == "failed" else " (run again, finished)")
        for study in studies for name, cell in study.cells.items() for failure in cell.get("failures", ())
    ]  # fmt: skip
    failures = "Failures:\n\n" + "\n".join(failed) if failed else "No cell recorded a failure."
    return "\n\n".join([
        first, "Minutes: the time in which at least one cell of the tier ran (cells run beside each other).",
        second, "Seconds are means over cells, while other cells ran on the same GPU.", failures,
    ])  # fmt: skip


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


STUDENT = {3: 4.303, 4: 3.182, 5: 2.776}  # 97.5% quantile of Student's t, by number of seeds


def t_interval(values: Sequence[float]) -> str:
    """The 95% interval of the mean of a few numbers, in points.

    >>> t_interval([0.01, 0.02, 0.03])
    '[-0.5, +4.5]'
    """
    half = STUDENT[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    low, high = (round(100 * (statistics.mean(values) + side), 1) + 0.0 for side in (-half, half))
    return f"[{low:+.1f}, {high:+.1f}]"


def limits(studies: Sequence[Study], found: Sequence[Section], plan: Plan) -> str:
    lines = [f"- {plan.about(s)['model']} only, in the regime {s.regime}." for s in found]
    lines += [f"- {s.regime}: the untuned model's score is left out: {cut_text(s)}."
              for s in found if s.base_cut > MOST_CUT]  # fmt: skip
    lines += [line for study in studies for line in (environments_text(study), versions_text(study)) if line]
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
    lines += [f"- {s.regime} {code(n)}: over its {e.seeds} seeds alone, each one number, the 95% t-interval of the "
              f"difference at the best temperature is {t_interval(s.by_seed(n))}."
              for s in found for n, e in s.primary.items() if e.seeds in STUDENT]  # fmt: skip
    lines.append("- The choice of temperature and rate is not drawn again in a resample.")
    return "\n".join(lines)


def cell_list(studies: Sequence[Study]) -> str:
    """Every cell with its environment, cost and command."""
    lines: list[str] = []
    for study in studies:
        for name, cell in sorted(study.cells.items()):
            about = study.environments[cell["environment"]] if study.environments else {}
            spent = f", {seconds_of(cell):.0f} s" if "cost" in cell else ""
            lines.append(f"# {name}: {cell['state']}{spent}; {environment_text(about)}\n{cell['command']}")
    return (
        "<details><summary>The command of every cell</summary>\n\n```bash\n" + "\n".join(lines) + "\n```\n\n</details>"
    )


# --- pages ------------------------------------------------------------------------------------------------------------

NONE_YET = "No cell of the study is committed yet; the [plan](plan.md) says which will be run."


def results_page(studies: Sequence[Study], found: Sequence[Section], plan: Plan, figures: Sequence[str]) -> str:
    """The generated part of docs/study/results.md."""
    if not found:
        return NONE_YET
    regimes = [section for section in found if not plan.is_variant(section.regime)]
    said = [line for section in found for line in answers(section, plan)] + default_answer(regimes)
    pages = ["## Answers", "\n".join(wrapped(f"- {line}", "  ") for line in said), wrapped(READING)]
    for section in found:
        pages += [f"## {heading(section, plan)}", primary_table(section), "Score and difference from NLL at each "
                  "temperature, each objective at its own learning rate (chosen on the other half of the items):",
                  temperature_table(section)]  # fmt: skip
        pages += [f"![{caption}](../images/{name})" for name, caption in figure_names(section) if name in figures]
        if len(section.rates) > 1:
            pages += ["Score by learning rate, each at its best temperature:", rate_table(section)]
        if tokens := token_table(section):
            pages += [
                f"Held-out tokens, {rate_text(section)}, means over seeds:",
                tokens,
            ]
            pages += [text] if (text := entropy_text(section, found, plan)) else []
        pages += [f"Form of the answers, {rate_text(section)}:", form_table(section)]
    for title, regimes_of in plan.series.items():
        if text := series_table(found, regimes_of):
            pages += [f"## By {title}", "Scores in per cent; mean p of the exchanged answers where they were "
                      "measured. Objectives at one learning rate.", text]  # fmt: skip
    if again := rerun_table(found):
        pages += ["## Cells that were run again", again]
    pages += ["## Cost", cost_tables(studies, plan), "## Limits", limits(studies, found, plan), "## Cells",
              cell_list(studies)]  # fmt: skip
    return "\n\n".join(pages)


READING = (
    "Numbers are per cent or points with 95% intervals in brackets, by a bootstrap over items and seeds. *Score* is at "
    "the temperature and learning rate that were chosen on the other half of the items. *Minus NLL* is paired by item "
    "and seed, on the cells that both objectives have; *by seed* has its value for each seed. *p (Holm)* is over the "
    f"objectives of a regime; a difference is decided below {LEVEL:g}. *Fall* is the score minus the "
    "score at T = 1. *Explicit* answers state their result "
    "(boxed, marked or in words). *Conflicts* are confident conflicts, a share of the held-out tokens; *likeliest* is "
    "the share of tokens that are the model's first choice."
)
README_NONE = (
    "A [study](docs/study/plan.md) will decide. Until then, test on your own data with "
    "[`deftune compare`](docs/compare.md)."
)


def readme_block(found: Sequence[Section], plan: Plan, figures: Sequence[str]) -> str:
    """The generated part of README.md: the picture of the first regime, and its numbers."""
    section = next((s for s in found if s.primary and len(s.temperatures) > 1), None)
    if section is None:
        return README_NONE
    about = plan.about(section)
    shown = [name for name in HEADLINE[1:] if name in section.primary]
    lines: list[str] = []
    name, _ = figure_names(section)[0]
    if name in figures:
        lines += [f"![Accuracy against sampling temperature for {', '.join(HEADLINE)}](docs/images/{name})", ""]
    kinds = [("greedy", 0.0), ("T = 1", 1.0), ("best temperature", None)]
    kinds = [(title, t) for title, t in kinds if t is None or t in section.temperatures]
    reference = [section.accuracy(REFERENCE, t) for _, t in kinds]
    seeds = max((effect.seeds for effect in reference if effect), default=0)
    rows = [[f"`nll`, {seeds_text(seeds)}", *(points(effect, sign=False) for effect in reference)]]
    for one in shown:
        label = f"{code(one)} minus NLL, {seeds_text(section.primary[one].seeds)}"
        rows.append([label, *(points(section.difference(one, t)) for _, t in kinds)])
    lines += [table(["accuracy", *(title for title, _ in kinds)], rows), ""]
    lines.append(wrapped(
        f"*{about['model']} tuned on {about['data']}; points, with 95% intervals over items and seeds (one seed: over "
        f"items).* "
        f"[All results](docs/study/results.md) of the "
        f"[study](docs/study/plan.md); [`deftune advise MODEL DATA`](docs/advise.md) applies them to your data."
    ))  # fmt: skip
    return "\n".join(lines)


# --- evidence ---------------------------------------------------------------------------------------------------------


def evidence(found: Sequence[Section], plan: Plan, earlier: Sequence[Record]) -> list[Record]:
    """The rows of `deftune.comparison.evidence`: the study's, those from before it, and the paper's."""
    rows: list[Record] = []
    regimes = {section.regime for section in found if section.primary}
    for section in found:
        if plan.is_variant(section.regime):  # says nothing about a user's data
            continue
        about = plan.about(section)
        base = next((cell["held_out"] for cell in section.cells(BASE) if "held_out" in cell), None)
        measures = [("best temperature", None), ("greedy", 0.0), ("T = 1", 1.0)]
        for name in section.primary:
            for measure, temperature in measures:
                found_pair = section.pair(name, temperature)
                effect = section.difference(name, temperature)
                if effect is None or found_pair is None:
                    continue
                value, low, high = (round(point, 1) + 0.0 for point in effect.points)
                rates = sorted({o.learning_rate for o in found_pair[0].options if o.learning_rate is not None})
                rows.append({
                    "regime": about["kind"], "model": about["model"], "data": about["data"],
                    "task": ", ".join(section.averaged), "base_p": base and round(base["p"][0], 2),
                    "base_concentration": base and round(base["concentration"][0], 2), "objective": name,
                    "against": REFERENCE, "measure": measure, "difference": value, "low": low, "high": high,
                    "p_holm": section.holm[name] if temperature is None else None, "seeds": effect.seeds,
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


def evidence_text(rows: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(rows, indent=1) + "\n"
