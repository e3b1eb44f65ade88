"""Compile the decoder layers of a model, each by itself, for the time of a training run."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import nn

from deftune.artifacts.config import RunConfig
from deftune.tokens.head import base_of
from deftune.training.attention import VARLEN, why_no_varlen_kernel
from deftune.training.machine import weights_of

EARNS_COMPILING = 300  # micro-batches: compiling takes 10 to 15 s, and saves 0.06 to 0.1 s of each (8k to 32k tokens)
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


def earns_compiling(config: RunConfig, micro_batches: int) -> bool:
    """Whether compiled layers were measured for such runs, and the run is long enough to earn back their seconds.

    They were measured in full fine-tuning on one GPU, with bfloat16 weights and without Liger's layers.
    """
    long = config.train.compile == "layers" or micro_batches >= EARNS_COMPILING
    return long and weights_of(config) != "float32" and not config.train.liger


def expects_compiled(config: RunConfig, micro_batches: int) -> bool:
    """Whether a run will compile its layers, as far as its config and the machine tell: the model may still refuse."""
    train = config.train
    asked = train.compile in ("auto", "layers") and train.attention in ("auto", VARLEN)
    able = why_no_varlen_kernel() is None and why_no_compiler() is None
    return asked and able and earns_compiling(config, micro_batches)


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
