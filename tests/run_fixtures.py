"""What the training tests share: a model of some thousand weights, a file of conversations, a config over them."""

from pathlib import Path

import pytest

from deftune.artifacts.config import RunConfig
from deftune.selftest.tiny import run_content, save_chat_model, save_conversations


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """The folder of the tiny model, its tokenizer trained on the conversations."""
    return save_chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def chat_file(tmp_path_factory) -> Path:
    """60 conversations of two messages."""
    return save_conversations(tmp_path_factory.mktemp("data") / "chat.jsonl")


@pytest.fixture(scope="session")
def make_config(tiny_model, chat_file):
    """``make_config(folder, {"train.max_steps": 3, "data.packing": True}, objective="nll")`` is a RunConfig."""

    def make(run: Path, nested: dict | None = None, **plain) -> RunConfig:
        return RunConfig.model_validate(run_content(run, tiny_model, chat_file, {**(nested or {}), **plain}))

    return make
