"""Other processes, and what makes compiling quick in all of them."""

import contextlib
import os
import signal
from collections.abc import Iterable
from importlib.metadata import version

# Machine code is not optimised, and fused operations come from emitters that are quick, though their
# code is not: a train step is compiled in a fifth of the time. XLA ends a process over a flag that it
# does not know, so the second is for the version of which it is known.
QUICKLY = "--xla_backend_optimization_level=0"
if version("jaxlib").startswith("0.10."):
    QUICKLY += " --xla_cpu_use_fusion_emitters=false"


def kill(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Sends a signal to those that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
