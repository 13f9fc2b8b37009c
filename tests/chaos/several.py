"""`python -m tests.chaos.several --processes 2 --count 24`: jobs of several processes, one of which is lost.

At a random moment one process, each in its turn, is killed, told to leave, stands still, hangs while its heart
beats, finds its disk full or blocked, or is started with another config; with --bucket the run lies in a bucket,
whose network may be cut for half a minute, and may go back to its first checkpoint. All must end within the bound,
with a line that says why, and a restart must end bit for bit as the undisturbed job; nothing may be left. The
number of a fault decides its kind and its victim.
"""

import argparse
import contextlib
import errno
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxrl_llm import storage
from jaxrl_llm.training.checkpoint import ARRAYS, Checkpoints
from tests.chaos.faults import FOREVER
from tests.chaos.scene import (
    STALL,
    Finding,
    Nursery,
    Record,
    Scene,
    Undisturbed,
    difference,
    recorded,
)
from tests.chaos.small import STEPS
from tests.chaos.trial import RESUMES, Trial, report
from tests.training import s3
from tests.training.conftest import forget
from tests.training.process import port

DEVICES = 4  # of a job, shared out
LOST = 15.0
SLACK = 120.0  # seconds to end in, once it is known that one is lost
MEETING = 300.0  # seconds that processes wait for one another
GRACE = 60.0  # seconds that leaving may take
CUT = 30.0
HANGING = 300.0  # seconds to end in, once one hangs: 25 until its watch sees it, and until all know


@dataclass
class Job:
    """The processes of a run; `out` is its folder or URL."""

    members: list[Scene]
    out: str
    wire: s3.Wire | None

    def start(
        self, victim: int = 0, arm: tuple[int, ...] = (), *, stall: bool = False,
        hang: tuple[str, int] | tuple[()] = (), flags: tuple[str, ...] = (),
        other: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """Starts all, or resumes them; `arm` is what shim.c is to do to one, or where it is to `hang`.

        That one has `other` flags too.
        """
        where = f"127.0.0.1:{port()}"
        for i, one in enumerate(self.members):
            one.told = ()
            one.flags = ["--process", f"{i}/{len(self.members)}@{where}", "--lost", f"{LOST:g}"]
            mine = i == victim
            own = flags + STALL * stall + (other if mine else ())
            one.start(*(arm if mine else ()), flags=own, hang=hang if mine else ())

    def missed(self) -> float:
        """Seconds in which a process that is gone is missed by the others; it is later where they have not met."""
        met = all("data" in one.moments() for one in self.members)
        return (LOST if met else MEETING) + SLACK

    def ends(self, within: float, but: int | None = None) -> list[str]:
        """How each has ended but one; a Finding if some do not within so many seconds."""
        until = time.monotonic() + within
        left = lambda: max(0.1, until - time.monotonic())
        return [one.end(left()) for i, one in enumerate(self.members) if i != but]

    def line(self, but: int | None = None) -> str:
        """What the first of them, but one, has said at its end."""
        lines = [one.line() for i, one in enumerate(self.members) if i != but]
        return next(filter(None, lines), "")

    def record(self) -> tuple[Record, set[str]]:
        """What the run has left, and the names of that, its checkpoints among them."""
        forget()
        here = storage.local(self.out)
        found = [p.relative_to(here).parts for p in here.rglob("*") if p.is_file()]
        aside = {parts[1] for parts in found if "later-" in parts[:2][-1]}
        if lost := [
            name for name in aside if not any((here / "checkpoints" / name).glob("state/*"))
        ]:
            raise Finding(f"the arrays of {lost} are lost")
        found = [parts for parts in found if parts[:2][-1] not in aside]
        names = {"/".join(parts[: 1 + (parts[0] == "checkpoints")]) for parts in found}
        stacks = {name for name in names if name.startswith("stacks-")}
        return recorded(here), names - {storage.LOCK} - stacks

    def require_none_left(self, finished: bool) -> None:
        """A Finding if processes are left, or after a job that ended well the copy of a bucket."""
        for one in self.members:
            one.require_none_left()
        copies = [p for one in self.members for p in one.folder.glob(f"{storage.PREFIX}*")]
        if finished and copies:
            raise Finding(f"copies are left: {copies}")

    def close(self, *, keep: bool = False) -> None:
        """Ends what still runs, and removes the run, unless somebody wants to look at it."""
        for one in self.members:
            one.kill_all()
        if not keep:
            shutil.rmtree(self.members[0].folder.parent)


class Stage:
    """What trials share: the process that runs are forked from, the bucket, the undisturbed job."""

    def __init__(self, scratch: Path, processes: int, wire: s3.Wire | None = None):
        self.scratch, self.processes, self.wire = scratch.absolute(), processes, wire
        self.nursery = Nursery(self.scratch, JAX_NUM_CPU_DEVICES=str(DEVICES // processes))
        whole, start = self.job("whole", in_bucket=False), time.monotonic()
        whole.start()
        if (ends := whole.ends(1800.0)) != ["completed"] * processes:
            raise SystemExit(f"the undisturbed job: {ends}: {whole.members[0].said}")
        seconds, (record, self.names) = time.monotonic() - start, whole.record()
        self.whole = [
            Undisturbed(record, seconds, one.moments(), one.operations) for one in whole.members
        ]
        print(f"undisturbed: {seconds:.1f} s, {self.whole[0].operations} operations", flush=True)
        whole.close()

    def job(self, name: str, *, in_bucket: bool = True) -> Job:
        """A job in a folder of that name, or in the bucket, if there is one."""
        folder, wire = self.scratch / name, self.wire if in_bucket else None
        out = f"s3://{s3.BUCKET}/{name}" if wire else str(folder / "run")
        members = [Scene(self.nursery, folder / str(i)) for i in range(self.processes)]
        for one in members:
            one.out, one.environment = out, {"TMPDIR": str(one.folder)}
            one.environment |= s3.credentials(wire.port) if wire else {}
        return Job(members, out, wire)


def killed(job: Job, victim: int) -> list[str]:
    """A process is gone from one moment to the next."""
    job.members[victim].told = (signal.SIGKILL,)
    job.members[victim].signal(signal.SIGKILL)
    return job.ends(job.missed())


def told(job: Job, victim: int) -> list[str]:
    """A process is told to leave: all do, or it ends at once where it was not yet, or no more, a run."""
    job.members[victim].told = (signal.SIGTERM,)
    job.members[victim].signal(signal.SIGTERM)
    return job.ends(GRACE + job.missed())


def still(job: Job, victim: int) -> list[str]:
    """A process stands still until the others have given it up, and then goes on."""
    job.members[victim].signal(signal.SIGSTOP)
    try:
        job.ends(job.missed(), but=victim)
    finally:
        job.members[victim].signal(signal.SIGCONT)
    return job.ends(LOST + SLACK)


def stopped(job: Job, victim: int) -> list[str]:
    """A process stands still for good: the others end, and whoever started it kills it."""
    job.members[victim].told = (signal.SIGKILL,)
    job.members[victim].signal(signal.SIGSTOP)
    ends = job.ends(job.missed(), but=victim)
    job.members[victim].signal(signal.SIGKILL)
    return [*ends, job.members[victim].end()]


def hung(job: Job, victim: int, seconds: float) -> list[str]:
    """A process makes no progress any more, while its heart beats: all end, one of them with its stacks."""
    ends = job.ends(HANGING + 3 * seconds)
    said = [one.stalled(i) for i, one in enumerate(job.members)]
    if "stopped" in ends and not any(words.startswith("stood") for words in said):
        raise Finding(f"no watch has ended process {victim}: {job.line()}")
    return ends


def otherwise(job: Job, victim: int) -> list[str]:
    """All are killed, and one comes back with another config: the line that says so is the end of all."""
    for i in range(len(job.members)):
        job.members[i].told = (signal.SIGKILL,)
        job.members[i].signal(signal.SIGKILL)
    job.ends(SLACK)
    job.start(victim, other=("--steps", str(STEPS + 1)))
    ends = job.ends(MEETING + SLACK)
    if {*ends} != {"a line"} or "start all with the same" not in job.line():
        raise Finding(f"another config is not refused: {ends}: {job.line()}")
    return ends


def offline(job: Job, victim: int) -> list[str]:
    """Nobody reaches the bucket for a while."""
    del victim
    assert job.wire
    job.wire.cut()
    time.sleep(CUT)
    job.wire.mend()
    return job.ends(1800.0)


def gone_back(job: Job, victim: int) -> list[str]:
    """A process is killed, and the run goes back to the first of its checkpoints."""
    if {*(ends := killed(job, victim))} == {"completed"}:
        return ends
    forget()
    there = Checkpoints(storage.local(job.out, but=(ARRAYS,)) / "checkpoints").steps
    if there:
        job.start(flags=("--resume", str(there[0])))
        ends = job.ends(1800.0)
    return ends


ACTS: dict[str, Callable[[Job, int], list[str]]] = {
    "kill -9": killed, "SIGTERM": told, "stands still": still, "stops for good": stopped, "network cut": offline,
    "goes back": gone_back, "other configs": otherwise,
}  # fmt: skip
# operations on files for which there is no room, from a random one on
FULL = {"disk full": FOREVER, "disk full once": 0}
HANGS = ("hangs", "disk blocks")
FOLDER = (
    "kill -9", "SIGTERM", "disk full", "hangs", "kill -9", "disk blocks", "SIGTERM", "stands still", "hangs",
    "disk full once", "stops for good", "other configs",
)  # fmt: skip
BUCKET = ("kill -9", "SIGTERM", "network cut", "hangs", "goes back")


def trial(stage: Stage, seed: int, only: str | None = None) -> Trial:
    """One fault, from the start of its job to the comparison."""
    kinds = (only,) if only else BUCKET if stage.wire else FOLDER
    kind, victim = kinds[seed // stage.processes % len(kinds)], seed % stage.processes
    draw, job = random.Random(f"several {stage.processes} {seed}"), stage.job(f"t{seed}")
    command = f"tests.chaos.several --processes {stage.processes}"
    command += (" --bucket" if stage.wire else "") + (f" --only '{only}'" if only else "")
    one, whole = Trial(f"{kind}, process {victim}", seed, command), stage.whole[victim]
    start = time.monotonic()
    try:
        if kind in FULL:
            first = whole.operation(draw)
            one.moment = f"operation {first}"
            job.start(victim, (first, first + FULL[kind], errno.ENOSPC, -1, 0))
            ends = job.ends(3 * whole.seconds + 60 + LOST + SLACK)
        elif kind in HANGS:
            hang, arm = whole.moment(draw, 0), (whole.operation(draw), FOREVER, -2, -1, 0)
            one.moment = f"{hang[0]} {hang[1]}" if kind == "hangs" else f"operation {arm[0]}"
            how = {"hang": hang} if kind == "hangs" else {"arm": arm}
            job.start(victim, stall=True, **how)
            ends = hung(job, victim, whole.seconds)
        else:
            job.start()
            one.moment = job.members[victim].wait_for(draw, whole)
            ends = ACTS[kind](job, victim)
        one.said = job.line(but=victim)
        one.end = settled(stage, job, ends)
    except Finding as found:
        one.finding = str(found)
    finally:
        job.close(keep=bool(one.finding))
    one.seconds = time.monotonic() - start
    return one


def settled(stage: Stage, job: Job, ends: list[str]) -> str:
    """Restarts all until the run is complete, and compares it; how it ended, in a word or two."""
    first = " and ".join(dict.fromkeys(sorted(ends)))
    stalled = "no progress" in "".join(one.line() for one in job.members)
    for _ in range(RESUMES):
        job.require_none_left(finished={*ends} <= {"completed", "stopped"} and not stalled)
        if {*ends} == {"completed"}:
            break
        job.start()
        ends = job.ends(1800.0)
        if "a line" in ends:
            raise Finding(f"not resumed: {job.line()}")
    record, names = job.record()
    if differs := difference(record, stage.whole[0].record):
        raise Finding(differs)
    if names != stage.names:
        raise Finding(f"left in the run: {sorted(names ^ stage.names)}")
    return first if first == "completed" else f"{first}, resumed"


def main() -> None:
    """Runs faults."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2, help="of a job: 1, 2 or 4")
    parser.add_argument("--count", type=int, default=20, help="faults")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the others count on")
    parser.add_argument(
        "--bucket", action="store_true", help="the run lies in one, on this machine"
    )
    parser.add_argument("--only", choices=[*ACTS, *FULL, *HANGS], help="a kind of fault")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # nothing is left behind
    scratch = Path(tempfile.mkdtemp(prefix="several-"))
    with s3.served() if given.bucket else contextlib.nullcontext() as port:
        wire = None if port is None else s3.Wire(port)
        os.environ.update(s3.credentials(wire.port) if wire else {})
        stage = Stage(scratch, given.processes, wire)
        seeds = range(given.seed, given.seed + given.count)
        try:
            report((trial(stage, seed, given.only) for seed in seeds), scratch)
        finally:
            stage.nursery.close()


if __name__ == "__main__":
    main()
