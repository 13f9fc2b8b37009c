"""How a run stops: in order, when a signal or a time limit sets a flag, or because it stalls.

A run stalls when its main thread makes no progress for FACTOR times as long as its present phase
has ever taken, whatever it waits in: a collective, a reward, a file system, a socket. The stacks of
all threads of all processes are written, and the code of its end says that it may be resumed.
"""

import faulthandler
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from jaxrl_llm import forks
from jaxrl_llm.background import in_background, repeating
from jaxrl_llm.errors import StopRequested

if TYPE_CHECKING:
    from jaxrl_llm.training.clock import Clock

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
HURRY = 2.0  # seconds of grace after a second Ctrl-C
# seconds without progress, more than buckets and servers are waited for; times the longest so far
LEAST, FACTOR = 1200.0, 10.0
LOOK = 1.0  # seconds between two looks at the progress
WRITING = 10.0  # seconds that writing stacks may take; then they are printed
UNFINISHED = 75  # exit code of a run that was asked to stop before its end: resume it
STALLED = 76  # of one that made no progress: launchers start it again, so many times


class Stop:
    """A flag: the run was asked to stop. Signals raise nothing: running work checks it."""

    def __init__(self) -> None:
        self.requested = self.wants_save = False
        self.save_seconds = math.inf  # between two saves that nothing else asks for
        self.saved = time.monotonic()
        self.stacks: Path | None = None  # where `stall` writes the stacks of all threads
        self._bell = -1  # a pipe that wakes `_watch`

    def request(self) -> None:
        """Asks to stop; callable from any thread."""
        self.requested = True
        if self._bell >= 0:
            os.write(self._bell, b"\0")

    @property
    def save_is_due(self) -> bool:
        """True if it is time for a save."""
        return time.monotonic() - self.saved > self.save_seconds

    def check(self) -> None:
        """Raises StopRequested if the run was asked to stop; for places where work may be dropped."""
        if self.requested:
            raise StopRequested

    def stall(self, reason: str) -> NoReturn:
        """Ends this process, which makes no progress, after writing the stacks of all threads."""
        where = self.stacks
        if where is not None:  # the folder may lie on what the run waits for: in a thread
            late = wait([in_background(partial(_write_stacks, where))], WRITING).not_done
            if late or not where.exists():
                where = None
        if where is None:
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        said = "above" if where is None else f"in {where}"
        _say(
            f"{reason}: the stacks of all threads are {said}; go on from the last checkpoint with --resume"
        )
        os._exit(STALLED)


@contextmanager
def stall_watchdog(
    progress: "Clock", *, least: float, factor: float, stalled: Callable[[str], None]
) -> Iterator[None]:
    """For the block, calls `stalled(reason)` if there is no progress for longer than the limit.

    Suspended time (SIGSTOP, a laptop's lid) does not count: looks are counted, not the clock.
    """

    def looks() -> Iterator[None]:
        last, waited = progress.now, 0.0
        while True:
            yield  # until the next look
            now = progress.now
            last, waited = now, waited + LOOK if now == last else 0.0
            if waited > (limit := progress.limit(least, factor)):
                stalled(
                    f"no progress in the phase {now[0]} for {waited:.0f} s, its limit is {limit:.0f} s"
                )

    next(look := looks())
    with repeating(partial(next, look), LOOK):
        yield


def _write_stacks(where: Path) -> None:
    with suppress(OSError), where.open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)


def _say(line: str) -> None:
    with suppress(OSError):  # the terminal may be closed
        print(f"jaxrl-llm: {line}", file=sys.stderr, flush=True)


@contextmanager
def stoppable(stop: Stop, *, grace: float = 60.0, minutes: float | None = None) -> Iterator[None]:
    """For the block SIGNALS, or `minutes`, ask to stop; `grace` seconds later the process ends.

    A second Ctrl-C ends it within HURRY seconds. A signal ignored before, such as SIGHUP under
    nohup, stays ignored.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    heard = [n for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
    # the pipe gets a signal's number at once, even while the main thread is in a compiled program
    wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in heard}
    stop._bell, ended = write, threading.Event()
    watch = threading.Thread(target=_watch, args=(stop, read, ended, grace, minutes), daemon=True)
    watch.start()

    def undo() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        stop._bell = -1

    try:
        with forks.undone_in_children(undo):
            yield
    finally:
        undo()
        ended.set()
        with suppress(BlockingIOError):  # it is full: `_watch` is awake
            os.write(write, b"\0")
        watch.join()
        os.close(read)
        os.close(write)


def _watch(
    stop: Stop, read: int, ended: threading.Event, grace: float, minutes: float | None
) -> None:
    """Reads signal numbers from the pipe until all has `ended`; ends the process when its time is."""
    end = time.monotonic() + 60.0 * minutes if minutes is not None else None
    deadline, interrupts = None, 0
    while True:
        due = end if deadline is None else deadline
        wait = None if due is None else max(0.0, due - time.monotonic())
        if select.select([read], [], [], wait)[0]:
            numbers = os.read(read, 64)
            if ended.is_set():
                return
            if not {0, *SIGNALS} & {*numbers}:  # such as SIGALRM, which a reward may use
                continue
            interrupts += numbers.count(signal.SIGINT)
            if interrupts == 1 and deadline is None:
                _say(f"stopping, within {grace:g} s; Ctrl-C again ends at once")
        elif deadline is not None:
            _end(grace, interrupted=interrupts > 1)
        latest = time.monotonic() + (grace if interrupts < 2 else HURRY)
        deadline = latest if deadline is None else min(deadline, latest)
        stop.requested = True


def _end(grace: float, *, interrupted: bool) -> None:
    """Ends the process from this thread; the main one is in a call that cannot be interrupted."""
    if not interrupted:
        _say(
            f"stopped; what was under way took more than {grace:g} s (--grace) and is lost: "
            "go on from the last checkpoint with --resume"
        )
    os._exit(130 if interrupted else UNFINISHED)
