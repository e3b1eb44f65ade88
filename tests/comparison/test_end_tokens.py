"""The probability of held-out end tokens in a comparison's summary and table."""

import pyarrow
import pytest
import torch

from deftune.comparison import summary
from deftune.comparison.show import token_lines


@pytest.mark.parametrize(("ends", "expected", "shown"), [([False, True], 0.25, "0.250"), ([False, False], None, "-")])
def test_end_p_of_token_tables(monkeypatch, ends, expected, shown):
    columns = {"row": [0, 0], "p": [0.5, 0.25], "log_p": [-0.7, -1.4], "concentration": [0.5, 0.5],
               "entropy": [1.0, 1.0], "rank": [0, 1], "is_eos": ends}  # fmt: skip
    table = pyarrow.table(columns)
    monkeypatch.setattr(summary, "read_token_table", lambda path, names: table.select(names))
    monkeypatch.setattr(summary, "exchanged_record", lambda path, rows, columns: (torch.zeros(2, dtype=torch.bool), {}))

    class Cell:
        token_table = None

    record = summary.token_record([Cell()])
    assert record["end_p"] == expected
    header, line = token_lines([{"objective": "deft", "learning_rate": 1e-4, **record}])
    assert dict(zip(header, line, strict=True))["end p"] == shown
