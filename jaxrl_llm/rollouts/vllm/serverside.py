"""Code that runs beside and in a vLLM server, not in the trainer: standard library only.

The keeper, a process between trainer and server (`python serverside.py PARENT FOLDER COMMAND...`),
ends the server and all its processes however the trainer ends, kill -9 included: vLLM's engine and
workers would live on and hold the GPU's memory. In the server, the guard is middleware: vLLM asks
for its key under /v1 only, and would load weights for anybody. Behind the guard, the receiver takes
weights that come over the network.
"""

import contextlib
import errno
import hmac
import json
import os
import pathlib
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
import zlib

GRACE = 10.0  # seconds for a server to end by itself
POLL = 0.2
HEIR = "trap '' TERM INT HUP; read _; kill -9 0"  # its input ends when the keeper does


def keep(parent, folder, command):
    """Runs a command until it ends, standard input closes, or the parent ends; then ends its group.

    (The parent is checked too because its forks may hold the input open.) If the parent is gone,
    the folder is deleted. If this process is killed itself, a shell in the group, which waits for
    that alone, kills the rest.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # may go to a whole job; the trainer decides
    heir = subprocess.Popen(["/bin/sh", "-c", HEIR], stdin=subprocess.PIPE)  # noqa: S603
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)  # noqa: S603
    while server.poll() is None and os.getppid() == parent:
        if select.select([sys.stdin], [], [], POLL)[0]:
            break
    os.killpg(0, signal.SIGTERM)
    # The last process to end frees vLLM's shared memory (400 MB), so all get time to do so.
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline and not living() <= {os.getpid(), heir.pid}:
        server.poll()
        time.sleep(POLL)
    if os.getppid() != parent:
        shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)  # whoever is left of the group, and this process


def living():
    """The process ids of this group that are alive, as far as /proc tells."""
    found = set()
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(
            OSError, ValueError
        ):  # it has just ended: no file, or an empty one
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
            if int(group) == os.getpgrp() and state != "Z":
                found.add(int(path.parent.name))
    return found


class Guard:
    """ASGI middleware: only /health answers without the key."""

    def __init__(self, app):
        self.app, self.receiver = app, Receiver(os.environ["JAXRL_WEIGHTS"])
        self.expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope, receive, send):
        """Passes on requests with the key, and refuses the rest with 401."""
        public = scope["type"] not in ("http", "websocket") or scope["path"] == "/health"
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if public or hmac.compare_digest(given, self.expected):
            weights = scope["type"] == "http" and scope["path"].startswith("/weights/")
            await (self.receiver if weights else self.app)(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await answer(send, 401, {"error": "Unauthorized"})


class Refused(Exception):  # noqa: N818
    """A request that would fail again if repeated."""


class Receiver:
    """An ASGI application that stores weights in a folder of its host, only the newest.

        POST /weights/find {"name", "path", "sizes"} -> {"path": where they are read here, or null}
        PUT /weights/file?name=&file= with bytes -> {"checksum": crc32 of the bytes}

    Each may be repeated; only a piece of a file is in memory at a time.
    """

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)

    async def __call__(self, scope, receive, send):
        """Answers one request."""
        try:
            if scope["path"].endswith("/file"):
                query = dict(urllib.parse.parse_qsl(scope["query_string"].decode()))
                said = {"checksum": await self._write(query, pieces(receive))}
            else:
                body = b"".join([piece async for piece in pieces(receive, limit=2**20)])
                said = {"path": self._find(json.loads(body))}
            status = 200
        except (Refused, KeyError, ValueError) as error:
            status, said = 400, {"error": f"not a request for weights: {error}"}
        except OSError as error:
            status = 413 if error.errno in (errno.ENOSPC, errno.EDQUOT) else 500
            said = {"error": f"{self.folder} on the server's host: {error.strerror}"}
        await answer(send, status, said)

    def _find(self, asked):
        """The trainer's folder if this host sees it, else a copy, ours or of a server beside us."""
        whole, partial = self._folders(asked["name"])
        if partial.is_dir() and asked["sizes"] == {
            path.name: path.stat().st_size for path in partial.iterdir()
        }:
            partial.rename(whole)
        copies = self.folder.parent.glob(f"*{self.folder.suffix}/{whole.name}")
        for folder in (pathlib.Path(asked["path"]), *sorted(copies)):
            if os.access(folder / "config.json", os.R_OK):
                return str(folder)
        return None

    async def _write(self, asked, body):
        """Writes a file and returns its crc32; new weights delete the old ones first."""
        if not re.fullmatch(r"config\.json|model-\d{5}\.safetensors", asked["file"]):
            raise Refused("no such file in a folder of weights")
        _, partial = self._folders(asked["name"])
        if not partial.is_dir():
            shutil.rmtree(self.folder, ignore_errors=True)
            partial.mkdir(0o700, parents=True)
        checksum = 0
        with (partial / asked["file"]).open("wb") as file:
            async for piece in body:
                checksum = zlib.crc32(piece, checksum)
                file.write(piece)
        return checksum

    def _folders(self, name):
        """The folder of complete weights of this name, and of those still arriving."""
        if not re.fullmatch(r"[\w-]{1,100}", name):
            raise Refused("no name of weights")
        return self.folder / name, self.folder / f"partial-{name}"


async def pieces(receive, limit=None):
    """The body of a request, piece by piece; Refused beyond `limit` bytes."""
    more, size = True, 0
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused("the trainer went away")
        more, piece = message.get("more_body", False), message.get("body", b"")
        size += len(piece)
        if limit is not None and size > limit:
            raise Refused("too long")
        yield piece


async def answer(send, status, content):
    """Sends a JSON response."""
    head = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})


if __name__ == "__main__":
    keep(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
