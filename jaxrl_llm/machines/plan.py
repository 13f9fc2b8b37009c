"""What a config would be on a machine: memory, traffic and time a step, from its compiled programs.

Bytes, collectives and shapes are facts of the compilers. Seconds are estimates: the arithmetic and the bytes that were
counted, at the rates of a data sheet.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.config import Config, Pretrained
from jaxrl_llm.errors import UserError
from jaxrl_llm.machines import flops, hlo, topologies
from jaxrl_llm.machines.programs import Lowered, Planned
from jaxrl_llm.machines.topologies import Chip, Machine
from jaxrl_llm.models import hf, qwen2, sharding

RESERVED = 0.94  # of a GPU's memory, what is left beside the driver and the communication library


@dataclass(frozen=True)
class Seconds:
    """Of one device, if nothing else took time."""

    arithmetic: float = 0.0
    memory: float = 0.0
    links: float = 0.0
    network: float = 0.0

    @property
    def least(self) -> float:
        """All at the same time."""
        return max(self.arithmetic, self.memory, self.links, self.network)

    @property
    def most(self) -> float:
        """One after the other."""
        return self.arithmetic + self.memory + self.links + self.network

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(*(getattr(self, n) + getattr(other, n) for n in self.__dataclass_fields__))


@dataclass(frozen=True)
class Program:
    """A compiled program: its peak on a device, what is held there beside it, traffic, and time of a step."""

    name: str
    times: float
    peak: int
    beside: int
    collectives: list[hlo.Collective]
    kernels: Mapping[str, int]
    cycles: int
    compiled_in: float
    seconds: Seconds = field(default_factory=Seconds)

    @property
    def together(self) -> int:
        """Bytes on a device while it runs."""
        return self.peak + self.beside


@dataclass(frozen=True)
class Plan:
    """All of it, for one machine and mesh."""

    machine: str
    mesh: Mapping[str, int]
    devices: int
    memory: int
    parts: Mapping[str, int]
    programs: list[Program]
    dropped: list[str] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """Bytes on a device at the worst moment of a step."""
        return max(program.together for program in self.programs)

    @property
    def fits(self) -> bool:
        """Whether the device has as much."""
        return self.peak <= self.memory

    @property
    def seconds(self) -> tuple[float, float]:
        """Of a step: if everything overlaps, and if nothing does."""
        return tuple(sum(getattr(p.seconds, end) for p in self.programs) for end in ("least", "most"))


def shape_of(config: Config) -> qwen2.Shape:
    """The architecture; of a published Qwen2.5 by its name alone."""
    if not isinstance(config.model, Pretrained):
        return config.model.shape
    name = config.model.name.rpartition("/")[2]
    for known in (name, name.removesuffix("-Instruct")):
        if known in qwen2.PRESETS:
            return qwen2.PRESETS[known]
    return hf.load_shape(hf.resolve(config.model.name))


def plan(
    config: Config,
    machine: Machine,
    *,
    tokens: int = 0,
    only: tuple[str, ...] = (),
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Compiles the programs of a step and reads them; `tokens` is the mean length of a response (0: the limit)."""
    sizes = config.mesh
    mesh = sharding.make_mesh(sizes.data, sizes.fsdp, sizes.tensor, machine.devices)
    planned = Planned(config, shape_of(config), mesh)
    programs = []
    with topologies.compiling_for(mesh):
        parts = parts_of(planned)
        for name, lower in planned.programs():
            if only and name not in only:
                continue
            say(f"compiling {name}")
            start = time.perf_counter()
            made = _read(name, lower(), parts)
            made = replace(made, compiled_in=time.perf_counter() - start)
            programs.append(_timed(made, planned, machine, tokens))
    memory = machine.chip.memory
    if machine.chip.platform == "cuda":
        memory = int(RESERVED * memory)
    return Plan(machine.name, dict(mesh.shape), mesh.size, memory, parts, programs)


def parts_of(planned: Planned) -> dict[str, int]:
    """Bytes on one device by what holds them, as far as shapes say."""
    state, config = planned.state, planned.config
    parts = {"parameters": local_bytes(state.params), "optimizer": local_bytes(state.opt_state)}
    if config.keeps_reference:
        parts["reference"] = local_bytes(planned.reference)
    if planned.copies_weights:
        parts["sampler's copy"] = local_bytes(planned.weights)
    if planned.cache is not None:
        parts["cache"] = local_bytes(planned.cache)
    accumulators = 2 if config.collate.microbatches > 1 else 1
    parts["gradients"] = accumulators * sum(
        math.prod(x.sharding.shard_shape(x.shape)) * 4 for x in jax.tree.leaves(state.params)
    )
    bins = planned.batch.inputs.tokens
    rows, length = bins.sharding.shard_shape(bins.shape)[2:]
    width = planned.shape.hidden_size * jnp.dtype(config.compute.dtype).itemsize
    if config.compute.remat is jax.checkpoint:
        parts["activations kept"] = planned.shape.num_layers * rows * length * width
    parts["logits at a time"] = planned.logit_bytes
    return parts


def local_bytes(tree: Any) -> int:
    """What the first device holds of arrays or shapes."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


HELD = {  # what is on the device and not an argument of the program
    "prefill": ("parameters", "optimizer", "reference", "cache"),
    "decode": ("parameters", "optimizer", "reference"),
    "score": ("optimizer", "reference"),
    "credit": ("parameters", "optimizer", "reference"),
    "update": ("reference",),
}


def _read(name: str, lowered: Lowered, parts: Mapping[str, int]) -> Program:
    compiled = lowered.compiled()
    module = hlo.Module(compiled.as_text())
    held = [part for part in HELD[name] if part != "parameters" or "sampler's copy" in parts or name == "credit"]
    return Program(
        name,
        lowered.times,
        _peak(compiled.memory_analysis()),
        sum(parts.get(part, 0) for part in held),
        module.collectives(),
        module.kernels(),
        module.cycles(),
        0.0,
    )
