"""The statistics of a token from a row of logits: one pass, in blocks, by sums that reduce over vocabulary shards.

For a row z with target y, m = max z, u = z - m, E = e^u:

    rest = sum_{v != y} E    squares = sum_{v != y} E^2    moment = sum_{v != y} u E

The sums leave the target out: its error 1 - p = rest / (E_y + rest) then keeps its relative precision as p goes to 1.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deftune.losses.checks import check_logits, label_error, nan_error
from deftune.losses.dtensors import local_logits
from deftune.losses.eager import eager
from deftune.losses.shards import VocabShard
from deftune.objectives.stats import IGNORE_INDEX, STATISTICS, TokenStats, columns_of

# a block that fits a core's share of the cache is three times faster; a GPU needs fewer, larger blocks
BLOCK_BYTES = {"cpu": 1 << 20}
BLOCK_BYTES_ELSEWHERE = 64 << 20


COLUMNS = ("log_p", "entropy", "log_collision", "log_sum", "shift")
"""The rows of ``columns`` [5, tokens], float64, which backends fill: the statistics, log sum e^u and max z.

To add a statistic, append its name here and in `STATISTICS`, its sum in `RowSums`, and see `triton_statistics`.
"""
LOG_P, ENTROPY, LOG_SUM, SHIFT = (COLUMNS.index(name) for name in ("log_p", "entropy", "log_sum", "shift"))


class RowSums(NamedTuple):
    """One row's sums, each ``[rows]``; shards of a vocabulary combine by max, then by addition after rescaling."""

    shift: Tensor  # m
    target: Tensor  # z_y
    rest: Tensor
    squares: Tensor
    moment: Tensor


def rescaled(sums: RowSums, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(rest, squares, moment) about another shift, at least as large."""
    lower = sums.shift - shift
    factor = lower.exp()
    # sum (u + d) e^{u + d}, with 0 * -inf = 0 for a shard of nothing but -inf
    moment = torch.where(factor == 0, 0.0, (sums.moment + lower * sums.rest) * factor)
    return sums.rest * factor, sums.squares * factor**2, moment


def merge_ranks(sums: RowSums, y: Tensor, shard: VocabShard) -> RowSums:
    """The sums of whole rows from those of this rank's classes: a MAX of three numbers a row, then a SUM of four.

    ``y`` are the targets' columns (`VocabShard.columns`). A row whose target differs among the ranks becomes NaN, on
    all of them.
    """
    sums, labels = RowSums(*(wide(column) for column in sums)), wide(shard.labels(y))
    shift, most, least = shard.maximum(torch.stack([sums.shift, labels, -labels]))
    parts = [*rescaled(sums, shift), torch.where(y >= 0, sums.target, 0.0)]
    rest, squares, moment, target = shard.total(torch.stack(parts))
    return RowSums(shift, torch.where(most == -least, target, torch.nan), rest, squares, moment)


def wide_dtype(device: torch.device) -> torch.dtype:
    """Per-token vectors are float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def wide(tensor: Tensor) -> Tensor:
    return tensor.to(wide_dtype(tensor.device))


def stats_columns(sums: RowSums) -> tuple[Tensor, ...]:
    """The `COLUMNS` of rows, with log_sum = log sum_v e^u.

    log_p = u_y - log S;  log_collision = log sum E^2 - 2 log S;  entropy = log S - sum u E / S.
    """
    u_y = wide(sums.target) - wide(sums.shift)
    rest, squares, moment = wide(sums.rest), wide(sums.squares), wide(sums.moment)
    # S = E_y + rest = 1 + (expm1 u_y + rest): exact where the target is the maximum
    log_sum = torch.log1p(torch.expm1(u_y) + rest)
    log_p = u_y - log_sum
    log_collision = (torch.log1p(torch.expm1(2 * u_y) + squares) - 2 * log_sum).clamp(max=0)
    own = torch.where(u_y == -torch.inf, 0.0, u_y * u_y.exp())  # 0 * -inf = 0
    entropy = (log_sum - (own + moment) / log_sum.exp()).clamp(min=0)
    return log_p, entropy, log_collision, log_sum, wide(sums.shift)


def block_rows(vocab_size: int, dtype: torch.dtype, device: torch.device) -> int:
    """Rows of one working block."""
    limit = BLOCK_BYTES.get(device.type, BLOCK_BYTES_ELSEWHERE)
    return max(1, limit // (max(1, vocab_size) * dtype.itemsize))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_blocks(logits: Tensor, index: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
    """(positions in the index, those rows) of ``[..., V]`` logits by flat index, without a copy of all rows.

    The rows have the logits' own dtype and must not be written to.
    """
    leading = logits.shape[:-1]
    try:
        flat = logits.view(-1, logits.shape[-1])
    except RuntimeError:  # leading dimensions that do not merge, as in logits[:, :-1]
        flat = None
    for start in range(0, len(index), size):
        part = slice(start, min(start + size, len(index)))
        if flat is None:
            yield part, logits[torch.unravel_index(index[part], leading)]
        elif len(index) == len(flat):
            yield part, flat[part]
        else:
            yield part, flat.index_select(0, index[part])


def row_sums(logits: Tensor, index: Tensor, columns: Tensor, partial: bool = False) -> RowSums:
    """The sums of the rows of ``index``; ``columns`` are their targets', below 0 (``partial``) if another rank's."""
    dtype = compute_dtype(logits.dtype)
    sums = torch.empty(len(RowSums._fields), len(index), dtype=dtype, device=logits.device)
    size = min(block_rows(logits.shape[-1], dtype, logits.device), max(1, len(index)))
    e = torch.empty(size, logits.shape[-1], dtype=dtype, device=logits.device)
    u = torch.empty_like(e)
    for part, z in row_blocks(logits, index, size):
        block_sums(z, columns[part], u[: len(z)], e[: len(z)], sums[:, part], partial)
    return RowSums(*sums)


def block_sums(z: Tensor, y: Tensor, u: Tensor, e: Tensor, out: Tensor, partial: bool = False) -> None:
    """The `RowSums` of one block into ``out`` [5, rows]; ``u`` and ``e`` are buffers.

    ``partial``: the columns are those of a shard, where a target may be missing (y < 0), all may be -inf, or none
    may be there.
    """
    if partial and not z.shape[1]:
        out[0], out[1:] = -torch.inf, 0.0
        return
    own, y = y[:, None] >= 0, y[:, None].clamp(min=0) if partial else y[:, None]
    shift = z.amax(-1, keepdim=True)
    out[0], out[1] = shift[:, 0], z.gather(-1, y)[:, 0]
    if partial:  # -inf - -inf is NaN
        shift = shift.clamp(min=torch.finfo(shift.dtype).min)
    widened_difference(z, shift, u)
    torch.exp(u, out=e)
    e.scatter_(-1, y, torch.where(own, 0.0, e.gather(-1, y))) if partial else e.scatter_(-1, y, 0)
    torch.sum(e, -1, out=out[2])
    out[3] = torch.linalg.vecdot(e, e)
    out[4] = torch.linalg.vecdot(u, e)
    if z.device.type != "cpu" or bool(out[4].isnan().any()):
        # u = -inf where E = 0: the product is 0. Below -800 E is 0 in float64 too, so the bound changes nothing else
        out[4] = torch.linalg.vecdot(u.clamp_(min=-800), e)


def widened_difference(z: Tensor, shift: Tensor, out: Tensor) -> None:
    """z - shift in the precision of ``out``: torch would subtract half precision in half precision."""
    torch.sub(z if z.dtype == out.dtype else out.copy_(z), shift.to(out.dtype), out=out)


def stats_of(
    columns: Tensor | Sequence[Tensor],
    top: Tensor | None,
    targets: Tensor,
    vocab_size: int,
    top_entropy: Tensor | None = None,
) -> TokenStats:
    """Statistics out of `COLUMNS` and the log-probabilities of the likeliest tokens."""
    source = None if top is None else columns_of(top, vocab_size)
    measured = None if top is None or top_entropy is None else (top.shape[1], top_entropy)
    vectors = {name: column for name, column in zip(COLUMNS, columns) if name in STATISTICS}
    return TokenStats(**vectors, targets=targets, vocab_size=vocab_size, _top_source=source, _top_entropy=measured)


def log_p_of(largest: Tensor, columns: Tensor) -> Tensor:
    """Log-probabilities of logits from the columns [5, M] of their rows: z - log_sum - shift."""
    return wide(largest) - (columns[LOG_SUM] + columns[SHIFT])[:, None]


def plain(device: torch.device) -> AbstractContextManager[Any]:
    """No gradients, the sums in float32 or better whatever autocast says, kernels on the tensors' own device."""
    several = device.type == "cuda" and torch.cuda.device_count() > 1
    return _plain(device, several) if several or torch.is_autocast_enabled(device.type) else torch.no_grad()


@contextmanager
def _plain(device: torch.device, several: bool) -> Generator[None]:
    on_device = torch.cuda.device(device) if several else nullcontext()
    with torch.no_grad(), torch.autocast(device.type, enabled=False), on_device:
        yield


def supervised_index(targets: Tensor) -> Tensor:
    """Flat indices of the supervised tokens."""
    return (targets != IGNORE_INDEX).nonzero()[:, 0]


def supervised_rows(targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """(flat indices, labels) of the supervised tokens; a label outside [0, V) is an error that names it."""
    index = supervised_index(targets)
    labels = targets[index]
    if len(labels):
        low, high = torch.stack(labels.aminmax()).tolist()  # one read of the device
        if low < 0 or high >= vocab_size:
            bad = index[((labels < 0) | (labels >= vocab_size)).nonzero()[0, 0]]
            raise label_error(int(bad), int(targets[bad]), vocab_size)
    return index, labels


@dataclass(frozen=True)
class TopOfLogits:
    """The likeliest tokens of some rows, taken from the logits when first asked for; of a shard, on every rank."""

    logits: Tensor
    index: Tensor
    log_total: Tensor  # log sum e^z of each row
    shard: VocabShard | None
    taken: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def __call__(self, k: int) -> Tensor:
        logits, shard = self.logits, self.shard
        k = min(k, logits.shape[-1] if shard is None else shard.vocab_size)
        if k not in self.taken:
            dtype = compute_dtype(logits.dtype)
            top = torch.empty(len(self.index), min(k, logits.shape[-1]), dtype=dtype, device=logits.device)
            with torch.no_grad():
                for part, z in row_blocks(logits, self.index, block_rows(logits.shape[-1], dtype, logits.device)):
                    top[part] = z.topk(top.shape[1], -1).values.to(dtype)
                top = top if shard is None else shard.likeliest(top, k)
            self.taken[k] = wide(top) - self.log_total[:, None]
        return self.taken[k]


def logits_stats(
    logits: Tensor, targets: Tensor, shard: VocabShard | None = None
) -> tuple[TokenStats, Tensor, RowSums, Tensor]:
    """(statistics, supervised index, sums, log_sum) of flat targets; bad labels and NaN rows are errors at once."""
    vocab_size = logits.shape[-1] if shard is None else shard.vocab_size
    index, targets = supervised_rows(targets, vocab_size)
    with plain(logits.device):
        if shard is None:
            sums = row_sums(logits, index, targets)
        else:
            own = shard.columns(targets, logits.shape[-1])
            sums = merge_ranks(row_sums(logits, index, own, partial=True), own, shard)
        columns = stats_columns(sums)
    if bool((bad := columns[LOG_P].isnan()).any()):
        raise nan_error(int(index[bad.nonzero()[0, 0]]), "logits", shard is not None)
    log_sum = columns[LOG_SUM]
    top = TopOfLogits(logits, index, columns[SHIFT] + log_sum, shard)
    return replace(stats_of(columns, None, targets, vocab_size), _top_source=top), index, sums, log_sum


@eager
def token_stats(logits: Tensor, targets: Tensor, *, shard: VocabShard | None = None) -> TokenStats:
    """The statistics of the supervised tokens of ``[..., V]`` logits: log p, entropy and log sum P^2.

        u = z - max z;  log_p = u_y - log sum e^u;  log_collision = log sum e^{2u} - 2 log sum e^u

    No gradient flows: for a loss use `token_loss`. The rows are read once, in blocks, without a copy of the logits; the
    result keeps a reference to the logits for `TokenStats.top_log_p`.

    Args:
        logits: ``[..., V]``.
        targets: ``[...]`` token ids, already shifted; IGNORE_INDEX (-100) is skipped.
        shard: the classes of this rank, if ranks share the vocabulary (`VocabShard`); not needed for a DTensor sharded
            on its last dimension. Every rank gets the statistics of the whole vocabulary. If one rank calls
            `TokenStats.top_log_p`, all ranks must call it.

    Returns:
        One entry for each supervised token, in the order of the targets.

    Raises:
        ValueError: a label is outside [0, V), or logits are NaN.

    >>> stats = token_stats(torch.tensor([[0.0, 0.0], [9.0, 0.0]]), torch.tensor([1, -100]))
    >>> stats.p, stats.concentration
    (tensor([0.5000], dtype=torch.float64), tensor([0.5000], dtype=torch.float64))
    """
    with torch.no_grad():
        logits, targets, _, shard = local_logits(logits, targets, None, shard)
        check_logits(logits, targets, shard is not None)
        if shard is not None:
            shard = shard.checked(logits.shape[-1], logits.device, "logits")
        return logits_stats(logits.detach(), targets.reshape(-1), shard)[0]
