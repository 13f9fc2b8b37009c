"""A process of a run under faults: its folder, its server; started, disturbed, resumed, compared."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl_llm.training import journal, leaving
from tests.chaos.proxy import Proxy
from tests.processes import QUICKLY, kill
from tests.training.process import ROOT

CONFIG = ROOT / "tests" / "chaos" / "small.py"
MEASURED = ("time/", "sync/")  # by clocks, and on the way to a server
MARK = (
    "VLLM_CHAOS_TRIAL"  # in the environment of all, for a server too: of others it gets no variable
)
STALLED = re.compile(r"no progress in the phase \w+ for (\d+) s")
STALL = ("--stall-minutes", "0.07", "--stall-factor", "3")  # for runs that are made to hang
SHORT = ("--patience", "8")  # for those whose server goes for good
LEADER = (
    "the leader (usually slice 0 task 0)"  # as JAX calls process 0, without which nothing works
)


class Finding(Exception):
    """What must not happen."""


class Nursery:
    """The process whose children the runs are."""

    def __init__(self, scratch: Path, **environment: str):
        shim = scratch / "shim.so"
        source = Path(__file__).with_name("shim.c")
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
        ours = {
            "LD_PRELOAD": str(shim),
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(scratch / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "XLA_FLAGS": QUICKLY,
            "JAXRL_LOGGERS": "",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.nursery"],
            cwd=ROOT, env=os.environ | environment | ours, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._ask({"poll": 0})  # it has imported everything

    def start(self, **request: Any) -> int:
        return self._ask({"start": request})

    def status(self, pid: int) -> int | None:
        return self._ask({"poll": pid})

    def close(self) -> None:
        self._process.communicate()

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@dataclass(frozen=True)
class Record:
    """What a run has left that must be the same whatever happened to it."""

    metrics: list[dict[str, Any]]
    newest: dict[str, Any]  # the note of the newest checkpoint, with the fingerprints of its arrays
    samples: dict[str, str]


@dataclass
class Undisturbed:
    """The run that others are compared with, how long it took and what it did."""

    record: Record
    seconds: float
    moments: list[str]
    operations: int
    calls: dict[str, int] = field(default_factory=dict)

    def operation(self, draw: random.Random) -> int:
        """One of its operations on files; nearly the same where a run has had a few more or less."""
        return int(draw.random() * self.operations)

    def moment(self, draw: random.Random, first: int = 1) -> tuple[str, int]:
        """One of its moments, from the `first` on, and how often it came before."""
        place = draw.randrange(first, len(self.moments))
        return self.moments[place], self.moments[:place].count(self.moments[place])


@dataclass
class Scene:
    """A process of a run with one engine; `flags` are its config's."""

    nursery: Nursery
    folder: Path
    flags: list[str] = field(default_factory=list)
    bound: float = 900.0
    environment: dict[str, str] = field(default_factory=dict)
    proxy: Proxy | None = None
    config: Path = CONFIG
    pid: int = 0
    started: int = 0
    told: tuple[int, ...] = ()  # signals that may end it at once
    stall: tuple[str, ...] = STALL
    short: tuple[str, ...] = SHORT

    def __post_init__(self):
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.out: Path | str = self.folder / "run"

    def start(
        self, *arm: int, flags: tuple[str, ...] = (), hang: tuple[str | int, ...] = ()
    ) -> None:
        """Starts the run, or resumes it; `arm` is what shim.c is to do, `hang` what nursery.py is to."""
        self.started += 1
        self.flags += flags
        where = ["--out", str(self.out), "--resume", "auto"]
        own = {MARK: str(self.folder), "CHAOS_COUNT": str(self.folder / "count")}
        self.pid = self.nursery.start(
            arguments=["train", str(self.config), *where, *self.flags],
            log=str(self.log),
            moments=str(self._moments),
            environment=own | self.environment,
            arm=[str(self.out), *(arm or (-1, -1, 0, -1, 0))],
            hang=hang,
        )

    @property
    def log(self) -> Path:
        return self.folder / f"log-{self.started}"

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def _moments(self) -> Path:
        return self.folder / f"moments-{self.started}"

    def moments(self) -> list[str]:
        return self._moments.read_text().split() if self._moments.exists() else []

    @property
    def status(self) -> int | None:
        return self.nursery.status(self.pid)

    @property
    def operations(self) -> int:
        """On the files of the run, as its process has counted them."""
        return int((self.folder / "count").read_text())

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.status is None:
                os.kill(self.pid, number)

    def wait_for(self, draw: random.Random, undisturbed: Undisturbed) -> str:
        """Until a random moment of the run, or its end; the moment in words."""
        place = draw.randrange(-1, len(undisturbed.moments))
        delay = draw.uniform(0, 1.0 if place < 0 else 0.3)
        self.until(lambda: len(self.moments()) > place)
        time.sleep(delay)
        name = "begin" if place < 0 else undisturbed.moments[place]
        return f"{name} {undisturbed.moments[: place + 1].count(name)} +{delay:.2f} s"

    def until(self, condition=lambda: False, within: float = 0.0) -> None:
        """Until that holds or the run ends."""
        end = time.monotonic() + (within or self.bound)
        while not condition() and self.status is None and time.monotonic() < end:
            time.sleep(0.02)

    def end(self, within: float = 0.0) -> str:
        """How the run ended: completed, stopped, killed or a line; a Finding for anything else."""
        self.until(within=within)
        if self.status is None:
            self.signal(signal.SIGUSR2)
            time.sleep(1.0)
            where = self.said.partition("Current thread")[2]
            self.kill_all()
            raise Finding(f"hang: {self.folder.name} does not end: {where}")
        status, text = self.status, self.said
        if "Traceback" in text or "Fatal Python" in text:
            raise Finding(f"traceback: {text[text.find('Traceback') :][-600:]}")
        lines = [line for line in text.splitlines() if line.startswith("jaxrl-llm: ")]
        if status in (0, leaving.UNFINISHED, leaving.STALLED):
            return "stopped" if status or lines else "completed"
        if (status in (1, 2) and len(lines) == 1) or (status == -signal.SIGABRT and LEADER in text):
            return "a line"
        at_once = status in (-signal.SIGKILL, -signal.SIGQUIT)
        before_or_after = {"data", "end"} & {*self.moments()} != {"data"}
        ended_by = -status if status < 0 else signal.SIGINT if status == 130 else 0
        if ended_by in self.told and (at_once or status == 130 or before_or_after):
            return "killed"  # before a run and after it other signals end it too, as they do any program
        raise Finding(f"traceback: exit code {status} of {self.folder.name}, said {text[-500:]!r}")

    def stalled(self, index: int = 0) -> str:
        """How long the run stood still before its watch ended it; a Finding without the stacks."""
        if self.status != leaving.STALLED or not (found := STALLED.search(self.line())):
            return "it was not stalled"
        stacks = Path(self.out) / f"stacks-{index}.txt"
        text = stacks.read_text() if f"are in {stacks}" in self.line() else self.said
        if "most recent call first" not in text:
            raise Finding(f"no stacks: {self.line()}")
        return f"stood still for {found[1]} s"

    def line(self) -> str:
        """What the run said at its end."""
        start = "jaxrl-llm: "
        return next((x[len(start) :] for x in self.said.splitlines() if x.startswith(start)), "")

    def processes(self) -> list[int]:
        """Those that were started in this scene and still live."""
        found = []
        mark = f"{MARK}={self.folder}\0".encode()
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and mark in (path / "environ").read_bytes():
                    found.append(int(path.name))
        return found

    def kill_all(self) -> None:
        kill(self.processes())
        if self.pid:
            self.signal(signal.SIGKILL)
            self.until()

    def require_none_left(self, seconds: float = 120.0) -> None:
        """A Finding if a process is left after so long."""
        end = time.monotonic() + seconds
        while found := self.processes():
            if time.monotonic() > end:
                names = [Path(f"/proc/{pid}/cmdline").read_bytes()[:200] for pid in found]
                self.kill_all()
                raise Finding(f"processes are left: {names}")
            time.sleep(0.1)


def recorded(out: Path) -> Record:
    """What a run has left in its folder."""
    newest = checkpoints(out)[-1]
    note = json.loads((newest / "note" / "metadata").read_bytes())
    for late in ("score", "sum"):  # an evaluation that was cut short comes after the save
        del note[late]
    samples = {p.name: p.read_text() for p in sorted((out / "samples").glob("step*"))}
    metrics = [
        {name: value for name, value in record.items() if not name.startswith(MEASURED)}
        for record in journal.read(out)
    ]
    return Record(metrics, {newest.name: note}, samples)


def checkpoints(out: Path) -> list[Path]:
    """The folders of a run's checkpoints, the newest last."""
    there = [p for p in (out / "checkpoints").glob("*") if p.name.isdigit()]
    return sorted(there, key=lambda p: int(p.name))


def difference(found: Record, whole: Record) -> str:
    """The first thing in which two runs differ; empty if in none."""
    a, b = found.metrics, whole.metrics
    keys = [[(r["step"], r["phase"], len(r)) for r in records] for records in (a, b)]
    if keys[0] != keys[1]:
        missing = [k for k in keys[1] if k not in keys[0]]
        return f"lost: records {missing}, found {len(a)} of {len(b)}"
    pairs = [(x, y, k) for x, y in zip(a, b, strict=True) for k in y]
    if other := [(x["step"], k, x.get(k), y[k]) for x, y, k in pairs if x.get(k) != y[k]]:
        return f"undetected: {len(other)} other figures, first {other[0]}"
    names = [name for name in ("newest", "samples") if getattr(found, name) != getattr(whole, name)]
    return f"undetected: other {names[0]}" if names else ""
