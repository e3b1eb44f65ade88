"""One definition of each word: every user of token statistics agrees on every token, and leaves the model as it was."""

import copy
import json
import os
import pickle

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from trl import SFTConfig

import deftune
from deftune.artifacts.models import packaged_folder
from deftune.artifacts.results import load_result
from deftune.data.encoding import Encoder, encode_rows
from deftune.data.end_tokens import end_tokens_of, stop_ids
from deftune.evaluation.evaluate import Result
from deftune.evaluation.heldout import HeldoutSettings
from deftune.evaluation.heldout import measure as measure_heldout
from deftune.evaluation.local import TransformersSampler
from deftune.inspection.inspect import inspect_table
from deftune.inspection.page import page_arrays
from deftune.objectives import Context
from deftune.tokens.conflict import CONFIDENT, is_confident_conflict
from deftune.tokens.head import HeadOptions, StatisticsCall, shifted
from deftune.tokens.passes import Measurement, token_context, token_passes
from deftune.tokens.table import read_token_table, write_token_table
from deftune.training.recording import StepRecord
from deftune.training.trainer import DeftSFTTrainer
from tiny_chat import make_model, make_row
from tolerances import assert_near

QWEN = os.environ.get("DEFTUNE_QWEN", "")
CHATS = [
    make_row("What is 12 plus 30?", "12 plus 30 is 42.", where="rows:1"),
    make_row("Name a colour.", "Blue.", "And another?", "Green, or a dark red.", where="rows:2"),
    make_row("What is the capital of France?", "The capital of France is Rome.", where="rows:3"),
    make_row("Count to five.", "1, 2, 3, 4, 5", where="rows:4"),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_table_measures_what_training_measures_in_every_dtype(dtype):
    """Logits of 40 and more, which bfloat16 would round by 0.125: both take them in float32 or better."""
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(16, 300, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(3 * torch.randn(300, 16, generator=generator))
    hidden, targets = torch.randn(2, 15, 16, generator=generator).to(dtype), torch.arange(30).view(2, 15)
    options = HeadOptions(1.5, None)
    table = Measurement(["deft"], Context())(head, hidden, targets, options)
    training = StatisticsCall()(head, hidden, targets, options)
    z = 1.5 * torch.nn.functional.linear(hidden.double(), head.weight.double(), head.bias.double()).detach()
    exact = deftune.token_stats(z, targets)
    assert z.abs().max() > 40
    for stats in (table.stats, training.stats):
        for name in ("log_p", "entropy", "log_collision"):
            found, expected = getattr(stats, name), getattr(exact, name)
            assert_near(found, expected, "float32 entropy", condition=2 + 2 * float(z.abs().max()), what=name)
    assert table.columns is not None
    assert torch.equal(table.columns["rank"], (z > z.gather(-1, targets[..., None])).sum(-1).flatten())


@pytest.fixture(
    scope="module",
    params=[
        "tiny",
        pytest.param("smollm2", marks=pytest.mark.skipif(
            not packaged_folder("smollm2").is_dir(), reason="smollm2 is not in the cache"
        )),
        pytest.param("qwen", marks=[
            pytest.mark.slow, pytest.mark.skipif(not QWEN, reason="DEFTUNE_QWEN names no GGUF file of a Qwen2.5 model"),
        ]),
    ],
)  # fmt: skip
def chat(request, tokenizer):
    """(model, tokenizer)"""
    return (make_model(tokenizer), tokenizer) if request.param == "tiny" else load_result(QWEN or request.param)


def heldout_records(folder, model, tokenizer, encoder):
    result = Result(folder)
    result.open(HeldoutSettings(model="m", data="d"))
    ends = frozenset(encoder.end_ids.values())
    return measure_heldout(result, model, tokenizer, encode_rows(CHATS, encoder), ends, batch_rows=2)


def test_every_user_agrees_on_every_token(chat, tmp_path):
    model, tokenizer = chat
    encoder = Encoder(tokenizer, max_length=512)
    scores = deftune.score_rows(model, tokenizer, CHATS, encoder=encoder)
    stats, row = scores.stats, scores.row
    # the model's own logits, row by row
    for place, example in enumerate(encode_rows(CHATS, encoder).examples):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([example.input_ids])).logits
        own = deftune.token_stats(logits, shifted(torch.tensor([example.labels])))
        for name in ("log_p", "entropy", "concentration"):
            assert torch.allclose(getattr(stats, name)[row == place], getattr(own, name).double(), atol=5e-4), name
        assert torch.equal(stats.targets[row == place], own.targets)
    # the token table and the columns of score_rows
    write_token_table(tmp_path / "t.parquet", model, tokenizer, CHATS, encoder=encoder, objectives=["deft", "nll"])
    table = read_token_table(tmp_path / "t.parquet")
    with_gates = deftune.score_rows(model, tokenizer, CHATS, encoder=encoder, objectives=["deft", "nll"])
    assert table["row"].to_pylist() == row.tolist() and table["position"].to_pylist() == scores.position.tolist()
    assert table["text"].to_pylist() == scores.text == with_gates.text
    for name in ("log_p", "p", "entropy", "concentration"):
        for values in (table[name].to_numpy(), with_gates.columns[name], getattr(with_gates.stats, name)):
            assert np.allclose(values, getattr(stats, name), atol=1e-4), name
    assert np.allclose(table["focus:deft"], table["concentration"]), "DEFT's focus is the concentration"
    assert (table["focus:nll"].to_numpy() == 0).all(), "NLL's focus is not"
    # held-out sums
    for record in heldout_records(tmp_path / "r", model, tokenizer, encoder):
        mine = row == record["row"]
        for name in ("nll", "p", "concentration", "entropy"):
            assert record[name] == pytest.approx(float(getattr(stats, name)[mine].sum()), rel=1e-4), name
    # confident conflicts: the training record, the inspector and its page, from the same numbers
    inspection = inspect_table(tmp_path / "t.parquet")
    columns = [torch.tensor(table[name].to_numpy()) for name in ("log_p", "concentration")]
    assert inspection.confident.tolist() == is_confident_conflict(*columns).tolist()
    assert (
        page_arrays(inspection)["conflict"].astype(np.float64) >= CONFIDENT
    ).tolist() == inspection.confident.tolist()
    record = StepRecord(deftune.objective("nll"), tuple(encoder.end_ids.values()))
    record.add(with_gates.stats, Context(), torch.tensor(0))
    means = record.take()
    assert round(means["conflicts"] * len(stats)) == inspection.confident.sum()
    assert means["focus"] == 0 and means["concentration"] == pytest.approx(float(stats.concentration.mean()), rel=1e-4)
    # end tokens: the mask, the record, the table, the objectives, the sampler
    ends = set(encoder.end_ids.values())
    assert ends and ends == set(end_tokens_of(tokenizer).values()) == set(token_context(encoder).special_ids)
    is_end = np.isin(stats.targets, list(ends))
    assert table["is_eos"].to_pylist() == is_end.tolist() and is_end.sum() == 5  # five answers, each ended
    assert means["eos_p"] == pytest.approx(float(stats.p[torch.from_numpy(is_end)].mean()), rel=1e-3)
    sampler = TransformersSampler(model, tokenizer)
    assert set(sampler.network.end_ids) == stop_ids(model, ends) >= ends


def test_the_trainers_evaluation_agrees(tokenizer, tmp_path):
    model, encoder = make_model(tokenizer), Encoder(tokenizer, max_length=512)
    scores = deftune.score_rows(model, tokenizer, CHATS, encoder=encoder)
    rows = [{"input_ids": e.input_ids, "labels": e.labels} for e in encode_rows(CHATS, encoder).examples]
    arguments = SFTConfig(
        output_dir=str(tmp_path / "out"), per_device_eval_batch_size=3, report_to=[], bf16=False, use_cpu=True,
        gradient_checkpointing=False, max_steps=1, per_device_train_batch_size=2, learning_rate=1e-3,
    )  # fmt: skip
    data = Dataset.from_list(rows)
    trainer = DeftSFTTrainer(
        model, arguments, objective="deft | eos(nll)", train_dataset=data, eval_dataset=data,
        processing_class=tokenizer,
    )  # fmt: skip
    assert set(trainer.special_ids) == set(encoder.end_ids.values())
    found = trainer.evaluate()
    stats, objective = scores.stats, trainer.objective
    expected = {
        "nll": stats.nll, "p": stats.p, "concentration": stats.concentration, "entropy": stats.entropy,
        "loss": objective.loss(stats, token_context(encoder)), "focus": objective.focus(stats, token_context(encoder)),
        "conflicts": is_confident_conflict(stats.log_p, stats.concentration).double(),
    }  # fmt: skip
    for name, column in expected.items():
        assert found[f"eval_{name}"] == pytest.approx(float(column.mean()), rel=1e-5), name
    # after training: the class is the model's own, in memory and on disk
    trainer.train()
    trained = trainer.model
    assert type(trained) is transformers.LlamaForCausalLM and type(trained.lm_head) is torch.nn.Linear
    assert type(pickle.loads(pickle.dumps(trained))) is transformers.LlamaForCausalLM
    trainer.save_model(str(tmp_path / "saved"))
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert config["architectures"] == ["LlamaForCausalLM"] and type(again) is transformers.LlamaForCausalLM
    one, other = (deftune.score_rows(m, tokenizer, CHATS).stats.log_p for m in (trained, again))
    assert torch.equal(one, other) and not torch.allclose(one, stats.log_p, atol=1e-3)


def state_of(model):
    """All that measuring might change, apart from the weights."""
    return [
        (name, type(module), sorted(module.__dict__), module.__dict__.get("forward"), module.training,
         len(module._forward_hooks), len(module._forward_pre_hooks))
        for name, module in model.named_modules()
    ]  # fmt: skip


@pytest.mark.parametrize("lora", [False, True])
def test_measuring_leaves_the_model_alone(lora, tokenizer, tmp_path):
    model, encoder = make_model(tokenizer), Encoder(tokenizer, max_length=512)
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    model.train()
    next(model.modules()).training = False  # modes that differ from module to module
    before, weights = state_of(model), {name: value.clone() for name, value in model.state_dict().items()}
    examples = encode_rows(CHATS, encoder).examples
    for measurement in (None, Measurement(["deft"], Context())):
        for _ in token_passes(model, tokenizer, examples, measurement=measurement, batch_rows=2):
            assert state_of(model) == before, "between two rows"
    heldout_records(tmp_path / "r", model, tokenizer, encoder)
    write_token_table(tmp_path / "t.parquet", model, tokenizer, CHATS)
    broken = copy.deepcopy(model)
    with torch.no_grad():
        next(broken.parameters()).fill_(torch.nan)
    broken_before = state_of(broken)
    with pytest.raises(ValueError, match="NaN"):
        deftune.score_rows(broken, tokenizer, CHATS)
    assert state_of(broken) == broken_before and state_of(model) == before
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert state_of(pickle.loads(pickle.dumps(model))) == state_of(copy.deepcopy(model)) == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_rows_may_be_dicts_and_some_without_an_answer(tokenizer):
    model = make_model(tokenizer)
    dicts = [{"messages": list(row.messages)} for row in CHATS]
    assert torch.equal(
        deftune.score_rows(model, tokenizer, dicts).stats.log_p, deftune.score_rows(model, tokenizer, CHATS).stats.log_p
    )
    seen = []
    found = deftune.score_rows(model, tokenizer, [{"prompt": "a?", "completion": "b"}, dicts[0]], progress=seen.append)
    assert (
        found.row.unique().tolist() == [0, 1]
        and "".join(found.text).startswith("b<|im_end|>12 plus")
        and len(seen) == 2
    )
    with pytest.raises(ValueError, match=r"rows\[1\]: "):
        deftune.score_rows(model, tokenizer, [dicts[0], {"messages": 3}])
    with pytest.raises(ValueError, match="depends on a whole optimizer step"):
        deftune.score_rows(model, tokenizer, dicts, objectives=["clip"])
