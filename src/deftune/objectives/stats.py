"""What an objective may see: the statistics of supervised tokens, and the context of the optimizer step."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""The label of a token that is not supervised; every function of deftune skips it."""

STATISTICS = ("log_p", "entropy", "log_collision")
"""The vectors of `TokenStats` that are computed from a row of logits."""


@dataclass(frozen=True)
class TokenStats:
    """The statistics of the supervised tokens, as flat vectors. An objective reads these and nothing else of a token.

    With P = softmax(z), p = P[target], one entry per supervised token:

    - ``log_p``: log p
    - ``entropy``: -sum_v P_v log P_v
    - ``log_collision``: log sum_v P_v^2, minus the Rényi-2 entropy
    - ``targets``: the target ids
    - ``vocab_size``: V

    The first three are float64 where the device has it, because float32 would round log p = -11.93 by more than 2e-7.
    The likeliest tokens cost more and are computed only when ``top_log_p`` is called. `token_stats` and
    `linear_token_stats` make the statistics from a model, `from_columns` from numbers of another source.

    >>> stats = from_columns(log_p=[-0.1, -3.0], entropy=[0.4, 2.0], log_collision=[-0.2, -1.5], vocab_size=100)
    >>> len(stats), stats.nll, stats.concentration
    (2, tensor([0.1000, 3.0000], dtype=torch.float64), tensor([0.8187, 0.2231], dtype=torch.float64))
    """

    log_p: Tensor
    entropy: Tensor
    log_collision: Tensor
    targets: Tensor
    vocab_size: int
    _top_source: Callable[[int], Tensor] | None = field(default=None, repr=False, compare=False)
    # (k, `top_entropy(k)`), where a kernel has computed it with the likeliest tokens
    _top_entropy: tuple[int, Tensor] | None = field(default=None, repr=False, compare=False)

    @property
    def p(self) -> Tensor:
        """The target's probability."""
        return self.log_p.exp()

    @property
    def error(self) -> Tensor:
        """The prediction error 1 - p, exact for p near 1."""
        return -torch.expm1(self.log_p)

    @property
    def nll(self) -> Tensor:
        """-log p."""
        return -self.log_p

    @property
    def concentration(self) -> Tensor:
        """sum_v P_v^2 in [1/V, 1]: DEFT's focus."""
        return self.log_collision.exp()

    def top_log_p(self, k: int) -> Tensor:
        """Log-probabilities of the min(k, V) likeliest tokens, largest first: ``[tokens, min(k, V)]``."""
        if self._top_source is None:
            raise ValueError(
                f"these statistics hold no likeliest tokens, but the top {k} were asked for; set `top_k = {k}` in the "
                f"objective, or pass top_k={k} to the function that makes the statistics"
            )
        return self._top_source(k)

    def top_entropy(self, k: int) -> Tensor:
        """-sum q log q over the min(k, V) likeliest tokens, q their probabilities over the sum of these.

        >>> half = from_columns([-0.7], [0.7], [-0.7], vocab_size=9, top_log_p=torch.tensor([[0.5, 0.5, 0.0]]).log())
        >>> half.top_entropy(2)
        tensor([0.6931])
        """
        if self._top_entropy is not None and self._top_entropy[0] == min(k, self.vocab_size):
            return self._top_entropy[1]
        # H = log1p(r) + sum -u e^u / (1 + r), u = log P_j - log P_1 and r = sum e^u over j > 1: no term is negative, so
        # nothing cancels and H keeps its relative precision. -sum q log q loses it: where the likeliest token has
        # nearly everything, its log q = -log(1 + r) is rounded with 1 + r, by up to 2^-24 / r of it in float32
        top = self.top_log_p(k)
        u = (top[:, 1:] - top[:, :1]).clamp(min=-800)  # e^-800 is 0 in float64: 0 log 0 = 0
        share = u.exp()
        rest = share.sum(-1)
        return rest.log1p() - (share * u).sum(-1) / (1 + rest)

    def detach(self) -> TokenStats:
        """The same statistics, cut from the autograd graph."""
        return replace(self, **{name: getattr(self, name).detach() for name in STATISTICS})

    def map(self, change: Callable[[Tensor], Tensor], top_k: int = 0) -> TokenStats:
        """The record with ``change`` applied to each vector; of the logits it keeps the ``top_k`` likeliest tokens.

        >>> from_columns([-1.0, -2.0], [0.5, 0.6], [-0.5, -0.6], vocab_size=4).map(lambda vector: vector[1:]).nll
        tensor([2.], dtype=torch.float64)
        """
        top = columns_of(change(self.top_log_p(top_k)), self.vocab_size) if top_k else None
        vectors = {name: change(getattr(self, name)) for name in (*STATISTICS, "targets")}
        return replace(self, **vectors, _top_source=top, _top_entropy=None)

    def __len__(self) -> int:
        return self.log_p.shape[0]

    @staticmethod
    def cat(parts: Iterable[TokenStats]) -> TokenStats:
        """One record for several, in order: the micro-batches of a step, the chunks of a pass.

        >>> a = from_columns(log_p=[-1.0], entropy=[0.5], log_collision=[-0.5], vocab_size=4)
        >>> len(TokenStats.cat([a, a]))
        2
        """
        parts = list(parts)
        if not parts:
            raise ValueError("TokenStats.cat: nothing to join; pass at least one record")
        sizes = {part.vocab_size for part in parts}
        if len(sizes) > 1:
            raise ValueError(f"TokenStats.cat: the records have different vocabularies, {sorted(sizes)}")
        sources = [part._top_source for part in parts if part._top_source is not None]
        return TokenStats(
            **{name: torch.cat([getattr(part, name) for part in parts]) for name in (*STATISTICS, "targets")},
            vocab_size=sizes.pop(),
            _top_source=functools.partial(_take_from_all, sources) if len(sources) == len(parts) else None,
            _top_entropy=None,
        )


def from_columns(
    log_p: Tensor | list[float],
    entropy: Tensor | list[float],
    log_collision: Tensor | list[float],
    *,
    vocab_size: int,
    targets: Tensor | list[int] | None = None,
    top_log_p: Tensor | None = None,
) -> TokenStats:
    """Token statistics from columns that were measured elsewhere: a log, a table, another engine.

    >>> from_columns([-0.5], [1.0], [-0.7], vocab_size=10).p
    tensor([0.6065], dtype=torch.float64)

    Args:
        log_p: log-probability of each target, ``[tokens]``.
        entropy: entropy of each distribution in nats, ``[tokens]``.
        log_collision: log sum P^2, ``[tokens]``.
        vocab_size: the number of classes V.
        targets: token ids, ``[tokens]``, for modifiers that read them; default: all 0.
        top_log_p: the k largest log-probabilities, ``[tokens, k]``, for objectives with ``top_k``.

    Returns:
        The statistics, for the methods of an `Objective`; lists become float64.

    Raises:
        ValueError: the columns are not flat, or not all equally long.
    """

    def column(values: Tensor | list[float]) -> Tensor:
        return values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.float64)

    columns = [column(log_p), column(entropy), column(log_collision)]
    if len({c.shape for c in columns}) != 1 or columns[0].dim() != 1:
        raise ValueError(
            f"from_columns: the columns must be flat and equally long, got shapes {[tuple(c.shape) for c in columns]}"
        )
    log_p, entropy, log_collision = columns
    ids = torch.zeros_like(log_p, dtype=torch.long) if targets is None else torch.as_tensor(targets)
    for name, given in (("targets", ids), ("top_log_p", top_log_p)):
        if given is not None and given.shape[:1] != log_p.shape:
            raise ValueError(f"from_columns: {name} has {len(given)} rows for {len(log_p)} tokens; one for each token")
    source = None if top_log_p is None else columns_of(top_log_p, vocab_size)
    return TokenStats(log_p, entropy, log_collision, ids, vocab_size, source)


def columns_of(top: Tensor, vocab_size: int) -> Callable[[int], Tensor]:
    """A source of the likeliest tokens out of ones already taken, refusing more than there are; it can be pickled."""
    return functools.partial(_take_columns, top, vocab_size)


def _take_columns(top: Tensor, vocab_size: int, k: int) -> Tensor:
    if min(k, vocab_size) > top.shape[-1]:
        raise ValueError(f"the top {k} were asked for, but these statistics were made with top_k={top.shape[-1]}")
    return top[:, : min(k, vocab_size)]


def _take_from_all(sources: Iterable[Callable[[int], Tensor]], k: int) -> Tensor:
    return torch.cat([source(k) for source in sources])


@dataclass(frozen=True)
class StepStats:
    """Statistics of one whole optimizer step, over all micro-batches and ranks; `step_stats` returns them.

    ``values`` maps the key of each `StepStatistic` to its number; ``num_items`` is the number of supervised tokens.
    """

    values: Mapping[str, Tensor]
    num_items: int

    def get(self, key: str, asker: object) -> Tensor:
        """The number of that key; an error that names the objective that asks where there is none."""
        if key not in self.values:
            raise ValueError(
                f"the context's step statistics lack {key!r}, which `{asker}` needs (they hold "
                f"{sorted(self.values)}); make them with deftune.step_stats for this very objective"
            )
        return self.values[key]


@dataclass(frozen=True)
class Context:
    """Inputs that some objectives need beside the statistics of a token; most objectives need none.

    - ``progress``: the share of training done, 0 to 1 (for ``| warmup``)
    - ``special_ids``: ids of end tokens (for ``| eos(...)``)
    - ``step``: statistics of the whole optimizer step from `step_stats` (for `clip`, `cayley-released`). Or
      ``"deferred"``, for mass objectives (`mile`, ``| mean_one``): the losses are not divided by the mean of the step,
      and the caller multiplies the accumulated gradients once by num_items / mass

    Raises:
        ValueError: a field has a value that cannot be meant.

    >>> from deftune import objective
    >>> stats = from_columns([-1.0, -1.0], [0.5, 0.5], [-0.5, -0.5], vocab_size=9, targets=[2, 3])
    >>> objective("linear | eos(nll)").gate(stats, Context(special_ids=(2,)))
    tensor([1.0000, 0.3679], dtype=torch.float64)
    """

    progress: float | None = None
    special_ids: tuple[int, ...] | None = None
    step: StepStats | Literal["deferred"] | None = None

    def __post_init__(self) -> None:
        if self.progress is not None and not (0.0 <= self.progress <= 1.0 and math.isfinite(self.progress)):
            raise ValueError(f"Context: progress is the share of training done, from 0 to 1, got {self.progress}")
        if isinstance(self.special_ids, int):
            raise ValueError(f"Context: special_ids is a tuple of ids, got the number {self.special_ids}; write (id,)")
        if self.special_ids is not None:
            object.__setattr__(self, "special_ids", tuple(int(i) for i in self.special_ids))
        if not (self.step is None or self.step == "deferred" or hasattr(self.step, "num_items")):
            raise ValueError(f"Context: step is what deftune.step_stats returns, or 'deferred', got {self.step!r}")

    def need_progress(self, asker: object) -> float:
        """The progress; an error that names the objective that asks where there is none."""
        if self.progress is None:
            raise ValueError(f"`{asker}` needs the training progress: pass context=Context(progress=step / num_steps)")
        return self.progress

    def need_special_ids(self, asker: object) -> tuple[int, ...]:
        """The special ids; an error that names the objective that asks where there are none."""
        if not self.special_ids:
            raise ValueError(
                f"`{asker}` needs the ids of the end and format tokens: pass "
                f"context=Context(special_ids=(tokenizer.eos_token_id, ...)); in a run's config, set data.end_tokens"
            )
        return self.special_ids


NO_CONTEXT = Context()
