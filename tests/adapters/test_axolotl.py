"""axolotl with an objective goes the way of a plain loop."""

import json

import pytest
import transformers
from stack_runs import LEARNING_RATE, OBJECTIVES, STEPS, assert_trains, launch, make_files, needs_stack, read_run

pytestmark = needs_stack("axolotl")
CONFIG = {
    "plugins": ["deftune.adapters.axolotl.DeftPlugin"], "chat_template": "tokenizer_default", "sequence_len": 128,
    "micro_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": STEPS, "learning_rate": LEARNING_RATE,
    "lr_scheduler": "constant", "warmup_steps": 0, "optimizer": "adamw_torch", "weight_decay": 0.0,
    "max_grad_norm": 1.0, "bf16": False, "fp16": False, "tf32": False, "logging_steps": 1, "save_strategy": "no",
    "curriculum_sampling": True, "val_set_size": 0, "attn_implementation": "sdpa", "seed": 1,
    "special_tokens": {"pad_token": "<|pad|>"}, "gradient_checkpointing": False, "dataloader_num_workers": 0,
    "dataset_num_proc": 1, "sample_packing": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("axolotl")
    model, _ = make_files(folder, transformers.LlamaForCausalLM)  # axolotl adds a token to Qwen2's vocabulary
    return folder, model


def config(files, name: str, **more) -> dict:
    folder, model = files
    return {
        **CONFIG, "base_model": str(model), "output_dir": str(folder / "out" / name),
        "datasets": [{"path": str(folder / "rows.jsonl"), "type": "chat_template", "ds_type": "json"}],
        "dataset_prepared_path": str(folder / "prepared"), **more,
    }  # fmt: skip


def arguments(files, name: str, **more) -> list[str]:
    path = files[0] / f"{name}.yaml"
    path.write_text(json.dumps(config(files, name, **more)))  # JSON is YAML
    return [str(path)]


@pytest.fixture(scope="module")
def trained(files):
    """Every objective with two micro-batches a step."""
    runs = {name: arguments(files, name, deft_objective=spec) for name, spec in OBJECTIVES.items()}
    done = launch(files[0], "axolotl", runs)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "deftune: axolotl trains `deft | floor(0.2)`: loss" in done.stdout, done.stdout[-4000:]
    return files


@pytest.mark.parametrize("name", [*OBJECTIVES])
def test_trains_as_a_plain_loop(name, trained):
    folder, model = trained
    run = read_run(folder, name)
    assert all(len(step) == 2 for step in run["steps"])
    other = {"nll": None, "floor": "deft"}.get(name, "nll")
    assert_trains(model, run, OBJECTIVES[name], read_run(folder, other) if other else None)


def test_two_ranks_change_nothing(files):
    folder, model = files
    done = launch(folder, "axolotl", {"ranks": arguments(files, "ranks", deft_objective="deft")}, ranks=2)
    assert done.returncode == 0, done.stdout[-4000:]
    run = read_run(folder, "ranks", ranks=2)
    assert max(len(step) for step in run["steps"]) == 4
    assert_trains(model, run, "deft")


@pytest.mark.parametrize(
    "name, message",
    [("bypass", "the trainer did not call the loss"), ("swapped", "the trainer used the loss ")],
)
def test_nll_in_place_of_the_objective_stops_before_the_first_update(files, name, message):
    """The trainer takes the model's own NLL, or the adapter computes NLL."""
    done = launch(files[0], "axolotl", {name: arguments(files, name, deft_objective="deft")})
    assert done.returncode != 0
    assert f"axolotl: `deft` is not what is trained: {message}" in done.stdout, done.stdout[-4000:]
    assert not (files[0] / f"{name}.0.pt").exists()  # written after the training


@pytest.mark.parametrize(
    "more, message",
    [
        ({"deft_objective": "deft", "use_eaft": True}, "use_eaft=True cannot be combined with deft_objective"),
        ({"deft_objective": "deft", "cut_cross_entropy": True}, "cut_cross_entropy=True cannot be combined"),
        ({"deft_objective": "deft", "context_parallel_size": 2}, "context_parallel_size=2 cannot be combined"),
        ({"deft_objective": "clip"}, "`clip` depends on the whole optimizer step"),
        ({"deft_objective": "defft"}, "Did you mean 'deft'"),
        ({}, "DeftPlugin needs deft_objective"),
    ],
)
def test_wrong_combinations_are_refused(more, message):
    from deftune.adapters.axolotl import DeftArgs

    with pytest.raises(ValueError, match=message):
        DeftArgs(**more)


def test_axolotls_own_schema_refuses(files):
    """The key is validated where axolotl reads its file, before a model is loaded."""
    done = launch(files[0], "axolotl", {"refused": arguments(files, "refused", deft_objective="deft", use_dft=True)})
    assert done.returncode != 0
    assert "use_dft=True cannot be combined with deft_objective" in done.stdout, done.stdout[-4000:]
