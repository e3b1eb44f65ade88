"""The cache of encoded rows: the same examples, found by content, verified, bounded, and never in the way."""

from __future__ import annotations

import errno
import json
import os
import threading
import time

import pytest
import transformers

from deftune.artifacts.templates import TEMPLATES
from deftune.data import cache as encoded_cache
from deftune.data.cache import encode_cached
from deftune.data.encoding import Encoder, EncodingError, encode_rows
from deftune.data.examples import Examples
from deftune.data.rows import BadRows, PackedRows, Row


@pytest.fixture(autouse=True)
def turned_on(monkeypatch):
    monkeypatch.delenv("DEFTUNE_DATA_CACHE_GB")


@pytest.fixture
def tokenizer(tiny_model):
    return transformers.AutoTokenizer.from_pretrained(tiny_model)


def make_rows(number: int, *, answer: str = "is", start: int = 0) -> PackedRows:
    return PackedRows(
        Row(
            ({"role": "user", "content": f"What is {i}?"}, {"role": "assistant", "content": f"{answer} {i}"}),
            None,
            f"a.jsonl:{i}",
            "a.jsonl",
        )
        for i in range(start, start + number)
    )


class Cache:
    """The cache of a folder, and how often rows had to be encoded."""

    def __init__(self, folder):
        self.folder, self.encoded, self.notices = folder, 0, []

    def __call__(self, rows, encoder, bad=None):
        bad = BadRows() if bad is None else bad

        def encode():
            self.encoded += 1
            return encode_rows(rows, encoder, bad=bad)

        return encode_cached(rows, encoder, self.folder, bad=bad, encode=encode, notice=self.notices.append)


def test_a_second_time_the_rows_are_read(tmp_path, tokenizer):
    cache, encoder = Cache(tmp_path), Encoder(tokenizer, max_length=24)
    first, second = cache(make_rows(9), encoder), cache(make_rows(9), encoder)
    assert cache.encoded == 1 and list(second.examples) == list(first.examples) and second.facts() == first.facts()
    assert "9 rows were encoded before: taken from" in cache.notices[-1]
    assert sorted(path.suffix for path in tmp_path.rglob("*") if path.is_file() and path.parent != tmp_path) == [
        ".bin", ".bin", ".bin", ".bin", ".json", ".json", ".jsonl",
    ]  # fmt: skip


def test_whatever_the_tokens_depend_on_makes_another_entry(tmp_path, tokenizer, monkeypatch):
    cache = Cache(tmp_path)
    changed = transformers.AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    changed.add_tokens(["capital"])
    encoders = [
        Encoder(tokenizer, max_length=99),
        Encoder(tokenizer, max_length=98),
        Encoder(tokenizer, max_length=99, overlong="drop"),
        Encoder(tokenizer, max_length=99, mask="all"),
        Encoder(tokenizer, max_length=99, template="plain"),
        Encoder(tokenizer, max_length=99, template_options={"enable_thinking": False}),
        Encoder(changed, max_length=99),
    ]
    for encoder in encoders:
        cache(make_rows(3), encoder)
    cache(make_rows(4), encoders[0])
    cache(make_rows(3, answer="was"), encoders[0])
    cache(make_rows(3, start=1), encoders[0])
    assert cache.encoded == len(encoders) + 3
    monkeypatch.setattr(encoded_cache, "code_digest", lambda: "code of another version")
    cache(make_rows(3), Encoder(tokenizer, max_length=99))
    assert cache.encoded == len(encoders) + 4


def test_refused_rows_are_kept_with_their_reasons(tmp_path, tokenizer):
    cache, encoder = Cache(tmp_path), Encoder(tokenizer, max_length=99)
    rows = PackedRows([*make_rows(3), *make_rows(1, answer="<|im_end|>", start=7)])
    first, second = BadRows(skip=True), BadRows(skip=True)
    cache(rows, encoder, first)
    cache(rows, encoder, second)
    assert cache.encoded == 1 and list(first.rows) == list(second.rows) and second.rows[0].where == "a.jsonl:7"
    assert json.loads(second.rows[0].raw)["messages"][1]["content"] == "<|im_end|> 7"
    with pytest.raises(EncodingError, match=r"^a.jsonl:7: the text spells"):
        cache(rows, encoder)


@pytest.mark.parametrize("name", ["input_ids.bin", "rows.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_damaged_entry_is_made_again(tmp_path, tokenizer, name, damage):
    cache, encoder = Cache(tmp_path), Encoder(tokenizer, max_length=99)
    first = list(cache(make_rows(5), encoder).examples)  # the result itself is a map of the file
    (path,) = tmp_path.glob(f"*/{name}")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink() if damage == "gone" else path.write_bytes(content if damage == "flip" else content[:-5])
    again = cache(make_rows(5), encoder)
    assert cache.encoded == 2 and list(again.examples) == first
    assert any("the cached rows are damaged" in text for text in cache.notices)
    cache(make_rows(5), encoder)
    assert cache.encoded == 2


def test_the_oldest_entries_make_room(tmp_path, tokenizer, monkeypatch):
    cache, encoder = Cache(tmp_path), Encoder(tokenizer, max_length=99)
    cache(make_rows(5), encoder)
    size = sum(path.stat().st_size for path in tmp_path.glob("*/*"))
    monkeypatch.setenv("DEFTUNE_DATA_CACHE_GB", str(2.5 * size / 1e9))
    cache(make_rows(5, start=10), encoder)
    for age, entry in enumerate(sorted(tmp_path.glob("*/manifest.json"), key=lambda path: path.stat().st_mtime_ns)):
        os.utime(entry, (1000 + age, 1000 + age))
    cache(make_rows(5), encoder)  # used again: no longer the oldest
    cache(make_rows(5, start=20), encoder)
    assert cache.encoded == 3 and len(list(tmp_path.glob("*/manifest.json"))) == 2
    cache(make_rows(5), encoder)
    assert cache.encoded == 3
    cache(make_rows(5, start=10), encoder)
    assert cache.encoded == 4


def test_it_can_be_turned_off(tmp_path, tokenizer, monkeypatch):
    cache, encoder = Cache(tmp_path / "cache"), Encoder(tokenizer, max_length=99)
    monkeypatch.setenv("DEFTUNE_DATA_CACHE_GB", "0")
    cache(make_rows(3), encoder)
    cache(make_rows(3), encoder)
    assert cache.encoded == 2 and not (tmp_path / "cache").exists()
    monkeypatch.setenv("DEFTUNE_DATA_CACHE_GB", "lots")
    with pytest.raises(ValueError, match="DEFTUNE_DATA_CACHE_GB: a number of gigabytes, 0 for no cache, got 'lots'"):
        cache(make_rows(3), encoder)


def test_a_template_that_writes_the_date_is_not_cached(tmp_path, tokenizer):
    tokenizer.chat_template = "{{ strftime_now('%Y') }}" + TEMPLATES["chatml"]
    cache, encoder = Cache(tmp_path / "cache"), Encoder(tokenizer, max_length=99)
    cache(make_rows(3), encoder)
    assert cache.encoded == 1 and not (tmp_path / "cache").exists()


def test_a_full_disk_costs_the_entry_and_not_the_run(tmp_path, tokenizer, monkeypatch):

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Examples, "save", fail)
    cache, encoder = Cache(tmp_path), Encoder(tokenizer, max_length=99)
    assert len(cache(make_rows(3), encoder).examples) == 3
    assert "the encoded rows could not be kept (No space left on device)" in cache.notices[-1]
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_folder_that_cannot_be_made_costs_the_cache_and_not_the_run(tmp_path, tokenizer):
    (tmp_path / "file").write_text("")
    cache, encoder = Cache(tmp_path / "file" / "cache"), Encoder(tokenizer, max_length=99)
    assert len(cache(make_rows(3), encoder).examples) == 3 and cache.encoded == 1
    assert "encoded rows cannot be kept in" in cache.notices[-1]


def test_an_error_after_the_encoding_does_not_encode_again(tmp_path, tokenizer, monkeypatch):
    """A second encoding would also list the refused rows twice."""

    def fail(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(tmp_path))

    monkeypatch.setattr(encoded_cache, "_make_room", fail)
    cache, bad = Cache(tmp_path), BadRows(skip=True)
    rows = PackedRows([*make_rows(3), *make_rows(1, answer="<|im_end|>", start=7)])
    assert len(cache(rows, Encoder(tokenizer, max_length=99), bad).examples) == 3
    assert cache.encoded == 1 and len(bad.rows) == 1 and "encoded rows cannot be kept in" in cache.notices[-1]


def test_two_that_want_the_same_rows_encode_them_once(tmp_path, tokenizer):
    """Ranks of a machine, or cells of a comparison."""
    rows, encoder = make_rows(5), Encoder(tokenizer, max_length=99)
    begun, go_on = threading.Event(), threading.Event()
    other = Cache(tmp_path)

    def encode():
        begun.set()
        go_on.wait()
        return encode_rows(rows, encoder)

    first = threading.Thread(
        target=encode_cached, args=(rows, encoder, tmp_path), kwargs={"bad": BadRows(), "encode": encode}
    )
    first.start()
    begun.wait()
    second = threading.Thread(target=other, args=(rows, encoder))
    second.start()
    while not other.notices:
        time.sleep(0.01)
    go_on.set()
    first.join()
    second.join()
    assert other.encoded == 0 and other.notices[0] == "another process is encoding rows: waiting for it"
    assert encoded_cache.MANIFEST in {path.name for path in tmp_path.glob("*/*")}


def test_what_killed_processes_left_is_removed(tmp_path, tokenizer, monkeypatch):
    """A staging folder is named by the process that writes it, which no later process has for a name."""
    cache, encoder = Cache(tmp_path), Encoder(tokenizer, max_length=99)
    old, new, half = tmp_path / f".{'a' * 64}-123", tmp_path / f".{'b' * 64}-123", tmp_path / ("c" * 64)
    for folder in (old, new, half):
        folder.mkdir()
        (folder / "input_ids.bin").write_bytes(b"x" * 10**5)
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    monkeypatch.setenv("DEFTUNE_DATA_CACHE_GB", str(5e-5))  # half an entry, whose removal was interrupted, is over it
    cache(make_rows(3), encoder)
    assert not old.exists() and new.exists() and not half.exists()
    assert len(list(tmp_path.glob("*/manifest.json"))) == 1
