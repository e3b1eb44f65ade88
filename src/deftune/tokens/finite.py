"""Logits that are not finite, from which no token can be chosen."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def finite_rows(logits: Tensor) -> Tensor:
    """Whether a token can be chosen from each row of logits.

    Args:
        logits: [..., V]; single logits may be -inf (tokens that are never chosen).

    Returns:
        [...] of bool: no logit is NaN or inf, and one is above -inf.
    """
    return logits.amax(-1).isfinite()


def finite_note(made: int) -> str:
    """What is wrong, after ``made`` tokens of an answer."""
    return f"the model's logits are not finite after {made} tokens"


class FiniteLogits:
    """A logits processor for transformers' ``generate`` that stops at logits which are not finite.

    Without it greedy decoding takes some token of a row of NaN.

    Args:
        model: the model that generates; the error names it, and its first weight that is not finite.
        prompt: the number of tokens of the prompt.

    Raises:
        ValueError: the logits of a row are not finite.
    """

    def __init__(self, model: Any, prompt: int):
        self.model, self.prompt = model, prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if finite_rows(scores).all():
            return scores
        bad = (name for name, weight in self.model.named_parameters() if not weight.isfinite().all())
        found = next(bad, None)
        cause = "its weights are finite, the forward pass is not" if found is None else f"{found} has NaN or inf"
        raise ValueError(
            f"model: {self.model.name_or_path}: {finite_note(input_ids.shape[-1] - self.prompt)} ({cause}); use an "
            f"earlier checkpoint of the run (RUN:STEP), or another copy of the model"
        )
