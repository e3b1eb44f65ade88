"""Answers from vLLM in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from deftune.data.rows import Row
from deftune.evaluation.chance import derive_key
from deftune.evaluation.sampler import Finish, Output, Prompt, Sampler, Settings


class VllmSampler(Sampler):
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

    def answers(self, prompts: Sequence[Prompt], settings: Settings) -> Iterator[Output]:
        asked = [(prompt, sample) for prompt in prompts for sample in range(settings.samples)]
        rows = [Row(tuple(dict(message) for message in p.messages), None, p.id, "prompt") for p, _ in asked]
        inputs = [{"prompt_token_ids": self.encoder.encode_prompt(row)} for row in rows]
        params = [
            self._vllm.SamplingParams(
                n=1, temperature=settings.temperature, top_p=settings.top_p, max_tokens=settings.max_new_tokens,
                stop_token_ids=self.end_ids, seed=derive_key(settings.seed, prompt.id, sample) >> 33,
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
