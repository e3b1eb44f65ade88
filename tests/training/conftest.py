"""What the training tests share: a model of some thousand weights, a file of conversations, a config over them."""

import json
import random
from pathlib import Path

import pytest

import tiny
from deftune.training.config import RunConfig


def conversations(number: int, seed: int = 0) -> list[dict]:
    """Sums in words, of unequal lengths."""
    draw = random.Random(seed)
    found = []
    for _ in range(number):
        terms = [draw.randint(1, 99) for _ in range(draw.randint(2, 5))]
        answer = f"{' plus '.join(map(str, terms))} is {sum(terms)}." + " Done!" * draw.randint(0, 4)
        found.append(
            {
                "messages": [
                    {"role": "user", "content": f"What is {' + '.join(map(str, terms))}?"},
                    {"role": "assistant", "content": answer},
                ]
            }
        )
    return found


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """The folder of the tiny model, its tokenizer trained on the conversations."""
    text = [message["content"] for row in conversations(60) for message in row["messages"]]
    tokenizer = tiny.make_tokenizer([*text, "user\nassistant\nsystem\n"], size=320)
    return tiny.save_model(tmp_path_factory.mktemp("models") / "tiny", tokenizer)


@pytest.fixture(scope="session")
def chat_file(tmp_path_factory) -> Path:
    """60 conversations of two messages."""
    path = tmp_path_factory.mktemp("data") / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in conversations(60)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def make_config(tiny_model, chat_file):
    """``make_config(folder, {"train.max_steps": 3, "data.packing": True}, objective="nll")`` is a RunConfig."""

    def make(run: Path, nested: dict | None = None, **plain) -> RunConfig:
        content = {
            "run": str(run),
            "objective": "deft",
            "model": {"name": str(tiny_model)},
            "data": {"train": [{"path": str(chat_file)}], "max_length": 128},
            "train": {
                "learning_rate": 1e-3, "batch_size": 8, "micro_batch_size": 4, "max_steps": 4, "epochs": 1000,
                "save_steps": 2, "precision": "fp32", "seed": 1,
            },
        }  # fmt: skip
        for key, value in {**(nested or {}), **plain}.items():
            *parents, last = key.split(".")
            place = content
            for part in parents:
                place = place.setdefault(part, {})
            place[last] = value
        return RunConfig.model_validate(content)

    return make
