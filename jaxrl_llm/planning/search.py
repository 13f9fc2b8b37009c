"""A search for the fastest layout of a config that fits into a machine's memory."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxrl_llm.config import Config, Mesh, Offload
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import qwen2
from jaxrl_llm.planning import flops
from jaxrl_llm.planning.machines import Machine
from jaxrl_llm.planning.plan import Plan, plan, shape_of

TRIALS = 12  # layouts to compile before giving up
MOMENTS = 8  # bytes a parameter of Adam's moments in float32
BYTES = 4 + MOMENTS + 4 + 4  # bytes a parameter with itself and two gradients


@dataclass(frozen=True)
class Layout:
    """The settings of a config that a search may change."""

    tensor: int
    fsdp: int
    data: int
    microbatches: int
    recompute: bool
    offload: Offload = "none"

    def of(self, config: Config) -> Config:
        remat = jax.checkpoint if self.recompute else None
        return replace(
            config,
            mesh=Mesh(self.data, self.fsdp, self.tensor),
            collate=replace(config.collate, microbatches=self.microbatches),
            compute=replace(config.compute, remat=remat),
            offload=self.offload,
        )

    def __str__(self) -> str:
        again = "recomputing layers" if self.recompute else "keeping everything"
        mesh = f"data {self.data} x fsdp {self.fsdp} x tensor {self.tensor}"
        out = f"{mesh}, {self.microbatches} micro-batches, {again}"
        return out if self.offload == "none" else f"{out}, offload {self.offload}"


def fastest(config: Config, machine: Machine, tokens: int, say: Callable[[str], None]) -> Plan:
    """The plan of the first layout that fits, in order of estimated time; UserError if none does.

    The update, which mostly decides, is compiled first; where it fits, all programs are.
    """
    if not machine.chip.flops:
        raise UserError(
            f"--search reckons with a data sheet, and there is none of the devices of {machine.name}: name the "
            "machine with --on, like h100x8 or v5e-16"
        )
    shape = shape_of(config)
    layouts = [
        x for x in candidates(config, shape, machine) if _least(x, shape) < machine.chip.memory
    ]
    tried = sorted(layouts, key=lambda x: estimate(x, config, shape, machine))[:TRIALS]
    for layout in tried:
        for only in (("update",), ()):
            made = plan(layout.of(config), machine, tokens=tokens, only=only)
            needed, there = made.peak / 2**30, made.memory / 2**30
            say(f"{layout}: {made.worst.name} {needed:.1f} of {there:.1f} GiB a device")
            if not made.fits:
                break
        else:
            return made
    raise UserError(
        f"none of {len(tried)} layouts of this config fits on {machine.name} ({len(layouts)} looked possible): "
        "take more devices, or shorter responses"
    )


def candidates(config: Config, shape: qwen2.Shape, machine: Machine) -> list[Layout]:
    """Every layout that divides evenly: rows over the batch axes, heads over the tensor axis.

    If rows never divide, every layout whose heads do: the collator pads with empty rows.
    """
    devices = len(machine.devices)
    rows = config.prompts * config.group_size // config.collate.minibatches
    offloads: tuple[Offload, ...] = ("none", "both" if config.keeps_reference else "optimizer")
    layouts = []
    for tensor in (1, 2, 4, 8):
        if devices % tensor or shape.num_heads % tensor or tensor > machine.together:
            continue
        shards = devices // tensor  # of parameters: none, those of a node, or all
        fsdp = {n for n in (1, machine.together // tensor, shards) if shards % n == 0}
        choices = (_divisors(rows), sorted(fsdp), (False, True), offloads)
        for micro, n, recompute, offload in itertools.product(*choices):
            layouts.append(Layout(tensor, n, shards // n, micro, recompute, offload))
    evenly = [x for x in layouts if rows // x.microbatches % (x.fsdp * x.data) == 0]
    return evenly or layouts


def estimate(layout: Layout, config: Config, shape: qwen2.Shape, machine: Machine) -> float:
    """Seconds of a step's updates: arithmetic, gathered weights, sums over tensor, offload."""
    chip, limit = machine.chip, config.collate
    rows, length = config.prompts * config.group_size, limit.prompt_length + limit.response_length
    work = flops.of_step(layout.of(config), shape, limit.response_length)["update"]
    visits = limit.minibatches * layout.microbatches
    width = jnp.dtype(config.compute.dtype).itemsize
    gathered = (
        (2 + layout.recompute) * visits * qwen2.parameter_count(shape) * width / layout.tensor
    )
    sums = (4 + 2 * layout.recompute) * shape.num_layers * rows * length * shape.hidden_size * width
    sums *= 2 * (1 - 1 / layout.tensor) / (layout.data * layout.fsdp)
    within = layout.fsdp * layout.tensor <= machine.together
    waited = gathered * (1 - 1 / layout.fsdp) / (chip.link if within else chip.network)
    waited += sums / chip.link
    out = work / len(machine.devices) / chip.flops + config.objective.stages * waited
    if layout.offload != "none":
        kept = MOMENTS * qwen2.parameter_count(shape) / (layout.fsdp * layout.tensor)
        out += limit.minibatches * config.objective.stages * 2 * kept / chip.host
    return out


def _least(layout: Layout, shape: qwen2.Shape) -> float:
    """Bytes that a device needs at least: its shards of parameters, moments and gradients."""
    each = BYTES if layout.offload == "none" else BYTES - MOMENTS
    return each * qwen2.parameter_count(shape) / (layout.fsdp * layout.tensor)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
