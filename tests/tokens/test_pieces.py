"""Tokens as text: whatever the tokenizer does, the pieces join to the text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from deftune.tokens.pieces import Pieces


class Fast:
    """As much of transformers' tokenizer as `Pieces` asks for."""

    def __init__(self, backend):
        self.backend_tokenizer = backend

    def convert_ids_to_tokens(self, token):
        return self.backend_tokenizer.id_to_token(token)


def byte_level():
    backend = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return backend


def byte_fallback():
    """As Llama 2's: a space is a mark, a text's first space is stripped, other characters are bytes."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for text in ("▁", "a", "b", "▁a", "▁b", "ab"):
        vocab[text] = len(vocab)
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁", "b"), ("a", "b")], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["</s>"])
    return backend


BACKENDS = {"byte level": byte_level(), "byte fallback": byte_fallback()}


@pytest.mark.parametrize("kind", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.sampled_from(list("ab \n\téß漢👩‍🔬\u0301\ufffd")), max_size=30))
def test_pieces_join_to_the_text(kind, text):
    backend = BACKENDS[kind]
    ids = backend.encode(text, add_special_tokens=False).ids
    pieces = Pieces(Fast(backend)).of(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == backend.decode(ids, skip_special_tokens=False) == text


def test_a_character_of_several_tokens_stands_with_the_last():
    backend = BACKENDS["byte level"]
    assert Pieces(Fast(backend)).of(backend.encode("a漢b").ids) == ["a", "", "", "漢", "b"]


def test_what_a_cut_leaves_of_a_character_is_not_lost():
    backend = BACKENDS["byte level"]
    assert Pieces(Fast(backend)).of(backend.encode("a漢").ids[:-1]) == ["a", "", "\ufffd"]


def test_special_tokens_are_text():
    backend = BACKENDS["byte fallback"]
    ids = [*backend.encode("ab a").ids, backend.token_to_id("</s>")]
    assert Pieces(Fast(backend)).of(ids)[-1] == "</s>"


def test_alone_a_part_of_a_character_is_shown_as_the_vocabulary_writes_it():
    pieces = Pieces(Fast(BACKENDS["byte level"]))
    first, *_ = BACKENDS["byte level"].encode("漢").ids
    assert pieces.alone(first) == "æ"
    assert pieces.alone(BACKENDS["byte level"].encode("x").ids[0]) == "x"


def test_nothing_is_nothing():
    assert Pieces(Fast(BACKENDS["byte level"])).of([]) == []
