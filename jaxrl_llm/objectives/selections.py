"""Selections of tokens: `(advantage, data) -> bool [B,T]`, over one mini-batch.

Pass one as `Objective.select`, for surrogates and penalties that read `data.selected`, or to
`factors.only`, `without` and `renormalised`. Published code selects in every micro-batch by the
current log-probs; here it is once a mini-batch by `old_logp` (or the argument `logp`), so it does
not depend on how the batch is cut. On a batch's first optimizer step the log-probs are the same.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_llm.objectives import token_data as per_response
from jaxrl_llm.objectives.factors import mean_ratio, token_ratio
from jaxrl_llm.objectives.token_data import Mask, TokenData, Tokens


def nothing(advantage: Tokens, data: TokenData) -> Mask:
    """No token."""
    return jnp.zeros_like(data.mask)


def covariance(
    advantage: Tokens, data: TokenData, *, share: float = 2e-3, logp: Tokens | None = None
) -> Mask:
    """KL-Cov's: the `share` of tokens, at least one, with the highest covariance of log-prob and A.

    arXiv:2505.22617: 2e-3 for 7B, 2e-4 for 32B, as fractions; the authors' code takes percent.
    """
    cov = jnp.where(data.mask, _covariance(advantage, data, logp), -jnp.inf)
    return lowest(-cov, data.mask, jnp.maximum(part(share, data.mask.sum()), 1))


def covariance_band(
    advantage: Tokens,
    data: TokenData,
    *,
    share: float = 2e-4,
    lower: float = 1.0,
    upper: float = 5.0,
    low: float = 1.0,
    high: float = 1.0,
    seed: int = 0,
    logp: Tokens | None = None,
) -> Mask:
    """Clip-Cov's: a random `share` of all tokens, at least one, drawn from those in `band`.

    arXiv:2505.22617. A token that PPO's bounds already clip is not drawn.
    """
    candidates = band(advantage, data, lower=lower, upper=upper, low=low, high=high, logp=logp)
    count = jnp.maximum(part(share, data.mask.sum()), 1)
    apart = noise(data, ~seed)  # from what `partition` draws by the same seed
    return lowest(apart, candidates, jnp.minimum(count, candidates.sum()))


def band(
    advantage: Tokens,
    data: TokenData,
    *,
    lower: float,
    upper: float,
    low: float = 1.0,
    high: float = 1.0,
    logp: Tokens | None = None,
) -> Mask:
    """Tokens with a covariance in (lower, upper) that PPO's bounds do not clip."""
    cov = _covariance(advantage, data, logp)
    r = jnp.exp((data.old_logp if logp is None else logp) - data.old_logp)
    clipped = ((advantage > 0) & (r > 1.0 + high)) | ((advantage < 0) & (r < 1.0 - low))
    return data.mask & (cov > lower) & (cov < upper) & ~clipped


def lowest_probability(
    advantage: Tokens,
    data: TokenData,
    *,
    share: float = 0.01,
    positive_share: float = 0.0,
    logp: Tokens | None = None,
) -> Mask:
    """Lp-Reg's: the least likely `share` of tokens with A < 0, and `positive_share` with A > 0.

    arXiv:2510.03222. At least one of each with a share; the authors' code never takes just one.
    """
    logp = data.old_logp if logp is None else logp

    def among(some, share):
        count = jnp.maximum(part(share, some.sum()), 1)
        return lowest(logp, some, count) if share else jnp.zeros_like(some)

    negative, positive = data.mask & (advantage < 0), data.mask & (advantage > 0)
    return among(negative, share) | among(positive, positive_share)


def calm(advantage: Tokens, data: TokenData, *, quantile: float = 0.8) -> Mask:
    """ASPO's: tokens with entropy up to this quantile of their response's (arXiv:2510.06062)."""
    del advantage
    entropy = jnp.where(data.mask, data.entropy, jnp.nan)
    return data.mask & (data.entropy <= jnp.nanquantile(entropy, quantile, axis=1, keepdims=True))


def highest_entropy(advantage: Tokens, data: TokenData, *, share: float = 0.2) -> Mask:
    """Tokens with an entropy from the (1 - share) quantile upwards: 80/20 (arXiv:2506.01939)."""
    del advantage
    entropy = jnp.where(data.mask, data.entropy, jnp.nan)
    return data.mask & (data.entropy >= jnp.nanquantile(entropy, 1.0 - share))


def top_entropy(advantage: Tokens, data: TokenData, *, share: float = 0.2) -> Mask:
    """Exactly floor(share * tokens) tokens of the highest entropy: 80/20 as other code has it."""
    del advantage
    return lowest(-data.entropy, data.mask, part(share, data.mask.sum()))


# Rejection by distance from the sampler; the bounds are on 1 / rho = pi_sampler / pi_old.


def near_token(advantage: Tokens, data: TokenData, *, low: float = 0.5, high: float = 2.0) -> Mask:
    """Tokens with 1 / rho in [low, high]."""
    del advantage
    return data.mask & _within(1.0 / token_ratio(data), low, high)


def near_response(
    advantage: Tokens, data: TokenData, *, low: float = 0.99, high: float = 1.01
) -> Mask:
    """Responses whose geometric mean of 1 / rho lies in [low, high]."""
    del advantage
    return data.mask & _within(1.0 / mean_ratio(data), low, high)


def near_response_k3(advantage: Tokens, data: TokenData, *, high: float = 0.001) -> Mask:
    """Responses whose mean of rho - 1 - log rho is at most `high`."""
    del advantage
    gap = data.old_logp - data.sampler_logp
    return data.mask & (per_response.mean(jnp.exp(gap) - 1.0 - gap, data) <= high)


# Helpers, which `partition` uses too.


def part(share: float, count: Int[Array, ""]) -> Int[Array, ""]:
    """floor(share * count) in double precision: 0.29 of 100 is 28, and a third of 300 is not 99."""
    with jax.enable_x64(True):
        return jnp.floor(share * count.astype(jnp.float64)).astype(jnp.int32)


def lowest(x: Tokens, some: Mask, count: Int[Array, ""]) -> Mask:
    """True on the `count` tokens of `some` with the smallest x; ties by position."""
    order = jnp.argsort(jnp.where(some, x, jnp.inf).ravel(), stable=True)
    rank = jnp.zeros(x.size, jnp.int32).at[order].set(jnp.arange(x.size, dtype=jnp.int32))
    return some & (rank.reshape(x.shape) < count)


def noise(data: TokenData, seed: int) -> Float[Array, "B T"]:
    """Uniform draws in [0, 1): new in every batch, the same on resume, on any padding and devices.

    The key is made from the seed, the lengths and the rewards, whose bits are the same everywhere
    (those of log-probs are not); each draw from the key, the row and the position.
    """
    fold, start = jax.vmap(jax.random.fold_in, (None, 0)), jax.random.key(seed)
    rows, columns = map(jnp.arange, data.mask.shape)
    keys = fold(start, rows)
    for number in (data.mask.sum(1), jax.lax.bitcast_convert_type(data.reward[:, 0], jnp.int32)):
        keys = jax.vmap(jax.random.fold_in)(keys, number)
    key = jax.random.fold_in(start, jax.vmap(jax.random.bits)(keys).sum())
    places = jax.vmap(fold, (0, None))(fold(key, rows), columns)
    return jax.vmap(jax.vmap(jax.random.uniform))(places)


def _covariance(advantage, data, logp):
    logp = data.old_logp if logp is None else logp
    count = jnp.maximum(data.mask.sum(), 1)
    centred = lambda x: x - jnp.sum(x, where=data.mask) / count
    return centred(advantage) * centred(logp)


def _within(x, low, high):
    return (x >= low) & (x <= high)
