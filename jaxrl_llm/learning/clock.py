"""Where the seconds of a step go."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds per phase of a step; what no phase covers and what the sampler reports is idle device time."""

    def __init__(self):
        self.restart()

    def restart(self) -> None:
        """Begins a step: what lies before (an evaluation, a checkpoint) belongs to none."""
        self.seconds: dict[str, float] = defaultdict(float)
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Counts the block towards a phase."""
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def lap(self, idle_inside: float = 0.0) -> dict[str, float]:
        """The step that ends here: total, phases, and the share in which no program was in flight."""
        total = time.perf_counter() - self._start
        busy = sum(v for k, v in self.seconds.items() if k not in ("reward", "collate"))
        out = {f"time/{name}": value for name, value in self.seconds.items()}
        out |= {"time/step": total, "time/idle_share": 1 - (busy - idle_inside) / total}
        self.restart()
        return out
