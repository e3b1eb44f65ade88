"""The reference of config keys: complete, in step with the code, and printed by `deftune config keys`."""

import json
from pathlib import Path

import pytest

from deftune.artifacts.config import Lora, RunConfig, load_config
from deftune.artifacts.keys import keys_of, render_keys
from deftune.cli import main
from deftune.comparison.grid import Comparison
from deftune.evaluation.task_files import TaskFile

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("root", [RunConfig, Comparison, TaskFile])
def test_every_key_has_a_meaning(root):
    assert [key.path for key in keys_of(root) if not key.about] == []


def test_every_leaf_of_a_config_is_a_key():
    base = {"model": {"name": "m", "lora": {}}, "data": {"train": [{"path": "rows.jsonl"}], "tasks": [{"name": "t"}]}}
    config = json.loads(load_config(None, ["train.eval_steps=1", "data.holdout=0.1"], base).model_dump_json())

    def leaves(value, path):
        if isinstance(value, dict) and value:
            return [leaf for name, inner in value.items() for leaf in leaves(inner, f"{path}.{name}".lstrip("."))]
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return leaves(value[0], f"{path}[]")
        return [path]

    keys = keys_of(RunConfig)
    assert set(leaves(config, "")) <= {key.path for key in keys}
    assert len({key.path for key in keys}) == len(keys)


def test_types_and_defaults():
    keys = {key.path: key for key in keys_of(RunConfig)}
    assert keys["train.betas"][1:3] == ("2 of number >= 0, < 1", "[0.9, 0.95]")
    assert keys["train.gradient_checkpointing"][1:3] == ("true, false, auto", "auto")
    assert keys["model.name"].default == "required"
    assert keys["data.eval"].about.endswith("the keys of data.train[]")
    assert "data.eval[].path" not in keys
    assert keys["model.lora.target_modules"].type == "text or list of text"
    assert render_keys(keys_of(Lora)[:1]) == "r: integer > 0 (default: 16)\n    the rank of the adapters"


def test_the_page_is_what_the_command_prints(capsys):
    assert main(["config", "keys", "--markdown"]) == 0
    page = (ROOT / "docs" / "config_keys.md").read_text()
    assert capsys.readouterr().out == page, "run `deftune config keys --markdown > docs/config_keys.md`"


def test_a_prefix_chooses_keys(capsys):
    assert main(["config", "keys", "train.l"]) == 0
    out = capsys.readouterr().out
    assert "train.learning_rate: number > 0 (default: 5e-05)\n    the highest learning rate" in out
    assert "train.epochs" not in out
    assert main(["config", "keys", "trian"]) == 2
    assert "no key begins with 'trian'. Did you mean 'train'?" in capsys.readouterr().err
    assert main(["config", "keys", "train", "--markdown"]) == 2
    assert "leave out the prefix" in capsys.readouterr().err
