"""One look for every figure, files that stay what they are, and tables that come back as they went."""

import csv
import itertools

import numpy as np
import pyarrow as pa
import pytest

from deftune.inspection.gates import gate_table, map_table, plot_gates, plot_maps
from deftune.inspection.style import LOOKS, RC, columns_of, look_of, new_figure, read_table, save_figure, styled

matplotlib = pytest.importorskip("matplotlib")


def luminance(colour):
    r, g, b = matplotlib.colors.to_rgb(colour)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_every_objective_has_a_look_of_its_own():
    for (one, a), (other, b) in itertools.combinations(LOOKS.items(), 2):
        assert a.colour != b.colour, (one, other)
        # in grey two objectives differ in lightness, line or marker
        assert abs(luminance(a.colour) - luminance(b.colour)) > 0.05 or a.line != b.line or a.marker != b.marker


def test_unknown_specs_have_a_look_that_depends_on_nothing_else():
    assert look_of("alpha(0.3)") == look_of("alpha(0.3)") != look_of("alpha(0.7)")
    assert look_of("deft | eos(nll)").colour == LOOKS["deft"].colour
    assert look_of("deft | eos(nll)").line != LOOKS["deft"].line


@styled
def small_figure():
    figure, axes = new_figure(1, 1, (2, 2))
    axes[0][0].plot([0, 1], [0, 1], label="a line")
    axes[0][0].set_title("words that stay text")
    return figure


def test_a_figure_is_saved_with_its_table_and_without_a_date(tmp_path):
    for folder in ("one", "two"):
        paths = save_figure(small_figure(), tmp_path / folder / "v1.2", [{"x": 0, "y": 0.5}, {"x": 1, "y": 1e-9}])
        assert [path.name for path in paths] == ["v1.2.png", "v1.2.svg", "v1.2.pdf", "v1.2.csv"]
    for kind in ("png", "svg", "pdf", "csv"):
        assert (tmp_path / f"one/v1.2.{kind}").read_bytes() == (tmp_path / f"two/v1.2.{kind}").read_bytes(), kind
    assert ">words that stay text<" in (tmp_path / "one/v1.2.svg").read_text()
    assert b"/FontFile2" in (tmp_path / "one/v1.2.pdf").read_bytes()  # TrueType, not outlines
    assert read_table(tmp_path / "one/v1.2.csv").to_pydict() == {"x": [0, 1], "y": [0.5, 1e-9]}


def test_tables_come_back(tmp_path):
    lines = [{"name": "a", "value": 0.1, "low": None}, {"name": "b, c", "value": float("nan"), "low": None}]
    path = save_figure(small_figure(), tmp_path / "f", lines)[-1]
    back = columns_of(read_table(path), ["name", "value", "low"], "x")
    assert back["name"].tolist() == ["a", "b, c"] and np.isnan(back["low"]).all()
    np.testing.assert_equal(back["value"], [0.1, np.nan])
    arrow = pa.table({"d_p": [1.5, 2.5]})
    assert save_figure(small_figure(), tmp_path / "g", arrow)[-1].name == "g.parquet"
    assert read_table(tmp_path / "g.parquet").equals(arrow)


def test_the_readers_own_settings_stay_his():
    matplotlib.rcParams["font.size"] = 31
    try:
        figure = small_figure()
        assert matplotlib.rcParams["font.size"] == 31
        assert figure.axes[0].title.get_fontsize() == RC["axes.titlesize"]
    finally:
        matplotlib.rcdefaults()


@pytest.mark.parametrize(
    "table",
    [pa.table({"p": [1.0, 2.0]}), [{"p": 1.0}, {"p": 2.0}]],
    ids=["arrow", "lines"],
)
def test_two_kinds_of_tables_are_one(table):
    assert columns_of(table, ["p"], "x")["p"].tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match=r"x: the table has no column 'q' \(it has p\)"):
        columns_of(table, ["q"], "x")


def test_empty_and_ragged_tables_are_refused(tmp_path):
    (tmp_path / "t.csv").write_text("p,b\n")
    for empty in ([], pa.table({"p": pa.array([], pa.float32())}), read_table(tmp_path / "t.csv")):
        with pytest.raises(ValueError, match="x: the table is empty"):
            columns_of(empty, ["p"], "x")
    for text in ("", "p,b\n1\n"):
        (tmp_path / "t.csv").write_text(text)
        with pytest.raises(ValueError, match=r"t\.csv: holds no table \("):
            read_table(tmp_path / "t.csv")
    with pytest.raises(ValueError, match="no such file"):
        read_table(tmp_path / "none.csv")


def test_gate_curves_are_the_tables(tmp_path):
    table = gate_table(["nll", "deft"], points=11)
    figure = plot_gates(table)
    gates = figure.axes[0]
    for line, name in zip(gates.lines, ("nll", "deft")):
        rows = [row for row in table if row["objective"] == name and row["state"] == "spread"]
        assert line.get_label() == name and line.get_color() == look_of(name).colour
        assert list(line.get_xdata()) == [row["p"] for row in rows]
        assert list(line.get_ydata()) == [row["gate"] for row in rows]
    save_figure(figure, tmp_path / "gates", table)
    assert len(list(csv.DictReader((tmp_path / "gates.csv").open()))) == len(table) == 2 * 2 * 11


def test_signal_maps_are_the_tables():
    table = map_table(["linear", "deft"], points=9, vocab_size=50)
    axes = plot_maps(table).axes
    for axis, name in zip(axes, ("linear", "deft")):
        mesh = axis.collections[0]
        expected = [row["share"] for row in table if row["objective"] == name]
        assert axis.get_title() == name
        assert np.allclose(np.ravel(mesh.get_array()), expected)
