"""Factors for a rollout engine that disagrees with the trainer: `(old_logp, sampler_logp) -> [B,T]`.

`old_logp` is the trainer's own log-probability of the sampled token before the update, `sampler_logp` the
one reported by the engine that sampled it. The factor is constant in the parameters.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

Tokens = Float[Array, "B T"]


def uncorrected(old_logp: Tokens, sampler_logp: Tokens) -> Tokens:
    """1: the two engines are taken to agree."""
    del sampler_logp
    return jnp.ones_like(old_logp)


def truncated_importance(old_logp: Tokens, sampler_logp: Tokens, *, cap: float = 2.0) -> Tokens:
    """min(pi_old / pi_sampler, cap) (truncated importance sampling, Ionides 2008)."""
    return jnp.minimum(jnp.exp(old_logp - sampler_logp), cap)


def masked_importance(
    old_logp: Tokens, sampler_logp: Tokens, *, low: float = 0.5, high: float = 2.0
) -> Tokens:
    """pi_old / pi_sampler where it lies in [low, high], else 0: a token too far off teaches nothing."""
    ratio = jnp.exp(old_logp - sampler_logp)
    return jnp.where((ratio >= low) & (ratio <= high), ratio, 0.0)
