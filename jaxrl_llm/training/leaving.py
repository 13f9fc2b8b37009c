"""Stopping in good order: a signal or the clock asks, the loop looks at safe places and saves, in time."""

import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from jaxrl_llm.errors import Leaving, UserError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
HURRY = 2.0  # seconds that a second Ctrl-C leaves
UNFINISHED = 75  # exit code of a run that was asked to stop before its end: resume it


class Stop:
    """Whether the run was asked to stop. Nothing is raised out of a signal: work under way looks at it."""

    def __init__(self) -> None:
        self.asked = False
        self._bell = -1  # wakes the thread that counts the time

    def ask(self) -> None:
        """Asks, from any thread."""
        self.asked = True
        if self._bell >= 0:
            os.write(self._bell, b"\0")

    def check(self) -> None:
        """Raises Leaving if the run was asked to stop; called where what is under way may be dropped."""
        if self.asked:
            raise Leaving


@contextmanager
def stoppable(stop: Stop, *, grace: float = 60.0, minutes: float | None = None) -> Iterator[None]:
    """Any of SIGNALS, or so many minutes, ask to stop; `grace` seconds later the process ends as it is.

    A second Ctrl-C ends it at once. A signal that was ignored before, as SIGHUP under nohup, stays ignored.
    """
    for name, value in (("--grace", grace), ("--max-minutes", minutes)):
        if value is not None and not (value >= 0 and math.isfinite(value)):
            raise UserError(f"{name} {value}: a number from 0 on")
    read, write = os.pipe()
    os.set_blocking(write, False)
    heard = [n for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
    # Python writes a signal's number to the pipe at once, though the main thread may be deep in a program
    wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in heard}
    stop._bell = write
    watch = threading.Thread(target=_watch, args=(stop, read, grace, minutes), daemon=True)
    watch.start()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        stop._bell = -1
        os.close(write)
        watch.join()


def _watch(stop: Stop, read: int, grace: float, minutes: float | None) -> None:
    """Reads the numbers of signals as they come; ends the process when the grace is over."""
    end = time.monotonic() + 60.0 * minutes if minutes is not None else None
    deadline, interrupts = None, 0
    while True:
        due = end if deadline is None else deadline
        wait = None if due is None else max(0.0, due - time.monotonic())
        if select.select([read], [], [], wait)[0]:
            numbers = os.read(read, 64)
            if not numbers:  # closed: the block is over
                os.close(read)
                return
            if not {0, *SIGNALS} & {*numbers}:  # such as SIGALRM, which a reward may use
                continue
            interrupts += numbers.count(signal.SIGINT)
        elif deadline is not None:
            _end(grace, interrupted=interrupts > 1)
        latest = time.monotonic() + (grace if interrupts < 2 else HURRY)
        deadline = latest if deadline is None else min(deadline, latest)
        stop.asked = True


def _end(grace: float, *, interrupted: bool) -> None:
    """Ends the process without the main thread, which is in something that cannot be interrupted."""
    if not interrupted:
        with suppress(OSError):  # of a terminal that is closed
            print(
                f"jaxrl-llm: stopped; what was under way took more than {grace:g} s (--grace) and is lost: "
                "go on from the last checkpoint with --resume",
                file=sys.stderr,
                flush=True,
            )
    os._exit(130 if interrupted else UNFINISHED)
