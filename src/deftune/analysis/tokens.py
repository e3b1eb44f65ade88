"""Token tables: one line per supervised token, with what the model thought of it and what each objective does to it.

Rows go through the model in batches of similar length; the head is applied to the supervised positions alone, a chunk
at a time, so that no [tokens, V] tensor is ever whole. A table is written as it is made, into a file of another name
that takes its own when it is complete. Beside ``tokens.parquet`` lies ``tokens.rows.parquet``: a line per row, with the
text around the tokens.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from deftune._version import __version__
from deftune.data.encoding import Collator, Encoded, Encoder, Mask, encode_rows
from deftune.data.rows import Row
from deftune.kernels.statistics import logits_stats, supervised_index, wide
from deftune.objectives import IGNORE_INDEX, Context, Focus, Objective
from deftune.objectives import objective as parse_objective
from deftune.objectives.modifiers import Modifier
from deftune.training.head import HeadOptions, attach_objective, base_of, shifted
from deftune.training.results import parse_result
from deftune.training.train import make_encoder
from deftune.training.trainer import special_token_ids

DEFAULT = ("nll", "linear", "cayley", "deft", "eaft")
"""The objectives of a table where nothing is asked for: the paper's."""

TOKEN_COLUMNS: dict[str, pa.DataType] = {
    "row": pa.int32(),  # place in the data
    "position": pa.int32(),  # of the token in its sequence
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

CHUNK_BYTES = {"cpu": 256 << 20}  # of float32 logits at a time
CHUNK_BYTES_ELSEWHERE = 1 << 30
WINDOW_BATCHES = 8  # batches' worth of rows are sorted by length together, and make a row group


class TokenBatch(NamedTuple):
    """Some rows of the data: their tokens, and themselves."""

    tokens: pa.RecordBatch
    rows: pa.RecordBatch


class Written(NamedTuple):
    """What `write_token_table` made: the files, and the facts about the data that a reader should see."""

    tokens: Path
    rows: Path
    num_tokens: int
    facts: list[str]


def token_schema(objectives: Sequence[str | Objective]) -> pa.Schema:
    """The fixed columns, then ``focus:S``, ``gate:S``, ``signal:S`` and ``gradient:S`` for each objective S.

    >>> token_schema(["deft"]).names[-4:]
    ['focus:deft', 'gate:deft', 'signal:deft', 'gradient:deft']
    """
    names = [f"{column}:{parse_objective(spec)}" for spec in objectives for column in OBJECTIVE_COLUMNS]
    return pa.schema([*TOKEN_COLUMNS.items(), *((name, pa.float32()) for name in names)])


def parse_objectives(specs: Iterable[str | Objective]) -> list[Objective]:
    """Objectives that a token alone determines; one that needs a whole optimizer step has no place in a table."""
    chosen = list(dict.fromkeys(map(parse_objective, specs)))
    for objective in chosen:
        if objective.kind != "local":
            raise ValueError(
                f"token table: the gate of `{objective}` depends on a whole optimizer step, which a table does not "
                f"have; leave it out (for `... | mean_one`, the gates of the objective before it are the same but for "
                f"a factor)"
            )
        if "progress" in objective.requires:
            raise ValueError(
                f"token table: `{objective}` depends on the training progress, which a table does not have; name the "
                f"objective that it ends in"
            )
    return chosen


def has_focus(objective: Objective) -> bool:
    """Whether the objective is given by a focus: weighted NLL has none.

    >>> has_focus(parse_objective("deft | floor(0.1)")), has_focus(parse_objective("eaft"))
    (True, False)
    """
    while isinstance(objective, Modifier):
        objective = objective.inner
    return isinstance(objective, Focus)


def encoder_for(
    name: str, tokenizer: Any, *, template: str | None = None, mask: Mask | None = None, max_length: int | None = None
) -> Encoder:
    """How a model's rows are encoded: as its training did, where it is a run; what is given overrides that."""
    if max_length is not None and max_length < 2:
        raise ValueError(f"max_length: a token and its target need at least 2, got {max_length}")
    run, _ = parse_result(name)
    if run is not None:
        given = {"template": template, "mask": mask, "max_length": max_length}
        data = run.read_config().data.model_copy(update={k: v for k, v in given.items() if v is not None})
        return make_encoder(data, tokenizer)
    return Encoder(tokenizer, template=template, mask=mask or "assistant", max_length=max_length or 2048)


# --- what is measured -------------------------------------------------------------------------------------------------


class Measurement:
    """What the head does with the hidden states here: the supervised tokens' columns, flat, in the targets' order."""

    def __init__(self, objectives: Sequence[Objective], context: Context):
        self.objectives, self.context = objectives, context

    @torch.no_grad()
    def __call__(self, head: Any, hidden: Tensor, targets: Tensor, options: HeadOptions) -> dict[str, Tensor]:
        flat, targets = hidden.flatten(0, -2), targets.flatten()
        index = supervised_index(targets)
        rows = max(1, CHUNK_BYTES.get(hidden.device.type, CHUNK_BYTES_ELSEWHERE) // (4 * head.weight.shape[0]))
        parts: list[dict[str, Tensor]] = []
        for part in index.split(rows):
            z = torch.nn.functional.linear(flat[part].to(head.weight.dtype), head.weight, head.bias).float()
            z = z.mul_(options.logit_scale)
            if options.softcap is not None:
                z = z.div_(options.softcap).tanh_().mul_(options.softcap)
            parts.append(self.columns(z, targets[part]))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def columns(self, z: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """A table's numbers from ``[tokens, V]`` logits.

        ||P - e_y||^2 = (1-p)^2 + sum_{v != y} P_v^2 from sums that leave the target out: sum P^2 - 2p + 1 would lose
        all its digits as p goes to 1.
        """
        stats, _, sums, log_sum = logits_stats(z, targets)
        rest, squares = wide(sums.rest), wide(sums.squares)
        error_norm = (squares + rest * rest).sqrt() * (-log_sum).exp()
        rank = (z > z.gather(-1, targets[:, None])).sum(-1)
        top = z.topk(2, -1)
        top_log_p = stats.top_log_p(2)
        # where the target ties with the largest, it is the argmax
        is_top = rank == 0
        other = torch.where(top.indices[:, 0] == targets, 1, 0)[:, None]
        columns = {
            "log_p": stats.log_p,
            "p": stats.p,
            "entropy": stats.entropy,
            "concentration": stats.concentration,
            "rank": rank,
            "top_id": torch.where(is_top, targets, top.indices[:, 0]),
            "top_log_p": torch.where(is_top, stats.log_p, top_log_p[:, 0]),
            "other_id": top.indices.gather(1, other)[:, 0],
            "other_log_p": top_log_p.gather(1, other)[:, 0],
        }
        for objective in self.objectives:
            gate = objective.gate(stats, self.context)
            if has_focus(objective):
                columns[f"focus:{objective}"] = objective.focus(stats, self.context)
            columns[f"gate:{objective}"] = gate
            columns[f"signal:{objective}"] = gate * stats.error
            columns[f"gradient:{objective}"] = gate * error_norm
        return columns


def measure(
    model: Any, pad_token_id: int, examples: Sequence[Encoded], measurement: Measurement, batch_tokens: int
) -> list[dict[str, np.ndarray]]:
    """Each example's columns, in the examples' order; batches hold at most ``batch_tokens`` places, padding included.

    An example longer than that makes a batch of its own.
    """
    found: dict[int, dict[str, np.ndarray]] = {}
    collator = Collator(pad_token_id, padding_free=False)
    for places in batches_of([len(example.input_ids) for example in examples], batch_tokens):
        batch = collator([examples[i] for i in places])
        targets = shifted(batch.pop("labels"))
        inputs = {name: value.to(model.device) for name, value in batch.items()}
        try:
            columns = model(**inputs, deft_targets=targets.to(model.device), deft_call=measurement)
        except ValueError as error:  # NaN
            raise ValueError(f"{examples[places[0]].where} to {examples[places[-1]].where}: {error}") from error
        ends = np.cumsum((targets != IGNORE_INDEX).sum(1).numpy())[:-1]
        split = {name: np.split(column.cpu().numpy(), ends) for name, column in columns.items()}
        for i, place in enumerate(places):
            found[place] = {name: parts[i] for name, parts in split.items()}
    return [found[i] for i in range(len(examples))]


def batches_of(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Places of rows that go through the model together: of similar length, rows x longest <= ``batch_tokens``.

    >>> list(batches_of([3, 9, 2, 5], 10))
    [[2, 0], [3], [1]]
    """
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and (len(batch) + 1) * lengths[i] > batch_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


# --- text -------------------------------------------------------------------------------------------------------------


class Pieces:
    """Token ids as text, token by token, so that a row's pieces join to its text.

    Where several tokens spell one character, the last of them has it and the others have "".
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._backend: Any = tokenizer.backend_tokenizer
        self._alone: dict[int, str] = {}

    def of(self, ids: Sequence[int]) -> list[str]:
        """One piece per token. What a cut leaves of a character is U+FFFD at the end."""
        pieces = [""] * len(ids)
        # decoding goes on from the tokens of the last piece: the text of a token may depend on the one before
        start = done = 0
        known = ""
        for i in range(len(ids)):
            text = self._decode(ids[start : i + 1])
            if text.endswith("\ufffd") and i + 1 < len(ids):
                continue
            pieces[i] = text[len(known) :]
            start, done = done, i + 1
            known = self._decode(ids[start:done])
        return pieces

    def alone(self, token: int) -> str:
        """A token by itself; where it is part of a character, as the vocabulary writes it."""
        text = self._decode([token])
        return self._tokenizer.convert_ids_to_tokens(token) if "\ufffd" in text else text

    def _decode(self, ids: Sequence[int]) -> str:
        if len(ids) > 1:
            return self._backend.decode(ids, skip_special_tokens=False)
        if ids and ids[0] not in self._alone:
            self._alone[ids[0]] = self._backend.decode(ids, skip_special_tokens=False)
        return self._alone[ids[0]] if ids else ""


# --- tables -----------------------------------------------------------------------------------------------------------


class TableMaker:
    """From an encoded row and its columns to a table's lines."""

    def __init__(self, tokenizer: Any, encoder: Encoder, objectives: Sequence[Objective]):
        self.pieces = Pieces(tokenizer)
        self.schema = token_schema(objectives)
        self.ends = np.array(sorted(encoder.end_ids.values()))
        self.special = np.array(sorted({*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}))

    def batch(
        self, places: Sequence[int], examples: Sequence[Encoded], found: list[dict[str, np.ndarray]]
    ) -> TokenBatch:
        columns: dict[str, Any] = {name: np.concatenate([part[name] for part in found]) for name in found[0]}
        positions = [supervised_places(example) for example in examples]
        texts = [self.pieces.of(example.input_ids) for example in examples]
        ids = [np.asarray(example.input_ids)[where] for example, where in zip(examples, positions)]
        columns["row"] = np.repeat(np.asarray(places), [len(where) for where in positions])
        columns["position"] = np.concatenate(positions)
        columns["token_id"] = np.concatenate(ids)
        columns["text"] = [text[i] for text, where in zip(texts, positions) for i in where.tolist()]
        columns["is_eos"] = np.isin(columns["token_id"], self.ends)
        columns["is_format"] = np.isin(columns["token_id"], self.special)
        for name in ("top", "other"):
            columns[f"{name}_text"] = [self.pieces.alone(token) for token in columns[f"{name}_id"].tolist()]
        size = len(columns["row"])
        arrays = [
            pa.array(columns[field.name]).cast(field.type) if field.name in columns else pa.nulls(size, field.type)
            for field in self.schema
        ]
        rows = [row_line(*parts) for parts in zip(places, examples, positions, texts)]
        return TokenBatch(
            pa.RecordBatch.from_arrays(arrays, schema=self.schema), pa.RecordBatch.from_pylist(rows, schema=ROW_SCHEMA)
        )


def supervised_places(example: Encoded) -> np.ndarray:
    """Where in its sequence an example is supervised; never at its first token, which nothing predicts."""
    return np.flatnonzero(np.asarray(example.labels[1:]) != IGNORE_INDEX) + 1


def row_line(place: int, example: Encoded, positions: np.ndarray, texts: list[str]) -> dict[str, Any]:
    """A row's line in ``*.rows.parquet``."""
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
    objectives: Iterable[str | Objective] = DEFAULT, batch_tokens: int = 8192,
) -> Iterator[TokenBatch]:  # fmt: skip
    """A model's token table in parts, in the rows' order; ``examples`` are (place in the data, encoded row).

    Some batches' worth of rows are in memory at a time. The numbers do not depend on how rows are batched, but for
    the rounding of matrix products of other shapes.
    """
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens: at least 1, got {batch_tokens}")
    chosen = parse_objectives(objectives)
    attach_objective(base_of(model))
    model.eval()
    measurement = Measurement(chosen, Context(special_ids=special_token_ids(tokenizer)))
    maker = TableMaker(tokenizer, encoder, chosen)
    for window in windows(examples, WINDOW_BATCHES * batch_tokens):
        places, rows = [place for place, _ in window], [example for _, example in window]
        with torch.no_grad():
            found = measure(model, tokenizer.pad_token_id, rows, measurement, batch_tokens)
        yield maker.batch(places, rows, found)


def windows(examples: Iterable[tuple[int, Encoded]], tokens: int) -> Iterator[list[tuple[int, Encoded]]]:
    """The examples in runs of about so many tokens."""
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


def placed(rows: Sequence[Row], examples: Sequence[Encoded]) -> Iterator[tuple[int, Encoded]]:
    """Each example with its row's place: examples are the rows in order, some left out."""
    place = 0
    for example in examples:
        while rows[place].where != example.where:
            place += 1
        yield place, example
        place += 1


def write_token_table(
    path: str | Path, model: Any, tokenizer: Any, rows: Sequence[Row], *, encoder: Encoder | None = None,
    objectives: Iterable[str | Objective] = DEFAULT, batch_tokens: int = 8192, skip_bad_rows: bool = False,
    facts: Mapping[str, Any] | None = None, progress: Callable[[int], None] = lambda _: None,
) -> Written:  # fmt: skip
    """Write the token table of ``rows`` to ``path`` (Parquet), and the rows' texts beside it.

    ``encoder`` says how rows become tokens (default: the tokenizer's template, answers supervised, 2048 tokens).
    ``facts`` are kept in the schema's metadata; `table_facts` reads them. ``progress`` hears how many rows are done.
    Both files appear whole or not at all.
    """
    path = Path(path)
    chosen = parse_objectives(objectives)
    encoder = encoder or Encoder(tokenizer, max_length=2048)
    encoded = encode_rows(rows, encoder, skip_bad_rows=skip_bad_rows)
    about = {
        "version": __version__,
        "objectives": [str(objective) for objective in chosen],
        "template": encoder.template,
        "max_length": encoder.max_length,
        "mask": encoder.mask,
        **(facts or {}),
    }
    metadata = {METADATA_KEY: json.dumps(about).encode()}
    beside, count = rows_path(path), 0
    with contextlib.ExitStack() as files:
        # the rows first: where there is a token table, there are its rows
        to_tokens = files.enter_context(parquet_file(path, token_schema(chosen).with_metadata(metadata)))
        to_rows = files.enter_context(parquet_file(beside, ROW_SCHEMA.with_metadata(metadata)))
        for part in token_batches(
            model, tokenizer, placed(rows, encoded.examples), encoder, objectives=chosen, batch_tokens=batch_tokens
        ):
            to_tokens.write_batch(part.tokens)
            to_rows.write_batch(part.rows)
            count += part.tokens.num_rows
            progress(part.rows.num_rows)
    return Written(path, beside, count, encoded.facts())


@contextlib.contextmanager
def parquet_file(path: Path, schema: pa.Schema) -> Generator[pq.ParquetWriter]:
    """A file to write batches into, under another name until it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.writing")
    try:
        with open(temporary, "wb") as sink:
            with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
                yield writer
            sink.flush()
            os.fsync(sink.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def rows_path(path: str | Path) -> Path:
    """Where the rows of a token table lie.

    >>> str(rows_path("out/tokens.parquet"))
    'out/tokens.rows.parquet'
    """
    path = Path(path)
    return path.with_name(f"{path.stem}.rows.parquet")


def read_token_table(path: str | Path, columns: Sequence[str] | None = None) -> pa.Table:
    """A token table, or some of its columns; one that is no token table is refused."""
    return _read(Path(path), TOKEN_COLUMNS, columns)


def read_rows_table(path: str | Path) -> pa.Table:
    """The rows of the token table at ``path`` (either file's name will do)."""
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
    return json.loads(metadata.get(METADATA_KEY, b"{}"))


def table_objectives(table: pa.Table) -> list[str]:
    """The objectives that a table has columns for, in its order."""
    return [name.removeprefix("gate:") for name in table.column_names if name.startswith("gate:")]
