"""One OpenAI-compatible vLLM server over HTTP: token ids in, token ids and log-probs out, and its weights' label.

Every request here may be repeated: a completion is a function of its seed, the others set what they say.
Nothing that a server says is believed: an answer is whole and of the right form, or it is NoAnswer.
"""

import contextlib
import http.client
import json
import re
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollouts.link import Link, address
from jaxrl_llm.rollouts.sampler import Sampling

MODEL = "policy"
UNLABELLED = "default"  # what vLLM calls weights that nobody has labelled
TOKEN_SECONDS = 0.25  # the slowest server that is worth waiting for takes this long for a token
ANSWER_BYTES, TOKEN_BYTES = 2**20, 2**10  # the longest answer, and what each token adds to it
LOGPS = -1e9, 1e-3  # no log-prob is outside, rounding included


class NoAnswer(Exception):  # noqa: N818
    """Nothing usable came back, and the same request may do better later or elsewhere."""


class NoRoute(NoAnswer):
    """The server has nothing at this path."""


class Response(NamedTuple):
    """A sampled response; `finished` if it ends on a stop token."""

    tokens: list[int]
    logps: list[float]
    finished: bool


class Server:
    """A server at `url`, which may take `timeout` seconds for an answer and TOKEN_SECONDS more for each token.

    Threads may share it.
    """

    def __init__(self, url: str, key: str = "", timeout: float = 600.0):
        self.url, self.timeout = url.rstrip("/"), timeout
        self._where = address(self.url)
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        self._kept: list[Link] = []
        self._busy: set[Link] = set()
        self._lock, self._closed = threading.Lock(), 0

    def complete(
        self, prompt: Sequence[int], sampling: Sampling, seed: int, vocabulary: int
    ) -> Response:
        """One response to a prompt, its tokens from a vocabulary of this size."""
        asks = _asks(prompt) | {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": seed,
            "logprobs": 0,
            "stop_token_ids": list(sampling.stop),
            "ignore_eos": True,  # the stop tokens are ours alone
        }
        answer = self.post("/v1/completions", asks, tokens=len(prompt) + sampling.max_tokens)
        return read_response(answer, sampling, vocabulary)

    def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs, at temperature 1, of each token but the first."""
        asks = _asks(tokens) | {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        answer = self.post("/v1/completions", asks, tokens=len(tokens))
        try:
            entries = answer["choices"][0]["prompt_logprobs"][1:]
            pairs = zip(entries, tokens[1:], strict=True)
            return [float(entry[str(token)]["logprob"]) for entry, token in pairs]
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            raise NoAnswer(f"scored a prompt without its log-probs ({error!r:.200})") from error

    def label(self) -> str | None:
        """The identity of the weights it serves; None before somebody has given them one."""
        label = self.get("/weight_info").get("weight_version")
        if not isinstance(label, str):
            raise NoAnswer("it does not say which weights it serves")
        return None if label in ("", UNLABELLED) else _plain(label, 100)

    def get(self, path: str) -> dict[str, Any]:
        """The JSON at a path."""
        return self._exchange("GET", path, None, 0)

    def post(
        self, path: str, body: dict[str, Any] | None = None, tokens: int = 0
    ) -> dict[str, Any]:
        """The JSON that answers this one, which asks for so many tokens."""
        return self._exchange("POST", path, None if body is None else json.dumps(body), tokens)

    def send(self, path: str, content: bytes) -> dict[str, Any]:
        """The JSON that answers some bytes."""
        return self._exchange("POST", path, content, 0)

    def close(self) -> None:
        """Closes all connections; requests under way on other threads end with NoAnswer."""
        with self._lock:
            self._closed += 1
            while self._kept:
                self._kept.pop().close()
            for link in self._busy:
                with contextlib.suppress(OSError):
                    link.cut()

    def _exchange(
        self, method: str, path: str, body: str | bytes | None, tokens: int
    ) -> dict[str, Any]:
        """An answer. That a kept connection is dead says nothing, so the next one is tried, at last a new one."""
        deadline = time.monotonic() + self.timeout + TOKEN_SECONDS * tokens
        limit = ANSWER_BYTES + TOKEN_BYTES * tokens
        route = self._where.prefix + path
        while True:
            link, kept, closed = self._take()
            try:
                status, content = link.exchange(
                    method, route, body, self._headers, deadline=deadline, limit=limit
                )
            except BaseException as error:
                if not self._drop(link, closed) and kept and isinstance(error, ConnectionError):
                    continue
                if not isinstance(error, OSError | http.client.HTTPException):
                    raise
                raise NoAnswer(_plain(f"{type(error).__name__}: {error}")) from error
            self._keep(link, closed)
            return self._read(path, status, content)

    def _take(self) -> tuple[Link, bool, int]:
        """A connection, whether it was used before, and how often all were closed until now."""
        with self._lock:
            kept = bool(self._kept)
            link = self._kept.pop() if kept else Link(self._where)
            self._busy.add(link)
            return link, kept, self._closed

    def _keep(self, link: Link, closed: int) -> None:
        """For the next request, unless all were closed meanwhile."""
        with self._lock:
            self._busy.discard(link)
            if closed == self._closed:
                self._kept.append(link)
            else:
                link.close()

    def _drop(self, link: Link, closed: int) -> bool:
        """Closes a connection; whether all were closed meanwhile."""
        link.close()
        with self._lock:
            self._busy.discard(link)
            return closed != self._closed

    def _read(self, path: str, status: int, content: bytes) -> dict[str, Any]:
        if status in (401, 403):
            raise UserError(f"{self.url} refused the key: give the one that it was started with")
        if status == 404:
            raise NoRoute(
                f"status 404, {self.url} knows no {path}: if that stays, start it with VLLM_SERVER_DEV_MODE=1 "
                f"and --served-model-name {MODEL}, or use a newer vLLM"
            )
        if 400 <= status < 500 and status not in (408, 429):
            raise UserError(f"{self.url}{path} refused a request: {_message(content)}")
        if status != 200:
            raise NoAnswer(f"status {status}: {_message(content)}")
        try:
            answer = json.loads(content) if content else {}
        except (ValueError, RecursionError) as error:
            raise NoAnswer(f"an answer that is not JSON: {content[:80]!r}") from error
        if not isinstance(answer, dict):
            raise NoAnswer(f"an answer that is no JSON object: {content[:80]!r}")
        return answer


def read_response(answer: dict[str, Any], sampling: Sampling, vocabulary: int) -> Response:
    """The response in an answer, if it is whole: ended by a stop token or by the limit, a log-prob a token."""
    try:
        (choice,) = answer["choices"]
        tokens, logps = list(choice["token_ids"]), list(choice["logprobs"]["token_logprobs"])
        reason = choice["finish_reason"]
    except (KeyError, TypeError, ValueError) as error:
        raise NoAnswer(f"a completion without its tokens ({error!r:.200})") from error
    if not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
        raise NoAnswer(f"a completion with tokens that are none of the {vocabulary}")
    if not all(type(logp) in (int, float) and LOGPS[0] < logp <= LOGPS[1] for logp in logps):
        raise NoAnswer("a completion with log-probs that are none")
    ends = [i for i, token in enumerate(tokens) if token in sampling.stop]
    stopped = reason == "stop" and ends == [len(tokens) - 1]
    cut = reason == "length" and not ends and len(tokens) == sampling.max_tokens
    if not (stopped or cut) or len(tokens) > sampling.max_tokens or len(logps) != len(tokens):
        raise NoAnswer(
            f"a completion of {len(tokens)} tokens and {len(logps)} log-probs that ended by {reason!r:.40}"
        )
    return Response(tokens, [float(logp) for logp in logps], stopped)


def _asks(tokens: Sequence[int]) -> dict[str, Any]:
    """What every completion says; tokens as ids throughout, so that the server needs no tokenizer."""
    ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    return {"model": MODEL, "prompt": [int(token) for token in tokens], **ids}


def _message(content: bytes) -> str:
    """The message in an error's JSON, else its beginning."""
    text = content[: 2**12].decode(errors="replace")
    found = re.search(r'"(?:message|error)":\s*"((?:[^"\\]|\\.)*)"', text)
    return _plain(found[1] if found else text)


def _plain(text: str, length: int = 300) -> str:
    """One line that a terminal can show: what a server says may hold anything."""
    return "".join(c if c.isprintable() else " " for c in text[:length]).strip()
