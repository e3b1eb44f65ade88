"""The micro-batches of a run: made from places in the data, and what is read from them again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset

from deftune.data.packing import Collator


class Batches:
    """A collator for datasets of places in one list: the examples stay as they are, whatever a dataset would make of
    them."""

    def __init__(self, sequences: Sequence[Any] | ConcatDataset[Any], collator: Collator):
        self.sequences, self.collator = sequences, collator

    def __call__(self, rows: list[dict[str, int]]) -> dict[str, torch.Tensor]:
        sequences = [self.sequences[row["place"]] for row in rows]
        batch = self.collator(sequences)
        batch["places"] = torch.tensor([row["place"] for row in rows])  # names the rows of a batch that is not finite
        if "attention_mask" not in batch:  # the batch itself does not show where a sequence ends: -1 is padding
            lengths = [len(sequence.input_ids) for sequence in sequences]
            batch["row_of"] = torch.full_like(batch["labels"], -1)
            places = batch["row_of"].view(-1).split(lengths) if self.collator.padding_free else batch["row_of"]
            for row, (place, length) in enumerate(zip(places, lengths)):
                place[:length] = row
        return batch


def make_dataset(places: range) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"place": np.arange(places.start, places.stop)})  # no list of Python's integers


def rows_of(batch: dict[str, Any]) -> Tensor | None:
    """Which row of the batch a token belongs to; None where TRL's collator laid rows end to end without a trace."""
    labels = batch["labels"]
    if "row_of" in batch:
        return batch["row_of"]
    if "position_ids" in batch and "attention_mask" not in batch:
        return None
    return torch.arange(len(labels), device=labels.device)[:, None]


def input_tokens(inputs: dict[str, Any]) -> Tensor:
    """How many tokens went into the model, padding left out."""
    mask = inputs["row_of"] >= 0 if "row_of" in inputs else inputs.get("attention_mask")
    ids = inputs["input_ids"]
    return torch.full((), ids.numel(), device=ids.device) if mask is None else mask.sum()  # made there: no waiting


def save_batches(folder: Path, batches: list[Any]) -> Path:
    """Write a step's micro-batches as safetensors files, one each, for a look or a rerun."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for number, batch in enumerate(batches):
        # copies: some are one tensor under two names, which safetensors refuses
        tensors = {name: value.cpu().clone().contiguous() for name, value in batch.items() if isinstance(value, Tensor)}
        save_file(tensors, folder / f"micro-batch-{number + 1}.safetensors")
    return folder
