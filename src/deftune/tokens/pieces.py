"""Token ids as text, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Pieces:
    """Token ids as text, token by token, so that a row's pieces join to its text.

    Where several tokens spell one character, the last of them has it and the others have "".
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._backend: Any = tokenizer.backend_tokenizer
        self._alone: dict[int, str] = {}

    def of(self, ids: Sequence[int]) -> list[str]:
        """One piece per token. What a cut leaves of a character is U+FFFD at the end."""
        pieces = [""] * len(ids)
        # decoding goes on from the tokens of the last piece: the text of a token may depend on the one before
        start = done = 0
        known = ""
        for i in range(len(ids)):
            text = self._decode(ids[start : i + 1])
            if text.endswith("\ufffd") and i + 1 < len(ids):
                continue
            pieces[i] = text[len(known) :]
            start, done = done, i + 1
            known = self._decode(ids[start:done])
        return pieces

    def alone(self, token: int) -> str:
        """A token by itself; where it is part of a character, as the vocabulary writes it."""
        text = self._decode([token])
        return self._tokenizer.convert_ids_to_tokens(token) if "\ufffd" in text else text

    def _decode(self, ids: Sequence[int]) -> str:
        if len(ids) > 1:
            return self._backend.decode(ids, skip_special_tokens=False)
        if ids and ids[0] not in self._alone:
            self._alone[ids[0]] = self._backend.decode(ids, skip_special_tokens=False)
        return self._alone[ids[0]] if ids else ""
