"""Other processes."""

import contextlib
import os
import signal
from collections.abc import Iterable


def kill(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Sends a signal to those that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
