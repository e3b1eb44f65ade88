"""The catalogue: every objective and modifier by name, with what a person choosing one wants to know."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from deftune.objectives.base import Objective
from deftune.objectives.family import Alpha, Bottom, Cayley, CayleyReleased, Clip, Deft, Dft, Eaft, Mile, Top
from deftune.objectives.modifiers import Blend, Eos, Floor, MeanOne, Modifier, Warmup


def nll() -> Objective:
    """-log p."""
    return Alpha(0.0)


def linear() -> Objective:
    """1 - p."""
    return Alpha(1.0)


def hellinger() -> Objective:
    """2 (1 - sqrt p)."""
    return Alpha(0.5)


OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "nll": nll,
    "linear": linear,
    "dft": Dft,
    "alpha": Alpha,
    "hellinger": hellinger,
    "cayley": Cayley,
    "cayley-released": CayleyReleased,
    "deft": Deft,
    "eaft": Eaft,
    "top": Top,
    "bottom": Bottom,
    "mile": Mile,
    "clip": Clip,
}
"""Objectives by name; `register` adds one."""

MODIFIERS: dict[str, Callable[..., Objective]] = {
    "floor": Floor,
    "eos": Eos,
    "blend": Blend,
    "warmup": Warmup,
    "mean_one": MeanOne,
}
"""Modifiers by name; each takes the objective before it."""


class About(NamedTuple):
    """A row of the catalogue's table."""

    usage: str
    gate: str
    value: str
    source: str
    use: str
    hurts: str


ABOUT: dict[str, About] = {
    "nll": About(
        "nll",
        "1",
        "-log p",
        "maximum likelihood",
        "the data is clean and the model has to learn new things",
        "noisy or conflicting labels: the least likely tokens take most of the gradient",
    ),
    "linear": About(
        "linear",
        "p",
        "1 - p",
        "-p of Li et al. 2025, 'Beyond Log Likelihood'",
        "the model is strong on the data already",
        "the model is weak: gradients vanish with p, and end tokens may never be learned",
    ),
    "dft": About(
        "dft",
        "p",
        "-sg[p] log p",
        "Wu et al. 2025, dynamic fine-tuning",
        "to match runs made with TRL's or LLaMA-Factory's dft",
        "as linear (the gradient is the same)",
    ),
    "alpha": About(
        "alpha(a)",
        "p^a",
        "(1 - p^a)/a",
        "DEFT's deformed-log family; GCE for 0 < a < 1",
        "one fixed point between nll (a=0) and linear (a=1) is wanted",
        "any single a is too open for noise or too shut for gaps; a > 1 ignores most tokens",
    ),
    "hellinger": About(
        "hellinger",
        "p^(1/2)",
        "2 (1 - sqrt p)",
        "alpha(0.5)",
        "a robust middle without a parameter to tune",
        "as alpha",
    ),
    "cayley": About(
        "cayley(kappa=1)",
        "p^a, a = (1-z)/(1+kappa z), z = sqrt(1-p)",
        "(1 - p^a)/a, a detached",
        "DEFT, Eq. alpha_star",
        "new knowledge matters and the labels are right: the gate reopens as p goes to 0",
        "confident conflicts: at p near 0 it pushes as hard as nll",
    ),
    "cayley-released": About(
        "cayley-released",
        "p^a, a = f + (1-f) p/(2-p), f = mean(p)/2, in [1e-3, 1]",
        "(1 - p^a)/a, a detached",
        "the authors' repository",
        "to compare with runs of the released code",
        "needs the whole step's mean p: a pre-pass under accumulation or several ranks",
    ),
    "deft": About(
        "deft",
        "p^a, a = sum P^2",
        "(1 - p^a)/a, a detached",
        "DEFT, Eq. deft_alpha",
        "labels may conflict with what the model knows: only a confident model is protected",
        "a confidently wrong model that must be corrected: its gate is shut",
    ),
    "eaft": About(
        "eaft(k=20, power=1, norm=lnk|3|none|full)",
        "(H_top-k / ln k)^power",
        "gate * -log p, gate detached",
        "Diao et al. 2026, entropy-adaptive fine-tuning",
        "confident conflicts are the trouble, and low-p tokens are to be learned otherwise",
        "confident and right tokens get little too: sharpening is slow",
    ),
    "top": About(
        "top(t, of=nll|linear)",
        "1[p >= t] * gate of nll or linear",
        "1[p >= t] * its value",
        "Beyond Log Likelihood; ProFit is top(0.1)",
        "an ablation: are the unlikely tokens worth anything?",
        "everything the model does not know yet is ignored",
    ),
    "bottom": About(
        "bottom(t, of=nll|linear)",
        "1[p < t] * gate of nll or linear",
        "1[p < t] * its value",
        "Beyond Log Likelihood",
        "an ablation: what top leaves out",
        "learns from the least likely tokens alone",
    ),
    "mile": About(
        "mile(gamma=1)",
        "(1+H)^gamma / its step mean",
        "gate * -log p, gate detached",
        "MiLe loss",
        "a control: weights of mean one, so learning rates compare with nll",
        "gives noise in uncertain places more weight",
    ),
    "clip": About(
        "clip(k=3)",
        "min(1, k median/NLL), detached",
        "min(NLL, k median)",
        "a robust-statistics control",
        "a simple baseline to beat: outliers are capped",
        "needs the whole step's median: a pre-pass under accumulation or several ranks",
    ),
    "floor": About(
        "... | floor(g)",
        "max(gate, g)",
        "value + sg[max(0, g - gate)] * NLL",
        "modifier",
        "a shut gate must not lose a token altogether",
        "lets some of the noise back in",
    ),
    "eos": About(
        "... | eos(o)",
        "gate of o on the special ids",
        "value of o there",
        "modifier",
        "models tuned with p-gates that never stop: eos(nll)",
        "format tokens that are wrong in the data are learned fully",
    ),
    "blend": About(
        "... | blend(o, w)",
        "(1-w) gate + w gate of o",
        "the same mix",
        "modifier",
        "to hedge between two objectives",
        "one more number to tune",
    ),
    "warmup": About(
        "... | warmup(f)",
        "1 until progress f, linear to the gate at 2f",
        "the same mix",
        "modifier",
        "the first steps must open up a weak model",
        "conflicts are learned fully meanwhile",
    ),
    "mean_one": About(
        "... | mean_one",
        "gate / its step mean",
        "value / the same mean",
        "modifier, last only",
        "to tell an objective's shape from a smaller learning rate",
        "a step of few open gates gets large ones",
    ),
}


T = TypeVar("T", bound=Callable[..., Objective])


def register(name: str) -> Callable[[T], T]:
    """Add an objective or a modifier of your own to the catalogue, so that specs can name it.

    >>> from dataclasses import dataclass
    >>> from deftune import Focus, objective
    >>> @register("half-deft")
    ... @dataclass(frozen=True)
    ... class HalfDeft(Focus):
    ...     scale: float = 0.5
    ...     def focus(self, stats, context=None):
    ...         return self.scale * stats.concentration
    >>> objective("half-deft(scale=0.25) | floor(0.1)").inner, str(HalfDeft(0.25))
    (HalfDeft(scale=0.25), 'half-deft(scale=0.25)')
    >>> _ = OBJECTIVES.pop("half-deft")

    Args:
        name: the name in specs: letters, digits, ``_`` and ``-``, beginning with a letter.

    Returns:
        A decorator for a class, or for a function that returns an `Objective`. A subclass of `Modifier` becomes a
        modifier, everything else an objective.

    Raises:
        ValueError: a spec could not spell the name, the catalogue has it, or the class has another ``name``.
    """
    if not re.fullmatch(r"[A-Za-z][\w-]*", name):
        raise ValueError(f"register: {name!r} is no name; use letters, digits, _ and -, beginning with a letter")
    if name in OBJECTIVES or name in MODIFIERS:
        raise ValueError(f"register: {name!r} is in the catalogue already; choose another name")

    def add(factory: T) -> T:
        _set_name(factory, name)
        (MODIFIERS if _is_modifier(factory) else OBJECTIVES)[name] = factory
        return factory

    return add


def _is_modifier(factory: object) -> bool:
    return isinstance(factory, type) and issubclass(factory, Modifier)


def _set_name(factory: object, name: str) -> None:
    """Give a class the name of its spec, so that ``str()`` of an instance is a spec again."""
    if isinstance(factory, type) and issubclass(factory, Objective):
        if factory.name not in ("", name):
            raise ValueError(f"register: the class's own name is {factory.name!r}, not {name!r}; make them the same")
        factory.name = name
