"""The terminal view: it fits, says what the numbers say, and data cannot steer the terminal."""

import io

import pytest
from inspect_tables import END, ROWS, make_inspection
from rich.console import Console

from deftune.inspection.terminal import render_inspection


def render(inspection, width=120, **options) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, **options)
    render_inspection(inspection, console, inspection.ranked_rows("answer")[:5], by="answer")
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 120, 160])
def test_the_ranking_fits_the_terminal(width):
    text = render(make_inspection(data="a/long/folder/" + "rows" * 10 + ".jsonl"), width)
    lines = text[text.index("rows by") :].splitlines()
    lines = lines[: next(i for i, line in enumerate(lines) if line.startswith("└"))]
    assert max(map(len, lines)) <= width
    first = [cell.strip() for cell in lines[4].split("│")]
    assert first[1:3] == ["1", "6.89"] and first[3].endswith(".jsonl:2")
    assert "⟦7⟧" in first[4] and first[5:7] == ["0.001", "'6' 0.98"]
    assert (len(first) > 8) is (width == 160)  # the gates, where there is room
    if width == 160:
        assert first[7:10] == ["1", "0.001", "0.0013"]


def test_rows_are_shown_in_full_with_their_conflicts_marked():
    text = render(make_inspection())
    assert "3 + 3 = ⟦7⟧↵\n#### 7<|im_end|>" in text
    assert "stated answer '7': the model expects '6' (0.98), not '7' (0.001)" in text
    assert "2 confident conflicts (conflict >= 0.9): 7.7% of the tokens, 41% of the loss" in text
    assert "1 of 2 stated answers contradict the model; rows with most of their loss on conflicts: 1" in text


def test_the_token_in_the_list_is_where_the_score_comes_from():
    """A margin of 3.91 on the answer is shown with the answer's token, not with a louder conflict elsewhere."""
    rows = [[("So", 1e-7, "The", 0.9999), ("x\n#### ", 0.9, "\n", 0.05), ("5", 0.01, "4", 0.5), END]]
    text = render(make_inspection(rows))
    first = next(line for line in text.splitlines() if line.startswith("│ 1 │"))
    cells = [cell.strip() for cell in first.split("│")]
    assert cells[2] == "3.91" and "⟦5⟧" in cells[4] and cells[5:7] == ["0.01", "'4' 0.5"]
    assert "  stated answer '5': the model expects '4' (0.5), not '5' (0.01), margin 3.91\n" in text


def test_no_conflict_has_no_gate_and_no_row_no_table():
    inspection = make_inspection([[("a", 0.9, "b", 0.05), END]])
    assert "nan" not in render(inspection)
    out = io.StringIO()
    render_inspection(inspection, Console(file=out), inspection.ranked_rows("answer")[:0], by="answer")
    assert out.getvalue().endswith("no row has such a score\n")


def test_colour_instead_of_marks_where_there_is_colour():
    text = render(make_inspection(), force_terminal=True, color_system="truecolor")
    assert "\x1b[1;37;48;2;" in text[text.index("in full") :]  # bold white on a red
    assert "⟦" not in text[text.index("in full") :]


def test_end_tokens_get_a_word_of_advice():
    lost = ("<|im_end|>", 0.0001, "\n", 0.99)
    assert "1 of the conflicts are end or format tokens" in render(make_inspection([[*ROWS[0][:-1], lost]]))
    assert "end or format tokens" not in render(make_inspection())


def test_data_cannot_steer_the_terminal():
    hostile = "\x1b[2J\x07[bold]\u202e"
    rows = [[(hostile, 0.001, hostile, 0.99), ("x\n", 0.9, "y", 0.05), END]]
    text = render(make_inspection(rows, wheres=[hostile], model="[red]m", data="d"))
    assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text
    assert "\\x1b[2J" in text and "[bold]" in text and "[red]m" in text  # spelled out; markup is text
