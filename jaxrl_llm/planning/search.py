"""A search for the fastest layout of a config that fits into a machine's memory."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxrl_llm.config import Config, Mesh, Offload
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import lora, qwen2
from jaxrl_llm.planning import flops, report
from jaxrl_llm.planning.machines import Machine
from jaxrl_llm.planning.plan import Plan, plan, shape_of
from jaxrl_llm.planning.sizes import estimated, fitted

TRIALS = 12  # layouts to compile before giving up
MOMENTS = 8  # bytes a parameter of Adam's moments in float32


def fastest(config: Config, machine: Machine, tokens: int, say: Callable[[str], None]) -> Plan:
    """The plan of the first layout that fits, in order of estimated time; UserError if none does.

    A layout is the config with another mesh, recomputation and offload, and as few micro-batches as
    fit. The update, which mostly decides, is compiled first; where it fits, all programs are.
    """
    if not machine.chip.flops:
        raise UserError(
            f"--search reckons with a data sheet, and there is none of the devices of {machine.name}: name the "
            "machine with --on, like h100x8 or v5e-16"
        )
    shape, possible = shape_of(config), list[tuple[float, Config]]()
    for layout in candidates(config, shape, machine):
        try:
            sized = layout.sized(estimated(layout, machine, shape))
        except UserError:  # its arrays alone do not fit
            continue
        possible.append((estimate(sized, shape, machine), layout))
    tried = sorted(possible, key=lambda one: one[0])[:TRIALS]
    for _, layout in tried:
        try:
            sized, _ = fitted(layout, machine, shape, only=("update",))
        except UserError as error:
            say(f"{_describe(layout)}: {error}")
            continue
        best = plan(sized, machine, shape, tokens=tokens)
        needed, there = best.peak / 2**30, best.memory / 2**30
        said = f"{_describe(layout)}, {report.sized(sized.sizes)}"
        say(f"{said}: {best.worst.name} {needed:.1f} of {there:.1f} GiB a device")
        if best.fits:
            return best
    raise UserError(
        f"none of {len(tried)} layouts of this config fits on {machine.name} ({len(possible)} looked possible): "
        "take more devices, or shorter responses"
    )


def candidates(config: Config, shape: qwen2.Shape, machine: Machine) -> list[Config]:
    """Every layout that divides evenly: rows over the batch axes, heads over the tensor axis.

    If rows never divide, every layout whose heads do: the collator pads with empty rows.
    Micro-batches are left open.
    """
    devices = len(machine.devices)
    rows = config.prompts * config.group_size // config.collate.minibatches
    frozen = config.keeps_reference or config.teacher
    offloads: tuple[Offload, ...] = ("none", "both" if frozen else "optimizer")
    layouts = []
    for tensor in (1, 2, 4, 8):
        if devices % tensor or shape.num_heads % tensor or tensor > machine.together:
            continue
        shards = devices // tensor  # of parameters: none, those of a node, or all
        fsdp = {n for n in (1, machine.together // tensor, shards) if shards % n == 0}
        for n, remat, offload in itertools.product(sorted(fsdp), (None, jax.checkpoint), offloads):
            layouts.append((Mesh(shards // n, n, tensor), remat, offload))
    evenly = [x for x in layouts if rows % (x[0].data * x[0].fsdp) == 0]
    return [
        replace(
            config,
            mesh=mesh,
            collate=replace(config.collate, microbatches=0),
            compute=replace(config.compute, remat=remat),
            offload=offload,
        )
        for mesh, remat, offload in evenly or layouts
    ]


def estimate(layout: Config, shape: qwen2.Shape, machine: Machine) -> float:
    """Seconds of a step's updates: arithmetic, gathered weights, sums over tensor and data, offload."""
    limit, mesh = layout.collate, layout.mesh
    chip = machine.chip.computing(layout.compute.dtype)
    recompute, stages = bool(layout.compute.remat), layout.loss.stages
    rows, length = layout.prompts * layout.group_size, limit.prompt_length + limit.response_length
    parameters = qwen2.parameter_count(shape)
    width = jnp.dtype(layout.compute.dtype).itemsize
    visits = limit.minibatches * limit.microbatches
    gathered = (2 + recompute) * visits * parameters * width / mesh.tensor
    sums = (4 + 2 * recompute) * shape.num_layers * rows * length * shape.hidden_size * width
    sums *= 2 * (1 - 1 / mesh.tensor) / (mesh.data * mesh.fsdp)
    within = mesh.fsdp * mesh.tensor <= machine.together
    waited = gathered * (1 - 1 / mesh.fsdp) / (chip.link if within else chip.network)
    waited += sums / chip.link
    summed = 2 * 4 * limit.minibatches * _trained(shape) / (mesh.fsdp * mesh.tensor)
    within = len(machine.devices) <= machine.together
    waited += summed * (1 - 1 / mesh.data) / (chip.link if within else chip.network)
    work = flops.of_step(layout, shape, limit.response_length)["update"]
    out = work / len(machine.devices) / chip.flops + stages * waited
    if layout.offload != "none":
        kept = MOMENTS * _trained(shape) / (mesh.fsdp * mesh.tensor)
        out += limit.minibatches * stages * 2 * kept / chip.host
    return out


def _trained(shape: qwen2.Shape) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(lora.trained(shape)))


def _describe(layout: Config) -> str:
    mesh = " x ".join(f"{name} {size}" for name, size in vars(layout.mesh).items())
    again = "recomputing layers" if layout.compute.remat else "keeping everything"
    out = f"{mesh}, {again}"
    return out if layout.offload == "none" else f"{out}, offload {layout.offload}"
