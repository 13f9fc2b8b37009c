"""The end of a process with the exit code of its main thread, though threads of a library may wait for ever."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

LEAVE = 5.0  # seconds from the end of the main thread to that of the threads left behind
_END = SimpleNamespace(code=1, watch=None)


@contextmanager
def ending() -> Iterator[None]:
    """The main thread's last block: how it ends is the exit code of the process."""
    _END.code = 1
    try:
        yield
        _END.code = 0
    except SystemExit as stop:
        _END.code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        raise


def leave_threads_behind() -> None:
    """From now on no thread that waits keeps the process when the main thread has ended."""
    if _END.watch is None:
        _END.watch = threading.Thread(target=_end_with_the_main_thread, daemon=True)
        _END.watch.start()


def _end_with_the_main_thread() -> None:
    threading.main_thread().join()
    time.sleep(LEAVE)
    os._exit(_END.code)
