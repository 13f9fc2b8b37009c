"""A fault tried: the run disturbed, ended, resumed where that is needed, and compared."""

import random
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.faults import FAULTS, NATIVE, OWN, Backup
from tests.chaos.proxy import Proxy
from tests.chaos.scene import ROOT, Finding, Nursery, Scene, Undisturbed, difference, digest
from tests.chaos.serving import Serving

RESUMES = 4


@dataclass
class Trial:
    """What became of a fault; `end` is one word for the table, `finding` empty if all is well."""

    kind: str
    seed: int
    moment: str
    end: str
    said: str
    finding: str
    seconds: float

    def line(self, command: str = "") -> str:
        """For people; a finding names the command that makes it again."""
        text = f"seed {self.seed}  {self.kind}  [{self.moment}]  {self.end}  {self.seconds:.0f} s"
        if self.said:
            text += f"  ({self.said[:160]})"
        if self.finding:
            command = command or f"tests.chaos --only '{self.kind}' --seed {self.seed} --count 1"
            text += f"\n  FINDING {self.finding}\n  again: python -m {command}"
        return text


class Stage:
    """What trials share: the process that runs are forked from, a server, the undisturbed runs."""

    def __init__(self, scratch: Path, vllm: str | None, bound: float):
        self.scratch, self.bound = scratch.absolute(), bound
        self.vllm = vllm
        self.nursery = Nursery(self.scratch)
        self._serving: Serving | None = None
        self._whole: dict[str, Undisturbed] = {}

    def close(self) -> None:
        """Ends them."""
        if self._serving:
            self._serving.close()
        self.nursery.close()

    def scene(self, engine: str, name: str) -> Scene:
        """A run of an engine, in a folder of that name."""
        folder = self.scratch / name
        made = Scene(self.nursery, folder, [], self.bound)
        if engine == NATIVE:
            return made
        (folder / "m").mkdir()
        made.flags = ["--memory", str(folder / "m")]
        if self.vllm:
            made.flags += ["--patience", "300", "--timeout", "20"]
        if engine == OWN:
            made.flags += ["--python", self.vllm or str(self._standin())]
            return made
        if self._serving is None:
            self._serving = Serving(self.scratch, self.vllm)
        made.proxy = Proxy(folder / "p.sock", self._serving.url, self._serving.key)
        made.flags += ["--servers", f"unix://{made.proxy.path}"]
        made.environment["VLLM_API_KEY"] = self._serving.key
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
        scene = self.scene(engine, name)
        start = time.monotonic()
        scene.start()
        if (end := scene.end()) != "completed":
            raise SystemExit(f"the undisturbed run ({engine}): {end}: {scene.log.read_text()}")
        seconds = time.monotonic() - start
        if left := scene.left():
            raise SystemExit(f"the undisturbed run ({engine}): {left}")
        operations = scene.operations
        calls = dict(scene.proxy.calls) if scene.proxy else {}
        made = Undisturbed(scene.record(), seconds, scene.moments(), operations, calls)
        _clear(scene)
        print(
            f"undisturbed ({engine}): {seconds:.1f} s, {len(made.moments)} moments, "
            f"{operations} operations on files, {len(made.record.metrics)} records",
            flush=True,
        )
        return made

    def _standin(self) -> Path:
        """What takes the place of vLLM's Python."""
        path = self.scratch / "standin"
        python = shlex.join([f"PYTHONPATH={ROOT}", "OPENBLAS_NUM_THREADS=1", sys.executable])
        path.write_text(f'#!/bin/sh\nshift 2\nexec env {python} -m tests.chaos.standin "$@"\n')
        path.chmod(0o755)
        return path


def trial(stage: Stage, kind: str, seed: int) -> Trial:
    """One fault, from the start of its run to the comparison."""
    fault, draw = FAULTS[kind], random.Random(digest(f"{kind} {seed}"))
    whole = stage.whole(fault.engine)
    scene = stage.scene(fault.engine, f"t{seed}")
    start, one = time.monotonic(), Trial(kind, seed, "", "finding", "", "", 0.0)
    try:
        one.moment = fault.act(scene, draw, whole)
        end, backup = scene.end(), {}
        one.said = scene.line()
        if left := scene.left():
            raise Finding(left)
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
                path.write_bytes(content)
            first, backup = "refused", {}
    if end != "completed":
        raise Finding(f"not complete after {RESUMES} resumes: {end}")
    found = scene.record()
    if differs := difference(found, whole.record):
        # metrics.jsonl and run.json have no checksums; the state is the same all the same
        unsure = first == "damaged" and one.kind.startswith(("journal", "record"))
        if not unsure or any(whole.record.newest.get(k, v) != v for k, v in found.newest.items()):
            raise Finding(differs)
        first = "other records"
    if left := scene.left():
        raise Finding(left)
    return first if first in ("completed", "refused", "other records") else f"{first}, resumed"


def _clear(scene: Scene) -> None:
    if scene.proxy:
        scene.proxy.vanish()
    shutil.rmtree(scene.folder, ignore_errors=True)
