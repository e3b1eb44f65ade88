"""The text of each token of a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Pieces:
    """The text of each token, such that the texts of a row join to the text of the row.

    Where several tokens spell one character, the last of them has the character and the others have "".
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._backend: Any = tokenizer.backend_tokenizer
        self._alone: dict[int, str] = {}

    def of(self, ids: Sequence[int]) -> list[str]:
        """One text per token. A character that is cut off at the end of the row is U+FFFD."""
        pieces = [""] * len(ids)
        # the text of a token may depend on the token before: decode from the start of the last piece
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
        """The text of a single token; for a part of a character, the spelling of the vocabulary."""
        text = self._decode([token])
        return self._tokenizer.convert_ids_to_tokens(token) if "\ufffd" in text else text

    def _decode(self, ids: Sequence[int]) -> str:
        if len(ids) > 1:
            return self._backend.decode(ids, skip_special_tokens=False)
        if ids and ids[0] not in self._alone:
            self._alone[ids[0]] = self._backend.decode(ids, skip_special_tokens=False)
        return self._alone[ids[0]] if ids else ""
