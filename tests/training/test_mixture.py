"""`data.total` is about the rows to train on; sources without weights are joined; rows left out are counted."""

import pytest

from deftune.artifacts.config import RunConfig
from deftune.data.rows import BadRows
from deftune.training.preparation import read_mixture


def test_the_total_of_a_mixture_does_not_limit_rows_to_measure(tmp_path):
    for name, number in (("a", 30), ("b", 30), ("held", 3)):
        lines = [f'{{"prompt": "{name} {n}", "completion": "{n}"}}\n' for n in range(number)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    sources = {name: {"path": str(tmp_path / f"{name}.jsonl")} for name in ("a", "b", "held")}
    data = {"train": [sources["a"], sources["b"]], "eval": [sources["held"]], "total": 20}
    config = RunConfig.model_validate({"model": {"name": "x"}, "data": data})
    bad = BadRows()
    trained = read_mixture(config.data.train, config, bad, lambda _: None, total=config.data.total)
    assert len(trained) == 20 and sum(row.source.endswith("a.jsonl") for row in trained) == 10
    assert len(read_mixture(config.data.eval, config, bad, lambda _: None)) == 3


def test_rows_that_the_weights_leave_out_are_counted(tmp_path):
    for name, number in (("a", 30), ("b", 3)):
        lines = [f'{{"prompt": "{name} {n}", "completion": "{n}"}}\n' for n in range(number)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))

    def read(weights, total=None):
        sources = [{"path": str(tmp_path / f"{name}.jsonl"), "weight": weight} for name, weight in weights.items()]
        config = RunConfig.model_validate({"model": {"name": "x"}, "data": {"train": sources}})
        said = []
        rows = read_mixture(config.data.train, config, BadRows(), said.append, total=total)
        return len(rows), [line for line in said if "WARNING" in line]

    count, (warning,) = read({"a": 1, "b": 1})
    assert count == 6 and warning == (
        f"WARNING: 6 of 33 rows are used, as many as the weights and the rows of {tmp_path / 'b.jsonl'} allow; "
        f"leave the weights out to use all"
    )
    assert read({"a": 30, "b": 3}) == (33, [])
    assert read({"a": 1, "b": 1}, total=4) == (4, [])  # asked for
    assert read({"a": None, "b": None}) == (33, []) and read({"a": None, "b": None}, total=11) == (11, [])
    with pytest.raises(ValueError, match=r"b.jsonl: has no weight, and other sources have one; give every source a w"):
        read({"a": 1, "b": None})
