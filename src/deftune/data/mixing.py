"""Several sources mixed by weight, rows split into training and held-out rows without leaks, and answers exchanged."""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from random import Random

from deftune.data.rows import Row


def _shares(weights: Sequence[float], total: int) -> list[int]:
    """``total`` divided in proportion: floors first, then one each to the largest remainders (ties: the earlier)."""
    exact = [Fraction(weight) for weight in weights]
    quotas = [total * weight / sum(exact) for weight in exact]
    counts = [math.floor(quota) for quota in quotas]
    order = sorted(range(len(quotas)), key=lambda i: (counts[i] - quotas[i], i))
    for index in order[: total - sum(counts)]:
        counts[index] += 1
    return counts


def mix_places(
    sources: Sequence[tuple[Sequence[Row], float]], *, total: int | None = None, seed: int
) -> Iterator[tuple[int, int]]:
    """Rows of several sources in exact proportion to their weights, shuffled; the same for a seed on every machine.

    Args:
        sources: (rows, weight) of each.
        total: how many rows; by default the most that the smallest source allows. No row is taken twice.
        seed: of the shuffling.

    Returns:
        (number of the source, place of the row in the source), in the mixture's order.
    """
    if not sources:
        raise ValueError("mix: no sources; give at least one (rows, weight)")
    for index, (rows, weight) in enumerate(sources):
        if not rows:
            raise ValueError(f"mix: source {index} has no rows; leave it out")
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"mix: {_named(sources, index)} has weight {weight}; a weight is a number above 0")
    weights = [weight for _, weight in sources]
    if total is None:
        whole = sum(map(Fraction, weights))
        total = min(math.floor(len(rows) * whole / Fraction(weight)) for rows, weight in sources)
    if total < 1:
        raise ValueError(f"mix: total is at least 1, got {total}")
    counts = _shares(weights, total)
    picked: list[array[int]] = []
    for index, ((rows, _), count) in enumerate(zip(sources, counts)):
        if count > len(rows):
            raise ValueError(
                f"mix: {_named(sources, index)} has {len(rows)} rows and {count} of {total} are needed; "
                f"lower data.total or the source's weight"
            )
        picked.append(_shuffled(range(len(rows)), f"{seed}/{index}/0")[:count])
    order = _shuffled((index for index, count in enumerate(counts) for _ in range(count)), f"{seed}/order")
    queues = [iter(places) for places in picked]
    return ((index, next(queues[index])) for index in order)


def _named(sources: Sequence[tuple[Sequence[Row], float]], index: int) -> str:
    return f"source {index} ({sources[index][0][0].source})"


def _shuffled(items: Iterable[int], seed: str) -> array[int]:
    shuffled = array("q", items)
    Random(seed).shuffle(shuffled)  # a string seeds through SHA-512, so PYTHONHASHSEED has no part in it
    return shuffled


def prompt_of(row: Row) -> str:
    """The text before a row's first answer, with each run of white space made one space."""
    parts: list[str] = []
    asked = False
    for message in row.messages:
        if message["role"] == "assistant":
            if asked:
                break
            continue
        asked = asked or message["role"] == "user"
        parts.append(f"{message['role']}: {message.get('content') or ''}")
    return " ".join(" ".join(parts).split()) if asked else repr(row.messages)


def split_places(rows: Sequence[Row], holdout: float, seed: int) -> tuple[Sequence[int], Sequence[int]]:
    """Places of the rows to train on and of the rows held out, each in order; equal prompts are on the same side.

    Args:
        rows: all rows.
        holdout: a whole number holds out that many rows (a few more if the last prompt has several), a fraction about
            that share of them.
        seed: the side follows from the prompt's hash and the seed alone, so with a fraction new rows move no old ones.
    """
    fraction = isinstance(holdout, float)
    if not 0 < holdout < (1 if fraction else len(rows)):
        bound = "between 0 and 1" if fraction else f"from 1 to {len(rows) - 1}"
        raise ValueError(f"holdout: a number of rows or a fraction, {bound} for {len(rows)} rows, got {holdout}")
    places = array("d", (_place(row, seed) for row in rows))
    limit = holdout if fraction else sorted(places)[int(holdout) - 1]
    held = array("q", (index for index, place in enumerate(places) if place <= limit))
    train = array("q", (index for index, place in enumerate(places) if place > limit))
    if not held or not train:
        empty = "held out" if not held else "left to train on"
        raise ValueError(
            f"holdout: no rows are {empty} of {len(rows)} with holdout={holdout}, seed={seed}; change them"
        )
    return train, held


EXCHANGED = ", with the answer of "
"""In `Row.where` of a row that has another row's answer, before the place of the other row."""


def exchange_partners(rows: Sequence[Row], share: float) -> array[int]:
    """Pairs for the exchange of last answers among about ``share`` of the rows: label noise on purpose.

    Which rows are chosen follows from their prompts alone: a larger share chooses the rows of a smaller one too. Two
    rows are exchanged only if their prompts and their answers differ; a chosen row without a partner keeps its answer.

    Args:
        rows: all rows; they are read one at a time, and their text is not held.
        share: of the rows, from 0 to 1.

    Returns:
        For each row the place of its partner, -1 for a row without one. `exchanged_row` makes the exchanged rows.

    >>> def row(n): return Row(({"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": n}), None, n, "")
    >>> exchange_partners([row("1"), row("2")], 1.0), exchange_partners([row("1"), row("2")], 0.0)
    (array('q', [1, 0]), array('q', [-1, -1]))
    """
    # A chosen row takes the first waiting row that fits, and waits if none does. So no two waiting rows fit each other:
    # all of them have one answer, or all have one prompt. If any fits a new row, one of the first two groups does.
    partners = array("q", [-1]) * len(rows)
    first: dict[bytes, int] = {}  # when an answer, and when an answer with a prompt, was first left waiting
    waiting: list[tuple[int, int, bytes, bytes, deque[int]]] = []  # groups of one answer and prompt, the first first
    for place, row in enumerate(rows):
        if _place(row, "exchange") >= share:
            continue
        answer, prompt = _digest(json.dumps(row.messages[-1])), _digest(prompt_of(row))
        fits = (i for i, group in enumerate(waiting[:2]) if group[2] != answer and group[3] != prompt)
        at = next(fits, None)
        if at is None:
            order = first.setdefault(answer, len(first)), first.setdefault(answer + prompt, len(first))
            _wait(waiting, (*order, answer, prompt), place)
            continue
        partner = waiting[at][4].popleft()
        partners[place], partners[partner] = partner, place
        if not waiting[at][4]:
            del waiting[at]
    return partners


def exchanged_row(rows: Sequence[Row], place: int, partner: int) -> Row:
    """The row at a place with the last answer of its partner; `is_exchanged` knows it by its ``where``."""
    row, other = rows[place], rows[partner]
    return replace(row, messages=(*row.messages[:-1], other.messages[-1]), where=f"{row.where}{EXCHANGED}{other.where}")


def _wait(
    waiting: list[tuple[int, int, bytes, bytes, deque[int]]], group: tuple[int, int, bytes, bytes], place: int
) -> None:
    """Add a place to its group, and the group in its order."""
    at = bisect_left(waiting, group[:2], key=lambda found: found[:2])
    if at == len(waiting) or waiting[at][:2] != group[:2]:
        waiting.insert(at, (*group, deque()))
    waiting[at][4].append(place)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def is_exchanged(where: str) -> bool:
    """Whether the row at this place has another row's answer, by `exchanged_row`."""
    return EXCHANGED in where


def _place(row: Row, seed: int | str) -> float:
    """A number in [0, 1), spread evenly over prompts."""
    digest = hashlib.sha256(f"{seed}/{prompt_of(row)}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48
