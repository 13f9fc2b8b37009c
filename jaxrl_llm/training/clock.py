"""What a run's time goes into, phase by phase, over all of its sessions."""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import jax

HOST = ("reward", "collate")  # phases of a step in which no program runs on the devices
OUTSIDE = ("start", "compile", "save", "evaluation", "lost")  # what is no step
COMPILING = "/jax/core/compile/backend_compile_duration"  # an event of JAX's
FIRST = 6.0  # times the least limit, for the first phase of a name: it compiles
NAMES = {"start": "starting", "compile": "compiling", "save": "saving", "lost": "lost to restarts"}


class Clock:
    """Seconds by phase; nested phases count for the innermost, and compiling for "compile".

    Used by one thread; others may read `now` and `limit`. `spent` are the seconds of the run's
    earlier sessions by phase, without the seconds `lost` with steps that have to be made again. The
    time between phases of a step is "other".
    """

    def __init__(self, spent: Mapping[str, float] | None = None, *, lost: float = 0.0):
        self._spent, self._found = Counter(spent or {}), Counter[str]()
        if lost:
            self._found["lost"] = lost
        self._open: list[str] = []
        self._longest: dict[str, float] = {}
        self._thread = threading.get_ident()
        self._turned, self._step = time.perf_counter(), 0.0
        self.now: tuple[str, float] = ("start", time.monotonic())
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Counts the time of the block for a phase."""
        self._turn()
        self._open.append(phase)
        self.now = (phase, time.monotonic())
        try:
            yield
        finally:
            self._turn()
            self._open.pop()
            self.now = (self._open[-1] if self._open else "other", time.monotonic())

    def beat(self) -> None:
        """Something was done in the phase: a longer wait begins anew. Callable from any thread."""
        self.now = (self.now[0], time.monotonic())

    def limit(self, least: float, factor: float) -> float:
        """Seconds without progress after which the present phase counts as stalled."""
        longest = self._longest.get(self.now[0])
        return FIRST * least if longest is None else max(least, factor * longest)

    def restart(self) -> None:
        """Begins a step."""
        self._turn()
        self._step = sum(n for phase, n in self._found.items() if phase not in OUTSIDE)

    def lap(self, idle_inside: float = 0.0) -> dict[str, float]:
        """Ends a step; its seconds by phase, and those since the last step spent outside of it.

        `time/step` is without compiling; `time/idle_share` is its share in which no program ran,
        `idle_inside` seconds of the rollout among it; `time/goodput` the share of steps in all of
        the run's time so far.
        """
        self._turn()
        found, self._found = self._found, Counter[str]()
        self._spent.update(found)
        steps = lambda some: sum(n for name, n in some.items() if name not in OUTSIDE)
        step = steps(found) - self._step
        busy = step - found["other"] - sum(found[name] for name in HOST) - idle_inside
        out = {f"time/{name}": value for name, value in found.items()}
        out |= {"time/step": step, "time/idle_share": 1 - busy / max(step, 1e-9)}
        return out | {"time/goodput": steps(self._spent) / max(sum(self._spent.values()), 1e-9)}

    def in_words(self) -> str:
        """The run's time so far and the shares of what it went into, as a line."""
        self._turn()
        whole = self._spent + self._found
        total = max(sum(whole.values()), 1e-9)
        shares = [f"{NAMES.get(name, name)} {value / total:.0%}" for name, value in whole.most_common()
                  if value >= 0.005 * total]  # fmt: skip
        return f"{duration(total)} in all: {', '.join(shares)}"

    def _turn(self) -> None:
        """Counts the time since the last turn for the innermost phase."""
        now = time.perf_counter()
        phase = self._open[-1] if self._open else "other"
        self._found[phase] += now - self._turned
        self._longest[phase] = max(self._longest.get(phase, 0.0), now - self._turned)
        self._turned = now

    def _heard(self, event: str, seconds: float, **_: object) -> None:
        if event == COMPILING and threading.get_ident() == self._thread:
            self._found["compile"] += seconds
            self._found[self._open[-1] if self._open else "other"] -= seconds


def duration(seconds: float) -> str:
    """Seconds for people: 42 s, 3 min 20 s, 5 h 10 min."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
