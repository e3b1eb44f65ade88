"""`deftune advise`: the place of the data, the rule from evidence to objective, and what it never claims."""

import dataclasses
import json

import pytest

from deftune.cli import main
from deftune.cli.advise import probe_text
from deftune.comparison.advise import (
    advice_from,
    advise,
    best_of,
    best_when_sampled,
    gain,
    probe,
    regime_of,
    strength_of,
)
from deftune.comparison.evidence import BEST, GREEDY, HOT, Evidence, evidence
from deftune.objectives import objective


def mean(value: float, spread: float = 0.01) -> dict:
    return {"mean": value, "low": value - spread, "high": value + spread}


def measured(p: float, **changes) -> dict:
    """The numbers of a token table: 1,000 tokens, 50 conflicts."""
    return {
        "tokens": 1000, "rows": 20, "nll": mean(1.0), "p": mean(p), "concentration": mean(p), "entropy": mean(1.0),
        "conflicts": mean(0.05), "top1": mean(0.7), "conflict_loss": 0.3, "end_rows": 1.0, "end_p": 0.4,
        "conflict_kinds": {"end": 3, "format": 1, "blank": 6, "other": 40}, **changes,
    }  # fmt: skip


def row(name: str, measure: str, difference: float, *, half: float | None = 1.0, seeds: int = 3, **more) -> Evidence:
    interval = {} if half is None else {"low": difference - half, "high": difference + half}
    settled = {"regime": "strong", "model": "a model", "against": "nll", "source": "study", "where": "here",
               "learning_rates": (1e-5,)}  # fmt: skip
    return Evidence(objective=name, measure=measure, difference=difference, seeds=seeds, **(settled | interval | more))


def test_the_shipped_evidence_gives_three_answers_for_three_regimes():
    """NLL in each, since no gain at the best temperature is decided; the reasons and the answer at T = 1 differ."""
    weak, intermediate, strong = (advice_from(measured(p)) for p in (0.01, 0.36, 0.55))
    assert (weak.regime, weak.objective, weak.sampled) == ("weak", "nll", None)
    assert weak.because == ("measured below NLL at the best temperature of each (learning rate 5e-05): linear",)
    assert (intermediate.regime, intermediate.objective, intermediate.sampled) == ("intermediate", "nll", None)
    assert intermediate.because == (
        "measured below NLL at the best temperature of each (learning rate 5e-05): deft",  # MedQuAD
        "no tuned model was above a constant answer (medicine)",
    )
    assert (strong.regime, strong.objective, strong.sampled) == ("strong", "nll", "deft")
    assert strong.learning_rates == (5e-6,) and "learning rate, 5e-06 (2 seeds" in strong.because[-1]
    assert "all tuned models were below the untuned model (GSM8K)" in strong.because
    assert len({(a.objective, a.sampled, a.because) for a in (weak, intermediate, strong)}) == 3
    assert "GSM8K with SmolLM2-135M-Instruct (0.55)" in strong.place


def test_every_row_names_an_objective_and_its_source():
    for one in evidence():
        assert str(objective(one.objective)) == one.objective and str(objective(one.against)) == one.against
        assert one.regime in ("strong", "intermediate", "weak", "mixed") and one.where and one.seeds >= 1
        assert one.low is None or one.low <= one.difference <= one.high


def test_an_objective_is_advised_where_a_decided_difference_says_so():
    up, open_, down = row("deft", BEST, 3.0), row("eaft", BEST, 0.5), row("linear", BEST, -4.0)
    assert (up.decided, open_.decided, down.decided) == (1, 0, -1)
    assert best_of([up, open_, down]) == "deft" and best_of([open_, down]) == "nll" and best_of([]) == "nll"
    assert best_of([row("deft", BEST, 3.0, p_holm=0.2)]) == "nll"  # Holm's p-value decides where there is one
    assert "+3.0 points [+2.0, +4.0] (p = 0.2 after Holm), best temperature" in str(row("deft", BEST, 3.0, p_holm=0.2))
    loose = row("deft", BEST, 3.0, p_holm=0.01, p_variance=0.3)  # the seeds differ
    assert best_of([loose]) == "nll" and "(p = 0.3 by the analysis of variance)" in str(loose)
    assert "Holm" not in str(row("deft", BEST, 3.0, p_holm=0.01)) + str(row("deft", BEST, 0.5, p_holm=0.9))
    assert best_of([up, row("deft", BEST, -3.0, model="another")]) == "nll"
    assert best_of([row("deft", HOT, 9.0), row("deft", GREEDY, 9.0)]) == "nll"


def test_rows_that_show_no_knowledge_are_printed_and_decide_nothing():
    idle = [row("deft", measure, 9.0, counts=False, note="no tuned model was above a constant answer", data="trivia")
            for measure in (BEST, HOT)]  # fmt: skip
    advice = advice_from(measured(0.6), known=idle)
    assert (advice.objective, advice.sampled) == ("nll", None) and len(advice.evidence) == 2
    assert advice.because[-1] == "no tuned model was above a constant answer (trivia)"


def sampled(rows, objective):
    found = best_when_sampled(rows, objective)
    return found and found.objective


def test_for_sampled_answers_an_objective_that_costs_little_greedily_goes_first():
    rows = [row("deft", HOT, 17.0), row("deft", GREEDY, -3.0), row("cayley", HOT, 8.0), row("cayley", GREEDY, -0.5)]
    assert sampled(rows, "nll") == "cayley" and sampled(rows[:2], "nll") == "deft"
    assert sampled(rows[:-1], "nll") == "deft"  # what cayley costs greedily is not known
    assert sampled(rows, "cayley") is None
    assert sampled([row("deft", HOT, 4.0)], "nll") is None  # less than the study's 5 points
    assert sampled([row("deft", HOT, 9.0, half=10.0)], "nll") is None
    assert sampled([row("deft", HOT, 9.0, half=None)], "nll") == "deft"


def test_a_learning_rate_at_which_an_objective_costs_nothing_greedily_goes_first():
    low = {"learning_rates": (5e-6,)}
    rows = [row("deft", GREEDY, -4.0), row("deft", HOT, 16.0), row("cayley", GREEDY, 0.0), row("cayley", HOT, 12.0),
            dataclasses.replace(row("deft", GREEDY, 1.0), **low), dataclasses.replace(row("deft", HOT, 15.0), **low),
            ]  # fmt: skip
    found = best_when_sampled(rows, "nll")
    assert found is not None and (found.objective, found.learning_rates) == ("deft", (5e-6,))


def test_a_cost_counts_for_the_cells_that_it_was_measured_on():
    rows = [row("deft", GREEDY, -6.0), row("deft", HOT, 9.0), row("cayley", GREEDY, -0.5), row("cayley", HOT, 8.0)]
    elsewhere = [row("deft", GREEDY, 0.0, model="another"), row("deft", HOT, 1.0, model="another")]
    assert (
        sampled(rows, "nll") == "cayley" == sampled([*rows, *elsewhere], "nll") == sampled([*elsewhere, *rows], "nll")
    )


def test_a_gain_is_above_the_best_score_of_nll():
    """At 2e-5 NLL is poor, and DEFT is far above it without being good."""
    good = row("deft", HOT, 12.0, score=50.0)
    poor = row("deft", HOT, 15.0, score=40.0, learning_rates=(2e-5,))
    cost = [row("deft", GREEDY, 0.0, score=50.0), row("deft", GREEDY, 1.0, score=45.0, learning_rates=(2e-5,))]
    ours = [good, poor, *cost]
    assert [gain(one, ours) for one in ours] == [12.0, 2.0, 0.0, -5.0]
    assert best_when_sampled(ours, "nll") is good and best_when_sampled([poor, *cost], "nll") is poor
    assert best_when_sampled([poor, row("eaft", HOT, 0.0, score=38.0)], "nll") is None
    assert gain(row("deft", HOT, 7.0), ours) == 7.0  # no score is recorded
    advice = advice_from(measured(0.6), known=ours)
    assert advice.because[-1] == (
        "at T = 1 deft is 12.0 points above NLL at the same learning rate, 1e-05 (3 seeds; the interval excludes 0), "
        "and 12.0 above NLL at its best rate"
    )
    assert advice.strength == "moderate: 3 seeds of 1 model at most (a model)"
    few = [dataclasses.replace(good, seeds=1), cost[0], row("linear", HOT, -3.0, model="another")]
    assert advice_from(measured(0.6), known=few).strength == "weak: 1 seed of 1 model at most (a model)"


def test_without_a_measured_cell_the_advice_says_so_and_the_claim_stays_the_papers():
    claim = row("deft", "the paper's average", 9.7, half=None, source="paper", where="Table 1", model="4 models")
    advice = advice_from(measured(0.6), known=[claim])
    assert advice.objective == "nll" and advice.sampled is None and advice.learning_rates == ()
    assert advice.strength.startswith("none: no cell of this regime was measured")
    assert advice.place.endswith("no cell was measured") and str(claim).endswith("the paper, Table 1")
    assert strength_of([row("deft", BEST, 1.0, seeds=1)]) == "weak: 1 seed of 1 model at most (a model)"
    assert (
        strength_of([row("deft", BEST, 1.0, model="a (Q4)"), row("deft", BEST, 1.0, model="b")])
        == "strong: 3 seeds of 2 models at most (a, b)"
    )


def test_the_interval_of_p_may_reach_into_another_regime():
    assert [regime_of(p) for p in (0.19, 0.2, 0.44, 0.45)] == ["weak", "intermediate", "intermediate", "strong"]
    assert "and within its interval strong" in advice_from(measured(0.44) | {"p": mean(0.44, 0.03)}).place


def test_what_to_watch_comes_from_the_rows():
    lines = advice_from(measured(0.55)).watch
    assert any("4 of 50 confident conflicts are end or format tokens, where the gate of deft" in line for line in lines)
    assert any("5.0% of the tokens: `deftune inspect`" in line for line in lines)
    lines = advice_from(measured(0.01, end_rows=0.0, end_p=None)).watch  # the advice there is nll: no gate is small
    assert lines[0].startswith("no row has a supervised end token, so the tuned model will not learn to stop")
    assert not any("where the gate of" in line for line in lines)
    assert "25% of the rows have no supervised end token" in advice_from(measured(0.36, end_rows=0.75)).watch[0]


def test_the_command_measures_and_answers(model_folder, data_file, capsys):
    arguments = ["advise", str(model_folder), str(data_file), "--rows", "6"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    for label in ("p, sum P^2", "conflicts", "end tokens", "regime", "objective", "learning rate", "evidence", "watch"):
        assert f"\n{label}" in out, label
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    again = advise(str(model_folder), str(data_file), rows=6)
    assert found == json.loads(json.dumps(dataclasses.asdict(again))) and found["measured"]["rows"] == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "3"], "--steps: is for --probe; add --probe, or leave it out"),
        (["--learning-rate", "1e-4"], "--learning-rate: is for --probe; add --probe, or leave it out"),
        (["--rows", "0"], "--rows: "),
        (["--fields", "prompt"], "--fields: "),
        (["--probe", "--seeds", "a"], "--seeds: whole numbers with commas, got 'a'"),
        (["--probe", "--seeds", "1,1"], "probe: seeds: 1 is there twice"),
        (["--probe", "--seeds=-1"], "probe: seeds.0: Input should be greater than or equal to 0 (got -1)"),
        (["--probe", "--learning-rate", "0"], "probe: learning_rates.0: Input should be greater than 0 (got 0.0)"),
        (["--probe", "--rows", "4"], "--rows: 4 rows are too few to train and to hold out; give at least 8"),
    ],
)
def test_wrong_options_are_named(model_folder, data_file, capsys, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    assert main(["advise", str(model_folder), str(data_file), *options]) == 2
    assert f"deftune: {message}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_probe_trains_a_model_not_a_run(run, data_file, tmp_path):
    with pytest.raises(ValueError, match="is a run; name its base model, which the probe trains"):
        probe(str(run.folder), str(data_file), tmp_path)


@pytest.mark.long
def test_a_probe_compares_on_rows_that_it_did_not_train_on(tiny_model, chat_file, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--probe", "--steps", "2", "--rows", "12", "--learning-rate", "1e-3", "--json"]
    assert main(["advise", str(tiny_model), str(chat_file), *options]) == 0
    lines = json.loads(capsys.readouterr().out)["probe"]
    assert [line["objective"] for line in lines] == ["base", "nll", "deft", "deft | floor(0.2)"]
    base, nll, deft, floor = lines
    assert nll["nll"]["mean"] < base["nll"]["mean"] and not nll["minus_nll"]
    for line in (deft, floor):
        difference = line["minus_nll"]["nll"]
        assert difference["mean"] == pytest.approx(line["nll"]["mean"] - nll["nll"]["mean"], abs=1e-9)
        assert difference["low"] <= difference["mean"] <= difference["high"]
    assert probe_text(lines)[0].startswith("\nProbe: tokens of 3 held-out rows, 1 seed, [95% interval over rows, not")
    train, held_out = ((tmp_path / f"advise-probe/{name}.jsonl").read_text() for name in ("train", "held_out"))
    assert len(train.splitlines()) == 9 and len(held_out.splitlines()) == 3
    arguments = ["advise", str(tiny_model), str(chat_file), *options]
    assert main([*arguments, "--rows", "16"]) == 2  # the finished cells are of 12 rows
    assert "advise-probe: holds a probe of other rows; choose another folder with --out" in capsys.readouterr().err
    assert (tmp_path / "advise-probe/train.jsonl").read_text() == train
    assert main([*arguments, "--steps", "3"]) == 2
    error = capsys.readouterr().err
    assert "(train.max_steps: 2 -> 3" in error and error.endswith("choose another folder with --out\n")
