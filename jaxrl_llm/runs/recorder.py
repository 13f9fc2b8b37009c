"""What the steps of a phase leave for people: a record each, alarms, samples."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm import hosts
from jaxrl_llm.errors import UserError
from jaxrl_llm.learning.step import Step
from jaxrl_llm.runs import alarms, journal
from jaxrl_llm.runs.journal import Journal


class Recorder:
    """Records each step of a phase while the devices work at the one after it.

    `advance` is told its figures, `show` gets the step. Alarms look at all steps of the phase; the run is ended
    only for what those of this process show.
    """

    def __init__(
        self,
        written: Journal,
        phase: str,
        advance: Callable[[int, Mapping[str, Any]], None],
        *,
        most_unchecked: float,
        show: Callable[[Step], None] = lambda _: None,
    ):
        self._journal, self._phase, self._advance, self._show = written, phase, advance, show
        self._most_unchecked = most_unchecked
        self._records: list[dict[str, float]] = [
            r for r in journal.read(written.folder) if r["phase"] == phase and "updates" in r
        ]
        self._before = len(self._records)
        self._said: set[str] = set()
        self._held: list[Step] = []
        self._unshown: Step | None = None
        self.last: Step | None = None

    def hold(self, step: Step) -> None:
        """The step to record next, after those that could not be written."""
        self._held.append(step)
        self.last = step

    def flush(self) -> None:
        """Records and shows it now, as far as it has not been yet; all processes know whether that went well."""
        with hosts.together():
            while self._held:
                self._record(self._held[0])
                self._unshown = self._held.pop(0)
            if self._unshown is not None:
                self._show(self._unshown)
                self._unshown = None

    def _record(self, step: Step) -> None:
        values = step.metrics()
        records = [*self._records, {name: float(value) for name, value in values.items()}]
        found = alarms.alarms(records)
        alarmed = {f"alarm/{kind}": 1 for kind in found}
        self._journal.record(step.number, self._phase, values | alarmed)
        self._records = records
        self._advance(step.number, values)
        for kind, text in found.items():
            if kind not in self._said:
                self._said.add(kind)
                self._journal.say(f"  step {step.number}: warning: {text}")

    def check(self) -> None:
        """A UserError where the steps recorded by this process give no reason to go on."""
        here = self._records[self._before :]
        if reason := alarms.reason_to_stop(here, self._most_unchecked):
            raise UserError(reason)
