"""What a server does with weights that come over the network: parts of files go into a folder of its own host.

    POST /weights/find {"name", "path"}                 {"path": where this host reads these weights, or null}
    POST /weights/part?name=&file=&offset=&sum= (bytes) {}
    POST /weights/whole {"name", "sizes"}               {"path": that of the folder, null if parts are missing}

Each may be repeated, and no more than a piece of a part is in memory. It stands behind the guard in the server's
own environment, so it imports nothing of this package.
"""

import errno
import json
import os
import re
import shutil
import urllib.parse
import zlib

NAME, FILE = re.compile(r"[\w-]{1,100}"), re.compile(r"config\.json|model-\d{5}\.safetensors")
QUESTION = 2**20  # bytes that a question may have
FULL = (errno.ENOSPC, errno.EDQUOT)


class Refused(Exception):  # noqa: N818
    """An answer of another status than 200."""

    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class Receiver:
    """An ASGI application for the routes; complete weights are folders in `folder`, of which the newest stays."""

    def __init__(self, folder):
        self.folder = folder

    async def __call__(self, scope, receive, send):
        """Answers one request."""
        try:
            status, answer = 200, await self._answer(scope, receive)
        except Refused as refused:
            status, answer = refused.status, {"error": str(refused)}
        except OSError as error:
            status = 413 if error.errno in FULL else 500
            answer = {"error": f"{self.folder} on the server's host: {error.strerror}"}
        head = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    async def _answer(self, scope, receive):
        route = scope["path"].rpartition("/")[2]
        if route == "part":
            asked = dict(urllib.parse.parse_qsl(scope["query_string"].decode()))
            await self._part(asked, pieces(receive))
            return {}
        if route not in ("find", "whole"):
            raise Refused(404, "no such route")
        body = b""
        async for piece in pieces(receive):
            body += piece
            if len(body) > QUESTION:
                raise Refused(413, "a question of that length")
        asked = json.loads(body)
        return {"path": (self._find if route == "find" else self._whole)(asked)}

    def _find(self, asked):
        """The folder as the trainer names it, if this host has it too; else the copy that came here, or beside."""
        name = os.path.basename(self._at(asked["name"]))
        copies = [os.path.join(copy, name) for copy in sorted(siblings(self.folder))]
        for folder in (asked["path"], *copies):
            if os.access(os.path.join(folder, "config.json"), os.R_OK):
                return folder
        return None

    async def _part(self, asked, body):
        """Writes a part where it belongs; what came before these weights goes first."""
        if not FILE.fullmatch(asked["file"]):
            raise Refused(400, "no such file in a folder of weights")
        partial = self._at(asked["name"], "partial-")
        if not os.path.isdir(partial):
            shutil.rmtree(self.folder, ignore_errors=True)
            os.makedirs(partial, 0o700)
        offset, found = int(asked["offset"]), 0
        file = os.open(os.path.join(partial, asked["file"]), os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            async for piece in body:
                found = zlib.crc32(piece, found)
                while piece:
                    written = os.pwrite(file, piece, offset)
                    offset, piece = offset + written, piece[written:]
        finally:
            os.close(file)
        if found != int(asked["sum"]):
            raise Refused(503, "a part arrived otherwise than it was sent")

    def _whole(self, asked):
        """The folder, if all files have come with all of their bytes."""
        folder, partial = self._at(asked["name"]), self._at(asked["name"], "partial-")
        if os.path.isdir(partial):
            there = {entry.name: entry.stat().st_size for entry in os.scandir(partial)}
            if there == asked["sizes"]:
                os.rename(partial, folder)
        return folder if os.path.isdir(folder) else None

    def _at(self, name, prefix=""):
        if not NAME.fullmatch(name):
            raise Refused(400, "no name of weights")
        return os.path.join(self.folder, prefix + name)


def siblings(folder):
    """The folders of the servers that share this one's."""
    parent, suffix = os.path.dirname(folder), os.path.splitext(folder)[1]
    return [entry.path for entry in os.scandir(parent) if entry.name.endswith(suffix)]


async def pieces(receive):
    """The body of a request as it comes."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused(400, "the trainer went away")
        more = message.get("more_body", False)
        yield message.get("body", b"")
