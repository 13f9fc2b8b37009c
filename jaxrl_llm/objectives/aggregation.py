"""Aggregation as a weight: `mask -> [B,T]`; the loss is always `sum(weight * per_token)`.

The weight is computed once over a whole mini-batch, so micro-batches, shards and accumulation steps
are slices that add up. Rows with an empty mask are padding and count nowhere.
"""

import jax.numpy as jnp

from jaxrl_llm.objectives.token_data import Mask, Tokens


def token_mean(mask: Mask) -> Tokens:
    """1 / (number of tokens): every token counts the same."""
    return mask / jnp.maximum(mask.sum(dtype=jnp.float32), 1.0)


def seq_mean_token_mean(mask: Mask) -> Tokens:
    """1 / (number of sequences * length of this one): every sequence counts the same."""
    length = mask.sum(1, keepdims=True, dtype=jnp.float32)
    return mask / jnp.maximum(length, 1.0) / _sequences(mask)


def seq_mean_token_sum(mask: Mask) -> Tokens:
    """1 / (number of sequences): tokens of a sequence add up."""
    return mask / _sequences(mask)


def constant_length(mask: Mask, *, length: int) -> Tokens:
    """1 / (number of sequences * a constant), Dr. GRPO's normaliser (arXiv:2503.20783)."""
    return mask / (_sequences(mask) * length)


def _sequences(mask):
    return jnp.maximum(mask.any(1).sum(dtype=jnp.float32), 1.0)
