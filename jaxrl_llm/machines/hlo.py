"""What a compiled program says of itself: collectives and how often they run, cycles, loops.

The optimised HLO is read as text, which is what every backend gives. A loop whose trip count depends on data says
its limit by a name scope, `at_most_N` (`models.primitives.up_to`).
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "bf16": 16, "f16": 16, "s16": 16, "u16": 16}
BITS |= {"f32": 32, "s32": 32, "u32": 32, "f64": 64, "s64": 64, "u64": 64}
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
PACKAGE = "/jaxrl_llm/"
PLACING = "models/sharding.py"  # who asked for it is the better line

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
    """One kind of array that travels: bytes of the whole array among `devices`, how often, from which line."""

    kind: str
    array: str
    size: int
    devices: int
    span: int
    times: int
    line: str

    @property
    def sent(self) -> float:
        """Bytes that each device sends in all, by the best known rings."""
        share = (self.devices - 1) / self.devices
        return (
            self.times
            * self.size
            * {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share)
        )


@dataclass(frozen=True)
class Instruction:
    """A line of a computation."""

    name: str
    type: str
    op: str
    rest: str


@dataclass
class Module:
    """The text of a compiled program."""

    text: str
    computations: dict[str, list[Instruction]] = field(default_factory=dict)
    entry: str = ""

    def __post_init__(self):
        body: list[Instruction] = []
        for line in self.text.splitlines():
            if found := _COMPUTATION.match(line):
                body = self.computations[found[2]] = []
                self.entry = found[2] if found[1] else self.entry
            elif found := _INSTRUCTION.match(line):
                body.append(Instruction(*found.groups()))

    def collectives(self) -> list[Collective]:
        """Those that are alike together, the largest traffic first; clones of one in the same loop count once."""
        found: dict[Collective, int] = defaultdict(int)
        home: dict[tuple[str, int], str] = {}  # of a channel; its clones are elsewhere
        for computation, times, loop in self._reached(into_fusions=True):
            operands = {i.name: i for i in self.computations[computation]}
            for i in self.computations[computation]:
                kind = i.op.removesuffix("-start")
                if kind not in KINDS:
                    continue
                channel = re.search(r"channel_id=(\d+)", i.rest)
                if channel and home.setdefault((channel[1], times), computation) != computation:
                    continue
                devices, span = _group(i.rest)
                size, array = _size(i, devices)
                line = self._line(i, operands) or self._line_of_loop(loop)
                found[Collective(kind, array, size, devices, span, 0, line)] += times
        all_ = [replace(one, times=times) for one, times in found.items()]
        return sorted(all_, key=lambda c: -c.sent)

    def cycles(self) -> int:
        """Cycles of the compiler's own cost model, loops multiplied out; 0 where it has none."""
        total = 0
        for computation, times, _ in self._reached(into_fusions=False):
            for i in self.computations[computation]:
                if cycles := re.search(r'"estimated_cycles":"(\d+)"', i.rest):
                    total += times * int(cycles[1])
        return total

    def kernels(self) -> dict[str, int]:
        """Custom calls by target, and how often they run."""
        out: dict[str, int] = defaultdict(int)
        for computation, times, _ in self._reached(into_fusions=True):
            for i in self.computations[computation]:
                if i.op == "custom-call" and (
                    target := re.search(r'custom_call_target="([^"]+)"', i.rest)
                ):
                    out[target[1]] += times
        return dict(out)

    @property
    def unbounded(self) -> list[str]:
        """The loops of which nothing says how often they run; they count once."""
        return [
            self._line(i, {}) or i.name
            for computation, _, _ in self._reached(into_fusions=True)
            for i in self.computations[computation]
            if i.op == "while" and self._trips(i) is None
        ]

    def _reached(self, *, into_fusions: bool) -> Iterator[tuple[str, int, str]]:
        """`(computation, how often it runs, metadata of the loop around it)`, from the entry on."""
        waiting = [(self.entry, 1, "")]
        while waiting:
            name, times, loop = waiting.pop()
            if name not in self.computations:
                continue
            yield name, times, loop
            for i in self.computations[name]:
                if i.op == "while":
                    body = re.search(r"body=%([\w.\-]+)", i.rest)
                    waiting.append((body[1] if body else "", times * (self._trips(i) or 1), i.rest))
                elif i.op in ("conditional", "call", "async-start") or into_fusions:
                    waiting += [(called, times, loop) for called in _called(i)]

    def _trips(self, loop: Instruction) -> int | None:
        """How often a loop runs, at most; None if the text does not say."""
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
            return int(known[1])
        parts = [re.search(rf"{part}=%([\w.\-]+)", loop.rest) for part in ("condition", "body")]
        condition, body = ([] if not p else self.computations.get(p[1], []) for p in parts)
        if limit := _compared_to(condition):
            return -(-limit // _stride(condition, body))
        name = re.search(r'op_name="([^"]*)"', loop.rest)
        tail = name[1].rsplit("/while/", 1)[-1] if name else ""
        if limit := re.findall(r"at_most_(\d+)", tail):
            return int(limit[-1])
        return None

    def _line(self, i: Instruction, operands: dict[str, Instruction]) -> str:
        """The innermost line of this package that the instruction, or what it reads, comes from."""
        frame = re.search(r"stack_frame_id=(\d+)", i.rest)
        if frame and (line := self._frames.get(int(frame[1]))):
            return line
        for name in re.findall(r"%([\w.\-]+)", i.rest.split("), ")[0]):
            if name in operands and (line := self._line(operands[name], {})):
                return line
        return ""

    def _line_of_loop(self, rest: str) -> str:
        frame = re.search(r"stack_frame_id=(\d+)", rest)
        line = self._frames.get(int(frame[1]), "") if frame else ""
        return f"within {line}" if line else ""

    @cached_property
    def _frames(self) -> dict[int, str]:
        """`file:line` of this package for a frame, found by climbing from it."""
        tables: dict[str, dict[int, str]] = {}
        current: dict[int, str] = {}
        for line in self.text.splitlines():
            if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                current = tables[line] = {}
            elif found := re.match(r"(\d+) (.*)", line):
                current[int(found[1])] = found[2]
        number = lambda key, text: int(m[1]) if (m := re.search(rf"{key}=(\d+)", text)) else 0
        out: dict[int, str] = {}
        frames = tables.get("StackFrames", {})
        for frame in frames:
            at, climbed = frame, set()
            while at in frames and at not in climbed:
                climbed.add(at)
                location = tables["FileLocations"].get(number("file_location_id", frames[at]), "")
                name = tables["FileNames"].get(number("file_name_id", location), "").strip('"')
                if PACKAGE in name and not name.endswith(PLACING):
                    out[frame] = f"{name.rsplit(PACKAGE, 1)[1]}:{number(' line', location)}"
                    break
                at = number("parent_frame_id", frames[at])
        return out


def _compared_to(condition: list[Instruction]) -> int:
    """The constant that a loop's counter has to stay below, 0 if it is none."""
    constants = {
        i.name: int(i.rest.split(")")[0])
        for i in condition
        if i.op == "constant" and i.type.startswith(("s32[]", "u32[]"))
    }
    for i in condition:
        if i.op == "compare" and "direction=LT" in i.rest:
            return next((constants[name] for name in _operands(i) if name in constants), 0)
    return 0


def _stride(condition: list[Instruction], body: list[Instruction]) -> int:
    """The constant that a loop's counter grows by a turn; 1 if the text is not that plain."""
    read = {i.name: i for i in condition + body}
    compared = [name for i in condition if i.op == "compare" for name in _operands(i)]
    places = [
        int(place[1])
        for name in compared
        if name in read and (place := re.search(r"index=(\d+)", read[name].rest))
    ]
    if not places or not body or body[-1].op != "tuple":
        return 1
    counted = read.get(_operands(body[-1])[places[0]])
    grown = _operands(counted) if counted and counted.op == "add" else []
    by = [read[name] for name in grown if name in read and read[name].op == "constant"]
    return int(by[0].rest.split(")")[0]) if by else 1


def _operands(i: Instruction) -> list[str]:
    """The names of what an instruction reads."""
    return re.findall(r"%([\w.\-]+)", i.rest.split(")")[0])


def _called(i: Instruction) -> list[str]:
    if branches := re.search(r"branch_computations=\{([^}]*)\}", i.rest):
        return re.findall(r"%([\w.\-]+)", branches[1])
    names = re.findall(r"(?:calls|true_computation|false_computation)=%([\w.\-]+)", i.rest)
    return names + (re.findall(r"to_apply=%([\w.\-]+)", i.rest) if i.op == "call" else [])


def _size(i: Instruction, devices: int) -> tuple[int, str]:
    """Bytes of the whole array of a collective, and how it is written."""
    arrays = [(f"{t}[{d}]", _bytes(t, d)) for t, d in _ARRAY.findall(i.type) if t in BITS]
    sizes = [size for _, size in arrays]
    largest = max(arrays, key=lambda a: a[1], default=("", 0))[0]
    kind = i.op.removesuffix("-start")
    if i.op.endswith("-start") and kind != "all-reduce":
        half = len(sizes) // 2  # what goes in, then what comes out
        return max(sum(sizes[:half]), sum(sizes[half:])), largest
    return sum(sizes) * (devices if kind == "reduce-scatter" else 1), largest


def _bytes(kind: str, dims: str) -> int:
    return math.prod(int(d) for d in dims.split(",") if d) * BITS[kind] // 8


def _group(rest: str) -> tuple[int, int]:
    """How many devices take part together, and over how many consecutive ones they are spread."""
    if found := _MESH.search(rest):
        axes = re.findall(r"'([^']+)'=(\d+)", found[1])
        sizes = [int(size) for _, size in axes]
        named = [n for n, (axis, _) in enumerate(axes) if f"'{axis}'" in found[4]]
        ids = _ids(found[2] or str(math.prod(sizes)), found[3]).reshape(sizes)
        first = ids[tuple(slice(None) if n in named else 0 for n in range(len(sizes)))]
    elif found := _IOTA.search(rest):
        first = _ids(found[3], found[4]).reshape(int(found[1]), int(found[2]))[0]
    elif found := _LISTS.search(rest):
        first = np.asarray([int(d) for d in found[1].split("}")[0].strip("{").split(",") if d])
    else:
        pairs = _PAIRS.search(rest)
        one = re.findall(r"(\d+),(\d+)", pairs[1])[0] if pairs else ("0", "0")
        first = np.asarray([int(d) for d in one])
    return max(first.size, 1), int(first.max() - first.min()) + 1 if first.size else 1


def _ids(dims: str, order: str | None) -> np.ndarray:
    """Numbers of devices as `[4,8]T(1,0)` has them: counted up in these dimensions, then transposed."""
    sizes = [int(d) for d in dims.split(",")]
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose([int(d) for d in order.split(",")]) if order else ids
