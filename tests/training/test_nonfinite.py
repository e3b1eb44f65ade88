"""A gradient that is not finite is explained: reruns of the micro-batch name the layer, operation and remedy."""

import json

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file
from small import make_arguments, make_model, make_rows, make_trainer

from deftune.training import attention

ROWS = make_rows(12)


class WrongBackward(torch.autograd.Function):
    """A kernel whose forward is right and whose gradients are NaN."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * torch.nan


def break_flash(monkeypatch, call: int) -> None:
    """From now on torch's flash kernel has wrong gradients in each second attention, as cuDNN's had in one layer."""
    right, calls = torch.nn.functional.scaled_dot_product_attention, [0]

    def attend(*args, **kwargs):
        calls[0] += 1
        out = right(*args, **kwargs)
        return WrongBackward.apply(out) if torch.backends.cuda.flash_sdp_enabled() and calls[0] % 2 == call else out

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)


def trainer_of(tmp_path, **more):
    arguments = make_arguments(tmp_path / "out", gradient_accumulation_steps=2, per_device_train_batch_size=2)
    return make_trainer(make_model(torch.float32), arguments, ROWS, **{"objective": "deft", **more})[0]


def error_of(trainer) -> str:
    with pytest.raises(ValueError) as caught:
        trainer.train()
    return str(caught.value)


def test_a_wrong_attention_kernel_is_named_with_the_one_to_use(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    break_flash(monkeypatch, call=0)
    text = error_of(trainer)
    assert text.startswith("training step 1: the gradient's norm is nan; the weights were not changed.")
    assert "Micro-batch 1 of 2, run again: the forward pass is finite, the backward pass is not" in text
    assert "first in model.layers.1.self_attn (WrongBackwardBackward)" in text
    assert "flash not finite" in text and "math finite" in text
    assert text.endswith("The attention kernel is at fault: set train.attention=math.")
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters()))
    saved = tmp_path / "out" / "nonfinite" / "step-1"
    assert str(saved) in text
    batch = load_file(saved / "micro-batch-1.safetensors")
    assert {"input_ids", "labels"} <= batch.keys() and len(batch["input_ids"]) == 2
    assert json.loads((saved / "diagnosis.json").read_text())["gradient"] == "model.layers.1.self_attn"


def test_the_kernel_that_the_advice_names_trains(tmp_path, monkeypatch):
    break_flash(monkeypatch, call=0)
    trainer_of(tmp_path, attention="math").train()


def test_an_overflow_in_the_forward_pass_is_named_by_its_layer(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.model.model.layers[1].mlp.act_fn.register_forward_hook(
        lambda module, args, out: out * torch.inf if trainer.state.global_step == 1 else out
    )
    text = error_of(trainer)
    assert text.startswith("training step 2: ")
    assert "the forward pass is not finite, first in model.layers.1.mlp.act_fn" in text
    assert "look at the rows of this micro-batch" in text


def test_weights_that_are_not_finite_are_named(tmp_path):
    trainer = trainer_of(tmp_path)
    with torch.no_grad():
        trainer.model.model.layers[0].mlp.up_proj.weight[3, 2] = torch.nan
    text = error_of(trainer)
    assert "The weight model.layers.0.mlp.up_proj.weight is not finite." in text
    assert "start from whole weights" in text


def test_a_failure_that_does_not_repeat_is_not_blamed_on_the_learning_rate(tmp_path):
    trainer, seen = trainer_of(tmp_path), []

    def once(grad):
        seen.append(1)
        return grad * torch.nan if len(seen) == 1 else grad

    trainer.model.model.norm.weight.register_hook(once)
    text = error_of(trainer)
    assert "each of the step's 2 micro-batches has finite gradients" in text
    assert "The failure did not repeat" in text and "learning rate" not in text


def test_a_full_disk_does_not_hide_the_failure(tmp_path, monkeypatch):
    """safetensors has a class of its own for it, which is no OSError."""

    def full(*_):
        raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    trainer = trainer_of(tmp_path)
    break_flash(monkeypatch, call=0)
    text = error_of(trainer)
    assert "micro-batches could not be saved (Error while serializing: I/O error: No space left" in text
    assert "set train.attention=math" in text


@pytest.mark.parametrize("spec", ["mile", "clip"])
def test_objectives_of_a_whole_step_are_explained_too(tmp_path, monkeypatch, spec):
    trainer = trainer_of(tmp_path, objective=spec)
    break_flash(monkeypatch, call=0)
    assert "set train.attention=math" in error_of(trainer)


def test_cudnn_is_never_chosen_by_default():
    assert "cudnn" not in attention.kernels_of("auto")
    with attention.attention_kernels():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.math_sdp_enabled()
    with attention.attention_kernels("cudnn"):
        assert torch.backends.cuda.cudnn_sdp_enabled() and not torch.backends.cuda.math_sdp_enabled()
    with pytest.raises(ValueError, match="unknown kernel 'fast'; one of auto, varlen, flash, efficient, math, cudnn"):
        attention.kernels_of("fast")


def test_with_masters_float32_and_the_layer_are_tried_too(tmp_path, monkeypatch):
    """The reruns take the float32 masters as weights; afterwards the model has its bfloat16 weights again."""
    arguments = make_arguments(tmp_path / "out", per_device_train_batch_size=2, bf16=True)
    trainer = make_trainer(make_model(torch.float32), arguments, ROWS, weights="bfloat16_with_masters")[0]
    before = [p.detach().clone() for p in trainer.model.parameters()]
    kind = type(trainer.model.model.layers[1].mlp)
    plain = kind.forward

    def overflow(self, hidden):
        out = plain(self, hidden)
        return out * torch.inf if torch.is_autocast_enabled("cpu") else out

    monkeypatch.setattr(kind, "forward", overflow)
    text = error_of(trainer)
    assert "the forward pass is not finite, first in model.layers.0.mlp; in float32 it is finite" in text
    assert "bfloat16 overflows there: set train.precision=fp32" in text
    after = list(trainer.model.parameters())
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("weights", ["float32", "bfloat16_with_masters"])
@pytest.mark.parametrize("compiled", ["layers", "whole"])
@pytest.mark.parametrize("compiled_only", [True, False])
def test_compiled_code_is_told_from_the_layers_own_fault(tmp_path, monkeypatch, compiled_only, compiled, weights):
    """The compiler here runs a graph as it is; a layer is wrong while it is compiled, or always."""
    from deftune.training import compiling

    def attend(self, *args, **kwargs):
        out = plain(self, *args, **kwargs)
        wrong = self.layer_idx == 1 and (torch.compiler.is_compiling() or not compiled_only)
        return (WrongBackward.apply(out[0]) if wrong else out[0], *out[1:])

    whole = {"torch_compile": True, "torch_compile_backend": "eager"} if compiled == "whole" else {}
    arguments = make_arguments(
        tmp_path / "out",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        bf16=weights != "float32",
        **whole,
    )
    trainer = make_trainer(make_model(torch.float32), arguments, ROWS, weights=weights, compile_layers=not whole)[0]
    kind = type(trainer.model.model.layers[0].self_attn)
    plain = kind.forward
    monkeypatch.setattr(kind, "forward", attend)
    compile_layer = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda layer, **options: compile_layer(layer, backend="eager", **options)
    )
    text = error_of(trainer)
    if compiled_only:
        assert "Micro-batch 1 of 2, run again, is not finite in the code of torch.compile, and finite without" in text
        assert text.endswith("The compiled code is at fault: set train.compile=false.")
    else:
        assert "first in model.layers.1.self_attn (WrongBackwardBackward)" in text
    assert all(layer._compiled_call_impl is None for layer in compiling.decoder_layers(trainer.model))
