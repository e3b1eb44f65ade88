"""A stand-in for vLLM, which the default tests do without: its interface over a transformers model. It is not vLLM.

What `VllmSampler` relies on is here as vLLM 0.32 documents and does it: keyword arguments only, prompts in tokens that
must leave room for one more, end tokens of the tokenizer and of the generation config added to those of the request,
token ids with the end token, no text where none is asked for, errors that are no ValueError, temperatures below 0.01
raised. Kernels, batches, memory and the draws of its sampler are not: `test_vllm.py` runs the real one.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, TypedDict

import torch
import transformers

__version__ = "0.0.stand-in"


class VLLMValidationError(Exception):
    pass


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]


@dataclass(kw_only=True)
class SamplingParams:
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    max_tokens: int | None = 16
    detokenize: bool = True

    def __post_init__(self):
        if self.temperature > 2:
            raise VLLMValidationError(f"temperature must be in [0, 2], got {self.temperature}.")
        if 0 < self.temperature < 0.01:
            self.temperature = 0.01


@dataclass
class CompletionOutput:
    text: str
    token_ids: list[int]
    finish_reason: str


@dataclass
class RequestOutput:
    outputs: list[CompletionOutput]


class LLM:
    made: ClassVar[list["LLM"]] = []  # for the tests
    calls_left: ClassVar[float] = float("inf")

    def __init__(
        self, model: str, *, trust_remote_code: bool = False, tensor_parallel_size: int = 1, dtype: str = "auto",
        revision: str | None = None, tokenizer_revision: str | None = None, gpu_memory_utilization: float = 0.92,
        max_model_len: int | None = None,
    ):  # fmt: skip
        self.options = {"dtype": dtype, "gpu_memory_utilization": gpu_memory_utilization}
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code
        ).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(
            model, revision=tokenizer_revision, trust_remote_code=trust_remote_code
        )
        most = self.model.config.max_position_embeddings
        if (max_model_len or 0) > most:
            raise VLLMValidationError(f"User-specified max_model_len ({max_model_len}) is greater than {most}.")
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=max_model_len or most))
        own = self.model.generation_config.eos_token_id
        self.ends = {self.tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])}
        self.asked: list[tuple[list[int], SamplingParams]] = []
        LLM.made.append(self)

    def generate(
        self, prompts: list[TokensPrompt], sampling_params: list[SamplingParams], *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        if LLM.calls_left <= 0:
            raise RuntimeError("EngineCore encountered an issue. See stack trace (above) for the root cause.")
        LLM.calls_left -= 1
        assert len(prompts) == len(sampling_params) and not use_tqdm
        for prompt in prompts:
            length = len(prompt["prompt_token_ids"])
            if length >= self.llm_engine.model_config.max_model_len:
                raise VLLMValidationError(f"The decoder prompt (length {length}) is longer than the maximum.")
        self.asked += [(prompt["prompt_token_ids"], params) for prompt, params in zip(prompts, sampling_params)]
        return [RequestOutput([self._complete(p["prompt_token_ids"], s)]) for p, s in zip(prompts, sampling_params)]

    @torch.no_grad()
    def _complete(self, prompt: list[int], params: SamplingParams) -> CompletionOutput:
        """One token after another, alone and without a cache."""
        ends = self.ends | set(params.stop_token_ids)
        chance = torch.Generator().manual_seed(params.seed) if params.seed is not None else None
        most = self.llm_engine.model_config.max_model_len - len(prompt)
        made: list[int] = []
        while True:
            logits = self.model(input_ids=torch.tensor([prompt + made])).logits[0, -1].float()
            made.append(self._draw(logits, params, chance))
            if made[-1] in ends or len(made) == min(most, params.max_tokens or most):
                break
        finish = "stop" if made[-1] in ends else "length"
        assert not params.detokenize
        return CompletionOutput("", made, finish)

    def _draw(self, logits: torch.Tensor, params: SamplingParams, chance: torch.Generator | None) -> int:
        if params.temperature == 0:
            return int(logits.argmax())
        p, order = (logits / params.temperature).softmax(0).sort(descending=True)
        p = p * (p.cumsum(0) - p < params.top_p)
        return int(order[p.multinomial(1, generator=chance)])
