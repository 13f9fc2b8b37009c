"""Where a run writes down what happens: metrics.jsonl, TensorBoard, Weights & Biases, the terminal."""

import importlib.util
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, Self, cast

import rich.console
import rich.progress
from rich.table import Column
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2, summary_pb2

from jaxrl_llm import desk, files
from jaxrl_llm.errors import UserError, first_line
from jaxrl_llm.runs import record, seal

APART = ("checkpoints", "reference")  # in a bucket they are stored by themselves
METRICS, DAMAGED = "metrics.jsonl", "metrics.damaged.jsonl"
WANDB = "JAXRL_WANDB"  # the environment variable that asks for Weights & Biases
_event, _summary = cast(Any, event_pb2), cast(Any, summary_pb2)  # made when they are imported
logger = logging.getLogger(__name__)


class Journal:
    """Writes a run down, one record a step; on resume what came after the checkpoint is forgotten first.

    `check` is called before anything is written: it raises where the folder is no longer ours.
    """

    def __init__(
        self,
        folder: Path,
        console: rich.console.Console,
        *,
        check: Callable[[], None] = lambda: None,
    ):
        self.folder, self.console, self._check = folder, console, check
        self._open = ExitStack()
        self.progress = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(bar_width=12),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TextColumn("left"),
            rich.progress.TimeRemainingColumn(),
            rich.progress.TextColumn(
                "{task.fields[figures]}", table_column=Column(no_wrap=True, ratio=1)
            ),
            console=console,
            expand=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Lets go of the files, where an error has kept them from being closed: that is what will be told."""
        with suppress(OSError):
            self._open.close()

    def start(self, after: int = -1) -> None:
        """Opens the files; what they hold of steps later than `after` is forgotten."""
        self._wandb = self._start_wandb()
        records, damaged = _parsed(self.folder)
        kept = [r for r in records if r["step"] <= after]
        path = self.folder / METRICS
        with self._writing(METRICS):
            if damaged:
                with (self.folder / DAMAGED).open("ab") as file:
                    file.write(b"\n".join([*damaged, b""]))
                self.say(
                    f"{len(damaged)} damaged lines of {METRICS} were set aside in {self.folder / DAMAGED}"
                )
            there = {r["step"] for r in kept}
            if lost := [n for n in range(min(there, default=1), after + 1) if n not in there]:
                self.say(
                    f"{len(lost)} steps have no record in {path}, the first is step {lost[0]}: "
                    "the file has lost its end"
                )
            files.write(path, b"".join(map(seal.line, kept)).decode())
            self._file = self._open.enter_context(path.open("ab", buffering=0))
            self._board = _Board(self.folder / "tensorboard", after + 1 if kept else None)
            self._open.callback(self._board.close)

    def record(self, step: int, phase: str, values: Mapping[str, Any]) -> None:
        """One line of metrics."""
        values = {name: _plain(value) for name, value in values.items()}
        with self._writing(METRICS):
            self._board.add(step, {f"{phase}/{name}": value for name, value in values.items()})
            # the record last: a step that failed before it is recorded again
            _append(self._file, seal.line({"step": step, "phase": phase, **values}))
        if self._wandb is not None:
            self._wandb.log({f"{phase}/{name}": value for name, value in values.items()}, step=step)

    def sync(self) -> None:
        """The records to the disk, so that what is saved after this is never ahead of them."""
        with self._writing(METRICS):
            os.fsync(self._file.fileno())

    def say(self, text: Any) -> None:
        """A line, or a table, on the terminal."""
        self.console.print(desk.spoken(text) if isinstance(text, str) else text)

    def samples(self, step: int, title: str, entries: list[tuple[str, str, str]]) -> None:
        """Sampled responses for people: (prompt, response, remark) each, in samples/step-N.md."""
        lines = [f"# {title}, step {step}", ""]
        for prompt, response, remark in entries:
            lines += [
                "## Prompt",
                "",
                _quoted(prompt),
                "",
                f"**{remark}**",
                "",
                _quoted(response),
                "",
            ]
        folder = self.folder / "samples"
        with self._writing("samples"):
            folder.mkdir(exist_ok=True)
            files.write(folder / f"step-{step:06d}.md", "\n".join(lines))

    def close(self) -> None:
        """Everything to disk."""
        with self._writing(METRICS):
            os.fsync(self._file.fileno())
            self._open.close()
        if self._wandb is not None:
            self._wandb.finish()

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """Asks whether the folder is ours; an error of the disk becomes one line."""
        self._check()
        try:
            yield
        except OSError as error:
            raise UserError(
                f"cannot write {what} to {self.folder}: {error.strerror or error}: make room or permit "
                "writing, then go on with --resume"
            ) from error

    def _start_wandb(self) -> Any:
        """A Weights & Biases run, where the environment variable asks for one; a resumed run goes on with it."""
        if os.environ.get(WANDB, "0") in ("", "0"):
            return None
        if importlib.util.find_spec("wandb") is None:
            raise UserError(
                f"{WANDB} asks for Weights & Biases, which is not installed: pip install wandb"
            )
        import wandb  # pyright: ignore[reportMissingImports]

        try:
            return wandb.init(
                project="jaxrl_llm", name=self.folder.absolute().name, dir=self.folder,
                id=record.identity(self.folder), resume="allow",
            )  # fmt: skip
        except Exception as error:  # the library's own errors have no common base
            reason = first_line(error)
            raise UserError(
                f"Weights & Biases does not start ({reason}): log in to it, or leave {WANDB} out"
            ) from error


class Unwritten(Journal):
    """The journal of a process that leaves the writing to another."""

    def start(self, after: int = -1) -> None:
        """Nothing is opened."""

    def record(self, step: int, phase: str, values: Mapping[str, Any]) -> None:
        """Nothing is recorded."""

    def sync(self) -> None:
        """Nothing is to be on a disk."""

    def samples(self, step: int, title: str, entries: list[tuple[str, str, str]]) -> None:
        """Nobody is shown any."""

    def close(self) -> None:
        """Nothing is open."""


class _Board:
    """The scalars of a run as TensorBoard reads them, written where we stand: an error is ours to see."""

    def __init__(self, folder: Path, purge: int | None):
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"))
        if purge is not None:  # what a reader has seen of later steps is forgotten
            start = _event.SessionLog(status=_event.SessionLog.START)
            self._write(_event.Event(step=purge, session_log=start))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """All values of a step."""
        points = [
            _summary.Summary.Value(tag=name, simple_value=value) for name, value in values.items()
        ]
        self._write(_event.Event(step=step, summary=_summary.Summary(value=points)))

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        self._writer.write_event(event)
        self._writer.flush()


def store(folder: Path) -> None:
    """Puts what a run has written down into its bucket, if it lies in one."""
    desk.store(folder, but=APART)


def read(folder: Path) -> list[dict[str, Any]]:
    """The records of a run; damaged lines are left out with a warning, and a last one that is not complete."""
    records, damaged = _parsed(folder)
    if damaged:
        logger.warning(
            "%d damaged lines of %s are left out, first %r",
            len(damaged), folder / METRICS, damaged[0][:40],
        )  # fmt: skip
    return records


def _parsed(folder: Path) -> tuple[list[dict[str, Any]], list[bytes]]:
    """The records, and the lines that are none; a kill may have cut the last line, which counts as neither."""
    path = folder / METRICS
    lines = (path.read_bytes() if path.exists() else b"").split(b"\n")
    sealed = any(map(seal.is_sealed, lines))
    found = [_record(line) if seal.is_sealed(line) or not sealed else None for line in lines]
    damaged = [line for line, one in zip(lines[:-1], found, strict=False) if one is None]
    return [one for one in found if one is not None], damaged


def _record(line: bytes) -> dict[str, Any] | None:
    """The record of a line, if it is one."""
    try:
        found = seal.entry(line)
    except ValueError:  # not JSON, not UTF-8, or altered
        return None
    whole = isinstance(found, dict) and isinstance(found.get("step"), int) and "phase" in found
    return found if whole else None


def _append(file: FileIO, line: bytes) -> None:
    """The whole line or nothing of it."""
    size = os.fstat(file.fileno()).st_size
    try:
        written = 0
        while written < len(line):
            written += file.write(line[written:])
    except OSError:
        file.truncate(size)
        raise


def _plain(value: Any) -> float | int:
    return value if isinstance(value, int) else float(value)


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.splitlines() or [""])
