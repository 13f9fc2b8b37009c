"""What a forked child has of this process: open files with their locks, handlers of signals. Not ours.

A reward may fork, as `multiprocessing` does, and its child may outlive everything here.
"""

import os
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


def _in_child() -> None:
    while _OURS:
        _OURS.pop()()


os.register_at_fork(after_in_child=_in_child)
