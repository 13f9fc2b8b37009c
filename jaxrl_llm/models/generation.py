"""Generation with a key/value cache, one token per call for every slot (a sequence in the batch).

`CpuGenerator` and `AcceleratorGenerator` differ in the layout of weights and cache.

- On a CPU layers stay stacked, and the cache is cut into blocks of columns. A step visits only the
  blocks in use, so its cost follows the longest live sequence (1.4 to 4.3 times the tokens a
  second), and it compiles once. A block beyond a sequence's end changes nothing, to the last bit:
  results do not depend on the rest of the batch.
- On accelerators every layer has its own arrays, and no shape or trip count depends on data: in a
  scan all weights and the cache would be copied for every token, by their compilers' account. A
  step reads the whole cache that it is given, so the caller grows it with the longest sequence (1.0
  to 4.0 times the tokens a second). The table is in docs/benchmarks.md.
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
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models import lora, qwen2
from jaxrl_llm.models.primitives import einsum
from jaxrl_llm.models.sharding import BATCH, constrain, count, fit, param_shardings, split_over


class Cache(NamedTuple):
    """Keys and values of N layers, in B blocks of W columns, for S sequences and K heads of size D.

    Columns come last in `k`: one vector instruction multiplies a query by 8 or 128 of them.
    """

    k: Float[Array, "N B S K D W"]
    v: Float[Array, "N B S K W D"]


@dataclass(frozen=True)
class CpuGenerator:
    """Generation on CPUs, with a cache in blocks of `block` columns.

    `rounded` is the dtype of the policy that is sampled: `definition` may compute in a wider one,
    with weights rounded to it.
    """

    definition: Any
    block: int
    mesh: Mesh
    adapted: qwen2.Lora | None = None  # of the parameters given to `weights`; merged there
    rounded: DTypeLike = jnp.float32
    static: ClassVar[bool] = False

    def weights(self, params):
        """The parameters, placed and cast for generation; not copied where they are so already."""
        params = _merging(self.adapted)(params) if self.adapted else params
        wide = jnp.dtype(qwen2.settings(self.definition)[1].dtype)
        narrow = jnp.dtype(self.rounded)

        def move(x, to):
            if x.dtype == wide == narrow and x.sharding.is_equivalent_to(to, x.ndim):
                # where the copies have a mesh of their own it has to be on that
                here = getattr(x.sharding, "mesh", to.mesh) == to.mesh
                return x if here else jax.device_put(x, to)
            return _moving(narrow, wide, to)(x)

        return jax.tree.map(move, params, param_shardings(params, self.mesh))

    def grow(self, cache: Cache, columns: int) -> Cache:
        """The cache unchanged: it has room for all columns from the start."""
        del columns
        return cache

    def empty(self, slots: int, columns: int) -> Cache:
        """A cache of zeros for `slots` sequences of up to `columns` tokens."""
        shape, compute = qwen2.settings(self.definition)
        lead = (shape.num_layers, -(-columns // self.block), slots, shape.num_kv_heads)
        zeros = partial(jnp.zeros, dtype=compute.dtype)
        k = zeros((*lead, shape.head_dim, self.block))
        return _shard(Cache(k, zeros((*lead, self.block, shape.head_dim))))

    def prefill(self, params, tokens: Int[Array, "P L"]) -> Cache:
        """Keys and values of right-padded prompts; those of padding are never read."""
        model = nnx.merge(self.definition, params)
        x = model.embed(tokens)
        ropes = model.ropes(_columns(tokens))
        layer_def, layers = nnx.split(model.layers)

        def apply(x, each):
            layer, kind = each
            return _prefill_layer(model, nnx.merge(layer_def, layer), x, ropes, kind)

        _, (k, v) = jax.lax.scan(apply, x, (layers, model.kinds()))
        k, v = (_blocks(x, self.block) for x in (k, v))
        return _shard(Cache(jnp.moveaxis(k, 3, -1), jnp.moveaxis(v, 3, -2)))

    def insert(
        self, cache: Cache, prompts: Cache, slot: Int[Array, "J"], which: Int[Array, "J"]
    ) -> Cache:
        """Copies prompt `which[j]` into slot `slot[j]`; nothing where the slot is out of range.

        Blocks of padding that the cache has no room for are dropped.
        """
        blocks = min(prompts.k.shape[1], cache.k.shape[1])

        def copy(into, source):
            return into.at[:, :blocks, slot].set(source[:, :blocks, which], mode="drop")

        return _shard(Cache(*map(copy, cache, prompts)))

    def decode(
        self, params, cache: Cache, token: Int[Array, "S"], position: Int[Array, "S"]
    ) -> tuple[Float[Array, "S V"], Cache]:
        """Reads one token per sequence at its position: float32 logits of the next, new cache."""
        model = nnx.merge(self.definition, params)
        ropes, firsts = model.ropes(position[:, None]), _firsts(model, position)
        layer_def, layers = nnx.split(model.layers)
        x = _embedded(model, token)

        def apply(carry, xs):
            x, cache = carry
            layer, i, kind = nnx.merge(layer_def, xs[0]), *xs[1:]
            x, q, k, v = _token_qkv(layer, x, ropes[kind])
            cache = _write_block(cache, i, position, k, v)
            mixed = _attend_blocks(q, cache, i, position, firsts[kind])
            return (layer.finish(x, mixed[:, None]), cache), None

        each = (layers, jnp.arange(model.shape.num_layers), model.kinds())
        (x, cache), _ = jax.lax.scan(apply, (x, cache), each)
        return _logits(model, x), _shard(cache)


@cache
def _merging(adapted: qwen2.Lora):
    """The program that merges adapters; cached, so compiled once."""
    return jax.jit(partial(lora.merged, lora=adapted))


@cache
def _moving(narrow, wide, to):
    """The program that rounds an array, casts it and moves it to a sharding; cached, so compiled once."""
    kept = jnp.finfo(narrow)  # two casts XLA may take for none, as for GPUs
    rounded = lambda x: jax.lax.reduce_precision(x, kept.nexp, kept.nmant).astype(wide)
    return jax.jit(rounded, out_shardings=to)


def _attend_blocks(
    q: Float[Array, "S H D"], cache: Cache, layer, position, first
) -> Float[Array, "S H D"]:
    """Softmax over the columns from `first` to each position, block by block.

    With a running maximum: what a block without a column to see adds, the next one fades to 0.
    """
    slots, heads, size = q.shape
    _, _, _, kv_heads, _, width = cache.k.shape
    q = (q * size**-0.5).reshape(slots, kv_heads, heads // kv_heads, size)

    def block(b, carry):
        top, total, mixed = carry
        scores = einsum("skgd,skdw->skgw", q, cache.k[layer, b])
        seen = _seen(b * width + jnp.arange(width), position, first)
        scores = jnp.where(seen[:, None, None], scores, -1e30)
        high = jnp.maximum(top, scores.max(-1, keepdims=True))
        weights, fade = jnp.exp(scores - high), jnp.exp(top - high)
        v = cache.v[layer, b]
        add = einsum("skgw,skwd->skgd", weights.astype(v.dtype), v)
        return high, total * fade + weights.sum(-1, keepdims=True), mixed * fade + add

    start = jnp.full((*q.shape[:3], 1), -1e30, jnp.float32)
    carry = (start, jnp.zeros_like(start), jnp.zeros(q.shape, jnp.float32))
    _, total, mixed = jax.lax.fori_loop(0, position.max() // width + 1, block, carry)
    return (mixed / total).astype(q.dtype).reshape(slots, heads, size)


def _write_block(cache: Cache, layer, position, k: Float[Array, "S K D"], v: Float[Array, "S K D"]):
    """Writes one column per sequence at its position."""
    width, slots = cache.k.shape[-1], jnp.arange(position.shape[0])
    b, column = position // width, position % width
    return Cache(
        cache.k.at[layer, b, slots, :, :, column].set(k),
        cache.v.at[layer, b, slots, :, column].set(v),
    )


def _blocks(x: Float[Array, "N S L K D"], width: int) -> Float[Array, "N B S W K D"]:
    """Columns cut into blocks, the last one padded with zeros."""
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % width), (0, 0), (0, 0)))
    return jnp.moveaxis(x.reshape(*x.shape[:2], -1, width, *x.shape[3:]), 2, 1)


class LayerCache(NamedTuple):
    """Keys and values of one layer: S sequences, K heads of size D, C columns."""

    k: Float[Array, "S K C D"]
    v: Float[Array, "S K C D"]


@dataclass(frozen=True)
class AcceleratorGenerator:
    """Generation on accelerators, with a `LayerCache` per layer; a step reads all of the cache."""

    definition: Any
    mesh: Mesh
    adapted: qwen2.Lora | None = None  # of the parameters given to `weights`; merged there
    static: ClassVar[bool] = True

    def weights(self, params):
        """The parameters, placed and cast for generation, with `layers` as a list."""
        shardings = jax.tree.map(lambda x: x.sharding, self.weights_like(params))
        leaves, tree = jax.tree.flatten(shardings)
        return _copying(self, tuple(leaves), tree)(params)

    def weights_like(self, params):
        """Shapes, dtypes and shardings of `weights`, nothing allocated."""
        where = param_shardings(jax.eval_shape(self._merged, params), self.mesh)
        one = jax.tree.map(lambda to: NamedSharding(self.mesh, P(*to.spec[1:])), where["layers"])
        shapes = jax.eval_shape(self._apart, params)
        where |= {"layers": [one] * len(shapes["layers"])}
        like = lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to)
        return jax.tree.map(like, shapes, where)

    def _merged(self, params):
        return lora.merged(params, self.adapted)

    def _apart(self, params):
        shape, compute = qwen2.settings(self.definition)
        params = jax.tree.map(lambda x: x.astype(compute.dtype), self._merged(params))
        layer = lambda i: jax.tree.map(itemgetter(i), params["layers"])
        return params | {"layers": [layer(i) for i in range(shape.num_layers)]}

    def empty(self, slots: int, columns: int) -> list[LayerCache]:
        """A cache of zeros for `slots` sequences of up to `columns` tokens."""
        shape, compute = qwen2.settings(self.definition)
        zeros = jnp.zeros((slots, shape.num_kv_heads, columns, shape.head_dim), compute.dtype)
        return [_shard(LayerCache(zeros, zeros)) for _ in range(shape.num_layers)]

    def grow(self, cache: list[LayerCache], columns: int) -> list[LayerCache]:
        """Grows the cache in place, layer by layer: only one layer exists twice at a time."""
        for i, layer in enumerate(cache):
            cache[i] = _grown(layer, columns)
        return cache

    def prefill(self, params, tokens: Int[Array, "P L"]) -> list[LayerCache]:
        """Keys and values of right-padded prompts; those of padding are never read."""
        model, layers = self._model(params)
        x, cache = model.embed(tokens), []
        ropes = model.ropes(_columns(tokens))
        for layer, kind in zip(layers, model.shape.kind_of, strict=True):
            x, new = _prefill_layer(model, layer, x, ropes, kind)
            cache.append(_shard(LayerCache(*(jnp.swapaxes(y, 1, 2) for y in new))))
        return cache

    def insert(
        self,
        cache: Sequence[LayerCache],
        prompts: Sequence[LayerCache],
        slot: Int[Array, "J"],
        which: Int[Array, "J"],
    ) -> list[LayerCache]:
        """Copies prompt `which[j]` into slot `slot[j]`; nothing where that is out of range."""
        columns = min(cache[0].k.shape[2], prompts[0].k.shape[2])

        def copy(into, source):
            source = constrain(source[which, :, :columns], None, "tensor", None, None)
            return into.at[slot, :, :columns].set(source, mode="drop")

        return [_shard(LayerCache(*map(copy, *pair))) for pair in zip(cache, prompts, strict=True)]

    def decode(
        self,
        params,
        cache: Sequence[LayerCache],
        token: Int[Array, "S"],
        position: Int[Array, "S"],
    ) -> tuple[Float[Array, "S V"], list[LayerCache]]:
        """Reads one token per sequence at its position: float32 logits of the next, new cache."""
        model, layers = self._model(params)
        ropes, firsts, longer = model.ropes(position[:, None]), _firsts(model, position), []
        x = _embedded(model, token)
        for layer, (k, v), kind in zip(layers, cache, model.shape.kind_of, strict=True):
            x, q, new_k, new_v = _token_qkv(layer, x, ropes[kind])
            k, v = _write(k, new_k, position), _write(v, new_v, position)
            x = layer.finish(x, _attend(q, k, v, position, firsts[kind])[:, None])
            longer.append(_shard(LayerCache(k, v)))
        return _logits(model, x), longer

    def _model(self, params):
        """The model, and its layers one by one."""
        first = jax.tree.map(lambda x: x[None], params["layers"][0])
        model = nnx.merge(self.definition, params | {"layers": first})
        layer = nnx.split(model.layers)[0]
        return model, [nnx.merge(layer, each) for each in params["layers"]]


@cache
def _copying(
    generator: AcceleratorGenerator, shardings: tuple[NamedSharding, ...], tree: Any
) -> Any:
    """The program of `AcceleratorGenerator.weights`; cached, so compiled once."""
    return jax.jit(generator._apart, out_shardings=jax.tree.unflatten(tree, shardings))


def _attend(
    q: Float[Array, "S H D"],
    k: Float[Array, "S K C D"],
    v: Float[Array, "S K C D"],
    position,
    first,
) -> Float[Array, "S H D"]:
    """Softmax over the columns from `first` to each sequence's position."""
    slots, heads, size = q.shape
    kv_heads, columns = k.shape[1:3]
    q = (q * size**-0.5).reshape(slots, kv_heads, heads // kv_heads, size)
    scores = einsum("skgd,skcd->skgc", q, k)
    seen = _seen(jnp.arange(columns), position, first)
    scores = jnp.where(seen[:, None, None], scores, -1e30)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    mixed = einsum("skgc,skcd->skgd", weights.astype(v.dtype), v)
    mixed = mixed / weights.sum(-1, keepdims=True)
    return mixed.astype(q.dtype).reshape(slots, heads, size)


def _write(cache: Float[Array, "S K C D"], new: Float[Array, "S K D"], position: Int[Array, "S"]):
    """Writes one column per sequence at its position, on the device that holds it."""
    mesh = jax.sharding.get_abstract_mesh()
    rows, heads = fit(P(*_apart(cache.shape[1])), cache.shape[:2], mesh)
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
    return _shard(LayerCache(*(jnp.pad(x, more) for x in cache)))


def _shard(cache):
    """The cache in its place."""
    lead = [None] * (cache.k.ndim - 4)
    return type(cache)(*(constrain(x, *lead, *_apart(x.shape[-3]), None, None) for x in cache))


def _apart(heads: int):
    """Axes over which sequences, and these key-value heads, are split: all sequences if heads do not divide."""
    divide = heads % count(split_over("tensor")) == 0
    return (BATCH, "tensor") if divide else ((*BATCH, "tensor"), None)


def _columns(tokens: Int[Array, "P L"]) -> Int[Array, "P L"]:
    """The position of each token of right-padded prompts."""
    return jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)


def _firsts(model, position: Int[Array, "S"]):
    """The first column that each sequence's token sees, by kind of layer; None if that is 0."""
    windows = [kind.window for kind in model.shape.distinct]
    if not any(windows):
        return qwen2.OfKind([None])
    return qwen2.OfKind([position - (2**30 if w is None else w - 1) for w in windows])


def _seen(columns: Int[Array, "C"], position: Int[Array, "S"], first) -> Bool[Array, "S C"]:
    """The columns that each sequence's token sees."""
    seen = columns[None] <= position[:, None]
    return seen if first is None else seen & (columns[None] >= first[:, None])


def _prefill_layer(model, layer, x, ropes, kind):
    """One layer on whole prompts: its output, and its keys and values."""
    q, k, v = layer.qkv(x, ropes[kind])
    x = layer.finish(x, model.attend(q, k, v, None, kind))
    return constrain(x, BATCH, None, None), (k, v)


def _token_qkv(layer, x: Float[Array, "S 1 D"], rope):
    """A layer's input, and the queries, keys and values of one token a sequence, sharded."""
    x, qkv = constrain(x, BATCH, None, None), layer.qkv(x, rope)
    rows, heads = _apart(qkv[1].shape[2])
    return x, *(constrain(y, rows, None, heads, None)[:, 0] for y in qkv)


def _embedded(model, token: Int[Array, "S"]) -> Float[Array, "S 1 D"]:
    found = model.embed_tokens.weight[...][token[:, None]]
    return model.scaled(found.astype(model.compute.dtype))


def _logits(model, x: Float[Array, "S 1 D"]) -> Float[Array, "S V"]:
    """float32 logits of the next token."""
    hidden = model.norm(x)[:, 0]
    logits = einsum("sd,vd->sv", hidden, model.head.astype(hidden.dtype))
    logits = constrain(logits, BATCH, "tensor")  # moves the logits instead of the head
    return constrain(logits, (*BATCH, "tensor"), None)
