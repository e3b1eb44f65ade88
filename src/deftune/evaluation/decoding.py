"""The interface of decoders, and `PaddedDecoder`, which works with any transformers model.

A `Decoder` admits answers, generates tokens for all of them at once, and returns the finished ones. `PaddedDecoder`
extends a `DynamicCache` under a mask, as `generate` does; `slot_decoding.SlotDecoder` is faster.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deftune.evaluation.chance import draw, exponentials
from deftune.evaluation.sampler import Finish, Prompt
from deftune.tokens.finite import finite_note, finite_rows

DRAWN_AT_ONCE = 2**24  # logits: their noise, its bits and the scores are half a GiB


@dataclass(eq=False)
class Answer:
    """An answer that is being generated; ``finish`` is None until its end.

    ``key`` is `derive_key` as two int32; a ``temperature`` of 0 is greedy.
    """

    prompt: Prompt
    sample: int
    ids: list[int]
    limit: int
    key: tuple[int, int]
    temperature: float = 0.0
    made: list[int] = field(default_factory=list[int])
    finish: Finish | None = None
    note: str = ""

    def fail(self) -> None:
        self.finish, self.note = "error", finite_note(len(self.made))


class LanguageModel:
    """A model with its end tokens; chooses tokens from logits, and computes close ones again without a batch."""

    def __init__(self, model: Any, *, end_ids: Set[int], pad_id: int, tie_margin: float):
        self.model, self.end_ids, self.pad_id, self.tie_margin = model, end_ids, pad_id, tie_margin
        self.num_retried = 0
        self.keeps_last = takes(model, "logits_to_keep")

    @property
    def device(self) -> torch.device:
        return self.model.device

    @torch.no_grad()
    def forward(self, ids: Tensor, **more: Any) -> Tensor:
        """[rows, V] the logits of the last position."""
        if self.keeps_last:
            more["logits_to_keep"] = 1
        return self.model(input_ids=ids, **more).logits[:, -1]

    def choose(
        self, logits: Tensor, keys: Tensor, steps: Tensor, temperatures: Tensor, top_p: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[rows] the tokens, whether each is within the tie margin, and whether its logits are finite."""
        rows = max(1, DRAWN_AT_ONCE // logits.shape[-1])
        if len(logits) > rows:
            split = zip(logits.split(rows), keys.split(rows), steps.split(rows), temperatures.split(rows))
            parts = [self.choose(*part, top_p) for part in split]
            tokens, close, finite = (torch.cat(column) for column in zip(*parts))
            return tokens, close, finite
        logits = logits.float()
        finite = finite_rows(logits)
        logits = logits.where(finite[:, None], 0.0)
        tokens, close = self._draw(logits, keys, steps, temperatures, top_p, self.tie_margin)
        return tokens, close & finite, finite

    def settle(self, answer: Answer, made: Sequence[int], top_p: float) -> int:
        """The next token of one answer, computed without batch, padding or cache, so that no batch changes it."""
        self.num_retried += 1
        ids = torch.tensor([[*answer.ids, *made]], device=self.device)
        logits = self.forward(ids, use_cache=False).float()
        keys = torch.tensor([answer.key], dtype=torch.int32, device=self.device)
        steps = torch.tensor([len(made)], dtype=torch.int32, device=self.device)
        temperatures = torch.tensor([answer.temperature], dtype=torch.float32, device=self.device)
        return int(self._draw(logits, keys, steps, temperatures, top_p, 0.0)[0])

    def _draw(
        self, logits: Tensor, keys: Tensor, steps: Tensor, temperatures: Tensor, top_p: float, margin: float
    ) -> tuple[Tensor, Tensor]:
        noise = exponentials(keys, steps, logits.shape[-1]) if bool(temperatures.any()) else None
        return draw(logits, noise, temperatures, top_p, margin)


def takes(model: Any, name: str) -> bool:
    """Whether the model's forward has a parameter of that name."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return name in inspect.signature(base.forward).parameters


class Decoder(ABC):
    """Generates at most ``places`` answers together."""

    places: int

    @property
    @abstractmethod
    def num_live(self) -> int: ...

    @property
    def free(self) -> int:
        """How many answers can be admitted now."""
        return self.places - self.num_live

    @abstractmethod
    def admit(self, answers: list[Answer]) -> None: ...

    @abstractmethod
    def start(self) -> None:
        """Start to generate the next tokens; on a GPU without waiting for them."""

    @abstractmethod
    def collect(self) -> list[Answer]:
        """Wait for the tokens of `start`, and return the answers that are finished."""


class PaddedDecoder(Decoder):
    """One forward pass per token for a batch, padded on the left; finished rows are removed, new rows are added.

    A cache with sliding windows or recurrent states cannot take new rows: such a batch runs to its end.
    """

    def __init__(self, model: LanguageModel, *, top_p: float, places: int):
        self.model, self.top_p, self.places = model, top_p, places
        self.rows: list[Answer] = []
        self.cache: Any = None
        self.mask = self.logits = self.keys = torch.empty(0)

    @property
    def num_live(self) -> int:
        return len(self.rows)

    @property
    def free(self) -> int:
        return self.places - len(self.rows) if not self.rows or self.can_grow else 0

    @property
    def can_grow(self) -> bool:
        """Whether the cache is plain keys and values of all positions, which can be padded and joined."""
        from transformers.cache_utils import DynamicLayer

        return all(type(layer) is DynamicLayer for layer in self.cache.layers)

    def admit(self, answers: list[Answer]) -> None:
        """Run the model over the prompts, padded on the left; a prompt with several samples once."""
        from transformers import DynamicCache

        distinct = {row.prompt.id: row.ids for row in answers}
        place = {name: i for i, name in enumerate(distinct)}
        longest = max(map(len, distinct.values()))
        device, pad = self.model.device, self.model.pad_id
        ids = torch.tensor([[pad] * (longest - len(one)) + one for one in distinct.values()], device=device)
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in distinct.values()], device=device)
        cache: Any = DynamicCache(config=self.model.model.config)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = self.model.forward(
            ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        which = torch.tensor([place[row.prompt.id] for row in answers], device=device)
        if len(answers) > len(distinct):
            cache.batch_select_indices(which)
        keys = torch.tensor([row.key for row in answers], dtype=torch.int32, device=device)
        mask, logits = mask[which], logits[which]
        if not self.rows:
            self.rows, self.cache, self.mask, self.logits, self.keys = list(answers), cache, mask, logits, keys
            return
        missing = mask.shape[1] - self.mask.shape[1]
        self.mask = _padded(self.mask, self.cache, missing)
        mask = _padded(mask, cache, -missing)
        for mine, its in zip(self.cache.layers, cache.layers):
            mine.keys, mine.values = torch.cat([mine.keys, its.keys]), torch.cat([mine.values, its.values])
        self.rows += answers
        self.mask, self.logits = torch.cat([self.mask, mask]), torch.cat([self.logits, logits])
        self.keys = torch.cat([self.keys, keys])

    def start(self) -> None:
        pass  # nothing is done beside the caller

    def collect(self) -> list[Answer]:
        """Choose a token for every row, remove the finished rows, and run the model on the others."""
        device = self.keys.device
        steps = torch.tensor([len(row.made) for row in self.rows], dtype=torch.int32, device=device)
        temperatures = torch.tensor([row.temperature for row in self.rows], dtype=torch.float32, device=device)
        found = self.model.choose(self.logits, self.keys, steps, temperatures, self.top_p)
        chosen, ties, right = torch.stack([part.long() for part in found]).tolist()
        for i, row in enumerate(self.rows):
            if not right[i]:
                row.fail()
                continue
            token = self.model.settle(row, row.made, self.top_p) if ties[i] else chosen[i]
            row.made.append(token)
            if token in self.model.end_ids:
                row.finish = "stop"
            elif len(row.made) >= row.limit:
                row.finish = "length"
        finished = [row for row in self.rows if row.finish]
        self._keep([i for i, row in enumerate(self.rows) if not row.finish])
        if self.rows:
            next_ids = torch.tensor([[row.made[-1]] for row in self.rows], device=device)
            self.mask = F.pad(self.mask, (0, 1), value=1)
            positions = self.mask.sum(-1, keepdim=True) - 1
            self.logits = self.model.forward(
                next_ids, attention_mask=self.mask, position_ids=positions, past_key_values=self.cache, use_cache=True
            )
        return finished

    def _keep(self, places: list[int]) -> None:
        if len(places) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in places]
        if not places:
            return
        index = torch.tensor(places, device=self.mask.device)
        self.cache.batch_select_indices(index)
        self.mask, self.logits, self.keys = self.mask[index], self.logits[index], self.keys[index]
        if self.can_grow:
            unused = int((self.mask.cumsum(-1) == 0).sum(-1).min())
            for layer in self.cache.layers:
                layer.keys, layer.values = layer.keys[:, :, unused:], layer.values[:, :, unused:]
            self.mask = self.mask[:, unused:]


def _padded(mask: Tensor, cache: Any, count: int) -> Tensor:
    """The mask with ``count`` columns more on the left, if that is above 0, and the cache with it."""
    if count > 0:
        mask = F.pad(mask, (count, 0))
        for layer in cache.layers:
            layer.keys, layer.values = (F.pad(part, (0, 0, count, 0)) for part in (layer.keys, layer.values))
    return mask
