"""The card beside a model's weights: published with them, so without a path of the machine."""

import json
import os
import re
import shutil

import pytest
import yaml
from rich.console import Console

from deftune.artifacts.config import ConfigError, RunConfig, Source
from deftune.artifacts.runs import Run
from deftune.training import machine
from deftune.training.card import card_text, hub_dataset, render_merged_card
from deftune.training.ending import push
from deftune.training.results import merge
from deftune.training.train import train_run

LOCAL = re.compile(r"(?<![\w.:/])(?:/|~/|\.\./)\w")  # the beginning of a path, not of `a/b` or `https://`


def front(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def config(**changes) -> RunConfig:
    return RunConfig.model_validate({
        "run": "/home/me/runs/mine", "model": {"name": "smollm2"},
        "data": {"train": [{"path": "/home/me/secret/train.jsonl", "limit": 5}, {"path": "org/set:main"},
                           {"generate": "word_sorting", "limit": 9, "weight": 2}],
                 "template": "/home/me/chat.jinja"},
        **changes,
    })  # fmt: skip


def test_a_card_has_no_local_path_and_names_what_is_known(tmp_path):
    dropped = "train: dropped, over 96 tokens: /home/me/secret/train.jsonl:8, /home/me/secret/train.jsonl:11"
    card = card_text(config(), ["train: 5 rows", dropped], Run(tmp_path / "mine"))
    assert "- train: dropped, over 96 tokens: train.jsonl:8, train.jsonl:11\n" in card
    assert front(card) == {
        "library_name": "transformers", "pipeline_tag": "text-generation",
        "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct", "base_model_relation": "finetune",
        "license": "apache-2.0", "datasets": ["org/set"], "tags": ["deftune", "sft"],
    }  # fmt: skip
    assert not LOCAL.search(card) and "secret" not in card and "/home" not in card
    assert "Tuned from SmolLM2-135M-Instruct (Q4_1, dequantised) (from `HuggingFaceTB/SmolLM2-135M-Instruct`)" in card
    assert (
        "- `train.jsonl`, first 5 rows\n- `org/set:main`\n- generated: `word_sorting`, first 9 rows, weight 2" in card
    )
    content = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert content["run"] == "mine" and content["data"]["template"] == "chat.jinja"
    assert content["data"]["train"][0]["path"] == "train.jsonl" and content["train"]["batch_size"] == 256


def test_a_base_model_without_a_hub_id_is_not_named_as_one(tmp_path):
    for name in (str(tmp_path), "/no/such/folder", "file.gguf", "models/of/mine"):
        assert not {"base_model", "license"} & set(front(card_text(config(model={"name": name}), [], Run(tmp_path))))
    head = front(card_text(config(model={"name": "org/name", "lora": {}}), [], Run(tmp_path)))
    assert (head["base_model"], head["base_model_relation"], head["library_name"]) == ("org/name", "adapter", "peft")


def test_datasets_are_hub_ids_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "here").mkdir(parents=True)
    paths = [
        "org/set",
        "org/set:config",
        "org/here",
        "data/train.jsonl",
        "data/train.jsonl.gz",
        "/a/b",
        "x",
        "data/faq.csv",
    ]
    found = [hub_dataset(Source(path=path)) for path in paths]  # pyright: ignore
    assert found == ["org/set", "org/set", *[None] * 6]


@pytest.mark.parametrize("model", [{"name": "smollm2"}, {"name": "org/name", "lora": {}}, {"name": "/no/such/folder"}])
def test_the_hub_can_read_the_front_matter(tmp_path, model):
    """By the hub's own parser; its online check of a card needs a connection."""
    from huggingface_hub import ModelCard
    from huggingface_hub.utils import validate_repo_id

    head = ModelCard(card_text(config(model=model), [], Run(tmp_path / "mine"))).data
    assert head.pipeline_tag == "text-generation" and head.tags == ["deftune", "sft"]
    assert head.library_name == ("peft" if "lora" in model else "transformers")
    named = [*(head.datasets or []), *([head.base_model] if head.base_model else [])]
    for name in named:
        validate_repo_id(name)
    assert (head.base_model is None) == model["name"].startswith("/")
    assert head.license == ("apache-2.0" if model["name"] == "smollm2" else None)
    assert yaml.safe_load(head.to_yaml()) == front(card_text(config(model=model), [], Run(tmp_path / "mine")))


@pytest.mark.parametrize("private", [False, True])
def test_the_result_is_uploaded(tmp_path, monkeypatch, private):
    """The hub cannot be reached in a test: this is a record of the calls of its client."""
    import huggingface_hub

    calls = []

    class Api:
        def create_repo(self, name, **options):
            calls.append((name, options))

        def upload_folder(self, **options):
            calls.append(options)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    said = []
    push(Run(tmp_path), "org/name", said.append, private=private)
    assert calls == [
        ("org/name", {"private": private, "exist_ok": True}),
        {"repo_id": "org/name", "folder_path": str(tmp_path / "model")},
    ]
    assert said == ["uploaded to org/name"]


def test_an_upload_without_a_token_is_refused_before_training(monkeypatch):
    checked = config(train={"push_to_hub": "org/name"})
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError, match=r"train\.push_to_hub: this machine has no token .* `hf auth login`"):
        machine.check_config(checked)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_x")
    machine.check_config(checked)


def test_a_private_upload_needs_a_name():
    with pytest.raises(ValueError, match="push_private: nothing is uploaded; give push_to_hub"):
        config(train={"push_private": True})


@pytest.fixture(scope="module")
def trained(tmp_path_factory, make_config) -> Run:
    where = tmp_path_factory.mktemp("lora") / "run"
    with open(os.devnull, "w") as nowhere:
        return train_run(make_config(where, {"model.lora": {"r": 4, "alpha": 8}}), Console(file=nowhere)).run


@pytest.fixture
def lora_run(trained, tmp_path) -> Run:
    """A copy of the trained run, which a test may change."""
    return Run(shutil.copytree(trained.folder, tmp_path / "run"))


def test_a_runs_own_card(lora_run, trained):
    card = (lora_run.model / "README.md").read_text()
    assert not LOCAL.search(card) and str(trained.folder.parent) not in card
    assert card.startswith("---\nlibrary_name: peft\n") and "A LoRA adapter for tiny," in card
    assert "It holds the weights of step 4, the last." in card
    assert "| step 4, whose weights were kept | |" in card and "| nll | " in card
    assert json.loads((lora_run.model / "adapter_config.json").read_text())["base_model_name_or_path"] is None


def test_merge_writes_a_card(lora_run, tmp_path):
    card = (merge(lora_run, tmp_path / "merged") / "README.md").read_text()
    assert front(card)["library_name"] == "transformers" and "A LoRA adapter merged into tiny," in card
    assert not LOCAL.search(card) and "rows/step" in card


def test_a_card_names_the_step_that_was_kept(lora_run):
    nll = {record["step"]: record["nll"] for record in lora_run.read_metrics() if record["kind"] == "train"}
    card = card_text(lora_run.read_config(), [], lora_run, kept=2)
    assert "| step 2, whose weights were kept | |" in card and f"| nll | {nll[2]:.4g} |" in card
    lora_run.set_status("finished", step=4, kept=3)
    assert "| step 3, whose weights were kept | |" in render_merged_card(lora_run)
    (lora_run.folder / "data.json").write_text("[")
    assert "merged into tiny" in render_merged_card(lora_run)
