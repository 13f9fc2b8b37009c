"""Advantages rescaled by how likely the token was when it was sampled: `(advantage, old_logp) -> [B,T]`."""

import jax.numpy as jnp
from jaxtyping import Array, Float

Tokens = Float[Array, "B T"]


def identity(advantage: Tokens, old_logp: Tokens) -> Tokens:
    """The advantage as it is."""
    del old_logp
    return advantage


def linear_in_probability(advantage: Tokens, old_logp: Tokens, *, alpha: float) -> Tokens:
    """Advantage Reweighting, A * (alpha * pi_old + 1 - alpha) (arXiv:2505.12929, Eq. 4)."""
    return advantage * (alpha * jnp.exp(old_logp) + 1.0 - alpha)
