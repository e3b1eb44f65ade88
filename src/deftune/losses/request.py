"""The seam of the fused loss: a `Request`, checked once where it is made, and the `Result` that a backend returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deftune.losses.checks import check_count_option, check_options, check_targets
from deftune.losses.head import Head, check_head
from deftune.losses.reduction import check_step, mean_items
from deftune.losses.sparse import Sparse
from deftune.losses.statistics import wide
from deftune.objectives import Context, Objective, TokenStats
from deftune.objectives.stats import NO_CONTEXT


@dataclass(frozen=True)
class Rows:
    """The supervised tokens of a request."""

    index: Tensor  # [M]: their positions among the N tokens
    labels: Tensor  # [M]
    facts: Tensor | None = None  # of the Triton backends, on the device: M, and a flag that is set if a log p is NaN


@dataclass(frozen=True)
class Request:
    """A loss or statistics to compute, from N flat tokens; made by `make_request`, which checks every field."""

    hidden: Tensor  # [N, D]
    head: Head
    targets: Tensor  # [N]
    objective: Objective | None  # None: the statistics alone
    context: Context
    reduction: str
    num_items: Tensor | float | None
    weights: Tensor | None  # [N]; [M], of the supervised tokens, once ``rows`` are known
    top_k: int  # how many of the largest log-probabilities of each token are needed
    dtype: torch.dtype  # of the GEMMs
    wanted: tuple[bool, bool, bool]  # gradients to make in the same pass: of hidden, weight and bias
    chunk_rows: int | None
    sparse: Sparse | None
    gates: bool = False  # whether the result has the gate and the loss of each token
    rows: Rows | None = None  # where an earlier run of this request has found them

    def over(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Request:
        """The same request on these tensors, detached."""
        bias = None if bias is None else bias.detach()
        return replace(self, hidden=hidden.detach(), head=replace(self.head, weight=weight.detach(), bias=bias))

    def located(self, rows: Rows) -> Request:
        """The same request with its supervised rows."""
        return replace(self, rows=rows, weights=None if self.weights is None else self.weights[rows.index])

    def released(self) -> Request:
        """The same request without its large tensors: autograd saves those, and frees them after the backward."""
        nothing = self.hidden.new_empty(0)
        return replace(self.over(nothing, nothing, None), targets=nothing)

    @property
    def supervised(self) -> Rows:
        """The supervised tokens, after `located`."""
        assert self.rows is not None
        return self.rows

    @property
    def count(self) -> int:
        """The number of supervised tokens, after `located`."""
        return len(self.supervised.index)

    def scale(self) -> Tensor | float:
        """The factor of the sum over the supervised tokens; checks the step's statistics."""
        if self.objective is None:
            return 1.0
        check_step(self.objective, self.context, self.num_items, self.count)
        items = mean_items(self.num_items, self.count) if self.reduction == "mean" else 1.0
        return 1.0 / (wide(items) if isinstance(items, Tensor) else items)


@dataclass
class Gradients:
    """Sums of gradients: dX [N, D] in the dtype of hidden, dW and db in float32 or float64; None: not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    factor: Tensor | None = None  # still to be multiplied with, where it is known after the last chunk only


@dataclass(frozen=True)
class Result:
    """What a backend returns."""

    loss: Tensor | None  # a scalar; None for ``reduction="none"``, for which `fused_loss` makes it from ``values``
    gradients: Gradients | None
    stats: TokenStats
    request: Request  # with its rows
    gate: Tensor | None = None  # [M] float64: the factor of P - onehot, without the reduction's scale
    values: Tensor | None = None  # [M] float64: the loss of each token


def gemm_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype of a linear layer's GEMM: autocast's where autocast is on (but for float64), else that of hidden."""
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(device) if autocast else hidden.dtype


def wanted_gradients(hidden: Tensor, head: Head) -> tuple[bool, bool, bool]:
    """Which of hidden, weight and bias autograd will ask a gradient of."""
    enabled = torch.is_grad_enabled()
    return (
        enabled and hidden.requires_grad,
        enabled and head.weight.requires_grad,
        enabled and head.bias is not None and head.bias.requires_grad,
    )


def make_request(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    objective: Objective | None = None,
    *,
    reduction: str = "mean",
    num_items: Tensor | float | None = None,
    weights: Tensor | None = None,
    context: Context | None = None,
    top_k: int = 0,
    chunk_rows: int | None = None,
    sparse: Sparse | None = None,
    gates: bool = False,
    dtype: torch.dtype | None = None,
    wanted: Sequence[bool] | None = None,
) -> Request:
    """A checked request, flat: [..., D] hidden states become [N, D], [...] targets [N].

    ``dtype`` and ``wanted`` are read from autocast and autograd where they are None. ``top_k`` is that of the
    objective, if there is one.

    Raises:
        ValueError: an argument is wrong; the text names it, and what to pass instead.
    """
    if torch._C._are_functorch_transforms_active():  # pyright: ignore
        raise ValueError(
            "hidden: torch.func (vmap, grad, jvp, ...) cannot transform the fused loss, whose gradients are made in "
            "its forward pass; use torch.autograd, or deftune.token_loss on the logits"
        )
    check_head(hidden, head)
    check_targets(targets, hidden, "hidden")
    check_options(targets, reduction, num_items, weights, context)
    check_count_option("top_k", top_k, 0)
    if chunk_rows is not None:
        check_count_option("chunk_rows", chunk_rows, 1)
    if sparse is not None:
        check_sparse(sparse, head, reduction)
    if head.shard is not None:
        head = replace(head, shard=head.shard.checked(head.classes, hidden.device, "weight"))
    hidden_gradient, weight_gradient, bias_gradient = wanted_gradients(hidden, head) if wanted is None else wanted
    in_this_pass = objective is not None and reduction != "none"
    if targets.dim() != 1:
        hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    return Request(
        hidden, head, targets, objective, context or NO_CONTEXT, reduction, num_items,
        None if weights is None else weights.reshape(-1), objective.top_k if objective else top_k,
        dtype or gemm_dtype(hidden),
        (in_this_pass and hidden_gradient, in_this_pass and weight_gradient, in_this_pass and bias_gradient),
        chunk_rows, sparse, gates,
    )  # fmt: skip


def check_sparse(sparse: object, head: Head, reduction: str) -> None:
    """Refuse what the sparse mode would compute wrongly, or ignore."""
    if not isinstance(sparse, Sparse):
        raise ValueError(f"sparse: expected a deftune.Sparse(share=...), got {type(sparse).__name__}")
    if head.shard is not None:
        raise ValueError("sparse: cannot be combined with a shard, whose rank knows the mass of its own classes only")
    if head.softcap is not None:
        raise ValueError("sparse: cannot be combined with a softcap, whose slope differs among the left-out classes")
    if reduction == "none":
        raise ValueError('sparse: needs reduction="mean" or "sum"; with "none" the backward recomputes the gradients')
