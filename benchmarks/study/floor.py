"""What a floor under DEFT's gate does: how fast a confident conflict is learned, and how much label noise is.

    python -m benchmarks.study.floor docs/images/floor.png          # the figure of docs/study/floor.md, and its numbers
    python -m benchmarks.study.floor --tokens tokens.parquet        # shares of the signal in a token table

The model has two logits, of the label and of one rival that holds the rest: P = (p, 1 - p). Under gradient flow each
logit moves by minus its gradient, so that z = z_label - z_rival and p follow

    dz/dt = 2 s (1 - p),    dp/dt = 2 s p (1 - p)^2,    gates s: 1 (NLL), p (linear), p^a (DEFT), max(p^a, g) (floor)

with DEFT's focus a = p^2 + (1 - p)^2. The derivations are in docs/study/floor.md.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deftune.inspection.style import PAGE_INCHES, legend_below, line_style, new_figure, styled
from deftune.tokens.conflict import is_confident_conflict
from deftune.tokens.table import read_token_table, table_objectives

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Gate = Callable[[float], float]
FLOORS = (0.05, 0.1, 0.2, 0.4)
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)


def deft_gate(p: float) -> float:
    """DEFT's gate of the two-logit model; increasing on (0, 1/2].

    s = p^a,  a = p^2 + (1 - p)^2

    >>> round(deft_gate(0.5), 6), round(deft_gate(0.001), 6)
    (0.707107, 0.001014)
    """
    return p ** (p * p + (1 - p) ** 2)


def floor_gate(p: float, floor: float) -> float:
    """The gate of ``deft | floor(g)``.

    s = max(p^a, g)

    >>> floor_gate(0.001, 0.2)
    0.2
    """
    return max(deft_gate(p), floor)


# --- time to learn a conflict -----------------------------------------------------------------------------------------


def _check(start: float, end: float) -> None:
    if not 0 < start <= end < 1:
        raise ValueError(f"0 < start <= end < 1, got start={start}, end={end}")


def nll_time(start: float, end: float = 0.5) -> float:
    """Time in which NLL takes p from ``start`` to ``end``: it grows with the logarithm of 1/start.

    T = F(end) - F(start),  F(p) = (ln(p / (1 - p)) + 1 / (1 - p)) / 2

    >>> round(nll_time(0.001), 3), round(nll_time(0.000001), 3)
    (3.953, 7.408)
    """
    _check(start, end)

    def antiderivative(p: float) -> float:
        return (math.log(p) - math.log1p(-p) + 1 / (1 - p)) / 2

    return antiderivative(end) - antiderivative(start)


def linear_time(start: float, end: float = 0.5) -> float:
    """Time in which ``linear`` (gate p) takes p from ``start`` to ``end``: it grows as 1 / (2 start).

    T = G(end) - G(start),  G(p) = ln(p / (1 - p)) + (1 / (1 - p) - 1 / p) / 2

    >>> round(linear_time(0.001), 1)
    506.4
    """
    _check(start, end)

    def antiderivative(p: float) -> float:
        return math.log(p) - math.log1p(-p) + (1 / (1 - p) - 1 / p) / 2

    return antiderivative(end) - antiderivative(start)


def gate_time(gate: Gate, start: float, end: float = 0.5) -> float:
    """Time in which a gate takes p from ``start`` to ``end``, by quadrature over z = ln(p / (1 - p)).

    T = integral of (1 + e^z) / (2 s) dz

    >>> abs(gate_time(lambda p: 1.0, 0.001) - nll_time(0.001)) < 1e-12
    True
    """
    _check(start, end)
    low, high = (math.log(p) - math.log1p(-p) for p in (start, end))
    edges = np.linspace(low, high, max(2, math.ceil(high - low) * 2 + 1))
    total = 0.0
    for a, b in pairwise(edges.tolist()):
        for node, weight in zip(_NODES, _WEIGHTS):
            z = (a + b) / 2 + (b - a) / 2 * float(node)
            total += float(weight) * (b - a) / 2 * (1 + math.exp(z)) / (2 * gate(1 / (1 + math.exp(-z))))
    return float(total)


def deft_time(start: float, end: float = 0.5) -> float:
    """Time in which DEFT takes p from ``start`` to ``end``.

    linear_time / 1.69 <= T <= linear_time, because p <= p^a <= 1.69 p on (0, 1/2]

    >>> round(deft_time(0.001), 1)
    483.4
    """
    return gate_time(deft_gate, start, end)


def crossing(floor: float) -> float:
    """The p below which the floor is above DEFT's gate: p^a = g.

    >>> round(crossing(0.2), 4)
    0.1266
    """
    if not 0 < floor <= deft_gate(0.5):
        raise ValueError(f"floor: above 0 and at most {deft_gate(0.5):.3f}, DEFT's gate at p = 1/2, got {floor}")
    low, high = 0.0, 0.5
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if deft_gate(middle) < floor else (low, middle)
    return high


def floor_time(start: float, floor: float) -> float:
    """Time in which ``deft | floor(g)`` takes p from ``start`` to 1/2.

    T = nll_time(start, c) / g + deft_time(c),  c the crossing;  nll_time <= T <= nll_time / g

    >>> round(floor_time(0.001, 0.2), 1)
    16.1
    """
    at = crossing(floor)
    if start >= at:
        return deft_time(start)
    return nll_time(start, at) / floor + deft_time(at)


# --- label noise ------------------------------------------------------------------------------------------------------


def noise_probability(gate: Gate, noise: float) -> float:
    """The probability that training gives to a wrong label that stands in a share ``noise`` of the same rows.

    A model that begins undecided, p = 1/2, comes to rest where both labels pull alike:

        (1 - n) s(p) (1 - p) = n s(1 - p) p        p: of the right label; returned is 1 - p

    NLL: n. With a gate without such a point above 1/2 the model becomes certain: 0.

    >>> round(noise_probability(lambda p: 1.0, 0.1), 6), noise_probability(deft_gate, 0.1)
    (0.1, 0.0)
    """
    if not 0 < noise < 0.5:
        raise ValueError(f"noise: between 0 and 1/2, got {noise}")

    def pull(wrong: float) -> float:
        return (1 - noise) * gate(1 - wrong) * wrong - noise * gate(wrong) * (1 - wrong)

    grid = [10**exponent for exponent in np.linspace(math.log10(0.5), -12, 1000).tolist()]
    low = next((wrong for wrong in grid if pull(wrong) <= 0), None)  # down to it the right label pulls harder
    if low is None:
        return 0.0
    high = 0.5 if low == grid[0] else grid[grid.index(low) - 1]
    for _ in range(200):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if pull(middle) > 0 else (middle, high)
    return high


def floor_noise(noise: float, floor: float) -> float:
    """The probability of a wrong label under a floor, to first order: NLL's odds times the floor.

    1 - p = g n / (1 - n)

    >>> round(floor_noise(0.1, 0.2), 4)
    0.0222
    """
    return floor * noise / (1 - noise)


DEFT_NOISE = 1 / (
    1 + math.exp(max(2 * p * (1 - p) * math.log(p / (1 - p)) for p in np.linspace(0.5, 0.999, 2000).tolist()))
)
"""The largest share of wrong labels that DEFT ignores here, 39%: 2 p (1 - p) ln(p / (1 - p)) is at most 0.448."""


# --- real tokens ------------------------------------------------------------------------------------------------------


def conflict_shares(path: str | Path) -> dict[str, tuple[float, float]]:
    """By objective of a token table: the confident conflicts' share of the signal s (1 - p), and the mean gate there.

    Args:
        path: a token table (`deftune analyze tokens`).
    """
    import torch

    table = read_token_table(path)
    log_p, concentration = (torch.from_numpy(table[name].to_numpy().copy()) for name in ("log_p", "concentration"))
    where = is_confident_conflict(log_p, concentration).numpy()
    found: dict[str, tuple[float, float]] = {}
    for name in table_objectives(table):
        signal, gate = (table[f"{column}:{name}"].to_numpy().astype(np.float64) for column in ("signal", "gate"))
        found[name] = float(signal[where].sum() / signal.sum()), float(gate[where].mean())
    return found


# --- the figure and the numbers ---------------------------------------------------------------------------------------


def gates() -> dict[str, Gate]:
    """The gates that the figure shows, by spec."""
    floors: dict[str, Gate] = {f"deft | floor({g:g})": lambda p, g=g: floor_gate(p, g) for g in FLOORS}
    return {"nll": lambda p: 1.0, "deft": deft_gate, **floors}


def flip_time(name: str, start: float) -> float:
    """The time from ``start`` to 1/2 under one of `gates`."""
    if name == "nll":
        return nll_time(start)
    return deft_time(start) if name == "deft" else floor_time(start, float(name[len("deft | floor(") : -1]))


@styled
def plot_floor() -> Figure:
    """Gate over p, time to learn a conflict over its p, probability of a wrong label over its share."""
    figure, axes = new_figure(1, 3, (PAGE_INCHES, 2.4))
    at = np.geomspace(1e-4, 0.4, 60)
    shares = np.linspace(0.01, 0.35, 35)
    panels: list[tuple[Any, Callable[[str, Gate, float], float], str, str]] = [
        (at, lambda name, gate, x: gate(x), "p of the label", "gate"),
        (at, lambda name, gate, x: flip_time(name, x), "p of the label at the start", "time until p = 1/2"),
        (shares, lambda name, gate, x: noise_probability(gate, x), "share of wrong labels", "p of the wrong label"),
    ]
    for axis, (xs, value, below, beside) in zip(axes[0], panels):
        for name, gate in gates().items():
            axis.plot(xs, [value(name, gate, float(x)) for x in xs], **line_style(name))
        axis.set(xlabel=below, ylabel=beside)
        if xs is at:
            axis.set(xscale="log", yscale="log")
        axis.grid()
    legend_below(figure, axes[0])
    return figure


def numbers() -> list[str]:
    """The table of the page, as Markdown lines."""
    header = ["objective", "gate at p = 0.001", "time from 0.01", "from 0.001", "from 0.0001",
              "p of a wrong label, 10%", "30%"]  # fmt: skip
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    for name, gate in gates().items():
        times = [f"{flip_time(name, start):,.1f}" for start in (1e-2, 1e-3, 1e-4)]
        wrong = [f"{noise_probability(gate, share):.3f}" for share in (0.1, 0.3)]
        shown = name.replace("|", "\\|")
        lines.append(f"| `{shown}` | {gate(1e-3):.3g} | {' | '.join(times)} | {' | '.join(wrong)} |")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.study.floor", description="what a floor does")
    parser.add_argument("out", nargs="?", type=Path, help="write the figure there (.png, .svg, .pdf)")
    parser.add_argument("--tokens", type=Path, metavar="FILE", help="a token table: shares of its signal")
    args = parser.parse_args(argv)
    if args.out is not None:
        about = {"Software": None} if args.out.suffix == ".png" else {}  # the same bytes with any matplotlib
        plot_floor().savefig(args.out, dpi=200, facecolor="white", metadata=about)
    print("\n".join(numbers()))
    if args.tokens is not None:
        print("\n| objective | share of the signal on confident conflicts | mean gate there |\n|---|---|---|")
        for name, (share, gate) in conflict_shares(args.tokens).items():
            shown = name.replace("|", "\\|")
            print(f"| `{shown}` | {share:.1%} | {gate:.3f} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
