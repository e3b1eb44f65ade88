"""The plain loop that every stack is compared with goes the way of `deftune train`."""

import json

import pytest
from stack_runs import CLIP, LEARNING_RATE, OBJECTIVES, STEPS, assert_trains, make_files

COLUMNS = ("input_ids", "attention_mask", "position_ids", "labels")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize("spec", [OBJECTIVES[name] for name in ("nll", "floor", "eos", "warmup")])
def test_deftune_train_is_the_plain_loop(spec, files, tmp_path, monkeypatch):
    pytest.importorskip("trl", minversion="1.15", reason="`deftune train` needs TRL 1.15, and a stack pins another")
    from rich.console import Console
    from safetensors.torch import load_file
    from transformers import Trainer

    from deftune.artifacts.config import RunConfig
    from deftune.selftest.tiny import run_content
    from deftune.training.train import train_run

    steps, original = [], Trainer.get_batch_samples

    def get_batch_samples(self, *args):
        batches, num_items = original(self, *args)
        if batches:
            steps.append([{name: batch[name].clone() for name in COLUMNS if name in batch} for batch in batches])
        return batches, num_items

    monkeypatch.setattr(Trainer, "get_batch_samples", get_batch_samples)
    model, rows = files
    options = {"batch_size": 4, "micro_batch_size": 2, "max_steps": STEPS, "learning_rate": LEARNING_RATE,
               "schedule": "constant", "warmup_ratio": 0.0, "weight_decay": 0.0, "betas": [0.9, 0.999], "clip": CLIP,
               "save_steps": 1000}  # fmt: skip
    content = run_content(tmp_path / "run", model, rows, {f"train.{name}": value for name, value in options.items()})
    with (tmp_path / "out.txt").open("w") as out:
        train_run(RunConfig.model_validate({**content, "objective": spec}), Console(file=out))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [record["loss"] for record in map(json.loads, lines) if "loss" in record]
    weights = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert_trains(model, {"steps": steps, "losses": losses, "weights": weights}, spec)
