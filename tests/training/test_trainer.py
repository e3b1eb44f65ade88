"""The trainer's loss is that of the whole step, however it is divided; options are honoured or refused."""

import copy
import functools
import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig
from small import (
    END,
    PAD,
    deviation,
    make_arguments,
    make_model,
    make_rows,
    make_tokenizer,
    make_trainer,
    oracle,
    padded,
)  # fmt: skip

import deftune
from deftune.data.encoding import Encoded
from deftune.data.packing import Collator, pack
from deftune.objectives import IGNORE_INDEX, Context, TokenStats
from deftune.objectives.stats import from_columns
from deftune.tokens.head import shifted
from deftune.training import nonfinite
from deftune.training.assembly import Batches, make_dataset
from deftune.training.recording import P_EDGES, StepRecord, input_tokens
from deftune.training.refusals import check_divided
from deftune.training.trainer import DeftSFTTrainer

PARAMETERS = {"alpha": "alpha(0.7)", "top": "top(0.02)", "bottom": "bottom(0.02)"}
SPECS = [PARAMETERS.get(name, name) for name in deftune.OBJECTIVES] + [
    "deft | eos(nll)", "cayley | floor(0.1)", "deft | mean_one", "deft | warmup(0.3)", "eaft(5) | blend(nll, 0.3)",
    "clip | mean_one", "mile(2) | floor(0.1)",
]  # fmt: skip
ROWS = make_rows(40)
SPECIAL = (END, PAD)
FLOAT64, FLOAT32 = 1e-12, 1e-5  # a step's gradients and its loss: the same sums in another order


def windows(rows, size):
    return [rows[start : start + size] for start in range(0, len(rows), size)]


# --- accumulation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_a_step_is_the_same_however_it_is_accumulated(spec, tmp_path):
    """32 rows a step as 1 x 32, 2 x 16 and 32 x 1, and a last window of 8, against one call over all the tokens."""
    model = make_model()
    needs = deftune.objective(spec).requires
    expected = [
        oracle(model, rows, spec, Context(
            special_ids=SPECIAL if "special_ids" in needs else None, progress=step / 2 if "progress" in needs else None,
        ))
        for step, rows in enumerate(windows(ROWS, 32))
    ]  # fmt: skip
    for micro, accumulated in ((32, 1), (16, 2), (1, 32)):
        arguments = make_arguments(
            tmp_path, per_device_train_batch_size=micro, gradient_accumulation_steps=accumulated, optim="sgd",
            learning_rate=0.0,
        )  # fmt: skip
        trainer, watch = make_trainer(copy.deepcopy(model), arguments, ROWS, objective=spec)
        summary = trainer.train()
        losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
        assert len(losses) == len(watch.steps) == 2
        assert abs(summary.training_loss - sum(losses) / 2) <= FLOAT32 * max(1, abs(losses[0])), "the final train_loss"
        for (loss, gradients), found, found_loss in zip(expected, watch.steps, losses):
            assert deviation(found, gradients) <= FLOAT64, f"{accumulated} x {micro}"
            assert abs(found_loss - loss) <= FLOAT64 * max(1, abs(loss)), f"{accumulated} x {micro}"


@pytest.mark.parametrize("spec", ["nll", "deft", "mile", "clip"])
def test_in_float32_the_loss_agrees_to_five_digits(spec, tmp_path):
    runs = []
    for micro, accumulated in ((16, 1), (2, 8)):
        arguments = make_arguments(
            tmp_path, per_device_train_batch_size=micro, gradient_accumulation_steps=accumulated, max_grad_norm=1.0
        )
        trainer, _ = make_trainer(make_model(torch.float32), arguments, ROWS, objective=spec)
        trainer.train()
        runs.append([record["loss"] for record in trainer.state.log_history if "loss" in record])
    assert len(runs[0]) == 3
    assert all(abs(a - b) <= FLOAT32 * max(1, abs(a)) for a, b in zip(*runs))


def test_a_mass_objectives_gradients_are_rescaled_before_clipping(tmp_path):
    """After it, the clipped gradient's norm would not be the limit."""
    arguments = make_arguments(
        tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_grad_norm=0.01
    )
    trainer, watch = make_trainer(make_model(), arguments, ROWS[:8], objective="deft | mean_one")
    trainer.train()
    norm = torch.stack([g.norm() for g in watch.steps[0].values()]).norm()
    assert abs(norm.item() - 0.01) < 1e-6
    assert trainer.state.log_history[0]["grad_norm"] > 0.01 and trainer.state.log_history[0]["clipped"] == 1.0


def test_dropout_is_the_same_in_the_pre_pass(tmp_path):
    """A step objective's statistics are those of the very pass that is trained on."""
    model = make_model(attention_dropout=0.5)
    arguments = make_arguments(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    trainer, _ = make_trainer(model, arguments, ROWS[:8], objective="clip")
    seen, forward = [], trainer._forward

    def watched(*args, **kwargs):
        output = forward(*args, **kwargs)
        seen.append(output.stats.log_p)
        return output

    trainer._forward = watched
    trainer.train()
    assert len(seen) == 8
    assert all(torch.equal(a, b) for a, b in zip(seen[:4], seen[4:]))


# --- tokens that are not there ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["nll", "deft", "mile", "clip"])
def test_a_micro_batch_without_supervised_tokens_counts_for_nothing(spec, tmp_path):
    silent = [{"input_ids": row["input_ids"], "labels": [IGNORE_INDEX] * len(row["input_ids"])} for row in ROWS[:4]]
    model = make_model()
    loss, gradients = oracle(model, ROWS[4:8], spec, Context())
    arguments = make_arguments(tmp_path, gradient_accumulation_steps=2, optim="sgd", learning_rate=0.0)
    trainer, watch = make_trainer(model, arguments, silent + ROWS[4:8], objective=spec)
    trainer.train()
    assert deviation(watch.steps[0], gradients) <= FLOAT64
    assert abs(trainer.state.log_history[0]["loss"] - loss) <= FLOAT64 * max(1, loss)


@pytest.mark.parametrize("spec", ["deft", "mile", "clip"])
def test_a_step_without_supervised_tokens_is_an_error(spec, tmp_path):
    silent = [{"input_ids": row["input_ids"], "labels": [IGNORE_INDEX] * len(row["input_ids"])} for row in ROWS[:8]]
    trainer, _ = make_trainer(make_model(), make_arguments(tmp_path), ROWS[:4] + silent, objective=spec)
    with pytest.raises(ValueError, match=r"training step 2: none of its tokens is supervised, on any rank.*preview"):
        trainer.train()


class Watched:
    """A trainer of three steps, and what model and optimizer were when each step's gradient came."""

    def __init__(self, folder, **more):
        self.model = make_model(torch.float32)
        arguments = make_arguments(folder, save_strategy="steps", save_steps=1, **more)
        self.trainer, _ = make_trainer(self.model, arguments, ROWS[:12], objective="deft")
        self.trainer._explained = lambda inputs, why: ValueError(f"training step {inputs.step}: {why}")  # no reruns
        self.seen, self.factor = [], lambda step: 1.0
        self.model.model.norm.weight.register_hook(self.watch)

    def watch(self, grad):
        self.seen.append(self.state())
        return grad * self.factor(len(self.seen))

    def state(self):
        moments = [] if self.trainer.optimizer is None else self.trainer.optimizer.optimizer.state.values()
        return [p.detach().clone() for p in self.model.parameters()] + [
            torch.as_tensor(value).clone() for state in moments for value in state.values()
        ]

    def assert_not_made(self, step):
        """Step ``step`` changed nothing, was not counted, was not saved, and was the last whose gradient was made."""
        then, now = self.seen[step - 1], self.state()
        assert len(self.seen) == step and self.trainer.state.global_step == step - 1
        assert all(torch.equal(a, b) for a, b in zip(then, now)) and (step == 1 or len(then) == len(now))
        assert not list(Path(self.trainer.args.output_dir).glob(f"checkpoint-{step}"))
        assert not hasattr(self.trainer.optimizer.optimizer, "found_inf")
        assert self.trainer.args.logging_nan_inf_filter  # as it was


@pytest.mark.parametrize("wrong_step", [1, 2, 3], ids="step {}".format)
@pytest.mark.parametrize("logging_steps", [1, 5], ids="logged every {}".format)
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "sgd"])
@pytest.mark.parametrize("clip", [0.0, 1.0], ids="clip {}".format)
def test_a_gradient_without_a_number_never_reaches_the_weights(tmp_path, clip, optim, logging_steps, wrong_step):
    watched = Watched(tmp_path, max_grad_norm=clip, optim=optim, logging_steps=logging_steps)
    watched.factor = lambda step: torch.nan if step == wrong_step else 1.0
    with pytest.raises(ValueError, match=rf"step {wrong_step}: the gradient's norm is nan"):
        watched.trainer.train()
    watched.assert_not_made(wrong_step)


@pytest.mark.parametrize("save_steps", [1, 50], ids="saved every {}".format)
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
def test_a_token_without_a_distribution_is_named_with_its_step(tmp_path, monkeypatch, optim, save_steps):
    """As a GPU finds it: noted by a flag, its gradient 0, the norm finite; raised by whatever waits for it first."""
    watched = Watched(tmp_path, optim=optim, logging_steps=5)
    watched.trainer.args.save_steps = save_steps
    flags = []

    def raise_noted(**_):
        if any(bool(flag) for flag in flags):
            flags.clear()
            raise ValueError("hidden x weight: token 7")

    monkeypatch.setattr(nonfinite, "raise_pending", raise_noted)
    monkeypatch.setattr(nonfinite, "pending_flags", lambda device: list(flags))
    model = watched.trainer.model
    monkeypatch.setattr(model, "forward", forward_noting(model.forward, raise_noted, flags, watched))
    with pytest.raises(ValueError, match=r"training step 2: hidden x weight: token 7"):
        watched.trainer.train()
    watched.assert_not_made(2)


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and none is here")


@on_a_gpu
@pytest.mark.parametrize("wrong_step", [1, 2], ids="step {}".format)
@pytest.mark.parametrize("logging_steps", [1, 5], ids="logged every {}".format)
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "sgd"])
def test_a_gradient_without_a_number_on_a_gpu(tmp_path, optim, logging_steps, wrong_step):
    watched = Watched(tmp_path, use_cpu=False, bf16=True, optim=optim, logging_steps=logging_steps, max_grad_norm=1.0)
    watched.factor = lambda step: torch.nan if step == wrong_step else 1.0
    with pytest.raises(ValueError, match=rf"step {wrong_step}: the gradient's norm is nan"):
        watched.trainer.train()
    watched.assert_not_made(wrong_step)


@on_a_gpu
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "sgd"])
def test_a_token_without_a_distribution_on_a_gpu(tmp_path, optim):
    watched = Watched(tmp_path, use_cpu=False, bf16=True, optim=optim, logging_steps=5)
    watched.trainer.args.save_steps = 50
    place = next(i for i, label in enumerate(ROWS[4]["labels"][1:]) if label != IGNORE_INDEX)

    def spoil(module, args, hidden):
        if len(watched.seen) == 1:  # of the second step
            hidden = hidden.clone()
            hidden[0, place] = torch.nan
        return hidden

    watched.model.model.norm.register_forward_hook(spoil)
    with pytest.raises(ValueError, match=rf"training step 2: .*token {place}\b"):
        watched.trainer.train()
    watched.assert_not_made(2)


def forward_noting(forward, raise_noted, flags, watched):
    """A forward that does what the head's does on a GPU: raise what an earlier one noted, and note its own."""

    @functools.wraps(forward)
    def run(*args, **kwargs):
        raise_noted()
        output = forward(*args, **kwargs)
        flags[:] = [torch.tensor([int(len(watched.seen) == 1)])]  # of the second step
        return output

    return run


class Told(transformers.TrainerCallback):
    """Whether the optimizer was told about the norm, step by step."""

    def __init__(self):
        self.seen = []

    def on_pre_optimizer_step(self, *_, optimizer, **__):
        self.seen.append(hasattr(optimizer.optimizer, "found_inf"))


def test_a_guarded_step_is_the_step(tmp_path, monkeypatch):
    """An optimizer that may skip an update makes the same step as one that may not."""
    weights = []
    for guarded in (True, False):
        model = make_model(torch.float32)
        arguments = make_arguments(tmp_path, max_grad_norm=0.1, optim="adamw_torch_fused", learning_rate=1e-2)
        trainer, _ = make_trainer(model, arguments, ROWS[:12], objective="deft")
        if not guarded:
            monkeypatch.setattr(nonfinite, "skip_nonfinite", lambda optimizer, norm: None)
        told = Told()
        trainer.add_callback(told)
        trainer.train()
        assert told.seen == [guarded] * 3 and not hasattr(trainer.optimizer.optimizer, "found_inf")
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights))


# --- packing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("spec", ["deft", "clip"])
def test_packed_rows_are_trained_as_padded_ones(spec, attention, tmp_path):
    """The same rows padded, end to end, and packed: attention and targets stay inside a row."""
    rows = [Encoded(row["input_ids"], row["labels"], "here", "rows") for row in make_rows(16)]
    packs = pack(rows, 40)
    assert any(len(one.lengths) > 2 for one in packs)
    found = []
    for sequences, padding_free, micro in ((rows, False, 4), (rows, True, 4), (packs, True, 2), (packs, False, 2)):
        arguments = make_arguments(
            tmp_path, per_device_train_batch_size=micro, gradient_accumulation_steps=16, optim="sgd", learning_rate=0.0,
            remove_unused_columns=False,
        )  # fmt: skip
        model = make_model(torch.float32, attn_implementation=attention)
        trainer, watch = make_trainer(
            model, arguments, make_dataset(range(len(sequences))).to_list(), objective=spec,
            data_collator=Batches(list(sequences), Collator(PAD, padding_free=padding_free)),
        )  # fmt: skip
        trainer.train()
        found.append((trainer.state.log_history[0], watch.steps[0]))
    (record, gradients), *others = found
    for other, other_gradients in others:
        assert other["tokens"] == record["tokens"] and other["input_tokens"] == record["input_tokens"]
        assert abs(other["loss"] - record["loss"]) <= FLOAT32 * max(1, record["loss"])
        assert deviation(other_gradients, gradients) <= FLOAT32


class Crossing(transformers.LlamaForCausalLM):
    """A model that does not know where a packed row ends."""

    def forward(self, *args, position_ids=None, **kwargs):
        return super().forward(*args, **kwargs)


def test_a_model_that_sees_across_packed_rows_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"packing: with attn_implementation='sdpa' Crossing sees across the rows"):
        make_trainer(make_model(torch.float32, Crossing), make_arguments(tmp_path, padding_free=True), ROWS[:4])
    make_trainer(make_model(torch.float32, Crossing), make_arguments(tmp_path), ROWS[:4])


# --- how a step is computed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["deft", "clip", "mile"])
def test_gradient_checkpointing_changes_nothing(spec, tmp_path):
    found = []
    for on in (False, True):
        arguments = make_arguments(tmp_path, gradient_checkpointing=on, gradient_accumulation_steps=2)
        trainer, watch = make_trainer(make_model(), arguments, ROWS[:16], objective=spec)
        trainer.train()
        found.append(watch.steps)
    assert all(deviation(a, b) <= FLOAT64 for a, b in zip(*found)) and len(found[0]) == 2


def test_lora_trains_the_adapters_to_the_same_loss(tmp_path):
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    arguments = make_arguments(tmp_path, gradient_accumulation_steps=2, optim="sgd", learning_rate=0.0)
    trainer, watch = make_trainer(make_model(), arguments, ROWS[:8], objective="deft", peft_config=lora)
    loss, gradients = oracle(trainer.model, ROWS[:8], "deft", Context())
    trainer.train()
    assert all("lora_" in name for name in watch.steps[0])
    # PEFT keeps adapters in float32
    assert deviation(watch.steps[0], gradients) <= FLOAT32
    assert abs(trainer.state.log_history[0]["loss"] - loss) <= FLOAT32


def test_bfloat16_autocast_trains_float32_weights(tmp_path):
    model = make_model(torch.float32)
    loss, gradients = oracle(model, ROWS[:8], "deft", Context())
    trainer, watch = make_trainer(model, make_arguments(tmp_path, bf16=True, gradient_accumulation_steps=2), ROWS[:8])
    trainer.train()
    assert {g.dtype for g in watch.steps[0].values()} == {torch.float32}
    assert abs(trainer.state.log_history[0]["loss"] - loss) <= 2**-6 * loss
    assert deviation(watch.steps[0], gradients) <= 0.1


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("spec, backend", [("deft", "aot_eager"), ("clip", "aot_eager"),
                                           pytest.param("deft", "inductor", marks=pytest.mark.slow)])  # fmt: skip
def test_torch_compile_gives_the_same_losses_without_compiling_every_step(spec, backend, tmp_path):
    from torch._dynamo.utils import counters

    rows = [row for row in make_rows(400) if len(row["input_ids"]) >= 12][:24]
    rows = [{name: values[:12] for name, values in row.items()} for row in rows]
    for row in rows:
        row["labels"][-2:] = row["input_ids"][-2:]
    runs = []
    for on in (False, True):
        torch._dynamo.reset()
        counters.clear()
        arguments = make_arguments(tmp_path, torch_compile=on, torch_compile_backend=backend if on else None)
        trainer, _ = make_trainer(make_model(torch.float32), arguments, rows, objective=spec)
        compiled = []

        class Count(transformers.TrainerCallback):
            def on_step_end(self, args, state, control, compiled=compiled, **kwargs):
                compiled.append(counters["stats"]["unique_graphs"])

        trainer.add_callback(Count())
        trainer.train()
        runs.append([record["loss"] for record in trainer.state.log_history if "loss" in record])
    assert len(runs[0]) == 6
    assert all(abs(a - b) <= FLOAT32 * max(1, a) for a, b in zip(*runs))
    assert compiled[0] > 0 and len(set(compiled[1:])) == 1, f"graphs after each step: {compiled}"


# --- options ----------------------------------------------------------------------------------------------------------

REFUSED = {
    "loss_type": ({"loss_type": "dft"}, {}, r"loss_type='dft' cannot be combined.*objective='dft'"),
    "label smoothing": ({"label_smoothing_factor": 0.1}, {}, r"label_smoothing_factor cannot .*set it to 0"),
    "Liger's cross-entropy": (
        {"use_liger_kernel": True, "liger_kernel_config": {"cross_entropy": True}}, {}, r"Liger's cross-entropy cannot",
    ),
    "Liger's fused head": (
        {"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": True}}, {},
        r"Liger's cross-entropy cannot",
    ),
    "a mean of rank means": ({"average_tokens_across_devices": False}, {}, r"average_tokens_across_devices=False"),
    "a loss function": ({}, {"compute_loss_func": lambda *_: None}, r"compute_loss_func cannot .*drop one of the two"),
    "metrics of logits": ({}, {"compute_metrics": lambda _: {}}, r"compute_metrics cannot .*makes no logits"),
    "logits for metrics": (
        {}, {"preprocess_logits_for_metrics": lambda *_: None}, r"preprocess_logits_for_metrics cannot .*no logits"
    ),
    "quantisation": ({}, {"quantization_config": object()}, r"quantization_config cannot .*pass a LoRA peft_config"),
    "an adapter on the head": (
        {}, {"peft_config": LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM")}, r"lm_head"
    ),
    "prompt tuning": (
        {}, {"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)}, r"puts virtual tokens"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_ignored_is_refused(case, tmp_path):
    options, more, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        make_trainer(make_model(torch.float32), make_arguments(tmp_path, **options), ROWS[:4], **more)


def test_a_loss_function_given_by_position_is_refused_too(tmp_path):
    with pytest.raises(ValueError, match="compute_loss_func cannot be combined"):
        DeftSFTTrainer(make_model(), make_arguments(tmp_path), None, None, None, make_tokenizer(), lambda *_: None)


@pytest.mark.parametrize(
    "field, message",
    [("deepspeed", "DeepSpeed cannot"), ("n_gpu", "DataParallel cannot .*torchrun")],
)
def test_other_houses_parallelism_is_refused(field, message, tmp_path):
    class Arguments:
        deepspeed = {"stage": 3} if field == "deepspeed" else None
        n_gpu = 2 if field == "n_gpu" else 1

    with pytest.raises(ValueError, match=message):
        DeftSFTTrainer(make_model(), Arguments())


@pytest.mark.parametrize("name", ["sp", "cp", "tp"])
def test_a_part_of_a_row_on_a_rank_is_refused(name):
    parallel = type("Parallel", (), {f"{name}_enabled": True})
    arguments = type("Arguments", (), {"parallelism_config": parallel})
    message = {"tp": "tensor parallelism needs a model that transformers divided"}
    with pytest.raises(ValueError, match=message.get(name, f"{name} parallelism cannot be combined")):
        DeftSFTTrainer(make_model(), arguments)


def test_tensor_parallel_ranks_train_local_objectives_without_adapters():
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    weight.full_tensor = None  # as a DTensor has it
    head = torch.nn.Linear(2, 2)
    head.weight = weight
    model = type("Divided", (), {"tp_size": 2, "get_output_embeddings": lambda self: head})()
    check_divided(model, deftune.objective("deft"), None)
    with pytest.raises(ValueError, match="'clip' sums over the rows of all ranks"):
        check_divided(model, deftune.objective("clip"), None)
    with pytest.raises(ValueError, match="and no adapter"):
        check_divided(model, deftune.objective("deft"), None, adapter=object())


def test_a_router_loss_is_not_left_out_silently(tmp_path):
    def make():
        return make_model(
            torch.float32, transformers.MixtralForCausalLM, num_local_experts=2, num_experts_per_tok=1, head_dim=8
        )

    with pytest.raises(ValueError, match=r"MixtralForCausalLM has a router loss.*router_aux_loss_coef=0.0"):
        make_trainer(make(), make_arguments(tmp_path), ROWS[:4])
    trainer, _ = make_trainer(make(), make_arguments(tmp_path, router_aux_loss_coef=0.0), ROWS[:4])
    trainer.train()


# --- evaluation and records -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["nll", "deft", "mile", "clip", "deft | mean_one"])
def test_evaluation_is_a_mean_over_tokens(spec, tmp_path):
    held_out = make_rows(13, seed=5)
    model = make_model(torch.float32)
    batch = padded(held_out)
    targets = shifted(batch.pop("labels"))
    with torch.no_grad():
        logits = model(**batch).logits.double()
    expected = deftune.token_loss(logits, targets, spec).item()
    nll = deftune.token_loss(logits, targets, "nll").item()
    for size in (1, 4, 13):
        trainer, _ = make_trainer(
            copy.deepcopy(model), make_arguments(tmp_path, per_device_eval_batch_size=size), ROWS[:4], objective=spec,
            eval_dataset=Dataset.from_list(held_out),
        )  # fmt: skip
        metrics = trainer.evaluate()
        assert abs(metrics["eval_loss"] - expected) <= 1e-6 * max(1, abs(expected)), size
        assert abs(metrics["eval_nll"] - nll) <= 1e-6 * nll, size
        assert metrics["eval_tokens"] == int((targets != IGNORE_INDEX).sum())
        assert trainer.state.log_history[-1]["eval_loss"] == metrics["eval_loss"]


def test_evaluation_during_training_leaves_the_training_record_alone(tmp_path):
    def run(**more):
        arguments = make_arguments(tmp_path, **more)
        trainer, _ = make_trainer(make_model(), arguments, ROWS[:16], objective="mile",
                                  eval_dataset=Dataset.from_list(make_rows(5, seed=5)))  # fmt: skip
        trainer.train()
        return trainer.state.log_history

    plain, evaluated = run(), run(eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=2)
    same = ("loss", "nll", "p", "gate", "tokens", "input_tokens", "grad_norm")
    train = [record for record in evaluated if "loss" in record]
    assert [[r[k] for k in same] for r in train] == [[r[k] for k in same] for r in plain if "loss" in r]
    assert sum("eval_nll" in record for record in evaluated) == 4


def test_an_evaluation_without_supervised_tokens_is_an_error(tmp_path):
    silent = [{"input_ids": [1, 2, 3], "labels": [IGNORE_INDEX] * 3}]
    trainer, _ = make_trainer(make_model(), make_arguments(tmp_path), ROWS[:4], eval_dataset=Dataset.from_list(silent))
    with pytest.raises(ValueError, match="evaluation: none of its tokens is supervised"):
        trainer.evaluate()


def test_every_field_of_a_record_is_what_its_name_says():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(50, 20, generator=generator, dtype=torch.float64) * 4
    targets = torch.randint(0, 20, (50,), generator=generator)
    logits[0, targets[0]], logits[1, targets[1]] = -60.0, 60.0  # p near 0 and near 1
    stats = deftune.token_stats(logits, targets)
    record = StepRecord(deftune.objective("deft"), (3, 4))
    for part in (slice(0, 20), slice(20, 20), slice(20, 50)):
        columns = (stats.log_p[part], stats.entropy[part], stats.log_collision[part], stats.targets[part])
        record.add(TokenStats(*columns, 20), Context(), torch.tensor(len(columns[0]) + 7))
    found = record.take()
    P = torch.softmax(logits, -1)
    p = P[torch.arange(50), targets]
    c = (P**2).sum(-1)
    gate = p**c
    ended = (targets == 3) | (targets == 4)
    edges = [0.0, *P_EDGES, 1.0]
    expected = {
        "objective": (1 - gate) / c, "nll": -p.log(), "p": p, "focus": c, "gate": gate, "signal": gate * (1 - p),
        "entropy": -(P * P.log()).sum(-1), "concentration": c, "suppressed": (gate < 0.1).double(),
        "conflicts": (1 - gate >= 0.9).double(),  # of any objective: 1 - p^(sum P^2)
    }  # fmt: skip
    assert 0 < expected["suppressed"].mean() < 1 and 0 < expected["conflicts"].mean() < 1 and ended.any()
    for name, column in expected.items():
        assert found[name] == pytest.approx(column.mean().item(), rel=1e-9), name
    assert found["tokens"] == 50 and found["input_tokens"] == 71
    assert found["eos_p"] == pytest.approx(p[ended].mean().item(), rel=1e-12)
    assert found["p_histogram"] == [int(((low < p) & (p <= high)).sum()) for low, high in itertools.pairwise(edges)]
    assert set(found) == {*expected, "tokens", "input_tokens", "eos_p", "p_histogram"}
    assert record.take() == {}


@on_a_gpu
def test_a_record_never_waits_for_the_gpu():
    """A synchronisation between the head and the backward would leave the GPU idle while the host catches up."""
    stats = deftune.token_stats(torch.randn(50, 20, device="cuda"), torch.randint(0, 20, (50,), device="cuda"))
    record = StepRecord(deftune.objective("deft"), (3, 4))
    inputs = {"input_ids": torch.zeros(2, 30, device="cuda")}
    record.add(stats, Context(), input_tokens(inputs))
    torch.cuda.set_sync_debug_mode("error")
    try:
        record.add(stats, Context(), input_tokens(inputs))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = record.take()
    assert found["tokens"] == 100 and found["input_tokens"] == 120


def test_a_mass_objectives_record_shows_its_normalised_gate(tmp_path):
    arguments = make_arguments(tmp_path, gradient_accumulation_steps=4, optim="sgd", learning_rate=0.0)
    trainer, _ = make_trainer(make_model(), arguments, ROWS[:16], objective="mile(2)")
    trainer.train()
    assert trainer.state.log_history[0]["gate"] == pytest.approx(1.0, abs=1e-12)


def test_an_empty_record_is_no_division_by_zero():
    record = StepRecord(deftune.objective("deft"), ())
    record.add(replace(from_columns([], [], [], vocab_size=4)), Context(), torch.tensor(5))
    assert record.take() == {"tokens": 0, "input_tokens": 5}


# --- sparse gradients -------------------------------------------------------------------------------------------------


def test_sparse_gradients_are_as_far_from_the_dense_ones_as_the_log_says(tmp_path):
    """Twelve of 48 classes; the loss is exact, and every class that was left out is in the report's sample."""
    found = []
    for sparse in (None, deftune.Sparse(0.25)):
        model = make_model(tie_word_embeddings=False)
        trainer, watch = make_trainer(model, make_arguments(tmp_path, max_steps=1), ROWS[:4], sparse=sparse)
        trainer.train()
        found.append((trainer.state.log_history[0], watch.steps[0]["lm_head.weight"]))
    (dense, exact), (logged, approximate) = found
    assert logged["loss"] == dense["loss"] and "sparse_dropped" not in dense
    assert 0.05 < logged["sparse_dropped"] < 0.75
    off = float((approximate - exact).norm() / exact.norm())
    assert 1e-3 < off < 0.5 and off == pytest.approx(logged["sparse_error_weight"], rel=0.05)


def test_all_classes_are_the_dense_gradients(tmp_path):
    steps = []
    for sparse in (None, deftune.Sparse(1.0)):
        arguments = make_arguments(tmp_path, gradient_accumulation_steps=2)
        trainer, watch = make_trainer(make_model(), arguments, ROWS[:16], sparse=sparse)
        trainer.train()
        steps.append(watch.steps[-1])
    assert deviation(*steps) < 1e-10


def test_sparse_gradients_of_a_capped_head_are_refused(tmp_path):
    model = make_model()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="sparse cannot be combined with the softcap of LlamaForCausalLM's head"):
        make_trainer(model, make_arguments(tmp_path), ROWS[:4], sparse=deftune.Sparse(0.5))
