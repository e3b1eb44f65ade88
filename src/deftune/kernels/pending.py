"""Errors that a GPU finds: noted where they happen, raised at a later synchronisation, never by one of their own."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from deftune.kernels.checks import nan_error


class _Note(NamedTuple):
    total: Tensor  # on the host: the sum of log_p, NaN if one is
    log_p: Tensor
    places: Tensor
    written: torch.cuda.Event


_notes: list[_Note] = []


def note_rows(log_p: Tensor, index: Tensor) -> None:
    """Have the device say whether some of these log p are NaN, without waiting for it."""
    if log_p.numel():
        total = log_p.sum().to("cpu", non_blocking=True)  # into pinned memory
        written = torch.cuda.Event()
        written.record()
        _notes.append(_Note(total, log_p, index, written))


def raise_pending(*, wait: bool = True) -> None:
    """Raise the error that an earlier call on a GPU met: a token whose logits are NaN, by its flat index.

    Every loss of deftune does this (``wait=False``) right after counting its tokens, which synchronises. A trainer
    calls it before the optimizer steps, where it reads the loss anyway, so that no NaN reaches the weights.

    >>> raise_pending()
    """
    while _notes and (wait or _notes[0].written.query()):
        note = _notes.pop(0)
        note.written.synchronize()
        if math.isnan(float(note.total)):
            _notes.clear()
            raise nan_error(int(note.places[note.log_p.isnan().nonzero()[0, 0]]), "hidden x weight")
