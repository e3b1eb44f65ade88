"""A second start takes the encoded rows without reading the sources, and reports the same; any change is noticed."""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import shutil
import threading
from pathlib import Path

import pytest
import transformers

from deftune.artifacts import folders
from deftune.artifacts.runs import Run
from deftune.artifacts.templates import TEMPLATES
from deftune.data import cache as encoded_cache
from deftune.data.rows import RowError
from deftune.selftest import tiny
from deftune.training import preparation
from deftune.training.data_record import facts, fingerprint, record_data
from deftune.training.preparation import prepare, sources_key
from waiting import HANG_SECONDS


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("DEFTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DEFTUNE_DATA_CACHE_GB", "1")
    return tmp_path / "cache"


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """The sources that were read, one entry for each time."""
    found: list[str] = []
    own = preparation.iterate_rows

    def read(place, **options):
        found.append(place)
        return own(place, **options)

    monkeypatch.setattr(preparation, "iterate_rows", read)
    return found


@pytest.fixture
def data(tmp_path) -> Path:
    return tiny.save_conversations(tmp_path / "rows.jsonl", 40)


@pytest.fixture
def start(make_config, tmp_path, data):
    """``start({"data.packing": True})`` prepares the run: what it is made of, and what was said."""

    def begin(changes: dict | None = None):
        said: list[str] = []
        found = {"data.train": [{"path": str(data)}], **(changes or {})}
        return prepare(make_config(tmp_path / "run", found), said.append), said

    return begin


def test_a_second_start_reads_no_row_and_reports_the_same(start, tmp_path, data, monkeypatch):
    refused = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a <|im_end|> b"}]}
    with data.open("a") as file:
        file.write("{oops\n" + json.dumps(refused) + "\n")
    other = tiny.save_conversations(tmp_path / "other.jsonl", 20)
    changes = {
        "data.train": [{"path": str(data), "weight": 2.0}, {"path": str(other), "weight": 1.0, "exchange": 0.5}],
        "data.eval": [{"path": str(other), "limit": 5}],
        "data.skip_bad_rows": True,
        "data.packing": True,
        "data.max_length": 24,
    }
    first, said = start(changes)
    record_data(first, Run(tmp_path))
    written = [(tmp_path / name).read_bytes() for name in ("data.json", "bad_rows.jsonl")]
    monkeypatch.setattr(preparation, "iterate_rows", lambda *_, **__: pytest.fail("read"))
    monkeypatch.setattr(preparation, "encode_packed", lambda *_, **__: pytest.fail("encoded"))
    second, again = start(changes)
    assert facts(second) == facts(first) and fingerprint(second) == fingerprint(first)
    assert list(second.bad.rows) == list(first.bad.rows) and len(first.bad.rows) == 2
    assert any("WARNING" in line for line in facts(second)) and any("dropped" in line for line in facts(second))
    told = [line for line in said if "encoded" not in line]
    assert any("have the answer of another row" in line for line in told) and again[: len(told)] == told
    assert sum("rows were encoded before: taken from" in line for line in again) == 2 == len(again) - len(told)
    record_data(second, Run(tmp_path))
    assert written == [(tmp_path / name).read_bytes() for name in ("data.json", "bad_rows.jsonl")]
    assert list(second.sequences) == list(first.sequences) and list(second.eval.examples) == list(first.eval.examples)


def test_a_changed_byte_is_read(start, reads, data):
    before, _ = start()
    data.write_bytes(data.read_bytes().replace(b"What", b"Whot", 1))
    after, _ = start()
    assert len(reads) == 2 and fingerprint(after) != fingerprint(before)


@pytest.mark.parametrize("how", ["in place", "renamed", "mapped"])
def test_other_bytes_under_the_same_name_size_and_time_are_read(start, reads, data, cache, how):
    found, text = data.stat(), data.read_bytes()
    before, _ = start()
    changed = text.replace(b"What", b"Whot", 1)
    if how == "in place":
        data.write_bytes(changed)
    elif how == "renamed":
        data.with_suffix(".new").write_bytes(changed)
        os.replace(data.with_suffix(".new"), data)
    else:  # such a write may leave every time of the file as it was
        with data.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            mapped[:] = changed
    os.utime(data, ns=(found.st_atime_ns, found.st_mtime_ns))
    after, _ = start()
    assert len(reads) == 2 and fingerprint(after) != fingerprint(before)
    assert [path.name for path in cache.iterdir()] == ["encoded"]  # no memory of files


def test_a_touched_file_is_not_read(start, reads, data):
    start()
    os.utime(data, (1, 1))
    start()
    assert len(reads) == 1


@pytest.mark.parametrize(
    "source",
    [{"format": "messages"}, {"limit": 30}, {"exchange": 0.5}, {"exchange": 0.5, "exchanged_only": True},
     {"weight": 2.0}, {"fields": {"messages": "messages"}}],
)  # fmt: skip
def test_another_option_of_a_source_is_read(start, reads, data, source):
    start()
    start({"data.train": [{"path": str(data), **source}]})
    assert len(reads) == 2


def test_other_options_of_the_rows_are_read(start, reads, data):
    changes = [
        {"data.skip_bad_rows": True}, {"data.holdout": 0.25}, {"data.holdout": 0.25, "train.seed": 8},
        {"data.holdout": 0.3}, {"data.total": 20}, {"data.train": [{"path": str(data)}, {"path": str(data)}]},
        {"data.eval": [{"path": str(data)}]},
    ]  # fmt: skip
    start()
    for change in changes:
        before = len(reads)
        start(change)
        assert len(reads) > before, change
    before = len(reads)
    for change in [{}, *changes]:
        start(change)
    assert len(reads) == before
    start({"train.seed": 9, "data.packing": True, "train.max_steps": 1})  # none of them changes a row
    assert len(reads) == before


def test_another_encoder_encodes_again(start, reads, tmp_path, tiny_model):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    first, _ = start({"model.name": str(folder)})
    tokenizer.add_tokens(["capital", "What is"])
    tokenizer.save_pretrained(folder)
    tiny.make_model(tokenizer).save_pretrained(folder)
    second, _ = start({"model.name": str(folder)})
    assert len(reads) == 2 and fingerprint(second) != fingerprint(first)
    for number, change in enumerate([{"data.max_length": 30}, {"data.template": "plain"}, {"data.mask": "all"}], 3):
        start({"model.name": str(folder), **change})
        assert len(reads) == number


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
@pytest.mark.parametrize("name", ["reading.json", "input_ids.bin", "rows.json"])
def test_a_damaged_entry_is_made_again(start, reads, cache, name, damage):
    first, _ = start()
    before = list(first.sequences)
    (path,) = (cache / "encoded").glob(f"*/{name}")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink() if damage == "gone" else path.write_bytes(content if damage == "flip" else content[:-5])
    second, said = start()
    assert len(reads) == 2 and list(second.sequences) == before
    assert sum("damaged: " in line for line in said) == 1
    start()
    assert len(reads) == 2


def test_a_file_that_changes_while_it_is_read_is_not_remembered(start, data, monkeypatch):
    own, number = preparation.iterate_rows, 0

    def read(place, **options):
        nonlocal number
        number += 1
        yield from own(place, **options)
        with data.open("a") as file:
            file.write(data.read_text().splitlines()[0] + "\n")

    monkeypatch.setattr(preparation, "iterate_rows", read)
    first, _ = start()
    monkeypatch.setattr(preparation, "iterate_rows", own)
    second, _ = start()
    assert number == 1 and (len(first.train.examples), len(second.train.examples)) == (40, 41)


def test_files_of_a_folder(start, reads, tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in ("train-0.jsonl", "train-1.jsonl"):
        tiny.save_conversations(folder / name, 10)
    source = {"data.train": [{"path": str(folder), "split": "train"}]}
    for _ in range(2):
        start(source)
    assert len(reads) == 1
    (folder / "train-1.jsonl").rename(folder / "train-2.jsonl")  # the rows have other places
    start(source)
    tiny.save_conversations(folder / "train-3.jsonl", 10)
    assert len(start(source)[0].train.examples) == 30 and len(reads) == 3
    (folder / "README.md").write_text("not data")
    start(source)
    assert len(reads) == 3


def test_a_few_rows_of_a_large_file_are_read_without_a_look_at_the_rest(start, reads, data, monkeypatch):
    monkeypatch.setattr(encoded_cache, "ROW_BYTES", data.stat().st_size // 10)
    for limit, expected in ((11, 1), (9, 3)):
        for _ in range(2):
            start({"data.train": [{"path": str(data), "limit": limit}]})
        assert len(reads) == expected


def test_generated_rows_are_made_anew(start, reads, cache):
    pytest.importorskip("reasoning_gym")
    for _ in range(2):
        start({"data.train": [{"generate": "word_sorting", "limit": 5}], "data.max_length": 2048})
    assert len(reads) == 2 and not list((cache / "encoded").glob("*/reading.json"))


def test_without_a_cache_nothing_is_remembered(start, reads, cache, monkeypatch):
    monkeypatch.setenv("DEFTUNE_DATA_CACHE_GB", "0")
    for _ in range(2):
        start()
    assert len(reads) == 2 and not cache.exists()


def test_a_template_that_writes_the_date_is_read_every_time(start, reads, tmp_path):
    template = tmp_path / "dated.jinja"
    template.write_text("{{ strftime_now('%Y') }}" + TEMPLATES["chatml"])
    for _ in range(2):
        start({"data.template": str(template)})
    assert len(reads) == 2


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(start, reads, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DEFTUNE_CACHE", str(tmp_path / "file"))
    for _ in range(2):
        assert len(start()[0].train.examples) == 40
    assert len(reads) == 2


def test_wrong_data_is_named_as_ever(start, data, tmp_path):
    with pytest.raises(RowError, match="no such file or folder"):
        start({"data.train": [{"path": str(tmp_path / "absent.jsonl")}]})
    data.write_text("{oops\n")
    for _ in range(2):
        with pytest.raises(RowError, match="not JSON"):
            start()


def test_of_two_threads_one_reads(start, reads, monkeypatch):
    """Also ranks of a machine: the second waits for the first, and reads nothing."""
    begun, go_on = threading.Event(), threading.Event()
    own = preparation.iterate_rows

    def read(place, **options):
        begun.set()
        go_on.wait()
        return own(place, **options)

    monkeypatch.setattr(preparation, "iterate_rows", read)
    found = []
    threads = [threading.Thread(target=lambda: found.append(start()[0])) for _ in range(2)]
    for thread in threads:
        thread.start()
    begun.wait()
    while not list((Path(os.environ["DEFTUNE_CACHE"]) / "encoded").glob(".lock-reading-*")):
        pass
    go_on.set()
    for thread in threads:
        thread.join()
    assert len(reads) == 1 and fingerprint(found[0]) == fingerprint(found[1])


def _prepare_in_process(content: dict, results) -> None:
    from deftune.artifacts.config import RunConfig

    reads = 0
    own = preparation.iterate_rows

    def read(place, **options):
        nonlocal reads
        reads += 1
        return own(place, **options)

    preparation.iterate_rows = read
    found = fingerprint(prepare(RunConfig.model_validate(content), lambda _: None))
    results.put((found, reads))


def test_of_two_processes_one_reads(make_config, tmp_path, data):
    config = make_config(tmp_path / "run", {"data.train": [{"path": str(data)}], "data.packing": True})
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    content = json.loads(config.model_dump_json())
    processes = [context.Process(target=_prepare_in_process, args=(content, results)) for _ in range(2)]
    for process in processes:
        process.start()
    found = [results.get(timeout=HANG_SECONDS) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(reads for _, reads in found) == [0, 1] and len({key for key, _ in found}) == 1


def test_the_lock_of_a_killed_reader_stops_nobody(start, reads, cache, make_config, tmp_path, data):
    config = make_config(tmp_path / "run", {"data.train": [{"path": str(data)}]})
    key = sources_key(config)
    (cache / "encoded").mkdir(parents=True)
    (cache / "encoded" / f".lock-reading-{key[:2]}").write_text("")
    start()
    assert len(reads) == 1 and folders.verify(cache / "encoded" / key)
