"""`TokenData`: the data of a batch's tokens that an objective reads, constant in the parameters."""

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Tokens: TypeAlias = Float[Array, "B T"]
Mask: TypeAlias = Bool[Array, "B T"]
Rewards: TypeAlias = Float[Array, "P G"]
UNKNOWN: Any = None


class TokenData(NamedTuple):
    """Per-token data of a batch; all fields have the same shape but two, and None is a field not computed.

    In `Objective.credit` a row is a response, `[B,T]`; in the update a row is a bin, which may hold
    several. So sum over a response by `response` (as `total` and `mean` do), never over a row.
    """

    mask: Mask
    """True on sampled tokens of a response, False on padding"""
    old_logp: Tokens
    """log-probs before this batch's update; with `ratios="sampler"` in a config, the sampler's"""
    ref_logp: Tokens = UNKNOWN
    """log-probs of the frozen reference policy"""
    sampler_logp: Tokens = UNKNOWN
    """log-probs as the sampler reported them"""
    teacher_logp: Tokens = UNKNOWN
    """log-probs of the teacher, another model (`teacher` in a config)"""
    teacher_top: Float[Array, "B T K"] = UNKNOWN
    """those of its `Objective.top` likeliest tokens in the place of this one; for penalties alone"""
    top_logp: Float[Array, "B T K"] = UNKNOWN
    """log-probs of the same tokens by the policy in training, the only field with a gradient"""
    entropy: Tokens = UNKNOWN
    """of the distribution that the token was drawn from, in nats"""
    proxy_logp: Tokens = UNKNOWN
    """log-probs of the old policy without its most unlikely tokens (`Objective.proxy`)"""
    reward: Tokens = UNKNOWN
    """reward of the token's response"""
    response: Int[Array, "B T"] = UNKNOWN
    """the number of the token's response in its row; 0 on padding"""
    selected: Mask = UNKNOWN
    """tokens chosen by `Objective.select`"""
    turn: Int[Array, "B T"] = UNKNOWN
    """the number of the token's turn in its episode, from 1; 0 on padding"""
    turn_reward: Tokens = UNKNOWN
    """reward that the environment gave for the token's turn; of a response in one turn its reward"""
    segment: Int[Array, "B T"] = UNKNOWN
    """the number of the token's context in its episode, from 1; 0 on padding"""


def trainer(data: TokenData) -> Tokens:
    """`old_logp`, by default the denominator of a ratio."""
    return data.old_logp


def sampler(data: TokenData) -> Tokens:
    """`sampler_logp`: as the denominator of a ratio it corrects for the sampler's mismatch too."""
    return data.sampler_logp


def total(x: Tokens, data: TokenData) -> Tokens:
    """The sum of x over the response of each token; 0 on padding."""
    segments = x.shape[1] + 1
    add = jax.vmap(lambda row, number: jax.ops.segment_sum(row, number, segments)[number])
    return jnp.where(data.mask, add(jnp.where(data.mask, x, 0.0), data.response), 0.0)


def mean(x: Tokens, data: TokenData) -> Tokens:
    """The mean of x over the response of each token; 0 on padding."""
    return total(x, data) / jnp.maximum(total(jnp.ones_like(x), data), 1.0)


def batch_mean(x: Tokens | Mask, mask: Mask) -> Float[Array, ""]:
    """The mean of x over all tokens of a batch; 0 if there is none."""
    return jnp.sum(jnp.where(mask, x, 0.0)) / jnp.maximum(mask.sum(), 1)


def ratio(logp: Tokens, anchor_logp: Tokens, bound: float = 20.0) -> Tokens:
    """exp(logp - anchor_logp), the difference clamped to +-bound."""
    return jnp.exp(jnp.clip(logp - anchor_logp, -bound, bound))
