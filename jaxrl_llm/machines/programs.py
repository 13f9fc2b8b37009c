"""The programs of a run's step, lowered for a mesh from shapes alone: what a machine will be asked to do."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.config import Config
from jaxrl_llm.learning import update
from jaxrl_llm.models import qwen2, sharding
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.rollouts import native
from jaxrl_llm.rollouts.engines import Native
from jaxrl_llm.rollouts.sampler import Rollout

STEPS = 256  # tokens of a call of the decoding loop


@dataclass(frozen=True)
class Planned:
    """A config's model on a mesh; the arrays of a run by their shapes and places."""

    config: Config
    shape: qwen2.Shape
    mesh: Mesh

    @property
    def policy(self) -> Policy:
        """The model without its parameters."""
        return Policy(qwen2.graph(self.shape, self.config.compute)[0])

    @cached_property
    def state(self) -> update.TrainState:
        """Parameters and what the optimizer keeps."""
        shapes = qwen2.graph(self.shape)[1]
        places = sharding.param_shardings(shapes, self.mesh)
        params = jax.tree.map(partial(like, dtype="float32"), shapes, places)
        return update.state_like(params, self.config.optimizer)

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

    @property
    def reference(self) -> Any:
        """The parameters of the reference policy."""
        return self.state.params

    @cached_property
    def weights(self) -> Any:
        """What the embedded engine reads."""
        weights = jax.jit(self._decoder.weights)
        places = weights.lower(self.state.params).compile().output_shardings
        return jax.tree.map(like, jax.eval_shape(weights, self.state.params), places)

    @property
    def copies_weights(self) -> bool:
        """Whether those are others than the trainer's own."""
        same = lambda a, b: a.dtype == b.dtype and a.sharding.is_equivalent_to(b.sharding, a.ndim)
        return not jax.tree.all(jax.tree.map(same, self.weights, self.state.params))

    @cached_property
    def cache(self) -> Any:
        """Keys and values of all slots."""
        limit, engine = self.config.collate, self._engine
        size = engine.slots, limit.prompt_length + limit.response_length
        empty = jax.jit(lambda weights: self._decoder.empty(weights, *size), keep_unused=True)
        places = empty.lower(self.weights).compile().output_shardings
        return jax.tree.map(like, jax.eval_shape(empty, self.weights), places)

    @property
    def native(self) -> bool:
        """Whether the responses are sampled on the same devices."""
        return isinstance(self.config.engine, Native)

    def programs(self) -> dict[str, Callable[[], jax.stages.Lowered]]:
        """Each program by its name, in the order of a step."""
        sampling = {"prefill": self._prefill, "decode": self._decode} if self.native else {}
        learning = {"score": self._score, "credit": self._lower_credit, "update": self._update}
        return {**sampling, **learning}

    def _lower_credit(self) -> jax.stages.Lowered:
        return jax.jit(self._credit).lower(self.batch, self._reward, self._scores)

    def _score(self) -> jax.stages.Lowered:
        objective = self.config.objective
        proxy = objective.proxy if objective.reads("proxy_logp") else 0.0
        scores = self.policy.scores(self.config.sampling.temperature, proxy=proxy)
        program: Any = update.make_score(scores)
        return program.lower(self.state.params, self.batch.inputs)

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
        return self._everywhere(np.zeros(shape, np.float32))

    def _credit(self, batch: Any, reward: Any, scores: Mapping[str, Any]) -> update.Credited:
        return update.make_credit(self.config.objective)(batch, reward, **scores)

    def _update(self) -> jax.stages.Lowered:
        config, credit = self.config, jax.jit(self._credit)
        arguments = self.batch, self._reward, self._scores
        places = credit.lower(*arguments).compile().output_shardings
        credited = jax.tree.map(like, jax.eval_shape(credit, *arguments), places)
        program: Any = update.make_train_step(
            self.policy.logp(config.sampling.temperature),
            config.objective,
            config.optimizer,
            order=config.order,
            shardings=jax.tree.map(lambda x: x.sharding, self.state),
        )
        return program.lower(self.state, credited)

    @property
    def _engine(self) -> Native:
        assert isinstance(self.config.engine, Native)
        return self.config.engine

    @property
    def _decoder(self) -> Any:
        return self.policy.decoder(self._engine.block)

    def _prefill(self) -> jax.stages.Lowered:
        shape = (self._engine.prefill_prompts, self.config.collate.prompt_length)
        tokens = self._everywhere(np.zeros(shape, np.int32))
        return jax.jit(self._decoder.prefill).lower(self.weights, tokens)

    def _decode(self) -> jax.stages.Lowered:
        slots = native._idle(self._engine.slots, self.config.collate.response_length)
        rules = native._rules(self.config.sampling)
        host = jax.tree.map(self._everywhere, (slots, rules, np.zeros((), np.int32)))
        program = jax.jit(
            partial(native.run, self._decoder.decode, steps=STEPS), donate_argnums=(1, 2)
        )
        return program.lower(self.weights, self.cache, *host)

    def _everywhere(self, x: np.ndarray) -> Any:
        return like(x, NamedSharding(self.mesh, P()))


def like(x: Any, sharding: Any = None, dtype: Any = None) -> jax.ShapeDtypeStruct:
    """The shape of an array and where it lies."""
    return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=sharding)


def local_bytes(tree: Any) -> int:
    """What the first device holds of arrays or shapes."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )
