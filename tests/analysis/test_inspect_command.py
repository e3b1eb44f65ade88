"""`deftune inspect`, as a user runs it, on the tiny model."""

import json
import re

import pytest

from deftune.cli import main


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
    assert f"{model_folder} reads {data_file}: 5 rows" in printed
    assert "top(0.1, of=linear)" in printed and "share of its push" in printed
    assert f"{flagged}: 2 rows by answer, with reasons" in printed
    assert f"{rest}: the other 4 rows, 1 of them not inspected" in printed
    assert {path.name for path in tmp_path.iterdir()} == {page, flagged, rest}  # the table was a temporary one
    both = [json.loads(line) for name in (flagged, rest) for line in (tmp_path / name).read_text().splitlines()]
    data = [json.loads(line) for line in data_file.read_text().splitlines()]
    assert sorted(json.dumps(row["messages"]) for row in both) == sorted(json.dumps(row["messages"]) for row in data)


def test_a_table_is_reused_without_its_model(table, capsys, monkeypatch):
    monkeypatch.setattr("deftune.training.results.load_result", None)  # loading a model would fail
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


def test_no_option_is_ignored(table, capsys):
    for option, value in (("--rows", "3"), ("--max-length", "64"), ("--format", "messages"), ("--template", "plain")):
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
    assert main([*args, "--skip-bad-rows", "--keep", "rest.jsonl", "--top", "1"]) == 0
    assert "1 row skipped: 1 not JSON" in capsys.readouterr().err
    assert json.loads((tmp_path / "bad_rows.jsonl").read_text())["where"].endswith("data.jsonl:7")
    assert len((tmp_path / "rest.jsonl").read_text().splitlines()) == 5


def test_generated_rows_are_exported_as_messages(tmp_path, model_folder):
    out = tmp_path / "flagged.jsonl"
    args = ["generated:gsm_symbolic", "--rows", "3", "--objectives", "nll", "--top", "1", "--export", str(out)]
    assert main(["inspect", str(model_folder), *args]) == 0
    [row] = [json.loads(line) for line in out.read_text().splitlines()]
    assert [message["role"] for message in row["messages"]][-1] == "assistant"
