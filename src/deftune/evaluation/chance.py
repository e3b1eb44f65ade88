"""Random numbers of sampling, without state: they do not depend on what else is drawn.

A token is drawn by the Gumbel-max rule: argmax over the vocabulary of ``z_v / T - log E_v``, where E_v is exponential
with mean 1: a hash of (key, step, v), and key is SHA-256 of (seed, item id, sample).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

NUCLEUS_PART = 1024  # tokens: nearly always enough for top_p, and much less to sort than a vocabulary
GOLDEN = -1640531527  # 2^32 / golden ratio, as a signed 32-bit number


def derive_key(seed: int, id: str, sample: int) -> int:
    """64 bits for one answer, from (seed, id, sample) by SHA-256; the same on every machine.

    >>> derive_key(0, "gsm8k/17", 0) == derive_key(0, "gsm8k/17", 0) != derive_key(0, "gsm8k/17", 1)
    True
    """
    text = json.dumps([seed, id, sample])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def signed(value: int) -> int:
    """A number below 2^64's low 32 bits, as torch's int32 holds them."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32 bits that scatters them (Wellons' lowbias32); int32 products wrap, shifts are made logical."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * signed(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def exponentials(keys: Tensor, steps: Tensor, size: int) -> Tensor:
    """[rows, size] exponential variables with mean 1, each a hash of its row's key and step and its own place.

    ``keys`` is [rows, 2] int32 (`derive_key` in halves), ``steps`` [rows] int32. 31 bits each: u in (0, 1) on a grid of
    2^-31, E = -log(1 - u), which keeps its relative precision where E is small and so likely to win.
    """
    import torch

    start = _mix(keys[:, :1] + steps[:, None] * GOLDEN)
    places = torch.arange(size, dtype=torch.int32, device=keys.device)
    bits = _mix(_mix(places[None] ^ start) + keys[:, 1:])
    u = ((bits & 0x7FFFFFFF).float() + 0.5) * 2.0**-31
    return -torch.log1p(-u.clamp_(max=1 - 2.0**-24))


def _first_max(scores: Tensor) -> Tensor:
    """[rows] the lowest place of each row's maximum: argmax itself may return any of several."""
    import torch

    best = scores.amax(-1, keepdim=True)
    places = torch.arange(scores.shape[-1], device=scores.device)
    return torch.where(scores == best, places, scores.shape[-1]).amin(-1)


def nucleus(z: Tensor, top_p: float, slacks: Sequence[float], unit: Tensor | float = 1.0) -> list[Tensor]:
    """Which tokens top_p keeps: those with less than ``top_p`` of the mass strictly above them, the best always.

    A mask for each slack: 0 is that set; > 0 a smaller one, as if all other logits and their mass were higher by it;
    < 0 a larger one. ``unit`` [rows, 1] is a slack of 1 on the scale of each row of ``z``. Only the upper part of the
    vocabulary is put in order, if the largest set ends within it.
    """
    import torch

    total = z.logsumexp(-1, keepdim=True)
    size = z.shape[-1]
    masks: list[Tensor] = []
    for k in (min(NUCLEUS_PART, size), size):
        ordered, order = z.topk(k, -1)
        share = (ordered - total).double().exp()
        masks.clear()
        for slack in sorted(slacks):
            # tokens whose logit is above z_v - slack count as above v; where slack > 0 v itself is among them
            count = torch.searchsorted(-ordered, slack * unit - ordered, right=slack > 0)
            above = share.cumsum(-1).gather(-1, (count - 1).clamp(min=0)) * (count > 0) - (share if slack > 0 else 0)
            kept = above + slack * unit < top_p
            kept[..., 0] = True
            masks.append(torch.zeros_like(z, dtype=torch.bool).scatter(-1, order, kept))
            if slack == min(slacks) and k < size and bool(kept[..., -1].any()):
                break
        else:
            break
    return [masks[sorted(slacks).index(slack)] for slack in slacks]


def draw(
    logits: Tensor, noise: Tensor | None, temperatures: Tensor, top_p: float, margin: float
) -> tuple[Tensor, Tensor]:
    """[rows] the tokens, and whether a change of the logits by ``margin`` / 2 each could make it another one.

    ``logits`` [rows, V] float32; ``temperatures`` [rows] float32, where 0 is greedy, whatever ``top_p`` is; ``noise``
    is `exponentials`, or None if every row is greedy.
    """

    def best(scores: Tensor) -> tuple[Tensor, Tensor]:
        token = _first_max(scores)
        top = scores.gather(-1, token[:, None])
        others = scores.scatter(-1, token[:, None], -math.inf).amax(-1)
        return token, top[:, 0] - others

    if noise is None:
        token, gap = best(logits)
        return token, gap < margin
    greedy = temperatures == 0
    scale = temperatures.masked_fill(greedy, 1.0)
    z = logits / scale[:, None]
    scores = (z - noise.log()).where(~greedy[:, None], logits)
    if top_p < 1:
        masks = nucleus(z, top_p, (0.0, -margin, margin), 1 / scale[:, None])
        exact, wide, narrow = (mask | greedy[:, None] for mask in masks)
        token, _ = best(scores.masked_fill(~exact, -math.inf))
        # the winner of the largest set that rounding could make, if it is in the smallest one, wins in all between
        winner, gap = best(scores.masked_fill(~wide, -math.inf))
        sure = narrow.gather(-1, winner[:, None])[:, 0]
        return token, (~sure | (gap * scale < margin)) & (margin > 0)
    token, gap = best(scores)
    return token, gap * scale < margin
