"""Middleware for vLLM, which protects only /v1 by itself: no path but /health answers without the key.

It passes weights that come over the network to their receiver. It runs in the server's own environment, so it
imports nothing of this package but what lies beside it there.
"""

import hmac
import importlib
import os


class Guard:
    """An ASGI application before another one; the key is the environment's VLLM_API_KEY."""

    def __init__(self, app):
        self.app = app
        self.expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()
        self.receiver = importlib.import_module("receiver").Receiver(os.environ["JAXRL_WEIGHTS"])

    async def __call__(self, scope, receive, send):
        """Passes on what carries the key, and refuses the rest with 401."""
        public = scope["type"] not in ("http", "websocket") or scope["path"] == "/health"
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if public or hmac.compare_digest(given, self.expected):
            carried = scope["type"] == "http" and scope["path"].startswith("/weights/")
            await (self.receiver if carried else self.app)(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            head = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": head})
            await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})
