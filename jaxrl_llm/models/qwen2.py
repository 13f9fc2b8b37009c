"""The decoder in Flax NNX; `graph` splits the model into a definition and a tree of parameters.

Families of models differ by fields of their `Shape` alone.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxrl_llm.errors import UserError, at_least
from jaxrl_llm.models import attention, int8, primitives
from jaxrl_llm.models.sharding import BATCH, constrain, gathered

Hidden = Float[Array, "R L D"]


@dataclass(frozen=True)
class LayerKind:
    """How a layer sees positions: rotary base `theta` (None: not at all), and a window.

    With a `window` a token sees so many positions, its own included. Frequencies are divided by
    `factor`; with `bands` (low, high, length) those of wavelengths below length / high are not, and
    those up to length / low partly: `llama3` in config.json.

    >>> sliding, whole = jl.LayerKind(theta=1e4, window=512), jl.LayerKind(theta=1e6)
    >>> jl.Shape(64, 128, 384, 6, 4, 2, tied=True, kinds=(*[sliding] * 5, whole)).kind_of
    (0, 0, 0, 0, 0, 1)
    """

    theta: float | None = 1e6
    window: int | None = None
    factor: float = 1.0
    bands: tuple[float, float, int] | None = None


LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Lora:
    """Adapters of low rank on the products in `targets`; only they are trained.

    A product W x becomes W x + (alpha / rank) B A x, with A `[rank, in]` and B `[out, rank]`, which
    begins as 0. The learning rate is about ten times that of training all weights. `base` is how the
    other weights of products are kept: in the compute precision, or in 8 bits (half of bfloat16).

    >>> jl.Pretrained("Qwen/Qwen2.5-3B", lora=jl.Lora(rank=16, targets=("q_proj", "v_proj"))).lora.scale
    2.0
    """

    rank: int = 32
    alpha: float = 32.0
    targets: tuple[str, ...] = LINEAR
    base: Literal["compute", "int8"] = "compute"

    def __post_init__(self):
        at_least(1, "lora", self, "rank")
        if self.base not in ("compute", "int8"):
            raise UserError(f"lora: base = {self.base!r} is neither compute nor int8")
        if not self.alpha > 0:
            raise UserError(f"lora: alpha = {self.alpha} must be above 0")
        if not self.targets or {*self.targets} - {*LINEAR}:
            raise UserError(
                f"lora: targets are some of {', '.join(LINEAR)}, not {', '.join(self.targets) or 'none'}"
            )

    @property
    def scale(self) -> float:
        """What B A x is multiplied by."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class Mixture:
    """So many `experts` in place of a layer's MLP, each `size` wide; a token is sent to `chosen`.

    They are weighted by the softmax over all experts, divided by the chosen ones' sum if `rescaled`.

    >>> mixture = jl.Mixture(experts=8, chosen=2, size=32)
    >>> jl.Shape(64, 128, 384, 4, 4, 2, tied=False, mixture=mixture).mixture.chosen
    2
    """

    experts: int
    chosen: int
    size: int
    rescaled: bool = True


@dataclass(frozen=True)
class Shape:
    """The architecture: everything that the parameters' shapes and values depend on.

    `kinds` repeat through the layers. `head_size` None is hidden_size / num_heads. `biases` are names
    of products. Scores are multiplied by `query_scalar`^-1/2 (None: head_dim). There are norms
    before attention and MLP, or after, or both. `norm_offset` and `scaled_embedding` are Gemma's:
    norms multiply by 1 + weight, the embedding by sqrt(hidden_size). `lora` adds adapters to products.

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
    max_length: int = 32_768
    family: str = "qwen2"
    head_size: int | None = None
    kinds: tuple[LayerKind, ...] = (LayerKind(),)
    biases: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    norms_of_heads: bool = False
    query_scalar: int | None = None
    activation: Literal["silu", "gelu"] = "silu"
    norms_before: bool = True
    norms_after: bool = False
    norm_offset: bool = False
    scaled_embedding: bool = False
    mixture: Mixture | None = None
    lora: Lora | None = None

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def kind_of(self) -> tuple[int, ...]:
        """Which of `distinct` each layer is."""
        return tuple(
            self.distinct.index(self.kinds[i % len(self.kinds)]) for i in range(self.num_layers)
        )

    @property
    def distinct(self) -> tuple[LayerKind, ...]:
        """The kinds, each once."""
        return tuple(dict.fromkeys(self.kinds[: self.num_layers]))


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
    """y = x W' + b with W `[*out, *in]` as in Hugging Face files, but heads as a separate axis.

    With `lora` the same products of its two factors are added.
    """

    def __init__(
        self,
        out: tuple[int, ...],
        into: tuple[int, ...],
        *,
        bias: bool = False,
        lora: Lora | None = None,
        rngs: nnx.Rngs,
    ):
        scale = math.prod(into) ** -0.5  # keeps the variance of the input
        self.weight = nnx.Param(scale * rngs.params.normal((*out, *into)))
        self.bias = nnx.Param(jnp.zeros(out)) if bias else None
        self.contracted, self.scale = len(into), lora.scale if lora else 1.0
        self.lora_A = Linear((lora.rank,), into, rngs=rngs) if lora else None
        self.lora_B = Linear(out, (lora.rank,), rngs=rngs) if lora else None
        if self.lora_B is not None:
            self.lora_B.weight[...] *= 0.0

    def __call__(self, x):
        y = primitives.product(x, self.weight[...].astype(x.dtype), self.contracted)
        if self.lora_A is not None and self.lora_B is not None:
            y = y + self.scale * self.lora_B(self.lora_A(x))
        return y if self.bias is None else y + _like(self.bias[...], y)


class RMSNorm(nnx.Module):
    """x / rms(x) * weight, computed in float32; with `offset`, times 1 + weight before the cast."""

    def __init__(self, size: int, *, eps: float, offset: bool = False):
        self.weight = nnx.Param(jnp.zeros(size) if offset else jnp.ones(size))
        self.eps, self.offset = eps, offset

    def __call__(self, x):
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + self.eps)
        if self.offset:
            return (wide * scale * (1 + _like(self.weight[...], wide))).astype(x.dtype)
        return (wide * scale).astype(x.dtype) * _like(self.weight[...], x)


def _norm(shape: Shape, size: int | None = None) -> RMSNorm:
    return RMSNorm(size or shape.hidden_size, eps=shape.rms_norm_eps, offset=shape.norm_offset)


def _linear(name: str, out, into, shape: Shape, rngs: nnx.Rngs) -> Linear:
    lora = shape.lora if shape.lora and name in shape.lora.targets else None
    return Linear(out, into, bias=name in shape.biases, lora=lora, rngs=rngs)


class SelfAttention(nnx.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape, *, rngs: nnx.Rngs):
        heads, kv_heads = (shape.num_heads, shape.head_dim), (shape.num_kv_heads, shape.head_dim)
        into = (shape.hidden_size,)
        self.q_proj = _linear("q_proj", heads, into, shape, rngs)
        self.k_proj = _linear("k_proj", kv_heads, into, shape, rngs)
        self.v_proj = _linear("v_proj", kv_heads, into, shape, rngs)
        self.o_proj = _linear("o_proj", into, heads, shape, rngs)
        self.q_norm = _norm(shape, shape.head_dim) if shape.norms_of_heads else None
        self.k_norm = _norm(shape, shape.head_dim) if shape.norms_of_heads else None
        # attention multiplies by head_dim^-1/2
        self.scale = (shape.head_dim / (shape.query_scalar or shape.head_dim)) ** 0.5

    def qkv(self, x, rope):
        """Queries, keys and values, with rotary positions in the first two."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.scale != 1.0:
            q = q * self.scale
        return rotate(q, rope), rotate(k, rope), v


class MLP(nnx.Module):
    """SwiGLU, or with gelu for silu: down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: Shape, *, rngs: nnx.Rngs):
        wide, narrow = (shape.intermediate_size,), (shape.hidden_size,)
        self.gate_proj = _linear("gate_proj", wide, narrow, shape, rngs)
        self.up_proj = _linear("up_proj", wide, narrow, shape, rngs)
        self.down_proj = _linear("down_proj", narrow, wide, shape, rngs)
        self.activation = shape.activation

    def __call__(self, x):
        act = {"silu": jax.nn.silu, "gelu": jax.nn.gelu}[self.activation]  # gelu's tanh form
        return self.down_proj(act(self.gate_proj(x)) * self.up_proj(x))


class Experts(nnx.Module):
    """A router and MLPs: the sum of the chosen ones, by their weights; see `models/experts.py`."""

    def __init__(self, shape: Shape, mixture: Mixture, *, rngs: nnx.Rngs):
        self.gate = Linear((mixture.experts,), (shape.hidden_size,), bias=False, rngs=rngs)

        @nnx.split_rngs(splits=mixture.experts)
        @nnx.vmap
        def stacked(rngs):
            return MLP(replace(shape, intermediate_size=mixture.size), rngs=rngs)

        self.experts = stacked(rngs)
        self.mixture = mixture

    def __call__(self, x, live=None):
        """`[R,L,D]`; tokens that are not `live` (None: all are) cost nothing and get 0."""
        gate, gate_weights = nnx.split(self.gate)
        expert, expert_weights = nnx.split(self.experts)
        route = lambda weights, x: choice(nnx.merge(gate, weights)(x), self.mixture)
        apply = lambda weights, x: nnx.merge(expert, weights)(x)
        live = jnp.ones(x.shape[:2], bool) if live is None else live
        weights = nnx.to_pure_dict(gate_weights), nnx.to_pure_dict(expert_weights)
        from jaxrl_llm.models import experts  # other models do without

        return experts.mixed(route, apply, x, live, *weights)


def choice(logits: Float[Array, "R L E"], mixture: Mixture):
    """The experts of each token and their weights, `[R,L,K]` both."""
    weights, chosen = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32)), mixture.chosen)
    return chosen, weights / weights.sum(-1, keepdims=True) if mixture.rescaled else weights


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); with `norms_after` of both results, also or only.

    Names are those of files: `post_attention_layernorm` is the MLP's norm before, unless there are norms after.
    """

    def __init__(self, shape: Shape, *, rngs: nnx.Rngs):
        both = shape.norms_before and shape.norms_after
        self.input_layernorm = _norm(shape) if shape.norms_before else None
        self.self_attn = SelfAttention(shape, rngs=rngs)
        self.post_attention_layernorm = _norm(shape)
        self.pre_feedforward_layernorm = _norm(shape) if both else None
        self.post_feedforward_layernorm = _norm(shape) if shape.norms_after else None
        mixture = shape.mixture
        self.mlp = Experts(shape, mixture, rngs=rngs) if mixture else MLP(shape, rngs=rngs)

    def __call__(self, x, rope, attend, live=None):
        return self.finish(x, attend(*self.qkv(x, rope)), live)

    def qkv(self, x, rope):
        """Queries, keys and values of the normalised input."""
        before = self.input_layernorm
        return self.self_attn.qkv(x if before is None else before(x), rope)

    def finish(self, x, mixed, live=None):
        """The rest of the layer, from attention's output `mixed` on; experts skip what is not `live`."""
        mlp = self.mlp if live is None else partial(self.mlp, live=live)
        y = self.self_attn.o_proj(mixed)
        before, after = self.pre_feedforward_layernorm, self.post_feedforward_layernorm
        if after is None:
            x = x + y
            return x + mlp(self.post_attention_layernorm(x))
        x = x + self.post_attention_layernorm(y)
        return x + after(mlp(x if before is None else before(x)))


class Embedding(nnx.Module):
    """A table `[V,D]`, for tokens going in or for logits coming out."""

    def __init__(self, shape: Shape, *, rngs: nnx.Rngs):
        table = rngs.params.normal((shape.vocab_size, shape.hidden_size))
        self.weight = nnx.Param(shape.hidden_size**-0.5 * table)


class Decoder(nnx.Module):
    """The decoder; parameters have their Hugging Face names, layers are stacked on axis 0."""

    def __init__(self, shape: Shape, compute: Compute = Compute(), *, rngs: nnx.Rngs):
        self.shape, self.compute = shape, compute
        self.embed_tokens = Embedding(shape, rngs=rngs)

        @nnx.split_rngs(splits=shape.num_layers)
        @nnx.vmap
        def stacked(rngs):
            return Layer(shape, rngs=rngs)

        self.layers = stacked(rngs)
        self.norm = _norm(shape)
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
        ropes = self.ropes(positions)
        live = None if self.shape.mixture is None else _live(positions, segments)
        layer_def, layers = nnx.split(self.layers)

        def apply(x, layer, offset, kind):
            if offset is not None:
                x = x + offset[None].astype(x.dtype)
            weights = gathered(int8.widened(layer, self.compute.dtype), self.compute.dtype)
            attend = lambda q, k, v: self.attend(q, k, v, segments, kind)
            x = nnx.merge(layer_def, weights)(x, ropes[kind], attend, live)
            return constrain(x, BATCH, None, None)

        if self.compute.remat is not None:
            apply = self.compute.remat(apply)
        each = nnx.to_pure_dict(layers), offsets, self.kinds()
        x, _ = jax.lax.scan(lambda x, layer: (apply(x, *layer), None), x, each)
        return self.norm(x)

    def embed(self, tokens: Int[Array, "R L"]) -> Hidden:
        """The rows of the embedding table for these tokens, in the compute dtype."""
        found = primitives.rows(self.embed_tokens.weight[...], tokens, self.compute.dtype)
        return self.scaled(found)

    def scaled(self, rows: Hidden) -> Hidden:
        """Rows of the embedding table as the first layer reads them."""
        factor = jnp.asarray(self.shape.hidden_size**0.5, rows.dtype)
        return rows * factor if self.shape.scaled_embedding else rows

    def kinds(self) -> Int[Array, "N"] | None:
        """Which of the distinct kinds each layer is, to be scanned; None if all are the same."""
        several = len(self.shape.distinct) > 1
        return jnp.asarray(self.shape.kind_of) if several else None

    def ropes(self, positions: Int[Array, "R L"]) -> "OfKind":
        """cos and sin of position * frequency, `[R,L,1,D/2]` each, by kind of layer."""
        at, half = positions[..., None, None].astype(jnp.float32), self.shape.head_dim // 2
        angles = [at * frequencies(kind, half)[None, None, None] for kind in self.shape.distinct]
        return OfKind([(jnp.cos(angle), jnp.sin(angle)) for angle in angles])

    def attend(self, q, k, v, segments, kind) -> Float[Array, "R L H D"]:
        """Attention in a layer of this kind, within its window."""

        def within(window):
            limit = {} if window is None or window >= q.shape[1] else {"window": window}
            return lambda q, k, v: self.compute.attend(q, k, v, segments, **limit)

        windows = [one.window for one in self.shape.distinct]
        if len(set(windows)) == 1:
            return within(windows[0])(q, k, v)
        if isinstance(kind, int):
            return within(windows[kind])(q, k, v)
        return jax.lax.switch(kind, [within(window) for window in windows], q, k, v)

    @property
    def head(self) -> Float[Array, "V D"]:
        """The matrix that turns hidden states into logits."""
        return (self.lm_head or self.embed_tokens).weight[...]


class OfKind:
    """Arrays of one shape for each kind of layer; of a single one whatever is asked for."""

    def __init__(self, each: list[Any]):
        self._several = len(each) > 1
        self._all = jax.tree.map(lambda *x: jnp.stack(x), *each) if self._several else each[0]

    def __getitem__(self, kind):
        """What belongs to a kind, a number that may be traced."""
        return jax.tree.map(lambda x: x[kind], self._all) if self._several else self._all


def _live(positions: Int[Array, "R L"], segments: Int[Array, "R L"] | None) -> Bool[Array, "R L"]:
    """Which tokens are no padding: that has segment 0, or position 0 behind the first column."""
    if segments is not None:
        return segments > 0
    return (positions > 0) | (jnp.arange(positions.shape[1])[None] == 0)


def frequencies(kind: LayerKind, half: int) -> Float[Array, "C"]:
    """The `half` rotary frequencies of a kind of layer; 0, which turns nothing, without a base."""
    if kind.theta is None:
        return jnp.zeros(half)
    found = 1.0 / kind.theta ** (jnp.arange(half, dtype=jnp.float32) / half)
    if kind.bands is None:
        return found if kind.factor == 1.0 else found / kind.factor
    low, high, length = kind.bands
    turns = length * found / (2 * math.pi)  # within the length of earlier training
    kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - kept) * found / kind.factor + kept * found


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
    model = nnx.eval_shape(lambda: Decoder(shape, compute, rngs=nnx.Rngs(0)))
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
        params = nnx.to_pure_dict(nnx.state(Decoder(shape, rngs=nnx.Rngs(seed))))
        return jax.tree.map(lambda x: x.astype(dtype), params)

    return jax.jit(make, out_shardings=shardings)()


def matrices(params):
    """`(input axes, output axes)` of parameters that are stacks of matrices, None for others."""

    def one(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not re.fullmatch(r"layers/.*_proj(/lora_[AB])?/weight", name):
            return None
        whole = "o_proj/" in name and not name.endswith("lora_B/weight")  # heads go in
        first_in = 2 if whole else leaf.ndim - 1
        first_out = 2 if "/experts/" in name else 1
        return tuple(range(first_in, leaf.ndim)), tuple(range(first_out, first_in))

    return jax.tree_util.tree_map_with_path(one, params)
