"""Figures of scores: from results, or from a table of one's own, with intervals; drawn is what the table says."""

import json

import numpy as np
import pyarrow as pa
import pytest

from deftune.cli import main
from deftune.comparison.figures import (
    continuum_table,
    entropy_table,
    plot_continuum,
    plot_entropy,
    plot_rates,
    plot_temperatures,
    score_table,
)
from deftune.evaluation.evaluate import Result, Settings, summarize
from deftune.evaluation.items import Item
from deftune.evaluation.suites import SUITES, task_named
from deftune.inspection.style import look_of

pytest.importorskip("matplotlib")

TEMPERATURES = (0.0, 0.5, 1.0)


def make_result(folder, right, tasks=("math500",), kind="math"):
    """A result as `deftune eval` leaves it: of 8 items, ``right(item, temperature)`` are graded 1."""
    chosen = {name: (task_named(name), [Item(str(i), "?", "1") for i in range(8)]) for name in tasks}
    settings = Settings("m", kind, {name: task.version for name, (task, _) in chosen.items()}, 1, TEMPERATURES)
    graded = [
        {"task": name, "id": item.id, "temperature": t, "sample": 0, "how": "boxed", "finish": "stop",
         "score": float(right(i, t)), "similarity": 0.5 + 0.5 * right(i, t)}
        for name, (_, items) in chosen.items() for i, item in enumerate(items) for t in TEMPERATURES
    ]  # fmt: skip
    result = Result(folder)
    result.open(settings)
    result.graded.write_text("".join(json.dumps(line) + "\n" for line in graded))
    (folder / "summary.json").write_text(json.dumps(summarize(settings, SUITES[kind], chosen, graded, {})))
    return folder


@pytest.fixture
def results(tmp_path):
    return {
        "nll": make_result(tmp_path / "nll", lambda i, t: i < 6 - 4 * t),
        "deft": make_result(tmp_path / "deft", lambda i, t: i < 4),
    }


@pytest.fixture
def scores(results):
    return score_table([("strong", name, folder) for name, folder in results.items()])


def test_scores_and_intervals_are_the_results(scores, results):
    assert [(line["objective"], line["temperature"], line["score"]) for line in scores] == [
        ("nll", 0.0, 0.75), ("nll", 0.5, 0.5), ("nll", 1.0, 0.25),
        ("deft", 0.0, 0.5), ("deft", 0.5, 0.5), ("deft", 1.0, 0.5),
    ]  # fmt: skip
    row = Result(results["nll"]).summary()["rows"][0]
    assert [scores[0]["low"], scores[0]["high"]] == row["interval"]
    assert {line["task"] for line in scores} == {"math500"}


def test_several_tasks_are_averaged_or_chosen(tmp_path):
    folder = make_result(tmp_path / "r", lambda i, t: i < 4, tasks=("math500", "minerva_math"))
    average = score_table([("", "nll", folder)])[0]
    assert average["task"].startswith("math (2 of 5") and average["score"] == 0.5
    se = Result(folder).summary()["averages"][0]["standard_error"]
    assert average["high"] - average["low"] == pytest.approx(2 * 1.959964 * se)
    assert score_table([("", "nll", folder)], task="minerva_math")[0]["task"] == "minerva_math"
    with pytest.raises(ValueError, match="has no task 'aime'; it has math500, minerva_math"):
        score_table([("", "nll", folder)], task="aime")


def test_similarity_has_an_interval_too(tmp_path, results):
    folder = make_result(tmp_path / "fig", lambda i, t: i < 4, tasks=("figfont",), kind="figfont")
    line = score_table([("weak", "deft", folder)], metric="similarity")[0]
    assert line["score"] == 0.75 and 0.5 <= line["low"] < 0.75 < line["high"] <= 1
    with pytest.raises(ValueError, match="math500 has no 'similarity'; leave the metric out"):
        score_table([("", "nll", results["nll"])], metric="similarity")


def test_a_folder_that_is_no_result_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is no result"):
        score_table([("", "nll", tmp_path)])


def errorbars(axis):
    """label -> (points, segments) of the axis' error bars."""
    return {
        bars.get_label(): (bars[0].get_xydata(), [np.asarray(s) for s in bars[2][0].get_segments()])
        for bars in axis.containers
    }


def test_temperatures_show_scores_and_intervals(scores):
    (axis,) = plot_temperatures(scores).axes
    drawn = errorbars(axis)
    assert list(drawn) == ["nll", "deft"]
    for name, (points, segments) in drawn.items():
        mine = [line for line in scores if line["objective"] == name]
        assert points[:, 1].tolist() == pytest.approx([100 * line["score"] for line in mine])
        assert points[:, 0].tolist() == [line["temperature"] for line in mine]
        for segment, line in zip(segments, mine):
            assert segment[:, 1].tolist() == pytest.approx([100 * line["low"], 100 * line["high"]])
    assert axis.containers[1][0].get_color() == look_of("deft").colour
    assert axis.containers[1][0].get_marker() == look_of("deft").marker


def test_objectives_stand_side_by_side_without_moving_on_the_axis(scores):
    """Four points apart on the page; coordinates, limits and ticks are those of the table."""
    figure = plot_temperatures([line for line in scores if line["temperature"] == 0])
    (axis,) = figure.axes
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["0"]  # not -0.004 to 0.004
    figure.draw_without_rendering()
    places = [bars[0].get_transform().transform((0, 0))[0] for bars in axis.containers]
    assert places[1] - places[0] == pytest.approx(4 * figure.dpi / 72)


def test_a_table_without_intervals_has_no_bars():
    table = {"regime": ["", ""], "objective": ["nll", "nll"], "temperature": [1.0, 0.0], "score": [0.2, 0.4],
             "low": [float("nan")] * 2, "high": [float("nan")] * 2}  # fmt: skip
    (axis,) = plot_temperatures(pa.table(table)).axes
    points, segments = errorbars(axis)["nll"]
    assert points[:, 0].tolist() == [0.0, 1.0] and points[:, 1].tolist() == [40, 20]  # in the order of temperature
    assert all(np.ptp(segment[:, 1]) == 0 for segment in segments)


@pytest.mark.parametrize("score", [0.0, 0.004, 0.5, 0.999, 1.0])
def test_equal_scores_are_not_drawn_apart(score):
    """matplotlib's own axis of scores that are all 0 goes from -0.055 to 0.055."""
    objectives = ["nll", "nll", "deft", "deft"]
    table = {"regime": [""] * 4, "objective": objectives, "temperature": [0.0, 1.0, 0.0, 1.0], "score": [score] * 4,
             "low": [score] * 4, "high": [score] * 4, "entropy": [0.5, 0.5, 0.4, 0.4],
             "base_p": [0.1, 0.2, 0.1, 0.2], "learning_rate": [1e-5, 1e-5, 1e-5, 1e-5]}  # fmt: skip
    for plot in (plot_temperatures, plot_rates, plot_continuum, plot_entropy):
        for axis in plot(pa.table(table)).axes:
            low, high = axis.get_ylim()
            assert high - low >= 5 and -0.2 < low < 100 * score < high


def test_the_continuum_orders_regimes_by_the_base_models_p(tmp_path, scores):
    weak = make_result(tmp_path / "weak", lambda i, t: i < 2)
    every = [*scores, *score_table([("weak", "nll", weak)])]
    table = continuum_table(every, {"strong": 0.55, "weak": 0.01}, temperature=1.0)
    assert len(table) == 3 and {line["base_p"] for line in table} == {0.55, 0.01}
    weak, strong = plot_continuum(table).axes  # in the order of p, each with its own axis of scores
    assert [axis.get_title().splitlines() for axis in (weak, strong)] == [
        ["weak", "base p = 0.01"], ["strong", "base p = 0.55"]
    ]  # fmt: skip
    for axis, expected in ((weak, {"nll": 25.0}), (strong, {"nll": 25.0, "deft": 50.0})):
        drawn = {name: points for name, (points, _) in errorbars(axis).items() if len(points)}
        assert {name: points[:, 1].tolist() for name, points in drawn.items()} == {n: [y] for n, y in expected.items()}
        names = [tick.get_text() for tick in axis.get_xticklabels()]
        assert [names[int(points[0, 0])] for points in drawn.values()] == list(drawn)
    with pytest.raises(ValueError, match=r"several temperatures \(0, 0.5, 1\); choose one"):
        continuum_table(every, {"strong": 0.5, "weak": 0.1})
    with pytest.raises(ValueError, match=r"no scores at temperature 0\.7; there are 0, 0\.5, 1"):
        continuum_table(every, {"strong": 0.5, "weak": 0.1}, temperature=0.7)
    with pytest.raises(ValueError, match=r"no base model's p for regime 'weak' \(there are: strong\)"):
        continuum_table(every, {"strong": 0.5}, temperature=1.0)


def test_entropy_has_a_panel_per_temperature(scores):
    table = entropy_table(scores, {("strong", "nll"): 0.9, ("strong", "deft"): 0.4})
    axes = plot_entropy(table).axes
    assert [axis.get_title() for axis in axes] == ["T = 0", "T = 0.5", "T = 1"]
    assert errorbars(axes[2])["nll"][0].tolist() == [[0.9, 25.0]]
    assert errorbars(axes[2])["deft"][0].tolist() == [[0.4, 50.0]]
    with pytest.raises(ValueError, match=r"no token table of strong/deft \(there are: strong/nll\)"):
        entropy_table(scores, {("strong", "nll"): 0.9})


def test_entropies_that_were_not_measured_are_named(scores):
    mixed = [*scores, *({**line, "regime": "weak"} for line in scores if line["temperature"] == 0)]
    axes = plot_entropy([{**line, "entropy": 2.0} for line in mixed]).axes
    assert [[text.get_text() for text in axis.texts] for axis in axes] == [[]] * 4 + [["not measured"]] * 2
    assert all(axis.get_xlim() == pytest.approx((1.975, 2.025)) for axis in axes)  # equal entropies look equal


def test_the_commands(tmp_path, capsys, results, model_folder, data_file):
    tokens = tmp_path / "tokens.parquet"
    assert main(["analyze", "tokens", str(model_folder), str(data_file), "--out", str(tokens)]) == 0
    named = [f"strong/{name}={folder}" for name, folder in results.items()]
    for argv in (
        ["temperatures", *named],
        ["continuum", *named, "--base", f"strong={tokens}", "--temperature", "1"],
        ["entropy", *named, "--tokens", f"strong/nll={tokens}", "--tokens", f"strong/deft={tokens}"],
    ):
        out = tmp_path / "figures" / argv[0]
        assert main(["analyze", *argv, "--out", str(out)]) == 0
        again = tmp_path / "again" / argv[0]
        assert main(["analyze", argv[0], "--table", str(out.with_suffix(".csv")), "--out", str(again)]) == 0
        assert again.with_suffix(".svg").read_bytes() == out.with_suffix(".svg").read_bytes(), argv[0]
    import csv

    import pyarrow.parquet as pq

    line = next(csv.DictReader((tmp_path / "figures/continuum.csv").open()))
    assert float(line["base_p"]) == pytest.approx(float(np.mean(pq.read_table(tokens)["p"])), rel=1e-6)
    capsys.readouterr()
    assert main(["analyze", "temperatures", "--table", "x.csv", "--task", "math500"]) == 2
    assert "--task: has no effect on a table that is made" in capsys.readouterr().err


def test_a_saved_table_without_a_regime_is_drawn_again(tmp_path, results):
    out, again = tmp_path / "figures" / "first", tmp_path / "figures" / "again"
    assert main(["analyze", "temperatures", *(f"{n}={f}" for n, f in results.items()), "--out", str(out)]) == 0
    assert main(["analyze", "temperatures", "--table", f"{out}.csv", "--out", str(again)]) == 0
    assert again.with_suffix(".svg").read_bytes() == out.with_suffix(".svg").read_bytes()


def test_arrow_tables_will_do(scores):
    assert len(plot_temperatures(pa.Table.from_pylist(scores)).axes) == 1
