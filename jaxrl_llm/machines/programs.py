"""The programs of a run's step, lowered for a mesh from shapes alone: what a machine will be asked to do."""

from collections.abc import Iterator, Mapping
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

    def lowered(self) -> Iterator[tuple[str, jax.stages.Lowered]]:
        """Each program of a step by its name, in the order of a step."""
        if isinstance(self.config.engine, Native):
            yield "prefill", self._prefill(self.config.engine)
            yield "decode", self._decode(self.config.engine)
        yield "score", self._score()
        yield "credit", jax.jit(self._credit).lower(self.batch, self._reward, self._scores)
        yield "update", self._update()

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

    def _prefill(self, engine: Native) -> jax.stages.Lowered:
        decoder = self.policy.decoder(engine.block)
        tokens = np.zeros((engine.prefill_prompts, self.config.collate.prompt_length), np.int32)
        return jax.jit(decoder.prefill).lower(self._weights(decoder), self._everywhere(tokens))

    def _decode(self, engine: Native) -> jax.stages.Lowered:
        decoder, limit = self.policy.decoder(engine.block), self.config.collate
        weights = self._weights(decoder)
        columns = limit.prompt_length + limit.response_length
        empty = jax.jit(decoder.empty, static_argnums=(1, 2))
        arguments = weights, engine.slots, columns
        places = empty.lower(*arguments).compile().output_shardings
        cache = jax.tree.map(
            like, jax.eval_shape(lambda w: empty(w, *arguments[1:]), weights), places
        )
        slots, rules = (
            native.idle(engine.slots, limit.response_length),
            native.rules(self.config.sampling),
        )
        host = jax.tree.map(self._everywhere, (slots, rules, np.zeros((), np.int32)))
        program = jax.jit(partial(native.run, decoder.decode, steps=STEPS), donate_argnums=(1, 2))
        return program.lower(weights, cache, *host)

    def _weights(self, decoder: Any) -> Any:
        weights = jax.jit(decoder.weights)
        places = weights.lower(self.state.params).compile().output_shardings
        return jax.tree.map(like, jax.eval_shape(weights, self.state.params), places)

    def _everywhere(self, x: np.ndarray) -> Any:
        return like(x, NamedSharding(self.mesh, P()))


def like(x: Any, sharding: Any = None, dtype: Any = None) -> jax.ShapeDtypeStruct:
    """The shape of an array and where it lies."""
    return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=sharding)
