"""`jaxrl-llm view`: a page on which the tokens of one or several runs can be looked at."""

import http.server
import json
import secrets
import sys
import threading
from pathlib import Path
from typing import Any

from jaxrl_llm import storage
from jaxrl_llm.errors import UserError, flags_at_least
from jaxrl_llm.research import page
from jaxrl_llm.training.folder import RunFolder


def main(
    runs: tuple[str, ...],
    /,
    *,
    out: str = "tokens.html",
    tokens: int = 200_000,
    serve: bool = False,
    port: int = 0,
) -> None:
    """Write a page that shows every token of the responses that runs kept, and their curves.

    Args:
        runs: the folders or URLs of runs.
        out: the page to write, a file or URL; it needs no network and nothing beside it.
        tokens: about how many tokens to show; of a longer run steps evenly apart are shown.
        serve: show it at an address of this machine instead, with new steps as the runs go on.
        port: of that address; 0 takes a free one.
    """
    if not runs:
        raise UserError("view wants the folders of one or several runs")
    flags_at_least(1, tokens=tokens)
    if serve:
        with server(runs, tokens, port) as made:
            print(f"{made.address}   (Ctrl-C ends it)", flush=True)
            made.serve_forever()
    with storage.upload_after(out) as target:
        storage.write(target, page.page(page.gathered(_folders(runs), tokens)))
    print(f"written to {out}: open it in a browser")


def _folders(runs: tuple[str, ...]) -> list[Path]:
    return [RunFolder(run).path for run in runs]


class Server(http.server.ThreadingHTTPServer):
    """Shows the page on loopback to those who know its address."""

    daemon_threads = True
    address: str

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # else a tab was closed
            super().handle_error(request, client_address)


def server(runs: tuple[str, ...], tokens: int, port: int) -> Server:
    """A server of the page of runs; raises a UserError if that cannot be made, or the port is taken."""
    key, alone = f"/{secrets.token_urlsafe(16)}/", threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path not in (key, f"{key}data"):
                self.send_error(404)
                return
            try:
                with alone:  # two threads must not pull the same file from a bucket
                    data = page.gathered(_folders(runs), tokens) | {"live": True}
            except (UserError, OSError) as error:
                self.send_error(503, explain=str(error))  # the status line holds Latin-1 alone
                return
            whole = self.path == key
            body = (page.page(data) if whole else json.dumps(data)).encode()
            kind = "text/html" if whole else "application/json"
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object, **_: object) -> None:
            del args

    page.gathered(_folders(runs), tokens)  # what is wrong is said now
    try:
        made = Server(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:
        raise UserError(f"--port {port}: {error}: choose another") from error
    made.address = f"http://127.0.0.1:{made.server_port}{key}"
    return made
