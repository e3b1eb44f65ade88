"""A server's answers: believed only if they are answers, asked for again where that may help."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from deftune.evaluation.generation import EndpointSampler, Output, Prompt, SamplerError, derive_key
from waiting import HANG_SECONDS


def prompts(number: int) -> list[Prompt]:
    return [Prompt(f"q/{i}", [{"role": "user", "content": f"What is {i} plus 1?"}]) for i in range(number)]


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
    given_up = threading.Event()

    def respond(number, body):
        given_up.wait(HANG_SECONDS)
        return 200, completion()

    with Server(respond) as server:
        with pytest.raises(SamplerError, match=r"no answer in 0\.1 seconds|timed out"):
            list(EndpointSampler(server.url, "m", retries=0, timeout=0.1).sample(prompts(1), max_new_tokens=1))
        given_up.set()


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
