"""Generation on accelerators: every layer has arrays of its own, and no shape or trip count depends on data.

Weights sliced out of a stack, or a cache that is stacked, would be copied for every token. A program reads the
whole cache that it is given; who calls it grows the cache with the longest sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxrl_llm.models import product, sharding
from jaxrl_llm.models.sharding import BATCH, constrain


class LayerCache(NamedTuple):
    """Keys and values of a layer in C columns, for S sequences of K heads of D."""

    k: Float[Array, "S K C D"]
    v: Float[Array, "S K C D"]


@dataclass(frozen=True)
class Unrolled:
    """Generation by the model of a definition on the devices of a mesh; a cache is a sequence of layers'."""

    definition: Any
    mesh: Mesh
    static: ClassVar[bool] = True

    def weights(self, params):
        """The parameters where and in the precision that generation computes in, the layers apart."""
        places, tree = jax.tree.flatten(
            jax.tree.map(lambda x: x.sharding, self.weights_like(params))
        )
        return _copying(self, tuple(places), tree)(params)

    def weights_like(self, params):
        """Shapes and places of `weights`."""
        where = sharding.param_shardings(params, self.mesh)
        one = jax.tree.map(lambda to: NamedSharding(self.mesh, P(*to.spec[1:])), where["layers"])
        shapes = jax.eval_shape(self._apart, params)
        where |= {"layers": [one] * len(shapes["layers"])}
        like = lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to)
        return jax.tree.map(like, shapes, where)

    def _apart(self, params):
        dtype = nnx.merge(self.definition, params).compute.dtype
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        count = len(jax.tree.leaves(params["layers"])[0])
        each = [jax.tree.map(itemgetter(i), params["layers"]) for i in range(count)]
        return params | {"layers": each}

    def empty(self, params, slots: int, columns: int) -> list[LayerCache]:
        """A cache for sequences of up to `columns` tokens."""
        model, layers = self._model(params)
        shape = model.shape
        zeros = jnp.zeros((slots, shape.num_kv_heads, columns, shape.head_dim), model.compute.dtype)
        return [_place(LayerCache(zeros, zeros)) for _ in layers]

    def grow(self, cache: list[LayerCache], columns: int) -> list[LayerCache]:
        """The cache with more columns, made layer by layer: only one of them is there twice."""
        for i, layer in enumerate(cache):
            cache[i] = _grown(layer, columns)
        return cache

    def prefill(self, params, tokens: Int[Array, "P L"]) -> list[LayerCache]:
        """Keys and values of right-padded prompts; columns beyond a prompt's end hold padding, never read."""
        model, layers = self._model(params)
        x, cache = model.embed(tokens), []
        rope = model.rope(jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape))
        for layer in layers:
            q, k, v = layer.qkv(x, rope)
            x = constrain(layer.finish(x, model.compute.attend(q, k, v, None)), BATCH, None, None)
            cache.append(_place(LayerCache(*(jnp.swapaxes(y, 1, 2) for y in (k, v)))))
        return cache

    def insert(
        self,
        cache: Sequence[LayerCache],
        prompts: Sequence[LayerCache],
        slot: Int[Array, "J"],
        which: Int[Array, "J"],
    ) -> list[LayerCache]:
        """Copies prompt `which[j]` into slot `slot[j]`; a slot out of range is a lane without work."""
        columns = min(cache[0].k.shape[2], prompts[0].k.shape[2])

        def copy(into, source):
            source = constrain(source[which, :, :columns], None, "tensor", None, None)
            return into.at[slot, :, :columns].set(source, mode="drop")

        return [_place(LayerCache(*map(copy, *pair))) for pair in zip(cache, prompts, strict=True)]

    def decode(
        self,
        params,
        cache: Sequence[LayerCache],
        token: Int[Array, "S"],
        position: Int[Array, "S"],
    ) -> tuple[Float[Array, "S V"], list[LayerCache]]:
        """Reads one token of each sequence at its position: the next one's logits in float32, the longer cache."""
        model, layers = self._model(params)
        rope, longer = model.rope(position[:, None]), []
        x = model.embed_tokens.weight[...][token[:, None]].astype(model.compute.dtype)
        for layer, (k, v) in zip(layers, cache, strict=True):
            x = constrain(x, BATCH, None, None)
            q, *new = (constrain(y, BATCH, None, "tensor", None) for y in layer.qkv(x, rope))
            k, v = (_write(x, y[:, 0], position) for x, y in zip((k, v), new, strict=True))
            x = layer.finish(x, _attend(q[:, 0], k, v, position)[:, None])
            longer.append(_place(LayerCache(k, v)))
        hidden = model.norm(x)[:, 0]
        logits = product.einsum("sd,vd->sv", hidden, model.head.astype(hidden.dtype))
        logits = constrain(logits, BATCH, "tensor")  # the head stays where it is, logits travel
        return constrain(logits, (*BATCH, "tensor"), None), longer

    def _model(self, params):
        """The model, and its layers one by one."""
        first = jax.tree.map(lambda x: x[None], params["layers"][0])
        model = nnx.merge(self.definition, params | {"layers": first})
        layer = nnx.split(model.layers)[0]
        return model, [nnx.merge(layer, each) for each in params["layers"]]


@cache
def _copying(decoder: Unrolled, places: tuple[NamedSharding, ...], tree: Any) -> Any:
    """The program that copies a decoder's weights to these places, compiled once."""
    return jax.jit(decoder._apart, out_shardings=jax.tree.unflatten(tree, places))


def _attend(
    q: Float[Array, "S H D"], k: Float[Array, "S K C D"], v: Float[Array, "S K C D"], position
) -> Float[Array, "S H D"]:
    """Softmax over the columns up to each sequence's position."""
    slots, heads, size = q.shape
    kv_heads, columns = k.shape[1:3]
    q = (q * size**-0.5).reshape(slots, kv_heads, heads // kv_heads, size)
    scores = product.einsum("skgd,skcd->skgc", q, k)
    seen = jnp.arange(columns)[None] <= position[:, None]
    scores = jnp.where(seen[:, None, None], scores, -1e30)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    mixed = product.einsum("skgc,skcd->skgd", weights.astype(v.dtype), v)
    mixed = mixed / weights.sum(-1, keepdims=True)
    return mixed.astype(q.dtype).reshape(slots, heads, size)


def _write(cache: Float[Array, "S K C D"], new: Float[Array, "S K D"], position: Int[Array, "S"]):
    """Puts one column a sequence at its position, on the device that holds it."""
    mesh = jax.sharding.get_abstract_mesh()
    rows, heads = sharding.fit(P(BATCH, "tensor"), cache.shape[:2], mesh)
    here = P(rows, heads)

    def put(cache, new, position):
        slot, head = (jnp.arange(n) for n in cache.shape[:2])
        return cache.at[slot[:, None], head[None], position[:, None]].set(new)

    return jax.shard_map(put, in_specs=(here, here, P(rows)), out_specs=here, check_vma=False)(
        cache, new, position
    )


@partial(jax.jit, static_argnums=1)
def _grown(cache: LayerCache, columns: int) -> LayerCache:
    more = ((0, 0), (0, 0), (0, columns - cache.k.shape[2]), (0, 0))
    return _place(LayerCache(*(jnp.pad(x, more) for x in cache)))


def _place(cache: LayerCache) -> LayerCache:
    return LayerCache(*(constrain(x, BATCH, "tensor", None, None) for x in cache))
