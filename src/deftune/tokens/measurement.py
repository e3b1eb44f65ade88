"""What a model thinks of each supervised token, and what each objective does to it: from rows to columns of numbers.

The head is applied to the supervised positions alone, a chunk at a time: no [tokens, V] tensor is ever whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deftune.data.encoding import Encoded
from deftune.data.packing import Collator
from deftune.losses.statistics import logits_stats, supervised_index, wide
from deftune.objectives import IGNORE_INDEX, Context, Focus, Objective
from deftune.objectives import objective as parse_objective
from deftune.objectives.modifiers import Modifier
from deftune.tokens.head import HeadOptions, shifted

CHUNK_BYTES = {"cpu": 256 << 20}  # of float32 logits at a time
CHUNK_BYTES_ELSEWHERE = 1 << 30


def parse_objectives(specs: Iterable[str | Objective]) -> list[Objective]:
    """Objectives that a token alone determines; one that needs a whole optimizer step has no place in a table."""
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


def has_focus(objective: Objective) -> bool:
    """Whether the objective is given by a focus: weighted NLL has none.

    >>> has_focus(parse_objective("deft | floor(0.1)")), has_focus(parse_objective("eaft"))
    (True, False)
    """
    while isinstance(objective, Modifier):
        objective = objective.inner
    return isinstance(objective, Focus)


class Measurement:
    """What the head does with the hidden states here: the supervised tokens' columns, flat, in the targets' order."""

    def __init__(self, objectives: Sequence[Objective], context: Context):
        self.objectives, self.context = objectives, context

    @torch.no_grad()
    def __call__(self, head: Any, hidden: Tensor, targets: Tensor, options: HeadOptions) -> dict[str, Tensor]:
        flat, targets = hidden.flatten(0, -2), targets.flatten()
        index = supervised_index(targets)
        rows = max(1, CHUNK_BYTES.get(hidden.device.type, CHUNK_BYTES_ELSEWHERE) // (4 * head.weight.shape[0]))
        parts: list[dict[str, Tensor]] = []
        for part in index.split(rows):
            z = torch.nn.functional.linear(flat[part].to(head.weight.dtype), head.weight, head.bias).float()
            z = z.mul_(options.logit_scale)
            if options.softcap is not None:
                z = z.div_(options.softcap).tanh_().mul_(options.softcap)
            parts.append(self.columns(z, targets[part]))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def columns(self, z: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """A table's numbers from ``[tokens, V]`` logits.

        ||P - e_y||^2 = (1-p)^2 + sum_{v != y} P_v^2 from sums that leave the target out: sum P^2 - 2p + 1 would lose
        all its digits as p goes to 1.
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
        for objective in self.objectives:
            gate = objective.gate(stats, self.context)
            if has_focus(objective):
                columns[f"focus:{objective}"] = objective.focus(stats, self.context)
            columns[f"gate:{objective}"] = gate
            columns[f"signal:{objective}"] = gate * stats.error
            columns[f"gradient:{objective}"] = gate * error_norm
        return columns


def measure(
    model: Any, pad_token_id: int, examples: Sequence[Encoded], measurement: Measurement, batch_tokens: int,
    progress: Callable[[int], None] = lambda _: None,
) -> list[dict[str, np.ndarray]]:  # fmt: skip
    """Each example's columns, in the examples' order; batches hold at most ``batch_tokens`` places, padding included.

    An example longer than that makes a batch of its own. ``progress`` is called with each batch's number of rows.
    """
    found: dict[int, dict[str, np.ndarray]] = {}
    collator = Collator(pad_token_id, padding_free=False)
    for places in batches_of([len(example.input_ids) for example in examples], batch_tokens):
        batch = collator([examples[i] for i in places])
        targets = shifted(batch.pop("labels"))
        inputs = {name: value.to(model.device) for name, value in batch.items()}
        try:
            columns = model(**inputs, deft_targets=targets.to(model.device), deft_call=measurement)
        except ValueError as error:  # NaN
            raise ValueError(f"{examples[places[0]].where} to {examples[places[-1]].where}: {error}") from error
        ends = np.cumsum((targets != IGNORE_INDEX).sum(1).numpy())[:-1]
        split = {name: np.split(column.cpu().numpy(), ends) for name, column in columns.items()}
        for i, place in enumerate(places):
            found[place] = {name: parts[i] for name, parts in split.items()}
        progress(len(places))
    return [found[i] for i in range(len(examples))]


def batches_of(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Places of rows that go through the model together: of similar length, rows x longest <= ``batch_tokens``.

    >>> list(batches_of([3, 9, 2, 5], 10))
    [[2, 0], [3], [1]]
    """
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and (len(batch) + 1) * lengths[i] > batch_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
