"""Errors that a GPU finds: recorded where they happen, raised at a later call, never by an extra synchronisation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deftune.kernels.checks import nan_error


class _Note(NamedTuple):
    ready: torch.cuda.Event
    first_bad: Tensor  # pinned: the flat index of the first row without a distribution, -1 if none


_notes: list[_Note] = []


def note_nan(log_p: Tensor, index: Tensor) -> None:
    """Remember, on the device, the first row whose log p is NaN."""
    bad = log_p.isnan()
    first = torch.where(bad.any(), index[bad.to(torch.uint8).argmax()], -1)
    host = torch.empty((), dtype=first.dtype, pin_memory=True)
    host.copy_(first, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    _notes.append(_Note(ready, host))


def raise_pending(*, wait: bool = False) -> None:
    """Raise the error that an earlier call on a GPU met, if it is known by now.

    Every loss of deftune calls this first. A trainer calls it with ``wait=True`` before the optimizer steps, where it
    synchronises anyway (to read the loss), so that no NaN reaches the weights.

    >>> raise_pending()
    """
    while _notes and (wait or _notes[0].ready.query()):
        note = _notes.pop(0)
        note.ready.synchronize()
        if (index := int(note.first_bad)) >= 0:
            _notes.clear()
            raise nan_error(index, "hidden x weight")
