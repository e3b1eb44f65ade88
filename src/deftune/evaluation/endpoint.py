"""Answers from a server that speaks OpenAI's /v1/chat/completions."""

from __future__ import annotations

import http.client
import json
import os
import queue
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from deftune.evaluation.chance import derive_key
from deftune.evaluation.sampler import Output, Prompt, Sampler, SamplerError, Settings

MAX_ANSWER_BYTES = 64 * 2**20


class _Retry(Exception):
    """What went wrong this time, and may not the next."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would take the key to another host."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        return None


class EndpointSampler(Sampler):
    """A server that speaks OpenAI's /v1/chat/completions: vLLM, SGLang, llama.cpp, transformers serve.

    The server applies its own chat template: serve the folder that training saved, which has the one trained with.
    ``seed`` is sent per answer, from (seed, item, sample); how far the server honours it is the server's affair.
    ``api_key_env`` names the environment variable with the key; it is in no message. Requests go out ``concurrency`` at
    a time. What may pass (no connection, a time-out, 408, 409, 429, 5xx, an answer that is no completion) is tried
    again ``retries`` times, after 1, 2, 4, ... times ``backoff`` seconds; other HTTP errors are not.
    ``extra`` is added to each request's body, such as ``{"top_k": -1}``.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_env: str | None = None,
        concurrency: int = 8,
        timeout: float = 600.0,
        retries: int = 4,
        backoff: float = 1.0,
        extra: Mapping[str, Any] | None = None,
    ):
        parts = urllib.parse.urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base_url: http://host:port or https://host, got {base_url!r}")
        if concurrency < 1 or retries < 0 or not timeout > 0 or backoff < 0:
            raise ValueError("concurrency is at least 1, retries and backoff at least 0, timeout above 0")
        base = base_url.rstrip("/")
        self.url = f"{base if base.endswith('/v1') else base + '/v1'}/chat/completions"
        self.model, self.concurrency, self.timeout = model, concurrency, timeout
        self.retries, self.backoff, self.extra = retries, backoff, dict(extra or {})
        self._headers = {"Content-Type": "application/json"}
        if api_key_env is not None:
            key = os.environ.get(api_key_env)
            if not key:
                raise ValueError(f"api_key_env: the environment has no {api_key_env}; set it to the key")
            self._headers["Authorization"] = f"Bearer {key}"
        self._opener = urllib.request.build_opener(_NoRedirect)

    def answers(self, prompts: Sequence[Prompt], settings: Settings) -> Iterator[Output]:
        waiting: queue.SimpleQueue[tuple[Prompt, int]] = queue.SimpleQueue()
        for prompt in prompts:
            for sample in range(settings.samples):
                waiting.put((prompt, sample))
        total = len(prompts) * settings.samples
        results: queue.SimpleQueue[Output | BaseException | None] = queue.SimpleQueue()
        stop = threading.Event()

        def work() -> None:
            try:
                while not stop.is_set():
                    try:
                        prompt, sample = waiting.get_nowait()
                    except queue.Empty:
                        break
                    results.put(self._ask(prompt, sample, settings, stop))
            except BaseException as error:  # handed to the reader, which would wait for ever
                stop.set()
                results.put(error)
            finally:
                results.put(None)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(self.concurrency, total))]
        for thread in threads:
            thread.start()
        done, left, failure = 0, len(threads), None
        try:
            while left:
                result = results.get()
                if result is None:
                    left -= 1
                elif isinstance(result, Output):
                    done += 1
                    yield result
                elif failure is None:  # the other requests on their way are still answered, then it is raised
                    failure = result
        finally:
            stop.set()
        if isinstance(failure, SamplerError):
            raise SamplerError(failure.message, done)
        if failure is not None:
            raise failure

    def _ask(self, prompt: Prompt, sample: int, settings: Settings, stop: threading.Event) -> Output:
        body = {
            **self.extra,
            "model": self.model,
            "messages": [dict(message) for message in prompt.messages],
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
                return self._answer(prompt, sample, self._post(data, prompt))
            except _Retry as problem:
                tries += 1
                if tries > self.retries or stop.is_set():
                    times = f"{tries} attempt{'s' if tries > 1 else ''}"
                    raise SamplerError(f"{self.url}: {prompt.id}: {problem} (after {times})") from None
                stop.wait(self.backoff * 2 ** (tries - 1))

    def _post(self, data: bytes, prompt: Prompt) -> bytes:
        request = urllib.request.Request(self.url, data, self._headers, method="POST")
        try:
            with self._opener.open(request, timeout=self.timeout) as response:
                content = response.read(MAX_ANSWER_BYTES + 1)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(2000).decode("utf-8", "replace").strip().replace("\n", " ")[:300]
            problem = f"HTTP {error.code} {error.reason}{said and f': {said}'}"
            if error.code in (408, 409, 429) or error.code >= 500:
                raise _Retry(problem) from None
            raise SamplerError(f"{self.url}: {prompt.id}: {problem}") from None
        except TimeoutError:
            raise _Retry(f"no answer in {self.timeout:g} seconds") from None
        except urllib.error.URLError as error:
            raise _Retry(f"no connection: {error.reason}") from None
        except (OSError, http.client.HTTPException) as error:
            raise _Retry(f"connection lost: {error or type(error).__name__}") from None
        if len(content) > MAX_ANSWER_BYTES:
            raise _Retry(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
        return content

    def _answer(self, prompt: Prompt, sample: int, content: bytes) -> Output:
        """What the server said, every field checked before it is believed."""

        def wrong(what: str) -> _Retry:
            return _Retry(f"not a chat completion: {what}: {content[:200].decode('utf-8', 'replace')!r}")

        try:
            said: Any = json.loads(content)
        except (ValueError, RecursionError):
            raise wrong("not JSON") from None
        choices: Any = cast("dict[str, Any]", said).get("choices") if isinstance(said, dict) else None
        if not isinstance(choices, list) or len(cast("list[Any]", choices)) != 1:
            raise wrong("'choices' is not a list of one")
        choice: Any = choices[0]
        message: Any = cast("dict[str, Any]", choice).get("message") if isinstance(choice, dict) else None
        if not isinstance(message, dict):
            raise wrong("no message in its choice")
        text: Any = cast("dict[str, Any]", message).get("content")
        if text is None:
            text = ""  # an empty answer, or one of nothing but reasoning
        if not isinstance(text, str):
            raise wrong("'content' is not text")
        usage: Any = said.get("usage")
        tokens: Any = cast("dict[str, Any]", usage).get("completion_tokens") if isinstance(usage, dict) else None
        if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0):
            raise wrong("'completion_tokens' is not a count")
        reason: Any = choice.get("finish_reason")
        if reason in ("stop", "length"):
            return Output(prompt.id, sample, text, tokens, reason)
        return Output(prompt.id, sample, text, tokens, "error", f"the server ended it with {str(reason)[:60]!r}")
