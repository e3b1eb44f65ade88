"""Which kernel computes attention, chosen on purpose instead of by torch's default order.

cuDNN's attention backward returned NaN for padded batches of a real 1.5B model (bf16, torch 2.11, cuDNN 9.19, H200),
where torch's flash, memory-efficient and plain kernels return finite gradients. torch prefers cuDNN's kernel on such
GPUs, so deftune leaves it out unless the user asks for it.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch.nn.attention import SDPBackend, sdpa_kernel

KERNELS: dict[str, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
AUTO = ("flash", "efficient", "math")


def kernels_of(choice: str) -> tuple[str, ...]:
    """The names of the kernels that torch may pick from: ``auto`` is every kernel but cuDNN's.

    >>> kernels_of("auto")
    ('flash', 'efficient', 'math')
    """
    if choice == "auto":
        return AUTO
    if choice not in KERNELS:
        raise ValueError(f"attention: unknown kernel {choice!r}; one of auto, {', '.join(KERNELS)}")
    return (choice,)


@contextmanager
def attention_kernels(choice: str = "auto") -> Generator[None]:
    """Inside, `scaled_dot_product_attention` runs on the kernels of ``choice`` only.

    Wrap the forward and the backward: gradient checkpointing runs the forward again inside the backward. Models with
    another attention (``flash_attention_2``, ``eager``) are not affected. In your own training loop::

        with attention_kernels():
            loss = model(**batch).loss
            loss.backward()

    Args:
        choice: ``auto`` (all but cuDNN's), ``flash``, ``efficient``, ``math`` or ``cudnn``.
    """
    with sdpa_kernel([KERNELS[name] for name in kernels_of(choice)]):
        yield
