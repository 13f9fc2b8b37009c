"""What is seen of a study while it is made."""

import time
from collections.abc import Mapping

import rich.live
import rich.table

from jaxrl_llm.runs import fleet, journal
from jaxrl_llm.runs.notes import REINFORCE

REDRAW = 5.0  # seconds


class Watch:
    """The live table: a line a variant, a column a seed; where there is no terminal, a line a run."""

    def __init__(self, grid, runs, lengths, console):
        self.grid, self.runs, self.lengths, self.console = grid, runs, lengths, console
        self.cells: dict[str, str] = {}
        self.shown: dict[str, str] = {}
        self.next = 0.0
        self.live = rich.live.Live(console=console, auto_refresh=False)

    def __enter__(self):
        if self.console.is_terminal:
            self.live.start()
        return self.look

    def __exit__(self, *_):
        self.live.stop()

    def look(self, states: Mapping[str, str]) -> None:
        """Shows what has changed."""
        changed = {n: s for n, s in states.items() if self.shown.get(n, fleet.WAITING) != s}
        self.shown.update(changed)
        if not self.console.is_terminal:
            for name, state in changed.items():
                self.console.print(
                    f"{time.strftime('%H:%M')} {state} {name} {self._progress(name)}"
                )
        elif changed or time.monotonic() > self.next:
            self.next = time.monotonic() + REDRAW
            self.live.update(self._table(states), refresh=True)

    def _table(self, states: Mapping[str, str]) -> rich.table.Table:
        seeds = sorted({run.seed for run in self.runs})
        busy = sum(state == fleet.RUNNING for state in states.values())
        left = sum(state == fleet.WAITING for state in states.values())
        title = f"{self.grid.title}: step and held-out accuracy; {busy} running, {left} waiting"
        table = rich.table.Table("", *(f"seed {seed}" for seed in seeds), title=title)
        warm = [self.grid.study.warm_start(run) for run in self.runs]
        rows: dict[tuple[str, str], dict[int, str]] = {}
        for run in [*warm, *self.runs]:
            state = states.get(run.name, fleet.DONE)
            if (
                run.name not in self.cells
                or state != self.cells[run.name].partition(" ")[0]
                or (state == fleet.RUNNING)
            ):
                self.cells[run.name] = f"{state} {self._progress(run.name)}"
            rows.setdefault((run.panel, run.variant), {})[run.seed] = self.cells[run.name]
        for (panel, variant), cells in rows.items():
            table.add_row(f"{panel} {variant}".strip(), *(cells.get(seed, "") for seed in seeds))
        return table

    def _progress(self, name: str) -> str:
        records = journal.read(self.grid.out / "runs" / name)
        if not records:
            return ""
        step, scores = records[-1]["step"], [r for r in records if "eval/accuracy" in r]
        score = f" {100 * scores[-1]['eval/accuracy']:.1f}%" if scores else ""
        begin, steps = self.lengths[name]
        if records[-1]["phase"] == REINFORCE and steps:
            return f"{step - begin}/{steps}{score}"
        return f"warm {step}/{begin}{score}"
