"""The tokenizer of a GGUF file, the same with every version of transformers.

transformers 5.17 reads some of these tokenizers wrongly, and says nothing: Gemma's words become single characters, and
the end token of a Llama becomes its BOS token. 5.18 mended both.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

# architectures with SentencePiece's BPE, whose files have no merges
GEMMA = ("gemma", "gemma2", "gemma3")
# llama.cpp's names of ways to split text with which it takes a word that is a token as it is, whatever the merges say
LLAMA3_SPLITS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
FACTS = (
    "model", "pre", "tokens", "token_type", "add_bos_token", "add_eos_token",
    "bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id",
)  # fmt: skip
SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # llama.cpp's types of tokens
WORDS = 200


class WrongTokenizer(ValueError):
    """The tokenizer that transformers makes of a GGUF file is not the one that the file describes."""


@contextlib.contextmanager
def read_once(path: Path) -> Generator[None]:
    """Inside, the header of a GGUF file is read once, and faster.

    transformers reads it anew for the config, the tokenizer and the weights, and gguf takes 10 s and more for 150,000
    tokens and their merges: each is a view of a memory-mapped array, which costs ten times a view of a plain one.
    """
    import gguf
    import numpy as np

    original: Any = gguf.GGUFReader
    readers = dict[str, Any]()

    class Reader(original):
        def _get(self, *args: Any, **options: Any) -> Any:
            if isinstance(self.data, np.memmap):
                self.data = self.data.view(np.ndarray)
            return super()._get(*args, **options)

    def make(source: str | os.PathLike[str], *args: Any, **options: Any) -> Any:
        key = os.path.realpath(source)
        if args or options or key != os.path.realpath(path):
            return original(source, *args, **options)
        if key not in readers:
            readers[key] = Reader(source)
        return readers[key]

    gguf.GGUFReader = make
    try:
        yield
    finally:
        gguf.GGUFReader = original


def read_tokenizer(gguf: Path) -> Any:
    """The tokenizer of a GGUF file; vocabulary, special tokens and BOS are as the file's header says.

    Raises:
        WrongTokenizer: this version of transformers makes a tokenizer of the file that splits the vocabulary's words.
    """
    import transformers

    facts = tokenizer_facts(gguf)
    if facts.get("model") == "llama" and facts.get("architecture") in GEMMA:
        tokenizer = _gemma_tokenizer(facts)
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    _declare_tokens(tokenizer, facts)
    if facts.get("model") == "gpt2" and facts.get("pre") in LLAMA3_SPLITS:
        tokenizer.backend_tokenizer.model.ignore_merges = True  # as in llama.cpp: a word that is a token stays whole
    if facts.get("add_bos_token") and tokenizer.bos_token_id is not None:
        tokenizer.add_bos_token = True  # transformers 5.17 leaves it out: Gemma's NLL is twice as high without
    with tempfile.TemporaryDirectory() as folder:  # some classes rebuild the tokenizer when they load it
        tokenizer.save_pretrained(folder)
        check_words(transformers.AutoTokenizer.from_pretrained(folder), facts, gguf)
    return tokenizer


def tokenizer_facts(gguf: Path) -> dict[str, Any]:
    """What a GGUF file's header says of its tokenizer, under llama.cpp's names."""
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    names = {name: f"tokenizer.ggml.{name}" for name in FACTS}
    names |= {"architecture": "general.architecture", "chat_template": "tokenizer.chat_template"}
    return {name: fields[key].contents() for name, key in names.items() if key in fields}


def _gemma_tokenizer(facts: dict[str, Any]) -> Any:
    """Gemma's BPE. The file has no merges: two tokens make a third, in the order of the third token's id."""
    from transformers import GemmaTokenizer

    # several spaces are written as spaces in the file; the normalizer has made each a ▁ before they are looked up
    tokens = ["▁" * len(token) if not token.strip(" ") else token for token in facts["tokens"]]
    vocab = {token: number for number, token in enumerate(tokens)}
    merges = [
        (token[:cut], token[cut:])
        for token in tokens
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    options: dict[str, Any] = {"vocab": vocab, "merges": merges}
    options |= {name: facts[name] for name in ("chat_template",) if name in facts}
    options |= {name: facts["tokens"][facts[key]] for name, key in SPECIAL.items() if key in facts}
    options |= {"add_bos_token": facts.get("add_bos_token", True), "add_eos_token": facts.get("add_eos_token", False)}
    return GemmaTokenizer(**options)


def _declare_tokens(tokenizer: Any, facts: dict[str, Any]) -> None:
    """Give a tokenizer the special and the user-defined tokens of the header, where it has others."""
    from tokenizers import AddedToken

    if (tokens := facts.get("tokens")) is None:
        return
    vocab, known = tokenizer.get_vocab(), tokenizer.added_tokens_decoder
    for special, kind in ((True, CONTROL), (False, USER_DEFINED)):
        new = [
            AddedToken(token, normalized=False, special=special)
            for number, (token, its) in enumerate(zip(tokens, facts.get("token_type", ())))
            if its == kind and number not in known and vocab.get(token) == number
        ]
        if new:
            tokenizer.add_tokens(new, special_tokens=special)
    for name, key in SPECIAL.items():
        token = tokens[facts[key]] if key in facts else None
        if getattr(tokenizer, name) != token:
            setattr(tokenizer, name, token)


def check_words(tokenizer: Any, facts: dict[str, Any], gguf: Path) -> None:
    """Refuse a tokenizer that splits words which are tokens of the file's vocabulary.

    Looked at are `WORDS` tokens of a space and letters, spread over the vocabulary; most of them must stay whole.

    Raises:
        WrongTokenizer: half of them, or more, are split.
    """
    import transformers

    tokens: list[str] = facts.get("tokens", [])
    types: list[int] = facts.get("token_type", [NORMAL] * len(tokens))
    spaces = "▁", "Ġ"  # of SentencePiece and of byte-level BPE
    words = [
        (number, f" {token[1:]}")
        for number, (token, kind) in enumerate(zip(tokens, types))
        if kind == NORMAL and len(token) > 2 and token[0] in spaces and token[1:].isascii() and token[1:].isalpha()
    ]
    words = words[:: max(1, len(words) // WORDS)]
    split = [word for number, word in words if number not in tokenizer(word, add_special_tokens=False)["input_ids"]]
    if 2 * len(split) >= len(words) > 0:
        pieces = tokenizer.convert_ids_to_tokens(tokenizer(split[0], add_special_tokens=False)["input_ids"])
        raise WrongTokenizer(
            f"model: {gguf}: transformers {transformers.__version__} reads its tokenizer wrongly: {len(split)} of "
            f"{len(words)} words of the file's vocabulary are split ({split[0]!r} into {pieces}); install another "
            f"version of transformers (5.18 rewrote this part), or pass the folder of the original model"
        )
