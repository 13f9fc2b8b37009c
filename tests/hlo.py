"""What a compiled program sends between devices, read off its text."""

import math
import re
from typing import NamedTuple

KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"


class Sent(NamedTuple):
    """A collective: its kind, the elements of its largest result, and in how many loops it is."""

    kind: str
    size: int
    loops: int


def collectives(compiled) -> list[Sent]:
    """All of them, from the entry down through loops, branches and calls."""
    bodies, name = {}, ""
    for line in compiled.as_text().splitlines():
        if start := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            name = "ENTRY" if start[1] else start[2]
        bodies.setdefault(name, []).append(line)
    return list(_inside(bodies, "ENTRY", 0))


def _inside(bodies, name, loops):
    for line in bodies[name]:
        if found := re.search(rf" = (.*?) ({KINDS})(-start)?\(", line):
            shapes = re.findall(r"\[([\d,]*)\]", re.sub(r"\{[^}]*\}", "", found[1]))
            sizes = [math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes]
            yield Sent(found[2], max(sizes), loops)
        for body in re.findall(r" body=%?([\w.\-]+)", line):
            yield from _inside(bodies, body, loops + 1)
        branches = re.findall(r"(?:true_computation|false_computation)=%?([\w.\-]+)", line)
        for group in re.findall(r"branch_computations=\{([^}]*)\}", line):
            branches += re.findall(r"[\w.\-]+", group)
        if " call(" in line:
            branches += re.findall(r"to_apply=%?([\w.\-]+)", line)
        for branch in branches:
            yield from _inside(bodies, branch, loops)
