"""A server's answers: believed only if they are answers, asked for again where that may help."""

import threading

import pytest
from chat_server import Server, completion

from deftune.evaluation.chance import derive_key
from deftune.evaluation.endpoint import FAILURES_IN_A_ROW, EndpointSampler, parse_address
from deftune.evaluation.sampler import Output, Prompt, SamplerError
from waiting import HANG_SECONDS


def prompts(number: int) -> list[Prompt]:
    return [Prompt(f"q/{i}", f"What is {i} plus 1?") for i in range(number)]


def ask(server, number=3, retries=2, **settings):
    sampler = EndpointSampler(server.url, "m", retries=retries, backoff=0.01, timeout=HANG_SECONDS)
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
    "'choices' is not a list with an answer": (200, {"object": "error"}),
    "'choices' is not a list with an answer ": (200, {"choices": []}),
    "'choices' is not a list with an answer  ": (200, [1]),
    "no message in its choice": (200, {"choices": ["42"]}),
    "no message in its choice ": (200, {"choices": [{"text": "42"}]}),
    "'content' is neither text nor a list of texts": (200, completion(text=42)),
    "'completion_tokens' is not a count": (200, completion(tokens="7")),
    "HTTP 500": (500, b"oh no"),
    "HTTP 429": (429, b"slow down"),
    "connection lost": (None, None),
    "not JSON ": (None, b'{"choi'),
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_fault_that_stays_is_the_items_error(message):
    def respond(number, body):
        return FAULTS[message] if "is 0 plus" in body["messages"][0]["content"] else (200, completion())

    with Server(respond) as server:
        outputs = {output.id: output for output in ask(server, 3)}
    failed = outputs.pop("q/0")
    assert failed.finish == "error" and failed.text == "" and message.strip() in failed.note
    assert failed.note.endswith("(after 3 attempts)") and len(server.requests) == 5
    assert [output.finish for output in outputs.values()] == ["stop", "stop"]


def test_many_failures_in_a_row_stop_the_sampling():
    with Server(lambda number, body: (503, b"loading")) as server:
        sampler = EndpointSampler(server.url, "m", retries=1, backoff=0.0, concurrency=1)
        outputs = []
        with pytest.raises(SamplerError, match=r"5 requests in a row failed, .*HTTP 503.*loading .after 2 attempts"):
            for output in sampler.sample(prompts(60), max_new_tokens=9):
                outputs.append(output)
    assert len(outputs) == FAILURES_IN_A_ROW - 1 and {output.finish for output in outputs} == {"error"}
    assert len(server.requests) == 2 * FAILURES_IN_A_ROW


@pytest.mark.parametrize("message", FAULTS)
def test_a_fault_that_passes_is_tried_again(message):
    with Server(lambda number, body: FAULTS[message] if number < 2 else (200, completion())) as server:
        [output] = ask(server, 1)
    assert output == Output("q/0", 0, "42", 7, "stop") and len(server.requests) == 3


def test_the_server_says_how_long_to_wait():
    notices: list[str] = []
    with Server(lambda number, body: (429, b"slow down") if number == 0 else (200, completion())) as server:
        sampler = EndpointSampler(server.url, "m", backoff=0.01, timeout=HANG_SECONDS, notice=notices.append)
        [output] = sampler.sample(prompts(1), max_new_tokens=9)
    assert output.text == "42"
    assert [notice.partition("HTTP ")[2] for notice in notices] == [
        "429 Too Many Requests: slow down; attempt 2 in 0.25 s"
    ]


@pytest.mark.parametrize("status", [400, 413, 422])
def test_one_item_that_is_refused_is_its_error_and_the_others_are_asked(status):
    """The usual answer to a context that is too long; another try would change nothing."""

    def respond(number, body):
        long = "is 1 plus" in body["messages"][0]["content"]
        return (status, b"maximum context\nlength is \x1b[2J 9 tokens") if long else (200, completion())

    with Server(respond) as server:
        outputs = {output.id: output for output in ask(server, 3)}
    assert len(server.requests) == 3
    assert outputs["q/1"].finish == "error" and outputs["q/0"].finish == outputs["q/2"].finish == "stop"
    assert outputs["q/1"].note.startswith(f"HTTP {status} ")
    assert outputs["q/1"].note.endswith(": maximum context length is \\x1b[2J 9 tokens")


@pytest.mark.parametrize(
    ("status", "hint"),
    [
        (401, "--api-key-env NAME"),
        (403, "--api-key-env NAME"),
        (404, r"check the model's name 'm' and the URL; GET http://127.0.0.1:\d+/v1/models lists the names"),
        (307, "a redirect is not followed"),
    ],
)
def test_a_refusal_of_every_item_stops_with_a_hint(status, hint):
    with Server(lambda number, body: (status, b"no such model")) as server:
        with pytest.raises(SamplerError, match=f"HTTP {status}.*no such model; .*{hint}"):
            list(ask(server, 1))
    assert len(server.requests) == 1


def test_a_403_after_an_answer_is_the_items_error():
    with Server(lambda number, body: (403, b"flagged") if number else (200, completion())) as server:
        sampler = EndpointSampler(server.url, "m", concurrency=1)
        outputs = list(sampler.sample(prompts(2), max_new_tokens=1))
    assert [output.finish for output in outputs] == ["stop", "error"] and "flagged" in outputs[1].note


def test_a_server_that_dies_leaves_the_answers_before_it():
    with Server(lambda number, body: (200, completion()) if number < 6 else (503, b"")) as server:
        sampler = EndpointSampler(server.url, "m", retries=1, backoff=0.01, concurrency=2)
        outputs = []
        with pytest.raises(SamplerError, match="after 2 attempts") as caught:
            for output in sampler.sample(prompts(60), max_new_tokens=9):
                outputs.append(output)
    assert len([o for o in outputs if o.finish == "stop"]) == caught.value.done == 6
    assert "6 answers were finished before" in str(caught.value) and len(server.requests) < 60


def test_only_the_samples_that_are_wanted_are_asked():
    some = [Prompt("q/0", prompts(1)[0].text, (1, 3)), Prompt("q/1", prompts(2)[1].text)]
    with Server(lambda number, body: (200, completion())) as server:
        outputs = list(EndpointSampler(server.url, "m").sample(some, samples=4, temperature=1.0, max_new_tokens=1))
        with pytest.raises(ValueError, match=r"'q/0' wants samples \(1, 3\); there are 2, from 0"):
            EndpointSampler(server.url, "m").sample(some, samples=2, temperature=1.0, max_new_tokens=1)
    assert {(o.id, o.sample) for o in outputs} == {("q/0", 1), ("q/0", 3), *(("q/1", i) for i in range(4))}
    assert len(server.requests) == 6


def test_no_server_at_all():
    with Server(lambda number, body: (200, completion())) as server:
        url = server.url
    with pytest.raises(SamplerError, match=r"no connection.*after 2 attempts"):
        list(EndpointSampler(url, "m", retries=1, backoff=0.0).sample(prompts(1), max_new_tokens=1))


def test_a_slow_server_times_out():
    over = threading.Event()

    def respond(number, body):
        over.wait(HANG_SECONDS)
        return 200, completion()

    notices = []
    with Server(respond) as server:
        sampler = EndpointSampler(server.url, "m", retries=1, timeout=0.1, backoff=0.0, notice=notices.append)
        [output] = sampler.sample(prompts(1), max_new_tokens=1)
        over.set()
    assert output.finish == "error" and output.note.startswith("no answer in 0.1 seconds; --timeout allows more")
    assert notices == [f"{server.url}/v1/chat/completions: q/0: no answer in 0.1 seconds; --timeout allows more; "
                       "attempt 2 in 0 s"]  # fmt: skip


def test_the_time_out_is_for_the_whole_request():
    """A server that sends a byte now and then resets the time-out of every read; this one would never end."""
    with Server(lambda number, body: ("drip", b" ")) as server:
        [output] = EndpointSampler(server.url, "m", retries=0, timeout=2).sample(prompts(1), max_new_tokens=1)
        assert server.hung_up.wait(HANG_SECONDS)  # the connection is closed, not left behind
    assert output.finish == "error" and output.note.startswith("no answer in 2 seconds")


def test_requests_run_beside_each_other():
    together, most, lock, four = 0, 0, threading.Lock(), threading.Barrier(4)

    def respond(number, body):
        nonlocal together, most
        with lock:
            together += 1
            most = max(most, together)
        four.wait(HANG_SECONDS)  # 12 requests, each answered when four are there
        with lock:
            together -= 1
        return 200, completion()

    with Server(respond) as server:
        assert len(list(EndpointSampler(server.url, "m", concurrency=4).sample(prompts(12), max_new_tokens=1))) == 12
    assert most == 4


def answer_to(said):
    with Server(lambda number, body: (200, said)) as server:
        [output] = ask(server, 1)
    return output


def test_other_ends_and_missing_counts():
    said = {"choices": [{"message": {"content": None}, "finish_reason": "content_filter"}]}
    note = "the server ended the answer with finish_reason 'content_filter'"
    assert answer_to(said) == Output("q/0", 0, "", None, "error", note)
    assert answer_to(completion(reason="eos_token")).finish == "stop"
    assert answer_to(completion(reason="max_tokens")).finish == "length"


def test_content_in_parts_is_joined_and_the_first_choice_counts():
    parts = [
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "It is "},
        "4",
        {"type": "text", "text": "2"},
    ]
    assert answer_to(completion(parts)).text == "It is 42"
    two = completion("first")
    two["choices"] += completion("second")["choices"]
    assert answer_to(two).text == "first"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_without_an_answer_is_an_error_that_says_so(field):
    said = completion(None)
    said["choices"][0]["message"][field] = "Let me think"
    output = answer_to(said)
    assert output.finish == "error" and "reasoning and no answer" in output.note
    said["choices"][0]["finish_reason"] = "length"
    output = answer_to(said)
    assert output.finish == "length" and output.note == "cut off in the reasoning, before any answer"
    assert answer_to(completion(None)).finish == "stop"  # an empty answer is one


def test_the_key_is_sent_and_never_said(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sk-secret")
    with Server(lambda number, body: (401, b"bad key sk-secret")) as server:
        sampler = EndpointSampler(server.url + "/v1/", "m", api_key_env="SOME_KEY")
        with pytest.raises(SamplerError) as caught:
            list(sampler.sample(prompts(1), max_new_tokens=1))
    assert server.headers[0]["Authorization"] == "Bearer sk-secret" and "sk-secret" not in str(caught.value)
    assert "bad key ***" in str(caught.value) and server.requests[0]["path"] == "/v1/chat/completions"
    with pytest.raises(ValueError, match="the environment has no OTHER_KEY"):
        EndpointSampler("http://localhost", "m", api_key_env="OTHER_KEY")
    monkeypatch.setenv("BAD_KEY", "sk\nsecret")
    with pytest.raises(ValueError, match="BAD_KEY holds no key") as caught:
        EndpointSampler("http://localhost", "m", api_key_env="BAD_KEY")
    assert "secret" not in str(caught.value)


def test_a_password_in_the_url_is_sent_and_never_said():
    with Server(lambda number, body: (400, b"who is me:pass?")) as server:
        url = server.url.replace("//", "//me:p%61ss@")
        [output] = EndpointSampler(url, "m").sample(prompts(1), max_new_tokens=1)
    assert server.headers[0]["Authorization"] == "Basic bWU6cGFzcw=="  # base64 of me:pass
    assert output.note.endswith("who is me:***?")
    sampler = EndpointSampler("http://me:pass@127.0.0.1:9/v1", "m", retries=0)
    with pytest.raises(SamplerError, match=r"http://127\.0\.0\.1:9/v1/chat/completions: q/0: no connection") as caught:
        list(sampler.sample(prompts(1), max_new_tokens=1))
    assert "pass" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("file:///etc/passwd", "url: write http://host:port or https://host, got 'file:///etc/passwd'"),
        ("htp://me:secret@host", "got 'htp://***@host'"),
        ("http://me:sec/ret@host", "url: the port in 'http://***@host' is no number"),
        ("http://me:secret@host:99999", "the port in 'http://***@host:99999'"),
        ("http://host/v1?key=secret", "http://host/v1 goes on with '?' or '#'; leave it out"),
    ],
)
def test_urls_that_cannot_be(url, text):
    with pytest.raises(ValueError) as caught:
        EndpointSampler(url, "m")
    assert text in str(caught.value) and "secret" not in str(caught.value) and "ret@" not in str(caught.value)


def test_addresses_are_alike_where_the_server_is():
    for url in ("http://h:80", "http://h:80/", "http://h:80/v1", "http://x:y@H:80/v1/"):
        assert parse_address(url).base == "http://h:80/v1"
    assert parse_address("https://[::1]:8/api").base == "https://[::1]:8/api/v1"


def test_extra_fields_are_sent_and_ours_are_not_replaced():
    with Server(lambda number, body: (200, completion())) as server:
        list(EndpointSampler(server.url, "m", extra_body={"top_k": 20}).sample(prompts(1), max_new_tokens=1))
    assert server.requests[0]["top_k"] == 20
    with pytest.raises(ValueError, match="extra_body: 'temperature' is set by deftune itself; leave it out"):
        EndpointSampler(server.url, "m", extra_body={"temperature": 2})
