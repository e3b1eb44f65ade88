"""Engines: what generates the answers of an evaluation, and with which options.

An engine never depends on what is installed: at a temperature above 0, another engine draws other answers.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from deftune.artifacts.display import QUIET, Display
from deftune.artifacts.options import OptionError, check_counts
from deftune.artifacts.results import encoding_for, prompt_options
from deftune.evaluation.endpoint import EndpointSampler, parse_address
from deftune.evaluation.sampler import Sampler

DTYPES = ("bfloat16", "float16", "float32")


class Engine(ABC):
    """Generates answers. The constructor raises an `OptionError` for a wrong option."""

    local: ClassVar[bool] = True  # the model is loaded in this process, and the prompts are encoded here

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What a result records: name, version, and the options that the answers depend on.

        A stopped evaluation resumes with the same description only, the version aside.
        """

    @abstractmethod
    def make_sampler(
        self, model: str, *, encoding: dict[str, Any], trust_remote_code: bool, display: Display
    ) -> Sampler:
        """Load ``model``. ``encoding`` has the options of an `Encoder` that a prompt depends on."""

    def encoding(self, model: str, template: str | None, like: str | Path | None) -> dict[str, Any]:
        """The options of an `Encoder` for the prompts of ``model``; {} if another process encodes them."""
        return prompt_options(encoding_for(model, template, like))


@dataclass(frozen=True)
class Transformers(Engine):
    """transformers in this process, in `default_dtype`.

    ``batch_size``: answers at a time; None is 16, on a GPU up to 2048.
    """

    batch_size: int | None = None

    def __post_init__(self) -> None:
        check_counts(batch_size=self.batch_size)

    def describe(self) -> dict[str, Any]:
        return {"name": "transformers", "version": version("transformers"), "dtype": default_dtype()}

    def make_sampler(
        self, model: str, *, encoding: dict[str, Any], trust_remote_code: bool, display: Display
    ) -> Sampler:
        import torch

        from deftune.evaluation.local import TransformersSampler

        loaded, tokenizer = load(model, trust_remote_code=trust_remote_code, display=display)
        if default_dtype() == "bfloat16":
            loaded = loaded.to(torch.bfloat16)
        return TransformersSampler(loaded, tokenizer, batch_size=self.batch_size, encoder_options=encoding)


@dataclass(frozen=True)
class Vllm(Engine):
    """vLLM in this process, if it is installed. The options are those of ``vllm.LLM``.

    ``dtype`` is by default the one that `Transformers` would use: bfloat16 on a GPU, else float32.
    """

    dtype: str | None = None
    max_model_len: int | None = None  # tokens, prompt and answer together
    gpu_memory_utilization: float | None = None
    tensor_parallel_size: int | None = None  # number of GPUs

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise OptionError("dtype", f"one of {', '.join(DTYPES)}; got {self.dtype!r}")
        check_counts(max_model_len=self.max_model_len, tensor_parallel_size=self.tensor_parallel_size)
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise OptionError("gpu_memory_utilization", f"a share above 0, at most 1; got {share}")

    def _options(self) -> dict[str, Any]:
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return {"dtype": default_dtype(), **given}

    def describe(self) -> dict[str, Any]:
        from deftune.evaluation.vllm_engine import import_vllm

        try:
            vllm = import_vllm()
        except ImportError as error:
            raise OptionError("engine", str(error)) from error
        # memory and number of GPUs do not change an answer
        options = {name: value for name, value in self._options().items() if name in ("dtype", "max_model_len")}
        return {"name": "vllm", "version": vllm.__version__, **options}

    def make_sampler(
        self, model: str, *, encoding: dict[str, Any], trust_remote_code: bool, display: Display
    ) -> Sampler:
        from deftune.artifacts.display import quiet
        from deftune.artifacts.results import plain_model
        from deftune.evaluation.vllm_engine import VllmSampler

        # the folder receives a merged LoRA adapter; vLLM has read it when the sampler is constructed
        with tempfile.TemporaryDirectory(prefix="deftune-merged-") as folder, quiet():
            source, tokenizer, loading = plain_model(
                model, Path(folder), display.say, trust_remote_code=trust_remote_code
            )
            if "revision" in loading:
                loading["tokenizer_revision"] = loading["revision"]
            return VllmSampler(source, tokenizer, encoder_options=encoding, **loading, **self._options())


@dataclass(frozen=True)
class Endpoint(Engine):
    """A server with OpenAI's /v1/chat/completions. The options are those of `EndpointSampler`, which checks them.

    >>> Endpoint("http://me:secret@localhost:8000").describe()
    {'name': 'endpoint', 'url': 'http://localhost:8000/v1'}
    """

    url: str = field(repr=False)  # may hold a password
    api_key_env: str | None = None
    timeout: float = 600.0
    retries: int = 4
    concurrency: int = 8
    extra_body: dict[str, Any] = field(default_factory=dict[str, Any])
    local: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.make_sampler("", encoding={}, trust_remote_code=False, display=QUIET)

    def describe(self) -> dict[str, Any]:
        described: dict[str, Any] = {"name": "endpoint", "url": parse_address(self.url).base}
        return described | ({"extra_body": self.extra_body} if self.extra_body else {})

    def make_sampler(
        self, model: str, *, encoding: dict[str, Any], trust_remote_code: bool, display: Display
    ) -> Sampler:
        return EndpointSampler(model=model, notice=display.say_seldom, **asdict(self))

    def encoding(self, model: str, template: str | None, like: str | Path | None) -> dict[str, Any]:
        return {}


def default_dtype() -> str:
    """The dtype that a model of this process generates in: bfloat16 on a GPU, else float32."""
    import torch

    return "bfloat16" if torch.cuda.is_available() else "float32"


def load(model: str, *, trust_remote_code: bool = False, display: Display = QUIET) -> tuple[Any, Any]:
    """(model, tokenizer) of a run, a checkpoint or a model; on the GPU if there is one."""
    import torch

    from deftune.artifacts.display import quiet
    from deftune.artifacts.results import load_result

    with quiet():
        loaded, tokenizer = load_result(model, display.say, trust_remote_code=trust_remote_code)
    return (loaded.to("cuda") if torch.cuda.is_available() else loaded), tokenizer
