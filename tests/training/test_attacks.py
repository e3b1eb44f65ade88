"""Files and folders that somebody else made: none of them executes anything, and none is written through.

Every attack leaves a mark when it works: a file that its code would make, or a file outside the folder that would
change. ``ATTACKS`` counts them; the manifests of test_checkpoints.py and the grader's answers are beside these.
"""

import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from deftune.artifacts.folders import seal
from deftune.artifacts.runs import Run
from deftune.cli import main
from deftune.training.train import train_run


@dataclass
class Scene:
    """Where an attack happens: a folder of its own, the mark of its success, and good things to spoil."""

    folder: Path
    model: Path
    data: Path
    lora: Path
    plain: Path
    precious: Path

    @property
    def mark(self) -> Path:
        return self.folder / "EXECUTED"

    @property
    def python(self) -> str:
        return f"import pathlib; pathlib.Path({str(self.mark)!r}).touch()\n"

    @property
    def shell(self) -> str:
        return f"touch '{self.mark}'"

    def copy(self, source: Path, name: str = "given") -> Path:
        return Path(shutil.copytree(source, self.folder / name))

    def config(self, **changes: Any) -> Path:
        """A good config of one's own, with changes to its sections."""
        content = yaml.safe_load((self.plain / "config.yaml").read_text())
        content["run"] = str(self.folder / "own")
        for section, values in changes.items():
            content[section] = {**content[section], **values} if isinstance(values, dict) else values
        path = self.folder / "own.yaml"
        path.write_text(yaml.safe_dump(content))
        return path


ATTACKS: dict[str, Callable[[Scene], list[str]]] = {}


def attack(made: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """Register a function that lays the trap and returns the command that walks into it."""
    ATTACKS[made.__name__] = made
    return made


def attacks(**cases: Any) -> Callable[[Callable[..., list[str]]], Callable[..., list[str]]]:
    """Register a function once for each value of its second argument."""

    def register(made: Callable[..., list[str]]) -> Callable[..., list[str]]:
        for name, value in cases.items():
            ATTACKS[f"{made.__name__}: {name.replace('_', ' ')}"] = lambda scene, value=value: made(scene, value)
        return made

    return register


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_run(run: Path, **model: Any) -> Path:
    """A run's recorded config with other values in its section `model`."""
    content = yaml.safe_load((run / "config.yaml").read_text())
    content["model"] |= model
    (run / "config.yaml").write_text(yaml.safe_dump(content))
    return run


def resumable(run: Path) -> Path:
    """The run as a kill after its last checkpoint would leave it."""
    shutil.rmtree(run / "model", ignore_errors=True)
    Run(run).set_status("running", step=2)
    return run


# --- code of a model's repository -------------------------------------------------------------------------------------


def with_code(scene: Scene, folder: Path) -> Path:
    """A model whose classes are in the folder itself."""
    (folder / "evil.py").write_text(
        scene.python + "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Config(LlamaConfig):\n    model_type = 'evil'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Config\n"
    )
    classes = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    edit_json(folder / "config.json", model_type="evil", auto_map=classes)
    return folder


def commands(scene: Scene, model: str) -> dict[str, list[str]]:
    data = str(scene.data)
    return {
        "chat": ["chat", model],
        "inspect": ["inspect", model, data],
        "eval": ["eval", "heldout", model, "--data", data, "--out", str(scene.folder / "result")],
        "tokens": ["analyze", "tokens", model, data, "--out", str(scene.folder / "tokens.parquet")],
        "merge": ["merge", model],
        "train": ["train", model],
        "dry_run": ["train", model, "--dry-run"],
        "config_file": ["train", f"{model}/config.yaml"],
        "advise": ["advise", model, data, "--rows", "4"],
        "export": ["export", "axolotl", model, "--out", str(scene.folder / "exported")],
        "export_gguf": ["export", "gguf", model, "--out", str(scene.folder / "exported.gguf")],
        "plan": ["plan", model],
        "plan_file": ["plan", f"{model}/config.yaml"],
        "preview": ["data", "preview", f"{model}/config.yaml"],
    }


def asking_run(scene: Scene) -> Path:
    """Somebody's LoRA run, whose config says to run the code of its base model."""
    base = with_code(scene, scene.copy(scene.model, "base"))
    return edit_run(scene.copy(scene.lora), name=str(base), trust_remote_code=True)


@attacks(**{
    name: name
    for name in ("chat", "inspect", "eval", "tokens", "merge", "advise", "export", "export_gguf", "plan", "plan_file",
                 "preview")
})  # fmt: skip
def a_run_that_asks_for_its_base_models_code(scene: Scene, command: str) -> list[str]:
    return commands(scene, str(asking_run(scene)))[command]


@attacks(**{name: name for name in ("chat", "inspect", "eval", "tokens")})
def the_base_of_a_run_that_asks_for_code(scene: Scene, command: str) -> list[str]:
    return commands(scene, f"{asking_run(scene)}:0")[command]


@attacks(**{name: name for name in ("train", "dry_run", "config_file")})
def resuming_a_run_that_asks_for_code(scene: Scene, command: str) -> list[str]:
    return commands(scene, str(resumable(asking_run(scene))))[command]


@attack
def a_result_with_code_in_it(scene: Scene) -> list[str]:
    run = edit_run(scene.copy(scene.plain), trust_remote_code=True)
    with_code(scene, run / "model")
    seal(run / "model")
    return ["chat", str(run)]


@attack
def a_checkpoint_with_code_in_it(scene: Scene) -> list[str]:
    run = edit_run(scene.copy(scene.plain), trust_remote_code=True)
    with_code(scene, run / "checkpoints" / "checkpoint-2")
    seal(run / "checkpoints" / "checkpoint-2", step=2)
    return ["chat", f"{run}:2"]


@attack
def a_comparison_that_asks_for_code(scene: Scene) -> list[str]:
    base = with_code(scene, scene.copy(scene.model, "base"))
    folder = scene.folder / "comparison"
    folder.mkdir()
    content = {
        "objectives": ["nll"], "model": {"name": str(base), "trust_remote_code": True}, "train": {"max_steps": 1},
        "regimes": {"weak": {"data": {"train": [{"path": str(scene.data)}]}, "tokens": [{"path": str(scene.data)}]}},
    }  # fmt: skip
    (folder / "comparison.yaml").write_text(yaml.safe_dump(content))
    return ["compare", "run", str(folder)]


@attack
def a_model_folder_with_code(scene: Scene) -> list[str]:
    return ["chat", str(with_code(scene, scene.copy(scene.model)))]


@attack
def a_tokenizer_with_code(scene: Scene) -> list[str]:
    folder = scene.copy(scene.model)
    (folder / "evil.py").write_text(
        scene.python + "from transformers import PreTrainedTokenizerFast\nclass T(PreTrainedTokenizerFast):\n    pass\n"
    )
    edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "evil.T"]}, tokenizer_class="T")
    return ["chat", str(folder)]


@attack
def generation_with_code(scene: Scene) -> list[str]:
    folder = scene.copy(scene.model)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(scene.python + "def generate(model, **options): ...\n")
    return ["chat", str(folder)]


@attacks(
    megatron={"megatron_config": {"a": 1}, "megatron_core": "evil"},
    auto_mapping={"auto_mapping": {"parent_library": "evil", "base_model_class": "A"}, "task_type": None},
)
def an_adapter_that_names_a_module(scene: Scene, keys: dict[str, Any]) -> list[str]:
    (scene.folder / "evil.py").write_text(scene.python)
    run = scene.copy(scene.lora)
    edit_json(run / "model" / "adapter_config.json", **keys)
    seal(run / "model")
    return ["chat", str(run)]


# --- pickles ----------------------------------------------------------------------------------------------------------


class Bomb:
    def __init__(self, command: str):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def write_pickle(scene: Scene, path: Path) -> None:
    """As torch.save writes it."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Bomb(scene.shell), 2))
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")


@attacks(bin="pytorch_model.bin", pt="model.pt", pth="consolidated.00.pth")
def pickled_weights(scene: Scene, name: str) -> list[str]:
    folder = scene.copy(scene.model)
    (folder / "model.safetensors").unlink()
    write_pickle(scene, folder / name)
    return ["chat", str(folder)]


@attack
def a_pickle_named_safetensors(scene: Scene) -> list[str]:
    folder = scene.copy(scene.model)
    write_pickle(scene, folder / "model.safetensors")
    return ["chat", str(folder)]


@attack
def a_pickle_named_gguf(scene: Scene) -> list[str]:
    write_pickle(scene, scene.folder / "model.gguf")
    return ["chat", str(scene.folder / "model.gguf")]


@attack
def an_index_that_names_a_pickle(scene: Scene) -> list[str]:
    folder = scene.copy(scene.model)
    names = names_in(folder)
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    write_pickle(scene, folder / "weights.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "weights.bin")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return ["chat", str(folder)]


@attack
def an_index_that_leaves_the_folder(scene: Scene) -> list[str]:
    folder = scene.copy(scene.model)
    names = names_in(folder)
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    write_pickle(scene, scene.folder / "outside.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../outside.bin")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return ["chat", str(folder)]


def names_in(folder: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return list(file.keys())


@attack
def a_pickled_adapter(scene: Scene) -> list[str]:
    run = scene.copy(scene.lora)
    (run / "model" / "adapter_model.safetensors").unlink()
    write_pickle(scene, run / "model" / "adapter_model.bin")
    seal(run / "model")
    return ["chat", str(run)]


@attacks(optimizer="optimizer.pt", scheduler="scheduler.pt", random="rng_state.pth", arguments="training_args.bin")
def a_pickle_in_a_resealed_checkpoint(scene: Scene, name: str) -> list[str]:
    run = resumable(scene.copy(scene.plain))
    folder = run / "checkpoints" / "checkpoint-2"
    write_pickle(scene, folder / name)
    seal(folder, step=2)
    return ["train", str(run)]


# --- YAML -------------------------------------------------------------------------------------------------------------

TAGS = {
    "apply": "!!python/object/apply:os.system [{shell!r}]",
    "new": "!!python/object/new:os.system [{shell!r}]",
    "module": "!!python/module:evil",
    "name": "!!python/name:evil.main",
    "object": "!!python/object:evil.A {{}}",
}


@attacks(**TAGS)
def a_tag_in_a_config(scene: Scene, text: str) -> list[str]:
    (scene.folder / "evil.py").write_text(scene.python)
    path = scene.folder / "run.yaml"
    path.write_text(f"run: {text.format(shell=scene.shell)}\n")
    return ["train", str(path)]


@attack
def a_tag_in_a_runs_config(scene: Scene) -> list[str]:
    run = scene.copy(scene.plain)
    (run / "config.yaml").write_text(f"objective: {TAGS['apply'].format(shell=scene.shell)}\n")
    return ["runs", str(scene.folder)]


@attack
def a_tag_in_an_override(scene: Scene) -> list[str]:
    return ["train", str(scene.config()), "--set", f"run={TAGS['apply'].format(shell=scene.shell)}"]


@attack
def a_tag_in_a_task(scene: Scene) -> list[str]:
    path = scene.folder / "task.yaml"
    path.write_text(f"name: {TAGS['apply'].format(shell=scene.shell)}\n")
    return ["eval", "run", str(scene.model), "--task-file", str(path)]


@attack
def a_tag_in_a_comparison(scene: Scene) -> list[str]:
    path = scene.folder / "compare.yaml"
    path.write_text(f"folder: {TAGS['apply'].format(shell=scene.shell)}\n")
    return ["compare", "run", str(path)]


LAUGHS = "\n".join(["a0: &a0 [x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30))])


@attacks(aliases=LAUGHS, itself="run: &a [*a]", deep="run: " + "[" * 100_000, keys="? " * 50_000)
def a_config_that_explodes(scene: Scene, text: str) -> list[str]:
    path = scene.folder / "run.yaml"
    path.write_text(text)
    return ["train", str(path)]


# --- templates --------------------------------------------------------------------------------------------------------

JINJA = {
    "globals": "{{{{ cycler.__init__.__globals__.os.system({shell!r}) }}}}",
    "lipsum": "{{{{ lipsum.__globals__['os'].system({shell!r}) }}}}",
    "functions": "{{{{ raise_exception.__globals__['__builtins__']['__import__']('os').system({shell!r}) }}}}",
    "clock": "{{{{ strftime_now.__globals__['datetime'].sys.modules['os'].system({shell!r}) }}}}",
    "subclasses": "{{% for c in ''.__class__.__mro__[1].__subclasses__() %}}{{% if c.__name__ == 'Popen' %}}"
    "{{{{ c({shell!r}, shell=True) }}}}{{% endif %}}{{% endfor %}}",
    "attribute": "{{{{ (messages|attr('__class__')|attr('__base__')).__subclasses__() }}}}",
    "format": "{{{{ '{{0.__class__.__init__.__globals__}}'.format(cycler) }}}}",
    "loader": "{{{{ self._TemplateReference__context.environment.from_string('x').module }}}}",
    "include": "{{% include '/etc/passwd' %}}",
    "import": "{{% import 'evil.py' as evil %}}",
}


@attacks(**JINJA)
def a_template(scene: Scene, text: str) -> list[str]:
    folder = scene.copy(scene.model)
    template = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}" + text.format(shell=scene.shell)
    (folder / "chat_template.jinja").write_text(template)
    return ["inspect", str(folder), str(scene.data)]


# --- programs that a repository names ---------------------------------------------------------------------------------

GIT = {
    "fsmonitor": "[core]\n\tfsmonitor = {shell}\n",
    "filter": '[filter "x"]\n\tclean = {shell}\n\tsmudge = {shell}\n\trequired = true\n',
    "pager": "[core]\n\tpager = {shell}\n\teditor = {shell}\n\tsshCommand = {shell}\n",
    "diff": "[diff]\n\texternal = {shell}\n",
}


def repository(scene: Scene, config: str) -> list[str]:
    git = scene.folder / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "objects").mkdir()
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "refs" / "heads" / "main").write_text("0" * 39 + "1\n")
    (git / "config").write_text("[core]\n\trepositoryformatversion = 0\n" + config)
    (scene.folder / ".gitattributes").write_text("* filter=x diff=x\n")
    return ["train", str(scene.config())]


@attacks(**GIT)
def the_working_folders_git(scene: Scene, config: str) -> list[str]:
    return repository(scene, config.format(shell=scene.shell))


@attack
def a_git_on_the_path(scene: Scene) -> list[str]:
    program = scene.folder / "bin" / "git"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{scene.shell}\n")
    program.chmod(0o755)
    os.environ["PATH"] = f"{program.parent}:{os.environ['PATH']}"  # the fixture puts it back
    return repository(scene, "")


# --- links ------------------------------------------------------------------------------------------------------------


@attacks(runs="runs", train="train")
def a_lock_that_is_a_link(scene: Scene, command: str) -> list[str]:
    run = resumable(scene.copy(scene.plain))
    (run / ".lock").unlink(missing_ok=True)
    (run / ".lock").symlink_to(scene.precious)
    return ["runs", str(scene.folder)] if command == "runs" else ["train", str(run)]


@attacks(
    status=".status.json.writing", data=".data.json.writing", metrics=".metrics.jsonl.writing", records="metrics.jsonl",
    facts="data.json", state="status.json", model="model", saving="checkpoints/.saving-2",
)  # fmt: skip
def a_link_where_a_run_writes(scene: Scene, name: str) -> list[str]:
    run = resumable(scene.copy(scene.plain))
    shutil.rmtree(run / "checkpoints" / "checkpoint-2")
    place = run / name
    place.unlink(missing_ok=True)
    place.symlink_to(scene.precious.parent if name in ("model", "checkpoints/.saving-2") else scene.precious)
    return ["train", str(run)]


@attack
def a_checkpoint_that_is_a_link(scene: Scene) -> list[str]:
    run = resumable(scene.copy(scene.plain))
    (run / "checkpoints" / "checkpoint-3").symlink_to(scene.precious.parent)
    return ["train", str(run)]


@attack
def a_regime_outside_its_comparison(scene: Scene) -> list[str]:
    content = {
        "folder": str(scene.folder / "comparison"), "objectives": ["nll"], "model": {"name": str(scene.model)},
        "regimes": {"..": {"data": {"train": [{"path": str(scene.data)}]}, "tokens": [{"path": str(scene.data)}]}},
    }  # fmt: skip
    path = scene.folder / "compare.yaml"
    path.write_text(yaml.safe_dump(content))
    return ["compare", "run", str(path)]


# --- JSON -------------------------------------------------------------------------------------------------------------


@attacks(
    status="status.json", metrics="metrics.jsonl", data="data.json", state="checkpoints/checkpoint-2/trainer_state.json"
)
def deep_json_in_a_run(scene: Scene, name: str) -> list[str]:
    run = resumable(scene.copy(scene.plain))
    (run / name).write_text('{"a":' * 100_000)
    if "/" in name:
        seal(run / "checkpoints" / "checkpoint-2", step=2)
    return ["train", str(run)]


@attacks(
    config="config.json",
    tokenizer="tokenizer.json",
    settings="tokenizer_config.json",
    generation="generation_config.json",
)
def deep_json_in_a_model(scene: Scene, name: str) -> list[str]:
    folder = scene.copy(scene.model)
    (folder / name).write_text("[" * 100_000)
    return ["chat", str(folder)]


# --- the tests --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory, make_config) -> tuple[Path, Path]:
    """A LoRA run and a plain one, of two steps."""
    folder = tmp_path_factory.mktemp("runs")
    settings = {"train.max_steps": 2, "train.save_steps": 1}
    with open(os.devnull, "w") as nowhere:
        for name, more in (("lora", {"model.lora": {"r": 4}}), ("plain", {})):
            train_run(make_config(folder / name, {**settings, **more}), Console(file=nowhere))
    return folder / "lora", folder / "plain"


@pytest.fixture
def scene(tmp_path, monkeypatch, trained, tiny_model, chat_file) -> Scene:
    precious = tmp_path / "precious" / "thesis.tex"
    precious.parent.mkdir()
    precious.write_text("years of work")
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(chat_file.read_text().splitlines(keepends=True)[:4]))
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))  # as `python -m deftune` has it
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setenv("DEFTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 1 + 2?\n"))
    return Scene(folder, tiny_model, data, *trained, precious)


def test_more_than_40_attacks():
    """The number is a figure of the scoreboard: `pytest -k test_attack --collect-only -q` lists them."""
    print(f"{len(ATTACKS)} attack files and folders")
    assert len(ATTACKS) >= 80


@pytest.mark.parametrize("name", ATTACKS)
def test_attack(scene, name, capsys):
    arguments = ATTACKS[name](scene)
    code = main(arguments)
    output = capsys.readouterr()
    assert not scene.mark.exists(), f"executed: {output}"
    assert scene.precious.read_text() == "years of work"
    assert [path.name for path in scene.precious.parent.iterdir()] == ["thesis.tex"]
    assert code in (0, 2)
    if code == 2:
        errors = [line for line in output.err.splitlines() if line.startswith("deftune: ")]
        assert len(errors) == 1 and "Traceback" not in output.err


@pytest.mark.parametrize(
    "command",
    ["chat", "inspect", "eval", "tokens", "merge", "train", "advise", "export", "export_gguf", "plan", "preview"],
)
def test_the_code_runs_when_the_user_says_so(scene, command, capsys):
    """What the attacks above would have done: the same folder and command, with the flag."""
    run = asking_run(scene)
    if command == "train":
        resumable(run)
    code = main([*commands(scene, str(run))[command], "--trust-remote-code"])
    assert scene.mark.exists(), capsys.readouterr()
    assert code in (0, 2)


def test_a_config_of_ones_own_says_so(scene, capsys):
    base = with_code(scene, scene.copy(scene.model, "base"))
    config = scene.config(model={"name": str(base), "trust_remote_code": True})
    assert main(["train", str(config), "--dry-run"]) == 0, capsys.readouterr()
    assert scene.mark.exists()


@pytest.mark.parametrize("command", ["chat", "train", "export", "plan", "preview"])
def test_what_the_run_asks_for_is_said(scene, command, capsys):
    run = asking_run(scene)
    assert main(commands(scene, str(resumable(run) if command == "train" else run))[command]) == 2
    err = capsys.readouterr().err
    assert "read that code, and pass --trust-remote-code if you trust it" in err
    assert f"the run {'was trained with' if command == 'chat' else 'asks to execute'} the code of " in err


def test_nothing_that_executes_is_in_the_package():
    """No eval, exec, yaml.load or torch.load; no shell; no pickle but in the pipes between a process and its workers.

    The attacks of `deftune selftest` write pickles, and read none. torch's sharded checkpoints are pickled:
    `training/sharded.py` alone reads them, with a list of allowed classes (`test_sharded.py`).
    """
    import ast

    import deftune

    calls = {"eval", "exec", "compile", "__import__", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.load",
             "os.system", "os.popen", "pickle.load", "pickle.loads", "pickle.Unpickler"}  # fmt: skip
    home = Path(deftune.__file__).parent
    pipes = {("data/parallel.py", "process.stdout"), ("data/parallel.py", "source")}
    pickling = {name for name, _ in pipes} | {"selftest/attacks.py", "training/sharded.py"}
    for path in home.rglob("*.py"):
        name = path.relative_to(home).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                forbidden = {"marshal", "shelve", "dill", "cloudpickle"} | (set() if name in pickling else {"pickle"})
                if name != "training/sharded.py":
                    forbidden |= {"torch.distributed.checkpoint", "torch.distributed.checkpoint.state_dict_loader"}
                assert not forbidden & set(names), path
            elif isinstance(node, ast.Call):
                called, first = ast.unparse(node.func), ast.unparse(node.args[0]) if node.args else ""
                if called == "pickle.load" and (name, first) in pipes:
                    continue
                if called == "torch.load" and any(ast.unparse(k) == "weights_only=True" for k in node.keywords):
                    continue
                assert called not in calls, f"{path}:{node.lineno}"
                assert not any(keyword.arg == "shell" for keyword in node.keywords), f"{path}:{node.lineno}"


def test_weights_of_a_good_folder_are_loaded_in_the_same_scene(scene, capsys):
    """The scene itself refuses nothing."""
    assert main(["chat", str(scene.plain), "--max-new-tokens", "4"]) == 0
    assert main(["chat", str(scene.lora), "--max-new-tokens", "4"]) == 0
    assert not scene.mark.exists()
