"""Label noise on purpose: the answers of some rows exchanged in pairs."""

import json
import time
import tracemalloc
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from deftune.artifacts.config import RunConfig, Source
from deftune.data import spool as spools
from deftune.data.mixing import _place, exchange_partners, exchanged_row, is_exchanged, prompt_of
from deftune.data.rows import BadRows, Row
from deftune.training.preparation import read_mixture


def row(number: int, answer: str) -> Row:
    messages = ({"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": answer})
    return Row(messages, None, f"rows.jsonl:{number}", "rows.jsonl")


def exchange_answers(rows: list[Row], share: float) -> list[Row]:
    partners = exchange_partners(rows, share)
    return [
        row if partner < 0 else exchanged_row(rows, i, partner) for i, (row, partner) in enumerate(zip(rows, partners))
    ]


def answers(rows: list[Row]) -> list[str]:
    return [one.messages[-1]["content"] for one in rows]


@given(st.lists(st.sampled_from("abc"), max_size=40), st.floats(0, 1))
def test_an_exchange_permutes_the_answers_and_marks_the_rows_that_are_wrong(texts, share):
    rows = [row(number, text) for number, text in enumerate(texts)]
    found = exchange_answers(rows, share)
    assert sorted(answers(found)) == sorted(texts) and len(found) == len(rows)
    for before, after in zip(rows, found):
        assert after.messages[:-1] == before.messages[:-1]
        assert is_exchanged(after.where) == (after.messages != before.messages)
        assert after.where.startswith(before.where)


def test_the_share_is_kept_and_a_larger_share_contains_a_smaller_one():
    rows = [row(number, str(number)) for number in range(4000)]
    marked = {
        s: {r.where.split(",")[0] for r in exchange_answers(rows, s) if is_exchanged(r.where)} for s in (0.1, 0.3)
    }
    assert 0.085 < len(marked[0.1]) / 4000 < 0.115 and 0.28 < len(marked[0.3]) / 4000 < 0.32
    assert len(marked[0.1] - marked[0.3]) <= 1  # the last one may have no partner
    assert exchange_answers(rows, 0.0) == rows
    # the first rows are exchanged as they are among all, but for the ones whose partner is cut off
    cut, whole = exchange_answers(rows[:1000], 0.3), exchange_answers(rows, 0.3)
    assert sum(a != b for a, b in zip(cut, whole)) <= 1


def test_answers_to_the_same_question_are_not_exchanged():
    """Several right answers to one question: exchanged with each other they would still be right."""
    rows = [row(number // 4, f"way {number}") for number in range(80)]
    for before, after in zip(rows, exchange_answers(rows, 1.0)):
        if is_exchanged(after.where):
            other = after.messages[-1]["content"]
            assert rows[int(other.split()[1])].messages[0] != before.messages[0]


def test_a_source_is_read_with_its_answers_exchanged(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "question {n}", "completion": "{n}"}}\n' for n in range(60)))
    said: list[str] = []

    def read(**options):
        config = RunConfig.model_validate({"model": {"name": "x"}, "data": {"train": [{"path": str(path), **options}]}})
        return list(read_mixture(config.data.train, config, BadRows(), said.append))

    plain, noisy, wrong = read(), read(exchange=0.5), read(exchange=0.5, exchanged_only=True)
    assert answers(plain) == [str(n) for n in range(60)] != answers(noisy)
    assert wrong == [one for one in noisy if is_exchanged(one.where)] and len(wrong) > 10
    assert f"{path}: {len(wrong)} of 60 rows have the answer of another row" in said


def partners_by_definition(rows: list[Row], share: float) -> list[int]:
    """Every waiting row is held with its text, and all are searched, as versions until 0.2.0 did."""
    found = [-1] * len(rows)
    waiting: dict[str, dict[str, deque[int]]] = {}
    for index, row in enumerate(rows):
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
        else:
            found[index] = partners.popleft()
            found[found[index]] = index
    return found


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abcd")), max_size=60), st.sampled_from([0.5, 1.0]))
def test_the_pairs_are_those_of_earlier_versions(pairs, share):
    rows = [replace(row(question, text), where=f"rows.jsonl:{i}") for i, (question, text) in enumerate(pairs)]
    assert list(exchange_partners(rows, share)) == partners_by_definition(rows, share)


def test_no_text_is_held(monkeypatch, tmp_path):
    """Ten times the text in as many rows: the same memory."""
    monkeypatch.setattr(spools, "MEMORY_BYTES", 2**12)
    monkeypatch.setenv("DEFTUNE_CACHE", str(tmp_path))

    def peak(length: int) -> int:
        path = tmp_path / f"{length}.jsonl"
        lines = ({"prompt": f"{n} " * length, "completion": f"{n}!" * length} for n in range(200))
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        source = {"path": str(path), "exchange": 0.5}
        config = RunConfig.model_validate({"model": {"name": "x"}, "data": {"train": [source]}})
        tracemalloc.start()
        rows = read_mixture(config.data.train, config, BadRows(), lambda _: None)
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(rows) == 200
        return size

    peak(10)  # imports
    small, large = peak(200), peak(2_000)
    assert large < small + 700_000, (small, large)  # the text alone is 2.5 MB more


def test_many_rows_take_linear_time():
    """Each row is compared with two groups of those that wait, however many there are."""
    rows = [row(number, str(number)) for number in range(20_000)]
    begin = time.process_time()
    assert min(exchange_partners(rows, 1.0)) >= 0
    assert time.process_time() - begin < 3  # 14 s where all are searched


def test_exchanged_rows_alone_need_a_share():
    with pytest.raises(ValidationError, match="`exchanged_only` needs `exchange`"):
        Source(path="a.jsonl", exchanged_only=True)
