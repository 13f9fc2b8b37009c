"""New weights to running servers, and proof that they arrived.

A folder in memory-backed storage is written first, while the servers go on with the old one; then each is
paused, loads it, forgets its prefix cache, gets the new label and resumes. HTTP 200 proves nothing (some
backends keep part of the old weights and say so nowhere), so every sync ends with a probe: log-probs of
a few fixed sequences from each server against the trainer's own.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from jaxrl_llm.errors import UserError
from jaxrl_llm.rollouts.server import NoAnswer, Server

MEMORY = Path("/dev/shm")  # noqa: S108 (a folder with a random name is made in it)
PREFIX, LOCK = "jaxrl-llm-", "in-use"
SHARD_BYTES = 2**28
TOLERANCE = {"float32": 1e-3, "bfloat16": 1.0}  # bfloat16 reaches 0.4 on a sound 135M model
RETRY = 0.5  # seconds

T = TypeVar("T")
Tensors = Iterable[tuple[str, np.ndarray]]


@dataclass(frozen=True)
class Report:
    """What a sync cost; `gather` is the time of bringing tensors to the host, `difference` the probe's worst."""

    version: int
    bytes: int = 0
    gather: float = 0.0
    write: float = 0.0
    reload: float = 0.0
    probe: float = 0.0
    difference: float = 0.0


Transport = Callable[[Tensors, Mapping[str, Any], int, Sequence[Server]], Report]
"""Brings tensors and their config into servers that then serve them under a version.

`Folders` is one, for every backend. 2026-11: on GPUs vLLM also takes tensors through a collective
(/init_weight_transfer_engine, /start_weight_update, /update_weights, /finish_weight_update with
--weight-transfer-config); one for it is another function of this form, and the probe is the same.
"""


@dataclass
class Folders:
    """A transport through model folders under `root`, of which only the newest is kept.

    `publish(folder, version)` is told of a folder before any server loads it: what restarts servers
    has to know. `check` raises if the servers will not come back; `patience` is how long to wait for one.
    """

    root: Path
    publish: Callable[[Path, int], None] = lambda folder, version: None
    check: Callable[[], None] = lambda: None
    patience: float = 600.0
    _serial: int = 0
    _newest: tuple[Path, int] | None = None

    def __call__(
        self, tensors: Tensors, config: Mapping[str, Any], version: int, servers: Sequence[Server]
    ) -> Report:
        """Writes, then has every server load, all at the same time; the other folders are removed."""
        self._serial += 1
        folder = self.root / f"weights-{self._serial:06d}"
        written = write_folder(tensors, config, folder)
        start = time.monotonic()
        self._newest = folder, version
        self.publish(folder, version)
        with ThreadPoolExecutor(len(servers)) as pool:
            jobs = [pool.submit(self._load, server, folder, version) for server in servers]
            for job in jobs:
                job.result()
        for old in self.root.glob("weights-*"):
            if old != folder:
                shutil.rmtree(old)
        reload = time.monotonic() - start
        return Report(version, written.bytes, written.gather, written.write, reload)

    def renew(self, server: Server) -> None:
        """Brings the newest weights into a server that has started again."""
        assert self._newest is not None
        load(server, *self._newest)

    def _load(self, server: Server, folder: Path, version: int) -> None:
        """Loads, and does so again if the server dies over it."""
        what = f"{server.url} did not load the weights of version {version}"
        persist(lambda: load(server, folder, version), what, self.check, self.patience)


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


def load(server: Server, folder: Path, version: int) -> None:
    """One server: pause, reload, forget what was computed with the old weights, label, resume."""
    server.post("/pause?mode=abort")
    server.post(
        "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    )
    if server.post("/reset_prefix_cache").get("success") is not True:
        raise NoAnswer("its prefix cache was not cleared")
    server.post("/update_weight_version", {"new_version": str(version)})
    server.post("/resume")


@contextmanager
def exchange_folder(under: Path | None = None) -> Iterator[Path]:
    """A fresh folder in memory-backed storage where there is any, removed at the end.

    What a process left behind that was killed is removed too: nobody holds the lock in it any more.
    """
    under = under or (MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir()))
    for lock in under.glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError), lock.open() as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent)
    try:
        root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=under))
    except OSError as error:
        raise UserError(f"cannot make a folder in {under}: {error.strerror}") from error
    with (root / LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        try:
            yield root
        finally:
            shutil.rmtree(root, ignore_errors=True)


def write_folder(tensors: Tensors, config: Mapping[str, Any], folder: Path) -> Report:
    """A Hugging Face model folder, complete or not at all, in the dtype that its config names."""
    partial = folder.with_name(f"partial-{folder.name}")
    start, count = time.monotonic(), _Count()
    try:
        partial.mkdir(parents=True)
        (partial / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
        counted = count.through(tensors, jnp.dtype(config["dtype"]))
        for i, shard in enumerate(_shards(counted)):
            path = partial / f"model-{i:05d}.safetensors"
            safetensors.numpy.save_file(shard, path, metadata={"format": "pt"})
        partial.rename(folder)
    except (OSError, safetensors.SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        full = os.strerror(errno.ENOSPC) in str(error)
        raise UserError(
            f"cannot write the weights to {folder.parent}: {error} after "
            f"{count.bytes / 1e6:,.1f} MB; the servers keep the old ones"
            + (": make room there (twice the model), or choose another folder" if full else "")
        ) from error
    total = time.monotonic() - start
    return Report(0, bytes=count.bytes, gather=count.seconds, write=total - count.seconds)


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


# The proof.


def probe_sequences(vocab_size: int, *, count: int = 4, length: int = 24) -> list[list[int]]:
    """Fixed sequences of tokens from all over the vocabulary."""
    rng = np.random.default_rng(0)
    return rng.integers(0, vocab_size, (count, length)).tolist()


def probe(
    servers: Sequence[Server],
    sequences: Sequence[Sequence[int]],
    expected: Sequence[np.ndarray],
    *,
    version: int,
    tolerance: float,
    config: Mapping[str, Any],
    before: Sequence[np.ndarray] | None = None,
) -> float:
    """The largest difference between log-probs of a server and `expected`; beyond the tolerance a UserError.

    `before` are the trainer's log-probs at the sync before this one: a server that is nearer to them by
    far did not load, even if a step changes less than the tolerance allows.
    """
    worst = 0.0
    for server in servers:
        label = server.version()
        if label != version:
            raise UserError(
                f"{server.url} serves version {label} after a sync of version {version}: is "
                "somebody else using it?"
            )
        got = [np.asarray(server.score(sequence)) for sequence in sequences]
        difference = distance(got, expected)
        stale = before is not None and 2 * _mean(got, before) < _mean(got, expected)
        if stale or not difference <= tolerance:
            raise UserError(
                f"{server.url} answered the sync of version {version} with success, but its "
                f"log-probs differ from the trainer's by up to {difference:.3g} (tolerance "
                f"{tolerance:g}): {_cause(stale, difference, config)}"
            )
        worst = max(worst, difference)
    return worst


def distance(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> float:
    """The largest absolute difference; a NaN is larger than anything."""
    difference = np.abs(np.concatenate(list(a)) - np.concatenate(list(b))).max()
    return float(np.nan_to_num(difference, nan=np.inf, posinf=np.inf))


def _mean(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> float:
    return float(np.abs(np.concatenate(list(a)) - np.concatenate(list(b))).mean())


def _cause(stale: bool, difference: float, config: Mapping[str, Any]) -> str:
    """The likely reason, in words."""
    if stale:
        return "it still computes with the old weights, so this vLLM does not reload; use the Native engine"
    if config["tie_word_embeddings"]:
        return "likely a stale LM head, because the model is served tied; serve it untied"
    if config["dtype"] != "float32" and difference < 2.0:
        return f"likely the rounding of {config['dtype']}; serve float32, or raise the tolerance"
    return "likely a part of the old weights is still in use (a stale head), or another dtype or config"
