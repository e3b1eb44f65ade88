"""A tokenizer as the keys of a GGUF file: the tokens, their types and merges, the special tokens, the chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deftune.artifacts.vocabulary import LLAMA3_SPLITS
from deftune.data.encoding import end_tokens_of

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {  # the regular expression that splits text before the merges -> llama.cpp's name of it
    rf"{CONTRACTIONS}|\p{{N}}{REST}": "qwen2",
    rf"{CONTRACTIONS}|\p{{N}}{{1,3}}{REST}": "llama-bpe",
}
SPACE = "▁"  # how SentencePiece writes a space


@dataclass(frozen=True)
class GgufTokenizer:
    """The keys of a tokenizer; ``pre`` and ``merges`` are those of byte-level BPE, ``scores`` of SentencePiece."""

    tokens: list[str]
    types: list[int]
    pre: str | None
    merges: list[str]
    scores: list[float]
    special: dict[str, int]
    adds_bos: bool
    template: str | list[dict[str, str]] | None
    notes: list[str]

    def add_to(self, writer: Any) -> list[str]:
        """Write the keys; the notes on what the file cannot hold."""
        writer.add_tokenizer_model("llama" if self.pre is None else "gpt2")
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.pre is None:
            writer.add_token_scores(self.scores)
            writer.add_add_space_prefix(False)
        else:
            writer.add_tokenizer_pre(self.pre)
            writer.add_token_merges(self.merges)
        for name, token in self.special.items():
            getattr(writer, f"add_{name}_token_id")(token)
        writer.add_add_bos_token(self.adds_bos)
        if self.template is not None:
            writer.add_chat_template(self.template)
        return self.notes


def describe_tokenizer(tokenizer: Any, vocab_size: int, end_tokens: Sequence[str] = ()) -> GgufTokenizer:
    """A transformers tokenizer as llama.cpp stores it.

    Args:
        tokenizer: byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) or SentencePiece's BPE without a leading space (Gemma).
        vocab_size: of the model: ids that the tokenizer does not have become unused tokens.
        end_tokens: tokens that end an answer beside those that llama.cpp knows.

    Raises:
        ValueError: llama.cpp has no counterpart of the tokenizer.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise refused(f"is a {type(tokenizer).__name__}, which is written in Python")
    content: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    model: dict[str, Any] = content["model"]
    if model["type"] != "BPE":
        raise refused(f"is {model['type']}, not BPE")
    pre = None if is_sentencepiece(content) else pre_tokenizer_name(content["pre_tokenizer"])
    notes = [] if pre is None else normalizer_notes(content["normalizer"])
    check_whole_words(content, pre)
    tokens, types = token_list(tokenizer, vocab_size, plain=pre is None)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    special = {
        name: token
        for name in ("bos", "eos", "unk", "pad")
        if (token := getattr(tokenizer, f"{name}_token_id")) is not None
    }
    if len(tokenizer) > vocab_size:  # Gemma 3's has a token for images, which its text models do not embed
        notes.append(f"tokens from id {vocab_size} on are left out: the model's embedding has no row for them")
    if end_tokens:  # of data.end_tokens: llama.cpp stops at one beside EOS, and at those that it knows by their text
        special["eot"] = end_tokens_of(tokenizer, declared=end_tokens)[end_tokens[0]]
        notes += [
            f"data.end_tokens: the file holds one end-of-turn token; {token!r} is left out" for token in end_tokens[1:]
        ]
    if without := [name for name, token in special.items() if token >= vocab_size]:
        raise refused(f"has a {without[0]} token of id {special[without[0]]}, and the embedding {vocab_size:,} rows")
    bos: int | None = tokenizer.bos_token_id
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    return GgufTokenizer(
        tokens, types, pre, merges, merge_scores(tokens, types, merges) if pre is None else [], special,
        bos is not None and tokenizer("a")["input_ids"][:1] == [bos], template, notes,
    )  # fmt: skip


def refused(what: str) -> ValueError:
    return ValueError(
        f"export gguf: the tokenizer {what}, for which there is no counterpart here; llama.cpp's "
        f"convert_hf_to_gguf.py knows more tokenizers and converts the folder that `deftune merge` writes"
    )


def token_list(tokenizer: Any, vocab_size: int, *, plain: bool) -> tuple[list[str], list[int]]:
    """Each token's text and llama.cpp's type of it; in a ``plain`` (SentencePiece) vocabulary bytes are <0x0A>."""
    from gguf import TokenType

    texts = {number: text for text, number in tokenizer.get_vocab().items()}
    added: dict[int, Any] = tokenizer.added_tokens_decoder
    tokens: list[str] = []
    types: list[int] = []
    for number in range(vocab_size):
        text, kind = texts.get(number), TokenType.NORMAL
        if text is None:
            text, kind = f"[PAD{number}]", TokenType.UNUSED
        elif plain and number == tokenizer.unk_token_id:
            kind = TokenType.UNKNOWN
        elif number in added and added[number].special:
            kind = TokenType.CONTROL
        elif number in added:  # matched in the text as written, before spaces are replaced
            text, kind = text.replace(SPACE, " ") if plain else text, TokenType.USER_DEFINED
        elif plain and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            kind = TokenType.BYTE
        tokens.append(text)
        types.append(int(kind))
    return tokens, types


def steps_of(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer, one after the other."""
    if part is None:
        return []
    inside = part.get("normalizers", part.get("pretokenizers"))
    return [part] if inside is None else [step for one in inside for step in steps_of(one)]


def normalizer_notes(normalizer: dict[str, Any] | None) -> list[str]:
    """What a file of byte-level BPE cannot say about the text before it is split: NFC is noted, others are refused."""
    kinds = [step["type"] for step in steps_of(normalizer)]
    if any(kind != "NFC" for kind in kinds):
        raise refused(f"changes text before it splits it ({', '.join(kinds)})")
    lost = "the tokenizer brings text into Unicode's form NFC and llama.cpp does not: other forms get other tokens"
    return [lost] if kinds else []


def check_whole_words(content: dict[str, Any], pre: str | None) -> None:
    """Refuse a tokenizer that treats a whole word in its vocabulary unlike llama.cpp, if a token shows it."""
    from tokenizers import Tokenizer

    model, there = content["model"], pre in LLAMA3_SPLITS
    if bool(model.get("ignore_merges")) == there:
        return
    merging: Any = Tokenizer.from_str(json.dumps({**content, "model": {**model, "ignore_merges": False}})).model
    added = {token["content"] for token in content["added_tokens"]}
    if unmerged := [token for token in model["vocab"] if token not in added and len(merging.tokenize(token)) != 1]:
        raise refused(
            f"has ignore_merges={json.dumps(not there)}, llama.cpp has {json.dumps(there)} for its way to split text, "
            f"and no merges make {len(unmerged):,} of its tokens, such as {unmerged[0]!r}"
        )


def is_sentencepiece(content: dict[str, Any]) -> bool:
    """Whether spaces are written as ▁ and unknown characters as bytes, with no space put in front of the text."""
    normalizer = content["normalizer"]
    byte_level = any(step["type"] == "ByteLevel" for step in steps_of(content["pre_tokenizer"]))
    if not content["model"].get("byte_fallback") or byte_level:
        return False
    if normalizer != {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}:
        raise refused("is SentencePiece's with another treatment of spaces than Gemma's")
    return True


def pre_tokenizer_name(steps: dict[str, Any] | None) -> str:
    """llama.cpp's name of what splits a text before the merges of byte-level BPE."""
    parts = steps_of(steps)
    last = parts[-1] if parts else {}
    if last.get("type") == "ByteLevel" and not last.get("add_prefix_space"):
        before = parts[:-1]
        if last.get("use_regex", True):
            if not before:
                return "gpt-2"
            if before == [{"type": "Digits", "individual_digits": True}]:
                return "smollm"
        elif len(before) == 1 and before[0]["type"] == "Split" and before[0].get("behavior") == "Isolated":
            if name := SPLITS.get(before[0]["pattern"].get("Regex", "")):
                return name
    raise refused(f"splits text by {json.dumps(steps)[:120]}")


def merge_scores(tokens: Sequence[str], types: Sequence[int], merges: Sequence[str]) -> list[float]:
    """A score for each token by which SentencePiece's merges come in their order: the earliest merge is the highest.

    llama.cpp merges the neighbours whose joined token has the highest score; a merge list says the order itself.
    """
    rank: dict[str, int] = {}
    for place, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", "", 1), place)
    return [-float(rank[token]) if token in rank else -1e9 if kind == 1 else 0.0 for token, kind in zip(tokens, types)]
