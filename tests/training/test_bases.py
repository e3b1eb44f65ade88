"""LoRA over frozen weights that are not float32: bfloat16, and 4 bits where bitsandbytes is installed."""

import copy
import io
import json
import os

import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from rich.console import Console
from safetensors.torch import load_file
from small import deviation, make_arguments, make_model, make_rows, make_trainer, oracle

import deftune
from deftune.artifacts.config import ConfigError, RunConfig, load_config
from deftune.artifacts.models import check_bitsandbytes, load_model
from deftune.artifacts.results import load_result
from deftune.artifacts.runs import Run
from deftune.objectives import Context
from deftune.tokens.head import shifted
from deftune.training.assembly import load_base, lora_config
from deftune.training.assembly import make_arguments as make_run_arguments
from deftune.training.machine import base_dtype, check_config
from deftune.training.preparation import prepare
from deftune.training.refusals import check_model
from deftune.training.results import merge
from deftune.training.train import fits_in_memory, train_run
from tiny import make_tokenizer, save_model

LORA = {"model.lora": {"r": 4, "alpha": 8}}
BASE = {"model": {"name": "org/model"}, "data": {"train": [{"path": "rows.jsonl"}]}}
ROWS = make_rows(8)


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)


def test_every_target_of_adapters_names_a_module():
    """PEFT leaves a misspelt name out as long as another one fits."""

    def targets(*names: str) -> RunConfig:
        return RunConfig.model_validate({**BASE, "model": {"name": "m", "lora": {"target_modules": list(names)}}})

    model = make_model()
    assert lora_config(targets("q_proj", "self_attn.v_proj"), model).target_modules == {"q_proj", "self_attn.v_proj"}
    expected = r"target_modules: no module of the model is named '{}'.{} Linear layers: down_proj, gate_proj, k_proj, "
    with pytest.raises(ValueError, match=expected.format("v_porj", r" Did you mean 'v_proj'\?")):
        lora_config(targets("q_proj", "v_porj"), model)
    with pytest.raises(ValueError, match=expected.format("roj", ".*")):  # a part of a name is no name
        lora_config(targets("roj"), model)
    for pattern in ("all-linear", r".*\.layers\.0\..*_proj"):
        config = RunConfig.model_validate({**BASE, "model": {"name": "m", "lora": {"target_modules": pattern}}})
        assert lora_config(config, model).target_modules == pattern


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("spec", ["deft", "mile(1)", "clip"])
def test_adapters_over_a_bfloat16_base_have_the_gradients_of_a_float32_base(spec, autocast, tmp_path):
    model = make_model(torch.bfloat16)
    arguments = {"optim": "sgd", "learning_rate": 0.0, "gradient_accumulation_steps": 2}
    trainer, watch = make_trainer(
        copy.deepcopy(model), make_arguments(tmp_path, bf16=autocast, **arguments), ROWS, objective=spec,
        peft_config=lora(),
    )  # fmt: skip
    dtypes = {"lora_" in name: p.dtype for name, p in trainer.model.named_parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    trainer.train()
    wide, expected = make_trainer(
        model.float(), make_arguments(tmp_path, **arguments), ROWS, objective=spec, peft_config=lora()
    )
    set_peft_model_state_dict(wide.model, get_peft_model_state_dict(trainer.model))
    wide.train()
    found, reference = (t.state.log_history[0]["loss"] for t in (trainer, wide))
    assert abs(found - reference) <= 2**-6 * reference
    assert {g.dtype for g in watch.steps[0].values()} == {torch.float32}
    assert deviation(watch.steps[0], expected.steps[0]) <= 0.1


def test_the_oracle_of_the_float32_base_is_the_logits_own(tmp_path):
    """What the test above compares with is right itself."""
    arguments = make_arguments(tmp_path, optim="sgd", learning_rate=0.0, gradient_accumulation_steps=2)
    trainer, watch = make_trainer(make_model(torch.bfloat16).float(), arguments, ROWS, peft_config=lora())
    _, expected = oracle(trainer.model, ROWS, "deft", Context())
    trainer.train()
    assert deviation(watch.steps[0], expected) <= 1e-5


def held_out_loss(config, model) -> float:
    """The objective's mean over the held-out tokens, from the model's logits."""
    held = prepare(config, lambda _: None).eval
    total = count = 0.0
    for row in held.examples:
        targets = shifted(torch.tensor([row.labels]))
        with torch.no_grad():
            logits = model(torch.tensor([row.input_ids])).logits
        total += float(deftune.token_loss(logits, targets, config.objective, reduction="sum"))
        count += int((targets != -100).sum())
    return total / count


@pytest.mark.parametrize("packing", [False, True])
def test_a_run_trains_adapters_over_a_bfloat16_base(tmp_path, make_config, packing):
    run = tmp_path / "run"
    config = make_config(
        run, {**LORA, "model.dtype": "bfloat16", "data.packing": packing, "train.max_steps": 3, "data.holdout": 0.2}
    )
    printed = Console(file=io.StringIO(), width=1000)
    train_run(config, printed)
    assert "with LoRA r=4 over bfloat16 weights" in printed.file.getvalue()
    adapter = load_file(run / "model" / "adapter_model.safetensors")
    assert {value.dtype for value in adapter.values()} == {torch.float32}
    model, _ = load_result(str(run))
    merged, _ = load_result(str(merge(Run(run), tmp_path / "merged")))
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        one, other = model(ids).logits, merged(ids).logits
    assert one.dtype == other.dtype == torch.float32
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    final = next(record for record in records if record.get("final"))
    assert final["eval_loss"] == pytest.approx(held_out_loss(config, merged), rel=2**-6)


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory) -> str:
    """bitsandbytes quantises blocks of 64, and on a CPU its rows must hold whole blocks."""
    folder = tmp_path_factory.mktemp("models") / "wide"
    return str(save_model(folder, make_tokenizer(size=320), hidden_size=64, intermediate_size=128))


@pytest.mark.parametrize(("dtype", "packing"), [("float32", False), ("auto", True)])
def test_a_run_trains_adapters_over_4_bit_weights(tmp_path, make_config, wide_model, dtype, packing):
    """And its result has the weights that it was trained on, not the original ones."""
    pytest.importorskip("bitsandbytes")
    run = tmp_path / "run"
    config = make_config(
        run,
        {**LORA, "model.name": wide_model, "model.quantization": "4bit", "model.dtype": dtype, "data.packing": packing,
         "data.holdout": 0.2},
    )  # fmt: skip
    printed = Console(file=io.StringIO(), width=1000)
    train_run(config, printed)
    assert f"over 4-bit and {'bfloat16' if dtype == 'auto' else dtype} weights" in printed.file.getvalue()
    adapter = load_file(run / "model" / "adapter_model.safetensors")
    assert {value.dtype for value in adapter.values()} == {torch.float32}
    merged, _ = load_result(str(merge(Run(run), tmp_path / "merged")))
    final = next(record for record in Run(run).read_metrics() if record.get("final"))["eval_loss"]
    assert final == pytest.approx(held_out_loss(config, merged), rel=2**-6 if dtype == "auto" else 1e-4)
    original, _ = load_result(f"{run}:0")
    layer, other = (model.model.layers[0].mlp.down_proj.weight.detach() for model in (merged, original))
    assert 0.02 < float((layer - other).norm() / other.norm()) < 0.2, "NF4 is some percent away from the weights"


@pytest.mark.parametrize("spec", ["deft", "clip"])
def test_adapters_over_4_bit_weights_have_the_gradients_of_the_dequantised_ones(spec, wide_model, tmp_path):
    """Also after an evaluation, for which bitsandbytes' CPU kernels would repack the weights."""
    pytest.importorskip("bitsandbytes")
    arguments = {"optim": "sgd", "learning_rate": 0.0, "gradient_accumulation_steps": 2}
    quantised = load_model(wide_model, quantization="4bit")
    plain = load_model(wide_model)
    plain.load_state_dict(load_model(wide_model, quantization="4bit").dequantize().state_dict())
    trainer, watch = make_trainer(
        quantised, make_arguments(tmp_path, **arguments), ROWS, objective=spec, peft_config=lora()
    )
    assert {p.dtype for p in trainer.model.parameters() if p.requires_grad} == {torch.float32}
    with torch.no_grad():
        trainer.model.eval()(input_ids=torch.arange(8)[None])
    trainer.train()
    other, expected = make_trainer(
        plain, make_arguments(tmp_path, **arguments), ROWS, objective=spec, peft_config=lora()
    )
    set_peft_model_state_dict(other.model, get_peft_model_state_dict(trainer.model))
    other.train()
    assert deviation(watch.steps[0], expected.steps[0]) <= 1e-4


def test_4_bit_weights_need_an_adapter_and_a_head_that_is_not_quantised(tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = make_model(torch.float32)
    model.is_quantized = True
    with pytest.raises(ValueError, match=r"is quantised; load the original weights, or 4-bit ones"):
        check_model(model, False, deftune.objective("deft"))
    model.is_quantized = False
    model.lm_head = bitsandbytes.nn.Linear4bit(16, 48, bias=False).to("cpu")
    with pytest.raises(ValueError, match=r"the head is a Linear4bit, not a plain Linear"):
        make_trainer(model, make_arguments(tmp_path), ROWS, peft_config=lora())


def test_a_missing_bitsandbytes_is_named(tmp_path, make_config, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = make_config(tmp_path / "run", {**LORA, "model.quantization": "4bit"})
    with pytest.raises(ConfigError, match=r"model\.quantization: bitsandbytes is not installed; pip install"):
        check_bitsandbytes("model.quantization")
    with pytest.raises(ConfigError):
        load_model(config.model.name, quantization="4bit")


def test_the_attention_is_the_one_that_is_named(tmp_path, make_config):
    losses = {}
    for name in ("auto", "eager"):
        config = make_config(tmp_path / name, {"model.attention_implementation": name, "train.max_steps": 1})
        base = load_base(prepare(config, lambda _: None))
        assert base.config._attn_implementation == ("sdpa" if name == "auto" else name)
        assert fits_in_memory(config) == (name == "auto")
        with open(os.devnull, "w") as nowhere:
            losses[name] = train_run(config, Console(file=nowhere)).run.read_metrics()[0]["loss"]
    assert losses["eager"] == pytest.approx(losses["auto"], rel=1e-5)
    with pytest.raises(
        ConfigError, match=r"model\.attention_implementation: flash attention needs a GPU; leave it out"
    ):
        check_config(make_config(tmp_path / "flash", {"model.attention_implementation": "flash_attention_2"}))


def test_flash_attention_without_its_package_is_refused_before_the_data_are_read(tmp_path, make_config, monkeypatch):
    config = make_config(tmp_path / "flash", {"model.attention_implementation": "flash_attention_2"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match="neither flash-attn nor kernels is installed; pip install one of them, or leav"
    ):
        check_config(config)


def test_noise_on_the_embeddings_changes_the_training_and_not_the_evaluation(tmp_path, make_config):
    records = {}
    for alpha in (None, 5.0):
        settings = {
            "train.neftune_alpha": alpha,
            "train.max_steps": 1,
            "data.holdout": 0.2,
            "train.learning_rate": 1e-12,
        }
        with open(os.devnull, "w") as nowhere:
            records[alpha] = train_run(make_config(tmp_path / str(alpha), settings), Console(file=nowhere)).run
    noisy, plain = (records[alpha].read_metrics() for alpha in (5.0, None))
    assert abs(noisy[0]["loss"] / plain[0]["loss"] - 1) > 1e-3
    assert noisy[-1]["eval_loss"] == pytest.approx(plain[-1]["eval_loss"], rel=1e-6)


def test_liger_is_for_the_layers_of_a_gpu(tmp_path, make_config, monkeypatch):
    config = make_config(tmp_path / "run", {"train.liger": True})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"train\.liger: liger-kernel is not installed; pip install liger-kernel"):
        check_config(config)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=r"train\.liger: Liger's kernels need a GPU; leave it out"):
        check_config(config)
    monkeypatch.undo()
    prepared = prepare(make_config(tmp_path / "run"), lambda _: None)
    prepared.config = config
    arguments = make_run_arguments(prepared, Run(tmp_path / "run"))
    assert arguments.use_liger_kernel and not any(arguments.liger_kernel_config.values())


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    return monkeypatch


@pytest.mark.parametrize(
    ("overrides", "on_cpu", "on_gpu"),
    [
        ([], "float32", "float32"),
        (["model.lora.r=4"], "float32", "bfloat16"),
        (["model.lora.r=4", "model.dtype=float32"], "float32", "float32"),
        (["model.lora.r=4", "model.dtype=bfloat16"], "bfloat16", "bfloat16"),
        (["model.lora.r=4", "train.precision=fp32"], "float32", "float32"),
        (["model.lora.r=4", "train.fsdp=true"], "float32", "float32"),
    ],
)
def test_auto_is_bfloat16_for_adapters_on_a_gpu(overrides, on_cpu, on_gpu, gpu):
    config = load_config(None, overrides, json.loads(json.dumps(BASE)))
    assert base_dtype(config) == on_gpu
    assert fits_in_memory(config) == (on_gpu == "float32" and not config.train.fsdp)
    gpu.undo()
    assert base_dtype(config) == on_cpu


def test_a_gpu_without_bfloat16_is_named(gpu):
    gpu.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    config = load_config(None, ["model.lora.r=4", "model.dtype=bfloat16"], json.loads(json.dumps(BASE)))
    with pytest.raises(ConfigError, match=r"model\.dtype: this GPU has no bfloat16; use float32"):
        check_config(config)
