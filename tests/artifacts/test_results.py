"""A finished run: scored, talked to, merged."""

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from rich.console import Console

from deftune.artifacts.checkpoints import checkpoints
from deftune.artifacts.models import load_tokenizer
from deftune.artifacts.results import encoding_of, load_result, prompt_options, weights_digest
from deftune.artifacts.runs import Run
from deftune.artifacts.templates import TEMPLATES
from deftune.cli import main
from deftune.data.encoding import Encoder, encode_rows
from deftune.data.rows import Row
from deftune.data.sources import read_rows
from deftune.training.results import merge, reply
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


def test_a_run_is_evaluated_with_the_date_of_its_training(tmp_path, make_config, tiny_model):
    from deftune.artifacts.runs import open_run

    run, _ = open_run(make_config(tmp_path / "run"))
    assert run.template_time() is None and "now" not in encoding_of(run)
    (run.folder / "data.json").write_text('{"now": "2024-07-26T08:00:00"}')
    options = prompt_options(encoding_of(str(run.folder)))
    assert options["now"] == "2024-07-26T08:00:00"
    tokenizer = load_tokenizer(str(tiny_model))
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}" + TEMPLATES["chatml"]
    row = Row(({"role": "user", "content": "Hello"},), None, "a:1", "a")
    encoder = Encoder(tokenizer, max_length=99, **options)
    assert tokenizer.decode(encoder.encode_prompt(row)).startswith("26 Jul 2024")
    for damaged in ("", "[]", '{"now": 3}', '{"now": "yesterday"}'):
        (run.folder / "data.json").write_text(damaged)
        assert run.template_time() is None


def test_a_run_without_a_result(tmp_path, make_config, capsys):
    from deftune.artifacts.runs import open_run

    open_run(make_config(tmp_path / "new"))
    assert main(["chat", str(tmp_path / "new")]) == 2
    assert "has no model yet (the run is new)" in capsys.readouterr().err
    assert main(["merge", str(tmp_path / "none")]) == 2
    assert "none: is no run (it has no config.yaml)" in capsys.readouterr().err


def test_a_damaged_result_is_not_loaded(lora_run, tmp_path, capsys):
    import shutil

    shutil.copytree(lora_run.folder, tmp_path / "copy")
    weights = tmp_path / "copy" / "model" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert main(["chat", str(tmp_path / "copy")]) == 2
    assert "is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("locked", "name", "text"),
    [
        ("model/adapter_model.safetensors", "", "{path}: cannot be read (Permission denied), so whether"),
        ("model", "", "{path}/manifest.json: cannot be read (Permission denied), so whether"),
        ("config.yaml", "", "{path}: Permission denied; change its permissions, or name another place"),
        (
            "merged/model.safetensors",
            "merged",
            "model: {path}: cannot be read (Permission denied); make it readable to",
        ),
        ("merged/config.json", "merged", "model: {path}: cannot be read (Permission denied); make it"),
    ],
)
def test_a_model_that_may_not_be_read_is_not_called_missing(lora_run, tmp_path, locked, name, text):
    run = tmp_path / "run"
    shutil.copytree(lora_run.folder, run)
    if name:
        merge(lora_run, run / name)
    path = run / locked
    command = [sys.executable, "-m", "deftune", "chat", str(run / name)]
    if os.geteuid() == 0:  # root reads everything, unless it gives that up
        if shutil.which("setpriv") is None:
            pytest.skip("root needs setpriv to be refused a file")
        lost = "-dac_override,-dac_read_search"
        command = ["setpriv", f"--bounding-set={lost}", f"--inh-caps={lost}", *command]
    mode = path.stat().st_mode
    path.chmod(0)
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    finally:
        path.chmod(mode)
    assert done.returncode == 2
    assert "deftune: " + text.format(path=path) in done.stderr and "No such file" not in done.stderr


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


def test_chat_gives_the_prompt_that_training_showed(tmp_path, make_config, tiny_model, monkeypatch, capsys):
    """With the template's options and the BOS token of the run, and the whole conversation."""
    template = tmp_path / "named.jinja"
    template.write_text("{{ name }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    options = {"data.template": str(template), "data.template_options": {"name": "Ann"}}
    run = train_run(make_config(tmp_path / "run", options), Console(file=open(os.devnull, "w"))).run
    template.unlink()  # it is saved with the model
    seen: list[str] = []
    true = transformers.LlamaForCausalLM.generate
    tokenizer = load_tokenizer(str(tiny_model))

    def generate(self, input_ids, **given):
        seen.append(tokenizer.decode(input_ids[0]))
        return true(self, input_ids, **given)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "generate", generate)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert main(["chat", str(run.folder), "--max-new-tokens", "2", "--system", "Hi"]) == 0
    answer = capsys.readouterr().out.split("\n")[0]
    assert seen[0] == "AnnHi<|im_end|>one<|im_end|>"
    assert seen[1] == f"AnnHi<|im_end|>one<|im_end|>{answer}<|im_end|>two<|im_end|>"


@pytest.mark.parametrize(("more", "hint"), [([], "pass another --template"), (["--system", "a"], "leave out --system")])
def test_a_template_that_refuses_the_conversation_is_one_line(tiny_model, tmp_path, monkeypatch, capsys, more, hint):
    template = tmp_path / "strict.jinja"
    template.write_text("{{ raise_exception('System role not supported') }}")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert main(["chat", str(tiny_model), "--template", str(template), *more]) == 2
    refusal = "deftune: the chat template refuses the conversation (System role not supported); "
    assert capsys.readouterr().err.startswith(refusal + hint)


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_chat_stops_where_the_logits_are_not_finite(tiny_model, tmp_path, monkeypatch, capsys, temperature):
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = float("nan")
    folder = Path(shutil.copytree(tiny_model, tmp_path / "nan"))
    model.save_pretrained(folder)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nagain\n"))
    capsys.readouterr()
    assert main(["chat", str(folder), "--temperature", temperature]) == 2
    out, err = capsys.readouterr()
    assert out.strip() == ""
    where = f"deftune: model: {folder}: the model's logits are not finite after 0 tokens "
    cause = "(model.layers.1.mlp.up_proj.weight has NaN or inf); "
    assert err == f"{where}{cause}use an earlier checkpoint of the run (RUN:STEP), or another copy of the model\n"


def test_chat_says_where_finite_weights_give_logits_that_are_not(tiny_model, monkeypatch):
    model, tokenizer = load_result(str(tiny_model))
    true, calls = type(model).forward, []

    def forward(self, *args, **given):
        out = true(self, *args, **given)
        calls.append(out)
        if len(calls) == 3:
            out.logits[..., 5] = float("inf")
        return out

    monkeypatch.setattr(type(model), "forward", forward)
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(
        ValueError, match="after 2 tokens \\(its weights are finite, the forward pass is not\\); use an ear"
    ):
        list(reply(model, tokenizer, Encoder(tokenizer, max_length=99), messages))


def test_chat_refuses_a_negative_temperature(lora_run, capsys):
    for value in ("-1", "nan"):
        assert main(["chat", str(lora_run.folder), "--temperature", value]) == 2
        assert f"--temperature: at least 0, got {value}" in capsys.readouterr().err


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


def test_the_digest_tells_weights_apart(tiny_model, lora_run, tmp_path):
    """Of the same name, of a copy, of an adapter over another base model; without loading anything."""
    copy = tmp_path / "copy"
    shutil.copytree(tiny_model, copy)
    before = weights_digest(str(copy))
    assert before == weights_digest(str(tiny_model)) is not None
    path = copy / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-2000] + bytes(byte ^ 1 for byte in content[-2000:]))
    assert weights_digest(str(copy)) not in (None, before)
    steps = [step.name.rpartition("-")[2] for step in checkpoints(lora_run.checkpoints)]
    names = [str(lora_run.folder), f"{lora_run.folder}:0", *(f"{lora_run.folder}:{step}" for step in steps)]
    digests = [weights_digest(name) for name in names]
    assert digests[1] == before and all(digest.endswith(f"+{before}") for digest in [digests[0], *digests[2:]])
    assert len(set(digests)) == len(digests) - 1  # the result is the last checkpoint
    assert weights_digest("org/model") is weights_digest("smollm2") is weights_digest(str(tmp_path)) is None
