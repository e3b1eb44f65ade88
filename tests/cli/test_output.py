"""What data, models, servers and folders say is text: it does not steer the terminal, and brackets are no markup."""

import io
import json
import os
import subprocess
import sys

import pytest
import yaml

import tiny
from deftune.artifacts.terminal import one_line, printable, visible
from deftune.cli import main

EVIL = "\x1b]0;pwned\x07\x1b[2J\x9b31m\u202eabc"
CONTROLS = {"\x1b", "\x07", "\x9b", "\u202e"}
SHOWN = "\\x1b]0;pwned\\x07\\x1b[2J\\x9b31m\\u202eabc"


def check(text: str) -> None:
    assert SHOWN in text and not CONTROLS & set(text), repr(text)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("models") / "tiny", tiny.make_tokenizer())


@pytest.fixture
def config(tmp_path, model):
    """A config over a file of rows: ``config([...], run=...)`` is its path."""

    def make(rows: list[dict], name: str = "rows.jsonl", **more) -> str:
        data = tmp_path / name
        data.parent.mkdir(parents=True, exist_ok=True)
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        content = {
            "run": str(tmp_path / "run"), "model": {"name": str(model)},
            "data": {"train": [{"path": str(data)}], "max_length": 64},
            "train": {"batch_size": 2, "micro_batch_size": 2, "max_steps": 1, "precision": "fp32"}, **more,
        }  # fmt: skip
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(content))
        return str(path)

    return make


GOOD = {"messages": [{"role": "user", "content": "What is 12?"}, {"role": "assistant", "content": "12"}]}


def test_every_control_character_is_written_out():
    controls = "".join(map(chr, [*range(32), *range(127, 160), 0x200E, 0x202E, 0x2066, 0xFEFF]))
    for shown in (printable(controls), visible(controls), one_line(controls)):
        assert all(character.isprintable() or character in "\n\t" for character in shown)
    assert one_line("a\nb\tc") == "a\\nb\\tc"
    assert printable("na\u00efve \u65e5\u672c \U0001f600") == "na\u00efve \u65e5\u672c \U0001f600"


def test_a_key_of_a_bad_row(config, capsys):
    assert main(["train", config([{EVIL: 1}])]) == 2
    check(capsys.readouterr().err)


def test_what_a_template_raises(config, model, tmp_path, capsys):
    template = tmp_path / "t.jinja"
    template.write_text("{{ raise_exception('" + EVIL + "') }}")
    assert main(["data", "preview", config([GOOD]).replace("run.yaml", "rows.jsonl"), "--model", str(model),
                 "--template", str(template)]) == 2  # fmt: skip
    check(capsys.readouterr().err)


def test_the_name_of_a_missing_file(capsys, tmp_path):
    assert main(["train", str(tmp_path / EVIL)]) == 2
    check(capsys.readouterr().err)


def test_answers_in_chat(model, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    monkeypatch.setattr("deftune.training.results.reply", lambda *a, **k: iter(EVIL))  # a character a piece
    assert main(["chat", str(model)]) == 0
    check(capsys.readouterr().out)


def test_the_error_of_a_cell(tmp_path, model, capsys):
    folder = tmp_path / "comparison"
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(GOOD) + "\n")
    source = [{"path": str(rows)}]
    content = {"objectives": ["nll"], "base": False, "model": {"name": str(model)},
               "regimes": {"weak": {"data": {"train": source}, "tokens": source}}}  # fmt: skip
    cell = folder / "weak" / "nll" / "lr5e-05-s0"
    cell.mkdir(parents=True)
    (folder / "comparison.yaml").write_text(yaml.safe_dump(content))
    (cell / "cell.json").write_text(json.dumps({"state": "failed", "error": EVIL}))
    assert main(["compare", "show", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "pwned" in shown and not CONTROLS & set(shown), repr(shown)


@pytest.mark.parametrize("name", ["rows[v2].jsonl", "d[/b].jsonl", "[red]rows.jsonl", "a[/b]/rows.jsonl"])
def test_brackets_in_the_name_of_a_file(config, tmp_path, capsys, name):
    assert main(["train", config([GOOD] * 4, name)]) == 0
    assert f"{tmp_path / name}: 4 rows\n" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a[/b]", "[bold]", "run[v2]"])
def test_brackets_in_the_name_of_a_run(config, tmp_path, capsys, name):
    assert main(["train", config([GOOD] * 4, run=str(tmp_path / name))]) == 0
    assert f"finished: {tmp_path / name / 'model'} " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("deftune.cli", "config schema"),
        ("deftune.artifacts.config", "config schema"),
        ("numpy._core.multiarray", "objectives show deft"),  # torch's C++ code imports it, and drops what is raised
    ],
)
def test_an_interrupt_while_importing_is_no_traceback(tmp_path, module, command):
    """Ctrl-C in the first second: before the command line is there, and inside a command."""
    (tmp_path / "sitecustomize.py").write_text(
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "class Interrupt:\n"
        "    waits = True\n"
        "    def find_spec(self, name, *rest):\n"
        f"        if name == {module!r} and self.waits:\n"
        "            self.waits = False\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
    )
    search = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "deftune", *command.split()], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": search},
    )  # fmt: skip
    assert done.returncode == 130 and done.stderr == "deftune: interrupted\n", done.stderr


def test_bitsandbytes_does_not_ask_for_kernels():
    """It is imported by PEFT, in every command that trains, and says so before the first line of ours."""
    pytest.importorskip("bitsandbytes")
    code = (
        "import sys; sys.argv = ['deftune', 'doctor']; from deftune.__main__ import main; main(); import bitsandbytes"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "kernels" not in done.stderr, done.stderr


@pytest.mark.parametrize("module", ["deftune.training.train", "deftune.training.trainer", "deftune.artifacts.results"])
def test_bitsandbytes_does_not_ask_for_kernels_in_a_script(module):
    """Another message of its logger is shown."""
    pytest.importorskip("bitsandbytes")
    code = (
        f"import logging, {module}, peft, bitsandbytes; "
        "logging.getLogger('bitsandbytes.backends.cpu.ops').warning('an important message')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "important" in done.stderr and "kernels" not in done.stderr, done.stderr


def test_a_terminal_without_utf8_gets_other_characters_written_out(tmp_path):
    folder = tmp_path / "r\u00fcn"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "deftune", "init", str(folder / "run.yaml")], capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert b"r\\xfcn/run.yaml written" in done.stdout
