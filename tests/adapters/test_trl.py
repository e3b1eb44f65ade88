"""Options of TRL's users: with each of them `DeftSFTTrainer` and `hf_loss` train what a few lines of torch compute."""

import copy
import json

import pytest
import torch
import transformers
import trl
from datasets import Dataset
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from trl import SFTConfig, SFTTrainer

import deftune
from deftune.selftest import tiny

CONVERSATIONS = [row["messages"] for row in tiny.conversations(16)]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + eos_token }}{% endgeneration %}{% else %}{{ m['content'] + eos_token }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRAINERS = pytest.mark.parametrize(
    "hook",
    [
        pytest.param(False, id="DeftSFTTrainer"),
        pytest.param(True, id="hf_loss", marks=pytest.mark.skipif(
            Version(trl.__version__) < Version("1.16"), reason="SFTTrainer of TRL 1.15 runs on GPUs only"
        )),
    ],
)  # fmt: skip
FLOAT32 = 1e-5  # of gradients and losses: the same sums in another order


def messages():
    return Dataset.from_list([{"messages": turns} for turns in CONVERSATIONS])


def completions():
    return Dataset.from_list([{"prompt": turns[:-1], "completion": turns[-1:]} for turns in CONVERSATIONS])


def texts():
    return Dataset.from_list([{"text": " ".join(turn["content"] for turn in turns)} for turns in CONVERSATIONS])


def with_tools():
    return Dataset.from_list([{"messages": turns, "tools": json.dumps(TOOLS)} for turns in CONVERSATIONS])


def stream():
    return messages().to_iterable_dataset()


def lora(**more):
    return LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, **{"target_modules": "all-linear", **more})


# name: (rows, options of SFTConfig, arguments of the trainer)
CASES = {
    "messages": (messages, {}, {}),
    "prompt and completion": (completions, {}, {}),
    "completion_only_loss=False": (completions, {"completion_only_loss": False}, {}),
    "assistant_only_loss": (messages, {"assistant_only_loss": True}, {}),
    "text": (texts, {}, {}),
    "tools": (with_tools, {"assistant_only_loss": True}, {}),
    "a formatting function": (messages, {}, {"formatting_func": lambda row: row["messages"][-1]["content"]}),
    "bfd": (messages, {"packing": True, "max_length": 128}, {}),
    "bfd_split": (messages, {"packing": True, "max_length": 32, "packing_strategy": "bfd_split"}, {}),
    "wrapped": (messages, {"packing": True, "max_length": 64, "packing_strategy": "wrapped"}, {}),
    "padding_free": (messages, {"padding_free": True, "max_length": None}, {}),
    "truncated": (messages, {"max_length": 16}, {}),
    "padded": (messages, {"pad_to_multiple_of": 16}, {}),
    "dataset_num_proc": (messages, {"dataset_num_proc": 2}, {}),
    "data workers": (messages, {"dataloader_num_workers": 1}, {}),
    "a stream": (stream, {}, {}),
    "a packed stream": (stream, {"packing": True, "max_length": 128, "gradient_accumulation_steps": 1}, {}),
    "checkpointing": (messages, {"gradient_checkpointing": True}, {}),
    "reentrant": (messages, {"gradient_checkpointing": True,
                             "gradient_checkpointing_kwargs": {"use_reentrant": True}}, {}),
    "selective": (messages, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"selective": True}}, {}),
    "loss_type=chunked_nll": (messages, {"loss_type": "chunked_nll"}, {}),
    "LoRA": (messages, {}, {"peft_config": lora()}),
    "LoRA with a trained head": (messages, {}, {"peft_config": lora(modules_to_save=["lm_head"])}),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    text = [turn["content"] for turns in CONVERSATIONS for turn in turns]
    made = tiny.make_tokenizer([*text, "user\nassistant\nsystem\n"], size=320)
    made.chat_template = TEMPLATE
    return made


def make_model(tokenizer):
    return tiny.make_model(tokenizer, gain=20.0)  # an untrained model's gates are all alike


class Watched(transformers.TrainerCallback):
    """Keeps the gradients of each optimizer step, and the micro-batches that they are of."""

    def __init__(self):
        self.gradients, self.batches = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    def follow(self, trainer):
        original = trainer.get_batch_samples

        def get_batch_samples(*args):
            batches, count = original(*args)
            if batches:  # none at the end of a stream
                self.batches.append([dict(batch) for batch in batches])
            return batches, count

        trainer.get_batch_samples = get_batch_samples


def train(folder, tokenizer, rows, options, more, *, hook=False, model=None, processor=None):
    """(trainer, what was watched) after two steps of two micro-batches that leave the weights as they are."""
    args = SFTConfig(**{
        "output_dir": str(folder), "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "max_steps": 2,
        "learning_rate": 0.0, "optim": "sgd", "bf16": False, "use_cpu": True, "logging_steps": 1, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "max_grad_norm": 0.0, "gradient_checkpointing": False, **options,
    })  # fmt: skip
    watched = Watched()
    common = {"train_dataset": rows, "processing_class": processor or tokenizer, "callbacks": [watched], **more}
    model = make_model(tokenizer) if model is None else model
    if hook:
        trainer = SFTTrainer(model, args, compute_loss_func=deftune.hf_loss("deft"), **common)
    else:
        trainer = deftune.DeftSFTTrainer(model, args, objective="deft", **common)
    trainer.remove_callback(transformers.PrinterCallback)
    watched.follow(trainer)
    trainer.train()
    return trainer, watched


def plain_step(model, batches):
    """(loss, gradients) of DEFT, (1 - p^a) / a with a = sum P^2 detached, over the micro-batches of a step."""
    model.zero_grad()
    model.eval()
    count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    total = 0.0
    for batch in batches:
        targets = batch["labels"][:, 1:]
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        log_P = model(**inputs, use_cache=False).logits[:, :-1].log_softmax(-1)[targets != -100]
        log_p = log_P.gather(-1, targets[targets != -100][:, None])[:, 0]
        focus = log_P.detach().exp().square().sum(-1)
        loss = ((1 - (focus * log_p).exp()) / focus).sum() / count
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_plain(trainer, watched):
    model = copy.deepcopy(trainer.model)
    for module in model.modules():  # the forwards that the trainers set on the model
        module.__dict__.pop("forward", None)
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    assert len(losses) == len(watched.gradients) == len(watched.batches) == 2
    for loss, found, batches in zip(losses, watched.gradients, watched.batches):
        expected_loss, expected = plain_step(model, batches)
        assert found.keys() <= expected.keys() and found
        assert loss == pytest.approx(expected_loss, rel=FLOAT32)
        difference = sum((found[name] - expected[name]).square().sum() for name in found)
        assert difference**0.5 <= FLOAT32 * sum(expected[name].square().sum() for name in found) ** 0.5


@TRAINERS
@pytest.mark.parametrize("case", CASES)
def test_an_option_trains_what_plain_torch_computes(case, hook, tokenizer, tmp_path):
    rows, options, more = CASES[case]
    assert_plain(*train(tmp_path, tokenizer, rows(), options, more, hook=hook))


@pytest.mark.parametrize("case", ["prompt and completion", "assistant_only_loss", "tools"])
def test_the_answers_alone_are_supervised(case, tokenizer, tmp_path):
    rows, options, more = CASES[case]
    _, watched = train(tmp_path, tokenizer, rows(), options, more)
    answers = {turns[-1]["content"] for turns in CONVERSATIONS}
    for labels in watched.batches[0][0]["labels"]:
        assert tokenizer.decode(labels[labels != -100]).removesuffix("\n").removesuffix("<|im_end|>") in answers


def test_a_model_with_adapters_already(tokenizer, tmp_path):
    model = get_peft_model(make_model(tokenizer), lora())
    assert_plain(*train(tmp_path, tokenizer, messages(), {}, {}, model=model))


def test_the_rest_of_a_stream_is_a_step_of_its_own(tokenizer, tmp_path):
    """16 rows, 3 in a micro-batch, 4 micro-batches in a step; transformers adds the rest to the next step."""
    trainer, watched = train(tmp_path, tokenizer, stream(), {"gradient_accumulation_steps": 4}, {})
    assert [sum(int((batch["labels"] != -100).any()) for batch in step) for step in watched.batches] == [4, 2]
    assert_plain(trainer, watched)


def test_noise_on_the_embeddings_is_added(tokenizer, tmp_path):
    quiet, _ = train(tmp_path, tokenizer, messages(), {}, {})
    noisy, _ = train(tmp_path, tokenizer, messages(), {"neftune_noise_alpha": 5}, {})
    assert noisy.state.log_history[0]["loss"] != pytest.approx(quiet.state.log_history[0]["loss"], rel=1e-3)


def test_several_evaluation_sets_the_best_model_and_resuming(tokenizer, tmp_path):
    rows = {"one": messages().select(range(7)), "two": messages().select(range(7, 12))}
    options = {
        "max_steps": 4, "learning_rate": 1e-3, "optim": "adamw_torch", "eval_strategy": "steps", "eval_steps": 2,
        "save_strategy": "steps", "save_steps": 2, "per_device_eval_batch_size": 3, "load_best_model_at_end": True,
        "metric_for_best_model": "eval_one_loss",
    }  # fmt: skip
    trainer, _ = train(tmp_path, tokenizer, messages(), options, {"eval_dataset": rows})
    model = copy.deepcopy(trainer.model)
    for module in model.modules():
        module.__dict__.pop("forward", None)
    for name in rows:  # means over all tokens of a set, which does not divide into batches of equal size
        batch = trainer.data_collator(list(trainer.eval_dataset[name]))
        measured = [record for record in trainer.state.log_history if f"eval_{name}_loss" in record]
        assert [record["step"] for record in measured] == [2, 4]
        assert measured[-1][f"eval_{name}_loss"] == pytest.approx(plain_step(model, [batch])[0], rel=FLOAT32)
    assert trainer.state.best_global_step == 4
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.model.load_state_dict(make_model(tokenizer).state_dict())
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(torch.equal(weights[name], p) for name, p in trainer.model.named_parameters())


# --- a model that sees ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seeing(tokenizer):
    """(model, processor, rows) of a tiny LLaVA; an image of 28 x 28 pixels is four tokens."""
    pytest.importorskip("PIL")
    import numpy
    from PIL import Image

    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}"
        "{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    processor = transformers.LlavaProcessor(
        image_processor=images, tokenizer=tokenizer, patch_size=14, vision_feature_select_strategy="default",
        image_token="<image>", num_additional_image_tokens=1, chat_template=template,
    )  # fmt: skip
    sizes = {"intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(hidden_size=16, image_size=28, patch_size=14, projection_dim=16, **sizes)
    text = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_key_value_heads=2, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, **sizes,
    )  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=vision.to_dict(), text_config=text.to_dict(),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    random = numpy.random.default_rng(0)

    def turn(role, text, *before):
        return {"role": role, "content": [*before, {"type": "text", "text": text}]}

    rows = [
        {
            "prompt": [turn("user", turns[-2]["content"], {"type": "image"})],
            "completion": [turn("assistant", turns[-1]["content"])],
            "images": [Image.fromarray(random.integers(0, 255, (28, 28, 3), dtype=numpy.uint8))],
        }
        for turns in CONVERSATIONS
    ]
    return model, processor, Dataset.from_list(rows)


@TRAINERS
@pytest.mark.parametrize("adapters", [None, lora(target_modules=["q_proj"])], ids=["full", "LoRA"])
def test_images(adapters, hook, seeing, tmp_path):
    model, processor, rows = seeing
    more = {} if adapters is None else {"peft_config": copy.deepcopy(adapters)}
    trainer, watched = train(
        tmp_path, None, rows, {"max_length": None}, more, hook=hook, model=copy.deepcopy(model), processor=processor
    )
    assert "pixel_values" in watched.batches[0][0]
    assert_plain(trainer, watched)


# --- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.accelerator.is_available(), reason="offloads activations of a GPU")
def test_activations_are_offloaded_from_a_gpu_only(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"activation_offloading cannot be combined .* no GPU"):
        train(tmp_path, tokenizer, messages(), {"activation_offloading": True}, {})


def test_trained_tokens_of_a_tied_head_are_refused_by_their_name(tokenizer, tmp_path):
    adapters = lora(trainable_token_indices=[1, 2], target_modules=["q_proj"])
    model = tiny.make_model(tokenizer, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"the head is a TrainableTokensWrapper.*trainable_token_indices"):
        train(tmp_path, tokenizer, messages(), {}, {"peft_config": adapters}, model=model)
