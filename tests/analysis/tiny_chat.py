"""A model of some thousand weights, its tokenizer, and rows with every kind of text."""

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from deftune.data.rows import Row
from deftune.data.templates import TEMPLATES

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|pad|>"]
TEXTS = [
    ("What is 12 plus 30?", "12 plus 30 is 42."),
    ("Say it in Polish.", "Zażółć gęślą jaźń"),
    ("A flag?", "🇨🇭 and 👩‍🔬 and 漢字"),
    ("Lines?", "one\n\ttwo\n\n  three "),
    ("Long?", "is " * 60 + "done."),
    ("Zeros?", "0" * 40),
]


def make_row(*turns: str, where: str = "rows:1") -> Row:
    """User, assistant, user, ... in turn."""
    roles = ("user", "assistant")
    messages = tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(turns))
    return Row(messages, None, where, "rows")


def make_rows() -> list[Row]:
    return [make_row(*turns, where=f"rows:{i + 1}") for i, turns in enumerate(TEXTS)]


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE of 300 tokens, ChatML: most characters that are not ASCII take several tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(["What is 12 plus 30? user assistant system The answer is"], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    tokenizer.chat_template = TEMPLATES["chatml"]
    return tokenizer


def make_model(tokenizer, cls=transformers.LlamaForCausalLM, **more):
    """2 layers of width 32, their weights enlarged: an untrained model's next tokens are all alike."""
    options = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id, **more,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = cls(cls.config_class(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    return model.eval()
