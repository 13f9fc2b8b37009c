"""The processes of a run, one a host: which of them this is, and what they agree on before any goes on.

Programs on devices need all processes. So where one cannot go on, the others have to know before they start the
next program: they meet in rounds (`agree`), and what one brings to a round (a result, an error, the wish to leave)
all of them see. A process that ends without a word is missed by a thread of every other, which ends its own
with a line. Alone, a process agrees with itself.
"""

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from traceback import print_exception
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_llm.errors import Leaving, UserError, causes, first_line

AUTO = "auto"
BEAT = 1.0  # seconds between two signs of life
LOST = 60.0  # seconds without one after which a process is given up
MEETING = 300.0  # seconds in which all have to have been started
LEAVE = 10.0  # seconds that one which knows of an end has for its own
LEAST = 2**16  # bytes that an exchange has room for
SLICE = 200  # milliseconds of a wait after which signals are looked at
_FOREVER = 10**7  # seconds: JAX's own watch would end a process without a line
_NOBODY_MISSING = re.compile("RESOURCE_EXHAUSTED|INVALID_ARGUMENT|Barrier timed out")


@dataclass
class _Job:
    """This process among `count`, and the store of words that they share."""

    index: int = 0
    count: int = 1
    store: Any = None
    names: list[str] = field(default_factory=list)
    round: int = 0
    meeting: bool = False  # in a round, which must not be broken off
    heard: int = 0  # how often the store has answered the watch
    failure: str = ""  # what ends this process, once it is known
    lost: float = LOST


_JOB = _Job()


def index() -> int:
    """The number of this process, from 0."""
    return _JOB.index


def count() -> int:
    """How many processes there are."""
    return _JOB.count


def first() -> bool:
    """Whether this is the process that writes what is there once."""
    return _JOB.index == 0


def meeting() -> bool:
    """Whether this process is in a round: nothing may be raised into it."""
    return _JOB.meeting


@contextmanager
def joined(
    process: str | None, *, lost: float = LOST, asked: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """One of the processes of a job for the block: AUTO, as the cluster says, or I/N@HOST:PORT; None is alone.

    If one is not heard of for `lost` seconds, or has ended with an error, this one ends. The wish of one to leave,
    `asked()`, reaches the others as a signal.
    """
    if process is None:
        yield
        return
    _join(process)
    _JOB.lost = lost
    with _watched(lost, asked):
        try:
            yield
            agree()
        except BaseException as error:
            if not (agreed := getattr(error, "agreed", False)):
                _outwait(error)
            _put(f"ended/{_JOB.index}", "" if agreed else _line(error))
            raise


def agree(word: str = "") -> list[str]:
    """The words that all processes bring to the round of this number, as soon as the last is there.

    If one of them has failed, or leaves, all raise it.
    """
    if _JOB.count == 1:
        return [word]
    return [entry["word"] for entry in _meet({"word": word})]


def everywhere(here: bool) -> bool:
    """Whether it is so in every process."""
    return all(agree("yes" if here else ""))


def told(make: Callable[[], Any]) -> Any:
    """What the first process makes, something that JSON can say."""
    if _JOB.count == 1:
        return make()
    with _announcing():
        word = json.dumps(make()) if first() else ""
    return json.loads(agree(word)[0])


@contextmanager
def together() -> Iterator[None]:
    """A block after which all processes know that it went well in each, or raise what went wrong in one."""
    with _announcing():
        yield
    agree()


@contextmanager
def _announcing() -> Iterator[None]:
    """A block whose error the others hear of."""
    try:
        yield
    except (UserError, Leaving) as error:
        announce(error)
        raise


def announce(error: BaseException) -> None:
    """Lets the others know of an error that ends this process's part, once."""
    if _JOB.count > 1 and not getattr(error, "agreed", False):
        error.agreed = True  # pyright: ignore[reportAttributeAccessIssue]
        kind = "leaving" if isinstance(error, Leaving) else "failed"
        if kind == "failed":
            _outwait(error)
            known = isinstance(error, UserError)
            _JOB.failure = _line(error) if known else f"{type(error).__name__}: {_line(error)}"
            if not known:
                print_exception(error)  # now: the others may not come
            _put(f"failed/{_JOB.index}", json.dumps([_JOB.round + 1, _JOB.failure]))
        _meet({"word": "", kind: _line(error)}, own=error)


def _outwait(error: BaseException) -> None:
    """If it comes of a program, or of a store, that one of us is missing from, the watch will say who."""
    ours = (e for e in causes(error) if isinstance(e, jax.errors.JaxRuntimeError))
    if any(not _NOBODY_MISSING.search(str(e)) for e in ours):
        time.sleep(1.25 * _JOB.lost + 5 * BEAT)


def exchange(payload: bytes) -> list[bytes]:
    """The payloads of all processes, by way of the devices."""
    if _JOB.count == 1:
        return [payload]
    with _unbroken():  # from the first round on the others count on the second
        sizes = [int(size) for size in agree(str(len(payload)))]
        room = max(LEAST, 1 << max(sizes).bit_length())  # one of few sizes: each is a program
        padded = np.zeros(room, np.uint8)
        padded[: len(payload)] = np.frombuffer(payload, np.uint8)
        rows = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def _join(process: str) -> None:
    """Connects to the other processes, before JAX looks at its devices."""
    place: dict[str, Any] = {}
    if process != AUTO:
        found = re.fullmatch(r"(\d+)/(\d+)@(.+:\d+)", process)
        if not found or int(found[1]) >= int(found[2]):
            raise UserError(
                f"--process {process}: write auto, or I/N@HOST:PORT, process I (from 0) of N, which meet there"
            )
        place = {"process_id": int(found[1]), "num_processes": int(found[2])}
        place |= {"coordinator_address": found[3], "cluster_detection_method": "deactivate"}
    alone = "--process {}: the processes did not find one another ({}): start all, with an address that all reach"
    met, late = threading.Event(), alone.format(process, f"not all came within {MEETING:g} s")
    threading.Thread(target=_give_up_unless, args=(met, late), daemon=True).start()
    jax.config.update("jax_enable_preemption_service", False)  # it would take our SIGTERM
    try:
        jax.distributed.initialize(
            **place, initialization_timeout=2 * int(MEETING), heartbeat_timeout_seconds=_FOREVER
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(alone.format(process, first_line(error))) from error
    finally:
        met.set()
    from jax._src import distributed  # as orbax does: nothing public says what the processes share

    state = distributed.global_state
    _JOB.index, _JOB.count, _JOB.store = state.process_id, state.num_processes, state.client
    hosts = agree(socket.gethostname())
    _JOB.names = [f"process {i} on {host}" for i, host in enumerate(hosts)]
    if len(set(hosts)) == len(hosts):  # where each has a host, each has all of its GPUs
        jax.config.update("jax_cuda_visible_devices", "all")
    # programs of CPUs, read back, have lost the order of their collectives
    if jax.default_backend() == "cpu":
        jax.config.update("jax_enable_compilation_cache", False)


def _give_up_unless(met: threading.Event, reason: str) -> None:
    """JAX's own end of the waiting is a stack trace."""
    if not met.wait(MEETING):
        _JOB.failure = reason
        _end(reason)


def _meet(entry: dict[str, str], own: BaseException | None = None) -> list[dict[str, str]]:
    """What all processes bring to the next round; with an error of its `own` none of the others' is raised."""
    _JOB.round += 1
    here = f"round/{_JOB.round}"
    with _unbroken():
        _put(f"{here}/{_JOB.index}", json.dumps(entry))
        if first():
            entries = [json.loads(_wait(f"{here}/{i}")) for i in range(_JOB.count)]
            _put(f"{here}/all", json.dumps(entries))
            _JOB.store.key_value_delete(f"round/{_JOB.round - 2}/")  # which all have read
        else:
            entries = json.loads(_wait(f"{here}/all"))
    if own is None:
        _raise(entries)
    return entries


@contextmanager
def _unbroken() -> Iterator[None]:
    """A block into which nothing may be raised from outside."""
    before, _JOB.meeting = _JOB.meeting, True
    try:
        yield
    finally:
        _JOB.meeting = before


def _raise(entries: list[dict[str, str]]) -> None:
    """The first failure of a process, else its wish to leave, as an error of this one."""
    named = zip(_JOB.names, entries, strict=False)
    found: list[Any] = [UserError(f"{name}: {e['failed']}") for name, e in named if "failed" in e]
    found += [Leaving() for entry in entries if "leaving" in entry]
    if found:
        found[0].agreed = True
        raise found[0]


def _put(key: str, value: str) -> None:
    _JOB.store.key_value_set(key, value, allow_overwrite=True)


def _wait(key: str) -> str:
    """The value of a key, once somebody has set it; signals are handled meanwhile."""
    while True:
        try:
            return _JOB.store.blocking_key_value_get(key, SLICE)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


@contextmanager
def _watched(lost: float, asked: Callable[[], bool]) -> Iterator[None]:
    """A block during which the others are watched, and the watch: what it asks may never be answered."""
    done, over = threading.Event(), threading.Event()
    watch = threading.Thread(target=_watch, args=(done, lost, asked), daemon=True)
    watch.start()
    threading.Thread(target=_watch_the_watch, args=(over, lost), daemon=True).start()
    try:
        yield
    finally:
        done.set()
        watch.join()
        over.set()


def _watch_the_watch(over: threading.Event, lost: float) -> None:
    """Ends this process if the first no longer answers; seconds count in which this one was awake."""
    heard, silent = -1, 0
    while not over.wait(BEAT):
        heard, silent = _JOB.heard, silent + 1 if _JOB.heard == heard else 0
        if silent * BEAT > lost:
            _end(f"{_JOB.names[0]}, through which all meet, has not answered for {lost:g} s")


def _watch(done: threading.Event, lost: float, asked: Callable[[], bool]) -> None:
    """Gives signs of life and looks at those of the others, until the block is over."""
    seen: dict[int, tuple[str, float]] = {}
    expected: dict[str, float] = {}
    told_to_leave = False
    while not done.wait(BEAT):
        try:
            _put(f"alive/{_JOB.index}", f"{_JOB.heard}{' leaving' if asked() else ''}")
            alive = dict(_JOB.store.key_value_dir_get("alive/"))
            ended = dict(_JOB.store.key_value_dir_get("ended/"))
            failed = dict(_JOB.store.key_value_dir_get("failed/"))
            _JOB.heard += 1
        except jax.errors.JaxRuntimeError:
            _end(f"{_JOB.names[0]}, through which all meet, cannot be reached")
        now = time.monotonic()
        for i in set(range(_JOB.count)) - {_JOB.index}:
            value = alive.get(f"alive/{i}", "")
            before, since = seen.get(i, ("", now))
            seen[i] = (value, now if value != before else since)
            if ended.get(f"ended/{i}"):
                if not done.wait(LEAVE):
                    _end(f"{_JOB.names[i]} has ended: {ended[f'ended/{i}']}")
            elif f"ended/{i}" not in ended and now - seen[i][1] > lost:
                _end(f"{_JOB.names[i]} has not been heard of for {lost:g} s")
            if value.endswith("leaving") and not (asked() or told_to_leave):
                told_to_leave = True
                os.kill(os.getpid(), signal.SIGUSR1)
        for key, value in failed.items():
            # one that failed waits in a round; in a program that waits for it we never come to that
            meeting, reason = json.loads(value)
            if _JOB.round < meeting and now - expected.setdefault(key, now) > lost:
                _end(f"{_JOB.names[int(key.removeprefix('failed/'))]}: {reason}")


def _end(reason: str) -> NoReturn:
    """Ends this process, whose main thread may wait in a program for one that is gone."""
    said = f"jaxrl-llm: {reason}; this process ends too: start all again with --resume"
    print(f"jaxrl-llm: {_JOB.failure}" if _JOB.failure else said, file=sys.stderr, flush=True)
    os._exit(2)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
