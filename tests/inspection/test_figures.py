"""Figures of tokens and of training: what is drawn is what the table says, and the table is what the tokens say."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from deftune import objective, token_stats
from deftune.cli import main
from deftune.inspection.figures import (
    bin_of,
    focus_anchors,
    gradient_map_table,
    histogram_table,
    p_edges,
    plot_gradient_maps,
    plot_histograms,
    plot_progress,
    probability_shares,
    progress_table,
)
from deftune.inspection.style import look_of
from deftune.objectives import Context
from deftune.tokens.passes import Measurement

matplotlib = pytest.importorskip("matplotlib")


def token_table(objectives=("nll", "linear", "deft"), seed=0, scale=4.0, size=400):
    """Tokens of random logits, as a token table has them."""
    generator = torch.Generator().manual_seed(seed)
    z, targets = scale * torch.randn(size, 50, generator=generator), torch.randint(50, (size,), generator=generator)
    _, columns = Measurement([objective(spec) for spec in objectives], Context()).measure(z, targets)
    names = ("p", "entropy", *(f"{kind}:{spec}" for spec in objectives for kind in ("gate", "gradient")))
    return pa.table({name: columns[name].float().numpy() for name in names}), token_stats(z, targets)


def test_bins_are_even_in_log_p_with_an_edge_at_a_half():
    edges = p_edges(4)
    assert edges[0] == pytest.approx(1e-8) and edges[-1] == 1 and 0.5 in edges and np.isclose(edges, 1e-3).any()
    places = bin_of(np.array([0.0, 1e-12, 1.0, 0.5, 0.50001]), edges)
    assert places[0] == places[1] == 0 and places[2] == len(edges) - 2
    assert edges[places[3] + 1] == 0.5 and edges[places[4]] == 0.5  # (low, high]


def test_gradient_maps_are_means_of_the_tokens():
    table, stats = token_table(scale=1.5)
    lines = gradient_map_table({"strong": table}, per_decade=2, entropy_bins=5)
    assert sum(line["tokens"] for line in lines) == 3 * 400
    p, h = np.asarray(table["p"], float), np.asarray(table["entropy"], float)
    for spec in ("nll", "deft"):
        gradient = np.asarray(table[f"gradient:{spec}"], float)
        norm = (stats.concentration - 2 * stats.p + 1).sqrt()
        assert np.allclose(gradient, objective(spec).gate(stats) * norm, rtol=1e-5)
        mine = [line for line in lines if line["objective"] == spec]
        assert sum(line["mass"] for line in mine) == pytest.approx(1)
        for line in mine:
            inside = (p > line["p_low"]) & (p <= line["p_high"])
            inside &= (h > line["entropy_low"]) & (h <= line["entropy_high"])
            assert inside.sum() == line["tokens"]
            assert line["gradient"] == pytest.approx(gradient[inside].mean())
            assert line["normalised"] == pytest.approx(gradient[inside].mean() / gradient.max())
            assert line["mass"] == pytest.approx(gradient[inside].sum() / gradient.sum())


def test_gradient_map_panels_show_the_table():
    tables = {"strong": token_table(scale=6.0)[0], "weak": token_table(seed=1, scale=1.0)[0]}
    lines = gradient_map_table(tables, ["nll", "deft"])
    figure = plot_gradient_maps(lines)
    panels = figure.axes[:4]
    assert [[text.get_text() for text in panel.texts] for panel in panels] == [["nll"], ["deft"], [], []]
    assert panels[0].get_ylabel().startswith("strong") and panels[2].get_ylabel().startswith("weak")
    for panel, (regime, spec) in zip(panels, [(r, s) for r in ("strong", "weak") for s in ("nll", "deft")]):
        mine = [line for line in lines if (line["regime"], line["objective"]) == (regime, spec)]
        shown = np.ma.filled(panel.collections[0].get_array(), np.nan).ravel()
        assert sorted(shown[~np.isnan(shown)]) == pytest.approx(sorted(line["normalised"] for line in mine))
        tail = sum(line["mass"] for line in mine if line["p_high"] <= 1.0001e-3)
        head = sum(line["mass"] for line in mine if line["p_low"] >= 0.5)
        assert panel.get_title() == f"≤10⁻³: {tail:.0%}   >½: {head:.0%}"
        assert panel.get_xscale() == "log"


def test_a_gradient_map_of_an_objective_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="a table has no gradients of cayley, only of nll, linear, deft"):
        gradient_map_table({"strong": token_table()[0]}, ["cayley"])


def test_histograms_count_tokens():
    table, _ = token_table()
    p = np.asarray(table["p"], float)
    lines = histogram_table({("strong", "base"): table, ("strong", "deft"): token_table(seed=3)[0]})
    mine = [line for line in lines if line["model"] == "base"]
    assert sum(line["tokens"] for line in mine) == 400
    for line in mine:
        assert line["tokens"] == ((p > line["p_low"]) & (p <= line["p_high"])).sum() or line["p_low"] <= 1e-8
        assert line["density"] == pytest.approx(line["share"] / np.log10(line["p_high"] / line["p_low"]))
    ends = probability_shares(lines)[0]
    assert ends["p<=1e-3"] == pytest.approx((p <= 1e-3).mean()) and ends["p>0.5"] == pytest.approx((p > 0.5).mean())
    assert 0 < ends["p<=1e-3"] < 1 and 0 < ends["p>0.5"] < 1


def test_histogram_panels_show_the_table():
    tables = {
        ("strong", "base"): token_table()[0], ("strong", "deft"): token_table(seed=2)[0],
        ("weak", "base"): token_table(scale=1.0)[0],
    }  # fmt: skip
    lines = histogram_table(tables)
    figure = plot_histograms(lines)
    strong, weak = figure.axes
    assert (strong.get_title(), weak.get_title()) == ("strong", "weak")
    assert len(strong.patches) == 2 and len(weak.patches) == 1
    for patch, model in zip(strong.patches, ("base", "deft")):
        values, edges, _ = patch.get_data()
        mine = [line for line in lines if (line["regime"], line["model"]) == ("strong", model)]
        assert values.tolist() == [line["density"] for line in mine]
        assert edges.tolist()[:-1] == [line["p_low"] for line in mine]
        colour = patch.get_facecolor() if model == "base" else patch.get_edgecolor()
        assert matplotlib.colors.to_hex(colour[:3]).upper() == look_of(model).colour
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["base", "deft"]
    shown = [line.split() for line in strong.texts[0].get_text().splitlines()[1:]]
    ends = probability_shares(lines)
    assert shown == [[e["model"], f"{e['p<=1e-3']:.0%}", f"{e['p>0.5']:.0%}"] for e in ends[:2]]


def test_progress_is_what_the_run_recorded(run):
    lines = progress_table([("strong", run.folder)])
    records = [record for record in run.read_metrics() if record["kind"] == "train"]
    assert [line["updates"] for line in lines] == [0, 1, 2, 3]
    assert [line["p"] for line in lines] == [record["p"] for record in records]
    assert {line["objective"] for line in lines} == {"deft"}
    figure = plot_progress(lines)
    above, below = figure.axes  # one metric an axis
    (p,), (concentration, paper) = above.lines, below.lines
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["deft", "paper's a, Llama-3.1-8B"]
    assert p.get_marker() == concentration.get_marker() == look_of("deft").marker
    assert p.get_ydata().tolist() == [record["p"] for record in records]
    assert concentration.get_ydata().tolist() == [record["concentration"] for record in records]
    assert paper.get_xydata().tolist() == [[0, 0.65], [3, 0.95]]  # the last stands at the run's end, before update 4
    assert all(float(tick).is_integer() for tick in below.get_xticks())


def test_objectives_are_told_apart_without_colour_while_training(run):
    lines = progress_table([("mine", run.folder)])
    above, _ = plot_progress([*lines, *({**line, "run": "other", "objective": "eaft"} for line in lines)]).axes
    deft, eaft = above.lines
    assert deft.get_linestyle() != eaft.get_linestyle() and deft.get_marker() != eaft.get_marker()


def test_the_papers_focus_stands_beside_ours(run):
    lines = focus_anchors(progress_table([("strong", run.folder), ("mine", run.folder)]))
    records = [record for record in run.read_metrics() if record["kind"] == "train"]
    assert [(line["updates"], line["paper"]) for line in lines] == [(0, 0.65), (4, 0.75), ("end", 0.95)]
    assert lines[0]["ours"] == records[0]["concentration"] and lines[2]["ours"] == records[3]["concentration"]
    assert np.isnan(lines[1]["ours"])  # the run has three updates before its last step


def test_only_the_papers_regimes_have_its_anchors(run):
    above, below = plot_progress(progress_table([("mine", run.folder)])).axes
    assert len(above.lines) == len(below.lines) == 1 and above.get_title() == "mine"


def test_a_run_without_steps_is_refused(tmp_path, run):
    (tmp_path / "config.yaml").write_bytes(run.config.read_bytes())
    with pytest.raises(ValueError, match="has recorded no training steps"):
        progress_table([("strong", tmp_path)])
    with pytest.raises(ValueError, match=r"is no run \(it has no config.yaml\)"):
        progress_table([("strong", tmp_path / "none")])


# --- the commands -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tables(tmp_path_factory, model_folder, data_file, run):
    folder = tmp_path_factory.mktemp("tables")
    for name, model in (("base", model_folder), ("deft", run.folder)):
        argv = ["analyze", "tokens", str(model), str(data_file), "--out", str(folder / f"{name}.parquet")]
        assert main([*argv, "--template", "plain"]) == 0
    return folder


@pytest.mark.long
def test_the_commands_draw_and_draw_again(tmp_path, capsys, tables, run):
    base, deft = tables / "base.parquet", tables / "deft.parquet"
    for name, inputs in {
        "gradients": [f"strong={base}", f"weak={deft}", "--objectives", "nll,deft"],
        "histograms": [f"strong/base={base}", f"strong/deft={deft}"],
        "progress": [f"strong={run.folder}", f"weak={run.folder}"],
    }.items():
        out = tmp_path / name
        assert main(["analyze", name, *inputs, "--out", str(out)]) == 0
        written = capsys.readouterr().out.splitlines()[-4:]
        assert written == [str(out.with_suffix(f".{kind}")) for kind in ("png", "svg", "pdf", "csv")]
        again = tmp_path / "again" / name
        assert main(["analyze", name, "--table", str(out.with_suffix(".csv")), "--out", str(again)]) == 0
        capsys.readouterr()
        assert again.with_suffix(".svg").read_bytes() == out.with_suffix(".svg").read_bytes(), name


def test_histograms_print_both_ends(tmp_path, capsys, tables):
    assert main(["analyze", "histograms", f"base={tables / 'base.parquet'}", "--out", str(tmp_path / "h")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split() == ["regime", "model", "tokens", "p<=1e-3", "p>0.5"] and "base" in said[1]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["gradients"], "analyze gradients: give either inputs (strong=tokens.parquet) or --table"),
        (["gradients", "a=x.parquet", "--table", "t.csv"], "give either inputs"),
        (["gradients", "a=x.parquet"], "x.parquet: no such file; `deftune analyze tokens` writes it"),
        (["gradients", "--table", "none.csv"], "none.csv: no such file"),
        (["gradients", "--table", "none.csv", "--objectives", "nll"], "--objectives: has no effect on a table"),
        (["gradients", "a/x=t.parquet", "b/x=t.parquet"], "a/x=t.parquet: write it as REGIME=PATH, without a /"),
        (["continuum", "--table", "none.csv", "--temperature", "0"], "--temperature: has no effect on a table"),
        (["histograms", "x.parquet"], "x.parquet: name its model or objective, as in deft=x.parquet"),
        (["histograms", "a=x.parquet", "a=y.parquet"], "a=y.parquet: a is given twice"),
        (["histograms", "strong/a="], "write it as NAME=PATH"),
        (["progress", "strong=nowhere"], "nowhere: is no run"),
        (["conflicts", "a.parquet", "b.parquet"], "a.parquet: no such file"),
    ],
)
def test_the_commands_say_what_is_wrong_in_a_line(tmp_path, monkeypatch, capsys, argv, message):
    monkeypatch.chdir(tmp_path)
    assert main(["analyze", *argv]) == 2
    said = capsys.readouterr().err
    assert said.startswith("deftune: ") and message in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())
