"""The presets on whole machines: `python -m tests.machines.matrix` compiles all their programs, about an hour.

Prints the worst moment of each, its step and what its updates send, and fails if a program needs more memory or
collectives than is recorded in matrix.json; `--write` records. Words pick cases: `... tests.machines.matrix 3B`.
"""

import argparse
import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxrl_llm import config as configs
from jaxrl_llm.config import Mesh, Offload
from jaxrl_llm.machines import topologies
from jaxrl_llm.machines.plan import Plan, plan
from tests.machines.programs import figures, worse

RECORDED = Path(__file__).with_name("matrix.json")
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Case:
    """A config file with a model on a machine."""

    file: str
    model: str
    machine: str
    mesh: Mesh = field(default_factory=Mesh)
    offload: Offload = "none"

    def __str__(self) -> str:
        sizes = "" if self.mesh == Mesh() else " " + " x ".join(map(str, vars(self.mesh).values()))
        beside = "" if self.offload == "none" else f" offload {self.offload}"
        return f"{self.file} {self.model} {self.machine}{sizes}{beside}"

    def plan(self) -> Plan:
        """Compiled."""
        make: Any = configs.load(ROOT / "configs" / f"{self.file}.py")
        config = make(model=f"Qwen/Qwen2.5-{self.model}")
        config = replace(config, mesh=self.mesh, offload=self.offload)
        return plan(config, topologies.machine(self.machine))


CASES = (
    Case("kk", "3B", "h100x4"),
    Case("kk", "3B", "h100x8"),
    Case("kk", "3B", "h100x8", Mesh(tensor=4)),
    Case("kk", "3B", "h200x1"),
    Case("kk", "3B", "v5e-16"),
    Case("kk", "3B", "v5p-8"),
    Case("kk", "7B", "h100x4"),
    Case("kk", "7B", "h100x8"),
    Case("kk", "7B", "h200x1", offload="both"),
    Case("kk", "7B", "v5p:2x2x2"),
    Case("kk", "14B", "h100x4", offload="both"),
    Case("kk", "14B", "h100x8"),
    Case("kk", "32B", "h200x4", offload="both"),
    Case("kk", "32B", "h200x8"),
    Case("kk", "32B", "4xh100x8"),
    Case("math", "7B", "h100x8"),
)


def main() -> int:
    """0 if nothing has grown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="record what is found")
    parser.add_argument(
        "words", nargs="*", help="only cases with one of these words in their names"
    )
    given = parser.parse_args()
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    faults = []
    for case in CASES:
        name = str(case)
        if given.words and not any(word in name.split() for word in given.words):
            continue
        made = case.plan()
        found, (least, most) = figures(made), made.seconds
        room = f"{made.peak / 2**30:6.1f} of {made.memory / 2**30:5.1f} GiB"
        sent = sum(c.sent for p in made.programs if p.name == "update" for c in p.collectives)
        print(
            f"{name:34} {room}, a step {least:.0f} to {most:.0f} s, updates send {sent / 1e9:,.0f} GB",
            flush=True,
        )
        if not made.fits:
            faults.append(f"{name}: it does not fit")
        if given.write:
            recorded[name] = found
            RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
        elif name in recorded:
            faults += [f"{name}: {said}" for said in worse(recorded[name], found)]
        else:
            faults.append(f"{name}: nothing is recorded of it (--write)")
    print("\n".join(faults), file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
