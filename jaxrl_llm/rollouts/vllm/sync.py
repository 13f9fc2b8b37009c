"""New weights to running servers.

A folder in memory-backed storage is written first, while the servers go on with the old one; then
each is paused, loads it, clears its prefix cache, resumes and gets the new label. A server whose
host does not see the folder is sent its files. HTTP 200 proves nothing, so every sync is followed
by a proof (proof.py).
"""

import asyncio
import errno
import itertools
import json
import os
import shutil
import time
import urllib.parse
import zlib
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollouts.vllm.client import NoAnswer, NoRoute, Server, together

SHARD_BYTES = 2**28  # of a file of weights
PIECE_BYTES = 2**18  # of a file, in memory at a time while it is sent
COMPARED = 2**22  # numbers compared at a time
RETRY = 0.5  # seconds between attempts

T = TypeVar("T")
Tensors = Iterable[tuple[str, np.ndarray]]


@dataclass(frozen=True)
class Report:
    """The cost of a sync: bytes, and seconds of each phase; `gather` brings tensors to the host.

    `difference` is the proof's largest, in nats; `changed` is the share of numbers that differ from
    the previous sync (1 at the first).
    """

    bytes: int = 0
    changed: float = 1.0
    gather: float = 0.0
    write: float = 0.0
    reload: float = 0.0
    probe: float = 0.0
    difference: float = 0.0


@dataclass
class WeightSync:
    """Brings tensors into servers through model folders under `root`; only the newest is kept.

    `publish(folder)` is called before any server loads a folder, for code that restarts servers.
    `check` raises if the servers will not come back; `patience` is how many seconds to wait for
    one. With `remote`, servers may be on hosts that do not see the folder, and are sent its files.
    """

    root: Path
    patience: float
    publish: Callable[[Path], None] = lambda folder: None
    check: Callable[[], None] = lambda: None
    remote: bool = False
    _serial: int = 0
    _newest: Path = Path()

    def write(self, tensors: Tensors, config: Mapping[str, Any]) -> Report:
        """Writes the folder that servers load from now on."""
        self._serial += 1
        folder = self.root / f"weights-{self._serial:06d}"
        report = write_folder(tensors, config, folder, before=self._newest)
        self._newest = folder
        self.publish(folder)
        return report

    async def load(self, servers: Sequence[Server], label: str) -> None:
        """Has all servers load the newest folder at the same time, then deletes the others."""
        failure = f"did not load the weights {label}"
        for server in servers if self.remote else ():  # in turn: servers of one host share a copy
            await self.persist(server, failure, self._path_at)
        await together(*(self.persist(x, failure, self.reload, label) for x in servers))
        for old in self.root.glob("weights-*"):
            if old != self._newest:
                shutil.rmtree(old)

    async def reload(self, server: Server, label: str) -> None:
        """Brings the newest weights into a server, in one attempt."""
        await load(server, await self._path_at(server), label)

    async def persist(
        self, server: Server, failure: str, attempt: Callable[..., Awaitable[T]], *args: Any
    ) -> T:
        """The result of `attempt(server, *args)`, repeated on NoAnswer; then a UserError."""
        deadline = time.monotonic() + self.patience
        while True:
            try:
                return await attempt(server, *args)
            except NoAnswer as error:
                self.check()
                if time.monotonic() > deadline:
                    raise UserError(
                        f"{server.url} {failure} within {self.patience:g} s ({error}): look into its log"
                    ) from error
                await asyncio.sleep(RETRY)

    async def _path_at(self, server: Server) -> str:
        """The path of the newest weights for a server; sent to its host if that sees none."""
        folder = self._newest
        if not self.remote:
            return str(folder)
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        name = f"{folder.parent.name}-{folder.name}"
        asks = {"path": str(folder), "name": name, "sizes": sizes}
        try:
            found = (await server.post("/weights/find", asks)).get("path")
        except NoRoute:  # not started by `Sidecar`: its owner must make the folder visible to it
            return str(folder)
        if found is None:
            for file in sizes:
                failure = f"did not take {file} of the weights"
                await self.persist(server, failure, send_file, folder / file, name)
            found = (await server.post("/weights/find", asks)).get("path")
        if not isinstance(found, str):
            raise NoAnswer("a part of the weights has not come to its host")
        return found


async def load(server: Server, folder: str, label: str) -> None:
    """One server: pause, reload, clear the prefix cache, resume, label.

    Meanwhile it has the label `loading(label)`, with which no response counts, and by which a load
    of another trainer is noticed.
    """
    await server.post("/pause?mode=abort")
    await server.post("/update_weight_version", {"new_version": loading(label)})
    reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
    await server.post("/collective_rpc", reload)
    if (await server.post("/reset_prefix_cache")).get("success") is not True:
        raise NoAnswer("its prefix cache was not cleared")
    meanwhile = await server.label()
    if meanwhile is None:
        raise NoAnswer("it has started again")
    if meanwhile != loading(label):
        raise UserError(
            f"{server.url} was given the weights {meanwhile} by somebody else while it loaded {label}: "
            "one trainer a server"
        )
    await server.post("/resume")
    await server.post("/update_weight_version", {"new_version": label})


def loading(label: str) -> str:
    """The label of a server while it loads these weights."""
    return f"loading {label}"


async def send_file(server: Server, path: Path, name: str) -> None:
    """Sends a file of the weights `name` to a server's host; NoAnswer if it arrives altered.

    Plain http and proxies protect nothing from end to end, and in bfloat16 the proof would not
    notice a single altered number: hence a checksum.
    """
    checksum = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal checksum
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                checksum = zlib.crc32(piece, checksum)
                yield piece

    query = urllib.parse.urlencode({"name": name, "file": path.name})
    if (await server.put(f"/weights/file?{query}", pieces())).get("checksum") != checksum:
        raise NoAnswer("a file of weights arrived otherwise than it was sent")


def write_folder(
    tensors: Tensors, config: Mapping[str, Any], folder: Path, before: Path | None = None
) -> Report:
    """Writes a Hugging Face model folder, complete or not at all, in the dtype of `config`.

    `Report.changed` is counted against the folder `before`, that of the previous sync.
    """
    partial = folder.with_name(f"partial-{folder.name}")
    start, dtype = time.monotonic(), jnp.dtype(config["dtype"])
    size, changed, gather = 0, 0, 0.0
    try:
        if folder.parent.lstat().st_uid != os.geteuid():  # another user has replaced it
            raise PermissionError(errno.EPERM, "it belongs to another user", str(folder.parent))
        partial.mkdir(mode=0o700)
        (partial / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
        shards = _shards(tensors, dtype)
        for i in itertools.count():
            began = time.monotonic()
            shard = next(shards, None)
            gather += time.monotonic() - began
            if shard is None:
                break
            path = partial / f"model-{i:05d}.safetensors"
            safetensors.numpy.save_file(shard, path, metadata={"format": "pt"})
            size += sum(array.nbytes for array in shard.values())
            changed += _changed(path, before and before / path.name, dtype.itemsize)
        partial.rename(folder)
    except (OSError, safetensors.SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        full = os.strerror(errno.ENOSPC) in str(error)
        raise UserError(
            f"cannot write the weights to {folder.parent}: {error} after {size / 1e6:,.1f} MB; "
            "the servers keep the old ones"
            + (": make room there (twice the model), or choose another folder" if full else "")
        ) from error
    share = min(1.0, changed * dtype.itemsize / max(1, size))
    return Report(size, share, gather, write=time.monotonic() - start - gather)


def _shards(tensors: Tensors, dtype: np.dtype) -> Iterator[dict[str, np.ndarray]]:
    """Tensors in groups of about SHARD_BYTES, a file each, cast to `dtype`."""
    shard: dict[str, np.ndarray] = {}
    for name, array in tensors:
        if shard and sum(a.nbytes for a in shard.values()) >= SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = np.ascontiguousarray(array, dtype=dtype)
    yield shard


def _changed(path: Path, before: Path | None, itemsize: int) -> int:
    """How many numbers differ from the file `before`; all if it is missing or of another size."""
    size = path.stat().st_size
    if before is None or not before.is_file() or before.stat().st_size != size:
        return size // itemsize
    new, old = (np.memmap(p, dtype=f"u{itemsize}", mode="r") for p in (path, before))
    starts = range(0, len(new), COMPARED)
    differ = (new[i : i + COMPARED] != old[i : i + COMPARED] for i in starts)
    return sum(int(np.count_nonzero(some)) for some in differ)
