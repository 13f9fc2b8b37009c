"""An objective is a record of pure functions, in the order in which the data meets them."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.objectives import aggregation, correction, losses, partition, reweighting

Tokens = Float[Array, "B T"]
Mask = Bool[Array, "B T"]


@dataclass(frozen=True)
class Objective:
    """What is maximised: `credit` is constant in the parameters, `per_token` is what is differentiated."""

    advantage: Callable[..., Tokens]
    reweight: Callable[..., Tokens] = reweighting.identity
    correct: Callable[..., Tokens] = correction.uncorrected
    surrogate: Callable[..., Tokens] = losses.clipped
    penalties: tuple[tuple[float, Callable[..., Tokens]], ...] = ()
    aggregate: Callable[..., Tokens] = aggregation.token_mean
    partition: Callable[..., Bool[Array, "S B T"]] = partition.together

    def credit(
        self,
        reward: Float[Array, "B"],
        old_logp: Tokens,
        ref_logp: Tokens,
        sampler_logp: Tokens,
        mask: Mask,
        *,
        minibatches: int = 1,
    ) -> tuple[Tokens, Float[Array, "S B T"]]:
        """The advantage and the weight of every token in every stage.

        Advantages see the whole batch; each of the `minibatches` equal runs of rows has a denominator
        of its own.
        """
        advantage = self.reweight(self.advantage(reward, old_logp, ref_logp, mask), old_logp)
        advantage = jnp.where(mask, advantage * self.correct(old_logp, sampler_logp), 0.0)
        by_minibatch = mask.reshape(minibatches, -1, mask.shape[1])
        weight = jax.vmap(self.aggregate)(by_minibatch).reshape(mask.shape)
        return advantage, weight[None] * self.partition(old_logp, mask)

    def per_token(
        self, logp: Tokens, old_logp: Tokens, ref_logp: Tokens, advantage: Tokens
    ) -> tuple[Tokens, Tokens]:
        """The surrogate and the weighted sum of the penalties; the loss is their sum."""
        penalty = jnp.zeros_like(logp)
        for coefficient, estimator in self.penalties:
            penalty += coefficient * estimator(logp, ref_logp)
        return self.surrogate(logp, old_logp, advantage), penalty

    @property
    def stages(self) -> int:
        """How many optimizer steps the partition asks for."""
        tokens = jax.ShapeDtypeStruct((1, 1), jnp.float32)
        mask = jax.ShapeDtypeStruct((1, 1), jnp.bool_)
        return jax.eval_shape(self.partition, tokens, mask).shape[0]
