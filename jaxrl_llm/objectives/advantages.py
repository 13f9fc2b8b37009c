"""Rewards to per-token advantages: `(reward, old_logp, ref_logp, mask) -> [B,T]`.

Rows come in groups of `group_size` neighbours that answer the same prompt. A row whose mask is empty
is padding: it counts in no mean, deviation or group.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.objectives import kl

Rewards = Float[Array, "B"]
Tokens = Float[Array, "B T"]
Mask = Bool[Array, "B T"]


def imitation(reward: Rewards, old_logp: Tokens, ref_logp: Tokens, mask: Mask) -> Tokens:
    """1 for every token: with the `reinforce` surrogate, the negative log-likelihood of demonstrations."""
    del reward, ref_logp
    return jnp.where(mask, jnp.ones_like(old_logp), 0.0)


def grpo(
    reward: Rewards, old_logp: Tokens, ref_logp: Tokens, mask: Mask, *, group_size: int
) -> Tokens:
    """Reward standardised within its group: (R - mean) / (std + 1e-6), std unbiased (arXiv:2402.03300).

    A group whose rewards are all equal gets exactly 0; a group of one has mean 0 and std 1.
    """
    del old_logp, ref_logp
    reward, valid = _grouped(reward, mask, group_size)
    count = valid.sum(1, keepdims=True)
    alone = count == 1
    centred = jnp.where(alone, reward, reward - _mean(reward, valid))
    variance = jnp.sum(jnp.square(centred), 1, where=valid, keepdims=True) / jnp.maximum(
        count - 1, 1
    )
    std = jnp.where(alone, 1.0, jnp.sqrt(variance))
    score = jnp.where(_uneven(reward, valid) | alone, centred / (std + 1e-6), 0.0)
    return _to_tokens(score, mask)


def dr_grpo(
    reward: Rewards, old_logp: Tokens, ref_logp: Tokens, mask: Mask, *, group_size: int
) -> Tokens:
    """Reward minus the mean of its group, not divided by its deviation (arXiv:2503.20783)."""
    del old_logp, ref_logp
    reward, valid = _grouped(reward, mask, group_size)
    score = jnp.where(_uneven(reward, valid), reward - _mean(reward, valid), 0.0)
    return _to_tokens(score, mask)


def rloo(
    reward: Rewards, old_logp: Tokens, ref_logp: Tokens, mask: Mask, *, group_size: int
) -> Tokens:
    """Reward minus the mean of the others of its group (arXiv:2402.14740); alone, the reward itself."""
    del old_logp, ref_logp
    reward, valid = _grouped(reward, mask, group_size)
    count = valid.sum(1, keepdims=True)
    scale = count / jnp.maximum(count - 1, 1)
    score = jnp.where(_uneven(reward, valid), scale * (reward - _mean(reward, valid)), 0.0)
    return _to_tokens(jnp.where(count == 1, reward, score), mask)


def reinforce_plus_plus(
    reward: Rewards,
    old_logp: Tokens,
    ref_logp: Tokens,
    mask: Mask,
    *,
    kl_coef: float = 1e-3,
    gamma: float = 1.0,
    estimator: Callable[[Tokens, Tokens], Tokens] = kl.k1,
) -> Tokens:
    """Whitened returns of r_t = R [t = last] - kl_coef * KL_t over the whole batch (arXiv:2501.03262)."""
    returns = discounted_returns(
        token_rewards(reward, old_logp, ref_logp, mask, kl_coef=kl_coef, estimator=estimator),
        gamma=gamma,
    )
    return whiten(returns, mask)


def token_rewards(
    reward: Rewards,
    old_logp: Tokens,
    ref_logp: Tokens,
    mask: Mask,
    *,
    kl_coef: float,
    estimator: Callable[[Tokens, Tokens], Tokens] = kl.k1,
) -> Tokens:
    """The reward on the last token of each response, minus kl_coef times the KL on every token."""
    penalty = jnp.where(mask, estimator(old_logp, ref_logp), 0.0)
    return jnp.where(_is_last(mask), reward[:, None], 0.0) - kl_coef * penalty


def discounted_returns(rewards: Tokens, *, gamma: float) -> Tokens:
    """Return-to-go G_t = r_t + gamma * G_{t+1}."""

    def then(later, earlier):
        return later[0] * earlier[0], earlier[1] + earlier[0] * later[1]

    discount = jnp.full_like(rewards, gamma)
    return jax.lax.associative_scan(then, (discount, rewards), reverse=True, axis=1)[1]


def whiten(x: Tokens, mask: Mask) -> Tokens:
    """(x - mean) * rsqrt(var + 1e-8) over all masked tokens, var unbiased; 0 elsewhere."""
    count = mask.sum()
    centred = jnp.where(mask, x - jnp.sum(x, where=mask) / jnp.maximum(count, 1), 0.0)
    variance = jnp.sum(jnp.square(centred)) / jnp.maximum(count - 1, 1)
    return centred * jax.lax.rsqrt(variance + 1e-8)


def _grouped(reward, mask, group_size):
    if reward.shape[0] % group_size:
        raise ValueError(f"{reward.shape[0]} rows are not a whole number of groups of {group_size}")
    valid = mask.any(1).reshape(-1, group_size)
    return reward.reshape(-1, group_size), valid


def _mean(x, valid):
    return jnp.sum(x, 1, where=valid, keepdims=True) / jnp.maximum(valid.sum(1, keepdims=True), 1)


def _uneven(x, valid):
    """Whether rewards of a group differ (or are NaN): rounding in the mean must not look like a signal."""
    high = jnp.max(x, 1, where=valid, initial=-jnp.inf, keepdims=True)
    low = jnp.min(x, 1, where=valid, initial=jnp.inf, keepdims=True)
    return ~(high == low)


def _is_last(mask):
    remaining = jnp.flip(jnp.cumsum(jnp.flip(mask, 1), 1), 1)
    return mask & (remaining == 1)


def _to_tokens(score, mask):
    return jnp.where(mask, score.reshape(-1, 1), 0.0)
