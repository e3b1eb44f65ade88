"""`deftune export`: the files of other stacks, and the steps that they take."""

import dataclasses
import json
import os
import shlex
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from stack_runs import TRAJECTORY, WEIGHTS, distance

import deftune
from deftune.selftest import tiny

pytest.importorskip("trl", minversion="1.15", reason="the exported run is compared with `deftune train`")

from safetensors.torch import load_file

from deftune.adapters.export import STACKS, Exported, export_prepared, export_run
from deftune.adapters.export_job import permuted
from deftune.adapters.verl_rows import TokenRows
from deftune.artifacts.config import ConfigError, Lora, Model, RunConfig, Train
from deftune.cli import main
from deftune.training.preparation import prepare

HERE, SOURCE = Path(__file__).parent, Path(deftune.__file__).parents[1]
CHANGES = {"train.max_steps": 5, "train.epochs": 1, "train.warmup_ratio": 0.4, "train.save_steps": 1000}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    text = [message["content"] for row in tiny.conversations(60) for message in row["messages"]]
    tokenizer = tiny.make_tokenizer([*text, "user\nassistant\nsystem\n"], size=320)
    tiny.save_model(folder / "model", tokenizer, gain=20.0)
    return folder, tiny.save_conversations(folder / "rows.jsonl")


def make_config(files, run: Path, changes=None) -> RunConfig:
    content = tiny.run_content(run, files[0] / "model", files[1], {**CHANGES, **(changes or {})})
    return RunConfig.model_validate(content)


@pytest.fixture(scope="module")
def prepared(files):
    return prepare(make_config(files, files[0] / "run", {"data.holdout": 0.1}), lambda _: None)


@pytest.fixture(scope="module")
def exported(prepared, tmp_path_factory):
    """``exported(stack)``: what the export of the config as it stands says, and its folder."""

    @cache
    def make(stack: str):
        folder = tmp_path_factory.mktemp("exported") / stack
        return export_prepared(prepared, stack, folder), folder

    return make


def read(folder: Path, stack: str) -> dict:
    return yaml.safe_load((folder / f"{stack}.yaml").read_text())


def flat(content: dict) -> dict:
    """Nested keys, joined by points."""
    found = {}
    for name, value in content.items():
        found |= {f"{name}.{k}": v for k, v in flat(value).items()} if isinstance(value, dict) else {name: value}
    return found


HF = {
    "learning_rate": 1e-3, "max_steps": 5, "warmup_steps": 2, "weight_decay": 0.01, "adam_beta1": 0.9,
    "adam_beta2": 0.95, "max_grad_norm": 1.0, "seed": 1, "gradient_accumulation_steps": 2, "logging_steps": 1,
    "save_steps": 1000, "save_total_limit": 2,
}  # fmt: skip
TRAINER = {
    **HF, "data_seed": 1, "per_device_train_batch_size": 4, "lr_scheduler_type": "cosine", "num_train_epochs": 1.0,
    "optim": "adamw_torch_fused", "bf16": False,
}  # fmt: skip
GOLDEN = {
    "llamafactory": {
        **TRAINER, "deft_objective": "deft", "stage": "sft", "do_train": True, "finetuning_type": "full",
        "template": "empty", "cutoff_len": 128, "disable_gradient_checkpointing": True, "do_eval": True,
    },
    "swift": {
        **TRAINER, "loss_type": "deft", "ENV.DEFTUNE_OBJECTIVE": "deft", "template": "deft_tokens",
        "tuner_type": "full", "torch_dtype": "float32", "max_length": 128, "model_type": "llama",
        "gradient_checkpointing": False,
    },
    "axolotl": {
        **HF, "plugins": ["deftune.adapters.axolotl.DeftPlugin"], "deft_objective": "deft", "micro_batch_size": 4,
        "lr_scheduler": "cosine", "num_epochs": 1.0, "optimizer": "adamw_torch_fused", "bf16": False, "fp16": False,
        "sequence_len": 128, "sample_packing": False, "shuffle_merged_datasets": False,
        "gradient_checkpointing": False,
    },
    "verl": {
        "deft.objective": "deft", "data.train_batch_size": 8, "data.micro_batch_size_per_gpu": 4,
        "data.max_length": 128, "data.use_dynamic_bsz": False, "optim.lr": 1e-3, "optim.lr_scheduler_type": "cosine",
        "optim.lr_warmup_steps": 2, "optim.weight_decay": 0.01, "optim.betas": [0.9, 0.95], "optim.clip_grad": 1.0,
        "trainer.total_training_steps": 5, "trainer.total_epochs": 1, "trainer.save_freq": 1000,
        "trainer.max_ckpt_to_keep": 2, "engine.strategy": "fsdp2", "engine.mixed_precision.param_dtype": "fp32",
        "engine.seed": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("stack", [*STACKS])
def test_a_models_folder_is_named_by_its_absolute_path(stack, prepared, tmp_path, monkeypatch):
    """The stack may be started in another folder."""
    monkeypatch.chdir(Path(prepared.source).parent)
    relative = dataclasses.replace(prepared, source=Path(prepared.source).name)
    export_prepared(relative, stack, tmp_path / "out")
    assert str(Path(prepared.source).absolute()) in flat(read(tmp_path / "out", stack)).values()


@pytest.mark.parametrize("stack", [*STACKS])
def test_the_file_has_the_run(stack, prepared, tmp_path):
    done = export_prepared(prepared, stack, tmp_path / "out")
    found = flat(read(tmp_path / "out", stack))
    assert {name: found.get(name) for name in GOLDEN[stack]} == GOLDEN[stack]
    assert prepared.source in found.values() or found.get("model.path") == prepared.source
    assert all(path.exists() for path in done.files)
    recorded = json.loads((tmp_path / "out" / "export.json").read_text())
    assert recorded == {"stack": stack, "command": done.command, "notes": done.notes}
    assert f"{stack}.yaml" in done.command or f"--config-name {stack}" in done.command


@pytest.mark.parametrize("stack", [*STACKS])
def test_the_rows_are_the_runs_tokens_and_labels(stack, prepared, tmp_path):
    import datasets

    export_prepared(prepared, stack, tmp_path)
    expected = [(list(row.input_ids), list(row.labels)) for row in prepared.train.examples]
    if stack == "llamafactory":
        rows = datasets.load_from_disk(str(tmp_path / "tokens"))["train"]
        found = list(zip(rows["input_ids"], rows["labels"]))
    elif stack == "swift":
        rows = datasets.load_from_disk(str(tmp_path / "train"))
        found = list(zip(rows["deft_input_ids"], rows["deft_labels"]))
    elif stack == "axolotl":
        rows = datasets.Dataset.from_parquet(str(tmp_path / "train.parquet"), cache_dir=str(tmp_path / "cache"))
        found = list(zip(rows["input_ids"], rows["labels"]))
    else:
        rows = TokenRows(str(tmp_path / "train.parquet"), None, {"pad_mode": "no_padding", "max_length": 128})
        found = [(row["input_ids"].tolist(), row["loss_mask"].tolist()) for row in rows]
        expected = [(ids, [int(label != -100) for label in labels]) for ids, labels in expected]
        assert sorted(found) == sorted(expected) and found != expected  # in verl's places
        return
    assert [(list(ids), list(labels)) for ids, labels in found] == expected


def test_verls_sampler_draws_the_rows_in_the_runs_order():
    from accelerate.data_loader import SeedableRandomSampler
    from torch.utils.data import DistributedSampler

    rows = list(range(53))
    places = permuted(rows, seed=7)
    drawn = [places[i] for i in DistributedSampler(places, num_replicas=1, rank=0, shuffle=True)]
    assert drawn == list(SeedableRandomSampler(rows, data_seed=7))


# a value beside the default for every key of the model's and the training's section
OTHER = {
    "model.revision": "main", "model.trust_remote_code": True, "model.lora": Lora(r=4), "train.learning_rate": 1e-4,
    "train.epochs": 0.6, "train.max_steps": 4, "train.batch_size": 16, "train.micro_batch_size": 2,
    "train.weight_decay": 0.5, "train.betas": (0.8, 0.9), "train.warmup_ratio": 0.8, "train.schedule": "constant",
    "train.clip": 0.5, "train.seed": 5, "train.precision": "bf16", "train.gradient_checkpointing": True,
    "train.compile": True, "train.attention": "math", "train.sparse": 0.5, "train.fsdp": True, "train.workers": 1,
    "train.save_steps": 7, "train.keep": 5, "train.save_at": [2], "train.eval_steps": 2, "train.best": "eval_loss",
    "train.report_to": ["wandb"], "train.push_to_hub": "org/name",
    "train.push_private": True,
}  # fmt: skip
KEYS = [f"{name}.{key}" for name, cls in (("model", Model), ("train", Train)) for key in cls.model_fields]


@pytest.mark.parametrize("stack", [*STACKS])
def test_the_former_defaults_are_exported_as_the_new_ones(stack, prepared, exported, tmp_path):
    """Runs of 0.3.0 have them written out."""
    train = prepared.config.train.model_copy(update={"weights": "float32", "compile": False})
    config = prepared.config.model_copy(update={"train": train})
    export_prepared(dataclasses.replace(prepared, config=config), stack, tmp_path / "other")
    own = json.dumps(read(tmp_path / "other", stack)).replace(str(tmp_path / "other"), str(exported(stack)[1]))
    assert json.loads(own) == read(exported(stack)[1], stack)


@pytest.mark.parametrize("stack", [*STACKS])
@pytest.mark.parametrize("key", [key for key in KEYS if key != "model.name"])
def test_no_key_is_dropped(stack, key, prepared, exported, tmp_path):
    """A changed value changes the file, adds a note, or is an error that names the key."""
    base, folder = exported(stack)
    section, name = key.split(".")
    config = prepared.config
    value = OTHER.get(key, "another value")  # a key that is new has no counterpart: it must be refused
    changed = config.model_copy(update={section: getattr(config, section).model_copy(update={name: value})})
    try:
        done = export_prepared(dataclasses.replace(prepared, config=changed), stack, tmp_path / "other")
    except ConfigError as error:
        assert f"export {stack}: {key}" in str(error)
        assert not (tmp_path / "other").exists()
        return
    before, after = read(folder, stack), read(tmp_path / "other", stack)
    own = json.loads(json.dumps(after).replace(str(tmp_path / "other"), str(folder)))
    if stack == "verl" and key == "train.fsdp":
        return  # verl shards in any case
    assert own != before or any(line.startswith(key) for line in set(done.notes) - set(base.notes))


EARLY = {"data.holdout": 0.1, "train.eval_steps": 1, "train.best": "eval_loss", "train.stop_after": 2}


@pytest.mark.parametrize(
    "stack, changes, message",
    [
        ("llamafactory", {"objective": "clip"}, "`clip` depends on the whole optimizer step"),
        ("axolotl", {"data.packing": True}, "export axolotl: data.packing: axolotl packs rows in another way"),
        ("swift", {"train.sparse": 0.1}, "export swift: train.sparse: swift has no sparse head gradients"),
        ("verl", {"train.schedule": "linear"}, "export verl: train.schedule: verl has cosine and constant"),
        ("axolotl", {"train.warmup_ratio": 0.2}, "axolotl takes two instead"),
        ("axolotl", EARLY, "export axolotl: train.best: an exported run ends with its last step; --set"),
        ("llamafactory", EARLY, "export llamafactory: train.stop_after: is not exported to llamafactory; leave it out"),
        ("torchtitan", {}, "its configs are Python modules"),
        ("lamafactory", {}, "unknown stack 'lamafactory'. Did you mean 'llamafactory'"),
        ("ggguf", {}, "unknown stack 'ggguf'. Did you mean 'gguf'? Known: verl, axolotl, llamafactory, swift, gguf"),
        ("verl", {"objective": "linear | eos(nll)", "data.template": "chatml"}, "takes its end tokens from"),
    ],
)  # fmt: skip
def test_what_a_stack_cannot_train_is_refused(stack, changes, message, files, tmp_path):
    with pytest.raises(ValueError) as error:
        export_run(make_config(files, tmp_path / "run", changes), stack, tmp_path / "out")
    assert message in str(error.value)
    assert not (tmp_path / "out").exists()


def test_ranks_divide_the_batch(files, tmp_path):
    export_run(make_config(files, tmp_path / "run"), "llamafactory", tmp_path / "out", ranks=2)
    assert read(tmp_path / "out", "llamafactory")["gradient_accumulation_steps"] == 1
    with pytest.raises(ValueError, match="cannot be 3 ranks x 4 rows"):
        export_run(make_config(files, tmp_path / "run"), "llamafactory", tmp_path / "other", ranks=3)
    with pytest.raises(ValueError, match="is not empty; name another folder"):
        export_run(make_config(files, tmp_path / "run"), "llamafactory", tmp_path / "out")


def test_the_command(files, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    config = make_config(files, tmp_path / "run", {"train.push_to_hub": "org/name"})
    path.write_text(yaml.safe_dump(json.loads(config.model_dump_json())))
    assert main(["export", "axolotl", str(path), "--out", str(tmp_path / "out"), "--set", "objective=cayley"]) == 0
    out = capsys.readouterr().out
    assert "note: train.push_to_hub: not exported" in out and f"axolotl train {tmp_path}/out/axolotl.yaml" in out
    assert read(tmp_path / "out", "axolotl")["deft_objective"] == "cayley"
    assert main(["export", "axolotl", "strong/qwen/deft", "--out", str(tmp_path / "x")]) == 2
    assert "unknown recipe" in capsys.readouterr().err


def test_the_adapter_is_the_one_that_deftune_train_begins_with(files, tmp_path):
    """The random start of `deftune train`, drawn without the model's weights; nobody else's random numbers change."""
    from deftune.artifacts.runs import Run
    from deftune.training.assembly import make_trainer

    ready = prepare(make_config(files, tmp_path / "run", {"model.lora": {"r": 4}}), lambda _: None)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    done = export_prepared(ready, "llamafactory", tmp_path / "out")
    assert torch.equal(torch.get_rng_state(), before)
    assert tmp_path / "out" / "adapter" in done.files and not any("lora" in note for note in done.notes)
    assert read(tmp_path / "out", "llamafactory")["adapter_name_or_path"] == str(tmp_path / "out" / "adapter")
    exported = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    model = make_trainer(ready, Run(tmp_path / "other"), []).model
    begun = {name.replace(".default", ""): p.detach() for name, p in model.named_parameters() if p.requires_grad}
    assert exported.keys() == begun.keys()
    assert all(torch.equal(exported[name], begun[name]) for name in begun)
    assert any(weight.abs().max() > 0 for weight in exported.values())


# --- the same steps, in the stack itself ------------------------------------------------------------------------------


def python_of(stack: str) -> str:
    """The interpreter of the stack's environment, which .ci/stacks built below $DEFTUNE_STACKS."""
    path = Path(os.environ.get("DEFTUNE_STACKS", "/nowhere"), stack, "bin", "python")
    if not path.is_file():
        pytest.skip(f"{path}: not there; .ci/stacks {stack} builds it below $DEFTUNE_STACKS")
    return str(path)


def run_exported(done: Exported, python: str, out: Path, folder: Path, ranks: int) -> None:
    """Train exported files: with the command that the export names, or with the shims that a CPU needs."""
    stack, bin = done.stack, Path(python).parent
    hidden = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "DEFTUNE"))}
    environment = {
        **hidden, "PYTHONPATH": f"{SOURCE}:{HERE}", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "DO_NOT_TRACK": "1", "PATH": f"{bin}:{os.environ['PATH']}",
    }  # fmt: skip
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    if stack == "verl":
        arguments = ["--config-path", str(out), "--config-name", "verl", "trainer.device=cpu", "trainer.logger=[file]",
                     "checkpoint.save_contents=[extra]", f"hydra.run.dir={folder}/hydra"]  # fmt: skip
        (folder / "runs.json").write_text(json.dumps([{"name": "exported", "args": arguments}]))
        environment |= {"VERL_USE_EXTERNAL_MODULES": "verl_on_cpu", "VERL_PLATFORM": "cpu",
                        "VERL_ENGINE_DEVICE": "cuda"}  # fmt: skip
        command = [*torchrun, str(HERE / "verl_on_cpu.py"), "runs.json"]
    elif stack == "axolotl":
        if (out / "adapter").exists():  # axolotl's own LoRA kernels, its default, need a GPU
            with (out / "axolotl.yaml").open("a") as file:
                file.write("lora_mlp_kernel: false\n")
        (folder / "runs.json").write_text(json.dumps({"exported": [str(out / f"{stack}.yaml")]}))
        command = [*torchrun, str(HERE / "drivers" / "recorded.py"), str(folder), stack, "exported"]
    else:
        command = ["bash", "-c", done.command]
    ended = subprocess.run(
        command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert ended.returncode == 0, f"{shlex.join(command)}\n{ended.stdout[-4000:]}"


LORA = {"model.lora": {"r": 4, "alpha": 8}}
FORMS = {"full": ({}, 1), "two ranks": ({}, 2), "LoRA": (LORA, 1), "LoRA, two ranks": (LORA, 2)}


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stack", [*STACKS])
def test_an_exported_run_takes_the_steps_of_deftune_train(stack, form, files, tmp_path):
    """Losses of the steps and last weights, against `deftune train` on one rank."""
    from rich.console import Console

    from deftune.training.train import train_run

    python = python_of(stack)
    changes, ranks = FORMS[form]
    if stack == "verl" and not changes:  # verl decays norms too, of which a note tells
        changes = {"train.weight_decay": 0.0}
    config = make_config(files, tmp_path / "run", changes)
    train_run(config, Console(quiet=True))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [record["loss"] for record in map(json.loads, lines) if "loss" in record]
    done = export_run(config, stack, tmp_path / "out", ranks=ranks)
    assert not any("lora" in note for note in done.notes)
    run_exported(done, python, tmp_path / "out", tmp_path, ranks)
    assert len(losses) == 5
    result = tmp_path / "out" / "result"
    if stack == "verl":
        error = tmp_path / "exported.error"
        assert not error.exists(), error.read_text()
        steps = [json.loads(line)["data"] for line in (tmp_path / "exported.jsonl").read_text().splitlines()]
        found = [step["train/loss"] for step in steps if "train/loss" in step]
    else:
        state = json.loads(next(result.rglob("trainer_state.json")).read_text())
        found = [record["loss"] for record in state["log_history"] if "loss" in record]
    apart = max(abs(a - b) / max(1, abs(a)) for a, b in zip(losses, found, strict=True))
    print(f"{stack}, {form}: losses differ by {apart:.1e}")
    assert apart <= TRAJECTORY
    assert max(abs(losses[0] - loss) for loss in losses[1:]) > 100 * TRAJECTORY
    if stack == "verl":
        return
    name = "adapter_model.safetensors" if "LoRA" in form else "model.safetensors"
    trained = load_file(tmp_path / "run" / "model" / name)
    start = load_file((tmp_path / "out" / "adapter" if "LoRA" in form else files[0] / "model") / name)
    place = result if (result / name).exists() else result / "checkpoint-5"
    apart = distance(trained, load_file(place / name))
    print(f"{stack}, {form}: weights differ by {apart:.1e}")
    assert apart <= WEIGHTS
    assert distance(trained, start) > 50 * WEIGHTS
