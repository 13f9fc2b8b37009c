"""The record of a run's steps: metrics, lines on the terminal, seconds by phase."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from statistics import fmean
from typing import Any, Self

from jaxrl_llm.errors import UserError
from jaxrl_llm.training import alarms
from jaxrl_llm.training.clock import Clock
from jaxrl_llm.training.journal import REINFORCE, WARM_START, Journal
from jaxrl_llm.training.terminal import duration

_SECONDS = ("s/step", 9, ".2f", "time/step")
_COLUMNS = {  # of the line of a step: title, width, form, and the figure, the first one that a step has
    WARM_START: (("loss", 9, ".3f", "loss"), _SECONDS),
    REINFORCE: (
        ("reward", 8, ".2f", "reward"),
        ("accuracy", 10, ".0%", "accuracy"),
        ("length", 8, ",.0f", "length"),
        ("KL", 9, ".4f", "kl_reference", "kl_teacher"),
        ("tokens/s", 11, ",.0f", "time/tokens_per_second"),
        _SECONDS,
    ),
}
WAIT = 60.0  # seconds after which a phase before the first step's end is told of
_HEAD = 25  # lines after which the titles are said again
_PACE = 2.0  # seconds between lines of steps, but the first and the last of a phase
_RECENT = 10  # steps whose mean time tells how long the rest will take

Figures = Callable[[], Mapping[str, Any]]


class RunLog:
    """The log of a run; in each step of a phase, `step` for the whole and `phase` for its parts.

    A step is recorded by `flush`, while the devices work on the next one: fetching its metrics from
    them would else keep both waiting. Alarms see all steps. An evaluation comes `every` so many
    steps of the phase, and at its end.
    """

    def __init__(
        self,
        journal: Journal,
        clock: Clock,
        max_ungraded: float = 1.0,
        equal_rewards_teach: bool = False,
    ):
        self.journal, self.clock, self._most_ungraded = journal, clock, max_ungraded
        self._equal_rewards_teach = equal_rewards_teach
        self.phase = clock  # `with log.phase(name)` counts the time of the block
        self._pending: tuple[int, Figures] | None = None
        self._figures: Figures = dict
        self._at_end: list[Callable[[], None]] = []
        self._records: list[Mapping[str, Any]] = []
        self.progress: Callable[[], str] = str  # of the present phase in words

    def begin(self, phase: str, steps: range, start: int, every: int) -> None:
        """Begins a phase, or goes on with it after step `start`; says that the first step compiles."""
        self._phase, self._steps, self._every, self._warned = phase, steps, every, set[str]()
        mine = lambda r: r["phase"] == phase and "updates" in r  # steps, and no evaluations
        self._records = [r for r in self.journal.records if mine(r)]
        self._before = len(self._records)
        self._title, self._lines = phase.replace("_", " "), 0
        self._next_line = -math.inf  # by the monotonic clock
        if start < steps.stop:
            before = max((r.get("time/compile", 0.0) for r in self._records), default=0.0)
            known = f", {duration(before)} when it last did" if before else ""
            self.journal.say(f"{self._title}: the first step also compiles its programs{known}")

    @contextmanager
    def step(self, step: int) -> Iterator[Self]:
        """For the block, makes the step: what it gave to `at_end` is called when it has ended.

        Its record is whole even if that raises. A UserError if the run should not go on.
        """
        self.clock.restart()
        self._figures, self._at_end = dict, []  # whatever a step that failed has left
        yield self
        self.flush()  # the step before, where the phase has not done so
        seconds: dict[str, float] = {}
        figures = self._figures
        self._pending = step, lambda: {**figures(), **seconds}
        try:
            for work in self._at_end:
                work()
        finally:
            self._at_end = []  # what they hold of the step is let go
            seconds |= self.clock.lap()
        self.require_progress()

    def tell(self) -> None:
        """Says how long the present phase has taken, until a step has said how long one takes."""
        phase, seconds = self.clock.since
        if seconds >= WAIT and not self._records:
            self.journal.say(f"  {phase}: {duration(seconds)} so far{self.progress()}")

    def later(self, figures: Callable[..., Mapping[str, Any]], *args: Any) -> None:
        """Gives the step's metrics; `figures(*args)` may wait for the devices."""
        self._figures = partial(figures, *args)

    def at_end(self, work: Callable[..., None], *args: Any) -> None:
        """Has `work(*args)` called when the step has been made: its errors cost no step."""
        self._at_end.append(partial(work, *args))

    def flush(self) -> None:
        """Records the last step, if it is not yet, and prints new alarms."""
        if self._pending is None:
            return
        (step, figures), self._pending = self._pending, None
        values = figures()
        self._records.append({name: float(value) for name, value in values.items()})
        found = alarms.alarms(self._records, self._equal_rewards_teach)
        alarmed = {f"alarm/{kind}": 1 for kind in found}
        self.journal.record(step, self._phase, {**values, **alarmed})
        self._records[-1] = self.journal.records[-1]  # kept once
        self._show(step, values)
        for kind, text in found.items():
            if kind not in self._warned:
                self._warned.add(kind)
                self.journal.say(f"  step {step}: warning: {text}", "yellow")

    def require_progress(self) -> None:
        """A UserError if the steps recorded by this process show that the run should not go on."""
        here = self._records[max(self._before, len(self._records) - alarms.WINDOW) :]
        if reason := alarms.reason_to_stop(here, self._most_ungraded):
            raise UserError(reason)

    def _show(self, step: int, values: Mapping[str, Any]) -> None:
        """A line of at most 80 columns: the step, its figures, and how long the phase will go on."""
        done, total = step - self._steps.start, len(self._steps)
        if time.monotonic() < self._next_line and done < total:
            return
        self._next_line = time.monotonic() + _PACE
        recent = [r["time/step"] for r in self._records[-_RECENT:] if "time/step" in r]
        columns = _COLUMNS.get(self._phase, _COLUMNS[WARM_START])
        if self._lines % _HEAD == 0:
            titles = "".join(f"{title:>{width}}" for title, width, *_ in columns)
            self.journal.say(f"{self._title:<13}{titles}{'left':>12}")
        self._lines += 1
        cells = ""
        for _, width, form, *names in columns:
            there = [format(float(values[name]), form) for name in names if name in values]
            cells += f"{there[0] if there else '-':>{width}}"
        left = duration(self._left(done, fmean(recent))) if recent else "-"
        self.journal.say(f"{f'{done}/{total}':>13}{cells}{left:>12}")

    def _left(self, done: int, seconds: float) -> float:
        """The rest of the phase at so many seconds a step, with its evaluations if one is known."""
        total, named = len(self._steps), {"eval/accuracy", "time/evaluation"}
        due = sum(step > done for step in {*range(self._every, total, self._every), total})
        known = [r["time/evaluation"] for r in self.journal.records if named <= r.keys()]
        return (total - done) * seconds + due * min(known, default=0.0)
