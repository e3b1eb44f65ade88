"""Row 18: files that try to run code, or to write outside their folder, when a command reads them.

The test suite has more of them (`tests/training/test_attacks.py`): git, names of paths, and the package's own source.
Every attack would leave a file called `canary`, or change one called `thesis`. None of them does more than that.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from deftune.artifacts import checkpoints, folders
from deftune.selftest import tiny
from deftune.selftest.check import Figure, Size
from deftune.selftest.files import command
from deftune.selftest.runs import Bench


@dataclass(frozen=True)
class Target:
    """An attack's own folder, the files that show its success, and a run and a LoRA run to copy from."""

    folder: Path
    bench: Bench
    run: Path
    lora: Path

    @property
    def canary(self) -> Path:
        return self.folder / "canary"

    @property
    def thesis(self) -> Path:
        return self.folder / "thesis"

    def copy(self, source: Path) -> Path:
        return Path(shutil.copytree(source, self.folder / source.name))

    def unfinished_run(self) -> Path:
        """A copy of the run as a kill before its end would leave it: `deftune train` resumes it."""
        run = self.copy(self.run)
        shutil.rmtree(run / "model")
        (run / "status.json").write_text(json.dumps({"state": "running", "step": 1}))
        return run

    def write(self, name: str, content: str) -> Path:
        path = self.folder / name
        path.write_text(content)
        return path

    def config(self, changes: dict[str, Any], name: str = "config.yaml") -> Path:
        content = tiny.run_content(self.folder / "out", self.bench.model, self.bench.data, changes)
        return self.write(name, json.dumps(content))

    def read_by(self, name: str, model: object) -> Command:
        """The command of this name, on a model or a run."""
        data, out = self.bench.data, self.folder / "out"
        commands: dict[str, Command] = {
            "chat": ("chat", model, "--max-new-tokens", 1),
            "inspect": ("inspect", model, data, "--rows", 2, "--max-length", 64),
            "eval": ("eval", "heldout", model, "--data", data, "--rows", 2, "--out", out),
            "merge": ("merge", model, "--out", out),
            "train": ("train", self.config({"model.name": str(model)}), "--dry-run"),
        }
        return commands[name]


Command = tuple[object, ...]
ATTACKS: dict[str, Callable[[Target], list[Command]]] = {}


def attacks(*cases: Any) -> Callable[[Callable[[Target, Any], list[Command]]], None]:
    """Register a function for each of the cases: it writes the files, and returns the commands that read them."""

    def register(function: Callable[[Target, Any], list[Command]]) -> None:
        for number, case in enumerate(cases):
            label = case if isinstance(case, str) and len(case) < 30 else number
            ATTACKS[f"{function.__name__}, {label}"] = lambda target, case=case: function(target, case)

    return register


# --- code beside the weights ------------------------------------------------------------------------------------------

EVIL = "from pathlib import Path\nPath({!r}).touch()\nclass Model: pass\nclass Config: pass\nclass Tokenizer: pass\n"


def model_with_code(target: Target) -> Path:
    model = target.copy(target.bench.model)
    (model / "evil.py").write_text(EVIL.format(str(target.canary)))
    config = json.loads((model / "config.json").read_text())
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": "evil.Tokenizer"}
    (model / "config.json").write_text(json.dumps({**config, "model_type": "evil", "auto_map": names}))
    return model


def run_with_code(target: Target, source: Path) -> Path:
    """A copy of a run whose config says to trust the code of its base model."""
    run = target.copy(source)
    content = yaml.safe_load((run / "config.yaml").read_text())
    content["model"] |= {"name": str(model_with_code(target)), "trust_remote_code": True}
    (run / "config.yaml").write_text(yaml.safe_dump(content))
    return run


@attacks("chat", "inspect", "eval", "merge")
def trusting_lora_run(target: Target, reader: str) -> list[Command]:
    return [target.read_by(reader, run_with_code(target, target.lora))]


@attacks("chat", "inspect", "eval")
def base_model_of_trusting_run(target: Target, reader: str) -> list[Command]:
    return [target.read_by(reader, f"{run_with_code(target, target.run)}:0")]


@attacks("chat", "inspect", "eval", "train")
def code_in_model_folder(target: Target, reader: str) -> list[Command]:
    return [target.read_by(reader, model_with_code(target))]


# --- pickles ----------------------------------------------------------------------------------------------------------


class Pickled:
    """An object whose unpickling touches the canary."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.canary,))


def write_pickle(target: Target, path: Path) -> None:
    path.write_bytes(pickle.dumps(Pickled(target.canary)))


@attacks("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "model.safetensors")
def pickle_in_sealed_checkpoint(target: Target, name: str) -> list[Command]:
    run = target.unfinished_run()
    newest = checkpoints.checkpoints(run / "checkpoints")[-1]
    write_pickle(target, newest / name)
    (newest / folders.MANIFEST).unlink()
    folders.seal(newest, step=checkpoints.step_of(newest))  # the attacker can compute checksums, too
    return [("train", run)]


@attacks(("pytorch_model.bin", "train"), ("pytorch_model.bin", "chat"), ("model.safetensors", "eval"))
def pickle_as_weights(target: Target, case: tuple[str, str]) -> list[Command]:
    name, reader = case
    model = target.copy(target.bench.model)
    (model / "model.safetensors").unlink()
    write_pickle(target, model / name)
    return [target.read_by(reader, model)]


@attacks("rows.jsonl", "rows.parquet", "rows.json", "rows.jsonl.gz")
def pickle_as_data(target: Target, name: str) -> list[Command]:
    write_pickle(target, target.folder / name)
    return [("data", "preview", target.folder / name, "--model", target.bench.model)]


# --- YAML, templates, texts -------------------------------------------------------------------------------------------

TAGS = [
    "!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['CANARY']]",
    "!!python/object/apply:os.system ['touch CANARY']",
    "!!python/object/new:os.system ['touch CANARY']",
    "!!python/object/apply:subprocess.check_call [['touch', 'CANARY']]",
]
READERS = ("train", "compare", "task", "run", "--set")


@attacks(*((tag, reader) for tag in TAGS for reader in READERS))
def yaml_tag(target: Target, case: tuple[str, str]) -> list[Command]:
    tag, reader = case[0].replace("CANARY", str(target.canary)), case[1]
    path = target.write("evil.yaml", f"objective: {tag}\nrun: out\ndata: {{train: [{{path: a}}]}}\nname: x\n")
    if reader == "run":
        run = target.copy(target.run)
        shutil.copy(path, run / "config.yaml")
        return [("runs", target.folder), ("train", run)]
    if reader == "task":
        return [("eval", "run", target.bench.model, "--task-file", path, "--out", target.folder / "result")]
    if reader == "--set":
        return [("train", target.config({}), "--dry-run", "--set", f"objective={tag}")]
    return [("train", path)] if reader == "train" else [("compare", "run", path)]


@attacks(
    "{{ cycler.__init__.__globals__.os.popen('touch CANARY').read() }}",
    "{{ lipsum.__globals__['os'].system('touch CANARY') }}",
    "{{ joiner.__init__.__globals__['os'].system('touch CANARY') }}",
    "{{ namespace.__init__.__globals__['os'].system('touch CANARY') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__.__subclasses__()[-1].__init__.__globals__ }}",
    "{{ raise_exception.__globals__['os'].system('touch CANARY') }}",
    "{{ strftime_now.__globals__['os'].system('touch CANARY') }}",
    "{{ self.__init__.__globals__.__builtins__.open('CANARY', 'w') }}",
    "{{ ('%s' | format).__self__ }}{{ '{0.__class__.__init__}'.format(messages) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('touch CANARY') }}",
)
def chat_template(target: Target, text: str) -> list[Command]:
    path = target.write("evil.jinja", text.replace("CANARY", str(target.canary)) + "{{ messages[0]['content'] }}")
    model = target.copy(target.bench.model)
    shutil.copy(path, model / "chat_template.jinja")
    preview = ("data", "preview", target.bench.data, "--model", target.bench.model, "--template", path)
    return [preview, target.read_by("chat", model)]


@attacks(
    "__import__('pathlib').Path('CANARY').touch()",
    "eval(\"open('CANARY','w')\")",
    "deft(__import__('os'))",
    "{}.x",
)
def code_as_objective_or_value(target: Target, text: str) -> list[Command]:
    spec = text.replace("CANARY", str(target.canary))
    return [
        ("objectives", "show", spec),
        ("train", target.config({"objective": spec}), "--dry-run"),
        ("train", target.config({}, "good.yaml"), "--dry-run", "--set", f"train.seed={spec}"),
    ]


@attacks("[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000)
def deep_json_and_yaml(target: Target, text: str) -> list[Command]:
    rows = [target.write(name, text) for name in ("rows.jsonl", "rows.json")]
    previews: list[Command] = [("data", "preview", path, "--model", target.bench.model) for path in rows]
    return [*previews, ("train", target.write("deep.yaml", text))]


# --- links ------------------------------------------------------------------------------------------------------------


@attacks(".lock", ".status.json.writing", ".metrics.jsonl.writing", "metrics.jsonl", "status.json")
def link_in_run(target: Target, name: str) -> list[Command]:
    run = target.unfinished_run()
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(target.thesis)
    return [("runs", target.folder), ("train", run)]


@attacks("train")
def link_in_checkpoint(target: Target, _: str) -> list[Command]:
    run = target.unfinished_run()
    weights = checkpoints.checkpoints(run / "checkpoints")[-1] / "model.safetensors"
    weights.unlink()
    weights.symlink_to(target.thesis)
    return [("train", run)]


# --- the check --------------------------------------------------------------------------------------------------------


def attack_files(size: Size) -> Figure:
    bench = Bench(size.folder)
    run = bench.train("run", {"train.max_steps": 2, "train.save_steps": 1, "train.keep": 9})
    lora = bench.train("lora", {"train.max_steps": 1, "model.lora": {"r": 2, "alpha": 4}})
    misses: list[str] = []
    for number, (name, prepare) in enumerate(ATTACKS.items()):
        target = Target(size.folder / f"attack-{number}", bench, run, lora)
        target.folder.mkdir()
        target.thesis.write_text("years of work")
        with contextlib.chdir(target.folder):
            for arguments in prepare(target):
                with contextlib.suppress(Exception), mock.patch("sys.stdin", io.StringIO("hello\n")):
                    command(*arguments)
        if target.canary.exists():
            misses.append(f"executed: {name}")
        if target.thesis.read_text() != "years of work":
            misses.append(f"wrote through a link: {name}")
        shutil.rmtree(target.folder, ignore_errors=True)
        sys.modules.pop("evil", None)
    text = f"{len(misses)} of {len(ATTACKS)} attacks executed or wrote outside"
    return Figure(text, not misses and len(ATTACKS) >= 40, tuple(misses))
