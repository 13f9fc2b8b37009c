"""A stand-in on loopback for servers that tasks ask: judges, searches, receivers."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LATE = 299  # the status of an answer that takes a second


class Server(ThreadingHTTPServer):
    """`answers` are given in turn, the last for good: `(status, text)`, or what `answer` makes that of.

    `answer` is called with one of the others and the request's body; `asked` are paths, keys and bodies.
    """

    def __init__(self, *answers, answer=None, port=0):
        super().__init__(("127.0.0.1", port), _Handler)
        self.answer = answer
        self.url, self.asked, self.answers = f"http://127.0.0.1:{self.server_port}", [], [*answers]
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, self.headers.get("Authorization"), body))
        answers = self.server.answers
        given = answers.pop(0) if len(answers) > 1 else answers[0]
        status, text = given if isinstance(given, tuple) else self.server.answer(given, body)
        time.sleep(status == LATE)
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        if status == 429:
            self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass
