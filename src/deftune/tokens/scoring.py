"""Token statistics of a model on given rows, without gradients: what a model thinks of the answers it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deftune.data.encoding import Encoded
from deftune.data.packing import Collator
from deftune.objectives import IGNORE_INDEX, Context, TokenStats
from deftune.objectives import objective as parse_objective
from deftune.objectives.stats import columns_of
from deftune.tokens.head import ObjectiveCall, attach_objective, base_of, shifted


@dataclass(frozen=True)
class Scores:
    """The supervised tokens of some rows: their statistics, flat, and the row each belongs to."""

    stats: TokenStats
    rows: Tensor  # [tokens]

    def columns(self) -> dict[str, Tensor]:
        """What is compared between models, [tokens] each."""
        s = self.stats
        return {"nll": s.nll, "p": s.p, "focus": s.concentration, "entropy": s.entropy}


def score(
    model: Any, tokenizer: Any, examples: Sequence[Encoded], *, batch_size: int = 8,
    progress: Callable[[int], None] = lambda _: None,
) -> Scores:  # fmt: skip
    """Run a model over encoded rows; the result is in the rows' order."""
    parts: list[tuple[int, TokenStats]] = []
    for part in score_batches(model, tokenizer, examples, batch_size=batch_size):
        parts.append(part)
        progress(1)
    parts.sort(key=lambda part: part[0])
    rows = torch.cat([torch.full((len(part),), place) for place, part in parts])
    return Scores(TokenStats.cat([part for _, part in parts]), rows)


def score_batches(
    model: Any, tokenizer: Any, examples: Sequence[Encoded], *, batch_size: int = 8, top_k: int = 0
) -> Iterator[tuple[int, TokenStats]]:  # fmt: skip
    """(place, its tokens' statistics) of each row as it is scored; rows of similar length go together.

    ``top_k`` asks for the log-probabilities of the likeliest tokens too.
    """
    attach_objective(base_of(model))
    model.eval()
    call = ObjectiveCall(parse_objective("nll"), Context(), None, statistics_only=True, top_k=top_k)
    collator = Collator(tokenizer.pad_token_id, padding_free=False)
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].input_ids))
    for start in range(0, len(order), batch_size):
        places = order[start : start + batch_size]
        batch = {name: value.to(model.device) for name, value in collator([examples[i] for i in places]).items()}
        targets = shifted(batch.pop("labels"))
        with torch.no_grad():  # not around a yield: it would hold for the caller too
            stats = model(**batch, deft_targets=targets, deft_call=call).stats
        first = 0
        for place, count in zip(places, (targets != IGNORE_INDEX).sum(1).tolist()):
            yield place, taken(stats, slice(first, first + count), top_k)
            first += count


def taken(stats: TokenStats, part: slice, top_k: int = 0) -> TokenStats:
    """Some of the tokens, on the host."""
    log_p, entropy, collision, targets = (
        column[part].cpu() for column in (stats.log_p, stats.entropy, stats.log_collision, stats.targets)
    )
    top = columns_of(stats.top_log_p(top_k)[part].cpu(), stats.vocab_size) if top_k else None
    return TokenStats(log_p, entropy, collision, targets, stats.vocab_size, top)


@dataclass(frozen=True)
class Estimate:
    """A mean over tokens with a 95% interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def bootstrap(values: Tensor, rows: Tensor, *, samples: int = 2000, seed: int = 0) -> Estimate:
    """The mean over tokens and its percentile interval; rows are resampled, since the tokens of a row go together.

    >>> bootstrap(torch.ones(4), torch.tensor([0, 0, 1, 1]))
    Estimate(mean=1.0, low=1.0, high=1.0)
    """
    _, index = rows.unique(return_inverse=True)
    number = int(index.max()) + 1
    sums = torch.zeros(number, dtype=torch.float64).index_add_(0, index, values.double())
    counts = torch.zeros(number, dtype=torch.float64).index_add_(0, index, torch.ones_like(values, dtype=torch.float64))
    chosen = torch.randint(number, (samples, number), generator=torch.Generator().manual_seed(seed))
    means = sums[chosen].sum(1) / counts[chosen].sum(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Estimate(float(sums.sum() / counts.sum()), low, high)
