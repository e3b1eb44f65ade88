"""The profile of a step: what its parts are, that they add up, and that the training does not change."""

import json
import time

import pytest
import torch
from small import make_arguments, make_model, make_rows, make_trainer

from deftune.cli import main
from deftune.training import profiling
from deftune.training.profiling import STEPS, StepProfiler, needed_flops, sustained_tflops, what_limits


def trained(tmp_path, profiled: bool, **more):
    """(losses, weights, profile) of a run of ten steps, two micro-batches each."""
    found = []
    arguments = make_arguments(tmp_path, gradient_accumulation_steps=2, num_train_epochs=5, max_grad_norm=1.0)
    trainer, _ = make_trainer(make_model(torch.float32), arguments, make_rows(16), objective="deft", **more)
    profiler = StepProfiler(lambda: trainer, found.append, tmp_path / "profile.json")
    if profiled:
        trainer.add_callback(profiler)
    with profiler:
        trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    return losses, trainer.model.state_dict(), found, trainer


@pytest.fixture
def quick(monkeypatch):
    """A short measurement of the matrix products' rate."""
    monkeypatch.setattr(profiling, "sustained_tflops", lambda *_: sustained_tflops(*_, seconds=0.01))


def test_a_profile_has_every_part_and_changes_nothing(tmp_path, quick):
    plain, weights, none, _ = trained(tmp_path / "plain", profiled=False)
    (tmp_path / "profiled").mkdir()
    losses, same, (profile,), trainer = trained(tmp_path / "profiled", profiled=True)
    assert not none and losses == plain and len(losses) == 10
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    parts = {part.part: part for part in profile.parts}
    expected = "embedding, attention, MLP, norms, head + loss, gradient sums, optimizer + clipping, data, other"
    assert set(expected.split(", ")) | {"records, logging"} <= parts.keys()
    assert all(part.host_ms > 0 and part.device_ms is None for part in profile.parts)
    assert sum(part.share for part in profile.parts) == pytest.approx(1, abs=0.02)
    assert profile.gpu_busy is None and profile.dtype == "float32" and 0 < profile.mfu < 1
    assert profile.input_tokens > profile.supervised_tokens > 0
    written = json.loads((tmp_path / "profiled" / "profile.json").read_text())
    assert written["parts"][0]["part"] == "embedding" and written["bound"] == profile.bound
    lines = profile.lines()
    assert lines[1].split() == ["part", "of", "a", "step", "host", "ms", "share"]
    assert lines[-1] == f"what limits the speed: {profile.bound}"
    # the ranges are gone
    assert not {"log", "get_batch_samples"} & trainer.__dict__.keys()
    assert not any("leave" in str(hook) for m in trainer.model.modules() for hook in m._forward_hooks.values())


def test_operations_of_the_backward_pass_belong_to_the_part_of_their_forward_operation():
    first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    with profiling.silent_kineto(), profiling.torch_profile(activities=[profiling.ProfilerActivity.CPU]) as profiler:
        with profiling.record_function("deftune::attention"):
            hidden = first(torch.ones(3, 8))
        with profiling.record_function("deftune::MLP"), torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = second(hidden)
        hidden.sum().backward()
    attribution = profiling.Attribution(profiler.events())
    found = [(event.name, attribution.part(event)) for event in attribution.events]
    products = [part for name, part in found if name in ("aten::mm", "aten::addmm")]
    assert products.count("attention") == 2 and products.count("MLP") == 3  # the first layer's input has no gradient
    assert {part for name, part in found if name in ("aten::_to_copy", "ToCopyBackward0")} == {"casts"}
    assert {part for name, part in found if "AccumulateGrad" in name} == {"gradient sums"}
    assert {part for name, part in found if name == "aten::sum" and part != "MLP"} <= {"other", "attention"}


def test_activations_that_are_computed_again_belong_to_their_part(tmp_path, quick):
    trainer, _ = make_trainer(
        make_model(torch.float32), make_arguments(tmp_path, gradient_checkpointing=True, num_train_epochs=3),
        make_rows(16), objective="deft",
    )  # fmt: skip
    found = []
    with StepProfiler(lambda: trainer, found.append) as profiler:
        trainer.add_callback(profiler)
        trainer.train()
    shares = {part.part: part.share for part in found[0].parts}
    assert shares["attention"] > 0 and shares["MLP"] > 0


def test_starting_and_stopping_the_profiler_is_no_time_of_a_step(tmp_path, quick, monkeypatch):
    class Slow(profiling.torch_profile):
        def __enter__(self):
            time.sleep(2)
            return super().__enter__()

        def __exit__(self, *error):
            time.sleep(2)
            super().__exit__(*error)

    monkeypatch.setattr(profiling, "torch_profile", Slow)
    *_, found, trainer = trained(tmp_path, profiled=True)
    seconds = [record["step_seconds"] for record in trainer.state.log_history if "loss" in record]
    assert len(found) == 1 and len(seconds) == 10 and max(seconds) < 2


def test_a_run_that_fails_while_it_is_recorded_leaves_no_profiler_behind(tmp_path):
    arguments = make_arguments(tmp_path, num_train_epochs=5)
    trainer, _ = make_trainer(make_model(torch.float32), arguments, make_rows(16), objective="deft")
    with pytest.raises(RuntimeError, match="stop here"), StepProfiler(lambda: trainer, print) as profiler:
        trainer.add_callback(profiler)
        profiler.first = -(profiling.WARMUP + profiling.TIMED)
        profiler.on_train_begin = lambda *_, **__: None
        trainer.callback_handler.on_substep_end = trainer.callback_handler.on_step_end = stop_here
        trainer.train()
    assert "log" not in trainer.__dict__
    with profiling.silent_kineto(), profiling.torch_profile(activities=[profiling.ProfilerActivity.CPU]):
        torch.ones(1)  # a second profiler cannot start beside another


def stop_here(*_):
    raise RuntimeError("stop here")


def test_the_operations_of_a_step_are_counted():
    model = make_model(torch.float32)  # width 16, MLP 32, 2 heads of 8, one of keys, 48 tokens, tied
    layer = 16 * 16 * 2 + 2 * 16 * 8 + 3 * 16 * 32
    assert needed_flops(model, 100, 40) == 6 * (100 * 2 * layer + 40 * 48 * 16)
    for parameter in model.model.layers.parameters():
        parameter.requires_grad_(False)
    assert needed_flops(model, 100, 40) == 4 * 100 * 2 * layer + 6 * 40 * 48 * 16


def test_what_limits_a_step_is_said_in_words():
    assert what_limits(0.5, 0.7, 0.05).startswith("the host launches kernels slower than the GPU runs them (the GPU is")
    assert "train.compile=layers" in what_limits(0.5, 0.7, 0.05)
    assert "train.compile" not in what_limits(0.5, 0.7, 0.05, compiled=True)
    assert what_limits(0.5, 0.7, 0.3).startswith("making the batches (30% of a step); use data workers")
    assert what_limits(0.95, 0.7, 0.3) == (
        "the GPU is busy for 95% of a step; matrix products and attention, which take 70% of its time"
    )
    assert "; memory bandwidth: matrix products and attention take 30% of its time" in what_limits(0.95, 0.3, 0)
    assert what_limits(None, 0.8, 0) == "matrix products and attention, which take 80% of a step"


def test_the_rate_of_matrix_products_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    assert sustained_tflops(torch.device("cpu"), torch.float32, seconds=0.01) > 0
    assert torch.equal(before, torch.get_rng_state())


def test_the_command_prints_the_table_and_writes_the_file(tmp_path, make_config, capsys, quick):
    from deftune.artifacts.config import render_yaml

    path = tmp_path / "run.yaml"
    path.write_text(render_yaml(make_config(tmp_path / "run", {"train.max_steps": STEPS})))
    assert main(["train", str(path), "--profile"]) == 0
    shown = capsys.readouterr().err
    assert "part of a step" in shown and "what limits the speed: " in shown and "USDT" not in shown
    assert json.loads((tmp_path / "run" / "profile.json").read_text())["steps"] == profiling.RECORDED
    assert main(["train", str(path), "--profile"]) == 2
    assert "--profile: " in (shown := capsys.readouterr().err) and "is finished; profile another folder" in shown


def test_a_run_with_too_few_steps_is_refused(tmp_path, make_config, capsys):
    from deftune.artifacts.config import render_yaml

    path = tmp_path / "run.yaml"
    path.write_text(render_yaml(make_config(tmp_path / "run", {"train.max_steps": 3})))
    assert main(["train", str(path), "--profile"]) == 2
    line = f"--profile: needs {STEPS} steps, and the run has 3 left; raise train.max_steps or train.epochs, or lower"
    assert line in capsys.readouterr().err
    assert main(["train", str(path), "--profile", "--dry-run"]) == 2
    assert "--profile: a dry run takes no steps" in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and none is here")
@pytest.mark.gpu
def test_a_profile_on_a_gpu_has_the_times_of_its_kernels(tmp_path):
    found = []
    arguments = make_arguments(tmp_path, num_train_epochs=3, use_cpu=False, bf16=True)
    model = make_model(torch.float32, hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    trainer, _ = make_trainer(model, arguments, make_rows(16), objective="deft")
    with StepProfiler(lambda: trainer, found.append) as profiler:
        trainer.add_callback(profiler)
        trainer.train()
    (profile,) = found
    parts = {part.part: part for part in profile.parts}
    for name in ("embedding", "attention", "MLP", "norms", "head + loss", "casts", "optimizer + clipping"):
        assert parts[name].device_ms > 0, name
    assert 0 < profile.gpu_busy <= 1 and profile.gemm_tflops > 10 and profile.dtype == "bfloat16"
    assert sum(part.share for part in profile.parts) == pytest.approx(1, abs=0.05)
