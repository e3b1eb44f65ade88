"""The forward of Llama and Qwen2 written out, for reading prompts and for decoding: 11 launches a layer instead of 40.

transformers' modules take eight kernels for a norm and ten for a rotation, which at a token a row is most of a step's
time. Here an addition with the norm after it, a rotation, and silu(gate) * up are one each (`triton_decoding`). The
projections are the model's own modules. What the modules round to the model's dtype is rounded here too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM, Qwen2ForCausalLM

if TYPE_CHECKING:
    from deftune.evaluation.slots import SlotCache


class Direct:
    """A model of one of the classes that are written out here, on a device with Triton."""

    def __init__(self, model: Any):
        from deftune.evaluation import triton_decoding

        self.kernels, self.model, self.body = triton_decoding, model, model.model
        self.width: int = self.body.layers[0].self_attn.head_dim
        self.scale: float = self.body.layers[0].self_attn.scaling

    @staticmethod
    def takes(model: Any) -> bool:
        """Whether the model is of such a class, without sliding windows, hooks or replaced modules."""
        if type(model) not in (LlamaForCausalLM, Qwen2ForCausalLM) or model.config.hidden_act != "silu":
            return False
        attention = [layer.self_attn for layer in model.model.layers]
        if any(getattr(one, "sliding_window", None) is not None for one in attention):
            return False
        return not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules())

    def step(self, tokens: Tensor, cache: SlotCache) -> Tensor:
        """[rows, V] the logits after ``tokens`` [rows], as `slots.step_logits`."""
        hidden = self.body.embed_tokens(tokens)
        rotation = self._rotation(hidden, cache.lengths[: len(tokens)])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.kernels.attend(
                q, k, v, cache.keys[layer], cache.values[layer], cache.lengths, scale=self.scale, rotation=rotation
            )

        return self.model.lm_head(self._forward(hidden, attend))

    def read(self, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The keys and values [rows, heads, tokens, width] of every layer for ``ids`` [rows, tokens]."""
        rows, tokens = ids.shape
        hidden = self.body.embed_tokens(ids.flatten())
        cos, sin = self._rotation(hidden, torch.arange(tokens, device=ids.device))
        found: list[tuple[Tensor, Tensor]] = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = self.kernels.rotate(q, cos, sin), self.kernels.rotate(k, cos, sin)
            q, k, v = (part.unflatten(0, (rows, tokens)).transpose(1, 2) for part in (q, k, v))
            found.append((k, v))
            if q.dtype == torch.float32:  # no attention that shares heads takes it, but the one that holds all scores
                k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
            return out.transpose(1, 2).flatten(0, 1)

        self._forward(hidden, attend)
        return found

    def _rotation(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [positions, width]."""
        cos, sin = self.body.rotary_emb(hidden, positions[None])
        return cos[0], sin[0]

    def _forward(self, x: Tensor, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """The last norm of hidden states [tokens, D]; ``attend`` takes and returns [tokens, heads, width]."""
        add_norm, silu_times = self.kernels.add_norm, self.kernels.silu_times
        more: Tensor | None = None  # the output of the layer before, not added yet
        for i, layer in enumerate(self.body.layers):
            attention, mlp = layer.self_attn, layer.mlp
            x, h = add_norm(x, more, layer.input_layernorm.weight, layer.input_layernorm.variance_epsilon)
            projected = (part(h) for part in (attention.q_proj, attention.k_proj, attention.v_proj))
            out = attend(i, *(part.unflatten(-1, (-1, self.width)) for part in projected))
            norm = layer.post_attention_layernorm
            x, h = add_norm(x, attention.o_proj(out.flatten(1)), norm.weight, norm.variance_epsilon)
            more = mlp.down_proj(silu_times(mlp.gate_proj(h), mlp.up_proj(h)))
        return add_norm(x, more, self.body.norm.weight, self.body.norm.variance_epsilon)[1]
