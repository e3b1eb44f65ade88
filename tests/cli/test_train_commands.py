"""The commands around a run, as a user types them."""

import json

import pytest
import yaml

from deftune.cli import build_parser, main


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


def test_every_command_has_help(capsys):
    for command in ("train", "init", "config", "runs", "data", "quickstart", "chat", "merge"):
        with pytest.raises(SystemExit) as ended:
            build_parser().parse_args([command, "--help"])
        assert ended.value.code == 0
        assert command in capsys.readouterr().out
