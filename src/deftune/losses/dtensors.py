"""DTensors as inputs of a loss: this rank's part of them, and the `VocabShard` that their placements describe.

Logits that are sharded on their last dimension have the same rows on all ranks of that mesh dimension. A weight alone
does not say so: ``Shard(0)`` is the placement of tensor parallelism, where the ranks share their rows, and of FSDP2,
where each rank has rows of its own. The hidden states decide: as a DTensor on the same mesh they say whether the rows
are replicated. A plain tensor of hidden states beside a sharded weight is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from deftune.losses.head import Head
from deftune.losses.shards import VocabShard, chunks_of
from deftune.objectives import Context, Objective

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> bool:
    """Whether the value is a DTensor; torch.distributed.tensor is not imported for it."""
    return isinstance(value, Tensor) and hasattr(value, "full_tensor")


def check_divided_rows(
    name: str, rows: Any, objective: Objective, reduction: str, num_items: object, context: Context | None
) -> None:
    """Refuse a loss of all rows where a DTensor gives each rank some of them, and the call names no count of all.

    Raises:
        ValueError: a mean over one rank's rows, or an objective of the whole step from these rows alone, is asked for.
    """
    if not is_dtensor(rows):
        return
    divided = [
        number
        for number, placement in enumerate(rows.placements)
        if placement.is_shard() and placement.dim % rows.dim() != rows.dim() - 1 and rows.device_mesh.size(number) > 1
    ]
    if divided and reduction == "mean" and num_items is None:
        raise ValueError(
            f"num_items: the rows of {name} are divided over mesh dimension {divided[0]}, and the mean over one rank's "
            f"rows is not that over all; pass num_items=the supervised tokens of all ranks, or reduction='sum'"
        )
    if divided and objective.kind != "local" and (context is None or context.step is None):
        raise ValueError(
            f"{name}: `{objective}` depends on the whole optimizer step, and mesh dimension {divided[0]} divides its "
            f"rows among ranks; pass context=Context(step=deftune.step_stats(...)), or redistribute {name}"
        )


def local_logits(
    logits: Any, targets: Any, weights: Any, shard: VocabShard | None
) -> tuple[Any, Any, Any, VocabShard | None]:
    """(logits, targets, weights, shard) of this rank; plain tensors pass through.

    Raises:
        ValueError: the logits' placements are not those of whole rows or of one vocabulary shard.
    """
    if not is_dtensor(logits):
        _refuse_dtensors("the logits are not", targets=targets, weights=weights)
        return logits, targets, weights, shard
    if shard is not None:
        raise ValueError("shard: the logits are a DTensor, which has its shard in its placements; drop one of them")
    at = _sharded_dim("logits", logits, logits.dim() - 1)
    if at is not None:
        shard = _shard(logits.device_mesh.get_group(at), logits.shape[-1], True)
    targets, weights = _beside("targets", targets, logits), _beside("weights", weights, logits)
    return logits.to_local(), targets, weights, shard


def local_head(
    hidden: Any, head: Head, targets: Any, weights: Any = None
) -> tuple[Tensor, Head, Tensor, Tensor | None]:
    """(hidden, head, targets, weights) of this rank; plain tensors pass through.

    The gradient of the hidden states leaves the loss as a DTensor that is still to be summed (``Partial``) over the
    ranks of the shard: an all-reduce, or a reduce-scatter where the hidden states came from a sharded sequence.

    Raises:
        ValueError: it is not plain that the ranks share the vocabulary, and the rows are the same on each of them.
    """
    weight: Any = head.weight
    bias: Any = head.bias
    if not (is_dtensor(weight) or is_dtensor(hidden)):
        _refuse_dtensors("hidden and weight are not", bias=bias, targets=targets, weights=weights)
        return hidden, head, targets, weights
    from torch.distributed.tensor import Partial, Replicate, Shard

    if not is_dtensor(weight) or not is_dtensor(hidden):
        raise ValueError(_one_of_two(is_dtensor(weight)))
    if head.shard is not None:
        raise ValueError("shard: the weight is a DTensor, which has its shard in its placements; drop one of them")
    if hidden.device_mesh != weight.device_mesh:
        raise ValueError(f"hidden: is on {hidden.device_mesh} and the weight on {weight.device_mesh}; use one mesh")
    at = _sharded_dim("weight", weight, 0)
    rows, placements = hidden.placements, weight.placements
    if bias is not None and (not is_dtensor(bias) or tuple(bias.placements) != tuple(placements)):
        raise ValueError("bias: must be a DTensor with the weight's placements")
    width = hidden.dim() - 1
    for number, (row, column) in enumerate(zip(rows, placements)):
        if number == at and not row.is_replicate():
            what = "is divided" if row.is_shard() else "is not summed"
            raise ValueError(
                f"hidden: {what} ({row}) over mesh dimension {number}, over which the weight is Shard(0). A vocabulary "
                f"shard needs the same rows on every rank: hidden.redistribute(placements=[..., Replicate()]). Under "
                f"FSDP2 call the loss inside the forward of the wrapped module, where the weight is gathered"
            )
        if number != at and (row.is_partial() or (isinstance(row, Shard) and row.dim % hidden.dim() == width)):
            raise ValueError(
                f"hidden: {row} over mesh dimension {number} leaves no whole row on a rank; redistribute it"
            )
        if number != at and not column.is_replicate():
            raise ValueError(f"weight: {column} over mesh dimension {number}; only one dimension may share the classes")
    shard = None if at is None else _shard(weight.device_mesh.get_group(at), weight.shape[0], False)
    # where each rank has rows of its own, the gradient of the weight is to be summed
    summed = [Partial() if row.is_shard() else column for row, column in zip(rows, placements)]
    states = [Partial() if number == at else row for number, row in enumerate(rows)]
    targets, weights = _beside("targets", targets, hidden), _beside("weights", weights, hidden)
    assert all(row.is_shard() or isinstance(row, Replicate) for row in rows)
    weight = weight.to_local(grad_placements=summed)
    bias = None if bias is None else bias.to_local(grad_placements=summed)
    head = replace(head, weight=weight, bias=bias, shard=shard)
    return hidden.to_local(grad_placements=states), head, targets, weights


def _refuse_dtensors(others: str, **given: Any) -> None:
    for name, tensor in given.items():
        if is_dtensor(tensor):
            raise ValueError(
                f"{name}: is a DTensor, {others}; pass {name}.to_local() of the same rows and classes, or call the "
                f"loss inside the forward of the module that FSDP wraps, where parameters are gathered"
            )


def _sharded_dim(name: str, tensor: DTensor, dim: int) -> int | None:
    """The mesh dimension over which tensor dimension ``dim`` is divided; None: it is whole on every rank."""
    from torch.distributed.tensor import Replicate, Shard

    found: list[int] = []
    for number, placement in enumerate(tensor.placements):
        if type(placement) not in (Replicate, Shard):
            raise ValueError(f"{name}: {placement} over mesh dimension {number}; use Shard or Replicate")
        if isinstance(placement, Shard) and placement.dim % tensor.dim() == dim:
            found.append(number)
    if len(found) > 1:
        raise ValueError(f"{name}: mesh dimensions {found} all divide dimension {dim}; only one may")
    return found[0] if found else None


def _shard(group: Any, vocab_size: int, reduce_hidden: bool) -> VocabShard:
    """The shard of a DTensor, whose layout follows from its shape: no rank is asked."""
    layout = chunks_of(vocab_size, dist.get_world_size(group))
    return VocabShard(layout[dist.get_rank(group)][0], vocab_size, group, reduce_hidden, layout)


def _beside(name: str, other: Any, tensor: DTensor) -> Any:
    """This rank's part of ``other``, whose rows are those of ``tensor``."""
    if not is_dtensor(other):
        return other
    width = tensor.dim() - 1
    from torch.distributed.tensor import Replicate

    expected = [Replicate() if p.is_shard(width) or p.is_shard(-1) else p for p in tensor.placements]
    if other.device_mesh != tensor.device_mesh or list(other.placements) != expected:
        raise ValueError(f"{name}: is placed as {other.placements}, but the rows as {tuple(expected)}; redistribute it")
    return other.to_local()


def _one_of_two(weight: bool) -> str:
    if weight:
        return (
            "weight: is a DTensor, of which this process holds a shard only, and hidden is a plain tensor, so it is "
            "not known whether the ranks have the same rows. FSDP2: call the loss inside the forward of the module "
            "that FSDP wraps, where the parameter is gathered and its gradient will be reduced. Tensor parallel: pass "
            "hidden as a DTensor, Replicate() on the weight's mesh, or weight.to_local() with shard=VocabShard(...)"
        )
    return "hidden: is a DTensor and the weight is not; pass both as DTensors on one mesh, or hidden.to_local()"
