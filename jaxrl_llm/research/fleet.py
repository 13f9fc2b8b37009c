"""Many runs, each a process of its own on cores of its own, several at a time."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxrl_llm.runs.leaving import Stop

WAITING, RUNNING, DONE, FAILED, STOPPED = "waiting", "running", "done", "failed", "stopped"
POLL = 0.2


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
    stop: Stop,
    look: Callable[[Mapping[str, str]], None],
    environment: Mapping[str, str],
) -> dict[str, str]:
    """The state of every job in the end, in the given order `workers` at a time; `look` sees them meanwhile.

    Every job has `threads` cores, however many run beside it: sums are then in the same order in all. When `stop`
    is asked no job is started any more, and those that run get SIGTERM and their time to save.
    """
    states = {job.name: WAITING for job in jobs}
    running: dict[int, tuple[Job, subprocess.Popen[bytes]]] = {}
    asked = False
    try:
        while running or (not stop.asked and WAITING in states.values()):
            for slot, (job, process) in [*running.items()]:
                if process.poll() is not None:
                    del running[slot]
                    ended = DONE if process.returncode == 0 else FAILED
                    states[job.name] = STOPPED if stop.asked else ended
            for job in jobs:
                if states[job.name] != WAITING or stop.asked:
                    continue
                before = states.get(job.after, DONE)
                if before in (FAILED, STOPPED):
                    states[job.name] = FAILED
                elif before == DONE and len(running) < workers:
                    slot = min({*range(workers)} - {*running})
                    running[slot] = (job, _start(job, slot, threads, environment))
                    states[job.name] = RUNNING
            if stop.asked and not asked:
                asked = True
                for _, process in running.values():
                    process.send_signal(signal.SIGTERM)
            look(states)
            time.sleep(POLL if running else 0.0)
    except BaseException as error:
        again = isinstance(error, KeyboardInterrupt)  # a second time
        for _, process in running.values():
            process.send_signal(signal.SIGKILL if again else signal.SIGTERM)
        for _, process in running.values():
            process.wait()
        raise
    return states


def unfinished(states: Mapping[str, str]) -> bool:
    """Whether jobs were told to stop, or never started."""
    return not {WAITING, STOPPED}.isdisjoint(states.values())


def available() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return [*range(os.cpu_count() or 1)]  # macOS


def cores(slot: int, threads: int) -> list[int]:
    """The cores of a worker, of those that this process may use; shared if there are too few."""
    if not hasattr(os, "sched_setaffinity"):  # macOS
        return []
    there = available()
    return [there[(slot * threads + i) % len(there)] for i in range(threads)]


def _start(
    job: Job, slot: int, threads: int, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """The process, which Ctrl-C on the terminal does not reach: it is told by us."""
    mine, given = cores(slot, threads), {**os.environ, **environment, "NPROC": str(threads)}
    job.log.parent.mkdir(parents=True, exist_ok=True)
    before = os.sched_getaffinity(0) if mine else set()
    with job.log.open("ab") as log:
        try:
            if mine:
                os.sched_setaffinity(0, mine)  # the child inherits it
            return subprocess.Popen(  # noqa: S603
                job.command, env=given, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        finally:
            if mine:
                os.sched_setaffinity(0, before)
