"""The commands around a run, as a user types them."""

import argparse
import json
import shutil
import subprocess

import pytest
import yaml

import tiny
from deftune.cli import GREETING, build_parser, main


def every_parser(parser, name="deftune"):
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command, inner in action.choices.items():
                yield from every_parser(inner, f"{name} {command}")


def test_init_writes_a_config_that_is_read_back(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    assert main(["init", str(path)]) == 0
    assert f"deftune train {path} --dry-run" in capsys.readouterr().out
    assert main(["config", "show", str(path), "--set", "train.seed=7"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["train"]["seed"] == 7
    assert main(["init", str(path)]) == 2
    assert "exists; name another file" in capsys.readouterr().err


def test_init_with_a_recipe(tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    assert main(["init", str(path), "--recipe", "strong/qwen2.5-math-1.5b/deft"]) == 0
    assert "# paper" in path.read_text()
    assert main(["init", str(tmp_path / "x"), "--recipe", "strong/qwen2.5-math-1.5b/defft"]) == 2
    assert "strong/qwen2.5-math-1.5b/deft" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_recipes_lists_all_on_lines_of_their_own(capsys):
    assert main(["paper", "recipes"]) == 0
    out = capsys.readouterr().out
    assert "\nstrong/llama-3.1-8b/linear " in out and "\nmulti-epoch/" in out


def test_schema_is_json(capsys):
    assert main(["config", "schema"]) == 0
    assert "properties" in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("arguments", [["train", "none.yaml"], ["runs", "none"], ["data", "preview", "none.jsonl"]])
def test_what_is_missing_is_one_line_and_exit_code_2(arguments, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("deftune: ") and len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_every_command_and_argument_is_explained():
    for name, parser in every_parser(build_parser()):
        assert parser.description, name
        for action in parser._actions:
            if not isinstance(action, argparse._SubParsersAction):
                assert action.help, f"{name} {action.option_strings or action.dest}"


def test_every_help_page_fits_a_terminal_of_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    pages = {"deftune": GREETING, **{name: parser.format_help() for name, parser in every_parser(build_parser())}}
    assert len(pages) > 40
    wide = [f"{name}: {line}" for name, page in pages.items() for line in page.splitlines() if len(line) > 80]
    assert wide == []


def test_without_a_command_the_five_things_one_does_are_named(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(f"deftune {command}" in out for command in ("quickstart", "init", "inspect", "compare", "eval"))


def test_the_rows_of_a_config_are_previewed_as_its_run_reads_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = tiny.save_model(tmp_path / "tiny", tiny.make_tokenizer())
    rows = tmp_path / "rows.csv"
    rows.write_text("q,a\nWhat is 12?,twelve\nWhat is 2?,two\n")
    content = {
        "run": str(tmp_path / "run"), "model": {"name": str(model)},
        "data": {"train": [{"path": str(rows), "fields": {"prompt": "q", "completion": "a"}}], "max_length": 64},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    assert main(["data", "preview", "run.yaml", "--show", "1"]) == 0
    out = capsys.readouterr().out
    assert "twelve" in out and "two" not in out.replace("twelve", "")
    assert not (tmp_path / "run").exists()
    assert main(["data", "preview", "run.yaml", "--mask", "all", "--max-length", "9"]) == 2
    assert "--mask, --max-length: run.yaml says how its rows are read" in capsys.readouterr().err


@pytest.mark.parametrize(("line", "now"), [
    ("data preview rows.jsonl --limit 5", "deftune data preview: --limit is now --rows"),
    ("eval show results/a --rows 5", "deftune eval show: --rows is now --show"),
    ("plan org/model --rows 4", "deftune plan: --rows is now --micro-batch-size"),
])  # fmt: skip
def test_an_options_former_name_leads_to_the_new_one(line, now, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(line.split())
    assert stopped.value.code == 2 and capsys.readouterr().err.startswith(now)


@pytest.mark.parametrize(("line", "usage", "text"), [
    ("trian run.yaml", "deftune [", "invalid choice: 'trian'. Did you mean 'train'? Choose from objectives, "),
    ("eval shwo r", "deftune eval [", "argument ACTION: invalid choice: 'shwo'. Did you mean 'show'? Choose from "),
    ("train a.yaml --dryrun", "deftune train [", "unrecognized arguments: --dryrun. Did you mean '--dry-run'?"),
    ("quickstart --lr 2", "deftune quickstart [", "unrecognized arguments: --lr 2\n"),
    ("eval run m --taks=gsm8k", "deftune eval run [", "unrecognized arguments: --taks=gsm8k. Did you mean '--task'?"),
    ("doctor --verbose", "deftune doctor [", "deftune doctor: error: unrecognized arguments: --verbose\n"),
    ("completion fish", "deftune completion [", "argument shell: invalid choice: 'fish'. Choose from bash, zsh\n"),
    ("compare", "deftune compare [", "the following arguments are required: ACTION, one of init, run, show\n"),
])  # fmt: skip
def test_a_misspelt_command_or_option_is_named_by_its_own_command(line, usage, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(line.split())
    err = capsys.readouterr().err
    assert stopped.value.code == 2 and err.startswith(f"usage: {usage}") and text in err, err


def test_a_data_file_in_place_of_a_config_is_named(capsys, tmp_path):
    rows = tmp_path / "rows.csv"
    rows.write_text("Question,Answer\n1,2\n")
    assert main(["train", str(rows)]) == 2
    assert f"{rows}: is data, not a config; `deftune init run.yaml` writes a config" in capsys.readouterr().err


def test_an_option_means_the_same_in_every_command():
    """--rows reads the first rows, --show says how many are shown, --limit samples a task's items."""
    found: dict[str, set[str]] = {}

    def walk(parser):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for one in action.choices.values():
                    walk(one)
            for name in set(action.option_strings) & {"--rows", "--show", "--limit", "--first", "--top"}:
                if action.help != argparse.SUPPRESS:
                    found.setdefault(name, set()).add(str(action.help).partition(" (")[0])

    walk(build_parser())
    assert found == {
        "--rows": {"read the first N rows only"},
        "--show": {"how many rows to show", "how many answers or rows"},
        "--limit": {"ask a sample of N items of each task"},
        "--top": {"most rows to list and to export"},
    }


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_scripts_know_every_command(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in ("quickstart", "inspect", "heldout", "--dry-run"))


def test_bash_completes_a_command(tmp_path, capsys):
    if (bash := shutil.which("bash")) is None:
        pytest.skip("bash is not installed")
    main(["completion", "bash"])
    (tmp_path / "deftune.sh").write_text(capsys.readouterr().out)
    lines = ["source deftune.sh", "COMP_WORDS=(deftune insp)", "COMP_CWORD=1", "COMP_LINE='deftune insp'",
             "_shtab_deftune", "echo \"${COMPREPLY[@]}\""]  # fmt: skip
    done = subprocess.run([bash, "-c", "\n".join(lines)], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == ["inspect"], done.stderr
