"""Samplers: the same answers whatever the batch, the right distribution, and servers that misbehave."""

import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
import transformers

from deftune.evaluation import generation
from deftune.evaluation.generation import (
    EndpointSampler,
    Output,
    Prompt,
    SamplerError,
    TransformersSampler,
    VllmSampler,
    _nucleus,
    derive_key,
    draw,
    exponentials,
)


def prompts(number: int) -> list[Prompt]:
    """Questions of unequal lengths."""
    return [
        Prompt(f"q/{i}", [{"role": "user", "content": f"What is {i} plus {'30 and ' * (i % 7)}1?"}])
        for i in range(number)
    ]


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

        def forward(self, input_ids, logits_to_keep=0, **more):
            out = model(input_ids=input_ids, logits_to_keep=logits_to_keep, **more)
            generator = torch.Generator().manual_seed(input_ids.shape[0] * 1000 + input_ids.shape[1])
            out.logits += size * (2 * torch.rand(out.logits.shape, generator=generator) - 1)
            return out

    return Noisy()


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


def test_the_margin_is_off_in_half_precision(model, tokenizer, make_model):
    assert make_sampler(model, tokenizer).tie_margin == 1e-3
    half = make_model(tokenizer).to(torch.bfloat16)
    sampler = TransformersSampler(half, tokenizer, batch_size=3)
    assert sampler.tie_margin == 0
    assert len(answers(sampler, prompts(5), temperature=1.0)) == 5


def test_seeds_samples_and_ids_draw_differently(model, tokenizer):
    sampler = make_sampler(model, tokenizer, end_ids=())
    found = answers(sampler, prompts(3), temperature=1.0, samples=4)
    assert len(set(found.values())) == 12
    again = answers(sampler, prompts(3), temperature=1.0, samples=4, seed=4)
    assert all(again[key] != found[key] for key in found)


@pytest.mark.parametrize("family", ["gemma3", "qwen3"])
def test_other_attention(tokenizer, family, make_model):
    """Gemma's sliding windows cannot be joined, so batches run to their ends; the answers are the same."""
    if family == "gemma3":
        cls, more = transformers.Gemma3ForCausalLM, {"sliding_window": 8, "head_dim": 8, "num_hidden_layers": 6}
    else:
        cls, more = transformers.Qwen3ForCausalLM, {"head_dim": 8}
    model = make_model(tokenizer, cls, **more)
    alone = answers(make_sampler(model, tokenizer, batch_size=1), prompts(9), temperature=1.0)
    for size in (4, 16):
        assert answers(make_sampler(model, tokenizer, batch_size=size), prompts(9), temperature=1.0) == alone


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


def test_a_model_in_training_goes_back_to_it(tokenizer, make_model):
    model = make_model(tokenizer).train()
    stream = make_sampler(model, tokenizer).sample(prompts(3), max_new_tokens=8)
    next(stream)
    assert not model.training
    stream.close()
    assert model.training


def test_the_samples_of_a_prompt_share_its_prefill(model, tokenizer):
    shapes: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        forward = model.forward
        patch.setattr(model, "forward", lambda *a, **k: shapes.append(tuple(k["input_ids"].shape)) or forward(*a, **k))
        answers(make_sampler(model, tokenizer, tie_margin=0, end_ids=()), prompts(2), temperature=1.0, samples=8)
    assert shapes[0][0] == 2 and shapes[1] == (16, 1)


def test_prompts_that_cannot_be_answered_say_why(model, tokenizer, make_model):
    long = Prompt("long", [{"role": "user", "content": "x1" * 300}])
    nearly = Prompt("nearly", [{"role": "user", "content": "?" * (256 - 5 - 14)}])
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


def test_an_id_twice_is_refused(model, tokenizer):
    with pytest.raises(ValueError, match="two prompts have the id 'q/0'"):
        next(make_sampler(model, tokenizer).sample([*prompts(2), *prompts(1)], max_new_tokens=5))


# Chance --------------------------------------------------------------------------------------------------------------


def keys_of(number: int) -> torch.Tensor:
    keys = [derive_key(0, "item", sample) for sample in range(number)]
    return torch.tensor([[key >> 32, key & 0xFFFFFFFF] for key in keys]).to(torch.int32)


def test_keys_are_pinned():
    """A change of the derivation would change every sampled result."""
    assert derive_key(0, "gsm8k/0", 0) == 0x2805EAB28A23C0C0
    noise = exponentials(keys_of(1), torch.tensor([5], dtype=torch.int32), 3)
    assert noise.tolist() == [[pytest.approx(value, rel=1e-6) for value in PINNED]]


PINNED = (0.4083150625228882, 0.673494279384613, 2.0412437915802)


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("vary", ["sample", "step"])
def test_tokens_are_drawn_from_the_softmax(vary):
    number = 40_000
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, 0.5, -3.0])
    keys = keys_of(number) if vary == "sample" else keys_of(1).expand(number, 2)
    steps = torch.arange(number, dtype=torch.int32) if vary == "step" else torch.zeros(number, dtype=torch.int32)
    tokens, _ = draw(logits.expand(number, 6), exponentials(keys, steps, 6), 0.8, 1.0, 0.0)
    counts = torch.bincount(tokens, minlength=6).double()
    # 5 degrees of freedom: above 20.5 once in a thousand, and the draws are fixed
    assert chi_square(counts, number * (logits.double() / 0.8).softmax(0)) < 20.5
    pairs = torch.bincount(tokens[:-1] * 6 + tokens[1:], minlength=36).double()
    shares = counts / number
    assert chi_square(pairs, (number - 1) * torch.outer(shares, shares).flatten()) < 57.3  # 25 degrees, 1 in 4000


def test_exponentials_are_exponential_over_a_vocabulary():
    noise = exponentials(keys_of(8), torch.arange(8, dtype=torch.int32), 50_000).double()
    assert noise.min() > 0 and noise.isfinite().all()
    u = (-noise).exp()
    for row in u:  # Kolmogorov-Smirnov: above 1.95 / sqrt(n) once in a thousand
        ordered = row.sort().values
        assert (ordered - torch.arange(1, 50_001) / 50_000).abs().max() < 1.95 / math.sqrt(50_000)
    assert torch.corrcoef(u).fill_diagonal_(0).abs().max() < 0.02


def nucleus(z, top_p, slack=0.0) -> list[bool]:
    [mask] = _nucleus(torch.tensor([z]), top_p, [slack])
    return mask[0].tolist()


def test_the_nucleus():
    z = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().tolist()
    assert nucleus(z, 0.6) == [False, True, False, True]
    assert nucleus(z, 0.75) == [False, True, True, True]
    assert nucleus(z, 1e-6) == [False, True, False, False]
    assert nucleus([1.0, 1.0, 0.0], 0.1) == [True, True, False]  # equals go together
    for top_p in (0.05, 0.39, 0.5, 0.7, 0.71, 0.9):
        for slack in (1e-3, 0.1):
            small, exact, large = (torch.tensor(nucleus(z, top_p, s)) for s in (slack, 0.0, -slack))
            assert (small <= exact).all() and (exact <= large).all()
    assert sum(nucleus(z, 0.7001, 1e-3)) < sum(nucleus(z, 0.7001, -1e-3))  # 0.4 + 0.3 are above the third


@pytest.mark.parametrize("spread", [0.0, 0.01, 3.0])
def test_the_nucleus_of_a_large_vocabulary(monkeypatch, spread):
    """Whether the upper part is enough (a spread of 3) or not, the masks are those of the whole order."""
    z = spread * torch.randn(4, 2000, generator=torch.Generator().manual_seed(0))
    slacks = (0.0, -1e-3, 1e-3)
    monkeypatch.setattr(generation, "NUCLEUS_PART", 2000)
    whole = _nucleus(z, 0.8, slacks)
    monkeypatch.setattr(generation, "NUCLEUS_PART", 500)
    assert all(torch.equal(a, b) for a, b in zip(_nucleus(z, 0.8, slacks), whole))
    share = z.double().softmax(-1)
    above = torch.stack([(share * (z > z[:, v : v + 1])).sum(-1) for v in range(2000)], 1)
    assert torch.equal(whole[0], (above < 0.8) | (z == z.amax(-1, keepdim=True)))


def test_a_close_call_is_seen():
    """Whatever a change of half the margin does to the choice, ``draw`` said that it could."""
    generator = torch.Generator().manual_seed(0)
    rows, size, margin = 3000, 20, 0.2
    logits = 2 * torch.randn(rows, size, generator=generator)
    noise = exponentials(keys_of(1).expand(rows, 2), torch.arange(rows, dtype=torch.int32), size)
    for temperature, top_p in ((0.0, 1.0), (1.0, 1.0), (0.6, 1.0), (1.0, 0.7), (0.6, 0.9)):
        part = None if temperature == 0 else noise
        token, close = draw(logits, part, temperature, top_p, margin)
        changed = torch.zeros(rows, dtype=torch.bool)
        for _ in range(40):
            moved = logits + margin / 2 * (2 * torch.rand(rows, size, generator=generator) - 1)
            changed |= draw(moved, part, temperature, top_p, 0.0)[0] != token
        assert changed.sum() > 20 and not (changed & ~close).any()
        assert close.float().mean() < 0.5


def test_equal_logits_go_to_the_lowest_token():
    token, close = draw(torch.zeros(2, 1000), None, 0.0, 1.0, 1e-3)
    assert token.tolist() == [0, 0] and close.all()


# Servers -------------------------------------------------------------------------------------------------------------


class Server:
    """A server on the loopback whose answers a test scripts: ``respond(number, body)`` is (status, content)."""

    def __init__(self, respond):
        self.requests: list[dict] = []
        self.headers: list[dict] = []
        outer, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(outer.requests)
                    outer.requests.append({**body, "path": self.path})
                    outer.headers.append(dict(self.headers))
                status, content = respond(number, body)
                if status is None and content is None:  # dies before its answer
                    self.close_connection = True
                    return
                if status is None:  # dies in the middle of it
                    self.send_response(200)
                    self.send_header("Content-Length", "1000")
                    self.end_headers()
                    self.wfile.write(content)
                    self.close_connection = True
                    return
                self.send_response(status)
                if status in (301, 307):
                    self.send_header("Location", "http://127.0.0.1:9/elsewhere")
                self.end_headers()
                self.wfile.write(content if isinstance(content, bytes) else json.dumps(content).encode())

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()


def completion(text="42", reason="stop", tokens=7):
    message = {"role": "assistant", "content": text}
    return {"choices": [{"message": message, "finish_reason": reason}], "usage": {"completion_tokens": tokens}}


def ask(server, number=3, retries=2, **settings):
    sampler = EndpointSampler(server.url, "m", retries=retries, backoff=0.01, timeout=5)
    return sampler.sample(prompts(number), max_new_tokens=9, **settings)


def test_an_endpoint_is_asked_once_per_sample_with_its_own_seed():
    with Server(lambda number, body: (200, completion(str(body["seed"]), "length"))) as server:
        outputs = list(ask(server, 5, samples=3, temperature=0.5, top_p=0.9, seed=1))
    assert {(o.id, o.sample) for o in outputs} == {(f"q/{i}", k) for i in range(5) for k in range(3)}
    assert len({o.text for o in outputs}) == 15 and {o.tokens for o in outputs} == {7}
    assert all(o.text == str(derive_key(1, o.id, o.sample) >> 33) and o.finish == "length" for o in outputs)
    request = server.requests[0]
    assert request["path"] == "/v1/chat/completions" and request["model"] == "m" and request["max_tokens"] == 9
    assert (request["temperature"], request["top_p"]) == (0.5, 0.9) and request["messages"][0]["role"] == "user"
    assert all(0 <= r["seed"] < 2**31 for r in server.requests)


FAULTS = {
    "not JSON": (200, b"<html>gateway</html>"),
    "'choices' is not a list of one": (200, {"object": "error"}),
    "'choices' is not a list of one ": (200, {"choices": []}),
    "'choices' is not a list of one  ": (200, [1]),
    "no message in its choice": (200, {"choices": ["42"]}),
    "no message in its choice ": (200, {"choices": [{"text": "42"}]}),
    "'content' is not text": (200, completion(text=42)),
    "'completion_tokens' is not a count": (200, completion(tokens="7")),
    "HTTP 500": (500, b"oh no"),
    "HTTP 429": (429, b"slow down"),
    "connection lost": (None, None),
    "not JSON ": (None, b'{"choi'),
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_fault_that_stays_is_an_error_that_counts(message):
    with (
        Server(lambda number, body: FAULTS[message]) as server,
        pytest.raises(SamplerError, match=message.strip()) as caught,
    ):
        list(ask(server, 1))
    assert "after 3 attempts" in str(caught.value) and "q/0" in str(caught.value) and caught.value.done == 0
    assert len(server.requests) == 3


@pytest.mark.parametrize("message", FAULTS)
def test_a_fault_that_passes_is_tried_again(message):
    with Server(lambda number, body: FAULTS[message] if number < 2 else (200, completion())) as server:
        [output] = ask(server, 1)
    assert output == Output("q/0", 0, "42", 7, "stop") and len(server.requests) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 307])
def test_a_refusal_is_not_tried_again(status):
    with Server(lambda number, body: (status, b"no such model")) as server:
        with pytest.raises(SamplerError, match=f"HTTP {status}.*no such model"):
            list(ask(server, 1))
    assert len(server.requests) == 1


def test_a_server_that_dies_leaves_the_answers_before_it():
    with Server(lambda number, body: (200, completion()) if number < 6 else (503, b"")) as server:
        sampler = EndpointSampler(server.url, "m", retries=1, backoff=0.01, concurrency=2)
        outputs = []
        with pytest.raises(SamplerError, match="after 2 attempts") as caught:
            for output in sampler.sample(prompts(20), max_new_tokens=9):
                outputs.append(output)
    assert len(outputs) == caught.value.done == 6 and "6 answers were finished before" in str(caught.value)
    assert len(server.requests) < 20  # the rest was not asked


def test_no_server_at_all():
    with Server(lambda number, body: (200, completion())) as server:
        url = server.url
    with pytest.raises(SamplerError, match=r"no connection.*after 2 attempts"):
        list(EndpointSampler(url, "m", retries=1, backoff=0.0).sample(prompts(1), max_new_tokens=1))


def test_a_slow_server_times_out():
    def respond(number, body):
        time.sleep(1.0)
        return 200, completion()

    with Server(respond) as server, pytest.raises(SamplerError, match=r"no answer in 0\.1 seconds|timed out"):
        list(EndpointSampler(server.url, "m", retries=0, timeout=0.1).sample(prompts(1), max_new_tokens=1))


def test_requests_run_beside_each_other():
    together, most, lock = 0, 0, threading.Lock()

    def respond(number, body):
        nonlocal together, most
        with lock:
            together += 1
            most = max(most, together)
        time.sleep(0.05)
        with lock:
            together -= 1
        return 200, completion()

    with Server(respond) as server:
        assert len(list(EndpointSampler(server.url, "m", concurrency=4).sample(prompts(12), max_new_tokens=1))) == 12
    assert 2 <= most <= 4


def test_other_ends_and_missing_counts():
    said = {"choices": [{"message": {"content": None}, "finish_reason": "content_filter"}]}
    with Server(lambda number, body: (200, said)) as server:
        [output] = ask(server, 1)
    assert output == Output("q/0", 0, "", None, "error", "the server ended it with 'content_filter'")


def test_the_key_is_sent_and_never_said(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sk-secret")
    with Server(lambda number, body: (401, b"bad key")) as server:
        sampler = EndpointSampler(server.url + "/v1/", "m", api_key_env="SOME_KEY")
        with pytest.raises(SamplerError) as caught:
            list(sampler.sample(prompts(1), max_new_tokens=1))
    assert server.headers[0]["Authorization"] == "Bearer sk-secret" and "sk-secret" not in str(caught.value)
    assert server.requests[0]["path"] == "/v1/chat/completions"
    with pytest.raises(ValueError, match="the environment has no OTHER_KEY"):
        EndpointSampler("http://localhost", "m", api_key_env="OTHER_KEY")
    with pytest.raises(ValueError, match="base_url"):
        EndpointSampler("file:///etc/passwd", "m")


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
