"""Rows encoded by several processes: the same as by one, whatever the rows, and nothing left behind."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from small_tokenizer import small_tokenizer

from deftune.artifacts.templates import TEMPLATES
from deftune.data import parallel
from deftune.data.encoding import EncodedRows, Encoder, EncodingError, encode_rows
from deftune.data.examples import IGNORE_INDEX, Encoded, Examples
from deftune.data.parallel import encode_packed
from deftune.data.rows import BadRows, PackedRows, Row, RowError
from deftune.data.sandbox import TemplateLimitError
from waiting import is_dead, wait_for

CHATML = TEMPLATES["chatml"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(parallel, "CHUNK_BYTES", 2000)


def make_rows(number: int, *, bad_at: tuple[int, ...] = ()) -> PackedRows:
    draw = Random(0)

    def row(i: int) -> Row:
        answer = "</s>" if i in bad_at else "The capital is é日 Paris. " * draw.randrange(1, 12)
        turns = ({"role": "user", "content": f"What is the capital of {i}?"}, {"role": "assistant", "content": answer})
        return Row(turns, None, f"a{i % 3}.jsonl:{i}", f"a{i % 3}.jsonl")

    return PackedRows(row(i) for i in range(number))


def content(result: EncodedRows) -> tuple:
    lists = (result.fully_truncated, result.overlong, result.fully_masked, list(result.refused))
    return list(result.examples), lists, result.num_rows, result.num_ended, result.facts()


@pytest.mark.parametrize("options", [{"max_length": 40}, {"max_length": 60, "overlong": "drop"}, {"max_length": 999}])
def test_several_processes_give_what_one_gives(options):
    rows, encoder = make_rows(100, bad_at=(3, 50, 51)), Encoder(small_tokenizer(CHATML), **options)
    bad, bad_too, bad_three = BadRows(skip=True), BadRows(skip=True), BadRows(skip=True)
    expected = encode_rows(rows, encoder, bad=bad)
    done: list[int] = []
    assert content(encode_packed(rows, encoder, bad=bad_too, workers=1)) == content(expected)
    assert content(encode_packed(rows, encoder, bad=bad_three, workers=2, progress=done.append)) == content(expected)
    assert list(bad.rows) == list(bad_too.rows) == list(bad_three.rows) and [row.where for row in bad.rows] == [
        "a0.jsonl:3", "a2.jsonl:50", "a0.jsonl:51",
    ]  # fmt: skip
    assert done == sorted(done) and done[-1] == 100 and len(done) > 4


def test_the_first_bad_row_is_the_error():
    rows, encoder = make_rows(100, bad_at=(60, 61, 99)), Encoder(small_tokenizer(CHATML), max_length=999)
    with pytest.raises(EncodingError, match=r"^a0.jsonl:60: the text spells"):
        encode_packed(rows, encoder, bad=BadRows(), workers=2)
    with pytest.raises(ValueError, match="no row has a supervised token left"):
        encode_packed(make_rows(30), Encoder(small_tokenizer(CHATML), max_length=5), bad=BadRows(), workers=2)


def test_a_hostile_template_is_stopped_in_a_process_too():
    encoder = Encoder(small_tokenizer("{{ 'a' * 3000000000 }}"), max_length=9)
    with pytest.raises(TemplateLimitError, match="the chat template was stopped"):
        encode_packed(make_rows(40), encoder, bad=BadRows(skip=True), workers=2)


def test_the_processes_have_none_of_our_files_and_are_gone_afterwards(tmp_path, monkeypatch):
    """A run's lock above all: a process that lives on must not hold it."""
    started: list[subprocess.Popen[bytes]] = []
    opened: list[list[str]] = []
    popen = subprocess.Popen

    def start(*args, **options):
        started.append(popen(*args, **options))
        return started[-1]

    def look(_: int) -> None:
        for process in started:
            if process.poll() is None:
                names: list[str] = []
                with suppress(OSError):  # the process ends
                    for link in Path(f"/proc/{process.pid}/fd").iterdir():
                        with suppress(FileNotFoundError):  # the process imports, and has closed this file again
                            names.append(os.readlink(link))
                opened.append(names)

    monkeypatch.setattr(parallel.subprocess, "Popen", start)
    with (tmp_path / ".lock").open("w") as lock:
        os.set_inheritable(lock.fileno(), True)
        encode_packed(
            make_rows(60), Encoder(small_tokenizer(CHATML), max_length=99), bad=BadRows(), workers=2, progress=look
        )
    assert len(started) == 2 and opened and not any(str(tmp_path) in name for names in opened for name in names)
    assert all(process.poll() is not None for process in started)


def test_a_process_that_is_killed_is_one_line(monkeypatch):
    monkeypatch.setattr(parallel, "_START", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    message = r"^a process that encodes rows was killed by signal 9; .*DEFTUNE_DATA_WORKERS=1"
    with pytest.raises(ValueError, match=message):
        encode_packed(make_rows(60), Encoder(small_tokenizer(CHATML), max_length=99), bad=BadRows(), workers=2)


def test_a_process_that_dies_before_it_is_written_to_is_one_line(monkeypatch):
    """The pipe to it is broken by then."""
    monkeypatch.setattr(parallel, "_START", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    start = parallel.subprocess.Popen

    def started_and_dead(*args, **options):
        process = start(*args, **options)
        process.wait()
        return process

    monkeypatch.setattr(parallel.subprocess, "Popen", started_and_dead)
    with pytest.raises(ValueError, match=r"^a process that encodes rows was killed by signal 9"):
        encode_packed(make_rows(60), Encoder(small_tokenizer(CHATML), max_length=99), bad=BadRows(), workers=2)


def test_processes_end_with_their_parent(tmp_path):
    """The parent is killed while they wait for rows."""
    script = tmp_path / "parent.py"
    encoder = tmp_path / "encoder"
    encoder.write_bytes(pickle.dumps(Encoder(small_tokenizer(CHATML), max_length=99)))
    script.write_text(
        "import pickle, sys, time\n"
        "from deftune.data import parallel\n"
        f"encoder = pickle.load(open({str(encoder)!r}, 'rb'))\n"
        "start = parallel.subprocess.Popen\n"
        "def popen(*a, **k):\n"
        "    p = start(*a, **k); print(p.pid, flush=True); return p\n"
        "parallel.subprocess.Popen = popen\n"
        "with parallel._pool(encoder, False, 2):\n"
        "    print('started', flush=True); time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    lines = [parent.stdout.readline().strip() for _ in range(3)]
    assert lines[2] == "started"
    parent.kill()
    parent.wait()
    wait_for(lambda: all(map(is_dead, lines[:2])), lambda: f"{lines[:2]} outlive their parent")


def test_small_data_and_one_core_start_no_process(monkeypatch):
    monkeypatch.setattr(parallel.subprocess, "Popen", None)
    encode_packed(make_rows(60), Encoder(small_tokenizer(CHATML), max_length=99), bad=BadRows())
    monkeypatch.setattr(parallel, "SMALL_BYTES", 0)
    monkeypatch.setenv("DEFTUNE_DATA_WORKERS", "1")
    encode_packed(make_rows(60), Encoder(small_tokenizer(CHATML), max_length=99), bad=BadRows())
    monkeypatch.setenv("DEFTUNE_DATA_WORKERS", "many")
    with pytest.raises(ValueError, match="DEFTUNE_DATA_WORKERS: a number from 1 to 160, got 'many'"):
        encode_packed(make_rows(60), Encoder(small_tokenizer(CHATML), max_length=99), bad=BadRows())


def test_ranks_that_all_encode_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("DEFTUNE_DATA_WORKERS", raising=False)
    assert [parallel.default_workers(ranks) for ranks in (1, 2, 16)] == [8, 4, 1]


def test_an_encoding_process_loads_neither_torch_nor_transformers():
    check = "import sys, deftune.data.parallel; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# --- what rows and examples are held in


def test_packed_rows_are_the_rows():
    tools = ({"function": {"name": "f", "parameters": {"a": [1, 2.5, None, True]}}},)
    odd = Row(({"role": "user", "content": "é日\ud800\n\0"}, {"role": "assistant", "content": "a"}), tools, "a:1", "a")
    rows = [odd, *make_rows(5)]
    packed = PackedRows(rows)
    assert list(packed) == rows and packed[-1] == rows[-1] and packed[1:3] == rows[1:3] and len(packed) == 6
    assert list(PackedRows.gather((packed, i) for i in (4, 0, 4))) == [rows[4], rows[0], rows[4]]
    assert packed.digest == PackedRows(rows).digest != PackedRows(rows[::-1]).digest


def test_a_value_that_json_cannot_hold_is_a_bad_row():
    call = {"function": {"name": "f", "arguments": {"when": b"\xff"}}}
    row = Row(({"role": "assistant", "content": None, "tool_calls": [call]},), None, "a.parquet[3]", "a.parquet")
    with pytest.raises(RowError, match=r"^a.parquet\[3\]: a value that JSON cannot hold \(.*bytes"):
        PackedRows([row])
    bad = BadRows(skip=True)
    assert len(PackedRows([row, *make_rows(1)], bad)) == 1 and bad.rows[0].where == "a.parquet[3]"


def test_examples_are_what_was_appended(tmp_path):
    one = Encoded([1, 2, 3], [IGNORE_INDEX, 2, IGNORE_INDEX], "é.jsonl:1", "é.jsonl", truncated=4, straddled=1)
    two = Encoded([7], [7], "b.jsonl:2", "b.jsonl")
    examples = Examples([one, two])
    assert list(examples) == [one, two] and examples[-1] == two and examples[:1] == [one]
    more = Examples([two])
    more.extend(examples)
    assert list(more) == [two, one, two] and more.sources == ["b.jsonl", "é.jsonl"]
    more.append(one)
    assert list(more)[3] == one and more.sizes == [1, 3, 1, 3]
    more.save(tmp_path)
    again = Examples.open(tmp_path, more.sources)
    again.append(two)
    assert list(again) == [*more, two]
    assert (more.num_tokens, more.num_supervised, more.num_truncated, more.num_straddled) == (8, 4, 2, 2)
    assert more.first_above(8) is None and more.first_above(7) == (7, "b.jsonl:2")
    assert more.first_above(3) == (7, "b.jsonl:2") and examples.first_above(2) == (2, "é.jsonl:1")
    with pytest.raises(IndexError):
        _ = examples[2]
    with pytest.raises(ValueError, match="a label is neither its token"):
        examples.append(Encoded([1], [2], "a:1", "a"))


def test_the_ignored_label_is_the_objectives():
    from deftune.objectives import IGNORE_INDEX as objectives_ignore

    assert IGNORE_INDEX == objectives_ignore


def test_processes_start_side_by_side(monkeypatch):
    """None is sent the encoder, which it reads once its imports are done, before all of them have been started."""
    events = []

    class Process:
        stdin = SimpleNamespace(write=lambda _: events.append("written"), close=lambda: None)
        stdout = None

        def __init__(self, *_, **__):
            events.append("started")

        def kill(self) -> None: ...
        def wait(self) -> None: ...

    monkeypatch.setattr(parallel.subprocess, "Popen", Process)
    with parallel._pool(Encoder(small_tokenizer(CHATML), max_length=99), False, 3):
        assert events == ["started"] * 3 + ["written"] * 3
