"""Exported rows are the data's own, readable as data again; nothing is lost between the two files."""

import json

import pytest
from inspect_tables import ROWS, make_inspection

from deftune.data.sources import read_fields, read_rows
from deftune.inspection.export import KEY, write_export

RIGHT, WRONG, PROSE = range(3)


@pytest.fixture
def source(tmp_path):
    """Four rows of GSM8K's form with fields of their own; the table covers the first three."""
    path = tmp_path / "rows.jsonl"
    answers = ["".join(token[0] for token in row[:-1]) for row in ROWS]
    lines = [
        {"question": f"Question {i}?", "answer": a, "id": i, "müll": "ü"} for i, a in enumerate([*answers, "9\n#### 9"])
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_flagged_and_kept_are_all_the_rows(source, tmp_path):
    inspection = make_inspection(data=str(source))
    export, keep = tmp_path / "out" / "flagged.jsonl", tmp_path / "kept.jsonl"
    done = write_export(inspection, [WRONG, RIGHT], read_fields(source), by="answer", export=export, keep=keep)
    assert done == (2, 2, 1)
    flagged, kept, all_rows = lines_of(export), lines_of(keep), lines_of(source)
    assert [row["id"] for row in flagged] == [WRONG, RIGHT]  # by rank
    assert kept == [all_rows[PROSE], all_rows[3]]  # in their order, as they were
    findings = [row.pop(KEY) for row in flagged]
    assert flagged == [all_rows[WRONG], all_rows[RIGHT]]
    assert (findings[0]["rank"], findings[0]["where"]) == (1, f"{source}:2")
    assert findings[0]["reasons"][0].startswith("stated answer '7': the model expects '6'")
    assert (findings[0]["by"], findings[0]["reasons"][0][-4:]) == ("answer", "6.89")
    assert findings[1]["reasons"] == ["stated answer '4': the model expects it; least likely in it: '4' (0.95)"]
    assert findings[0]["scores"]["answer"] == pytest.approx(6.887, abs=1e-3)


def test_a_score_that_is_not_there_is_null(source, tmp_path):
    write_export(
        make_inspection(data=str(source)),
        [PROSE],
        read_fields(source),
        by="answer",
        export=tmp_path / "e.jsonl",
        keep=None,
    )
    assert lines_of(tmp_path / "e.jsonl")[0][KEY]["scores"]["answer"] is None


def test_exported_rows_can_be_read_back_as_data(source, tmp_path):
    export = tmp_path / "flagged.jsonl"
    write_export(make_inspection(data=str(source)), [WRONG], read_fields(source), by="answer", export=export, keep=None)
    [row] = read_rows(export)
    assert row.messages == read_rows(source, format="gsm8k")[WRONG].messages


def test_a_row_that_is_gone_is_an_error_and_leaves_no_file(source, tmp_path):
    inspection = make_inspection(data=str(source))
    source.write_text(source.read_text().splitlines()[0] + "\n")
    export, keep = tmp_path / "e.jsonl", tmp_path / "k.jsonl"
    with pytest.raises(ValueError, match=r"rows.jsonl:2: is not in the data; name its split"):
        write_export(inspection, [WRONG], read_fields(source), by="answer", export=export, keep=keep)
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl"}
