"""The one pass of a model over rows, without gradients: statistics of every supervised token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deftune.artifacts.embedding import check_embedded
from deftune.data.encoding import Encoded, Encoder, encode_rows
from deftune.data.packing import Collator
from deftune.data.rows import BadRows, Row
from deftune.data.sources import parse_row
from deftune.losses import raise_pending
from deftune.losses.chunks import Supervised
from deftune.losses.head import Head
from deftune.losses.request import gemm_dtype
from deftune.losses.statistics import logits_stats, supervised_index, wide
from deftune.losses.torch_backend import TorchBackend
from deftune.objectives import IGNORE_INDEX, Context, Focus, Objective, TokenStats
from deftune.objectives import objective as parse_objective
from deftune.objectives.base import Modifier
from deftune.tokens.head import (
    HeadCall,
    ObjectiveOutput,
    StatisticsCall,
    base_of,
    check_head,
    evaluating,
    objective_forward,
    shifted,
)
from deftune.tokens.pieces import Pieces

BATCH_TOKENS = 8192
CHUNK_BYTES = {"cpu": 256 << 20}  # of float32 logits at a time
CHUNK_BYTES_ELSEWHERE = 1 << 30


# --- the pass ---------------------------------------------------------------------------------------------------------


class RowTokens(NamedTuple):
    """The supervised tokens of one row after the pass, on the host."""

    place: int  # of the row in the examples
    stats: TokenStats
    columns: dict[str, Tensor]  # those of the `Measurement`; empty without one


def token_passes(
    model: Any, tokenizer: Any, examples: Sequence[Encoded], *, measurement: Measurement | None = None, top_k: int = 0,
    batch_tokens: int = BATCH_TOKENS, batch_rows: int | None = None,
) -> Iterator[RowTokens]:  # fmt: skip
    """Run a model once over encoded rows and yield each row's token statistics as soon as its batch is done.

    Rows of similar length go through the model together. The batching changes no number beyond the rounding of matrix
    products. Between two batches the model is exactly as the caller left it: class, forward, training mode.

    Args:
        model: a causal LM of transformers, or PEFT's wrapper of one.
        tokenizer: its tokenizer, for the padding id.
        examples: encoded rows, each with at least one supervised token.
        measurement: also compute the columns of a token table.
        top_k: also keep the log-probabilities of the ``top_k`` likeliest tokens (`TokenStats.top_log_p`).
        batch_tokens: the most places in a batch, padding included; a longer row makes a batch of its own.
        batch_rows: the most rows in a batch; None is no limit.

    Raises:
        ValueError: logits are NaN (the error names the rows), a token has no embedding, or the fused functions cannot
            reproduce the head.
    """
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens: at least 1, got {batch_tokens}")
    base = base_of(model)
    check_head(base)
    for example in examples:
        check_embedded(model, tokenizer, (max(example.input_ids),), example.where)
    if len(examples) > 1:  # rows of other lengths are padded
        check_embedded(model, tokenizer, (tokenizer.pad_token_id,), "the padding token")
    call = measurement or StatisticsCall(top_k)
    collator = Collator(tokenizer.pad_token_id, padding_free=False)
    for places in batches_of([len(example.input_ids) for example in examples], batch_tokens, batch_rows):
        batch = {name: value.to(model.device) for name, value in collator([examples[i] for i in places]).items()}
        targets = shifted(batch.pop("labels"))
        try:
            with evaluating(model), objective_forward(base):
                output: ObjectiveOutput = model(**batch, deft_targets=targets, deft_call=call)
            raise_pending()  # on a GPU the fused functions report NaN late
        except ValueError as error:
            raise ValueError(f"{examples[places[0]].where} to {examples[places[-1]].where}: {error}") from error
        likeliest = 2 if measurement else top_k
        stats = output.stats.map(Tensor.cpu, likeliest)
        columns = {name: column.cpu() for name, column in (output.columns or {}).items()}
        start = 0
        for place, count in zip(places, (targets != IGNORE_INDEX).sum(1).tolist()):
            part = slice(start, start + count)
            own = stats.map(lambda vector, part=part: vector[part], likeliest)
            yield RowTokens(place, own, {name: column[part] for name, column in columns.items()})
            start += count


def batches_of(lengths: Sequence[int], batch_tokens: int, batch_rows: int | None = None) -> Iterator[list[int]]:
    """The places of rows that go through the model together, by length; rows x longest <= ``batch_tokens``.

    >>> list(batches_of([3, 9, 2, 5], 10)), list(batches_of([3, 9, 2, 5], 99, 2))
    ([[2, 0], [3], [1]], [[2, 0], [3, 1]])
    """
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and ((len(batch) + 1) * lengths[i] > batch_tokens or len(batch) == batch_rows):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


# --- the columns of a token table -------------------------------------------------------------------------------------


def parse_objectives(specs: Iterable[str | Objective]) -> list[Objective]:
    """The objectives of a token table; one that needs more than a token's own statistics is an error."""
    chosen = list(dict.fromkeys(map(parse_objective, specs)))
    for objective in chosen:
        if objective.kind != "local":
            raise ValueError(
                f"token table: the gate of `{objective}` depends on a whole optimizer step, which a table does not "
                f"have; leave it out (for `... | mean_one`, the gates of the objective before it are the same but for "
                f"a factor)"
            )
        if "progress" in objective.requires:
            raise ValueError(
                f"token table: `{objective}` depends on the training progress, which a table does not have; name the "
                f"objective that it ends in"
            )
    return chosen


def why_not_computable(objective: Objective, context: Context) -> str | None:
    """Why an objective has no gate in ``context``; None where it has one.

    >>> why_not_computable(parse_objective("deft | eos(nll)"), Context())
    'the tokens that end an answer, which it needs, are not known'
    """
    if "special_ids" in objective.requires and not context.special_ids:
        return "the tokens that end an answer, which it needs, are not known"
    return None


def token_context(encoder: Encoder) -> Context:
    """The context of a table's objectives: the tokens that end an answer."""
    return Context(special_ids=tuple(sorted(encoder.end_ids.values())))


def has_focus(objective: Objective) -> bool:
    """Whether the objective is given by a focus: weighted NLL has none.

    >>> has_focus(parse_objective("deft | floor(0.1)")), has_focus(parse_objective("eaft"))
    (True, False)
    """
    while isinstance(objective, Modifier):
        objective = objective.inner
    return isinstance(objective, Focus)


def entropy_column(temperature: float) -> str:
    """
    >>> entropy_column(0.5)
    'entropy:0.5'
    """
    return f"entropy:{temperature:g}"


class Measurement(HeadCall):
    """For token tables: all of their columns.

    The head is applied to the supervised positions alone, one chunk at a time, so that a ``[tokens, V]`` tensor of all
    tokens is never in memory.

    ``temperatures``: also the entropy of softmax(z / T) for each T, as column ``entropy:T``.

    Raises:
        ValueError: an objective cannot be computed from a token's own statistics and ``context``.
    """

    def __init__(self, objectives: Iterable[str | Objective], context: Context, temperatures: Sequence[float] = ()):
        self.objectives, self.context, self.temperatures = parse_objectives(objectives), context, tuple(temperatures)
        for objective in self.objectives:
            if reason := why_not_computable(objective, context):
                raise ValueError(f"token table: `{objective}`: {reason}; leave it out")

    @torch.no_grad()
    def compute(self, hidden: Tensor, head: Head, targets: Tensor) -> ObjectiveOutput:
        if head.shard is not None:
            raise ValueError("token table: tensor-parallel ranks share the head; load the model on one rank")
        hidden, targets = hidden.flatten(0, -2), targets.flatten()
        index = supervised_index(targets)
        # float32 logits of half-precision states too, as those of the fused loss: rounded ones have other statistics
        backend = TorchBackend(head, gemm_dtype(hidden), Supervised(hidden, index, targets[index]))
        rows = max(1, CHUNK_BYTES.get(hidden.device.type, CHUNK_BYTES_ELSEWHERE) // (4 * head.classes))
        stats: list[TokenStats] = []
        columns: list[dict[str, Tensor]] = []
        for start in range(0, len(index), rows):
            x, y, _ = backend.all.take(slice(start, start + rows))
            of_part, found = self.measure(backend.logits(x), y)
            stats.append(of_part.map(Tensor.cpu, 2))
            columns.append(found)
        joined = {name: torch.cat([part[name] for part in columns]) for name in columns[0]}
        return ObjectiveOutput(None, TokenStats.cat(stats), joined)

    def measure(self, z: Tensor, targets: Tensor) -> tuple[TokenStats, dict[str, Tensor]]:
        """The statistics and the columns of ``[tokens, V]`` logits.

        ||P - e_y||^2 = (1-p)^2 + sum_{v != y} P_v^2 comes from sums that leave the target out: sum P^2 - 2p + 1 would
        lose all its digits as p goes to 1.
        """
        stats, _, sums, log_sum = logits_stats(z, targets)
        rest, squares = wide(sums.rest), wide(sums.squares)
        error_norm = (squares + rest * rest).sqrt() * (-log_sum).exp()
        rank = (z > z.gather(-1, targets[:, None])).sum(-1)
        top = z.topk(2, -1)
        top_log_p = stats.top_log_p(2)
        # where the target ties with the largest, it is the argmax
        is_top = rank == 0
        other = torch.where(top.indices[:, 0] == targets, 1, 0)[:, None]
        columns = {
            "log_p": stats.log_p,
            "p": stats.p,
            "entropy": stats.entropy,
            "concentration": stats.concentration,
            "rank": rank,
            "top_id": torch.where(is_top, targets, top.indices[:, 0]),
            "top_log_p": torch.where(is_top, stats.log_p, top_log_p[:, 0]),
            "other_id": top.indices.gather(1, other)[:, 0],
            "other_log_p": top_log_p.gather(1, other)[:, 0],
        }
        for temperature in self.temperatures:
            columns[entropy_column(temperature)] = logits_stats(z / temperature, targets)[0].entropy
        for objective in self.objectives:
            gate = objective.gate(stats, self.context)
            if has_focus(objective):
                columns[f"focus:{objective}"] = objective.focus(stats, self.context)
            columns[f"gate:{objective}"] = gate
            columns[f"signal:{objective}"] = gate * stats.error
            columns[f"gradient:{objective}"] = gate * error_norm
        return stats, columns


# --- rows in, tokens out ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenScores:
    """The supervised tokens of some rows, flat, in the order of the rows: what `score_rows` returns."""

    stats: TokenStats  # log_p, entropy, log_collision, targets
    row: Tensor  # [tokens]: the index of the token's row
    position: Tensor  # [tokens]: the token's index in its row's sequence
    text: list[str]  # of each token
    columns: dict[str, Tensor]  # rank, top_id, gate:S, ... where objectives were given; else empty


def score_rows(
    model: Any, tokenizer: Any, rows: Sequence[Row | Mapping[str, Any]], *, encoder: Encoder | None = None,
    objectives: Iterable[str | Objective] = (), batch_tokens: int = BATCH_TOKENS, bad: BadRows | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> TokenScores:  # fmt: skip
    """The statistics of each supervised token of given rows.

    With P the model's distribution at a token and y its target: log p = log P[y], the entropy -sum P log P and
    log sum P^2. The model is left as it is.

    Args:
        model: a causal LM of transformers, or PEFT's wrapper of one.
        tokenizer: its tokenizer.
        rows: `deftune.data.rows.Row`s, or dicts such as ``{"messages": [...]}`` in any format that `train` reads.
        encoder: how rows become tokens and which of them are supervised; by default the tokenizer's chat template,
            the assistant's turns and at most 2048 tokens.
        objectives: also compute the focus, gate, signal and gradient norm of these objectives, and the token's rank.
        batch_tokens: the most places in a batch, padding included.
        bad: what to do with rows that cannot be encoded; by default the first one raises.
        progress: called with 1 after each row.

    Returns:
        The tokens of all rows; a row without a supervised token has none.

    Raises:
        ValueError: a row cannot be read or encoded, an objective needs a whole step, or logits are NaN.

    >>> from deftune.selftest.tiny import make_model, make_tokenizer
    >>> tokenizer = make_tokenizer()
    >>> chat = [{"role": "user", "content": "What is 12 plus 30?"}, {"role": "assistant", "content": "42"}]
    >>> scores = score_rows(make_model(tokenizer), tokenizer, [{"messages": chat}], objectives=["deft"])
    >>> scores.row.tolist(), scores.text
    ([0, 0, 0], ['4', '2', '<|im_end|>'])
    >>> scores.stats.p.shape, scores.columns["gate:deft"].shape
    (torch.Size([3]), torch.Size([3]))
    """
    given = [row if isinstance(row, Row) else parse_row(row, f"rows[{i}]") for i, row in enumerate(rows)]
    encoder = encoder or Encoder(tokenizer, max_length=2048)
    examples = encode_rows(given, encoder, bad=bad).examples
    chosen = list(objectives)
    measurement = Measurement(chosen, token_context(encoder)) if chosen else None
    found: list[RowTokens] = []
    for tokens in token_passes(model, tokenizer, examples, measurement=measurement, batch_tokens=batch_tokens):
        found.append(tokens)
        progress(1)
    found.sort(key=lambda tokens: tokens.place)
    positions = [supervised_places(example) for example in examples]
    pieces = Pieces(tokenizer)
    texts = [pieces.of(example.input_ids) for example in examples]
    return TokenScores(
        TokenStats.cat([tokens.stats for tokens in found]),
        torch.cat([torch.full((len(where),), place) for (place, _), where in zip(placed(given, examples), positions)]),
        torch.from_numpy(np.concatenate(positions)),
        [text[i] for text, where in zip(texts, positions) for i in where.tolist()],
        {name: torch.cat([tokens.columns[name] for tokens in found]) for name in found[0].columns},
    )


def supervised_places(example: Encoded) -> np.ndarray:
    """The positions of the supervised tokens; never the first token of the sequence, which nothing predicts."""
    return np.flatnonzero(np.asarray(example.labels[1:]) != IGNORE_INDEX) + 1


def placed(rows: Sequence[Row], examples: Sequence[Encoded]) -> Iterator[tuple[int, Encoded]]:
    """Each example with the index of its row: the examples are the rows in order, some left out."""
    place = 0
    for example in examples:
        while rows[place].where != example.where:
            place += 1
        yield place, example
        place += 1
