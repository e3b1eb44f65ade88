"""What the evaluation tests share: a model of some thousand weights with its tokenizer, and where real data may lie."""

from pathlib import Path

import pytest
import transformers

import tiny

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(scope="session")
def tokenizer():
    return tiny.make_tokenizer()


def enlarged(tokenizer, cls=transformers.LlamaForCausalLM, **more):
    return tiny.make_model(tokenizer, cls, gain=8.0, **more)


@pytest.fixture(scope="session")
def make_model():
    """``make_model(tokenizer, cls, **config)`` is a fresh model."""
    return enlarged


@pytest.fixture(scope="session")
def model(tokenizer):
    return enlarged(tokenizer)


@pytest.fixture(scope="session")
def data() -> Path:
    if not DATA.is_dir():
        pytest.skip(f"the benchmarks' files are not part of the repository and not at {DATA}")
    return DATA
