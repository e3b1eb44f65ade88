"""The objectives: the deformed-log family, the paper's two trajectories, and the weights it is compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from deftune.objectives.base import Focus, Kind, Objective, StepStatistic, Weight, render_value, weighted_nll
from deftune.objectives.catalogue import About, register
from deftune.objectives.stats import NO_CONTEXT, Context, TokenStats

MOST_POWER = 100  # of an entropy, up to ln V: a larger power leaves the range of float64


def require(holds: bool, name: str, what: str, got: object, remedy: str) -> None:
    if not holds:
        raise ValueError(f"{name}: {what}, got {got}; {remedy}")


@register(
    "nll",
    About(
        "nll",
        gate="1",
        value="-log p",
        source="maximum likelihood",
        use="the data is clean and the model has to learn new things",
        hurts="noisy or conflicting labels: the least likely tokens take most of the gradient",
    ),
)
def nll() -> Objective:
    """-log p."""
    return Alpha(0.0)


@register(
    "linear",
    About(
        "linear",
        gate="p",
        value="1 - p",
        source="-p of Li et al. 2025, 'Beyond Log Likelihood'",
        use="the model is strong on the data already",
        hurts="the model is weak: gradients vanish with p, and end tokens may never be learned",
    ),
)
def linear() -> Objective:
    """1 - p."""
    return Alpha(1.0)


@register(
    "dft",
    About(
        "dft",
        gate="p",
        value="-sg[p] log p",
        source="Wu et al. 2025, dynamic fine-tuning",
        use="to match runs made with TRL's or LLaMA-Factory's dft",
        hurts="as linear (the gradient is the same)",
    ),
)
@dataclass(frozen=True)
class Dft(Weight):
    """Dynamic fine-tuning: L = -sg[p] log p, gate p; the gradient is `linear`'s, only the value differs."""

    def focus(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Tensor:
        return torch.ones_like(stats.log_p)

    def weight(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Tensor:
        return stats.p


@register(
    "alpha",
    About(
        "alpha(a)",
        gate="p^a",
        value="(1 - p^a)/a",
        source="DEFT's deformed-log family; GCE for 0 < a < 1",
        use="one fixed point between nll (a=0) and linear (a=1) is wanted",
        hurts="one a for all tokens learns too much noise or too little that is new; a > 1 ignores most tokens",
    ),
)
@dataclass(frozen=True)
class Alpha(Focus):
    """L_a(p) = (1 - p^a)/a with one focus a >= 0 for every token: gate p^a (Eq. example_alpha).

    >>> str(Alpha(0.0)), str(Alpha(0.5)), str(Alpha(1.0)), str(Alpha(0.7))
    ('nll', 'hellinger', 'linear', 'alpha(0.7)')
    """

    NAMED: ClassVar[dict[float, str]] = {0.0: "nll", 0.5: "hellinger", 1.0: "linear"}
    a: float

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.a) and self.a >= 0,
            "alpha",
            "the focus a must be finite and >= 0 (a < 0 would push hardest on the least likely tokens)",
            self.a,
            "use nll for a = 0, linear for a = 1",
        )

    def focus(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Tensor:
        return torch.full_like(stats.log_p, self.a)

    def __str__(self) -> str:
        return self.NAMED.get(self.a) or f"alpha({render_value(self.a)})"


@register(
    "hellinger",
    About(
        "hellinger",
        gate="p^(1/2)",
        value="2 (1 - sqrt p)",
        source="alpha(0.5)",
        use="a robust middle without a parameter to tune",
        hurts="as alpha",
    ),
)
def hellinger() -> Objective:
    """2 (1 - sqrt p)."""
    return Alpha(0.5)


@register(
    "cayley",
    About(
        "cayley(kappa=1)",
        gate="p^a, a = (1-z)/(1+kappa z), z = sqrt(1-p)",
        value="(1 - p^a)/a, a detached",
        source="DEFT, Eq. alpha_star",
        use="new knowledge matters and the labels are right: the gate goes to 1 as p goes to 0",
        hurts="confident conflicts: at p near 0 it pushes as hard as nll",
    ),
)
@dataclass(frozen=True)
class Cayley(Focus):
    """The Cayley trajectory: z = sqrt(1-p), a = (1-z)/(1 + kappa z); kappa = 1 is the paper's (Eq. alpha_star).

    >>> from deftune.objectives.stats import from_columns
    >>> Cayley().focus(from_columns([math.log(0.75)], [0.0], [0.0], vocab_size=2))
    tensor([0.3333], dtype=torch.float64)
    """

    kappa: float = 1.0

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.kappa) and self.kappa > -1,
            "cayley",
            "kappa must be > -1 (the map leaves [0, 1] otherwise)",
            self.kappa,
            "the paper's choice is kappa=1",
        )

    def focus(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Tensor:
        # (1-z)/(1+kz) = (1-z^2)/((1+z)(1+kz)) = p/((1+z)(1+kz)): the textbook form cancels for small p
        z = stats.error.sqrt()
        one = 1 + z
        return (stats.p / (one * (one if self.kappa == 1 else 1 + self.kappa * z))).detach()


@register(
    "cayley-released",
    About(
        "cayley-released",
        gate="p^a, a = f + (1-f) p/(2-p), f = mean(p)/2, in [1e-3, 1]",
        value="(1 - p^a)/a, a detached",
        source="the authors' repository",
        use="to compare with runs of the released code",
        hurts="needs the whole step's mean p: a pre-pass under accumulation or several ranks",
    ),
)
@dataclass(frozen=True)
class CayleyReleased(Focus):
    """What the authors' repository trains: a = f + (1-f) p/(2-p), f = 0.5 mean p, clamped to [1e-3, 1].

    Their mean is over a micro-batch; here it is over the whole optimizer step.
    """

    @property
    def step_statistics(self) -> tuple[StepStatistic, ...]:
        return (StepStatistic("mean p", lambda stats, context: stats.p, "mean"),)

    def focus(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Tensor:
        p = stats.p.detach()
        floor = 0.5 * self.step_value(self.step_statistics[0], stats, context).detach()
        return (floor + (1 - floor) * p / (2 - p)).clamp(1e-3, 1.0)


@register(
    "deft",
    About(
        "deft",
        gate="p^a, a = sum P^2",
        value="(1 - p^a)/a, a detached",
        source="DEFT, Eq. deft_alpha",
        use="labels may conflict with what the model knows: only a confident model is protected",
        hurts="the model is confidently wrong and must be corrected: the gate is nearly 0 there",
    ),
)
@dataclass(frozen=True)
class Deft(Focus):
    """Dynamic entropy fine-tuning: a = sum_v P_v^2 = exp(-H_2(P)) (Eq. deft_alpha), gate p^a.

    >>> from deftune.objectives.stats import from_columns
    >>> stats = from_columns([math.log(0.25)], [math.log(4)], [-math.log(4)], vocab_size=4)  # uniform over 4
    >>> Deft().focus(stats), Deft().gate(stats)
    (tensor([0.2500], dtype=torch.float64), tensor([0.7071], dtype=torch.float64))
    """

    def focus(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Tensor:
        return stats.concentration.detach()


@register(
    "eaft",
    About(
        "eaft(k=20, power=1, norm=lnk|3|none|full)",
        gate="(H_top-k / ln k)^power",
        value="gate * -log p, gate detached",
        source="Diao et al. 2026, entropy-adaptive fine-tuning",
        use="confident conflicts are the problem, and other unlikely tokens must be learned",
        hurts="confident and right tokens get little too: sharpening is slow",
    ),
)
@dataclass(frozen=True)
class Eaft(Weight):
    """Entropy-adaptive fine-tuning: weight (H_topk / norm)^power, H of the top min(k, V) renormalised.

    ``norm`` names the divisors in use: ``lnk`` (ln of the asked k), ``3`` (LLaMA-Factory's), ``none``, and ``full``
    (the exact entropy over ln V; k is not used).
    """

    k: int = 20
    power: float = 1.0
    norm: Literal["lnk", "3", "none", "full"] = "lnk"

    def __post_init__(self) -> None:
        require(self.k >= 2, "eaft", "k must be at least 2 (one token has no entropy)", self.k, "the default is k=20")
        bounds = f"power must be > 0 and <= {MOST_POWER}"
        require(0 < self.power <= MOST_POWER, "eaft", bounds, self.power, "the default is 1")
        object.__setattr__(self, "norm", str(self.norm))  # norm=3 in Python means what it means in a spec
        norms = ("lnk", "3", "none", "full")
        require(self.norm in norms, "eaft", f"norm must be one of {', '.join(norms)}", self.norm, "the default is lnk")
        require(self.norm != "full" or self.k == 20, "eaft", "norm=full has no k", f"k={self.k}", "leave k out")

    @property
    def top_k(self) -> int:
        return 0 if self.norm == "full" else self.k

    def weight(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Tensor:
        if self.norm == "full":
            share = stats.entropy / math.log(stats.vocab_size) if stats.vocab_size > 1 else stats.entropy
        else:
            share = stats.top_entropy(self.k) / {"lnk": math.log(self.k), "3": 3.0, "none": 1.0}[self.norm]
        return share if self.power == 1 else share**self.power


@dataclass(frozen=True)
class Threshold(Objective):
    """`top` and `bottom`: only tokens on one side of p = t, with the gate of `nll` or `linear`."""

    t: float
    of: Literal["nll", "linear"] = "nll"

    def __post_init__(self) -> None:
        name = self.name
        require(0 <= self.t <= 1, name, "the threshold t is a probability in [0, 1]", self.t, "ProFit is top(0.1)")
        require(self.of in ("nll", "linear"), name, "of must be nll or linear", self.of, "the default is nll")

    def selected(self, stats: TokenStats) -> Tensor:
        raise NotImplementedError

    @property
    def log_t(self) -> float:
        return math.log(self.t) if self.t > 0 else -math.inf

    @property
    def base(self) -> Alpha:
        return Alpha(0.0) if self.of == "nll" else Alpha(1.0)

    def focus(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Tensor:
        return self.base.focus(stats, context)

    def evaluate(self, stats: TokenStats, context: Context = NO_CONTEXT) -> tuple[Tensor, Tensor]:
        selected, (gate, loss) = self.selected(stats), self.base.evaluate(stats, context)
        return torch.where(selected, gate, 0.0), torch.where(selected, loss, 0.0)

    def __str__(self) -> str:
        return f"{self.name}({render_value(self.t)}{', of=linear' if self.of == 'linear' else ''})"


@register(
    "top",
    About(
        "top(t, of=nll|linear)",
        gate="1[p >= t] * gate of nll or linear",
        value="1[p >= t] * its value",
        source="Beyond Log Likelihood; ProFit is top(0.1)",
        use="an ablation: are the unlikely tokens worth anything?",
        hurts="everything the model does not know yet is ignored",
    ),
)
@dataclass(frozen=True)
class Top(Threshold):
    """Gate 1[p >= t] times the gate of ``of``; the denominator stays all supervised tokens."""

    def selected(self, stats: TokenStats) -> Tensor:
        return stats.log_p >= self.log_t


@register(
    "bottom",
    About(
        "bottom(t, of=nll|linear)",
        gate="1[p < t] * gate of nll or linear",
        value="1[p < t] * its value",
        source="Beyond Log Likelihood",
        use="an ablation: what top leaves out",
        hurts="learns from the least likely tokens alone",
    ),
)
@dataclass(frozen=True)
class Bottom(Threshold):
    """Gate 1[p < t] times the gate of ``of``: what `top` leaves out."""

    def selected(self, stats: TokenStats) -> Tensor:
        return stats.log_p < self.log_t


@register(
    "mile",
    About(
        "mile(gamma=1)",
        gate="(1+H)^gamma / its step mean",
        value="gate * -log p, gate detached",
        source="MiLe loss",
        use="a control: weights of mean one, so learning rates compare with nll",
        hurts="gives noise in uncertain places more weight",
    ),
)
@dataclass(frozen=True)
class Mile(Weight):
    """Weight (1+H)^gamma over its step mean: high-entropy tokens count more, and the mean weight is one."""

    gamma: float = 1.0

    def __post_init__(self) -> None:
        bounds = f"gamma must be from -{MOST_POWER} to {MOST_POWER}"
        require(abs(self.gamma) <= MOST_POWER, "mile", bounds, self.gamma, "the default is 1")

    @property
    def kind(self) -> Kind:
        return "mass"

    @property
    def step_statistics(self) -> tuple[StepStatistic, ...]:
        return (StepStatistic(f"mass of {self}", self.mass, "mean"),)

    def mass(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Tensor:
        return (1 + stats.entropy.detach()) ** self.gamma

    def weight(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Tensor:
        if context.step == "deferred":
            return self.mass(stats, context)
        return self.mass(stats, context) / self.step_value(self.step_statistics[0], stats, context)


@register(
    "clip",
    About(
        "clip(k=3)",
        gate="min(1, k median/NLL), detached",
        value="min(NLL, k median)",
        source="a robust-statistics control",
        use="a simple baseline to beat: outliers are capped",
        hurts="needs the whole step's median: a pre-pass under accumulation or several ranks",
    ),
)
@dataclass(frozen=True)
class Clip(Objective):
    """L = min(NLL, k * median NLL of the step), gate min(1, k * median / NLL), detached."""

    k: float = 3.0

    def __post_init__(self) -> None:
        require(math.isfinite(self.k) and self.k > 0, "clip", "k must be > 0", self.k, "the default is k=3")

    @property
    def step_statistics(self) -> tuple[StepStatistic, ...]:
        return (StepStatistic("median nll", lambda stats, context: stats.nll.detach(), "median"),)

    def focus(self, stats: TokenStats, context: Context = NO_CONTEXT) -> Tensor:
        return torch.zeros_like(stats.log_p)

    def evaluate(self, stats: TokenStats, context: Context = NO_CONTEXT) -> tuple[Tensor, Tensor]:
        cap = self.k * self.step_value(self.step_statistics[0], stats, context)
        nll = stats.nll.detach()
        gate = torch.where(nll <= cap, 1.0, cap / nll)
        # sg[cap / NLL] * NLL has the value cap and the gate's gradient; at p = 0 only the value is left
        return gate, torch.where(gate == 0, cap, weighted_nll(stats.log_p, gate))
