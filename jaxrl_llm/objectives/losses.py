"""Surrogate losses per token, unreduced: `(logp, old_logp, advantage) -> [B,T]`."""

import jax.numpy as jnp
from jaxtyping import Array, Float

Tokens = Float[Array, "B T"]


def reinforce(logp: Tokens, old_logp: Tokens, advantage: Tokens) -> Tokens:
    """-A * log pi, the plain policy gradient (Williams 1992)."""
    del old_logp
    return -advantage * logp


def clipped(
    logp: Tokens,
    old_logp: Tokens,
    advantage: Tokens,
    *,
    low: float = 0.2,
    high: float = 0.24,
    dual: float = 10.0,
) -> Tokens:
    """PPO's max(-A r, -A clip(r, 1 - low, 1 + high)), at most -A * dual where A < 0.

    arXiv:1707.06347; separate bounds from arXiv:2503.14476, the dual clip from arXiv:1912.09729.
    """
    ratio = jnp.exp(logp - old_logp)
    loss = jnp.maximum(-advantage * ratio, -advantage * jnp.clip(ratio, 1.0 - low, 1.0 + high))
    return jnp.where(advantage < 0, jnp.minimum(loss, -advantage * dual), loss)
