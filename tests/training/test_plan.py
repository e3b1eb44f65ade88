"""`deftune plan` against what was measured."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from deftune.artifacts.config import RunConfig
from deftune.cli import main
from deftune.training import plan as planning
from deftune.training.plan import (
    BACKBONES,
    GPUS,
    MEASURED,
    MEASURED_LORA,
    WORK,
    Strategy,
    Workload,
    choose_checkpointing,
    estimate,
    find_shape,
    plan,
    shape_of,
    workload_of,
)

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
# the sizes that the hub's pages state
PARAMETERS = {
    "meta-llama/Llama-3.1-8B": 8_030_261_248, "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "deepseek-ai/deepseek-math-7b-base": 6_910_365_696, "Qwen/Qwen2.5-Math-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304, "Qwen/Qwen2.5-Math-7B": 7_615_616_512, "Qwen/Qwen2.5-7B": 7_615_616_512,
}  # fmt: skip


def shape(name: str):
    if name == "SmolLM2-135M":
        return shape_of(transformers.AutoConfig.for_model(**SMOLLM2), name)
    numbers = json.loads((RESULTS / "qwen2.5-coder-1.5b.json").read_text())
    return shape_of(transformers.AutoConfig.for_model(**numbers), name)


def of_row(row):
    return f"{row.model}-{row.layers}-{row.rows}"


@pytest.mark.parametrize("row", MEASURED, ids=of_row)
def test_the_rows_are_those_of_the_files(row):
    text = (RESULTS / row.file).read_text()
    if row.file.endswith(".jsonl"):
        head, *results = (json.loads(line) for line in text.splitlines())
    else:
        head = json.loads(text)
        results = head["results"]
    assert head["machine"].startswith("NVIDIA H200")
    deft = next(result for result in results if result["contender"] == row.contender)
    assert round(deft["peak_gib"], 2) == row.peak_gib
    steps = deft["seconds"] if "seconds" in deft else [seconds for steps in deft["rounds"] for seconds in steps]
    printed = deft.get("tokens", row.rows * 2048) / statistics.median(steps)
    assert abs(printed - row.tokens_per_second) <= 0.1 * printed  # some tables leave out the first steps of a round
    assert f"{row.tokens_per_second:,}" in (RESULTS / row.file).with_suffix(".md").read_text()
    assert abs(shape(row.model).flops_per_token(2048) / WORK[row.model] - 1) <= 0.01


@pytest.mark.parametrize("row", MEASURED, ids=of_row)
def test_memory_is_within_five_percent_of_the_measured_peak(row):
    found = estimate(shape(row.model), Workload(2048, row.rows), Strategy(layers=row.layers)).total
    assert abs(found / row.peak_gib - 1) <= 0.05


@pytest.mark.parametrize("base", MEASURED_LORA)
def test_memory_of_lora_is_within_five_percent_of_the_measured_peak(base):
    measured = json.loads((RESULTS / "lora_memory_h200.json").read_text())
    name = {"bfloat16": "deftune, LoRA over bfloat16", "4bit": "deftune, QLoRA"}[base] + ", recomputed activations"
    row = next(row for row in measured["results"] if row["contender"] == name)
    assert round(row["peak_gib"], 2) == MEASURED_LORA[base]
    way = Strategy(checkpointing=True, lora_rank=16, base=base, layers="varlen")
    found = estimate(find_shape("meta-llama/Llama-3.1-8B"), Workload(2048, 4), way).total
    assert abs(found / row["peak_gib"] - 1) <= 0.05


@pytest.mark.parametrize("row", [row for row in MEASURED if row.file != "training_h200.json"], ids=of_row)
def test_speed_is_the_measured_one_where_it_was_measured(row):
    found = planning.make_plan(shape(row.model), Workload(2048, row.rows), Strategy(layers=row.layers), GPUS["h200"], 1)
    assert abs(found.tokens_per_second / row.tokens_per_second - 1) <= 0.02
    assert not any("extrapolates" in note for note in found.notes)


def test_short_rows_of_a_measured_model_take_less_work_than_was_measured():
    chosen, _ = plan(shape("SmolLM2-135M"), Workload(64, 16))
    assert any("extrapolates: the work of a token is outside of the measured" in note for note in chosen.notes)


@pytest.mark.parametrize("name", [*BACKBONES])
def test_backbones_have_the_parameters_of_the_hub(name):
    assert find_shape(name).parameters == PARAMETERS[name]


def test_the_recipes_backbones_are_known():
    from deftune.paper import recipes

    assert {backbone.hub for backbone in recipes.BACKBONES.values()} == set(BACKBONES)


def test_states_are_sixteen_bytes_a_parameter_and_are_divided():
    found = find_shape("Qwen/Qwen2.5-7B")
    whole = estimate(found, Workload(8, 1, accumulation=2))
    states = whole.weights + whole.gradients + whole.optimizer
    assert states * planning.GIB == pytest.approx(16 * found.parameters)
    parts = estimate(found, Workload(8, 1, accumulation=2), Strategy(shards=8))
    assert parts.weights + parts.gradients + parts.optimizer == pytest.approx(states / 8)
    lora = estimate(found, Workload(8, 1, accumulation=2), Strategy(lora_rank=16))
    narrow = estimate(found, Workload(2048, 4), Strategy(lora_rank=16, base="bfloat16"))
    wide = estimate(found, Workload(2048, 4), Strategy(lora_rank=16))
    adapters = wide.weights - 4 * found.parameters / planning.GIB
    assert narrow.weights == pytest.approx(2 * found.parameters / planning.GIB + adapters) and narrow.copies == 0
    quantised = estimate(found, Workload(2048, 4), Strategy(lora_rank=16, base="4bit"))
    rest = found.parameters - found.linear
    expected = (0.516 * found.linear + 2 * rest) / planning.GIB + adapters
    assert quantised.weights == pytest.approx(expected, rel=1e-3)
    assert 0.7 < narrow.activations / wide.activations < 1
    assert lora.optimizer < 0.01 * whole.optimizer and lora.weights == pytest.approx(whole.weights, rel=0.02)


def test_optimizers_have_their_own_states():
    found = find_shape("meta-llama/Llama-3.1-8B")
    rest = found.parameters - found.linear
    for name, expected in {
        "adamw": 8 * found.parameters, "adamw_8bit": 2 * found.linear + 8 * rest, "adafactor": 0,
        "muon": 4 * found.linear + 8 * rest,
    }.items():  # fmt: skip
        assert estimate(found, Workload(8, 1, optimizer=name)).optimizer * planning.GIB == pytest.approx(expected)


def test_the_strategy_is_the_fastest_that_fits(monkeypatch):
    monkeypatch.setitem(GPUS, "small", planning.Gpu("small", 15.0, 165.0))
    small, large = find_shape("Qwen/Qwen2.5-1.5B"), find_shape("meta-llama/Llama-3.1-8B")
    assert str(plan(small, Workload(3072, 4), gpus=8)[0].strategy) == "DDP"
    assert str(plan(small, Workload(2048, 1))[0].strategy) == "one GPU, compiled layers"
    assert plan(small, Workload(2048, 1))[0].strategy.options() == ["train.compile=layers"]
    assert str(plan(small, Workload(2048, 1, layers="varlen"))[0].strategy) == "one GPU"
    other = replace(small, kind="gemma3_text")  # its memory in compiled layers was not measured
    assert str(plan(other, Workload(2048, 1))[0].strategy) == "one GPU"
    chosen, tried = plan(large, Workload(3072, 4, 8), gpus=8)
    assert chosen.strategy.shards == 8 and chosen.fits and not tried[0].fits
    assert chosen.strategy.options()[0] == "train.fsdp=true"
    assert plan(large, Workload(2048, 1, 2), gpu="h100")[0].strategy.lora_rank == 16
    assert plan(large, Workload(1024, 1), gpu="small")[0].strategy.options() == [
        "model.lora.r=16",
        "model.quantization=4bit",
    ]
    nothing, _ = plan(large, Workload(131072, 64), gpu="h100")
    assert not nothing.fits


def test_8b_on_a_card_of_24_gb():
    """15 GiB of bfloat16 weights leave room for checkpointed rows; where they do not fit, 4 bits do."""
    large = find_shape("meta-llama/Llama-3.1-8B")
    for gpu in ("rtx4090", "rtx3090", "a10", "l4"):
        expected = {4: "model.dtype=bfloat16", 16: "model.quantization=4bit"}
        for rows, last in expected.items():
            chosen, _ = plan(large, Workload(1024, rows), gpu=gpu)
            assert chosen.fits and chosen.gpu.gib < 24, gpu
            assert chosen.strategy.options() == ["train.gradient_checkpointing=true", "model.lora.r=16", last]


def test_an_unknown_gpu_is_refused_before_the_hub_is_asked(monkeypatch, capsys):
    monkeypatch.setattr(planning, "find_shape", lambda *a, **k: pytest.fail("the model was looked up"))
    assert main(["plan", "org/model", "--gpu", "rtx4909"]) == 2
    assert "unknown GPU 'rtx4909'. Did you mean 'rtx4090'? Known: h200, " in capsys.readouterr().err


def test_checkpointing_saves_activations_and_costs_time():
    found, work = find_shape("Qwen/Qwen2.5-1.5B"), Workload(2048, 4)
    full = planning.make_plan(found, work, Strategy(), GPUS["h200"], 1)
    less = planning.make_plan(found, work, Strategy(checkpointing=True), GPUS["h200"], 1)
    assert less.memory.activations < 0.2 * full.memory.activations
    assert less.tokens_per_second == pytest.approx(0.75 * full.tokens_per_second)


def test_checkpointing_is_chosen_by_the_memory(tmp_path):
    folder = tmp_path / "model"
    transformers.AutoConfig.for_model(**SMOLLM2).save_pretrained(folder)
    (folder / "model.safetensors").touch()  # only looked at
    content = {"model": {"name": "org/model"}, "data": {"train": [{"path": "rows.jsonl"}]}, "train": {"batch_size": 8}}

    def config_of(**train):
        return RunConfig.model_validate({**content, "train": {**content["train"], **train}})

    def chosen(gib, gpus=1, **train):
        return choose_checkpointing(config_of(**train), str(folder), "float32", gpus, gib)

    need = estimate(shape("SmolLM2-135M"), Workload(2048, 4, 2)).total
    assert chosen(need / 0.89).why.startswith("gradient checkpointing is off: a step needs about 11 of")
    assert not chosen(need / 0.89).on and chosen(need / 0.91).on and "is on" in chosen(need / 0.91).why
    compiled = estimate(shape("SmolLM2-135M"), Workload(2048, 4, 2), Strategy(layers="compiled")).total
    for gib, on, needs in ((need / 0.89, False, False), (compiled / 0.89, False, True), (compiled / 0.91, True, False)):
        found = choose_checkpointing(config_of(), str(folder), "float32", 1, gib, compiles=True)
        assert (found.on, found.needs_compiled) == (on, needs)
        assert f"a step needs about {compiled:.0f} of {gib:.0f} GiB without, with compiled layers" in found.why
    assert not chosen(None).on and not chosen(None).why
    whole = {"batch_size": 4, "tensor_parallel": 2}  # one micro-batch of 4 rows, on both of its ranks
    need = estimate(shape("SmolLM2-135M"), Workload(2048, 4, 1), Strategy(2)).total
    assert not chosen(need / 0.89, 2, **whole).on and chosen(need / 0.91, 2, **whole).on
    assert chosen(None, gradient_checkpointing=True).on and not chosen(1.0, gradient_checkpointing=False).on
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    assert chosen(80.0).on and "the memory was not counted (plan: the config of" in chosen(80.0).why


@pytest.mark.parametrize(
    "options, layers",
    [
        ({}, "compiled"), ({"compile": "layers"}, "compiled"), ({"compile": False}, "varlen"),
        ({"liger": True}, "varlen"),
        ({"weights": "float32"}, "varlen"), ({"optimizer": "muon"}, "varlen"), ({"attention": "flash"}, "padded"),
        ({"precision": "fp32"}, "padded"),
    ],
)  # fmt: skip
def test_the_layers_of_a_run_follow_its_options(options, layers):
    content = {"model": {"name": "org/model"}, "data": {"train": [{"path": "rows.jsonl"}]}, "train": options}
    assert workload_of(RunConfig.model_validate(content), 1).layers == layers
    tried = plan(shape("SmolLM2-135M"), workload_of(RunConfig.model_validate(content), 1))[1]
    assert {found.strategy.layers for found in tried} == ({"padded"} if layers == "padded" else {"varlen", layers})


def test_what_cannot_be_planned_is_refused():
    moe = transformers.AutoConfig.for_model("mixtral", num_local_experts=8)
    with pytest.raises(ValueError, match="is a mixture of experts"):
        shape_of(moe, "mixtral")
    with pytest.raises(ValueError, match=r"unknown GPU 'h2000'. Did you mean 'h200'"):
        plan(find_shape("Qwen/Qwen2.5-1.5B"), Workload(8, 1), gpu="h2000")


def test_the_command(tmp_path, capsys):
    assert main(["plan", "Qwen/Qwen2.5-7B", "--gpus", "8", "--gpu", "h200", "--length", "3072"]) == 0
    out = capsys.readouterr().out
    assert "FSDP2" in out and "7.62B" in out and "training_h200_fast_qwen.jsonl" in out and "extrapolates" in out
    assert main(["plan", "strong/llama-3.1-8b/deft", "--gpus", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["chosen"]["fits"] and found["parameters"] == PARAMETERS["meta-llama/Llama-3.1-8B"]
    assert main(["plan", "--backbones", "--gpus", "8"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in BACKBONES)
    assert main(["plan", "strong/llama-3.1-8b/deft", "--gpus", "3"]) == 2
    assert "cannot be 3 GPUs x 4 rows" in capsys.readouterr().err
