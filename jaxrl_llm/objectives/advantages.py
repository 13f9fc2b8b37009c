"""Rewards to per-token advantages: `(reward [P,G], seen) -> [B,T]`.

A line of `reward` is a prompt and its group of responses, which are neighbouring rows of `[B,T]`. A row
whose mask is empty is padding: it counts in no mean, deviation or group.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.objectives import kl
from jaxrl_llm.objectives.seen import Mask, Rewards, Seen, Tokens


def imitation(reward: Rewards, seen: Seen) -> Tokens:
    """1 for every token: with the `reinforce` surrogate, the negative log-likelihood of demonstrations."""
    del reward
    return jnp.where(seen.mask, jnp.ones_like(seen.old_logp), 0.0)


def grpo(reward: Rewards, seen: Seen) -> Tokens:
    """Reward standardised within its group: (R - mean) / (std + 1e-6), std unbiased (arXiv:2402.03300).

    A group whose rewards are all equal gets exactly 0; a group of one has mean 0 and std 1.
    """
    valid, count, alone = _group(reward, seen)
    centred = jnp.where(alone, reward, reward - _mean(reward, valid))
    variance = jnp.sum(jnp.square(centred), 1, where=valid, keepdims=True) / jnp.maximum(
        count - 1, 1
    )
    std = jnp.where(alone, 1.0, jnp.sqrt(variance))
    score = jnp.where(_uneven(reward, valid) | alone, centred / (std + 1e-6), 0.0)
    return _to_tokens(score, seen)


def dr_grpo(reward: Rewards, seen: Seen) -> Tokens:
    """Reward minus the mean of its group, not divided by its deviation (arXiv:2503.20783).

    A lone response gets its reward.
    """
    valid, _, alone = _group(reward, seen)
    score = jnp.where(_uneven(reward, valid), reward - _mean(reward, valid), 0.0)
    return _to_tokens(jnp.where(alone, reward, score), seen)


def rloo(reward: Rewards, seen: Seen) -> Tokens:
    """Reward minus the mean of the others of its group (arXiv:2402.14740); alone, the reward itself."""
    valid, count, alone = _group(reward, seen)
    scale = count / jnp.maximum(count - 1, 1)
    score = jnp.where(_uneven(reward, valid), scale * (reward - _mean(reward, valid)), 0.0)
    return _to_tokens(jnp.where(alone, reward, score), seen)


def opo(reward: Rewards, seen: Seen) -> Tokens:
    """Reward minus the group's mean weighted by length (arXiv:2505.23585); alone, the reward itself."""
    _, _, alone = _group(reward, seen)
    length = seen.mask.sum(1, dtype=reward.dtype).reshape(reward.shape)
    total = jnp.maximum(length.sum(1, keepdims=True), 1.0)
    baseline = (length * reward).sum(1, keepdims=True) / total
    return _to_tokens(jnp.where(alone, reward, reward - baseline), seen)


def maxrl(reward: Rewards, seen: Seen) -> Tokens:
    """(R - mean) / mean of the group, 0 where the mean is not positive (arXiv:2602.02710).

    The authors' own code divides by mean + 1e-6: a negative mean turns every sign around there. A lone
    response gets 0: nothing is learned from it.
    """
    valid, _, _ = _group(reward, seen)
    mean = _mean(reward, valid)
    safe = jnp.where(mean > 0, mean, 1.0)
    return _to_tokens(jnp.where(mean > 0, (reward - mean) / safe, 0.0), seen)


def asymre(reward: Rewards, seen: Seen, *, shift: float = -0.1) -> Tokens:
    """Reward minus (mean of the group + shift), for plain -A log pi (arXiv:2506.20520).

    A group of equal rewards gets -shift: keep it. A lone response gets its reward.
    """
    valid, _, alone = _group(reward, seen)
    return _to_tokens(jnp.where(alone, reward, reward - (_mean(reward, valid) + shift)), seen)


def w_reinforce(reward: Rewards, seen: Seen, *, positive: float = 0.1) -> Tokens:
    """`positive` for a reward above 0, -1 for any other: no baseline, no group (arXiv:2506.01347).

    The paper has rewards of 1 and 0; published code passes any other through unweighted.
    """
    return _to_tokens(jnp.where(reward > 0, positive, -1.0), seen)


def reinforce_plus_plus(
    reward: Rewards,
    seen: Seen,
    *,
    kl_coef: float = 1e-3,
    gamma: float = 1.0,
    estimator: Callable[[Tokens, Seen], Tokens] = kl.k1,
) -> Tokens:
    """Whitened returns of r_t = R [t = last] - kl_coef * KL_t over the whole batch (arXiv:2501.03262)."""
    rewards = token_rewards(reward, seen, kl_coef=kl_coef, estimator=estimator)
    return whiten(discounted_returns(rewards, gamma=gamma), seen.mask)


def token_rewards(
    reward: Rewards,
    seen: Seen,
    *,
    kl_coef: float,
    estimator: Callable[[Tokens, Seen], Tokens] = kl.k1,
) -> Tokens:
    """The reward on the last token of each response, minus kl_coef times the KL on every token."""
    penalty = jnp.where(seen.mask, estimator(seen.old_logp, seen), 0.0)
    return jnp.where(_is_last(seen.mask), reward.reshape(-1, 1), 0.0) - kl_coef * penalty


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


# Rewards that are changed before they become advantages: `(reward, seen) -> reward`.


def shaped(
    reward: Rewards,
    seen: Seen,
    *,
    by: Callable[[Rewards, Seen], Rewards],
    then: Callable[[Rewards, Seen], Tokens] = grpo,
) -> Tokens:
    """The advantage `then` of the reward that `by` makes of it."""
    return then(by(reward, seen), seen)


def unlikeliness(reward: Rewards, seen: Seen, *, beta: float = 0.25) -> Rewards:
    """R (1 - beta * rank / G), rank 0 the least likely response of its group (arXiv:2506.02355).

    For R >= 0: a negative reward would favour the likely. Equal rewards no longer mean no advantage.
    """
    valid, count, _ = _group(reward, seen)
    length = jnp.maximum(seen.mask.sum(1), 1)
    score = (jnp.sum(seen.old_logp, 1, where=seen.mask) / length).reshape(reward.shape)
    order = jnp.argsort(jnp.where(valid, score, jnp.inf), axis=1, stable=True)
    rank = jnp.argsort(order, axis=1, stable=True)
    return reward * (1.0 - beta * rank / jnp.maximum(count, 1))


def overlong(
    reward: Rewards,
    seen: Seen,
    *,
    longest: int,
    buffer: int = 4096,
    factor: float = 1.0,
    floor: float = -1.0,
) -> Rewards:
    """R - factor * (n - (longest - buffer)) / buffer beyond longest - buffer tokens: DAPO's (arXiv:2503.14476).

    The penalty stops at `floor`, which only matters for responses over `longest`; some code has none.
    """
    over = seen.mask.sum(1).reshape(reward.shape) - (longest - buffer)
    return reward + jnp.clip(-over / buffer, floor, 0.0) * factor


def _group(reward, seen):
    """Which responses are no padding, how many they are in each group, and whether just one."""
    if reward.size != seen.mask.shape[0]:
        raise ValueError(f"{reward.shape} rewards [P,G] are not those of {seen.mask.shape[0]} rows")
    valid = seen.mask.any(1).reshape(reward.shape)
    count = valid.sum(1, keepdims=True)
    return valid, count, count == 1


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


def _to_tokens(score, seen):
    return jnp.where(seen.mask, score.reshape(-1, 1), 0.0)
