"""The definition of a confident conflict: a token where the model is sure of another one."""

from __future__ import annotations

import torch
from torch import Tensor

CONFIDENT = 0.9
"""A token is a confident conflict where `conflict` is at least this: DEFT's gate there is at most a tenth of NLL's."""


def conflict(log_p: Tensor, concentration: Tensor) -> Tensor:
    """How surely the model expects another token than the target, in [0, 1].

        conflict = 1 - p^(sum P^2) = 1 - gate of DEFT

    The three tokens below: a sure model that the target contradicts, an undecided model, a sure model that is right.

    >>> p, concentration = torch.tensor([0.001, 0.001, 0.99]), torch.tensor([0.95, 0.01, 0.98])
    >>> conflict(p.log(), concentration)
    tensor([0.9986, 0.0667, 0.0098])

    Args:
        log_p: log p of the target, ``[tokens]``.
        concentration: sum P^2 of the model's distribution, ``[tokens]``.

    Returns:
        The conflict in float32, ``[tokens]``: training statistics (float64) and token tables (float32) then agree.
    """
    return -torch.expm1(concentration.float() * log_p.float())


def is_confident_conflict(log_p: Tensor, concentration: Tensor) -> Tensor:
    """Whether each token is a confident conflict, ``[tokens]`` of bool: `conflict` >= `CONFIDENT`.

    >>> is_confident_conflict(torch.tensor([0.001, 0.2]).log(), torch.tensor([0.95, 0.95]))
    tensor([ True, False])
    """
    return conflict(log_p, concentration) >= CONFIDENT
