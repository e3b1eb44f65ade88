"""Row 18: files that try to run code, or to write outside their folder, when a command reads them.

Every attack would leave a file called `canary`, or change one called `thesis`. None of them does more than that.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from deftune.artifacts import checkpoints, folders
from deftune.selftest import tiny
from deftune.selftest.check import Figure, Size
from deftune.selftest.files import command
from deftune.selftest.runs import Bench

FORBIDDEN = {"marshal", "shelve", "dill", "cloudpickle"}  # modules that execute what they read, as pickle does
# what may be unpickled: (file, argument) of pipes between a process and workers that it started with its own code
PIPES = {("data/parallel.py", "process.stdout"), ("data/parallel.py", "source")}


class Pickled:
    """An object whose unpickling touches the canary."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.canary,))


@dataclass(frozen=True)
class Target:
    """What the attacks have at hand: a finished run, a LoRA run, and an empty folder of their own."""

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

    def copy(self, what: Path) -> Path:
        return Path(shutil.copytree(what, self.folder / what.name))

    def config(self, changes: dict[str, Any]) -> Path:
        path = self.folder / "config.yaml"
        content = tiny.run_content(self.folder / "out", self.bench.model, self.bench.data, changes)
        path.write_text(json.dumps(content))
        return path

    def commands(self, model: Path) -> Iterator[tuple[str, tuple[object, ...]]]:
        """The commands that read a model or a run."""
        rows = ("--rows", "2", "--max-length", "64")
        yield "chat", ("chat", model, "--max-new-tokens", "1")
        yield "inspect", ("inspect", model, self.bench.data, *rows)
        yield "eval", ("eval", "heldout", model, "--data", self.bench.data, "--rows", "2",
                       "--out", self.folder / "result")  # fmt: skip
        yield "merge", ("merge", model, "--out", self.folder / "merged")


Attack = Callable[[Target], None]


def quiet_command(*arguments: object) -> None:
    """A command whose answer does not matter here, only what it touches."""
    with contextlib.suppress(Exception), mock.patch("sys.stdin", io.StringIO("hello\n")):
        command(*arguments)


def attacks() -> Iterator[tuple[str, Attack]]:
    yield from remote_code()
    yield from pickles()
    yield from yaml_tags()
    yield from chat_templates()
    yield from paths_and_links()
    yield from texts()


# --- code beside the weights ------------------------------------------------------------------------------------------

EVIL = "from pathlib import Path\nPath({!r}).touch()\nclass Model: pass\nclass Config: pass\nclass Tokenizer: pass\n"


def add_remote_code(folder: Path, canary: Path) -> Path:
    (folder / "evil.py").write_text(EVIL.format(str(canary)))
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": "evil.Tokenizer"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "evil", "auto_map": names}))
    return folder


def remote_code() -> Iterator[tuple[str, Attack]]:
    """Code in a model's folder, with a run's config that says to trust it."""

    def by_config(name: str, lora: bool, step: str = "") -> Attack:
        def attack(target: Target) -> None:
            run = target.copy(target.lora if lora else target.run)
            model = add_remote_code(target.copy(target.bench.model), target.canary)
            content = json.loads(json.dumps(load_yaml(run / "config.yaml")))
            content["model"] |= {"name": str(model), "trust_remote_code": True}
            (run / "config.yaml").write_text(json.dumps(content))
            place = Path(f"{run}{step}")
            quiet_command(*dict(target.commands(place))[name])

        return attack

    def by_folder(name: str) -> Attack:
        def attack(target: Target) -> None:
            model = add_remote_code(target.copy(target.bench.model), target.canary)
            quiet_command(*dict(target.commands(model))[name])

        return attack

    for name in ("chat", "inspect", "eval", "merge"):
        yield f"trust_remote_code in a LoRA run's config: {name}", by_config(name, lora=True)
    for name in ("chat", "inspect", "eval"):
        yield f"trust_remote_code in a run's config, base model: {name}", by_config(name, lora=False, step=":0")
        yield f"code in a model's folder: {name}", by_folder(name)

    def trained(target: Target) -> None:
        model = add_remote_code(target.copy(target.bench.model), target.canary)
        quiet_command("train", target.config({"model.name": str(model)}), "--dry-run")

    yield "code in a model's folder: train", trained

    def git(target: Target) -> None:
        if shutil.which("git") is None:
            return
        repository = target.folder / "repository"
        repository.mkdir()
        for line in ("init -q", "-c user.name=a -c user.email=a@b commit -q --allow-empty -m x"):
            subprocess.run(["git", *line.split()], cwd=repository, check=True, capture_output=True)
        for key in ("core.fsmonitor", "core.sshCommand", "diff.external", "core.pager"):
            subprocess.run(["git", "config", key, f"touch {target.canary};:"], cwd=repository, check=True)
        with contextlib.chdir(repository):
            quiet_command("train", target.config({"train.max_steps": 1}))

    yield "a git repository's configured programs: train", git


def load_yaml(path: Path) -> Any:
    import yaml

    return yaml.safe_load(path.read_text())


# --- pickles ----------------------------------------------------------------------------------------------------------


def pickles() -> Iterator[tuple[str, Attack]]:
    def in_checkpoint(name: str) -> Attack:
        def attack(target: Target) -> None:
            run = target.copy(target.run)
            shutil.rmtree(run / "model")
            newest = checkpoints.checkpoints(run / "checkpoints")[-1]
            (newest / name).write_bytes(pickle.dumps(Pickled(target.canary)))
            (newest / folders.MANIFEST).unlink()
            folders.seal(newest, step=checkpoints.step_of(newest))  # the attacker can compute checksums, too
            (run / "status.json").write_text(json.dumps({"state": "running", "step": 1}))
            quiet_command("train", run)

        return attack

    def in_model(name: str, reader: str) -> Attack:
        def attack(target: Target) -> None:
            model = target.copy(target.bench.model)
            (model / "model.safetensors").unlink()
            (model / name).write_bytes(pickle.dumps(Pickled(target.canary)))
            if reader == "train":
                quiet_command("train", target.config({"model.name": str(model)}), "--dry-run")
            else:
                quiet_command(*dict(target.commands(model))[reader])

        return attack

    def data(suffix: str) -> Attack:
        def attack(target: Target) -> None:
            path = target.folder / f"rows{suffix}"
            path.write_bytes(pickle.dumps(Pickled(target.canary)))
            quiet_command("data", "preview", path, "--model", target.bench.model)

        return attack

    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "model.safetensors"):
        yield f"a pickle for {name} in a sealed checkpoint", in_checkpoint(name)
    for name, reader in (("pytorch_model.bin", "train"), ("pytorch_model.bin", "chat"), ("model.safetensors", "eval")):
        yield f"a pickle for {name}: {reader}", in_model(name, reader)
    for suffix in (".jsonl", ".parquet", ".json", ".jsonl.gz"):
        yield f"a pickle as data ({suffix})", data(suffix)


# --- YAML, templates, texts -------------------------------------------------------------------------------------------


def yaml_tags() -> Iterator[tuple[str, Attack]]:
    tags = [
        "!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{}']]",
        "!!python/object/apply:os.system ['touch {}']",
        "!!python/object/new:os.system ['touch {}']",
        "!!python/object/apply:subprocess.check_call [['touch', '{}']]",
    ]
    for number, tag in enumerate(tags):
        for kind in ("train", "compare", "task", "run", "--set"):

            def attack(target: Target, tag: str = tag, kind: str = kind) -> None:
                evil = tag.format(target.canary)
                path = target.folder / "evil.yaml"
                path.write_text(f"objective: {evil}\nrun: out\ndata: {{train: [{{path: a}}]}}\nname: x\n")
                if kind == "run":
                    run = target.copy(target.run)
                    (run / "config.yaml").write_text(path.read_text())
                    quiet_command("runs", target.folder)
                    quiet_command("train", run)
                elif kind == "task":
                    quiet_command("eval", "run", target.bench.model, "--task-file", path, "--out", target.folder / "r")
                elif kind == "--set":
                    quiet_command("train", target.config({}), "--dry-run", "--set", f"objective={evil}")
                else:
                    quiet_command(*(["train", path] if kind == "train" else ["compare", "run", path]))

            yield f"YAML tag {number}: {kind}", attack


JINJA = [
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
]


def chat_templates() -> Iterator[tuple[str, Attack]]:
    for number, text in enumerate(JINJA):

        def attack(target: Target, text: str = text) -> None:
            path = target.folder / "evil.jinja"
            path.write_text(text.replace("CANARY", str(target.canary)) + "{{ messages[0]['content'] }}")
            quiet_command("data", "preview", target.bench.data, "--model", target.bench.model, "--template", path)
            model = target.copy(target.bench.model)
            (model / "chat_template.jinja").write_text(path.read_text())
            quiet_command("chat", model, "--max-new-tokens", "1")

        yield f"chat template {number}", attack


def texts() -> Iterator[tuple[str, Attack]]:
    """Code where an objective, an override or a JSON value is read."""
    code = ["__import__('pathlib').Path('{}').touch()", "eval(\"open('{}','w')\")", "deft(__import__('os'))", "{{}}.x"]
    for number, text in enumerate(code):

        def attack(target: Target, text: str = text) -> None:
            spec = text.format(target.canary)
            quiet_command("objectives", "show", spec)
            quiet_command("train", target.config({"objective": spec}), "--dry-run")
            quiet_command("train", target.config({}), "--dry-run", "--set", f"train.seed={spec}")

        yield f"code as an objective or override {number}", attack
    for number, deep in enumerate(["[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000]):

        def nested(target: Target, deep: str = deep) -> None:
            for name in ("rows.jsonl", "rows.json", "deep.yaml"):
                (target.folder / name).write_text(deep)
            quiet_command("data", "preview", target.folder / "rows.jsonl", "--model", target.bench.model)
            quiet_command("data", "preview", target.folder / "rows.json", "--model", target.bench.model)
            quiet_command("train", target.folder / "deep.yaml")

        yield f"deep JSON and YAML {number}", nested


# --- paths and links --------------------------------------------------------------------------------------------------


def paths_and_links() -> Iterator[tuple[str, Attack]]:
    def lock(target: Target) -> None:
        run = target.copy(target.run)
        (run / ".lock").unlink(missing_ok=True)
        (run / ".lock").symlink_to(target.thesis)
        (run / "status.json").write_text(json.dumps({"state": "running", "step": 1}))
        quiet_command("runs", target.folder)

    yield "a link for .lock: runs", lock

    def locked_training(target: Target) -> None:
        run = target.copy(target.run)
        shutil.rmtree(run / "model")
        (run / ".lock").unlink(missing_ok=True)
        (run / ".lock").symlink_to(target.thesis)
        quiet_command("train", run)

    yield "a link for .lock: train", locked_training

    for name in (".status.json.writing", ".metrics.jsonl.writing", "metrics.jsonl", "status.json"):

        def writing(target: Target, name: str = name) -> None:
            run = target.copy(target.run)
            shutil.rmtree(run / "model")
            (run / name).unlink(missing_ok=True)
            (run / name).symlink_to(target.thesis)
            quiet_command("train", run)

        yield f"a link for {name}: train", writing

    def in_checkpoint(target: Target) -> None:
        run = target.copy(target.run)
        newest = checkpoints.checkpoints(run / "checkpoints")[-1]
        (newest / "model.safetensors").unlink()
        (newest / "model.safetensors").symlink_to(target.thesis)
        shutil.rmtree(run / "model")
        quiet_command("train", run)

    yield "a link in a checkpoint: train", in_checkpoint

    def traversal(target: Target) -> None:
        run = target.copy(target.run)
        newest = checkpoints.checkpoints(run / "checkpoints")[-1]
        manifest = json.loads(json.loads((newest / folders.MANIFEST).read_text())["content"])
        manifest["files"]["../../../thesis"] = {"bytes": 5, "sha256": "0" * 64}
        (newest / folders.MANIFEST).write_text(folders.render_manifest(json.dumps(manifest)))
        shutil.rmtree(run / "model")
        quiet_command("train", run)

    yield "a manifest that names a file outside: train", traversal

    for name in ("..", ".", "../up", "/tmp"):

        def regime(target: Target, name: str = name) -> None:
            inside = target.folder / "deep" / "inside" / "grid"
            content = {
                "folder": str(inside), "objectives": ["nll"], "model": {"name": str(target.bench.model)},
                "train": {"max_steps": 1, "epochs": 9, "batch_size": 8, "micro_batch_size": 8, "precision": "fp32"},
                "regimes": {name: {"data": {"train": [{"path": str(target.bench.data)}], "max_length": 128},
                                   "tokens": [{"path": str(target.bench.data), "limit": 2}]}},
            }  # fmt: skip
            path = target.folder / "compare.yaml"
            path.write_text(json.dumps(content))
            quiet_command("compare", "run", path, "--cell", f"{name}/base")
            outside = [p for p in inside.parent.parent.rglob("*") if p.is_file() and inside not in p.parents]
            if outside:
                target.canary.touch()

        yield f"a regime named {name!r}: compare", regime


# --- the package's own source -----------------------------------------------------------------------------------------


def dangerous_calls() -> list[str]:
    """Calls in the package that execute what they read: eval, exec, yaml.load, torch.load, pickle of a file."""
    found: list[str] = []
    home = Path(__file__).parents[1]
    for path in sorted(home.rglob("*.py")):
        if path == Path(__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = ""
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
                if called in ("eval", "exec", "yaml.load", "yaml.unsafe_load", "os.system", "os.popen", "dcp.load"):
                    name = called
                elif called.startswith("pickle.") and called.lower().endswith(("load", "loads", "unpickler")):
                    pipe = (path.relative_to(home).as_posix(), ", ".join(map(ast.unparse, node.args)))
                    name = called if pipe not in PIPES else ""
                elif called == "torch.load" and not safe:
                    name = called
            elif isinstance(node, ast.Import) and FORBIDDEN & {alias.name for alias in node.names}:
                name = ast.unparse(node)
            if name:
                found.append(f"{path.relative_to(home)}:{node.lineno}: {name}")  # pyright: ignore
    return found


def attack_files(size: Size) -> Figure:
    bench = Bench(size.folder)
    run = bench.train("run", {"train.max_steps": 2, "train.save_steps": 1, "train.keep": 9})
    lora = bench.train("lora", {"train.max_steps": 1, "model.lora": {"r": 2, "alpha": 4}})
    misses: list[str] = []
    tried = 0
    for number, (name, attack) in enumerate(attacks()):
        tried += 1
        target = Target(size.folder / f"attack-{number}", bench, run, lora)
        target.folder.mkdir()
        target.thesis.write_text("years of work")
        with contextlib.chdir(target.folder):
            attack(target)
        if target.canary.exists():
            misses.append(f"executed: {name}")
        if target.thesis.read_text() != "years of work":
            misses.append(f"wrote through: {name}")
        shutil.rmtree(target.folder, ignore_errors=True)
        sys.modules.pop("evil", None)
    calls = dangerous_calls()
    text = f"{len(misses)} of {tried} attacks executed or wrote outside; {len(calls)} dangerous calls in the package"
    return Figure(text, not misses and not calls and tried >= 40, (*misses, *calls))
