"""What a config would be on a machine: memory, traffic and time a step, from its compiled programs.

Bytes, collectives and shapes are facts of the compilers. Seconds are estimates: the arithmetic and the bytes that
were counted, at the rates of a data sheet.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.config import Config, Pretrained
from jaxrl_llm.machines import hlo, seconds, share, topologies
from jaxrl_llm.machines.programs import Planned, local_bytes, on_hosts
from jaxrl_llm.machines.seconds import Seconds
from jaxrl_llm.machines.topologies import Machine
from jaxrl_llm.models import hf, logprobs, qwen2, sharding


@dataclass(frozen=True)
class Program:
    """A compiled program: its peak on a device, what is held there beside it, traffic, its time in a step.

    `live` is the most that is in use at a time, in the compiler's own account; `peak` is what is allocated for it.
    """

    name: str
    peak: int
    live: int
    beside: int
    collectives: list[hlo.Collective]
    kernels: Mapping[str, int]
    cycles: int
    compiled_in: float
    seconds: Seconds

    @property
    def together(self) -> int:
        """Bytes on a device while it runs."""
        return self.peak + self.beside


@dataclass(frozen=True)
class Plan:
    """All of it, for one machine and mesh; `waiting` is in the memory of the hosts, in bytes a device."""

    machine: str
    mesh: Mapping[str, int]
    devices: int
    memory: int
    parts: Mapping[str, int]
    programs: list[Program]
    timed: bool = True
    waiting: Mapping[str, int] = field(default_factory=dict)
    left_whole: Sequence[str] = ()

    @property
    def worst(self) -> Program:
        """The program at the worst moment of a step."""
        return max(self.programs, key=lambda program: program.together)

    @property
    def peak(self) -> int:
        """Bytes on a device then."""
        return self.worst.together

    @property
    def fits(self) -> bool:
        """Whether the device has as much."""
        return self.peak <= self.memory

    @property
    def seconds(self) -> tuple[float, float]:
        """Of a step: if everything overlaps, and if nothing does."""
        return (
            sum(program.seconds.least for program in self.programs),
            sum(program.seconds.most for program in self.programs),
        )


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
    shape: qwen2.Shape | None = None,
    tokens: int = 0,
    only: tuple[str, ...] = (),
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Compiles the programs of a step and reads them; `tokens` is the mean length of a response (0: the limit)."""
    sizes, chip = config.mesh, machine.chip
    memory = int(chip.memory * (share.of_a_gpu() if chip.platform == "cuda" else 1))
    mesh = sharding.make_mesh(sizes.data, sizes.fsdp, sizes.tensor, machine.devices)
    planned, programs = Planned(config, shape or shape_of(config), mesh, memory), []
    with topologies.compiling_for(mesh):
        parts, waiting = parts_of(planned), waiting_of(planned)
        for name, compile_it in planned.programs().items():
            if only and name not in only:
                continue
            say(f"compiling {name}")
            start = time.perf_counter()
            compiled: Any = compile_it()
            took = time.perf_counter() - start
            module = hlo.Module(compiled.as_text())
            collectives = module.collectives()
            program = Program(
                name,
                peak=peak_of(compiled.memory_analysis(), machine.chip.platform),
                live=_live(compiled.memory_analysis()),
                beside=_beside(name, planned, parts, waiting),
                collectives=collectives,
                kernels=module.kernels(),
                cycles=module.cycles(),
                compiled_in=took,
                seconds=seconds.of(name, planned, machine, collectives, tokens),
            )
            programs.append(program)
    whole = sharding.left_whole(planned.state.params, mesh)
    shape_of_mesh, timed = dict(mesh.shape), chip.flops > 0
    return Plan(
        machine.name, shape_of_mesh, mesh.size, memory, parts, programs, timed, waiting, whole
    )


HELD = {  # on the device, and no arguments of the program; parameters where the sampler has a copy
    "gather": {"optimizer", "reference"},
    "prefill": {"parameters", "optimizer", "reference", "cache"},
    "decode": {"parameters", "optimizer", "reference"},
    "score": {"optimizer", "reference"},
    "credit": {"optimizer", "reference"},
    "update": {"reference"},
}


def parts_of(planned: Planned) -> dict[str, int]:
    """Bytes on one device by what holds them, as far as shapes say."""
    state, config = planned.state, planned.config
    parts = {"parameters": local_bytes(state.params), "optimizer": local_bytes(state.opt_state)}
    if config.keeps_reference:
        parts["reference"] = local_bytes(planned.reference)
    for part, size in waiting_of(planned).items():
        parts[part] -= size
    parts = {part: size for part, size in parts.items() if size}
    if planned.native:
        parts["cache"] = local_bytes(planned.cache)
        if planned.copies_weights:
            parts["sampler's copy"] = local_bytes(planned.weights)
    sums = 2 if config.collate.microbatches > 1 else 1  # of a micro-batch, and added up
    parts["gradients"] = sums * local_bytes(state.params)
    bins = planned.batch.inputs.tokens
    rows, length = bins.sharding.shard_shape(bins.shape)[2:]
    width = planned.shape.hidden_size * jnp.dtype(config.compute.dtype).itemsize
    if config.compute.remat is jax.checkpoint:
        parts["inputs of layers"] = planned.shape.num_layers * rows * length * width
    whole = 4 * rows * length * planned.shape.vocab_size
    parts["logits at a time"] = min(logprobs.logit_bytes(), whole)
    return parts


def waiting_of(planned: Planned) -> dict[str, int]:
    """Bytes that the hosts keep for each device."""
    trees = {"optimizer": planned.state.opt_state}
    if planned.config.keeps_reference:
        trees["reference"] = planned.reference
    found = {part: local_bytes(on_hosts(tree)) for part, tree in trees.items()}
    return {part: size for part, size in found.items() if size}


def _beside(
    name: str, planned: Planned, parts: Mapping[str, int], waiting: Mapping[str, int]
) -> int:
    """Bytes that a device holds for others while a program runs."""
    held = HELD[name]
    if not (planned.native and planned.copies_weights):
        held = held - {"parameters"}
    brought = waiting.get("reference", 0) if name == "score" else 0
    return brought + sum(parts.get(part, 0) for part in held)


def peak_of(memory: Any, platform: str) -> int:
    """Bytes of arguments, results and what is in between, as much of them as there is at a time.

    A TPU's compiler says when each is alive; elsewhere what is in between is allocated as one piece.
    """
    together = memory.argument_size_in_bytes + memory.output_size_in_bytes
    together += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    return _live(memory) if platform == "tpu" else together


def _live(memory: Any) -> int:
    """The compiler's own account of the peak, less what lies in the memory of the host."""
    waiting = memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes
    return memory.peak_memory_in_bytes - waiting
