"""The share of a forked child in this process: open files with their locks, handlers of signals. Not ours.

A reward may fork, as `multiprocessing` does, and its child may outlive everything here.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_OURS: list[Callable[[], object]] = []


@contextmanager
def undone_in_children(undo: Callable[[], object]) -> Iterator[None]:
    """For the block, each child that is forked calls `undo` before anything else, the last one first."""
    _OURS.append(undo)
    try:
        yield
    finally:
        if undo in _OURS:  # not in a child
            _OURS.remove(undo)


# A signal to the child waits until all is undone: it would go to our handlers, through our pipe.
_before = threading.local()


def _hold_signals() -> None:
    _before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before.mask)


def _in_child() -> None:
    while _OURS:
        _OURS.pop()()
    _release_signals()


os.register_at_fork(
    before=_hold_signals, after_in_parent=_release_signals, after_in_child=_in_child
)
