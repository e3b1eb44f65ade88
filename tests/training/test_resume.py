"""A run that was stopped anywhere and resumed is, bit for bit, the run that was not."""

import io
import json
import os
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from deftune.artifacts import checkpoints, folders
from deftune.artifacts.config import ConfigError
from deftune.artifacts.runs import Run, summary
from deftune.artifacts.templates import TEMPLATES
from deftune.training.train import Outcome, train_run
from tiny import make_tokenizer, save_model

STEPS = 40
# 60 rows, 8 a step: epochs of 7 whole steps and one of 4 rows, which is one micro-batch where the others have two
LONG = {"train.max_steps": STEPS, "train.save_steps": 1, "train.keep": 50}
CLOCK = ("step_seconds", "tokens_per_second", "memory_gib", "eval_runtime", "eval_samples_per_second",
         "eval_steps_per_second")  # fmt: skip


def train(config, console: Console | None = None, **options) -> Outcome:
    with open(os.devnull, "w") as nowhere:
        return train_run(config, console or Console(file=nowhere), **options)


def weights(run: Path) -> dict[str, bytes]:
    """The result's tensors, byte for byte."""
    folders.verify(run / "model")
    return {path.name: path.read_bytes() for path in sorted((run / "model").glob("*.safetensors"))}


def metrics(run: Path) -> list[dict]:
    """What was recorded, but for the clock."""
    return [{k: v for k, v in record.items() if k not in CLOCK} for record in Run(run).read_metrics()]


def rewound(run: Path, step: int, copy: Path) -> Path:
    """A copy of the run as a kill soon after the checkpoint of ``step`` would leave it."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("checkpoint-*", "model"))
    shutil.copytree(run / "checkpoints" / f"checkpoint-{step}", copy / "checkpoints" / f"checkpoint-{step}")
    (copy / "status.json").write_text(json.dumps({"state": "running", "step": step}))
    return copy


def check_same(run: Path, reference: Path, steps: int = STEPS) -> None:
    assert weights(run) == weights(reference) != {}
    assert metrics(run) == metrics(reference)
    assert [r["step"] for r in metrics(run) if r["kind"] == "train"] == list(range(1, steps + 1))


@pytest.fixture(scope="module")
def reference(tmp_path_factory, make_config) -> Path:
    """40 steps, undisturbed: five epochs of 8 steps."""
    run = tmp_path_factory.mktemp("runs") / "reference"
    assert train(make_config(run, LONG)).step == STEPS
    return run


# 31, 32, 33: before, at and after the end of an epoch; 39 and 40: one step left, none left
@pytest.mark.parametrize(
    "step",
    [k if k in (31, 32, 33, 39, 40) else pytest.param(k, marks=pytest.mark.slow) for k in range(1, STEPS + 1)],
)
def test_resumed_after_any_step(tmp_path, make_config, reference, step):
    copy = rewound(reference, step, tmp_path / "copy")
    assert train(make_config(copy, LONG)).step == STEPS
    check_same(copy, reference)


def test_resumed_twice(tmp_path, make_config, reference):
    copy = rewound(reference, 28, tmp_path / "copy")
    train(make_config(copy, LONG))
    again = rewound(copy, 36, tmp_path / "again")
    train(make_config(again, LONG))
    check_same(again, reference)


def test_resumed_with_smaller_micro_batches(tmp_path, make_config, reference):
    """After running out of memory: the same rows in each step, gradients that differ by rounding."""
    run = rewound(reference, 33, tmp_path / "run")
    said = io.StringIO()
    changes = {"train.micro_batch_size": 1, "train.save_steps": 5}
    assert train(make_config(run, {**LONG, **changes}), Console(file=said, width=200)).step == STEPS
    assert "changed since the run began: train.micro_batch_size: 4 -> 1" in said.getvalue()
    assert "changed since the run began: train.save_steps: 1 -> 5" in said.getvalue()
    for record, expected in zip(metrics(run), metrics(reference), strict=True):
        assert record["nll"] == pytest.approx(expected["nll"], rel=1e-5)
    assert not (run / "checkpoints" / "checkpoint-34").exists() and (run / "checkpoints" / "checkpoint-35").exists()
    assert train(make_config(run, {**LONG, **changes})).state == "finished"
    with pytest.raises(folders.FolderError, match=r"another run \(train.seed: 1 -> 2\)"):
        train(make_config(run, {**LONG, **changes, "train.seed": 2}))


@pytest.mark.parametrize("kind", ["model.safetensors", "optimizer.pt", "rng_state.pth", "manifest.json"])
def test_a_damaged_checkpoint_costs_its_steps_only(tmp_path, make_config, reference, kind):
    copy = rewound(reference, 37, tmp_path / "copy")
    shutil.copytree(reference / "checkpoints" / "checkpoint-38", copy / "checkpoints" / "checkpoint-38")
    damaged = copy / "checkpoints" / "checkpoint-38" / kind
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 16
    damaged.write_bytes(content)
    with (tmp_path / "output").open("w+") as output:
        train_run(make_config(copy, LONG), Console(file=output))
        output.seek(0)
        assert "passing over a checkpoint: " in (text := output.read()) and "checkpoint-37" in text
    check_same(copy, reference)
    folders.verify(damaged.parent)  # written anew


def test_from_the_start_when_no_checkpoint_verifies_and_it_is_asked_for(tmp_path, make_config, reference):
    copy = rewound(reference, 3, tmp_path / "copy")
    (copy / "checkpoints" / "checkpoint-3" / "optimizer.pt").unlink()
    (copy / "checkpoints" / ".saving-4").mkdir()
    before = (copy / "metrics.jsonl").read_bytes()
    with pytest.raises(folders.FolderError, match=r"none of its checkpoints \(1\) is as it was written"):
        train(make_config(copy, LONG))
    assert [path.name for path in (copy / "checkpoints").glob("checkpoint-*")] == ["checkpoint-3"]
    assert (copy / "metrics.jsonl").read_bytes() == before
    train(make_config(copy, LONG), restart=True)
    check_same(copy, reference)
    assert not list((copy / "checkpoints").glob(".saving-*"))
    assert (copy / "checkpoints.old-1" / "checkpoint-3").is_dir()
    with pytest.raises(ValueError, match=r"--restart: .* is finished; train anew in another folder"):
        train(make_config(copy, LONG), restart=True)


def test_two_fresh_runs_are_equal(tmp_path, make_config):
    settings = {"train.max_steps": 10, "train.save_steps": 100}
    for name in ("one", "other"):
        train(make_config(tmp_path / name, settings))
    check_same(tmp_path / "one", tmp_path / "other", steps=10)


# Each kind of objective, each source of randomness. 6 steps, epochs of 4: resumed within an epoch, at its end, and when
# no step is left though the epoch is not over (transformers by itself would take one more).
LORA = {"model.lora": {"r": 4, "alpha": 8, "dropout": 0.2}}
VARIANTS = {
    "local": {"objective": "deft"},
    "mass": {"objective": "mile(1)"},
    "step": {"objective": "clip"},
    "warmup": {"objective": "deft | warmup(0.4)"},
    "lora": LORA,  # its dropout draws from the random state that a checkpoint keeps
    "lora, mass": {**LORA, "objective": "mile(1)"},
    "lora, step": {**LORA, "objective": "clip"},  # the forward pass before the step draws, too
    "4-bit": {**LORA, "model.quantization": "4bit"},
    "adafactor": {"train.optimizer": "adafactor"},
    "muon": {"train.optimizer": "muon"},
    "NEFTune": {"train.neftune_alpha": 5.0},
    "NEFTune, step": {"train.neftune_alpha": 5.0, "objective": "clip"},  # as dropout: one noise for both passes
    "packing": {"data.packing": True},
    "workers": {"train.workers": 2},
    "checkpointing": {"train.gradient_checkpointing": True, **LORA},
    "holdout": {"data.holdout": 0.2, "train.eval_steps": 2, "train.best": "eval_nll"},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("places", [(3,), pytest.param((4, 6), marks=pytest.mark.slow)], ids=["within", "ends"])
def test_resumed_in_every_way_of_training(tmp_path, make_config, variant, places):
    own: dict[str, object] = {}
    if variant == "4-bit":  # bitsandbytes quantises blocks of 64
        pytest.importorskip("bitsandbytes")
        wide = save_model(tmp_path / "wide", make_tokenizer(size=320), hidden_size=64, intermediate_size=128)
        own = {"model.name": str(wide)}
    steps = 6
    settings = {"train.batch_size": 16, "train.max_steps": steps, "train.save_steps": 1, "train.keep": 9}
    settings |= VARIANTS[variant] | own
    reference = tmp_path / "reference"
    train(make_config(reference, settings))
    for step in (2,) if variant == "holdout" and places == (3,) else places:
        copy = rewound(reference, step, tmp_path / "copy")
        if variant == "holdout":  # the best one stays beside it
            state = json.loads((copy / "checkpoints" / f"checkpoint-{step}" / "trainer_state.json").read_text())
            best = f"checkpoint-{state['best_global_step']}"
            shutil.copytree(reference / "checkpoints" / best, copy / "checkpoints" / best, dirs_exist_ok=True)
        train(make_config(copy, settings))
        check_same(copy, reference, steps)


# --- the best checkpoint ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def worse(tmp_path_factory) -> dict[str, object]:
    """Settings whose first evaluation is the best: the held-out answers have letters that no training answer has."""
    path = tmp_path_factory.mktemp("data") / "other_letters.jsonl"
    turns = [("user", "What is 2 + 3?"), ("assistant", "QZXJ VKWY QZ BFG")]
    row = json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]})
    path.write_text(f"{row}\n" * 4, encoding="utf-8")
    return {
        "train.max_steps": 8, "train.learning_rate": 0.01, "train.schedule": "constant", "train.warmup_ratio": 0.0,
        "data.eval": [{"path": str(path)}], "train.eval_steps": 2, "train.keep": 1, "train.best": "eval_nll",
    }  # fmt: skip


@pytest.fixture(scope="module")
def worsened(tmp_path_factory, make_config, worse) -> Path:
    run = tmp_path_factory.mktemp("runs") / "worsened"
    train(make_config(run, worse))
    return run


def best_step(run: Path) -> int:
    newest = checkpoints.checkpoints(run / "checkpoints")[-1]
    return json.loads((newest / "trainer_state.json").read_text())["best_global_step"]


def test_the_best_one_is_kept_and_becomes_the_result(worsened):
    best = best_step(worsened)
    assert best < 8, "the test is worth nothing unless training harms"
    found = [checkpoints.step_of(folder) for folder in checkpoints.checkpoints(worsened / "checkpoints")]
    assert found == [best, 8]
    assert (
        weights(worsened)["model.safetensors"]
        == (worsened / "checkpoints" / f"checkpoint-{best}" / "model.safetensors").read_bytes()
    )


@pytest.mark.parametrize("best", ["none", "eval_loss"])
def test_the_run_says_which_step_it_kept(tmp_path, make_config, best, worse):
    """The last one unless asked otherwise, in what it prints, in `status.json`, in `deftune runs` and on the card."""
    printed = Console(file=io.StringIO(), width=1000)
    outcome = train(make_config(tmp_path / "run", {**worse, "train.best": best}), printed)
    kept = best_step(outcome.run.folder) if best == "eval_loss" else 8
    assert (kept < 8) == (best == "eval_loss")
    words = f"holds the weights of step {kept}" + (": best eval_loss" if best == "eval_loss" else ", the last")
    assert words in printed.file.getvalue()
    assert (outcome.run.status()["kept"], outcome.run.status()["by"], outcome.run.status()["step"]) == (kept, best, 8)
    assert summary(outcome.run)["kept"] == kept
    assert words in (outcome.run.model / "README.md").read_text()
    evaluated = [r for r in outcome.run.read_metrics() if r["kind"] == "eval"]
    result = next(r for r in evaluated if r.get("final"))
    assert result["eval_loss"] == next(r["eval_loss"] for r in evaluated if r["step"] == kept)


def test_a_failure_after_the_last_step_is_recorded(tmp_path, make_config, worse, monkeypatch):
    """Evaluations that are NaN have no best step: the error says so, and the run does not stay "running"."""
    from deftune.training.trainer import DeftSFTTrainer

    evaluate = DeftSFTTrainer.evaluation_loop

    def broken(self, *args, **kwargs):
        output = evaluate(self, *args, **kwargs)
        output.metrics["eval_nll"] = float("nan")
        return output

    monkeypatch.setattr(DeftSFTTrainer, "evaluation_loop", broken)
    with pytest.raises(ValueError, match=r"train\.best: eval_nll was NaN in every evaluation"):
        train(make_config(tmp_path / "run", worse))
    status = Run(tmp_path / "run").status()
    assert status["state"] == "failed" and status["step"] == 8 and "train.best" in status["error"][0]


def test_a_run_stops_when_evaluations_no_longer_improve(tmp_path, make_config, worse):
    """Its words, its status and its card say so; resumed anywhere, also after its end, it stops at the same step."""
    printed = Console(file=io.StringIO(), width=1000)
    settings = {**worse, "train.stop_after": 2, "train.max_steps": 40, "train.save_steps": 1, "train.keep": 99}
    outcome = train(make_config(tmp_path / "run", settings), printed)
    best = best_step(outcome.run.folder)
    assert outcome.step == best + 2 * 2 < 40 and outcome.run.status()["kept"] == best
    words = f"stopped early: 2 evaluations without improvement at step {outcome.step} of 40"
    assert words in printed.file.getvalue() and words in (outcome.run.model / "README.md").read_text()
    assert outcome.run.status()["stopped_early"] in words
    for step in (best + 1, best + 3, outcome.step):
        copy = rewound(outcome.run.folder, step, tmp_path / f"copy-{step}")
        for kept in range(1, step):  # the best one is among them
            place = f"checkpoints/checkpoint-{kept}"
            shutil.copytree(outcome.run.folder / place, copy / place, dirs_exist_ok=True)
        again = train(make_config(copy, settings))
        assert again.step == outcome.step and again.run.status()["stopped_early"] in words
        assert weights(copy) == weights(outcome.run.folder)


def test_evaluations_leave_the_checkpoints_to_the_config(tmp_path, make_config, worse):
    """`save_steps` and `keep` are as given with `eval_steps` beside them; the best one stays besides."""
    settings = {**worse, "train.max_steps": 9, "train.save_steps": 1, "train.keep": 1, "train.eval_steps": 4}
    outcome = train(make_config(tmp_path / "last", {**settings, "train.best": "none"}))
    assert [folder.name for folder in checkpoints.checkpoints(outcome.run.checkpoints)] == ["checkpoint-9"]
    outcome = train(make_config(tmp_path / "best", {**settings, "train.save_steps": 3}))
    best = outcome.run.status()["kept"]
    assert best in (4, 8), "the test is worth nothing unless the last step is not the best"
    found = [folder.name for folder in checkpoints.checkpoints(outcome.run.checkpoints)]
    assert found == [f"checkpoint-{best}", "checkpoint-9"]


def test_the_best_one_is_found_where_the_run_is_now(tmp_path, make_config, worsened, worse):
    """Not in the folder that the run was moved from, and not given up for the last one."""
    best, moved = best_step(worsened), tmp_path / "moved"
    original = tmp_path / "original"
    train(make_config(original, worse))
    rewound(original, 8, moved)
    shutil.copytree(original / "checkpoints" / f"checkpoint-{best}", moved / "checkpoints" / f"checkpoint-{best}")
    shutil.rmtree(original)
    train(make_config(moved, worse))
    assert weights(moved) == weights(worsened)


def test_a_damaged_best_one_is_an_error(tmp_path, make_config, worsened, worse):
    best = best_step(worsened)
    copy = rewound(worsened, 8, tmp_path / "copy")
    shutil.copytree(worsened / "checkpoints" / f"checkpoint-{best}", copy / "checkpoints" / f"checkpoint-{best}")
    path = copy / "checkpoints" / f"checkpoint-{best}" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(folders.FolderError, match=r"model\.safetensors: is damaged"):
        train(make_config(copy, worse))
    assert not (copy / "model").exists()


def test_checkpoints_at_given_steps_stay(make_config, tmp_path):
    """Beside the newest one. A step that never comes is an error before the model is loaded."""
    settings = {"train.max_steps": 7, "train.save_steps": 2, "train.keep": 1, "train.save_at": [1, 4]}
    outcome = train(make_config(tmp_path / "run", settings))
    assert [folder.name for folder in checkpoints.checkpoints(outcome.run.checkpoints)] == [
        "checkpoint-1", "checkpoint-4", "checkpoint-7",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"train\.save_at: step 8 never comes, the run has 7"):
        train(make_config(tmp_path / "other", {**settings, "train.save_at": [8]}))
    assert not (tmp_path / "other").exists()


def test_a_template_that_writes_the_time_writes_that_of_the_beginning(tmp_path, make_config):
    """Llama 3.2's template writes the date: a run resumed on another day has the rows that it began with."""
    template = tmp_path / "dated.jinja"
    template.write_text("{{ strftime_now('%d %b %Y %H:%M:%S.%f') }}" + TEMPLATES["chatml"])
    short = {"train.max_steps": 4, "train.save_steps": 1, "train.keep": 50, "data.template": str(template)}
    said = io.StringIO()
    train(make_config(tmp_path / "run", short), Console(file=said, width=200))
    copy = rewound(tmp_path / "run", 2, tmp_path / "copy")
    train(make_config(copy, short))
    check_same(copy, tmp_path / "run", 4)
    assert "the chat template writes the date: " in said.getvalue()
    other = make_config(tmp_path / "other", short)  # to be compared with the first: its rows are the same
    train(other, alike=[Run(tmp_path / "run")])
    found = [json.loads((tmp_path / name / "data.json").read_text()) for name in ("run", "other")]
    assert found[0] == found[1]


def test_a_model_that_a_killed_launch_saved_in_part_is_removed(tmp_path, make_config, monkeypatch):
    """Each torchrun has a port of its own."""
    config = make_config(tmp_path / "run", {"train.max_steps": 2})

    monkeypatch.setenv("MASTER_PORT", "29501")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        save = folders.seal

        def seal(folder, **facts):
            if "model" in folder.name:
                patched.setattr(folders.shutil, "rmtree", lambda *_, **__: None)  # a kill cleans nothing up
                raise KeyboardInterrupt
            save(folder, **facts)

        patched.setattr(folders, "seal", seal)
        train(config)
    assert list((tmp_path / "run").glob(".model-*"))
    monkeypatch.setenv("MASTER_PORT", "29502")
    assert train(config).state == "finished"
    assert list((tmp_path / "run").glob(".model-*")) == []
