"""The records of a run: metrics.jsonl, loggers, samples, the terminal."""

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import rich.console

from jaxrl_llm import storage
from jaxrl_llm.errors import printable

if TYPE_CHECKING:
    from jaxrl_llm.training.loggers import Loggers

METRICS = "metrics.jsonl"
PART = 1000  # records of a file in a bucket, where a file that has grown goes up whole
WARM_START, REINFORCE = "warm_start", "reinforce"  # the phases of a run
LOSS = "eval/loss"  # of rows that are imitated, on those that are not
# of mixed tasks what chooses the best checkpoint, in place of accuracy and mean reward over all of them
BEST_BY, BEST_BY_REWARD = "eval/best_by", "eval/best_by_reward"
logger = logging.getLogger(__name__)
Record = dict[str, Any]
Score = tuple[float, float]  # of a policy: accuracy, or the loss below 0; then the mean reward
LOWEST: Score = (-math.inf, 0.0)


def read(folder: Path) -> list[Record]:
    """The records of a run, one a step or evaluation; leaves out damaged lines with a warning."""
    lines: dict[bytes, None] = {}  # once each: a kill may leave a part beside the file of the whole
    for path in _parts(folder):
        whole, _, _ = path.read_bytes().rpartition(b"\n")  # a kill may have cut the last line
        lines |= dict.fromkeys(whole.split(b"\n") if whole else ())
    found = [*map(_parsed, lines)]
    if damaged := found.count(None):
        logger.warning("%d damaged lines of %s are left out", damaged, folder / METRICS)
    return [record for record in found if record is not None]


def _parts(folder: Path) -> list[Path]:
    """The files of records that there are, in their order: one, but of a run in a bucket."""
    others = sorted(folder.glob("metrics-[0-9]*.jsonl"), key=lambda path: (len(path.name), path))
    return [path for path in (folder / METRICS, *others) if path.exists()]


def _part(folder: Path, before: int) -> Path:
    """The file of a record after `before` others."""
    part = 0 if storage.shared(folder) else before // PART
    return folder / (f"metrics-{part}.jsonl" if part else METRICS)


def evaluations(records: Iterable[Record], figure: str = "eval/accuracy") -> list[Record]:
    """Those with this figure of an evaluation; one whose responses are all ungraded has none."""
    return [r for r in records if figure in r and r.get("eval/examples", 1)]


def learning(records: Sequence[Record]) -> tuple[Sequence[Record], str]:
    """The records of reinforcement, of rows that are imitated all; and what the first evaluation is before."""
    if any(LOSS in r for r in records):
        return records, "the first step"
    return [r for r in records if r["phase"] == REINFORCE], "reinforcement"


def scores(records: Sequence[Record]) -> dict[int, Score]:
    """Scores by step, of which the highest is the best checkpoint's, from the start of reinforcement on.

    The mean reward tells equal accuracies apart: a reward with degrees may never call a response correct. Of
    rows that are imitated it is the loss on others, below 0.
    """
    if losses := {r["step"]: (-r[LOSS], 0.0) for r in records if LOSS in r}:
        return losses
    ours = [r for r in learning(records)[0] if "eval/accuracy" in r]
    score = lambda r: (
        r.get(BEST_BY, r["eval/accuracy"]),
        r.get(BEST_BY_REWARD, r.get("eval/score", 0.0)),
    )
    # an evaluation whose responses are all ungraded is no better than any
    return {r["step"]: score(r) if r.get("eval/examples", 1) else LOWEST for r in ours}


def fit(
    records: list[Record], regular: Callable[[int], bool] = lambda step: True
) -> dict[int, Score]:
    """Scores of the steps that may be the best.

    That is not the policy from before reinforcement, nor a step saved only because of a stop.
    """
    known, highest, found = scores(records), LOWEST, {}
    for step in sorted(known)[1:]:
        if known[step] > LOWEST and (regular(step) or known[step] > highest):
            found[step] = known[step]
        highest = max(highest, known[step])
    return found


class Journal:
    """Writes the records of a run; processes other than the writer only keep them in `records`.

    `records` are those of the run so far, of the writer's folder; `on_record` is called with each new
    one, by the writer. Leaving the block without an error ends the run for its loggers, too.
    """

    def __init__(
        self,
        folder: Path,
        console: rich.console.Console,
        records: list[Record] | None = None,
        *,
        writes: bool = True,
        on_record: Callable[[Record], None] | None = None,
    ):
        self.folder, self.console = folder, console
        self._writes, self._on_record = writes, on_record
        self.records = read(folder) if records is None else records
        self._synced = len(self.records)
        self._loggers: Loggers | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.sync()
        finally:
            if self._loggers:
                self._loggers.close(finished=kind is None)

    def start(self, after: int) -> None:
        """Opens the files; drops records of steps after `after` (-1: all records)."""
        before, self.records = self.records, [r for r in self.records if r["step"] <= after]
        if not self._writes:
            return
        there = {r["step"] for r in self.records}
        if lost := [n for n in range(min(there, default=1), after + 1) if n not in there]:
            self.say(f"{len(lost)} steps have no record in {METRICS}, the first is step {lost[0]}")
        files: dict[Path, list[bytes]] = {_part(self.folder, 0): []}
        for i, record in enumerate(self.records):
            files.setdefault(_part(self.folder, i), []).append(_line(record))
        for path in reversed(files):  # the first one last: until then it may be the whole
            storage.write(path, b"".join(files[path]))
        for path in {*_parts(self.folder)} - {*files}:
            storage.remove(path)
        self._synced = len(self.records)
        from jaxrl_llm.training.loggers import Loggers  # which no other command needs

        self._loggers = Loggers(self.folder, after + 1 if before else None)

    def record(self, step: int, phase: str, values: Mapping[str, Any]) -> None:
        """Adds a record of a step: to the file, and for the loggers."""
        values = {n: v if isinstance(v, int) else float(v) for n, v in values.items()}
        record = {"step": step, "phase": phase, **values}
        if self._loggers:
            with _part(self.folder, len(self.records)).open("ab") as file:
                file.write(_line(record))
            self._loggers.log(step, {f"{phase}/{name}": value for name, value in values.items()})
            if self._on_record:
                self._on_record(record)
        self.records.append(record)

    def find(self, name: str, step: int, phase: str) -> float | None:
        """The metric `name` of a recorded step, or None."""
        here = (r for r in self.records if r["step"] == step and r["phase"] == phase and name in r)
        return next((r[name] for r in here), None)

    def sync(self) -> None:
        """Syncs the records to disk, so that no checkpoint saved after this is ahead of them."""
        # parts that were written since the last time; those before may be gone from a mirror
        parts = {_part(self.folder, i): None for i in range(self._synced, len(self.records))}
        for part in parts if self._writes else ():
            storage.sync(part)
        self._synced = len(self.records)

    def say(self, text: Any, style: str | None = None) -> None:
        """Prints a line or a table on the terminal."""
        self.console.print(text, style=style)

    def samples(self, step: int, entries: list[tuple[str, str, str]]) -> None:
        """Responses for people, (prompt, response, remark) each: samples/step-N.md, and loggers."""
        if not self._loggers:
            return
        rows = [[*map(printable, entry)] for entry in entries]
        self._loggers.table(step, "samples", ["prompt", "response", "remark"], rows)
        lines = [f"# Sampled responses, step {step}", ""]
        for prompt, response, remark in entries:
            lines += ["## Prompt", "", _quoted(prompt), ""]
            lines += [f"**{remark}**", "", _quoted(response), ""]
        folder = self.folder / "samples"
        folder.mkdir(exist_ok=True)
        storage.write(folder / f"step-{step:06d}.md", "\n".join(lines))


def print_to(output: IO[str], record: Mapping[str, Any]) -> None:
    """Prints a record as a line of JSON, while somebody reads that."""
    output.write(json.dumps(record) + "\n")
    output.flush()


def _line(record: Record) -> bytes:
    return json.dumps(record).encode() + b"\n"


def _parsed(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:  # not JSON, or not UTF-8
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    numbers = all(isinstance(x, int | float) for name, x in record.items() if name != "phase")
    return record if numbers and isinstance(record.get("phase"), str) else None


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}" for line in printable(text).splitlines() or [""])
