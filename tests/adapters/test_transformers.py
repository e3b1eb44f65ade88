"""`hf_loss` in transformers' own Trainer goes the way of a plain loop, in the oldest transformers too (.ci/stacks).

And the oldest transformers reads the tokenizer of a GGUF file as the newest does.
"""

import pytest
import transformers
from stack_runs import CLIP, LEARNING_RATE, OBJECTIVES, STEPS, assert_trains, make_files

import deftune
from deftune.artifacts.vocabulary import read_tokenizer
from tiny_gguf import GEMMA_TEXTS, write_gemma

pytestmark = pytest.mark.smoke
NAMES = ("nll", "deft", "eaft", "floor")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("transformers"))


@pytest.mark.parametrize("name", NAMES)
def test_hf_loss_trains_as_a_plain_loop(name, files, tmp_path):
    """Two micro-batches a step."""
    from datasets import Dataset

    folder, conversations = files
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    steps = []

    class Recorded(transformers.Trainer):
        def get_batch_samples(self, *args, **kwargs):
            batches, num_items = super().get_batch_samples(*args, **kwargs)
            if batches:
                steps.append([{key: value.clone() for key, value in batch.items()} for batch in batches])
            return batches, num_items

    rows = []
    for row in Dataset.from_json(str(conversations), cache_dir=str(tmp_path)):
        prompt, answer = (tokenizer(message["content"])["input_ids"] for message in row["messages"])
        answer = [*answer, tokenizer.eos_token_id]
        rows.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=STEPS,
        learning_rate=LEARNING_RATE, lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=CLIP,
        optim="adamw_torch", logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    trainer = Recorded(
        model, arguments, train_dataset=Dataset.from_list(rows),
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer),
        compute_loss_func=deftune.hf_loss(OBJECTIVES[name]),
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    weights = {key: parameter.detach() for key, parameter in model.named_parameters()}
    assert_trains(folder, {"steps": steps, "losses": losses, "weights": weights}, OBJECTIVES[name])


def test_context_parallelism_is_refused(monkeypatch):
    """The Trainer would hand over labels that are not shifted across the ranks."""
    from types import SimpleNamespace

    import torch
    from accelerate.state import AcceleratorState

    loss, outputs = deftune.hf_loss("deft"), {"logits": torch.zeros(1, 2, 4)}
    labels = torch.tensor([[1, 2]])
    monkeypatch.setitem(AcceleratorState._shared_state, "parallelism_config", SimpleNamespace(cp_enabled=False))
    assert loss(outputs, labels) > 0
    monkeypatch.setitem(AcceleratorState._shared_state, "parallelism_config", SimpleNamespace(cp_enabled=True))
    with pytest.raises(ValueError, match="hf_loss: context parallelism divides each row among ranks"):
        loss(outputs, labels)


def test_the_tokenizer_of_a_gguf_file(tmp_path):
    """transformers 5.17 splits Gemma's words into characters; tests/artifacts/test_vocabulary.py has the rest."""
    tokenizer = read_tokenizer(write_gemma(tmp_path / "model.gguf"))
    assert {text: tokenizer.tokenize(text) for text in GEMMA_TEXTS} == GEMMA_TEXTS
