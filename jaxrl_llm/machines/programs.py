"""The programs of a run's step, lowered for a mesh from shapes alone: what a machine will be asked to do."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.config import Config
from jaxrl_llm.learning import reinforce, update
from jaxrl_llm.machines import topologies
from jaxrl_llm.models import qwen2, sharding
from jaxrl_llm.models.policy import Policy, fewest_devices
from jaxrl_llm.rollouts import native, slots
from jaxrl_llm.rollouts.engines import Native
from jaxrl_llm.rollouts.sampler import Rollout


@dataclass(frozen=True)
class Planned:
    """A config's model on a mesh of devices of so much memory; the arrays of a run by their shapes and places."""

    config: Config
    shape: qwen2.Shape
    mesh: Mesh
    memory: int

    @property
    def policy(self) -> Policy:
        """The model without its parameters."""
        return Policy(qwen2.graph(self.shape, self.config.compute)[0])

    @cached_property
    def state(self) -> update.TrainState:
        """Parameters and what the optimizer keeps."""
        params = sharding.params_like(qwen2.graph(self.shape)[1], self.mesh)
        offload = self.config.offloads("optimizer")
        return update.state_like(params, self.config.optimizer, offload=offload)

    @cached_property
    def batch(self) -> Any:
        """The longest batch there can be."""
        limit, rows = self.config.collate, self.config.prompts * self.config.group_size
        shards = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        longest = Rollout(
            [[0] * limit.prompt_length] * rows,
            [[0] * limit.response_length] * rows,
            [[0.0] * limit.response_length] * rows,
        )
        return update.place(replace(limit, shards=shards)(longest), self.mesh, like)

    @cached_property
    def reference(self) -> Any:
        """The parameters of the reference policy."""
        shapes = jax.eval_shape(self.policy.narrowed, self.state.params)
        beside = sharding.in_host_memory if self.config.offloads("reference") else lambda x: x
        return jax.tree.map(lambda x, p: like(x, beside(p.sharding)), shapes, self.state.params)

    @cached_property
    def weights(self) -> Any:
        """What the embedded engine reads."""
        params, decoder = self.state.params, self.decoder
        if decoder.static:
            return decoder.weights_like(params)
        return jax.tree.map(like, self.reference, sharding.param_shardings(params, decoder.mesh))

    @property
    def copies_weights(self) -> bool:
        """Whether those are others than the trainer's own."""
        leaves = jax.tree.leaves(self.weights), jax.tree.leaves(self.state.params)
        same = lambda a, b: a.dtype == b.dtype and a.sharding.is_equivalent_to(b.sharding, a.ndim)
        return not (len(leaves[0]) == len(leaves[1]) and all(map(same, *leaves)))

    @cached_property
    def cache(self) -> Any:
        """Keys and values of all slots, at the longest."""
        limit = self.config.collate
        size = self.engine.slots, limit.prompt_length + limit.response_length
        with topologies.compiling_for(self.decoder.mesh):
            empty = jax.jit(lambda weights: self.decoder.empty(weights, *size), keep_unused=True)
            shapes = jax.eval_shape(empty, self.weights)
            places = empty.lower(self.weights).compile().output_shardings
            return jax.tree.map(like, shapes, places)

    @property
    def native(self) -> bool:
        """Whether the responses are sampled on the same devices."""
        return isinstance(self.config.engine, Native)

    def programs(self) -> dict[str, Callable[[], jax.stages.Compiled]]:
        """What compiles each program, by its name, in the order of a step."""
        sampling = {"prefill": self._prefill, "decode": self._decode} if self.native else {}
        if self.native and self.decoder.static:
            sampling = {"gather": self._gather, **sampling}
        learning = {"score": self._score, "credit": lambda: self._credit, "update": self._update}
        return {**sampling, **learning}

    def _score(self) -> jax.stages.Compiled:
        config = self.config
        program: Any = reinforce.scoring(self.policy, config.objective, config.sampling.temperature)
        return program.lower(self.state.params, self.batch.inputs).compile()

    @property
    def _scores(self) -> dict[str, Any]:
        """What the scoring of a batch gives, as far as the objective looks at it."""
        objective = self.config.objective
        names = [n for n in ("ref_logp", "entropy", "proxy_logp") if objective.reads(n)]
        place = self.batch.inputs.scored.sharding
        binned = like(self.batch.layout.in_rows, place, dtype="float32")
        return dict.fromkeys(["old_logp", *names], binned)

    @property
    def _reward(self) -> Any:
        shape = (self.config.prompts, self.config.group_size)
        return like(np.zeros(shape, np.float32), NamedSharding(self.mesh, P()))

    @cached_property
    def _credit(self) -> jax.stages.Compiled:
        program: Any = update.make_credit(self.config.objective)
        return program.lower(self.batch, self._reward, **self._scores).compile()

    @cached_property
    def credited(self) -> update.Credited:
        """A batch that is ready to learn from."""
        return jax.tree.map(like, self._credit.out_info, self._credit.output_shardings)

    def _update(self) -> jax.stages.Compiled:
        config = self.config
        program: Any = update.make_train_step(
            self.policy.logp(config.sampling.temperature),
            config.objective,
            config.optimizer,
            order=config.order,
            shardings=jax.tree.map(lambda x: x.sharding, self.state),
        )
        return program.lower(self.state, self.credited).compile()

    @cached_property
    def engine(self) -> Native:
        """The embedded engine, where there is one, with as many slots and prompts as the devices share evenly."""
        engine, devices = cast(Native, self.config.engine), self.mesh.size
        slots, _, rows = native.shared_out(engine.slots, engine.prefill_prompts, devices, devices)
        return replace(engine, slots=slots, prefill_prompts=rows)

    @cached_property
    def decoder(self) -> Any:
        """How the embedded engine generates."""
        definition, engine = self.policy.definition, self.engine
        shared = engine.devices_a_copy or fewest_devices(definition, self.mesh, self.memory)
        return self.policy.decoder(self.mesh, block=engine.block, devices_a_copy=shared)

    @property
    def stride(self) -> int:
        """Tokens that the decoding program makes before it asks whether to go on."""
        return native.STRIDE if self.decoder.static else 1

    def _gather(self) -> jax.stages.Compiled:
        with topologies.compiling_for(self.decoder.mesh):
            return jax.jit(self.decoder.weights).lower(self.state.params).compile()

    def _prefill(self) -> jax.stages.Compiled:
        shape = (self.engine.prefill_prompts, self.config.collate.prompt_length)
        with topologies.compiling_for(self.decoder.mesh):
            tokens = self._everywhere(np.zeros(shape, np.int32))
            return jax.jit(self.decoder.prefill).lower(self.weights, tokens).compile()

    def _decode(self) -> jax.stages.Compiled:
        sampling = self.config.sampling
        idle = slots.idle_slots(self.engine.slots, self.config.collate.response_length)
        one = np.zeros((), np.int32)
        host = jax.tree.map(self._everywhere, (idle, slots.rules_of(sampling), one, one))
        program = slots.program(self.decoder.decode, self.stride)
        ways = slots.ways_of(sampling) if self.decoder.static else None
        with topologies.compiling_for(self.decoder.mesh):
            return program.lower(self.weights, self.cache, *host, ways=ways).compile()

    def _everywhere(self, x: np.ndarray) -> Any:
        return like(x, NamedSharding(self.decoder.mesh if self.native else self.mesh, P()))


def like(x: Any, sharding: Any = None, dtype: Any = None) -> jax.ShapeDtypeStruct:
    """The shape of an array and where it lies."""
    return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=sharding)


def local_bytes(tree: Any) -> int:
    """What the first device holds of arrays or shapes, or its host for it."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def on_hosts(tree: Any) -> list[Any]:
    """Those of arrays or shapes that lie in the memory of the hosts."""
    return [x for x in jax.tree.leaves(tree) if x.sharding.memory_kind == sharding.HOST]
