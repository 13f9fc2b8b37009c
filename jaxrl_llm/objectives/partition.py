"""Which tokens each optimizer step learns from: `(data) -> bool [S,B,T]`, S steps a mini-batch.

Stages split the weights of the loss without renormalising them: with disjoint stages that cover the
mask, the losses of the stages add up to the loss of `together`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxrl_llm.errors import from_0_to_1
from jaxrl_llm.objectives.selections import lowest, noise, part
from jaxrl_llm.objectives.token_data import TokenData

Stages = Bool[Array, "S B T"]


def together(data: TokenData, *, steps: int = 1) -> Stages:
    """Every token in every step; `steps=2` is the control for Lopti's second optimizer step."""
    return jnp.broadcast_to(data.mask, (steps, *data.mask.shape))


def lopti(data: TokenData, *, eta: float = 0.5) -> Stages:
    """First the tokens with pi_old < eta, then the others (arXiv:2505.12929, Algorithm 1)."""
    from_0_to_1("eta", eta)
    return _split(jnp.exp(data.old_logp) < eta, data)


def reversed(data: TokenData, *, eta: float = 0.5) -> Stages:  # noqa: A001
    """Lopti's stages in the wrong order: high probabilities first, the paper's ablation."""
    return lopti(data, eta=eta)[::-1]


def quantile(data: TokenData, *, share: float) -> Stages:
    """First the `share` of tokens with the lowest pi_old, then the others."""
    return _split(lowest(data.old_logp, data.mask, part(share, data.mask.sum())), data)


def random(data: TokenData, *, share: float, seed: int = 0) -> Stages:
    """First a random `share` of the tokens, then the others: a control for what Lopti selects."""
    return _split(lowest(noise(data, seed), data.mask, part(share, data.mask.sum())), data)


def random_matched(data: TokenData, *, eta: float = 0.5, seed: int = 0) -> Stages:
    """First as many random tokens as Lopti's first stage has, then the others."""
    count = lopti(data, eta=eta)[0].sum()
    return _split(lowest(noise(data, seed), data.mask, count), data)


def drop_low(data: TokenData, *, eta: float = 0.5) -> Stages:
    """Only the tokens with pi_old >= eta, in one step; the denominator stays the full count."""
    return lopti(data, eta=eta)[1:]


def drop_high(data: TokenData, *, eta: float = 0.5) -> Stages:
    """Only the tokens with pi_old < eta, in one step; the denominator stays the full count."""
    return lopti(data, eta=eta)[:1]


def _split(first, data):
    return jnp.stack([first & data.mask, ~first & data.mask])
