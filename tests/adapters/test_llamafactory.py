"""LLaMA-Factory with an objective goes the way of a plain loop."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from stack_runs import (
    LEARNING_RATE,
    OBJECTIVES,
    STEPS,
    TRAJECTORY,
    assert_trains,
    launch,
    make_files,
    needs_stack,
    read_run,
)

pytestmark = needs_stack("llamafactory")
ARGUMENTS = {
    "stage": "sft", "do_train": True, "finetuning_type": "full", "dataset": "rows", "template": "qwen",
    "cutoff_len": 128, "disable_shuffling": True, "per_device_train_batch_size": 2, "learning_rate": LEARNING_RATE,
    "lr_scheduler_type": "constant", "max_steps": STEPS, "logging_steps": 1, "report_to": "none",
    "save_strategy": "no", "overwrite_cache": True, "weight_decay": 0.0, "use_cpu": True, "optim": "adamw_torch",
}  # fmt: skip
COLUMNS = {
    "formatting": "sharegpt", "columns": {"messages": "messages"},
    "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llamafactory")
    model, rows = make_files(folder)
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": rows.name, **COLUMNS}}))
    return folder, model


def arguments(files, name: str, **more) -> list[str]:
    """x.yaml as a user writes it, and the command's arguments."""
    folder, model = files
    content = {**ARGUMENTS, "model_name_or_path": str(model), "dataset_dir": str(folder),
               "output_dir": str(folder / "out" / name), **more}  # fmt: skip
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(content))  # JSON is YAML
    return [str(path)]


@pytest.fixture(scope="module")
def trained(files):
    """Every objective with two micro-batches a step, and one that supervises the prompts too."""
    runs = {name: arguments(files, name, deft_objective=spec, gradient_accumulation_steps=2)
            for name, spec in OBJECTIVES.items()}  # fmt: skip
    runs["prompts"] = arguments(files, "prompts", deft_objective="deft", gradient_accumulation_steps=2,
                                train_on_prompt=True, template="empty")  # fmt: skip
    runs["lora"] = arguments(files, "lora", deft_objective="deft", gradient_accumulation_steps=2,
                             finetuning_type="lora", lora_rank=4, lora_dropout=0.0)  # fmt: skip
    done = launch(files[0], "llamafactory", runs)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "deftune: LLaMA-Factory trains `deft | floor(0.2)`: loss" in done.stdout, done.stdout[-4000:]
    return files[0], files[1]


@pytest.mark.parametrize("name", [*OBJECTIVES, "prompts"])
def test_trains_as_a_plain_loop(name, trained):
    folder, model = trained
    run = read_run(folder, name)
    assert all(len(step) == 2 for step in run["steps"])
    other = {"nll": None, "floor": "deft", "prompts": "deft"}.get(name, "nll")
    assert_trains(model, run, OBJECTIVES.get(name, "deft"), read_run(folder, other) if other else None)


def test_lora_starts_at_the_same_loss(trained):
    """An adapter adds nothing before its first update."""
    lora, full = (read_run(trained[0], name)["losses"] for name in ("lora", "deft"))
    assert abs(lora[0] - full[0]) <= TRAJECTORY * full[0]
    epoch = 15  # steps: 60 rows, in the same order every time, 4 a step
    assert len(lora) == STEPS and all(after < before for before, after in zip(lora, lora[epoch:]))


def test_two_ranks_change_nothing(files):
    folder, model = files
    done = launch(
        folder, "llamafactory",
        {"ranks": arguments(files, "ranks", deft_objective="deft", gradient_accumulation_steps=2)}, ranks=2,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert done.stdout.count("threads of gloo: 0") == 2, "they may abort the process while Python exits"
    run = read_run(folder, "ranks", ranks=2)
    assert {len(step) for step in run["steps"]} == {4, 2}  # the last step of an epoch is shorter
    assert_trains(model, run, "deft")


def test_the_command_starts_torchrun_as_llamafactory_does(files):
    (path,) = arguments(files, "command", deft_objective="deft", max_steps=1)
    environment = {**os.environ, "FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2", "CUDA_VISIBLE_DEVICES": "",
                   "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "deftune.adapters.llamafactory", "train", path, "deft_objective=linear"],
        env=environment, cwd=files[0], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert "Initializing 2 distributed tasks" in done.stdout
    assert done.stdout.count("deftune: LLaMA-Factory trains `linear`: loss") == 1


@pytest.mark.parametrize(
    "name, message",
    [("bypass", "the trainer did not call the loss"), ("swapped", "the trainer used the loss ")],
)
def test_nll_in_place_of_the_objective_stops_before_the_first_update(files, name, message):
    """The trainer takes the model's own NLL, or the adapter computes NLL."""
    done = launch(files[0], "llamafactory", {name: arguments(files, name, deft_objective="deft")})
    assert done.returncode != 0
    assert f"LLaMA-Factory: `deft` is not what is trained: {message}" in done.stdout, done.stdout[-4000:]
    assert not (files[0] / f"{name}.0.pt").exists()  # written after the training


@pytest.mark.parametrize(
    "more, message",
    [
        ({"deft_objective": "deft", "use_dft_loss": True}, "use_dft_loss cannot be combined with deft_objective"),
        ({"deft_objective": "deft", "use_eaft_loss": True}, r"eaft\(norm=3\)"),
        ({"deft_objective": "deft", "stage": "pt"}, "stage=pt cannot be combined"),
        ({"deft_objective": "mile"}, "`mile` depends on the whole optimizer step"),
        ({"deft_objective": "defft"}, "Did you mean 'deft'"),
        ({}, "deft_objective is missing"),
    ],
)
def test_wrong_combinations_are_refused(files, more, message, monkeypatch):
    from llamafactory.hparams import parser
    from llamafactory.train.sft import workflow

    from deftune.adapters.llamafactory import install

    monkeypatch.setattr(parser, "_TRAIN_ARGS", list(parser._TRAIN_ARGS))
    monkeypatch.setattr(workflow, "CustomSeq2SeqTrainer", workflow.CustomSeq2SeqTrainer)
    install()
    with pytest.raises(ValueError, match=message):
        parser.get_train_args({**ARGUMENTS, "model_name_or_path": str(files[1]), "output_dir": "out", **more})
