"""Rows encoded by several processes; the result is the same, token for token, as with one process.

A worker process loads neither torch nor transformers, so it is small. It reads pickled frames from its stdin: first the
`Encoder` and whether to skip refused rows, then lists of packed rows. For each list it writes an `EncodedRows`, or the
exception that stopped it, to its stdout. It ends when its stdin does, so a parent that is killed leaves none behind.
"""

from __future__ import annotations

import json
import os
import pickle  # between a process and its own children; nothing is stored
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from typing import Any, BinaryIO

from deftune.data.encoding import EncodedRows, Encoder, checked, encode_part
from deftune.data.rows import BadRows, PackedRows, unpack_row

SMALL_BYTES = 4 * 2**20  # of rows: up to here starting processes costs more than they save
CHUNK_BYTES = 2**18  # of rows in one message: a fraction of a second of work
MAX_WORKERS = 16
_START = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from deftune.data.parallel import work; work()"


def default_workers(ranks: int = 1) -> int:
    """The cores of this process, divided by the ranks of this machine that encode; or $DEFTUNE_DATA_WORKERS."""
    if asked := os.environ.get("DEFTUNE_DATA_WORKERS"):
        if not asked.isdecimal() or not 1 <= int(asked) <= 10 * MAX_WORKERS:
            raise ValueError(f"DEFTUNE_DATA_WORKERS: a number from 1 to {10 * MAX_WORKERS}, got {asked!r}")
        return int(asked)
    return max(1, min(MAX_WORKERS, num_cores() // ranks))


def num_cores() -> int:
    """The cores that this process may run on; macOS does not say, and has all of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode_packed(
    rows: PackedRows,
    encoder: Encoder,
    *,
    bad: BadRows,
    workers: int | None = None,
    ranks: int = 1,
    progress: Callable[[int], None] = lambda _: None,
) -> EncodedRows:
    """Encode many rows by several processes; the result is that of `encode_rows`.

    Args:
        rows: the rows.
        encoder: the tokenizer, template and mask.
        bad: what to do with a row whose mask cannot be verified.
        workers: how many processes; by default none for a few MiB of rows, else one for each core.
        ranks: how many ranks of this machine do the same at this time, and share its cores.
        progress: called with the number of rows done.
    """
    size = rows.texts.num_bytes
    if workers is None:
        workers = default_workers(ranks) if size > SMALL_BYTES else 1
    result = EncodedRows(encoder.max_length)
    workers = min(workers, -(-size // CHUNK_BYTES))
    with closing(_encoded_chunks(_chunks(rows.texts), encoder, bad.skip, workers)) as parts:
        for part in parts:
            result.extend(part)
            progress(result.num_rows)
    return checked(result, encoder, bad)


def _chunks(texts: Iterable[bytes]) -> Iterator[list[bytes]]:
    chunk: list[bytes] = []
    size = 0
    for text in texts:
        chunk.append(text)
        size += len(text)
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _encoded_chunks(
    chunks: Iterable[list[bytes]], encoder: Encoder, skip: bool, workers: int
) -> Generator[EncodedRows]:
    """The result of each chunk, in order."""
    if workers <= 1:
        yield from (_encode_chunk(chunk, encoder, skip) for chunk in chunks)
        return
    with _pool(encoder, skip, workers) as submit:
        ahead: deque[Future[EncodedRows]] = deque()  # a few chunks, so that no process waits for this one
        for chunk in chunks:
            ahead.append(submit(chunk))
            if len(ahead) > 2 * workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _encode_chunk(texts: list[bytes], encoder: Encoder, skip: bool) -> EncodedRows:
    return encode_part(map(unpack_row, texts), encoder, skip=skip)


# --- in this process --------------------------------------------------------------------------------------------------


@contextmanager
def _pool(encoder: Encoder, skip: bool, workers: int) -> Generator[Callable[[list[bytes]], Future[EncodedRows]]]:
    """``submit(chunk)``: each of the processes is written to and read from by a thread at a time.

    They are started as programs of their own, not forked: no thread's lock is copied in a locked state, and no open
    file of this process (a run's lock for one) is open in them.
    """
    setting = pickle.dumps((encoder, skip), protocol=pickle.HIGHEST_PROTOCOL)
    command = [sys.executable, "-P", "-c", _START, json.dumps(sys.path)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    processes: list[subprocess.Popen[bytes]] = []
    idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
    threads = ThreadPoolExecutor(workers)

    def encode(chunk: list[bytes]) -> EncodedRows:
        process = idle.get()
        try:
            return _ask(process, chunk)
        finally:
            idle.put(process)

    try:
        for _ in range(workers):
            processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment))
        for process in processes:  # once all are started: a process reads the megabytes of an encoder after its imports
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # the process is dead already; `_ask` says of what
                process.stdin.write(setting)
            idle.put(process)
        yield lambda chunk: threads.submit(encode, chunk)
    finally:
        for process in processes:
            process.kill()
        threads.shutdown(wait=True, cancel_futures=True)  # a thread that waits for an answer gets the end of its file
        for process in processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):  # what was not written yet has no reader
                        pipe.close()


def _ask(process: subprocess.Popen[bytes], chunk: list[bytes]) -> EncodedRows:
    assert process.stdin is not None and process.stdout is not None
    try:
        pickle.dump(chunk, process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
        process.stdin.flush()
        answer: Any = pickle.load(process.stdout)
    except (EOFError, BrokenPipeError, pickle.UnpicklingError):
        code = process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        raise ValueError(
            f"a process that encodes rows {how}; the machine may be out of memory: run it again with fewer at once "
            f"(DEFTUNE_DATA_WORKERS=1)"
        ) from None
    if isinstance(answer, Exception):
        raise answer
    return answer


# --- in a worker process ----------------------------------------------------------------------------------------------


def work() -> None:
    """Encode the chunks that this process reads from its stdin, until the stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process
    source: BinaryIO = sys.stdin.buffer
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing but frames goes to the parent
    try:
        encoder, skip = pickle.load(source)
        while True:
            texts: list[bytes] = pickle.load(source)
            answer: Any
            try:
                answer = _encode_chunk(texts, encoder, skip)
            except ValueError as error:
                answer = error
            except Exception as error:  # whose class the parent may not be able to read
                answer = RuntimeError(f"{type(error).__name__}: {error}")
            pickle.dump(answer, sink, protocol=pickle.HIGHEST_PROTOCOL)
            sink.flush()
    except (EOFError, BrokenPipeError):
        os._exit(0)  # a buffer that cannot be flushed any more would be a traceback
