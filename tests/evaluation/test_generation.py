"""Samplers: the same answers whatever the batch, the right distribution, and servers that misbehave."""

import copy
import math
import os
import socket
import subprocess
import sys
import warnings

import pytest
import torch
import transformers

from deftune.artifacts.templates import TEMPLATES
from deftune.evaluation import slots
from deftune.evaluation.endpoint import EndpointSampler
from deftune.evaluation.local import TransformersSampler
from deftune.evaluation.sampler import Output, Prompt
from deftune.evaluation.vllm_engine import VllmSampler


def prompts(number: int) -> list[Prompt]:
    """Questions of unequal lengths."""
    return [Prompt(f"q/{i}", f"What is {i} plus {'30 and ' * (i % 7)}1?") for i in range(number)]


@pytest.fixture(params=["slots", "padded"])
def decoder(request, monkeypatch):
    """Both ways to decode; a model that can do with slots is told that it cannot."""

    def refuse(model):
        raise slots.Unsupported("the test asks for it")

    if request.param == "padded":
        monkeypatch.setattr(slots, "survey", refuse)
        warnings.filterwarnings("ignore", "decoding with a padded batch")
    return request.param


both = pytest.mark.usefixtures("decoder")

ENDS = range(3, 30)  # as many tokens as make answers end after some ten tokens, at unequal lengths


def make_sampler(model, tokenizer, **options) -> TransformersSampler:
    return TransformersSampler(model, tokenizer, **{"end_ids": ENDS, **options})


def answers(sampler, asked, **settings) -> dict[tuple[str, int], tuple]:
    settings = {"max_new_tokens": 16, "seed": 3, **settings}
    made = list(sampler.sample(asked, **settings))
    found = {(o.id, o.sample): (o.text, o.tokens, o.finish) for o in made}
    assert len(found) == len(made) == len(asked) * settings.get("samples", 1)
    return found


SETTINGS = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "samples": 2},
    "nucleus": {"temperature": 0.7, "top_p": 0.8, "samples": 2},
}


@both
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_answers_do_not_depend_on_the_batch(model, tokenizer, settings):
    asked = prompts(20)
    alone = answers(make_sampler(model, tokenizer, batch_size=1), asked, **settings)
    assert len({text for text, _, _ in alone.values()}) > len(alone) // 2  # the model does say different things
    assert {finish for _, _, finish in alone.values()} == {"stop", "length"}
    for size in (8, 32):
        assert answers(make_sampler(model, tokenizer, batch_size=size), asked, **settings) == alone
    fewer = asked[13:4:-1]  # other company, other order
    found = answers(make_sampler(model, tokenizer, batch_size=4), fewer, **settings)
    assert found == {key: alone[key] for key in found}


@both
def test_the_greedy_answers_are_those_of_generate(model, tokenizer):
    asked = prompts(6)
    sampler = make_sampler(model, tokenizer, batch_size=4)
    found = answers(sampler, asked)
    for prompt in asked:
        ids = torch.tensor([sampler.encode(prompt)])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, eos_token_id=[1, *ENDS]
        )
        new = out[0, ids.shape[1] :].tolist()
        ended = new[-1] in (1, *ENDS)
        text = tokenizer.decode(new[:-1] if ended else new, skip_special_tokens=True)
        assert found[prompt.id, 0] == (text, len(new), "stop" if ended else "length")


def noisy(model, size: float):
    """The model with its logits moved by up to ``size``, by an amount that depends on the shape of the batch."""

    class Noisy(torch.nn.Module):
        config, dtype, device, generation_config = model.config, model.dtype, model.device, model.generation_config

        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, input_ids, logits_to_keep=0, **more):
            out = model(input_ids=input_ids, logits_to_keep=logits_to_keep, **more)
            generator = torch.Generator().manual_seed(input_ids.shape[0] * 1000 + input_ids.shape[1])
            out.logits += size * (2 * torch.rand(out.logits.shape, generator=generator) - 1)
            return out

    return Noisy()


@both
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_close_calls_are_decided_alone(model, tokenizer, settings):
    """Rounding made 10,000 times larger: without the margin answers differ between batches, with it they do not."""
    asked, rough = prompts(12), noisy(model, 0.05)

    def runs(margin: float) -> list[dict]:
        samplers = [make_sampler(rough, tokenizer, batch_size=size, tie_margin=margin) for size in (1, 8, 32)]
        found = [answers(sampler, asked, **settings) for sampler in samplers]
        assert all((sampler.num_retried > 0) == (margin > 0) for sampler in samplers)
        return found

    one, eight, all_ = runs(0.3)
    assert one == eight == all_
    one, eight, all_ = runs(0.0)
    assert one != eight and one != all_


# Several temperatures in one pool -------------------------------------------------------------------------------------


def mixed() -> dict[float, list[Prompt]]:
    """Greedy, and two temperatures with 2 samples, of which some are not wanted."""
    some = [Prompt(p.id, p.text, (i % 2,)) if i % 3 else p for i, p in enumerate(prompts(14))]
    return {0.0: prompts(12), 0.5: some[:1:-1], 1.0: prompts(7)}


def pooled(sampler, asked: dict[float, list[Prompt]], **settings) -> dict[tuple[float, str, int], tuple]:
    made = list(sampler.sample_at(asked, **{"samples": 2, "max_new_tokens": 16, "seed": 3, **settings}))
    found = {(temperature, o.id, o.sample): (o.text, o.tokens, o.finish) for temperature, o in made}
    assert len(found) == len(made)
    return found


def separate(sampler, asked: dict[float, list[Prompt]], **settings) -> dict[tuple[float, str, int], tuple]:
    settings = {"max_new_tokens": 16, "seed": 3, **settings}
    return {
        (temperature, o.id, o.sample): (o.text, o.tokens, o.finish)
        for temperature, its in asked.items()
        for o in sampler.sample(its, samples=1 if temperature == 0 else 2, temperature=temperature, **settings)
    }


@both
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_pooled_answers_are_those_of_a_call_for_each_temperature(model, tokenizer, top_p):
    alone = separate(make_sampler(model, tokenizer, batch_size=8), mixed(), top_p=top_p)
    assert len(alone) == 12 + 16 + 14 and len(set(alone.values())) > 20
    for size in (1, 5, 64):
        sampler = make_sampler(model, tokenizer, batch_size=size)
        assert pooled(sampler, mixed(), top_p=top_p) == alone
        assert sampler.num_tokens == sum(tokens for _, tokens, _ in alone.values())


@both
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_close_calls_of_a_pool_are_decided_alone(model, tokenizer, top_p):
    rough = noisy(model, 0.05)
    for margin in (0.3, 0.0):
        sampler = make_sampler(rough, tokenizer, batch_size=8, tie_margin=margin)
        alone = separate(sampler, mixed(), top_p=top_p)
        before = sampler.num_retried
        assert (pooled(sampler, mixed(), top_p=top_p) == alone) == (margin > 0)
        assert (sampler.num_retried > before) == (margin > 0)


@both
def test_a_pool_reads_each_prompt_once(model, tokenizer):
    sampler = make_sampler(model, tokenizer, batch_size=64, tie_margin=0, end_ids=())
    sampler.survey()  # which also calls the model
    shapes: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        forward = model.forward
        patch.setattr(model, "forward", lambda *a, **k: shapes.append(tuple(k["input_ids"].shape)) or forward(*a, **k))
        pooled(sampler, {temperature: prompts(9) for temperature in (0.0, 0.5, 1.0)})
    assert shapes[0][0] == 9 and shapes[1:] == [(45, 1)] * (len(shapes) - 1)


@both
def test_errors_of_a_pool_have_their_temperature(model, tokenizer):
    asked = {0: prompts(2), 1: [Prompt("long", "x1" * 300), *prompts(1)]}
    found = pooled(make_sampler(model, tokenizer), asked)
    assert {key[0] for key, answer in found.items() if answer[2] == "error"} == {1.0} and len(found) == 2 + 4
    assert list(make_sampler(model, tokenizer).sample_at({}, max_new_tokens=3)) == []
    with pytest.raises(ValueError, match="duplicate id 'q/0'"):
        make_sampler(model, tokenizer).sample_at({0.0: prompts(1), 1.0: prompts(1) * 2}, max_new_tokens=3)
    with pytest.raises(ValueError, match="id 'q/0' has another text at temperature 1 than at one before"):
        make_sampler(model, tokenizer).sample_at({0.0: prompts(1), 1.0: [Prompt("q/0", "Why?")]}, max_new_tokens=3)


def test_the_margin_is_off_in_half_precision(model, tokenizer, make_model):
    assert make_sampler(model, tokenizer).network.tie_margin == 1e-3
    half = make_model(tokenizer).to(torch.bfloat16)
    sampler = TransformersSampler(half, tokenizer, batch_size=3)
    assert sampler.network.tie_margin == 0
    assert len(answers(sampler, prompts(5), temperature=1.0)) == 5


def test_seeds_samples_and_ids_draw_differently(model, tokenizer):
    sampler = make_sampler(model, tokenizer, end_ids=())
    found = answers(sampler, prompts(3), temperature=1.0, samples=4)
    assert len(set(found.values())) == 12
    again = answers(sampler, prompts(3), temperature=1.0, samples=4, seed=4)
    assert all(again[key] != found[key] for key in found)


@both
@pytest.mark.parametrize("family", ["gemma3", "qwen3"])
def test_other_attention(tokenizer, family, make_model):
    """Gemma's sliding windows cannot be joined, so padded batches run to their ends; the answers are the same."""
    if family == "gemma3":
        cls, more = transformers.Gemma3ForCausalLM, {"sliding_window": 8, "head_dim": 8, "num_hidden_layers": 6}
    else:
        cls, more = transformers.Qwen3ForCausalLM, {"head_dim": 8}
    model = make_model(tokenizer, cls, **more)
    alone = answers(make_sampler(model, tokenizer, batch_size=1), prompts(9), temperature=1.0)
    for size in (4, 16):
        assert answers(make_sampler(model, tokenizer, batch_size=size), prompts(9), temperature=1.0) == alone


@both
def test_answers_stream_out_and_rows_are_replaced(model, tokenizer):
    sampler = make_sampler(model, tokenizer, batch_size=4)
    shapes: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        forward = model.forward
        patch.setattr(model, "forward", lambda *a, **k: shapes.append(tuple(k["input_ids"].shape)) or forward(*a, **k))
        stream = sampler.sample(prompts(30), temperature=1.0, max_new_tokens=40, seed=0)
        assert isinstance(next(stream), Output) and sampler.num_tokens < 4 * 40
        rest = list(stream)
    assert len(rest) == 29
    steps = [rows for rows, width in shapes if width == 1]
    assert max(rows for rows, _ in shapes) == 4 and sum(steps) > 3 * len(steps)  # most places are taken at most times


@both
def test_a_model_in_training_goes_back_to_it(tokenizer, make_model):
    model = make_model(tokenizer).train()
    stream = make_sampler(model, tokenizer).sample(prompts(3), max_new_tokens=8)
    next(stream)
    assert not model.training
    stream.close()
    assert model.training


@both
def test_the_samples_of_a_prompt_share_its_prefill(model, tokenizer):
    sampler = make_sampler(model, tokenizer, tie_margin=0, end_ids=())
    sampler.survey()  # which also calls the model
    shapes: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        forward = model.forward
        patch.setattr(model, "forward", lambda *a, **k: shapes.append(tuple(k["input_ids"].shape)) or forward(*a, **k))
        answers(sampler, prompts(2), temperature=1.0, samples=8)
    assert shapes[0][0] == 2 and shapes[1] == (16, 1)


@both
def test_prompts_that_cannot_be_answered_say_why(model, tokenizer, make_model):
    long = Prompt("long", "x1" * 300)
    nearly = Prompt("nearly", "?" * (256 - 5 - 14))
    found = {o.id: o for o in make_sampler(model, tokenizer).sample([long, nearly, *prompts(1)], max_new_tokens=50)}
    assert found["long"].finish == "error" and "leave no room in the model's 256" in found["long"].note
    assert found["nearly"].finish in ("length", "stop") and found["nearly"].tokens < 50
    assert found["q/0"].note == ""
    template = "{{ raise_exception('no') }}"
    broken = make_model(tokenizer)
    strict = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>")
    strict.chat_template = template
    [output] = TransformersSampler(broken, strict).sample(prompts(1), max_new_tokens=5)
    assert output.finish == "error" and "the chat template fails" in output.note


@both
def test_logits_that_are_not_finite_are_an_error(tokenizer, make_model):
    model = make_model(tokenizer)
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    [output] = make_sampler(model, tokenizer).sample(prompts(1), max_new_tokens=5)
    assert output.finish == "error" and "not finite" in output.note


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples": 0}, "samples: at least 1"),
        ({"samples": 2}, "greedy answers are all the same"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_wrong_settings(model, tokenizer, settings, message):
    with pytest.raises(ValueError, match=message):
        next(make_sampler(model, tokenizer).sample(prompts(1), **{"max_new_tokens": 5, **settings}))


def test_a_template_that_writes_the_date_writes_the_same_one_every_day(model, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{{ strftime_now('%d %B %Y') }}" + TEMPLATES["chatml"]
    ids = TransformersSampler(model, tokenizer).encode(prompts(1)[0])
    assert tokenizer.decode(ids).startswith("26 July 2024")
    of_run = TransformersSampler(model, tokenizer, encoder_options={"now": "2026-01-02T03:04:05"})
    assert tokenizer.decode(of_run.encode(prompts(1)[0])).startswith("02 January 2026")


def test_an_id_twice_is_refused(model, tokenizer):
    with pytest.raises(ValueError, match="duplicate id 'q/0' in questions 1 and 3"):
        next(make_sampler(model, tokenizer).sample([*prompts(2), *prompts(1)], max_new_tokens=5))


@pytest.mark.slow
def test_a_real_server(model, tokenizer, tmp_path):
    """`transformers serve` on the loopback, with the same model: its greedy answers are those of our own loop."""
    for package in ("fastapi", "uvicorn"):
        pytest.importorskip(package, reason=f"transformers serve needs {package}")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", "--port", str(port)]
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    try:
        sampler = EndpointSampler(f"http://localhost:{port}", str(tmp_path), retries=7, backoff=1.0, concurrency=2)
        found = answers(sampler, prompts(4))
    finally:
        server.kill()
        server.wait()
    # it decodes invalid bytes as we do, but counts and ends by the model's own end token alone
    expected = answers(TransformersSampler(model, tokenizer), prompts(4))
    assert {key: text for key, (text, _, _) in found.items()} == {key: text for key, (text, _, _) in expected.items()}


def test_vllm_is_asked_for_by_name(tokenizer):
    with pytest.raises(ImportError, match="pip install vllm"):
        VllmSampler("some/model", tokenizer)
