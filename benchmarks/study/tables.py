"""The tables of docs/study/results.md: scores, tokens and form of the answers by regime, and the cost of the cells."""

from __future__ import annotations

import itertools
import re
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from deftune.comparison.grid import BASE
from deftune.comparison.tables import escape_markdown

from .cells import Record, Study, seconds_of
from .effects import REFERENCE, Effect, Section, effect_of, in_points, share
from .plan import Plan

EXPLICIT = ("boxed", "marked", "stated", "text")  # how an answer that states itself is found


# --- words and numbers ------------------------------------------------------------------------------------------------


def code(objective: str) -> str:
    return f"`{objective}`"


def points(effect: Effect | None, *, sign: bool = True) -> str:
    """A value in points with its interval."""
    if effect is None:
        return "-"
    value, low, high = effect.points
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


def mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def rate_text(section: Section) -> str:
    """The rate at which all objectives are shown together."""
    return "untuned" if section.reference_rate is None else f"learning rate {section.reference_rate:g}"


# --- scores and tokens ------------------------------------------------------------------------------------------------


def verdict(section: Section, objective: str) -> str:
    """above / below / not decided, by the primary measure."""
    if not section.decided(objective):
        return "not decided"
    return "above NLL" if section.primary[objective].value > 0 else "below NLL"


def shown(section: Section) -> list[str]:
    """The untuned model, where it has scores, and the tuned objectives."""
    return [*([BASE] if BASE in section.scores else []), *section.objectives]


def primary_table(section: Section) -> str:
    header = ["objective", "seeds", "rates", "chosen", "score", "minus NLL", "by seed", "p (Holm)", "", "fall to T = 1"]
    rows: list[list[str]] = []
    for name in shown(section):
        chosen, score = section.chosen(name, None), section.accuracy(name, None)
        if chosen is None or score is None:
            continue
        options = dict.fromkeys(
            f"T={o.temperature:g}" + ("" if o.learning_rate is None else f", {o.learning_rate:g}")
            for o in chosen.chosen
        )
        rates = section.rates_of(name)
        effect = section.primary.get(name)
        by_seed = ", ".join(f"{in_points(value):+.1f}" for value in section.by_seed(name)) if effect else "-"
        rows.append([
            code(name), str(len(chosen.seeds)) if name != BASE else "", str(len(rates)) if name != BASE else "",
            " and ".join(options), points(score, sign=False), points(effect), by_seed,
            p_text(section.holm()[name]) if effect else "-", verdict(section, name) if effect else "",
            points(section.fall(name)),
        ])  # fmt: skip
    return table(header, rows)


def temperature_table(section: Section) -> str:
    header = ["objective"]
    for temperature in section.temperatures:
        header += [f"T = {temperature:g}", "minus NLL"]
    rows: list[list[str]] = []
    for name in shown(section):
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


def rate_differences(section: Section) -> str:
    """Each objective minus NLL at each learning rate, greedy and at T = 1, with the number of seeds."""
    kinds = [(title, t) for title, t in (("greedy", 0.0), ("T = 1", 1.0)) if t in section.temperatures]
    header = ["objective", *(f"{rate:g}, {title}" for rate in section.rates for title, _ in kinds)]
    rows: list[list[str]] = []
    for name in section.primary:
        row = [code(name)]
        for rate in section.rates:
            for _, temperature in kinds:
                effect = section.difference(name, temperature, rate=rate)
                row.append(f"{points(effect)}, {seeds_text(effect.seeds)}" if effect else "-")
        rows.append(row)
    return table(header, rows)


def reference_cells(section: Section, objective: str) -> list[Record]:
    """The cells of an objective at the rate of most cells; of the untuned model the one that the scores are from."""
    if objective == BASE:
        return section.base_section.cells(BASE)
    return section.cells(objective, section.reference_rate)


def token_table(section: Section) -> str:
    """Held-out tokens at the rate of most cells: means over seeds."""
    header = ["objective", "seeds", "NLL", "mean p", "sum P²", "entropy", "likeliest", "conflicts", "p of end tokens"]
    wrong = any("exchanged" in cell.get("held_out", {}) for cell in section.study.finished(section.regime))
    header += ["p of exchanged answers"] if wrong else []
    rows: list[list[str]] = []
    for name in [BASE, *section.objectives]:
        cells = reference_cells(section, name)
        found = [cell["held_out"] for cell in cells if "held_out" in cell]
        if found:
            means = [mean(one[key][0] for one in found) for key in ("nll", "p", "concentration", "entropy")]
            shares = [mean(one[key][0] for one in found) for key in ("top1", "conflicts")]
            numbers = [*(number(v, ".3f") for v in means), *(number(v, ".1%") for v in shares)]
            end = number(mean(one["end_p"] for one in found), ".3f")
            last = [number(exchanged_p(cells), ".3f")] if wrong else []
            rows.append([code(name), str(len(found)) if name != BASE else "", *numbers, end, *last])
    return table(header, rows) if rows else ""


def entropy_curve(cells: Iterable[Record]) -> dict[float, float]:
    """Mean entropy of the held-out tokens by sampling temperature, over the cells that measured it; 0 at T = 0."""
    found = [cell["held_out"] for cell in cells if "entropies" in cell.get("held_out", {})]
    if not found:
        return {}
    temperatures = set[str].intersection(*(set(one["entropies"]) for one in found))
    curve = {float(t): statistics.mean(one["entropies"][t][0] for one in found) for t in temperatures}
    return dict(sorted({0.0: 0.0, **curve, 1.0: statistics.mean(one["entropy"][0] for one in found)}.items()))


def with_reruns(cells: Iterable[Record]) -> list[Record]:
    """The cells, each followed by the same cell run again."""
    return [run for cell in cells for run in (cell, *cell.get("reruns", ()))]


def entropy_text(section: Section, found: Sequence[Section], plan: Plan) -> str:
    """NLL's entropy by temperature, and where it is DEFT's at T = 1; "" where it was not measured."""
    curve = entropy_curve(with_reruns(section.cells(REFERENCE, section.reference_rate)))
    of = plan.regimes.get(section.regime, {}).get("variant_of")
    places = [section, *(other for other in found if other.regime == of)]  # where the regime has no DEFT: the other one
    cells = [with_reruns(one.cells("deft", section.reference_rate)) for one in places]
    cells = [[cell for cell in group if "held_out" in cell] for group in cells]
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
    """Scores over regimes that change one thing, such as the number of epochs, at the lowest rate that all have.

    "" while fewer than two regimes have cells, or where they have no rate in common.
    """
    parts = {s.regime: s for regime in labels for s in found if s.regime == regime and s.objectives}
    shared = set[float].intersection(*(set(section.rates) for section in parts.values())) if len(parts) > 1 else set()
    if not shared:
        return ""
    rate = min(shared)
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
    about = f"Scores in per cent, all at learning rate {rate:g}; mean p of exchanged answers where it was measured."
    return f"{about}\n\n{table(header, rows)}"


def exchanged_p(cells: Iterable[Record]) -> float | None:
    """The mean p of the answers that were exchanged on purpose, over cells."""
    found = [cell.get("held_out", {}).get("exchanged") for cell in cells]
    return mean(one["p"][0] for one in found if one)


def form_table(section: Section) -> str:
    """Form of the answers at the rate of most cells: explicit answers, answers cut off, tokens."""
    header = ["objective"]
    for temperature in section.temperatures:
        header += [f"explicit, T = {temperature:g}", "cut off", "tokens"]
    rows: list[list[str]] = []
    for name in [BASE, *section.objectives] if section.base_section.cells(BASE) else section.objectives:
        row = [code(name)]
        cells = reference_cells(section, name)
        for temperature in section.temperatures:
            found = [
                task[f"{temperature:g}"] for cell in cells for task in cell["scores"][section.title].values()
                if f"{temperature:g}" in task
            ]  # fmt: skip
            shares = share(found, "extracted", EXPLICIT), share(found, "finished", ("length",))
            row += [number(value, ".1%") for value in shares]
            row.append(number(mean(one["answer_tokens"] for one in found), ".0f"))
        rows.append(row)
    return table(header, rows)


Twins = tuple[Section, Section]  # a cell alone, and the same cell run again


def reruns(section: Section) -> Iterator[tuple[str, Record, Twins]]:
    """(name, cell, twins) of every cell that was run again and whose score is not left out."""
    config, items = section.study.config, section.study.items
    for name, cell in section.study.cells.items():
        for again in cell.get("reruns", ()) if cell["regime"] == section.regime else ():
            first, second = (
                Section(Study(config, [], items, {name: one}), section.regime, section.title) for one in (cell, again)
            )
            if cell["objective"] in first.scores and cell["objective"] in second.scores:
                yield name, cell, (first, second)


def difference_of(twins: Twins, objective: str, temperature: float) -> Effect | None:
    """The second run minus the first."""
    first, second = (twin.chosen(objective, temperature) for twin in twins)
    return effect_of(second.minus(first, twins[0].averaged)) if first and second else None


def rerun_difference(section: Section, objective: str, temperature: float) -> Effect | None:
    """Of the first cell of an objective that was run again: the second score minus the first; None without one."""
    found = (twins for _, cell, twins in reruns(section) if cell["objective"] == objective)
    return next((effect for twins in found if (effect := difference_of(twins, objective, temperature))), None)


def rerun_table(found: Sequence[Section]) -> str:
    """Cells that were run a second time: their scores, and the difference of the two runs with its interval."""
    rows: list[list[str]] = []
    for section in found:
        for name, cell, again in reruns(section):
            for temperature in section.temperatures:
                first, second = (run.accuracy(cell["objective"], temperature) for run in again)
                difference = difference_of(again, cell["objective"], temperature)
                if first and second and difference:
                    rows.append([escape_markdown(name), f"{temperature:g}", points(first, sign=False),
                                 points(second, sign=False), points(difference)])  # fmt: skip
    return table(["cell", "T", "first", "again", "difference"], rows) if rows else ""


# --- cost -------------------------------------------------------------------------------------------------------------


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
    most = {regime: max(cell["cost"]["memory_gib"] for cell in cells) for regime, cells in parts.items()}
    each = [
        [regime, str(len(cells)), *(f"{sum(c['cost'][n] for c in cells) / len(cells):.0f}" for n in names),
         f"{most[regime]:.1f}" if most[regime] else "-"] for regime, cells in parts.items()
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
        second, "Seconds are means over cells, while other cells ran on the same GPU; of the memory it is the largest.",
        failures,
    ])  # fmt: skip
