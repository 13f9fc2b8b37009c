"""The sum over each token's experts, in blocks: no expert has a limit, and no token is dropped.

Rows (a token for one of its experts) are sorted by expert and cut into blocks of a single expert; a
loop goes over the blocks there are. So arithmetic is that of the chosen experts alone and a block to
fill up for each, memory that of a block beside the sum, and rows of padding cost nothing.
`jax.lax.ragged_dot` would need room for all choices on one device (docs/models.md).

Experts stay on their devices, as the vocabulary does, and tokens, being smaller, move.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.models.primitives import einsum, up_to, whole_rows, whole_shards
from jaxrl_llm.models.sharding import BATCH, VOCAB, on_each_device, platform, split_over

BLOCK = 512  # rows of an expert that are multiplied at a time, at most
ROUND = 8
FEW = {"cpu": 0, "gpu": 512, "tpu": 512}  # tokens that are multiplied by all experts

Apply = Callable[[Any, Float[Array, "B D"]], Float[Array, "B D"]]


class Routed(NamedTuple):
    """Tokens for experts: `x`, what the `router` sees of them, and which are `live`; the others get 0.

    `replayed` are their experts where these are chosen already (-1: they are not).
    """

    x: Float[Array, "R L D"]
    router: Float[Array, "R L D"]
    live: Bool[Array, "R L"]
    replayed: Int[Array, "R L K"] | None = None


def apply_experts(
    route: Callable[..., tuple[Int[Array, "R L K"], Float[Array, "R L K"]]],
    apply: Apply,
    inputs: Routed,
    gate: Any,
    experts: Any,
) -> tuple[Float[Array, "R L D"], Int[Array, "R L K"]]:
    """The sum of `weight * apply(expert, x)` over a token's experts, and which these are.

    `route(gate, inputs.router, inputs.replayed)` has experts and weights. Arrays of `experts` have a
    leading axis of experts.
    """
    rows, number = len(inputs.x), len(jax.tree.leaves(experts)[0])
    fsdp, tensor, axes = split_over("fsdp"), split_over("tensor"), split_over(*VOCAB)

    def local(inputs, gate, experts):
        x, seen, live, replayed = inputs
        choice, weights = route(gate, seen, replayed)
        chosen = jnp.where(live[..., None], choice, number)  # an expert that no device has
        # tokens move to the experts: a group's rows are on all of its devices from here on
        gather = lambda y: jax.lax.all_gather(y, fsdp, tiled=True)
        group, chosen, weights = gather(x), gather(chosen), gather(weights)
        count = len(jax.tree.leaves(experts)[0])
        here = chosen - jax.lax.axis_index(axes) * count
        here = jnp.where((here >= 0) & (here < count) & (chosen < number), here, count)
        size = -(-here.size // number)  # if all experts are chosen equally often
        block = min(BLOCK, -(-size // ROUND) * ROUND)
        flat = (y.reshape(-1, y.shape[-1]) for y in (group, here, weights))
        few = math.prod(group.shape[:-1]) <= FEW[platform()]
        total: Any = _by_all if few else _summed
        found = total(apply, block, *flat, experts).reshape(group.shape).astype(x.dtype)
        # a token's experts may lie on several devices: their sums are added, each row going home
        found = jax.lax.psum_scatter(found, fsdp, tiled=True)
        return jax.lax.psum(found, tensor), choice

    place = on_each_device(local, (P(BATCH), P(), P(VOCAB)), P(BATCH))
    inputs, experts = jax.tree.map(whole_rows, inputs), jax.tree.map(whole_shards, experts)
    return jax.tree.map(lambda y: y[:rows], place(inputs, gate, experts))


def _by_all(apply, block, x, chosen, weights, experts):
    """The sum by every expert on every token: quicker where reading the experts takes longer."""
    del block
    number = len(jax.tree.leaves(experts)[0])
    spread = jnp.sum(jax.nn.one_hot(chosen, number) * weights[..., None], 1)
    each = jax.vmap(apply, (0, None))(experts, x)
    return einsum("te,etd->td", spread, each.astype(jnp.float32))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _summed(
    apply: Apply,
    block: int,
    x: Float[Array, "T D"],
    chosen: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    experts: Any,
) -> Float[Array, "T D"]:
    """The float32 sum; `chosen` beyond the last expert adds nothing."""
    blocks = _Blocks(chosen, len(jax.tree.leaves(experts)[0]), block)

    def one(i, out):
        expert, token, place = blocks.at(i)
        y = _weighted(apply, _of(expert, experts), _some(x, token), _some(weights.ravel(), place))
        return _added(out, token, y)

    return up_to(blocks.most, blocks.used, one, jnp.zeros(x.shape, jnp.float32))


def _backward(apply, block, saved, gradient):
    x, chosen, weights, experts = saved
    blocks, flat = _Blocks(chosen, len(jax.tree.leaves(experts)[0]), block), weights.ravel()

    def one(i, out):
        expert, token, place = blocks.at(i)
        arguments = _of(expert, experts), _some(x, token), _some(flat, place)
        _, pull = jax.vjp(partial(_weighted, apply), *arguments)
        d_expert, d_x, d_weights = pull(_some(gradient, token))
        d_experts = jax.tree.map(
            lambda all_, one: all_.at[expert].add(one.astype(all_.dtype)), out[0], d_expert
        )
        return d_experts, _added(out[1], token, d_x), _added(out[2], place, d_weights)

    zeros = jax.tree.map(lambda y: jnp.zeros(y.shape, jnp.float32), (experts, x, flat))
    found = up_to(blocks.most, blocks.used, one, zeros)
    like = lambda y, as_: y.astype(as_.dtype)
    d_experts, d_x, d_weights = jax.tree.map(like, found, (experts, x, flat))
    return d_x, None, d_weights.reshape(weights.shape), d_experts


_summed.defvjp(lambda *args: (_summed(*args), args[2:]), _backward)


class _Blocks:
    """Rows sorted by expert, in blocks of a single one; `used` of `most` blocks have rows."""

    def __init__(self, chosen: Int[Array, "T K"], number: int, block: int):
        self.tokens, self.choices = chosen.shape
        self.block, self.most = block, chosen.size // block + number
        # sorted, the rows of an expert lie together; choices of other devices' come last
        self.order = jnp.argsort(chosen.ravel())
        experts = jnp.arange(number + 1)
        self.starts = jnp.searchsorted(chosen.ravel()[self.order], experts).astype(jnp.int32)
        each = -(-jnp.diff(self.starts) // block)
        self.last = jnp.cumsum(each)
        self.first, self.used = self.last - each, self.last[-1]

    def at(self, i):
        """The expert of block i, its rows' tokens, and their places among all choices.

        Rows to fill up have numbers of their own beyond the last, so that none is there twice.
        """
        expert = jnp.searchsorted(self.last, i, side="right")
        extra = jnp.arange(self.block)
        row = self.starts[expert] + (i - self.first[expert]) * self.block + extra
        there = row < self.starts[expert + 1]
        place = self.order.at[row].get(mode="fill", fill_value=0)
        token = jnp.where(there, place // self.choices, self.tokens + extra)
        return expert, token, jnp.where(there, place, self.order.size + extra)


def _weighted(apply, expert, x, weights):
    return apply(expert, x).astype(jnp.float32) * weights[:, None].astype(jnp.float32)


def _of(expert, experts):
    """The arrays of one expert."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, expert, keepdims=False), experts)


def _some(x, index):
    """Rows of x, 0 for those beyond the last."""
    return x.at[index].get(mode="fill", fill_value=0, unique_indices=True)


def _added(out, index, rows):
    return out.at[index].add(rows.astype(out.dtype), mode="drop", unique_indices=True)
