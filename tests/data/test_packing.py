"""Packing and batches: nothing is lost, nothing is doubled, and no target sees another example."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deftune.data import packing
from deftune.data.encoding import IGNORE_INDEX, Encoded
from deftune.data.packing import Collator, Pack, pack

LENGTH = 32


def example(size: int, mask: int, *, first: int = 0, where: str = "a.jsonl:1") -> Encoded:
    """``size`` distinct tokens from ``first``; bit i of ``mask`` supervises token i."""
    ids = list(range(first, first + size))
    return Encoded(ids, [token if mask >> i & 1 else IGNORE_INDEX for i, token in enumerate(ids)], where, "a.jsonl")


# (length, mask) per example; tokens repeat between examples, so that a doubled one cannot hide behind its ids
examples = st.lists(
    st.tuples(st.integers(1, LENGTH), st.integers(0, 2**LENGTH - 1), st.integers(0, 5)), max_size=12
).map(lambda drawn: [example(size, mask, first=first) for size, mask, first in drawn])

Pairs = Counter[tuple[tuple[int, ...], int]]


def pairs_of_examples(encoded: Sequence[Encoded]) -> Pairs:
    """(context, target) of each supervised token that has a token before it."""
    return Counter(
        (tuple(one.input_ids[:i]), label)
        for one in encoded
        for i, label in enumerate(one.labels)
        if i and label != IGNORE_INDEX
    )


def pairs_of_row(input_ids: list[int], labels: list[int], position_ids: list[int]) -> Pairs:
    """The same, as a model computes them: labels shifted over the whole row, context by restarting positions."""
    found: Pairs = Counter()
    for i, target in enumerate(labels[1:]):  # the logits of token i against label i + 1
        if target != IGNORE_INDEX:
            found[tuple(input_ids[i - position_ids[i] : i + 1]), target] += 1
    return found


def pairs_of_packs(packs: Sequence[Pack]) -> Pairs:
    return sum((pairs_of_row(one.input_ids, one.labels, one.position_ids) for one in packs), Counter())


def check_best_fit(encoded: list[Encoded], length: int) -> None:
    packs = pack(encoded, length)
    check(packs, encoded, length)
    # any two packs together overflow, or one could have taken the other: best fit never leaves both half empty
    sizes = sorted(len(one.input_ids) for one in packs)
    assert len(sizes) < 2 or sizes[0] + sizes[1] > length


@settings(max_examples=500, deadline=None)
@given(examples, st.integers(LENGTH, 3 * LENGTH))
def test_packs_keep_every_target_and_its_context(encoded: list[Encoded], length: int):
    check_best_fit(encoded, length)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None)
@given(examples, st.integers(LENGTH, 3 * LENGTH))
def test_five_thousand_packs_keep_every_target_and_its_context(encoded: list[Encoded], length: int):
    check_best_fit(encoded, length)


def check(packs: Sequence[Pack], encoded: list[Encoded], length: int) -> None:
    assert pairs_of_packs(packs) == pairs_of_examples(encoded)
    whole = Counter(tuple(one.input_ids) for one in encoded)
    for one in packs:
        assert sum(one.lengths) == len(one.input_ids) == len(one.labels) == len(one.position_ids) <= length
        assert one.position_ids == [i for size in one.lengths for i in range(size)]
        start = 0
        for size in one.lengths:
            assert one.labels[start] == IGNORE_INDEX
            whole[tuple(one.input_ids[start : start + size])] -= 1
            start += size
    assert not any(whole.values())


@settings(max_examples=300, deadline=None)
@given(examples.filter(bool), st.booleans())
def test_padding_free_batch_keeps_every_target(encoded: list[Encoded], packed: bool):
    batch = Collator(99, padding_free=True)(pack(encoded, 40) if packed else encoded)
    names = ("input_ids", "labels", "position_ids")
    assert set(batch) == {*names, "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    lengths = [len(one.input_ids) for one in encoded]
    assert sorted(batch["cu_seq_lens_q"].diff().tolist()) == sorted(lengths) and batch["max_length_q"] == max(lengths)
    rows = [batch[name].tolist() for name in names]
    assert all(len(row) == 1 for row in rows)
    assert pairs_of_row(*(row[0] for row in rows)) == pairs_of_examples(encoded)
    assert len(rows[0][0]) == sum(len(one.input_ids) for one in encoded)


@settings(max_examples=300, deadline=None)
@given(examples.filter(bool))
def test_padded_batch_keeps_every_target(encoded: list[Encoded]):
    batch = Collator(99, padding_free=False)(encoded)
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    found: Pairs = Counter()
    for ids, mask, labels, one in zip(*(batch[n].tolist() for n in batch), encoded):
        size = len(one.input_ids)
        assert mask == [1] * size + [0] * (len(mask) - size)
        assert ids == one.input_ids + [99] * (len(ids) - size)
        assert labels[0] == IGNORE_INDEX and labels[size:] == [IGNORE_INDEX] * (len(ids) - size)
        found += pairs_of_row(ids, labels, list(range(len(ids))))
    assert found == pairs_of_examples(encoded)
    longest = max(len(one.input_ids) for one in encoded)
    assert batch["input_ids"].shape == (len(encoded), longest)
    assert batch["labels"].dtype == torch.int64


def test_best_fit_by_hand():
    # 7, then 5, 4 (beside 5 it leaves 1), 3 (beside 7 it leaves 0), 2: then everything in the data's order
    encoded = [example(size, -1, first=10 * i) for i, size in enumerate([3, 5, 2, 7, 4])]
    assert [one.lengths for one in pack(encoded, 10)] == [[3, 7], [5, 4], [2]]
    assert [one.lengths for one in pack([encoded[2], example(9, -1)], 10)] == [[2], [9]]


def by_definition(lengths: Sequence[int], length: int) -> list[list[int]]:
    """Longest first, each into the bin that it leaves the least room in; of those into the earliest."""
    bins: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        room = [length - sum(lengths[j] for j in members) for members in bins]
        fits = [(free, which) for which, free in enumerate(room) if free >= lengths[i]]
        if fits:
            bins[min(fits)[1]].append(i)
        else:
            bins.append([i])
    return bins


@given(st.lists(st.integers(0, 20), max_size=40), st.integers(20, 60))
def test_best_fit_by_its_definition(lengths: list[int], length: int):
    assert [list(members) for members in packing._best_fit_decreasing(lengths, length)] == by_definition(
        lengths, length
    )


def test_packing_is_deterministic_and_leaves_its_input_alone():
    encoded = [example(1 + i * 7 % 30, i, first=i) for i in range(200)]
    before = [(list(one.input_ids), list(one.labels)) for one in encoded]
    assert list(pack(encoded, 64)) == list(pack(encoded, 64))
    assert before == [(one.input_ids, one.labels) for one in encoded]


def test_pack_errors():
    with pytest.raises(ValueError, match=r"a.jsonl:7: 9 tokens do not fit a pack of 8; encode with max_length=8"):
        pack([example(9, 1, where="a.jsonl:7")], 8)
    assert list(pack([], 8)) == []


def test_packs_become_rows_whose_positions_show_every_boundary():
    """No attention mask: the padding of a row is a sequence of its own, and nothing in it is supervised."""
    packs = pack([example(4, 6), example(3, 5), example(5, 7)], 8)
    batch = Collator(99, padding_free=False)(packs)
    assert "attention_mask" not in batch
    assert batch["input_ids"].shape == batch["labels"].shape == batch["position_ids"].shape == (len(packs), 8)
    for row, one in enumerate(packs):
        size = len(one.input_ids)
        assert batch["input_ids"][row].tolist() == one.input_ids + [99] * (8 - size)
        assert batch["position_ids"][row].tolist() == [*one.position_ids, *range(8 - size)]
        assert batch["labels"][row].tolist() == one.labels + [-100] * (8 - size)
