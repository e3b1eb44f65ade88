"""`EndpointSampler`: answers from a server with OpenAI's /v1/chat/completions."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import math
import os
import queue
import re
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from deftune.artifacts.options import OptionError
from deftune.artifacts.terminal import printable
from deftune.evaluation.chance import derive_key
from deftune.evaluation.sampler import Finish, Output, Prompt, Sampler, SamplerError, Settings

MAX_ANSWER_BYTES = 64 * 2**20
FAILURES_IN_A_ROW = 5  # requests that fail after all retries, with no other answer between: the server is down
OWN_FIELDS = ("model", "messages", "max_tokens", "temperature", "top_p", "seed", "stream", "n")
# the words of several servers for the two ways in which an answer ends
FINISHED: dict[Any, Finish] = {
    "stop": "stop", "eos": "stop", "eos_token": "stop", "stop_sequence": "stop", "end_turn": "stop",
    "length": "length", "max_tokens": "length",
}  # fmt: skip
HINTS = {
    401: "name the environment variable with the API key: --api-key-env NAME",
    402: "the account behind the key cannot pay",
    403: "the key, or the lack of one, does not allow it: --api-key-env NAME",
    404: "check the model's name {model!r} and the URL; GET {base}/models lists the names",
    405: "check the URL; it ends in /v1",
}
REDIRECTED = "a redirect is not followed, it would take the key to another host; give the URL that it leads to"


class Address(NamedTuple):
    """A server's URL up to /v1, and the "name:password" of the URL apart from it."""

    base: str
    login: str | None


def parse_address(text: str) -> Address:
    """Parse a URL; an error shows no password.

    >>> parse_address("http://me:secret@localhost:8000")
    Address(base='http://localhost:8000/v1', login='me:secret')
    """
    shown = re.sub(r"(?<=//).*@", "***@", text)
    parts = urllib.parse.urlsplit(text)
    try:
        port = parts.port
    except ValueError:
        raise OptionError("url", f"the port in {shown!r} is no number from 0 to 65535") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise OptionError("url", f"write http://host:port or https://host, got {shown!r}")
    if parts.query or parts.fragment:
        raise OptionError("url", f"{re.split('[?#]', shown)[0]} goes on with '?' or '#'; leave it out")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    base = f"{parts.scheme}://{host}{'' if port is None else f':{port}'}{parts.path.rstrip('/')}"
    login = None
    if parts.username is not None:
        login = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
    return Address(base if base.endswith("/v1") else f"{base}/v1", login)


class _Retry(Exception):
    """A failure that may pass: the request is tried again, after the ``seconds`` that the server asks for at least."""

    seconds: float = 0.0


class _Unreachable(_Retry):
    """The server cannot be reached; the item is not the cause."""


class _Refused(Exception):
    """The server refuses this item; another attempt would change nothing."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which would send the key to another host."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        return None


class _Deadline:
    """A time limit for a whole request; urllib's time-out is for each read, and a server may send byte by byte."""

    def __init__(self, seconds: float):
        self.expired = False
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._timer = threading.Timer(seconds, self._expire)
        self._timer.daemon = True

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        self._timer.start()
        try:
            yield
        finally:
            self._timer.cancel()
            with self._lock:
                self._socket = None

    def watch(self, connection: socket.socket) -> None:
        with self._lock:
            self._socket = connection
            if self.expired:
                raise TimeoutError

    def _expire(self) -> None:
        with self._lock:
            self.expired = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    # shut down the plain socket: shutting down TLS would change state that the reading thread uses
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


class _Watched(http.client.HTTPConnection):
    """A connection whose socket is closed at the deadline."""

    def __init__(self, *arguments: Any, deadline: _Deadline, **options: Any):
        super().__init__(*arguments, **options)
        self._deadline = deadline

    def connect(self) -> None:
        super().connect()
        self._deadline.watch(self.sock)


class _WatchedTLS(_Watched, http.client.HTTPSConnection):
    pass


class _Request(urllib.request.Request):
    deadline: _Deadline


class _HTTPHandler(urllib.request.HTTPHandler):
    def http_open(self, req: Any) -> Any:
        return self.do_open(cast(Any, _Watched), req, deadline=req.deadline)


class _HTTPSHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: Any) -> Any:
        return self.do_open(cast(Any, _WatchedTLS), req, deadline=req.deadline)


class EndpointSampler(Sampler):
    """Asks a server with OpenAI's /v1/chat/completions: vLLM, SGLang, llama.cpp, transformers serve.

    The server applies its own chat template: serve the folder that training saved, which has the template of training.
    A seed is sent with each answer; the server decides what it does with the seed.

    Args:
        url: http://host:port or https://host, with or without /v1. A name and password in it are sent as HTTP basic
            authentication, and are in no message.
        api_key_env: the environment variable with the API key, which is in no message.
        concurrency: requests at a time.
        timeout: seconds that a request may take in all.
        retries, backoff: a time-out, 408, 409, 429, 5xx or an answer that is no completion is tried again, after 1, 2,
            4, ... times ``backoff`` seconds, or the server's ``Retry-After`` (at most ``timeout``) if that is longer;
            after the last retry it is the item's error.
        extra_body: fields added to the body of each request, such as ``{"top_k": -1}``.
        notice: is called with a line for each retry.

    Other HTTP errors (400 if the context is too long) are the item's error at once. A `SamplerError` stops the sampling
    if the item cannot be the cause: no connection, a redirect, 401, 402, 404, 405, a 403 before any answer, and
    `FAILURES_IN_A_ROW` failed items without an answer between them.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key_env: str | None = None,
        concurrency: int = 8,
        timeout: float = 600.0,
        retries: int = 4,
        backoff: float = 1.0,
        extra_body: Mapping[str, Any] | None = None,
        notice: Callable[[str], None] = lambda _: None,
    ):
        self.base, login = parse_address(url)
        if not 0 < timeout < math.inf:
            raise OptionError("timeout", f"a number of seconds above 0; got {timeout:g}")
        if retries < 0:
            raise OptionError("retries", f"a number from 0; got {retries}")
        if concurrency < 1:
            raise OptionError("concurrency", f"a number from 1; got {concurrency}")
        if backoff < 0:
            raise OptionError("backoff", f"a number of seconds from 0; got {backoff:g}")
        if own := [name for name in OWN_FIELDS if name in (extra_body or {})]:
            raise OptionError("extra_body", f"{own[0]!r} is set by deftune itself; leave it out")
        self.url = f"{self.base}/chat/completions"
        self.model, self.concurrency, self.timeout = model, concurrency, timeout
        self.retries, self.backoff, self.extra_body, self.notice = retries, backoff, dict(extra_body or {}), notice
        self._headers = {"Content-Type": "application/json"}
        self._secrets: list[str] = []
        if api_key_env is not None:
            key = read_key(api_key_env)
            if login is not None:
                raise OptionError("api_key_env", "the URL has a name and password already; leave one of them out")
            self._headers["Authorization"], self._secrets = f"Bearer {key}", [key]
        elif login is not None:
            code = base64.b64encode(login.encode()).decode()
            self._headers["Authorization"], self._secrets = f"Basic {code}", [code, login.partition(":")[2]]
        self._opener = urllib.request.build_opener(_NoRedirect, _HTTPHandler, _HTTPSHandler)
        self._lock = threading.Lock()
        self._answered, self._failed_in_a_row = False, 0

    def answers(self, prompts: Sequence[Prompt], settings: Settings) -> Iterator[Output]:
        waiting: queue.SimpleQueue[tuple[Prompt, int]] = queue.SimpleQueue()
        for prompt in prompts:
            for sample in settings.samples_of(prompt):
                waiting.put((prompt, sample))
        results: queue.SimpleQueue[Output | BaseException | None] = queue.SimpleQueue()
        stop = threading.Event()

        def work() -> None:
            try:
                while not stop.is_set():
                    try:
                        prompt, sample = waiting.get_nowait()
                    except queue.Empty:
                        break
                    output = self._ask(prompt, sample, settings, stop)
                    if output is not None:
                        results.put(output)
            except BaseException as error:  # handed to the reader, which would wait for ever
                stop.set()
                results.put(error)
            finally:
                results.put(None)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(self.concurrency, waiting.qsize()))]
        for thread in threads:
            thread.start()
        done, left, failure = 0, len(threads), None
        try:
            while left:
                result = results.get()
                if result is None:
                    left -= 1
                elif isinstance(result, Output):
                    done += result.finish != "error"
                    yield result
                elif failure is None:  # the other requests on their way are still answered, then it is raised
                    failure = result
        finally:
            stop.set()
        if isinstance(failure, SamplerError):
            raise SamplerError(failure.message, done)
        if failure is not None:
            raise failure

    def _ask(self, prompt: Prompt, sample: int, settings: Settings, stop: threading.Event) -> Output | None:
        """An answer, or the item's error; None if another request found that the server cannot be used."""
        body = {
            **self.extra_body,
            "model": self.model,
            "messages": [{"role": "user", "content": prompt.text}],
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "seed": derive_key(settings.seed, prompt.id, sample) >> 33,  # 31 bits: some servers take no more
            "stream": False,
        }
        data = json.dumps(body).encode()
        tries = 0
        while True:
            try:
                output = self._answer(prompt, sample, self._post(data, prompt))
            except _Refused as problem:
                self._count(failed=False)
                return Output(prompt.id, sample, "", None, "error", str(problem))
            except _Retry as problem:
                if stop.is_set():
                    return None
                tries += 1
                if tries <= self.retries:
                    seconds = max(self.backoff * 2 ** (tries - 1), min(problem.seconds, self.timeout))
                    self.notice(f"{self.url}: {prompt.id}: {problem}; attempt {tries + 1} in {seconds:g} s")
                    if stop.wait(seconds):
                        return None
                    continue
                note = f"{problem} (after {tries} attempt{'s' if tries > 1 else ''})"
                if isinstance(problem, _Unreachable):
                    raise SamplerError(f"{self.url}: {prompt.id}: {note}") from None
                in_a_row = self._count(failed=True)
                if in_a_row >= FAILURES_IN_A_ROW:
                    raise SamplerError(
                        f"{self.url}: {in_a_row} requests in a row failed, the last of them {prompt.id}: {note}"
                    ) from None
                return Output(prompt.id, sample, "", None, "error", note)
            else:
                self._count(failed=False)
                self._answered = True
                return output

    def _count(self, *, failed: bool) -> int:
        """The number of failed requests since the last answer."""
        with self._lock:
            self._failed_in_a_row = self._failed_in_a_row + 1 if failed else 0
            return self._failed_in_a_row

    def _post(self, data: bytes, prompt: Prompt) -> bytes:
        request = _Request(self.url, data, self._headers, method="POST")
        request.deadline = deadline = _Deadline(self.timeout)
        late = _Retry(f"no answer in {self.timeout:g} seconds; --timeout allows more")
        with deadline.running():
            try:
                with self._opener.open(request, timeout=self.timeout) as response:
                    content = response.read(MAX_ANSWER_BYTES + 1)
            except urllib.error.HTTPError as error:
                raise self._http_error(error, prompt) from None
            except (OSError, http.client.HTTPException) as error:
                reason = error.reason if isinstance(error, urllib.error.URLError) else error
                if deadline.expired or isinstance(reason, TimeoutError):
                    raise late from None
                lost = isinstance(reason, ConnectionError) and not isinstance(reason, ConnectionRefusedError)
                if lost or not isinstance(error, urllib.error.URLError):
                    raise _Retry(f"connection lost: {str(reason) or type(reason).__name__}") from None
                raise _Unreachable(f"no connection: {reason}") from None
            if deadline.expired:  # the content is incomplete
                raise late
        if len(content) > MAX_ANSWER_BYTES:
            raise _Retry(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
        return content

    def _http_error(self, error: urllib.error.HTTPError, prompt: Prompt) -> Exception:
        """The exception for an HTTP error: try again, an error of this item, or an error of every item."""
        said = b""
        with error, contextlib.suppress(OSError, http.client.HTTPException):
            said = error.read(2000)
        text = self._clean(" ".join(_message_in(said.decode("utf-8", "replace")).split())[:300])
        problem = f"HTTP {error.code} {self._clean(str(error.reason))}{text and f': {text}'}"
        if error.code in (408, 409, 429) or error.code >= 500:
            later = _Retry(problem)
            wanted = str(error.headers.get("Retry-After", "")).strip()
            later.seconds = float(wanted) if re.fullmatch(r"[0-9]{1,6}(?:\.[0-9]+)?", wanted) else 0.0
            return later
        if error.code < 400:
            return SamplerError(f"{self.url}: {prompt.id}: {problem}; {REDIRECTED}")
        if error.code in HINTS and not (error.code == 403 and self._answered):  # some refuse an item with 403
            hint = HINTS[error.code].format(model=self.model, base=self.base)
            return SamplerError(f"{self.url}: {prompt.id}: {problem}; {hint}")
        return _Refused(problem)

    def _clean(self, text: str) -> str:
        """A server's text without secrets and without terminal control characters."""
        for secret in filter(None, self._secrets):
            text = text.replace(secret, "***")
        return printable(text)

    def _answer(self, prompt: Prompt, sample: int, content: bytes) -> Output:
        """The answer in a response; every field is checked."""

        def wrong(what: str) -> _Retry:
            start = self._clean(repr(content[:200].decode("utf-8", "replace")))
            return _Retry(f"not a chat completion: {what}: {start}")

        try:
            said: Any = json.loads(content)
        except (ValueError, RecursionError):
            raise wrong("not JSON") from None
        choices: Any = cast("dict[str, Any]", said).get("choices") if isinstance(said, dict) else None
        if not isinstance(choices, list) or not choices:
            raise wrong("'choices' is not a list with an answer")
        choice: Any = choices[0]  # one was asked for; some servers send more
        message: Any = cast("dict[str, Any]", choice).get("message") if isinstance(choice, dict) else None
        if not isinstance(message, dict):
            raise wrong("no message in its choice")
        text = _text_of(cast("dict[str, Any]", message).get("content"))
        if text is None:
            raise wrong("'content' is neither text nor a list of texts")
        usage: Any = said.get("usage")
        tokens: Any = cast("dict[str, Any]", usage).get("completion_tokens") if isinstance(usage, dict) else None
        if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0):
            raise wrong("'completion_tokens' is not a count")
        reason: Any = choice.get("finish_reason")
        finish = FINISHED.get(reason) if isinstance(reason, str) else None
        if finish is None:
            note = f"the server ended the answer with finish_reason {self._clean(str(reason)[:60])!r}"
            return Output(prompt.id, sample, text, tokens, "error", note)
        if not text and any(message.get(name) for name in ("reasoning_content", "reasoning")):
            if finish == "length":
                return Output(prompt.id, sample, "", tokens, finish, "cut off in the reasoning, before any answer")
            note = "the server sent reasoning and no answer: 'content' is empty beside 'reasoning_content'"
            return Output(prompt.id, sample, "", tokens, "error", note)
        return Output(prompt.id, sample, text, tokens, finish)


def _message_in(body: str) -> str:
    """The message in the body of an error, if the body is JSON; else the body.

    >>> _message_in('{"error": {"message": "too long", "code": 400}}'), _message_in("Bad Gateway")
    ('too long', 'Bad Gateway')
    """
    try:
        said: Any = json.loads(body)
    except (ValueError, RecursionError):
        return body
    for name in ("error", "message"):
        if isinstance(said, dict) and name in said:
            said = cast("dict[str, Any]", said)[name]
    return said if isinstance(said, str) else body


def _text_of(content: Any) -> str | None:
    """The text of a message's ``content``: text, null, or a list of parts; parts with reasoning are left out."""
    if content is None:
        return ""  # an empty answer, or one of nothing but reasoning
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts: list[str] = []
    for part in cast("list[Any]", content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind: Any = cast("dict[str, Any]", part).get("type") if isinstance(part, dict) else None
        if kind in ("thinking", "reasoning"):
            continue
        text: Any = part.get("text") if kind in ("text", "output_text") else None
        if not isinstance(text, str):
            return None
        texts.append(text)
    return "".join(texts)


def read_key(variable: str) -> str:
    """The API key in an environment variable; an error does not show its value."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise OptionError("api_key_env", f"the environment has no {variable}; set it to the key")
    if not (key.isascii() and key.isprintable()):
        raise OptionError("api_key_env", f"{variable} holds no key: a key is printable ASCII on one line")
    return key
