"""Causal grouped-query attention, one function per backend: `(q, k, v, segments) -> [R,L,H,D]`.

A token sees itself and the earlier tokens of its segment, with `window` only the nearest of them:
so many, itself included. With `segments` None each row is one right-padded sequence. Responses that
share a prompt are a segment each, and the prompt is another one, which they see too (`xla`).
"""

import logging
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.primitives import einsum, summed
from jaxrl_llm.models.sharding import BATCH, capability, current_mesh, fit, platform

Queries = Float[Array, "R L H D"]
Keys = Float[Array, "R L K D"]
Segments = Int[Array, "R L"] | None
WIDEST = 128  # head width of the kernels for GPUs
OLDEST = 8.0  # compute capability that they need
logger = logging.getLogger(__name__)


class Shared(NamedTuple):
    """The segment of each token's prompt, which it sees too, and the token's position after that."""

    prompts: Int[Array, "R L"]
    positions: Int[Array, "R L"]


def for_platform(
    q: Queries, k: Keys, v: Keys, segments: Segments, *, window: int | None = None
) -> Queries:
    """Attention by the fused kernel for the current mesh's devices, or the default ones."""
    return chosen()(q, k, v, segments, window=window)


def chosen() -> Callable[..., Queries]:
    """The kernel of `for_platform`: `gpu`, `splash`, or `xla` where there is no kernel.

    GPUs before Ampere, such as a T4, have none: neither Triton nor cuDNN takes them.
    """
    kernel = {"gpu": gpu, "tpu": splash}.get(platform(), xla)
    if kernel is gpu and (known := capability()) < OLDEST:
        _say_plain(known)
        return xla
    return kernel


def xla(
    q: Queries,
    k: Keys,
    v: Keys,
    segments: Segments,
    *,
    window: int | None = None,
    shared: Shared | None = None,
) -> Queries:
    """Plain XLA, for any platform: up to 8 blocks of queries, each against the keys up to its end.

    That is about half the work of full attention, and the scores of a block fit a CPU's cache. On a
    GPU, where each shape of a product is tuned for seconds, a block has 1,024 queries or more,
    unless a window makes small ones much cheaper.
    """
    rows, length, heads, size = q.shape
    groups = heads // k.shape[2]
    q = jnp.moveaxis(q.reshape(rows, length, -1, groups, size) * size**-0.5, 1, 3)
    k, v = jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2)
    least = 1024 if platform() == "gpu" and window is None else 64
    width = -(-length // min(8, max(1, length // least)))
    out = [
        _attend_block(q[..., start : start + width, :], k, v, segments, start, window, shared)
        for start in range(0, length, width)
    ]
    return jnp.moveaxis(jnp.concatenate(out, 3), 3, 1).reshape(rows, length, heads, size)


def gpu(q: Queries, k: Keys, v: Keys, segments: Segments, *, window: int | None = None) -> Queries:
    """NVIDIA: cuDNN for padded rows, Triton for packed ones; other dtypes are cast to bfloat16.

    cuDNN would take segments as a bias `[R,1,L,L]` and compute the gradient of it. What the kernels
    lack goes by XLA: packed rows within a window, heads wider than WIDEST, and in padded rows those
    whose width is no multiple of 8.
    """
    lacking = q.shape[3] % 8 if segments is None else window is not None
    if lacking or q.shape[3] > WIDEST:
        return xla(q, k, v, segments, window=window)
    dtype = q.dtype
    half = dtype if dtype in (jnp.bfloat16, jnp.float16) else jnp.bfloat16
    q, k, v = (x.astype(half) for x in (q, k, v))
    out = cudnn(q, k, v, window) if segments is None else triton(q, k, v, segments)
    return out.astype(dtype)


def cudnn(q: Queries, k: Keys, v: Keys, window: int | None = None) -> Queries:
    """cuDNN's flash attention on right-padded rows in half precision, run shard by shard."""
    length = q.shape[1]
    sides = None if window is None else (window - 1, 0)
    kernel = partial(
        jax.nn.dot_product_attention,
        is_causal=True,
        local_window_size=sides,
        implementation="cudnn",
    )
    q, k, v = (_padded(x, 2) for x in (q, k, v))  # the backward pass needs an even length
    return _by_shard(lambda q, k, v, _: kernel(q, k, v), q, k, v, None)[:, :length]


def triton(q: Queries, k: Keys, v: Keys, segments: Segments, *, interpret: bool = False) -> Queries:
    """Pallas' flash attention for GPUs, shard by shard; `interpret` runs it on any platform."""
    # imported here because newer JAX warns on import: tokamax, another package, is to replace it
    from jax.experimental.pallas.ops.gpu import attention as pallas_gpu

    length, size = q.shape[1], q.shape[3]
    q, k, v = (_padded(x, 128) for x in (q, k, v))
    segments = None if segments is None else _padded(segments, 128)
    blocks = pallas_gpu.BlockSizes(128, 64, 64, 64, 64, 64)

    def local(q, k, v, segments):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        attend: Any = pallas_gpu.mha
        return attend(q, k, v, segments, size**-0.5, True, blocks, num_warps=8, interpret=interpret)

    return _by_shard(local, q, k, v, segments)[:, :length]


def splash(
    q: Queries,
    k: Keys,
    v: Keys,
    segments: Segments,
    *,
    window: int | None = None,
    interpret: bool = False,
) -> Queries:
    """TPU's flash attention, shard by shard; `interpret` runs it on any platform."""
    from jax.experimental.pallas.ops.tpu import splash_attention as tpu_splash  # takes 0.1 s

    length, size = q.shape[1], q.shape[3]
    block = _splash_block(length)
    q, k, v = (_padded(_padded(x, block), 128, axis=3) for x in (q * size**-0.5, k, v))
    segments = None if segments is None else _padded(segments, block)
    sizes = tpu_splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        use_fused_bwd_kernel=True,
    )

    def local(q, k, v, segments):
        square = (q.shape[1], q.shape[1])
        mask: Any = tpu_splash.CausalMask(square)
        if window is not None:
            mask = tpu_splash.LocalMask(square, (window - 1, 0), 0)
        with jax.ensure_compile_time_eval():
            kernel: Any = tpu_splash.make_splash_mha_single_device(
                tpu_splash.MultiHeadMask([mask] * q.shape[2]),
                block_sizes=sizes,
                interpret=interpret,
            )
        heads_first = [jnp.swapaxes(x, 1, 2) for x in (q, k, v)]
        ids = None if segments is None else tpu_splash.SegmentIds(segments, segments)
        return jax.vmap(kernel)(*heads_first, segment_ids=ids).swapaxes(1, 2)

    return _by_shard(local, q, k, v, segments)[:, :length, :, :size]


@cache
def _say_plain(capability: float) -> None:
    """Says once that there is no fused attention, which is slower and takes more memory."""
    logger.warning(
        "attention goes by plain XLA: fused kernels need compute capability %s, this GPU has %s",
        OLDEST, capability,
    )  # fmt: skip


def _by_shard(kernel: Callable[..., Queries], q, k, v, segments) -> Queries:
    """Runs the kernel on each device's rows and heads; keys are repeated until they divide."""
    mesh = current_mesh()
    if mesh is None:
        return kernel(q, k, v, segments)
    batch, _, heads = fit(P(BATCH, None, "tensor"), q.shape[:3], mesh)
    if heads is not None:
        times = math.lcm(k.shape[2], mesh.shape["tensor"]) // k.shape[2]
        k, v = (jnp.repeat(x, times, axis=2) for x in (k, v))
    spec = P(batch, None, heads)
    rows = None if segments is None else P(batch)
    return jax.shard_map(
        kernel, in_specs=(spec, spec, spec, rows), out_specs=spec, check_vma=False
    )(q, k, v, segments)


def _padded(x, multiple: int, axis: int = 1):
    """Zeros at the end of an axis: causal queries never see them, and their segment is 0."""
    width = [(0, 0)] * x.ndim
    width[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, width)


def _splash_block(length: int) -> int:
    """512 to 1,024 columns, whichever pads the row least; a shorter row is one block."""
    if length < 512:
        return -(-length // 128) * 128
    return min(range(1024, 511, -128), key=lambda block: -(-length // block) * block)


def _attend_block(q, k, v, segments, start, window, shared):
    """Queries `[R,K,G,Q,D]` from column `start`, against keys `[R,K,L,D]` up to their end."""
    end, low = start + q.shape[3], 0 if window is None else max(0, start - window + 1)
    positions = jnp.arange(k.shape[2])[None]
    if shared is not None:  # what is near may be many columns before
        low, positions = 0, shared.positions
    k, v = k[:, :, low:end], v[:, :, low:end]
    behind = positions[:, start:end, None] - positions[:, None, low:end]
    visible = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    if segments is not None:
        of_key = segments[:, None, low:end]
        related = segments[:, start:end, None] == of_key
        if shared is not None:
            related |= shared.prompts[:, start:end, None] == of_key
        visible &= related
    scores = einsum("rkgqd,rkld->rkgql", q, k)
    scores = jnp.where(visible[:, None, None], scores, -1e30)
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))  # cancels out: no gradient
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    mixed = _mixed(weights.astype(v.dtype), v)
    return (mixed / total).astype(q.dtype)


@jax.custom_vjp
def _mixed(weights, v):
    """Values, mixed; the backward pass is our own, for `summed`."""
    return einsum("rkgql,rkld->rkgqd", weights, v, v.dtype)


def _mixed_backward(saved, gradient):
    weights, v = saved
    lines = (x.reshape(*x.shape[:2], -1, x.shape[-1]) for x in (weights, gradient))
    return einsum("rkgqd,rkld->rkgql", gradient, v, v.dtype), summed(*lines)


_mixed.defvjp(lambda weights, v: (_mixed(weights, v), (weights, v)), _mixed_backward)
