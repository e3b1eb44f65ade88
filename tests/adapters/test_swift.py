"""ms-swift with an objective goes the way of a plain loop."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from stack_runs import LEARNING_RATE, OBJECTIVES, STEPS, assert_trains, launch, make_files, needs_stack, read_run

pytestmark = needs_stack("swift")
ARGUMENTS = {
    "loss_type": "deft", "model_type": "qwen2", "template": "chatml", "tuner_type": "full", "torch_dtype": "float32",
    "max_length": 128, "dataset_shuffle": "false", "train_dataloader_shuffle": "false",
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": LEARNING_RATE,
    "lr_scheduler_type": "constant", "warmup_ratio": 0, "max_steps": STEPS, "logging_steps": 1, "report_to": "none",
    "save_strategy": "no", "weight_decay": 0, "adam_beta2": 0.999, "use_cpu": "true", "fp16": "false",
    "bf16": "false", "optim": "adamw_torch", "check_model": "false", "add_version": "false",
    "dataloader_num_workers": 0, "gradient_checkpointing": "false", "max_grad_norm": 1.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def plugin():
    """The path that the documented command prints."""
    return subprocess.run(
        [sys.executable, "-m", "deftune.adapters.swift"], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture(scope="module")
def files(tmp_path_factory, plugin):
    folder = tmp_path_factory.mktemp("swift")
    model, rows = make_files(folder)
    weighted = [json.loads(line) for line in rows.read_text().splitlines()]
    for number, row in enumerate(weighted):
        row["messages"][-1]["loss_scale"] = 0.5 + number % 3
    (folder / "weighted.jsonl").write_text("".join(json.dumps(row) + "\n" for row in weighted))
    return folder, model


def arguments(files, plugin, name: str, spec: str, **more) -> list[str]:
    folder, model = files
    content = {**ARGUMENTS, "external_plugins": plugin, "model": model, "dataset": folder / "rows.jsonl",
               "output_dir": folder / "out" / name, **more}  # fmt: skip
    return [spec, *(str(part) for key, value in content.items() for part in (f"--{key}", value))]


@pytest.fixture(scope="module")
def trained(files, plugin):
    """Every objective with two micro-batches a step; one with weights of tokens, and one with a single row a batch."""
    folder, model = files
    runs = {name: arguments(files, plugin, name, spec) for name, spec in OBJECTIVES.items()}
    runs["weighted"] = arguments(
        files, plugin, "weighted", "deft", dataset=folder / "weighted.jsonl", is_binary_loss_scale="false"
    )
    runs["single"] = arguments(files, plugin, "single", "deft", per_device_train_batch_size=1)
    done = launch(folder, "swift", runs)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "deftune: ms-swift trains `deft | floor(0.2)`: loss" in done.stdout, done.stdout[-4000:]
    return folder, model


@pytest.mark.parametrize("name", [*OBJECTIVES, "weighted", "single"])
def test_trains_as_a_plain_loop(name, trained):
    folder, model = trained
    run = read_run(folder, name)
    assert all(len(step) == 2 for step in run["steps"])
    scales = [batch["loss_scale"].flatten() for batch in run["steps"][0] if "loss_scale" in batch]
    assert (name == "weighted") == bool(scales and ((torch.cat(scales) != 0) & (torch.cat(scales) != 1)).any())
    other = {"nll": None, "floor": "deft", "weighted": "deft", "single": "deft"}.get(name, "nll")
    assert_trains(model, run, OBJECTIVES.get(name, "deft"), read_run(folder, other) if other else None)


def test_two_ranks_change_nothing(files, plugin):
    folder, model = files
    done = launch(folder, "swift", {"ranks": arguments(files, plugin, "ranks", "deft")}, ranks=2)
    assert done.returncode == 0, done.stdout[-4000:]
    run = read_run(folder, "ranks", ranks=2)
    assert max(len(step) for step in run["steps"]) == 4
    assert_trains(model, run, "deft")


@pytest.mark.parametrize(
    "more, message",
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor cannot be combined with the objective `deft`"),
        ({"enable_dft_loss": "true"}, "enable_dft_loss (it is the objective dft) cannot be combined with --loss_type"),
    ],
)
def test_a_second_loss_is_refused(files, plugin, more, message):
    done = launch(files[0], "swift", {"second": arguments(files, plugin, "second", "deft", **more)})
    assert done.returncode != 0
    assert f"ms-swift: {message}" in done.stdout, done.stdout[-4000:]


def trainer_with(**more):
    meta = SimpleNamespace(stop_words=[])
    template = SimpleNamespace(sequence_parallel_size=1, template_meta=meta, tokenizer=None)
    return SimpleNamespace(**{"template": template, "task_type": "causal_lm", **more})


@pytest.mark.parametrize(
    "trainer, args, spec, message",
    [
        (type("Mega", (type("BaseMegatronTrainer", (), {}),), {})(), {}, "deft", "Megatron cannot be combined with"),
        (trainer_with(template=SimpleNamespace(sequence_parallel_size=2)), {}, "deft", "sequence_parallel_size > 1 ca"),
        (trainer_with(task_type="seq_cls"), {}, "deft", "a task that is not causal_lm cannot be combined"),
        (trainer_with(model_info=SimpleNamespace(is_moe_model=True)), {}, "deft", "router_aux_loss_coef > 0 cannot be"),
        (trainer_with(), {"enable_dft_loss": True}, "deft", r"enable_dft_loss \(it is the objective dft\) cannot be"),
        (trainer_with(), {}, "mile", "`mile` depends on the whole optimizer step"),
        (trainer_with(), {}, "defft", "Did you mean 'deft'"),
    ],
)
def test_wrong_combinations_are_refused(trainer, args, spec, message, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # ms-swift sets it when it is imported
    monkeypatch.setenv("DEFTUNE_OBJECTIVE", spec)
    from deftune.adapters.swift.deft_plugin import deft_loss

    with pytest.raises(ValueError, match=message):
        deft_loss(SimpleNamespace(**{"router_aux_loss_coef": 0.1, "tuner_backend": "peft", **args}), trainer)


@pytest.mark.parametrize(
    "name, message",
    [("bypass", "the trainer did not call the loss"), ("swapped", "the trainer used the loss ")],
)
def test_nll_in_place_of_the_objective_stops_before_the_first_update(files, plugin, name, message):
    """The trainer takes the model's own NLL, or the adapter computes NLL."""
    done = launch(files[0], "swift", {name: arguments(files, plugin, name, "deft")})
    assert done.returncode != 0
    assert f"ms-swift: `deft` is not what is trained: {message}" in done.stdout, done.stdout[-4000:]
    assert not (files[0] / f"{name}.0.pt").exists()  # written after the training
