"""Generation with a key/value cache, one token per call for every slot (a sequence in the batch).

`ScannedGenerator`, for small models on CPUs, and `UnrolledGenerator` differ in the layout of weights and cache.

Layers of a linear recurrence keep a `State` in place of keys and values. What has read a token cannot
read it again, as attention can, so `prefill` stops before the last token of a prompt, which is decoded
first, and `decode` is told which sequences are `live`.

Layers that read the keys and values of others have no cache, and no part in `prefill`.

With `routed` the experts of each token are kept beside the cache, at the token's column (`Chosen`), so
that a trainer can send it to the same ones.

- Scanned layers stay stacked, and the cache is cut into blocks of columns. A step visits only the
  blocks in use, so its cost follows the longest live sequence (1.4 to 4.3 times the tokens a
  second), and it compiles once. A block beyond a sequence's end changes nothing, to the last bit:
  results do not depend on the rest of the batch.
- Unrolled every layer has its own arrays, and no shape or trip count depends on data: in a scan all
  weights would be copied for every token, on CPUs too, which takes time once a layer has megabytes,
  and on accelerators the cache. A step reads the whole cache that it is given, so the caller grows
  it with the longest sequence (1.0 to 4.0 times the tokens a second). The table is in
  docs/benchmarks.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import getitem
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models import lora, qwen2
from jaxrl_llm.models.primitives import capped, einsum
from jaxrl_llm.models.sharding import (
    AXES,
    BATCH,
    constrain,
    count,
    fit,
    on_each_device,
    param_shardings,
    split_over,
)


class State(NamedTuple):
    """State of N layers of a linear recurrence for S sequences: the memory of H heads, in float32,
    and the last W inputs of the convolution.
    """

    memory: Float[Array, "*N S H K V"]
    recent: Float[Array, "*N S W C"]


class Cache(NamedTuple):
    """Keys and values of N layers, in B blocks of W columns, for S sequences and K heads of size D.

    Columns come last in `k`: one vector instruction multiplies a query by 8 or 128 of them.
    """

    k: Float[Array, "N B S K D W"]
    v: Float[Array, "N B S K W D"]


class Chosen(NamedTuple):
    """The experts of each token of S sequences in N layers, -1 where it is not known; C columns."""

    experts: Int[Array, "S C N K"]


Caches = list[Cache | State | Chosen]


@dataclass(frozen=True)
class ScannedGenerator:
    """Generation by a scan over the layers, with a cache in blocks of `block` columns, as CPUs do it best.

    `rounded` is the dtype of the policy that is sampled: `definition` may compute in a wider one,
    with weights rounded to it.
    """

    definition: Any
    block: int
    mesh: Mesh
    adapted: qwen2.Lora | None = None  # of the parameters, if `weights` merges them
    rounded: DTypeLike = jnp.float32
    routed: bool = False
    static: ClassVar[bool] = False

    def weights(self, params):
        """The parameters, placed and cast for generation; not copied where they are so already."""
        shape, compute = qwen2.settings(self.definition)
        if self.adapted or shape.lora:  # whose base may be of 8 bits
            params = _merging(self.adapted)(params)
        wide, narrow = jnp.dtype(compute.dtype), jnp.dtype(self.rounded)

        def move(x, to):
            if x.dtype == wide == narrow and x.sharding.is_equivalent_to(to, x.ndim):
                # where the copies have a mesh of their own it has to be on that
                here = getattr(x.sharding, "mesh", to.mesh) == to.mesh
                return x if here else jax.device_put(x, to)
            return _moving(narrow, wide, to)(x)

        return jax.tree.map(move, params, param_shardings(params, self.mesh))

    def empty(self, slots: int, columns: int) -> Caches:
        """A cache of zeros for `slots` sequences of up to `columns` tokens, a part a layer of a period."""
        shape, _ = qwen2.settings(self.definition)
        layers, blocks = shape.stretches[0].number, -(-columns // self.block)

        def cache(zeros, kv_heads, size):
            lead = (layers, blocks, slots, kv_heads)
            return Cache(zeros((*lead, size, self.block)), zeros((*lead, self.block, size)))

        kinds = shape.kind_of[: shape.period]
        return _empty(self, kinds, cache, (layers, slots), columns)

    def prefill(self, params, tokens: Int[Array, "P L"], lengths: Int[Array, "P"]) -> Caches:
        """Cache and states after prompts of these lengths, right-padded; keys of padding are never read."""
        model = nnx.merge(self.definition, params)
        x = model.embed(tokens)
        ropes = model.ropes(_columns(tokens))
        definitions, each = model.stacks(model.inputs(tokens, x))[0]

        def period(x, each):
            left, chosen = [], []
            for (definition, fixed), (layer, _, into, kind) in zip(definitions, each, strict=True):
                layer, kind = nnx.merge(definition, layer), kind if fixed is None else fixed
                x, new, experts = _prefill_layer(model, layer, x, ropes, kind, lengths, into)
                left.append(new)
                chosen.append(experts)
            return x, (left, chosen if self.routed else [])

        def one(left):
            if isinstance(left, State):
                return left
            k, v = (_blocks(x, self.block) for x in left)
            return Cache(jnp.moveaxis(k, 3, -1), jnp.moveaxis(v, 3, -2))

        each, chosen = jax.lax.scan(period, x, each)[1]
        return [*(_shard(one(left)) for left in each), *_all_layers(model.shape, [chosen])]

    def insert(
        self, cache: Caches, prompts: Caches, slot: Int[Array, "J"], which: Int[Array, "J"]
    ) -> Caches:
        """Copies prompt `which[j]` into slot `slot[j]`; nothing where the slot is out of range."""

        def copy(into, source):  # blocks of padding that the cache has no room for are dropped
            blocks = min(into.shape[1], source.shape[1])
            return into.at[:, :blocks, slot].set(source[:, :blocks, which], mode="drop")

        return _inserted(cache, prompts, slot, which, copy)

    def decode(
        self,
        params,
        cache: Caches,
        token: Int[Array, "S"],
        position: Int[Array, "S"],
        live: Bool[Array, "S"] | None = None,
    ) -> tuple[Float[Array, "S V"], Caches]:
        """Reads one token per sequence at its position: float32 logits of the next, new cache.

        Sequences that are not `live` (None: all are) keep their states and experts.
        """
        model = nnx.merge(self.definition, params)
        ropes, firsts = model.ropes(position[:, None]), _firsts(model, position)
        x, inputs = _embedded(model, token)
        (definitions, each), *reading = model.stacks(inputs)
        cache, old = _without_experts(cache)

        def period(carry, xs):
            (x, cache), (each, i), new, chosen = carry, xs, [], []
            for (definition, fixed), (layer, _, into, kind), layer_cache in zip(
                definitions, each, cache, strict=True
            ):
                layer, kind = nnx.merge(definition, layer), kind if fixed is None else fixed
                if isinstance(layer_cache, State):
                    now = State(*(y[i] for y in layer_cache))
                    x, state, experts = _token_state(layer, x, now, live, into)
                    new.append(
                        State(*(y.at[i].set(z) for y, z in zip(layer_cache, state, strict=True)))
                    )
                else:
                    x, q, k, v, gate = _token_qkv(layer, x, ropes[kind])
                    new.append(_write_block(layer_cache, i, position, k, v))
                    mixed = _attend_blocks(q, new[-1], i, position, firsts[kind])
                    y = layer.self_attn.out(mixed[:, None], gate)
                    x, experts = layer.finish(x, y, into)
                chosen.append(experts)
            return (x, new), chosen if old else []

        def reader(x, each, first, definitions):
            chosen = []
            for j, ((definition, kind), (layer, _, into, _)) in enumerate(
                zip(definitions, each, strict=True), first
            ):
                layer = nnx.merge(definition, layer)
                i, stack = divmod(model.shape.source(j), model.shape.period)
                x, q, gate = _token_queries(layer, x, ropes[kind], cache[stack].k.shape[3])
                mixed = _attend_blocks(q, cache[stack], i, position, firsts[kind])
                x, experts = layer.finish(x, layer.self_attn.out(mixed[:, None], gate), into)
                chosen.append(experts)
            return x, chosen if old else []

        stretch, *others = model.shape.stretches
        (x, cache), *chosen = jax.lax.scan(period, (x, cache), (each, jnp.arange(stretch.number)))
        for (definitions, each), other in zip(reading, others, strict=True):
            one = partial(reader, first=other.first, definitions=definitions)
            x, here = jax.lax.scan(one, x, each)
            chosen.append(here)
        new = _all_layers(model.shape, chosen)
        return _logits(model, x), [*map(_shard, cache), *_with_experts(old, new, position, live)]


@cache
def _merging(adapted: qwen2.Lora | None):
    """The program that merges adapters and widens a base of 8 bits; cached, so compiled once."""
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
        seen = _visible(b * width + jnp.arange(width), position, first)
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


LayerCaches = list[LayerCache | State | Chosen]


@dataclass(frozen=True)
class UnrolledGenerator:
    """Generation layer by layer, each with its `LayerCache`; a step reads all of the cache."""

    definition: Any
    mesh: Mesh
    adapted: qwen2.Lora | None = None  # of the parameters, if `weights` merges them
    routed: bool = False
    static: ClassVar[bool] = True

    def weights(self, params):
        """The parameters, placed and cast for generation, with `layers` as a list."""
        shardings = jax.tree.map(lambda x: x.sharding, self.weights_like(params))
        leaves, tree = jax.tree.flatten(shardings)
        return _copying(self, tuple(leaves), tree)(params)

    def weights_like(self, params):
        """Shapes, dtypes and shardings of `weights`, nothing allocated."""
        where = param_shardings(jax.eval_shape(self._merged, params), self.mesh)
        one = lambda to: NamedSharding(self.mesh, P(*to.spec[1:]))
        shapes = jax.eval_shape(self._apart, params)
        shape, _ = qwen2.settings(self.definition)
        where |= {"layers": qwen2.unstacked(where["layers"], shape, lambda to, _: one(to))}
        like = lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to)
        return jax.tree.map(like, shapes, where)

    def _merged(self, params):
        return lora.merged(params, self.adapted)

    def _apart(self, params):
        shape, compute = qwen2.settings(self.definition)
        params = jax.tree.map(lambda x: x.astype(compute.dtype), self._merged(params))
        return params | {"layers": qwen2.unstacked(params["layers"], shape, getitem)}

    def empty(self, slots: int, columns: int) -> LayerCaches:
        """A cache of zeros for `slots` sequences of up to `columns` tokens."""
        kinds = _kinds_of_own(qwen2.settings(self.definition)[0])
        cache = lambda zeros, kv_heads, size: LayerCache(
            *[zeros((slots, kv_heads, columns, size))] * 2
        )
        return _empty(self, kinds, cache, (slots,), columns)

    def grow(self, cache: LayerCaches, columns: int) -> LayerCaches:
        """Grows the cache in place, layer by layer: only one layer exists twice at a time."""
        for i, layer in enumerate(cache):
            cache[i] = layer if isinstance(layer, State) else _grown(layer, columns)
        return cache

    def prefill(self, params, tokens: Int[Array, "P L"], lengths: Int[Array, "P"]) -> LayerCaches:
        """Cache and states after prompts of these lengths, right-padded; keys of padding are never read."""
        model, layers = self._model(params)
        x, cache, chosen = model.embed(tokens), [], []
        ropes, inputs = model.ropes(_columns(tokens)), model.inputs(tokens, x)
        for i, kind in enumerate(_kinds_of_own(model.shape)):
            into = _of_layer(inputs, i)
            x, new, experts = _prefill_layer(model, layers[i], x, ropes, kind, lengths, into)
            state = isinstance(new, State)
            new = new if state else LayerCache(*(jnp.swapaxes(y, 1, 2) for y in new))
            cache.append(_shard(new))
            chosen.append(experts)
        return [*cache, *_each_layer(model.shape, chosen if self.routed else [])]

    def insert(
        self,
        cache: LayerCaches,
        prompts: LayerCaches,
        slot: Int[Array, "J"],
        which: Int[Array, "J"],
    ) -> LayerCaches:
        """Copies prompt `which[j]` into slot `slot[j]`; nothing where that is out of range."""

        def copy(into, source):
            columns = min(into.shape[2], source.shape[2])
            source = constrain(source[which, :, :columns], None, "tensor", None, None)
            return into.at[slot, :, :columns].set(source, mode="drop")

        return _inserted(cache, prompts, slot, which, copy)

    def decode(
        self,
        params,
        cache: LayerCaches,
        token: Int[Array, "S"],
        position: Int[Array, "S"],
        live: Bool[Array, "S"] | None = None,
    ) -> tuple[Float[Array, "S V"], LayerCaches]:
        """Reads one token per sequence at its position: float32 logits of the next, new cache.

        Sequences that are not `live` (None: all are) keep their states and experts.
        """
        model, layers = self._model(params)
        ropes, firsts, longer = model.ropes(position[:, None]), _firsts(model, position), []
        x, inputs = _embedded(model, token)
        (cache, old), chosen = _without_experts(cache), []
        for i, (layer, kind) in enumerate(zip(layers, model.shape.kind_of, strict=True)):
            layer_cache, into = cache[model.shape.source(i)], _of_layer(inputs, i)
            if isinstance(layer_cache, State):
                x, state, experts = _token_state(layer, x, layer_cache, live, into)
                longer.append(_shard(state))
                chosen.append(experts)
                continue
            if i < len(cache):
                x, q, new_k, new_v, gate = _token_qkv(layer, x, ropes[kind])
                k = _write(layer_cache.k, new_k, position)
                v = _write(layer_cache.v, new_v, position)
                longer.append(_shard(LayerCache(k, v)))
            else:
                k, v = longer[model.shape.source(i)]
                x, q, gate = _token_queries(layer, x, ropes[kind], k.shape[1])
            mixed = _attend(q, k, v, position, firsts[kind])[:, None]
            x, experts = layer.finish(x, layer.self_attn.out(mixed, gate), into)
            chosen.append(experts)
        new = _each_layer(model.shape, chosen if old else [])
        return _logits(model, x), [*longer, *_with_experts(old, new, position, live)]

    def _model(self, params):
        """The model, and its layers one by one."""
        shape, layers = qwen2.settings(self.definition)[0], params["layers"]
        stack = lambda one: [layers[one.first + i] for i in range(one.period)]
        first = [layer for one in shape.stretches for layer in stack(one)]
        first = [jax.tree.map(lambda x: x[None], layer) for layer in first]
        model = nnx.merge(self.definition, params | {"layers": qwen2.named(first, shape)})
        each = zip(shape.stretches, model.stacks(qwen2.LayerInputs()), strict=True)
        definitions = [of for one, (some, _) in each for of, _ in some * one.number]
        return model, [nnx.merge(*pair) for pair in zip(definitions, layers, strict=True)]


@cache
def _copying(generator: UnrolledGenerator, shardings: tuple[NamedSharding, ...], tree: Any) -> Any:
    """The program of `UnrolledGenerator.weights`; cached, so compiled once."""
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
    seen = _visible(jnp.arange(columns), position, first)
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
def _grown(cache: LayerCache | Chosen, columns: int) -> LayerCache | Chosen:
    if isinstance(cache, Chosen):
        more = ((0, 0), (0, columns - cache.experts.shape[1]), (0, 0), (0, 0))
        return _shard(Chosen(jnp.pad(cache.experts, more, constant_values=-1)))
    more = ((0, 0), (0, 0), (0, columns - cache.k.shape[2]), (0, 0))
    return LayerCache(*_shard(LayerCache(*(jnp.pad(x, more) for x in cache))))


def _empty(generator, kinds, cache, lead: tuple[int, ...], columns: int) -> list[Any]:
    """A cache before the first token: `cache(zeros, heads, size)` is that of a kind of attention."""
    shape, compute = qwen2.settings(generator.definition)
    zeros = partial(jnp.zeros, dtype=compute.dtype)
    sizes: Any = shape.delta

    def one(kind):
        if not shape.distinct[kind].delta:
            return cache(zeros, *shape.heads_of(shape.distinct[kind]))
        memory = jnp.zeros((*lead, sizes.heads, sizes.key_size, sizes.value_size))
        return State(memory, zeros((*lead, sizes.width - 1, sizes.channels)))

    layers = [_shard(one(kind)) for kind in kinds]
    if not (generator.routed and shape.mixture):
        return layers
    size = lead[-1], columns, shape.num_layers, shape.mixture.chosen
    return [*layers, _shard(Chosen(jnp.full(size, -1, jnp.int16)))]


def _each_layer(shape: qwen2.Shape, chosen: list[Int[Array, "R L K"]]) -> list[Chosen]:
    """Those of rows of tokens, from the first layers' experts, or none."""
    if not chosen:
        return []
    experts = jnp.stack(chosen, 2).astype(jnp.int16)
    rest = ((0, 0), (0, 0), (0, shape.num_layers - len(chosen)), (0, 0))
    return [_shard(Chosen(jnp.pad(experts, rest, constant_values=-1)))]


def _all_layers(shape: qwen2.Shape, stretches: list[list[Int[Array, "n R L K"]]]) -> list[Chosen]:
    """As `_each_layer`, from what scans over the stretches give."""
    flat = lambda one: jnp.stack(one, 1).reshape(-1, *one[0].shape[1:])
    return _each_layer(shape, [layer for one in stretches if one for layer in flat(one)])


def _without_experts(cache: Sequence[Any]) -> tuple[list[Any], list[Chosen]]:
    """The cache, and the experts beside it, if it has them."""
    routed = bool(cache) and isinstance(cache[-1], Chosen)
    return ([*cache[:-1]], [cache[-1]]) if routed else ([*cache], [])


def _with_experts(old: list[Chosen], new: list[Chosen], position, live) -> list[Chosen]:
    """The old ones, and of each live sequence the new token's at its position."""

    def put(experts, new, column):
        return experts.at[jnp.arange(len(experts)), column].set(new[:, 0], mode="drop")

    if not old:
        return []
    experts = old[0].experts
    # beyond the last column nothing is written
    column = position if live is None else jnp.where(live, position, experts.shape[1])
    place = on_each_device(put, P(AXES), P(AXES))
    return [_shard(Chosen(place(experts, new[0].experts, column)))]


def _inserted(cache: list[Any], prompts: list[Any], slot, which, copy) -> list[Any]:
    """The cache with prompt `which[j]` in slot `slot[j]`; `copy` does that for keys and values."""

    def one(slots, prompts):
        if isinstance(slots, State):  # of a layer, or of several
            lead = (slice(None),) * (slots.memory.ndim - 4)
            put = lambda x, y: x.at[(*lead, slot)].set(y[(*lead, which)], mode="drop")
            return jax.tree.map(put, slots, prompts)
        if not isinstance(slots, Chosen):
            return type(slots)(*map(copy, slots, prompts))
        columns = min(slots.experts.shape[1], prompts.experts.shape[1])
        source = prompts.experts[which, :columns]
        return Chosen(slots.experts.at[slot, :columns].set(source, mode="drop"))

    return [_shard(one(*pair)) for pair in zip(cache, prompts, strict=True)]


def _of_layer(inputs: qwen2.LayerInputs, layer: int) -> qwen2.LayerInputs:
    """Those of one layer."""
    return jax.tree.map(lambda x: x[layer], inputs)


def _shard(cache: Any) -> Any:
    """The cache in its place."""
    if isinstance(cache, Chosen):
        return Chosen(constrain(cache.experts, AXES, None, None, None))
    if isinstance(cache, State):
        lead, (rows, heads) = [None] * (cache.memory.ndim - 4), _apart(cache.memory.shape[-3])
        memory = constrain(cache.memory, *lead, rows, heads, None, None)
        return State(memory, constrain(cache.recent, *lead, rows, None, heads))
    lead = [None] * (cache.k.ndim - 4)
    return type(cache)(*(constrain(x, *lead, *_apart(x.shape[-3]), None, None) for x in cache))


def _apart(heads: int):
    """Axes over which sequences, and these key-value heads, are split: all sequences if heads do not divide."""
    divide = heads % count(split_over("tensor")) == 0
    return (BATCH, "tensor") if divide else ((*BATCH, "tensor"), None)


def _kinds_of_own(shape: qwen2.Shape) -> tuple[int, ...]:
    """The kinds of the layers that have keys and values, or a state, of their own."""
    return shape.kind_of[: shape.num_layers - shape.shared_layers]


def _columns(tokens: Int[Array, "P L"]) -> Int[Array, "P L"]:
    """The position of each token of right-padded prompts."""
    return jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)


def _firsts(model, position: Int[Array, "S"]):
    """The first column that each sequence's token sees, by kind of layer; None if that is 0."""
    windows = [kind.window for kind in model.shape.distinct]
    if not any(windows):
        return qwen2.OfKind([None])
    return qwen2.OfKind([position - (2**30 if w is None else w - 1) for w in windows])


def _visible(columns: Int[Array, "C"], position: Int[Array, "S"], first) -> Bool[Array, "S C"]:
    """The columns that each sequence's token sees."""
    mask = columns[None] <= position[:, None]
    return mask if first is None else mask & (columns[None] >= first[:, None])


def _prefill_layer(model, layer, x, ropes, kind, lengths, inputs):
    """One layer on whole prompts: its output, its keys and values, or its state, and the experts."""
    if layer.linear_attn is not None:
        y, *state = layer.linear_attn(layer.before(x), lengths=lengths)
        x, chosen = layer.finish(x, y, inputs)
        return constrain(x, BATCH, None, None), State(*state), chosen
    q, k, v, gate = layer.qkv(x, ropes[kind])
    mixed = model.attend(q, k, v, None, kind)
    x, chosen = layer.finish(x, layer.self_attn.out(mixed, gate), inputs)
    return constrain(x, BATCH, None, None), (k, v), chosen


def _token_qkv(layer, x: Float[Array, "S 1 D"], rope):
    """A layer's input; queries, keys and values of one token a sequence, sharded; the gate."""
    x, (*qkv, gate) = constrain(x, BATCH, None, None), layer.qkv(x, rope)
    rows, heads = _apart(qkv[1].shape[2])
    return x, *(constrain(y, rows, None, heads, None)[:, 0] for y in qkv), gate


def _token_queries(layer, x: Float[Array, "S 1 D"], rope, kv_heads: int):
    """`_token_qkv` of a layer that reads another's keys and values, of so many heads."""
    x = constrain(x, BATCH, None, None)
    q, gate = layer.self_attn.queries(layer.before(x), rope)
    rows, heads = _apart(kv_heads)
    return x, constrain(q, rows, None, heads, None)[:, 0], gate


def _token_state(layer, x: Float[Array, "S 1 D"], state: State, live, inputs):
    """Output of a layer of a recurrence for one token a sequence, its new state, and the experts."""
    x = constrain(x, BATCH, None, None)
    y, *new = layer.linear_attn.step(layer.before(x), *state)
    if live is not None:
        one = lambda x, y: jnp.where(jnp.expand_dims(live, range(1, x.ndim)), x, y)
        new = map(one, new, state)
    x, chosen = layer.finish(x, y, inputs)
    return x, State(*new), chosen


def _embedded(model, token: Int[Array, "S"]):
    """Input of the first layer `[S,1,D]`, and those of each layer."""
    rows = lambda table: table.weight[...][token[:, None]].astype(model.compute.dtype)
    x = model.scaled(rows(model.embed_tokens))
    if not model.shape.per_layer:
        return x, qwen2.LayerInputs()
    return x, qwen2.LayerInputs(model.of_layers(rows(model.embed_tokens_per_layer), x))


def _logits(model, x: Float[Array, "S 1 D"]) -> Float[Array, "S V"]:
    """float32 logits of the next token."""
    hidden = model.norm(x)[:, 0]
    logits = einsum("sd,vd->sv", hidden, model.head.astype(hidden.dtype))
    logits = constrain(logits, BATCH, "tensor")  # moves the logits instead of the head
    logits = constrain(logits, (*BATCH, "tensor"), None)
    return capped(logits, model.shape.logit_cap)
