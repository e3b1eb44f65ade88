"""The losses that `linear_loss.py` compares: of deftune, of torch, and of the peers that are installed."""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import deftune

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def logits32(hidden: Tensor, weight: Tensor) -> Tensor:
    """fp32 logits, from the accumulators where the device can."""
    if hidden.device.type == "cuda" and hidden.dtype != torch.float32:
        return _Logits32.apply(hidden, weight)  # pyright: ignore
    return (hidden @ weight.T).float()


class _Logits32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:  # pyright: ignore
        ctx.save_for_backward(hidden, weight)
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore
        hidden, weight = ctx.saved_tensors
        low = grad.to(hidden.dtype)
        return low @ weight, low.T @ hidden


def softmax_deft(logits: Tensor, targets: Tensor) -> Tensor:
    """What one writes from the paper: full softmax, stop-gradient on the focus."""
    log_probs = F.log_softmax(logits, -1)
    focus = log_probs.exp().square().sum(-1).detach()
    log_p = log_probs.gather(-1, targets[:, None])[:, 0]
    return (-torch.expm1(focus * log_p) / focus).mean()


def supervised(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    keep = targets != deftune.IGNORE_INDEX
    return hidden[keep], targets[keep]


def torch_deft(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    hidden, targets = supervised(hidden, targets)
    return softmax_deft(logits32(hidden, weight), targets)


def torch_nll(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits32(hidden, weight), targets)


def logits_and_token_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return deftune.token_loss(hidden @ weight.T, targets, "deft")


def compiled_deft() -> Loss:
    @torch.compile(dynamic=False)
    def core(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return softmax_deft((hidden @ weight.T).float(), targets)

    def run(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        hidden, targets = supervised(hidden, targets)
        return core(hidden, weight, targets)

    return run


def ours(spec: str, **options: Any) -> Loss:
    return lambda hidden, weight, targets: deftune.linear_loss(hidden, weight, targets, spec, **options)


def contenders(device: str) -> Iterator[tuple[str, str, Callable[[], Loss]]]:
    """(name, objective, maker); a maker may raise ImportError."""
    for spec in ("nll", "deft", "cayley", "eaft"):
        yield f"deftune {spec}", spec, lambda spec=spec: ours(spec)
    for share in (0.15, 0.05):
        sparse = deftune.Sparse(share)
        yield f"deftune deft, sparse {share}", "deft", lambda sparse=sparse: ours("deft", sparse=sparse)
    yield "torch eager deft, fp32 logits", "deft", lambda: torch_deft
    if device == "cpu":
        yield "logits + token_loss deft", "deft", lambda: logits_and_token_loss
        return
    # auto takes graphs for small heads: the same without them
    yield "deftune deft, graphs=False (backend triton)", "deft", lambda: ours("deft", backend="triton")
    yield "deftune deft, chunk_rows=4096", "deft", lambda: ours("deft", chunk_rows=4096)
    yield "torch.compile deft, compacted", "deft", compiled_deft
    yield "TRL fused head deft", "deft", trl_deft
    yield "Liger dft", "linear", lambda: liger(use_token_scaling=True)
    yield "Liger nll", "nll", liger
    yield "Liger nll, fp32 dW", "nll", lambda: liger(accum_dtype=torch.float32)
    yield "Liger nll, large chunks", "nll", lambda: liger(chunk_mem_const=16)
    yield "CCE nll", "nll", cce
    yield "CCE nll, torch_compile", "nll", lambda: cce(impl="torch_compile")
    yield "QuACK nll", "nll", quack
    yield "QuACK nll, compacted", "nll", lambda: quack(compacted=True)


def liger(**options: Any) -> Loss:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as loss  # pyright: ignore

    unknown = set(options) - set(inspect.signature(loss).parameters)
    if unknown:
        raise ImportError(f"this liger_kernel has no option {', '.join(unknown)}")

    def run(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        out = loss(hidden, weight, targets, **options)
        return out[0] if isinstance(out, tuple) else out

    return run


def cce(**options: Any) -> Loss:
    from cut_cross_entropy import linear_cross_entropy  # pyright: ignore

    return lambda hidden, weight, targets: linear_cross_entropy(hidden, weight, targets, **options)


def quack(compacted: bool = False) -> Loss:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy  # pyright: ignore

    def run(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        if compacted:  # it does not leave ignored rows out by itself
            hidden, targets = supervised(hidden, targets)
        return chunked_linear_cross_entropy(hidden, weight, targets)

    return run


def trl_deft() -> Loss:
    import trl.kernels.chunked_logprob as head  # pyright: ignore

    if "trl.trainer.utils" not in sys.modules:  # what the backward imports is not needed for plain tensors
        package, utils = types.ModuleType("trl.trainer"), types.ModuleType("trl.trainer.utils")
        package.__path__ = []
        utils.maybe_gather_lm_head_ctx = lambda *_: contextlib.nullcontext()  # pyright: ignore
        sys.modules.update({"trl.trainer": package, "trl.trainer.utils": utils})

    def run(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        hidden, targets = supervised(hidden, targets)
        out = head.ChunkedLogProbFunction.apply(
            hidden, weight, None, targets, 1.0, 32768, None, 1.0, ("log_sum_sq_probs",)
        )
        focus = out[2].exp().detach()
        return (-torch.expm1(focus * out[0]) / focus).mean()

    return run
