"""Tokens that a model has no embedding for: a tokenizer that is larger than its model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def check_embedded(model: Any, tokenizer: Any, ids: Iterable[int], where: str) -> None:
    """Refuse a token without a row in the model's embedding: an IndexError on a CPU and a device assert on a GPU.

    Args:
        model: a causal LM of transformers.
        tokenizer: names the token in the error.
        ids: the tokens that the model would get.
        where: what they are the tokens of.
    """
    if not hasattr(model, "get_input_embeddings"):  # a wrapper of a model, which says nothing of its embedding
        return
    size = int(model.get_input_embeddings().weight.shape[0])
    above = next((token for token in ids if token >= size), None)
    if above is not None:
        raise not_embedded(tokenizer, above, where, size)


def not_embedded(tokenizer: Any, token: int, where: str, size: int, of: str = "") -> ValueError:
    """The error for a token beyond an embedding of ``size`` rows; ``of`` says whose the tokenizer is: " of m"."""
    return ValueError(
        f"model: the tokenizer{of} has {len(tokenizer):,} tokens and the model's embedding {size:,}: token {token} "
        f"({tokenizer.convert_ids_to_tokens(token)!r}, {where}) has no embedding; use the tokenizer that the model was "
        f"trained with, or enlarge the embedding with resize_token_embeddings({len(tokenizer)}) and save the model"
    )
