"""Runs many commands, several at a time, each on cores of its own; they end with this process."""

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
# Runs argv[2:] after asking the kernel for a SIGTERM, on which a trainer saves and leaves, when the
# parent, argv[1], dies. The request survives exec; the parent may have died before it was made.
_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True)
class Job:
    """A command and its log file; it starts after the job `after`, and fails if that fails."""

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
    """Runs jobs in order, `workers` at a time; returns each one's last state by name.

    Every job has `threads` cores, however many run beside it, since sums depend on their number.
    `say` is called with (name, state) at each change. After a signal no job is started, and running
    ones get SIGTERM and may save; a second SIGINT kills them.
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
    """A list that collects the numbers of signals in SIGNALS that arrive within the block."""
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
    """Starts the job, on cores of its own if there are enough.

    On Linux it gets its own session, which Ctrl-C on the terminal does not reach: `run` sends the
    signal. Elsewhere it stays in our process group and ends with that.
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
