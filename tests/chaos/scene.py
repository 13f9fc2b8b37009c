"""One run under faults: its folder, its processes, its server; started, disturbed, resumed, compared."""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl_llm.training import journal
from jaxrl_llm.training.leaving import UNFINISHED
from tests.chaos.proxy import Proxy
from tests.processes import QUICKLY, kill

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "tests" / "chaos" / "small.py"
POLL = 0.02
MEASURED = ("time/", "sync/")  # by clocks, and on the way to a server
MARK = "CHAOS_TRIAL"
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
        environment = (
            os.environ
            | environment
            | {
                "LD_PRELOAD": str(shim),
                "PYTHONPATH": str(ROOT),
                "JAX_PLATFORMS": "cpu",
                "JAX_COMPILATION_CACHE_DIR": str(scratch / "compiled"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "XLA_FLAGS": QUICKLY,
                "JAXRL_WANDB": "0",
            }
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.nursery"],
            cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._answer()

    def start(self, **request: Any) -> int:
        return self._ask({"start": request})["pid"]

    def status(self, pid: int) -> int | None:
        return self._ask({"poll": pid})["status"]

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the nursery has ended")
        return json.loads(line)


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


@dataclass
class Scene:
    """A run with one engine; `flags` are its config's."""

    nursery: Nursery
    folder: Path
    flags: list[str]
    bound: float
    environment: dict[str, str] = field(default_factory=dict)
    proxy: Proxy | None = None
    config: Path = CONFIG
    pid: int = 0
    started: int = 0
    told: tuple[int, ...] = ()  # signals that may end it at once

    def __post_init__(self):
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.out = self.folder / "run"

    # The run

    def start(self, *arm: int, flags: tuple[str, ...] = ()) -> None:
        """Starts the run, or resumes it; `arm` is what shim.c is to do."""
        self.started += 1
        self.flags += flags
        self.pid = self.nursery.start(
            arguments=["train", str(self.config), "--out", str(self.out), "--resume", "auto",
                       *self.flags],
            log=str(self.log), moments=str(self._moments),
            environment={MARK: str(self.folder), "CHAOS_COUNT": str(self.folder / "count"),
                         **self.environment},
            arm=[str(self.out), *(arm or (-1, -1, 0, -1, 0))],
        )  # fmt: skip

    @property
    def log(self) -> Path:
        return self.folder / f"log-{self.started}"

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

    def until(self, condition) -> None:
        """Until that holds or the run ends."""
        end = time.monotonic() + self.bound
        while not condition() and self.status is None and time.monotonic() < end:
            time.sleep(POLL)

    def end(self) -> str:
        """How the run ended: completed, stopped, killed or a line; a Finding for anything else."""
        wait_for_ends([self], self.bound)
        return self.outcome()

    def outcome(self) -> str:
        """How a run that has ended did so."""
        status = self.status
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        if "Traceback" in text or "Fatal Python" in text:
            raise Finding(f"traceback: {text[text.find('Traceback') :][-600:]}")
        lines = [line for line in text.splitlines() if line.startswith("jaxrl-llm: ")]
        if status in (0, UNFINISHED):
            return "stopped" if status or lines else "completed"
        if status in (1, 2) and len(lines) == 1:
            return "a line"
        if status == 130 and signal.SIGINT in self.told:
            return "killed"
        if status == -signal.SIGABRT and LEADER in text:
            return "a line"
        at_once = status in (-signal.SIGKILL, -signal.SIGQUIT)
        before_or_after = {"data", "end"} & {*self.moments()} != {"data"}
        if status and -status in self.told and (at_once or before_or_after):
            return "killed"  # before a run and after it other signals end it too, as they do any program
        raise Finding(f"traceback: exit code {status} of {self.folder.name}, said {text[-500:]!r}")

    def line(self) -> str:
        """What the run said at its end."""
        lines = self.log.read_text(errors="replace").splitlines()
        return next((x[len("jaxrl-llm: ") :] for x in lines if x.startswith("jaxrl-llm: ")), "")

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
            self.until(lambda: False)

    def left(self, seconds: float = 25.0) -> str:
        """What is left besides the folder, after so long at the most."""
        end = time.monotonic() + seconds
        while found := self.processes():
            if time.monotonic() > end:
                names = [Path(f"/proc/{pid}/cmdline").read_bytes()[:200] for pid in found]
                self.kill_all()
                return f"processes are left: {names}"
            time.sleep(0.1)
        return ""

    def record(self) -> Record:
        """What the run has left."""
        return recorded(self.out)


def wait_for_ends(scenes: list[Scene], within: float) -> None:
    """Returns when the runs have ended; a Finding that says where one is if that takes longer."""
    until = time.monotonic() + within
    while running := [one for one in scenes if one.status is None]:
        if time.monotonic() > until:
            running[0].signal(signal.SIGUSR2)
            time.sleep(1.0)
            where = running[0].log.read_text(errors="replace").partition("Current thread")[2]
            running[0].kill_all()
            raise Finding(f"hang: {running[0].folder.name}, no end within {within:g} s: {where}")
        time.sleep(POLL)


def recorded(out: Path) -> Record:
    """What a run has left in its folder."""
    newest = checkpoints(out)[-1]
    note = json.loads((newest / "note" / "metadata").read_bytes())
    samples = {p.name: p.read_text() for p in sorted((out / "samples").glob("step*"))}
    return Record(metrics(out), {newest.name: note}, samples)


def checkpoints(out: Path) -> list[Path]:
    """The folders of a run's checkpoints, the newest last."""
    there = [p for p in (out / "checkpoints").glob("*") if p.name.isdigit()]
    return sorted(there, key=lambda p: int(p.name))


def metrics(out: Path) -> list[dict[str, Any]]:
    """The records of a run without what is measured."""
    return [
        {name: value for name, value in record.items() if not name.startswith(MEASURED)}
        for record in journal.read(out)
    ]


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


def digest(text: str) -> int:
    """A number of a text, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
