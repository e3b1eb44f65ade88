"""Errors that a GPU finds: kept where they happen, raised at a later call that synchronises anyway."""

from __future__ import annotations

from torch import Tensor

from deftune.kernels.checks import nan_error

_rows: list[tuple[Tensor, Tensor]] = []


def note_rows(log_p: Tensor, index: Tensor) -> None:
    """Remember the log p of these rows, on the device, to be looked at later."""
    if log_p.numel():
        _rows.append((log_p, index))


def raise_pending() -> None:
    """Raise the error that an earlier call on a GPU met: a token whose logits are NaN, by its flat index.

    Every loss of deftune does this first, where it synchronises to count its tokens. A trainer calls it before the
    optimizer steps, where it reads the loss anyway, so that no NaN reaches the weights.

    >>> raise_pending()
    """
    while _rows:
        log_p, index = _rows.pop()
        if bool((bad := log_p.isnan()).any()):
            _rows.clear()
            raise nan_error(int(index[bad.nonzero()[0, 0]]), "hidden x weight")
