"""Rewards to per-token advantages: `(reward [P,G], data) -> [B,T]`, 0 on padding.

A row of `reward` is a prompt's group of G responses, which are consecutive rows of `[B,T]`. A row
of `[B,T]` with an empty mask is padding and counts in no mean, deviation or group.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxrl_llm.objectives import kl
from jaxrl_llm.objectives.token_data import Mask, Rewards, TokenData, Tokens


def imitation(reward: Rewards, data: TokenData) -> Tokens:
    """1 on every token; the loss with `losses.reinforce` is then the negative log-likelihood."""
    del reward
    return jnp.where(data.mask, jnp.ones_like(data.old_logp), 0.0)


def nothing(reward: Rewards, data: TokenData) -> Tokens:
    """0 on every token: penalties alone are learned from."""
    del reward
    return jnp.zeros_like(data.old_logp)


def grpo(reward: Rewards, data: TokenData) -> Tokens:
    """Reward standardised in its group: (R - mean) / (std + 1e-6), std unbiased (arXiv:2402.03300).

    A group whose rewards are all equal gets exactly 0; a group of one has mean 0 and std 1.
    """
    valid, _, _ = _group(reward, data)
    return _to_tokens(_standardised(reward, valid), data)


def by_turn(
    reward: Rewards, data: TokenData, *, discount: float = 1.0, episode_share: float = 0.5
) -> Tokens:
    """(1 - s) A_turn + s A_episode, A_episode being `grpo`'s, and a token's A_turn that of its turn.

    Turn t has the return sum_{k >= t} discount^(k - t) r_k of the rewards of turns, standardised like
    `grpo` over those of the group that have a turn t; 0 if it alone of several has one.
    """
    _, _, alone = _group(reward, data)
    number = data.mask.shape[1] + 1  # turns have a token each, and padding is turn 0
    table = jax.vmap(partial(jax.ops.segment_sum, num_segments=number))
    last = data.mask & (data.turn != jnp.pad(data.turn, ((0, 0), (0, 1)))[:, 1:])
    rewards = table(jnp.where(last, data.turn_reward, 0.0), data.turn)
    returns = discounted_returns(rewards, gamma=discount)
    # [B, number] to rows of groups, one for each number of a turn
    lead, size = reward.shape
    groups = lambda x: x.reshape(lead, size, number).swapaxes(1, 2).reshape(-1, size)
    there = groups(table(last.astype(jnp.int32), data.turn) > 0)
    compared = jnp.repeat(alone[:, 0], number)[:, None] | (there.sum(1, keepdims=True) > 1)
    score = jnp.where(compared, _standardised(groups(returns), there), 0.0)
    score = score.reshape(lead, number, size).swapaxes(1, 2).reshape(-1, number)
    of_turn = jnp.where(data.mask, jnp.take_along_axis(score, data.turn, 1), 0.0)
    return (1 - episode_share) * of_turn + episode_share * grpo(reward, data)


def erl(reward: Rewards, data: TokenData) -> Tokens:
    """Of an episode of two attempts and a reflection between them (`WithReflection`, arXiv:2602.13949).

    The first attempt has its reward, standardised like `grpo` in its group; the reflection and the second
    attempt have that of the second, over those of the group that made one; 0 where there is none, or it alone
    of several.
    The second attempt under the first instructions, the fourth context, has max(its reward, 0).
    """
    _, _, alone = _group(reward, data)

    def attempt(context: int):
        """The last reward in a context, and which responses have that."""
        here = data.segment == context
        last = _is_last(data.mask & here)
        score = jnp.where(last, data.turn_reward, 0.0).sum(1).reshape(reward.shape)
        return score, last.any(1).reshape(reward.shape)

    (first, begun), (second, again) = attempt(1), attempt(3)
    compared = alone | (again.sum(1, keepdims=True) > 1)
    later = jnp.where(compared & again, _standardised(second, again), 0.0)
    scores = [_standardised(first, begun), later, later, jnp.maximum(second, 0.0)]
    of = [_to_tokens(score, data) for score in scores]
    return jnp.select([data.segment == context for context in (1, 2, 3, 4)], of, 0.0)


def dr_grpo(reward: Rewards, data: TokenData) -> Tokens:
    """Reward minus the mean of its group, not divided by its deviation (arXiv:2503.20783).

    A lone response gets its reward.
    """
    valid, _, alone = _group(reward, data)
    score = jnp.where(_uneven(reward, valid), reward - _mean(reward, valid), 0.0)
    return _to_tokens(jnp.where(alone, reward, score), data)


def rloo(reward: Rewards, data: TokenData) -> Tokens:
    """Reward minus the mean of the group's other rewards (arXiv:2402.14740); alone, the reward."""
    valid, count, alone = _group(reward, data)
    scale = count / jnp.maximum(count - 1, 1)
    score = jnp.where(_uneven(reward, valid), scale * (reward - _mean(reward, valid)), 0.0)
    return _to_tokens(jnp.where(alone, reward, score), data)


def opo(reward: Rewards, data: TokenData) -> Tokens:
    """Reward minus the group's length-weighted mean (arXiv:2505.23585); alone, the reward."""
    valid, _, alone = _group(reward, data)
    length = data.mask.sum(1, dtype=jnp.float32).reshape(reward.shape)
    total = jnp.maximum(length.sum(1, keepdims=True), 1.0)
    baseline = (length * reward).sum(1, keepdims=True) / total
    score = jnp.where(_uneven(reward, valid), reward - baseline, 0.0)
    return _to_tokens(jnp.where(alone, reward, score), data)


def maxrl(reward: Rewards, data: TokenData) -> Tokens:
    """(R - mean) / mean of the group, 0 where the mean is not positive (arXiv:2602.02710).

    The authors' code divides by mean + 1e-6, which flips every sign where the mean is negative. A
    lone response gets 0: nothing is learned from it.
    """
    valid, _, _ = _group(reward, data)
    mean = _mean(reward, valid)
    some = (mean > 0) & _uneven(reward, valid)
    return _to_tokens(jnp.where(some, (reward - mean) / jnp.where(some, mean, 1.0), 0.0), data)


def asymre(reward: Rewards, data: TokenData, *, shift: float = -0.1) -> Tokens:
    """Reward minus (mean of the group + shift), for plain -A log pi (arXiv:2506.20520).

    A group of equal rewards gets -shift: do not drop such groups. A lone response gets its reward.
    """
    valid, _, alone = _group(reward, data)
    return _to_tokens(jnp.where(alone, reward, reward - (_mean(reward, valid) + shift)), data)


def w_reinforce(reward: Rewards, data: TokenData, *, positive: float = 0.1) -> Tokens:
    """`positive` for a reward above 0, -1 for any other: no baseline, no group (arXiv:2506.01347).

    The paper has rewards of 1 and 0; published code leaves any other reward unweighted.
    """
    return _to_tokens(jnp.where(reward > 0, positive, -1.0), data)


def distilled(
    reward: Rewards,
    data: TokenData,
    *,
    coef: float = 1.0,
    reward_coef: float = 0.0,
    of_reward: Callable[[Rewards, TokenData], Tokens] = grpo,
) -> Tokens:
    """-coef (log sampler - log teacher) of each token, the reverse KL to the teacher as a reward.

    On-policy distillation (Thinking Machines 2025): no later token counts, there is no baseline. With
    `reward_coef` the task's own advantage, `of_reward`, is added, so many times.
    """
    gap = jnp.where(data.mask, data.sampler_logp - data.teacher_logp, 0.0)
    own = reward_coef * of_reward(reward, data) if reward_coef else 0.0
    return own - coef * gap


def reinforce_plus_plus(
    reward: Rewards,
    data: TokenData,
    *,
    kl_coef: float = 1e-3,
    gamma: float = 1.0,
    estimator: Callable[[Tokens, TokenData], Tokens] = kl.k1,
) -> Tokens:
    """Batch-whitened returns of r_t = R [t = last] - kl_coef * KL_t (arXiv:2501.03262)."""
    rewards = token_rewards(reward, data, kl_coef=kl_coef, estimator=estimator)
    return whiten(discounted_returns(rewards, gamma=gamma), data.mask)


def token_rewards(
    reward: Rewards,
    data: TokenData,
    *,
    kl_coef: float,
    estimator: Callable[[Tokens, TokenData], Tokens] = kl.k1,
) -> Tokens:
    """The reward on the last token of each response, minus kl_coef times the KL on every token."""
    penalty = jnp.where(data.mask, estimator(data.old_logp, data), 0.0)
    return jnp.where(_is_last(data.mask), reward.reshape(-1, 1), 0.0) - kl_coef * penalty


def discounted_returns(rewards: Tokens, *, gamma: float) -> Tokens:
    """Return-to-go G_t = r_t + gamma * G_{t+1}."""

    def then(later, earlier):
        return later[0] * earlier[0], earlier[1] + earlier[0] * later[1]

    discount = jnp.full_like(rewards, gamma)
    return jax.lax.associative_scan(then, (discount, rewards), reverse=True, axis=1)[1]


def whiten(x: Tokens, mask: Mask) -> Tokens:
    """(x - mean) * rsqrt(var + 1e-8) over all masked tokens, var unbiased; 0 elsewhere, or if all are equal."""
    count = mask.sum()
    centred = jnp.where(mask, x - jnp.sum(x, where=mask) / jnp.maximum(count, 1), 0.0)
    variance = jnp.sum(jnp.square(centred)) / jnp.maximum(count - 1, 1)
    uneven = _uneven(x.reshape(1, -1), mask.reshape(1, -1))
    return jnp.where(uneven, centred * jax.lax.rsqrt(variance + 1e-8), 0.0)


# Reward shaping: `(reward, data) -> reward`, applied before an advantage function by `shaped`.


def shaped(
    reward: Rewards,
    data: TokenData,
    *,
    by: Callable[[Rewards, TokenData], Rewards],
    then: Callable[[Rewards, TokenData], Tokens] = grpo,
) -> Tokens:
    """then(by(reward, data), data): the reward shaping `by`, then the advantage function `then`."""
    return then(by(reward, data), data)


def unlikeliness(reward: Rewards, data: TokenData, *, beta: float = 0.25) -> Rewards:
    """R (1 - beta * rank / G), rank 0 the least likely response of its group (arXiv:2506.02355).

    For R >= 0: a negative reward would favour likely responses. Equal rewards get advantages too.
    """
    valid, count, _ = _group(reward, data)
    length = jnp.maximum(data.mask.sum(1), 1)
    score = (jnp.sum(data.old_logp, 1, where=data.mask) / length).reshape(reward.shape)
    order = jnp.argsort(jnp.where(valid, score, jnp.inf), axis=1, stable=True)
    rank = jnp.argsort(order, axis=1, stable=True)
    return reward * (1.0 - beta * rank / jnp.maximum(count, 1))


def overlong(
    reward: Rewards,
    data: TokenData,
    *,
    longest: int,
    buffer: int = 4096,
    factor: float = 1.0,
    floor: float = -1.0,
) -> Rewards:
    """R + factor * clip((longest - buffer - n) / buffer, floor, 0), n the length in tokens: DAPO's.

    arXiv:2503.14476. `floor` only matters for responses over `longest`; some code has none.
    """
    over = data.mask.sum(1, dtype=jnp.int32).reshape(reward.shape) - (longest - buffer)
    return reward + jnp.clip(-over / buffer, floor, 0.0) * factor


def _group(reward, data):
    """Which responses [P,G] are not padding, how many in each group [P,1], and whether just one."""
    if reward.size != data.mask.shape[0]:
        raise ValueError(f"{reward.shape} rewards [P,G] are not those of {data.mask.shape[0]} rows")
    valid = data.mask.any(1).reshape(reward.shape)
    count = valid.sum(1, keepdims=True)
    return valid, count, count == 1


def _mean(x, valid):
    return jnp.sum(x, 1, where=valid, keepdims=True) / jnp.maximum(valid.sum(1, keepdims=True), 1)


def _standardised(x, valid):
    count = valid.sum(1, keepdims=True)
    alone = count == 1
    centred = jnp.where(alone, x, x - _mean(x, valid))
    variance = jnp.sum(jnp.square(centred), 1, where=valid, keepdims=True) / jnp.maximum(
        count - 1, 1
    )
    std = jnp.where(alone, 1.0, jnp.sqrt(variance))
    return jnp.where(_uneven(x, valid) | alone, centred / (std + 1e-6), 0.0)


def _uneven(x, valid):
    """True if numbers of a row differ (or are NaN); x - mean may not be 0 for equal ones."""
    high = jnp.max(x, 1, where=valid, initial=-jnp.inf, keepdims=True)
    low = jnp.min(x, 1, where=valid, initial=jnp.inf, keepdims=True)
    return ~(high == low)


def _is_last(mask):
    remaining = jnp.flip(jnp.cumsum(jnp.flip(mask, 1), 1), 1)
    return mask & (remaining == 1)


def _to_tokens(score, data):
    return jnp.where(data.mask, score.reshape(-1, 1), 0.0)
