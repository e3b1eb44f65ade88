"""What a model is called where results stand: a dequantised copy says so, and no folder of the machine is shown."""

import struct

import pytest

from deftune.artifacts.names import gguf_facts, hub_model, model_license, shown_model

KINDS = {str: 8, int: 4, float: 6}


def gguf(path, *fields, count=None, version=3):
    """A GGUF file's header, and nothing after it."""

    def text(value):
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def one(value):
        return text(value) if isinstance(value, str) else struct.pack("<I" if isinstance(value, int) else "<f", value)

    body = b""
    for key, value in fields:
        body += text(key)
        if isinstance(value, list):
            body += struct.pack("<IIQ", 9, KINDS[type(value[0])], len(value)) + b"".join(map(one, value))
        else:
            body += struct.pack("<I", KINDS[type(value)]) + one(value)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, len(fields) if count is None else count) + body)
    return path


LONG = [("general.architecture", "llama"), ("tokenizer.ggml.tokens", ["a", "bc", ""]), ("tokenizer.scores", [1.0, 2.0])]


@pytest.mark.parametrize(("kind", "shown"), [(3, "Q4_1, dequantised"), (15, "Q4_K_M, dequantised"), (1, "F16"),
                                             (32, "BF16"), (999, "file type 999, dequantised")])  # fmt: skip
def test_a_gguf_file_shows_its_quantisation(tmp_path, kind, shown):
    path = gguf(tmp_path / "some-model.gguf", *LONG, ("general.file_type", kind))
    assert shown_model(str(path)) == f"some-model.gguf ({shown})"


def test_a_gguf_files_licence_is_known(tmp_path):
    path = gguf(tmp_path / "m.gguf", *LONG, ("general.license", "mit"), ("general.file_type", 7))
    assert model_license(str(path)) == "mit" and hub_model(str(path)) is None
    path = gguf(tmp_path / "odd.gguf", ("general.license", "mit\ntags: [x]"))
    assert model_license(str(path)) is None


def test_a_header_that_cannot_be_read_is_no_error(tmp_path):
    whole = gguf(tmp_path / "whole.gguf", *LONG, ("general.file_type", 3)).read_bytes()
    for size in range(len(whole)):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        assert gguf_facts(tmp_path / "cut.gguf") == {}, size
    for damaged in (
        gguf(tmp_path / "a.gguf", ("general.architecture", "x"), count=2**40),
        gguf(tmp_path / "b.gguf", ("x", "y"), version=1),
        tmp_path / "absent.gguf",
    ):
        assert shown_model(str(damaged)) == f"{damaged.name} (dequantised)"
    (tmp_path / "c.gguf").write_bytes(whole[:24] + struct.pack("<Q", 2**60) + whole[32:])
    assert gguf_facts(tmp_path / "c.gguf") == {}


def test_names_tell_no_folder_of_the_machine(tmp_path):
    assert shown_model("smollm2") == "SmolLM2-135M-Instruct (Q4_1, dequantised)"
    assert shown_model("org/name") == "org/name"
    assert shown_model(str(tmp_path / "models" / "mine")) == "mine"
    assert shown_model("~/models/mine") == "mine"
    assert shown_model("../x/mine") == "mine"
    assert shown_model("models/mine") == "models/mine"
    assert shown_model(str(tmp_path / "runs" / "a" / "merged")) == "a/merged"


def test_hub_ids(tmp_path, monkeypatch):
    assert hub_model("smollm2") == "HuggingFaceTB/SmolLM2-135M-Instruct" and model_license("smollm2") == "apache-2.0"
    assert hub_model("org/name") == "org/name" and model_license("org/name") is None
    for name in ("/org/name", "a/b/c", "nothing", "../name", "org/name.gguf"):
        assert hub_model(name) is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert hub_model("org/name") is None  # a folder here
    (tmp_path / "org" / "name" / "README.md").write_text("---\nlicense: mit\n---\n# x\n")
    assert model_license("org/name") == "mit"
    for text in ("no front matter", "---\n[\n---\n", "---\n- a\n---\n", "---\nlicense: [a]\n---\n", "---\n"):
        (tmp_path / "org" / "name" / "README.md").write_text(text)
        assert model_license("org/name") is None


def test_a_run_is_named_with_what_it_was_tuned_from(tmp_path, make_config):
    from deftune.artifacts.runs import open_run

    config = make_config(tmp_path / "mine")
    open_run(config)
    assert shown_model(str(tmp_path / "mine")) == "mine, tuned from tiny"
    assert shown_model(f"{tmp_path / 'mine'}:200") == "mine:200, tuned from tiny"
    (tmp_path / "mine" / "config.yaml").write_text("[")
    assert shown_model(str(tmp_path / "mine")) == "mine, tuned from an unknown model"
