"""What makes the answers of `deftune eval`: transformers or vLLM in this process, or an endpoint."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deftune.cli.output import notice

# of vllm.LLM: name -> (type, which values, in words)
ENGINE_OPTIONS: dict[str, tuple[Callable[[str], Any], Callable[[Any], bool], str]] = {
    "dtype": (str, lambda value: value in ("bfloat16", "float16", "float32"), "bfloat16, float16 or float32"),
    "max_model_len": (int, lambda value: value >= 1, "a number of tokens, prompt and answer together"),
    "gpu_memory_utilization": (float, lambda value: 0 < value <= 1, "a share above 0, at most 1"),
    "tensor_parallel_size": (int, lambda value: value >= 1, "a number of GPUs"),
}
# of an endpoint: option -> (the default, what is allowed, in words)
ENDPOINT_OPTIONS: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "timeout": (600.0, lambda value: 0 < value < float("inf"), "a number of seconds above 0"),
    "retries": (4, lambda value: value >= 0, "a number from 0"),
    "concurrency": (8, lambda value: value >= 1, "a number from 1"),
}
ENDPOINT_ONLY = (*ENDPOINT_OPTIONS, "api_key_env", "extra_body", "change_endpoint")
RECORDED = ("dtype", "max_model_len")  # an answer depends on these; the others may change when it goes on


def check_engine(args: argparse.Namespace) -> None:
    """Refuse what the engine cannot honour, and an engine that is not there: before anything is read or loaded."""
    if args.endpoint is not None:
        if args.engine or args.engine_option:
            raise ValueError("--engine, --engine-option: an endpoint makes the answers itself; leave them out")
        if args.template or args.like:
            raise ValueError("--template, --like: an endpoint renders its own chat template; leave them out")
        if args.trust_remote_code:
            raise ValueError("--trust-remote-code: an endpoint loads its own model; leave it out")
        if args.batch_size:
            raise ValueError("--batch-size: an endpoint batches as it likes (--concurrency N); leave it out")
        check_endpoint(args)
        return
    for name in ENDPOINT_ONLY:
        if getattr(args, name) not in (None, False):
            raise ValueError(f"--{name.replace('_', '-')}: is for --endpoint URL; leave it out")
    if args.engine != "vllm":
        if args.engine_option:
            raise ValueError("--engine-option: is for --engine vllm; leave it out")
        return
    if args.batch_size:
        raise ValueError(
            "--batch-size: vLLM batches as its memory allows (--engine-option gpu_memory_utilization=0.9); leave it out"
        )
    parse_engine_options(args.engine_option)
    import_engine()


def check_endpoint(args: argparse.Namespace) -> None:
    """Refuse options of an endpoint that cannot be; an error names the flag, and no password."""
    from deftune.evaluation.endpoint import parse_address, read_key

    login = parse_address(args.endpoint, "--endpoint").login
    for name, (_, allowed, words) in ENDPOINT_OPTIONS.items():
        value = getattr(args, name)
        if value is not None and not allowed(value):
            raise ValueError(f"--{name}: {words}; got {value}")
    if args.api_key_env is not None:
        read_key(args.api_key_env, "--api-key-env")
        if login is not None:
            raise ValueError("--api-key-env: --endpoint has a name and password already; leave one of them out")
    parse_extra_body(args.extra_body)


def parse_extra_body(text: str | None) -> dict[str, Any]:
    """The fields that are added to each request.

    >>> parse_extra_body('{"top_k": 20}')
    {'top_k': 20}
    """
    from deftune.evaluation.endpoint import check_extra

    if text is None:
        return {}
    try:
        fields: Any = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise ValueError(f"""--extra-body: write a JSON object, such as '{{"top_k": 20}}'; got {text[:60]!r}""")
    extra: dict[str, Any] = dict(fields)  # pyright: ignore[reportUnknownArgumentType]
    check_extra(extra, "--extra-body")
    return extra


def parse_engine_options(given: list[str]) -> dict[str, Any]:
    """``NAME=VALUE`` each.

    >>> parse_engine_options(["max_model_len=4096", "dtype=float16"])
    {'max_model_len': 4096, 'dtype': 'float16'}
    """
    options: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or name not in ENGINE_OPTIONS:
            raise ValueError(f"--engine-option {text}: write NAME=VALUE; known: {', '.join(ENGINE_OPTIONS)}")
        if name in options:
            raise ValueError(f"--engine-option {name}: is given twice")
        parse, allowed, words = ENGINE_OPTIONS[name]
        try:
            options[name] = parse(value)
        except ValueError:
            options[name] = None
        if options[name] is None or not allowed(options[name]):
            raise ValueError(f"--engine-option {name}: {words}; got {value!r}")
    return options


def import_engine() -> Any:
    from deftune.evaluation.vllm_engine import import_vllm

    try:
        return import_vllm()
    except ImportError as error:
        raise ValueError(f"--engine vllm: {error}") from error


def vllm_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of vllm.LLM: what was given, and the dtype that transformers would have here."""
    import torch

    return {
        "dtype": "bfloat16" if torch.cuda.is_available() else "float32",
        **parse_engine_options(args.engine_option),
    }


def engine_of(args: argparse.Namespace) -> dict[str, Any]:
    """What the result records: the engine, its version, and those of its options that an answer depends on."""
    from importlib.metadata import version

    if args.endpoint is not None:
        from deftune.evaluation.endpoint import parse_address

        extra = parse_extra_body(args.extra_body)
        return {"name": "endpoint", "url": parse_address(args.endpoint).base} | ({"extra_body": extra} if extra else {})
    if args.engine != "vllm":
        return {"name": "transformers", "version": version("transformers")}
    options = vllm_options(args)
    return {"name": "vllm", "version": import_engine().__version__} | {n: options[n] for n in RECORDED if n in options}


def load(model: str, *, trust_remote_code: bool) -> tuple[Any, Any]:
    """(model, tokenizer), on the GPU where there is one."""
    import torch

    from deftune.artifacts.results import load_result
    from deftune.training.train import quiet

    with quiet():
        loaded, tokenizer = load_result(model, notice, trust_remote_code=trust_remote_code)
    return (loaded.to("cuda") if torch.cuda.is_available() else loaded), tokenizer


def make_sampler(
    args: argparse.Namespace, model: str, encoding: dict[str, Any], say: Callable[[str], None] = notice
) -> Any:
    """What answers; ``say`` is given what the user should know meanwhile, such as a server's retries."""
    from deftune.evaluation.generation import EndpointSampler, TransformersSampler

    if args.endpoint is not None:
        options: dict[str, Any] = {name: default for name, (default, _, _) in ENDPOINT_OPTIONS.items()}
        options |= {name: getattr(args, name) for name in options if getattr(args, name) is not None}
        return EndpointSampler(
            args.endpoint, model, api_key_env=args.api_key_env, extra=parse_extra_body(args.extra_body), notice=say,
            **options,
        )  # fmt: skip
    options = dict(encoding)
    template = options.pop("template")
    if args.engine == "vllm":
        return make_vllm_sampler(args, model, template, options)
    import torch

    loaded, tokenizer = load(model, trust_remote_code=args.trust_remote_code)
    if torch.cuda.is_available():
        loaded = loaded.to(torch.bfloat16)
    return TransformersSampler(
        loaded, tokenizer, template=template, batch_size=args.batch_size, encoder_options=options
    )


def make_vllm_sampler(args: argparse.Namespace, model: str, template: str | None, options: dict[str, Any]) -> Any:
    import tempfile

    from deftune.artifacts.results import plain_model
    from deftune.evaluation.generation import VllmSampler
    from deftune.training.train import quiet

    # an adapter is merged into this folder, which vLLM has read when it is made
    with tempfile.TemporaryDirectory(prefix="deftune-merged-") as place:
        with quiet():
            source, tokenizer, loading = plain_model(
                model, Path(place), notice, trust_remote_code=args.trust_remote_code
            )
        if "revision" in loading:
            loading["tokenizer_revision"] = loading["revision"]
        return VllmSampler(
            source, tokenizer, template=template, encoder_options=options, **loading, **vllm_options(args)
        )
