"""The sizes that a config leaves open, chosen by the memory of devices: slots and micro-batches."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from jaxrl_llm import distributed
from jaxrl_llm.config import Config
from jaxrl_llm.errors import UserError
from jaxrl_llm.models import attention, logprobs, qwen2
from jaxrl_llm.planning import machines, report
from jaxrl_llm.planning.machines import Machine
from jaxrl_llm.planning.plan import Plan, plan, step_of
from jaxrl_llm.planning.programs import BESIDE, Step, local_bytes
from jaxrl_llm.rollouts.engines import SLOTS, Native

ROOM = 0.95  # of a device's memory that is filled by choice: a plan does not see fragmentation
COARSEST = 16  # packed micro-batches at least: the last one used is computed whole, however empty
ON_A_CPU = 4096  # tokens of a micro-batch there: more make it no faster
LIMITED = {
    **dict.fromkeys(("prefill", "decode"), "slots"),
    **dict.fromkeys(("score", "update", "teacher"), "microbatches"),
}


def fitted(
    config: Config, machine: Machine, shape: qwen2.Shape, only: Sequence[str] = (), **settings: Any
) -> tuple[Config, Plan | None]:
    """The config with the most slots, and the fewest micro-batches, that fit where it leaves them open.

    They are estimated, then the plan (of the programs `only`, see there) confirms them, or they are
    halved and doubled until it does. A CPU gets a fixed choice without a plan. All processes of a
    run come to the same. A UserError if the least does not fit.
    """
    memory = min(map(int, distributed.agree(str(machine.chip.memory))))
    machine = replace(machine, chip=replace(machine.chip, memory=memory))
    sizes = estimated(config, machine, shape)
    while not _on_a_cpu(machine):
        sized = config.sized(sizes)
        planned = plan(sized, machine, shape, only=only, **settings)
        if planned.fits:
            return sized, planned
        name = LIMITED.get(planned.worst.name, "")
        less = _less(config, sizes)
        if config.sizes.get(name, 1) or less[name] == sizes[name]:
            raise UserError(
                f"{report.sized(sized.sizes)} on {machine.name}: {report.verdict(planned)}"
            )
        sizes[name] = less[name]
    return config.sized(sizes), None


def smaller(config: Config, machine: Machine, shape: qwen2.Shape) -> str:
    """In words: the sizes to take after those of the config ran out of memory."""
    engine, collate = config.engine, replace(config.collate, microbatches=0)
    engine = replace(engine, slots=0) if isinstance(engine, Native) else engine
    fit = estimated(replace(config, engine=engine, collate=collate), machine, shape)
    less = _less(config, config.sizes)  # at least: the estimate may have been what ran out
    least = {"slots": min, "microbatches": max}
    said = (f"{name}={least[name](fit[name], less[name])}" for name in config.sizes)
    return f"by an estimate {', '.join(said)} would fit; jaxrl-llm plan tells how much"


def _less(config: Config, sizes: Mapping[str, int]) -> dict[str, int]:
    """Half the slots, twice the micro-batches."""
    slots = max(1, sizes.get("slots", 0) // 2)
    return {"slots": slots, "microbatches": min(_rows(config), 2 * sizes["microbatches"])}


def estimated(config: Config, machine: Machine, shape: qwen2.Shape) -> dict[str, int]:
    """The sizes that fit by an estimate; a UserError if the arrays alone that there must be do not."""
    if all(config.sizes.values()):
        return config.sizes
    limit, rows = config.collate, _rows(config)
    columns, devices = limit.prompt_length + limit.response_length, len(machine.devices)
    responses = config.prompts * config.group_size
    usual = min(SLOTS, responses)
    if _on_a_cpu(machine):  # which has more memory than speed
        each = max(1, ON_A_CPU // columns) * devices
        return config.sizes | {"slots": usual, "microbatches": -(-rows // each)}
    step = step_of(config.sized({"slots": devices, "microbatches": rows}), machine, shape)
    # where nothing is sampled slots are never there, and chosen all the same
    sizes = {"slots": usual} if "slots" in config.sizes else {}
    shards = step.mesh.shape["data"] * step.mesh.shape["fsdp"]
    width, tensor = jnp.dtype(config.compute.dtype).itemsize, step.mesh.shape["tensor"]
    with machines.compiling_for(step.mesh):
        if step.samples and isinstance(config.engine, Native):
            cache, together = step.on_device["cache"], step.generator.mesh.shape["tensor"]
            prompts = -(-min(config.engine.prefill_prompts, responses) // devices) * together
            length = step.prompt_columns
            layer = _within_a_layer(config, shape, length) / together
            passing = prompts * length * (cache / step.cache_columns + layer)
            weights = step.on_device.get("sampler's copy", step.on_device["parameters"])
            held = step.beside_sampler + weights
            # while a cache grows one of its layers is there twice
            each = cache * (1 + 1 / shape.num_layers)
            most = -(-responses // devices)
            sizes["slots"] = devices * _most("sampling", step, held, passing, each, most)
        names = ("parameters", "frozen", *BESIDE, "gradients")
        held = sum(step.on_device.get(name, 0) for name in names)
        held += step.on_hosts.get("optimizer", 0)  # which comes over
        remat, layers = config.compute.remat, shape.num_layers
        plainly = limit.share_prompts
        layer = columns * _within_a_layer(config, shape, columns, plainly=plainly) / tensor
        inputs = columns * shape.hidden_size * width / step.sharing_positions
        kept = layers * (inputs if remat else layer)
        again = layer if remat else 0.0  # one at a time
        # logits, in float32, and their gradient go before the gradients of layers come
        logits = min(logprobs.logit_bytes(), 4 * rows * columns * shape.vocab_size)
        before = held - local_bytes(step.state.params["layers"])
        moments = ((held, 0, kept + again), (before, (1 + width / 4) * logits, kept))
        most, batch = rows // (COARSEST if limit.pack else 1) // shards, 2 * local_bytes(step.batch)
        for held, passing, each in moments:
            most = _most("the update", step, held, batch + passing, each, most)
    return sizes | {"microbatches": -(-rows // (shards * most))}


def _within_a_layer(
    config: Config, shape: qwen2.Shape, length: int, *, plainly: bool = False
) -> float:
    """Bytes a token at the worst moment: states, and what is between products or plain attention's.

    Between products is more with adapters; plain attention, which the config has or `plainly` asks
    for, has four numbers for each token before.
    """
    width = jnp.dtype(config.compute.dtype).itemsize
    inner, mixture = shape.intermediate_size, shape.mixture
    if mixture:
        inner = mixture.width + (inner if mixture.beside else 0)
    attend = config.compute.attend
    attend = attention.chosen() if attend is attention.for_platform else attend
    plainly |= attend is attention.xla
    scores = 4 * 4 * shape.num_heads * length / 2 if plainly else 0
    return 8 * shape.hidden_size * width + max((5 if shape.lora else 3) * inner * width, scores)


def _on_a_cpu(machine: Machine) -> bool:
    return machine.chip.platform == "here" and machine.devices[0].platform == "cpu"


def _rows(config: Config) -> int:
    """Rows of a mini-batch."""
    return config.prompts * config.group_size // config.collate.minibatches


def _most(what: str, step: Step, held: float, passing: float, each: float, most: int) -> int:
    """How many of `each` bytes fit beside what is held and passing, from 1 to `most`."""
    if held > step.memory:
        parts = sorted(step.on_device.items(), key=lambda part: -part[1])[:3]
        said = ", ".join(f"{name} {report.in_gib(size)}" for name, size in parts)
        raise UserError(
            f"with the least slots and micro-batches {what} holds {report.in_gib(held)} of "
            f"{report.in_gib(step.memory)} a device ({said}): take a smaller model, lora, offload, shorter "
            "responses or more devices"
        )
    return max(1, min(most, int((ROOM * step.memory - held - passing) / each)))
