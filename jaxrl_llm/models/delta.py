"""The gated delta rule (arXiv:2412.06464): per head a memory M `[K,V]`, in float32.

A token fades it, M = exp(g) M, corrects what it holds under the token's key, M += k (beta (v - k M))',
and reads it with the query, q M. Whole rows are computed in chunks: within one all corrections at once,
by the inverse of a triangular matrix, and from chunk to chunk in a scan, so that time and memory grow
with the length. With `segments` each of them begins with an empty memory.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.primitives import einsum
from jaxrl_llm.models.qwen2 import Delta, Linear, RMSNorm, Shape, linear
from jaxrl_llm.models.sharding import BATCH, constrain

CHUNK = 64  # tokens, a power of two
Segments = Int[Array, "R L"] | None


class GatedDelta(nnx.Module):
    """The gated delta rule in place of attention."""

    def __init__(self, shape: Shape, sizes: Delta, *, rngs: nnx.Rngs):
        mixed, values = (sizes.channels,), (sizes.heads * sizes.value_size,)
        into, heads = (shape.hidden_size,), (sizes.heads,)
        self.in_proj_qkv = linear("in_proj_qkv", mixed, into, shape, rngs)
        self.in_proj_z = linear("in_proj_z", values, into, shape, rngs)
        self.in_proj_b = linear("in_proj_b", heads, into, shape, rngs)
        self.in_proj_a = linear("in_proj_a", heads, into, shape, rngs)
        self.conv1d = Linear((*mixed, 1), (sizes.width,), rngs=rngs)  # never called
        self.A_log = nnx.Param(
            jnp.log(jax.random.uniform(rngs.params(), heads, minval=0.01, maxval=16))
        )
        self.dt_bias = nnx.Param(jnp.ones(heads))
        self.norm = RMSNorm(sizes.value_size, eps=shape.rms_norm_eps)
        self.out_proj = linear("out_proj", into, values, shape, rngs)
        self.sizes = sizes

    def __call__(self, x, segments=None, lengths=None):
        """The layer's output; with `lengths` also memory and inputs before each row's last token."""
        mixed = self.in_proj_qkv(x)
        parts = self._parts(x, convolved(mixed, self.conv1d.weight[...], segments))
        if lengths is None:
            return self._out(x, chunked(*parts, segments)[0])
        out, memory = chunked(*until(*parts, lengths - 1), segments)
        return self._out(x, out), memory, last(mixed, lengths - 1, self.sizes.width - 1)

    def step(self, x, memory, recent):
        """The same for one more token a sequence, `[S,1,D]`, from what is known of those before."""
        mixed = self.in_proj_qkv(x)
        here = convolved(mixed, self.conv1d.weight[...], None, recent)
        q, k, v, g, beta = (y[:, 0] for y in self._parts(x, here))
        out, memory = recurrent(q, k, v, g, beta, memory)
        return self._out(x, out[:, None]), memory, jnp.concatenate([recent, mixed], 1)[:, 1:]

    def _parts(self, x, mixed) -> tuple[Any, Any, Any, Any, Any]:
        """Queries, keys, values, log decays and rates of a convolution's result, in float32."""
        sizes = self.sizes
        keys = sizes.key_heads * sizes.key_size
        heads = lambda y, size: constrain(
            y.reshape(*y.shape[:2], -1, size), BATCH, None, "tensor", None
        )
        q, k, v = jnp.split(mixed, (keys, 2 * keys), -1)
        q, k, v = heads(q, sizes.key_size), heads(k, sizes.key_size), heads(v, sizes.value_size)
        decay = log_decay(self.in_proj_a(x), self.A_log[...], self.dt_bias[...])
        rate = jax.nn.sigmoid(self.in_proj_b(x)).astype(jnp.float32)
        return *units(q, k, sizes.heads), v.astype(jnp.float32), decay, rate

    def _out(self, x, out):
        """Normalised by head, times a gate, multiplied."""
        z = self.in_proj_z(x).reshape(out.shape).astype(jnp.float32)
        gated = (self.norm(out.astype(x.dtype)) * jax.nn.silu(z)).astype(x.dtype)
        return self.out_proj(gated.reshape(*x.shape[:2], -1))


def convolved(
    x: Float[Array, "R L C"], weight: Float[Array, "C 1 W"], segments: Segments, before: Any = None
) -> Float[Array, "R L C"]:
    """silu of a sum over the last W inputs of each channel, those `before` the row included."""
    length, width = x.shape[1], weight.shape[-1]
    if before is None:
        before = jnp.zeros((len(x), width - 1, x.shape[2]), x.dtype)
    every = jnp.concatenate([before, x], 1).astype(jnp.float32)
    total = 0.0
    for i in range(width):
        part, back = every[:, i : i + length], width - 1 - i
        if segments is not None and back:
            same = segments == jnp.pad(segments, ((0, 0), (back, 0)))[:, :length]
            part = jnp.where(same[..., None], part, 0)
        total += part * weight[:, 0, i].astype(jnp.float32)[None, None]
    return jax.nn.silu(jnp.asarray(total).astype(x.dtype))


def last(x: Float[Array, "R L C"], lengths: Int[Array, "R"], width: int) -> Float[Array, "R W C"]:
    """The last `width` of each row's first so many inputs, 0 where there are fewer."""
    at = lengths[:, None] - width + jnp.arange(width)[None]
    found = jnp.take_along_axis(x, jnp.maximum(at, 0)[..., None], 1)
    return jnp.where(at[..., None] >= 0, found, 0)


def log_decay(a: Float[Array, "R L H"], log_speed, bias) -> Float[Array, "R L H"]:
    """Logarithm of the factor by which a token fades the memory: never above 0."""
    a, log_speed, bias = (x.astype(jnp.float32) for x in (a, log_speed, bias))
    return -jnp.exp(log_speed)[None, None] * jax.nn.softplus(a + bias[None, None])


def units(q: Float[Array, "R L G K"], k: Float[Array, "R L G K"], heads: int):
    """Queries and keys of length one for each of so many heads; queries over sqrt(K)."""
    q, k = (jnp.repeat(_unit(x.astype(jnp.float32)), heads // x.shape[2], 2) for x in (q, k))
    return q * q.shape[-1] ** -0.5, k


def _unit(x):
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), -1, keepdims=True) + 1e-6)


def until(q, k, v, g, beta, lengths: Int[Array, "R"]):
    """The same of rows whose tokens change the memory up to these lengths only."""
    live = (jnp.arange(g.shape[1])[None] < lengths[:, None])[..., None]
    return q, k, v, jnp.where(live, g, 0), jnp.where(live, beta, 0)


def recurrent(q, k, v, g, beta, memory: Float[Array, "S H K V"]):
    """`(read [S,H,V], memory)` after one token a sequence."""
    memory = memory * jnp.exp(g)[..., None, None]
    change = (v - einsum("shk,shkv->shv", k, memory)) * beta[..., None]
    memory = memory + k[..., None] * change[..., None, :]
    return einsum("shk,shkv->shv", q, memory), memory


def chunked(
    q: Float[Array, "R L H K"],
    k: Float[Array, "R L H K"],
    v: Float[Array, "R L H V"],
    g: Float[Array, "R L H"],
    beta: Float[Array, "R L H"],
    segments: Segments,
) -> tuple[Float[Array, "R L H V"], Float[Array, "R H K V"]]:
    """Reads of all tokens of rows, and the memory after the last."""
    length = q.shape[1]
    size = min(CHUNK, 1 << (length - 1).bit_length())

    def cut(x):  # [N,R,H,C,...]
        x = jnp.pad(x, ((0, 0), (0, -length % size)) + ((0, 0),) * (x.ndim - 2))
        x = x.reshape(len(x), -1, size, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 3, 2)

    q, k, v, g, beta = (cut(x) for x in (q, k, v, g, beta))
    lower, under = jnp.tri(size), jnp.tri(size, k=-1)[None, None, None]
    # logarithms of the decay from token j to i: sums of their own, as in differences of long ones
    # a decay near 1 would be lost
    between = einsum("im,nrhmj->nrhij", lower, g[..., None] * under)
    pairs, start = lower[None, None, None] > 0, jnp.exp(g[..., :1] + between[..., 0])
    end, carried = jnp.exp(between[..., -1, :]), start[..., -1]
    if segments is not None:
        of = cut(segments[..., None])[:, :, :1, :]
        last = of[..., -1:]
        before = jnp.concatenate([last[:1] * 0 - 1, last[:-1]])
        pairs = pairs & (of[..., :, None] == of[..., None, :])
        start, end = jnp.where(of == before, start, 0), jnp.where(of == last, end, 0)
        carried = jnp.where(last == before, carried[..., None], 0)[..., 0]
    decay = jnp.where(pairs, jnp.exp(between), 0)
    rated = k * beta[..., None]
    within = einsum("nrhik,nrhjk->nrhij", rated, k) * decay * under
    solved = inverse(within)
    new = einsum("nrhij,nrhjv->nrhiv", solved, v * beta[..., None])
    held = einsum("nrhij,nrhjk->nrhik", solved, rated * start[..., None])
    scores = einsum("nrhik,nrhjk->nrhij", q, k) * decay
    each = new, held, scores, q * start[..., None], k * end[..., None], carried

    def chunk(memory, each):
        new, held, scores, q, k, carried = each
        change = new - einsum("rhik,rhkv->rhiv", held, memory)
        read = einsum("rhik,rhkv->rhiv", q, memory) + einsum("rhij,rhjv->rhiv", scores, change)
        return memory * carried[..., None, None] + einsum("rhik,rhiv->rhkv", k, change), read

    rows, heads = q.shape[1:3]
    empty = jnp.zeros((rows, heads, q.shape[-1], v.shape[-1]), jnp.float32)
    memory, read = jax.lax.scan(chunk, empty, each)
    read = jnp.moveaxis(jnp.moveaxis(read, 0, 1), 3, 2).reshape(rows, -1, heads, v.shape[-1])
    return read[:, :length], memory


def inverse(below: Float[Array, "*B C C"]) -> Float[Array, "*B C C"]:
    """That of 1 + `below`, which has numbers under its diagonal only; C is a power of two.

    From blocks to twice as large ones: powers of `below` would cancel where keys are alike.
    """
    size = below.shape[-1] // 2
    if not size:
        return jnp.ones_like(below)
    top, bottom = inverse(jnp.stack([below[..., :size, :size], below[..., size:, size:]]))
    corner = -einsum("...ij,...jk->...ik", bottom, below[..., size:, :size])
    corner = einsum("...ij,...jk->...ik", corner, top)
    rows = [top, jnp.zeros_like(top)], [corner, bottom]
    return jnp.concatenate([jnp.concatenate(row, -1) for row in rows], -2)
