"""`VllmSampler`: answers from vLLM in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from deftune.evaluation.chance import derive_key
from deftune.evaluation.sampler import Finish, Output, Prompt, SamplerError, Settings, TokenSampler

AT_ONCE = 2048  # answers of one call of vLLM: enough to fill a GPU, and the most that a kill loses


class VllmSampler(TokenSampler):
    """Generates answers with vLLM; prompts, end tokens, seeds and decoding are those of deftune.

    ``engine``: a ``vllm.LLM``, or a model's folder or hub id, from which one is made with ``engine_options``.
    ``tokenizer``: of transformers. ``encoder_options``: see `TokenSampler`.
    ``end_ids``: tokens that end an answer, beside those of the encoder; vLLM adds those of the generation config.
    Answers are yielded `AT_ONCE` at a time. The seed of an answer is the one that `EndpointSampler` sends, but vLLM
    draws other tokens than `TransformersSampler`, and does not promise that an answer is independent of its batch.

    Tested with vLLM 0.32 on a CPU (`.ci/stacks vllm`); the default tests have a stand-in.
    """

    def __init__(
        self, engine: Any, tokenizer: Any, *, end_ids: Iterable[int] = (),
        encoder_options: Mapping[str, Any] | None = None, **engine_options: Any,
    ):  # fmt: skip
        super().__init__(tokenizer, encoder_options)
        self._vllm = import_vllm()
        if isinstance(engine, str):
            try:
                engine = self._vllm.LLM(model=engine, **engine_options)
            except Exception as error:  # vLLM's errors have no common class, and vLLM prints them above this line
                raise ValueError(f"vLLM cannot load {engine}: {_first_line(error)}") from error
        elif engine_options:
            raise ValueError(f"{', '.join(engine_options)}: options of an engine that is made already")
        self.engine = engine
        self.max_length = engine.llm_engine.model_config.max_model_len
        self.end_ids = sorted({*self.encoder.end_ids.values(), *end_ids})

    def answers(self, prompts: Sequence[Prompt], settings: Settings) -> Iterator[Output]:
        asked, refused = self.encode_all(prompts, settings)
        yield from refused
        done = len(refused)
        each = [(*one, sample) for one in asked for sample in settings.samples_of(one[0])]
        for start in range(0, len(each), AT_ONCE):
            some = each[start : start + AT_ONCE]
            inputs = [self._vllm.TokensPrompt(prompt_token_ids=ids) for _, ids, _, _ in some]
            params = [self._params(settings, prompt, limit, sample) for prompt, _, limit, sample in some]
            try:
                results = self.engine.generate(inputs, params, use_tqdm=False)
            except Exception as error:
                raise SamplerError(f"vLLM stopped: {_first_line(error)}", done) from error
            for (prompt, _, _, sample), result in zip(some, results, strict=True):
                yield self._output(prompt, sample, result.outputs[0])
            done += len(some)

    def _params(self, settings: Settings, prompt: Prompt, limit: int, sample: int) -> Any:
        try:
            params = self._vllm.SamplingParams(
                temperature=settings.temperature, top_p=settings.top_p, max_tokens=limit, stop_token_ids=self.end_ids,
                seed=derive_key(settings.seed, prompt.id, sample) >> 33,  # 31 bits, as an endpoint's
                detokenize=False,  # piece by piece, it would not always give what decoding the whole gives
            )  # fmt: skip
        except Exception as error:  # no ValueError since 0.27
            raise ValueError(f"vLLM cannot be asked so: {_first_line(error)}") from error
        if params.temperature != settings.temperature:  # it takes those below 0.01 for 0.01, with a line in its log
            raise ValueError(
                f"temperature: vLLM would take {params.temperature:g} for {settings.temperature:g}; pass 0 for greedy"
            )
        return params

    def _output(self, prompt: Prompt, sample: int, made: Any) -> Output:
        finish: Finish = made.finish_reason if made.finish_reason in ("stop", "length") else "error"
        note = "" if finish != "error" else f"vLLM ended it with {made.finish_reason!r}"
        ids = list(made.token_ids)  # with the end token, if one ended it
        return Output(prompt.id, sample, self.decode(ids, finish), len(ids), finish, note)


def import_vllm() -> Any:
    """Import vllm; the ImportError says what to do."""
    try:
        import vllm  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise ImportError(f"vllm is installed and cannot be imported: {error}") from error
        found = None
    except Exception as error:  # its compiled parts may not go with this torch or this driver
        raise ImportError(f"vllm is installed and cannot be imported: {_first_line(error)}") from error
    else:
        found = vllm if hasattr(vllm, "__version__") else None  # else a folder of that name, such as its git clone
    if found is None:
        raise ImportError("vllm is not installed, and no extra of deftune brings it; pip install vllm")
    return found


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
