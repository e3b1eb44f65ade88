"""What the analysis tests share: the tiny model and its rows, in files too, and a run with checkpoints."""

import json
import os
import shutil
from pathlib import Path

import pytest
from rich.console import Console

import tiny
from deftune.artifacts.config import RunConfig
from deftune.artifacts.runs import Run
from deftune.data.rows import Row
from deftune.training.train import train_run
from tiny_chat import make_model, make_rows


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of a Chromium: a skip where there is none, but a failure with CI=true, where a page must be opened."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        how = "no Chromium to open the page in; install one (Debian: apt-get install chromium)"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(how)
    return found


@pytest.fixture(scope="session")
def tokenizer():
    return tiny.make_tokenizer()


@pytest.fixture(scope="session")
def model(tokenizer):
    return make_model(tokenizer)


@pytest.fixture(scope="session")
def rows() -> list[Row]:
    return make_rows()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, model, tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def data_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "chat.jsonl"
    lines = [json.dumps({"messages": list(row.messages)}) for row in make_rows()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def make_run(tmp_path_factory, model_folder, data_file):
    """``make_run(objective, **model)``: four steps, a checkpoint at each second one."""

    def make(objective: str, **model) -> Run:
        config = RunConfig.model_validate({
            "run": str(tmp_path_factory.mktemp("runs") / "run"), "objective": objective,
            "model": {"name": str(model_folder), **model},
            "data": {"train": [{"path": str(data_file)}], "max_length": 256, "template": "plain"},
            "train": {"learning_rate": 1e-2, "batch_size": 2, "micro_batch_size": 2, "max_steps": 4, "epochs": 10,
                      "save_steps": 2, "keep": 4, "precision": "fp32", "seed": 1},
        })  # fmt: skip
        with open(os.devnull, "w") as nowhere:
            return train_run(config, Console(file=nowhere)).run

    return make


@pytest.fixture(scope="session")
def run(make_run) -> Run:
    return make_run("deft")
