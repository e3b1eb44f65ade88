"""The check at the first micro-batch: what replaces the loss is an error, before the weights change."""

import pytest
import torch
import transformers

from deftune.adapters.check import TrainerLoss
from deftune.selftest import tiny

ROWS = [{"input_ids": [5, 6, 7, 8 + i, 1], "labels": [-100, -100, 7, 8 + i, 1]} for i in range(8)]


class Doubled(transformers.Trainer):
    def compute_loss(self, *args, **kwargs):
        return 2 * super().compute_loss(*args, **kwargs)


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
    trainer.train()
    assert loss.checked
    assert capsys.readouterr().out.count("deftune: stack trains `deft`: loss ") == 1


@pytest.mark.parametrize(
    "options, more, message",
    [
        ({"trainer": Doubled}, {}, "`deft` is not what is trained: the trainer used the loss .*, the objective of its"),
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
