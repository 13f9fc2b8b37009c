"""The processes of a run, one a host: joining, agreeing, sharing work, and ending together.

They agree at few points: in `share`, part of every rollout and evaluation, whether to go on; in
`from_first` on what the first has read. Errors are not agreed upon: the process with an error
prints its line and ends, a thread of every other sees that and ends its own, and the launcher
restarts all with `--resume auto`. For a single process all of this does nothing.
"""

import ctypes
import errno
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_llm import forks
from jaxrl_llm.background import in_background
from jaxrl_llm.errors import StopRequested, UserError, causes, first_line

T = TypeVar("T")
AUTO = "auto"
BEAT = 1.0  # seconds between heartbeats
LOST = 60.0  # seconds without a heartbeat after which a process counts as gone
MEETING = 300  # seconds within which all processes must have started
NAMED = 60  # seconds within which the name of process 0's host must be known
LEAVE = 10.0  # seconds in which the others may end by themselves after one has failed
STALLED = "stalled"  # how the reason of a process that makes no progress begins
LEAST = 2**16  # bytes of the smallest buffer of `gather`: few sizes, few programs
_COLLECTIVE = re.compile("Gloo|NCCL|closed by peer")  # failed collectives; some raise ValueError
_ITS_OWN = re.compile("RESOURCE_EXHAUSTED|INVALID_ARGUMENT|Barrier timed out")  # own faults
_FOREVER = 10**6  # seconds: turns off JAX's own watchdog, which ends with a page of C++


class Stop(Protocol):
    """A request to stop the run: `requested` says whether it was made, `request` makes it.

    `save_is_due` says whether it is time to save, in this process's view; `wants_save` whether all have agreed to.
    `stall(reason)` ends the process at once, with the stacks of its threads.
    """

    requested: bool
    wants_save: bool

    @property
    def save_is_due(self) -> bool: ...

    def request(self) -> None: ...

    def stall(self, reason: str) -> NoReturn: ...


@dataclass
class _Job:
    """This process among `count`, and the coordinator's key-value store that all share."""

    index: int = 0
    count: int = 1
    store: Any = None
    names: list[str] = field(default_factory=list)
    round: int = 0
    heard: int = 0  # how often the store has answered `_watch`
    progress: Callable[[], float] = lambda: 0.0  # when this process last did something
    went_on: Callable[[], None] = lambda: None  # called when another has done something


_JOB = _Job()


def count() -> int:
    """The number of processes."""
    return _JOB.count


def index() -> int:
    """The number of this process, from 0."""
    return _JOB.index


def first() -> bool:
    """True for the first process, the one that writes shared files."""
    return _JOB.index == 0


@contextmanager
def initialize(process: str | None, stop: Stop, *, lost: float = LOST) -> Iterator[None]:
    """Joins the other processes for the block; `process` is AUTO, I/N@HOST:PORT, or None if alone.

    With AUTO the cluster manager says who they are. If one fails, or sends no heartbeat for `lost`
    seconds, the others exit with code 2. If one is asked to stop, all are. Raises a UserError, or
    exits with code 2, if they do not meet.
    """
    if process is None:
        yield
        return
    with _place(process):
        _join(process)
        done = threading.Event()
        for watch in (_watch, _watch_the_store):
            threading.Thread(target=watch, args=(done, lost, stop), daemon=True).start()
        reason = ""
        try:
            # CPU programs read from JAX's cache lose the order of their collectives (JAX 0.10.2)
            if jax.default_backend() == "cpu":
                jax.config.update("jax_enable_compilation_cache", False)
            yield
        except BaseException as error:
            if not any(isinstance(cause, StopRequested) for cause in causes(error)):  # agreed upon
                if any(_of_another(cause) for cause in causes(error, implicit=True)):
                    time.sleep(lost + 2 * LEAVE)  # `_watch` says who is gone and ends this process
                known = isinstance(error, (UserError, KeyboardInterrupt))
                reason = "" if known else f"{type(error).__name__}: "
                reason += first_line(error)
            raise
        finally:
            _part(reason, done, lost)


def _part(reason: str, done: threading.Event, lost: float) -> None:
    """Leaves the job: together with all others or, after an error, by publishing the `reason`."""
    if not reason:
        _put(f"ended/{_JOB.index}", "")
        barrier()  # the store lives until all are here
        done.set()
        # now, with all others: at exit one may be late; one that stands still is not waited for
        wait([in_background(_shut_down)], lost)
        return
    done.set()
    with suppress(jax.errors.JaxRuntimeError):  # the others notice a lost store
        _put(f"ended/{_JOB.index}", reason)
    if first():  # the store ends with this process: the others must read the reason first
        time.sleep(LEAVE + 3 * BEAT)


def _shut_down() -> None:
    with suppress(jax.errors.JaxRuntimeError):  # the work is done: the others may be gone
        jax.distributed.shutdown()


@contextmanager
def watched(progress: Callable[[], float], went_on: Callable[[], None]) -> Iterator[None]:
    """For the block others learn when `progress`, of this process alone, changes; `went_on` is told of theirs.

    Who waits for one that works does not hang. Of processes that hang together none has progress.
    """
    before = _JOB.progress, _JOB.went_on
    _JOB.progress, _JOB.went_on = progress, went_on
    try:
        yield
    finally:
        _JOB.progress, _JOB.went_on = before


def agree(word: str) -> list[str]:
    """The words of all processes, in their order; all must call it, and it waits for the last."""
    if _JOB.count == 1:
        return [word]
    _JOB.round += 1
    here = f"round/{_JOB.round}"
    _put(f"{here}/{_JOB.index}", word)
    words = [_get(f"{here}/{i}") for i in range(_JOB.count)]
    if _JOB.round > 1:  # all have come to this round, so all have read the one before
        _JOB.store.key_value_delete(f"round/{_JOB.round - 1}/{_JOB.index}")
    return words


def barrier() -> None:
    """Returns once all processes have come here."""
    agree("")


def from_first(make: Callable[[], T]) -> T:
    """The result of `make` in the first process, in all processes; it must fit into JSON."""
    if _JOB.count == 1:
        return make()
    return json.loads(agree(json.dumps(make()) if first() else "")[0])


def check(stop: Stop) -> None:
    """Raises StopRequested in all processes if one was asked to stop; sets `wants_save` if it is time in one."""
    words = agree("leave" if stop.requested else "save" if stop.save_is_due else "")
    if "leave" in words:
        raise StopRequested
    stop.wants_save = "save" in words


def in_step(work: Callable[[], T], stop: Stop) -> T:
    """The result of `work`, which may raise StopRequested to end early.

    Raises that in all processes if one was asked to stop.
    """
    results: list[T] = []
    try:
        results.append(work())
    except StopRequested:
        stop.requested = True
    check(stop)
    return results[0]


def stalled(reason: str, stop: Stop) -> NoReturn:
    """Ends this process, which makes no progress, and so the others: all write their stacks."""
    if _JOB.count > 1:
        with suppress(jax.errors.JaxRuntimeError):
            _put(f"ended/{_JOB.index}", f"{STALLED}: {reason}")
        if first():  # the store ends with this process: the others must read the reason first
            time.sleep(LEAVE + 3 * BEAT)
    stop.stall(reason)


def gather(payload: bytes) -> list[bytes]:
    """The payloads of all processes, in their order, by an all-gather on the devices."""
    if _JOB.count == 1:
        return [payload]
    sizes = [int(size) for size in agree(str(len(payload)))]
    room = max(LEAST, 1 << max(sizes).bit_length())
    padded = np.zeros(room, np.uint8)
    padded[: len(payload)] = np.frombuffer(payload, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def _join(process: str) -> None:
    """Connects to the other processes; must come before JAX initialises its devices."""
    where: dict[str, Any] = {}
    if process != AUTO:
        match = re.fullmatch(r"(\d+)/(\d+)@(.+:\d+)", process)
        if not match or int(match[1]) >= int(match[2]):
            raise UserError(
                f"--process {process}: write auto, or I/N@HOST:PORT, process I (from 0) of N, which meet there"
            )
        where = {"process_id": int(match[1]), "num_processes": int(match[2])}
        where |= {"coordinator_address": match[3], "cluster_detection_method": "deactivate"}
        if match[1] == "0":
            where["coordinator_bind_address"] = match[3]
            _require_room(process, match[3])
    alone = "--process {}: the processes did not find one another ({}): start all, with an address that all reach"
    late = alone.format(process, f"not all came within {MEETING} s")
    # ends the wait before JAX does, with a page of C++
    timer = threading.Timer(MEETING, _end, args=(late,))
    timer.daemon = True
    timer.start()
    jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM
    try:
        jax.distributed.initialize(
            **where, initialization_timeout=2 * MEETING, heartbeat_timeout_seconds=_FOREVER
        )
        from jax._src import distributed  # as orbax does: the store is not public

        state = distributed.global_state
        _JOB.index, _JOB.count, _JOB.store = state.process_id, state.num_processes, state.client
        hosts = agree(socket.gethostname())
    except (RuntimeError, ValueError) as error:
        pods = "; in pods auto needs the package kubernetes, and leave to read them"
        said = first_line(error) + pods * (
            process == AUTO and "KUBERNETES_SERVICE_HOST" in os.environ
        )
        raise UserError(alone.format(process, said)) from error
    finally:
        timer.cancel()
    _JOB.names = [f"process {i} on {host}" for i, host in enumerate(hosts)]
    ctypes.CDLL(None).signal(signal.SIGABRT, _ON_ABORT)
    if len(set(hosts)) == len(hosts):  # one process a host: each uses all GPUs of its host
        jax.config.update("jax_cuda_visible_devices", "all")


@contextmanager
def _place(process: str) -> Iterator[None]:
    """Takes this process's place for the block; a UserError if it is taken: a second one would end all.

    That is a name that the kernel of Linux forgets with the process; elsewhere nothing is taken.
    """
    with socket.socket(socket.AF_UNIX) as place, forks.undone_in_children(place.close):
        try:
            if process != AUTO:
                place.bind(f"\0jaxrl-llm {process}")
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UserError(
                    f"--process {process}: it is running on this host already, and goes on: end it first"
                ) from error
        yield


def _require_room(process: str, address: str) -> None:
    """A UserError if the first process cannot listen: JAX ends without a line then."""
    host, _, port = address.rpartition(":")
    try:
        family, *_, (where, *_) = _looked_up(host.strip("[]"))
        socket.create_server((where, int(port)), family=family).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--process {process}: process 0 cannot listen at {address} ({first_line(error)}): give an "
            "address of its host, and a free port"
        ) from error


def _looked_up(host: str) -> Any:
    """The host's first address. A cluster may publish the name of a pod only after the pod has started."""
    end = time.monotonic() + NAMED
    while True:
        try:
            return socket.getaddrinfo(host, None)[0]
        except socket.gaierror:
            if time.monotonic() > end:
                raise
            time.sleep(1)


def require_joined() -> None:
    """A UserError if the devices are those of processes that have not joined, as on a slice of TPUs."""
    if jax.process_count() != _JOB.count:
        raise UserError(
            f"the devices here belong to {jax.process_count()} processes: start each with --process auto"
        )


def _aborted(_: int) -> None:
    """Ends this process in JAX's place, which aborts it where the connection to the first breaks.

    JAX has said so in a page of C++; a call-back of its own for that fails in jaxlib (to 0.12: bad_cast).
    """
    _end(
        f"JAX gave up, for the reason above; mostly {_JOB.names[0]}, through which all meet, is gone, or "
        "one was started a second time (a different incarnation)"
    )


# a handler of C, called in the thread that aborts: one of Python's would be called too late
_ON_ABORT = ctypes.CFUNCTYPE(None, ctypes.c_int)(_aborted)


def _of_another(error: BaseException) -> bool:
    """True if the error may come from a collective or the store, for lack of another process."""
    of_jax = isinstance(error, jax.errors.JaxRuntimeError) or _COLLECTIVE.search(str(error))
    return bool(of_jax) and not _ITS_OWN.search(str(error))


def _put(key: str, value: str) -> None:
    _JOB.store.key_value_set(key, value, allow_overwrite=True)


def _get(key: str) -> str:
    """The value of a key, once it is set; `_watch` ends the process if that cannot happen."""
    return _JOB.store.blocking_key_value_get(key, 1000 * _FOREVER)


def _watch(done: threading.Event, lost: float, stop: Stop) -> None:
    """Sends heartbeats and checks those of the others until `done`; passes on requests to stop."""
    signs: dict[str, tuple[str, float]] = {}
    done_by: dict[int, str] = {}
    while not done.wait(BEAT):
        try:
            sign = f"{_JOB.heard} {_JOB.progress()} {'leaving' if stop.requested else ''}"
            _put(f"alive/{_JOB.index}", sign)
            alive = dict(_JOB.store.key_value_dir_get("alive/"))
            ended = dict(_JOB.store.key_value_dir_get("ended/"))
        except jax.errors.JaxRuntimeError:
            if not done.wait(BEAT):
                _end(f"{_JOB.names[0]}, through which all meet, cannot be reached")
            return
        _JOB.heard += 1
        now = time.monotonic()
        for i in set(range(_JOB.count)) - {_JOB.index}:
            value, end = alive.get(f"alive/{i}", ""), ended.get(f"ended/{i}")
            if signs.get(name := _JOB.names[i], ("", 0.0))[0] != value or name not in signs:
                signs[name] = (value, now)
            _, _, further = value.partition(" ")
            if done_by.setdefault(i, further) != further:
                done_by[i] = further
                _JOB.went_on()
            if end and not done.wait(LEAVE):
                if end.startswith(STALLED):
                    stop.stall(f"{name} has {end}")
                _end(f"{name} has ended: {end}")
            if end is None and now - signs[name][1] > lost:
                _end(f"{name} has not been heard of for {lost:g} s")
            if value.endswith("leaving") and not stop.requested:
                stop.request()


def _watch_the_store(done: threading.Event, lost: float, stop: Stop) -> None:
    """Ends this process if the store stops answering: then the calls of `_watch` never return.

    Counts its own waits, not clock time, so a process that was suspended does not end on waking.
    """
    del stop
    heard, silent = -1, 0
    while not done.wait(BEAT):
        heard, silent = _JOB.heard, silent + 1 if _JOB.heard == heard else 0
        if silent * BEAT > lost + LEAVE:
            _end(f"{_JOB.names[0]}, through which all meet, has not answered for {lost:g} s")


def _end(reason: str) -> NoReturn:
    """Ends this process at once: its main thread may wait in a collective for one that is gone."""
    said = f"jaxrl-llm: {reason}; this process ends too: start all again with --resume auto"
    print(said, file=sys.stderr, flush=True)
    os._exit(2)
