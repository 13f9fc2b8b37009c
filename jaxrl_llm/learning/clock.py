"""Times the phases of a step."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds per phase; time in no phase, or idle in the sampler, is idle device time."""

    def __init__(self):
        self.restart()

    def restart(self) -> None:
        """Starts a step; time before it (an evaluation, a checkpoint) is not counted."""
        self.seconds: dict[str, float] = defaultdict(float)
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Adds the time of the block to a phase."""
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def lap(self, idle_inside: float = 0.0) -> dict[str, float]:
        """Ends a step: seconds in total and by phase, and the share in which no program ran."""
        total = time.perf_counter() - self._start
        # these two phases run on the host alone
        busy = sum(v for k, v in self.seconds.items() if k not in ("reward", "collate"))
        out = {f"time/{name}": value for name, value in self.seconds.items()}
        out |= {"time/step": total, "time/idle_share": 1 - (busy - idle_inside) / total}
        self.restart()
        return out
