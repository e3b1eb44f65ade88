"""The tokenizer of a GGUF file is the file's own, whatever version of transformers reads it."""

import os
from pathlib import Path

import gguf
import pytest
import transformers

from deftune.artifacts import models, vocabulary
from deftune.artifacts.models import load_model, load_tokenizer, resolve_model
from deftune.artifacts.vocabulary import read_once, read_tokenizer, tokenizer_facts
from tiny_gguf import GEMMA, GEMMA_TEXTS, close, write_gemma

# What Gemma's own tokenizer makes of it. transformers 5.17 made 32 tokens of the first line.
REAL_GEMMA = {
    "The capital of France is Paris.": [818, 5279, 529, 7001, 563, 9079, 236761],
    "  two  spaces\n\nand 1,234 = 漢字 🙂": [
        138, 13498, 138, 35220, 108, 624, 236743, 236770, 236764, 236778, 236800, 236812, 578, 236743, 201637, 57235,
    ],
    "<start_of_turn>user\nhi<end_of_turn>": [105, 2364, 107, 2202, 106],
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DEFTUNE_CACHE", str(tmp_path / "cache"))


def test_a_converted_gemma_file_keeps_words_whole(tmp_path, monkeypatch, tiny_model):
    """transformers 5.17 reads these tokens as Unigram, and loads them again as BPE without merges: characters."""
    weights = load_model(str(tiny_model))
    monkeypatch.setattr(models, "read_weights", lambda *_, **__: weights)
    tokenizer = load_tokenizer(resolve_model(str(write_gemma(tmp_path / "model.gguf"))))
    for text, tokens in GEMMA_TEXTS.items():
        assert tokenizer.tokenize(text) == tokens
        ids = tokenizer(text).input_ids
        assert ids == [2, *map(({**dict(zip(GEMMA, range(len(GEMMA)))), "▁▁": GEMMA.index("  ")}).get, tokens)]
        assert tokenizer.decode(ids) == f"<bos>{text}"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<eos>", "<pad>") and len(tokenizer) == len(GEMMA)


def test_special_tokens_are_those_of_the_header(tmp_path):
    """transformers 5.17 takes a Llama's BOS token for its end token, and declares no user-defined token."""
    letters = [chr(i) for i in range(ord("a"), ord("z") + 1)]
    tokens = ["<unk>", "<s>", "</s>", "<think>", *letters, "Ġ", "th", "the", "Ġthe"]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, 4] + [1] * (len(tokens) - 4))
    writer.add_token_merges(["t h", "th e", "Ġ the"])
    for name, token in (("unk", 0), ("bos", 1), ("eos", 2)):
        getattr(writer, f"add_{name}_token_id")(token)
    writer.add_block_count(1)  # transformers 5.17 makes the model's config for a tokenizer, too
    tokenizer = read_tokenizer(close(writer, tmp_path / "model.gguf"))
    assert (tokenizer.unk_token, tokenizer.bos_token, tokenizer.eos_token) == ("<unk>", "<s>", "</s>")
    assert tokenizer.pad_token is None
    assert tokenizer.tokenize("the<think> the</s>") == ["the", "<think>", "Ġthe", "</s>"]
    assert [tokenizer.added_tokens_decoder[number].special for number in range(4)] == [True, True, True, False]


def test_a_tokenizer_that_splits_the_words_of_the_file_is_refused(tmp_path, monkeypatch):
    path = write_gemma(tmp_path / "model.gguf")
    monkeypatch.setattr(vocabulary, "GEMMA", ())  # so that transformers reads it
    letters = transformers.GemmaTokenizer(vocab={token: i for i, token in enumerate(GEMMA)}, merges=[])
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: letters)
    with pytest.raises(ValueError) as raised:
        resolve_model(str(path))
    assert str(raised.value) == (
        f"model: {path}: transformers {transformers.__version__} reads its tokenizer wrongly: 2 of 2 words of the "
        f"file's vocabulary are split (' the' into ['▁', 't', 'h', 'e']); install another version of transformers "
        f"(5.18 rewrote this part), or pass the folder of the original model"
    )
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


@pytest.mark.parametrize("said", [True, False, None])
def test_a_gguf_file_says_whether_texts_begin_with_bos(tmp_path, said):
    """transformers 5.17 does not read it: Gemma's NLL is 4.8 instead of 2.2 without the token."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "gemma3")
    if said is not None:
        writer.add_add_bos_token(said)
    facts = tokenizer_facts(close(writer, path))
    assert facts == {"architecture": "gemma3", **({} if said is None else {"add_bos_token": said})}


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("DEFTUNE_GEMMA"), reason="DEFTUNE_GEMMA names no GGUF file of Gemma 3 270M")
def test_gemmas_own_file():
    tokenizer = read_tokenizer(Path(os.environ["DEFTUNE_GEMMA"]))
    assert len(tokenizer) == 262144
    for text, ids in REAL_GEMMA.items():
        assert tokenizer(text).input_ids == [2, *ids]
        assert tokenizer.decode(ids) == text


def test_a_header_is_read_once(tmp_path):
    path, other = write_gemma(tmp_path / "model.gguf"), write_gemma(tmp_path / "other.gguf")
    original = gguf.GGUFReader
    plain = original(path)
    with pytest.raises(KeyError), read_once(path):
        reader = gguf.GGUFReader(str(path))
        assert gguf.GGUFReader(path) is reader and gguf.GGUFReader(other) is not reader
        assert {k: f.contents() for k, f in reader.fields.items()} == {k: f.contents() for k, f in plain.fields.items()}
        assert [t.name for t in reader.tensors] == [t.name for t in plain.tensors]
        raise KeyError
    assert gguf.GGUFReader is original
