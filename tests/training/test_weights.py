"""No weight is left at random: files that do not hold exactly the model's tensors are refused, with their names."""

import io
import json
import os
import shutil
from pathlib import Path

import datasets
import pytest
import torch
import transformers
import trl
from rich.console import Console
from safetensors.torch import load_file, save_file
from trl.trainer import sft_trainer

import tiny
from deftune.artifacts import models
from deftune.artifacts.folders import seal
from deftune.artifacts.models import load_model, load_tokenizer, resolve_model
from deftune.artifacts.results import load_result
from deftune.artifacts.runs import Run
from deftune.cli import main
from deftune.training.train import train_run
from deftune.training.trainer import DeftSFTTrainer

NORM = "model.norm.weight"


def change(folder: Path, edit=lambda tensors: tensors, **config) -> Path:
    """Replace the tensors of a model folder, and keys of its config.json."""
    path = folder / "model.safetensors"
    save_file(edit(load_file(path)), path, metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **config}))
    return folder


@pytest.fixture
def copy(tmp_path, tiny_model) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "copy"))


DAMAGES = {
    "renamed prefix": (
        lambda tensors: {f"foo.{name}": value for name, value in tensors.items()}, {},
        "21 tensors missing (lm_head.weight, model.embed_tokens.weight, model.layers.0.input_layernorm.weight, ...); "
        "20 tensors unexpected (foo.model.embed_tokens.weight, ",
    ),
    "tensors missing": (
        lambda tensors: {name: value for name, value in tensors.items() if "layers.1" not in name}, {},
        "9 tensors missing (model.layers.1.input_layernorm.weight, ",
    ),
    "one missing": (
        lambda tensors: {name: value for name, value in tensors.items() if name != NORM}, {},
        "1 tensor missing (model.norm.weight);",
    ),
    "none at all": (lambda tensors: {}, {}, "21 tensors missing"),
    "one too many": (lambda tensors: {**tensors, "head.bias": torch.zeros(3)}, {}, "1 tensor unexpected (head.bias);"),
    "wrong shape": (
        lambda tensors: {**tensors, NORM: torch.zeros(31)}, {},
        "1 tensor of a wrong shape (model.norm.weight: (31,) instead of (32,));",
    ),
    "more layers than the file": (dict, {"num_hidden_layers": 3}, "9 tensors missing (model.layers.2."),
    "fewer layers than the file": (dict, {"num_hidden_layers": 1}, "9 tensors unexpected (model.layers.1."),
    "a head that is not tied": (dict, {"tie_word_embeddings": False}, "1 tensor missing (lm_head.weight);"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_that_do_not_fit_are_refused(copy, damage):
    edit, config, text = DAMAGES[damage]
    change(copy, edit, **config)
    with pytest.raises(ValueError) as caught:
        load_model(str(copy))
    message = str(caught.value)
    assert message.startswith(f"model: {copy}: the weights do not fit config.json: ") and text in message
    assert message.endswith("; download or convert the model again, or correct config.json")
    assert "\n" not in message


@pytest.mark.parametrize("command", ["train", "dry run", "chat", "eval", "inspect", "tokens"])
def test_every_command_that_loads_weights_refuses(copy, chat_file, make_config, tmp_path, capsys, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    change(copy, DAMAGES["renamed prefix"][0])
    model, data = str(copy), str(chat_file)
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(json.loads(make_config(tmp_path / "run", {"model.name": model}).model_dump_json())))
    arguments = {
        "train": ["train", str(config)],
        "dry run": ["train", str(config), "--dry-run"],
        "chat": ["chat", model],
        "eval": ["eval", "heldout", model, "--data", data],
        "inspect": ["inspect", model, data],
        "tokens": ["analyze", "tokens", model, data],
    }[command]
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert f"deftune: model: {model}: the weights do not fit config.json: 21 tensors missing" in err


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        ("one missing", "1 tensor missing (model.norm.weight);"),
        ("renamed prefix", DAMAGES["renamed prefix"][2]),
        ("a head that is not tied", "1 tensor missing (lm_head.weight);"),
        ("none at all", "21 tensors missing (lm_head.weight, model.embed_tokens.weight, "),
    ],
)
def test_the_trainer_refuses_a_folder_without_some_tensors(copy, tmp_path, damage, text):
    edit, config, _ = DAMAGES[damage]
    change(copy, edit, **config)
    load = sft_trainer.create_model_from_path
    with pytest.raises(ValueError) as caught:
        make_trainer(copy, tmp_path)
    message = str(caught.value)
    assert message.startswith(f"model: {copy}: the weights do not fit config.json: ") and text in message
    assert message.endswith("; download or convert the model again, or correct config.json")
    assert sft_trainer.create_model_from_path is load


@pytest.mark.parametrize(
    "edit",
    [
        lambda tensors: tensors,
        lambda tensors: {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)},
        lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
        lambda tensors: {**tensors, "value_head.bias": torch.zeros(3)},  # a warning of transformers
    ],
)
def test_the_trainer_loads_a_folder_with_all_tensors(copy, tmp_path, edit):
    model = make_trainer(change(copy, edit), tmp_path).model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    change(copy, lambda tensors: {k: v for k, v in tensors.items() if k in dict(model.named_parameters())})
    check_equal(model, copy)


def make_trainer(folder: Path, out: Path) -> DeftSFTTrainer:
    args = trl.SFTConfig(output_dir=str(out / "out"), report_to=[], use_cpu=True, bf16=False)
    rows = datasets.Dataset.from_list([{"prompt": "What is 1 + 2?", "completion": "3"}])
    return DeftSFTTrainer(str(folder), args, train_dataset=rows)


# --- what is right is loaded ------------------------------------------------------------------------------------------


def check_equal(model, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    state = model.state_dict()
    for name, value in tensors.items():
        assert torch.equal(state[name].to(value.dtype), value), name


@pytest.mark.parametrize(
    "edit",
    [
        lambda tensors: tensors,
        lambda tensors: {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)},  # of older files
        lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()},  # tied, and there
    ],
)
def test_what_real_files_contain_is_loaded(copy, edit):
    model = load_model(str(change(copy, edit)))
    assert model.lm_head.weight is model.model.embed_tokens.weight or torch.equal(
        model.lm_head.weight, model.model.embed_tokens.weight
    )
    change(copy, lambda tensors: {k: v for k, v in tensors.items() if k in dict(model.named_parameters())})
    check_equal(model, copy)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (transformers.LlamaForCausalLM, {"tie_word_embeddings": False}),
        (transformers.Qwen2ForCausalLM, {}),
        (transformers.Qwen3ForCausalLM, {"head_dim": 8}),
        (transformers.Gemma3ForCausalLM, {"head_dim": 8, "sliding_window": 16}),
        (transformers.GPTNeoXForCausalLM, {}),
    ],
)
def test_other_architectures_are_loaded(tmp_path, cls, options):
    tokenizer = tiny.make_tokenizer()
    folder = tiny.save_model(tmp_path / "model", tokenizer, cls=cls, **options)
    check_equal(load_model(str(folder)), folder)


# --- LoRA -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory, make_config) -> Run:
    config = make_config(tmp_path_factory.mktemp("lora") / "run", {"model.lora": {"r": 4}, "train.max_steps": 1})
    with open(os.devnull, "w") as nowhere:
        return train_run(config, Console(file=nowhere)).run


ADAPTERS = {
    "renamed": lambda tensors: {name.replace("layers", "blocks"): value for name, value in tensors.items()},
    "missing": lambda tensors: dict(list(tensors.items())[2:]),
    "extra": lambda tensors: {**tensors, "base_model.model.other.lora_A.weight": torch.zeros(4, 32)},
    "empty": lambda tensors: {},
}


@pytest.mark.parametrize("damage", ADAPTERS)
def test_an_adapter_that_does_not_fit_is_refused(tmp_path, lora_run, damage):
    run = Run(Path(shutil.copytree(lora_run.folder, tmp_path / "run")))
    path = run.model / "adapter_model.safetensors"
    save_file(ADAPTERS[damage](load_file(path)), path, metadata={"format": "pt"})
    seal(run.model)
    with pytest.raises(ValueError, match=r"the weights do not fit adapter_config\.json: ") as caught:
        load_result(str(run.folder))
    assert str(run.model) in str(caught.value)


def test_an_adapter_of_another_shape_is_one_line(tmp_path, lora_run):
    run = Run(Path(shutil.copytree(lora_run.folder, tmp_path / "run")))
    content = json.loads((run.model / "adapter_config.json").read_text())
    (run.model / "adapter_config.json").write_text(json.dumps({**content, "r": 2}))
    seal(run.model)
    with pytest.raises(ValueError, match=r"model: cannot load .*/run/model: .*size mismatch") as caught:
        load_result(str(run.folder))
    assert "\n" not in str(caught.value)


def test_a_pickled_adapter_is_not_read(tmp_path, lora_run):
    run = Run(Path(shutil.copytree(lora_run.folder, tmp_path / "run")))
    (run.model / "adapter_model.safetensors").rename(run.model / "adapter_model.bin")
    seal(run.model)
    with pytest.raises(ValueError, match=r"has no adapter_model\.safetensors"):
        load_result(str(run.folder))


def test_a_lora_run_is_loaded(lora_run):
    model, _ = load_result(str(lora_run.folder))
    tensors = load_file(lora_run.model / "adapter_model.safetensors")
    state = {name.replace(".default", ""): value for name, value in model.state_dict().items()}
    assert tensors and all(torch.equal(state[name], value) for name, value in tensors.items())


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"megatron_config": {"a": 1}, "megatron_core": "evil"}, "megatron_config: {'a': 1} is not what"),
        ({"megatron_core": "evil"}, "megatron_core: 'evil' is not what"),
        ({"auto_mapping": {"parent_library": "evil", "base_model_class": "A"}}, "auto_mapping: "),
        ({"peft_type": "IA3"}, "peft_type: 'IA3' is not what"),
        ({"use_dora": True}, "use_dora: True is not what"),
        ({"something_new": "evil"}, "something_new: 'evil' is not what"),
        ("[]", "is not a JSON object"),
        ("{", "is not JSON"),
    ],
)
def test_an_adapter_config_of_another_kind_is_refused(tmp_path, lora_run, content, text):
    run = Run(Path(shutil.copytree(lora_run.folder, tmp_path / "run")))
    path = run.model / "adapter_config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(json.loads(path.read_text()) | content))
    seal(run.model)
    with pytest.raises(ValueError) as caught:
        load_result(str(run.folder))
    assert str(caught.value).startswith(f"{path}: ") and text in str(caught.value)


def test_an_adapter_folder_is_no_model(lora_run):
    with pytest.raises(ValueError, match="is a LoRA adapter, not a model; pass its run's folder"):
        resolve_model(str(lora_run.model))


# --- GGUF -------------------------------------------------------------------------------------------------------------


def write_gguf(path: Path, folder: Path, edit=lambda tensors: tensors, layers: int = 2) -> Path:
    """The tiny model as llama.cpp would write it."""
    import gguf

    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in special else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(vocabulary.index("<|im_end|>"))
    writer.add_pad_token_id(vocabulary.index("<|pad|>"))
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "model.layers": "blk",
    }  # fmt: skip
    found: dict[str, torch.Tensor] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        for long, short in names.items():
            name = name.replace(long, short)
        found[name] = value
    for name, value in edit(found).items():
        writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("DEFTUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_gguf_file_is_loaded(tmp_path, tiny_model, cache):
    folder = resolve_model(str(write_gguf(tmp_path / "model.gguf", tiny_model)))
    model, expected = load_model(folder), load_model(str(tiny_model))
    assert load_tokenizer(folder).eos_token == "<|im_end|>"
    for name in (NORM, "model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"):
        assert torch.equal(model.state_dict()[name], expected.state_dict()[name])


@pytest.mark.parametrize(
    ("edit", "layers", "text"),
    [
        (
            lambda tensors: {k: v for k, v in tensors.items() if "blk.1" not in k},
            2,
            "9 tensors missing (model.layers.1",
        ),
        (lambda tensors: {f"foo.{k}": v for k, v in tensors.items()}, 2, "tensors missing (lm_head.weight, model.emb"),
        (dict, 3, "9 tensors missing (model.layers.2.input_layernorm.weight, "),
        (
            lambda tensors: {**tensors, "output_norm.weight": torch.zeros(31)},
            2,
            "of a wrong shape (model.norm.weight: ",
        ),
    ],
)
def test_a_gguf_file_that_lacks_tensors_is_refused(tmp_path, tiny_model, cache, edit, layers, text):
    path = write_gguf(tmp_path / "model.gguf", tiny_model, edit, layers)
    with pytest.raises(ValueError) as caught:
        resolve_model(str(path))
    assert str(caught.value).startswith(f"model: {path}: the weights do not fit ") and text in str(caught.value)
    assert not list(cache.rglob("*.safetensors"))


# --- folders that are wrong in other ways -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("[]", "config.json: is not a JSON object"),
        ("{", "config.json: is not JSON (Expecting property name"),
        ("[" * 100_000, "config.json: is not JSON (maximum recursion depth"),
        ({"hidden_act": "wild"}, "cannot load {model}: KeyError: 'wild'"),
        ({"hidden_size": "wide"}, "Field 'hidden_size' expected int, got str"),
        ({"model_type": ["llama"]}, "cannot load "),
        ({"model_type": "unknown"}, "has model type `unknown`"),
        ({"num_hidden_layers": 10**9}, "config.json: num_hidden_layers: 1000000000 is no number of layers"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            "is quantised (bitsandbytes)",
        ),
        ({"quantization_config": []}, "is quantised (quantization_config in config.json)"),
    ],
)
def test_a_wrong_config_json_is_one_line(copy, capsys, content, text):
    path = copy / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(json.loads(path.read_text()) | content))
    assert main(["chat", str(copy)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and text.format(model=copy) in lines[0], lines


@pytest.mark.parametrize("command", ["chat", "inspect", "eval heldout", "advise", "analyze tokens"])
def test_a_token_without_an_embedding_is_one_line(copy, chat_file, tmp_path, monkeypatch, capsys, command):
    """An IndexError on a CPU, a device assert on a GPU."""
    tokenizer = load_tokenizer(str(copy))
    size = len(tokenizer)
    assert tokenizer.add_tokens(["What is"]) == 1
    tokenizer.save_pretrained(copy)
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 1 plus 2?\n"))
    data = ["--data", str(chat_file)] if command == "eval heldout" else [str(chat_file)] if command != "chat" else []
    out = [] if command in ("chat", "inspect", "advise") else ["--out", str(tmp_path / "out.parquet")]
    rows = [] if command == "chat" else ["--rows", "4"]
    assert main([*command.split(), str(copy), *data, *rows, *out]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("deftune: ")]
    assert len(errors) == 1 and f"the model's embedding {size}: token {size} ('What is', " in errors[0], errors


@pytest.mark.parametrize("content", ["[]", "{", "{}", '{"model": {}, "added_tokens": 3}'])
def test_a_wrong_tokenizer_json_is_one_line(copy, capsys, content):
    (copy / "tokenizer.json").write_text(content)
    assert main(["chat", str(copy)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and f"model: cannot load the tokenizer of {copy}: " in lines[0], lines


def test_a_tokenizer_without_added_tokens_is_one_line(copy, capsys):
    content = json.loads((copy / "tokenizer.json").read_text())
    del content["added_tokens"]
    (copy / "tokenizer.json").write_text(json.dumps(content))
    assert main(["chat", str(copy)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and f"model: cannot load the tokenizer of {copy}: " in lines[0], lines


def test_the_packaged_models_are_checked_too(monkeypatch, tmp_path, tiny_model, cache):
    """`smollm2` goes the way of any other GGUF file."""
    path = write_gguf(tmp_path / "cut.gguf", tiny_model, DAMAGED_GGUF)
    monkeypatch.setattr(models, "_download", lambda packaged, folder: path)
    with pytest.raises(ValueError, match="9 tensors missing"):
        resolve_model("smollm2")


def DAMAGED_GGUF(tensors):
    return {name: value for name, value in tensors.items() if "blk.1" not in name}
