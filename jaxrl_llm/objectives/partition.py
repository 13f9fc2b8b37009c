"""Which tokens each optimizer step learns from: `(seen) -> bool [S,B,T]`, S steps a mini-batch.

Stages split the weights of the loss without renormalising them: with disjoint stages that cover the
mask, the losses of the stages add up to the loss of `together`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxrl_llm.objectives.seen import TokenData
from jaxrl_llm.objectives.selections import lowest, noise, part

Stages = Bool[Array, "S B T"]


def together(seen: TokenData, *, steps: int = 1) -> Stages:
    """Every token in every step; `steps=2` is the control for Lopti's second optimizer step."""
    return jnp.broadcast_to(seen.mask, (steps, *seen.mask.shape))


def lopti(seen: TokenData, *, eta: float = 0.5) -> Stages:
    """First the tokens with pi_old < eta, then the others (arXiv:2505.12929, Algorithm 1)."""
    return _split(jnp.exp(seen.old_logp) < eta, seen)


def reversed(seen: TokenData, *, eta: float = 0.5) -> Stages:  # noqa: A001
    """Lopti's stages in the wrong order: high probabilities first, the paper's ablation."""
    return lopti(seen, eta=eta)[::-1]


def quantile(seen: TokenData, *, share: float) -> Stages:
    """First the `share` of tokens with the lowest pi_old, then the others."""
    return _split(lowest(seen.old_logp, seen.mask, part(share, seen.mask.sum())), seen)


def random(seen: TokenData, *, share: float, seed: int = 0) -> Stages:
    """First a random `share` of the tokens, then the others: a control for what Lopti selects."""
    return _split(lowest(noise(seen, seed), seen.mask, part(share, seen.mask.sum())), seen)


def random_matched(seen: TokenData, *, eta: float = 0.5, seed: int = 0) -> Stages:
    """First as many random tokens as Lopti's first stage has, then the others."""
    count = lopti(seen, eta=eta)[0].sum()
    return _split(lowest(noise(seen, seed), seen.mask, count), seen)


def drop_low(seen: TokenData, *, eta: float = 0.5) -> Stages:
    """Only the tokens with pi_old >= eta, in one step; the denominator stays the full count."""
    return lopti(seen, eta=eta)[1:]


def drop_high(seen: TokenData, *, eta: float = 0.5) -> Stages:
    """Only the tokens with pi_old < eta, in one step; the denominator stays the full count."""
    return lopti(seen, eta=eta)[:1]


def _split(first, seen):
    return jnp.stack([first & seen.mask, ~first & seen.mask])
