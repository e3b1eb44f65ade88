"""Rows of any field names, and rows of CSV and TSV files."""

import gzip

import pytest

from deftune.artifacts.config import RunConfig
from deftune.cli import main
from deftune.data.rows import BadRows, RowError
from deftune.data.sources import read_rows

FIELDS = {"prompt": "q", "completion": "a"}


def texts(rows) -> list[tuple[str, ...]]:
    return [tuple(message["content"] for message in row.messages) for row in rows]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", b'{"q": "1+1?", "a": "2", "id": 7}\n{"q": "2,2", "a": "a\\nb", "id": 8}\n'),
        ("rows.csv", b'\xef\xbb\xbfid,q,a\r\n7,1+1?,2\r\n8,"2,2","a\nb"\r\n'),
        ("rows.tsv", b'id\tq\ta\n7\t1+1?\t2\n8\t2,2\t"a\nb"\n'),
        (
            "rows.csv",
            b'\xef\xbb\xbf"id";q;a\r\n7;1+1?;2\r\n8;2,2;"a\nb"\r\n',
        ),  # Excel where a comma is the decimal sign
        ("rows.csv", b'id\tq\ta\n7\t1+1?\t2\n8\t2,2\t"a\nb"\n'),
        ("rows.csv.gz", gzip.compress(b'id,q,a\n7,1+1?,2\n8,"2,2","a\nb"\n', mtime=0)),
    ],
)
def test_the_same_rows_whatever_the_file(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    rows = read_rows(path, fields=FIELDS)
    assert texts(rows) == [("1+1?", "2"), ("2,2", "a\nb")]
    assert [row.where.rpartition(":")[2] for row in rows] == (["1", "2"] if name == "rows.jsonl" else ["2", "3"])


def test_a_file_with_the_formats_own_names_needs_no_fields(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("prompt,completion\n1+1?,2\n")
    assert texts(read_rows(path)) == [("1+1?", "2")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("q,a\n1,2,3\n", r"rows\.csv:2: wrong number of values \(3 where the header has 2\)"),
        ("q,q\n1,2\n", r"rows\.csv:1: wrong header \('q', 'q'\); the first line names the columns, each once"),
        (",\n1,2\n", r"rows\.csv:1: wrong header \('', ''\); the first line names the columns, each once"),
        (
            "q|a\n1|2\n",
            r"rows\.csv:1: wrong header \('q\|a'\); the columns of this file are separated by '\|'; write it with ','",
        ),
        ('q,a\n1,"2\n', r"rows\.csv:2: not CSV \(unexpected end of data\); check the quotes"),
        ("q,b\n1,2\n", r"rows\.csv:2: no field 'a' \(the row has 'q', 'b'\); correct `fields`"),
        ("", r"rows\.csv: no rows"),
        ("q,a\n", r"rows\.csv: no rows"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path, content, message):
    path = tmp_path / "rows.csv"
    path.write_text(content)
    with pytest.raises(RowError, match=message):
        read_rows(path, fields=FIELDS)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_the_first_line_that_is_not_utf8_is_named(tmp_path, packed):
    """Far behind the header, and in the header."""
    path = tmp_path / ("rows.csv.gz" if packed else "rows.csv")
    for content, place in ((b"q,a\n" + b"1+1?,2\n" * 5000 + b"caf\xe9,2\n", "5002"), (b"caf\xe9,a\n1,2\n", "1")):
        path.write_bytes(gzip.compress(content) if packed else content)
        with pytest.raises(RowError, match=rf":{place}: not UTF-8 \(byte 0xe9 at position 4\); save the file as UTF-8"):
            read_rows(path, fields=FIELDS)


def test_names_of_columns_are_trimmed_and_empty_ones_left_out(tmp_path):
    """pandas writes its index under an empty name, spreadsheets export empty columns, people write "q, a"."""
    path = tmp_path / "rows.csv"
    path.write_text(",q, a ,\n0,1+1?,2,\n")
    assert texts(read_rows(path, fields=FIELDS)) == [("1+1?", "2")]
    with pytest.raises(RowError, match=r"unknown format \(its keys: q, a\."):
        read_rows(path)


def test_a_name_of_a_column_may_have_a_comma(tmp_path, tiny_model, capsys):
    path = tmp_path / "rows.csv"
    path.write_text('"Asked (EN)","Our reply, final"\n1+1?,2\n')
    with pytest.raises(RowError, match=r"unknown format \(its keys: Asked \(EN\), 'Our reply, final'\."):
        read_rows(path)
    fields = ["--fields", "prompt=Asked (EN), completion=Our reply, final"]
    assert main(["data", "preview", str(path), "--model", str(tiny_model), *fields]) == 0
    assert "1+1?" in capsys.readouterr().out


def test_a_bad_line_of_a_csv_file_is_skipped_on_request(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("q,a\n1,2\nonly one\n3,4\n")
    bad = BadRows(skip=True)
    assert texts(read_rows(path, fields=FIELDS, bad=bad)) == [("1", "2"), ("3", "4")]
    assert [row.where for row in bad.rows] == [f"{path}:3"]


def test_a_row_of_other_names_is_refused_with_the_remedy(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"q": "1+1?", "a": "2"}\n')
    with pytest.raises(RowError, match=r"fields: \{prompt: \.\.\., completion: \.\.\.\}"):
        read_rows(path)


def test_preview_and_config_take_fields(tmp_path, tiny_model, capsys):
    path = tmp_path / "rows.csv"
    path.write_text("q,a\n1+1?,2\n")
    assert main(["data", "preview", str(path), "--model", str(tiny_model), "--fields", "prompt=q,completion=a"]) == 0
    assert "1+1?" in capsys.readouterr().out
    table = ["--fields", "prompt=q,completion=a", "--max-length", "64"]
    assert main(["inspect", str(tiny_model), str(path), *table]) == 0
    assert "rows.csv:2" in capsys.readouterr().out
    assert main(["data", "preview", str(path), "--model", str(tiny_model), "--fields", "q"]) == 2
    assert "--fields: write NAME=NAME_IN_THE_DATA" in capsys.readouterr().err
    source = {"path": str(path), "fields": FIELDS}
    config = RunConfig.model_validate({"run": "r", "model": {"name": "smollm2"}, "data": {"train": [source]}})
    assert config.data.train[0].fields == FIELDS
    with pytest.raises(ValueError, match="`fields` is for `path`"):
        generated = {"generate": "word_sorting", "limit": 3, "fields": FIELDS}
        RunConfig.model_validate({"run": "r", "model": {"name": "smollm2"}, "data": {"train": [generated]}})
