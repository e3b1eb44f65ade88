"""Rows and tokens in files: the same result as in memory, and what is in memory does not grow with the text."""

import errno
import json
import os
import pickle
import tracemalloc

import numpy as np
import pytest

import tiny
from deftune.data import spool as spools
from deftune.data.cache import encode_cached
from deftune.data.encoding import Encoder
from deftune.data.examples import Encoded, Examples
from deftune.data.packing import pack
from deftune.data.parallel import encode_packed
from deftune.data.rows import BadRow, BadRows, Fault, PackedRows, Row
from deftune.data.spool import Spool


def test_a_long_read_is_whole(on_disk, monkeypatch):
    """Linux returns 2 GiB of a file at most; here 5 bytes."""
    spool, pread = Spool(), os.pread
    spool.append(bytes(range(100)))
    monkeypatch.setattr("deftune.data.spool.os.pread", lambda file, size, start: pread(file, min(size, 5), start))
    assert spool.read(3, 90) == bytes(range(3, 93))
    again = pickle.loads(pickle.dumps(spool))
    assert again.num_bytes == 100 and again.read(0, 100) == bytes(range(100))


@pytest.fixture
def on_disk(monkeypatch, tmp_path):
    """Every spool is a file after its first bytes."""
    monkeypatch.setattr(spools, "MEMORY_BYTES", 16)
    monkeypatch.setenv("DEFTUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_rows(number: int, spool: Spool | None = None, source: str = "a.jsonl") -> PackedRows:
    def row(i: int) -> Row:
        messages = ({"role": "user", "content": f"What is {i}?"}, {"role": "assistant", "content": "is " * i + "é漢"})
        return Row(messages, None, f"{source}:{i}", source)

    return PackedRows((row(i) for i in range(number)), spool=spool)


def content(result) -> list[Encoded]:
    return list(result.examples)


def test_a_spool_reads_what_was_appended(on_disk):
    parts = [bytes([65 + i]) * (3 * i) for i in range(12)]
    spool, start = Spool(), 0
    for part in parts:
        spool.append(part)
        assert spool.read(start, len(part)) == part  # also what is in the file's buffer
        start += len(part)
    assert spool.num_bytes == start and spool.view("u1").tobytes() == b"".join(parts)
    assert isinstance(spool.view("u1"), np.memmap)
    assert (on_disk / "spool").is_dir() and not list((on_disk / "spool").iterdir())  # the file has no name


def test_few_bytes_stay_in_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("DEFTUNE_CACHE", str(tmp_path))
    rows = make_rows(20)
    assert len(list(rows)) == 20 and not list(tmp_path.iterdir())


def test_rows_on_disk_are_the_rows(on_disk, monkeypatch):
    rows = make_rows(20)
    monkeypatch.setattr(spools, "MEMORY_BYTES", 2**20)
    expected = make_rows(20)
    assert list(rows) == list(expected) and rows[3:5] == expected[3:5] and rows[-1] == expected[-1]
    assert (rows.digest, rows.texts.num_bytes) == (expected.digest, expected.texts.num_bytes)
    with pytest.raises(IndexError):
        rows[20]


def test_gathered_rows_share_their_text(on_disk):
    spool = Spool()
    one, two = make_rows(5, spool), make_rows(5, spool, "b.jsonl")
    before = spool.num_bytes
    both = PackedRows.gather([(two, 4), (one, 0), (two, 1)])
    assert [row.where for row in both] == ["b.jsonl:4", "a.jsonl:0", "b.jsonl:1"] and spool.num_bytes == before
    apart = PackedRows.gather([(two, 4), (make_rows(5), 0), (two, 1)])  # of another spool: copied
    assert list(apart) == list(both) and apart.digest == both.digest


def test_encoding_and_packing_from_disk(on_disk, monkeypatch):
    encoder = Encoder(tiny.make_tokenizer(), max_length=99)
    found = encode_packed(make_rows(30), encoder, bad=BadRows(), workers=1)
    packs = pack(found.examples, 120)
    assert isinstance(found.examples.columns["input_ids"], np.memmap)
    monkeypatch.setattr(spools, "MEMORY_BYTES", 2**20)
    expected = encode_packed(make_rows(30), encoder, bad=BadRows(), workers=1)
    assert not isinstance(expected.examples.columns["input_ids"], np.memmap)
    assert content(found) == content(expected) and found.facts() == expected.facts()
    assert list(packs) == list(pack(expected.examples, 120))


def test_the_result_is_a_map_of_the_cached_file(on_disk, tmp_path, monkeypatch):
    monkeypatch.setenv("DEFTUNE_DATA_CACHE_GB", "1")
    encoder, rows = Encoder(tiny.make_tokenizer(), max_length=99), make_rows(30)

    def encode():
        return encode_packed(rows, encoder, bad=BadRows(), workers=1)

    first = encode_cached(rows, encoder, tmp_path / "encoded", bad=BadRows(), encode=encode)
    again = encode_cached(rows, encoder, tmp_path / "encoded", bad=BadRows(), encode=lambda: pytest.fail("encoded"))
    assert content(first) == content(again) == content(encode())
    for result in (first, again):
        columns = result.examples.columns
        assert all(str(column.filename).startswith(str(tmp_path / "encoded")) for column in columns.values())


@pytest.mark.parametrize("limit", [2**20, 0])
def test_a_saved_spool_is_opened(on_disk, tmp_path, monkeypatch, limit):
    """Few bytes are read into memory, many are a map of the file."""
    monkeypatch.setattr(spools, "BLOCK_BYTES", 3)
    spool = Spool()
    spool.append(bytes(range(100)))
    spool.save(tmp_path / "bytes")
    monkeypatch.setattr(spools, "MEMORY_BYTES", limit)
    again = Spool.open(tmp_path / "bytes")
    assert (again.num_bytes, again.read(7, 5)) == (100, bytes(range(7, 12)))
    assert again.view("u1").tolist() == list(range(100)) and isinstance(again.view("u1"), np.memmap) == (limit == 0)


def test_bad_rows_are_in_a_file_once_they_are_many(on_disk, tmp_path):
    bad = BadRows(skip=True)
    for i in range(20):
        bad.add(f"a.jsonl:{i}", Fault("not JSON", "é"), "x" * 100)
    assert isinstance(bad.rows._lines.spool.view("u1"), np.memmap) and len(bad.rows) == 20
    assert bad.rows[3] == BadRow("a.jsonl:3", "not JSON", "é", "x" * 100) and bad.rows[-1].where == "a.jsonl:19"
    bad.write(tmp_path / "bad_rows.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "bad_rows.jsonl").read_text().splitlines()]
    assert lines[3] == {"where": "a.jsonl:3", "reason": "not JSON (é)", "raw": "x" * 100} and len(lines) == 20


def test_memory_does_not_grow_with_the_text(monkeypatch, tmp_path):
    """Ten times the text in as many rows: the same memory, of Python and numpy alike."""
    monkeypatch.setattr(spools, "MEMORY_BYTES", 2**12)
    monkeypatch.setenv("DEFTUNE_CACHE", str(tmp_path))

    def held(length: int) -> int:
        tracemalloc.start()
        text = "x" * length
        rows = PackedRows(Row(({"role": "user", "content": text},), None, f"a:{i}", "a") for i in range(400))
        examples = Examples(Encoded([1] * length, [-100] * length, f"a:{i}", "a") for i in range(400))
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert len(rows) == len(examples) == 400
        return size

    small, large = held(1_000), held(10_000)
    assert large < small + 300_000, (small, large)  # in memory the text alone would be 3.6 MB more, the tokens 18 MB


@pytest.mark.parametrize("number", [2, 30])
def test_a_spool_can_be_copied(on_disk, number):
    rows = make_rows(number)
    examples = encode_packed(rows, Encoder(tiny.make_tokenizer(), max_length=99), bad=BadRows(), workers=1).examples
    assert len(examples.columns["rows"]) == number  # the views of the spools are not copied with them
    again = pickle.loads(pickle.dumps((rows, examples)))
    for copied, own in zip(again, (rows, examples)):
        assert list(copied) == list(own)
    again[0].texts.append(b'[[], null, "b", "b"]')
    again[1].append(Encoded([1], [-100], "b", "b"))
    assert (len(again[0]), len(rows)) == (number + 1, number) and list(again[1])[:number] == list(examples)


def test_a_full_disk_is_one_line(on_disk, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(spools.tempfile, "TemporaryFile", full)
    with pytest.raises(ValueError, match=r"data: the rows cannot be kept in .*spool \(No space left on device\); free"):
        make_rows(3)


def test_without_a_cache_folder_the_rows_are_in_the_system_s_temporary_one(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr(spools, "MEMORY_BYTES", 8)
    monkeypatch.setenv("DEFTUNE_CACHE", str(blocked))
    assert [row.where for row in make_rows(3)] == [row.where for row in list(make_rows(3))]
    assert make_rows(3).texts.spool._file is not None
