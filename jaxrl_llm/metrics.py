"""What a training step reports, as sums that add up over micro-batches, shards and stages."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.objectives import Objective, kl

Tokens = Float[Array, "R C"]


def token_sums(
    objective: Objective,
    logp: Tokens,
    old_logp: Tokens,
    ref_logp: Tokens,
    advantage: Tokens,
    weight: Tokens,
    mask: Bool[Array, "R C"],
) -> dict[str, Float[Array, ""]]:
    """Sums over the tokens at hand; `*_count` are divided by `tokens` in `as_means`.

    `policy`, `penalty` and `kl` are weighted like the loss. A token counts as clipped where the surrogate
    has lost its gradient: `clip` at the bounds, `clip_dual` at the dual clip (A < 0, ratio above).
    """
    surrogate, penalty = objective.per_token(logp, old_logp, ref_logp, advantage)
    pull = jax.grad(lambda x: objective.surrogate(x, old_logp, advantage).sum())(logp)
    stage = mask & (weight > 0)
    lost = stage & (pull == 0) & (advantage != 0)
    dual = (advantage < 0) & (logp > old_logp)
    return {
        "policy": jnp.sum(weight * surrogate),
        "penalty": jnp.sum(weight * penalty),
        "kl": jnp.sum(weight * kl.k3(logp, ref_logp)),
        "clip_count": jnp.sum(lost & ~dual, dtype=jnp.float32),
        "clip_dual_count": jnp.sum(lost & dual, dtype=jnp.float32),
        "moved_count": jnp.sum(jnp.where(mask, old_logp - logp, 0.0)),
        "share_count": jnp.sum(stage, dtype=jnp.float32),
        "tokens": jnp.sum(mask, dtype=jnp.float32),
    }


def as_means(sums: dict[str, Float[Array, ""]]) -> dict[str, Float[Array, ""]]:
    """Counts to shares of all tokens of the mini-batch, so that the stages of a step add up."""
    tokens = jnp.maximum(sums["tokens"], 1.0)
    means = {k.removesuffix("_count"): v / tokens for k, v in sums.items() if k.endswith("_count")}
    return means | {k: v for k, v in sums.items() if not k.endswith("_count")}
