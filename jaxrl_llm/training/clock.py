"""The time that a run spends, phase by phase, over all of its sessions."""

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import jax

from jaxrl_llm import storage
from jaxrl_llm.training.terminal import duration

PHASES = ("rollout", "reward", "collate", "score", "update", "sync", "other")  # of steps
HOST = ("reward", "collate")  # phases of a step in which no program runs on the devices
OUTSIDE = ("start", "compile", "save", "evaluation", "lost")  # what is no step
COMPILING = "/jax/core/compile/backend_compile_duration"  # an event of JAX's
FIRST = 6.0  # times the least limit, for the first phase of a name: it compiles
ALL = (*PHASES, *OUTSIDE)
NAMES = {"start": "starting", "compile": "compiling", "save": "saving", "lost": "lost to restarts"}


class Clock:
    """Seconds by phase; nested phases count for the innermost, and compiling for "compile".

    Used by one thread, and hears of compiling within its `with` block; other threads may call `beat`
    and `limit`, and read `now`. The time between phases is "other"; before `begin` it is "start", from
    `since` on (by `time.perf_counter`), if that is given.
    """

    def __init__(self, *, since: float | None = None):
        self._spent = defaultdict[str, float](float)
        self._since_lap = defaultdict[str, float](float)
        self._before: dict[str, float] = {}  # `_found` when the step began
        self._idle = 0.0
        self._turned = self._beaten = self._others = time.perf_counter()
        self._between = "other"
        if since is not None:
            self._since_lap["start"], self._between = self._turned - since, "start"
        self._open: list[str] = []
        self._longest: dict[str, float] = {}
        self._thread = threading.get_ident()

    def __enter__(self) -> Self:
        jax.monitoring.register_event_duration_secs_listener(self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._heard)

    def begin(self, spent: Mapping[str, float], *, lost: float = 0.0) -> None:
        """Ends the start. `spent` are the seconds of the run's earlier sessions by phase.

        `lost` are those of steps that have to be made again, which are not in `spent`.
        """
        self._turn()
        self._between = "other"
        self._spent.update(spent)
        if lost:
            self._since_lap["lost"] = lost

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Counts the time of the block for a phase."""
        self._turn()
        self._open.append(phase)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    @property
    def now(self) -> tuple[str, float]:
        """The present phase, and when something was last done in it."""
        return self._phase, max(self.last_here, self._others)

    @property
    def last_here(self) -> float:
        """When something was last done in this process, and not in others."""
        return max(self._turned, self._beaten, storage.heard())

    def others_went_on(self) -> None:
        """Something was done in another process, which this one may wait for. Callable from any thread."""
        self._others = time.perf_counter()

    @property
    def since(self) -> tuple[str, float]:
        """The present phase, and the seconds since it began, or an inner one ended. For any thread."""
        return self._phase, time.perf_counter() - self._turned

    def heartbeat(self) -> None:
        """Something was done in the phase: a longer wait begins anew. Callable from any thread."""
        self._beaten = time.perf_counter()

    def limit(self, least: float, factor: float) -> float:
        """Seconds without progress after which the present phase counts as stalled."""
        phase = self._phase
        longest = self._longest.get(phase)
        # a save may wait for the one before it to be written, however short all others were
        first = FIRST * least * (longest is None or phase == "save")
        return max(least, first, factor * (longest or 0.0))

    def restart(self) -> None:
        """Begins a step."""
        self._turn()
        self._before, self._idle = dict(self._since_lap), 0.0

    def idle(self, seconds: float) -> None:
        """No program ran on the devices for so many seconds of the rollout."""
        self._idle += seconds

    def lap(self) -> dict[str, float]:
        """Ends a step; its seconds by phase, and those since the last step spent outside of it.

        `time/step` is without compiling; `time/idle_share` is its share in which no program ran;
        `time/goodput` the share of steps in all of the run's time so far.
        """
        self._turn()
        by_phase, self._since_lap = self._since_lap, defaultdict[str, float](float)
        inside = defaultdict(float, {n: x - self._before.get(n, 0.0) for n, x in by_phase.items()})
        self._before = {}
        for name, seconds in by_phase.items():
            self._spent[name] += seconds
        steps = lambda some: sum(n for name, n in some.items() if name not in OUTSIDE)
        step = steps(inside)
        busy = step - inside["other"] - sum(inside[name] for name in HOST) - self._idle
        out = {f"time/{name}": value for name, value in by_phase.items()}
        out |= {"time/step": step, "time/idle_share": 1 - busy / max(step, 1e-9)}
        return out | {"time/goodput": steps(self._spent) / max(sum(self._spent.values()), 1e-9)}

    def in_words(self) -> str:
        """The run's time so far and the shares of what it went into, as a line."""
        self._turn()
        whole = {name: self._spent[name] + self._since_lap[name] for name in ALL}
        total = max(sum(whole.values()), 1e-9)
        large = sorted(
            (name for name in ALL if whole[name] >= 0.005 * total), key=whole.__getitem__
        )
        shares = [f"{NAMES.get(name, name)} {whole[name] / total:.0%}" for name in large[::-1]]
        return f"{duration(total)} in all: {', '.join(shares)}"

    @property
    def _phase(self) -> str:
        return [self._between, *self._open][-1]  # in one step: another thread may ask meanwhile

    def _turn(self) -> None:
        """Counts the time since the last turn for the innermost phase."""
        now, phase = time.perf_counter(), self._phase
        self._since_lap[phase] += now - self._turned
        self._longest[phase] = max(self._longest.get(phase, 0.0), now - self._turned)
        self._turned = now

    def _heard(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILING and threading.get_ident() == self._thread:
            self._since_lap["compile"] += duration_secs
            self._since_lap[self._phase] -= duration_secs


def spent(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds by phase in these records of a run; those of its steps have them all."""
    steps = [record for record in records if "time/step" in record]
    return {name: sum(record.get(f"time/{name}", 0.0) for record in steps) for name in ALL}
