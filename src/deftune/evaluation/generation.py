"""Answers from a model: one small interface, three ways to run it, and a generator of chance that can be repeated.

`Sampler.sample` yields each answer as it is finished, in any order. What answer (item, sample) is follows from the
model, the prompt, the settings and the seed alone; not from the order of the items, nor from which of them are asked.

**The chance.** A token is drawn by the Gumbel-max rule: argmax over the vocabulary of ``z_v / T - log E_v``, where E_v
is exponential with mean 1. E_v is a hash of (key, step, v), and key is SHA-256 of (seed, item id, sample): no state, so
that nothing drawn elsewhere can move it. Two models asked with the same seed meet the same E_v, which makes their
answers to the same item go together, and the difference between them less noisy.

**Batches.** Arithmetic in a batch rounds differently than alone: kernels and their summation orders depend on shapes.
On SmolLM2 in float32 on a CPU logits move by up to 1e-4 (batch 1, 8, 32, padded or not). A token therefore could change
where the best two candidates are closer than that. `TransformersSampler` watches the distance, and where it is below
``tie_margin`` it asks the model again for that row alone, without padding or cache: one shape, one answer, whatever
the batch. So as long as rounding moves a distance by less than ``tie_margin``, the answers are the same for every
``batch_size``, order and company, on one machine with one number of threads.

Not guaranteed: the same answers across devices, thread counts, or versions of torch; anything in bfloat16 or float16,
where rounding moves logits by tenths and no margin is on by default; an `EndpointSampler` or `VllmSampler`, which pass
the seed on and can promise no more than the server does.
"""

from __future__ import annotations

import hashlib
import http.client
import inspect
import json
import math
import os
import queue
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast

from deftune.data.rows import Row

if TYPE_CHECKING:
    from torch import Tensor

Finish = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class Prompt:
    """What is asked. ``id`` names it, in the results and in the hash that its chance comes from."""

    id: str
    messages: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Output:
    """One answer. ``tokens`` counts what was generated, its end token too; None where a server does not say.

    ``finish``: the model ended it, the limit did, or it could not be made; ``note`` then says why.
    """

    id: str
    sample: int
    text: str
    tokens: int | None
    finish: Finish
    note: str = ""


class SamplerError(RuntimeError):
    """Sampling had to stop. Answers that were yielded before remain valid; ``done`` is their number."""

    def __init__(self, message: str, done: int = 0):
        super().__init__(message, done)
        self.message, self.done = message, done

    def __str__(self) -> str:
        return f"{self.message}; {self.done} answers were finished before"


class Sampler(Protocol):
    """Whoever answers prompts: ``samples`` answers each, in whatever order they are finished."""

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int = 1,
        temperature: float = 0.0,
        top_p: float = 1.0,
        max_new_tokens: int,
        seed: int = 0,
    ) -> Iterator[Output]: ...


class Settings(NamedTuple):
    samples: int
    temperature: float
    top_p: float
    max_new_tokens: int
    seed: int


def _checked(prompts: Sequence[Prompt], settings: Settings) -> Settings:
    if settings.samples < 1:
        raise ValueError(f"samples: at least 1, got {settings.samples}")
    if not (math.isfinite(settings.temperature) and settings.temperature >= 0):
        raise ValueError(f"temperature: a number from 0 (greedy), got {settings.temperature}")
    if not 0 < settings.top_p <= 1:
        raise ValueError(f"top_p: above 0 and at most 1, got {settings.top_p}")
    if settings.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: at least 1, got {settings.max_new_tokens}")
    if settings.temperature == 0 and settings.samples > 1:
        raise ValueError(f"samples: greedy answers are all the same, got {settings.samples}; pass a temperature")
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise ValueError(f"two prompts have the id {prompt.id!r}; their answers could not be told apart")
        seen.add(prompt.id)
    return settings


def derive_key(seed: int, id: str, sample: int) -> int:
    """64 bits for one answer, from (seed, id, sample) by SHA-256; the same on every machine.

    >>> derive_key(0, "gsm8k/17", 0) == derive_key(0, "gsm8k/17", 0) != derive_key(0, "gsm8k/17", 1)
    True
    """
    text = json.dumps([seed, id, sample])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


# Chance --------------------------------------------------------------------------------------------------------------

NUCLEUS_PART = 1024  # tokens: nearly always enough for top_p, and much less to sort than a vocabulary
_GOLDEN = -1640531527  # 2^32 / golden ratio, as a signed 32-bit number


def _signed(value: int) -> int:
    """A number below 2^64's low 32 bits, as torch's int32 holds them."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32 bits that scatters them (Wellons' lowbias32); int32 products wrap, shifts are made logical."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _signed(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)


def exponentials(keys: Tensor, steps: Tensor, size: int) -> Tensor:
    """[rows, size] exponential variables with mean 1, each a hash of its row's key and step and its own place.

    ``keys`` is [rows, 2] int32 (`derive_key` in halves), ``steps`` [rows] int32. 31 bits each: u in (0, 1) on a grid of
    2^-31, E = -log(1 - u), which keeps its relative precision where E is small and so likely to win.
    """
    import torch

    start = _mix(keys[:, :1] + steps[:, None] * _GOLDEN)
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


def _nucleus(z: Tensor, top_p: float, slacks: Sequence[float]) -> list[Tensor]:
    """Which tokens top_p keeps: those with less than ``top_p`` of the mass strictly above them, the best always.

    A mask for each slack: 0 is that set; > 0 a smaller one, as if all other logits and their mass were higher by it;
    < 0 a larger one. Only the upper part of the vocabulary is put in order, if the largest set ends within it.
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
            count = torch.searchsorted(-ordered, slack - ordered, right=slack > 0)
            above = share.cumsum(-1).gather(-1, (count - 1).clamp(min=0)) * (count > 0) - (share if slack > 0 else 0)
            kept = above < top_p - slack
            kept[..., 0] = True
            masks.append(torch.zeros_like(z, dtype=torch.bool).scatter(-1, order, kept))
            if slack == min(slacks) and k < size and bool(kept[..., -1].any()):
                break
        else:
            break
    return [masks[sorted(slacks).index(slack)] for slack in slacks]


def draw(
    logits: Tensor, noise: Tensor | None, temperature: float, top_p: float, margin: float
) -> tuple[Tensor, Tensor]:
    """[rows] the tokens, and whether a change of the logits by ``margin`` / 2 each could make it another one.

    ``logits`` [rows, V] float32; ``noise`` is `exponentials`, None for the greedy choice.
    """

    def best(scores: Tensor) -> tuple[Tensor, Tensor]:
        token = _first_max(scores)
        top = scores.gather(-1, token[:, None])
        others = scores.scatter(-1, token[:, None], -math.inf).amax(-1)
        return token, top[:, 0] - others

    if noise is None:
        token, gap = best(logits)
        return token, gap < margin
    scores = logits / temperature - noise.log()
    if top_p < 1:
        slack = margin / temperature
        exact, wide, narrow = _nucleus(logits / temperature, top_p, (0.0, -slack, slack))
        token, _ = best(scores.masked_fill(~exact, -math.inf))
        # the winner of the largest set that rounding could make, if it is in the smallest one, wins in all between
        winner, gap = best(scores.masked_fill(~wide, -math.inf))
        sure = narrow.gather(-1, winner[:, None])[:, 0]
        return token, (~sure | (gap * temperature < margin)) & (margin > 0)
    token, gap = best(scores)
    return token, gap * temperature < margin


# Transformers --------------------------------------------------------------------------------------------------------

TIE_MARGIN = 1e-3  # of float32 logits: ten times what batches were seen to move them


@dataclass
class _Answer:
    """An answer in the making."""

    prompt: Prompt
    sample: int
    ids: list[int]
    limit: int
    key: tuple[int, int]
    made: list[int] = field(default_factory=list[int])


class TransformersSampler:
    """A transformers model, its tokenizer, and a loop: one forward a token for a whole batch.

    ``template`` and the rest of ``encoder_options`` are the training `Encoder`'s, so a prompt is what training showed.
    ``end_ids`` end an answer, beside those that the encoder knows and the model's generation config names.
    Rows that finish leave the batch, and waiting prompts take their places, longest first. The samples of a prompt
    that start together share its prefill.
    ``tie_margin``: see the module; None is `TIE_MARGIN` for float32 and wider, 0 (off) below.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        template: str | None = None,
        batch_size: int = 16,
        end_ids: Iterable[int] = (),
        tie_margin: float | None = None,
        encoder_options: Mapping[str, Any] | None = None,
    ):
        import torch

        from deftune.data.encoding import Encoder

        if batch_size < 1:
            raise ValueError(f"batch_size: at least 1, got {batch_size}")
        if tie_margin is not None and not tie_margin >= 0:
            raise ValueError(f"tie_margin: a number from 0 (off), got {tie_margin}")
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        # no prompt is cut to fit: one that is too long for the model is an answer with an error
        self.encoder = Encoder(tokenizer, template=template, max_length=2**31 - 1, **dict(encoder_options or {}))
        own: Any = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        own = own if isinstance(own, list) else [own]
        named = {int(i) for i in own if i is not None}
        self.end_ids = frozenset({*self.encoder.end_ids.values(), *named, *end_ids})
        wide = model.dtype in (torch.float32, torch.float64)
        self.tie_margin = tie_margin if tie_margin is not None else TIE_MARGIN if wide else 0.0
        limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.max_length = limit if limit is not None else math.inf
        self._keeps = {"logits_to_keep": 1} if _takes(model, "logits_to_keep") else {}
        self.num_tokens = self.num_retried = 0  # made so far, and of those asked again alone

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int = 1,
        temperature: float = 0.0,
        top_p: float = 1.0,
        max_new_tokens: int,
        seed: int = 0,
    ) -> Iterator[Output]:
        settings = _checked(prompts, Settings(samples, temperature, top_p, max_new_tokens, seed))
        was_training = self.model.training
        self.model.eval()
        try:
            yield from self._sample(prompts, settings)
        finally:
            self.model.train(was_training)

    def _sample(self, prompts: Sequence[Prompt], settings: Settings) -> Iterator[Output]:
        waiting: list[_Answer] = []
        for prompt in prompts:
            try:
                ids = self.encode(prompt)
                room = self.max_length - len(ids)
                if room < 1:
                    raise ValueError(f"{len(ids)} tokens of prompt leave no room in the model's {self.max_length}")
            except ValueError as error:
                for sample in range(settings.samples):
                    yield Output(prompt.id, sample, "", 0, "error", str(error))
                continue
            limit = int(min(room, settings.max_new_tokens))
            for sample in range(settings.samples):
                key = derive_key(settings.seed, prompt.id, sample)
                waiting.append(_Answer(prompt, sample, ids, limit, (_signed(key >> 32), _signed(key))))
        # the longest first: what does not fit in memory is known at once, and neighbours need little padding
        queue_ = deque(sorted(waiting, key=lambda a: -len(a.ids)))
        batch: _Batch | None = None
        while queue_ or batch:
            free = self.batch_size - len(batch.rows if batch else ())
            # a refill is a prefill and a copy of the cache, so it waits until a quarter of the places are free
            if queue_ and (batch is None or (batch.can_grow and 4 * free >= self.batch_size)):
                new = self._prefill([queue_.popleft() for _ in range(min(free, len(queue_)))])
                batch = new if batch is None else batch.joined(new)
            assert batch is not None
            yield from self._step(batch, settings)
            if not batch.rows:
                batch = None

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's tokens, through the template that training uses."""
        messages = tuple(dict(message) for message in prompt.messages)
        return self.encoder.encode_prompt(Row(messages, None, prompt.id, "prompt"))

    def _forward(self, ids: Tensor, **more: Any) -> Any:
        import torch

        with torch.no_grad():
            return self.model(input_ids=ids, **self._keeps, **more)

    def _prefill(self, rows: list[_Answer]) -> _Batch:
        """A batch that has read its prompts, padded on the left; each prompt is read once, whatever its samples."""
        import torch
        from transformers import DynamicCache

        distinct = {row.prompt.id: row.ids for row in rows}
        place = {name: i for i, name in enumerate(distinct)}
        longest = max(map(len, distinct.values()))
        device = self.model.device
        pad = self.tokenizer.pad_token_id or 0
        ids = torch.tensor([[pad] * (longest - len(one)) + one for one in distinct.values()], device=device)
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in distinct.values()], device=device)
        cache: Any = DynamicCache(config=self.model.config)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        out = self._forward(ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
        which = torch.tensor([place[row.prompt.id] for row in rows], device=device)
        if len(rows) > len(distinct):
            cache.batch_select_indices(which)
        keys = torch.tensor([row.key for row in rows], dtype=torch.int32, device=device)
        return _Batch(list(rows), cache, mask[which], out.logits[:, -1].float()[which], keys)

    def _step(self, batch: _Batch, settings: Settings) -> Iterator[Output]:
        """One token for every row; rows that it finishes are yielded and leave, the others go through the model."""
        import torch

        device = batch.logits.device
        noise = None
        if settings.temperature > 0:
            steps = torch.tensor([len(row.made) for row in batch.rows], dtype=torch.int32, device=device)
            noise = exponentials(batch.keys, steps, batch.logits.shape[-1])
        finite = batch.logits.amax(-1).isfinite()  # NaN comes through; -inf below the best is a token never said
        logits = batch.logits.where(finite[:, None], 0.0)
        tokens, close = draw(logits, noise, settings.temperature, settings.top_p, self.tie_margin)
        chosen, ties, right = torch.stack([tokens, close.long(), finite.long()]).tolist()
        self.num_tokens += len(chosen)
        going: list[int] = []
        for i, row in enumerate(batch.rows):
            if not right[i]:
                note = f"the model's logits are not finite after {len(row.made)} tokens"
                yield Output(row.prompt.id, row.sample, self._text(row.made), len(row.made), "error", note)
                continue
            if ties[i]:
                self.num_retried += 1
                alone = self._forward(torch.tensor([row.ids + row.made], device=device), use_cache=False).logits[:, -1]
                part = None if noise is None else noise[i : i + 1]
                chosen[i] = int(draw(alone.float(), part, settings.temperature, settings.top_p, 0.0)[0])
            row.made.append(chosen[i])
            if chosen[i] in self.end_ids:
                yield Output(row.prompt.id, row.sample, self._text(row.made[:-1]), len(row.made), "stop")
            elif len(row.made) >= row.limit:
                yield Output(row.prompt.id, row.sample, self._text(row.made), len(row.made), "length")
            else:
                going.append(i)
        batch.keep(going)
        if not going:
            return
        next_ids = torch.tensor([[chosen[i]] for i in going], device=device)
        batch.mask = torch.cat([batch.mask, batch.mask.new_ones(len(going), 1)], 1)
        positions = batch.mask.sum(-1, keepdim=True) - 1
        out = self._forward(
            next_ids, attention_mask=batch.mask, position_ids=positions, past_key_values=batch.cache, use_cache=True
        )
        batch.logits = out.logits[:, -1].float()

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@dataclass
class _Batch:
    """Rows that are generated together: their cache, mask [B, T], last logits [B, V] and keys [B, 2]."""

    rows: list[_Answer]
    cache: Any
    mask: Tensor
    logits: Tensor
    keys: Tensor

    @property
    def can_grow(self) -> bool:
        """Whether the cache is plain keys and values of all positions, which can be padded and joined.

        With sliding windows or recurrent states it is not, and a batch runs to its end before the next one starts.
        """
        from transformers.cache_utils import DynamicLayer

        return all(type(layer) is DynamicLayer for layer in self.cache.layers)

    def keep(self, places: list[int]) -> None:
        import torch

        if len(places) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in places]
        if not places:
            return
        index = torch.tensor(places, device=self.mask.device)
        self.cache.batch_select_indices(index)
        self.mask, self.logits, self.keys = self.mask[index], self.logits[index], self.keys[index]
        if self.can_grow:
            self._pad(-int((self.mask.cumsum(-1) == 0).sum(-1).min()))

    def _pad(self, count: int) -> None:
        """``count`` columns more on the left; below 0 fewer, which no row uses."""
        import torch.nn.functional as F

        if count:
            self.mask = F.pad(self.mask, (count, 0))
            for layer in self.cache.layers:
                layer.keys, layer.values = (F.pad(part, (0, 0, count, 0)) for part in (layer.keys, layer.values))

    def joined(self, other: _Batch) -> _Batch:
        import torch

        width = max(self.mask.shape[1], other.mask.shape[1])
        for batch in (self, other):
            batch._pad(width - batch.mask.shape[1])
        for mine, its in zip(self.cache.layers, other.cache.layers):
            mine.keys, mine.values = torch.cat([mine.keys, its.keys]), torch.cat([mine.values, its.values])
        self.rows += other.rows
        self.mask, self.logits = torch.cat([self.mask, other.mask]), torch.cat([self.logits, other.logits])
        self.keys = torch.cat([self.keys, other.keys])
        return self


def _takes(model: Any, name: str) -> bool:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return name in inspect.signature(base.forward).parameters


# A server ------------------------------------------------------------------------------------------------------------

MAX_ANSWER_BYTES = 64 * 2**20


class _Retry(Exception):
    """What went wrong this time, and may not the next."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would take the key to another host."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        return None


class EndpointSampler:
    """A server that speaks OpenAI's /v1/chat/completions: vLLM, SGLang, llama.cpp, transformers serve.

    The server applies its own chat template: serve the folder that training saved, which has the one trained with.
    ``seed`` is sent per answer, from (seed, item, sample); how far the server honours it is the server's affair.
    ``api_key_env`` names the environment variable with the key; it is in no message. Requests go out ``concurrency`` at
    a time. What may pass (no connection, a time-out, 408, 409, 429, 5xx, an answer that is no completion) is tried
    again ``retries`` times, after 1, 2, 4, ... times ``backoff`` seconds; other HTTP errors are not.
    ``extra`` is added to each request's body, such as ``{"top_k": -1}``.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_env: str | None = None,
        concurrency: int = 8,
        timeout: float = 600.0,
        retries: int = 4,
        backoff: float = 1.0,
        extra: Mapping[str, Any] | None = None,
    ):
        parts = urllib.parse.urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base_url: http://host:port or https://host, got {base_url!r}")
        if concurrency < 1 or retries < 0 or not timeout > 0 or backoff < 0:
            raise ValueError("concurrency is at least 1, retries and backoff at least 0, timeout above 0")
        base = base_url.rstrip("/")
        self.url = f"{base if base.endswith('/v1') else base + '/v1'}/chat/completions"
        self.model, self.concurrency, self.timeout = model, concurrency, timeout
        self.retries, self.backoff, self.extra = retries, backoff, dict(extra or {})
        self._headers = {"Content-Type": "application/json"}
        if api_key_env is not None:
            key = os.environ.get(api_key_env)
            if not key:
                raise ValueError(f"api_key_env: the environment has no {api_key_env}; set it to the key")
            self._headers["Authorization"] = f"Bearer {key}"
        self._opener = urllib.request.build_opener(_NoRedirect)

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int = 1,
        temperature: float = 0.0,
        top_p: float = 1.0,
        max_new_tokens: int,
        seed: int = 0,
    ) -> Iterator[Output]:
        settings = _checked(prompts, Settings(samples, temperature, top_p, max_new_tokens, seed))
        waiting: queue.SimpleQueue[tuple[Prompt, int]] = queue.SimpleQueue()
        for prompt in prompts:
            for sample in range(samples):
                waiting.put((prompt, sample))
        total = len(prompts) * samples
        results: queue.SimpleQueue[Output | BaseException | None] = queue.SimpleQueue()
        stop = threading.Event()

        def work() -> None:
            try:
                while not stop.is_set():
                    try:
                        prompt, sample = waiting.get_nowait()
                    except queue.Empty:
                        break
                    results.put(self._ask(prompt, sample, settings, stop))
            except BaseException as error:  # handed to the reader, which would wait for ever
                stop.set()
                results.put(error)
            finally:
                results.put(None)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(self.concurrency, total))]
        for thread in threads:
            thread.start()
        done, left, failure = 0, len(threads), None
        try:
            while left:
                result = results.get()
                if result is None:
                    left -= 1
                elif isinstance(result, Output):
                    done += 1
                    yield result
                elif failure is None:  # the other requests on their way are still answered, then it is raised
                    failure = result
        finally:
            stop.set()
        if isinstance(failure, SamplerError):
            raise SamplerError(failure.message, done)
        if failure is not None:
            raise failure

    def _ask(self, prompt: Prompt, sample: int, settings: Settings, stop: threading.Event) -> Output:
        body = {
            **self.extra,
            "model": self.model,
            "messages": [dict(message) for message in prompt.messages],
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "seed": derive_key(settings.seed, prompt.id, sample) >> 33,  # 31 bits: some servers take no more
            "stream": False,
        }
        data = json.dumps(body).encode()
        tries = 0
        while True:
            try:
                return self._answer(prompt, sample, self._post(data, prompt))
            except _Retry as problem:
                tries += 1
                if tries > self.retries or stop.is_set():
                    times = f"{tries} attempt{'s' if tries > 1 else ''}"
                    raise SamplerError(f"{self.url}: {prompt.id}: {problem} (after {times})") from None
                stop.wait(self.backoff * 2 ** (tries - 1))

    def _post(self, data: bytes, prompt: Prompt) -> bytes:
        request = urllib.request.Request(self.url, data, self._headers, method="POST")
        try:
            with self._opener.open(request, timeout=self.timeout) as response:
                content = response.read(MAX_ANSWER_BYTES + 1)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(2000).decode("utf-8", "replace").strip().replace("\n", " ")[:300]
            problem = f"HTTP {error.code} {error.reason}{said and f': {said}'}"
            if error.code in (408, 409, 429) or error.code >= 500:
                raise _Retry(problem) from None
            raise SamplerError(f"{self.url}: {prompt.id}: {problem}") from None
        except TimeoutError:
            raise _Retry(f"no answer in {self.timeout:g} seconds") from None
        except urllib.error.URLError as error:
            raise _Retry(f"no connection: {error.reason}") from None
        except (OSError, http.client.HTTPException) as error:
            raise _Retry(f"connection lost: {error or type(error).__name__}") from None
        if len(content) > MAX_ANSWER_BYTES:
            raise _Retry(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
        return content

    def _answer(self, prompt: Prompt, sample: int, content: bytes) -> Output:
        """What the server said, every field checked before it is believed."""

        def wrong(what: str) -> _Retry:
            return _Retry(f"not a chat completion: {what}: {content[:200].decode('utf-8', 'replace')!r}")

        try:
            said: Any = json.loads(content)
        except (ValueError, RecursionError):
            raise wrong("not JSON") from None
        choices: Any = cast("dict[str, Any]", said).get("choices") if isinstance(said, dict) else None
        if not isinstance(choices, list) or len(cast("list[Any]", choices)) != 1:
            raise wrong("'choices' is not a list of one")
        choice: Any = choices[0]
        message: Any = cast("dict[str, Any]", choice).get("message") if isinstance(choice, dict) else None
        if not isinstance(message, dict):
            raise wrong("no message in its choice")
        text: Any = cast("dict[str, Any]", message).get("content")
        if text is None:
            text = ""  # an empty answer, or one of nothing but reasoning
        if not isinstance(text, str):
            raise wrong("'content' is not text")
        usage: Any = said.get("usage")
        tokens: Any = cast("dict[str, Any]", usage).get("completion_tokens") if isinstance(usage, dict) else None
        if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0):
            raise wrong("'completion_tokens' is not a count")
        reason: Any = choice.get("finish_reason")
        if reason in ("stop", "length"):
            return Output(prompt.id, sample, text, tokens, reason)
        return Output(prompt.id, sample, text, tokens, "error", f"the server ended it with {str(reason)[:60]!r}")


# vLLM ----------------------------------------------------------------------------------------------------------------


class VllmSampler:
    """vLLM in this process: its throughput, our prompts and seeds. Written to its documented API; no test runs it.

    ``engine`` is a ``vllm.LLM`` or a model's name; ``tokenizer`` is transformers', for the training template.
    Answers are yielded when all are made. vLLM does not promise that a batch leaves an answer unchanged.
    """

    def __init__(
        self, engine: Any, tokenizer: Any, *, template: str | None = None, end_ids: Iterable[int] = (),
        encoder_options: Mapping[str, Any] | None = None, **engine_options: Any,
    ):  # fmt: skip
        from deftune.data.encoding import Encoder

        self._vllm = _vllm()
        if isinstance(engine, str):
            engine = self._vllm.LLM(model=engine, **engine_options)
        elif engine_options:
            raise ValueError(f"{', '.join(engine_options)}: options of an engine that is made already")
        self.engine = engine
        self.encoder = Encoder(tokenizer, template=template, max_length=2**31 - 1, **dict(encoder_options or {}))
        self.end_ids = sorted({*self.encoder.end_ids.values(), *end_ids})

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int = 1,
        temperature: float = 0.0,
        top_p: float = 1.0,
        max_new_tokens: int,
        seed: int = 0,
    ) -> Iterator[Output]:
        settings = _checked(prompts, Settings(samples, temperature, top_p, max_new_tokens, seed))
        asked = [(prompt, sample) for prompt in prompts for sample in range(settings.samples)]
        rows = [Row(tuple(dict(message) for message in p.messages), None, p.id, "prompt") for p, _ in asked]
        inputs = [{"prompt_token_ids": self.encoder.encode_prompt(row)} for row in rows]
        params = [
            self._vllm.SamplingParams(
                n=1, temperature=temperature, top_p=top_p, max_tokens=max_new_tokens, stop_token_ids=self.end_ids,
                seed=derive_key(seed, prompt.id, sample) >> 33,
            )
            for prompt, sample in asked
        ]  # fmt: skip
        for (prompt, sample), result in zip(asked, self.engine.generate(inputs, params)):
            made = result.outputs[0]
            finish: Finish = made.finish_reason if made.finish_reason in ("stop", "length") else "error"
            note = "" if finish != "error" else f"vLLM ended it with {made.finish_reason!r}"
            yield Output(prompt.id, sample, made.text, len(made.token_ids), finish, note)


def _vllm() -> Any:
    try:
        import vllm  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError("VllmSampler needs vllm, which is not a dependency of deftune; pip install vllm") from None
    return vllm
