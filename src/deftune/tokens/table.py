"""A token table: one line per supervised token, with the model's statistics and what each objective does there.

A table is written while the rows go through the model, under another name until it is complete. Beside
``tokens.parquet`` lies ``tokens.rows.parquet``: one line per row, with the text around its tokens.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from deftune._version import __version__
from deftune.artifacts.display import QUIET, Display, quiet
from deftune.artifacts.files import whole_file
from deftune.artifacts.options import OptionError, check_counts
from deftune.artifacts.results import encoding_of, load_result, reading_of
from deftune.data.encoding import Encoded, Encoder, Mask, encode_rows
from deftune.data.rows import BadRows, Row
from deftune.data.sources import read_rows
from deftune.objectives import Objective
from deftune.objectives import objective as parse_objective
from deftune.tokens.passes import (
    BATCH_TOKENS,
    Measurement,
    RowTokens,
    entropy_column,
    parse_objectives,
    placed,
    supervised_places,
    token_context,
    token_passes,
)
from deftune.tokens.pieces import Pieces

DEFAULT = ("nll", "linear", "cayley", "deft", "eaft")
"""The objectives of a table by default: the paper's."""

TOKEN_COLUMNS: dict[str, pa.DataType] = {
    "row": pa.int32(),  # index in the data
    "position": pa.int32(),  # index of the token in its sequence
    "token_id": pa.int32(),
    "text": pa.string(),
    "log_p": pa.float32(),
    "p": pa.float32(),
    "entropy": pa.float32(),
    "concentration": pa.float32(),  # sum P^2
    "rank": pa.int32(),  # tokens strictly likelier: 0 is the argmax
    "top_id": pa.int32(),  # the likeliest token
    "top_text": pa.string(),
    "top_log_p": pa.float32(),
    "other_id": pa.int32(),  # the likeliest token that is not the target
    "other_text": pa.string(),
    "other_log_p": pa.float32(),
    "is_eos": pa.bool_(),  # ends a turn
    "is_format": pa.bool_(),  # a special or added token: end, role, tool and thinking marks
}
OBJECTIVE_COLUMNS = ("focus", "gate", "signal", "gradient")
ROW_SCHEMA = pa.schema(
    [
        ("row", pa.int32()),
        ("where", pa.string()),  # train.jsonl:12
        ("prompt", pa.string()),  # all before the first supervised token, as the template writes it
        ("between", pa.list_(pa.string())),  # the text before each later answer of the conversation
        ("answer", pa.string()),  # the supervised tokens' texts, joined
        ("num_tokens", pa.int32()),
        ("num_supervised", pa.int32()),
        ("truncated", pa.int32()),  # tokens cut off the end
    ]
)
METADATA_KEY = b"deftune"

WINDOW_BATCHES = 8  # batches' worth of rows are sorted by length together, and make a row group


class Written(NamedTuple):
    """The files that `write_token_table` wrote, and facts about the data to show to the user."""

    tokens: Path
    rows: Path
    num_tokens: int
    facts: list[str]


def token_schema(objectives: Sequence[str | Objective], temperatures: Sequence[float] = ()) -> pa.Schema:
    """The fixed columns, ``entropy:T`` for each temperature T, and for each objective S ``focus:S``, ``gate:S``,
    ``signal:S`` and ``gradient:S``.

    >>> token_schema(["deft"]).names[-4:]
    ['focus:deft', 'gate:deft', 'signal:deft', 'gradient:deft']
    """
    names = [entropy_column(temperature) for temperature in temperatures]
    names += [f"{column}:{parse_objective(spec)}" for spec in objectives for column in OBJECTIVE_COLUMNS]
    return pa.schema([*TOKEN_COLUMNS.items(), *((name, pa.float32()) for name in names)])


# --- tables -----------------------------------------------------------------------------------------------------------


def row_line(place: int, example: Encoded, positions: np.ndarray, texts: list[str]) -> dict[str, Any]:
    """The line of one row in ``*.rows.parquet``."""
    runs = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
    starts = [0, *(int(run[-1]) + 1 for run in runs)]
    before = ["".join(texts[start : int(run[0])]) for start, run in zip(starts, runs)]
    return {
        "row": place,
        "where": example.where,
        "prompt": before[0],
        "between": before[1:],
        "answer": "".join(texts[i] for i in positions.tolist()),
        "num_tokens": len(example.input_ids),
        "num_supervised": len(positions),
        "truncated": example.truncated,
    }


def token_batches(
    model: Any, tokenizer: Any, examples: Iterable[tuple[int, Encoded]], encoder: Encoder, *,
    objectives: Iterable[str | Objective] = DEFAULT, temperatures: Sequence[float] = (),
    batch_tokens: int = BATCH_TOKENS, progress: Callable[[int], None] = lambda _: None,
) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:  # fmt: skip
    """A model's token table in parts, (tokens, their rows), in the order of the rows.

    ``examples`` are (index of the row, encoded row). The rows of `WINDOW_BATCHES` batches are in memory at a time.
    """
    measurement = Measurement(objectives, token_context(encoder), temperatures)
    schema, pieces = token_schema(measurement.objectives, temperatures), Pieces(tokenizer)
    ends = sorted(encoder.end_ids.values())
    special = sorted({*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()})
    for window in windows(examples, WINDOW_BATCHES * batch_tokens):
        places, rows = zip(*window)
        found: dict[int, RowTokens] = {}
        for tokens in token_passes(model, tokenizer, rows, measurement=measurement, batch_tokens=batch_tokens):
            found[tokens.place] = tokens
            progress(1)
        parts = [found[i] for i in range(len(rows))]
        positions = [supervised_places(example) for example in rows]
        texts = [pieces.of(example.input_ids) for example in rows]
        columns: dict[str, Any] = {
            name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns
        }
        ids = columns["token_id"] = np.concatenate([part.stats.targets for part in parts])
        columns["row"] = np.repeat(places, [len(where) for where in positions])
        columns["position"] = np.concatenate(positions)
        columns["text"] = [text[i] for text, where in zip(texts, positions) for i in where.tolist()]
        columns["is_eos"], columns["is_format"] = np.isin(ids, ends), np.isin(ids, special)
        for name in ("top", "other"):
            columns[f"{name}_text"] = [pieces.alone(token) for token in columns[f"{name}_id"].tolist()]
        arrays = [
            pa.array(columns[field.name]).cast(field.type) if field.name in columns else pa.nulls(len(ids), field.type)
            for field in schema
        ]
        lines = [row_line(*parts) for parts in zip(places, rows, positions, texts)]
        yield (
            pa.RecordBatch.from_arrays(arrays, schema=schema), pa.RecordBatch.from_pylist(lines, schema=ROW_SCHEMA)
        )  # fmt: skip


def windows(examples: Iterable[tuple[int, Encoded]], tokens: int) -> Iterator[list[tuple[int, Encoded]]]:
    """The examples in lists of about ``tokens`` tokens each."""
    window: list[tuple[int, Encoded]] = []
    size = 0
    for place, example in examples:
        window.append((place, example))
        size += len(example.input_ids)
        if size >= tokens:
            yield window
            window, size = [], 0
    if window:
        yield window


def write_token_table(
    path: str | Path, model: Any, tokenizer: Any, rows: Sequence[Row], *, encoder: Encoder | None = None,
    objectives: Iterable[str | Objective] = DEFAULT, temperatures: Sequence[float] = (),
    batch_tokens: int = BATCH_TOKENS, bad: BadRows | None = None, facts: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Written:  # fmt: skip
    """Write the token table of ``rows`` to ``path`` (Parquet), and the rows' texts beside it.

    Both files appear complete or not at all.

    Args:
        encoder: turns rows into tokens (default: the tokenizer's chat template, answers supervised, 2048 tokens).
        temperatures: also measure the entropy at these sampling temperatures, which are above 0.
        bad: handles rows whose mask cannot be verified; by default the first one raises.
        facts: stored in the schema's metadata, where `table_facts` reads them.
        progress: called with 1 after each row.
    """
    path = Path(path)
    chosen = parse_objectives(objectives)
    encoder = encoder or Encoder(tokenizer, max_length=2048)
    bad = BadRows() if bad is None else bad
    encoded = encode_rows(rows, encoder, bad=bad)
    about = {
        "version": __version__,
        "objectives": [str(objective) for objective in chosen],
        "temperatures": list(temperatures),
        "template": encoder.template,
        "max_length": encoder.max_length,
        "mask": encoder.mask,
        **(facts or {}),
    }
    metadata = {METADATA_KEY: json.dumps(about).encode()}
    beside, count = rows_path(path), 0
    with contextlib.ExitStack() as files:
        # the rows first: where there is a token table, there are its rows
        to_tokens = files.enter_context(parquet_file(path, token_schema(chosen, temperatures).with_metadata(metadata)))
        to_rows = files.enter_context(parquet_file(beside, ROW_SCHEMA.with_metadata(metadata)))
        for tokens, lines in token_batches(
            model, tokenizer, placed(rows, encoded.examples), encoder, objectives=chosen, temperatures=temperatures,
            batch_tokens=batch_tokens, progress=progress,
        ):  # fmt: skip
            to_tokens.write_batch(tokens)
            to_rows.write_batch(lines)
            count += tokens.num_rows
    return Written(path, beside, count, encoded.facts())


def make_token_table(
    path: str | Path, model: str, data: str, *, objectives: Iterable[str | Objective] = DEFAULT,
    rows: int | None = None, format: str = "auto", split: str | None = None, template: str | None = None,
    mask: Mask | None = None, max_length: int | None = None, batch_tokens: int = BATCH_TOKENS,
    fields: Mapping[str, str] | None = None, bad_rows: str | Path | None = None,
    trust_remote_code: bool = False, facts: Mapping[str, Any] | None = None,
    display: Display = QUIET,
) -> Written:  # fmt: skip
    """Load a model and data by name and write the token table of the data.

    Args:
        path: the table, a ``.parquet`` file.
        model: a run, ``RUN:STEP``, or any model that `deftune train` takes.
        data: a file, a folder, a hub id, or ``generated:NAME``.
        objectives: objectives whose gates are columns of the table.
        rows: the first rows only.
        format: the format of the data, as in `read_rows`; by default that of the run, for a file that it was trained
            or evaluated on.
        split: the split of the data, as in `read_rows`.
        fields: the names of the fields in the data, as in `read_rows`; by default those of the run, likewise.
        template: replaces the chat template of the run or of the tokenizer.
        mask: replaces the mask of the run or the default.
        max_length: replaces the longest length of a row.
        batch_tokens: the most places in a batch, padding included.
        bad_rows: a file for rows that cannot be used; without it the first such row is an error.
        trust_remote_code: run the code of the model's repository.
        facts: stored in the table's metadata beside model and data.
        display: receives the progress.

    Raises:
        ValueError: an argument is wrong, or a row cannot be used.
    """
    path = Path(path)
    if path.suffix != ".parquet":
        raise OptionError("out", f"{path} is not named .parquet, which it would be")
    check_counts(rows=rows, batch_tokens=batch_tokens)
    chosen = parse_objectives(objectives)
    display.show(f"reading {data}")
    bad = BadRows(skip=bad_rows is not None)
    reading = reading_of(model, data, format=format, fields=fields)
    found = read_rows(data, split=split, limit=rows, bad=bad, **reading)
    with quiet():
        display.show(f"loading {model}")
        loaded, tokenizer = load_result(model, display.say, trust_remote_code=trust_remote_code)
        encoder = Encoder(tokenizer, **encoding_of(model, template=template, mask=mask, max_length=max_length))
        display.say(f"rows have at most {encoder.max_length:,} tokens (max_length)")  # differs between runs and models
        if torch.cuda.is_available():
            loaded = loaded.to("cuda")
        done = 0

        def advance(number: int) -> None:
            nonlocal done
            done += number
            display.show("rows", done, len(found))

        advance(0)
        written = write_token_table(
            path, loaded, tokenizer, found, encoder=encoder, objectives=chosen, batch_tokens=batch_tokens, bad=bad,
            facts={"model": model, "data": data, **({"split": split} if split else {}), **(facts or {})},
            progress=advance,
        )  # fmt: skip
    for line in written.facts:
        display.say(line)
    if bad_rows is not None and bad.rows:
        bad.write(bad_rows)
        display.say(f"{bad.summary()}; see {bad_rows}")
    return written


@contextlib.contextmanager
def parquet_file(path: Path, schema: pa.Schema) -> Generator[pq.ParquetWriter]:
    """A Parquet file to write batches into; it appears when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as sink, pq.ParquetWriter(sink, schema, compression="zstd") as writer:
        yield writer


def rows_path(path: str | Path) -> Path:
    """The path of the rows that belong to the token table at ``path``.

    >>> str(rows_path("out/tokens.parquet"))
    'out/tokens.rows.parquet'
    """
    path = Path(path)
    return path.with_name(f"{path.stem}.rows.parquet")


def read_token_table(path: str | Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a token table, or some of its columns; another Parquet file is an error."""
    return _read(Path(path), TOKEN_COLUMNS, columns)


def read_rows_table(path: str | Path) -> pa.Table:
    """Read the rows of the token table at ``path``, which names either of the two files."""
    path = Path(path)
    return _read(path if path.name.endswith(".rows.parquet") else rows_path(path), ROW_SCHEMA.names, None)


def _read(path: Path, wanted: Iterable[str], columns: Sequence[str] | None) -> pa.Table:
    try:
        names = pq.read_schema(path).names
        if missing := [name for name in wanted if name not in names]:
            raise ValueError(f"{path}: is no token table of deftune (it has no column {missing[0]!r})")
        if unknown := [name for name in columns or () if name not in names]:
            raise ValueError(f"{path}: has no column {unknown[0]!r}; it has {', '.join(names)}")
        return pq.read_table(path, columns=None if columns is None else list(columns))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; `deftune analyze tokens` writes it") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: is no Parquet file that can be read ({error})") from None


def table_facts(table: pa.Table) -> dict[str, Any]:
    """How a table was made: model, data, template, objectives, version, command."""
    metadata = cast("dict[bytes, bytes]", table.schema.metadata or {})
    try:
        facts: Any = json.loads(metadata.get(METADATA_KEY, b"{}"))
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict):
        raise ValueError(
            "the facts that the token table was written with are damaged; `deftune analyze tokens` writes it"
        )
    return facts  # pyright: ignore[reportUnknownVariableType]


def token_table_facts(path: str | Path) -> dict[str, Any]:
    """`table_facts` of the table at ``path``, without reading its columns."""
    return table_facts(read_token_table(path, []))


def table_objectives(table: pa.Table) -> list[str]:
    """The objectives that a table has columns for, in its order."""
    return [name.removeprefix("gate:") for name in table.column_names if name.startswith("gate:")]
