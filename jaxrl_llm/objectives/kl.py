"""Estimators of KL(pi || ref) per token from the sampled token alone: `(logp, data) -> [B,T]`.

Each can be used in the reward (by its value) or as a penalty of the loss (by its gradient); `of_top`, which
looks at distributions, as a penalty alone. See "Approximating KL divergence", Schulman 2020.
"""

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax.lax import stop_gradient

from jaxrl_llm.objectives.token_data import TokenData, Tokens


def k1(logp: Tokens, data: TokenData) -> Tokens:
    """log pi - log ref, the unbiased value; its gradient is that of k2.

    The plain gradient of log pi - log ref does not contain the reference and is zero on average: as
    a loss term it would do nothing. The gradient of k2 is the unbiased gradient of the KL.
    """
    pull = k2(logp, data)
    return stop_gradient(logp - data.ref_logp) + (pull - stop_gradient(pull))


def k2(logp: Tokens, data: TokenData) -> Tokens:
    """(log pi - log ref)^2 / 2: biased value, unbiased gradient."""
    return 0.5 * jnp.square(logp - data.ref_logp)


def k3(logp: Tokens, data: TokenData) -> Tokens:
    """exp(d) - d - 1 with d = log ref - log pi: never negative; d clamped to 5, the value to 10."""
    d = jnp.clip(data.ref_logp - logp, -5.0, 5.0)
    return jnp.clip(jnp.exp(d) - d - 1.0, -10.0, 10.0)


def from_sampler(
    logp: Tokens, data: TokenData, *, estimator: Callable[[Tokens, TokenData], Tokens] = k2
) -> Tokens:
    """An estimator with the sampler's policy as the reference."""
    return estimator(logp, data._replace(ref_logp=data.sampler_logp))


def from_teacher(
    logp: Tokens, data: TokenData, *, estimator: Callable[[Tokens, TokenData], Tokens] = k1
) -> Tokens:
    """An estimator with the teacher as the reference: on-policy distillation as a penalty."""
    return estimator(logp, data._replace(ref_logp=data.teacher_logp))


def of_top(logp: Tokens, data: TokenData, *, beta: float = 0.5) -> Tokens:
    """The generalised Jensen-Shannon divergence of teacher and policy (arXiv:2306.13649), not an estimate.

    Over the teacher's `Objective.top` likeliest tokens, and all others as one. `beta` 0 is KL(teacher ||
    policy), 1 KL(policy || teacher).
    """
    teacher, policy = _with_rest(data.teacher_top), _with_rest(data.top_logp)
    kl = lambda a, b: jnp.sum(jnp.exp(a) * (a - b), -1)
    if beta in (0.0, 1.0):
        return kl(policy, teacher) if beta else kl(teacher, policy)
    middle = jnp.logaddexp(teacher + math.log(beta), policy + math.log1p(-beta))
    return beta * kl(teacher, middle) + (1 - beta) * kl(policy, middle)


def _with_rest(logp):
    """Log-probs of some tokens and of the rest, which is at least what float32 can tell from 0."""
    rest = jnp.log(jnp.maximum(1 - jnp.exp(logp).sum(-1, keepdims=True), 1e-6))
    return jnp.concatenate([logp, rest], -1)


def drift_of_selected(logp: Tokens, data: TokenData) -> Tokens:
    """|log pi - log pi_old| on the selected tokens: the penalty of KL-Cov (arXiv:2505.22617)."""
    return jnp.where(data.selected, jnp.abs(logp - data.old_logp), 0.0)
