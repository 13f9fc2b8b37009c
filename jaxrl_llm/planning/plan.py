"""The plan of a config on a machine: memory, traffic and time of a step, by its compiled programs.

Bytes, collectives and shapes are the compiler's. Seconds are estimates: counted arithmetic and
bytes, at the rates of a data sheet.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jaxrl_llm.accelerators import share_of_a_gpu
from jaxrl_llm.config import Config, Pretrained
from jaxrl_llm.errors import out_of_memory
from jaxrl_llm.models import qwen2, sharding
from jaxrl_llm.planning import hlo, machines
from jaxrl_llm.planning.machines import Machine
from jaxrl_llm.planning.programs import Program, Step, model_shape

WAITS = ("arithmetic", "memory", "links", "network", "host")  # resources that may limit a device


@dataclass(frozen=True)
class Compiled:
    """A compiled program: bytes of a device's memory, traffic, and its seconds in a step.

    `live` is the most in use at a time by the compiler's account, `peak` the memory allocated,
    `beside` other programs' arrays. `seconds` has a time for each of `WAITS`, as if it were alone.
    """

    name: str
    peak: int
    live: int
    beside: int
    collectives: list[hlo.Collective]
    kernels: Mapping[str, int]
    cycles: int
    compiled_in: float
    seconds: Mapping[str, float]
    recomputed: float = 0.0  # the share of its arithmetic that repeats some

    @property
    def needed(self) -> int:
        """Bytes in use on a device while it runs."""
        return self.peak + self.beside


@dataclass(frozen=True)
class Plan:
    """The plan for a machine and mesh; bytes are of one device, or of its host's memory for it."""

    machine: str
    mesh: Mapping[str, int]
    devices: int
    memory: int
    on_device: Mapping[str, int]
    programs: list[Compiled]
    timed: bool = True  # whether there is a data sheet to estimate seconds by
    on_hosts: Mapping[str, int] = field(default_factory=dict)
    left_whole: Sequence[str] = ()  # a sentence for each weight not divided over a mesh axis
    sizes: Mapping[str, int] = field(default_factory=dict)  # slots, and micro-batches

    @property
    def worst(self) -> Compiled:
        """The program that needs the most memory."""
        return max(self.programs, key=lambda program: program.needed)

    @property
    def peak(self) -> int:
        """Bytes in use on a device while `worst` runs."""
        return self.worst.needed

    @property
    def fits(self) -> bool:
        """True if a device has memory for the peak."""
        return self.peak <= self.memory

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds of a step if everything in a program overlaps, and if nothing does."""
        waits = [program.seconds.values() for program in self.programs]
        return sum(map(max, waits)), sum(map(sum, waits))


def shape_of(config: Config) -> qwen2.Shape:
    """The architecture of the config's model; for a preset without any file."""
    model = config.model
    return model_shape(model) if isinstance(model, Pretrained) else model.shape


def plan(
    config: Config,
    machine: Machine,
    shape: qwen2.Shape,
    *,
    tokens: int = 0,
    only: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Compiles the programs of a step, or `only` those named, and makes the plan of them.

    `tokens` is the mean length of a response for estimates of time (0: the limit).
    """
    machine = replace(machine, chip=machine.chip.computing(config.compute.dtype))
    step = step_of(config, machine, shape)
    mesh, compiled = step.mesh, []
    with machines.compiling_for(mesh):
        for program in step.programs(tokens):
            if not only or program.name in only:
                say(f"compiling {program.name}")
                compiled.append(_compiled(program, machine))
        return Plan(
            machine.name,
            dict(mesh.shape),
            mesh.size,
            step.memory,
            step.on_device,
            compiled,
            timed=machine.chip.flops > 0,
            on_hosts=step.on_hosts,
            left_whole=sharding.left_whole(step.state.params, mesh),
            sizes={n: x for n, x in config.sizes.items() if n != "slots" or step.samples},
        )


def step_of(config: Config, machine: Machine, shape: qwen2.Shape) -> Step:
    """The arrays and programs of a step on the machine, and the memory that JAX has there."""
    sizes, chip = config.mesh, machine.chip
    taken = share_of_a_gpu(chip.memory, left=config.shared)
    memory = int(chip.memory * (taken if chip.platform == "cuda" else 1))
    mesh = sharding.make_mesh(sizes.data, sizes.fsdp, sizes.tensor, machine.devices)
    return Step(config, shape, mesh, memory)


def _compiled(program: Program, machine: Machine) -> Compiled:
    start = time.perf_counter()
    try:
        compiled: Any = program.compile()
    except jax.errors.JaxRuntimeError as error:  # the compiler of TPUs refuses what is too large
        if not out_of_memory(error):
            raise
        used = re.search(r"([\d.]+)([KMGT])\)? (?:of|exceeds)", str(error))
        said = float(used[1]) * 2 ** (10 * (1 + "KMGT".index(used[2]))) if used else 0
        peak = max(int(said), machine.chip.memory + 1)
        seconds, took = _seconds(program, machine, []), time.perf_counter() - start
        return Compiled(program.name, peak, peak, 0, [], {}, 0, took, seconds, program.recomputed)
    took = time.perf_counter() - start
    module, memory = hlo.Module(compiled.as_text()), compiled.memory_analysis()
    collectives = module.collectives()
    return Compiled(
        program.name,
        peak=peak_of(memory, machine.chip.platform),
        live=_live(memory),
        beside=program.beside,
        collectives=collectives,
        kernels=module.kernels(),
        cycles=module.cycles(),
        compiled_in=took,
        seconds=_seconds(program, machine, collectives),
        recomputed=program.recomputed,
    )


def _seconds(
    program: Program, machine: Machine, collectives: list[hlo.Collective]
) -> dict[str, float]:
    chip = machine.chip
    if not chip.flops:
        return dict.fromkeys(WAITS, 0.0)
    sent = {True: 0.0, False: 0.0}  # bytes a device, by whether they leave the node or slice
    for collective in collectives:
        sent[collective.span > machine.together] += program.runs * collective.sent
    return {
        "arithmetic": program.flops / len(machine.devices) / chip.flops,
        "memory": program.runs * program.moved / chip.bandwidth,
        "links": sent[False] / chip.link,
        "network": sent[True] / chip.network,
        "host": program.copied / chip.host,
    }


def peak_of(memory: Any, platform: str) -> int:
    """Bytes that a program allocates for arguments, results and temporaries together.

    A TPU's compiler knows when each is alive; elsewhere temporaries are allocated as one block.
    """
    whole = memory.argument_size_in_bytes + memory.output_size_in_bytes
    whole += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    return _live(memory) if platform == "tpu" else whole


def _live(memory: Any) -> int:
    """The compiler's own account of the peak, without arrays in the memory of the host."""
    on_host = memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes
    return memory.peak_memory_in_bytes - on_host
