"""A folder of weights to a server's own host, where that does not see it: file by file, a part at a time.

The parts go the way of all requests, with the key. Each has a time of its own and is sent again if it fails, so
a large model on a slow network takes as long as it takes, and one that stands still is noticed.
"""

import urllib.parse
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrl_llm.rollouts.server import NoAnswer, NoRoute, Server

PART_BYTES = 2**24
Again = Callable[[Callable[[], Any]], Any]


def brought(server: Server, folder: Path, again: Again) -> str:
    """Where a server reads the weights of a folder, which are sent if its host does not see them.

    `again(attempt)` tries what may fail. A server that knows nothing of this is one that sees the folder.
    """
    name = f"{folder.parent.name}-{folder.name}"
    try:
        found = server.post("/weights/find", {"path": str(folder), "name": name}).get("path")
    except NoRoute:
        return str(folder)
    if found is None:
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        for file in sizes:
            _send(server, folder / file, name, again)
        found = server.post("/weights/whole", {"name": name, "sizes": sizes}).get("path")
    if not isinstance(found, str):
        raise NoAnswer("a part of the weights has not come to its host")
    return found


def _send(server: Server, path: Path, name: str, again: Again) -> None:
    """All parts of a file."""
    with path.open("rb") as file:
        offset = 0
        while part := file.read(PART_BYTES):
            asks = {"name": name, "file": path.name, "offset": offset, "sum": zlib.crc32(part)}
            route = f"/weights/part?{urllib.parse.urlencode(asks)}"
            again(lambda route=route, part=part: server.send(route, part))
            offset += len(part)
