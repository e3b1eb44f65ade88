"""Decoding in slots on a GPU: kernels in their dtypes, captured steps, and the answers against the plain loop."""

import math
import warnings

import pytest
import torch
import transformers

from deftune.evaluation import slots
from deftune.evaluation.chance import derive_key, draw, exponentials
from deftune.evaluation.decoding import Answer, LanguageModel
from deftune.evaluation.local import TransformersSampler
from deftune.evaluation.sampler import Prompt, SamplerError
from deftune.evaluation.slot_decoding import SlotDecoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and none is here"),
]

FAMILIES = {
    "llama": (transformers.LlamaForCausalLM, {}),
    "qwen2": (transformers.Qwen2ForCausalLM, {}),
    "gemma3": (transformers.Gemma3ForCausalLM, {"head_dim": 32, "sliding_window": 8, "num_hidden_layers": 6}),
}


@pytest.fixture(autouse=True)
def clean():
    """float32 means float32, and a step that cannot be captured is a failure."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "a decoding step cannot be captured")
        warnings.filterwarnings("error", "decoding with a padded batch")
        yield
    torch.set_float32_matmul_precision(before)
    torch.cuda.empty_cache()


@pytest.fixture(params=FAMILIES)
def model(request, tokenizer, make_model):
    cls, more = FAMILIES[request.param]
    return make_model(tokenizer, cls, **{"hidden_size": 64, "max_position_embeddings": 512, **more}).cuda()


@pytest.fixture
def llama(tokenizer, make_model):
    return make_model(tokenizer, hidden_size=64, max_position_embeddings=512).cuda()


def prompts(number: int) -> list[Prompt]:
    return [Prompt(f"q/{i}", f"What is {i} plus {'30 and ' * (i % 7)}1?") for i in range(number)]


def answers(sampler, asked, **settings) -> dict:
    made = list(sampler.sample(asked, **{"max_new_tokens": 40, "seed": 3, **settings}))
    found = {(o.id, o.sample): (o.text, o.tokens, o.finish) for o in made}
    assert len(found) == len(made) == len(asked) * settings.get("samples", 1)
    return found


def make_sampler(model, tokenizer, **options) -> TransformersSampler:
    return TransformersSampler(model, tokenizer, **{"end_ids": range(3, 20), **options})


def padded(monkeypatch):
    def refuse(model):
        raise slots.Unsupported("the test asks for it")

    monkeypatch.setattr(slots, "survey", refuse)
    warnings.filterwarnings("ignore", "decoding with a padded batch")


SETTINGS = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "samples": 2},
    "nucleus": {"temperature": 0.7, "top_p": 0.8, "samples": 2},
}
every_setting = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@every_setting
def test_float32_answers_are_those_of_the_plain_loop(model, tokenizer, settings, monkeypatch):
    """Whatever the number of slots: 1, fewer than answers (each refilled), as many, and more."""
    asked = prompts(18)
    found = answers(make_sampler(model, tokenizer, batch_size=8), asked, **settings)
    assert len({tokens for _, tokens, _ in found.values()}) > 1  # they end at different times
    for size in (1, 5, 200):
        assert answers(make_sampler(model, tokenizer, batch_size=size), asked, **settings) == found
    padded(monkeypatch)
    assert answers(make_sampler(model, tokenizer, batch_size=16), asked, **settings) == found


@every_setting
@every_dtype
def test_the_same_seed_gives_the_same_answers(llama, tokenizer, dtype, settings):
    """In any dtype, with the whole step in the graph (tie_margin 0), refilled and shrunk."""
    sampler = make_sampler(llama.to(dtype), tokenizer, batch_size=64, tie_margin=0.0)
    first = answers(sampler, prompts(150), max_new_tokens=100, **settings)
    assert answers(sampler, prompts(150), max_new_tokens=100, **settings) == first
    assert len(set(first.values())) > 75


def test_a_captured_step_is_the_step(llama):
    """Greedy in float32, all in one graph: the tokens of a forward of the whole row, at every length."""
    generator = torch.Generator().manual_seed(0)
    network = LanguageModel(llama, end_ids=set(), pad_id=0, tie_margin=0.0)
    decoder = SlotDecoder(network, slots.survey(network), slots.Plan(40, 120), top_p=1.0, max_new_tokens=50)
    rows = [torch.randint(3, 290, (1 + 2 * i,), generator=generator).tolist() for i in range(30)]
    decoder.admit([Answer(Prompt(str(i), ""), 0, ids, 50, (1, 2)) for i, ids in enumerate(rows)])
    found: list[Answer] = []
    while decoder.num_live:
        decoder.start()
        found += decoder.collect()
    assert decoder.one_pass and decoder.graphs
    for answer in found:
        whole = torch.tensor([[*answer.ids, *answer.made]], device="cuda")
        with torch.no_grad():
            logits = llama(whole, use_cache=False).logits[0, len(answer.ids) - 1 : -1]
        best = logits.max(-1).values
        chosen = logits.gather(-1, torch.tensor(answer.made, device="cuda")[:, None])[:, 0]
        assert (best - chosen).max() < 1e-3  # the best token, or one as good within rounding


def test_slots_shrink_as_answers_run_out(llama, tokenizer):
    """One long answer among 64: the rest of it goes through the graphs of 16 and 4 slots, and is the same as alone."""
    network = LanguageModel(llama, end_ids=set(), pad_id=0, tie_margin=0.0)
    limits = [300 if i == 63 else 5 + i % 20 for i in range(64)]
    rows = [[3 + i, 4, 5 + i] for i in range(64)]

    def run(which: list[int], places: int) -> tuple[SlotDecoder, dict]:
        plan = slots.Plan(places, 310)
        decoder = SlotDecoder(network, slots.survey(network), plan, top_p=1.0, max_new_tokens=300)
        decoder.admit([Answer(Prompt(str(i), ""), 0, rows[i], limits[i], (1, 2)) for i in which])
        found = {}
        while decoder.num_live:
            decoder.start()
            found |= {answer.prompt.id: answer.made for answer in decoder.collect()}
        return decoder, found

    decoder, found = run(list(range(64)), 64)
    assert set(decoder.graphs) == {64, 4} or set(decoder.graphs) == {64, 16, 4}
    assert {name: len(made) for name, made in found.items()} == {str(i): limit for i, limit in enumerate(limits)}
    assert found["63"][:50] == run([63], 1)[1]["63"][:50]


@every_dtype
def test_each_slot_has_its_own_temperature(llama, dtype):
    """One graph for all temperatures; an answer that moves to another slot takes its temperature along.

    The limits are the same in every run, so the shapes are, and the tokens of a row are the same bit for bit.
    """
    network = LanguageModel(llama.to(dtype), end_ids=set(), pad_id=0, tie_margin=0.0)
    limits = [300 if i >= 60 else 5 + i % 20 for i in range(64)]

    def run(temperatures: list[float]) -> list[list[int]]:
        plan = slots.Plan(64, 310)
        decoder = SlotDecoder(network, slots.survey(network), plan, top_p=1.0, max_new_tokens=300)
        answers = [
            Answer(Prompt(str(i), ""), 0, [3 + i, 4, 5 + i], limits[i], (i, 7 * i), temperature)
            for i, temperature in enumerate(temperatures)
        ]
        decoder.admit(answers)
        while decoder.num_live:
            decoder.start()
            decoder.collect()
        assert decoder.one_pass and len(decoder.graphs) > 1  # some answers moved
        return [answer.made for answer in answers]

    mixed = [(0.0, 0.5, 1.0)[i % 3] for i in range(64)]
    found = run(mixed)
    alone = {temperature: run([temperature] * 64) for temperature in (0.0, 0.5, 1.0)}
    assert found == [alone[temperature][i] for i, temperature in enumerate(mixed)]
    assert all(alone[0.0][i] != alone[1.0][i] for i in range(60, 64))


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_pooled_answers_are_those_of_a_call_for_each_temperature(llama, tokenizer, top_p):
    """In float32, where close calls are decided alone."""
    sampler = make_sampler(llama, tokenizer, batch_size=40)
    settings = {"max_new_tokens": 40, "seed": 3, "top_p": top_p}
    made = sampler.sample_at({temperature: prompts(25) for temperature in (0.0, 0.5, 1.0)}, samples=2, **settings)
    found = {(temperature, o.id, o.sample): (o.text, o.tokens, o.finish) for temperature, o in made}
    alone = {
        (temperature, *key): answer
        for temperature, samples in ((0.0, 1), (0.5, 2), (1.0, 2))
        for key, answer in answers(sampler, prompts(25), temperature=temperature, samples=samples, top_p=top_p).items()
    }
    assert found == alone and len(set(found.values())) > 40


def test_a_model_that_is_not_finite(llama, tokenizer):
    with torch.no_grad():
        llama.model.norm.weight.fill_(math.nan)
    for options in ({}, {"tie_margin": 0.0}):
        outputs = list(make_sampler(llama, tokenizer, **options).sample(prompts(5), max_new_tokens=20))
        assert all(o.finish == "error" and "not finite after 0 tokens" in o.note for o in outputs) and len(outputs) == 5


def test_what_does_not_fit_is_said(llama, tokenizer, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**20, 2**40))
    with pytest.raises(SamplerError, match=r"GiB free; lower max_new_tokens"):
        list(make_sampler(llama, tokenizer).sample(prompts(2), max_new_tokens=5))


def test_memory_is_given_back(llama, tokenizer):
    sampler = make_sampler(llama.bfloat16(), tokenizer)
    answers(sampler, prompts(30), temperature=1.0)
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        answers(sampler, prompts(30), temperature=1.0)
    assert torch.cuda.memory_allocated() <= before + 2**20


# Kernels -------------------------------------------------------------------------------------------------------------

SHAPES = {
    "smollm2": (3, 3, 64),
    "qwen2.5-1.5b": (2, 6, 128),
    "llama-3.1-8b": (8, 4, 128),
    "gemma-3-270m": (1, 4, 256),
    "ragged": (2, 5, 80),
}


@pytest.mark.parametrize("options", [{}, {"window": 100}, {"softcap": 5.0}], ids=str)
@every_dtype
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_attention_is_as_exact_as_torch(shape, dtype, options):
    """Its error against float64 is at most that of torch's own attention in the same dtype, and a little."""
    heads, group, width = shape
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device="cuda").to(dtype)

    lengths = torch.tensor([0, 1, 31, 32, 33, 127, 128, 129, 500, 1023], device="cuda")
    rows, room = len(lengths), 1024
    query, key, value = 2 * normal(rows, heads * group, width), normal(rows, heads, width), normal(rows, heads, width)
    keys, values = normal(rows, heads, room, width), normal(rows, heads, room, width)
    settings = {"scale": width**-0.5, **options}
    expected = slots.attend_plain(*(t.double() for t in (query, key, value, keys, values)), lengths, **settings)
    plain = slots.attend_plain(query, key, value, keys.clone(), values.clone(), lengths, **settings)
    out = slots.kernels().attend(query, key, value, keys, values, lengths, **settings)
    # e^z is computed as 2^(z log2 e): in float32 the product's rounding moves it by eps |z|
    z = torch.einsum("rhgd,rhnd->rhgn", query.double().view(rows, heads, group, width), keys.double()) * width**-0.5
    rounding = torch.finfo(torch.float32).eps * z.abs().max() + torch.finfo(dtype).eps
    assert (out - expected).abs().max() <= 1.5 * (plain - expected).abs().max() + rounding * expected.abs().max()


@pytest.mark.parametrize("temperatures", [(0.0,), (0.6,), (1.0,), (0.0, 1.0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_are_those_of_the_plain_draw(dtype, temperatures):
    """4096 rows of SmolLM2's vocabulary: the same tokens, but where the best two are as close as float32 rounds."""
    rows, size = 4096, 49152
    generator = torch.Generator(device="cuda").manual_seed(0)
    logits = (3 * torch.randn(rows, size, generator=generator, device="cuda")).to(dtype)
    halves = [derive_key(0, "item", sample) for sample in range(rows)]
    keys = torch.tensor([[key >> 32, key & 0xFFFFFFFF] for key in halves]).to(torch.int32).cuda()
    steps = torch.arange(rows, dtype=torch.int32, device="cuda")
    each = torch.tensor(temperatures, device="cuda").repeat(rows // len(temperatures))
    token, finite = slots.kernels().draw(logits, keys, steps, each)
    expected, close = [], []
    for part in range(0, rows, 512):
        those = slice(part, part + 512)
        noise = exponentials(keys[those], steps[those], size) if any(temperatures) else None
        one, near = draw(logits[those].float(), noise, each[those], 1.0, 2e-5)
        expected.append(one)
        close.append(near)
    expected, close = torch.cat(expected), torch.cat(close)
    assert finite.all()
    greedy = each == 0
    assert torch.equal(token[greedy], expected[greedy])  # equals, of which bfloat16 has many, go to the lowest token
    assert torch.equal(token[~close], expected[~close]) and int((token != expected).sum()) <= 4
