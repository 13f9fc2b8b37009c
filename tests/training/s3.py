"""A server for s3:// on this machine, and a wire to it that can be cut.

`python -m tests.training.s3 PORT` serves, one request at a time: as in the real one nothing comes between looking
whether an object is there and making it.
"""

import contextlib
import io
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator

from tests.training.process import ROOT, port

BUCKET = "bucket"


@contextlib.contextmanager
def served() -> Iterator[int]:
    """The port of a server with an empty bucket."""
    number = port()
    command = [sys.executable, "-W", "ignore", "-m", "tests.training.s3", str(number)]
    quiet = {"cwd": ROOT, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=clean(), **quiet) as server:
        try:
            made = urllib.request.Request(f"http://127.0.0.1:{number}/{BUCKET}", method="PUT")
            until = time.monotonic() + 300
            while True:
                try:
                    urllib.request.urlopen(made, timeout=100).close()
                    break
                except OSError:
                    assert server.poll() is None
                    assert time.monotonic() < until
                    time.sleep(0.1)
            yield number
        finally:
            server.kill()


def clean() -> dict[str, str]:
    """The environment without anybody's credentials."""
    return {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}


def credentials(port: int) -> dict[str, str]:
    """What the environment of a user of the server at a port says."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


class Wire:
    """Passes bytes on between a port of its own and that of a server, until it is cut."""

    def __init__(self, upstream: int):
        self._upstream, self._open = upstream, set[socket.socket]()
        self._whole, self._fatal = True, b""
        self.met = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Breaks what is under way; from now on who connects hears nothing."""
        self._whole = False
        for end in list(self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut_at(self, words: bytes) -> None:
        """Is cut as soon as these words come by, which do not arrive; `met` says so."""
        self._fatal = words

    def mend(self) -> None:
        """Passes on again."""
        self._whole = True

    def close(self) -> None:
        """Ends it."""
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                here = self._listener.accept()[0]
            except OSError:
                return
            if not self._whole:
                here.close()
                continue
            there = socket.create_connection(("127.0.0.1", self._upstream))
            threading.Thread(target=self._pass_on, args=(here, there), daemon=True).start()

    def _pass_on(self, here: socket.socket, there: socket.socket) -> None:
        self._open |= {here, there}
        with here, there, selectors.DefaultSelector() as ready, contextlib.suppress(OSError):
            ready.register(here, selectors.EVENT_READ, there)
            ready.register(there, selectors.EVENT_READ, here)
            while True:
                for key, _ in ready.select():
                    content = key.fileobj.recv(1 << 16)
                    if self._fatal and self._fatal in content:
                        self._fatal = b""
                        self.cut()
                        self.met.set()
                    if not content or not self._whole:
                        return
                    key.data.sendall(content)
        self._open -= {here, there}


def main(port: int) -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import run_simple
    from werkzeug.wsgi import get_input_stream

    inner, alone = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def application(environ, start_response):
        body = get_input_stream(environ).read()  # one that stands still holds up nobody else
        environ |= {"wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        with alone:
            return list(inner(environ, start_response))

    run_simple("127.0.0.1", port, application, threaded=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
