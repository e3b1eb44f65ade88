"""Learning conflicts: every token in its quadrant, every bar a count."""

import json
import math

import numpy as np
import pyarrow as pa
import pytest

from deftune.artifacts.results import load_result
from deftune.cli import main
from deftune.paper.conflicts import (
    FORGOTTEN,
    LEARNED,
    UNCHANGED,
    conflict_shares,
    conflict_table,
    pair_name,
    plot_conflicts,
)
from deftune.tokens.table import write_token_table
from tiny_chat import make_rows

matplotlib = pytest.importorskip("matplotlib")

BEFORE = [0.9, 0.6, 0.2, 0.1, 0.5, 0.3, 0.001]
AFTER = [0.3, 0.95, 0.7, 0.05, 0.504, 0.3, 0.4]
QUADRANTS = [2, 4, 4, 2, 0, 0, 4]


def tokens(p, concentration=None, **metadata):
    size = len(p)
    facts = {b"deftune": json.dumps(metadata).encode()}
    return pa.table({
        "row": pa.array([0] * size, pa.int32()), "position": pa.array(range(size), pa.int32()),
        "token_id": pa.array(range(size), pa.int32()), "text": [f"t{i}" for i in range(size)],
        "log_p": pa.array([math.log(x) for x in p], pa.float32()), "entropy": pa.array([1.0] * size, pa.float32()),
        "concentration": pa.array(concentration or [0.5] * size, pa.float32()),
    }).replace_schema_metadata(facts)  # fmt: skip


@pytest.fixture
def table():
    return conflict_table(tokens(BEFORE), tokens(AFTER), pair="steps 0 to 10")


def test_small_changes_are_drawn_small():
    table = conflict_table(tokens([0.5, 0.6]), tokens([0.501, 0.599]), pair="steps 0 to 10")
    assert plot_conflicts(table).axes[0].get_ylim() == pytest.approx((-0.105, 0.105))


def test_tokens_fall_into_the_quadrants_of_the_definition(table):
    assert table["quadrant"].to_pylist() == QUADRANTS
    assert np.allclose(table["d_p"], np.subtract(AFTER, BEFORE), atol=1e-6)
    assert np.allclose(table["d_l"], np.log(BEFORE) - np.log(AFTER), atol=1e-6)
    assert table["confident"].to_pylist() == [True, True, False, False, False, False, False]
    assert table["text"].to_pylist() == [f"t{i}" for i in range(7)]


def test_the_threshold_says_what_is_a_change():
    every = conflict_table(tokens(BEFORE), tokens(AFTER), threshold=0.0)
    assert every["quadrant"].to_pylist() == [2, 4, 4, 2, 4, 0, 4]
    few = conflict_table(tokens(BEFORE), tokens(AFTER), threshold=0.55)
    assert few["quadrant"].to_pylist() == [2, 0, 0, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="threshold: the smallest change of p that counts"):
        conflict_table(tokens(BEFORE), tokens(AFTER), threshold=-0.1)


def test_shares_are_counts(table):
    (line,) = conflict_shares(table)
    assert line["tokens"] == 7 and line["pair"] == "steps 0 to 10"
    assert line["learned"] == pytest.approx(3 / 7) == line["q4"]
    assert line["forgotten"] == pytest.approx(2 / 7) == line["q2"]
    assert line["q1"] == line["q3"] == 0
    assert line["learned_confident"] == pytest.approx(1 / 3) and line["learned_unsure"] == pytest.approx(2 / 3)
    assert line["forgotten_confident"] == pytest.approx(1 / 2)


def test_no_forgotten_tokens_have_no_shares():
    (line,) = conflict_shares(conflict_table(tokens([0.1]), tokens([0.9])))
    assert line["forgotten"] == 0 and math.isnan(line["forgotten_confident"]) and line["learned_confident"] == 0
    plot_conflicts(conflict_table(tokens([0.1]), tokens([0.9])))


def test_under_nll_two_quadrants_are_empty_and_under_deft_they_are_not():
    """p rises from .3 to .4 and DEFT's loss too, from (1 - .3^.9)/.9 to (1 - .4^.1)/.1: the model is less sure now."""
    before, after = tokens([0.3], [0.9]), tokens([0.4], [0.1])
    assert conflict_table(before, after)["quadrant"].to_pylist() == [4]
    found = conflict_table(before, after, objective="deft")
    assert found["quadrant"].to_pylist() == [1]
    assert found["d_l"][0].as_py() == pytest.approx((1 - 0.4**0.1) / 0.1 - (1 - 0.3**0.9) / 0.9, rel=1e-6)
    (line,) = conflict_shares(found)
    assert line["learned"] == 1 and line["q1"] == 1 and line["q4"] == 0


@pytest.mark.parametrize("spec", ["eaft", "mile(1)", "cayley-released", "deft | mean_one"])
def test_losses_that_a_table_does_not_determine_are_refused(spec):
    with pytest.raises(ValueError, match="cannot be had from a token table"):
        conflict_table(tokens(BEFORE), tokens(AFTER), objective=spec)


def test_tables_of_other_tokens_are_refused():
    with pytest.raises(ValueError, match=r"have 7 and 6 tokens; make both with the same data"):
        conflict_table(tokens(BEFORE), tokens(AFTER[:6]))
    other = tokens(AFTER)
    other = other.set_column(2, "token_id", pa.array([0, 1, 9, 3, 4, 5, 6], pa.int32()))
    with pytest.raises(ValueError, match=r"differ first at row 0, position 2 \(token_id 2 and 9\)"):
        conflict_table(tokens(BEFORE), other)


def test_the_figure_shows_the_table(table):
    twice = pa.concat_tables([table, conflict_table(tokens(AFTER), tokens(BEFORE), pair="back")])
    figure = plot_conflicts(twice)
    scatter, back, bars, back_bars = figure.axes
    assert scatter.get_title().startswith("steps 0 to 10") and back.get_title().startswith("back")
    drawn = {tuple(np.round(point, 6)) for group in scatter.collections for point in group.get_offsets()}
    assert drawn == {tuple(np.round(point, 6)) for point in zip(*(table[n].to_pylist() for n in ("d_p", "d_l")))}
    heights = [bar.get_height() for bar in bars.patches]
    assert heights == pytest.approx([3 / 7, 2 / 7, 1 / 2, 1 / 2, 1 / 3, 2 / 3])
    assert [bool(bar.get_hatch()) for bar in bars.patches] == [False, False, True, False, True, False]
    assert [bar.get_height() for bar in back_bars.patches][:2] == pytest.approx([2 / 7, 3 / 7])
    colours = {matplotlib.colors.to_hex(group.get_facecolor()[0]).upper() for group in scatter.collections}
    assert colours == {FORGOTTEN, LEARNED, UNCHANGED}


def test_many_tokens_are_drawn_as_a_sample_and_counted_whole(monkeypatch, table):
    monkeypatch.setattr("deftune.paper.conflicts.DRAWN_POINTS", 4)
    figure = plot_conflicts(table)
    assert "4 of 7 tokens drawn" in figure.axes[0].get_title()
    assert sum(len(group.get_offsets()) for group in figure.axes[0].collections) == 4
    assert figure.axes[1].patches[0].get_height() == pytest.approx(3 / 7)


def test_pairs_are_named_by_their_steps():
    assert pair_name(tokens([0.1], model="runs/a:0"), tokens([0.1], model="runs/a:10")) == "a, steps 0 to 10"
    assert pair_name(tokens([0.1], model="runs/a:0"), tokens([0.1], model="runs/a")) == "a, steps 0 to end"
    assert pair_name(tokens([0.1], model="smollm2"), tokens([0.1], model="runs/a")) == "smollm2 to runs/a"
    tuned = tokens([0.1], model="one/deft, tuned from smollm2")
    assert pair_name(tokens([0.1], model="smollm2"), tuned) == "smollm2 to one/deft"
    nameless = tokens([0.1])
    assert pair_name(nameless, nameless) == "before to after"


def test_the_command_from_a_runs_checkpoints(tmp_path, capsys, run):
    paths = []
    for step in (0, 2):
        model, tokenizer = load_result(f"{run.folder}:{step}")
        paths.append(str(tmp_path / f"{step}.parquet"))
        write_token_table(paths[-1], model, tokenizer, make_rows(), facts={"model": f"{run.folder}:{step}"})
    out = tmp_path / "figures" / "conflicts"
    assert main(["analyze", "conflicts", *paths, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "steps 0 to 2" in said and "forgotten" in said
    assert sorted(path.suffix for path in out.parent.iterdir()) == [".parquet", ".pdf", ".png", ".svg"]
    # the table beside the figure draws it again
    again = tmp_path / "again" / "conflicts"
    assert main(["analyze", "conflicts", "--table", f"{out}.parquet", "--out", str(again)]) == 0
    assert again.with_suffix(".svg").read_bytes() == out.with_suffix(".svg").read_bytes()
    assert main(["analyze", "conflicts", *paths, *paths]) == 2
    assert "two pairs are called 'run, steps 0 to 2'" in capsys.readouterr().err
    assert main(["analyze", "conflicts", paths[0]]) == 2
    assert "tables come in pairs, BEFORE AFTER; got 1" in capsys.readouterr().err
