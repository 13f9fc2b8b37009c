"""Which tokens each optimizer step sees: `(old_logp, mask) -> bool [S,B,T]`, one leading entry a step.

Stages split the weights of the loss, they do not renormalise them: with disjoint stages that cover the
mask, the losses of the stages add up to the loss of `together`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Tokens = Float[Array, "B T"]
Mask = Bool[Array, "B T"]
Stages = Bool[Array, "S B T"]


def together(old_logp: Tokens, mask: Mask, *, steps: int = 1) -> Stages:
    """Every token in every step; `steps=2` is the control for Lopti's second optimizer step."""
    del old_logp
    return jnp.broadcast_to(mask, (steps, *mask.shape))


def lopti(old_logp: Tokens, mask: Mask, *, eta: float = 0.5) -> Stages:
    """First the tokens with pi_old < eta, then the others (arXiv:2505.12929, Algorithm 1)."""
    return _split(jnp.exp(old_logp) < eta, mask)


def reversed(old_logp: Tokens, mask: Mask, *, eta: float = 0.5) -> Stages:  # noqa: A001
    """Lopti's stages in the wrong order: high probabilities first, the paper's ablation."""
    return lopti(old_logp, mask, eta=eta)[::-1]


def quantile(old_logp: Tokens, mask: Mask, *, share: float) -> Stages:
    """First the `share` of tokens with the lowest pi_old, then the others."""
    return _split(_lowest(old_logp, mask, share * mask.sum()), mask)


def random(old_logp: Tokens, mask: Mask, *, share: float, seed: int = 0) -> Stages:
    """First a random `share` of the tokens, then the others: a control for what Lopti selects."""
    return _split(_lowest(_noise(old_logp, mask, seed), mask, share * mask.sum()), mask)


def random_matched(old_logp: Tokens, mask: Mask, *, eta: float = 0.5, seed: int = 0) -> Stages:
    """First as many random tokens as Lopti would put there, then the others."""
    count = lopti(old_logp, mask, eta=eta)[0].sum()
    return _split(_lowest(_noise(old_logp, mask, seed), mask, count), mask)


def drop_low(old_logp: Tokens, mask: Mask, *, eta: float = 0.5) -> Stages:
    """Only the tokens with pi_old >= eta, in one step; the denominator stays the full count."""
    return lopti(old_logp, mask, eta=eta)[1:]


def drop_high(old_logp: Tokens, mask: Mask, *, eta: float = 0.5) -> Stages:
    """Only the tokens with pi_old < eta, in one step; the denominator stays the full count."""
    return lopti(old_logp, mask, eta=eta)[:1]


def _split(first, mask):
    return jnp.stack([first & mask, ~first & mask])


def _lowest(x, mask, count):
    """The `count` (rounded down) masked places with the smallest x; ties may make it fewer."""
    ordered = jnp.sort(jnp.where(mask, x, jnp.inf).ravel())
    count = jnp.floor(count).astype(jnp.int32)
    threshold = jnp.where(count < mask.sum(), ordered[jnp.minimum(count, mask.size - 1)], jnp.inf)
    return x < threshold


def _noise(old_logp, mask, seed):
    """Uniform draws that depend on the data and the seed: fresh in every batch, the same on resume."""
    bits = jax.lax.bitcast_convert_type(old_logp.astype(jnp.float32), jnp.int32)
    key = jax.random.fold_in(jax.random.key(seed), jnp.sum(jnp.where(mask, bits, 0)))
    return jax.random.uniform(key, mask.shape)
