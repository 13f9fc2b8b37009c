"""Estimators of KL(pi || ref) per token from the sampled token alone: `(logp, ref_logp) -> [B,T]`.

Each serves in the reward (its value) and in the loss (its gradient).
See "Approximating KL divergence", Schulman 2020.
"""

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Float

Tokens = Float[Array, "B T"]


def k1(logp: Tokens, ref_logp: Tokens) -> Tokens:
    """log pi - log ref, the unbiased value; its gradient is that of k2.

    The plain gradient of log pi - log ref does not contain the reference and is zero on average: as a
    loss it would pull nowhere. The gradient of k2 is the unbiased gradient of the KL.
    """
    pull = k2(logp, ref_logp)
    return stop_gradient(logp - ref_logp) + (pull - stop_gradient(pull))


def k2(logp: Tokens, ref_logp: Tokens) -> Tokens:
    """(log pi - log ref)^2 / 2: biased value, unbiased gradient."""
    return 0.5 * jnp.square(logp - ref_logp)


def k3(logp: Tokens, ref_logp: Tokens) -> Tokens:
    """exp(d) - d - 1 with d = log ref - log pi: never negative; d clamped to 5, the value to 10."""
    d = jnp.clip(ref_logp - logp, -5.0, 5.0)
    return jnp.clip(jnp.exp(d) - d - 1.0, -10.0, 10.0)
