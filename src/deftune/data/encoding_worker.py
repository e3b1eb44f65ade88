"""The process that `encode_packed` hands rows to. It loads neither torch nor transformers, so it is small.

Frames on its stdin: first an `Encoder`, then lists of packed rows; for each of these an `EncodedRows`, or the exception
that stopped it, on its stdout. It ends when its stdin does, so a parent that is killed leaves none behind.
"""

from __future__ import annotations

import os
import pickle  # between a process and its own parent; nothing is stored
import signal
import sys
from typing import Any, BinaryIO

from deftune.data.encoding import EncodedRows, Encoder, encode_into
from deftune.data.rows import unpack_row


def encode_texts(texts: list[bytes], encoder: Encoder) -> EncodedRows:
    """Encode packed rows; those whose mask cannot be verified are in ``refused``."""
    result = EncodedRows(max_length=encoder.max_length)
    for text in texts:
        encode_into(result, unpack_row(text), encoder)
    return result


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process
    source: BinaryIO = sys.stdin.buffer
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing but frames goes to the parent
    try:
        encoder: Encoder = pickle.load(source)
        while True:
            texts: list[bytes] = pickle.load(source)
            answer: Any
            try:
                answer = encode_texts(texts, encoder)
            except ValueError as error:
                answer = error
            except Exception as error:  # whose class the parent may not be able to read
                answer = RuntimeError(f"{type(error).__name__}: {error}")
            pickle.dump(answer, sink, protocol=pickle.HIGHEST_PROTOCOL)
            sink.flush()
    except (EOFError, BrokenPipeError):
        os._exit(0)  # a buffer that cannot be flushed any more would be a traceback


if __name__ == "__main__":
    main()
