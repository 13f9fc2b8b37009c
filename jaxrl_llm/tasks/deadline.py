"""Calls users' functions under a time limit, so that none of them can hang its caller.

On the main thread SIGALRM interrupts a function, even within one endless regular expression. On
others it cannot be interrupted, only given up: its daemon thread goes on until the process ends.
"""

import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class _OutOfTimeError(BaseException):
    """Raised within a function whose time is over; no Exception, so that little code catches it."""


def outcomes(
    calls: Sequence[Callable[[], T]], seconds: float, threads: int = 1
) -> list[T | Exception]:
    """The result or exception of each call, in order; TimeoutError for one over `seconds`."""
    if threads == 1 and threading.current_thread() is threading.main_thread():
        return [_interrupted(call, seconds) for call in calls]
    return _given_up(calls, seconds, threads)


def _late(seconds: float) -> TimeoutError:
    return TimeoutError(f"no result after {seconds:g} s")


def _left(error: SystemExit) -> RuntimeError:
    """The error in place of a function's exit(), which must not end the program."""
    return RuntimeError(f"it called exit({error.code})")


def _interrupted(call: Callable[[], T], seconds: float) -> T | Exception:
    def interrupt(*_: object) -> None:
        raise _OutOfTimeError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again each second, if caught
            return call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _OutOfTimeError:
        return _late(seconds)
    except SystemExit as error:
        return _left(error)
    except Exception as error:  # a user's function may raise anything
        return error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # the alarm may have come before the first one
        signal.signal(signal.SIGALRM, before)


def _given_up(
    calls: Sequence[Callable[[], T]], seconds: float, threads: int
) -> list[T | Exception]:
    settled: dict[int, T | Exception] = {}
    begun: dict[int, float] = {}
    waiting = iter(range(len(calls)))
    lock = threading.Lock()
    done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

    def work() -> None:
        while True:
            with lock:
                index = next(waiting, None)
                if index is None:
                    return
                begun[index] = time.monotonic()
            try:
                outcome: Any = calls[index]()
            except SystemExit as error:
                outcome = _left(error)
            except BaseException as error:
                outcome = error
            with lock:
                if index in settled:  # given up as late: another thread has replaced this one
                    return
            done.put((index, outcome))

    def start(count: int) -> None:
        for _ in range(count):
            threading.Thread(target=work, daemon=True).start()

    start(min(threads, len(calls)))
    while len(settled) < len(calls):
        with lock:
            running = [t for i, t in begun.items() if i not in settled]
        next_end = min(running, default=time.monotonic()) + seconds
        try:
            index, outcome = done.get(timeout=max(0.01, next_end - time.monotonic()))
        except queue.Empty:
            now = time.monotonic()
            with lock:
                late = [i for i, t in begun.items() if i not in settled and now - t >= seconds]
                settled.update((i, _late(seconds)) for i in late)
            start(len(late))
            continue
        if isinstance(outcome, BaseException) and not isinstance(outcome, Exception):
            raise outcome  # KeyboardInterrupt and the like are for the caller
        with lock:
            settled.setdefault(index, outcome)
    return [settled[i] for i in range(len(calls))]
