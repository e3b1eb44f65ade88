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
