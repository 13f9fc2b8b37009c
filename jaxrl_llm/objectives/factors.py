"""Factors that multiply an advantage, constant in the parameters: `(advantage, data) -> [B,T]`.

Weights by probability, importance weights for a sampler that disagrees with the trainer, and masks
that drop tokens. They change neither penalties nor the denominator of the loss. rho is pi_old /
pi_sampler of a token: 1 with `ratios="sampler"` in a config, where `old_logp` is the sampler's.
"""

from collections.abc import Callable

import jax.numpy as jnp

from jaxrl_llm.errors import from_0_to_1
from jaxrl_llm.objectives import aggregation
from jaxrl_llm.objectives import token_data as per_response
from jaxrl_llm.objectives.token_data import Mask, TokenData, Tokens, batch_mean, ratio

Selection = Callable[[Tokens, TokenData], Mask]
Factor = Callable[[Tokens, TokenData], Tokens]


def linear_in_probability(advantage: Tokens, data: TokenData, *, alpha: float = 0.3) -> Tokens:
    """alpha pi_old + 1 - alpha: Advantage Reweighting (arXiv:2505.12929); alpha = 0 is 1."""
    del advantage
    from_0_to_1("alpha", alpha)
    return alpha * jnp.exp(data.old_logp) + 1.0 - alpha


# Importance weights `(data) -> [B,T]`, the argument `weight` of `truncated` and `masked`.


def token_ratio(data: TokenData) -> Tokens:
    """rho of each token."""
    return ratio(data.old_logp, data.sampler_logp)


def response_ratio(data: TokenData) -> Tokens:
    """The product of rho over the response: small biases of tokens make it vanish or explode."""
    gap = per_response.total(data.old_logp - data.sampler_logp, data)
    return jnp.exp(jnp.clip(gap, -20.0, 20.0))


def mean_ratio(data: TokenData) -> Tokens:
    """The geometric mean of rho over the token's response."""
    return jnp.exp(per_response.mean(data.old_logp - data.sampler_logp, data))


def truncated(
    advantage: Tokens,
    data: TokenData,
    *,
    cap: float = 2.0,
    floor: float = 0.0,
    weight: Callable[[TokenData], Tokens] = token_ratio,
) -> Tokens:
    """The weight clipped to [floor, cap]: TIS (Yao et al. 2025; truncation: Ionides 2008).

    `weight=response_ratio` weights whole responses.
    """
    del advantage
    return jnp.clip(weight(data), floor, cap)


def masked(
    advantage: Tokens,
    data: TokenData,
    *,
    low: float = 0.5,
    high: float = 5.0,
    weight: Callable[[TokenData], Tokens] = token_ratio,
) -> Tokens:
    """The weight where it lies in [low, high], else 0; by default IcePop (arXiv:2510.18855).

    With `weight=response_ratio`, low 0 and high 3 it is MIS (Liu et al. 2025).
    """
    del advantage
    w = weight(data)
    return jnp.where((w >= low) & (w <= high), w, 0.0)


def normalised(
    advantage: Tokens,
    data: TokenData,
    *,
    by: Factor,
    average: Callable[[Mask], Tokens] = aggregation.token_mean,
) -> Tokens:
    """The factor `by` divided by its mean, so that the mean weight is 1.

    `average` weighs the tokens in that mean. With the objective's own aggregation the loss is that of
    self-normalised importance sampling; `aggregation.seq_mean_token_mean` is the mean over
    responses, as verl has it for weights of whole responses.
    """
    w, each = by(advantage, data), average(data.mask)
    mean = jnp.sum(w * each, where=data.mask) / jnp.maximum(jnp.sum(each, where=data.mask), 1e-8)
    return w / jnp.maximum(mean, 1e-8)


# Masks that drop tokens; the loss's denominator still counts all tokens, but for `renormalised`.


def only(advantage: Tokens, data: TokenData, *, select: Selection) -> Tokens:
    """1 on the selected tokens, 0 on the others; with `selections.highest_entropy` it is 80/20."""
    return select(advantage, data).astype(advantage.dtype)


def without(advantage: Tokens, data: TokenData, *, select: Selection) -> Tokens:
    """0 on the selected tokens, 1 on others; with `selections.covariance_band` it is Clip-Cov."""
    return 1.0 - only(advantage, data, select=select)


def renormalised(advantage: Tokens, data: TokenData, *, select: Selection) -> Tokens:
    """`only` times tokens / selected tokens: a token mean is then over the selected tokens."""
    kept = only(advantage, data, select=select)
    return kept / jnp.maximum(batch_mean(kept, data.mask), 1.0 / data.mask.size)
