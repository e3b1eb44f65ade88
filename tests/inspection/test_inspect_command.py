"""`deftune inspect`, as a user runs it, on the tiny model."""

import json
import re

import numpy as np
import pyarrow.parquet as pq
import pytest
from inspect_tables import ROWS, make_tables

from deftune.cli import main
from deftune.data.generated import generate
from deftune.tokens.table import rows_path


@pytest.fixture(scope="module")
def table(tmp_path_factory, model_folder, data_file):
    """A table of the tiny model, made by the command itself."""
    path = tmp_path_factory.mktemp("tables") / "tokens.parquet"
    assert main(["inspect", str(model_folder), str(data_file), "--tokens", str(path), "--objectives", "nll,deft"]) == 0
    return path


def error_of(capsys, *args) -> str:
    assert main(["inspect", *map(str, args)]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1, printed
    return printed


def test_it_reads_a_model_and_data(tmp_path, monkeypatch, model_folder, data_file, capsys):
    monkeypatch.chdir(tmp_path)
    page, flagged, rest = "page.html", "flagged.jsonl", "rest.jsonl"
    args = ["--objectives", "nll,top(0.1, of=linear)", "--rows", "5", "--top", "2", "--html", page, "--export", flagged]
    assert main(["inspect", str(model_folder), str(data_file), *args, "--keep", rest]) == 0
    printed = capsys.readouterr().out
    assert f"{model_folder.name} reads {data_file}: 5 rows" in printed
    assert "top(0.1, of=linear)" in printed and "share of its gradient" in printed
    assert re.search(rf"{flagged}: (no row with a reason; --min-score takes|\d+ rows? with a reason)", printed)
    assert re.search(rf"{rest}: the other \d rows, 1 of them not inspected", printed)
    assert {path.name for path in tmp_path.iterdir()} == {page, flagged, rest}  # the table was a temporary one
    both = [json.loads(line) for name in (flagged, rest) for line in (tmp_path / name).read_text().splitlines()]
    data = [json.loads(line) for line in data_file.read_text().splitlines()]
    assert sorted(json.dumps(row["messages"]) for row in both) == sorted(json.dumps(row["messages"]) for row in data)


def exported(path) -> list[dict]:
    return [json.loads(line)["deftune_inspect"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("by", ["answer", "conflict", "noise", "mean_nll", "max_nll", "mean_p"])
def test_every_exported_row_has_its_reason_with_the_numbers_of_its_score(table, tmp_path, capsys, by):
    """Over a real table: the list's score, p and expected token, the export's reason and its scores are one thing."""
    from deftune.inspection.inspect import inspect_table

    inspection, out = inspect_table(table), tmp_path / "out.jsonl"
    low = "-1" if by != "mean_p" else "2"
    assert main(["inspect", "--tokens", str(table), "--by", by, "--min-score", low, "--export", str(out)]) == 0
    listed = [[cell.strip() for cell in line.split("│")] for line in capsys.readouterr().out.splitlines()]
    listed = {cells[1]: cells for cells in listed if len(cells) > 6 and cells[1].isdecimal()}
    wheres = [line["where"] for line in inspection.rows]
    found = exported(out)
    assert len(found) == int(np.isfinite(inspection.scores[by]).sum()) > 0
    for rank, one in enumerate(found, 1):
        row = wheres.index(one["where"])
        assert (one["rank"], one["by"]) == (rank, by)
        token = inspection.token_of(row, by)
        p, q = (np.exp(inspection.tokens[name][token]) for name in ("log_p", "other_log_p"))
        score = one["scores"][by]
        shown = listed[str(rank)]
        assert shown[2] == f"{score:.3g}" and shown[5] == f"{p:.2g}" and shown[6].endswith(f" {q:.2g}")
        if by in ("answer", "max_nll"):
            assert score == pytest.approx(max(0, np.log(q / p)) if by == "answer" else -np.log(p), rel=1e-4, abs=1e-6)
        if by == "noise":
            assert one["reasons"][0].startswith(f"{score:.0%} of its loss" if score else "none of its loss")
        elif score > 0:
            assert f"{score:.3g}" in one["reasons"][0]


def test_export_takes_rows_with_a_reason_only(tmp_path, capsys):
    """Of a right sum, a wrong one and prose only the wrong one has a reason; --min-score takes rows by score alone."""
    data, made = tmp_path / "rows.jsonl", tmp_path / "tokens.parquet"
    answers = ["".join(token[0] for token in row[:-1]) for row in ROWS]
    data.write_text("".join(json.dumps({"question": "?", "answer": answer}) + "\n" for answer in answers))
    for table, path in zip(make_tables(data=str(data)), (made, rows_path(made))):
        pq.write_table(table, path)
    out, rest = tmp_path / "out.jsonl", tmp_path / "rest.jsonl"

    def export(*args) -> tuple[list[str], str]:
        assert main(["inspect", "--tokens", str(made), "--export", str(out), "--keep", str(rest), *args]) == 0
        assert len(exported(out)) + len(rest.read_text().splitlines()) == 3
        return [one["where"].rsplit(":", 1)[1] for one in exported(out)], capsys.readouterr().out

    rows, printed = export()
    assert rows == ["2"] and f"{out}: 1 row with a reason, by answer\n" in printed
    assert export("--by", "max_nll")[0] == ["2"]
    assert exported(out)[0]["rank"] == 2  # among all rows, as the list shows it
    rows, printed = export("--min-score", "0")
    assert rows == ["2", "1"] and f"{out}: 2 rows with answer >= 0, by answer\n" in printed
    rows, printed = export("--min-score", "0", "--top", "1")
    assert rows == ["2"] and "1 row with answer >= 0, by answer; 1 more (--top 2)\n" in printed
    assert export("--by", "mean_p", "--min-score", "0.6")[0] == ["3"]
    rows, printed = export("--min-score", "1e9")
    assert rows == [] and f"{out}: no row with answer >= 1e+09\n" in printed and "no row has such a score" in printed


def test_a_table_is_reused_without_its_model(table, capsys, monkeypatch):
    monkeypatch.setattr("deftune.artifacts.results.load_result", None)  # loading a model would fail
    assert main(["inspect", "--tokens", str(table), "--by", "mean_nll", "--objectives", "deft"]) == 0
    printed = capsys.readouterr().out
    assert "rows by mean NLL" in printed
    assert "⟦" in printed  # no terminal: marks instead of colour


def test_a_narrow_terminal_still_tells_which_row(table, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["inspect", "--tokens", str(table)]) == 0
    ranked = capsys.readouterr().out.partition("rows by")[2].partition("in full")[0]
    lines = [line for line in ranked.splitlines() if line.startswith("│")]
    assert lines and all(re.match(r"│ \d+ │ +[\d.e+-]+ │ \S+:\d+ +│.*⟦.*⟧", line) for line in lines)
    assert max(map(len, ranked.splitlines())) <= 80


def test_a_table_of_another_model_or_data_is_refused(table, capsys, model_folder, data_file):
    assert "was made with model" in error_of(capsys, "smollm2", data_file, "--tokens", table)
    assert "was made with data" in error_of(capsys, model_folder, "other.jsonl", "--tokens", table)


def test_no_option_is_ignored(table, model_folder, data_file, capsys):
    assert "--batch-tokens: at least 1, got 0" in error_of(capsys, model_folder, data_file, "--batch-tokens", "0")
    for option, value in (("--rows", "3"), ("--rows", "0"), ("--max-length", "64"), ("--format", "messages"),
                          ("--template", "plain"), ("--batch-tokens", "0")):  # fmt: skip
        assert f"{option}: {table} is made already" in error_of(capsys, "--tokens", table, option, value)
    assert "nothing is exported" in error_of(capsys, "--tokens", table, "--skip-bad-rows")
    assert "--split" in error_of(capsys, "--tokens", table, "--split", "test")
    assert "is a folder; name a file" in error_of(capsys, "--tokens", table, "--html", table.parent)


def test_mistakes_are_one_line(table, tmp_path, capsys, model_folder, data_file):
    assert "needs a model and data, or --tokens" in error_of(capsys)
    assert "needs a model and data" in error_of(capsys, model_folder)
    assert "none.parquet does not exist" in error_of(capsys, "--tokens", tmp_path / "none.parquet")
    assert "--by: unknown score 'loss'. Known: answer" in error_of(capsys, "--tokens", table, "--by", "loss")
    assert "--top: at least 1, got 0" in error_of(capsys, "--tokens", table, "--top", "0")
    assert "has no gates of eaft" in error_of(capsys, "--tokens", table, "--objectives", "eaft")
    same = tmp_path / "same"
    assert "name the same file" in error_of(capsys, "--tokens", table, "--export", same, "--keep", same)


def test_the_data_is_never_written_over(table, capsys, model_folder, data_file):
    before = data_file.read_bytes()
    for args in (("--tokens", table), (model_folder, data_file)):
        assert "is the data itself; name another file" in error_of(capsys, *args, "--keep", data_file)
    inside = data_file.parent / "new.jsonl"
    assert "is in the data folder" in error_of(capsys, model_folder, data_file.parent, "--export", inside)
    assert data_file.read_bytes() == before


def test_rows_are_not_taken_from_data_that_changed(tmp_path, capsys, model_folder, data_file):
    data, made = tmp_path / "data.jsonl", tmp_path / "tokens.parquet"
    data.write_bytes(data_file.read_bytes())
    assert main(["inspect", str(model_folder), str(data), "--tokens", str(made), "--objectives", "nll"]) == 0
    capsys.readouterr()
    lines = data.read_text().splitlines()
    data.write_text("\n".join(reversed(lines)) + "\n")
    assert "changed after" in error_of(capsys, "--tokens", made, "--export", tmp_path / "e.jsonl")


def test_skipped_rows_are_named_where_the_table_is_temporary(tmp_path, monkeypatch, capsys, model_folder, data_file):
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data.jsonl"
    data.write_text(data_file.read_text() + "{broken\n")
    args = ["inspect", str(model_folder), str(data), "--objectives", "nll"]
    assert "data.jsonl:7: not JSON" in error_of(capsys, *args[1:])
    assert main([*args, "--skip-bad-rows", "--keep", "rest.jsonl", "--top", "1", "--min-score", "0"]) == 0
    assert "1 row skipped: 1 not JSON" in capsys.readouterr().err
    assert json.loads((tmp_path / "bad_rows.jsonl").read_text())["where"].endswith("data.jsonl:7")
    assert len((tmp_path / "rest.jsonl").read_text().splitlines()) == 5


def test_generated_rows_are_exported_as_messages(tmp_path, model_folder):
    out = tmp_path / "flagged.jsonl"
    args = ["generated:gsm_symbolic", "--rows", "3", "--objectives", "nll", "--top", "1", "--export", str(out)]
    assert main(["inspect", str(model_folder), *args, "--by", "mean_nll", "--min-score", "0"]) == 0
    [row] = [json.loads(line) for line in out.read_text().splitlines()]
    assert [message["role"] for message in row["messages"]][-1] == "assistant"


def test_rows_of_a_table_are_exported_from_its_split(tmp_path, model_folder):
    table, out = str(tmp_path / "tokens.parquet"), tmp_path / "flagged.jsonl"
    made = [str(model_folder), "generated:gsm_symbolic", "--rows", "2", "--split", "test", "--objectives", "nll"]
    assert main(["inspect", *made, "--tokens", table]) == 0
    assert main(["inspect", "--tokens", table, "--export", str(out), "--by", "mean_nll", "--min-score", "0"]) == 0
    places = {json.loads(line)["deftune_inspect"]["where"] for line in out.read_text().splitlines()}
    assert places == {row.where for row in generate("gsm_symbolic", split="test", size=2)}
