"""The study's figures: score against temperature, and against learning rate."""

from __future__ import annotations

from pathlib import Path

from deftune.comparison.figures import plot_rates, plot_temperatures
from deftune.comparison.grid import BASE

from .cells import Record
from .effects import ORDER, REFERENCE, Section
from .plan import HEADLINE, Plan, rate_text


def figure_names(section: Section) -> list[tuple[str, str]]:
    """(file, caption) of a section's figures."""
    stem = f"study_{section.regime}_{section.title}"
    return [
        (f"{stem}_temperature.png", f"Score against sampling temperature, {rate_text(section)}"),
        (f"{stem}_rate.png", "Score against learning rate, greedy and at temperature 1"),
    ]


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


def draw(section: Section, plan: Plan, folder: Path) -> list[str]:
    """Write the figures of a section as PNG; the names of the files."""
    written: list[str] = []
    (temperature, _), (rate, _) = figure_names(section)
    about = plan.about(section)
    title = f"{about['model']}, {about['data']}"
    folder.mkdir(parents=True, exist_ok=True)
    if len(section.temperatures) > 1:
        figure = plot_temperatures(temperature_lines(section))
        figure.suptitle(f"{title}; {rate_text(section)}", fontsize=8)
        ends = [end for axis in figure.axes for end in axis.get_ylim()]
        for axis in figure.axes:
            axis.set_ylim(min(ends), max(ends))
        figure.savefig(folder / temperature, dpi=200, facecolor="white", metadata={"Software": None})
        written.append(temperature)
    if len(section.rates) > 1:
        figure = plot_rates(rate_lines(section))
        figure.suptitle(title, fontsize=8)
        figure.savefig(folder / rate, dpi=200, facecolor="white", metadata={"Software": None})
        written.append(rate)
    return written
