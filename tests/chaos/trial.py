"""A fault tried: the run disturbed, ended, resumed where that is needed, and compared."""

import os
import random
import shlex
import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.faults import FAULTS, NATIVE, OWN, REAL, Backup
from tests.chaos.proxy import Proxy
from tests.chaos.scene import ROOT, Finding, Nursery, Scene, Undisturbed, difference, recorded
from tests.chaos.standin import Standin

RESUMES = 4
KEY = "chaos-key"


@dataclass
class Trial:
    """What became of a fault; `end` is one word for the table, `finding` empty if all is well."""

    kind: str
    seed: int
    command: str = ""
    moment: str = ""
    end: str = "finding"
    said: str = ""
    finding: str = ""
    seconds: float = 0.0

    def line(self) -> str:
        """For people; a finding names the command that makes it again."""
        text = f"seed {self.seed}  {self.kind}  [{self.moment}]  {self.end}  {self.seconds:.0f} s"
        if self.said:
            text += f"  ({self.said[:160]})"
        if self.finding:
            again = self.command or f"tests.chaos --only '{self.kind}'"
            again = f"python -m {again} --seed {self.seed} --count 1"
            text += f"\n  FINDING {self.finding}\n  again: {again}"
        return text


def report(trials: Iterable[Trial], scratch: Path) -> None:
    """Prints a line each and a table at the end; exits with 1, and keeps the runs, after findings."""
    done: list[Trial] = []
    try:
        for one in trials:
            done.append(one)
            print(one.line(), flush=True)
    finally:
        print(table(done), flush=True)
        if not (found := any(one.finding for one in done)):
            shutil.rmtree(scratch, ignore_errors=True)
    sys.exit(1 if found else 0)


def table(trials: list[Trial]) -> str:
    """How many faults of each kind ended how."""
    ends = list(dict.fromkeys(one.end for one in trials))
    rows = ["| fault | " + " | ".join(ends) + " |", "|---" * (len(ends) + 1) + "|"]
    for kind in dict.fromkeys(one.kind for one in trials):
        counts = [sum(t.kind == kind and t.end == end for t in trials) for end in ends]
        rows.append(f"| {kind} | " + " | ".join(map(str, counts)) + " |")
    seconds = sum(one.seconds for one in trials)
    return "\n".join([*rows, f"{len(trials)} faults in {seconds:.0f} s, {time.strftime('%F')}"])


class Stage:
    """What trials share: the process that runs are forked from, a server, the undisturbed runs."""

    def __init__(self, scratch: Path, bound: float = 900.0):
        self.scratch, self.bound = scratch.absolute(), bound
        self.nursery = Nursery(self.scratch)
        self._server: Standin | None = None
        self._proxies: list[Proxy] = []
        self._whole: dict[str, Undisturbed] = {}

    def close(self) -> None:
        """Ends them."""
        for proxy in self._proxies:
            proxy.close()
        if self._server:
            self._server.die()
        self.nursery.close()

    def scene(self, engine: str, name: str) -> Scene:
        """A run of an engine, in a folder of that name."""
        folder = self.scratch / name
        made = Scene(self.nursery, folder, bound=self.bound)
        if engine == NATIVE:
            return made
        (folder / "m").mkdir()
        made.flags = ["--memory", str(folder / "m")]
        if engine == REAL:  # the start takes half a minute, and the keeper waits for two
            made.flags += ["--python", os.environ["JAXRL_VLLM_PYTHON"]]
            made.flags += ["--timeout", "20", "--patience", "400"]
            made.bound, made.stall, made.short = 600.0, ("--stall-minutes", "0.5"), ()
            return made
        if engine == OWN:
            made.flags += ["--python", str(self._python())]
            return made
        socket = self.scratch / "s.sock"
        self._server = self._server or Standin(path=socket, key=KEY)
        made.proxy = Proxy(folder / "p.sock", socket, KEY)
        self._proxies.append(made.proxy)
        made.flags += ["--servers", f"unix://{made.proxy.path}"]
        made.environment["VLLM_API_KEY"] = KEY
        return made

    def whole(self, engine: str) -> Undisturbed:
        """The undisturbed run of an engine; two are made, and must be equal."""
        if engine not in self._whole:
            first, second = (self._undisturbed(engine, f"whole-{i}") for i in range(2))
            if differs := difference(second.record, first.record):
                raise SystemExit(f"two undisturbed runs ({engine}) differ: {differs}")
            self._whole[engine] = second
        return self._whole[engine]

    def _undisturbed(self, engine: str, name: str) -> Undisturbed:
        scene, start = self.scene(engine, name), time.monotonic()
        scene.start()
        if (end := scene.end()) != "completed":
            raise SystemExit(f"the undisturbed run ({engine}): {end}: {scene.said}")
        seconds = time.monotonic() - start
        scene.require_none_left()
        calls = dict(scene.proxy.calls) if scene.proxy else {}
        record, moments = recorded(scene.folder / "run"), scene.moments()
        made = Undisturbed(record, seconds, moments, scene.operations, calls)
        _clear(scene)
        print(
            f"undisturbed ({engine}): {seconds:.1f} s, {len(moments)} moments, "
            f"{made.operations} operations on files, {len(record.metrics)} records",
            flush=True,
        )
        return made

    def _python(self) -> Path:
        """What takes the place of vLLM's Python."""
        path = self.scratch / "standin"
        python = shlex.join([f"PYTHONPATH={ROOT}", "OPENBLAS_NUM_THREADS=1", sys.executable])
        path.write_text(f'#!/bin/sh\nshift 2\nexec env {python} -m tests.chaos.standin "$@"\n')
        path.chmod(0o755)
        return path


def trial(stage: Stage, kind: str, seed: int) -> Trial:
    """One fault, from the start of its run to the comparison."""
    fault, draw = FAULTS[kind], random.Random(f"{kind} {seed}")
    whole = stage.whole(fault.engine)
    scene = stage.scene(fault.engine, f"t{seed}")
    command = f"tests.chaos --vllm --only '{kind}'" if fault.engine == REAL else ""
    start, one = time.monotonic(), Trial(kind, seed, command)
    try:
        one.moment = fault.act(scene, draw, whole)
        end, backup = scene.end(), {}
        one.said = scene.line()
        scene.require_none_left()
        if fault.damage is not None:
            words, backup = fault.damage(scene, draw)
            one.moment += f", {words}"
            end = "damaged" if backup else end
        one.end = _settled(scene, whole, end, backup, one)
        _clear(scene)
    except Finding as found:
        one.finding = str(found)
        scene.kill_all()
    one.seconds = time.monotonic() - start
    return one


def _settled(scene: Scene, whole: Undisturbed, end: str, backup: Backup, one: Trial) -> str:
    """Resumes until the run is complete, and compares it; how it ended, in a word or two."""
    first, scene.told = end, ()
    for _ in range(RESUMES):
        if end == "completed":
            break
        scene.start()
        end = scene.end()
        if end == "a line":
            if not backup:
                raise Finding(f"not resumed: {scene.line()}")
            one.said = scene.line()
            for path, content in backup.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            first, backup = "refused", {}
    if end != "completed":
        raise Finding(f"not complete after {RESUMES} resumes: {end}")
    found = recorded(scene.folder / "run")
    if differs := difference(found, whole.record):
        # metrics.jsonl and run.json have no checksums; the state is the same all the same
        unsure = first == "damaged" and one.kind.startswith(("journal", "record"))
        if not unsure or any(whole.record.newest.get(k, v) != v for k, v in found.newest.items()):
            raise Finding(differs)
        first = "other records"
    scene.require_none_left()
    return first if first in ("completed", "refused", "other records") else f"{first}, resumed"


def _clear(scene: Scene) -> None:
    if scene.proxy:
        scene.proxy.close()
    shutil.rmtree(scene.folder, ignore_errors=True)
