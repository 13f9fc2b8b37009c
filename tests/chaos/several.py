"""`python -m tests.chaos.several --processes 2 --count 24`: jobs of several processes, one of which is lost.

At a random moment one process, each in its turn, is killed, told to leave, stands still, or finds its disk full;
with --bucket the run lies in a bucket, whose network may be cut for half a minute. All must end within the bound,
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxrl_llm import desk
from jaxrl_llm.runs.leaving import UNFINISHED
from jaxrl_llm.storage import Place
from tests.chaos.__main__ import table
from tests.chaos.faults import FOREVER
from tests.chaos.scene import (
    Finding,
    Nursery,
    Record,
    Scene,
    Undisturbed,
    difference,
    digest,
    recorded,
)  # fmt: skip
from tests.chaos.trial import RESUMES, Trial
from tests.training import s3
from tests.training.conftest import forget
from tests.training.process import port

DEVICES = 4  # of a job, shared out
LOST = 15.0
SLACK = 20.0  # seconds to end in, once it is known that one is lost
MEETING = 300.0  # seconds that processes wait for one another
GRACE = 60.0  # seconds that leaving may take
CUT = 30.0
LEADER = (
    "the leader (usually slice 0 task 0)"  # as JAX calls process 0, without which nothing works
)
KILLED, TOLD, STILL, OFFLINE = "kill -9", "SIGTERM", "stands still", "network cut"
FULL, FULL_ONCE = "disk full", "disk full once"
FOLDER, BUCKET = (KILLED, TOLD, FULL, KILLED, TOLD, STILL, FULL_ONCE), (KILLED, TOLD, OFFLINE)


@dataclass
class Job:
    """The processes of a run; `out` is its folder or URL."""

    members: list[Scene]
    out: str
    wire: s3.Wire | None

    def start(self, victim: int = 0, arm: tuple[int, ...] = ()) -> None:
        """Starts all, or resumes them; `arm` is what shim.c is to do to one."""
        where = f"127.0.0.1:{port()}"
        for i, one in enumerate(self.members):
            one.flags = ["--process", f"{i}/{len(self.members)}@{where}", "--lost", f"{LOST:g}"]
            one.start(*(arm if i == victim else ()))

    def ends(self, within: float, but: int | None = None) -> list[str]:
        """How each has ended but one; a Finding if some do not within so many seconds."""
        until = time.monotonic() + within
        waited = [one for i, one in enumerate(self.members) if i != but]
        while running := [one for one in waited if one.status is None]:
            if time.monotonic() > until:
                running[0].signal(signal.SIGUSR2)
                time.sleep(1.0)
                where = running[0].log.read_text(errors="replace").partition("Current thread")[2]
                raise Finding(f"hang: {running[0].folder.name} after {within:g} s: {where}")
            time.sleep(0.05)
        return ["" if i == but else ended(one) for i, one in enumerate(self.members)]

    def record(self) -> Record:
        """What the run has left."""
        with self.at_hand() as here:
            return recorded(here)

    def entries(self) -> list[str]:
        """The names of what the run has left, its checkpoints among them."""
        with self.at_hand() as here:
            found = [p.name for p in [*here.iterdir(), *(here / "checkpoints").iterdir()]]
        return sorted({*found} - {"lock"})

    @contextlib.contextmanager
    def at_hand(self) -> Iterator[Path]:
        """The folder of the run, or a copy of what is in the bucket."""
        forget()
        here = desk.at_hand(Path(self.out))
        desk.fetch(here)
        yield here
        forget()

    def left(self, finished: bool) -> str:
        """What is left besides the run: processes, or after one that ended well a lock or a desk."""
        for one in self.members:
            if found := one.left(killed=True):
                return found
        if not finished:
            return ""
        if self.wire is None:
            return "the lock is left" if self.members[0].locked() else ""
        locks = {name: Place(self.out).read(name) for name in Place(self.out).names("lock")}
        if any(content != b"{}" for content in locks.values()):
            return f"locks are left: {locks}"
        desks = [p for one in self.members for p in one.folder.glob("jaxrl-llm-*")]
        return f"desks are left: {desks}" if desks else ""

    def close(self, *, keep: bool = False) -> None:
        """Ends what still runs, and removes the run, unless somebody wants to look at it."""
        for one in self.members:
            one.kill_all()
        if not keep:
            shutil.rmtree(self.members[0].folder.parent)


def ended(one: Scene) -> str:
    """How a process that has ended did so; a Finding if it should not."""
    status, text = one.status, one.log.read_text(errors="replace") if one.log.exists() else ""
    if "Traceback" in text or "Fatal Python" in text:
        raise Finding(f"traceback: {text[text.find('Traceback') :][-600:]}")
    lines = [line for line in text.splitlines() if line.startswith("jaxrl-llm: ")]
    if status in (0, UNFINISHED):
        return "stopped" if status else "completed"
    if status == 2 and len(lines) == 1:
        return "a line"
    if status == -signal.SIGABRT and LEADER in text:
        return "a line"
    if status is not None and -status in one.told:
        return "killed"
    raise Finding(f"{one.folder.name}: exit code {status}, said {text[-500:]!r}")


class Stage:
    """What trials share: the process that runs are forked from, the bucket, the undisturbed job."""

    def __init__(self, scratch: Path, processes: int, wire: s3.Wire | None = None):
        self.scratch, self.processes, self.wire = scratch.absolute(), processes, wire
        self.nursery = Nursery(self.scratch, JAX_NUM_CPU_DEVICES=str(DEVICES // processes))
        whole = self.job("whole", in_bucket=False)
        start = time.monotonic()
        whole.start()
        if (ends := whole.ends(600.0)) != ["completed"] * processes:
            raise SystemExit(f"the undisturbed job: {ends}: {whole.members[0].log.read_text()}")
        seconds, self.entries = time.monotonic() - start, whole.entries()
        self.whole = [
            Undisturbed(whole.record(), seconds, one.moments(), one.operations)
            for one in whole.members
        ]
        moments = [len(one.moments) for one in self.whole]
        print(
            f"undisturbed: {seconds:.1f} s, moments of each {moments}, operations on files "
            f"{[one.operations for one in self.whole]}",
            flush=True,
        )
        whole.close()

    def job(self, name: str, *, in_bucket: bool | None = None) -> Job:
        """A job in a folder, or a bucket, of that name."""
        folder, bucket = (
            self.scratch / name,
            self.wire is not None if in_bucket is None else in_bucket,
        )
        out = f"s3://{s3.BUCKET}/{name}" if bucket else str(folder / "run")
        members = [Scene(self.nursery, folder / str(i), [], 240.0) for i in range(self.processes)]
        for one in members:
            one.out = Path(out)
            one.environment = {"TMPDIR": str(one.folder)}
            if bucket and self.wire:
                one.environment |= s3.credentials(self.wire.port)
        return Job(members, out, self.wire if bucket else None)

    def close(self) -> None:
        """Ends them."""
        self.nursery.close()


def trial(stage: Stage, seed: int, only: str | None = None) -> Trial:
    """One fault, from the start of its job to the comparison."""
    kinds = (only,) if only else FOLDER if stage.wire is None else BUCKET
    kind, victim = kinds[seed // stage.processes % len(kinds)], seed % stage.processes
    draw, job = random.Random(digest(f"several {stage.processes} {seed}")), stage.job(f"t{seed}")
    one = Trial(f"{kind}, process {victim}", seed, "", "finding", "", "", 0.0)
    start = time.monotonic()
    try:
        if kind in (FULL, FULL_ONCE):
            one.moment, ends = full(job, victim, kind, draw, stage.whole[victim])
        else:
            job.start()
            one.moment = job.members[victim].wait_for(draw, stage.whole[victim])
            ends = ACTS[kind](job, victim)
        one.said = said(job, victim)
        one.end = settled(stage, job, ends)
    except Finding as found:
        one.finding = str(found)
    finally:
        job.close(keep=bool(one.finding))
    one.seconds = time.monotonic() - start
    return one


def killed(job: Job, victim: int) -> list[str]:
    """A process is gone from one moment to the next."""
    met = all("data" in one.moments() for one in job.members)
    job.members[victim].told = (signal.SIGKILL,)
    job.members[victim].signal(signal.SIGKILL)
    return job.ends((LOST if met else MEETING) + SLACK)


def told(job: Job, victim: int) -> list[str]:
    """A process is told to leave: all do, or it ends at once where it was not yet, or no more, a run."""
    met = all("data" in one.moments() for one in job.members)
    job.members[victim].told = (signal.SIGTERM,)
    job.members[victim].signal(signal.SIGTERM)
    return job.ends((GRACE + LOST if met else MEETING) + SLACK)


def still(job: Job, victim: int) -> list[str]:
    """A process stands still until the others have given it up, and then goes on."""
    met = all("data" in one.moments() for one in job.members)
    job.members[victim].signal(signal.SIGSTOP)
    try:
        job.ends((LOST if met else MEETING) + SLACK, but=victim)
    finally:
        job.members[victim].signal(signal.SIGCONT)
    return job.ends(LOST + SLACK)


def full(
    job: Job, victim: int, kind: str, draw: random.Random, whole: Undisturbed
) -> tuple[str, list[str]]:
    """From a random operation on, or for one, there is no room for what a process writes."""
    first = whole.operation(draw)
    last = first if kind == FULL_ONCE else FOREVER
    job.start(victim, (first, last, errno.ENOSPC, -1, 0))
    return f"operation {first}", job.ends(3 * whole.seconds + 60 + LOST + SLACK)


def offline(job: Job, victim: int) -> list[str]:
    """Nobody reaches the bucket for a while."""
    del victim
    assert job.wire
    job.wire.cut()
    time.sleep(CUT)
    job.wire.mend()
    return job.ends(600.0)


ACTS: dict[str, Callable[[Job, int], list[str]]] = {
    KILLED: killed, TOLD: told, STILL: still, OFFLINE: offline,
}  # fmt: skip


def said(job: Job, victim: int) -> str:
    """What the first of the others has said at its end."""
    lines = [one.line() for i, one in enumerate(job.members) if i != victim]
    return next(filter(None, lines), "")


def settled(stage: Stage, job: Job, ends: list[str]) -> str:
    """Restarts all until the run is complete, and compares it; how it ended, in a word or two."""
    first = " and ".join(dict.fromkeys(sorted(ends)))
    for one in job.members:
        one.told = ()
    for _ in range(RESUMES):
        if left := job.left(finished={*ends} <= {"completed", "stopped"}):
            raise Finding(left)
        if {*ends} == {"completed"}:
            break
        job.start()
        ends = job.ends(300.0)
        if "a line" in ends:
            raise Finding(f"not resumed: {said(job, -1)}")
    if differs := difference(job.record(), stage.whole[0].record):
        raise Finding(differs)
    if (entries := job.entries()) != stage.entries:
        raise Finding(f"left in the run: {sorted({*entries} ^ {*stage.entries})}")
    return first if first == "completed" else f"{first}, resumed"


def main() -> None:
    """Runs faults, prints a line each and a table at the end; exits with 1 if there were findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2, help="of a job: 1, 2 or 4")
    parser.add_argument("--count", type=int, default=20, help="faults")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the others count on")
    parser.add_argument(
        "--bucket", action="store_true", help="the run lies in one, on this machine"
    )
    parser.add_argument("--only", choices=[*ACTS, FULL, FULL_ONCE], help="a kind of fault")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # nothing is left behind
    scratch, done = Path(tempfile.mkdtemp(prefix="several-")), []
    with s3.served() if given.bucket else contextlib.nullcontext() as port:
        wire = None if port is None else s3.Wire(port)
        os.environ.update({} if wire is None else s3.credentials(wire.port))
        stage = Stage(scratch, given.processes, wire)
        try:
            for seed in range(given.seed, given.seed + given.count):
                done.append(one := trial(stage, seed, given.only))
                how = f"--processes {given.processes}{' --bucket' if given.bucket else ''}"
                how += f" --only '{given.only}'" if given.only else ""
                print(one.line(f"tests.chaos.several {how} --seed {seed} --count 1"), flush=True)
        finally:
            stage.close()
            print(table(done), flush=True)
    found = any(one.finding for one in done)
    if not found:
        shutil.rmtree(scratch, ignore_errors=True)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
