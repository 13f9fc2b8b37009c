"""Many commands, several at a time, each a process on cores of its own that ends when we do."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jaxrl_llm.training.leaving import SIGNALS, UNFINISHED

WAITING, RUNNING, DONE, FAILED, STOPPED = "waiting", "running", "done", "failed", "stopped"
POLL = 0.2  # seconds
LINUX = sys.platform == "linux"
# Runs argv[2:] with the request that the kernel send SIGTERM, on which a trainer saves and leaves, when the
# parent, argv[1], has died. The request outlives exec; the parent may have died before it was made.
_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True)
class Job:
    """A command whose output goes to `log`; it starts when the job `after` is done, and fails with it."""

    name: str
    command: Sequence[str]
    log: Path
    after: str = ""


def run(
    jobs: Sequence[Job],
    workers: int,
    threads: int,
    environment: Mapping[str, str],
    say: Callable[[str, str], None],
) -> dict[str, str]:
    """The state of every job in the end; in the given order, `workers` at a time. `say` hears (name, state).

    Every job has `threads` cores, however many run beside it: sums are then in the same order in all.
    After a signal that ends a run no job is started, and those that run get SIGTERM and their time to save; a
    second SIGINT kills them.
    """
    states = {job.name: WAITING for job in jobs}
    running: dict[int, tuple[Job, subprocess.Popen[bytes]]] = {}

    def turn(job: Job, state: str) -> None:
        states[job.name] = state
        say(job.name, state)

    with _signals() as asked:
        told = 0
        try:
            while running or (not asked and WAITING in states.values()):
                for slot, (job, process) in [*running.items()]:
                    if process.poll() is not None:
                        del running[slot]
                        stopped = asked or process.returncode == UNFINISHED
                        turn(
                            job, DONE if not process.returncode else STOPPED if stopped else FAILED
                        )
                for job in jobs:
                    if states[job.name] != WAITING or asked:
                        continue
                    before = states.get(job.after, DONE)
                    if before in (FAILED, STOPPED):
                        turn(job, before)
                    elif before == DONE and len(running) < workers:
                        slot = min({*range(workers)} - {*running})
                        running[slot] = (job, _start(job, slot, threads, environment))
                        turn(job, RUNNING)
                if len(asked) > told:
                    told = len(asked)
                    again = asked.count(signal.SIGINT) > 1
                    for _, process in running.values():
                        process.send_signal(signal.SIGKILL if again else signal.SIGTERM)
                time.sleep(POLL if running else 0.0)
        finally:  # nothing runs here but after an error
            for _, process in running.values():
                process.terminate()
            for _, process in running.values():
                process.wait()
    return states


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The numbers of the signals that ask to stop, as they arrive within the block."""
    asked: list[int] = []
    note = lambda number, _: asked.append(number)
    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def available() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if LINUX else [*range(os.cpu_count() or 1)]


def _start(
    job: Job, slot: int, threads: int, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """The process, on cores of its own as far as there are enough.

    On Linux it has a session of its own, which Ctrl-C on the terminal does not reach: we tell it. Elsewhere it
    stays in our process group, so that what ends the group ends it too.
    """
    job.log.parent.mkdir(parents=True, exist_ok=True)
    given = {**os.environ, **environment, "NPROC": str(threads)}
    with job.log.open("ab") as log:

        def start(command: Sequence[str]) -> subprocess.Popen[bytes]:
            return subprocess.Popen(  # noqa: S603
                command, env=given, start_new_session=LINUX,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

        if not LINUX:
            return start(job.command)
        there = available()
        os.sched_setaffinity(  # the child inherits it
            0, {there[(slot * threads + i) % len(there)] for i in range(threads)}
        )
        try:
            bound = [sys.executable, "-S", "-P", "-c", _WITH_PARENT, str(os.getpid())]
            return start([*bound, *job.command])
        finally:
            os.sched_setaffinity(0, there)
