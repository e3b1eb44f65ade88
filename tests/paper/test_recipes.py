"""The recipes: the paper's cells, the files they are written as, and their architectures through the trainer."""

import copy
import re

import pytest
import torch

import deftune
from deftune.artifacts.config import ConfigError, load_config
from deftune.paper.recipes import (
    BACKBONES,
    BATCH_SIZE,
    CELLS,
    METHODS,
    PROVENANCE,
    REGIMES,
    Mark,
    recipe,
    recipes,
    render_recipe,
)

NAMES = [found.name for found in recipes()]

# Counted in the paper: trained rows (or columns) of each table, without Base.
PRINTED = {
    "Table 1": 20,  # 4 models x 5 methods, mathematics
    "Table 2": 20,  # 4 models x 5 methods, medicine
    "Table 3": 20,  # 4 models x 5 methods, FigFont
    "Table 4": 5,  # Qwen2.5-1.5B, mixed
    "Table 5": 5,  # LLaMA-3.1-8B of Table 1, evaluated on medicine
    "Table 6": 20,  # LLaMA-3.1-8B, 5 methods x 4 epochs
    "Table 7": 5,  # Table 4's, medicine
    "Table 8": 5,  # Table 4's, mathematics
}

BACKBONES_PRINTED = {
    "Table 1": ["LLaMA-3.1-8B", "DeepseekMath-7B", "Qwen2.5-Math-1.5B", "Qwen2.5-Math-7B"],
    "Table 2": ["LLaMA-3.1-8B", "LLaMA-3.2-3B", "Qwen2.5-1.5B", "Qwen2.5-Math-7B"],
    "Table 3": ["LLaMA-3.1-8B", "LLaMA-3.2-3B", "Qwen2.5-1.5B", "Qwen2.5-7B"],
    "Table 4": ["Qwen2.5-1.5B"],
    "Table 5": ["LLaMA-3.1-8B"],
    "Table 6": ["LLaMA-3.1-8B"],
    "Table 7": ["Qwen2.5-1.5B"],
    "Table 8": ["Qwen2.5-1.5B"],
}


# --- the cells --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", PRINTED)
def test_cells_are_those_of_the_printed_table(table):
    found = [each for each in recipes() if table in each.tables]
    assert len(found) == PRINTED[table]
    printed = [name.lower().replace("deepseekmath", "deepseek-math") for name in BACKBONES_PRINTED[table]]
    assert list(dict.fromkeys(cell.backbone for cell in found)) == printed
    assert [METHODS[m] for m in dict.fromkeys(cell.method for cell in found)] == [
        "-logp", "-p", "EAFT", "Cayley-Trans", "DEFT",
    ]  # fmt: skip


def test_runs_are_counted_once():
    assert list(CELLS) == list(PRINTED)
    assert len(NAMES) == len(set(NAMES)) == 80  # 100 cells; 5 of Table 5, 5 of 6, and 10 of 7 and 8 are others' runs
    assert sum(PRINTED.values()) == 100 == sum(len(found.tables) for found in recipes())


def test_a_run_knows_all_its_tables():
    assert recipe("strong/llama-3.1-8b/deft").tables == ("Table 1", "Table 5", "Table 6")
    assert recipe("strong/qwen2.5-math-1.5b/deft").tables == ("Table 1",)
    assert recipe("multi-epoch/llama-3.1-8b/cayley-e3").tables == ("Table 6",)
    assert recipe("mixed/qwen2.5-1.5b/nll").tables == ("Table 4", "Table 7", "Table 8")
    assert recipe("weak/llama-3.2-3b/nll").table == "Table 3"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "strong/qwen2.5-math-1.5b/defft",
            "Did you mean 'strong/qwen2.5-math-1.5b/deft'? `deftune paper recipes` lists all 80",
        ),
        ("ood/llama-3.1-8b/deft", "It is the run of 'strong/llama-3.1-8b/deft'; use that one"),
        ("multi-epoch/llama-3.1-8b/eaft-e1", "It is the run of 'strong/llama-3.1-8b/eaft'; use that one"),
        ("zzz", "unknown recipe 'zzz'. `deftune paper recipes` lists all 80"),
    ],
)
def test_unknown_recipe(name, message):
    with pytest.raises(ValueError, match=re.escape(f"unknown recipe {name!r}.")) as error:
        recipe(name)
    assert message in str(error.value)


# --- the settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_resolves(name):
    found = recipe(name)
    config = found.resolve()
    assert config.objective == found.method
    assert config.model.name == BACKBONES[found.backbone].hub
    assert config.data.max_length == {"strong": 3072, "mixed": 3072, "intermediate": 800, "weak": 800}[found.regime]
    assert config.train.learning_rate == (2e-5 if config.model.name == "meta-llama/Llama-3.1-8B" else 5e-5)
    assert config.train.weight_decay == (1e-5 if found.regime == "weak" else 0.01)
    assert config.train.epochs == found.epochs
    ranks = 8  # the paper's node
    assert config.train.batch_size % (ranks * config.train.micro_batch_size) == 0


@pytest.mark.parametrize(("regime", "least", "most"), [
    ("strong", 67_000, 68_000),  # "67k"
    ("intermediate", 23_493, 23_493),  # m23k
    ("weak", 40_000, 40_000),
])  # fmt: skip
def test_steps_are_the_full_batches_of_the_rows(regime, least, most):
    steps = REGIMES[regime].steps
    assert least // BATCH_SIZE <= steps <= most // BATCH_SIZE
    assert steps == {"strong": 264, "intermediate": 91, "weak": 156}[regime]


def test_steps_of_more_epochs():
    assert recipe("multi-epoch/llama-3.1-8b/deft-e4").resolve().train.max_steps == 4 * 264
    assert recipe("mixed/qwen2.5-1.5b/deft").resolve().train.max_steps is None
    assert recipe("mixed/qwen2.5-1.5b/deft").resolve().data.total == 264 * BATCH_SIZE


def test_overrides_leave_the_table_as_it_is():
    found = recipe("weak/qwen2.5-7b/deft")
    changed = found.resolve(["data.train.0.limit=100", "train.epochs=2", "model.name=smollm2"])
    assert (changed.data.train[0].limit, changed.train.epochs, changed.model.name) == (100, 2, "smollm2")
    assert found.resolve().data.train[0].limit == 40_000 == REGIMES["weak"].source["limit"]
    with pytest.raises(ConfigError, match="Did you mean 'epochs'"):
        found.resolve(["train.epoch=2"])


def test_methods_are_objectives():
    for method in METHODS:
        assert str(deftune.objective(method)) == method


def test_formats_and_templates_exist():
    from deftune.artifacts.templates import TEMPLATES
    from deftune.data.formats import FORMATS
    from deftune.data.generated import GENERATORS

    assert list(REGIMES) == ["strong", "intermediate", "weak", "mixed"]
    assert {r.source["format"] for r in REGIMES.values() if "format" in r.source} <= set(FORMATS)
    assert {r.source["generate"] for r in REGIMES.values() if "generate" in r.source} <= set(GENERATORS)
    assert {b.template for b in BACKBONES.values()} - {None} <= set(TEMPLATES)


# --- the files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_file_is_read_back_to_the_same_config(name, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(render_recipe(name))
    assert load_config(path) == recipe(name).resolve()


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_of_the_file_is_marked(name):
    settings = [line for line in render_recipe(name).splitlines() if line and not line.startswith("#")]
    bare = [line.strip() for line in settings if not re.search(r"  # (paper|released code|ours)\b", line)]
    assert bare == ["model:", "data:", "train:", "train:"]


def test_marks_of_the_narrower_scope_win():
    marked = {
        ("strong/qwen2.5-math-1.5b/deft", "objective", "deft"): "paper",
        ("strong/qwen2.5-math-1.5b/eaft", "objective", "eaft"): "ours",
        ("strong/qwen2.5-math-1.5b/deft", "train.max_steps", 264): "released code",
        ("multi-epoch/llama-3.1-8b/deft-e2", "train.max_steps", 528): "ours",
        ("strong/qwen2.5-math-7b/deft", "train.fsdp", True): "released code",
        ("strong/qwen2.5-math-1.5b/deft", "train.fsdp", False): "ours",
        ("mixed/qwen2.5-1.5b/deft", "data.max_length", 3072): "ours",
        ("mixed/qwen2.5-1.5b/deft", "train.learning_rate", 5e-5): "paper",
    }
    assert {key: recipe(key[0]).mark(*key[1:]).origin for key in marked} == marked
    assert str(Mark("paper")) == "# paper"
    with pytest.raises(LookupError, match=r"no mark for train\.momentum"):
        recipe("mixed/qwen2.5-1.5b/deft").mark("train.momentum", 0.9)


def leaves(value, path=""):
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from leaves(inner, f"{path}{key}.")
        elif key == "train":
            for section in inner:
                yield from leaves(section, f"{path}{key}.")
        else:
            yield f"{path}{key}", inner


def test_no_mark_is_left_over():
    used = {id(found.mark(*leaf)) for found in recipes() for leaf in leaves(found.config())}
    marks = {(scope, key): id(mark) for scope, inner in PROVENANCE.items() for key, mark in inner.items()}
    assert {key for key, mark in marks.items() if mark not in used} == set()


# --- the architectures ------------------------------------------------------------------------------------------------

VOCABULARY = 64
SOFTCAP = 2.0


def tiny_model(architecture):
    import transformers

    sizes = dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.3, pad_token_id=1,
        bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    makers = {
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, {}),
        "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config, {}),
        "gemma3": (transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig, {}),
        "gemma3 softcap": (
            transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig, {"final_logit_softcapping": SOFTCAP},
        ),
    }  # fmt: skip
    model, config, more = makers[architecture]
    torch.manual_seed(0)
    return model(config(**sizes, **more))


def tiny_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<eos>": 0, "<pad>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


ROWS = [
    {"input_ids": [5, 9, 33, 12, 41, 7, 0], "labels": [-100, -100, 33, 12, 41, 7, 0]},
    {"input_ids": [6, 20, 63, 0], "labels": [-100, -100, 63, 0]},
]


def expected_loss(model):
    """DEFT of the model's own logits, on the rows padded by hand."""
    width = max(len(row["input_ids"]) for row in ROWS)
    pad = [width - len(row["input_ids"]) for row in ROWS]
    ids = torch.tensor([row["input_ids"] + [1] * n for row, n in zip(ROWS, pad)])
    labels = torch.tensor([row["labels"] + [-100] * n for row, n in zip(ROWS, pad)])
    attention = torch.tensor([[1] * (width - n) + [0] * n for n in pad])
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=attention).logits.float()
    return logits, deftune.token_loss(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), "deft")


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3", "gemma3 softcap"])
def test_architecture_trains_with_the_objective_of_its_own_logits(architecture, tmp_path):
    pytest.importorskip("trl")
    from datasets import Dataset
    from trl import SFTConfig

    from deftune.training.trainer import DeftSFTTrainer

    model = tiny_model(architecture)
    before = copy.deepcopy(model)
    logits, expected = expected_loss(before)
    if architecture == "gemma3 softcap":
        assert SOFTCAP / 2 < logits.abs().max() < SOFTCAP  # it does something, and the model applies it
    returned = []

    class Watched(DeftSFTTrainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            returned.append(float(loss.detach()))
            return loss

    args = SFTConfig(
        output_dir=str(tmp_path), dataset_kwargs={"skip_prepare_dataset": True}, max_length=None, max_steps=2,
        per_device_train_batch_size=len(ROWS), learning_rate=1e-2, bf16=False, gradient_checkpointing=False,
        use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    trainer = Watched(
        model, args, train_dataset=Dataset.from_list(ROWS), processing_class=tiny_tokenizer(), objective="deft"
    )
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == len(returned) == 2
    # float32 losses of order 1 over a vocabulary of 64, summed in another order
    assert returned[0] == pytest.approx(float(expected), abs=1e-5)
    assert logged[0] == pytest.approx(float(expected), abs=1e-5)
    assert float(expected_loss(model)[1]) < returned[1] < returned[0]  # both steps learned
