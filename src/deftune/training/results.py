"""What to do with a finished run: load it, talk to it, merge its adapter."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from deftune.training.checkpoints import CheckpointError, sealed_folder, verify
from deftune.training.models import load_model, load_tokenizer, resolve_model
from deftune.training.runs import Run


def load_result(name: str, notice: Callable[[str], None] = lambda _: None) -> tuple[Any, Any]:
    """(model, tokenizer) of a run's folder, or of anything `deftune train` takes as a model."""
    run = Run(Path(name))
    if not run.config.is_file():
        source = resolve_model(name, notice)
        return load_model(source), load_tokenizer(source)
    folder = result_folder(run)
    tokenizer = load_tokenizer(str(folder))
    if not is_adapter(folder):
        return load_model(str(folder)), tokenizer
    from peft import PeftModel

    config = run.read_config()
    base = load_model(
        resolve_model(config.model.name, notice),
        revision=config.model.revision,
        trust_remote_code=config.model.trust_remote_code,
    )
    return PeftModel.from_pretrained(base, str(folder)), tokenizer


def result_folder(run: Run) -> Path:
    """Where a finished run's model lies, verified."""
    if not run.model.is_dir():
        state = run.status()["state"]
        raise ValueError(f"{run.folder}: has no model yet (the run is {state}); `deftune train {run.folder}` goes on")
    try:
        verify(run.model)
    except CheckpointError as error:
        raise ValueError(f"{error}; it is not loaded") from error
    return run.model


def is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file()


def merge(run: Run, out: Path, notice: Callable[[str], None] = lambda _: None) -> Path:
    """The adapter of a LoRA run added into its base model's weights, as a plain model folder."""
    folder = result_folder(run)
    if not is_adapter(folder):
        raise ValueError(f"{run.folder}: was not trained with LoRA; {folder} is a plain model already")
    if out.exists():
        raise ValueError(f"{out}: exists; name another folder")
    model, tokenizer = load_result(str(run.folder), notice)
    merged = model.merge_and_unload(safe_merge=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    with sealed_folder(out.parent / f".{out.name}-{os.getpid()}", out, run=str(run.folder)) as place:
        merged.save_pretrained(place)
        tokenizer.save_pretrained(place)
    return out


def reply(
    model: Any, tokenizer: Any, messages: list[dict[str, str]], *, template: str | None = None,
    max_new_tokens: int = 512, temperature: float = 0.0,
) -> Generator[str]:  # fmt: skip
    """The model's answer to a conversation, piece by piece as it is made; temperature 0 is greedy."""
    from transformers import TextIteratorStreamer

    from deftune.data.templates import resolve_template

    inputs = tokenizer.apply_chat_template(
        messages, chat_template=resolve_template(tokenizer, template), add_generation_prompt=True,
        return_tensors="pt", return_dict=True,
    ).to(model.device)  # fmt: skip
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    options: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if temperature > 0:
        options = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
    options |= {"max_new_tokens": max_new_tokens, "pad_token_id": tokenizer.pad_token_id, "streamer": streamer}
    failure: list[BaseException] = []

    def work() -> None:
        try:
            with torch.no_grad():
                model.generate(**inputs, **options)
        except BaseException as error:  # handed to the reader, which would wait for ever
            failure.append(error)
            streamer.end()

    thread = Thread(target=work, daemon=True)
    thread.start()
    yield from streamer
    thread.join()
    if failure:
        raise failure[0]


@torch.no_grad()
def complete(model: Any, tokenizer: Any, prompts: list[list[int]], *, max_new_tokens: int) -> list[str]:
    """Greedy answers to several encoded prompts at once, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[tokenizer.pad_token_id] * (longest - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    model.eval()
    out = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, temperature=None,
        top_p=None, top_k=None, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return tokenizer.batch_decode(out[:, longest:], skip_special_tokens=True)
