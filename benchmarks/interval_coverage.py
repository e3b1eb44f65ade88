"""How often 95% intervals hold the true value, and how often a test at 5% rejects a true null, by simulation.

    python benchmarks/interval_coverage.py --out benchmarks/results/interval_coverage.md
    python benchmarks/interval_coverage.py --runs 50 --part seeds

Items have difficulties drawn from a Beta distribution, answers are right or wrong, and the truth is the mean over all
items (and all seeds) that could have been drawn. With R runs a coverage near 95% has a standard error of 22 / sqrt(R)
points: 1.1 for 400 runs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from study.effects import effect_of

from deftune.evaluation.crossed import crossed
from deftune.evaluation.statistics import Samples, best_temperature, holm, paired, score_interval

Row = tuple[str, str]
DIFFICULTIES = {"half right": (0.5, 0.5), "10% right": (1.0, 9.0), "2% right": (0.3, 14.7)}
CHANGES = {"none, 60% change": (0.3, 0.3), "none, 4% change": (0.02, 0.02), "20 points": (0.3, 0.1)}  # won, lost


def answers(a: float, b: float, items: int, samples: int) -> Samples:
    p = torch.distributions.Beta(a, b).sample((items,))
    return torch.bernoulli(p[:, None].expand(items, samples)).tolist()


def per_cent(found: list[bool]) -> str:
    return f"{100 * sum(found) / len(found):.1f}"


def scores(runs: int) -> Iterator[Row]:
    """`score_interval`."""
    for samples in (1, 16):
        for name, (a, b) in DIFFICULTIES.items():
            for items in (10, 30, 100, 400):
                held: list[bool] = []
                for run in range(runs):
                    found = score_interval(answers(a, b, items, samples), resamples=1_000, seed=run)
                    held.append(found.low <= a / (a + b) <= found.high)
                yield f"score, {samples} samples, {name}, {items} items: coverage", per_cent(held)


def differences(runs: int) -> Iterator[Row]:
    """`paired`, one answer each."""
    for name, (won, lost) in CHANGES.items():
        for items in (10, 30, 100, 400):
            held: list[bool] = []
            rejected: list[bool] = []
            for run in range(runs):
                drawn = torch.rand(items)
                a, b = (drawn < won).double(), ((drawn >= won) & (drawn < won + lost)).double()
                found = paired(a[:, None].tolist(), b[:, None].tolist(), resamples=1_000, permutations=1_000, seed=run)
                held.append(found.interval.low <= won - lost <= found.interval.high)
                rejected.append(found.p_value <= 0.05)
            yield f"difference {name}, {items} items: coverage", per_cent(held)
            yield f"difference {name}, {items} items: p <= 0.05", per_cent(rejected)


def seeds(runs: int) -> Iterator[Row]:
    """A difference of 0 over items and seeds, of which a quarter of the items change in each seed.

    `deftune compare` uses `crossed`, an analysis of variance; the study's `effect_of` resamples items and seeds;
    `paired` resamples items with their seeds' means.
    """
    for items in (100, 1_319):
        for number in (1, 2, 3, 5):
            for spread in (0.0, 0.01, 0.03):
                held: dict[str, list[bool]] = {}
                rejected: dict[str, list[bool]] = {}
                width: dict[str, float] = {}
                for run in range(runs):
                    means = 0.15 * torch.randn(items) + spread * torch.randn(number, 1)
                    drawn = torch.rand(number, items)
                    won, lost = ((0.25 + means) / 2).clamp(0, 1), ((0.25 - means) / 2).clamp(0, 1)
                    changes = (drawn < won).double() - ((drawn >= won) & (drawn < won + lost)).double()
                    over_seeds = changes.mean(0)[:, None].tolist()
                    only = paired(over_seeds, [[0.0]] * items, resamples=1_000, permutations=1_000, seed=run)
                    both, variance = effect_of([changes]), crossed([changes])
                    for name, low, high, p in (
                        ("items resampled", only.interval.low, only.interval.high, only.p_value),
                        ("items and seeds resampled", both.low, both.high, both.p),
                        ("analysis of variance", variance.interval.low, variance.interval.high, variance.p_value),
                    ):
                        held.setdefault(name, []).append(low <= 0 <= high)
                        rejected.setdefault(name, []).append(p <= 0.05)
                        width[name] = width.get(name, 0.0) + 100 * (high - low) / runs
                label = f"{number} seeds that differ by {100 * spread:g} points (sd), {items} items"
                for name in held:
                    yield f"{label}, {name}: coverage", per_cent(held[name])
                    yield f"{label}, {name}: p <= 0.05", per_cent(rejected[name])
                    yield f"{label}, {name}: points to either side, mean", f"{width[name] / 2:.1f}"


def choices(runs: int, items: int = 200) -> Iterator[Row]:
    """Holm over five comparisons with one base, none of them different; temperatures that are all equally good."""
    rejected: list[bool] = []
    for run in range(runs):
        p = torch.distributions.Beta(0.5, 0.5).sample((items,))
        base, *others = (torch.bernoulli(p)[:, None].tolist() for _ in range(6))
        values = [paired(other, base, resamples=100, permutations=1_000, seed=run).p_value for other in others]
        rejected.append(min(holm(values)) <= 0.05)
    yield "Holm, five true nulls, 200 items: any adjusted p <= 0.05", per_cent(rejected)
    apart: list[float] = []
    in_sample: list[float] = []
    for _ in range(runs):
        p = torch.distributions.Beta(0.5, 0.5).sample((items,))
        drawn = {t: {str(n): [float(x)] for n, x in enumerate(torch.bernoulli(p))} for t in (0.0, 0.3, 0.6, 0.8, 1.0)}
        found = best_temperature(drawn)
        apart.append(found.score.mean - float(p.mean()))
        in_sample.append(found.in_sample[1] - float(p.mean()))
    for name, values in (("chosen on the other half", apart), ("chosen on the same items", in_sample)):
        mean, spread = torch.tensor(values).mean(), torch.tensor(values).std()
        error = 100 * spread / math.sqrt(runs)
        yield f"best of five equal temperatures, {name}: points too high", f"{100 * mean:+.2f} +- {error:.2f}"


PARTS = {"scores": scores, "differences": differences, "seeds": seeds, "choices": choices}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--part", choices=list(PARTS), action="append")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lines = [f"{arguments.runs} runs; per cent", "", "| | |", "|---|---|"]
    for part in arguments.part or PARTS:
        torch.manual_seed(0)
        for label, figure in PARTS[part](arguments.runs):
            lines.append(f"| {label} | {figure} |")
            print(f"{label:110}{figure}", flush=True)
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
