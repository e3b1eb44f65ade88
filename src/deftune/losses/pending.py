"""Errors that a GPU finds: noted without synchronising, raised at a later synchronisation of the caller."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deftune.losses.checks import nan_error


class Note(NamedTuple):
    """A flag on the device, nonzero if one of these log p is NaN, and the stream that writes the flag."""

    flag: Tensor
    log_p: Tensor
    places: Tensor
    stream: torch.cuda.Stream
    sharded: bool = False


_notes: list[Note] = []
MOST = 64  # unread notes; beyond that, the oldest is waited for


def note_rows(flag: Tensor, log_p: Tensor, places: Tensor, sharded: bool = False) -> None:
    """Remember to read a flag later, without waiting for the device."""
    if log_p.numel():
        _notes.append(Note(flag, log_p, places, torch.cuda.current_stream(log_p.device), sharded))
        if len(_notes) > MOST:
            resolve(_notes[0], read_flag(_notes[0]))


def latest_note(stream: torch.cuda.Stream) -> Note | None:
    """The last note, if its flag is written on this stream, so that later work on the stream can read the flag."""
    return _notes[-1] if _notes and _notes[-1].stream == stream else None


def pending_flags(device: torch.device) -> list[Tensor] | None:
    """The flags of all notes if they are written on the device's current stream; else None."""
    if device.type != "cuda":
        return [] if not _notes else None
    here = torch.cuda.current_stream(device)
    return [note.flag for note in _notes] if all(note.stream == here for note in _notes) else None


def clear() -> None:
    """Forget all notes: the work that they are about is over."""
    _notes.clear()


def read_flag(note: Note) -> int:
    """Read a flag; waits for the stream that writes the flag."""
    with torch.cuda.stream(note.stream):
        return int(note.flag)


def resolve(note: Note, flag: int) -> None:
    """Drop a note whose flag was read; raise its error if the flag is set."""
    _notes[:] = [] if flag else [other for other in _notes if other is not note]
    if flag:
        raise nan_error(int(note.places[note.log_p.isnan().nonzero()[0, 0]]), "hidden x weight", note.sharded)


def raise_pending(*, wait: bool = True) -> None:
    """Raise the error of an earlier loss on a GPU whose logits were NaN; the message has the flat index of the token.

    A loss on a GPU does not wait for the device, so a NaN becomes known later. Call this function before the optimizer
    steps, so that no NaN reaches the weights. Every loss of deftune also checks the earlier calls of its stream.

    Args:
        wait: wait for the streams of all earlier calls; False: check only the calls of the current stream.

    Raises:
        ValueError: an earlier call had a NaN.

    >>> raise_pending()
    """
    for note in list(_notes):
        if wait or note.stream == torch.cuda.current_stream(note.stream.device):
            resolve(note, read_flag(note))
