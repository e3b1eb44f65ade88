"""The tokens that end an answer: the one definition for masks, ``eos(...)``, records and samplers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

# What ends a turn in the templates of the field, where the tokenizer has it as a token of its own.
END_OF_TURN = (
    "<|im_end|>",  # ChatML: Qwen, SmolLM, LFM2, Nemotron
    "<|eot_id|>",  # Llama 3
    "<|eom_id|>",  # Llama 3, before a tool's result
    "<|eot|>",  # Llama 4, Muse
    "<end_of_turn>",  # Gemma 1 to 3
    "<turn|>",  # Gemma 4
    "<|end|>",  # Phi 3, gpt-oss
    "<|return|>",  # gpt-oss, the last turn
    "<|call|>",  # gpt-oss, a tool call
    "<|END_OF_TURN_TOKEN|>",  # Cohere
    "<end_of_utterance>",  # Idefics, SmolVLM
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
    "<|endoftext|>",
    "</s>",
)


def end_tokens_of(tokenizer: Any, template: str | None = None, declared: Sequence[str] = ()) -> dict[str, int]:
    """The tokens that end an answer, {text: id}: the one definition for masks, ``eos(...)``, records and samplers.

    They are the tokenizer's EOS token, each token of `END_OF_TURN` that the tokenizer marks as special or the chat
    template writes, and the tokens that the user declares (``data.end_tokens``).

    Args:
        tokenizer: a transformers tokenizer.
        template: the chat template's Jinja text; None is the tokenizer's own, where it has one.
        declared: further tokens, by their text.

    Raises:
        ValueError: a declared token is not a token of its own in this tokenizer.
    """
    if template is None:
        own: str | dict[str, str] | None = tokenizer.chat_template
        template = (own.get("default") if isinstance(own, dict) else own) or ""
    vocabulary: dict[str, int] = tokenizer.get_added_vocab()
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    known = {
        token: vocabulary[token]
        for token in END_OF_TURN
        if token in vocabulary and (token in special or token in template)
    }
    if tokenizer.eos_token is not None:
        known[tokenizer.eos_token] = tokenizer.eos_token_id
    for token in declared:
        if token not in vocabulary:
            raise ValueError(
                f"end_tokens: {token!r} is not a token of its own in this tokenizer; add it, or leave it out"
            )
        known[token] = vocabulary[token]
    return known


def stop_ids(model: Any, end_ids: Iterable[int]) -> set[int]:
    """The ids at which generation stops: the end tokens, and those that the model's generation config names."""
    own: Any = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return {*end_ids, *(int(i) for i in (own if isinstance(own, list) else [own]) if i is not None)}
