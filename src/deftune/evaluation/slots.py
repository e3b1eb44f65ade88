"""Cache and attention of decoding in slots: each answer has a slot of the cache, with its own length.

The cache of a layer is one tensor [slots, heads, room, width]. A step takes the last token of each slot, writes its key
and value at the slot's length, and attends to the entries of the slot: no mask, no padding, no growing tensor. The next
prompt takes the slot of a finished answer. An ordinary forward pass runs over a prompt without its last token, which is
the input of the first step: so prompts need no logits, may be padded on the right without a mask, and all samples of a
prompt share its entries.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_utils import AttentionInterface

from deftune.evaluation.decoding import DRAWN_AT_ONCE, LanguageModel
from deftune.evaluation.sampler import SamplerError

SLOTS = "deftune_slots"  # the attention's name among transformers'
PREFILL_TOKENS = 2**16  # read at once, if there is memory: enough to fill a GPU


class Unsupported(Exception):
    """Why a model cannot decode in slots."""


class SlotCache(Cache):
    """Keys and values of every layer, [slots, heads, room, width] each, and how many entries each slot holds.

    `update` changes nothing: the attention adds the new entries, in the pass that reads the others.
    """

    def __init__(self, shapes: list[tuple[int, int]], slots: int, room: int, dtype: torch.dtype, device: torch.device):
        super().__init__(layers=[])
        # zeros: a weight of 0 times what was never written must be 0
        self.keys, self.values = (
            [torch.zeros(slots, heads, room, width, dtype=dtype, device=device) for heads, width in shapes]
            for _ in range(2)
        )
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=device)
        self.instead_of = ""  # the attention that prompts are read with

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def tensors(self) -> Iterator[Tensor]:
        yield from self.keys
        yield from self.values


# Attention -----------------------------------------------------------------------------------------------------------

# what models hand to any attention, and an attention of one query to its whole past does not need
NOT_NEEDED = {
    "is_causal", "position_ids", "use_cache", "return_dict", "output_attentions", "output_hidden_states",
    "output_router_logits",
}  # fmt: skip


def slot_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, scaling: float | None = None,
    dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None,
    slots: SlotCache | None = None, **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """One step's attention, as transformers' AttentionInterface calls it: query [rows, H, 1, D] -> [rows, 1, H, D]."""
    unknown = sorted(name for name, value in more.items() if value is not None and name not in NOT_NEEDED)
    if slots is None:
        raise Unsupported(f"{type(module).__name__} is not given what the model is called with")
    if unknown or attention_mask is not None:
        raise Unsupported(f"{type(module).__name__} has an attention with {', '.join(unknown) or 'a mask'}")
    if softcap is not None and slots.instead_of == "sdpa":
        raise Unsupported(f"{type(module).__name__} has a softcap that sdpa leaves out; load it with eager attention")
    layer = module.layer_idx
    if layer >= len(slots.keys) or key.shape[1:] != (slots.keys[layer].shape[1], 1, slots.keys[layer].shape[3]):
        raise Unsupported(f"{type(module).__name__} {layer} shares another layer's keys")
    attend = kernels().attend if query.is_cuda and has_kernels() else attend_plain
    out = attend(
        query[:, :, 0], key[:, :, 0], value[:, :, 0], slots.keys[layer], slots.values[layer], slots.lengths,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling, window=sliding_window, softcap=softcap,
    )  # fmt: skip
    return out[:, None], None


def attend_plain(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, *, scale: float,
    window: int | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """softmax(scale q K^T) V over the first ``lengths`` entries of each row's slot and the new one, which is added.

    ``query`` [rows, H, D], ``key`` and ``value`` [rows, heads, D], ``keys`` and ``values`` [slots, heads, room, D].
    """
    rows, heads, width = key.shape
    lengths = lengths[:rows]
    every = torch.arange(rows, device=key.device)
    keys[every, :, lengths], values[every, :, lengths] = key, value
    end = int(lengths.max()) + 1
    place = torch.arange(end, device=key.device)
    seen = place <= lengths[:, None]
    if window is not None:
        seen &= place > lengths[:, None] - window
    grouped = query.reshape(rows, heads, -1, width)
    scores = (grouped @ keys[:rows, :, :end].mT).to(torch.promote_types(keys.dtype, torch.float32)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    return (weights.to(values.dtype) @ values[:rows, :, :end]).reshape(query.shape)


AttentionInterface.register(SLOTS, slot_attention)


@functools.cache
def has_kernels() -> bool:
    return importlib.util.find_spec("triton") is not None


def kernels() -> Any:
    from deftune.evaluation import triton_decoding

    return triton_decoding


@contextmanager
def attention_in_slots(model: Any, cache: SlotCache) -> Generator[None]:
    """Use `slot_attention` as the model's attention inside the context, and restore the model afterwards."""
    configs: list[Any] = [m.config for m in model.modules() if isinstance(m, PreTrainedModel)]
    before = [config._attn_implementation for config in configs]
    cache.instead_of = before[0]
    try:
        for config in configs:
            config._attn_implementation = SLOTS
        yield
    finally:
        for config, name in zip(configs, before):
            config._attn_implementation = name


# Whether and how many ------------------------------------------------------------------------------------------------


class Survey(NamedTuple):
    """The size of a slot: (heads, width) of each layer's keys; and the size of the vocabulary."""

    shapes: list[tuple[int, int]]
    vocab_size: int

    def slot_bytes(self, room: int, itemsize: int) -> int:
        return 2 * room * sum(heads * width for heads, width in self.shapes) * itemsize


def survey(model: LanguageModel) -> Survey:
    """Try one token and one step of the model; raises `Unsupported` if it cannot decode in slots."""
    inner = [m for m in model.model.modules() if isinstance(m, PreTrainedModel)]
    if not inner:
        raise Unsupported("it is not a transformers model")
    if not all(getattr(m, "_supports_attention_backend", False) for m in inner):
        raise Unsupported(f"{type(inner[0]).__name__} has an attention of its own")
    if not model.keeps_last:
        raise Unsupported(f"{type(inner[0]).__name__} cannot leave out the prompts' logits")
    if len({parameter.device for parameter in model.model.parameters()}) > 1:
        raise Unsupported("its weights are on several devices")
    config: Any = inner[0].config.get_text_config()
    kinds = {type(layer) for layer in DynamicCache(config=config).layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    if kinds:
        raise Unsupported(f"its cache has a {kinds.pop().__name__}")
    rope: Any = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if part.get("rope_type") in ("dynamic", "longrope"):
            raise Unsupported(f"its {part['rope_type']} positions depend on the longest row")
    read: Any = DynamicCache()
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    model.forward(token, past_key_values=read, use_cache=True)
    if any(layer.keys.shape != layer.values.shape for layer in read.layers):
        raise Unsupported("its keys and values differ in size")
    shapes = [(layer.keys.shape[1], layer.keys.shape[3]) for layer in read.layers]
    cache = SlotCache(shapes, 1, 1, read.layers[0].keys.dtype, model.device)
    return Survey(shapes, step_logits(model, token[:, 0], cache).shape[-1])


def step_logits(model: LanguageModel, tokens: Tensor, cache: SlotCache) -> Tensor:
    """[rows, V] the logits after ``tokens`` [rows], the next token of each slot; they are added to the cache."""
    rows = len(tokens)
    with attention_in_slots(model.model, cache):
        return model.forward(
            tokens[:, None], position_ids=cache.lengths[:rows, None], past_key_values=cache, use_cache=True, slots=cache
        )


class Plan(NamedTuple):
    """The number of slots, the tokens of a slot, and the prompt tokens of one forward pass."""

    slots: int
    room: int
    portion: int = PREFILL_TOKENS


def plan(model: LanguageModel, found: Survey, room: int, wanted: int) -> Plan:
    """As many slots of ``room`` tokens as the device has memory for, at most ``wanted``."""
    device, itemsize = model.device, model.model.dtype.itemsize
    if device.type != "cuda":
        return Plan(wanted, room)
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    config: Any = model.model.config.get_text_config()
    wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    # a token that is read: some ten of the residual's width at once, half of them in float32, and the MLP's three
    read = (15 * config.hidden_size + 3 * wide) * itemsize
    portion = max(room, min(PREFILL_TOKENS, int(0.1 * free / read)))
    kept = portion * read + 32 * DRAWN_AT_ONCE
    each = found.slot_bytes(room, itemsize) + 2 * found.vocab_size * itemsize
    slots = int(0.95 * free - kept) // each
    if slots < 1:
        gib = 2**30
        raise SamplerError(
            f"an answer of {room} tokens with its prompt needs {each / gib:.2f} GiB of cache beside {kept / gib:.2f} "
            f"GiB for the work, and {device} has {free / gib:.2f} GiB free; lower max_new_tokens or free memory"
        )
    return Plan(min(slots, wanted), room, portion)
