"""What the training tests share: a model of some thousand weights, a file of conversations, a config over them."""

import json
import random
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from deftune.data.templates import TEMPLATES
from deftune.training.config import RunConfig

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|pad|>"]


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


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE trained on the conversations, ChatML, `<|im_end|>` ends a turn."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    text = [message["content"] for row in conversations(60) for message in row["messages"]]
    backend.train_from_iterator([*text, "user\nassistant\nsystem\n"], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    tokenizer.chat_template = TEMPLATES["chatml"]
    return tokenizer


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """The folder of a 2-layer Llama of width 32 with tied embeddings, and its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = make_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


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
