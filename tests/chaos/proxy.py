"""Between a trainer and its server: passes requests on, and does to some of them what networks and servers do.

A fault is a function (answer, handler) -> None: it gets the server's answer, (status, bytes), unsent, and the
handler to send something else by. `Proxy.lay(path, first, count, fault)` has it meet `count` requests of a
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

import httpx

from tests.rollouts.fake_vllm import UnixServer

Answer = tuple[int, bytes]
ROLLOUT, EVALUATION, PROBE = "rollout", "evaluation", "probe"  # kinds of completions
RELOAD, LABEL = "/collective_rpc", "/weight_info"
LONG = 40.0  # seconds, more than any answer may take
HUGE = 2**30


class Proxy:
    """Listens at `path` for the server at `upstream` (a URL)."""

    def __init__(self, path: Path, upstream: str, key: str):
        self.path, self.upstream, self.key = path, upstream, key
        self.calls: Counter[str] = Counter()
        self.met = 0
        self._laid: tuple[str, int, int, Callable] | None = None
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.listen()

    def lay(self, path: str, first: int, count: int, fault: Callable) -> None:
        """From now on the count of a path's requests begins anew."""
        with self._lock:
            self.calls.clear()
            self._laid, self.met = (path, first, count, fault), 0

    def lift(self) -> None:
        """No more faults."""
        self._laid = None

    def listen(self) -> None:
        """Opens the socket."""
        self.path.unlink(missing_ok=True)
        proxy = self

        class Handler(_Handler):
            owner = proxy

        UnixServer.daemon_threads = True
        self._http = UnixServer(str(self.path), Handler)
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def vanish(self) -> None:
        """The socket is gone, and every connection."""
        self.path.unlink(missing_ok=True)
        self._http.shutdown()
        self._http.server_close()
        for link in list(self._open):
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def relabel(self, label: str) -> None:
        """Does what another trainer at the server would do last."""
        sent = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        body = json.dumps({"new_version": label}).encode()
        asked(self.upstream, "POST", "/update_weight_version", body, sent)

    def fault_for(self, path: str) -> Callable | None:
        """The fault that this request meets."""
        with self._lock:
            number = self.calls[path]
            self.calls[path] += 1
            if self._laid is None:
                return None
            where, first, count, fault = self._laid
            if path != where or not first <= number < first + count:
                return None
            self.met += 1
            return fault


def asked(url: str, method: str, path: str, content: bytes | None, headers: dict) -> Answer:
    """The answer of the server at a Unix socket; OSError if there is none."""
    transport = httpx.HTTPTransport(uds=url.removeprefix("unix://"))
    try:
        with httpx.Client(transport=transport, timeout=600.0) as client:
            reply = client.request(
                method, f"http://localhost{path}", content=content, headers=headers
            )
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
        path = self.path.split("?")[0]
        if path == "/v1/completions":
            asked = json.loads(body)
            sampled = ROLLOUT if asked["temperature"] else EVALUATION
            path = PROBE if "prompt_logprobs" in asked else sampled
        fault = self.owner.fault_for(path)
        try:
            answer = (200, b"{}") if fault is swallowed else self._ask(body)
            with contextlib.suppress(OSError):
                (fault or plain)(answer, self)
        except OSError:
            self.close_connection = True

    def _ask(self, body) -> Answer:
        names = ("Content-Type", "Authorization")
        sent = {name: self.headers[name] for name in names if self.headers[name]}
        return asked(self.owner.upstream, self.command, self.path, body, sent)

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


swallowed = lambda answer, handler: handler.send(
    *answer
)  # never reaches the server, who would load


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


def not_found(answer: Answer, handler: _Handler) -> None:
    handler.send(404, b'{"message": "no such thing"}')


def internal(answer: Answer, handler: _Handler) -> None:
    handler.send(500, b'{"message": "EngineDeadError"}')


def nonsense(answer: Answer, handler: _Handler) -> None:
    handler.send(200, b"<html>\x00\xff it works </html>")


def torn(answer: Answer, handler: _Handler) -> None:
    handler.send(200, answer[1][: len(answer[1]) // 2], len(answer[1]))
    handler.hang_up()


def huge(answer: Answer, handler: _Handler) -> None:
    handler.send(200, b'{"choices": [', HUGE)
    with contextlib.suppress(OSError):
        for _ in range(HUGE // 2**20):
            handler.wfile.write(b" " * 2**20)
    handler.close_connection = True


def _altered(change: Callable[[dict], None]) -> Callable:
    def fault(answer: Answer, handler: _Handler) -> None:
        status, content = answer
        try:
            found = json.loads(content)
            change(found)
        except (ValueError, KeyError, IndexError):
            pass
        else:
            content = json.dumps(found).encode()
        handler.send(status, content)

    return fault


def _choice(name: str, change: Callable) -> Callable:
    def altered(found: dict) -> None:
        choice = found["choices"][0]
        if name == "logprobs":
            logps = choice["logprobs"]["token_logprobs"]
            choice["logprobs"]["token_logprobs"] = change(logps)
        else:
            choice[name] = change(choice[name])

    return _altered(altered)


strange_tokens = _choice("token_ids", lambda tokens: [*tokens[:-1], 10**6])
other_tokens = _choice("token_ids", lambda tokens: [2 + (token * 7 + 3) % 60 for token in tokens])
fewer_tokens = _choice("token_ids", lambda tokens: tokens[:-1])
nan_logps = _choice("logprobs", lambda logps: [float("nan"), *logps[1:]])
other_logps = _choice("logprobs", lambda logps: [logp - 0.5 for logp in logps])
other_scores = _choice(
    "prompt_logprobs",
    lambda entries: [
        entry and {token: {"logprob": value["logprob"] - 0.5} for token, value in entry.items()}
        for entry in entries
    ],
)
no_choices = _altered(lambda found: found.update(choices=[]))
old_label = _altered(lambda found: found.update(weight_version="deadbeef-1"))
