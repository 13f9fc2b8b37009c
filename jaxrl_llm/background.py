"""Work in threads beside the main one: a call, a call every so often, an event loop."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


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


@contextmanager
def repeating(work: Callable[[], object], every: float) -> Iterator[None]:
    """For the block, calls `work()` every so many seconds; at its end the last call is waited for."""
    done = threading.Event()

    def run() -> None:
        while not done.wait(every):
            work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def once(make: Callable[P, T]) -> Callable[P, T]:
    """`make`, called once for equal arguments, whichever threads ask at a time."""
    lock, made = threading.Lock(), cache(make)

    def ask(*args: P.args, **kwargs: P.kwargs) -> T:
        with lock:
            return made(*args, **kwargs)

    return ask


@once
def loop(name: str) -> asyncio.AbstractEventLoop:
    """The event loop of that name: the main thread may run one already, as in a notebook."""
    made = asyncio.new_event_loop()
    threading.Thread(target=made.run_forever, name=name, daemon=True).start()
    return made
