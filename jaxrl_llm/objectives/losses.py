"""Surrogate losses per token, unreduced: `(logp, advantage, data) -> [B,T]`.

r is pi / pi_old of a token, A its advantage, sg(x) = stop_gradient(x); `anchor` gives the log-probs
in r's denominator. Where published code and paper differ, the docstring says which one this is. All
but `lp_reg` scale with A, so a positive factor of A is a factor of the loss.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax.lax import stop_gradient

from jaxrl_llm.objectives import token_data as per_response
from jaxrl_llm.objectives.token_data import Mask, TokenData, Tokens, ratio, trainer

Surrogate = Callable[[Tokens, Tokens, TokenData], Tokens]
Anchor = Callable[[TokenData], Tokens]


def reinforce(logp: Tokens, advantage: Tokens, data: TokenData) -> Tokens:
    """-A log pi, the plain policy gradient (Williams 1992)."""
    del data
    return -advantage * logp


def importance(
    logp: Tokens, advantage: Tokens, data: TokenData, *, anchor: Anchor = trainer
) -> Tokens:
    """-A r without clipping; `anchor` gives the log-probs in the denominator of r."""
    return -advantage * jnp.exp(logp - anchor(data))


def clipped(
    logp: Tokens,
    advantage: Tokens,
    data: TokenData,
    *,
    low: float = 0.2,
    high: float = 0.24,
    dual: float = 10.0,
) -> Tokens:
    """PPO's max(-A r, -A clip(r, 1 - low, 1 + high)), at most -A * dual where A < 0.

    arXiv:1707.06347; separate bounds from arXiv:2503.14476, the dual clip from arXiv:1912.09729.
    """
    r = jnp.exp(logp - data.old_logp)
    loss = jnp.maximum(-advantage * r, -advantage * jnp.clip(r, 1.0 - low, 1.0 + high))
    return jnp.where(advantage < 0, jnp.minimum(loss, -advantage * dual), loss)


def cispo(
    logp: Tokens,
    advantage: Tokens,
    data: TokenData,
    *,
    low: float = 1.0,
    high: float = 4.0,
    anchor: Anchor = trainer,
) -> Tokens:
    """-A sg(clip(r, 1 - low, 1 + high)) log pi: clipped tokens keep a gradient (arXiv:2506.13585).

    No lower bound by default, as in the paper; code that reuses PPO's options keeps one of 0.8. Do
    not multiply by `factors.truncated` with `anchor=sampler`, which corrects for the sampler too.
    """
    r = ratio(logp, anchor(data))
    return -advantage * stop_gradient(jnp.clip(r, 1.0 - low, 1.0 + high)) * logp


def dppo_tv(
    logp: Tokens,
    advantage: Tokens,
    data: TokenData,
    *,
    low: float = 0.15,
    high: float = 0.15,
    anchor: Anchor = trainer,
    then: Surrogate = cispo,
) -> Tokens:
    """`then` where p - p_anchor <= high (A > 0) or >= -low (A <= 0), else 0 (arXiv:2602.04879).

    DPPO, Binary-TV: a trust region of probabilities, not of ratios. In the paper p_anchor is the
    sampler's. The cap on the ratio is that of `then`; published defaults set it three ways.
    """
    moved = jnp.exp(logp) - jnp.exp(anchor(data))
    inside = jnp.where(advantage > 0, moved <= high, moved >= -low)
    return jnp.where(inside, then(logp, advantage, data), 0.0)


def dppo_kl(
    logp: Tokens,
    advantage: Tokens,
    data: TokenData,
    *,
    low: float = 0.05,
    high: float = 0.05,
    anchor: Anchor = trainer,
    then: Surrogate = cispo,
) -> Tokens:
    """`then`, but 0 where p has moved in A's direction and the KL exceeds its bound.

    DPPO, Binary-KL (arXiv:2602.04879): KL(anchor || p) of two outcomes, this token or any other.
    """
    p, q = jnp.exp(logp), jnp.exp(anchor(data))
    others = (1.0 - q) * jnp.log((1.0 - q + 1e-8) / (1.0 - p + 1e-8))
    distance = q * (anchor(data) - logp) + others
    outside = jnp.where(advantage > 0, (distance > high) & (p > q), (distance > low) & (p < q))
    return jnp.where(outside, 0.0, then(logp, advantage, data))


def gspo(
    logp: Tokens, advantage: Tokens, data: TokenData, *, low: float = 3e-4, high: float = 4e-4
) -> Tokens:
    """PPO with s = exp(mean of log r over the response) in place of r (arXiv:2507.18071).

    Each token carries s times the gradient of its own log pi. Published with `seq_mean_token_mean`.
    """
    s = per_response.mean(logp - data.old_logp, data)
    s = jnp.exp(jnp.minimum(stop_gradient(s) + logp - stop_gradient(logp), 10.0))
    return jnp.maximum(-advantage * s, -advantage * jnp.clip(s, 1.0 - low, 1.0 + high))


def gmpo(
    logp: Tokens, advantage: Tokens, data: TokenData, *, low: float = 0.4, high: float = 0.4
) -> Tokens:
    """-A exp(mean over the response of log r, clipped one-sidedly in log space) (arXiv:2507.20673).

    Aggregate by `seq_mean_token_mean`. Each token has its own gradient, so stages can split them.
    """
    change = logp - data.old_logp
    bound = jnp.where(advantage > 0, jnp.minimum(change, high), jnp.maximum(change, -low))
    mean = jnp.exp(per_response.mean(stop_gradient(bound), data))
    return -advantage * mean * _unit_slope(bound)


def sapo(
    logp: Tokens,
    advantage: Tokens,
    data: TokenData,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Tokens:
    """-A (4 / tau) sigmoid(tau (r - 1)): a soft gate in place of clipping (arXiv:2511.20347)."""
    tau = jnp.where(advantage > 0, tau_positive, tau_negative)
    r = ratio(logp, data.old_logp)
    return -advantage * (4.0 / tau) / (1.0 + jnp.exp(-tau * (r - 1.0)))


def ce_gppo(
    logp: Tokens,
    advantage: Tokens,
    data: TokenData,
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual: float = 10.0,
    beta1: float = 0.75,
    beta2: float = 1.0,
) -> Tokens:
    """PPO whose clipped tokens keep a slope: beta1 times below, beta2 above (arXiv:2509.20712).

    The betas are those of the released runs, not the code's defaults.
    """
    r = jnp.exp(logp - data.old_logp)
    below, above = (advantage < 0) & (r < 1.0 - low), (advantage > 0) & (r > 1.0 + high)
    kept = jnp.where(below, beta1 * (1.0 - low), beta2 * (1.0 + high)) * _unit_slope(logp)
    loss = -advantage * jnp.where(below | above, kept, r)
    return jnp.where(advantage < 0, jnp.minimum(loss, -advantage * dual), loss)


def aspo(
    logp: Tokens,
    advantage: Tokens,
    data: TokenData,
    *,
    calm: float = 0.2,
    open: float = 0.4,  # noqa: A002
    dual: float = 3.0,
) -> Tokens:
    """PPO with 1 / r in place of r where A >= 0; -A dual log pi above `dual` (arXiv:2510.06062).

    The bounds are `calm` on selected tokens (`selections.calm`), `open` on the others.
    """
    r, bound = ratio(logp, data.old_logp), jnp.where(data.selected, calm, open)
    up = jnp.minimum(r, 1.0 + bound)
    inverse = stop_gradient(1.0 / up) * jnp.where(r < 1.0 + bound, _unit_slope(logp), 1.0)
    weight = jnp.where(advantage < 0, jnp.maximum(r, 1.0 - bound), inverse)
    return -advantage * jnp.where(weight > dual, dual * logp, weight)


def positive_reward(advantage: Tokens, data: TokenData) -> Mask:
    """Tokens of responses with R > 0."""
    return data.reward > 0


def topr(
    logp: Tokens,
    advantage: Tokens,
    data: TokenData,
    *,
    positive: Callable[[Tokens, TokenData], Mask] = positive_reward,
    weights: tuple[float, float] = (1.0, 1.0),
) -> Tokens:
    """-A w log pi, w = 1 on positive responses and sg(min(r, 1)) on the others (arXiv:2503.14286).

    r is the token's, as in published code; in the paper it is that of the whole response.
    """
    tapered = stop_gradient(jnp.minimum(jnp.exp(logp - data.old_logp), 1.0))
    weight = jnp.where(positive(advantage, data), weights[0], weights[1] * tapered)
    return -advantage * weight * logp


def lp_reg(
    logp: Tokens,
    advantage: Tokens,
    data: TokenData,
    *,
    low: float = 1.0,
    high: float = 9.0,
    coef: float = 1.0,
) -> Tokens:
    """PPO, but -A r + coef k3(proxy || pi) on selected tokens with pi < proxy (arXiv:2510.03222).

    Select by `selections.lowest_probability`; the proxy is the old policy without unlikely tokens.
    """
    d = data.proxy_logp - logp
    k3 = jnp.minimum(jnp.exp(d) - d - 1.0, 10.0)
    pulled = importance(logp, advantage, data) + coef * k3
    plain = clipped(logp, advantage, data, low=low, high=high, dual=jnp.inf)
    return jnp.where(data.selected & (d > 0), pulled, plain)


def opsm(
    logp: Tokens,
    advantage: Tokens,
    data: TokenData,
    *,
    delta: float = 1e-4,
    anchor: Anchor = trainer,
    then: Surrogate = clipped,
) -> Tokens:
    """`then`, but 0 where A < 0 and a response's mean(anchor - logp) > delta (arXiv:2512.02556)."""
    drift = per_response.mean(anchor(data) - stop_gradient(logp), data)
    return jnp.where((advantage >= 0) | (drift <= delta), then(logp, advantage, data), 0.0)


def _unit_slope(x):
    """The value 1 with the gradient of x."""
    return jnp.exp(x - stop_gradient(x))
