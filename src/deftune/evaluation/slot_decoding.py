"""`SlotDecoder`: each answer has a slot of the cache; a step extends all answers, and a free slot takes the next one.

On CUDA a step, from the embedding to the drawn token, is captured as a graph and replayed, and the host polls for
finished answers every `LOOK_EVERY` steps; the kernels are in `triton_decoding`. Elsewhere a step is plain torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from deftune.evaluation.decoding import Answer, Decoder, LanguageModel
from deftune.evaluation.direct import Direct
from deftune.evaluation.slots import Plan, SlotCache, Survey, has_kernels, kernels, step_logits

LOOK_EVERY = 16  # steps: looking costs a synchronisation, not looking a slot that waits half of them
SHRINK = 4  # slots come in this many times fewer as answers run out; each number of them is a graph
WORTH_SHRINKING = 64  # steps to go: a graph costs about as much as some ten steps
RUNNING, STOP, LENGTH, BROKEN, EMPTY = range(5)


class SlotDecoder(Decoder):
    """Answers in the slots of a plan; the first ``size`` of them take part in a step.

    An answer has at most ``max_new_tokens`` tokens; its own limit may be lower.
    """

    def __init__(self, model: LanguageModel, found: Survey, plan: Plan, *, top_p: float, max_new_tokens: int):
        device = model.device
        self.model, self.top_p, self.portion = model, top_p, plan.portion
        self.places = places = plan.slots
        self.cache = SlotCache(found.shapes, places, plan.room, model.model.dtype, device)
        self.answers: list[Answer | None] = [None] * places
        self.num_made = [0] * places  # at the last look
        self.size = 0

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.token = zeros(places, dtype=torch.int64)  # what each slot's next step takes
        self.keys, self.steps, self.limits = zeros(places, 2), zeros(places), zeros(places)
        self.temperatures = zeros(places, dtype=torch.float32)
        self.state = zeros(places) + EMPTY
        self.made = zeros(places, max_new_tokens + 1)  # the last column is for slots that wait
        self.is_end = zeros(found.vocab_size, dtype=torch.bool)
        self.is_end[[i for i in sorted(model.end_ids) if i < found.vocab_size]] = True

        self.fast = device.type == "cuda" and has_kernels()
        self.direct = Direct(model.model) if self.fast and Direct.takes(model.model) else None
        self.one_pass = self.fast and model.tie_margin == 0 and top_p == 1  # the draw is part of the graph
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self.pool: Any = None
        self.sizes = [places]
        while self.sizes[-1] > 2 * SHRINK:
            self.sizes.append(-(-self.sizes[-1] // SHRINK))

    @property
    def num_live(self) -> int:
        return sum(answer is not None for answer in self.answers)

    def _size_for(self, count: int) -> int:
        """The number of slots that steps for ``count`` answers go through: theirs, or the next for which is a graph."""
        return min(size for size in self.sizes if size >= count) if self.fast else count

    # --- in

    @torch.no_grad()
    def admit(self, answers: list[Answer]) -> None:
        free = [place for place, held in enumerate(self.answers) if held is None][: len(answers)]
        for place, answer in zip(free, answers):
            self.answers[place], self.num_made[place] = answer, 0
        self.size = max(self.size, self._size_for(free[-1] + 1))
        at = self._index(free)
        self.token[at] = self._index([answer.ids[-1] for answer in answers])
        self.cache.lengths[at] = self._index([len(answer.ids) - 1 for answer in answers])
        self.keys[at] = torch.tensor([answer.key for answer in answers], dtype=torch.int32, device=at.device)
        temperatures = [answer.temperature for answer in answers]
        self.temperatures[at] = torch.tensor(temperatures, dtype=torch.float32, device=at.device)
        self.limits[at] = self._index([answer.limit for answer in answers]).int()
        self.steps[at], self.state[at] = 0, RUNNING
        for part in self._portions(answers):
            self._read([answers[i] for i in part], [free[i] for i in part])

    def _portions(self, answers: list[Answer]) -> Iterator[list[int]]:
        """Their places in order, as many at a time as are read together."""
        part: list[int] = []
        prompts: set[str] = set()
        longest = 0
        for i, answer in enumerate(answers):
            longest = max(longest, len(answer.ids))
            if part and longest * (len(prompts) + (answer.prompt.id not in prompts)) > self.portion:
                yield part
                part, longest = [], len(answer.ids)
                prompts.clear()
            part.append(i)
            prompts.add(answer.prompt.id)
        yield part

    def _read(self, answers: list[Answer], places: list[int]) -> None:
        """Prompts up to their last tokens, each once, padded on the right: what comes later does not matter to them."""
        distinct = {answer.prompt.id: answer.ids[:-1] for answer in answers}
        order = {name: i for i, name in enumerate(distinct)}
        width = max(1, *map(len, distinct.values()))
        pad = self.model.pad_id
        ids = self._index([one + [pad] * (width - len(one)) for one in distinct.values()])
        which, at = self._index([order[answer.prompt.id] for answer in answers]), self._index(places)
        if self.direct:
            layers = self.direct.read(ids)
        else:
            read: Any = DynamicCache()
            self.model.forward(ids, past_key_values=read, use_cache=True)
            layers = ((layer.keys, layer.values) for layer in read.layers)
        for keys, values, (its_keys, its_values) in zip(self.cache.keys, self.cache.values, layers):
            keys[:, :, :width].index_copy_(0, at, its_keys[which])
            values[:, :, :width].index_copy_(0, at, its_values[which])

    def _index(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.token.device)

    # --- on

    @torch.no_grad()
    def start(self) -> None:
        live = [place for place, answer in enumerate(self.answers) if answer is not None]
        to_go = max(answer.limit - made for answer, made in zip(self.answers, self.num_made) if answer is not None)
        size = self._size_for(len(live))
        if size < self.size and (not self.fast or to_go >= WORTH_SHRINKING):
            self._move([place for place in live if place >= size], size)
            self.size = size
        together = self.token.is_cuda and self.model.tie_margin == 0
        for _ in range(min(LOOK_EVERY, to_go) if together else 1):
            self._step(self.size)

    def _move(self, places: list[int], size: int) -> None:
        """The answers in ``places`` into free slots below ``size``."""
        if not places:
            return
        holes = [place for place in range(size) if self.answers[place] is None][: len(places)]
        longest = 0
        for place, hole in zip(places, holes):
            answer = self.answers[place]
            assert answer is not None
            longest = max(longest, len(answer.ids) + self.num_made[place])
            self.answers[hole], self.answers[place] = answer, None
            self.num_made[hole] = self.num_made[place]
        to, source = self._index(holes), self._index(places)
        for part in self.cache.tensors():
            part[:, :, :longest].index_copy_(0, to, part[:, :, :longest][source])
        per_slot = (self.token, self.keys, self.temperatures, self.steps, self.limits, self.state, self.made)
        for part in (self.cache.lengths, *per_slot):
            part[to] = part[source]
        self._empty(source)

    def _empty(self, places: Tensor) -> None:
        self.state[places], self.cache.lengths[places] = EMPTY, 0  # nothing to attend to

    def _step(self, size: int) -> None:
        if self.one_pass:
            self._replay(size, self._whole_step)
            return
        logits = self._replay(size, self._logits)
        tokens, close, finite = self.model.choose(
            logits, self.keys[:size], self.steps[:size], self.temperatures[:size], self.top_p
        )
        if self.model.tie_margin > 0:
            for place in (close & (self.state[:size] == RUNNING)).nonzero()[:, 0].tolist():
                answer = self.answers[place]
                assert answer is not None
                made = self.made[place, : self.num_made[place]].tolist()
                tokens[place] = self.model.settle(answer, made, self.top_p)
        self._commit(tokens, finite)

    def _logits(self, size: int) -> Tensor:
        if self.direct:
            return self.direct.step(self.token[:size], self.cache)
        return step_logits(self.model, self.token[:size], self.cache)

    def _whole_step(self, size: int) -> None:
        tokens, finite = kernels().draw(
            self._logits(size), self.keys[:size], self.steps[:size], self.temperatures[:size]
        )
        self._commit(tokens, finite)

    def _commit(self, tokens: Tensor, finite: Tensor) -> None:
        """Note the tokens of the slots that run, and which of them end with it."""
        size = len(tokens)
        state, steps = self.state[:size], self.steps[:size]
        # a slot that waits writes after its last token, where nothing is read
        self.made[:size].scatter_(1, steps[:, None].long(), tokens[:, None].int())
        runs = state == RUNNING
        goes = runs & finite
        steps += goes
        self.cache.lengths[:size] += goes
        self.token[:size] = torch.where(goes, tokens, self.token[:size])
        # filled in, not chosen by where: its scalars would be copied from the host, which a capture cannot do
        after = torch.full_like(state, RUNNING).masked_fill_(steps >= self.limits[:size], LENGTH)
        after.masked_fill_(self.is_end[tokens], STOP).masked_fill_(~finite, BROKEN)
        state.copy_(torch.where(runs, after, state))

    def _replay(self, size: int, function: Callable[[int], Any]) -> Any:
        """``function(size)`` from its graph; the first time as it is, which also makes all that a capture must find."""
        if not self.fast:
            return function(size)
        if size in self.graphs:
            graph, result = self.graphs[size]
            graph.replay()
            return result
        now = function(size)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                result = function(size)
        except RuntimeError as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            warnings.warn(f"a decoding step cannot be captured as a CUDA graph and runs slower: {reason}", stacklevel=2)
            self.fast = self.one_pass = False
        else:
            self.graphs[size] = graph, result
            self.pool = self.pool or graph.pool()
        return now

    # --- out

    @torch.no_grad()
    def collect(self) -> list[Answer]:
        state, steps = torch.stack([self.state[: self.size], self.steps[: self.size]]).tolist()
        done: list[int] = []
        for place, answer in enumerate(self.answers[: self.size]):
            if answer is not None:
                self.num_made[place] = steps[place]
                if state[place] != RUNNING:
                    done.append(place)
        if not done:
            return []
        at = self._index(done)
        rows = self.made[at, : max(steps[place] for place in done)].tolist()
        self._empty(at)
        finished: list[Answer] = []
        for place, row in zip(done, rows):
            answer, self.answers[place] = self.answers[place], None
            assert answer is not None
            answer.made = row[: steps[place]]
            if state[place] == BROKEN:
                answer.fail()
                for part in self.cache.tensors():
                    part[place] = 0.0  # what is not finite would reach the slot's next answer
            else:
                answer.finish = "stop" if state[place] == STOP else "length"
            finished.append(answer)
        return finished
