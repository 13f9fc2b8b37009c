"""Causal grouped-query attention, one function a backend: `(q, k, v, segments) -> [R,L,H,D]`.

Token t sees the tokens up to t of its own segment; `segments` None means one right-padded sequence a row.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as tpu_splash
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.sharding import BATCH, current_mesh, fit

Queries = Float[Array, "R L H D"]
Keys = Float[Array, "R L K D"]
Segments = Int[Array, "R L"] | None


def xla(q: Queries, k: Keys, v: Keys, segments: Segments) -> Queries:
    """Plain XLA, for any platform: block after block of queries, each against the keys before its end.

    Half the work of a full square, and scores that fit a cache.
    """
    rows, length, heads, size = q.shape
    groups = heads // k.shape[2]
    q = jnp.moveaxis(q.reshape(rows, length, -1, groups, size) * size**-0.5, 1, 3)
    k, v = jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2)
    width = -(-length // min(8, max(1, length // 64)))
    out = [
        _attend_block(q[..., start : start + width, :], k, v, segments, start)
        for start in range(0, length, width)
    ]
    return jnp.moveaxis(jnp.concatenate(out, 3), 3, 1).reshape(rows, length, heads, size)


def cudnn(q: Queries, k: Keys, v: Keys, segments: Segments) -> Queries:
    """NVIDIA's fused flash attention; computes in bfloat16 where the model is not in half precision."""
    half = q.dtype if q.dtype in (jnp.bfloat16, jnp.float16) else jnp.bfloat16
    q_, k_, v_ = (x.astype(half) for x in (q, k, v))
    mask = _same_segment(segments)
    out = jax.nn.dot_product_attention(
        q_, k_, v_, mask=mask, is_causal=True, implementation="cudnn"
    )
    return out.astype(q.dtype)


def splash(q: Queries, k: Keys, v: Keys, segments: Segments, *, interpret: bool = False) -> Queries:
    """TPU's fused flash attention, run shard by shard; `interpret` runs its kernel on any platform."""
    length, size = q.shape[1], q.shape[3]
    tail, wide = -length % 128, -size % 128
    q, k, v = (jnp.pad(x, ((0, 0), (0, tail), (0, 0), (0, wide))) for x in (q * size**-0.5, k, v))
    if segments is None:
        segments = jnp.ones((q.shape[0], length), jnp.int32)
    segments = jnp.pad(segments, ((0, 0), (0, tail)))

    def local(q, k, v, segments):
        causal = tpu_splash.CausalMask((q.shape[1], q.shape[1]))
        with jax.ensure_compile_time_eval():
            kernel: Any = tpu_splash.make_splash_mha_single_device(
                tpu_splash.MultiHeadMask([causal] * q.shape[2]), interpret=interpret
            )
        heads_first = [jnp.swapaxes(x, 1, 2) for x in (q, k, v)]
        ids = tpu_splash.SegmentIds(segments, segments)
        return jax.vmap(kernel)(*heads_first, segment_ids=ids).swapaxes(1, 2)

    mesh = current_mesh()
    if mesh is not None:
        by_head = fit(P(BATCH, None, "tensor"), (k.shape[0], 1, k.shape[2]), mesh)
        spec = P(by_head[0], None, by_head[2])
        local = jax.shard_map(
            local, in_specs=(spec, spec, spec, P(by_head[0])), out_specs=spec, check_vma=False
        )
    return local(q, k, v, segments)[:, :length, :, :size]


def for_platform(q: Queries, k: Keys, v: Keys, segments: Segments) -> Queries:
    """The fused kernel of the default backend: cuDNN on NVIDIA, splash on TPU, else plain XLA."""
    return {"gpu": cudnn, "tpu": splash}.get(jax.default_backend(), xla)(q, k, v, segments)


def _attend_block(q, k, v, segments, start):
    """The queries `[R,K,G,Q,D]` from column `start` on, against all keys `[R,K,L,D]` up to their end."""
    end = start + q.shape[3]
    k, v = k[:, :, :end], v[:, :, :end]
    seen = jnp.arange(start, end)[:, None] >= jnp.arange(end)[None, :]
    seen = seen[None, None, None]
    if segments is not None:
        seen &= (segments[:, start:end, None] == segments[:, None, :end])[:, None, None]
    scores = jnp.einsum("rkgqd,rkld->rkgql", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(seen, scores, -1e30)
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    mixed = jnp.einsum("rkgql,rkld->rkgqd", weights.astype(v.dtype), v)
    return (mixed / total).astype(q.dtype)


def _same_segment(segments):
    if segments is None:
        return None
    return (segments[:, :, None] == segments[:, None, :])[:, None]
