"""Which kernel computes attention, chosen on purpose instead of by torch's default order.

cuDNN's attention backward returned NaN for padded batches of a real 1.5B model (bf16, torch 2.11, cuDNN 9.19, H200),
where torch's flash, memory-efficient and plain kernels return finite gradients. torch prefers cuDNN's kernel on such
GPUs, so deftune leaves it out unless the user asks for it.

``varlen`` is torch's variable-length attention: the rows of a micro-batch lie end to end in one sequence, [1, T], and
the kernel gets their boundaries instead of a mask. No token of padding goes through the model.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from deftune.tokens.head import base_of

KERNELS: dict[str, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
AUTO = ("flash", "efficient", "math")
VARLEN = "varlen"
IMPLEMENTATION = "deftune_varlen"  # the name of `varlen` among transformers' attention functions


def auto_precision() -> str:
    """What ``train.precision: auto`` is: bf16 where the GPU has it, fp32 elsewhere."""
    return "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "fp32"


def kernels_of(choice: str) -> tuple[str, ...]:
    """The kernels that `scaled_dot_product_attention` may pick from: all but cuDNN's, or the one asked for.

    >>> kernels_of("auto")
    ('flash', 'efficient', 'math')
    """
    if choice in ("auto", VARLEN):
        return AUTO
    if choice not in KERNELS:
        raise ValueError(f"attention: unknown kernel {choice!r}; one of auto, {VARLEN}, {', '.join(KERNELS)}")
    return (choice,)


@contextmanager
def attention_kernels(choice: str = "auto", model: Any = None) -> Generator[None]:
    """Inside, attention runs on the kernels of ``choice`` only.

    Wrap the forward and the backward: gradient checkpointing runs the forward again inside the backward. Models with
    another attention (``flash_attention_2``, ``eager``) are not affected, except by ``varlen``. In your own training
    loop::

        with attention_kernels():
            loss = model(**batch).loss
            loss.backward()

    Args:
        choice: ``auto`` (all kernels of `scaled_dot_product_attention` but cuDNN's), ``flash``, ``efficient``, ``math``
            or ``cudnn``; ``varlen`` for batches of `deftune.data.packing.Collator` with ``padding_free=True``.
        model: the causal LM, for ``varlen``; its attention implementation is restored on exit.
    """
    with sdpa_kernel([KERNELS[name] for name in kernels_of(choice)]):
        if choice != VARLEN:
            yield
            return
        if model is None:
            raise ValueError("attention: varlen needs the model")
        _register()
        config: Any = base_of(model).config
        before, config._attn_implementation = config._attn_implementation, IMPLEMENTATION
        try:
            yield
        finally:
            config._attn_implementation = before


# --- variable-length attention ----------------------------------------------------------------------------------------


def find_varlen() -> Callable[..., Any] | None:
    """torch's kernel, or None where torch has none with a window (before 2.11)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    names = inspect.signature(varlen_attn).parameters
    if "window_size" not in names:
        return None
    # GQA: torch 2.11 takes fewer key heads as they are, later releases need enable_gqa
    return functools.partial(varlen_attn, enable_gqa=True) if "enable_gqa" in names else varlen_attn


TORCH_VARLEN = find_varlen()


def why_not_varlen(model: Any, *, fast: bool = True) -> str | None:
    """Why ``varlen`` cannot train a model, or None where it can.

    Args:
        model: the causal LM.
        fast: also say why ``varlen`` would be slow here: without torch's kernel every row is computed by itself.
    """
    config: Any = base_of(model).config
    if config.get_text_config() is not config:
        return "the model has several parts, with an attention each"
    if config._attn_implementation != "sdpa":
        return f"the model's attn_implementation is {config._attn_implementation!r}, not 'sdpa'"
    if getattr(config, "attention_dropout", 0.0):
        return "the model has attention dropout, which the kernel lacks"
    if getattr(config, "attn_logit_softcapping", None):
        return "the model caps its attention scores, which the kernel does not"
    return why_no_varlen_kernel() if fast else None


def why_no_varlen_kernel() -> str | None:
    """Why torch's kernel cannot run on this machine, or None where it can."""
    if not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)):
        return "the kernel needs a GPU of compute capability 8.0 or newer"
    if TORCH_VARLEN is None:
        return f"torch {torch.__version__} has no such kernel; 2.11 has"
    return None


def attend_rows(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float | None, window: int | None
) -> Tensor:
    """Causal attention inside each row of [T, heads, d] tensors; row i is [bounds[i], bounds[i + 1])."""
    left = -1 if window is None else window - 1  # a token sees itself and so many before it; -1: all
    if query.is_cuda and query.dtype != torch.float32 and TORCH_VARLEN is not None:
        return TORCH_VARLEN(query, key, value, bounds, bounds, longest, longest, scale=scale, window_size=(left, 0))
    rows: list[Tensor] = []
    edges = bounds.tolist()
    for start, end in itertools.pairwise(edges):
        q, k, v = (tensor[start:end].transpose(0, 1) for tensor in (query, key, value))
        mask = None
        if window is not None and end - start > window:
            ones = torch.ones(end - start, end - start, dtype=torch.bool, device=query.device)
            mask = ones.tril() & ones.triu(-left)
        rows.append(
            nn.functional.scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
            )[0].transpose(0, 1)
        )
    return torch.cat(rows)


def _varlen_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    cu_seq_lens_q: Tensor | None = None, max_length_q: int | None = None, scaling: float | None = None,
    dropout: float = 0.0, sliding_window: int | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """An attention function of transformers: [1, heads, T, d] tensors to [1, T, heads, d]."""
    given = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if dropout or given:
        raise ValueError(f"attention: varlen has no {given[0] if given else 'dropout'}; set train.attention=flash")
    if cu_seq_lens_q is None or max_length_q is None or query.shape[0] != 1:
        raise ValueError(
            "attention: varlen needs rows that lie end to end, with their boundaries (cu_seq_lens_q, max_length_q); "
            "use deftune.data.packing.Collator(..., padding_free=True), or another attention"
        )
    # under autocast the rotary embedding returns float32 queries and keys
    q, k, v = (tensor[0].transpose(0, 1).to(value.dtype) for tensor in (query, key, value))
    return attend_rows(q, k, v, cu_seq_lens_q, max_length_q, scaling, sliding_window)[None], None


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, _varlen_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The boundaries of the rows replace the mask."""
