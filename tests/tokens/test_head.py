"""A model whose forward ends in the objective: the loss of its own logits, or a refusal."""

import copy
import pickle

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import deftune
from deftune.objectives import IGNORE_INDEX, Context
from deftune.tokens import head as head_module
from deftune.tokens.head import (
    CHUNK_ROWS,
    ObjectiveCall,
    StatisticsCall,
    attach_objective,
    check_packing,
    chunk_options,
    objective_forward,
    shifted,
)
from tolerances import assert_close, assert_near

SIZES = {
    "vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "llama tied": (transformers.LlamaForCausalLM, transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "llama untied": (transformers.LlamaForCausalLM, transformers.LlamaConfig, {"tie_word_embeddings": False}),
    "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config, {}),
    "gemma3 softcap": (
        transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig, {"final_logit_softcapping": 2.0, "head_dim": 8}
    ),
    "cohere logit_scale": (transformers.CohereForCausalLM, transformers.CohereConfig, {"logit_scale": 0.5}),
    "granite logits_scaling": (transformers.GraniteForCausalLM, transformers.GraniteConfig, {"logits_scaling": 4.0}),
}  # fmt: skip


def make_model(name: str = "llama tied", dtype: torch.dtype = torch.float64, **more):
    cls, config, options = MODELS[name]
    torch.manual_seed(0)
    model = cls(config(**{**SIZES, **options, **more})).to(dtype)
    with torch.no_grad():  # logits of some size, or every objective would look the same
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    return model


def make_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 48, (3, 9), generator=generator)
    labels = ids.clone()
    labels[:, :3], labels[1, 6:], labels[2] = IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def objective_of(model, batch, spec="deft", call=None):
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    call = call or ObjectiveCall(deftune.objective(spec), Context(), None)
    return model(**inputs, deft_targets=shifted(batch["labels"]), deft_call=call)


def gradients(model) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("spec", ["nll", "deft", "clip"])
@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_that_of_the_models_own_logits(name, spec):
    model, batch = make_model(name), make_batch()
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    expected = deftune.token_loss(logits, shifted(batch["labels"]), spec)
    expected.backward()
    wanted = gradients(model)
    attach_objective(model)
    output = objective_of(model, batch, spec)
    assert output.loss.dtype == torch.float64
    assert_close(output.loss, expected, "float64 column")
    output.loss.backward()
    found = gradients(model)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert_near(found[key], value, "closed form", condition=max(1.0, float(value.abs().max())), what=key)
    stats = deftune.token_stats(logits.detach(), shifted(batch["labels"]))
    assert_close(output.stats.log_p, stats.log_p, "float64 column")
    only = objective_of(model, batch, call=StatisticsCall(deftune.objective(spec).top_k))
    assert only.loss is None and torch.equal(only.stats.log_p, output.stats.log_p)


@pytest.mark.parametrize("spec", ["deft", "clip", "mile", "linear | mean_one"])
def test_the_gates_are_those_of_the_objective(spec):
    """Also where the call is the whole step, whose mass is known after the last chunk only."""
    model, batch = make_model(), make_batch()
    attach_objective(model)
    output = objective_of(model, batch, spec)
    gate, value = deftune.objective(spec).evaluate(output.stats)
    assert_close(output.gated.gate, gate, "float64 column")
    assert_close(output.gated.value, value, "float64 column")


def test_without_targets_the_model_is_its_own(tmp_path):
    model = make_model(dtype=torch.float32).eval()
    prompt = torch.tensor([[5, 6, 7]])
    before = model.generate(prompt, max_new_tokens=5, do_sample=False)
    attach_objective(model)
    attach_objective(model)  # once is enough
    assert torch.equal(model.generate(prompt, max_new_tokens=5, do_sample=False), before)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is transformers.LlamaForCausalLM and again.config.architectures == ["LlamaForCausalLM"]
    assert {k: v.tolist() for k, v in again.state_dict().items()} == {
        k: v.tolist() for k, v in model.state_dict().items()
    }
    assert type(model) is transformers.LlamaForCausalLM and type(model.lm_head) is nn.Linear


@pytest.mark.parametrize("peft", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_model_in_training_pickles_and_copies(copied, peft):
    model, batch = make_model("llama untied").eval(), make_batch()
    base = model
    if peft:
        config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
        model = get_peft_model(model, config).eval()
    attach_objective(base)
    again = copied(model)
    own = again.get_base_model() if peft else again
    assert type(again) is type(model) and type(own) is transformers.LlamaForCausalLM
    assert own.forward.__self__ is own, "the copy's forward runs the original's weights"
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.zero_()
    attach_objective(own)
    assert objective_of(again, batch).loss > 0.1 and objective_of(model, batch).loss > 0.1
    assert not torch.equal(objective_of(again, batch).loss, objective_of(model, batch).loss)


def test_the_context_restores_what_was_there():
    model, batch = make_model(), make_batch()
    with objective_forward(model):
        assert objective_of(model, batch).loss > 0
    assert "forward" not in model.__dict__ and "forward" not in model.lm_head.__dict__
    mine = model.forward = lambda *args, **kwargs: "mine"
    with pytest.raises(RuntimeError, match="inside"), objective_forward(model):
        raise RuntimeError("inside")
    assert model.__dict__["forward"] is mine and model() == "mine"


class Doubled(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output


def test_a_head_that_does_something_else_is_refused():
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"Doubled: its logits are not softcap.*deftune.hf_loss"):
        attach_objective(Doubled(transformers.LlamaConfig(**SIZES)))
    model = make_model("llama untied")
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match="has no linear head of its own"):
        attach_objective(model)


def test_an_adapter_on_the_head_is_refused():
    model = get_peft_model(make_model("llama untied"), LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    with pytest.raises(ValueError, match=r"not a plain Linear.*leave lm_head out of target_modules"):
        attach_objective(model.get_base_model())
    later = make_model("llama untied")
    attach_objective(later)
    adapted = get_peft_model(later, LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(ValueError, match="not a plain Linear"):
        objective_of(adapted, make_batch())


@pytest.mark.parametrize("attach_first", [False, True])
def test_lora_trains_its_adapters_and_leaves_the_head(attach_first):
    model, batch = make_model("llama untied"), make_batch()
    if attach_first:
        attach_objective(model)
    model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    deftune.token_loss(logits, shifted(batch["labels"]), "deft").backward()
    wanted = gradients(model)
    attach_objective(model.get_base_model())
    objective_of(model, batch).loss.backward()
    found = gradients(model)
    assert found.keys() == wanted.keys() and all("lora_" in key for key in found) and len(found) == 28
    for key, value in wanted.items():
        assert_near(found[key], value, "closed form", condition=max(1.0, float(value.abs().max())), what=key)


def test_a_head_in_modules_to_save_is_trained():
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    model, batch = get_peft_model(make_model("llama untied"), config), make_batch()
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    deftune.token_loss(logits, shifted(batch["labels"]), "deft").backward()
    wanted = gradients(model)
    attach_objective(model.get_base_model())
    objective_of(model, batch).loss.backward()
    found = gradients(model)
    assert found.keys() == wanted.keys() and any("lm_head.modules_to_save" in key for key in found)
    for key, value in wanted.items():
        assert_near(found[key], value, "closed form", condition=max(1.0, float(value.abs().max())), what=key)


def test_a_batch_without_targets_is_zero_and_connected():
    model, batch = make_model(), make_batch()
    attach_objective(model)
    batch["labels"] = torch.full_like(batch["labels"], IGNORE_INDEX)
    output = objective_of(model, batch)
    assert output.loss.item() == 0 and len(output.stats) == 0
    output.loss.backward()
    found = gradients(model)
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(not value.any() for value in found.values())


def test_under_autocast_the_heads_gradient_is_float32():
    model, batch = make_model(dtype=torch.float32), make_batch()
    attach_objective(model)
    exact = objective_of(model, batch).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = objective_of(model, batch).loss
    loss.backward()
    gradient = model.lm_head.weight.grad
    assert gradient.dtype == torch.float32 and loss.dtype == torch.float32
    assert not torch.equal(gradient, gradient.bfloat16().float()), "it was rounded to bfloat16 on the way"
    assert abs(loss.item() - exact.item()) < 0.05 * exact.item()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_stays_inside_the_rows_of_a_pack(attention):
    check_packing(make_model(attn_implementation=attention))


def test_attention_across_the_rows_of_a_pack_is_refused():
    class Forgetful(transformers.LlamaForCausalLM):
        def forward(self, *args, position_ids=None, **kwargs):
            return super().forward(*args, **kwargs)

    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"attn_implementation='sdpa' Forgetful sees across the rows of a pack"):
        check_packing(Forgetful(transformers.LlamaConfig(**SIZES)))


@pytest.mark.parametrize(("sequences", "graphs"), [(1, True), (8, True), (16, False), (64, False)])
def test_a_large_batch_has_large_chunks_in_what_the_final_norm_will_take(monkeypatch, sequences, graphs):
    """SmolLM2 in float32 under autocast: E and the bfloat16 copies are no more than three times the hidden states."""
    hidden, weight = torch.empty(sequences * 2048, 576, device="meta"), torch.empty(49152, 576, device="meta")
    monkeypatch.setattr(head_module, "gemm_dtype", lambda _: torch.bfloat16)
    rows, backend = chunk_options(hidden, weight)
    assert backend == ("auto" if graphs else "triton,torch") and (rows == CHUNK_ROWS) == graphs
    if not graphs:
        taken = 2 * (rows * 49152 + hidden.numel() + weight.numel())
        assert 0.9 <= taken / (3 * 4 * hidden.numel()) <= 1


class Leaking(transformers.LlamaForCausalLM):
    """A token of the first row of a pack changes the logits of the second one by a little."""

    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        if input_ids.shape[1] == 9:
            output.logits[:, 5:] *= 1 + 2e-2 * input_ids[:, :1, None]
        return output


def test_a_small_leak_between_rows_is_seen_in_16_bits():
    """The rows' own logits are within the bound for bfloat16; they change with the other row."""
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="sees across the rows of a pack"):
        check_packing(Leaking(transformers.LlamaConfig(**SIZES)).bfloat16())


def test_rows_of_a_pack_are_not_refused_for_the_roundings_of_a_deep_model():
    """Sixty-four layers of random weights: two kernels of torch differ by 0.14 in bfloat16."""
    torch.manual_seed(0)
    sizes = SIZES | {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes | {"num_hidden_layers": 64, "initializer_range": 0.3})
    model = transformers.LlamaForCausalLM(config)
    for dtype, bound in [(torch.float32, 1e-4), (torch.bfloat16, 0.05)]:
        ids = torch.arange(5)[None]
        plain = model.to(dtype)(input_ids=ids).logits.float()
        with sdpa_kernel(SDPBackend.MATH):
            other = model(input_ids=ids).logits.float()
        assert (float((plain - other).abs().max() / plain.abs().max()) > bound) == (dtype == torch.bfloat16)
        check_packing(model, attention=lambda: sdpa_kernel(SDPBackend.MATH))


def test_experts_that_get_other_tokens_are_no_leak_between_rows():
    """With another first row each expert's products have other shapes, and bfloat16 rounds the second row otherwise.

    With AVX2 one of these models sends a token to another expert: its logits differ by 5.6%.
    """
    sizes = SIZES | {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    for seed in range(12):
        torch.manual_seed(seed)
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes | {"num_hidden_layers": 6}))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            check_packing(model)
