"""The check at the first micro-batch: what replaces the loss is an error, before the weights change."""

import copy
import itertools
import re
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from datasets import Dataset

from deftune.adapters import versions
from deftune.adapters.check import TrainerLoss, check_trainer
from deftune.adapters.logits import plain_losses
from deftune.adapters.versions import OLDEST
from deftune.losses import token_loss
from deftune.objectives import Context, objective
from deftune.selftest import tiny
from deftune.tokens.head import shifted

ROWS = [{"input_ids": [5, 6, 7, 8 + i, 1], "labels": [-100, -100, 7, 8 + i, 1]} for i in range(8)]


class Doubled(transformers.Trainer):
    def compute_loss(self, *args, **kwargs):
        return 2 * super().compute_loss(*args, **kwargs)


class Replaced(transformers.Trainer):
    def compute_loss(self, model, inputs, **kwargs):
        super().compute_loss(model, dict(inputs), **kwargs)  # takes the labels out
        return model(**inputs).loss


class WithoutCount(transformers.Trainer):
    def _get_num_items_in_batch(self, *args):
        return None


class OwnLoss(transformers.Trainer):
    def compute_loss(self, model, inputs, **kwargs):
        return model(**inputs).loss


class Fused(transformers.Qwen2ForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=output.logits[:, :0])


def make_trainer(folder, trainer=transformers.Trainer, model=transformers.Qwen2ForCausalLM, **more):
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=1, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, learning_rate=0.1,
        remove_unused_columns=False, **more,
    )  # fmt: skip
    tokenizer = tiny.make_tokenizer()
    made = trainer(tiny.make_model(tokenizer, model), arguments, train_dataset=ROWS, processing_class=tokenizer)
    made.data_collator = lambda rows: {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}
    return made


def test_a_loss_in_force_passes_once(tmp_path, capsys):
    trainer = make_trainer(tmp_path)
    loss = TrainerLoss("stack", trainer, "deft", trainer.processing_class)
    model = copy.deepcopy(trainer.model)
    trainer.train()
    assert loss.checked
    (printed,) = re.findall(r"trains `deft`: loss (\S+) of the first micro-batch verified", capsys.readouterr().out)
    means = []
    for row in ROWS:  # each has three supervised tokens, and the order of the rows is the trainer's
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
        means.append(token_loss(model(ids).logits, shifted(labels), "deft").item())
    pairs = [(a + b) / 2 for a, b in itertools.combinations(means, 2)]
    assert min(abs(pair - float(printed)) for pair in pairs) < 1e-4


def test_the_rest_of_a_stream_is_a_step_of_its_own(tmp_path):
    """Six rows in three micro-batches, two in a step; transformers would add the third gradient to the next step."""
    trainer = make_trainer(tmp_path)
    trainer.args.max_steps, trainer.args.learning_rate, trainer.args.max_grad_norm = 2, 0.0, 0.0
    rows = [*ROWS, *ROWS][:6]
    trainer.train_dataset = Dataset.from_list(rows).to_iterable_dataset()
    TrainerLoss("stack", trainer, "deft", trainer.processing_class)
    found = []
    trainer.add_callback(Gradients(found))
    model = copy.deepcopy(trainer.model)
    trainer.train()
    ids, labels = (torch.tensor([row[name] for row in rows[4:]]) for name in ("input_ids", "labels"))
    token_loss(model(ids).logits, shifted(labels), "deft").backward()
    assert len(found) == 2
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[1][name], parameter.grad, rtol=1e-4, atol=1e-7)  # float32 sums


class Gradients(transformers.TrainerCallback):
    """Appends the gradients of each optimizer step to a list."""

    def __init__(self, steps):
        self.steps = steps

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.steps.append({name: p.grad.clone() for name, p in model.named_parameters()})


@pytest.mark.parametrize(
    "options, more, message",
    [
        ({"trainer": Doubled}, {}, "`deft` is not what is trained: the trainer used the loss .*, the objective of its"),
        (
            {"trainer": Replaced},
            {},
            "`deft` is not what is trained: the trainer used the loss .*, the objective of its",
        ),
        ({"trainer": OwnLoss}, {}, "the trainer did not call the loss.*Switched on .*: the plugin x; turn it off"),
        ({"trainer": WithoutCount}, {}, "the trainer did not count the supervised tokens"),
        ({"model": Fused}, {}, "the model returned no logits that match the labels"),
        ({}, {"label_smoothing_factor": 0.1}, "stack: label_smoothing_factor cannot be combined with the objective"),
    ],
)
def test_what_replaces_the_loss_is_an_error_before_the_first_update(options, more, message, tmp_path):
    trainer = make_trainer(tmp_path, **options, **more)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    TrainerLoss("stack", trainer, "deft", trainer.processing_class, suspects={"the plugin x": True})
    with pytest.raises(ValueError, match=message):
        trainer.train()
    assert all(torch.equal(before[name], p) for name, p in trainer.model.named_parameters())


@pytest.mark.parametrize("spec", ["nll", "linear", "cayley", "deft", "eaft(5)", "eaft(norm=full)", "deft | floor(0.2)"])
def test_plain_losses_are_those_that_are_trained(spec):
    """Two ways to compute a loss: that of the check, and that of `deftune.losses`."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(3, 200, 11, dtype=torch.float64, generator=generator)  # more rows than are taken at a time
    targets = torch.randint(0, 11, (3, 200), generator=generator).index_fill(1, torch.tensor([0, 7]), -100)
    expected = token_loss(logits, targets, spec, reduction="none")[targets != -100]
    torch.testing.assert_close(plain_losses(logits, targets, objective(spec), Context()), expected, rtol=1e-12, atol=0)
    assert len(plain_losses(logits[:, :1], targets[:, :1], objective(spec), Context())) == 0


def test_refused_at_once(tmp_path):
    trainer = make_trainer(tmp_path)
    with pytest.raises(ValueError, match="stack: `mile` depends on the whole optimizer step"):
        TrainerLoss("stack", trainer, "mile", trainer.processing_class)
    trainer.compute_loss_func = print
    with pytest.raises(ValueError, match="stack: the trainer already has a loss"):
        TrainerLoss("stack", trainer, "deft", trainer.processing_class)


def test_end_tokens_are_the_tokenizers_and_the_stacks(tmp_path):
    trainer = make_trainer(tmp_path)
    tokenizer = trainer.processing_class
    ids = TrainerLoss("stack", trainer, "deft", tokenizer, end_tokens=["<|pad|>", "no token"]).special_ids
    assert ids == tuple(sorted([tokenizer.eos_token_id, tokenizer.pad_token_id]))


def trainer_with(parallel=None, config=None, **arguments):
    """What `check_trainer` reads of a Trainer: options of several GPUs cannot be switched on here."""
    usual = {"n_gpu": 1, "world_size": 1, "average_tokens_across_devices": True}
    model = tiny.make_model(tiny.make_tokenizer())
    for name, value in (config or {}).items():
        setattr(model.config, name, value)
    return SimpleNamespace(
        args=SimpleNamespace(**(usual | arguments)), label_smoother=None, model=model,
        accelerator=SimpleNamespace(parallelism_config=parallel),
    )  # fmt: skip


@pytest.mark.parametrize(
    "options, message",
    [
        ({"parallel": SimpleNamespace(cp_enabled=True)}, "stack: cp_size > 1 cannot be combined with the objective"),
        ({"parallel": SimpleNamespace(sp_enabled=True)}, "sp_size > 1 .* a rank would see a part of a row"),
        ({"parallel": SimpleNamespace(tp_enabled=True)}, "tp_size > 1 cannot be combined"),
        ({"n_gpu": 2}, "DataParallel .* start one process per GPU"),
        ({"world_size": 2, "average_tokens_across_devices": False}, "average_tokens_across_devices=False cannot be"),
        ({"config": {"output_router_logits": True, "router_aux_loss_coef": 0.1}}, "the router loss cannot be combined"),
    ],
)
def test_options_that_change_the_loss_are_refused(options, message):
    check_trainer("stack", trainer_with(), objective("deft"))
    with pytest.raises(ValueError, match=message):
        check_trainer("stack", trainer_with(**options), objective("deft"))


@pytest.mark.parametrize(
    "module, package",
    [
        ("llamafactory", "llamafactory"), ("swift.deft_plugin", "ms-swift"), ("axolotl", "axolotl"), ("verl", "verl"),
        ("torchtitan", "torchtitan"), ("megatron", "megatron-core"),
    ],
)  # fmt: skip
def test_an_old_stack_is_an_error_before_its_trainer_is_loaded(module, package, monkeypatch):
    monkeypatch.setattr(versions, "version", lambda name: {package: "0.2.9.post1"}[name])
    message = rf'{package} 0\.2\.9\.post1 is older than .*; pip install "{package}>={OLDEST[package]}"'
    with pytest.raises(ImportError, match=message):
        runpy.run_module(f"deftune.adapters.{module}", run_name="__main__")


@pytest.mark.parametrize("words, code", [(["--help"], 0), (["train", "-h"], 0), ([], 2), (["train"], 2), (["chat"], 2)])
def test_usage_of_llamafactory_needs_no_llamafactory(words, code, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "llamafactory", None)  # its import is an error
    monkeypatch.setattr(sys, "argv", ["deftune-llamafactory", *words])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("deftune.adapters.llamafactory", run_name="__main__")
    assert stopped.value.code == code
    printed = capsys.readouterr()
    assert (printed.err if code else printed.out).startswith("usage: deftune-llamafactory train FILE [key=value ...]")


def test_a_missing_llamafactory_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "llamafactory", None)
    monkeypatch.setattr(sys, "argv", ["deftune-llamafactory", "train", "sft.yaml"])
    with pytest.raises(SystemExit, match=r"LLaMA-Factory is not installed .*; pip install llamafactory==0\.9\.5"):
        runpy.run_module("deftune.adapters.llamafactory", run_name="__main__")


def test_versions_are_compared_as_numbers(monkeypatch):
    for found in ("0.16.1", "0.16.1rc2", "0.17.0", "0.100", "1.0"):
        monkeypatch.setattr(versions, "version", lambda _, found=found: found)
        versions.need_version("megatron-core")
    monkeypatch.undo()
    monkeypatch.setitem(OLDEST, "no such package", "1.0")
    versions.need_version("no such package")  # a checkout on the path
