"""What a config would be on a machine: memory, traffic and time of a step, from its compiled programs.

Bytes, collectives and shapes are facts of the compilers. Seconds are estimates: the arithmetic and the bytes that
were counted, at the rates of a data sheet.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.config import Config, Pretrained
from jaxrl_llm.models import hf, qwen2, sharding
from jaxrl_llm.planning import hlo, machines
from jaxrl_llm.planning.machines import Machine
from jaxrl_llm.planning.programs import Program, Step

WAITS = ("arithmetic", "memory", "links", "network", "host")  # what a device may wait for


@dataclass(frozen=True)
class Compiled:
    """A compiled program: memory of a device in bytes, traffic, and its seconds of a step.

    `live` is the most that is in use at a time, in the compiler's own account; `peak` is what is allocated for it.
    `beside` is held for other programs. `seconds` are by what a device would wait for if nothing else took time.
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

    @property
    def needed(self) -> int:
        """Bytes on a device while it runs."""
        return self.peak + self.beside


@dataclass(frozen=True)
class Plan:
    """All of it, for one machine and mesh; bytes are of a device, or of the host's memory for it."""

    machine: str
    mesh: Mapping[str, int]
    devices: int
    memory: int
    on_device: Mapping[str, int]
    programs: list[Compiled]
    timed: bool = True
    on_hosts: Mapping[str, int] = field(default_factory=dict)
    left_whole: Sequence[str] = ()

    @property
    def worst(self) -> Compiled:
        """The program at the worst moment of a step."""
        return max(self.programs, key=lambda program: program.needed)

    @property
    def peak(self) -> int:
        """Bytes on a device then."""
        return self.worst.needed

    @property
    def fits(self) -> bool:
        """Whether the device has as much."""
        return self.peak <= self.memory

    @property
    def seconds(self) -> tuple[float, float]:
        """Of a step: if everything overlaps, and if nothing does."""
        waits = [program.seconds.values() for program in self.programs]
        return sum(map(max, waits)), sum(map(sum, waits))


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
    only: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Compiles the programs of a step, or `only` those, and reads them.

    `tokens` is the mean length of a response to reckon time with (0: the limit).
    """
    sizes, chip = config.mesh, machine.chip
    memory = int(chip.memory * (machines.share_of_a_gpu() if chip.platform == "cuda" else 1))
    mesh = sharding.make_mesh(sizes.data, sizes.fsdp, sizes.tensor, machine.devices)
    step = Step(config, shape or shape_of(config), mesh, memory)
    compiled = []
    with machines.compiling_for(mesh):
        for program in step.programs(tokens):
            if not only or program.name in only:
                say(f"compiling {program.name}")
                compiled.append(_compiled(program, machine))
        return Plan(
            machine.name,
            dict(mesh.shape),
            mesh.size,
            memory,
            step.on_device,
            compiled,
            timed=chip.flops > 0,
            on_hosts=step.on_hosts,
            left_whole=sharding.left_whole(step.state.params, mesh),
        )


def _compiled(program: Program, machine: Machine) -> Compiled:
    start = time.perf_counter()
    compiled: Any = program.compile()
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
    )


def _seconds(
    program: Program, machine: Machine, collectives: list[hlo.Collective]
) -> dict[str, float]:
    chip = machine.chip
    if not chip.flops:
        return dict.fromkeys(WAITS, 0.0)
    sent = {True: 0.0, False: 0.0}  # by whether it leaves the node or slice
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
    """Bytes of arguments, results and what is in between, as much of them as there is at a time.

    A TPU's compiler says when each is alive; elsewhere what is in between is allocated as one piece.
    """
    whole = memory.argument_size_in_bytes + memory.output_size_in_bytes
    whole += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    return _live(memory) if platform == "tpu" else whole


def _live(memory: Any) -> int:
    """The compiler's own account of the peak, less what lies in the memory of the host."""
    on_host = memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes
    return memory.peak_memory_in_bytes - on_host
