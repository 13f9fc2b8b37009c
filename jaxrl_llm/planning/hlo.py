"""Reads collectives, kernels and cycles, and how often they run, from a compiled program's HLO.

It is read as text, which is what every backend gives. A loop whose trip count depends on data has
its limit in a name scope, `at_most_N` (`models.primitives.up_to`); one without counts once.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "bf16": 16, "f16": 16, "s16": 16, "u16": 16}
BITS |= {"f32": 32, "s32": 32, "u32": 32, "f64": 64, "s64": 64, "u64": 64}
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
PACKAGE = "/jaxrl_llm/"
PLACING = "models/sharding.py"  # skipped: the line that calls it is more telling

_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][a-z\-]*)\((.*)")
_COMPUTATION = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\{\s*$")
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_MESH = re.compile(
    r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?\{(.*?)\}"
)
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTS = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
_PAIRS = re.compile(r"source_target_pairs=\{(.*?)\}\}")


@dataclass(frozen=True)
class Collective:
    """Equal collectives of a program, counted together."""

    kind: str
    array: str  # type of the largest array, such as f32[8,4]
    size: int  # bytes of the whole arrays
    devices: int  # in a group
    span: int  # range of device numbers that a group covers
    times: int  # it runs
    line: str  # file:line of this package that asks for it

    @property
    def sent(self) -> float:
        """Bytes that each device sends over all runs, with ring algorithms."""
        share = (self.devices - 1) / self.devices
        passes = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share)
        return self.times * self.size * passes


class Instruction(NamedTuple):
    """A line of a computation: `%name = type op(rest`."""

    name: str
    type: str
    op: str
    rest: str

    def says(self, pattern: str) -> str:
        """The first group of the pattern in the rest of the line; "" without a match."""
        match = re.search(pattern, self.rest)
        return match[1] if match else ""

    @property
    def operands(self) -> list[str]:
        """The names of the instructions that it reads."""
        return re.findall(r"%([\w.\-]+)", self.rest.split(")")[0])

    @property
    def called(self) -> list[str]:
        """The names of the computations that it runs once each; not the body of a loop."""
        if branches := self.says(r"branch_computations=\{([^}]*)\}"):
            return re.findall(r"%([\w.\-]+)", branches)
        keys = "calls|true_computation|false_computation"
        keys += "|to_apply" if self.op == "call" else ""
        return re.findall(rf"(?:{keys})=%([\w.\-]+)", self.rest)


class Module:
    """A compiled program, parsed from its HLO text."""

    def __init__(self, text: str):
        self.text = text
        self.entry = ""
        self.computations: dict[str, list[Instruction]] = {}
        body: list[Instruction] = []
        for line in text.splitlines():
            if found := _COMPUTATION.match(line):
                body = self.computations[found[2]] = []
                self.entry = found[2] if found[1] else self.entry
            elif found := _INSTRUCTION.match(line):
                body.append(Instruction(*found.groups()))

    def collectives(self) -> list[Collective]:
        """Equal ones counted together, the most traffic first; XLA's clones of one count once."""
        counts: dict[Collective, int] = defaultdict(int)
        home: dict[Any, str] = {}  # where a channel was met first; clones are elsewhere with it
        for computation, times, loop in self._reached(into_fusions=True):
            body = {i.name: i for i in self.computations[computation]}
            for i in body.values():
                kind = i.op.removesuffix("-start")
                if kind not in KINDS:
                    continue
                channel = i.says(r"channel_id=(\d+)")
                if channel and home.setdefault((channel, times), computation) != computation:
                    continue
                devices, span = _group(i.rest)
                size, array = _size(i, devices)
                line = self._line(i, body)
                if not line and loop and (outer := self._line(loop, {})):
                    line = f"within {outer}"
                counts[Collective(kind, array, size, devices, span, 0, line)] += times
        all_ = [replace(one, times=times) for one, times in counts.items()]
        return sorted(all_, key=lambda c: -c.sent)

    def cycles(self) -> int:
        """Cycles by the compiler's own cost model, loops multiplied out; 0 where it has none."""
        return sum(
            times * int(i.says(r'"estimated_cycles":"(\d+)"') or 0)
            for computation, times, _ in self._reached(into_fusions=False)
            for i in self.computations[computation]
        )

    def kernels(self) -> dict[str, int]:
        """How often each custom call runs, by target."""
        out: dict[str, int] = defaultdict(int)
        for computation, times, _ in self._reached(into_fusions=True):
            for i in self.computations[computation]:
                if i.op == "custom-call" and (target := i.says(r'custom_call_target="([^"]+)"')):
                    out[target] += times
        return dict(out)

    def _reached(self, *, into_fusions: bool) -> Iterator[tuple[str, int, Instruction | None]]:
        """`(computation, times it runs, the loop around it)`, from the entry on."""
        waiting: list[tuple[str, int, Instruction | None]] = [(self.entry, 1, None)]
        while waiting:
            name, times, loop = waiting.pop()
            if name not in self.computations:
                continue
            yield name, times, loop
            for i in self.computations[name]:
                if i.op == "while":
                    waiting.append((i.says(r"body=%([\w.\-]+)"), times * self._trips(i), i))
                elif i.op in ("conditional", "call", "async-start") or into_fusions:
                    waiting += [(called, times, loop) for called in i.called]

    def _trips(self, loop: Instruction) -> int:
        """The most iterations of a loop; 1 if the text does not say."""
        if known := loop.says(r'"known_trip_count":\{"n":"(\d+)"'):
            return int(known)
        condition = self.computations.get(loop.says(r"condition=%([\w.\-]+)"), [])
        if limit := _compared_to(condition):
            body = self.computations.get(loop.says(r"body=%([\w.\-]+)"), [])
            return -(-limit // _stride(condition, body))
        scopes = loop.says(r'op_name="([^"]*)"').rsplit("/while/", 1)[-1]
        limits = re.findall(r"at_most_(\d+)", scopes)
        return int(limits[-1]) if limits else 1

    def _line(self, i: Instruction, body: dict[str, Instruction]) -> str:
        """The innermost file:line of this package for an instruction, or for one that it reads."""
        if line := self._frames.get(i.says(r"stack_frame_id=(\d+)")):
            return line
        read = re.findall(r"%([\w.\-]+)", i.rest.split("), ")[0])
        lines = (self._line(body[name], {}) for name in read if name in body)
        return next(filter(None, lines), "")

    @cached_property
    def _frames(self) -> dict[str, str]:
        """Stack frame number to file:line of the innermost frame in this package; "" if none."""
        files, locations = self._table("FileNames"), self._table("FileLocations")
        lines: dict[str, str] = {}
        for frame, text in self._table("StackFrames").items():  # the outer ones first
            location = locations.get(_field("file_location_id", text), "")
            file = files.get(_field("file_name_id", location), "").strip('"')
            if PACKAGE in file and not file.endswith(PLACING):
                lines[frame] = f"{file.rsplit(PACKAGE, 1)[1]}:{_field(' line', location)}"
            else:
                lines[frame] = lines.get(_field("parent_frame_id", text), "")
        return lines

    def _table(self, name: str) -> dict[str, str]:
        """The numbered lines under a heading such as FileNames: number to the rest of the line."""
        lines = self.text.partition(f"\n{name}\n")[2].partition("\n\n")[0]
        return dict(line.split(" ", 1) for line in lines.splitlines())


def _field(name: str, text: str) -> str:
    match = re.search(rf"{name}=(\d+)", text)
    return match[1] if match else ""


def _compared_to(condition: list[Instruction]) -> int:
    """The constant that a loop's counter stays below; 0 if the condition has another form."""
    constants = {
        i.name: int(i.rest.split(")")[0])
        for i in condition
        if i.op == "constant" and i.type.startswith(("s32[]", "u32[]"))
    }
    for i in condition:
        if i.op == "compare" and "direction=LT" in i.rest:
            return next((constants[name] for name in i.operands if name in constants), 0)
    return 0


def _stride(condition: list[Instruction], body: list[Instruction]) -> int:
    """The constant that a loop's counter grows by; 1 if the text has another form."""
    read = {i.name: i for i in condition + body}
    compared = [name for i in condition if i.op == "compare" for name in i.operands]
    places = [
        int(place[1])
        for name in compared
        if name in read and (place := re.search(r"index=(\d+)", read[name].rest))
    ]
    if not places or not body or body[-1].op != "tuple":
        return 1
    counted = read.get(body[-1].operands[places[0]])
    grown = counted.operands if counted and counted.op == "add" else []
    by = [read[name] for name in grown if name in read and read[name].op == "constant"]
    return int(by[0].rest.split(")")[0]) if by else 1


def _size(i: Instruction, devices: int) -> tuple[int, str]:
    """Bytes of a collective's arrays, whole, and the largest one's type such as `f32[8,4]`."""
    arrays = [(f"{t}[{d}]", _bytes(t, d)) for t, d in _ARRAY.findall(i.type) if t in BITS]
    sizes = [size for _, size in arrays]
    largest = max(arrays, key=lambda a: a[1], default=("", 0))[0]
    kind = i.op.removesuffix("-start")
    if i.op.endswith("-start") and kind != "all-reduce":
        half = len(sizes) // 2  # the type lists operands, then results
        return max(sum(sizes[:half]), sum(sizes[half:])), largest
    return sum(sizes) * (devices if kind == "reduce-scatter" else 1), largest  # returns a shard


def _bytes(kind: str, dims: str) -> int:
    return math.prod(int(d) for d in dims.split(",") if d) * BITS[kind] // 8


def _group(rest: str) -> tuple[int, int]:
    """Devices in a group, and the range of device numbers that it covers (last - first + 1)."""
    if match := _MESH.search(rest):
        axes = re.findall(r"'([^']+)'=(\d+)", match[1])
        sizes = [int(size) for _, size in axes]
        named = [n for n, (axis, _) in enumerate(axes) if f"'{axis}'" in match[4]]
        ids = _ids(match[2] or str(math.prod(sizes)), match[3]).reshape(sizes)
        first = ids[tuple(slice(None) if n in named else 0 for n in range(len(sizes)))]
    elif match := _IOTA.search(rest):
        first = _ids(match[3], match[4]).reshape(int(match[1]), int(match[2]))[0]
    elif match := _LISTS.search(rest):
        first = np.asarray([int(d) for d in match[1].split("}")[0].strip("{").split(",") if d])
    else:
        pairs = _PAIRS.search(rest)
        one = re.findall(r"(\d+),(\d+)", pairs[1])[0] if pairs else ("0", "0")
        first = np.asarray([int(d) for d in one])
    return max(first.size, 1), int(first.max() - first.min()) + 1 if first.size else 1


def _ids(dims: str, order: str | None) -> np.ndarray:
    """Device numbers written like `[4,8]T(1,0)`: counted up in this shape, then transposed."""
    sizes = [int(d) for d in dims.split(",")]
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose([int(d) for d in order.split(",")]) if order else ids
