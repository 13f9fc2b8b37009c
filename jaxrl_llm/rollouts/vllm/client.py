"""Requests to a vLLM server over HTTP, and the checks of what it answers.

Every request may be repeated: a completion depends on its seed, the others set a state. Each has a
connection of its own, a deadline and a limit on the size of the answer.
"""

import asyncio
import base64
import contextlib
import io
import ipaddress
import json
import math
import os
import re
import ssl
import stat
import time
import urllib.parse
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import httpx
import numpy as np
from jaxtyping import Int

from jaxrl_llm.background import loop
from jaxrl_llm.errors import UserError, printable
from jaxrl_llm.rollouts.sampler import Sampling

MODEL = "policy"  # the name that the weights are served under
UNLABELLED = "default"  # vLLM's label of weights before one is set
TOKEN_SECONDS = 0.25  # allowed per token, for the slowest server worth waiting for
ANSWER_BYTES, TOKEN_BYTES = 2**20, 2**12  # size limit of an answer, and more for each token
LOGPS = -1e9, 1e-3  # a log-prob outside is an error; above 0 only by rounding
# what a server may have defaults of its own for, from the model's folder: none of it is in the trainer's scores
PLAIN = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
SOCKET_PATH = 107  # bytes, the kernel's limit
REST = 0.5  # seconds before a server that has failed is asked again
CHECK_SECONDS = 0.5  # between two looks at whether work is still wanted

T = TypeVar("T")


class NoAnswer(Exception):  # noqa: N818
    """No usable answer; the same request may succeed later or on another server."""


class Late(NoAnswer):
    """No answer in so many `seconds`."""

    def __init__(self, seconds: float):
        super().__init__("the time for an answer is over")
        self.seconds = seconds


class NoRoute(NoAnswer):
    """The server has nothing at this path (status 404)."""


class Response(NamedTuple):
    """A sampled response; `finished` if it ends on a stop token, `aborted` if more might come.

    `experts` are those of the prompt and of all tokens but the last, None if they were not asked for.
    """

    tokens: list[int]
    logps: list[float]
    finished: bool
    aborted: bool = False
    experts: Int[np.ndarray, "L N K"] | None = None


class Server:
    """A server at `url`; an answer may take `timeout` seconds and TOKEN_SECONDS more per token.

    Requests raise NoAnswer where repeating may help, else a UserError.
    """

    def __init__(self, url: str, key: str = "", timeout: float = 600.0):
        self.url, self.key, self.timeout = url.rstrip("/"), key, timeout
        self.model = MODEL  # or the name of the adapters beside it
        # (layers, experts of a token, experts), if responses are to tell to which ones tokens were sent
        self.experts: tuple[int, int, int] | None = None
        self.restart: Callable[[], None] = lambda: None  # asks who keeps it to start it again
        parts = address(self.url)
        self._socket = Path(_path(parts)) if parts.scheme == "unix" else None
        self._tls = ssl.create_default_context() if parts.scheme == "https" else False

    async def complete(
        self, prompt: Sequence[int], sampling: Sampling, seed: int, vocabulary: int
    ) -> Response:
        """One response to a prompt; its tokens must be below `vocabulary`."""
        how: dict[str, Any] = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": seed,
            "logprobs": 0,
            "stop_token_ids": list(sampling.stop),
            "ignore_eos": True,  # only `stop_token_ids` end a response
            **PLAIN,
        }
        longest = len(prompt) + sampling.max_tokens
        if self.experts is None:
            body = self._tokens_only(prompt) | how
            answer = await self.post("/v1/completions", body, tokens=longest)
            return read_response(answer, sampling, vocabulary)
        body = {"model": self.model, "token_ids": [*map(int, prompt)], "sampling_params": how}
        try:
            answer = await self.post("/inference/v1/generate", body, tokens=longest)
        except NoRoute as error:
            raise self._tells_no_experts() from error
        response = read_response(as_completion(answer), sampling, vocabulary)
        return response._replace(experts=self._sent_to(answer, len(prompt), response))

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs, at temperature 1, of each token but the first."""
        body = self._tokens_only(tokens) | {
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        answer = await self.post("/v1/completions", body, tokens=len(tokens))
        try:
            entries = answer["choices"][0]["prompt_logprobs"][1:]
            pairs = zip(entries, tokens[1:], strict=True)
            return [float(entry[str(token)]["logprob"]) for entry, token in pairs]
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            raise NoAnswer(f"scored a prompt without its log-probs ({error!r:.200})") from error

    def _tells_no_experts(self) -> UserError:
        return UserError(
            f"{self.url} does not say to which experts it sends tokens: start it with "
            "--enable-return-routed-experts --enable-scale-out, or set replay=False in the engine"
        )

    def _sent_to(self, answer: dict[str, Any], prompt: int, response: Response) -> Any:
        """The experts in the answer to a prompt of so many tokens; None with a response that has none yet."""
        encoded = answer["choices"][0].get("routed_experts")
        if encoded is None and not response.tokens:
            return None
        if encoded is None:
            raise self._tells_no_experts()
        try:
            content = base64.b64decode(encoded, validate=True)
            array = np.load(io.BytesIO(content), allow_pickle=False)
        except (TypeError, ValueError, EOFError) as error:
            raise NoAnswer(f"experts that are no array ({error!r:.200})") from error
        assert self.experts is not None
        *sizes, number = self.experts
        size = prompt + len(response.tokens) - 1, *sizes
        if array.shape != size or array.dtype.kind not in "iu":
            raise NoAnswer(f"experts {array.dtype}{[*array.shape]} and not {[*size]}")
        if not (array >= 0).all() or not (array < number).all():
            raise NoAnswer(f"experts that are none of the {number}")
        return array.astype(np.int16)

    def _tokens_only(self, tokens: Sequence[int]) -> dict[str, Any]:
        """The fields that ask for token ids throughout, so that the server needs no tokenizer."""
        ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        return {"model": self.model, "prompt": [int(token) for token in tokens], **ids}

    async def label(self) -> str | None:
        """The label of its weights; None if none was set since the server started."""
        label = (await self.request("GET", "/weight_info")).get("weight_version")
        if not isinstance(label, str):
            raise NoAnswer("it does not say which weights it serves")
        return None if label in ("", UNLABELLED) else _one_line(label)

    async def post(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        tokens: int = 0,
        *,
        plain: bool = False,
    ) -> dict[str, Any]:
        """The JSON answer to a POST of `body`; `tokens` extends its deadline and size limit.

        A `plain` answer is a sentence, which is left out.
        """
        content = None if body is None else json.dumps(body).encode()
        return await self.request("POST", path, content, tokens, plain=plain)

    async def request(
        self,
        method: str,
        path: str,
        content: bytes | AsyncIterable[bytes] | None = None,
        tokens: int = 0,
        *,
        plain: bool = False,
    ) -> dict[str, Any]:
        """The JSON answer to a request; it goes to `url` alone, by no proxy and no redirect."""
        limit, received = ANSWER_BYTES + TOKEN_BYTES * tokens, bytearray()
        seconds = self.timeout + TOKEN_SECONDS * tokens
        base = self.url if self._socket is None else "http://localhost"
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        uds = None if self._socket is None else str(self._socket)
        transport = httpx.AsyncHTTPTransport(uds=uds, verify=self._tls)
        self._refuse_strangers()
        try:
            async with (
                asyncio.timeout(seconds),
                httpx.AsyncClient(transport=transport, timeout=None, trust_env=False) as client,  # noqa: S113
                client.stream(method, base + path, content=content, headers=headers) as reply,
            ):
                async for piece in reply.aiter_raw():
                    received += piece
                    if len(received) > limit:
                        raise NoAnswer(f"an answer of more than {limit} bytes")
        except TimeoutError:
            raise Late(seconds) from None
        except httpx.HTTPError as error:
            raise NoAnswer(_one_line(f"{type(error).__name__}: {error}")) from error
        answer = self._read(path, reply.status_code, bytes(received))
        return {} if plain else self._json(answer)

    def _refuse_strangers(self) -> None:
        """A UserError, before the key is sent, if another user owns the socket."""
        if self._socket is None:
            return
        try:
            there = self._socket.stat()
        except FileNotFoundError:  # its server starts again
            return
        if stat.S_ISSOCK(there.st_mode) and there.st_uid not in (0, os.geteuid()):
            raise UserError(
                f"user {there.st_uid} listens on {self._socket}, and not you: its place was taken"
            )

    def _read(self, path: str, status: int, content: bytes) -> bytes:
        if status in (401, 403):
            raise UserError(f"{self.url} refused the key: give the one that it was started with")
        if status == 404:
            raise NoRoute(
                f"status 404, {self.url} knows no {path}: if that stays, start it with VLLM_SERVER_DEV_MODE=1 "
                f"and --served-model-name {MODEL}, or use a newer vLLM"
            )
        if 400 <= status < 500 and status not in (408, 429):
            raise UserError(f"{self.url}{path} refused a request: {_one_line(content)}")
        if status != 200:
            raise NoAnswer(f"status {status}: {_one_line(content)}")
        return content

    def _json(self, content: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(content) if content else {}
        except (ValueError, RecursionError) as error:
            raise NoAnswer(f"an answer that is not JSON: {content[:80]!r}") from error
        if not isinstance(answer, dict):
            raise NoAnswer(f"an answer that is no JSON object: {content[:80]!r}")
        return answer


def as_completion(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer of the route for tokens, with its log-probs where completions have them."""
    try:
        [choice] = answer["choices"]
        logps = [one["logprob"] for one in (choice["logprobs"] or {}).get("content") or ()]
        return {"choices": [choice | {"logprobs": {"token_logprobs": logps}}]}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NoAnswer(f"an answer without its tokens ({error!r:.200})") from error


def read_response(answer: dict[str, Any], sampling: Sampling, vocabulary: int) -> Response:
    """The response in an answer; NoAnswer if it ends not on a stop token, at the limit or by abortion."""
    try:
        (choice,) = answer["choices"]
        tokens, reason = [*choice["token_ids"]], choice["finish_reason"]
        logps = [*(choice["logprobs"]["token_logprobs"] if tokens else ())]
    except (KeyError, TypeError, ValueError) as error:
        raise NoAnswer(f"a completion without its tokens ({error!r:.200})") from error
    if not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
        raise NoAnswer(f"a completion with tokens that are none of the {vocabulary}")
    if not all(type(logp) in (int, float) and LOGPS[0] < logp <= LOGPS[1] for logp in logps):
        raise NoAnswer("a completion with log-probs that are none")
    ends = [i for i, token in enumerate(tokens) if token in sampling.stop]
    stopped = reason == "stop" and ends == [len(tokens) - 1]
    cut = reason == "length" and not ends and len(tokens) == sampling.max_tokens
    aborted = reason == "abort" and not ends and len(tokens) < sampling.max_tokens
    fits = len(tokens) <= sampling.max_tokens and len(logps) == len(tokens)
    if not (fits and (stopped or cut or aborted)):
        raise NoAnswer(
            f"a completion of {len(tokens)} tokens and {len(logps)} log-probs that ended by {reason!r:.40}"
        )
    return Response(tokens, [float(logp) for logp in logps], stopped, aborted)


def _one_line(text: str | bytes) -> str:
    """The beginning, on a line that is safe to print: a server may send anything."""
    text = text[:1000].decode(errors="replace") if isinstance(text, bytes) else text
    return printable(re.sub(r"\s", " ", text[:300])).strip()


# Asking again, and several at a time.


class Patience:
    """Asks again where no answer comes; a UserError once all `servers` have failed for `seconds`.

    That is counted for each from its first failure since it last `answered`. One that has answered
    nothing while a request had its time is restarted: its engine may hang though its /health is
    good. `retries` is how often something was asked again.
    """

    def __init__(self, servers: Sequence[Server], seconds: float):
        self.seconds, self.retries = seconds, 0
        self.servers = servers
        self._failing_since: dict[Server, float] = {}
        self._answered: dict[Server, float] = {}

    def answered(self, server: Server) -> None:
        """Notes that a server does what it is asked for."""
        self._failing_since.pop(server, None)
        self._answered[server] = time.monotonic()

    def failing(self, server: Server) -> bool:
        """True if it has failed since it last answered."""
        return server in self._failing_since

    async def persist(self, server: Server, attempt: Callable[[Server], Awaitable[T]]) -> T:
        """The result of `attempt(server)`, repeated on NoAnswer."""
        while True:
            try:
                return await attempt(server)
            except NoAnswer as error:
                self.retries += 1
                now, since = time.monotonic(), self._failing_since
                since.setdefault(server, now)
                silent = now - self._answered.get(server, -math.inf)
                if isinstance(error, Late) and silent > error.seconds:
                    server.restart()
                if all(now - since.get(x, now) > self.seconds for x in self.servers):
                    raise UserError(
                        f"{server.url} has failed for {self.seconds:g} s, last by: {error} (its log may say more)"
                    ) from error
            await asyncio.sleep(REST)


@contextlib.asynccontextmanager
async def tasks() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup whose first error comes out by itself, not in a group."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0]  # noqa: B904 (its own cause stays)


def run(work: Coroutine[Any, Any, T], check: Callable[[], None] = lambda: None) -> T:
    """The result of `work`; an exception from `check`, called now and then, or Ctrl-C ends it."""
    future = asyncio.run_coroutine_threadsafe(work, loop("vllm"))
    try:
        while not futures.wait([future], CHECK_SECONDS).done:
            check()
        return future.result()
    finally:
        future.cancel()


# Addresses and keys.


def address(url: str) -> urllib.parse.SplitResult:
    """The parts of a server's URL; a UserError if it is invalid."""
    try:
        parts = urllib.parse.urlsplit(url)
        _ = parts.port, (parts.hostname or "").encode("idna")
        sound = url.isascii() and url.isprintable() and " " not in url and "@" not in parts.netloc
    except ValueError:
        parts, sound = urllib.parse.urlsplit(""), False
    if sound and parts.scheme == "unix" and not parts.netloc and parts.path.startswith("/"):
        if len(os.fsencode(_path(parts))) > SOCKET_PATH:
            raise UserError(
                f"the path of the socket {_path(parts)} is longer than {SOCKET_PATH} bytes: choose a "
                "shorter `memory` in the engine"
            )
    elif not (sound and parts.scheme in ("http", "https") and parts.hostname):
        raise UserError(
            f"{url!r} is no address of a server: write unix:///PATH, http://HOST:PORT or https://HOST:PORT"
        )
    return parts


def _path(parts: urllib.parse.SplitResult) -> str:
    """The path of a socket: in its address it is percent-encoded."""
    return urllib.parse.unquote(parts.path)


def is_private(url: str) -> bool:
    """True if data sent there stays on this machine, or is encrypted."""
    parts = address(url)
    if parts.scheme in ("unix", "https") or parts.hostname == "localhost":
        return True
    try:
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False


def write_key(key: str, path: Path) -> None:
    """Creates a file with the key that only its owner can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(key + "\n")


def read_key(path: Path | None) -> str:
    """The key in a file that only its owner can read (else a UserError), or in VLLM_API_KEY."""
    where, key = str(path or "VLLM_API_KEY"), os.environ.get("VLLM_API_KEY", "")
    if path is not None:
        try:
            # O_NONBLOCK: a pipe in its place would be waited for
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                found = os.fstat(file.fileno())
                content = file.read(1000) if stat.S_ISREG(found.st_mode) else b""
        except OSError as error:
            raise UserError(f"no key in {path}: {error.strerror}") from error
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise UserError(f"the key in {path} is not yours alone: chmod 600 {path}")
        if not (key := content.decode(errors="replace").strip()):
            raise UserError(f"{path} holds no key")
    if key and not (key.isascii() and key.isprintable()):
        raise UserError(f"the key in {where} holds more than letters, digits and signs on one line")
    return key
