"""Runs commands in processes, several at a time, each on cores of its own; they end with ours.

Where there are not enough, commands share them.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from jaxrl_llm.training.leaving import UNFINISHED, Stop

POLL = 0.2  # seconds
LINUX = sys.platform == "linux"
# Becomes the command argv[3:] on the cores argv[2], after asking the kernel for a SIGTERM, on which
# a trainer saves and leaves, when the parent, argv[1], dies. The request survives exec.
_BOUND = """
import ctypes, os, signal, sys
os.sched_setaffinity(0, map(int, sys.argv[2].split(",")))
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):  # it may have died before the request
    os.execv(sys.argv[3], sys.argv[3:])
"""


def run(
    commands: Mapping[str, Sequence[str]],
    logs: Path,
    *,
    workers: int,
    threads: int,
    environment: Mapping[str, str],
    stop: Stop,
    say: Callable[[str, int | None], None],
) -> dict[str, int | None]:
    """Runs commands in order, `workers` at a time; exit codes by name, None of those not started.

    Every command has `threads` cores, however many run beside it, since sums depend on their
    number, and writes to logs/NAME.log. Once `stop` is asked none is started, and running ones get
    SIGTERM and may save. One that leaves with UNFINISHED though nobody asked goes on at once.
    `say` is called with a name at its start (None), and with its exit code at its end.
    """
    logs.mkdir(parents=True, exist_ok=True)
    slots = SimpleQueue[int]()
    for slot in range(workers):
        slots.put(slot)

    def finished(name: str, slot: int) -> int:
        """Runs a command to its end, on the cores of its slot; returns its exit code."""
        command = commands[name]
        if LINUX:
            there = available()
            cores = ",".join(str(there[(slot * threads + i) % len(there)]) for i in range(threads))
            command = [sys.executable, "-S", "-P", "-c", _BOUND, str(os.getpid()), cores, *command]
        given, signalled = {**os.environ, **environment, "NPROC": str(threads)}, False
        with (
            (logs / f"{name}.log").open("ab") as log,
            subprocess.Popen(  # noqa: S603
                command, env=given, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            ) as process,
        ):
            while process.poll() is None:
                if stop.requested and not signalled:
                    process.terminate()
                    signalled = True
                time.sleep(POLL)
        return process.returncode

    def one(name: str) -> int | None:
        code, slot = None, slots.get()
        try:
            while not stop.requested and code in (None, UNFINISHED):
                say(name, None)
                code = finished(name, slot)
                say(name, code)
        except BaseException:
            stop.request()  # the others save, and are not waited for in vain
            raise
        finally:
            slots.put(slot)
        return code

    with ThreadPoolExecutor(workers) as pool:
        return dict(zip(commands, pool.map(one, commands), strict=True))


def available() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if LINUX else [*range(os.cpu_count() or 1)]
