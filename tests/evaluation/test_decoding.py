"""Decoding in slots: the attention, what a slot may not see, and which models cannot. The kernels are interpreted."""

import importlib.util
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
import transformers

from deftune.artifacts.models import load_model, load_tokenizer, resolve_model
from deftune.evaluation import slots
from deftune.evaluation.decoding import Answer, LanguageModel
from deftune.evaluation.local import TransformersSampler
from deftune.evaluation.sampler import Prompt, SamplerError
from deftune.evaluation.slot_decoding import SlotDecoder
from interpreter import run_checks

FAMILIES = {
    "llama": (transformers.LlamaForCausalLM, {}),
    "qwen2": (transformers.Qwen2ForCausalLM, {"num_hidden_layers": 3}),
    "qwen3": (transformers.Qwen3ForCausalLM, {"head_dim": 8}),
    "gemma2": (transformers.Gemma2ForCausalLM, {"head_dim": 8, "sliding_window": 8, "attn_logit_softcapping": 2.0}),
    "gemma3": (transformers.Gemma3ForCausalLM, {"head_dim": 8, "sliding_window": 8, "num_hidden_layers": 6}),
    "mistral": (transformers.MistralForCausalLM, {"sliding_window": 8, "head_dim": 8}),
    "phi3": (transformers.Phi3ForCausalLM, {}),
    "qwen3_moe": (
        transformers.Qwen3MoeForCausalLM,
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "olmo2": (transformers.Olmo2ForCausalLM, {}),
}
every_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_in_the_interpreter():
    """Triton decides at its import whether it interprets, and this process may have imported it long ago."""
    run_checks("evaluation", "check_decoding.py", "not slow")


def family_model(family, tokenizer, make_model):
    cls, more = FAMILIES[family]
    model = make_model(tokenizer, cls, **more)
    if family == "gemma2":
        model.set_attn_implementation("eager")  # some versions of transformers take sdpa, without its softcap
    return model


def ids_of(number: int, length: int) -> list[list[int]]:
    """Rows of unequal lengths, the first of one token."""
    generator = torch.Generator().manual_seed(0)
    sizes = [1, *range(2, length, max(1, length // number))][:number]
    return [torch.randint(3, 290, (size,), generator=generator).tolist() for size in sizes]


def network_of(model, **options) -> LanguageModel:
    return LanguageModel(model, **{"end_ids": set(), "pad_id": 0, "tie_margin": 0.0, **options})


def make_decoder(network, *, places, room, tokens=20, portion=1000) -> SlotDecoder:
    plan = slots.Plan(places, room, portion)
    return SlotDecoder(network, slots.survey(network), plan, top_p=1.0, max_new_tokens=tokens)


def make_answer(name: str, ids: list[int], limit: int) -> Answer:
    return Answer(Prompt(name, ""), 0, ids, limit, (1, 2))


@every_family
def test_the_logits_of_a_step_are_those_of_a_forward(family, tokenizer, make_model):
    """Rows of 1 to 30 tokens side by side, past windows of 8; every step against the whole row."""
    model = family_model(family, tokenizer, make_model)
    as_loaded = model.config._attn_implementation
    rows, steps = ids_of(7, 30), 12
    network = network_of(model)
    decoder = make_decoder(network, places=9, room=30 + steps, tokens=steps)
    decoder.admit([make_answer(str(i), ids, steps) for i, ids in enumerate(rows)])
    for _ in range(steps):
        size = len(rows)
        logits = decoder._logits(size)
        with torch.no_grad():
            expected = torch.cat([model(torch.tensor([ids]), use_cache=False).logits[:, -1] for ids in rows])
        assert (logits - expected).abs().max() < 2e-5 * expected.abs().max()
        decoder._commit(logits.argmax(-1), torch.ones(size, dtype=torch.bool))
        rows = [[*ids, int(token)] for ids, token in zip(rows, expected.argmax(-1))]
    assert model.config._attn_implementation == as_loaded


@pytest.mark.parametrize("window", [None, 5])
def test_plain_attention_is_that_of_torch(window):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([0, 3, 9, 4])
    keys, values = torch.randn(2, 4, 2, 12, 8, generator=generator)
    query, new = torch.randn(3, 6, 8, generator=generator), torch.randn(2, 3, 2, 8, generator=generator)
    before = keys[3].clone()
    out = slots.attend_plain(query, *new, keys, values, lengths, scale=0.3, window=window)
    assert torch.equal(keys[3], before)  # a slot that took no part
    for row, length in enumerate(lengths[:3].tolist()):
        assert torch.equal(keys[row, :, length], new[0, row])
        begin = 0 if window is None else max(0, length + 1 - window)
        past = slice(begin, length + 1)
        expected = F.scaled_dot_product_attention(
            query[row, :, None], keys[row, :, past], values[row, :, past], scale=0.3, enable_gqa=True
        )
        assert (out[row] - expected[:, 0]).abs().max() < 1e-6


def run(decoder, waiting: list[Answer]) -> dict[str, Answer]:
    """All of them, refilled whenever a place is free."""
    waiting, found = list(waiting), {}
    while waiting or decoder.num_live:
        if waiting and decoder.free:
            number = decoder.free
            decoder.admit(waiting[:number])
            waiting = waiting[number:]
        decoder.start()
        found |= {answer.prompt.id: answer for answer in decoder.collect()}
    return found


def test_slots_are_refilled_and_moved(model):
    """Limits of 1 to 19 tokens in 4 slots: each is taken several times, and answers move into the holes of others."""
    rows = ids_of(15, 40)
    limits = [1 + (7 * i) % 19 for i in range(15)]
    network = network_of(model)
    asked = [make_answer(str(i), ids, limit) for i, (ids, limit) in enumerate(zip(rows, limits))]
    found = run(make_decoder(network, places=4, room=60), asked)
    assert {i: len(found[str(i)].made) for i in range(15)} == dict(enumerate(limits))
    for i, ids in enumerate(rows):
        with torch.no_grad():
            out = model.generate(torch.tensor([ids]), max_new_tokens=limits[i], do_sample=False, eos_token_id=-1)
        assert found[str(i)].made == out[0, len(ids) :].tolist() and found[str(i)].finish == "length"


def test_a_broken_answer_leaves_its_slot_clean(tokenizer, make_model):
    """Token 5 makes every logit NaN; the next answer in its slot does not see it."""
    model = make_model(tokenizer)
    with torch.no_grad():
        model.model.embed_tokens.weight[5] = math.nan
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.nan_to_num(0.0))  # untied: only as an input
    broken, long, short = [*range(20, 30), 5, 9], list(range(40, 55)), [10, 11]
    network = network_of(model)
    asked = [make_answer("broken", broken, 9), make_answer("long", long, 18), make_answer("short", short, 9)]
    found = run(make_decoder(network, places=2, room=40), asked)
    assert found["broken"].finish == "error" and found["broken"].made == []
    assert "not finite after 0 tokens" in found["broken"].note
    # it took the broken one's slot, which is read beyond its own length as long as the long one runs
    alone = run(make_decoder(network, places=1, room=40), [make_answer("short", short, 9)])
    assert found["short"].finish == "length" and found["short"].made == alone["short"].made


def test_prompts_are_read_in_portions(model):
    """At most 64 tokens at a time; a prompt's samples are in one portion, unless it ends."""
    decoder = make_decoder(network_of(model), places=8, room=60, portion=64)
    portions = [[40], [40, 20], [20, 20, 16], [65]]
    answers = [make_answer(str(n), [3] * n, 1) for part in portions for n in part]
    assert [[len(answers[i].ids) for i in part] for part in decoder._portions(answers)] == [
        [40, 40], [20, 20, 20, 16], [65]
    ]  # fmt: skip


@every_family
def test_padded_batches_give_the_same_answers(family, tokenizer, make_model, monkeypatch):
    model = family_model(family, tokenizer, make_model)
    prompts = [Prompt(str(i), "What " * (1 + i % 5) + str(i)) for i in range(9)]

    def found(**settings) -> dict:
        sampler = TransformersSampler(model, tokenizer, batch_size=4, end_ids=range(3, 30))
        return {
            (o.id, o.sample): (o.text, o.tokens) for o in sampler.sample(prompts, max_new_tokens=14, seed=1, **settings)
        }

    in_slots = [found(), found(temperature=0.8, samples=2)]

    def refuse(model):
        raise slots.Unsupported("the test asks for it")

    monkeypatch.setattr(slots, "survey", refuse)
    with pytest.warns(UserWarning, match="padded batch, which is slower: the test asks for it"):
        assert [found(), found(temperature=0.8, samples=2)] == in_slots


REFUSED = {
    "it is not a transformers model": lambda make, tokenizer: torch.nn.Linear(2, 2),
    "dynamic positions depend on the longest row": lambda make, tokenizer: make(
        tokenizer, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    ),
    "attention with s_aux": lambda make, tokenizer: make(
        tokenizer, transformers.GptOssForCausalLM, num_local_experts=2, num_experts_per_tok=1, head_dim=8
    ),
    "its cache has a LinearAttention": lambda make, tokenizer: make(
        tokenizer, transformers.Lfm2ForCausalLM, layer_types=["conv", "full_attention"]
    ),
    "has an attention of its own": lambda make, tokenizer: make(
        tokenizer, transformers.BloomForCausalLM, n_head=4, n_layer=1
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_models_that_cannot_say_why(reason, tokenizer, make_model):
    network = network_of(REFUSED[reason](make_model, tokenizer))
    network.keeps_last = True
    with pytest.raises(slots.Unsupported, match=reason):
        slots.survey(network)


def test_a_softcap_is_not_mixed_with_none():
    """Some versions of transformers read Gemma 2's prompts by sdpa, without its softcap."""
    cache = slots.SlotCache([(2, 8)], 1, 4, torch.float32, torch.device("cpu"))
    module = torch.nn.Module()
    module.layer_idx = 0
    states = torch.ones(1, 2, 1, 8)
    slots.slot_attention(module, states, states, states, None, softcap=2.0, slots=cache)
    cache.instead_of = "sdpa"
    with pytest.raises(slots.Unsupported, match="a softcap that sdpa leaves out; load it with eager attention"):
        slots.slot_attention(module, states, states, states, None, softcap=2.0, slots=cache)


def test_a_model_that_cannot_is_answered_all_the_same(tokenizer, make_model):
    model = make_model(tokenizer, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    sampler = TransformersSampler(model, tokenizer)
    with pytest.warns(UserWarning, match="padded batch, which is slower: its dynamic positions"):
        assert len(list(sampler.sample([Prompt("a", "?")], max_new_tokens=3))) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        list(sampler.sample([Prompt("b", "?")], max_new_tokens=3))


def test_slots_are_as_many_as_fit(model, monkeypatch):
    """2 layers of 2 heads of width 8 are 256 bytes a token in float32."""
    network, gib = network_of(model), 2**30
    found = slots.survey(network)
    assert found.slot_bytes(1000, 4) == 256_000 and found.vocab_size == 296

    class OnCuda(LanguageModel):
        device = torch.device("cuda")

    network.__class__ = OnCuda
    free = 10 * gib
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 140 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * gib)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1 * gib)
    found_plan = slots.plan(network, found, 100_000, 10**6)
    assert found_plan.slots < 12 * gib / (256 * 100_000) < 1.5 * found_plan.slots
    assert found_plan.portion == 100_000 and found_plan.room == 100_000  # a prompt is read whole
    assert slots.plan(network, found, 100_000, 7).slots == 7
    assert slots.plan(network, found, 1000, 7) == (7, 1000, slots.PREFILL_TOKENS)
    free = -gib
    with pytest.raises(SamplerError, match=r"an answer of 1000000 tokens.*has 1\.00 GiB free; lower max_new_tokens"):
        slots.plan(network, found, 1_000_000, 8)


@pytest.mark.slow
def test_smollm2_says_what_generate_says():
    """A trained model, with the prompts and lengths of real use: the greedy tokens of transformers' own loop."""
    try:
        folder = resolve_model("smollm2")
    except ValueError as error:
        pytest.skip(f"SmolLM2 is not here: {error}")
    model, tokenizer = load_model(folder).eval(), load_tokenizer(folder)
    questions = ["What is 12 plus 30?", "Name three colours of the rainbow, and say which is your favourite.", "Hi"]
    prompts = [Prompt(str(i), text) for i, text in enumerate(questions)]
    sampler = TransformersSampler(model, tokenizer, batch_size=2)
    found = {o.id: o for o in sampler.sample(prompts, max_new_tokens=24)}
    for prompt in prompts:
        ids = torch.tensor([sampler.encode(prompt)])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        new = out[0, ids.shape[1] :]
        assert found[prompt.id].text == tokenizer.decode(new, skip_special_tokens=True)
        assert found[prompt.id].tokens == len(new)
