"""`TransformersSampler`: answers from a transformers model in this process."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deftune.artifacts.embedding import check_embedded
from deftune.artifacts.options import check_counts
from deftune.data.end_tokens import stop_ids
from deftune.evaluation.chance import derive_key, signed
from deftune.evaluation.sampler import Output, Prompt, Settings, TokenSampler

if TYPE_CHECKING:
    from deftune.evaluation.decoding import Answer, Decoder
    from deftune.evaluation.slots import Survey

TIE_MARGIN = 1e-3  # of float32 logits: ten times what batches were seen to move them
BATCH_SIZE, BATCH_SIZE_CUDA = 16, 2048


class TransformersSampler(TokenSampler):
    """Generates up to ``batch_size`` answers at once; a finished answer is replaced by the next prompt, longest first.

    ``encoder_options``: see `TokenSampler`.
    ``end_ids``: tokens that end an answer, beside those of the encoder and of the model's generation config.
    ``batch_size``: None is 16, and on a GPU 2048 or as many as fit into memory. Answers to one prompt that start
    together, at any temperature, share the forward pass of the prompt.
    ``tie_margin``: see `generation`; None is `TIE_MARGIN` for float32 and wider, 0 (off) for narrower dtypes.

    A model decodes in slots (`slots`) if it can, else in a padded batch (`decoding.PaddedDecoder`), with a warning.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        batch_size: int | None = None,
        end_ids: Iterable[int] = (),
        tie_margin: float | None = None,
        encoder_options: Mapping[str, Any] | None = None,
    ):
        import torch

        from deftune.evaluation.decoding import LanguageModel

        check_counts(batch_size=batch_size)
        if tie_margin is not None and not tie_margin >= 0:
            raise ValueError(f"tie_margin: a number from 0 (off), got {tie_margin}")
        super().__init__(tokenizer, encoder_options)
        self.model = model
        self.batch_size = batch_size or (BATCH_SIZE_CUDA if model.device.type == "cuda" else BATCH_SIZE)
        wide = model.dtype in (torch.float32, torch.float64)
        self.network = LanguageModel(
            model,
            end_ids=stop_ids(model, [*self.encoder.end_ids.values(), *end_ids]),
            pad_id=tokenizer.pad_token_id or 0,
            tie_margin=tie_margin if tie_margin is not None else TIE_MARGIN if wide else 0.0,
        )
        limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.max_length = limit if limit is not None else math.inf
        self.num_tokens = 0  # in finished answers
        self._survey: Survey | str | None = None

    @property
    def num_retried(self) -> int:
        """How many tokens were within the tie margin and were computed again without the batch."""
        return self.network.num_retried

    def answers(self, prompts: Sequence[Prompt], settings: Settings) -> Iterator[Output]:
        return (output for _, output in self.answers_at([(prompts, settings)]))

    def answers_at(self, asked: Sequence[tuple[Sequence[Prompt], Settings]]) -> Iterator[tuple[float, Output]]:
        """As `Sampler.answers_at`; the answers of all settings share the batch."""
        was_training = self.model.training
        self.model.eval()
        try:
            yield from self._answers_at(asked)
        finally:
            self.model.train(was_training)

    def _answers_at(self, asked: Sequence[tuple[Sequence[Prompt], Settings]]) -> Iterator[tuple[float, Output]]:
        waiting: list[Answer] = []
        refused: list[tuple[float, Output]] = []
        for prompts, settings in asked:
            answers, errors = self._encoded(prompts, settings)
            waiting += answers
            refused += [(settings.temperature, error) for error in errors]
        yield from refused
        if not waiting:
            return
        # longest first: a lack of memory shows at once, and neighbours need little padding; the answers to a prompt
        # are neighbours, so that they start together
        queue = deque(sorted(waiting, key=lambda answer: (-len(answer.ids), answer.prompt.id)))
        decoder = self._decoder(waiting, asked[0][1].top_p)
        finished: list[Answer] = []
        while queue or decoder.num_live:
            # a forward pass over prompts takes as long as several steps: wait until a quarter of the places are free
            if queue and (not decoder.num_live or 4 * decoder.free >= decoder.places):
                decoder.admit([queue.popleft() for _ in range(min(decoder.free, len(queue)))])
            decoder.start()
            yield from map(self._output, finished)  # beside the device's work
            finished = decoder.collect()
        yield from map(self._output, finished)

    def _encoded(self, prompts: Sequence[Prompt], settings: Settings) -> tuple[list[Answer], list[Output]]:
        """The answers to generate, and errors for prompts that the model cannot take."""
        from deftune.evaluation.decoding import Answer

        answers: list[Answer] = []
        asked, refused = self.encode_all(prompts, settings)
        for prompt, ids, limit in asked:
            check_embedded(self.model, self.tokenizer, ids, prompt.id)
            for sample in settings.samples_of(prompt):
                key = derive_key(settings.seed, prompt.id, sample)
                halves = signed(key >> 32), signed(key)
                answers.append(Answer(prompt, sample, ids, limit, halves, settings.temperature))
        return answers, refused

    def _decoder(self, waiting: list[Answer], top_p: float) -> Decoder:
        from deftune.evaluation.decoding import PaddedDecoder

        places = min(self.batch_size, len(waiting))
        found = self.survey()
        if isinstance(found, str):
            return PaddedDecoder(self.network, top_p=top_p, places=places)
        from deftune.evaluation.slot_decoding import SlotDecoder
        from deftune.evaluation.slots import plan

        room = max(len(answer.ids) + answer.limit for answer in waiting)
        return SlotDecoder(
            self.network, found, plan(self.network, found, room, places),
            top_p=top_p, max_new_tokens=max(answer.limit for answer in waiting),
        )  # fmt: skip

    def survey(self) -> Survey | str:
        """What a slot of the model needs, or why the model cannot decode in slots."""
        from deftune.evaluation.slots import Unsupported, survey

        if self._survey is None:
            try:
                self._survey = survey(self.network)
            except Unsupported as reason:
                self._survey = str(reason)
                warnings.warn(f"decoding with a padded batch, which is slower: {reason}", stacklevel=2)
        return self._survey

    def _output(self, answer: Answer) -> tuple[float, Output]:
        """(temperature, output) of a finished answer."""
        self.num_tokens += len(answer.made)
        assert answer.finish is not None
        text = self.decode(answer.made, answer.finish)
        output = Output(answer.prompt.id, answer.sample, text, len(answer.made), answer.finish, answer.note)
        return answer.temperature, output
