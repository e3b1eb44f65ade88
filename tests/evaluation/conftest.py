"""What the evaluation tests share: a model of some thousand weights with its tokenizer, and where real data may lie."""

from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from deftune.data.templates import TEMPLATES

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|pad|>"]


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE, ChatML, `<|im_end|>` ends a turn."""
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


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


def tiny(tokenizer, cls=transformers.LlamaForCausalLM, **more):
    """2 layers of width 32, their weights enlarged: an untrained model's next tokens are all alike."""
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
                parameter.mul_(8.0)
    return model.eval()


@pytest.fixture(scope="session")
def make_model():
    """``make_model(tokenizer, cls, **config)`` is a fresh model."""
    return tiny


@pytest.fixture(scope="session")
def model(tokenizer):
    return tiny(tokenizer)


@pytest.fixture(scope="session")
def data() -> Path:
    if not DATA.is_dir():
        pytest.skip(f"the benchmarks' files are not part of the repository and not at {DATA}")
    return DATA
