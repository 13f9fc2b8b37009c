"""Estimators of KL(pi || ref) per token from the sampled token alone: `(logp, seen) -> [B,T]`.

Each can be used in the reward (by its value) or as a penalty of the loss (by its gradient).
See "Approximating KL divergence", Schulman 2020.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax.lax import stop_gradient

from jaxrl_llm.objectives.seen import TokenData, Tokens


def k1(logp: Tokens, seen: TokenData) -> Tokens:
    """log pi - log ref, the unbiased value; its gradient is that of k2.

    The plain gradient of log pi - log ref does not contain the reference and is zero on average: as
    a loss term it would do nothing. The gradient of k2 is the unbiased gradient of the KL.
    """
    pull = k2(logp, seen)
    return stop_gradient(logp - seen.ref_logp) + (pull - stop_gradient(pull))


def k2(logp: Tokens, seen: TokenData) -> Tokens:
    """(log pi - log ref)^2 / 2: biased value, unbiased gradient."""
    return 0.5 * jnp.square(logp - seen.ref_logp)


def k3(logp: Tokens, seen: TokenData) -> Tokens:
    """exp(d) - d - 1 with d = log ref - log pi: never negative; d clamped to 5, the value to 10."""
    d = jnp.clip(seen.ref_logp - logp, -5.0, 5.0)
    return jnp.clip(jnp.exp(d) - d - 1.0, -10.0, 10.0)


def from_sampler(
    logp: Tokens, seen: TokenData, *, estimator: Callable[[Tokens, TokenData], Tokens] = k2
) -> Tokens:
    """An estimator with the sampler's policy as the reference."""
    return estimator(logp, seen._replace(ref_logp=seen.sampler_logp))


def drift_of_selected(logp: Tokens, seen: TokenData) -> Tokens:
    """|log pi - log pi_old| on the selected tokens: the penalty of KL-Cov (arXiv:2505.22617)."""
    return jnp.where(seen.selected, jnp.abs(logp - seen.old_logp), 0.0)
