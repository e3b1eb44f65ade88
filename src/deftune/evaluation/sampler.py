"""The interface of samplers: prompts, sampling settings, answers, and the encoding of prompts as in training.

The samplers: a transformers model in this process (`local`), a server (`endpoint`) and vLLM (`vllm_engine`).

An answer depends on the model, the prompt, the settings, the seed, the item's id and the number of the sample; not on
the order of the items, nor on the other items.

**Random numbers.** A token is drawn by the Gumbel-max rule: argmax over the vocabulary of ``z_v / T - log E_v``, where
E_v is exponential with mean 1. E_v is a hash of (key, step, v), and key is SHA-256 of (seed, item id, sample), so there
is no state. Two models with the same seed share E_v: their answers to an item are correlated, and the difference of
their scores is less noisy.

**Batches.** Kernels and their summation orders depend on shapes, so a batch rounds differently than a single row. On
SmolLM2 in float32 on a CPU, logits differ by up to 1e-4 (batches of 1, 8 and 32, padded or not), which could change a
token whose best two candidates are closer than that. Where they are closer than ``tie_margin``, `TransformersSampler`
computes the row again without batch, padding or cache. As long as rounding moves the distance by less than
``tie_margin``, answers are the same for every ``batch_size`` and order, on one machine with one number of threads.

Not guaranteed: the same answers on other devices, thread counts or versions of torch; in bfloat16 and float16, where
rounding moves logits by tenths and the margin is off by default; and from `EndpointSampler` and `VllmSampler`, which
only pass the seed on.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, NamedTuple

from deftune.artifacts.options import OptionError, check_counts
from deftune.data.rows import Row

Finish = Literal["stop", "length", "error"]


def with_date(encoder_options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an `Encoder`, with a date for templates that write one, so that results do not depend on the day.

    The options of a run have the date of its training; the date for other models is Llama 3's own default.
    """
    return {"now": datetime(2024, 7, 26), **encoder_options}


@dataclass(frozen=True)
class Prompt:
    """A prompt: the text of a user's message. ``id`` identifies it in results, and is part of the seed of its answers.

    ``samples``: the numbers of the wanted answers, such as (0, 3) if 1 and 2 exist already; None is all.
    """

    id: str
    text: str
    samples: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Output:
    """An answer. ``tokens`` counts the generated tokens with the end token; None if a server does not report it.

    ``finish``: "stop" (the model ended the answer), "length" (the token limit did) or "error" (``note`` says why).
    """

    id: str
    sample: int
    text: str
    tokens: int | None
    finish: Finish
    note: str = ""


class SamplerError(RuntimeError):
    """The sampler cannot continue. ``done`` is the number of answers before, which remain valid."""

    def __init__(self, message: str, done: int = 0):
        super().__init__(message, done)
        self.message, self.done = message, done

    def __str__(self) -> str:
        return f"{self.message}; {self.done} answers were finished before"


def check_unique(ids: Iterable[str]) -> None:
    """Raise a ValueError if two questions have the same id."""
    places: dict[str, int] = {}
    for place, name in enumerate(ids, 1):
        if places.setdefault(name, place) != place:
            raise ValueError(
                f"duplicate id {name!r} in questions {places[name]} and {place}; ids must be unique so that answers "
                f"can be matched to questions"
            )


def check_chance(temperature: float, top_p: float) -> None:
    """Raise an `OptionError` for a temperature or a nucleus that no token can be drawn with."""
    if not 0 <= temperature < math.inf:
        raise OptionError("temperature", f"a number from 0 (greedy), got {temperature}")
    if not 0 < top_p <= 1:
        raise OptionError("top_p", f"above 0, at most 1 (all tokens), got {top_p}")


class Settings(NamedTuple):
    """How prompts are answered."""

    samples: int
    temperature: float
    top_p: float
    max_new_tokens: int
    seed: int

    def samples_of(self, prompt: Prompt) -> Sequence[int]:
        """The numbers of the answers to generate for a prompt."""
        return range(self.samples) if prompt.samples is None else prompt.samples

    def checked(self, prompts: Sequence[Prompt]) -> Settings:
        """The settings themselves, or a ValueError if ``prompts`` cannot be answered with them."""
        check_counts(samples=self.samples, max_new_tokens=self.max_new_tokens)
        check_chance(self.temperature, self.top_p)
        if self.temperature == 0 and self.samples > 1:
            raise OptionError("samples", f"greedy answers are all the same, got {self.samples}; pass a temperature")
        check_unique(prompt.id for prompt in prompts)
        for prompt in prompts:
            if not set(self.samples_of(prompt)) <= set(range(self.samples)):
                raise ValueError(f"{prompt.id!r} wants samples {prompt.samples}; there are {self.samples}, from 0")
        return self


class Sampler(ABC):
    """Answers prompts. A subclass implements `answers`, whose arguments have been checked."""

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
        """Yield ``samples`` answers to each prompt, each as soon as it is finished, in any order."""
        settings = Settings(samples, temperature, top_p, max_new_tokens, seed)
        return self.answers(prompts, settings.checked(prompts))

    def sample_at(
        self,
        prompts: Mapping[float, Sequence[Prompt]],
        *,
        samples: int = 1,
        top_p: float = 1.0,
        max_new_tokens: int,
        seed: int = 0,
    ) -> Iterator[tuple[float, Output]]:
        """Yield (temperature, answer) for the prompts of several temperatures: the answers of a `sample` for each.

        ``samples``: the answers to each prompt at temperatures above 0; a greedy prompt has one. A sampler may generate
        the answers of all temperatures together, which is faster if the prompts are the same.

        Raises:
            ValueError: an option is out of range, or one id has two texts.
        """
        asked: list[tuple[Sequence[Prompt], Settings]] = []
        texts: dict[str, str] = {}
        for temperature, its in prompts.items():
            settings = Settings(1 if temperature == 0 else samples, temperature, top_p, max_new_tokens, seed)
            asked.append((its, settings.checked(its)))
            for prompt in its:
                if texts.setdefault(prompt.id, prompt.text) != prompt.text:  # a prompt is read once, known by its id
                    raise ValueError(
                        f"id {prompt.id!r} has another text at temperature {temperature:g} than at one before; give "
                        f"each text an id of its own"
                    )
        return self.answers_at(asked)

    @abstractmethod
    def answers(self, prompts: Sequence[Prompt], settings: Settings) -> Iterator[Output]: ...

    def answers_at(self, asked: Sequence[tuple[Sequence[Prompt], Settings]]) -> Iterator[tuple[float, Output]]:
        """The answers of each (prompts, settings) with their temperature; the settings have one ``top_p``."""
        for prompts, settings in asked:
            for output in self.answers(prompts, settings):
                yield settings.temperature, output


class TokenSampler(Sampler):
    """A sampler that encodes prompts as training does and decodes answers itself; a subclass generates tokens.

    ``encoder_options`` are those of the training `Encoder`, so that a prompt has the tokens that training showed.
    """

    max_length: float = math.inf  # tokens of prompt and answer together that the model can take

    def __init__(self, tokenizer: Any, encoder_options: Mapping[str, Any] | None):
        from deftune.data.encoding import Encoder

        self.tokenizer = tokenizer
        # no prompt is truncated: a prompt that is too long for the model is an error of its item
        self.encoder = Encoder(tokenizer, max_length=2**31 - 1, **with_date(encoder_options or {}))

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt's tokens, through the template that training uses."""
        return self.encoder.encode_prompt(Row(({"role": "user", "content": prompt.text},), None, prompt.id, "prompt"))

    def encode_all(
        self, prompts: Sequence[Prompt], settings: Settings
    ) -> tuple[list[tuple[Prompt, list[int], int]], list[Output]]:
        """(prompt, its tokens, token limit of its answer) of each prompt that fits; errors for the others."""
        asked: list[tuple[Prompt, list[int], int]] = []
        refused: list[Output] = []
        for prompt in prompts:
            try:
                ids = self.encode(prompt)
                room = self.max_length - len(ids)
                if room < 1:
                    raise ValueError(f"{len(ids)} tokens of prompt leave no room in the model's {self.max_length}")
            except ValueError as error:
                refused += [Output(prompt.id, i, "", 0, "error", str(error)) for i in settings.samples_of(prompt)]
                continue
            asked.append((prompt, ids, int(min(room, settings.max_new_tokens))))
        return asked, refused

    def decode(self, made: Sequence[int], finish: Finish) -> str:
        """The text of an answer, without the token that ended it."""
        said = list(made[:-1] if finish == "stop" else made)
        return self.tokenizer.decode(said, skip_special_tokens=True, clean_up_tokenization_spaces=False)
