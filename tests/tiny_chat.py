"""The tiny model with room for long rows, and rows with every kind of text."""

import transformers

import tiny
from deftune.data.rows import Row

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


def make_model(tokenizer, cls=transformers.LlamaForCausalLM, **more):
    return tiny.make_model(tokenizer, cls, **{"gain": 6.0, "max_position_embeddings": 512, **more})
