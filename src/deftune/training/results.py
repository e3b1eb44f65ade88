"""What to do with a finished run: merge its adapter, and let its model answer."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from deftune.artifacts.embedding import check_embedded
from deftune.artifacts.folders import sealed_folder
from deftune.artifacts.results import is_adapter, load_result, result_folder
from deftune.artifacts.runs import Run
from deftune.data.encoding import Encoder
from deftune.data.end_tokens import stop_ids
from deftune.data.rows import Row
from deftune.tokens.finite import FiniteLogits
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
    model: Any, tokenizer: Any, encoder: Encoder, messages: list[dict[str, str]], *, max_new_tokens: int = 512,
    temperature: float = 0.0,
) -> Generator[str]:  # fmt: skip
    """The model's answer to a conversation, piece by piece while it is generated; temperature 0 is greedy.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        encoder: gives the tokens of the conversation, and those that end an answer.
        messages: the conversation so far; the last message is the user's.
        max_new_tokens: most tokens of the answer.
        temperature: of sampling; 0 takes the likeliest token.

    Raises:
        EncodingError: the chat template refuses the conversation.
        ValueError: a token of the conversation has no embedding, or the model's logits are not finite.
    """
    from transformers import LogitsProcessorList, TextIteratorStreamer

    unanswered = (*messages, {"role": "assistant", "content": ""})
    prompt = encoder.encode_prompt(Row(unanswered, None, "this conversation", "chat"))
    check_embedded(model, tokenizer, prompt, "the conversation")
    ids = torch.tensor([prompt], device=model.device)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    options: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if temperature > 0:
        options = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
    options |= {"max_new_tokens": max_new_tokens, "pad_token_id": tokenizer.pad_token_id, "streamer": streamer}
    options["eos_token_id"] = sorted(stop_ids(model, encoder.end_ids.values()))
    options["logits_processor"] = LogitsProcessorList([FiniteLogits(model, len(prompt))])  # pyright: ignore
    failure: list[BaseException] = []

    def work() -> None:
        try:
            with torch.no_grad():
                model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
        except BaseException as error:  # handed to the reader, which would wait for ever
            failure.append(error)
            streamer.end()

    thread = Thread(target=work, daemon=True)
    thread.start()
    yield from streamer
    thread.join()
    if failure:
        raise failure[0]
