"""Qwen2.5 in Flax NNX; `graph` splits the model into a definition and a tree of parameters."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxrl_llm.models import attention, primitives
from jaxrl_llm.models.primitives import precision
from jaxrl_llm.models.sharding import BATCH, constrain, gathered

Hidden = Float[Array, "R L D"]


@dataclass(frozen=True)
class Shape:
    """The architecture: everything that the parameters' shapes and values depend on.

    >>> shape = jl.Shape(64, 128, 384, num_layers=4, num_heads=4, num_kv_heads=2, tied=True)
    >>> shape.head_dim
    32
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    tied: bool
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_length: int = 32_768

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads


@dataclass(frozen=True)
class Compute:
    """How the model is computed: dtype, attention kernel, what the backward pass recomputes.

    In float32 products keep all bits on every device, but the default `attend` computes in bfloat16
    on a GPU (`attention.xla` does not). `remat` wraps a layer: `jax.checkpoint` keeps only its
    input, `partial(jax.checkpoint, policy=...)` keeps what the policy names, None keeps everything.

    >>> jl.Compute(dtype="bfloat16", attend=jl.attention.xla, remat=None).dtype
    'bfloat16'
    """

    dtype: DTypeLike = jnp.float32
    attend: Callable[..., Float[Array, "R L H D"]] = attention.for_platform
    remat: Callable[[Callable], Callable] | None = jax.checkpoint


class Linear(nnx.Module):
    """y = x W' + b with W `[*out, *in]` as in Hugging Face files, but heads as a separate axis."""

    def __init__(self, out: tuple[int, ...], into: tuple[int, ...], *, bias: bool, rngs: nnx.Rngs):
        scale = math.prod(into) ** -0.5  # keeps the variance of the input
        self.weight = nnx.Param(scale * rngs.params.normal((*out, *into)))
        self.bias = nnx.Param(jnp.zeros(out)) if bias else None
        self.contracted = len(into)

    def __call__(self, x):
        n = self.contracted
        w = self.weight[...].astype(x.dtype)
        dims = (tuple(range(x.ndim - n, x.ndim)), tuple(range(w.ndim - n, w.ndim)))
        y = jax.lax.dot_general(x, w, (dims, ((), ())), precision(x, w))
        return y if self.bias is None else y + _like(self.bias[...], y)


class RMSNorm(nnx.Module):
    """x / rms(x) * weight, computed in float32."""

    def __init__(self, size: int, *, eps: float):
        self.weight = nnx.Param(jnp.ones(size))
        self.eps = eps

    def __call__(self, x):
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + self.eps)
        return (wide * scale).astype(x.dtype) * _like(self.weight[...], x)


class SelfAttention(nnx.Module):
    """Grouped-query attention with rotary positions and biases on q, k and v."""

    def __init__(self, shape: Shape, *, rngs: nnx.Rngs):
        heads, kv_heads = (shape.num_heads, shape.head_dim), (shape.num_kv_heads, shape.head_dim)
        into = (shape.hidden_size,)
        self.q_proj = Linear(heads, into, bias=True, rngs=rngs)
        self.k_proj = Linear(kv_heads, into, bias=True, rngs=rngs)
        self.v_proj = Linear(kv_heads, into, bias=True, rngs=rngs)
        self.o_proj = Linear(into, heads, bias=False, rngs=rngs)

    def qkv(self, x, rope):
        """Queries, keys and values, with rotary positions in the first two."""
        return rotate(self.q_proj(x), rope), rotate(self.k_proj(x), rope), self.v_proj(x)


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: Shape, *, rngs: nnx.Rngs):
        wide, narrow = (shape.intermediate_size,), (shape.hidden_size,)
        self.gate_proj = Linear(wide, narrow, bias=False, rngs=rngs)
        self.up_proj = Linear(wide, narrow, bias=False, rngs=rngs)
        self.down_proj = Linear(narrow, wide, bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, shape: Shape, *, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = SelfAttention(shape, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = MLP(shape, rngs=rngs)

    def __call__(self, x, rope, attend):
        return self.finish(x, attend(*self.qkv(x, rope)))

    def qkv(self, x, rope):
        """Queries, keys and values of the normalised input."""
        return self.self_attn.qkv(self.input_layernorm(x), rope)

    def finish(self, x, mixed):
        """The rest of the layer, from attention's output `mixed` on."""
        x = x + self.self_attn.o_proj(mixed)
        return x + self.mlp(self.post_attention_layernorm(x))


class Embedding(nnx.Module):
    """A table `[V,D]`, for tokens going in or for logits coming out."""

    def __init__(self, shape: Shape, *, rngs: nnx.Rngs):
        table = rngs.params.normal((shape.vocab_size, shape.hidden_size))
        self.weight = nnx.Param(shape.hidden_size**-0.5 * table)


class Qwen2(nnx.Module):
    """The decoder; parameters have their Hugging Face names, layers are stacked on axis 0."""

    def __init__(self, shape: Shape, compute: Compute = Compute(), *, rngs: nnx.Rngs):
        self.shape, self.compute = shape, compute
        self.embed_tokens = Embedding(shape, rngs=rngs)

        @nnx.split_rngs(splits=shape.num_layers)
        @nnx.vmap
        def stacked(rngs):
            return Layer(shape, rngs=rngs)

        self.layers = stacked(rngs)
        self.norm = RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.lm_head = None if shape.tied else Embedding(shape, rngs=rngs)

    def __call__(
        self,
        tokens: Int[Array, "R L"],
        positions: Int[Array, "R L"],
        segments: Int[Array, "R L"] | None = None,
        *,
        offsets: Float[Array, "N L D"] | None = None,
    ) -> Hidden:
        """Hidden states after the last norm; multiply by `head` for logits.

        `offsets` are added to the input of each layer, for gradients with respect to it.
        """
        x = self.embed(tokens)
        rope = self.rope(positions)
        layer_def, layers = nnx.split(self.layers)

        def apply(x, layer, offset):
            if offset is not None:
                x = x + offset[None].astype(x.dtype)
            attend = lambda q, k, v: self.compute.attend(q, k, v, segments)
            weights = gathered(layer, self.compute.dtype)
            x = nnx.merge(layer_def, weights)(x, rope, attend)
            return constrain(x, BATCH, None, None)

        if self.compute.remat is not None:
            apply = self.compute.remat(apply)
        each = nnx.to_pure_dict(layers), offsets
        x, _ = jax.lax.scan(lambda x, layer: (apply(x, *layer), None), x, each)
        return self.norm(x)

    def embed(self, tokens: Int[Array, "R L"]) -> Hidden:
        """The rows of the embedding table for these tokens, in the compute dtype."""
        return primitives.rows(self.embed_tokens.weight[...], tokens, self.compute.dtype)

    def rope(self, positions: Int[Array, "R L"]):
        """cos and sin of position * theta^(-2i/D), `[R,L,1,D/2]` each."""
        half = self.shape.head_dim // 2
        frequency = 1.0 / self.shape.rope_theta ** (jnp.arange(half, dtype=jnp.float32) / half)
        angle = positions[..., None, None].astype(jnp.float32) * frequency[None, None, None]
        return jnp.cos(angle), jnp.sin(angle)

    @property
    def head(self) -> Float[Array, "V D"]:
        """The matrix that turns hidden states into logits."""
        return (self.lm_head or self.embed_tokens).weight[...]


def rotate(x: Float[Array, "R L H D"], rope) -> Float[Array, "R L H D"]:
    """Rotary position embedding of the two halves of each head."""
    cos, sin = rope
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def _like(weight, x):
    """The weight broadcast to x, then cast: in this order its gradients add up in float32."""
    return jnp.broadcast_to(weight, x.shape).astype(x.dtype)


def graph(shape: Shape, compute: Compute = Compute()):
    """`(definition, parameter shapes)`; `nnx.merge(definition, params)` is the model again."""
    model = nnx.eval_shape(lambda: Qwen2(shape, compute, rngs=nnx.Rngs(0)))
    definition, state = nnx.split(model)
    return definition, nnx.to_pure_dict(state)


def settings(definition) -> tuple[Shape, Compute]:
    """What `graph` made a definition of."""
    known = dict(definition.attributes)
    return known["shape"].value, known["compute"].value


def parameter_count(shape: Shape) -> int:
    """The number of scalars in all parameters."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(graph(shape)[1]))


def init(shape: Shape, seed: int = 0, dtype: DTypeLike = jnp.float32, shardings=None):
    """Random parameters, created in place where `shardings`, a tree like them, says."""

    def make():
        params = nnx.to_pure_dict(nnx.state(Qwen2(shape, rngs=nnx.Rngs(seed))))
        return jax.tree.map(lambda x: x.astype(dtype), params)

    return jax.jit(make, out_shardings=shardings)()


def matrices(params):
    """`(input axes, output axes)` of parameters that are stacks of matrices, None for others."""

    def one(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not name.startswith("layers/") or not name.endswith("_proj/weight"):
            return None
        first_in = 2 if "o_proj" in name else leaf.ndim - 1
        return tuple(range(first_in, leaf.ndim)), tuple(range(1, first_in))

    return jax.tree_util.tree_map_with_path(one, params)


def _qwen2_5(hidden, intermediate, layers, heads, kv_heads, *, vocab=152_064, **other) -> Shape:
    return Shape(vocab, hidden, intermediate, layers, heads, kv_heads, **other)


PRESETS = {
    "Qwen2.5-0.5B": _qwen2_5(896, 4864, 24, 14, 2, vocab=151_936, tied=True),
    "Qwen2.5-1.5B": _qwen2_5(1536, 8960, 28, 12, 2, vocab=151_936, tied=True, max_length=131_072),
    "Qwen2.5-3B": _qwen2_5(2048, 11_008, 36, 16, 2, vocab=151_936, tied=True),
    "Qwen2.5-7B": _qwen2_5(3584, 18_944, 28, 28, 4, tied=False, max_length=131_072),
    "Qwen2.5-14B": _qwen2_5(
        5120, 13_824, 48, 40, 8, tied=False, rms_norm_eps=1e-5, max_length=131_072
    ),
    "Qwen2.5-32B": _qwen2_5(
        5120, 27_648, 64, 40, 8, tied=False, rms_norm_eps=1e-5, max_length=131_072
    ),
    "Qwen2.5-72B": _qwen2_5(
        8192, 29_568, 80, 64, 8, tied=False, rms_norm_eps=1e-5, max_length=131_072
    ),
    "Qwen2.5-7B-Instruct-1M": _qwen2_5(
        3584, 18_944, 28, 28, 4, tied=False, rms_norm_eps=1e-5, rope_theta=1e7, max_length=1_010_000
    ),
}
