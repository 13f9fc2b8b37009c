"""A stand-in for vLLM without torch: its routes, a model that fits in a line, and faults on request.

`python fake_vllm.py --uds PATH --model FOLDER ...` is a process like the real one; `Fake` runs inside a test.
"""

import argparse
import base64
import contextlib
import io
import json
import os
import pathlib
import socket
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

LOGP = -1.5


def tokens_of(prompt, seed, count):
    """The response: a function of the prompt and the seed."""
    return [(seed + sum(prompt) + i) % 50 for i in range(count)]


class UnixServer(ThreadingHTTPServer):
    """The same on a Unix socket."""

    address_family = socket.AF_UNIX

    def server_bind(self):
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = "localhost", 0


class Fake:
    """`fault(path, body, number)` runs before each route: it may sleep, answer (status, bytes) instead, change
    the server's label to the string that it returns, or raise ConnectionError to hang up.

    `received(path, query, body)` answers in the place of a receiver of weights.
    No response ends before `met` have been at work at once.
    """

    def __init__(
        self, *, port=0, path=None, key="key", fault=None, received=None, logp=LOGP, seconds=0.0
    ):
        self.key, self.fault, self.logp, self.seconds = key, fault, logp, seconds
        if received is not None:
            self.received = received
        self.label = "default"
        self.calls, self.bodies, self.loaded = Counter(), [], []
        self.pace, self.sampled = 0.0, []  # seconds a token; prompts and tokens of parts
        self.at_work, self.most, self.met = 0, 0, 0  # responses; the most of them at once
        self._pausing, self._pauses, self._paused = threading.Condition(), 0, False
        self._open, self._lock, self._dead = set(), threading.Lock(), False
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # an answer in one piece, or the kernel waits for the first to arrive

            def address_string(self):
                return "somebody"

            def log_message(self, *args):
                del args

            def setup(self):
                super().setup()
                with fake._lock:
                    fake._open.add(self.connection)
                    if fake._dead:
                        fake.cut()

            def do_GET(self):
                self.reply({})

            def do_POST(self):
                content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                weights = self.path.startswith("/weights/")
                self.reply(content if weights else json.loads(content or b"{}"))

            def do_PUT(self):
                if "Content-Length" in self.headers:
                    return self.do_POST()
                pieces = []
                while size := int(self.rfile.readline(), 16):
                    pieces.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return self.reply(b"".join(pieces))

            def reply(self, body):
                path = self.path.split("?")[0]
                key, query = self.headers.get("Authorization"), self.path.partition("?")[2]
                with fake._lock:
                    fake.calls[path] += 1
                    number = fake.calls[path]
                try:
                    status, content = fake.answer(path, body, key, query, number)
                except ConnectionError:
                    self.connection.close()
                    self.close_connection = True
                    return
                with contextlib.suppress(OSError):  # whoever asked may be gone
                    self.send_response(status)
                    if status == 302:
                        self.send_header("Location", content.decode())
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)
                    self.wfile.flush()

        ThreadingHTTPServer.daemon_threads = True
        if path is None:
            self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
            self.port = self.http.server_address[1]
            self.url = f"http://127.0.0.1:{self.port}"
        else:
            self.http = UnixServer(str(path), Handler)
            self.url = f"unix://{path}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.die()

    def die(self):
        """Stops listening and cuts every connection."""
        self.http.shutdown()
        self.http.server_close()
        with self._lock:
            self._dead = True
            self.cut()

    def cut(self):
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(2)

    def answer(self, path, body, authorization, query, number):
        if authorization != f"Bearer {self.key}" and path != "/health":
            return 401, b'{"error": "Unauthorized"}'
        instead = self.fault and self.fault(path, body, number)
        if isinstance(instead, str):
            self.label = instead
        elif instead:
            return instead
        if path.startswith("/weights/"):
            return self.received(path, query, body)
        return 200, json.dumps(self.route(path, body)).encode()

    def received(self, path, query, body):
        """Weights over the network: it knows nothing of that, as a server without our guard."""
        return 404, b'{"detail": "Not Found"}'

    def route(self, path, body):
        if path == "/weight_info":
            return {"weight_version": self.label}
        if path == "/update_weight_version":
            self.label = body["new_version"]
        if path == "/collective_rpc":
            self.loaded.append(body["kwargs"]["weights_path"])
        if path == "/reset_prefix_cache":
            return {"success": True}
        if path == "/v1/completions":
            self.bodies.append(body)
            time.sleep(self.seconds)
            whole = completion(body, self.logp)
            return whole if "prompt_logprobs" in body else self.sample(body, whole)
        if path == "/inference/v1/generate":
            asked = body["sampling_params"] | {"prompt": body["token_ids"]}
            self.bodies.append(asked)
            return as_generated(self.sample(asked, completion(asked, self.logp)), asked["prompt"])
        if path in ("/pause", "/resume"):
            with self._pausing:
                self._paused = path == "/pause"
                self._pauses += self._paused
                self._pausing.notify_all()
        return {}

    def sample(self, body, whole):
        """The completion in its time; as far as it is, if the server is paused meanwhile."""
        [choice] = whole["choices"]
        with self._pausing:
            self._pausing.wait_for(lambda: not self._paused)
            self.at_work += 1
            self.most = max(self.most, self.at_work)
            self._pausing.notify_all()
            self._pausing.wait_for(lambda: self.most >= self.met, 120)
            pauses, begun = self._pauses, time.monotonic()
            seconds = self.pace * len(choice["token_ids"])
            if seconds and self._pausing.wait_for(lambda: self._pauses > pauses, seconds):
                size = min(
                    int((time.monotonic() - begun) / self.pace), len(choice["token_ids"]) - 1
                )
                choice["token_ids"] = choice["token_ids"][:size]
                choice["logprobs"] = {"token_logprobs": [self.logp] * size} if size else None
                choice["finish_reason"] = "abort"
            self.at_work -= 1
            part = (*body["prompt"],), body["seed"], len(choice["token_ids"])
            self.sampled.append(part)
        return whole


def completion(body, logp=LOGP):
    """What vLLM answers."""
    prompt, stop = body["prompt"], body.get("stop_token_ids", [])
    tokens = tokens_of(prompt, body.get("seed", 0), body["max_tokens"])
    ends = [i for i, token in enumerate(tokens) if token in stop]
    tokens = tokens[: ends[0] + 1] if ends else tokens
    choice = {
        "token_ids": tokens,
        "logprobs": {"token_logprobs": [logp] * len(tokens)},
        "finish_reason": "stop" if ends else "length",
        "stop_reason": tokens[-1] if ends else None,
        "prompt_logprobs": [None, *({str(t): {"logprob": logp}} for t in prompt[1:])],
    }
    return {"choices": [choice]}


def experts_of(tokens):
    """Two of each token in three layers: a function of the token."""
    return np.asarray([[[t % 7, 7]] * 3 for t in tokens], np.uint8)


def as_generated(answer, prompt):
    """What vLLM answers where tokens are asked for with the experts they were sent to."""
    [choice] = answer["choices"]
    tokens, logps = choice["token_ids"], choice["logprobs"]
    each = zip(tokens, logps["token_logprobs"] if logps else (), strict=True)
    content = [{"token_id": t, "logprob": x, "top_logprobs": []} for t, x in each]
    written = io.BytesIO()
    np.save(written, experts_of([*prompt, *tokens][:-1]), allow_pickle=False)
    encoded = base64.b64encode(written.getvalue()).decode() if tokens else None
    more = {"logprobs": {"content": content}, "routed_experts": encoded}
    return {"choices": [choice | more]}


if __name__ == "__main__":
    if os.environ.get("FAKE_FAILS"):
        sys.exit("RuntimeError: no such model\nRuntimeError: Failed. See root cause above.")
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds")
    parser.add_argument("--model", type=pathlib.Path)
    known, _ = parser.parse_known_args()
    assert (known.model / "config.json").exists()
    hangs = pathlib.Path(os.environ.get("FAKE_HANGS", "/nonexistent"))
    healthy = ("/health",) if os.environ.get("FAKE_HEALTHY") else ()

    def answer(path, *_):
        if hangs.exists() and path not in healthy:
            time.sleep(600)
        if path == "/health" and "FAKE_SEEN" in os.environ:
            pathlib.Path(os.environ["FAKE_SEEN"]).touch()
        if "FAKE_CRASHES" in os.environ:
            print("RuntimeError: no such head", flush=True)
            threading.Timer(1.0, os._exit, (0,)).start()

    Fake(path=known.uds, key=os.environ["VLLM_API_KEY"], fault=answer)
    time.sleep(600)
