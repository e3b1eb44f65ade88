"""What to do with a finished run: merge its adapter, and let its model answer."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from deftune.artifacts.folders import sealed_folder
from deftune.artifacts.results import is_adapter, load_result, result_folder
from deftune.artifacts.runs import Run
from deftune.artifacts.templates import resolve_template
from deftune.data.end_tokens import end_tokens_of, stop_ids
from deftune.data.rendering import Template
from deftune.training.card import render_merged_card


def merge(
    run: Run, out: Path, notice: Callable[[str], None] = lambda _: None, *, trust_remote_code: bool = False
) -> Path:
    """The adapter of a LoRA run added into its base model's weights, as a plain model folder with a card."""
    folder = result_folder(run)
    if not is_adapter(folder):
        raise ValueError(f"{run.folder}: was not trained with LoRA; {folder} is a plain model already")
    if out.exists():
        raise ValueError(f"{out}: exists; name another folder")
    model, tokenizer = load_result(str(run.folder), notice, trust_remote_code=trust_remote_code)
    merged = model.merge_and_unload(safe_merge=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    with sealed_folder(out.parent / f".{out.name}-{os.getpid()}", out, run=str(run.folder)) as place:
        merged.save_pretrained(place)
        tokenizer.save_pretrained(place)
        (place / "README.md").write_text(render_merged_card(run), encoding="utf-8")
    return out


def reply(
    model: Any, tokenizer: Any, messages: list[dict[str, str]], *, template: str | None = None,
    end_tokens: Sequence[str] = (), max_new_tokens: int = 512, temperature: float = 0.0,
) -> Generator[str]:  # fmt: skip
    """The model's answer to a conversation, piece by piece while it is generated; temperature 0 is greedy.

    The answer stops at the tokens of `end_tokens_of`; ``end_tokens`` declares further ones.
    """
    from transformers import TextIteratorStreamer

    written = resolve_template(tokenizer, template)
    text = Template(written).render(messages, add_generation_prompt=True, variables=tokenizer.special_tokens_map)
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt").to(model.device)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    options: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if temperature > 0:
        options = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
    options |= {"max_new_tokens": max_new_tokens, "pad_token_id": tokenizer.pad_token_id, "streamer": streamer}
    options["eos_token_id"] = sorted(stop_ids(model, end_tokens_of(tokenizer, written, end_tokens).values()))
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
