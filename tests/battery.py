"""The battery: every spec that the tests of objectives and kernels run over, each beside its oracle.

A new objective or modifier adds rows here, and is then tested everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import deftune
import oracle as exact
from deftune import Context, Objective, TokenStats
from deftune.objectives.stats import from_columns

SETTING = exact.Setting(progress=0.15, special_ids=(1, 3))
CONTEXT = Context(progress=SETTING.progress, special_ids=SETTING.special_ids)


@dataclass(frozen=True)
class HalfDeft(deftune.Focus):
    """A user's own objective: half of DEFT's focus, plus a constant."""

    shift: float = 0.25

    def focus(self, stats: TokenStats, context: Context = CONTEXT) -> Tensor:
        return stats.concentration / 2 + self.shift


def half_deft(shift: float = 0.25) -> exact.Oracle:
    return exact.local(lambda row: exact.deformed(row, row.collision / 2 + exact.number(shift)))


@dataclass(frozen=True)
class Case:
    spec: str
    oracle: exact.Oracle
    kind: str = "local"
    make: Callable[[], Objective] | None = None  # for an objective that is not in the catalogue

    @property
    def objective(self) -> Objective:
        return self.make() if self.make else deftune.objective(self.spec)

    def __str__(self) -> str:
        return self.spec.replace(" ", "")


CASES = [
    Case("nll", exact.nll),
    Case("linear", exact.linear),
    Case("hellinger", exact.hellinger),
    Case("dft", exact.dft),
    Case("alpha(0)", exact.alpha(0)),
    Case("alpha(0.1)", exact.alpha(0.1)),
    Case("alpha(2.5)", exact.alpha(2.5)),
    Case("cayley", exact.cayley()),
    Case("cayley(kappa=0)", exact.cayley(0)),
    Case("cayley(kappa=-0.9)", exact.cayley(-0.9)),
    Case("cayley(7)", exact.cayley(7)),
    Case("cayley-released", exact.cayley_released, "step"),
    Case("deft", exact.deft),
    Case("eaft", exact.eaft()),
    Case("eaft(k=3)", exact.eaft(3)),
    Case("eaft(k=3, power=2, norm=3)", exact.eaft(3, 2, "3")),
    Case("eaft(5, 0.5, none)", exact.eaft(5, 0.5, "none")),
    Case("eaft(norm=full)", exact.eaft(norm="full")),
    Case("top(0.3)", exact.top(0.3)),
    Case("top(0.1, of=linear)", exact.top(0.1, "linear")),
    Case("top(0)", exact.top(0)),
    Case("bottom(0.3)", exact.bottom(0.3)),
    Case("bottom(0.7, linear)", exact.bottom(0.7, "linear")),
    Case("mile", exact.mile(), "mass"),
    Case("mile(2)", exact.mile(2), "mass"),
    Case("mile(-0.5)", exact.mile(-0.5), "mass"),
    Case("clip", exact.clip(), "step"),
    Case("clip(k=1)", exact.clip(1), "step"),
    Case("linear | floor(0.2)", exact.floor(exact.linear, 0.2)),
    Case("clip | floor(0.9)", exact.floor(exact.clip(), 0.9), "step"),
    Case("clip(1) | floor(0.1)", exact.floor(exact.clip(1), 0.1), "step"),
    Case("deft | eos(nll)", exact.eos(exact.deft, exact.nll)),
    Case("linear | eos(deft | floor(0.5))", exact.eos(exact.linear, exact.floor(exact.deft, 0.5))),
    Case("mile(2) | eos(nll)", exact.eos(exact.mile(2), exact.nll), "step"),
    Case("deft | blend(nll, 0.25)", exact.blend(exact.deft, exact.nll, 0.25)),
    Case("nll | blend(deft, 1)", exact.blend(exact.nll, exact.deft, 1)),  # at p = 0 the nll is infinite
    Case("linear | blend(eaft(k=4), 0)", exact.blend(exact.linear, exact.eaft(4), 0)),
    Case("deft | blend(clip(2), 0.5)", exact.blend(exact.deft, exact.clip(2), 0.5), "step"),
    Case("deft | warmup(0.1)", exact.warmup(exact.deft, 0.1)),
    Case("linear | warmup(0.5)", exact.warmup(exact.linear, 0.5)),
    Case("linear | warmup(0.05)", exact.warmup(exact.linear, 0.05)),
    Case("deft | mean_one", exact.mean_one(exact.deft), "mass"),
    Case("top(0.3) | mean_one", exact.mean_one(exact.top(0.3)), "mass"),
    Case("mile | mean_one", exact.mean_one(exact.mile()), "mass"),
    Case("clip(1) | mean_one", exact.mean_one(exact.clip(1)), "step"),
    Case("cayley-released | mean_one", exact.mean_one(exact.cayley_released), "step"),
    Case("deft | eos(nll) | mean_one", exact.mean_one(exact.eos(exact.deft, exact.nll)), "mass"),
    Case(
        "cayley(kappa=2) | floor(0.1) | warmup(0.1) | blend(dft, 0.3)",
        exact.blend(exact.warmup(exact.floor(exact.cayley(2), 0.1), 0.1), exact.dft, 0.3),
    ),
    Case("halfdeft", half_deft(), make=HalfDeft),
    Case("halfdeft(shift=0) | floor(0.2)", exact.floor(half_deft(0), 0.2), make=lambda: floored(HalfDeft(0.0), 0.2)),
]


def floored(inner: Objective, g: float) -> Objective:
    return deftune.MODIFIERS["floor"](inner, g=g)


def of_kind(*kinds: str) -> list[Case]:
    return [case for case in CASES if case.kind in kinds]


def names_in(spec: str) -> set[str]:
    return set(re.findall(r"[a-z][\w-]*", spec))


# --- data that every test may use -------------------------------------------------------------------------------------


def sample_logits(
    tokens: int, vocab_size: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Rows from flat to confident, rightly and wrongly, so that every threshold and cap has both sides."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.linspace(0.2, 6.0, tokens)[:, None]
    logits = (torch.randn(tokens, vocab_size, generator=generator) * scale).to(dtype)
    targets = torch.randint(0, vocab_size, (tokens,), generator=generator)
    likeliest = logits.argmax(-1)
    return logits, torch.where(torch.arange(tokens) % 3 == 0, likeliest, targets)


V_EXTREME = 152064  # Qwen2.5's padded vocabulary: the least focus is 1/V


def extreme_columns(dtype: torch.dtype = torch.float64) -> tuple[TokenStats, list[exact.Row]]:
    """log p from 0 to -inf at every focus from 1/V to 1, and the same rows for the oracle."""
    log_ps = [0.0, -1e-30, -1e-3, -0.7, -80.0, -1e4, -float("inf")]
    log_v = float(torch.tensor(V_EXTREME).log())
    shapes = [(0.0, 0.0), (0.5, -0.4), (log_v / 2, -3.0), (log_v, -log_v)]
    points = [(log_p, *shape) for log_p in log_ps for shape in shapes]
    log_p, entropy, log_collision = torch.tensor(points, dtype=dtype).T.contiguous()
    targets = torch.arange(len(points)) % 5
    tops = torch.tensor([[-0.1 * j * (1 + i % 4) for j in range(20)] for i in range(len(points))], dtype=dtype)
    tops[::4, 1:] = -float("inf")  # the concentrated rows: one token has it all
    stats = from_columns(log_p, entropy, log_collision, vocab_size=V_EXTREME, targets=targets, top_log_p=tops)
    columns = zip(log_p.tolist(), entropy.tolist(), log_collision.tolist(), targets.tolist(), tops.tolist())
    step = [
        exact.row_from_columns(lp, h, c, target=y, vocab_size=V_EXTREME, top_log_p=top) for lp, h, c, y, top in columns
    ]
    return stats, step
