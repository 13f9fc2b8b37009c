"""The records of a run: metrics.jsonl, TensorBoard, Weights & Biases, samples, the terminal."""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, cast

import rich.console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2, summary_pb2

from jaxrl_llm import storage
from jaxrl_llm.errors import UserError, first_line, printable
from jaxrl_llm.training import alarms
from jaxrl_llm.training.terminal import duration

METRICS = "metrics.jsonl"
WANDB = "JAXRL_WANDB"  # the environment variable that asks for Weights & Biases
WARM_START, REINFORCE = "warm_start", "reinforce"  # the phases of a run
SETTLED = 3  # steps after which the time of a step is no longer that of compiling
_event, _summary = cast(Any, event_pb2), cast(Any, summary_pb2)  # members are made on import
logger = logging.getLogger(__name__)
Record = dict[str, Any]


def read(folder: Path) -> list[Record]:
    """The records of a run, one a step or evaluation; leaves out damaged lines with a warning."""
    path = folder / METRICS
    lines = (path.read_bytes() if path.exists() else b"").split(b"\n")
    found = [_parsed(line) for line in lines[:-1]]  # a kill may have cut the last line
    if damaged := found.count(None):
        logger.warning("%d damaged lines of %s are left out", damaged, path)
    return [record for record in found if record is not None]


def scores(records: list[Record]) -> dict[int, float]:
    """Validation accuracy by step, from the start of reinforcement on."""
    name = "eval/accuracy"
    return {r["step"]: r[name] for r in records if r["phase"] == REINFORCE and name in r}


def best(
    records: list[Record], steps: list[int], regular: Callable[[int], bool] = lambda step: True
) -> int | None:
    """Of these steps the one of the highest validation accuracy, the later of equals; or None.

    Never the best: the policy from before reinforcement, and a step saved only because of a stop.
    """
    known, highest, fit = scores(records), -1.0, {}
    for step in sorted(known)[1:]:
        if regular(step) or known[step] > highest:
            fit[step] = known[step]
        highest = max(highest, known[step])
    return max((s for s in steps if s in fit), key=lambda s: (fit[s], s), default=None)


class Journal:
    """Writes the records of a run; processes other than the writer only keep them in `records`.

    `records` are those of the run so far, of the writer's folder. Leaving the block without an
    error ends the run at Weights & Biases, too.
    """

    def __init__(
        self,
        folder: Path,
        console: rich.console.Console,
        records: list[Record] | None = None,
        *,
        writes: bool = True,
    ):
        self.folder, self.console, self._writes = folder, console, writes
        self.records = read(folder) if records is None else records
        self._board: _Board | None = None
        self._wandb: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._board:
            self._board.close()
            self._board = None
        if kind is None:
            self.sync()
            self._log(lambda: self._wandb.finish())

    def start(self, after: int) -> None:
        """Opens the files; drops records of steps after `after` (-1: all records)."""
        known, self.records = self.records, [r for r in self.records if r["step"] <= after]
        if not self._writes:
            return
        there = {r["step"] for r in self.records}
        if lost := [n for n in range(min(there, default=1), after + 1) if n not in there]:
            self.say(f"{len(lost)} steps have no record in {METRICS}, the first is step {lost[0]}")
        storage.write(self.folder / METRICS, b"".join(map(_line, self.records)))
        self._board = _Board(self.folder / "tensorboard", after + 1 if known else None)
        self._wandb = self._start_wandb()

    def record(self, step: int, phase: str, values: Mapping[str, Any]) -> None:
        """Adds a record of a step: to the files, TensorBoard and Weights & Biases."""
        values = {n: v if isinstance(v, int) else float(v) for n, v in values.items()}
        record = {"step": step, "phase": phase, **values}
        if self._board:
            named = {f"{phase}/{name}": value for name, value in values.items()}
            self._board.add(step, named)
            # after TensorBoard: a step that failed there is recorded again
            with (self.folder / METRICS).open("ab") as file:
                file.write(_line(record))
            self._log(lambda: self._wandb.log(named, step=step))
        self.records.append(record)

    def find(self, name: str, step: int, phase: str) -> float | None:
        """The metric `name` of a recorded step, or None."""
        here = (r for r in self.records if r["step"] == step and r["phase"] == phase and name in r)
        return next((r[name] for r in here), None)

    def sync(self) -> None:
        """Syncs the records to disk, so that no checkpoint saved after this is ahead of them."""
        if self._writes:
            storage.sync(self.folder / METRICS)

    def say(self, text: Any) -> None:
        """Prints a line or a table on the terminal."""
        self.console.print(text)

    def samples(self, step: int, entries: list[tuple[str, str, str]]) -> None:
        """Writes responses for people to samples/step-N.md: (prompt, response, remark) each."""
        if not self._writes:
            return
        lines = [f"# Sampled responses, step {step}", ""]
        for prompt, response, remark in entries:
            lines += ["## Prompt", "", _quoted(prompt), ""]
            lines += [f"**{remark}**", "", _quoted(response), ""]
        folder = self.folder / "samples"
        folder.mkdir(exist_ok=True)
        storage.write(folder / f"step-{step:06d}.md", "\n".join(lines))

    def _log(self, call: Callable[[], Any]) -> None:
        """Calls Weights & Biases, whose errors never end a run."""
        if self._wandb is None:
            return
        try:
            call()
        except Exception as error:  # the library's own errors have no common base
            logger.warning("Weights & Biases is left out from here on: %s", first_line(error))
            self._wandb = None

    def _start_wandb(self) -> Any:
        """The run at Weights & Biases, resumed by its id; None unless the variable asks for it."""
        if os.environ.get(WANDB, "0") in ("", "0"):
            return None
        identity = json.loads((self.folder / "run.json").read_bytes())["id"]
        name = self.folder.absolute().name
        try:
            import wandb  # pyright: ignore[reportMissingImports]

            return wandb.init(
                project="jaxrl_llm", name=name, dir=self.folder, id=identity, resume="allow"
            )
        except Exception as error:  # as in `_log`; but a run that has not begun may end
            raise UserError(
                f"Weights & Biases does not start ({first_line(error)}): pip install wandb, log in to it, or "
                f"leave {WANDB} out"
            ) from error


_SHOWN = {
    "reward": "reward {:.2f}",
    "accuracy": "accuracy {:.0%}",
    "loss": "loss {:.3f}",
    "length": "length {:.0f}",
    "kl_reference": "KL {:.4f}",
    "time/tokens_per_second": "{:,.0f} tokens/s",
    "time/step": "{:.2f} s a step",
}


class Recorder:
    """Records a phase's steps, each while the devices work on the next; shows a progress bar.

    `hold` takes the metrics of a step, `flush` fetches and records them; alarms see all of them.
    An evaluation comes `every` so many steps, and at the end.
    """

    def __init__(
        self,
        journal: Journal,
        phase: str,
        steps: range,
        start: int,
        most_unchecked: float,
        every: int,
    ):
        self._journal, self._phase, self._steps = journal, phase, steps
        self._most_unchecked, self._every, self._said = most_unchecked, every, set()
        self._start = start
        mine = lambda r: r["phase"] == phase and "updates" in r  # steps, and no evaluations
        self._records = [r for r in journal.records if mine(r)]
        self._before = len(self._records)
        self._pending: tuple[int, Callable[[], Mapping[str, Any]]] | None = None
        figures = Column(no_wrap=True, ratio=1)
        self._progress = Progress(
            "{task.description}",
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            "left",
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}", table_column=figures),
            console=journal.console,
            expand=True,
        )
        self._title = phase.replace("_", " ")
        self._bar = self._progress.add_task(
            self._title, total=len(steps), completed=start - steps.start, figures=""
        )

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Shows the progress bar for the block, and says first that the first step compiles."""
        if self._start < self._steps.stop:
            before = max((r.get("time/compile", 0.0) for r in self._records), default=0.0)
            known = f", {duration(before)} when it last did" if before else ""
            self._journal.say(f"{self._title}: the first step also compiles its programs{known}")
        with self._progress:
            yield
        self._progress.remove_task(self._bar)

    def hold(self, step: int, figures: Callable[[], Mapping[str, Any]]) -> None:
        """Sets the step that `flush` records; `figures()` may wait for the devices."""
        self._pending = step, figures

    def flush(self) -> None:
        """Records the step given to `hold`, if there is one, and prints new alarms."""
        if self._pending is None:
            return
        (step, figures), self._pending = self._pending, None
        values = figures()
        self._records.append({name: float(value) for name, value in values.items()})
        found = alarms.alarms(self._records)
        alarmed = {f"alarm/{kind}": 1 for kind in found}
        self._journal.record(step, self._phase, {**values, **alarmed})
        self._show(step, values)
        for kind, text in found.items():
            if kind not in self._said:
                self._said.add(kind)
                self._journal.say(f"  step {step}: warning: {text}")

    def check(self) -> None:
        """A UserError if the steps recorded by this process show that the run should not go on."""
        here = self._records[max(self._before, len(self._records) - alarms.WINDOW) :]
        if reason := alarms.reason_to_stop(here, self._most_unchecked):
            raise UserError(reason)

    def _show(self, step: int, values: Mapping[str, Any]) -> None:
        done = step - self._steps.start
        known = [text.format(float(values[n])) for n, text in _SHOWN.items() if n in values]
        self._progress.update(self._bar, completed=done, figures=" | ".join(known))
        left = len(self._steps) - done
        if len(self._records) - self._before == SETTLED and left and "time/step" in values:
            self._journal.say(f"{self._title}: {self._to_go(done, float(values['time/step']))}")
        rarely = done % max(1, len(self._steps) // 20) == 0
        if not self._progress.console.is_terminal and rarely:
            self._journal.say(f"{done}/{len(self._steps)} {' | '.join([self._title, *known])}")

    def _to_go(self, done: int, seconds: float) -> str:
        """The rest of the phase in words, at so many seconds a step."""
        total = len(self._steps)
        left, evaluations = total - done, [*range(self._every, total, self._every), total]
        due = sum(step > done for step in evaluations)
        named = {"eval/accuracy", "time/evaluation"}
        known = [r["time/evaluation"] for r in self._journal.records if named <= r.keys()]
        said = duration(left * seconds + due * min(known, default=0.0))
        steps, tests = (
            f"{n} {what}{'s'[n == 1 :]}" for n, what in ((left, "step"), (due, "evaluation"))
        )
        return f"{steps} to go, about {said} {'with' if known else 'and'} {tests}"


class _Board:
    """TensorBoard event files, written at once.

    tensorboardX's own writer has a thread, which would wait for ever on a full disk.
    """

    def __init__(self, folder: Path, purge: int | None):
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"))
        self.close = self._writer.close
        if purge is not None:  # makes TensorBoard drop later steps
            start = _event.SessionLog(status=_event.SessionLog.START)
            self._write(step=purge, session_log=start)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        points = [_summary.Summary.Value(tag=name, simple_value=x) for name, x in values.items()]
        self._write(step=step, summary=_summary.Summary(value=points))

    def _write(self, **event: Any) -> None:
        self._writer.write_event(_event.Event(wall_time=time.time(), **event))
        self._writer.flush()


def _line(record: Record) -> bytes:
    return json.dumps(record).encode() + b"\n"


def _parsed(line: bytes) -> Record | None:
    try:
        found = json.loads(line)
    except ValueError:  # not JSON, or not UTF-8
        return None
    whole = isinstance(found, dict) and isinstance(found.get("step"), int) and "phase" in found
    return found if whole else None


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}" for line in printable(text).splitlines() or [""])
