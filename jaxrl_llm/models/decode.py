"""Generation on a CPU: prefill of whole prompts, then one token a call for every slot.

The cache is cut into blocks of columns, and a step walks over the blocks that hold something, so its cost
follows the longest live sequence, it compiles once, and a sequence's numbers do not depend on what else
is in the batch: a block beyond its end changes nothing, to the last bit.
"""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxrl_llm.models import product
from jaxrl_llm.models.sharding import BATCH, constrain, param_shardings


class Cache(NamedTuple):
    """Keys and values of N layers in B blocks of W columns, for S sequences of K heads of D.

    A key's columns come last: a query meets 8 or 128 of them in one vector instruction.
    """

    k: Float[Array, "N B S K D W"]
    v: Float[Array, "N B S K W D"]


@cache
def _moving(dtype, to):
    """The program that brings an array there in that precision, compiled once."""
    return jax.jit(lambda x: x.astype(dtype), out_shardings=to)


@dataclass(frozen=True)
class Decoder:
    """Generation by the model of a definition; `block` columns of the cache make a block.

    It computes on `mesh`, or on that set around the call.
    """

    definition: Any
    block: int
    mesh: Mesh | None = None
    static: ClassVar[bool] = False

    def weights(self, params):
        """The parameters where and in the precision that generation computes in; the same arrays if they are."""
        dtype = jnp.dtype(nnx.merge(self.definition, params).compute.dtype)
        where = jax.tree.map(lambda x: x.sharding, params)
        if self.mesh is not None:
            where = param_shardings(params, self.mesh)

        def move(x, to):
            if x.dtype == dtype and x.sharding.is_equivalent_to(to, x.ndim):
                return x
            return _moving(dtype, to)(x)

        return jax.tree.map(move, params, where)

    def grow(self, cache: Cache, columns: int) -> Cache:
        """The cache itself: it has room for all columns from the start."""
        del columns
        return cache

    def empty(self, params, slots: int, columns: int) -> Cache:
        """A cache for sequences of up to `columns` tokens."""
        model = nnx.merge(self.definition, params)
        shape = model.shape
        lead = (shape.num_layers, -(-columns // self.block), slots, shape.num_kv_heads)
        zeros = partial(jnp.zeros, dtype=model.compute.dtype)
        k = zeros((*lead, shape.head_dim, self.block))
        return _place(Cache(k, zeros((*lead, self.block, shape.head_dim))))

    def prefill(self, params, tokens: Int[Array, "P L"]) -> Cache:
        """Keys and values of right-padded prompts; columns beyond a prompt's end hold padding, never read."""
        model = nnx.merge(self.definition, params)
        x = model.embed(tokens)
        rope = model.rope(jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape))
        layer_def, layers = nnx.split(model.layers)

        def apply(x, layer):
            layer = nnx.merge(layer_def, layer)
            q, k, v = layer.qkv(x, rope)
            x = layer.finish(x, model.compute.attend(q, k, v, None))
            return constrain(x, BATCH, None, None), (k, v)

        _, (k, v) = jax.lax.scan(apply, x, layers)
        k, v = (_blocks(x, self.block) for x in (k, v))
        return _place(Cache(jnp.moveaxis(k, 3, -1), jnp.moveaxis(v, 3, -2)))

    def insert(
        self, cache: Cache, prompts: Cache, slot: Int[Array, "J"], which: Int[Array, "J"]
    ) -> Cache:
        """Copies prompt `which[j]` into slot `slot[j]`; a slot out of range is a lane without work.

        Blocks of padding that the cache has no room for stay behind.
        """
        blocks = min(prompts.k.shape[1], cache.k.shape[1])

        def copy(into, source):
            return into.at[:, :blocks, slot].set(source[:, :blocks, which], mode="drop")

        return _place(Cache(*map(copy, cache, prompts)))

    def decode(
        self, params, cache: Cache, token: Int[Array, "S"], position: Int[Array, "S"]
    ) -> tuple[Float[Array, "S V"], Cache]:
        """Reads one token of each sequence at its position: the next one's logits in float32, the longer cache."""
        model = nnx.merge(self.definition, params)
        rope = model.rope(position[:, None])
        layer_def, layers = nnx.split(model.layers)
        x = model.embed_tokens.weight[...][token[:, None]].astype(model.compute.dtype)

        def apply(carry, xs):
            x, cache = carry
            layer, i = nnx.merge(layer_def, xs[0]), xs[1]
            x = constrain(x, BATCH, None, None)
            q, k, v = (constrain(y, BATCH, None, "tensor", None) for y in layer.qkv(x, rope))
            cache = _write(cache, i, position, k[:, 0], v[:, 0])
            mixed = _attend(q[:, 0], cache, i, position)[:, None]
            return (layer.finish(x, mixed), cache), None

        each = (layers, jnp.arange(model.shape.num_layers))
        (x, cache), _ = jax.lax.scan(apply, (x, cache), each)
        hidden = model.norm(x)[:, 0]
        logits = product.einsum("sd,vd->sv", hidden, model.head.astype(hidden.dtype))
        logits = constrain(logits, BATCH, "tensor")  # the head stays where it is, logits travel
        return constrain(logits, (*BATCH, "tensor"), None), _place(cache)


def _attend(q: Float[Array, "S H D"], cache: Cache, layer, position) -> Float[Array, "S H D"]:
    """Softmax over the columns up to each sequence's position, block after block with a running maximum."""
    slots, heads, size = q.shape
    _, _, _, kv_heads, _, width = cache.k.shape
    q = (q * size**-0.5).reshape(slots, kv_heads, heads // kv_heads, size)

    def block(b, carry):
        top, total, mixed = carry
        scores = product.einsum("skgd,skdw->skgw", q, cache.k[layer, b])
        seen = b * width + jnp.arange(width)[None] <= position[:, None]
        scores = jnp.where(seen[:, None, None], scores, -1e30)
        high = jnp.maximum(top, scores.max(-1, keepdims=True))
        weights, fade = jnp.exp(scores - high), jnp.exp(top - high)
        v = cache.v[layer, b]
        add = product.einsum("skgw,skwd->skgd", weights.astype(v.dtype), v)
        return high, total * fade + weights.sum(-1, keepdims=True), mixed * fade + add

    start = jnp.full((*q.shape[:3], 1), -1e30, jnp.float32)
    carry = (start, jnp.zeros_like(start), jnp.zeros(q.shape, jnp.float32))
    _, total, mixed = jax.lax.fori_loop(0, position.max() // width + 1, block, carry)
    return (mixed / total).astype(q.dtype).reshape(slots, heads, size)


def _write(cache: Cache, layer, position, k: Float[Array, "S K D"], v: Float[Array, "S K D"]):
    """Puts one column a sequence at its position."""
    width, slots = cache.k.shape[-1], jnp.arange(position.shape[0])
    b, column = position // width, position % width
    return Cache(
        cache.k.at[layer, b, slots, :, :, column].set(k),
        cache.v.at[layer, b, slots, :, column].set(v),
    )


def _blocks(x: Float[Array, "N S L K D"], width: int) -> Float[Array, "N B S W K D"]:
    """Columns cut into blocks, the last one filled up with zeros."""
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % width), (0, 0), (0, 0)))
    return jnp.moveaxis(x.reshape(*x.shape[:2], -1, width, *x.shape[3:]), 2, 1)


def _place(cache: Cache) -> Cache:
    return Cache(*(constrain(x, None, None, BATCH, "tensor", None, None) for x in cache))
