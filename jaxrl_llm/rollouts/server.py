"""One OpenAI-compatible vLLM server over HTTP: token ids in, token ids and log-probs out, and its weights' label.

Every request here may be repeated: a completion is a function of its seed, the others set what they say.
"""

import contextlib
import http.client
import json
import re
import socket
import threading
import urllib.parse
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollouts.sampler import Sampling

MODEL = "policy"


class NoAnswer(Exception):  # noqa: N818
    """Nothing usable came back, and the same request may do better later or elsewhere."""


class Response(NamedTuple):
    """A sampled response; `finished` if it ends on a stop token."""

    tokens: list[int]
    logps: list[float]
    finished: bool


class Server:
    """A server at `url`; `timeout` is the seconds that one answer may take. Threads may share it."""

    def __init__(self, url: str, key: str = "", timeout: float = 600.0):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{url!r} is no address of a server: write http://HOST:PORT")
        self.url, self.timeout = url.rstrip("/"), timeout
        secure = parts.scheme == "https"
        self._kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._place, self._prefix = parts.netloc, parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        self._kept: list[http.client.HTTPConnection] = []
        self._busy: set[http.client.HTTPConnection] = set()
        self._lock, self._closed = threading.Lock(), 0

    def complete(self, prompt: Sequence[int], sampling: Sampling, seed: int) -> Response:
        """One response to a prompt."""
        answer = self.post(
            "/v1/completions",
            _asks(prompt)
            | {
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "seed": seed,
                "logprobs": 0,
                "stop_token_ids": list(sampling.stop),
                "ignore_eos": True,  # the stop tokens are ours alone
            },
        )
        return read_response(answer, sampling)

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs, at temperature 1, of each token but the first."""
        asks = _asks(tokens) | {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        answer = self.post("/v1/completions", asks)
        try:
            entries = answer["choices"][0]["prompt_logprobs"][1:]
            pairs = zip(entries, tokens[1:], strict=True)
            return [float(entry[str(token)]["logprob"]) for entry, token in pairs]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise NoAnswer(f"scored a prompt without its log-probs ({error!r})") from error

    def version(self) -> int | None:
        """The label of the weights it serves; None before it has got one."""
        label = str(self.get("/weight_info").get("weight_version", ""))
        return int(label) if label.isdecimal() else None

    def get(self, path: str) -> dict[str, Any]:
        """The JSON at a path."""
        return self._exchange("GET", path, None)

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON that answers this one."""
        return self._exchange("POST", path, None if body is None else json.dumps(body))

    def close(self) -> None:
        """Closes all connections; requests under way on other threads end with NoAnswer."""
        with self._lock:
            self._closed += 1
            while self._kept:
                self._kept.pop().close()
            for link in self._busy:
                if link.sock is not None:
                    with contextlib.suppress(OSError):
                        link.sock.shutdown(socket.SHUT_RDWR)

    def _exchange(self, method: str, path: str, body: str | None) -> dict[str, Any]:
        """An answer. That a kept connection is dead says nothing, so the next one is tried, at last a new one."""
        while True:
            link, kept, closed = self._take()
            try:
                link.request(method, self._prefix + path, body, self._headers)
                with link.getresponse() as reply:
                    status, content = reply.status, reply.read()
            except (OSError, http.client.HTTPException) as error:
                link.close()
                with self._lock:
                    self._busy.discard(link)
                    stale = kept and closed == self._closed and isinstance(error, ConnectionError)
                if stale:
                    continue
                raise NoAnswer(f"{type(error).__name__}: {error}") from error
            with self._lock:
                self._busy.discard(link)
                if closed == self._closed:
                    self._kept.append(link)
                else:
                    link.close()
            return self._read(path, status, content)

    def _take(self) -> tuple[http.client.HTTPConnection, bool, int]:
        """A connection, whether it was used before, and how often all were closed until now."""
        with self._lock:
            kept = bool(self._kept)
            link = self._kept.pop() if kept else self._kind(self._place, timeout=self.timeout)
            self._busy.add(link)
            return link, kept, self._closed

    def _read(self, path: str, status: int, content: bytes) -> dict[str, Any]:
        if status in (401, 403):
            raise UserError(f"{self.url} refused the key: give the one that it was started with")
        if status == 404:
            raise UserError(
                f"{self.url} knows no {path}: start it with VLLM_SERVER_DEV_MODE=1 and "
                f"--served-model-name {MODEL}, or use a newer vLLM"
            )
        if 400 <= status < 500 and status not in (408, 429):
            raise UserError(f"{self.url}{path} refused a request: {_message(content)}")
        if status != 200:
            raise NoAnswer(f"status {status}: {_message(content)}")
        try:
            answer = json.loads(content) if content else {}
        except ValueError as error:
            raise NoAnswer(f"an answer that is not JSON: {content[:80]!r}") from error
        if not isinstance(answer, dict):
            raise NoAnswer(f"an answer that is no JSON object: {content[:80]!r}")
        return answer


def read_response(answer: dict[str, Any], sampling: Sampling) -> Response:
    """The response in an answer, if it is whole: ended by a stop token or by the limit, a log-prob a token."""
    try:
        (choice,) = answer["choices"]
        tokens, logps = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        reason = choice["finish_reason"]
    except (KeyError, TypeError, ValueError) as error:
        raise NoAnswer(f"a completion without its tokens ({error!r})") from error
    stopped = reason == "stop" and bool(tokens) and tokens[-1] in sampling.stop
    cut = reason == "length" and len(tokens) == sampling.max_tokens
    if not (stopped or cut) or len(logps) != len(tokens):
        raise NoAnswer(
            f"a completion of {len(tokens)} tokens and {len(logps)} log-probs that ended by {reason!r}"
        )
    return Response(tokens, [float(logp) for logp in logps], stopped)


def _asks(tokens: Sequence[int]) -> dict[str, Any]:
    """What every completion says; tokens as ids throughout, so that the server needs no tokenizer."""
    ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    return {"model": MODEL, "prompt": [int(token) for token in tokens], **ids}


def _message(content: bytes) -> str:
    """The message in an error's JSON, else its first line."""
    text = content.decode(errors="replace")
    found = re.search(r'"(?:message|error)":\s*("(?:[^"\\]|\\.)*")', text)
    return (json.loads(found[1]) if found else text).strip().split("\n")[0][:300]
