"""A dataset of verl over rows that are tokens already: ``data.custom_cls`` of `deftune export verl`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset


class TokenRows(Dataset[dict[str, Tensor]]):
    """Rows of Parquet files with the columns ``input_ids`` and ``loss_mask``, as verl's MultiTurnSFTDataset gives them.

    Args:
        parquet_files: one path, or several.
        tokenizer: not used.
        config: verl's ``data``; ``pad_mode`` must be no_padding.
        max_samples: take the first rows only; -1 is all.

    Raises:
        ValueError: another ``pad_mode``, or a row longer than ``max_length``.
    """

    def __init__(
        self, parquet_files: str | Sequence[str], tokenizer: Any, config: Any, processor: Any = None,
        max_samples: int = -1,
    ):  # fmt: skip
        import pyarrow
        import pyarrow.parquet

        if config.get("pad_mode") != "no_padding":
            raise ValueError(f"deftune: data.pad_mode={config.get('pad_mode')}; exported rows need no_padding")
        paths = [parquet_files] if isinstance(parquet_files, str) else list(parquet_files)
        self.rows: Any = pyarrow.concat_tables([pyarrow.parquet.read_table(path) for path in paths])
        if max_samples > 0:
            self.rows = self.rows.slice(0, max_samples)
        longest = max((len(row) for row in self.rows["input_ids"]), default=0)
        if longest > config.get("max_length", longest):
            raise ValueError(f"deftune: a row has {longest} tokens; data.max_length is {config.get('max_length')}")

    def __len__(self) -> int:
        return self.rows.num_rows

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        input_ids = torch.tensor(self.rows["input_ids"][place].as_py())
        mask = torch.tensor(self.rows["loss_mask"][place].as_py())
        return {"input_ids": input_ids, "position_ids": torch.arange(len(input_ids)), "loss_mask": mask}
