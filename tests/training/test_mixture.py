"""`data.total` is about the rows to train on; rows to measure are read whole."""

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


def test_rows_that_the_weights_leave_out_are_told(tmp_path):
    """Equal weights, the default, take as many rows of a large source as the smallest one has."""
    for name, number in (("a", 3000), ("b", 10)):
        lines = [f'{{"prompt": "{name} {n}", "completion": "{n}"}}\n' for n in range(number)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    a, b = (str(tmp_path / f"{name}.jsonl") for name in "ab")
    left_out = f"20 rows by the weights of the sources: 10 of 3,000 of {a}, 10 of 10 of {b}"
    for weight, told in ((1, [left_out]), (300, [])):
        data = {"train": [{"path": a, "weight": weight}, {"path": b}]}
        config, said = RunConfig.model_validate({"model": {"name": "x"}, "data": data}), []
        rows = read_mixture(config.data.train, config, BadRows(), said.append)
        assert said == [f"{a}: 3,000 rows", f"{b}: 10 rows", *told] and len(rows) == (20 if told else 3010)
