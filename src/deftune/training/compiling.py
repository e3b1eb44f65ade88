"""Compile the decoder layers of a model, each by itself, for the time of a training run."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import nn

from deftune.tokens.head import base_of

TRIED = ("llama", "qwen2", "gemma3_text")  # model types whose compiled layers were trained on a GPU and compared


def decoder_layers(model: Any) -> list[nn.Module]:
    """The repeated blocks of a causal LM of transformers: the modules that its class says must not be split."""
    names: set[str] = set(getattr(base_of(model), "_no_split_modules", None) or ())
    layers = [module for module in base_of(model).modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(
            f"{type(base_of(model)).__name__}: its class does not name its decoder layers (_no_split_modules), so they "
            f"cannot be compiled one by one; use train.compile=true, which compiles the whole model, or false"
        )
    return layers


def why_no_compiler() -> str | None:
    """Why torch.compile cannot run on this machine, or None where it can."""
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        return "torch.compile needs a C compiler, and none is on the path"
    return None


def why_not_compiled(model: Any) -> str | None:
    """Why the layers of a model are not compiled unless a user asks for it; None where they are.

    Args:
        model: the causal LM, before adapters.
    """
    kind = str(getattr(model.config, "model_type", None))
    if not type(model).__module__.startswith("transformers."):
        return "the model's code is not that of transformers"
    if kind not in TRIED:
        return f"layers of {kind} have not been tried"
    if not getattr(model, "_no_split_modules", None):
        return "the model's class does not name its decoder layers"
    return why_no_compiler()


@contextmanager
def compiled_layers(model: Any, *, dynamic: bool | None = None) -> Generator[None]:
    """Inside, every decoder layer runs as torch.compile's code; the layers share the code, which is compiled once.

    Args:
        model: the causal LM, or PEFT's wrapper of one.
        dynamic: True where the number of tokens changes with every micro-batch; None lets torch find out.
    """
    layers = decoder_layers(model)
    for layer in layers:
        layer.compile(dynamic=dynamic)
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            kind = type(layers[0]).__name__
            line = next(iter(str(error).strip().splitlines()), "")[:300]
            raise ValueError(
                f"torch.compile cannot compile {kind} ({type(error).__name__}: {line}); set train.compile=false"
            ) from error
        raise
    finally:
        for layer in layers:
            layer._compiled_call_impl = None  # pyright: ignore[reportPrivateUsage]
