"""A finished run: scored, talked to, merged."""

import io
import os
from pathlib import Path

import pytest
import torch
from rich.console import Console

from deftune.artifacts.checkpoints import checkpoints
from deftune.artifacts.models import load_tokenizer
from deftune.artifacts.results import load_result
from deftune.artifacts.runs import Run
from deftune.artifacts.templates import TEMPLATES
from deftune.cli import main
from deftune.data.encoding import Encoder, encode_rows
from deftune.data.sources import read_rows
from deftune.training.results import merge
from deftune.training.train import train_run

LORA = {"model.lora": {"r": 4, "alpha": 8}, "train.learning_rate": 1e-2}


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory, make_config) -> Run:
    config = make_config(tmp_path_factory.mktemp("lora") / "run", LORA)
    return train_run(config, Console(file=open(os.devnull, "w"))).run


@pytest.fixture(scope="module")
def examples(tiny_model, chat_file):
    tokenizer = load_result(str(tiny_model))[1]
    return encode_rows(read_rows(chat_file)[:7], Encoder(tokenizer, mask="assistant", max_length=128)).examples


def test_a_merged_adapter_gives_the_same_logits(lora_run, tmp_path, examples):
    out = merge(lora_run, tmp_path / "merged")
    ids = torch.tensor([examples[0].input_ids])
    adapted, merged = load_result(str(lora_run.folder))[0].eval(), load_result(str(out))[0].eval()
    base = load_result(lora_run.read_config().model.name)[0].eval()
    with torch.no_grad():
        a, b, c = (model(input_ids=ids).logits for model in (adapted, merged, base))
    assert torch.allclose(a, b, atol=1e-5)
    assert (a - c).abs().max() > 1e-3  # the adapter did learn something
    with pytest.raises(ValueError, match="exists; name another folder"):
        merge(lora_run, out)


def test_a_plain_run_has_nothing_to_merge(tmp_path, make_config, capsys):
    run = train_run(make_config(tmp_path / "plain"), Console(file=open(os.devnull, "w"))).run
    assert main(["merge", str(run.folder)]) == 2
    assert "was not trained with LoRA" in capsys.readouterr().err


def test_a_run_without_a_result(tmp_path, make_config, capsys):
    from deftune.artifacts.runs import open_run

    open_run(make_config(tmp_path / "new"))
    assert main(["chat", str(tmp_path / "new")]) == 2
    assert "has no model yet (the run is new)" in capsys.readouterr().err


def test_a_damaged_result_is_not_loaded(lora_run, tmp_path, capsys):
    import shutil

    shutil.copytree(lora_run.folder, tmp_path / "copy")
    weights = tmp_path / "copy" / "model" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert main(["chat", str(tmp_path / "copy")]) == 2
    assert "is damaged" in capsys.readouterr().err


def test_verify_compares_every_byte(lora_run, tmp_path, capsys):
    import shutil

    shutil.copytree(lora_run.folder, tmp_path / "copy")
    run = Run(tmp_path / "copy")
    for folder in (run.folder, run.model, checkpoints(run.checkpoints)[-1]):
        assert main(["verify", str(folder)]) == 0
        assert f"{folder}" in capsys.readouterr().out
    places = [*checkpoints(run.checkpoints), run.model]
    assert main(["verify", str(run.folder)]) == 0
    assert [line.partition(": ")[0] for line in capsys.readouterr().out.splitlines()] == [str(p) for p in places]
    weights = run.model / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + bytes([weights.read_bytes()[-1] ^ 1]))
    load_result(str(run.folder))  # names and sizes are right: only `verify` reads every byte
    for folder in (run.folder, run.model):
        assert main(["verify", str(folder)]) == 1
        assert f"{weights}: is damaged (its sha256 is not the one written)" in capsys.readouterr().err
    (run.model / "manifest.json").unlink()
    assert main(["verify", str(run.folder)]) == 1
    assert "has no manifest.json; it was not written to the end" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["verify", str(tmp_path / "empty")]) == 2
    assert "nothing to verify; name a run, a checkpoint or a model folder" in capsys.readouterr().err


def test_chat_reads_lines_and_keeps_the_conversation(lora_run, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 1 + 2?\n/reset\n\nWhat is 1 + 2?\n/quit\nnever\n"))
    assert main(["chat", str(lora_run.folder), "--max-new-tokens", "8"]) == 0
    answers = [line for line in capsys.readouterr().out.split("\n") if line]
    assert (
        len(answers) % 2 == 0 and answers[: len(answers) // 2] == answers[len(answers) // 2 :] != []
    )  # greedy, and the conversation was forgotten


def test_chat_refuses_a_negative_temperature(lora_run, capsys):
    assert main(["chat", str(lora_run.folder), "--temperature", "-1"]) == 2
    assert "--temperature: -1 is below 0" in capsys.readouterr().err


def test_runs_tells_what_became_of_each(lora_run, tmp_path, capsys):
    import json
    import shutil

    from deftune.artifacts.folders import locked

    for name in ("done", "killed", "busy", "broken", "own", "empty"):
        shutil.copytree(lora_run.folder, tmp_path / name)
    for name in ("killed", "busy"):
        Run(tmp_path / name).set_status("running", step=2)
    (tmp_path / "broken" / "config.yaml").write_text("run: [")
    (tmp_path / "empty" / "config.yaml").write_text("run: x")
    own = tmp_path / "own" / "config.yaml"
    own.write_text(own.read_text().replace("objective: deft", "objective: my_objective(2)"))
    with locked(tmp_path / "busy", "training"):
        assert main(["runs", str(tmp_path), "--json"]) == 0
        found = {Path(run["run"]).name: run for run in json.loads(capsys.readouterr().out)}
    states = {name: run["state"] for name, run in found.items()}
    assert states == {
        "done": "finished", "killed": "interrupted", "busy": "running", "broken": "damaged", "empty": "damaged",
        "own": "finished",
    }  # fmt: skip
    assert found["own"]["objective"] == "my_objective(2)"  # of a file that was not imported
    assert found["done"]["objective"] == "deft" and found["done"]["step"] == 4 and found["done"]["nll"] > 0
    assert main(["runs", str(tmp_path)]) == 0
    assert "interrupted" in capsys.readouterr().out


def test_a_moved_run_is_found_by_its_folder(lora_run, tmp_path, capsys):
    import shutil

    shutil.move(shutil.copytree(lora_run.folder, tmp_path / "a"), tmp_path / "b")
    assert main(["train", str(tmp_path / "b")]) == 0
    assert "already finished" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "a").exists()


def test_a_run_keeps_the_template_it_was_trained_with(make_config, tmp_path):
    """Whoever loads the folder by itself, `lm_eval` or a server, prompts as training did."""
    with open(os.devnull, "w") as nowhere:
        outcome = train_run(make_config(tmp_path / "run", {"data.template": "plain"}), Console(file=nowhere))
    assert load_tokenizer(str(outcome.run.model)).chat_template == TEMPLATES["plain"]
