"""Metrics of a training step, as sums that add up over micro-batches, shards and stages."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.objectives import Objective, TokenData, kl
from jaxrl_llm.objectives.token_data import batch_mean

Tokens = Float[Array, "R C"]


class Sums(NamedTuple):
    """`weighted` like the loss; `over_tokens` unweighted, to be divided by the number of tokens."""

    weighted: dict[str, Float[Array, ""]]
    over_tokens: dict[str, Float[Array, ""]]


def token_sums(
    objective: Objective, logp: Tokens, advantage: Tokens, weight: Tokens, data: TokenData
) -> Sums:
    """Sums over the tokens of a micro-batch, at the current log-probs `logp`.

    A token counts as clipped if its surrogate has no gradient: `clip` at the bounds, `clip_dual` at
    the dual clip (A < 0, ratio above 1). `moved` sums old - new log-probs over the stage: an
    estimate of its part of KL(old || new).
    """
    surrogate, penalty = objective.per_token(logp, advantage, data)
    stage = data.mask & (weight > 0)
    lost = stage & without_slope(objective, logp, advantage, data)
    dual = (advantage < 0) & (logp > data.old_logp)
    weighted = {"policy": surrogate, "penalty": penalty}
    if data.ref_logp is not None:
        weighted["kl"] = kl.k3(logp, data)
    over_tokens = {
        "clip": lost & ~dual,
        "clip_dual": lost & dual,
        "moved": jnp.where(stage, data.old_logp - logp, 0.0),
        "share": stage,
    }
    return Sums(
        {name: jnp.sum(jnp.where(stage, weight * x, 0.0)) for name, x in weighted.items()},
        {name: jnp.sum(x, dtype=jnp.float32) for name, x in over_tokens.items()},
    )


def without_slope(
    objective: Objective, logp: Tokens, advantage: Tokens, data: TokenData
) -> Bool[Array, "R C"]:
    """True where the surrogate has lost its gradient though there is an advantage."""
    pull = jax.grad(lambda x: objective.surrogate(x, advantage, data).sum())(logp)
    return (pull == 0) & (advantage != 0)


def as_means(sums: Sums, tokens: Int[Array, "..."]) -> dict[str, Float[Array, "..."]]:
    """Sums over tokens divided by all tokens of their mini-batch, so that its stages add up."""
    return {
        name: x / jnp.maximum(tokens, 1) for name, x in sums.over_tokens.items()
    } | sums.weighted


def updates(visits: Mapping[str, np.ndarray]) -> np.ndarray:
    """`[K]`: the visits (mini-batch, stage) that had tokens and a finite gradient."""
    finite = np.isfinite(visits["loss"]) & np.isfinite(visits["grad_norm"])
    return (visits["share"] > 0) & finite


def count_updates(visits: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Number of optimizer steps made, and of those skipped for a gradient that is not finite."""
    done = updates(visits)
    return {"updates": int(done.sum()), "skipped": int(((visits["share"] > 0) & ~done).sum())}


def describe_policy(
    old_logp: Float[Array, "B T"],
    entropy: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    ref_logp: Float[Array, "B T"] | None = None,
) -> dict[str, Float[Array, ""]]:
    """Means over the response tokens of a batch before the update, in nats; KL to the reference.

    `rare_half` and `rare_quarter` are the shares of tokens with probability below 1/2 and 1/4.
    """
    mean = lambda x: batch_mean(x, mask)
    described = {
        "entropy": mean(entropy),
        "logp": mean(old_logp),
        "rare_half": mean(old_logp < jnp.log(0.5)),
        "rare_quarter": mean(old_logp < jnp.log(0.25)),
    }
    if ref_logp is not None:
        described["kl_reference"] = mean(kl.k3(old_logp, TokenData(mask, old_logp, ref_logp)))
    return described


def describe_mismatch(
    old_logp: Float[Array, "B T"], sampler_logp: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> dict[str, Float[Array, ""]]:
    """Distance in nats between the trainer's and the sampler's log-probs, and its cost in samples.

    `mismatch_ess` is the effective sample size of weights exp(old - sampler), as a share of tokens.
    """
    gap = jnp.where(mask, old_logp - sampler_logp, 0.0)
    weight = jnp.where(mask, jnp.exp(gap), 0.0)
    count, tiny = jnp.maximum(mask.sum(), 1), jnp.finfo(jnp.float32).tiny
    return {
        "mismatch_mean": jnp.abs(gap).sum() / count,
        "mismatch_max": jnp.abs(gap).max(),
        "mismatch_ess": jnp.square(weight.sum())
        / jnp.maximum(count * jnp.square(weight).sum(), tiny),
    }
