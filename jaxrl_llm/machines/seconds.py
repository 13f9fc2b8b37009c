"""How long a step would take: what was counted, at the rates of a data sheet. Estimates."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxrl_llm.config import Config
from jaxrl_llm.machines import flops
from jaxrl_llm.machines.hlo import Collective
from jaxrl_llm.machines.programs import Planned, local_bytes, on_hosts
from jaxrl_llm.machines.topologies import Machine
from jaxrl_llm.models.qwen2 import Shape


@dataclass(frozen=True)
class Seconds:
    """Of a device in a step, by what it would wait for if nothing else took time."""

    arithmetic: float = 0.0
    memory: float = 0.0
    links: float = 0.0
    network: float = 0.0
    host: float = 0.0

    @property
    def least(self) -> float:
        """All at the same time."""
        return max(self.arithmetic, self.memory, self.links, self.network, self.host)

    @property
    def most(self) -> float:
        """One after the other."""
        return self.arithmetic + self.memory + self.links + self.network + self.host


def of(
    name: str, planned: Planned, machine: Machine, collectives: Sequence[Collective], tokens: int
) -> Seconds:
    """A program's share of a step whose responses have `tokens` tokens in the mean (0: the limit)."""
    chip, limit = machine.chip, planned.config.collate
    if not chip.flops:
        return Seconds()
    tokens = tokens or limit.response_length
    times, share = times_of(name, planned, tokens), 1.0
    if limit.pack and name in ("score", "update"):  # micro-batches without a token are left out
        share = (limit.prompt_length + tokens) / (limit.prompt_length + limit.response_length)
    sent = {True: 0.0, False: 0.0}
    for collective in collectives:
        sent[collective.span > machine.together] += times * share * collective.sent
    return Seconds(
        arithmetic=arithmetic(name, planned.config, planned.shape, tokens)
        / planned.mesh.size
        / chip.flops,
        memory=times * share * moved(name, planned, tokens) / chip.bandwidth,
        links=sent[False] / chip.link,
        network=sent[True] / chip.network,
        host=from_host(name, planned) / chip.host,
    )


def times_of(name: str, planned: Planned, tokens: int) -> float:
    """How often a program runs in a step."""
    config = planned.config
    if name == "prefill":
        return -(-config.prompts // planned.engine.prefill_prompts)
    if name == "decode":
        return (
            -(-config.prompts * config.group_size // planned.engine.slots) * tokens / planned.stride
        )
    return 1 + config.keeps_reference if name == "score" else 1


def arithmetic(name: str, config: Config, shape: Shape, tokens: int) -> float:
    """FLOPs of a step on all devices, what is made again in the backward pass too."""
    rows, prompt = config.prompts * config.group_size, config.collate.prompt_length
    size = {"tokens": rows * (prompt + tokens), "scored": rows * tokens, "length": prompt + tokens}
    if name == "prefill":
        read = config.prompts * prompt
        return flops.forward(shape, tokens=read, scored=0, length=prompt)
    if name == "decode":
        return flops.forward(shape, **{**size, "tokens": rows * tokens})
    if name == "score":
        return (1 + config.keeps_reference) * flops.forward(shape, **size)
    if name == "update":
        again = flops.forward(shape, **size) if config.compute.remat else 0
        return config.objective.stages * (flops.update(shape, **size) + again)
    return 0.0


def from_host(name: str, planned: Planned) -> float:
    """Bytes of a step between a device and the memory of its host, either way."""
    if name == "score" and planned.config.keeps_reference:
        return local_bytes(on_hosts(planned.reference))
    visits = planned.config.collate.minibatches * planned.config.objective.stages
    return visits * 2 * local_bytes(on_hosts(planned.state)) if name == "update" else 0.0


def moved(name: str, planned: Planned, tokens: int) -> float:
    """Bytes that a device cannot help reading and writing each time a program runs: weights, state and cache."""
    limit, params = planned.config.collate, planned.state.params
    if name == "prefill":
        return local_bytes(planned.weights)
    if name == "decode":
        live = (limit.prompt_length + tokens / 2) / (limit.prompt_length + limit.response_length)
        token = local_bytes(planned.weights) + live * local_bytes(planned.cache)
        return planned.stride * token
    slices = limit.minibatches * limit.microbatches
    if name == "score":
        return slices * local_bytes(params)
    if name == "update":
        state = local_bytes((params, planned.state.opt_state))
        gradients = limit.microbatches * 5 * local_bytes(params)  # 2 reads of weights, 3 to add up
        return limit.minibatches * planned.config.objective.stages * (2 * state + gradients)
    return 0.0
