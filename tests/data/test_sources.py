"""Sources: folders, the hub, limits; mixing in exact proportion; splits that share no prompt."""

import json
import logging
import os
import re
import subprocess
import sys
import types
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deftune.data.generated import generate
from deftune.data.mixing import mix_places, prompt_of, split_places
from deftune.data.rows import BadRows, Row, RowError
from deftune.data.sources import read_fields, read_rows


def row(text, source="s", *, system=None, answer="a"):
    start = ({"role": "system", "content": system},) if system else ()
    turns = ({"role": "user", "content": text}, {"role": "assistant", "content": answer})
    return Row((*start, *turns), None, f"{source}[{text}]", source)


def made(name, count):
    return [row(str(i), name) for i in range(count)]


def write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


ALPACA = {"instruction": "i", "input": "", "output": "o"}


# Reading -------------------------------------------------------------------------------------------------------------


def test_format_is_resolved_by_the_first_row_and_reported(tmp_path, caplog):
    path = write(tmp_path / "a.jsonl", ALPACA, {"problem": "p", "solution": "s"}, ALPACA)
    with pytest.raises(RowError, match=r"a\.jsonl:2: no 'output' \(its keys: problem, solution\)|no 'instruction'"):
        read_rows(path)
    with caplog.at_level(logging.INFO, logger="deftune.data.sources"):
        rows = read_rows(path, bad=BadRows(skip=True))
    assert [row.where for row in rows] == [f"{path}:1", f"{path}:3"]
    assert caplog.messages == [f"{path}: 2 rows, format alpaca; 1 row skipped: 1 no 'instruction'"]


def test_a_first_row_of_no_format_can_be_skipped_but_an_unclear_one_cannot(tmp_path):
    path = write(tmp_path / "a.jsonl", {"text": "x"}, ALPACA)
    bad = BadRows(skip=True)
    assert len(read_rows(path, bad=bad)) == 1 and bad.summary() == "1 row skipped: 1 unknown format"
    path = write(tmp_path / "b.jsonl", {"question": "q", "answer": "a"}, ALPACA)
    with pytest.raises(
        RowError, match=r"b\.jsonl:1: format not clear .*could be gsm8k or medquad.*name it, e\.g\. --format gsm8k"
    ):
        read_rows(path, bad=BadRows(skip=True))
    assert len(read_rows(write(tmp_path / "c.jsonl", {"question": "q", "answer": "a"}), format="medquad")) == 1


def test_limit_counts_good_rows_and_reads_no_further(tmp_path):
    path = write(tmp_path / "a.jsonl", ALPACA, {"text": "x"}, ALPACA, ["never read"])
    assert len(read_rows(path, limit=1)) == 1
    assert len(read_rows(path, limit=2, bad=BadRows(skip=True))) == 2
    with pytest.raises(ValueError, match="limit: at least 1 row, got 0; leave it out to read all"):
        read_rows(path, limit=0)


def test_a_folder_is_read_sorted_and_what_is_no_data_is_passed_over(tmp_path):
    for name in ("b/x.jsonl", "a.jsonl", ".hidden.jsonl", "_tmp/y.jsonl"):
        write(tmp_path / name, ALPACA)
    (tmp_path / "README.md").write_text("read me")
    rows = read_rows(tmp_path)
    assert [row.where for row in rows] == [f"{tmp_path}/a.jsonl:1", f"{tmp_path}/b/x.jsonl:1"]
    assert {row.source for row in rows} == {str(tmp_path)}


def test_a_folder_with_train_and_test_needs_a_split(tmp_path):
    write(tmp_path / "train-00.jsonl", ALPACA)
    write(tmp_path / "train-01.jsonl", ALPACA)
    write(tmp_path / "test" / "0.jsonl", ALPACA, ALPACA, ALPACA)
    with pytest.raises(RowError, match=r"holds train and held-out files \(test/0\.jsonl, train-00.*split='train'"):
        read_rows(tmp_path)
    assert len(read_rows(tmp_path, split="train")) == 2 and len(read_rows(tmp_path, split="test")) == 3
    with pytest.raises(RowError, match=r"no files of split 'valid' \(it holds test/0\.jsonl, "):
        read_rows(tmp_path, split="valid")
    with pytest.raises(ValueError, match=r"train-00\.jsonl: a file has no splits, got split='train'; leave it out"):
        read_rows(tmp_path / "train-00.jsonl", split="train")


def test_a_folder_of_save_to_disk_is_read_like_others(tmp_path):
    datasets = pytest.importorskip("datasets")
    parts = {
        name: datasets.Dataset.from_list([{"prompt": f"{name} {i}?", "completion": str(i)} for i in range(300)])
        for name in ("train", "test")
    }
    parts["train"].save_to_disk(tmp_path / "alone", num_shards=2)
    (tmp_path / "alone" / "cache-0123.arrow").write_bytes(b"what map() left")
    rows = read_rows(tmp_path / "alone")
    assert [row.messages[0]["content"] for row in rows] == [f"train {i}?" for i in range(300)]
    assert rows[-1].where == str(tmp_path / "alone" / "data-00001-of-00002.arrow[149]")
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "both")
    with pytest.raises(
        RowError, match=r"both: holds train and held-out files \(test/data-00000-of-00001\.arrow, train/"
    ):
        read_rows(tmp_path / "both")
    assert len(read_rows(tmp_path / "both", split="test")) == 300


def test_an_arrow_file_may_be_a_stream_or_a_file_and_must_be_whole(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"prompt": ["a", "b"], "completion": ["1", "2"]})
    for name, make in (("stream.arrow", arrow.ipc.new_stream), ("file.arrow", arrow.ipc.new_file)):
        with make(tmp_path / name, table.schema) as writer:
            writer.write_table(table)
        assert [row.messages[1]["content"] for row in read_rows(tmp_path / name)] == ["1", "2"]
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(RowError, match=rf"{name}.*: not a whole Arrow file \("):
            read_rows(tmp_path / name)


def test_every_file_of_a_folder_must_give_something(tmp_path):
    write(tmp_path / "a.jsonl", ALPACA)
    write(tmp_path / "b.jsonl", {"text": "x"}, {"text": "y"})
    with pytest.raises(RowError, match=r"b\.jsonl: all 2 rows are bad \(the first, .*b\.jsonl:1: no 'instruction'"):
        read_rows(tmp_path, bad=BadRows(skip=True))


def test_nothing_there(tmp_path):
    write(tmp_path / "train.jsonl", ALPACA)
    with pytest.raises(
        RowError, match=r"tain\.jsonl: no such file or folder \(Did you mean 'train\.jsonl'\?\); give a file"
    ):
        read_rows(tmp_path / "tain.jsonl")
    begins = re.escape(f"(relative to the working directory, {Path.cwd()})")
    with pytest.raises(RowError, match=rf"^data/train\.jsonl: no such file or folder {begins}; give"):  # no hub id
        read_rows("data/train.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RowError, match=r"empty: no data files \(it holds nothing\); known: \.jsonl"):
        read_rows(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"unknown format 'gsm8'\. Did you mean 'gsm8k'\?"):
        read_rows(tmp_path / "train.jsonl", format="gsm8")


@pytest.fixture
def hub(monkeypatch):
    """A hub of one dataset; it notes how it was asked."""
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        if args[0] != "org/name":
            raise FileNotFoundError(f"Dataset '{args[0]}' doesn't exist on the Hub\nand more")
        return iter([{**ALPACA, "extra": None}, {**ALPACA, "output": ""}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return asked


def test_the_hub(hub):
    [first] = read_rows("org/name", limit=1)
    assert (first.where, first.source) == ("org/name:train[0]", "org/name")
    with pytest.raises(RowError, match=r"^org/name:main:test\[1\]: empty assistant turn \(message 1\)"):
        read_rows("org/name:main", split="test")
    assert hub == [
        (("org/name", None), {"split": "train", "streaming": True}),
        (("org/name", "main"), {"split": "test", "streaming": False}),
    ]


def test_the_hub_without_the_dataset(hub):
    expected = (
        "org/nothing: no such file, and not readable from the hub (FileNotFoundError: Dataset 'org/nothing' doesn't "
        "exist on the Hub); check the name (org/name:config) and split, your network and access, or give a local file"
    )
    with pytest.raises(RowError, match=f"^{re.escape(expected)}$"):
        read_rows("org/nothing")


def test_the_hub_without_datasets(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r'reading the hub needs datasets; pip install "deftune\[train\]"'):
        read_rows("org/name")


def test_local_files_need_no_datasets(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "org" / "name" / "a.jsonl", ALPACA)
    assert len(read_rows("org/name")) == 1


# Mixing --------------------------------------------------------------------------------------------------------------

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=4)


def mix(sources, **options):
    return [sources[index][0][place] for index, place in mix_places(sources, **options)]


def split_rows(rows, holdout, seed):
    return tuple([rows[place] for place in side] for side in split_places(rows, holdout, seed))


WEIGHTS = st.one_of(st.integers(1, 50), st.floats(0.01, 10))


@given(st.lists(WEIGHTS, min_size=1, max_size=4), st.integers(1, 80), st.integers(0, 5))
def test_proportions_are_exact_and_no_row_comes_twice(weights, total, seed):
    sources = [(made(f"s{i}", 80), weight) for i, weight in enumerate(weights)]
    mixed = mix(sources, total=total, seed=seed)
    assert mixed == mix(sources, total=total, seed=seed) and len(mixed) == total
    assert len({row.where for row in mixed}) == total
    taken = Counter(row.source for row in mixed)
    whole = sum(map(Fraction, weights))
    remainders = []
    for i, weight in enumerate(weights):
        quota = total * Fraction(weight) / whole
        assert abs(taken[f"s{i}"] - quota) < 1
        remainders.append((quota - int(quota), taken[f"s{i}"] - int(quota)))
    rounded_up = [remainder for remainder, up in remainders if up]
    rounded_down = [remainder for remainder, up in remainders if not up]
    assert min(rounded_up, default=1) >= max(rounded_down, default=0)  # the largest remainders, and only those


@given(st.data(), SIZES, st.integers(0, 5))
def test_without_a_total_nothing_repeats_and_the_smallest_source_is_used_up(data, sizes, seed):
    weights = data.draw(st.lists(st.integers(1, 5), min_size=len(sizes), max_size=len(sizes)))
    sources = [(made(f"s{i}", size), weight) for i, (size, weight) in enumerate(zip(sizes, weights))]
    mixed = mix(sources, seed=seed)
    assert len({row.where for row in mixed}) == len(mixed) >= 1
    most = min(size * sum(weights) // weight for size, weight in zip(sizes, weights))
    assert len(mixed) == most


def test_mix_by_hand():
    sources = [(made("a", 10), 3), (made("b", 10), 1)]
    mixed = mix(sources, total=8, seed=1)
    assert Counter(row.source for row in mixed) == {"a": 6, "b": 2}
    assert mixed != mix(sources, total=8, seed=2)
    assert [row.source for row in mixed] != sorted(row.source for row in mixed)  # shuffled together
    assert Counter(
        row.source for row in mix([(made("a", 9), 1), (made("b", 9), 1), (made("c", 9), 1)], total=8, seed=0)
    ) == {
        "a": 3,
        "b": 3,
        "c": 2,
    }


def test_mix_does_not_depend_on_the_hash_seed():
    code = (
        "from deftune.data.rows import Row; from deftune.data.mixing import mix_places, split_places\n"
        "rows = [Row(({'role': 'user', 'content': str(i)},), None, str(i), 's') for i in range(9)]\n"
        "mixed, held = mix_places([(rows, 2), (rows, 1)], total=9, seed=3), split_places(rows, 3, 0)[1]\n"
        "print([rows[place].where for _, place in mixed], [rows[place].where for place in held])"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1] == "['7', '0', '8', '5', '6', '4', '1', '1', '2'] ['1', '6', '8']\n"


@pytest.mark.parametrize(
    ("sources", "keywords", "expected"),
    [
        ([], {}, "mix: no sources; give at least one (rows, weight)"),
        ([([], 1)], {}, "mix: source 0 has no rows; leave it out"),
        ([(made("a", 2), 0)], {}, "mix: source 0 (a) has weight 0; a weight is a number above 0"),
        ([(made("a", 2), 1), (made("b", 2), float("nan"))], {}, "mix: source 1 (b) has weight nan"),
        ([(made("a", 2), float("inf"))], {}, "mix: source 0 (a) has weight inf"),
        ([(made("a", 2), 1)], {"total": 0}, "mix: total is at least 1, got 0"),
        (
            [(made("a", 9), 1), (made("b", 2), 1)],
            {"total": 6},
            "mix: source 1 (b) has 2 rows and 3 of 6 are needed; lower data.total or the source's weight",
        ),
    ],
)
def test_mixes_that_cannot_be(sources, keywords, expected):
    with pytest.raises(ValueError, match=re.escape(expected)):
        mix(sources, seed=0, **keywords)


# Splitting -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 12), min_size=2, max_size=60), st.data(), st.integers(0, 3))
def test_no_prompt_is_on_both_sides(prompts, data, seed):
    rows = [row(f"{'  ' * (i % 2)}question {prompt}", answer=str(i)) for i, prompt in enumerate(prompts)]
    holdout = data.draw(st.one_of(st.integers(1, len(rows) - 1), st.floats(0.05, 0.95)))
    try:
        train, held = split_rows(rows, holdout, seed)
    except ValueError as error:
        assert "no rows are" in str(error)
        return
    assert not {prompt_of(r) for r in train} & {prompt_of(r) for r in held}
    assert Counter(r.messages[-1]["content"] for r in train + held) == Counter(str(i) for i in range(len(rows)))
    if isinstance(holdout, int):
        assert holdout <= len(held) < holdout + max(Counter(prompts).values())


def test_sides_follow_from_content_and_seed():
    rows = made("s", 2000)
    train, held = split_rows(rows, 0.1, 0)
    assert 150 < len(held) < 250
    assert [r.where for r in train] == [r.where for r in rows if r in train]  # in the rows' order
    _, more = split_rows(
        [*made("t", 5000)[2000:], *reversed(rows)], 0.1, 0
    )  # new rows and another order move no old row
    assert {r.where for r in more if r.source == "s"} == {r.where for r in held}
    assert split_rows(rows, 0.1, 1)[1] != held
    assert len(split_rows(rows, 37, 0)[1]) == 37


def test_what_a_prompt_is():
    assert prompt_of(row(" a\n b ")) == prompt_of(row("a b", answer="other")) != prompt_of(row("ab"))
    assert prompt_of(row("a", system="s")) != prompt_of(row("a"))
    hello = ({"role": "assistant", "content": "Hello."},)
    greeted = [Row((*hello, *row(text).messages), None, text, "s") for text in ("a", "b")]
    assert prompt_of(greeted[0]) != prompt_of(greeted[1])
    alone = [Row(({"role": "assistant", "content": text},), None, text, "s") for text in ("a", "b")]
    assert prompt_of(alone[0]) != prompt_of(alone[1])


@pytest.mark.parametrize("holdout", [0, 3, -1, 0.0, 1.0, 1.5, float("nan")])
def test_holdouts_that_cannot_be(holdout):
    bound = "between 0 and 1" if isinstance(holdout, float) else "from 1 to 2"
    with pytest.raises(ValueError, match=f"holdout: a number of rows or a fraction, {bound} for 3 rows, got {holdout}"):
        split_rows(made("s", 3), holdout, 0)


def test_a_side_without_rows_is_an_error():
    with pytest.raises(
        ValueError, match="holdout: no rows are left to train on of 3 with holdout=1, seed=0; change them"
    ):
        split_rows([row("same")] * 3, 1, 0)
    with pytest.raises(ValueError, match="holdout: no rows are held out of 2 with holdout=1e-06"):
        split_rows(made("s", 2), 1e-6, 0)


# Generators ----------------------------------------------------------------------------------------------------------


def test_a_generator_is_a_source_like_any_other():
    pytest.importorskip("reasoning_gym")
    rows = read_rows("generated:word_sorting", limit=3, seed=7)
    assert rows == generate("word_sorting", size=3, seed=7) != read_rows("generated:word_sorting", limit=3)
    assert read_rows("generated:word_sorting", split="test", limit=2) == generate("word_sorting", split="test", size=2)
    fields = list(read_fields("generated:word_sorting", limit=2))
    assert [where for where, _ in fields] == [row.where for row in read_rows("generated:word_sorting", limit=2)]
    with pytest.raises(ValueError, match="--format: generated:word_sorting is generated and has none"):
        read_rows("generated:word_sorting", format="alpaca")
    with pytest.raises(ValueError, match=r"'word_sortin'\. Did you mean 'word_sorting'"):
        read_rows("generated:word_sortin")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a system without pipes in folders")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    """Opened twice, it would lose its first rows, or wait for ever for a second writer."""
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(RowError, match=r"rows.jsonl: is a pipe or a device \(.*\); write the rows to a file"):
        read_rows(tmp_path / "rows.jsonl")
