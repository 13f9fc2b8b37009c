"""Leaving in good order: a signal or the clock asks, what may be dropped is dropped, what is known is saved."""

import gc
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from jaxrl_llm import hosts
from jaxrl_llm.errors import Leaving

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
HURRY = 2.0  # seconds that a second Ctrl-C leaves
AGAIN = b"\0"  # beside the numbers of signals: one came where Leaving would be lost
UNFINISHED = 75  # exit code of a run that was asked to stop before its end: resume it
_WEAK = {f.__code__.co_filename for f in (weakref.finalize.__call__, weakref.WeakSet.__init__)}


class Stop:
    """Whether it is time to leave; no lock, for a signal handler runs while the main thread may hold it.

    If it is for one process of a job, all leave, after the same step.
    """

    def __init__(self) -> None:
        self.asked = False
        self._droppable = False

    def ask(self) -> None:
        """It is time; called on the main thread, and raises Leaving within a block that may be dropped."""
        self.asked = True
        if self._droppable and not hosts.meeting():
            self._droppable = False
            raise Leaving

    def check(self) -> None:
        """Raises Leaving if it is time."""
        with hosts.together():
            self._check_here()

    def _check_here(self) -> None:
        if self.asked:
            raise Leaving

    @contextmanager
    def droppable(self) -> Iterator[None]:
        """A block of the main thread that ends at once when it is time; what it has made so far is lost."""
        with hosts.together():
            self._droppable = True
            try:
                self._check_here()
                yield
            finally:
                self._droppable = False
            self._check_here()


@contextmanager
def leaving_gracefully(
    stop: Stop, *, grace: float = 60.0, minutes: float | None = None
) -> Iterator[None]:
    """Any of SIGNALS, or so many minutes, ask to stop; after `grace` seconds the process ends as it is.

    A second Ctrl-C interrupts.
    """

    def ask(number: int, frame: FrameType | None) -> None:
        if _swallows(frame):
            stop.asked = True
            os.write(write, AGAIN)
        elif stop.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            stop.ask()

    read, write = os.pipe()
    os.set_blocking(write, False)
    over = threading.Lock()  # held while we ask ourselves; from the end on for good
    wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    before = {number: signal.signal(number, ask) for number in SIGNALS}
    threading.Thread(target=_watch, args=(read, over, grace, minutes), daemon=True).start()
    try:
        yield
    finally:
        over.acquire()
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.close(write)


def _swallows(frame: FrameType | None) -> bool:
    """Whether it runs for the garbage collector or a finalizer: what is raised there is printed and lost."""
    callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None:
        code = frame.f_code
        if code in callbacks or code.co_name == "__del__" or code.co_filename in _WEAK:
            return True
        frame = frame.f_back
    return False


def _watch(read: int, over: threading.Lock, grace: float, minutes: float | None) -> None:
    """Reads the numbers of signals as they arrive, though the main thread may be deep in a program.

    Asks when the time is over, and ends the process when the grace is.
    """
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
            if AGAIN in numbers:
                time.sleep(0.01)
                _ask_here(over)
            for number in (n for n in numbers if n in SIGNALS):
                interrupts += number == signal.SIGINT
                latest = time.monotonic() + (grace if interrupts < 2 else HURRY)
                deadline = latest if deadline is None else min(deadline, latest)
        elif deadline is None:
            deadline = time.monotonic() + grace
            _ask_here(over)
        else:
            _end(grace, interrupted=interrupts > 1)


def _ask_here(over: threading.Lock) -> None:
    """Asks the main thread to leave, unless the block is over: the signal would end the process."""
    if over.acquire(blocking=False):
        os.kill(os.getpid(), signal.SIGUSR1)
        over.release()


def _end(grace: float, *, interrupted: bool) -> None:
    """Ends the process without the main thread, which is in something that cannot be interrupted."""
    if not interrupted:
        said = (
            f"jaxrl-llm: stopped; what was under way took more than {grace:g} s (--grace) and is lost: go on "
            "from the last checkpoint with --resume"
        )
        with suppress(OSError):  # of a terminal that is closed
            print(said, file=sys.stderr, flush=True)
    os._exit(130 if interrupted else UNFINISHED)
