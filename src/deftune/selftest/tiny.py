"""A model of some thousand weights, its tokenizer, conversations and a config over them: no download, no files."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from deftune.artifacts.display import quiet
from deftune.artifacts.templates import TEMPLATES

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|pad|>"]
TEXT = ("What is 12 plus 30? user assistant system The answer is",)


def make_tokenizer(text: Iterable[str] = TEXT, size: int = 300) -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE, ChatML, `<|im_end|>` ends a turn: most characters that are not ASCII take several tokens."""
    backend: Any = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(text, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    tokenizer.chat_template = TEMPLATES["chatml"]
    return tokenizer


def make_model(tokenizer: Any, cls: Any = transformers.LlamaForCausalLM, *, gain: float = 1.0, **more: Any) -> Any:
    """2 layers of width 32, tied. ``gain`` enlarges the weights: an untrained model's next tokens are all alike."""
    options: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id, **more,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = cls(cls.config_class(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(gain)
    return model.eval()


def save_model(folder: Path, tokenizer: transformers.PreTrainedTokenizerFast, **more: Any) -> Path:
    with quiet():
        make_model(tokenizer, **more).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def conversations(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Sums in words, of unequal lengths."""
    draw = random.Random(seed)
    found: list[dict[str, Any]] = []
    for _ in range(number):
        terms = [draw.randint(1, 99) for _ in range(draw.randint(2, 5))]
        answer = f"{' plus '.join(map(str, terms))} is {sum(terms)}." + " Done!" * draw.randint(0, 4)
        question = f"What is {' + '.join(map(str, terms))}?"
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        found.append({"messages": messages})
    return found


def save_chat_model(folder: Path) -> Path:
    """The tiny model, its tokenizer trained on the conversations."""
    text = [message["content"] for row in conversations(60) for message in row["messages"]]
    return save_model(folder, make_tokenizer([*text, "user\nassistant\nsystem\n"], size=320))


def save_conversations(path: Path, number: int = 60) -> Path:
    """A JSONL file of conversations of two messages."""
    path.write_text("".join(json.dumps(row) + "\n" for row in conversations(number)), encoding="utf-8")
    return path


def run_content(run: Path, model: Path, data: Path, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A run's config as a mapping; ``changes`` name values by path: ``{"train.max_steps": 3}``."""
    content: dict[str, Any] = {
        "run": str(run),
        "objective": "deft",
        "model": {"name": str(model)},
        "data": {"train": [{"path": str(data)}], "max_length": 128},
        "train": {
            "learning_rate": 1e-3, "batch_size": 8, "micro_batch_size": 4, "max_steps": 4, "epochs": 1000,
            "save_steps": 2, "precision": "fp32", "seed": 1,
        },
    }  # fmt: skip
    for key, value in (changes or {}).items():
        *parents, last = key.split(".")
        place = content
        for part in parents:
            place = place.setdefault(part, {})
        place[last] = value
    return content
