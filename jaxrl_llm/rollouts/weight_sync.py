"""New weights to running servers.

A folder in memory-backed storage is written first, while the servers go on with the old one; then each is
paused, loads it, forgets its prefix cache, resumes and gets the new label. HTTP 200 proves nothing, so every
sync is followed by a proof (proof.py).
"""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollouts.carry import brought
from jaxrl_llm.rollouts.server import NoAnswer, Server

SHARD_BYTES = 2**28
COMPARED = 2**22  # numbers at a time
RETRY = 0.5  # seconds

T = TypeVar("T")
Tensors = Iterable[tuple[str, np.ndarray]]


@dataclass(frozen=True)
class Report:
    """What a sync cost; `gather` is the time of bringing tensors to the host, `difference` the proof's worst.

    `changed` is the share of numbers that are others than at the sync before (all, at the first one).
    """

    bytes: int = 0
    changed: float = 1.0
    gather: float = 0.0
    write: float = 0.0
    reload: float = 0.0
    probe: float = 0.0
    difference: float = 0.0


@dataclass
class Folders:
    """Brings tensors into servers through model folders under `root`, of which only the newest is kept.

    `publish(folder)` is told of a folder before any server loads it: what restarts servers has to know.
    `check` raises if the servers will not come back; `patience` is how long to wait for one. With `carry` servers
    may be on hosts that do not see the folder: then it is sent there.
    """

    root: Path
    patience: float
    publish: Callable[[Path], None] = lambda folder: None
    check: Callable[[], None] = lambda: None
    carry: bool = False
    _serial: int = 0
    _newest: Path | None = None

    def __call__(
        self, tensors: Tensors, config: Mapping[str, Any], label: str, servers: Sequence[Server]
    ) -> Report:
        """Writes, then has every server load, all at the same time; the other folders are removed."""
        self._serial += 1
        folder = self.root / f"weights-{self._serial:06d}"
        report = write_folder(tensors, config, folder, before=self._newest)
        start = time.monotonic()
        self._newest = folder
        self.publish(folder)
        for server in servers:  # one by one: a host with several of them gets one copy
            self._persist(server, label, partial(self._brought, server, True))
        with ThreadPoolExecutor(len(servers)) as pool:
            jobs = [pool.submit(self._load, server, label) for server in servers]
            for job in jobs:
                job.result()
        for old in self.root.glob("weights-*"):
            if old != folder:
                shutil.rmtree(old)
        return replace(report, reload=time.monotonic() - start)

    def renew(self, server: Server, label: str) -> None:
        """Brings the newest weights into a server that has started again."""
        load(server, self._brought(server), label)

    def _load(self, server: Server, label: str) -> None:
        """Loads, and does so again if the server dies over it."""
        self._persist(server, label, partial(self.renew, server, label))

    def _brought(self, server: Server, persistently: bool = False) -> str:
        """Where the server reads the newest weights, once they are there; each part may be sent more than once."""
        assert self._newest is not None
        if not self.carry:
            return str(self._newest)
        once: Callable[[Callable[[], Any]], Any] = lambda attempt: attempt()
        again = partial(self._persist, server, self._newest.name) if persistently else once
        return brought(server, self._newest, again)

    def _persist(self, server: Server, what: str, attempt: Callable[[], T]) -> T:
        said = f"{server.url} did not load the weights {what}"
        return persist(attempt, said, self.check, self.patience)


def persist(attempt: Callable[[], T], what: str, check: Callable[[], None], patience: float) -> T:
    """The result of an attempt that gets an answer; after so many seconds a UserError says `what` failed."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return attempt()
        except NoAnswer as error:
            check()
            if time.monotonic() > deadline:
                raise UserError(
                    f"{what} within {patience:g} s ({error}): look into its log"
                ) from error
            time.sleep(RETRY)


def load(server: Server, folder: str, label: str) -> None:
    """One server: pause, reload, forget what was computed with the old weights, resume, label.

    Until then it bears a label that nobody waits for, and that tells whether somebody else loads as well.
    """
    server.post("/pause?mode=abort")
    server.post("/update_weight_version", {"new_version": loading(label)})
    server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
    if server.post("/reset_prefix_cache").get("success") is not True:
        raise NoAnswer("its prefix cache was not cleared")
    meanwhile = server.label()
    if meanwhile is None:
        raise NoAnswer("it has started again")
    if meanwhile != loading(label):
        raise UserError(
            f"{server.url} was given the weights {meanwhile} by somebody else while it loaded {label}: "
            "one trainer a server"
        )
    server.post("/resume")
    server.post("/update_weight_version", {"new_version": label})


def loading(label: str) -> str:
    """What a server is called that does not serve these weights yet."""
    return f"loading {label}"


def write_folder(
    tensors: Tensors, config: Mapping[str, Any], folder: Path, before: Path | None = None
) -> Report:
    """A Hugging Face model folder, complete or not at all, in the dtype that its config names.

    What has `changed` is counted against the folder of the sync `before`.
    """
    beside = folder.with_name(f"partial-{folder.name}")
    start, count = time.monotonic(), _Count()
    dtype, changed = jnp.dtype(config["dtype"]), 0
    try:
        _require_ours(folder.parent)
        beside.mkdir(mode=0o700)
        (beside / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
        for i, shard in enumerate(_shards(count.through(tensors, dtype))):
            path = beside / f"model-{i:05d}.safetensors"
            safetensors.numpy.save_file(shard, path, metadata={"format": "pt"})
            changed += _changed(path, before and before / path.name, dtype.itemsize)
        beside.rename(folder)
    except (OSError, safetensors.SafetensorError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        full = os.strerror(errno.ENOSPC) in str(error)
        raise UserError(
            f"cannot write the weights to {folder.parent}: {error} after "
            f"{count.bytes / 1e6:,.1f} MB; the servers keep the old ones"
            + (": make room there (twice the model), or choose another folder" if full else "")
        ) from error
    share = min(1.0, changed * dtype.itemsize / max(1, count.bytes))
    total = time.monotonic() - start
    return Report(count.bytes, share, gather=count.seconds, write=total - count.seconds)


def _require_ours(folder: Path) -> None:
    """An OSError if a folder is gone, or if somebody else has made another one in its place."""
    if folder.lstat().st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it belongs to another user", str(folder))


def _changed(path: Path, before: Path | None, itemsize: int) -> int:
    """How many numbers of a file are others than in the one before; all if that is of another form."""
    size = path.stat().st_size
    if before is None or not before.exists() or before.stat().st_size != size:
        return size // itemsize
    new, old = (np.memmap(p, dtype=f"u{itemsize}", mode="r") for p in (path, before))
    starts = range(0, len(new), COMPARED)
    differ = (new[i : i + COMPARED] != old[i : i + COMPARED] for i in starts)
    return sum(int(np.count_nonzero(some)) for some in differ)


def _shards(tensors: Tensors) -> Iterator[dict[str, np.ndarray]]:
    """A few tensors at a time, each file small beside the model."""
    shard: dict[str, np.ndarray] = {}
    for name, array in tensors:
        if shard and sum(a.nbytes for a in shard.values()) + array.nbytes > SHARD_BYTES:
            yield shard
            shard = {}
        shard[name] = array
    yield shard


class _Count:
    """Bytes and seconds of an iterator while others use it."""

    bytes = 0
    seconds = 0.0

    def through(self, tensors: Tensors, dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
        """The same pairs, the arrays in this dtype."""
        source, start = iter(tensors), time.monotonic()
        for name, array in source:
            array = np.ascontiguousarray(array, dtype=dtype)
            self.bytes += array.nbytes
            self.seconds += time.monotonic() - start
            yield name, array
            start = time.monotonic()
        self.seconds += time.monotonic() - start
