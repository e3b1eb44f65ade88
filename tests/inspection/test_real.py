"""A real model on real rows: what the token table says of SmolLM2 on GSM8K."""

from pathlib import Path

import numpy as np
import pytest

from deftune.artifacts.models import packaged_folder
from deftune.artifacts.results import load_result
from deftune.data.sources import read_rows
from deftune.tokens.table import read_rows_table, read_token_table, write_token_table

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "gsm8k" / "train.jsonl.gz"


@pytest.mark.skipif(not DATA.is_file(), reason=f"GSM8K is not part of the repository and not at {DATA}")
@pytest.mark.skipif(not packaged_folder("smollm2").is_dir(), reason="smollm2 is not in the cache: `deftune quickstart`")
def test_smollm2_on_gsm8k(tmp_path):
    path = tmp_path / "tokens.parquet"
    model, tokenizer = load_result("smollm2")
    rows = read_rows(DATA, limit=4)
    write_token_table(path, model, tokenizer, rows, batch_tokens=512)
    table = read_token_table(path)
    columns = {name: np.asarray(table[name]) for name in ("p", "concentration", "rank", "gate:deft", "gate:nll")}
    for line, row in zip(read_rows_table(path).to_pylist(), rows):
        assert line["answer"] == row.messages[-1]["content"] + "<|im_end|>"
        assert line["where"] == row.where and row.messages[0]["content"] in line["prompt"]
    assert columns["p"].mean() == pytest.approx(0.55, abs=0.1)  # the strong regime of this model
    assert columns["concentration"].mean() == pytest.approx(0.60, abs=0.1)
    assert (columns["rank"] == 0).mean() > 0.5
    assert (columns["gate:nll"] == 1).all() and (columns["gate:deft"] <= 1).all()
