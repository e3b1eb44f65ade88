"""Held-out token statistics: against the model's own logits, stopped and resumed, and compared row by row."""

import json
import math

import pytest
import torch

from deftune.cli import main
from deftune.data.encoding import Encoder, encode_rows
from deftune.data.rows import Row
from deftune.evaluation import heldout
from deftune.evaluation.evaluate import Result
from deftune.evaluation.heldout import (
    COLUMNS,
    HeldoutSettings,
    compare,
    measure,
    metric_interval,
    row_record,
    summarize,
    sums_of,
)
from deftune.evaluation.statistics import Interval, wilson_interval
from deftune.objectives import IGNORE_INDEX
from deftune.tokens.passes import score_rows

SETTINGS = HeldoutSettings(model="m", data="d")


def ece(confidence, correct, bins=15):
    """sum_b |B_b|/n |share of correct in B_b - mean confidence in B_b|, bins of equal width, closed above."""
    gaps = [0.0] * bins
    for p, right in zip(confidence, correct, strict=True):
        gaps[max(0, math.ceil(p * bins) - 1)] += float(right) - p
    return sum(map(abs, gaps)) / len(confidence)


def row(index: int) -> Row:
    answer = f"The answer is {12 + index}. " + "What is it? " * (index % 4)
    messages = ({"role": "user", "content": f"What is {index} plus 12?"}, {"role": "assistant", "content": answer})
    return Row(messages, None, f"rows[{index}]", "rows")


@pytest.fixture(scope="module")
def encoder(tokenizer):
    return Encoder(tokenizer, max_length=40)


@pytest.fixture(scope="module")
def encoded(encoder):
    return encode_rows([row(i) for i in range(9)], encoder)


def ends(encoder):
    return frozenset(encoder.end_ids.values())


def result_in(folder, settings=SETTINGS) -> Result:
    result = Result(folder)
    result.open(settings)
    return result


def finish(folder, model, tokenizer, encoded, encoder, **options) -> Result:
    result = result_in(folder)
    records = measure(result, model, tokenizer, encoded, ends(encoder), **options)
    (folder / "summary.json").write_text(json.dumps(summarize(SETTINGS, records, [])))
    return result


def by_hand(model, example):
    """(P of each supervised target's place [tokens, V], the targets)"""
    logits = model(input_ids=torch.tensor([example.input_ids])).logits[0, :-1].double()
    targets = torch.tensor(example.labels[1:])
    kept = targets != IGNORE_INDEX
    return logits[kept].softmax(-1), targets[kept]


@torch.no_grad()
def test_every_metric_is_what_its_definition_says(tmp_path, model, tokenizer, encoded, encoder):
    assert any(example.truncated for example in encoded.examples) and encoded.num_ended > 2  # some rows have no end
    result = result_in(tmp_path / "r")
    records = measure(result, model, tokenizer, encoded, ends(encoder), batch_rows=4)
    summary = summarize(SETTINGS, records, [])
    found = {r["metric"]: r["score"] for r in summary["rows"]}
    p, top, right, squares, entropy, at_end, end_right = [], [], [], [], [], [], []
    for example in encoded.examples:
        P, y = by_hand(model, example)
        mine = P.gather(1, y[:, None])[:, 0]
        p += mine.tolist()
        top += P.amax(1).tolist()
        right += (P.argmax(1) == y).tolist()
        squares += P.square().sum(1).tolist()
        entropy += torch.special.entr(P).sum(1).tolist()
        if int(y[-1]) in ends(encoder):
            at_end.append(float(mine[-1]))
            end_right.append(bool(P[-1].argmax() == y[-1]))
    assert summary["ends"] == len(at_end) < len(encoded.examples)
    expected = {
        "nll": -torch.tensor(p, dtype=torch.float64).log().mean(), "p": sum(p) / len(p),
        "concentration": sum(squares) / len(p),
        "entropy": sum(entropy) / len(p), "top1": sum(right) / len(p), "ece": ece(top, right),
        "end_p": sum(at_end) / len(at_end), "end_top1": sum(end_right) / len(at_end),
    }  # fmt: skip
    assert found == {name: pytest.approx(float(value), rel=1e-4) for name, value in expected.items()}
    for r in summary["rows"]:
        assert r["interval"][0] <= r["score"] <= r["interval"][1] or r["metric"] == "ece"  # its bootstrap is biased up


def test_it_agrees_with_the_scores_of_the_quickstart(tmp_path, model, tokenizer, encoded, encoder):
    records = measure(result_in(tmp_path / "r"), model, tokenizer, encoded, ends(encoder), batch_rows=3)
    stats = score_rows(model, tokenizer, [row(i) for i in range(9)], encoder=encoder).stats
    sums = sums_of(records).sum(0)
    for i, name in enumerate(("nll", "p", "concentration", "entropy"), 1):
        assert float(sums[i]) == pytest.approx(float(getattr(stats, name).sum()), rel=1e-5)
    assert int(sums[0]) == len(stats) == encoded.examples.num_supervised


def test_a_result_of_version_1_is_refused(tmp_path, model, tokenizer, encoded, encoder):
    """It calls the concentration "focus"."""
    result = finish(tmp_path / "r", model, tokenizer, encoded, encoder)
    summary = json.loads((result.folder / "summary.json").read_text())
    summary["settings"]["tasks"]["heldout"] = "1"
    (result.folder / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(ValueError, match=r"measured by an older deftune \(held-out version 1, now 2: .focus. is now"):
        heldout.read_rows(result)


def test_stopped_and_resumed_is_the_same(tmp_path, model, tokenizer, encoded, encoder):
    whole = finish(tmp_path / "whole", model, tokenizer, encoded, encoder)
    result = result_in(tmp_path / "r")
    path = result.folder / "rows.jsonl"

    class Stop(Exception):
        pass

    def stop(done, total):
        if done == 4:
            raise Stop

    with pytest.raises(Stop):
        measure(result, model, tokenizer, encoded, ends(encoder), batch_rows=2, progress=stop)
    with path.open("a") as file:
        file.write('{"row": 8, "wh')  # and a kill in the middle of a line
    seen = []
    records = measure(result, model, tokenizer, encoded, ends(encoder), progress=lambda done, total: seen.append(done))
    assert seen[0] == 4 and len(path.read_text().splitlines()) == 9  # nothing is scored twice
    expected = heldout.read_rows(whole)
    assert [r["targets"] for r in records] == [r["targets"] for r in expected]
    assert sums_of(records) == pytest.approx(sums_of(expected), rel=1e-4, abs=1e-5)
    other = encode_rows([row(i + 1) for i in range(9)], encoder)
    with pytest.raises(ValueError, match=r"9 of 9 rows have other tokens now, such as .*\[\d\]; pass the data"):
        measure(result, model, tokenizer, other, ends(encoder))


def test_a_share_of_no_row_or_of_every_row_is_not_certain():
    drawn = Interval(0.0, 0.0)
    sums = torch.zeros(20, len(COLUMNS) + 15, dtype=torch.float64)
    sums[:, COLUMNS.index("tokens")], sums[:12, COLUMNS.index("ends")] = 5, 1
    assert metric_interval("end_top1", 0.0, sums, drawn) == wilson_interval(0.0, 12)  # twelve rows end
    assert metric_interval("end_top1", 0.25, sums, Interval(0.1, 0.4)) == wilson_interval(0.25, 12)
    assert metric_interval("top1", 1.0, sums, Interval(1.0, 1.0)) == wilson_interval(1.0, 20)
    assert metric_interval("top1", 0.5, sums, Interval(0.4, 0.6)) == Interval(0.4, 0.6)
    assert metric_interval("nll", 2.0, sums, Interval(1.0, 3.0)) == Interval(1.0, 3.0)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda text: text[:-9], "rows.jsonl:9: the line is cut off"),
        (
            lambda text: "".join(text.splitlines(keepends=True)[1:]),
            "rows.jsonl: has 8 of 9 rows; it was cut",
        ),
        (lambda text: text.replace('"nll"', '"loss"', 1), "rows.jsonl:1: the line is damaged (no 'nll')"),
    ],
)
def test_damaged_rows_are_named(damage, text, tmp_path, model, tokenizer, encoded, encoder):
    result = finish(tmp_path / "r", model, tokenizer, encoded, encoder)
    path = result.folder / "rows.jsonl"
    path.write_text(damage(path.read_text()))
    with pytest.raises(ValueError) as caught:
        heldout.compare(result, result)
    assert text in str(caught.value) and "run the same `deftune eval heldout` again" in str(caught.value)


def test_no_end_is_said_and_not_a_number(tmp_path, model, tokenizer):
    short = Encoder(tokenizer, max_length=40)
    encoded = encode_rows([row(3), row(7)], short)
    summary = summarize(SETTINGS, measure(result_in(tmp_path / "r"), model, tokenizer, encoded, ends(short)), [])
    found = {r["metric"]: r["score"] for r in summary["rows"]}
    assert summary["ends"] == 0 and found["end_p"] is None and found["end_top1"] is None and found["nll"] > 0
    json.dumps(summary, allow_nan=False)


def test_compare_pairs_rows(tmp_path, model, make_model, tokenizer, encoded, encoder):
    base = finish(tmp_path / "a", model, tokenizer, encoded, encoder)
    other = make_model(tokenizer)
    with torch.no_grad():
        other.model.norm.weight.mul_(0.05)  # flatter: lower confidence everywhere
    run = finish(tmp_path / "b", other, tokenizer, encoded, encoder)
    rows = {r["metric"]: r for r in compare(base, run)}
    squares = rows["concentration"]
    assert squares["difference"] < 0 < rows["entropy"]["difference"]
    assert squares["interval"][1] < 0 and squares["p"] == 2 / 2**9  # all rows agree: the least there is
    assert squares["score"] - squares["base"] == squares["difference"]
    assert all(r["p_holm"] >= r["p"] for r in rows.values())
    same = compare(base, base)
    assert all(r["difference"] == 0 and r["p"] == 1 for r in same)
    fewer = encode_rows([row(i) for i in range(8)], encoder)
    with pytest.raises(ValueError, match=r"a has 9 rows and .*c has 8; measure both on the same rows"):
        compare(base, finish(tmp_path / "c", model, tokenizer, fewer, encoder))


def test_a_tie_counts_as_the_likeliest(model, tokenizer, encoded, encoder):
    from deftune.losses import token_stats

    example = encoded.examples[0]
    stats = token_stats(torch.tensor([[1.0, 1.0, 0.0], [2.0, 0.0, 1.9]]), torch.tensor([1, 2]))
    record = row_record(0, example, stats, frozenset({2}))
    assert record["top1"] == 1.0 and record["ends"] == 1 and record["end_top1"] == 0.0


def test_confidence_falls_into_the_bin_it_closes(encoded):
    from deftune.objectives.stats import from_columns

    confidence = torch.tensor([0.05, 1 / 15, 0.07, 0.5, 1.0], dtype=torch.float64)
    stats = from_columns(torch.full((5,), -9.0, dtype=torch.float64), [1.0] * 5, [-1.0] * 5, vocab_size=10,
                         top_log_p=confidence.log()[:, None])  # fmt: skip
    gaps = row_record(0, encoded.examples[0], stats, frozenset())["calibration"]
    expected = {0: 0.05 + 1 / 15, 1: 0.07, 7: 0.5, 14: 1.0}
    assert gaps == [pytest.approx(-expected.get(i, 0)) for i in range(15)]


# The command ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, model, tokenizer):
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    lines = [json.dumps({"messages": list(row(i).messages)}) for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_a_run_is_measured_as_it_was_trained_and_its_base_like_it(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    (folder / "run.yaml").write_text(
        "run: runs/a\nmodel: {name: model}\n"
        "data: {train: [{path: rows.jsonl}], template: plain, max_length: 64}\n"
        "train: {batch_size: 6, micro_batch_size: 2, learning_rate: 0.01, epochs: 2}\n"
    )
    assert main(["train", "run.yaml"]) == 0
    heldout = ["--data", "rows.jsonl", "--out"]
    assert main(["eval", "heldout", "runs/a", *heldout, "results/run/tokens"]) == 0
    settings = json.loads((folder / "results/run/tokens/settings.json").read_text())
    assert settings["encoding"]["template"] == "plain" and settings["encoding"]["max_length"] == 64
    assert main(["eval", "heldout", "model", *heldout, "results/other/tokens"]) == 0
    assert main(["eval", "heldout", "model", *heldout, "results/base/tokens", "--like", "runs/a"]) == 0
    capsys.readouterr()
    assert main(["eval", "compare", "results/other", "results/run"]) == 2  # another template: other tokens
    assert "the base as the run was encoded (--like RUN)" in capsys.readouterr().err
    assert main(["eval", "compare", "results/base", "results/run", "--json"]) == 0
    rows = {r["metric"]: r for r in json.loads(capsys.readouterr().out)["heldout"]}
    assert rows["nll"]["difference"] < 0  # of the rows it was trained on
    assert main(["eval", "compare", "results/base", "results/run"]) == 0
    assert "held-out tokens, paired by row" in capsys.readouterr().out
    assert main(["eval", "show", "results/run/tokens", "--show", "2"]) == 0
    assert "the 2 rows with the highest NLL" in capsys.readouterr().out
    assert main(["eval", "heldout", "runs/a", *heldout, "x", "--template", "chatml"]) == 2
    assert "was trained with its own" in capsys.readouterr().err
    weights = folder / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4000] + bytes(4000))  # the same name, other weights
    assert main(["eval", "heldout", "model", *heldout, "results/other/tokens"]) == 2
    assert "its answers are of other weights than model has now" in capsys.readouterr().err


def test_bad_rows_are_refused_or_set_aside(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    with (folder / "rows.jsonl").open("a") as file:
        file.write('{"messages": [{"role": "user", "content": "?"}]}\n')
    command = ["eval", "heldout", "model", "--data", "rows.jsonl"]
    assert main(command) == 2
    assert "rows.jsonl:7: no assistant turn" in capsys.readouterr().err
    assert main([*command, "--skip-bad-rows"]) == 0
    assert "1 row skipped" in capsys.readouterr().err
    assert len((folder / "results/model-heldout/bad_rows.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--data", "nowhere.jsonl"], "no such file or folder"),
        (["--data", "generated:gsm_symbolic"], "--rows: generated:gsm_symbolic has no end"),
        (
            ["--data", "generated:gsm_symbolic", "--rows", "2", "--format", "math"],
            "--format: generated:gsm_symbolic is generated and has none",
        ),
        (["--data", "generated:gsm_symbol", "--rows", "2"], "Did you mean 'gsm_symbolic'"),
        (["--data", "x", "--rows", "0"], "--rows: at least 1, got 0"),
        (["--data", "x", "--batch-size", "0"], "--batch-size: at least 1, got 0"),
        (["--data", "x", "--like", "nowhere"], "is no run"),
    ],
)
def test_wrong_calls_are_one_line(options, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "heldout", "smollm2", *options]) == 2
    err = capsys.readouterr().err
    assert text in err and len(err.splitlines()) == 1 and not list(tmp_path.iterdir())
