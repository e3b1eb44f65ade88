"""Rows of a file: JSONL, JSON, Parquet, Arrow, CSV and TSV, read strictly; JSONL and CSV line by line."""

from __future__ import annotations

import collections
import contextlib
import csv
import gzip
import io
import itertools
import json
import math
import re
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, cast

from deftune.data.fields import name_type
from deftune.data.rows import SKIP_REMEDY, BadRows, Fault, Record, RowError, raw_text

MAX_LINE_BYTES = 16 * 2**20
MAX_JSON_BYTES = 2**30  # a .json file is parsed in memory; a larger one belongs in JSONL
MAX_DEPTH = 100  # of nested lists and objects; chat rows use about six
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".csv", ".tsv", ".jsonl.gz", ".ndjson.gz", ".json.gz",
            ".csv.gz", ".tsv.gz")  # fmt: skip


# Strict JSON ---------------------------------------------------------------------------------------------------------


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        twice = next(key for key, count in collections.Counter(key for key, _ in pairs).items() if count > 1)
        raise Fault("duplicate key", f"{_shown(twice)} occurs more than once in one object")
    return made


def _constant(name: str) -> float:
    raise Fault(f"{name} is not JSON", "", f"write null or a number; {SKIP_REMEDY}")


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise Fault("number out of range", text[:40])
    return value


_STRICT = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
_LENIENT = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")
_SUSPECT_ESCAPE = re.compile(r"\\u(?:[dD][89a-fA-F]|0000)")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _check_values(text: str, value: object) -> None:
    """Refuse what JSON allows and a training text cannot hold: lone surrogates, NUL, lists nested without limit."""
    if text.count("[") + text.count("{") > MAX_DEPTH:
        level, depth = [value], 0
        while level:
            level = [inner for outer in level for inner in _children(outer)]
            depth += 1
            if depth > MAX_DEPTH:
                raise Fault("nested too deep", f"more than {MAX_DEPTH} levels")
    if _SUSPECT_ESCAPE.search(text):
        plain = json.dumps(value, ensure_ascii=False)
        try:
            plain.encode("utf-8")
        except UnicodeEncodeError as error:
            found = f"\\u{ord(plain[error.start]):04x} without its other half"
            raise Fault("lone surrogate", found, f"it is half of a character; {SKIP_REMEDY}") from None
        if re.search(r"(?<!\\)(?:\\\\)*\\u0000", plain):  # dumps escapes NUL even where it escapes little
            raise Fault("NUL character", "\\u0000 in a string")


def _children(value: object) -> list[Any]:
    if isinstance(value, dict):
        return list(cast("dict[str, Any]", value).values())
    return cast("list[Any]", value) if isinstance(value, list) else []


def _decode(text: str, start: int = 0, *, whole: bool = True) -> tuple[Any, int]:
    """One strict JSON value and where it ends; `json.JSONDecodeError` is left to the caller, who knows the place."""
    try:
        value, end = _STRICT.raw_decode(text, _space(text, start))
    except RecursionError:
        raise Fault("nested too deep", f"more than {MAX_DEPTH} levels") from None
    except (json.JSONDecodeError, Fault):
        raise
    except ValueError:  # Python refuses integers of thousands of digits
        raise Fault("number out of range", "an integer of more than 4000 digits") from None
    if whole and _space(text, end) != len(text):
        raise json.JSONDecodeError("Extra data", text, _space(text, end))
    _check_values(text if whole else text[start:end], value)
    return value, end


def _space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    return match.end() if match else start


def _as_object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Fault("not an object", name_type(value), f'a row looks like {{"messages": [...]}}; {SKIP_REMEDY}')
    return cast("dict[str, Any]", value)


def _syntax(error: json.JSONDecodeError) -> str:
    """The parser's error in plain words."""
    if error.msg == "Extra data":
        return f"more than one value, the second at column {error.colno}"
    return f"{error.msg.split(':')[0].removesuffix(' at')}, column {error.colno}"


def _utf8(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        detail = f"byte 0x{line[error.start]:02x} at position {error.start + 1}"
        raise Fault("not UTF-8", detail, f"save the file as UTF-8; {SKIP_REMEDY}") from None


def parse_line(line: bytes, *, ends_file: bool = False) -> dict[str, Any]:
    """The object that one line of JSONL holds, or a `Fault`. ``ends_file``: the line has no newline after it.

    >>> parse_line(b'{"question": "2 + 2?", "answer": "4"}')
    {'question': '2 + 2?', 'answer': '4'}
    """
    if b"\0" in line:
        raise Fault("NUL character", f"byte {line.index(0) + 1} of the line is 0", f"is the file whole? {SKIP_REMEDY}")
    text = _utf8(line)
    try:
        return _as_object(_decode(text)[0])
    except json.JSONDecodeError as error:
        if ends_file and (error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")):
            raise Fault(
                "last line cut off", f"after {len(text)} characters", f"copy the file again; {SKIP_REMEDY}"
            ) from None
        if text.lstrip().startswith("["):
            raise Fault("not JSON", _syntax(error), "a JSON list over several lines is named .json") from None
        raise Fault("not JSON", _syntax(error)) from None


# Files ---------------------------------------------------------------------------------------------------------------

_Stream = io.BufferedReader | gzip.GzipFile

_FOREIGN = (
    (b"\xff\xfe\0\0", "UTF-32 text", "convert it: iconv -f UTF-32 -t UTF-8"),
    (b"\xff\xfe", "UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "convert it: iconv -f UTF-16 -t UTF-8"),
    (b"{\0", "UTF-16 text", "convert it: iconv -f UTF-16LE -t UTF-8"),
    (b"\0{", "UTF-16 text", "convert it: iconv -f UTF-16BE -t UTF-8"),
    (b"PK\x03\x04", "a zip archive", "unpack it first"),
    (b"\x28\xb5\x2f\xfd", "Zstandard data", "unpack it first: unzstd"),
    (b"BZh", "bzip2 data", "unpack it first: bunzip2"),
    (b"\xfd7zXZ", "xz data", "unpack it first: unxz"),
    (b"version https://git-lfs", "a Git LFS pointer, not the data", "fetch it: git lfs pull"),
    (b"<!doctype html", "an HTML page", "the download failed; download the file itself"),
    (b"<html", "an HTML page", "the download failed; download the file itself"),
)


@contextlib.contextmanager
def _reading(where: str) -> Generator[None]:
    """Turn the errors of a broken file or disk into a `RowError` with the place; the rest cannot be read."""
    again = "copy or download the file again"
    try:
        yield
    except EOFError:
        raise RowError(where, Fault("gzip data cut off", "", again)) from None
    except (zlib.error, gzip.BadGzipFile) as error:
        raise RowError(where, Fault("corrupt gzip data", str(error).split("(")[0].strip(), again)) from None
    except OSError as error:
        raise RowError(where, Fault("cannot be read", error.strerror or str(error), "check the file")) from None


def _open(path: Path) -> _Stream:
    if path.exists() and not path.is_file() and not path.is_dir():
        why = "its rows can be read only once, and a run reads them again on every rank and at every start"
        raise RowError(str(path), Fault("is a pipe or a device", why, "write the rows to a file"))
    with open(path, "rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
    if path.suffix.lower() == ".gz" and not zipped:
        raise RowError(str(path), Fault("named .gz but not gzip data", "", "rename it, or compress it"))
    return gzip.GzipFile(path) if zipped else io.BufferedReader(io.FileIO(path), 2**16)


def _layout(path: Path, head: bytes) -> str:
    """jsonl, json, parquet, arrow, csv or tsv: by its name, by its first bytes where the name leaves it open."""
    name = path.name.lower().removesuffix(".gz")
    suffix = Path(name).suffix
    if head.startswith(b"PAR1") or suffix == ".parquet":
        return "parquet"
    if suffix == ".arrow":
        return "arrow"
    if suffix in (".xlsx", ".xls", ".ods"):  # a zip archive inside
        raise RowError(str(path), Fault("is a spreadsheet", "", "save the sheet as CSV (UTF-8)"))
    for magic, what, remedy in _FOREIGN:
        if head[:64].lower().startswith(magic.lower()):
            raise RowError(str(path), Fault(f"is {what}", "", remedy))
    if suffix in (".jsonl", ".ndjson"):
        return "jsonl"
    if suffix in (".csv", ".tsv"):
        return suffix[1:]
    if suffix not in (".json", ""):
        raise RowError(str(path), Fault(f"unknown file type {suffix!r}", "", f"known: {', '.join(SUFFIXES)}"))
    first, newline, rest = head.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")
    several = newline and first.rstrip().endswith(b"}") and rest.lstrip()[:1] in (b"{", b"")
    return "jsonl" if first.startswith(b"{") and several and rest.strip() else "json"


def read_records(path: str | Path, bad: BadRows) -> Iterator[Record]:
    """The rows of one file, each with its place, one at a time; bad ones go to ``bad``. No rows at all is an error."""
    path = Path(path)
    already, count = len(bad.rows), 0
    with _reading(str(path)), _open(path) as stream:
        read = _LAYOUTS[_layout(path, stream.peek(2**16))]
        for record in read(path, stream, bad):
            count += 1
            yield record
    if count == 0 and len(bad.rows) == already:
        raise RowError(str(path), Fault("no rows", "the file is empty", "check how it was made"))


def _read_jsonl(path: Path, stream: _Stream, bad: BadRows) -> Iterator[Record]:
    number = 0
    while True:
        number += 1
        where = f"{path}:{number}"
        with _reading(where):
            line = stream.readline(MAX_LINE_BYTES + 1)
            start, too_long = line, len(line) > MAX_LINE_BYTES
            while too_long and line and not line.endswith(b"\n"):
                line = stream.readline(2**20)  # skipped in pieces, to bound the memory
        if not start:
            return
        if number == 1:
            start = start.removeprefix(b"\xef\xbb\xbf")
        try:
            if too_long:
                raise Fault("line too long", f"more than {MAX_LINE_BYTES} bytes", "is it one row per line?")
            if not start.strip():
                continue
            record = parse_line(start, ends_file=not start.endswith(b"\n"))
        except Fault as fault:
            bad.add(where, fault, raw_text(start))
        else:
            yield where, record


def _read_json(path: Path, stream: _Stream, bad: BadRows) -> Iterator[Record]:
    with _reading(str(path)):
        data = stream.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise RowError(str(path), Fault("JSON file too long", f"more than {MAX_JSON_BYTES} bytes", "write it as JSONL"))
    text = ""
    try:
        text = _utf8(data.removeprefix(b"\xef\xbb\xbf"))
        if not text.strip():
            return
        if text[_space(text, 0)] == "[":
            yield from _json_list(path, text, bad)
        else:
            yield from _json_object(path, _as_object(_decode(text)[0]))
    except json.JSONDecodeError as error:
        cut = error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string")
        kind, remedy = ("JSON cut off", "copy the file again") if cut else ("not JSON", "fix the file")
        if error.msg == "Extra data":
            remedy = "a file of one row per line is named .jsonl"
        raise RowError(f"{path}:{error.lineno}", Fault(kind, _syntax(error), remedy)) from None
    except Fault as fault:
        raise RowError(f"{path}:1", fault) from None


def _json_list(path: Path, text: str, bad: BadRows) -> Iterator[Record]:
    """Row by row, so that each has a line and one bad row does not spoil the others."""
    at, line, counted = _space(text, _space(text, 0) + 1), 1, 0
    if text[at : at + 1] == "]":
        return
    while True:
        line, counted = line + text.count("\n", counted, at), at
        where = f"{path}:{line}"
        try:
            value, end = _decode(text, at, whole=False)
            record = _as_object(value)
        except Fault as fault:
            try:
                _, end = _LENIENT.raw_decode(text, at)
            except (RecursionError, ValueError):  # the end of the row cannot be found
                raise RowError(where, fault) from None
            bad.add(where, fault, raw_text(text[at:end].encode("utf-8", "replace")))
        else:
            yield where, record
        end = _space(text, end)
        if text[end : end + 1] == "]":
            if _space(text, end + 1) != len(text):
                raise json.JSONDecodeError("Extra data", text, _space(text, end + 1))
            return
        if text[end : end + 1] != ",":
            raise json.JSONDecodeError("Expecting ',' delimiter", text, end)
        at = _space(text, end + 1)


def _json_object(path: Path, value: dict[str, Any]) -> Iterator[Record]:
    """A wrapper around one list of rows, or one row."""
    lists = {key: inner for key, inner in value.items() if isinstance(inner, list) and inner}
    lists = {key: inner for key, inner in lists.items() if all(isinstance(row, dict) for row in inner)}
    if not lists or "messages" in value or "conversations" in value:
        yield f"{path}:1", value
        return
    if len(lists) > 1:
        raise Fault("several lists of rows", ", ".join(map(_shown, lists)), "keep one list in a file")
    [(key, rows)] = lists.items()
    for index, row in enumerate(rows):
        yield f"{path}:{key}[{index}]", row


def _read_csv(path: Path, stream: _Stream, bad: BadRows, delimiter: str = ",") -> Iterator[Record]:
    """Rows of text below a header line; a quoted value may hold line breaks.

    Columns without a name are left out: pandas writes its index as one. If the header has no ``delimiter`` but
    semicolons, tabs or commas, these separate the values: Excel writes semicolons where a comma is the decimal sign.
    """
    csv.field_size_limit(MAX_LINE_BYTES)
    text = io.TextIOWrapper(cast("Any", stream), encoding="utf-8-sig", newline="")
    try:
        with _reading(f"{path}:1"):
            header = text.readline(MAX_LINE_BYTES)
    except UnicodeDecodeError:
        raise _not_utf8(path) from None
    if delimiter not in header and len(others := [other for other in ";\t," if other in header]) == 1:
        delimiter = others[0]
    reader = csv.reader(itertools.chain([header] if header else [], text), delimiter=delimiter, strict=True)
    names: list[str] | None = None
    while True:
        where = f"{path}:{reader.line_num + 1}"
        try:
            with _reading(where):
                values = next(reader, None)
        except UnicodeDecodeError:
            raise _not_utf8(path) from None
        except csv.Error as error:  # a quote that is not closed swallows what follows: no later row is certain
            raise RowError(where, Fault("not CSV", str(error), "check the quotes, or write it as JSONL")) from None
        if values is None:
            return
        if names is None:
            names = [value.strip() for value in values]  # "prompt, completion"
            named = [name for name in names if name]
            remedy = "the first line names the columns, each once"
            if len(named) == 1 and (other := re.search(r"[;\t|,]", named[0])):
                remedy = f"the columns of this file are separated by {other[0]!r}; write it with {delimiter!r}"
            elif named and len(set(named)) == len(named):
                continue
            raise RowError(where, Fault("wrong header", ", ".join(map(_shown, names)), remedy))
        elif not values:
            continue
        elif len(values) != len(names):
            fault = Fault("wrong number of values", f"{len(values)} where the header has {len(names)}")
            bad.add(where, fault, raw_text(delimiter.join(values).encode()))
        elif any("\0" in value for value in values):
            bad.add(where, Fault("NUL character", "in a value"), raw_text(delimiter.join(values).encode()))
        else:
            yield where, {name: value for name, value in zip(names, values) if name}


def _not_utf8(path: Path) -> RowError:
    """The error of a text file that is not UTF-8, with the first line that is not; Python decodes in larger pieces."""
    with _open(path) as stream:
        for number, line in enumerate(stream, 1):
            try:
                _utf8(line)
            except Fault as fault:
                remedy = 'save the file as UTF-8 (Excel: "CSV UTF-8")'
                return RowError(f"{path}:{number}", Fault(fault.kind, fault.detail, remedy))
    return RowError(str(path), Fault("not UTF-8", "", "save the file as UTF-8"))


def _read_tsv(path: Path, stream: _Stream, bad: BadRows) -> Iterator[Record]:
    return _read_csv(path, stream, bad, "\t")


def _read_parquet(path: Path, stream: _Stream, bad: BadRows) -> Iterator[Record]:
    def batches() -> tuple[list[str], Iterator[Any]]:
        import pyarrow.parquet as parquet

        file: Any = parquet.ParquetFile(path)
        return file.schema_arrow.names, file.iter_batches(batch_size=256)

    if isinstance(stream, gzip.GzipFile):
        raise RowError(str(path), Fault("gzipped Parquet", "it is compressed inside", "unpack it first: gunzip"))
    return _read_batches(path, "Parquet", batches)


def _read_arrow(path: Path, stream: _Stream, bad: BadRows) -> Iterator[Record]:
    """A stream, as `save_to_disk` of datasets writes it, or an Arrow file."""

    def batches() -> tuple[list[str], Iterator[Any]]:
        from pyarrow import ipc, memory_map

        mapped = memory_map(str(path))
        if stream.peek(6).startswith(b"ARROW1"):
            file: Any = ipc.open_file(mapped)
            return file.schema.names, map(file.get_batch, range(file.num_record_batches))
        opened: Any = ipc.open_stream(mapped)
        return opened.schema.names, iter(opened)

    return _read_batches(path, "Arrow", batches)


def _read_batches(path: Path, kind: str, open: Callable[[], tuple[list[str], Iterator[Any]]]) -> Iterator[Record]:
    """The rows of a table that pyarrow reads in batches; ``open`` gives the names of the columns and the batches."""
    again, index = "copy or download the file again", 0
    try:
        names, batches = open()
    except ImportError:
        raise ImportError(f'{path}: {kind} needs pyarrow; pip install "deftune[train]"') from None
    except Exception as error:  # Arrow's own classes, and what Python makes of a damaged schema
        raise RowError(str(path), Fault(f"not a whole {kind} file", describe_error(error), again)) from None
    if len(set(names)) < len(names):
        twice = next(name for name, count in collections.Counter(names).items() if count > 1)
        remedy = "rename or remove one of them"
        raise RowError(str(path), Fault("duplicate column", f"{_shown(twice)} occurs more than once", remedy))
    while True:
        try:
            batch = next(batches, None)
            columns = [] if batch is None else [_column_values(column) for column in batch.columns]
        except Exception as error:
            raise RowError(
                f"{path}[{index}]", Fault(f"not a whole {kind} file", describe_error(error), again)
            ) from None
        if batch is None:
            return
        for place in range(batch.num_rows):
            yield f"{path}[{index}]", {name: values[place] for name, values in zip(names, columns)}
            index += 1


def describe_error(error: Exception) -> str:
    """The class and the first line of a library's error."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def _column_values(column: Any) -> list[Any]:
    """A column as Python values; bytes stand for what Python cannot hold: text that is not UTF-8, a date after 9999.

    Most rows have columns that nobody reads, and one of those must not stop the reading.
    """
    try:
        return column.to_pylist()
    except Exception:  # OverflowError, UnicodeDecodeError, ArrowInvalid, an unknown time zone's KeyError, ...
        return [_python_value(scalar) for scalar in column]


def _python_value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except Exception:
        return scalar.as_buffer().to_pybytes() if hasattr(scalar, "as_buffer") else b""


_LAYOUTS = {
    "jsonl": _read_jsonl, "json": _read_json, "parquet": _read_parquet, "arrow": _read_arrow, "csv": _read_csv,
    "tsv": _read_tsv,
}  # fmt: skip
