"""`deftune export gguf`: the file holds the model, read back by transformers; llama.cpp itself was tried by hand."""

import json

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers

import chat_fixtures
import tiny
from deftune.adapters.export_gguf import check_architecture, export_gguf, llama3_factors, write_gguf
from deftune.adapters.gguf_tokenizer import SPLITS, describe_tokenizer, merge_scores, pre_tokenizer_name
from deftune.artifacts.models import load_model, load_tokenizer, resolve_model
from deftune.artifacts.results import load_result
from deftune.cli import main
from deftune.data.encoding import Encoder
from tiny_chat import make_row, make_rows

tokenizer, model, model_folder, data_file = (
    chat_fixtures.tokenizer, chat_fixtures.model, chat_fixtures.model_folder, chat_fixtures.data_file,
)  # fmt: skip
make_run, run = chat_fixtures.make_run, chat_fixtures.run

# transformers reads 256 and 128 for these architectures, whatever the file says
GEMMA = {"num_hidden_layers": 7, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 8}
MODELS = {
    "llama": (transformers.LlamaForCausalLM, {}),
    "llama-untied": (transformers.LlamaForCausalLM, {"tie_word_embeddings": False, "head_dim": 16}),
    "llama-theta": (
        transformers.LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "rms_norm_eps": 1e-2},
    ),
    "qwen2": (transformers.Qwen2ForCausalLM, {}),
    "qwen3": (transformers.Qwen3ForCausalLM, {"head_dim": 128}),
    "gemma3": (transformers.Gemma3ForCausalLM, GEMMA),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DEFTUNE_CACHE", str(tmp_path / "cache"))


def make_model(tokenizer, name: str):
    """A tiny model whose norms and biases are not those of the start: a lost one would change the logits."""
    cls, options = MODELS[name]
    model = tiny.make_model(tokenizer, cls, **{"gain": 4.0, "vocab_size": len(tokenizer) + 8, **options})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def save(folder, model, tokenizer):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def read_back(path):
    folder = resolve_model(str(path))
    return load_model(folder), load_tokenizer(folder)


def logits(model, tokenizer) -> torch.Tensor:
    row = make_row("What is 12 plus 30?", "The answer is 42, and 漢字. " * 3)
    if tokenizer.chat_template is None:
        tokens = tokenizer(row.messages[-1]["content"]).input_ids
    else:
        tokens = Encoder(tokenizer, max_length=200).encode(row).input_ids
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits


@pytest.mark.parametrize("name", MODELS)
def test_the_file_gives_the_same_logits(tmp_path, name):
    tokenizer = make_sentencepiece() if name == "gemma3" else tiny.make_tokenizer()
    model = make_model(tokenizer, name)
    done = export_gguf(save(tmp_path / "model", model, tokenizer), tmp_path / "model.gguf", type="f32")
    assert done.architecture == name.split("-")[0]
    assert done.notes == [] or (name == "qwen2" and "NFC" in done.notes[0])  # the class of Qwen2's tokenizer adds it
    assert done.num_bytes == done.path.stat().st_size
    back = read_back(done.path)[0]
    expected = logits(model, tokenizer)
    assert expected.std() > 0.3
    torch.testing.assert_close(logits(back, tokenizer), expected, rtol=1e-5, atol=1e-5)
    assert not list(tmp_path.glob(".*"))


def test_the_tokenizer_survives(tmp_path):
    tokenizer = tiny.make_tokenizer()
    done = export_gguf(
        save(tmp_path / "model", make_model(tokenizer, "llama"), tokenizer), tmp_path / "model.gguf", type="f32"
    )
    back = read_back(done.path)[1]
    assert back.chat_template == tokenizer.chat_template
    assert (back.eos_token, back.pad_token) == ("<|im_end|>", "<|pad|>")
    for row in make_rows():
        old, new = (Encoder(each, max_length=500).encode(row) for each in (tokenizer, back))
        assert (old.input_ids, old.labels) == (new.input_ids, new.labels)
    fields = gguf.GGUFReader(done.path).fields
    assert fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    assert fields["tokenizer.ggml.add_bos_token"].contents() is False
    types = fields["tokenizer.ggml.token_type"].contents()
    assert [types[tokenizer.convert_tokens_to_ids(token)] for token in (*tiny.SPECIAL, "a")] == [3, 3, 3, 1]


@pytest.mark.parametrize(("kind", "bits", "error"), [("f16", 16, 1e-3), ("bf16", 16, 8e-3), ("q8_0", 8.5, 2e-2)])
def test_smaller_types(tmp_path, kind, bits, error):
    tokenizer = tiny.make_tokenizer()
    model = make_model(tokenizer, "llama")
    done = export_gguf(save(tmp_path / "model", model, tokenizer), tmp_path / "model.gguf", type=kind)
    matrix = next(t for t in gguf.GGUFReader(done.path).tensors if t.name == "blk.0.ffn_up.weight")
    assert matrix.n_bytes * 8 / matrix.n_elements == bits
    back = read_back(done.path)[0].state_dict()
    for name, value in model.state_dict().items():
        limit = 0 if value.dim() == 1 else error * value.abs().max()  # norms stay float32
        assert (back[name] - value).abs().max() <= limit, name


def test_rows_that_q8_0_cannot_hold_are_f16_and_named(tmp_path):
    tokenizer = tiny.make_tokenizer()
    model = tiny.make_model(tokenizer, intermediate_size=40)
    done = write_gguf(model, tokenizer, tmp_path / "model.gguf", type="q8_0", about={"name": "tiny"}, end_tokens=[])
    assert done.notes == [
        f"blk.{i}.ffn_down.weight is f16: q8_0 needs rows of a multiple of 32 values, these have 40" for i in (0, 1)
    ]


def test_ids_without_a_token_are_unused(tmp_path):
    """Embeddings are often padded to a multiple of 64."""
    tokenizer = tiny.make_tokenizer()
    model = tiny.make_model(tokenizer, vocab_size=len(tokenizer) + 4)
    write_gguf(model, tokenizer, tmp_path / "model.gguf", type="f32", about={"name": "tiny"}, end_tokens=[])
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    assert fields["tokenizer.ggml.tokens"].contents()[-1] == f"[PAD{len(tokenizer) + 3}]"
    assert fields["tokenizer.ggml.token_type"].contents()[-5:] == [1, 5, 5, 5, 5]


def test_llama3_positions_have_their_tensor(tmp_path):
    """The formula of Llama 3.1's rotary positions, written out; llama.cpp divides the frequencies by these factors."""
    tokenizer = tiny.make_tokenizer()
    scaling = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
    model = tiny.make_model(tokenizer, head_dim=16, rope_parameters=scaling)
    write_gguf(model, tokenizer, tmp_path / "model.gguf", type="f16", about={"name": "tiny"}, end_tokens=[])
    expected = []
    for i in range(8):
        length = 2 * np.pi * 10000.0 ** (2 * i / 16)
        smooth = (64 / length - 1) / (4 - 1)
        expected.append(1.0 if length < 64 / 4 else 8.0 if length > 64 else 1 / ((1 - smooth) / 8 + smooth))
    stored = next(t for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors if t.name == "rope_freqs.weight")
    np.testing.assert_allclose(stored.data, expected, rtol=1e-5)
    np.testing.assert_allclose(llama3_factors(model.config), expected, rtol=1e-5)
    assert len(set(expected)) > 2


# --- SentencePiece ----------------------------------------------------------------------------------------------------


def make_sentencepiece() -> transformers.PreTrainedTokenizerFast:
    """Gemma's kind: spaces as ▁, bytes for unknown characters, merges in the order of their tokens' ids."""
    letters = [*"▁abcdefghijklmnopqrstuvwxyz.,!?0123456789\n"]
    words = ["▁t", "he", "▁the", "an", "▁an", "▁▁", "in", "ing", "er"]
    pairs = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("a", "n"), ("▁", "an"), ("▁", "▁"), ("i", "n"), ("in", "g"),
             ("e", "r")]  # fmt: skip
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{i:02X}>" for i in range(256)), *words, *letters, "<turn>"]
    backend = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, pairs, unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_tokens(["<turn>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )


def test_a_sentencepiece_tokenizer(tmp_path):
    tokenizer = make_sentencepiece()
    model = make_model(tokenizer, "gemma3")
    done = export_gguf(save(tmp_path / "model", model, tokenizer), tmp_path / "model.gguf", type="f32")
    fields = gguf.GGUFReader(done.path).fields
    assert fields["tokenizer.ggml.model"].contents() == "llama"
    types = fields["tokenizer.ggml.token_type"].contents()
    # control, unknown, a byte; the last token, <turn>, is user-defined
    assert types[:5] == [3, 3, 3, 2, 6] and types[len(tokenizer) - 1] == 4
    back = read_back(done.path)[1]
    for text in ("the answer is 42.", "  two  spaces, and an error\n", "in the anteroom<turn>the thing", "Ę 漢"):
        assert back(text, add_special_tokens=False).input_ids == tokenizer(text, add_special_tokens=False).input_ids


def test_scores_follow_the_merges():
    """llama.cpp joins the pair of the highest score first: the earlier merge."""
    assert merge_scores(["a", "b", "ab", "abb", "<x>"], [1, 1, 1, 1, 3], ["a b", "ab b"])[2:] == [0.0, -1.0, 0.0]


# --- runs -------------------------------------------------------------------------------------------------------------


def test_a_lora_run_is_merged(tmp_path, make_run):
    run = make_run("deft", lora={"r": 4, "alpha": 32, "target_modules": "all-linear"})
    done = export_gguf(str(run.folder), tmp_path / "lora.gguf", type="f32")
    model, tokenizer = load_result(str(run.folder))
    base = load_result(f"{run.folder}:0")[0]
    expected, back = logits(model, tokenizer), read_back(done.path)
    torch.testing.assert_close(logits(*back), expected, rtol=1e-5, atol=1e-4)
    assert (logits(base, tokenizer) - expected).abs().max() > 0.01  # the adapter changed something
    assert back[1].chat_template == tokenizer.chat_template  # the run's own, `plain`
    assert gguf.GGUFReader(done.path).fields["general.name"].contents() == run.folder.name


def test_the_command(tmp_path, run, capsys):
    out = tmp_path / "models" / "first.gguf"
    assert main(["export", "gguf", f"{run.folder}:2", "--out", str(out), "--type", "q8_0"]) == 0
    printed = capsys.readouterr().out
    assert f"{out}: llama, 20 tensors, " in printed and f"llama-cli -m {out}" in printed
    step = load_result(f"{run.folder}:2")[0].model.norm.weight
    assert torch.equal(read_back(out)[0].model.norm.weight, step.detach())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--out", "a.bin"], "export gguf: --out a.bin: the name of a GGUF file ends in .gguf"),
        (["--out", "a.gguf", "--ranks", "2"], "export gguf: --ranks: the file holds a trained model; leave it out"),
        (["--out", "a.gguf", "--set", "run=x"], "export gguf: --set: the file holds a trained model; leave it out"),
    ],
)
def test_options_that_make_no_sense(arguments, text, capsys):
    assert main(["export", "gguf", "runs/first", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_a_type_is_for_gguf(tmp_path, capsys):
    assert main(["export", "axolotl", "run.yaml", "--out", str(tmp_path / "x"), "--type", "f16"]) == 2
    assert "export: --type is for gguf" in capsys.readouterr().err


def test_an_existing_file_stays(tmp_path):
    (tmp_path / "a.gguf").write_text("mine")
    with pytest.raises(ValueError, match=r"a\.gguf exists; name another file"):
        export_gguf("smollm2", tmp_path / "a.gguf")
    with pytest.raises(ValueError, match=r"unknown --type 'q8'\. Did you mean 'q8_0'\?"):
        export_gguf("smollm2", tmp_path / "b.gguf", type="q8")


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_an_architecture_that_is_not_here():
    with pytest.raises(ValueError) as caught:
        check_architecture(transformers.PhiConfig())
    text = str(caught.value)
    assert text.startswith("export gguf: phi is not supported (llama, qwen2, qwen3, gemma3_text are); llama.cpp's ")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (transformers.LlamaConfig(attention_bias=True), "attention_bias of the model is True, and llama.cpp's llama"),
        (transformers.LlamaConfig(hidden_act="gelu"), "hidden_act of the model is 'gelu'"),
        (transformers.Gemma3TextConfig(query_pre_attn_scalar=64), "query_pre_attn_scalar of the model is 64"),
        (transformers.Gemma3TextConfig(num_hidden_layers=2, layer_types=["full_attention"] * 2), "layer_types of the"),
    ],
)
def test_values_that_llama_cpp_fixes(config, text):
    with pytest.raises(ValueError, match=text):
        check_architecture(config)


def test_other_rotary_positions(tmp_path):
    tokenizer = tiny.make_tokenizer()
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    model = tiny.make_model(tokenizer, rope_parameters=yarn)
    with pytest.raises(ValueError, match=r"rotary positions of type 'yarn' are not supported \(default, lin"):
        write_gguf(model, tokenizer, tmp_path / "a.gguf", type="f16", about={"name": "a"}, end_tokens=[])
    assert not list(tmp_path.iterdir())


def test_a_value_that_f16_cannot_hold(tmp_path):
    tokenizer = tiny.make_tokenizer()
    model = tiny.make_model(tokenizer)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = 1e5
    with pytest.raises(ValueError, match=r"blk\.1\.ffn_up\.weight holds 1e\+05, more than f16 can; use --type bf16"):
        write_gguf(model, tokenizer, tmp_path / "a.gguf", type="f16", about={"name": "a"}, end_tokens=[])
    assert not list(tmp_path.iterdir())


def test_pre_tokenizers():
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    assert pre_tokenizer_name(byte_level) == "gpt-2"
    assert pre_tokenizer_name({"type": "Sequence", "pretokenizers": [digits, byte_level]}) == "smollm"
    for other in (None, digits, {**byte_level, "add_prefix_space": True}, {"type": "Whitespace"}):
        with pytest.raises(ValueError, match="export gguf: the tokenizer splits text by"):
            pre_tokenizer_name(other)


@pytest.mark.parametrize(("limit", "name"), [("", "qwen2"), ("{1,3}", "llama-bpe")])
def test_splits_by_regular_expression(limit, name):
    """As the tokenizer.json files of Qwen2.5 and Llama 3 spell them."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + limit
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )  # fmt: skip
    steps = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
    ]
    assert pre_tokenizer_name({"type": "Sequence", "pretokenizers": steps}) == name


def test_tokenizers_without_a_counterpart():
    word = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(ValueError, match="export gguf: the tokenizer is WordLevel, not BPE"):
        describe_tokenizer(word, 10)
    tokenizer = make_sentencepiece()
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend("▁")
    with pytest.raises(ValueError, match="another treatment of spaces than Gemma's"):
        describe_tokenizer(tokenizer, len(tokenizer))
    tokenizer = tiny.make_tokenizer()
    first = min(tokenizer.eos_token_id, tokenizer.pad_token_id)
    with pytest.raises(ValueError, match=rf"has a \w+ token of id \d+, and the embedding {first} rows"):
        describe_tokenizer(tokenizer, first)


def test_tokens_without_an_embedding_are_left_out():
    """Gemma 3's tokenizer has a token for images, one more than its text models embed."""
    tokenizer = tiny.make_tokenizer()
    size = len(tokenizer)
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    described = describe_tokenizer(tokenizer, size)
    assert described.notes == [f"tokens from id {size} on are left out: the model's embedding has no row for them"]
    assert len(described.tokens) == size and "<image>" not in described.tokens


def test_declared_end_tokens():
    tokenizer = tiny.make_tokenizer()
    described = describe_tokenizer(tokenizer, len(tokenizer), ["<|pad|>", "<|im_start|>"])
    assert described.special["eot"] == tokenizer.convert_tokens_to_ids("<|pad|>")
    assert described.notes == ["data.end_tokens: the file holds one end-of-turn token; '<|im_start|>' is left out"]


def test_a_tokenizer_written_in_python_is_refused_in_one_line():
    with pytest.raises(ValueError, match="the tokenizer is a ByT5Tokenizer, which is written in Python, for which"):
        describe_tokenizer(transformers.ByT5Tokenizer(), 300)


def test_normalizers_of_byte_level_tokenizers():
    """llama.cpp changes no text before byte-level BPE. NFC, which Qwen has, changes hardly any."""
    tokenizer = tiny.make_tokenizer()
    for plain in (None, normalizers.Sequence([])):
        tokenizer.backend_tokenizer.normalizer = plain
        assert describe_tokenizer(tokenizer, len(tokenizer)).notes == []
    for nfc in (normalizers.NFC(), normalizers.Sequence([normalizers.NFC()])):
        tokenizer.backend_tokenizer.normalizer = nfc
        (note,) = describe_tokenizer(tokenizer, len(tokenizer)).notes
        assert note.startswith("the tokenizer brings text into Unicode's form NFC and llama.cpp does not")
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    with pytest.raises(
        ValueError, match=r"the tokenizer changes text before it splits it \(NFC, Lowercase\), for which"
    ):
        describe_tokenizer(tokenizer, len(tokenizer))


def split_as(tokenizer, pre: str | None, *, ignore_merges: bool, unmerged: bool):
    """A tokenizer with Llama 3's way to split text, or GPT-2's; ``unmerged``: `anteater` is a token without merges."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["model"]["ignore_merges"] = ignore_merges
    if pre == "llama-bpe":
        split = {"type": "Split", "pattern": {"Regex": next(text for text, name in SPLITS.items() if name == pre)},
                 "behavior": "Isolated", "invert": False}  # fmt: skip
        last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, last]}
    if unmerged:
        content["model"]["vocab"]["anteater"] = len(tokenizer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)), eos_token="<|im_end|>", pad_token="<|pad|>"
    )


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
@pytest.mark.parametrize("ignore_merges", [False, True])
@pytest.mark.parametrize("unmerged", [False, True])
def test_words_that_are_tokens_are_treated_as_llama_cpp_does(pre, ignore_merges, unmerged):
    """The file cannot say `ignore_merges`: llama.cpp has it with Llama 3's split alone."""
    tokenizer = split_as(tiny.make_tokenizer(), pre, ignore_merges=ignore_merges, unmerged=unmerged)
    if unmerged and ignore_merges != (pre == "llama-bpe"):
        said, there = ("true", "false") if ignore_merges else ("false", "true")
        with pytest.raises(ValueError) as caught:
            describe_tokenizer(tokenizer, len(tokenizer))
        expected = (
            f"has ignore_merges={said}, llama.cpp has {there} for its way to split text, and no merges make 1 of "
        )
        assert f"{expected}its tokens, such as 'anteater'" in str(caught.value) and "\n" not in str(caught.value)
    else:  # alike, or no token shows the difference
        assert describe_tokenizer(tokenizer, len(tokenizer)).pre == pre


def test_a_file_with_the_split_of_llama_3_is_read_with_whole_words(tmp_path):
    tokenizer = split_as(tiny.make_tokenizer(), "llama-bpe", ignore_merges=True, unmerged=True)
    model = make_model(tokenizer, "llama")
    done = export_gguf(save(tmp_path / "model", model, tokenizer), tmp_path / "model.gguf", type="f32")
    back = read_back(done.path)[1]
    for text in ("anteater", "What is 12 plus 3456?", "anteaters, an anteater"):
        assert back(text).input_ids == tokenizer(text).input_ids
    assert len(back("anteater").input_ids) == 1


def test_a_byte_level_tokenizer_with_byte_fallback_is_not_sentencepiece():
    """As earlier releases of transformers read it from a GGUF file; every byte is a token, so none falls back."""
    tokenizer = tiny.make_tokenizer()
    tokenizer.backend_tokenizer.model.byte_fallback = True
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([])
    assert describe_tokenizer(tokenizer, len(tokenizer)).pre == "gpt-2"
