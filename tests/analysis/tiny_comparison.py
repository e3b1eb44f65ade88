"""A model of some thousand weights and a comparison over it that needs no file but the model's."""

from pathlib import Path

import torch
import transformers
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from deftune.analysis.grid import Comparison, load_comparison
from deftune.data.templates import TEMPLATES

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|pad|>"]


def save_model(folder: Path) -> Path:
    """A 2-layer Llama of width 32 with a byte-level tokenizer and ChatML."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(["user assistant system sort these words in ascending order"], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    tokenizer.chat_template = TEMPLATES["chatml"]
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def content(model: Path, folder: Path) -> dict:
    """Two objectives, two seeds, word sorting; asked eight FigFont items at two temperatures."""
    return {
        "folder": str(folder),
        "objectives": ["nll", "deft"],
        "seeds": [0, 1],
        "learning_rates": [1e-3],
        "model": {"name": str(model)},
        "train": {"max_steps": 3, "batch_size": 4, "micro_batch_size": 2, "save_steps": 2, "precision": "fp32"},
        "regimes": {
            "weak": {
                "data": {"train": [{"generate": "word_sorting", "limit": 12}], "max_length": 512},
                "evaluate": [
                    {"tasks": ["figfont"], "limit": 6, "temperatures": [0, 1], "samples": 2, "max_new_tokens": 4}
                ],
                "tokens": [{"generate": "word_sorting", "split": "test", "limit": 4}],
            }
        },
    }


def write(path: Path, what: dict) -> Path:
    path.write_text(yaml.safe_dump(what))
    return path


def comparison_at(tmp_path: Path, model: Path, **changes) -> Comparison:
    return load_comparison(write(tmp_path / "compare.yaml", content(model, tmp_path / "grid") | changes))
