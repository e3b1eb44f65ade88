"""A model of some thousand weights and its tokenizer, for every room's tests."""

from collections.abc import Iterable
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from deftune.data.templates import TEMPLATES

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|pad|>"]
TEXT = ("What is 12 plus 30? user assistant system The answer is",)


def make_tokenizer(text: Iterable[str] = TEXT, size: int = 300) -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE, ChatML, `<|im_end|>` ends a turn: most characters that are not ASCII take several tokens."""
    backend = Tokenizer(models.BPE())
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


def make_model(tokenizer, cls=transformers.LlamaForCausalLM, *, gain: float = 1.0, **more):
    """2 layers of width 32, tied. ``gain`` enlarges the weights: an untrained model's next tokens are all alike."""
    options = {
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


def save_model(folder: Path, tokenizer: transformers.PreTrainedTokenizerFast, **more) -> Path:
    make_model(tokenizer, **more).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
