"""New weights to running servers.

A folder in memory-backed storage is written first, while the servers go on with the old one; then
each loads it and proves that (proof.py). A server whose host does not see the folder is sent its
files. Where only adapters are trained, servers start with the model, and get the adapters alone.
"""

import asyncio
import errno
import json
import os
import re
import shutil
import time
import urllib.parse
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from jaxrl_llm.errors import UserError
from jaxrl_llm.models import lora
from jaxrl_llm.rollouts.vllm.client import NoAnswer, NoRoute, Server
from jaxrl_llm.rollouts.vllm.serverside import EXTENSION

SHARD_BYTES = 2**28  # of a file of weights
PIECE_BYTES = 2**18  # of a file, in memory at a time while it is sent
COMPARED = 2**22  # numbers compared at a time
UNABLE = "has no attribute '(jaxrl_reload|reload_weights)'"  # of workers, as those of TPUs in 0.32
# the names of a folder's config and of its files of tensors; adapters fit into one
MODEL, ADAPTERS = (
    ("config.json", "model-{:05d}.safetensors"),
    (lora.CONFIG, lora.TENSORS),
)

Tensors = Iterable[tuple[str, np.ndarray]]
T = TypeVar("T")


@dataclass(frozen=True)
class Written:
    """Bytes that were written, and seconds; `gather` is bringing the tensors to the host.

    `changed` is the share of numbers that differ from the folder before (1 at the first).
    """

    bytes: int
    changed: float
    gather: float
    write: float


@dataclass
class WeightSync:
    """Folders of weights under `root`; servers load `newest`, which is set once it can be proved.

    `publish(folder)` is called before any server loads a folder, for code that restarts servers.
    `check` raises if the servers will not come back; `patience` is how many seconds to wait for
    one. With `remote`, servers may be on hosts that do not see the folder, and are sent its files.
    """

    root: Path
    patience: float
    publish: Callable[[Path], None] = lambda folder: None
    check: Callable[[], None] = lambda: None
    remote: bool = False
    newest: Path = Path()
    _serial: int = 0
    _sending: asyncio.Lock = field(default_factory=asyncio.Lock)

    def write(self, tensors: Tensors, config: Mapping[str, Any]) -> tuple[Path, Written]:
        """Writes a folder of weights, or adapters, to be the next `newest`."""
        self._serial += 1
        folder = self.root / f"weights-{self._serial:06d}"
        written = write_folder(tensors, config, folder, before=self.newest)
        if not _adapters(config):
            self.publish(folder)
        return folder, written

    def write_base(self, tensors: Tensors, config: Mapping[str, Any]) -> None:
        """Writes the model that servers of our own start with, and load adapters beside."""
        if not self.remote:
            write_folder(tensors, config, self.root / "base")
            self.publish(self.root / "base")

    def delete_old(self) -> None:
        """Deletes all folders but the newest."""
        for folder in self.root.glob("weights-*"):
            if folder != self.newest:
                shutil.rmtree(folder)

    async def newest_for(self, server: Server) -> str:
        """The folder that a server reads the newest weights from; sends to its host what is not there yet."""
        folder, name = self.newest, f"{self.newest.parent.name}-{self.newest.name}"
        if not self.remote:
            return str(folder)
        query = urllib.parse.urlencode({"name": name, "path": folder})
        async with self._sending:  # one at a time: servers of one host share a copy
            try:
                copy = await server.request("GET", f"/weights/find?{query}")
            except NoRoute:  # not started by us: its owner must make the folder visible to it
                return str(folder)
            if not isinstance(copy.get("path"), str) or not isinstance(copy.get("files"), list):
                raise NoAnswer("it does not say where it reads weights")
            for path in sorted(folder.iterdir()):
                if path.name not in copy["files"]:
                    await send_file(server, path, name)
        return copy["path"]


async def load(
    server: Server, folder: str, label: str, prove: Callable[[Server], Awaitable[T]]
) -> T:
    """Has a server load a folder, then gives it the label; the result of `prove`.

    Meanwhile it has the label `loading(label)`, with which no response counts, and by which a load
    of another trainer is noticed. So a server with the label itself has been proved.
    """
    await server.post("/pause?mode=abort")
    await server.post("/update_weight_version", {"new_version": loading(label)})
    where = {"kwargs": {"weights_path": folder}}
    try:
        try:
            await server.post(EXTENSION, {"method": "jaxrl_reload"} | where)
        except NoRoute:  # not started by us
            await server.post("/collective_rpc", {"method": "reload_weights"} | where)
    except NoAnswer as error:
        if not re.search(UNABLE, str(error)):
            raise
        raise UserError(
            f"{server.url} cannot reload weights ({error}): use the Native engine"
        ) from error
    if (await server.post("/reset_prefix_cache")).get("success") is not True:
        raise NoAnswer("its prefix cache was not cleared")
    await server.post("/resume")
    proved = await prove(server)
    await _require_label(server, label)
    await server.post("/update_weight_version", {"new_version": label})
    return proved


async def load_adapters(
    server: Server, folder: str, label: str, prove: Callable[[Server], Awaitable[T]]
) -> T:
    """As `load`, of adapters under the name `label`; the server forgets the earlier ones."""
    await server.post("/update_weight_version", {"new_version": loading(label)})
    asked = {"lora_name": label, "lora_path": folder, "load_inplace": True}
    await server.post("/v1/load_lora_adapter", asked, plain=True)
    await server.post("/resume")  # it may have been interrupted
    server.model = label
    proved = await prove(server)
    await _require_label(server, label)
    for one in (await server.request("GET", "/v1/models")).get("data", []):
        if one.get("parent") is not None and one["id"] != label:
            await server.post("/v1/unload_lora_adapter", {"lora_name": one["id"]}, plain=True)
    await server.post("/update_weight_version", {"new_version": label})
    return proved


async def _require_label(server: Server, label: str) -> None:
    """Raises unless the server still loads these weights."""
    meanwhile = await server.label()
    if meanwhile is None:
        raise NoAnswer("it has started again")
    if meanwhile != loading(label):
        raise UserError(
            f"{server.url} was given the weights {meanwhile} by somebody else while it loaded {label}: "
            "one trainer a server"
        )


def loading(label: str) -> str:
    """The label of a server while it loads these weights."""
    return f"loading {label}"


async def send_file(server: Server, path: Path, name: str) -> None:
    """Sends a file of the weights `name` to a server's host, which keeps it if it arrives whole.

    Plain http and proxies protect nothing from end to end, and a proof finds no other way to get
    the weights over: hence a checksum.
    """

    content = np.memmap(path, mode="r")

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(content), PIECE_BYTES):
            yield content[start : start + PIECE_BYTES].tobytes()

    checksum = await asyncio.to_thread(zlib.crc32, content.data)
    query = urllib.parse.urlencode({"name": name, "file": path.name, "checksum": checksum})
    await server.request("PUT", f"/weights/file?{query}", pieces())


def write_folder(
    tensors: Tensors, config: Mapping[str, Any], folder: Path, before: Path | None = None
) -> Written:
    """Writes a folder of a model or adapters, in the dtype of `config`; a UserError leaves nothing.

    `Written.changed` is counted against the folder `before`.
    """
    start, dtype = time.monotonic(), jnp.dtype(config["dtype"])
    size, changed, write = 0, 0, 0.0
    described, name = ADAPTERS if _adapters(config) else MODEL
    try:
        if folder.parent.lstat().st_uid != os.geteuid():  # another user has replaced it
            raise PermissionError(errno.EPERM, "it belongs to another user", str(folder.parent))
        folder.mkdir(mode=0o700)
        (folder / described).write_text(json.dumps(dict(config), indent=2) + "\n")
        for i, shard in enumerate(_shards(tensors, dtype, whole=_adapters(config))):
            began = time.monotonic()
            path = folder / name.format(i)
            safetensors.numpy.save_file(shard, path, metadata={"format": "pt"})
            size += sum(array.nbytes for array in shard.values())
            changed += _changed(path, before and before / path.name, dtype.itemsize)
            write += time.monotonic() - began
    except (OSError, safetensors.SafetensorError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        full = os.strerror(errno.ENOSPC) in str(error)
        raise UserError(
            f"cannot write the weights to {folder.parent}: {error} after {size / 1e6:,.1f} MB; "
            "the servers keep the old ones"
            + (": make room there (twice the model), or choose another folder" if full else "")
        ) from error
    share = min(1.0, changed * dtype.itemsize / max(1, size))
    return Written(size, share, gather=time.monotonic() - start - write, write=write)


def _adapters(config: Mapping[str, Any]) -> bool:
    return "peft_type" in config


def _shards(tensors: Tensors, dtype: np.dtype, *, whole: bool) -> Iterator[dict[str, np.ndarray]]:
    """Tensors in groups of about SHARD_BYTES, or `whole`, a file each, cast to `dtype`."""
    shard: dict[str, np.ndarray] = {}
    for name, array in tensors:
        if shard and not whole and sum(a.nbytes for a in shard.values()) >= SHARD_BYTES:
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
