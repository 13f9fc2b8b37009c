"""Stopping in order: a signal or a time limit sets a flag; the loop looks at it, saves and ends."""

import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TypeVar

from jaxrl_llm.errors import Leaving, UserError

T = TypeVar("T")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
HURRY = 2.0  # seconds of grace after a second Ctrl-C
UNFINISHED = 75  # exit code of a run that was asked to stop before its end: resume it


class Stop:
    """Whether the run was asked to stop. Signals raise nothing: running work checks the flag."""

    def __init__(self) -> None:
        self.asked = False
        self._bell = -1  # a pipe that wakes `_watch`

    def ask(self) -> None:
        """Asks to stop; callable from any thread."""
        self.asked = True
        if self._bell >= 0:
            os.write(self._bell, b"\0")

    def check(self) -> None:
        """Raises Leaving if the run was asked to stop; for places where work may be dropped."""
        if self.asked:
            raise Leaving


@contextmanager
def stoppable(stop: Stop, *, grace: float = 60.0, minutes: float | None = None) -> Iterator[None]:
    """For the block SIGNALS, or `minutes`, ask to stop; `grace` seconds later the process ends.

    A second Ctrl-C ends it within HURRY seconds. A signal ignored before, such as SIGHUP under
    nohup, stays ignored. Raises a UserError for a negative number.
    """
    for name, value in (("--grace", grace), ("--max-minutes", minutes)):
        if value is not None and not (value >= 0 and math.isfinite(value)):
            raise UserError(f"{name} {value}: a number from 0 on")
    read, write = os.pipe()
    os.set_blocking(write, False)
    heard = [n for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
    # the pipe gets a signal's number at once, even while the main thread is in a compiled program
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


def in_background(work: Callable[[], T]) -> Future[T]:
    """A future of `work()`, run in a daemon thread: one of a pool would keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _watch(stop: Stop, read: int, grace: float, minutes: float | None) -> None:
    """Reads signal numbers from the pipe; ends the process when its time is over."""
    end = time.monotonic() + 60.0 * minutes if minutes is not None else None
    deadline, interrupts = None, 0
    while True:
        due = end if deadline is None else deadline
        wait = None if due is None else max(0.0, due - time.monotonic())
        if select.select([read], [], [], wait)[0]:
            numbers = os.read(read, 64)
            if not numbers:  # closed: the block has ended
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
    """Ends the process from this thread; the main one is in a call that cannot be interrupted."""
    if not interrupted:
        with suppress(OSError):  # the terminal may be closed
            print(
                f"jaxrl-llm: stopped; what was under way took more than {grace:g} s (--grace) and is lost: "
                "go on from the last checkpoint with --resume",
                file=sys.stderr,
                flush=True,
            )
    os._exit(130 if interrupted else UNFINISHED)
