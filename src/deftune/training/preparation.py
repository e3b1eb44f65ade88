"""What a run is made of, before there is a model: the config checked, the data read, masked and packed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from deftune.artifacts.config import ConfigError, RunConfig, Source
from deftune.artifacts.embedding import not_embedded
from deftune.artifacts.files import cache_folder
from deftune.artifacts.folders import one_at_a_time
from deftune.artifacts.models import load_tokenizer, resolve_model
from deftune.artifacts.results import encoder_options
from deftune.artifacts.templates import set_template
from deftune.data.cache import (
    ENCODING,
    Reading,
    code_digest,
    digest_files,
    encode_cached,
    find_encoded,
    is_cached,
    write_reading,
)
from deftune.data.encoding import EncodedRows, Encoder, NoExamples
from deftune.data.mixing import exchange_partners, exchanged_row, mix_places, split_places
from deftune.data.packing import pack
from deftune.data.parallel import encode_packed
from deftune.data.rows import BadRows, PackedRows, Row
from deftune.data.sources import iterate_rows
from deftune.data.spool import Spool
from deftune.training.display import RowProgress
from deftune.training.machine import base_dtype, check_config, data_ranks, expects_compiled, is_main, world_size
from deftune.training.plan import NO_CHECKPOINTING, Checkpointing, choose_checkpointing


@dataclass
class Prepared:
    """Everything but the model: what `--dry-run` looks at."""

    config: RunConfig
    tokenizer: Any
    source: str  # what from_pretrained takes
    train: EncodedRows
    eval: EncodedRows | None
    bad: BadRows
    sequences: Sequence[Any]  # what a micro-batch is made of: rows, or packs of them
    now: datetime | None = None  # what the chat template wrote as the time, if it writes one
    checkpointing: Checkpointing = NO_CHECKPOINTING

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        train = self.config.train
        per_epoch = -(-len(self.sequences) // train.batch_size)
        steps = max(1, round(per_epoch * train.epochs))
        return steps if train.max_steps is None else min(steps, train.max_steps)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a rank in the run."""
        train = self.config.train
        return self.steps * train.batch_size // (train.micro_batch_size * data_ranks(self.config))


def read_mixture(
    sources: list[Source], config: RunConfig, bad: BadRows, notice: Callable[[str], None], *, total: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> PackedRows:  # fmt: skip
    """The rows of the sources in an order of the seed; ``total`` of them, or all, or as many as the weights allow.

    Their text is in one spool, on disk where there is much. ``progress`` gets the lines that report the progress
    of the reading; by default ``notice`` gets them too.
    """
    without = [source.place for source in sources if source.weight is None]
    if 0 < len(without) < len(sources):
        raise ValueError(
            f"{without[0]}: has no weight, and other sources have one; give every source a weight, or none"
        )
    read: list[tuple[PackedRows, float]] = []
    spool = Spool()
    for source in sources:
        found = iterate_rows(
            source.place, format=source.format, split=source.split, limit=source.limit, bad=bad, fields=source.fields
        )
        rows = PackedRows(_counted(found, f"reading {source.place}", progress or notice), bad, spool)
        if source.exchange:
            partners = exchange_partners(rows, source.exchange)
            changed = PackedRows(
                (exchanged_row(rows, *pair) for pair in enumerate(partners) if pair[1] >= 0), bad, spool
            )
            notice(f"{source.place}: {len(changed):,} of {len(rows):,} rows have the answer of another row")
            rows = changed if source.exchanged_only else _replaced(rows, changed, partners)
        notice(f"{source.place}: {len(rows):,} rows")
        read.append((rows, len(rows) if source.weight is None else source.weight))
    if len(read) == 1 and total is None:
        return read[0][0]
    places = mix_places(read, total=total, seed=config.train.seed)
    mixed = PackedRows.gather((read[index][0], place) for index, place in places)
    sizes = [len(rows) for rows, _ in read]
    if total is None and len(mixed) < sum(sizes):
        _, least = min(zip(read, sources), key=lambda pair: len(pair[0][0]) / pair[0][1])
        notice(
            f"WARNING: {len(mixed):,} of {sum(sizes):,} rows are used, as many as the weights and the rows of "
            f"{least.place} allow; leave the weights out to use all"
        )
    return mixed


def _replaced(rows: PackedRows, changed: PackedRows, partners: Sequence[int]) -> PackedRows:
    """The rows, with the next of the changed ones for each that has a partner; no text is copied."""
    places = iter(range(len(changed)))
    return PackedRows.gather(
        (rows, place) if partner < 0 else (changed, next(places)) for place, partner in enumerate(partners)
    )


def _counted(rows: Iterable[Row], title: str, notice: Callable[[str], None]) -> Iterator[Row]:
    with RowProgress(title, None, notice, shown=is_main()) as progress:
        for number, row in enumerate(rows, 1):
            yield row
            progress.update(number)


def prepare(
    config: RunConfig, notice: Callable[[str], None], now: datetime | None = None, *, here: bool = True
) -> Prepared:
    """Read, mix, mask and pack the data; the model's weights are not touched.

    ``now``: the time that the chat template writes, if it writes one; None: that of this call.
    ``here``: whether this machine is to train the run, so that what it cannot do is refused.
    """
    if here:
        check_config(config)
    return plan_run(read_data(config, notice, now), config, here=here)


def read_data(config: RunConfig, notice: Callable[[str], None], now: datetime | None = None) -> Prepared:
    """The part of `prepare` that depends on `data_key` alone; runs that have the key in common can share it.

    Files that an earlier start read with the same options are not read again, if their encoded rows are in the cache.
    Of several processes that want the same rows one reads and encodes them, while the others wait.
    """
    coding = _load_coding(config, notice, now)
    key = sources_key(config) if is_cached(coding.encoder) else None
    if key is None:
        return _read_rows(config, notice, coding)
    if found := _find_prepared(config, key, coding, notice):
        return found
    with one_at_a_time(cache_folder() / "encoded" / f".lock-reading-{key[:2]}", notice, ENCODING):
        return _find_prepared(config, key, coding, notice, notice) or _read_rows(config, notice, coding, key)


@dataclass(frozen=True)
class _Coding:
    """The tokenizer of a run, and what encodes its rows."""

    source: str  # what from_pretrained takes
    tokenizer: Any
    encoder: Encoder


def _load_coding(config: RunConfig, notice: Callable[[str], None], now: datetime | None) -> _Coding:
    source = resolve_model(config.model.name, notice, revision=config.model.revision)
    tokenizer = load_tokenizer(source, **model_options(config))
    encoder = Encoder(tokenizer, **encoder_options(config.data), now=now)
    set_template(tokenizer, config.data.template)  # saved with the model
    return _Coding(source, tokenizer, encoder)


def model_options(config: RunConfig) -> dict[str, Any]:
    return {"revision": config.model.revision, "trust_remote_code": config.model.trust_remote_code}


def _find_prepared(
    config: RunConfig, key: str, coding: _Coding, notice: Callable[[str], None],
    warn: Callable[[str], None] = lambda _: None,
) -> Prepared | None:  # fmt: skip
    """The data as an earlier start read it; None where there is none in the cache."""
    bad = BadRows(skip=config.data.skip_bad_rows)
    folder = cache_folder() / "encoded"
    found = find_encoded(key, coding.encoder, folder, bad=bad, notice=notice, warn=warn)
    return _assemble(config, coding, found[0], found[1] if len(found) > 1 else None, bad) if found else None


def _read_rows(config: RunConfig, notice: Callable[[str], None], coding: _Coding, key: str | None = None) -> Prepared:
    """Read and encode the sources; with ``key``, remember under it what was read."""
    data = config.data
    unread, refused = BadRows(skip=data.skip_bad_rows), BadRows(skip=data.skip_bad_rows)
    lines: list[str] = []

    def print_line(text: str) -> None:
        lines.append(text)
        notice(text)

    rows = read_mixture(data.train, config, unread, print_line, total=data.total, progress=notice)
    held = read_mixture(data.eval, config, unread, print_line, progress=notice) if data.eval else PackedRows()
    if data.holdout:
        sides = split_places(rows, data.holdout, config.train.seed)
        rows, held = (PackedRows.gather((rows, place) for place in side) for side in sides)
        print_line(f"{len(held):,} rows held out")
    is_stable = key is not None and sources_key(config) == key  # the files did not change while they were read
    train = encode(rows, coding.encoder, refused, notice)
    try:
        evaluation = encode(held, coding.encoder, refused, notice) if held else None
    except NoExamples as error:
        raise ValueError(f"rows to evaluate on ({'data.holdout' if data.holdout else 'data.eval'}): {error}") from None
    if key is not None and is_stable:
        reading = Reading([side.digest for side in (rows, held) if side], lines, unread.rows)
        write_reading(key, reading, coding.encoder, cache_folder() / "encoded", notice)
    del rows, held
    unread.extend(refused.rows)
    return _assemble(config, coding, train, evaluation, unread)


def _assemble(
    config: RunConfig, coding: _Coding, train: EncodedRows, evaluation: EncodedRows | None, bad: BadRows
) -> Prepared:
    for encoded in (train, *([evaluation] if evaluation else [])):
        check_embedding(encoded, coding.tokenizer, coding.source, **model_options(config))
    data = config.data
    sequences: Sequence[Any] = pack(train.examples, data.max_length) if data.packing else train.examples
    now = coding.encoder.now if coding.encoder.depends_on_the_date else None
    return Prepared(config, coding.tokenizer, coding.source, train, evaluation, bad, sequences, now)


# options that change how rows are encoded or used, not which rows there are
NOT_OF_ROWS = {
    "template", "template_options", "end_tokens", "bos", "mask", "max_length", "overlong", "packing", "tasks",
}  # fmt: skip


def sources_key(config: RunConfig) -> str | None:
    """A name for the rows of a config, made without reading them; None where a source has no files to hash.

    It stands for the sha256 of every file, the options that change rows, and the code that reads them.
    """
    data = config.data
    files: list[list[tuple[str, str]]] = []
    for source in (*data.train, *data.eval):
        found = digest_files(source.place, source.split, source.limit)
        if found is None:
            return None
        files.append(found)
    seed = config.train.seed if _is_seeded(config) else None
    content = [code_digest(Path(__file__)), data.model_dump(mode="json", exclude=NOT_OF_ROWS), seed, files]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _is_seeded(config: RunConfig) -> bool:
    """Whether the seed mixes sources or holds rows out."""
    data = config.data
    return bool(data.holdout) or data.total is not None or max(len(data.train), len(data.eval)) > 1


def data_key(config: RunConfig) -> str:
    """Everything in a config that its data depends on; the seed only where it mixes sources or holds rows out."""
    seed = config.train.seed if _is_seeded(config) else None
    return json.dumps([config.data.model_dump_json(), config.model.model_dump_json(), seed])


def plan_run(read: Prepared, config: RunConfig, *, here: bool = True) -> Prepared:
    """The data of `read_data` for a run whose config has the same `data_key`."""
    prepared = replace(read, config=config)
    if here:
        source = prepared.source
        gpu = torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else None
        base = config.model.quantization or base_dtype(config)
        compiles = expects_compiled(config, prepared.micro_batches)
        prepared.checkpointing = choose_checkpointing(config, source, base, world_size(), gpu, compiles)
    late = [step for step in config.train.save_at if step > prepared.steps]
    if late and prepared.sequences:
        raise ConfigError(f"train.save_at: step {late[0]} never comes, the run has {prepared.steps}; leave it out")
    return prepared


def encode(rows: PackedRows, encoder: Encoder, bad: BadRows, notice: Callable[[str], None]) -> EncodedRows:
    """The rows' tokens and masks, from the cache or made by several processes.

    With the cache one rank of a machine encodes, on all cores, while the others wait and then read its result.
    """
    ranks = 1 if is_cached(encoder) else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def make() -> EncodedRows:
        with RowProgress("encoding rows", len(rows), notice, shown=is_main()) as progress:
            return encode_packed(rows, encoder, bad=bad, ranks=ranks, progress=progress.update)

    return encode_cached(rows, encoder, cache_folder() / "encoded", bad=bad, encode=make, notice=notice)


def text_config(source: str, **options: Any) -> Any:
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(source, **options).get_text_config()
    except Exception as error:  # a config.json of any shape: each class of config checks in its own way
        raise ValueError(f"model: cannot read the config of {source}: {str(error).splitlines()[:1]}") from error


def check_embedding(encoded: EncodedRows, tokenizer: Any, source: str, **options: Any) -> None:
    """A token without a row in the model's embedding is an IndexError on a CPU and a device assert on a GPU."""
    size = text_config(source, **options).vocab_size
    if tokenizer.pad_token_id >= size:
        found: tuple[int, str] | None = (tokenizer.pad_token_id, "the padding token")
    else:
        found = encoded.examples.first_above(size)
    if found:
        raise not_embedded(tokenizer, *found, size, of=f" of {source}")
