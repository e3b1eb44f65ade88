"""`hf_loss` in transformers' Trainer, TRL's own SFTTrainer and ours: one trajectory."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
import trl
from datasets import Dataset
from packaging.version import Version
from small import (
    END,
    PAD,
    Gradients,
    deviation,
    make_arguments,
    make_model,
    make_rows,
    make_tokenizer,
    make_trainer,
    padded,
)
from small import oracle as whole_step
from trl import SFTTrainer

import deftune
from deftune.objectives import IGNORE_INDEX, Context
from deftune.selftest.tiny import make_tokenizer as make_chat_tokenizer
from deftune.selftest.tiny import save_model
from deftune.tokens.head import shifted

ROWS = make_rows(60)
STEPS = 20
TRAJECTORY = 1e-5  # float32 over 20 steps of Adam: rounding in another order, amplified


def options(folder) -> dict:
    return {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "max_steps": STEPS,
            "learning_rate": 1e-3, "max_grad_norm": 1.0, "output_dir": str(folder)}  # fmt: skip


def plain_trainer(folder, model, rows, loss, **more):
    arguments = transformers.TrainingArguments(
        **{
            **options(folder),
            "use_cpu": True,
            "logging_steps": 1,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "train_sampling_strategy": "sequential",
            "remove_unused_columns": False,
            **more,
        }
    )
    watch = Gradients()
    trainer = transformers.Trainer(
        model, arguments, train_dataset=Dataset.from_list(rows), data_collator=padded, compute_loss_func=loss,
        callbacks=[watch],
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer, watch


def run(trainer) -> tuple[list[float], dict[str, torch.Tensor]]:
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    return losses, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def ours(folder, objective):
    trainer, _ = make_trainer(
        make_model(torch.float32, scale=2.0), make_arguments(folder, **options(folder)), ROWS, objective=objective
    )
    return run(trainer)


def assert_same(one, other):
    losses, weights = one
    other_losses, other_weights = other
    assert len(losses) == len(other_losses) == STEPS
    assert max(abs(a - b) / max(1, abs(a)) for a, b in zip(losses, other_losses)) <= TRAJECTORY
    assert max(float((weights[name] - other_weights[name]).abs().max()) for name in weights) <= TRAJECTORY
    assert losses[-1] < losses[0]


trls_own_runs_here = pytest.mark.skipif(
    Version(trl.__version__) < Version("1.16"), reason="TRL 1.15's own loss runs on GPUs only"
)


@trls_own_runs_here
def test_nll_is_trls_own(tmp_path):
    trainer = SFTTrainer(
        make_model(torch.float32, scale=2.0), make_arguments(tmp_path, **options(tmp_path), loss_type="nll"),
        train_dataset=Dataset.from_list(ROWS), processing_class=make_tokenizer(),
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    assert_same(run(trainer), ours(tmp_path, "nll"))


@trls_own_runs_here
def test_dft_is_trls_own(tmp_path):
    trainer = SFTTrainer(
        make_model(torch.float32, scale=2.0), make_arguments(tmp_path, **options(tmp_path), loss_type="dft"),
        train_dataset=Dataset.from_list(ROWS), processing_class=make_tokenizer(),
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    losses, weights = run(trainer)
    our_losses, our_weights = ours(tmp_path, "dft")
    assert max(abs(a - b) / max(1, abs(a)) for a, b in zip(losses, our_losses)) <= TRAJECTORY
    assert max(float((weights[name] - our_weights[name]).abs().max()) for name in weights) <= TRAJECTORY


@pytest.mark.parametrize("objective", ["nll", "deft", "cayley", "eaft"])
def test_transformers_trainer_goes_the_same_way(objective, tmp_path):
    trainer, _ = plain_trainer(tmp_path, make_model(torch.float32, scale=2.0), ROWS, deftune.hf_loss(objective))
    assert_same(run(trainer), ours(tmp_path, objective))


@pytest.mark.parametrize("objective", ["deft", "deft | eos(nll)"])
def test_a_step_of_transformers_trainer_is_exact(objective, tmp_path):
    """The last window is shorter than the others."""
    model = make_model()
    special = (END, PAD)
    trainer, watch = plain_trainer(
        tmp_path, model, ROWS[:16], deftune.hf_loss(objective, special_ids=special), optim="sgd", learning_rate=0.0,
        max_grad_norm=0.0, max_steps=-1, num_train_epochs=1,
    )  # fmt: skip
    expected = [whole_step(model, rows, objective, Context(special_ids=special)) for rows in (ROWS[:12], ROWS[12:16])]
    trainer.train()
    assert len(watch.steps) == 2
    for found, (_, gradients) in zip(watch.steps, expected):
        assert deviation(found, gradients) <= 1e-12


def test_the_hook_itself_shifts_and_divides():
    logits = torch.randn(2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[IGNORE_INDEX, 1, 2, 3, IGNORE_INDEX], [IGNORE_INDEX, IGNORE_INDEX, 4, 5, 6]])
    loss = deftune.hf_loss("deft")
    assert torch.equal(shifted(labels)[0], torch.tensor([1, 2, 3, IGNORE_INDEX, IGNORE_INDEX]))
    summed = deftune.token_loss(logits[:, :-1], labels[:, 1:], "deft", reduction="sum")
    for items in (20, torch.tensor(20)):
        assert torch.allclose(loss({"logits": logits}, labels, num_items_in_batch=items), summed / 20, rtol=1e-14)
    assert torch.allclose(loss({"logits": logits}, labels), summed / 6, rtol=1e-14)


@pytest.mark.parametrize(
    "spec, message",
    [
        ("mile", "`mile` depends on the whole optimizer step.*DeftSFTTrainer"),
        ("clip", "`clip` depends on the whole optimizer step"),
        ("deft | mean_one", "depends on the whole optimizer step"),
        ("deft | warmup(0.1)", "depends on the progress of the run"),
        ("deft | eos(nll)", r"needs special_ids=\(tokenizer.eos_token_id"),
        ("defft", "Did you mean 'deft'"),
    ],
)
def test_what_the_hook_cannot_know_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        deftune.hf_loss(spec)


@pytest.mark.parametrize("outputs", [(torch.zeros(1, 2, 3),), {"loss": 0.0}])
def test_outputs_without_logits_are_named(outputs):
    with pytest.raises(ValueError, match=f"returned a {type(outputs).__name__} without logits; leave return_dict"):
        deftune.hf_loss("deft")(outputs, torch.tensor([[1, 2]]))


def test_the_batches_of_the_guide_train_in_transformers_trainer(tmp_path):
    """The code under "Batches" in docs/other_trainers.md, with a tiny model and a file of rows."""
    rows = [{"prompt": f"What is {i} plus 1?", "completion": str(i + 1)} for i in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = save_model(tmp_path / "model", make_chat_tokenizer())
    page = (Path(__file__).parents[2] / "docs" / "other_trainers.md").read_text()
    code = re.search(r"## Batches.*?```python\n(.*?)```", page, re.S)
    assert code is not None
    names: dict = {}
    exec(code[1].replace("smollm2", str(model)).replace("train.jsonl", str(tmp_path / "train.jsonl")), names)
    assert {name: list(value.shape) for name, value in next(iter(names["batches"])).items()} == {
        name: [4, 22] for name in ("input_ids", "attention_mask", "labels")
    }
    arguments = transformers.TrainingArguments(
        str(tmp_path / "out"), use_cpu=True, max_steps=1, report_to=[], save_strategy="no", logging_steps=1
    )
    trainer = transformers.Trainer(
        names["model"], arguments, train_dataset=names["dataset"], data_collator=names["collator"],
        compute_loss_func=deftune.hf_loss("deft"),
    )  # fmt: skip
    trainer.train()
    assert trainer.state.log_history[0]["loss"] > 0
