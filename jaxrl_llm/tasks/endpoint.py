"""An HTTP server on the loopback interface, whose clients are told apart by their keys."""

import asyncio
import hmac
import json
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from http import HTTPStatus
from typing import Any

from jaxrl_llm.background import loop, once

LONGEST = 8 << 20  # bytes of a request's body
_HEAD = 1 << 16  # bytes of what comes before it
_SECONDS = 60.0  # in which a request has to come, after the one before it too
_LINGER = 1.0  # seconds in which a client that still sends can read why it is refused
Answer = Callable[[str, Any], Awaitable[tuple[str, str]]]  # path and JSON; type and body


class RefusedError(Exception):
    """A request that is answered by a status and a message."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Endpoint:
    """Answers `POST /v1/...` of JSON by the function of the request's key.

    It works in the event loop "environments", where `answers` are called.
    """

    def __init__(self) -> None:
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        self._secret = secrets.token_bytes(32)
        self.answers: dict[str, Answer] = {}  # by key
        serving = asyncio.start_server(self._serve, sock=listening, limit=_HEAD)
        self._server = asyncio.run_coroutine_threadsafe(serving, loop("environments"))

    def new_key(self) -> str:
        """A key that is known as one of ours also when nobody answers it any more."""
        name = secrets.token_hex(16)
        return f"{name}-{hmac.digest(self._secret, name.encode(), 'sha256').hex()}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the requests of a connection, one after the other."""
        broken = (OSError, EOFError, ValueError, asyncio.LimitOverrunError)  # or it is too slow
        with suppress(*broken), closing(writer):
            goes_on = True
            while goes_on:
                kind, status = "application/json", 200
                try:
                    async with asyncio.timeout(_SECONDS):
                        method, path, key, body = await _request(reader)
                    kind, reply = await self._answer(method, path, key, body)
                except RefusedError as error:
                    status, goes_on = error.status, error.status not in (411, 413)
                    what = {"message": str(error), "type": HTTPStatus(status).phrase}
                    reply = json.dumps({"error": {**what, "code": status, "param": None}})
                head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {kind}\r\n"
                head += "" if goes_on else "Connection: close\r\n"
                content = reply.encode()
                writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
                await writer.drain()
            writer.write_eof()
            await asyncio.sleep(_LINGER)

    async def _answer(self, method: str, path: str, key: str, body: bytes) -> tuple[str, str]:
        name, _, proof = key.partition("-")
        expected = hmac.digest(self._secret, name.encode(), "sha256").hex()
        if not hmac.compare_digest(proof.encode(), expected.encode()):
            raise RefusedError(401, "a wrong key, or none: it is in OPENAI_API_KEY")
        if key not in self.answers:
            raise RefusedError(410, "the episode is over")
        if (method, path) == ("GET", "/v1/models"):
            models = [{"id": "policy", "object": "model", "created": 0, "owned_by": "this run"}]
            return "application/json", json.dumps({"object": "list", "data": models})
        if method != "POST" or path not in ("/v1/chat/completions", "/v1/completions"):
            raise RefusedError(
                404, "there are /v1/chat/completions, /v1/completions and /v1/models"
            )
        try:
            request = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RefusedError(400, "the body is no JSON") from error
        return await self.answers[key](path, request)


async def _request(reader: asyncio.StreamReader) -> tuple[str, str, str, bytes]:
    """Method, path, key and body of the next request; a ValueError if it is none."""
    first, *fields = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ")
    pairs = (field.partition(":") for field in fields)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    if "transfer-encoding" in headers:
        raise RefusedError(411, "a request has to say its Content-Length")
    if (length := int(headers.get("content-length", 0))) > LONGEST:
        raise RefusedError(413, f"the body has {length} bytes, the limit is {LONGEST}")
    body = await reader.readexactly(length)
    key = headers.get("authorization", "").removeprefix("Bearer ")
    return method, target.partition("?")[0], key, body


@once
def endpoint() -> Endpoint:
    """The endpoint of this process, made when it is first asked for."""
    return Endpoint()
