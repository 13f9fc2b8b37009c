"""One token from each row of logits: truncation without sorting, noise fixed by the request."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

BLOCK = 256  # tokens in a block of the vocabulary


def token(
    logits: Float[Array, "S V"],
    identity: UInt32[Array, "S I"],
    *,
    temperature: Float[Array, ""] | None = None,
    top_p: Float[Array, ""] | None = None,
    top_k: Int[Array, ""] | None = None,
) -> tuple[Int[Array, "S"], Float[Array, "S"]]:
    """Tokens, and their log softmax(logits / temperature) before any truncation.

    A row's noise depends on its `identity` alone. Without a temperature it is the argmax.
    """
    greedy = temperature is None
    scaled = logits if greedy else logits / temperature
    shifted = scaled - scaled.max(-1, keepdims=True)
    weights = jnp.exp(shifted)
    sampled = lambda: categorical(truncate(weights, top_p, top_k), identity)
    chosen = _argmax(logits) if greedy else sampled()
    at = jnp.take_along_axis(shifted, chosen[:, None], -1)[:, 0]
    return chosen, at - jnp.log(weights.sum(-1))


def categorical(weights: Float[Array, "S V"], identity: UInt32[Array, "S I"]) -> Int[Array, "S"]:
    """A token with probability proportional to its weight: argmax(log weight + Gumbel noise) twice.

    First a block of the vocabulary by its sum, then a token in it, by V / 256 + 256 noise values.
    """
    rows, vocab = weights.shape
    weights = jnp.pad(weights, ((0, 0), (0, -vocab % BLOCK))).reshape(rows, -1, BLOCK)
    blocks = weights.shape[1]
    noise = jax.vmap(lambda i: jax.random.gumbel(_key(i), (blocks + BLOCK,)))(identity)
    block = _argmax(jnp.log(weights.sum(-1)) + noise[:, :blocks])
    inside = jnp.take_along_axis(weights, block[:, None, None], 1)[:, 0]
    return block * BLOCK + _argmax(jnp.log(inside) + noise[:, blocks:])


def truncate(
    weights: Float[Array, "S V"],
    top_p: Float[Array, ""] | None,
    top_k: Int[Array, ""] | None,
) -> Float[Array, "S V"]:
    """Weights of the top k, and of these the fewest with the share `top_p` of their sum; else 0.

    Ties with the smallest weight that is kept are kept too.
    """
    if top_k is not None:
        weights = _fewest(weights, lambda kept: kept.sum(-1, keepdims=True) >= top_k)
    if top_p is not None:
        goal = top_p * weights.sum(-1, keepdims=True)
        share = lambda kept: jnp.where(kept, weights, 0.0).sum(-1, keepdims=True)
        weights = _fewest(weights, lambda kept: share(kept) >= goal)
    return weights


def _fewest(
    weights: Float[Array, "S V"], enough: Callable[[Bool[Array, "S V"]], Bool[Array, "S 1"]]
):
    """The largest weights of each row that are `enough`, else 0: a threshold found bit by bit.

    Floats that are not negative are ordered like their bit patterns, so 31 passes find it exactly.
    """

    def set_bit(i, bits: Int[Array, "S 1"]):
        trial = bits | (1 << (30 - i))
        kept = weights >= jax.lax.bitcast_convert_type(trial, jnp.float32)
        return jnp.where(enough(kept), trial, bits)

    bits = jax.lax.fori_loop(0, 31, set_bit, jnp.zeros((weights.shape[0], 1), jnp.int32))
    threshold = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(weights >= threshold, weights, 0.0)


def _key(identity: UInt32[Array, "I"]):
    """A random key made of these numbers, folded in one after the other."""
    key = jax.random.key(identity[0])
    for i in range(1, identity.shape[0]):
        key = jax.random.fold_in(key, identity[i])
    return key


def _argmax(x: Float[Array, "S V"]) -> Int[Array, "S"]:
    """The first index of the maximum, in two reductions that vectorise."""
    best: Bool[Array, "S V"] = x == x.max(-1, keepdims=True)
    index = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    return jnp.where(best, index, x.shape[1] - 1).min(-1)
