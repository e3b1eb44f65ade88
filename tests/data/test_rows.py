"""Files read strictly: every kind of bad input is an error with its place, its reason and what to do."""

import gc
import gzip
import json
import os
import pickle
import tracemalloc

import pytest

from deftune.data import files as files_module
from deftune.data.files import parse_line, read_records
from deftune.data.rows import BadRows, Fault, RowError
from deftune.data.sources import read_rows


@pytest.fixture(autouse=True)
def no_collection():
    """Rows nested too deep end at the recursion limit, where an object of an earlier test could not be finalised."""
    gc.disable()
    yield
    gc.enable()


GOOD = b'{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}'


def chat(*turns, **keys):
    return json.dumps({"messages": [dict(role=role, content=content) for role, content in turns], **keys}).encode()


def message(**second):
    """A row whose answer is this message."""
    return json.dumps({"messages": [{"role": "user", "content": "q"}, second]}).encode()


# what is wrong: (name of the file, its second line after a good one, the error after "file:2: ")
BAD_LINES = {
    "not JSON": (b"{oops}", "not JSON (Expecting property name enclosed in double quotes, column 2); fix the row or"),
    "plain text": (b"hello", "not JSON (Expecting value, column 1)"),
    "Python's repr": (b"{'messages': None}", "not JSON (Expecting property name"),
    "trailing comma": (b'{"a": 1,}', "not JSON ("),
    "two values": (GOOD + b" " + GOOD, "not JSON (more than one value, the second at column 94)"),
    "tab in a string": (b'{"a": "\t"}', "not JSON (Invalid control character, column 8)"),
    "bad escape": (b'{"a": "\\x41"}', "not JSON (Invalid \\escape, column 8)"),
    "comment": (b"// no", "not JSON (Expecting value, column 1)"),
    "BOM in the middle": (b"\xef\xbb\xbf" + GOOD, "not JSON (Expecting value, column 1)"),
    "NaN": (b'{"a": NaN}', "NaN is not JSON; write null or a number; fix the row or pass --skip-bad-rows"),
    "Infinity": (b'{"a": Infinity}', "Infinity is not JSON"),
    "-Infinity": (b'{"a": [-Infinity]}', "-Infinity is not JSON"),
    "1e999": (b'{"a": 1e999}', "number out of range (1e999)"),
    "huge integer": (b'{"a": ' + b"9" * 5000 + b"}", "number out of range (an integer of more than 4000 digits)"),
    "duplicate key": (b'{"a": 1, "a": 2}', "duplicate key ('a' occurs more than once in one object)"),
    "duplicate key inside": (b'{"x": [{"role": 1, "role": 2}]}', "duplicate key ('role' occurs"),
    "lone surrogate": (b'{"a": "\\ud83d"}', "lone surrogate (\\ud83d without its other half)"),
    "lone low surrogate in a key": (b'{"\\uDE00": 1}', "lone surrogate (\\ude00 without its other half)"),
    "surrogate as UTF-8": (b'{"a": "\xed\xa0\x80"}', "not UTF-8 (byte 0xed at position 8); save the file as UTF-8"),
    "Latin-1": ('{"a": "café"}'.encode("latin-1"), "not UTF-8 (byte 0xe9 at position 11)"),
    "overlong UTF-8": (b'{"a": "\xc0\x80"}', "not UTF-8 (byte 0xc0"),
    "NUL byte": (b'{"a": "\0"}', "NUL character (byte 8 of the line is 0)"),
    "NUL escape": (b'{"a": "\\u0000"}', "NUL character (\\u0000 in a string)"),
    "NUL padding": (b"\0" * 100, "NUL character (byte 1 of the line is 0)"),
    "deep list": (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "nested too deep (more than 100 levels)"),
    "very deep": (b"[" * 100_000 + b"]" * 100_000, "nested too deep (more than 100 levels)"),
    "list": (b"[1, 2]", 'not an object (a list); a row looks like {"messages": [...]}; fix the row'),
    "string": (b'"text"', "not an object (a string)"),
    "number": (b"7", "not an object (a number)"),
    "null": (b"null", "not an object (null)"),
    "empty object": (b"{}", "no 'messages' (its keys: none)"),
    "another format": (b'{"problem": "p", "solution": "s"}', "no 'messages' (its keys: problem, solution)"),
    "messages null": (b'{"messages": null}', "'messages' is null"),
    "messages text": (b'{"messages": "hi"}', "'messages' is not a list (it is a string)"),
    "messages empty": (b'{"messages": []}', "no messages"),
    "message text": (b'{"messages": ["hi"]}', "message is not an object (message 0 is a string)"),
    "no assistant": (
        chat(("system", "s"), ("user", "q")),
        "no assistant turn (roles: system, user); fix the row or pass --skip-bad-rows",
    ),
    "user last": (
        chat(("user", "q"), ("assistant", "a"), ("user", "q")),
        "last turn is not the assistant's (roles: user, assistant, user)",
    ),
    "unknown role": (
        chat(("human", "q"), ("assistant", "a")),
        "unknown role (message 0: 'human'. Did you mean 'user'? Known: system, developer, user, assistant, tool)",
    ),
    "misspelt role": (
        chat(("user", "q"), ("assistent", "a")),
        "unknown role (message 1: 'assistent'. Did you mean 'assistant'?",
    ),
    "no role": (b'{"messages": [{"content": "q"}]}', "no role (message 0: 'None'."),
    "empty user turn": (chat(("user", " \n"), ("assistant", "a")), "empty user turn (message 0)"),
    "empty assistant turn": (chat(("user", "q"), ("assistant", "")), "empty assistant turn (message 1)"),
    "null assistant turn": (chat(("user", "q"), ("assistant", None)), "empty assistant turn (message 1)"),
    "content a number": (
        chat(("user", 4), ("assistant", "a")),
        "content is not text (message 0 (user): it is a number)",
    ),
    "content parts": (
        chat(("user", [{"type": "text", "text": "q"}, {"type": "image"}]), ("assistant", "a")),
        "content is not text (message 0 (user): it is a list; of a list of parts only a single text is read)",
    ),
    "system null": (chat(("system", None), ("user", "q"), ("assistant", "a")), "no content (message 0 (system))"),
    "unknown key": (
        message(role="assistant", content="a", weight=0),
        "unknown key in a message (message 1: 'weight'; known: role, content, tool_calls, name, tool_call_id, "
        "reasoning_content); it would be ignored: remove it from the rows, or pass --skip-bad-rows",
    ),
    "tool_calls an object": (
        message(role="assistant", tool_calls={"a": 1}),
        "tool_calls is not a list (it is an object)",
    ),
    "tool call without a name": (
        message(role="assistant", tool_calls=[{"function": {}}]),
        "tool call without a function's name (message 1: a call looks like",
    ),
    "tool call's arguments": (
        message(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": 3}}]),
        "tool call's arguments are neither text nor object (message 1)",
    ),
    "user calls a tool": (
        chat(("assistant", "a"))[:-3] + b'}, {"role": "user", "content": "q", "tool_calls": [1]}]}',
        "tool_calls outside an assistant turn (message 1 (user))",
    ),
    "tools not JSON": (chat(("user", "q"), ("assistant", "a"), tools="{"), "'tools' is not JSON ({)"),
    "tools nested too deep": (chat(("user", "q"), ("assistant", "a"), tools="[" * 20_000), "'tools' is not JSON ([[["),
    "tools of texts": (
        chat(("user", "q"), ("assistant", "a"), tools=["f"]),
        "a tool is not an object (it is a string)",
    ),
}
assert len(BAD_LINES) >= 30


@pytest.mark.parametrize("kind", BAD_LINES)
@pytest.mark.parametrize("ending", [b"\n", b"\r\n"], ids=["lf", "crlf"])
def test_a_bad_line_raises_with_its_place_and_reason(tmp_path, kind, ending):
    line, expected = BAD_LINES[kind]
    path = tmp_path / "train.jsonl"
    path.write_bytes(ending.join([GOOD, line, GOOD, b""]))
    with pytest.raises(RowError) as raised:
        read_rows(path)
    assert str(raised.value).startswith(f"{path}:2: {expected}")
    assert "; " in str(raised.value).split(expected.split(";")[0])[-1]  # and it says what to do


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_is_skipped_when_asked(tmp_path, kind):
    line, expected = BAD_LINES[kind]
    path = tmp_path / "train.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n".join([GOOD, line, b"", GOOD, line])))
    bad = BadRows(skip=True)
    good = read_rows(path, bad=bad)
    assert [row.where for row in good] == [f"{path}:1", f"{path}:4"]
    assert [row.where for row in bad.rows] == [f"{path}:2", f"{path}:5"]
    assert bad.rows[0].reason.startswith(expected.split(";")[0].split(")")[0])
    assert all(len(row.raw) <= 2000 for row in bad.rows)


# whole files: (name, bytes, the error after the file's path); these stop the reading even where rows are skipped
ZIPPED = gzip.compress(b"\n".join([GOOD] * 3000 + [b""]), mtime=0)
BAD_FILES = {
    "empty": ("a.jsonl", b"", ": no rows (the file is empty); check how it was made"),
    "only blank lines": ("a.jsonl", b"\n \r\n\t\n", ": no rows"),
    "only a BOM": ("a.jsonl", b"\xef\xbb\xbf", ": no rows"),
    "empty gzip": ("a.jsonl.gz", gzip.compress(b""), ": no rows"),
    "zero bytes named gz": ("a.jsonl.gz", b"", ": named .gz but not gzip data; rename it, or compress it"),
    "empty JSON": ("a.json", b" \n", ": no rows"),
    "empty JSON list": ("a.json", b"[ ]", ": no rows"),
    "not gzip": ("a.jsonl.gz", GOOD + b"\n", ": named .gz but not gzip data"),
    "gzip cut off in its header": ("a.jsonl.gz", ZIPPED[:5], ": gzip data cut off; copy or download the file again"),
    "gzip cut off": ("a.jsonl.gz", ZIPPED[:-30], ": gzip data cut off"),
    "gzip with a wrong checksum": ("a.jsonl.gz", ZIPPED[:-8] + b"\0" * 8, ": corrupt gzip data (CRC check failed 0x0"),
    "gzip with a hole": ("a.jsonl.gz", ZIPPED[:40] + b"\xff" * 20 + ZIPPED[60:], ": corrupt gzip data"),
    "UTF-16": ("a.jsonl", GOOD.decode().encode("utf-16"), ": is UTF-16 text; convert it: iconv -f UTF-16 -t UTF-8"),
    "UTF-16 BE": ("a.jsonl", b"\xfe\xff\0{", ": is UTF-16 text"),
    "UTF-16 without a mark": (
        "a.jsonl",
        GOOD.decode().encode("utf-16-le"),
        ": is UTF-16 text; convert it: iconv -f UTF-16LE",
    ),
    "UTF-32": ("a.json", GOOD.decode().encode("utf-32"), ": is UTF-32 text"),
    "zip": ("a.jsonl", b"PK\x03\x04rest", ": is a zip archive; unpack it first"),
    "zstd": ("a.jsonl", b"\x28\xb5\x2f\xfdrest", ": is Zstandard data; unpack it first: unzstd"),
    "xz": ("a", b"\xfd7zXZ\0rest", ": is xz data"),
    "bzip2": ("a.json", b"BZh91AY", ": is bzip2 data"),
    "LFS pointer": ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\n", ": is a Git LFS pointer, not the data"),
    "HTML": ("a.json", b"<!DOCTYPE html><html>", ": is an HTML page; the download failed"),
    "spreadsheet": ("a.xlsx", b"PK\x03\x04rest", ": is a spreadsheet; save the sheet as CSV (UTF-8)"),
    "text": (
        "a.txt",
        b"a,b\n1,2\n",
        ": unknown file type '.txt'; known: .jsonl, .ndjson, .json, .parquet, .arrow, .csv,",
    ),
    "JSON cut off": ("a.json", b"[" + GOOD + b",\n" + GOOD[:-20], ":2: JSON cut off ("),
    "JSON list not closed": ("a.json", b"[" + GOOD + b"\n", ":2: JSON cut off (Expecting ',' delimiter, column 1)"),
    "JSON list with a trailing comma": (
        "a.json",
        b"[" + GOOD + b",\n]",
        ":2: not JSON (Expecting value, column 1); fix",
    ),
    "JSON and more": (
        "a.json",
        b"[" + GOOD + b"]\nx",
        ":2: not JSON (more than one value, the second at column 1); a file of one row per line",
    ),
    "JSON of two lists": (
        "a.json",
        b'{"train": [{"a": 1}], "test": [{"a": 1}]}',
        ":1: several lists of rows ('train', 'test'); keep one list in a file",
    ),
    "JSON a number": ("a.json", b"3", ":1: not an object (a number)"),
    "JSON with a duplicate key": ("a.json", b'{"rows": [],\n"rows": []}', ":1: duplicate key ('rows'"),
    "JSON in Latin-1": ("a.json", b'["\xe9"]', ":1: not UTF-8 (byte 0xe9 at position 3)"),
    "Parquet cut off": ("a.parquet", b"PAR1abcd", ": not a whole Parquet file ("),
    "not Parquet": ("a.parquet", GOOD, ": not a whole Parquet file ("),
    "every row bad": ("a.jsonl", b"{}\n{}\n[]\n", ": all 3 rows are bad (the first, "),
    "the only row bad": ("a.jsonl", b"{}\n", ": its only row is bad (the first, "),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_is_an_error_even_when_rows_are_skipped(tmp_path, kind):
    name, data, expected = BAD_FILES[kind]
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(RowError) as raised:
        read_rows(path, bad=BadRows(skip=True))
    assert expected in str(raised.value) and str(raised.value).startswith(str(path))


def test_gzip_cut_off_names_the_line_it_reached(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n".join(GOOD + b" " * (i % 7) for i in range(60_000)))[:-9])
    with pytest.raises(RowError, match=r"a\.jsonl\.gz:[1-9]\d{4}: gzip data cut off; copy or download the file again"):
        read_rows(path)


def test_last_line_cut_off_is_told_from_bad_json(tmp_path):
    path = tmp_path / "a.jsonl"
    for length in (1, 20, len(GOOD) - 1):
        path.write_bytes(GOOD + b"\n" + GOOD[:length])
        with pytest.raises(
            RowError, match=rf"a\.jsonl:2: last line cut off \(after {length} characters\); copy the file"
        ):
            read_rows(path)
    path.write_bytes(GOOD + b"\n" + GOOD)  # no newline at the end is no fault
    assert len(read_rows(path)) == 2


@pytest.mark.parametrize("zipped", [False, True])
def test_a_line_too_long_is_passed_over_without_holding_it(tmp_path, zipped):
    path = tmp_path / "a.jsonl"
    huge = b'{"a": "' + b"x" * (100 * 2**20) + b'"}'
    with gzip.open(path, "wb", compresslevel=1) if zipped else open(path, "wb") as file:
        file.write(GOOD + b"\n" + huge + b"\n" + GOOD + b"\n")
    del huge
    with pytest.raises(
        RowError, match=r"a\.jsonl:2: line too long \(more than 16777216 bytes\); is it one row per line\?"
    ):
        read_rows(path)
    bad = BadRows(skip=True)
    tracemalloc.start()
    good = read_rows(path, bad=bad)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [row.where for row in good] == [
        f"{path}:1",
        f"{path}:3",
    ] and bad.summary() == "1 row skipped: 1 line too long"
    assert peak < 60 * 2**20  # the limit and its copies, not the line
    assert len(bad.rows[0].raw) == 2000


def test_a_long_file_is_read_line_by_line(tmp_path):
    path = tmp_path / "a.jsonl"
    row = b'{"a": "' + b"x" * 1000 + b'"}\n'
    path.write_bytes(row * 30_000)
    tracemalloc.start()
    assert sum(1 for _ in read_records(path, BadRows())) == 30_000
    assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    tracemalloc.stop()


# accepted: (name, bytes); each holds two rows
TWO = [GOOD, GOOD]
GOOD_FILES = {
    "BOM": ("a.jsonl", b"\xef\xbb\xbf" + b"\n".join(TWO)),
    "CRLF": ("a.jsonl", b"\r\n".join([*TWO, b""])),
    "blank lines": ("a.jsonl", b"\n\n  \n".join([b"", *TWO, b""])),
    "ndjson": ("a.ndjson", b"\n".join(TWO)),
    "gzip": ("a.jsonl.gz", gzip.compress(b"\n".join(TWO))),
    "gzip in two members": ("a.jsonl.gz", gzip.compress(GOOD + b"\n") + gzip.compress(GOOD)),
    "gzip under another name": ("a.jsonl", gzip.compress(b"\n".join(TWO))),
    "upper case": ("A.JSONL.GZ", gzip.compress(b"\n".join(TWO))),
    "JSON list": ("a.json", b"[" + b",\n".join(TWO) + b"]\n"),
    "JSON list with a BOM": ("a.json", b"\xef\xbb\xbf[" + b",\n".join(TWO) + b"]\n"),
    "JSON list, gzip": ("a.json.gz", gzip.compress(b"[" + b",".join(TWO) + b"]")),
    "JSON object": ("a.json", b'{"version": 1, "tags": ["x"],\n"rows": [' + b",".join(TWO) + b"]}"),
    "JSON object on one line": ("a.json", b'{"rows": [' + b",".join(TWO) + b"]}"),
    "JSONL named json": ("a.json", b"\n".join(TWO)),
    "JSONL without a name": ("data", b"\r\n".join(TWO)),
    "JSON list without a name": ("data", b"[\n" + b",\n".join(TWO) + b"\n]"),
}


@pytest.mark.parametrize("kind", GOOD_FILES)
def test_what_is_accepted(tmp_path, kind):
    name, data = GOOD_FILES[kind]
    path = tmp_path / name
    path.write_bytes(data)
    rows = read_rows(path)
    assert [row.messages[-1]["content"] for row in rows] == ["4", "4"]
    assert len({row.where for row in rows}) == 2 or kind == "JSON list, gzip"  # there both stand on line 1
    assert all(row.where.startswith(str(path)) and row.source == str(path) for row in rows)


def test_a_pretty_printed_row_is_one_row(tmp_path):
    path = tmp_path / "one.json"
    path.write_text(json.dumps(json.loads(GOOD), indent=2))
    assert len(read_rows(path)) == 1


def test_parquet_and_its_nulls(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    call = {"function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    table = arrow.Table.from_pylist([{"messages": messages}, {"messages": messages[:1]}])
    for name in ("a.parquet", "nameless"):
        path = tmp_path / name
        parquet.write_table(table, path)
        [row] = read_rows(path, limit=1)
        assert row.messages == (
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        )
        assert row.where == f"{path}[0]"
        with pytest.raises(RowError, match=r"\[1\]: no assistant turn \(roles: user\)"):
            read_rows(path)


def test_parquet_columns_that_nobody_reads_may_hold_anything(tmp_path):
    """Dates that Python cannot hold, zones that nobody knows, text that is no UTF-8, alone and inside others."""
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    far = arrow.array([2**62], arrow.int64())
    bad_text = arrow.array([b"\xff\xfe"], arrow.binary()).view(arrow.string())
    columns = {
        "question": arrow.array(["q"]), "answer": arrow.array(["a\n#### 4"]),
        "timestamp": far.cast(arrow.timestamp("us")), "zone": arrow.array([0], arrow.timestamp("s", tz="Mars/Olympus")),
        "date": arrow.array([2**30], arrow.int32()).cast(arrow.date32()), "duration": far.cast(arrow.duration("s")),
        "text": bad_text,
        "inside": arrow.StructArray.from_arrays([far.cast(arrow.timestamp("us")), bad_text], ["t", "s"]),
        "list": arrow.ListArray.from_arrays(arrow.array([0, 1], arrow.int32()), far.cast(arrow.timestamp("us"))),
    }  # fmt: skip
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table(columns), path)
    [row] = read_rows(path)
    assert [message["content"] for message in row.messages] == ["q", "a\n#### 4"]
    [(_, fields)] = read_records(path, BadRows())
    assert {type(fields[name]) for name in columns.keys() - {"question", "answer"}} == {bytes}
    assert fields["text"] == b"\xff\xfe"


def test_bad_text_in_a_parquet_row_is_a_bad_row(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    answers = arrow.array([b"yes", b"\xff\xfe", b"n\0o"], arrow.binary()).view(arrow.string())
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"prompt": arrow.array(["a", "b", "c"]), "completion": answers}), path)
    with pytest.raises(
        RowError,
        match=r"\[1\]: prompt and completion are neither both text nor both messages .*bytes that are not UTF-8",
    ):
        read_rows(path)
    bad = BadRows(skip=True)
    assert len(read_rows(path, bad=bad)) == 1
    assert [row.where for row in bad.rows] == [f"{path}[1]", f"{path}[2]"]
    assert bad.rows[1].reason == "NUL character (message 1 (assistant): in content)"


def test_parquet_with_two_columns_of_one_name_is_refused(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    columns = [arrow.array(["q"]), arrow.array(["a"]), arrow.array(["b"])]
    parquet.write_table(arrow.Table.from_arrays(columns, ["prompt", "completion", "completion"]), path)
    with pytest.raises(RowError) as raised:
        read_rows(path, bad=BadRows(skip=True))
    assert str(raised.value) == (
        f"{path}: duplicate column ('completion' occurs more than once); rename or remove one of them"
    )


def test_gzipped_parquet_says_what_to_do(tmp_path):
    path = tmp_path / "a.parquet.gz"
    path.write_bytes(gzip.compress(b"PAR1...."))
    with pytest.raises(RowError, match=r"gzipped Parquet \(it is compressed inside\); unpack it first: gunzip$"):
        read_rows(path)


def test_json_rows_have_their_lines_and_one_bad_row_spoils_no_other(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"[\n" + b",\n".join([GOOD, b'{"a": NaN}', b"[]", b'{"a": 1, "a": 2}', GOOD]) + b"\n]")
    with pytest.raises(RowError, match=r"a\.json:3: NaN is not JSON"):
        read_rows(path)
    bad = BadRows(skip=True)
    assert [row.where for row in read_rows(path, bad=bad)] == [f"{path}:2", f"{path}:6"]
    assert [row.where for row in bad.rows] == [f"{path}:3", f"{path}:4", f"{path}:5"]
    assert bad.rows[0].raw == '{"a": NaN}'


def test_json_over_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "MAX_JSON_BYTES", 100)
    path = tmp_path / "a.json"
    path.write_bytes(b"[" + b",".join(TWO) + b"]")
    with pytest.raises(RowError, match=r"a\.json: JSON file too long \(more than 100 bytes\); write it as JSONL"):
        read_rows(path)


def test_a_list_over_several_lines_named_jsonl(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"[\n" + GOOD + b"\n]\n")
    with pytest.raises(RowError, match=r"a\.jsonl:1: not JSON .*; a JSON list over several lines is named \.json"):
        read_rows(path)


def test_escapes_that_only_look_bad():
    assert parse_line(rb'{"a": "\\ud800 \\u0000 \ud83d\ude00"}') == {"a": "\\ud800 \\u0000 \U0001f600"}
    assert parse_line(b'{"a": ' + b"[" * 98 + b"]" * 98 + b"}")  # 99 levels and the text's own
    assert parse_line(b'{"a": "' + b"{[" * 500 + b'"}')  # brackets in a text are no depth


def test_unreadable(tmp_path):
    with pytest.raises(RowError, match=r"cannot be read \(Is a directory\); check the file"):
        list(read_records(tmp_path, BadRows()))


def test_bad_rows_summary_and_report(tmp_path):
    path = tmp_path / "a.jsonl"
    question = chat(("user", "q \u00e9"))
    path.write_bytes(b"\n".join([GOOD, question, b"nope \xff", question, GOOD, b"x" * 3000, b""]))
    bad = BadRows(skip=True)
    assert bad.summary() == "no rows skipped"
    read_rows(path, bad=bad)
    assert bad.summary() == "4 rows skipped: 2 no assistant turn, 1 not UTF-8, 1 not JSON"
    report = tmp_path / "bad.jsonl"
    bad.write(report)
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    assert [line["where"] for line in lines] == [f"{path}:{number}" for number in (2, 3, 4, 6)]
    assert lines[0]["reason"] == "no assistant turn (roles: user)" and json.loads(lines[0]["raw"]) == json.loads(
        question
    )
    assert lines[1]["raw"].startswith("nope \ufffd") and lines[3]["raw"] == "x" * 2000
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.jsonl", "bad.jsonl"]


def test_a_report_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    report = tmp_path / "bad.jsonl"
    report.write_text("old")
    bad = BadRows(skip=True)
    bad.add("a:1", Fault("not JSON"), "x")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        bad.write(report)
    assert report.read_text() == "old" and [file.name for file in tmp_path.iterdir()] == ["bad.jsonl"]


def test_an_error_survives_pickling():
    error = RowError("a.jsonl:3", Fault("not JSON", "column 2"))
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "a.jsonl:3: not JSON (column 2); fix the row or pass --skip-bad-rows"
    assert isinstance(again, ValueError)
