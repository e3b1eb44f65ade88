"""Rows and tokens in a file, in processes that are started and not forked."""

import multiprocessing
import pickle

import numpy as np
import pytest
import torch

from deftune.data import spool as spools
from deftune.data.examples import Encoded, Examples
from deftune.data.packing import Collator, pack
from deftune.data.rows import PackedRows, Row
from waiting import HANG_SECONDS

ROWS = [Row(({"role": "user", "content": f"é {i}"},), None, f"a.jsonl:{i}", "a.jsonl") for i in range(20)]


@pytest.fixture
def on_disk(monkeypatch, tmp_path):
    """Every spool is a file after its first bytes."""
    monkeypatch.setattr(spools, "MEMORY_BYTES", 16)
    monkeypatch.setenv("DEFTUNE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_data_workers_that_are_not_forked_read_the_same_file(on_disk, method):
    examples = Examples(Encoded([i, i + 1, i + 2], [-100, i + 1, i + 2], f"a:{i}", "a") for i in range(60))
    assert isinstance(examples.columns["input_ids"], np.memmap)
    packs = pack(examples, 9)
    collator = Collator(0, padding_free=False)
    loader = torch.utils.data.DataLoader(
        packs, batch_size=4, num_workers=1, collate_fn=collator, multiprocessing_context=method
    )
    expected = [collator(packs[start : start + 4]) for start in range(0, len(packs), 4)]
    for batch, own in zip(loader, expected, strict=True):
        assert all(torch.equal(batch[name], own[name]) for name in own)
    assert list(packs)[-1] == packs[len(packs) - 1]  # this process still reads it


class Kinds:
    """A collator that says in which process the tokens are a map of a file."""

    def __init__(self, examples):
        self.examples = examples

    def __call__(self, batch):
        return self.examples.columns["input_ids"]._mmap is not None, [example.input_ids for example in batch]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_data_workers_that_are_not_forked_map_the_cached_rows(on_disk, tmp_path, method):
    """Otherwise each of them would get a copy of all tokens."""
    made = Examples(Encoded([i, i + 1], [-100, i + 1], f"a:{i}", "a") for i in range(6))
    made.save(tmp_path)
    examples = Examples.open(tmp_path, made.sources)
    loader = torch.utils.data.DataLoader(
        examples, batch_size=3, num_workers=1, collate_fn=Kinds(examples), multiprocessing_context=method
    )
    assert list(loader) == [(True, [[i, i + 1] for i in range(start, start + 3)]) for start in (0, 3)]
    copied = pickle.loads(pickle.dumps(examples))
    (tmp_path / "input_ids.bin").unlink()
    assert list(copied) == list(examples) == list(made)


def _compare(rows: PackedRows, answer) -> None:
    """In a spawned process: the rows, whether they are in a file, and what an attempt to add one says."""
    try:
        rows.texts.append(b"x")
    except ValueError as error:
        answer.put((list(rows), rows.texts.spool._file is not None, str(error)))


def test_a_started_process_reads_rows_and_cannot_add_any(on_disk):
    rows, context = PackedRows(ROWS), multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=_compare, args=(rows, answer))
    process.start()
    found, in_file, text = answer.get(timeout=HANG_SECONDS)
    process.join()
    assert found == list(rows) and in_file and "can only be read" in text
