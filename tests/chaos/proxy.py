"""Between a trainer and its server: passes requests on, and does to some of them what networks and servers do.

A lie is a function (answer, handler) -> None: it gets the server's answer, (status, bytes), unsent, and the
handler to send something else by. `Proxy.lay(kind, first, count, lie)` has it meet `count` requests of a
kind from the `first` on.
"""

import contextlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx

from jaxrl_llm.rollouts.vllm.serverside import EXTENSION
from tests.rollouts.fake_vllm import UnixServer

Answer = tuple[int, bytes]
Lie = Callable[[Answer, Any], None]
ROLLOUT, EVALUATION, PROBE = "rollout", "evaluation", "probe"  # kinds of completions
RELOAD, LABEL = "/collective_rpc", "/weight_info"
COMPLETIONS = (ROLLOUT, EVALUATION)
REQUESTS = (*COMPLETIONS, PROBE, LABEL, RELOAD)
LONG = 40.0  # seconds, more than any answer may take
HUGE = 2**30


class Proxy:
    """Listens at `path` for the server at the Unix socket `upstream`."""

    def __init__(self, path: Path, upstream: Path, key: str):
        self.path, self.key = path, key
        self.calls: Counter[str] = Counter()
        self.met = 0
        self._laid: tuple[str, int, int, Lie] | None = None
        self._lock, self._open = threading.Lock(), set[socket.socket]()
        transport = httpx.HTTPTransport(uds=str(upstream))
        self._server = httpx.Client(transport=transport, timeout=600.0, base_url="http://localhost")
        self.listen()

    def lay(self, kind: str, first: int, count: int, lie: Lie) -> None:
        """From now on the count of a kind's requests begins anew."""
        with self._lock:
            self.calls.clear()
            self._laid, self.met = (kind, first, count, lie), 0

    def lift(self) -> None:
        """No more lies."""
        self._laid = None

    def listen(self) -> None:
        """Opens the socket."""
        self.path.unlink(missing_ok=True)
        UnixServer.daemon_threads = True
        handler = type("Handler", (_Handler,), {"owner": self})
        self._http = UnixServer(str(self.path), handler)
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def vanish(self) -> None:
        """The socket is gone, and every connection."""
        self.path.unlink(missing_ok=True)
        self._http.shutdown()
        self._http.server_close()
        for link in list(self._open):
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends it, and its own connections to the server."""
        self.vanish()
        self._server.close()

    def relabel(self, label: str) -> None:
        """Does what another trainer at the server would do last."""
        sent = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        self.ask("POST", "/update_weight_version", json.dumps({"new_version": label}), sent)

    def lie_for(self, kind: str) -> Lie | None:
        """The lie that this request meets."""
        with self._lock:
            number = self.calls[kind]
            self.calls[kind] += 1
            where, first, count, lie = self._laid or ("", 0, 0, plain)
            if kind != where or not first <= number < first + count:
                return None
            self.met += 1
            return lie

    def ask(self, method: str, path: str, body: str | None, headers: dict[str, str]) -> Answer:
        """The answer of the server; OSError if there is none."""
        try:
            reply = self._server.request(method, path, content=body, headers=headers)
            return reply.status_code, reply.content
        except httpx.HTTPError as error:
            raise ConnectionError(str(error)) from error


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: Proxy

    def address_string(self):
        return "trainer"

    def log_message(self, *args):
        del args

    def setup(self):
        super().setup()
        self.owner._open.add(self.connection)

    def finish(self):
        self.owner._open.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def do_GET(self):
        self._pass_on(None)

    def do_POST(self):
        size = int(self.headers.get("Content-Length") or 0)
        self._pass_on(self.rfile.read(size).decode())

    def _pass_on(self, body):
        kind = self.path.split("?")[0]
        if kind == "/v1/completions":
            asked = json.loads(body)
            sampled = ROLLOUT if asked["temperature"] else EVALUATION
            kind = PROBE if "prompt_logprobs" in asked else sampled
        elif kind == EXTENSION and "jaxrl_reload" in body:
            kind = RELOAD
        lie, names = self.owner.lie_for(kind), ("Content-Type", "Authorization")
        sent = {name: self.headers[name] for name in names if self.headers[name]}
        try:
            answer = (200, b"{}")
            if lie is not swallowed:
                answer = self.owner.ask(self.command, self.path, body, sent)
            with contextlib.suppress(OSError):
                (lie or plain)(answer, self)
        except OSError:
            self.close_connection = True

    def send(self, status: int, content: bytes, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content)

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


def plain(answer: Answer, handler: _Handler) -> None:
    handler.send(*answer)


def swallowed(answer: Answer, handler: _Handler) -> None:
    """Never reaches the server, who would load."""
    handler.send(*answer)


def hang(answer: Answer, handler: _Handler) -> None:
    time.sleep(LONG)
    handler.hang_up()


def drip(answer: Answer, handler: _Handler) -> None:
    handler.send(200, b"", len(answer[1]))
    for i in range(int(LONG)):
        handler.wfile.write(answer[1][i : i + 1])
        time.sleep(1.0)
    handler.hang_up()


def reset(answer: Answer, handler: _Handler) -> None:
    handler.hang_up()


def _instead(status: int, content: bytes) -> Lie:
    return lambda answer, handler: handler.send(status, content)


not_found = _instead(404, b'{"message": "no such thing"}')
internal = _instead(500, b'{"message": "EngineDeadError"}')
nonsense = _instead(200, b"<html>\x00\xff it works </html>")


def torn(answer: Answer, handler: _Handler) -> None:
    handler.send(200, answer[1][: len(answer[1]) // 2], len(answer[1]))
    handler.hang_up()


def huge(answer: Answer, handler: _Handler) -> None:
    handler.send(200, b'{"choices": [', HUGE)
    with contextlib.suppress(OSError):
        for _ in range(HUGE // 2**20):
            handler.wfile.write(b" " * 2**20)
    handler.close_connection = True


def _altered(change: Callable[[dict], object]) -> Lie:
    def lie(answer: Answer, handler: _Handler) -> None:
        status, content = answer
        if status == 200:
            change(found := json.loads(content))
            content = json.dumps(found).encode()
        handler.send(status, content)

    return lie


def _choice(*names: str, change: Callable) -> Lie:
    def altered(found: dict) -> None:
        *path, last = names
        inside = found["choices"][0]
        for name in path:
            inside = inside[name]
        inside[last] = change(inside[last])

    return _altered(altered)


def _lower(entry):
    return entry and {token: {"logprob": v["logprob"] - 0.5} for token, v in entry.items()}


LOGPS = ("logprobs", "token_logprobs")
strange_tokens = _choice("token_ids", change=lambda tokens: [*tokens[:-1], 10**6])
other_tokens = _choice("token_ids", change=lambda tokens: [2 + (t * 7 + 3) % 60 for t in tokens])
fewer_tokens = _choice("token_ids", change=lambda tokens: tokens[:-1])
nan_logps = _choice(*LOGPS, change=lambda logps: [float("nan"), *logps[1:]])
other_logps = _choice(*LOGPS, change=lambda logps: [logp - 0.5 for logp in logps])
other_scores = _choice("prompt_logprobs", change=lambda entries: [*map(_lower, entries)])
no_choices = _altered(lambda found: found.update(choices=[]))
old_label = _altered(lambda found: found.update(weight_version="deadbeef-1"))
