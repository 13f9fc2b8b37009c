"""One HTTP connection on which everything is bounded: a request has one deadline, an answer one size.

`http.client` bounds each read of a socket only, so a server that drips a byte a second outlasts any timeout.
"""

import functools
import http.client
import io
import ipaddress
import os
import socket
import ssl
import struct
import time
import urllib.parse
from typing import NamedTuple

from jaxrl_llm.errors import UserError

PIECE = 2**14  # bytes sent under one timeout
LONGEST_PATH = 107  # bytes of a Unix socket's


class Address(NamedTuple):
    """Where a server listens: a `path` of a Unix socket, or a host and port; `prefix` goes before every route."""

    scheme: str
    host: str = ""
    port: int | None = None
    prefix: str = ""
    path: str = ""

    @property
    def private(self) -> bool:
        """Whether what is sent there stays on this machine, or is encrypted."""
        if self.scheme in ("unix", "https") or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def address(url: str) -> Address:
    """The address in a URL: unix:///PATH, http://HOST:PORT or https://HOST:PORT; else a UserError."""
    wrong = UserError(
        f"{url!r} is no address of a server: write unix:///PATH, http://HOST:PORT or https://HOST:PORT"
    )
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")
    except ValueError:
        raise wrong from None
    if not url.isascii() or not url.isprintable() or " " in url:
        raise wrong
    if parts.scheme == "unix" and not host and parts.path.startswith("/"):
        if len(parts.path) > LONGEST_PATH:
            raise UserError(
                f"the path of the socket {parts.path} is longer than {LONGEST_PATH} bytes: choose a "
                "shorter `memory` in the engine"
            )
        return Address("unix", path=parts.path)
    if parts.scheme not in ("http", "https") or not host or "@" in parts.netloc:
        raise wrong
    return Address(parts.scheme, host, port, parts.path.rstrip("/"))


class Link:
    """A connection to an address, which may serve several requests, one after the other."""

    def __init__(self, where: Address):
        self._connection = _Connection(where)

    def exchange(
        self,
        method: str,
        path: str,
        body: str | bytes | None,
        headers: dict[str, str],
        *,
        deadline: float,
        limit: int,
    ) -> tuple[int, bytes]:
        """Status and content of the answer; OSError or HTTPException beyond the deadline or the limit."""
        self._connection.deadline = deadline
        self._connection.request(method, path, body, headers)
        with self._connection.getresponse() as reply:
            content = reply.read(limit + 1)
            if len(content) > limit:
                raise http.client.HTTPException(f"an answer of more than {limit} bytes")
            if reply.length:
                raise http.client.IncompleteRead(content, reply.length)
            return reply.status, content

    def cut(self) -> None:
        """Ends what another thread is doing on it."""
        sock = self._connection.sock
        if sock is not None:
            sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes it."""
        self._connection.close()


class _Connection(http.client.HTTPConnection):
    """A connection whose every operation ends by `deadline`, in the time of `time.monotonic`."""

    deadline = 0.0

    def __init__(self, where: Address):
        default = 443 if where.scheme == "https" else 80
        super().__init__(where.host or "localhost", where.port or default)
        self._where = where

    def connect(self) -> None:
        """Connects; `sock` then is a socket with a deadline."""
        self.sock = _Timed(self._connected(), self)  # pyright: ignore[reportAttributeAccessIssue]

    def _connected(self) -> socket.socket:
        if self._where.scheme == "unix":
            return _unix(self._where.path, left(self.deadline))
        link = socket.create_connection((self.host, self.port), left(self.deadline))
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._where.scheme == "http":
            return link
        link.settimeout(left(self.deadline))
        try:
            return _tls().wrap_socket(link, server_hostname=self.host)
        except BaseException:
            link.close()
            raise


class _Timed:
    """What `http.client` needs of a socket, each operation in what is left of the connection's deadline."""

    def __init__(self, sock: socket.socket, connection: _Connection):
        self._sock, self._connection = sock, connection
        self.shutdown, self.close = sock.shutdown, sock.close

    def sendall(self, data: bytes) -> None:
        """In pieces, because TLS would apply the timeout to each of its records."""
        for start in range(0, len(data), PIECE):
            self._sock.settimeout(left(self._connection.deadline))
            self._sock.sendall(data[start : start + PIECE])

    def makefile(self, mode: str) -> io.BufferedReader:
        """To read bytes from; the socket stays open until this is closed too."""
        del mode
        return io.BufferedReader(_Reader(self._sock, self._connection))


class _Reader(io.RawIOBase):
    """The bytes that come from a socket."""

    def __init__(self, sock: socket.socket, connection: _Connection):
        self._sock, self._connection = sock, connection
        self._bytes = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer) -> int | None:
        """What has come, at least one byte; 0 bytes at the end."""
        self._sock.settimeout(left(self._connection.deadline))
        return self._bytes.readinto(buffer)

    def close(self) -> None:
        """Closes the socket if that was asked for."""
        self._bytes.close()
        super().close()


def left(deadline: float) -> float:
    """Seconds until then; a TimeoutError if there are none."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("the time for an answer is over")
    return seconds


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _unix(path: str, seconds: float) -> socket.socket:
    """A connection to a Unix socket, if it is ours (or root's) who listens there."""
    link = socket.socket(socket.AF_UNIX)
    try:
        link.settimeout(seconds)
        link.connect(path)
        size = struct.calcsize("3i")
        _, owner, _ = struct.unpack(
            "3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        )
        if owner not in (0, os.geteuid()):
            raise UserError(f"user {owner} listens on {path}, and not you: its place was taken")
    except BaseException:
        link.close()
        raise
    return link
