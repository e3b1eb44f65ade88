"""Several sources mixed by weight, rows split into training and held-out rows without leaks, and answers exchanged."""

from __future__ import annotations

import hashlib
import json
import math
from array import array
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


def exchange_answers(rows: Sequence[Row], share: float) -> list[Row]:
    """The rows, with the last answers of about ``share`` of them exchanged in pairs: label noise on purpose.

    Which rows are chosen follows from their prompts alone: a larger share chooses the rows of a smaller one too. Two
    rows are exchanged only if their prompts and their answers differ; a chosen row without a partner keeps its answer.
    `is_exchanged` knows the exchanged rows by their place.

    Args:
        rows: all rows.
        share: of the rows, from 0 to 1.

    Returns:
        As many rows, in their order.

    >>> def row(n): return Row(({"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": n}), None, n, "")
    >>> [(r.where, r.messages[-1]["content"]) for r in exchange_answers([row("1"), row("2")], 1.0)]
    [('1, with the answer of 2', '2'), ('2, with the answer of 1', '1')]
    """
    found = list(rows)
    waiting: dict[str, dict[str, deque[int]]] = {}  # chosen, without a partner yet: by answer and prompt
    for index, row in enumerate(found):
        if _place(row, "exchange") >= share:
            continue
        answer, prompt = json.dumps(row.messages[-1]), prompt_of(row)
        places = (
            places
            for other, prompts in waiting.items() if other != answer
            for asked, places in prompts.items() if asked != prompt and places
        )  # fmt: skip
        partners = next(places, None)
        if partners is None:
            waiting.setdefault(answer, {}).setdefault(prompt, deque()).append(index)
            continue
        partner = partners.popleft()
        for mine, other in ((index, partner), (partner, index)):
            found[mine] = replace(
                rows[mine],
                messages=(*rows[mine].messages[:-1], rows[other].messages[-1]),
                where=f"{rows[mine].where}{EXCHANGED}{rows[other].where}",
            )
    return found


def is_exchanged(where: str) -> bool:
    """Whether the row at this place has another row's answer, by `exchange_answers`."""
    return EXCHANGED in where


def _place(row: Row, seed: int | str) -> float:
    """A number in [0, 1), spread evenly over prompts."""
    digest = hashlib.sha256(f"{seed}/{prompt_of(row)}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48
