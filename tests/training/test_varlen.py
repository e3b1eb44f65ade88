"""Rows end to end with their boundaries (`varlen`): the same losses and gradients as padded rows."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from safetensors.torch import load_file
from small import PAD, Gradients, deviation, make_arguments, make_model, make_rows, make_trainer

from deftune.artifacts.config import RunConfig
from deftune.artifacts.runs import Run
from deftune.data.examples import Encoded
from deftune.data.packing import Collator, pack
from deftune.training import assembly, attention, machine
from deftune.training import train as train_module
from deftune.training import trainer as trainer_module
from deftune.training.assembly import Batches, chosen_attention, compiles_layers, make_dataset
from deftune.training.attention import attention_kernels, why_not_varlen
from deftune.training.compiling import why_not_compiled
from deftune.training.machine import expects_compiled, weights_of
from deftune.training.plan import Checkpointing
from deftune.training.preparation import prepare
from deftune.training.train import dry_run, train_run

FLOAT32 = 2e-5  # of a step's largest gradient: two orders of float32 sums over a few hundred tokens
FLOAT64 = 1e-12
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and none is here")


def one_step(folder, sequences, model, *, padding_free: bool, **more) -> tuple[dict, dict, Gradients]:
    """The record and the gradients of one optimizer step over all sequences, two in a micro-batch."""
    arguments = make_arguments(
        folder, per_device_train_batch_size=2, gradient_accumulation_steps=16, optim="sgd", learning_rate=0.0,
        remove_unused_columns=False, gradient_checkpointing=more.pop("gradient_checkpointing", False),
    )  # fmt: skip
    trainer, watch = make_trainer(
        model, arguments, make_dataset(range(len(sequences))).to_list(),
        data_collator=Batches(list(sequences), Collator(PAD, padding_free=padding_free)), **more,
    )  # fmt: skip
    trainer.train()
    return trainer.state.log_history[0], watch.steps[0], trainer


def rows() -> list[Encoded]:
    return [Encoded(row["input_ids"], row["labels"], "here", "rows") for row in make_rows(16)]


@pytest.mark.parametrize("spec", ["deft", "clip", "mile"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_rows_end_to_end_are_trained_as_padded_ones(spec, packed, checkpointing, tmp_path):
    record, gradients, _ = one_step(
        tmp_path, rows(), make_model(torch.float32), padding_free=False, objective=spec, attention="math"
    )
    sequences = pack(rows(), 40) if packed else rows()
    model = make_model(torch.float32)
    other, found, _ = one_step(
        tmp_path, sequences, model, padding_free=True, objective=spec, attention="varlen",
        gradient_checkpointing=checkpointing,
    )  # fmt: skip
    assert other["tokens"] == record["tokens"] and other["input_tokens"] == record["input_tokens"]
    assert abs(other["loss"] - record["loss"]) <= FLOAT32 * max(1, record["loss"])
    assert deviation(found, gradients) <= FLOAT32
    assert model.config._attn_implementation == "sdpa"  # for whoever uses the model next


def test_a_gradient_that_is_not_finite_is_explained(tmp_path):
    """The batch holds the boundaries of its rows twice, as one tensor."""
    model = make_model(torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 2] = torch.nan
    with pytest.raises(ValueError, match=r"The weight model\.layers\.1\.mlp\.up_proj\.weight is not finite"):
        one_step(tmp_path, rows(), model, padding_free=True)
    saved = load_file(tmp_path / "nonfinite" / "step-1" / "micro-batch-1.safetensors")
    assert saved["cu_seq_lens_q"].equal(saved["cu_seq_lens_k"])


def test_adapters_are_trained_on_rows_end_to_end(tmp_path):
    """LoRA, through PEFT's wrapper: the same loss and gradients of the adapters as on padded rows."""
    from peft import LoraConfig

    found = []
    for choice, padding_free in (("math", False), ("varlen", True)):
        torch.manual_seed(0)  # the adapters' random start
        lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
        found.append(
            one_step(tmp_path, rows(), make_model(torch.float64), padding_free=padding_free, attention=choice,
                     peft_config=lora)
        )  # fmt: skip
    (record, gradients, _), (other, others, _) = found
    assert all("lora" in name for name in gradients)
    assert abs(other["loss"] - record["loss"]) <= FLOAT64 * max(1, record["loss"])
    assert deviation(others, gradients) <= FLOAT64


def test_a_sliding_window_is_kept(tmp_path):
    """Mistral's layers see four tokens back; rows are longer than that."""
    model = make_model(torch.float32, transformers.MistralForCausalLM, sliding_window=4)
    free = make_model(torch.float32, transformers.MistralForCausalLM, sliding_window=None)
    record, gradients, _ = one_step(tmp_path, rows(), copy.deepcopy(model), padding_free=False)
    unlimited, _, _ = one_step(tmp_path, rows(), free, padding_free=False)
    assert abs(unlimited["loss"] - record["loss"]) > 100 * FLOAT32  # the window matters here
    other, found, _ = one_step(tmp_path, rows(), model, padding_free=True, attention="varlen")
    assert abs(other["loss"] - record["loss"]) <= FLOAT32 * record["loss"]
    assert deviation(found, gradients) <= FLOAT32


def test_a_batch_without_boundaries_is_an_error(tmp_path):
    trainer, _ = make_trainer(make_model(torch.float32), make_arguments(tmp_path), make_rows(4), attention="varlen")
    with pytest.raises(ValueError, match=r"varlen needs rows that lie end to end, with their boundaries"):
        trainer.train()


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"attn_implementation": "eager"}, "attn_implementation is 'eager'"),
        ({"attention_dropout": 0.1}, "has attention dropout"),
    ],
)
def test_models_that_the_kernel_cannot_train_are_refused_with_the_reason(options, reason, tmp_path):
    model = make_model(torch.float32, **options)
    assert reason in str(why_not_varlen(model))
    with pytest.raises(ValueError, match=f"attention='varlen': .*{reason}.*; use another attention"):
        make_trainer(model, make_arguments(tmp_path), make_rows(4), attention="varlen")


def test_attention_without_the_model_is_an_error():
    with pytest.raises(ValueError, match="varlen needs the model"), attention_kernels("varlen"):
        pass


def run_config(tmp_path, **train) -> RunConfig:
    data = {"train": [{"path": "rows.jsonl"}]}
    return RunConfig.model_validate({"run": str(tmp_path), "model": {"name": "m"}, "data": data, "train": train})


def test_auto_is_varlen_in_bfloat16_where_the_model_allows_it(tmp_path, monkeypatch):
    """The GPU and its kernel are assumed; the check of the model's attention runs for real."""
    model = make_model(torch.float32)
    assert chosen_attention(run_config(tmp_path), model) == "auto" or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(attention, "TORCH_VARLEN", attention.attend_rows)
    assert chosen_attention(run_config(tmp_path, precision="bf16"), model) == "varlen"
    assert chosen_attention(run_config(tmp_path, precision="fp32"), model) == "auto"
    assert chosen_attention(run_config(tmp_path, precision="bf16", attention="flash"), model) == "flash"
    assert chosen_attention(run_config(tmp_path, precision="bf16"), make_model(attention_dropout=0.1)) == "auto"


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 48])
@pytest.mark.parametrize("lengths", [[128, 7, 1, 300, 64], [1024]])
def test_torchs_kernel_agrees_with_float64(lengths, window):
    """Qwen's heads (12 of 128, 2 for the keys): outputs and gradients against the plain formula, in float64."""
    from deftune.data.packing import row_boundaries

    generator = torch.Generator("cuda").manual_seed(0)
    total = sum(lengths)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(total, heads, 128, device="cuda", generator=generator).bfloat16().requires_grad_()

    inputs = [draw(12), draw(2), draw(2)]
    upstream = torch.randn(total, 12, 128, device="cuda", generator=generator).bfloat16()
    bounds = row_boundaries(lengths)
    output = attention.attend_rows(*inputs, bounds["cu_seq_lens_q"].cuda(), bounds["max_length_q"], None, window)
    found = [output, *torch.autograd.grad(output, inputs, upstream)]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).cuda()
    place = torch.arange(total, device="cuda")
    back = place[:, None] - place[None]
    seen = (row[:, None] == row[None]) & (back >= 0) & (back < (window or total))
    q, k, v = exact[0], exact[1].repeat_interleave(6, 1), exact[2].repeat_interleave(6, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / 128**0.5
    reference = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
    expected = [reference, *torch.autograd.grad(reference, exact, upstream.double())]
    for one, other in zip(found, expected):
        assert float((one - other).norm() / other.norm()) <= 1e-2  # bfloat16 operands


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("cls", ["LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM"])
def test_a_bfloat16_step_on_a_gpu_agrees_with_padded_rows(cls, tmp_path):
    found = []
    for choice, padding_free in (("math", False), ("varlen", True)):
        model = make_model(
            torch.float32, getattr(transformers, cls), scale=1.0, hidden_size=128, num_attention_heads=2, head_dim=64,
            sliding_window=4,
        )  # fmt: skip
        arguments = make_arguments(tmp_path, use_cpu=False, bf16=True, per_device_train_batch_size=16, max_steps=1,
                                   remove_unused_columns=False)  # fmt: skip
        trainer, watch = make_trainer(
            model, arguments, make_dataset(range(16)).to_list(), attention=choice,
            data_collator=Batches(rows(), Collator(PAD, padding_free=padding_free)),
        )  # fmt: skip
        trainer.train()
        found.append((trainer.state.log_history[0]["loss"], watch.steps[0]))
    (loss, gradients), (other, others) = found
    assert abs(loss - other) <= 2e-3 * loss  # bfloat16 compute, float32 sums
    assert deviation(others, gradients) <= 2e-2


@pytest.mark.long
@pytest.mark.parametrize("choice", [pytest.param("auto", marks=pytest.mark.slow), "varlen"])
def test_compiled_layers_train_as_plain_ones_and_leave_the_model_plain(choice, tmp_path):
    """Micro-batches of several lengths; afterwards no layer is compiled."""
    flat = choice == "varlen"
    record, gradients, _ = one_step(tmp_path, rows(), make_model(torch.float32), padding_free=flat, attention=choice)
    model = make_model(torch.float32)
    calls = []
    for layer in model.model.layers:
        layer.compile = lambda layer=layer, **options: (
            calls.append(options),
            torch.nn.Module.compile(layer, **options),
        )
    other, found, _ = one_step(tmp_path, rows(), model, padding_free=flat, attention=choice, compile_layers=True)
    assert calls == [{"dynamic": True if flat else None}] * 2
    assert abs(other["loss"] - record["loss"]) <= FLOAT32 * max(1, record["loss"])
    assert deviation(found, gradients) <= FLOAT32
    assert all(layer._compiled_call_impl is None for layer in model.model.layers)


def test_a_model_that_does_not_name_its_layers_is_refused(tmp_path):
    model = make_model(torch.float32)
    model._no_split_modules = None
    trainer, _ = make_trainer(model, make_arguments(tmp_path), make_rows(4), compile_layers=True)
    with pytest.raises(ValueError, match="does not name its decoder layers"):
        trainer.train()


def test_layers_that_torch_cannot_compile_are_an_error_with_the_remedy(tmp_path, monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError("no code for this graph")

    compile_layer = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda layer, **options: compile_layer(layer, backend=broken, **options)
    )
    trainer, _ = make_trainer(make_model(torch.float32), make_arguments(tmp_path), make_rows(4), compile_layers=True)
    with pytest.raises(ValueError, match=r"cannot compile LlamaDecoderLayer \(.*\); set train.compile=false"):
        trainer.train()


def test_evaluations_run_plain_layers(tmp_path, monkeypatch):
    """Compiled anew for a forward without gradients, a layer would take seconds at the first evaluation."""
    with_gradients = []

    def backend(graph, inputs):
        with_gradients.append(torch.is_grad_enabled())
        return graph

    compile_layer = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda layer, **options: compile_layer(layer, backend=backend, **options)
    )
    asked = []
    arguments = make_arguments(tmp_path, eval_strategy="steps", eval_steps=1)
    trainer, _ = make_trainer(
        make_model(torch.float32), arguments, make_rows(8), compile_layers=True,
        eval_dataset=Dataset.from_list(make_rows(4)),
        score_tasks=lambda model: asked.append(model(torch.tensor([[1, 2, 3]]))) or {"task": 0.5},
    )  # fmt: skip
    trainer.train()
    evaluations = [record for record in trainer.state.log_history if "eval_loss" in record]
    assert len(evaluations) == len(asked) == 2 and evaluations[0]["eval_task"] == 0.5
    assert with_gradients and all(with_gradients)


def prepared_run(tmp_path, steps: int = 150, recompute: bool = False, **train) -> Any:
    config = run_config(tmp_path, batch_size=8, micro_batch_size=4, **train)
    micro_batches = steps * 2
    return SimpleNamespace(
        config=config, steps=steps, micro_batches=micro_batches, checkpointing=SimpleNamespace(on=recompute)
    )


def test_auto_compiles_layers_in_long_runs_on_a_gpu(tmp_path, monkeypatch):
    """150 steps of two micro-batches earn it, 149 do not."""
    model = make_model(torch.float32)
    assert not compiles_layers(prepared_run(tmp_path), model, "varlen")  # no GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    assert compiles_layers(prepared_run(tmp_path), model, "varlen")
    assert not compiles_layers(prepared_run(tmp_path, steps=149), model, "varlen")
    assert not compiles_layers(prepared_run(tmp_path, recompute=True), model, "varlen")
    assert not compiles_layers(prepared_run(tmp_path), model, "auto")
    assert not compiles_layers(prepared_run(tmp_path, compile=False), model, "varlen")
    assert not compiles_layers(prepared_run(tmp_path, weights="float32"), model, "varlen")
    assert not compiles_layers(prepared_run(tmp_path, liger=True), model, "varlen")
    assert compiles_layers(prepared_run(tmp_path, steps=1, compile="layers"), model, "flash")


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda model, patch: setattr(model, "_no_split_modules", None), "does not name its decoder layers"),
        (lambda model, patch: setattr(model.config, "model_type", "mixtral"), "layers of mixtral have not been tried"),
        (lambda model, patch: patch.setattr(type(model), "__module__", "their_code"), "not that of transformers"),
        (lambda model, patch: patch.setenv("PATH", ""), "needs a C compiler"),
    ],
)
def test_auto_compiles_no_layers_that_were_not_tried(tmp_path, monkeypatch, change, reason):
    model = make_model(torch.float32)
    assert why_not_compiled(model) is None
    with monkeypatch.context() as patch:
        change(model, patch)
        assert reason in str(why_not_compiled(model))


def test_the_choices_of_auto_reach_the_trainer(tmp_path, make_config, monkeypatch):
    class Made(Exception):
        pass

    def make(*args, **kwargs):
        raise Made({name: kwargs[name] for name in ("weights", "compile_layers")})

    monkeypatch.setattr(trainer_module, "DeftSFTTrainer", make)
    monkeypatch.setattr(assembly, "weights_of", lambda config: "bfloat16_with_masters")
    monkeypatch.setattr(assembly, "compiles_layers", lambda *_: True)
    with pytest.raises(Made) as made:
        train_run(make_config(tmp_path / "run", {}))
    assert made.value.args[0] == {"weights": "bfloat16_with_masters", "compile_layers": True}


@pytest.mark.parametrize("compiled", [True, False])
def test_activations_are_recomputed_if_the_layers_are_not_compiled_after_all(
    tmp_path, make_config, monkeypatch, compiled
):
    """Memory was counted for compiled layers, and the model turns out to have other ones."""
    prepared = prepare(make_config(tmp_path / "run", {"train": {"max_steps": 1}}), print)
    prepared.checkpointing = Checkpointing(False, needs_compiled=True)
    monkeypatch.setattr(assembly, "compiles_layers", lambda *_: compiled)
    monkeypatch.setattr(assembly, "chosen_attention", lambda *_: "varlen")
    (name,) = assembly.checkpointing_argument(True)
    trainer = assembly.make_trainer(prepared, Run(tmp_path / "run"))
    assert bool(getattr(trainer.args, name)) is not compiled
    trainer.compile_layers = False
    trainer.train()
    assert any(getattr(module, "gradient_checkpointing", False) for module in trainer.model.modules()) is not compiled


def test_a_dry_run_computes_as_the_run(tmp_path, make_config, monkeypatch):
    """Rows end to end go through the attention that takes their boundaries, and not through a mask."""
    calls = []
    attend = attention.attend_rows
    monkeypatch.setattr(attention, "attend_rows", lambda *given: calls.append(1) or attend(*given))
    config = make_config(tmp_path / "run", {"train": {"attention": "varlen"}})
    trained = train_module.make_trainer

    def made(*given):
        trainer = trained(*given)
        calls.clear()  # of the checks
        return trainer

    monkeypatch.setattr(train_module, "make_trainer", made)
    dry_run(config, print)
    assert calls


@pytest.mark.parametrize("kind, expected", [("long", True), ("no kernel", False), ("short", False), ("padded", False)])
def test_a_run_expects_compiled_layers_before_its_model_is_loaded(tmp_path, monkeypatch, kind, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    lacks = "the kernel needs a GPU" if kind == "no kernel" else None
    monkeypatch.setattr(machine, "why_no_varlen_kernel", lambda: lacks)
    config = run_config(tmp_path, **({"attention": "flash"} if kind == "padded" else {}))
    assert expects_compiled(config, 299 if kind == "short" else 300) is expected


@pytest.mark.parametrize(
    "more, expected",
    [
        ({}, "bfloat16_with_masters"),
        ({"train": {"weights": "float32"}}, "float32"),
        ({"train": {"precision": "fp32"}}, "float32"),
        ({"train": {"optimizer": "adafactor"}}, "float32"),
        ({"train": {"fsdp": True}}, "float32"),
        ({"model": {"name": "m", "lora": {"r": 4}}}, "float32"),
    ],
)
def test_auto_weights_are_bfloat16_where_masters_were_measured(tmp_path, monkeypatch, more, expected):
    config = RunConfig.model_validate({**run_config(tmp_path).model_dump(), **more})
    assert weights_of(config) == ("float32" if more.get("train", {}).get("weights", "auto") == "auto" else expected)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    assert weights_of(config) == expected
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert weights_of(config) == "float32"
