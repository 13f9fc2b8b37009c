"""The decoder in Flax NNX; `graph` splits the model into a definition and a tree of parameters.

Families of models differ by fields of their `Shape` alone.
"""

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

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
    those up to length / low partly: `llama3` in config.json. With `ramp` (fast, slow, length) those
    that turn `fast` times in that length are not, those that do `slow` times are, others partly, and
    cos and sin are multiplied by `amplitude`: `yarn`. Only the first `turned` pairs of a
    head's numbers know positions (None: all). `head_size` and `kv_heads` are other than the shape's,
    and with `keys_as_values` one product gives both. With `delta` a layer has no attention but the
    recurrence that its shape's `delta` describes.

    >>> sliding, whole = jl.LayerKind(theta=1e4, window=512), jl.LayerKind(theta=1e6)
    >>> jl.Shape(64, 128, 384, 6, 4, 2, tied=True, kinds=(*[sliding] * 5, whole)).kind_of
    (0, 0, 0, 0, 0, 1)
    """

    theta: float | None = 1e6
    window: int | None = None
    factor: float = 1.0
    bands: tuple[float, float, int] | None = None
    delta: bool = False
    ramp: tuple[float, float, int] | None = None
    amplitude: float = 1.0
    turned: int | None = None
    head_size: int | None = None
    kv_heads: int | None = None
    keys_as_values: bool = False

    @property
    def structure(self) -> tuple[Any, ...]:
        """Fields on which the shapes of a layer's parameters depend."""
        return self.delta, self.head_size, self.kv_heads, self.keys_as_values


LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OF_DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")


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
        if not self.targets or {*self.targets} - {*LINEAR, *OF_DELTA}:
            known, given = ", ".join(LINEAR), ", ".join(self.targets) or "none"
            raise UserError(
                f"lora: targets are some of {known} (Qwen3.5: {', '.join(OF_DELTA)}), not {given}"
            )

    @property
    def scale(self) -> float:
        """Factor of B A x."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class MoE:
    """So many `experts` in place of a layer's MLP, each `size` wide; a token is sent to `chosen`.

    They are weighted by the softmax over all experts, divided by the chosen ones' sum if `rescaled`. An
    MLP of width `shared` is added for every token, times a sigmoid of it. With `beside` (Gemma 4) there is
    a layer's own MLP too, and the router sees what the norm before them has not changed. `fused` files
    have one tensor of all experts' gates and ups.

    >>> mixture = jl.MoE(experts=8, chosen=2, size=32)
    >>> jl.Shape(64, 128, 384, 4, 4, 2, tied=False, mixture=mixture).mixture.chosen
    2
    """

    experts: int
    chosen: int
    size: int
    rescaled: bool = True
    shared: int = 0
    beside: bool = False
    fused: bool = False

    @property
    def width(self) -> int:
        """Numbers between the products of a token's experts, the shared one among them."""
        return self.chosen * self.size + self.shared


@dataclass(frozen=True)
class Delta:
    """The gated delta rule of some layers: `heads` of values `[value_size]`, which share those of keys.

    Before it queries, keys and values go through a causal convolution over `width` tokens.

    >>> delta = jl.Delta(key_heads=2, heads=4, key_size=16, value_size=16)
    >>> kinds = (*[jl.LayerKind(None, delta=True)] * 3, jl.LayerKind(1e7))
    >>> jl.Shape(64, 128, 384, 8, 4, 2, tied=True, kinds=kinds, delta=delta).period
    4
    """

    key_heads: int
    heads: int
    key_size: int = 128
    value_size: int = 128
    width: int = 4

    @property
    def channels(self) -> int:
        """Of the convolution: all queries, keys and values."""
        return 2 * self.key_heads * self.key_size + self.heads * self.value_size


class Stretch(NamedTuple):
    """Layers from `first` on, whose parameters repeat after `period` layers, `number` times."""

    first: int
    period: int
    number: int

    @property
    def names(self) -> list[str]:
        """The names of the stacks of layers, one for each layer of a period."""
        return [f"{self.first + i}_mod_{self.period}" for i in range(self.period)]


@dataclass(frozen=True)
class Shape:
    """The architecture: everything that the parameters' shapes and values depend on.

    `kinds` repeat through the layers. `head_size` None is hidden_size / num_heads. `biases` are names
    of products. Scores are multiplied by `query_scalar`^-1/2 (None: head_dim). There are norms
    before attention and MLP, or after, or both. `norm_offset` and `scaled_embedding` are Gemma's:
    norms multiply by 1 + weight, the embedding by sqrt(hidden_size). Only the first `rotary_size`
    numbers of a head know positions (None: all). With `gated` the query's product has a second half,
    whose sigmoid multiplies what attention gives. `lora` adds adapters to products.

    Gemma 4's: `norm_wide` multiplies by norms' weights in float32; values are divided by their root
    mean square (`norm_values`); the last `shared_layers` read keys and values of the last layer of
    their kind before them, with `shared_wide` by MLPs of twice the width; each layer adds something
    of the token itself, in `per_layer` numbers, and is multiplied by a constant (`layer_scalars`);
    logits stay below `logit_cap`, by tanh.

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
    mixture: MoE | None = None
    lora: Lora | None = None
    rotary_size: int | None = None
    gated: bool = False
    delta: Delta | None = None
    norm_wide: bool = False
    norm_values: bool = False
    shared_layers: int = 0
    shared_wide: bool = False
    per_layer: int = 0
    layer_scalars: bool = False
    logit_cap: float | None = None

    def __post_init__(self):
        four = self.norms_before and self.norms_after
        if self.mixture and self.mixture.beside and (not four or self.mixture.shared):
            raise UserError("mixture: beside an MLP needs norms before and after, and no shared")

    def refuse_shared_prompts(self, name: str = "this one") -> None:
        """A UserError if a layer of this model cannot go on from one prompt to several responses."""
        if any(kind.delta for kind in self.distinct):
            raise UserError(
                "collate: share_prompts is for models that attend in all layers, which "
                f"{name} does not: leave it out"
            )

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

    def heads_of(self, kind: LayerKind) -> tuple[int, int]:
        """`(key-value heads, width of a head)` of a layer of this kind."""
        return kind.kv_heads or self.num_kv_heads, kind.head_size or self.head_dim

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        """The layers in stretches, each of which is one scan: those with keys of their own, the others."""
        border, every = self.num_layers - self.shared_layers, self.kind_of
        alike = len({kind.structure for kind in self.distinct}) == 1 and not self.shared_layers

        def stretch(first, end):
            here = every[first:end]
            fits = lambda n: len(here) % n == 0 and here == here[:n] * (len(here) // n)
            period = 1 if alike else next(filter(fits, range(1, len(here) + 1)))
            return Stretch(first, period, len(here) // period)

        return tuple(
            stretch(*ends) for ends in [(0, border), (border, self.num_layers)] if ends[0] < ends[1]
        )

    @property
    def period(self) -> int:
        """After how many layers the parameters of the first stretch repeat."""
        return self.stretches[0].period

    @property
    def is_one_stack(self) -> bool:
        """True if all layers have parameters of the same shapes, in one stack without a name."""
        return [(one.period, one.first) for one in self.stretches] == [(1, 0)]

    def source(self, layer: int) -> int:
        """The layer whose keys and values a layer reads: its own, but for the shared ones."""
        own = self.num_layers - self.shared_layers
        fits = lambda i: self.kind_of[i] == self.kind_of[layer]
        return layer if layer < own else max(filter(fits, range(own)))


@dataclass(frozen=True)
class Compute:
    """How the model is computed: dtype, attention kernel, what the backward pass recomputes.

    In float32 products keep all bits on every device, but the default `attend` computes in bfloat16
    on a GPU (`attention.xla` does not). `remat` wraps a layer: `jax.checkpoint` keeps only its
    input, `partial(jax.checkpoint, policy=...)` keeps what the policy names, None keeps everything.
    With `sequence_parallel` the mesh's `tensor` axis divides positions wherever tokens do not look at
    each other, and heads where they do: for long responses, whose hidden states take more than weights.

    >>> jl.Compute(dtype="bfloat16", attend=jl.attention.xla, remat=None).dtype
    'bfloat16'
    """

    dtype: DTypeLike = jnp.float32
    attend: Callable[..., Float[Array, "R L H D"]] = attention.for_platform
    remat: Callable[[Callable], Callable] | None = jax.checkpoint
    sequence_parallel: bool = False


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
    """x / rms(x) * weight; with `offset` times 1 + weight, which like `wide` is done before the cast.

    A weight is rounded to the dtype of x like those of products, also where it is multiplied in
    float32: then trainer, sampler and servers agree, whichever precision they keep it in.
    """

    def __init__(self, size: int, *, eps: float, offset: bool = False, wide: bool = False):
        self.weight = nnx.Param(jnp.zeros(size) if offset else jnp.ones(size))
        self.eps, self.offset, self.wide = eps, offset, wide

    def __call__(self, x):
        unit, weight = by_root_mean_square(x, self.eps), self.weight[...]
        if not (self.offset or self.wide):
            return unit.astype(x.dtype) * _like(weight, x)
        if x.dtype != jnp.float32:
            bits = jnp.finfo(x.dtype)  # two casts a compiler may take for none
            weight = jax.lax.reduce_precision(weight, bits.nexp, bits.nmant)
        weight = _like(weight, unit)
        return (unit * (1 + weight if self.offset else weight)).astype(x.dtype)


def by_root_mean_square(x, eps: float) -> Float[Array, "..."]:
    """x / rms(x) in float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + eps)


def _norm(shape: Shape, size: int | None = None) -> RMSNorm:
    return RMSNorm(
        size or shape.hidden_size,
        eps=shape.rms_norm_eps,
        offset=shape.norm_offset,
        wide=shape.norm_wide,
    )


def linear(name: str, out, into, shape: Shape, rngs: nnx.Rngs) -> Linear:
    """The product of this name, with what the shape gives it."""
    lora = shape.lora if shape.lora and name in shape.lora.targets else None
    return Linear(out, into, bias=name in shape.biases, lora=lora, rngs=rngs)


class SelfAttention(nnx.Module):
    """Grouped-query attention with rotary positions; `shared` if it reads another layer's keys."""

    def __init__(self, shape: Shape, kind: LayerKind, shared: bool, *, rngs: nnx.Rngs):
        kv_heads, size = shape.heads_of(kind)
        into, asked = (shape.hidden_size,), (shape.num_heads, size * (1 + shape.gated))
        product = lambda name: linear(name, (kv_heads, size), into, shape, rngs)
        self.q_proj = linear("q_proj", asked, into, shape, rngs)
        self.k_proj = None if shared else product("k_proj")
        self.v_proj = None if shared or kind.keys_as_values else product("v_proj")
        self.o_proj = linear("o_proj", into, (shape.num_heads, size), shape, rngs)
        self.q_norm = _norm(shape, size) if shape.norms_of_heads else None
        self.k_norm = _norm(shape, size) if shape.norms_of_heads and not shared else None
        # attention multiplies by head_dim^-1/2
        self.scale = (size / (shape.query_scalar or size)) ** 0.5
        self.gated, self.v_eps = shape.gated, shape.rms_norm_eps if shape.norm_values else None

    def queries(self, x, rope):
        """Queries with rotary positions; and the gate, if any."""
        q = self.q_proj(x)
        q, gate = jnp.split(q, 2, -1) if self.gated else (q, None)
        if self.q_norm is not None:
            q = self.q_norm(q)
        return rotate(q if self.scale == 1.0 else q * self.scale, rope), gate

    def keys_and_values(self, x, rope):
        """Keys, with rotary positions, and values."""
        assert self.k_proj is not None
        k = self.k_proj(x)
        v = k if self.v_proj is None else self.v_proj(x)
        if self.v_eps is not None:
            v = by_root_mean_square(v, self.v_eps).astype(v.dtype)
        return rotate(k if self.k_norm is None else self.k_norm(k), rope), v

    def out(self, mixed, gate):
        """The layer's sum, from attention's output `mixed` on."""
        return self.o_proj(mixed if gate is None else mixed * jax.nn.sigmoid(gate))


def _gated_delta(shape: Shape, sizes: Delta, rngs: nnx.Rngs):
    from jaxrl_llm.models.delta import GatedDelta  # other models do without

    return GatedDelta(shape, sizes, rngs=rngs)


ACTIVATIONS = {"silu": jax.nn.silu, "gelu": jax.nn.gelu}  # gelu's tanh form


class MLP(nnx.Module):
    """SwiGLU, or with gelu for silu: down(silu(gate(x)) * up(x)); `times` as wide."""

    def __init__(self, shape: Shape, times: int = 1, *, rngs: nnx.Rngs):
        wide, narrow = (times * shape.intermediate_size,), (shape.hidden_size,)
        self.gate_proj = linear("gate_proj", wide, narrow, shape, rngs)
        self.up_proj = linear("up_proj", wide, narrow, shape, rngs)
        self.down_proj = linear("down_proj", narrow, wide, shape, rngs)
        self.activation = shape.activation

    def __call__(self, x):
        act = ACTIVATIONS[self.activation]
        return self.down_proj(act(self.gate_proj(x)) * self.up_proj(x))


class FusedMLP(nnx.Module):
    """As `MLP`, its first two products one; a file has these tensors of all experts in one."""

    def __init__(self, shape: Shape, size: int, *, rngs: nnx.Rngs):
        hidden = shape.hidden_size
        self.fused_gate_up_proj = Linear((2 * size,), (hidden,), rngs=rngs)
        self.fused_down_proj = Linear((hidden,), (size,), rngs=rngs)
        self.activation = shape.activation

    def __call__(self, x):
        gate, up = jnp.split(self.fused_gate_up_proj(x), 2, -1)
        return self.fused_down_proj(ACTIVATIONS[self.activation](gate) * up)


def _experts(shape: Shape, mixture: MoE, rngs: nnx.Rngs):
    """The MLPs, stacked."""

    @nnx.split_rngs(splits=mixture.experts)
    @nnx.vmap
    def stacked(rngs):
        if mixture.fused:
            return FusedMLP(shape, mixture.size, rngs=rngs)
        return MLP(replace(shape, intermediate_size=mixture.size), rngs=rngs)

    return stacked(rngs)


def _mixed(route, router, mlps, x, live, replayed, routed=None):
    """The sum of the chosen ones, by their weights, and which they are; see `models/experts.py`.

    `route(router, routed, replayed)` has both; the router sees x, or `routed`. Tokens that are
    not `live` (None: all are) cost nothing and get 0.
    """
    from jaxrl_llm.models import experts  # other models do without

    (router, router_weights), (expert, expert_weights) = nnx.split(router), nnx.split(mlps)
    live = jnp.ones(x.shape[:2], bool) if live is None else live
    return experts.apply_experts(
        lambda weights, *inputs: route(nnx.merge(router, weights), *inputs),
        lambda weights, x: nnx.merge(expert, weights)(x),
        experts.Routed(x, x if routed is None else routed, live, replayed),
        nnx.to_pure_dict(router_weights),
        nnx.to_pure_dict(expert_weights),
    )


class Experts(nnx.Module):
    """A router and MLPs; names are those of files."""

    def __init__(self, shape: Shape, mixture: MoE, *, rngs: nnx.Rngs):
        hidden = (shape.hidden_size,)
        self.gate = Linear((mixture.experts,), hidden, bias=False, rngs=rngs)
        self.experts, self.mixture = _experts(shape, mixture, rngs), mixture
        shared = replace(shape, intermediate_size=mixture.shared)
        self.shared_expert = MLP(shared, rngs=rngs) if mixture.shared else None
        self.shared_expert_gate: Any = Linear((1,), hidden, rngs=rngs) if mixture.shared else None

    def __call__(self, x, live=None, replayed=None):
        """`[R,L,D]`, from what is `live`, and the experts of each token."""
        route = lambda gate, x, replayed: choice(gate(x), self.mixture, replayed)
        if self.shared_expert is None:
            return _mixed(route, self.gate, self.experts, x, live, replayed)
        x = constrain(x, BATCH, None, None)  # else it comes divided as the shared product wants it
        y, chosen = _mixed(route, self.gate, self.experts, x, live, replayed)
        return y + jax.nn.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x), chosen


class Router(nnx.Module):
    """Gemma 4's: of x / rms(x), and each expert's weight has a scale."""

    def __init__(self, shape: Shape, mixture: MoE, *, rngs: nnx.Rngs):
        self.proj = Linear((mixture.experts,), (shape.hidden_size,), rngs=rngs)
        self.scale = nnx.Param(jnp.ones(shape.hidden_size))
        self.per_expert_scale = nnx.Param(jnp.ones(mixture.experts))
        self.mixture, self.eps = mixture, shape.rms_norm_eps

    def __call__(self, x, replayed=None):
        """Experts and weights as `choice` has them."""
        unit = by_root_mean_square(x, self.eps).astype(x.dtype) * _like(self.scale[...], x)
        # in float32, for the root itself would be rounded
        unit = (unit.astype(jnp.float32) * x.shape[-1] ** -0.5).astype(x.dtype)
        chosen, weights = choice(self.proj(unit), self.mixture, replayed)
        return chosen, weights * self.per_expert_scale[...][chosen]


def choice(logits: Float[Array, "R L E"], mixture: MoE, replayed: Any = None):
    """The experts of each token and their weights, `[R,L,K]` both; `replayed` experts are kept."""
    every = jax.nn.softmax(logits.astype(jnp.float32))
    weights, chosen = jax.lax.top_k(every, mixture.chosen)
    if replayed is not None:
        chosen = jnp.where(replayed < 0, chosen, replayed)
        weights = jnp.take_along_axis(every, chosen, -1)
    return chosen, weights / weights.sum(-1, keepdims=True) if mixture.rescaled else weights


class LayerInputs(NamedTuple):
    """Inputs of a layer beside the hidden states; with a leading axis those of all layers.

    `tokens` are numbers of the tokens themselves, `experts` those that they are sent to, as in `Inputs`.
    """

    tokens: Float[Array, "*N R L P"] | None = None
    experts: Int[Array, "*N R L K"] | None = None


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); with `norms_after` of both results, also or only.

    Names are those of files: `post_attention_layernorm` is the MLP's norm before, unless there are norms after.
    """

    def __init__(self, shape: Shape, kind: LayerKind, shared: bool = False, *, rngs: nnx.Rngs):
        both = shape.norms_before and shape.norms_after
        self.input_layernorm = _norm(shape) if shape.norms_before else None
        sizes = shape.delta if kind.delta else None
        self.linear_attn = None if sizes is None else _gated_delta(shape, sizes, rngs)
        attention = SelfAttention(shape, kind, shared, rngs=rngs) if sizes is None else None
        self.self_attn: Any = attention
        self.post_attention_layernorm = _norm(shape)
        self.pre_feedforward_layernorm = _norm(shape) if both else None
        self.post_feedforward_layernorm = _norm(shape) if shape.norms_after else None
        mixture, times = shape.mixture, 2 if shared and shape.shared_wide else 1
        side = mixture if mixture and mixture.beside else None
        routed = None if side else mixture
        self.mlp = Experts(shape, routed, rngs=rngs) if routed else MLP(shape, times, rngs=rngs)
        self.router: Any = Router(shape, side, rngs=rngs) if side else None
        self.experts = _experts(shape, side, rngs) if side else None
        self.post_feedforward_layernorm_1: Any = _norm(shape) if side else None
        self.post_feedforward_layernorm_2: Any = _norm(shape) if side else None
        self.pre_feedforward_layernorm_2: Any = _norm(shape) if side else None
        size, hidden = shape.per_layer, (shape.hidden_size,)
        self.per_layer_input_gate = Linear((size,), hidden, rngs=rngs) if size else None
        self.per_layer_projection: Any = Linear(hidden, (size,), rngs=rngs) if size else None
        self.post_per_layer_input_norm: Any = _norm(shape) if size else None
        self.activation = shape.activation
        self.layer_scalar = nnx.Param(jnp.ones(1)) if shape.layer_scalars else None

    def __call__(self, x, rope, attend, segments, inputs, live=None, kv=None):
        """The layer's output, and its keys and values: `kv`, if it reads those of another layer."""
        if self.linear_attn is not None:
            return self.finish(x, self.linear_attn(self.before(x), segments), inputs, live)[0], None
        q, k, v, gate = self.qkv(x, rope, kv)
        y = self.self_attn.out(attend(q, k, v), gate)
        return self.finish(x, y, inputs, live)[0], (k, v)

    def before(self, x):
        """Input of attention: normalised, if there are norms before."""
        return x if self.input_layernorm is None else self.input_layernorm(x)

    def qkv(self, x, rope, kv=None):
        """Queries, keys and values (or `kv`) of the normalised input, and the gate."""
        x = self.before(x)
        q, gate = self.self_attn.queries(x, rope)
        return q, *(kv or self.self_attn.keys_and_values(x, rope)), gate

    def finish(self, x, y, inputs: LayerInputs, live=None):
        """The rest of the layer, after attention has given `y`, and each token's experts, if there are any.

        Experts skip what is not `live`.
        """

        def mlp(x):
            if isinstance(self.mlp, Experts):
                return self.mlp(x, live, inputs.experts)
            return self.mlp(x), None

        before, after = self.pre_feedforward_layernorm, self.post_feedforward_layernorm
        if after is None:
            x = x + y
            y, chosen = mlp(self.post_attention_layernorm(x))
            return x + y, chosen
        x = x + self.post_attention_layernorm(y)
        y, chosen = mlp(x if before is None else before(x))
        if self.experts is not None:
            inside = self.pre_feedforward_layernorm_2(x)
            route = lambda router, *inputs: router(*inputs)
            routed, chosen = _mixed(
                route, self.router, self.experts, inside, live, inputs.experts, x
            )
            y = self.post_feedforward_layernorm_1(y) + self.post_feedforward_layernorm_2(routed)
        x = x + after(y)
        if self.per_layer_input_gate is not None:
            gated = ACTIVATIONS[self.activation](self.per_layer_input_gate(x)) * inputs.tokens
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        if self.layer_scalar is not None:  # a constant of the model, which nobody trains
            x = x * _like(jax.lax.stop_gradient(self.layer_scalar[...]), x)
        return x, chosen


class Embedding(nnx.Module):
    """A table `[V,D]`, for tokens going in or for logits coming out."""

    def __init__(self, shape: Shape, size: int | None = None, *, rngs: nnx.Rngs):
        size = size or shape.hidden_size
        self.weight = nnx.Param(size**-0.5 * rngs.params.normal((shape.vocab_size, size)))


class Decoder(nnx.Module):
    """The decoder; parameters have their Hugging Face names, layers are stacked on axis 0.

    Where their parameters repeat after a `period` of 4, each fourth layer from the first on is a stack
    "0_mod_4", and so on; a stretch from layer 20 on begins with "20_mod_4".
    """

    def __init__(self, shape: Shape, compute: Compute = Compute(), *, rngs: nnx.Rngs):
        self.shape, self.compute = shape, compute
        self.embed_tokens = Embedding(shape, rngs=rngs)

        def stack(layer, number):
            @nnx.split_rngs(splits=number)
            @nnx.vmap
            def stacked(rngs):
                return Layer(
                    shape,
                    shape.distinct[shape.kind_of[layer]],
                    shape.source(layer) != layer,
                    rngs=rngs,
                )

            return stacked(rngs)

        each = [
            stack(one.first + i, one.number) for one in shape.stretches for i in range(one.period)
        ]

        self.layers: Any = nnx.Dict(named(each, shape)) if not shape.is_one_stack else each[0]
        self.norm = _norm(shape)
        self.lm_head = None if shape.tied else Embedding(shape, rngs=rngs)
        if size := shape.per_layer:
            width = size * shape.num_layers
            self.embed_tokens_per_layer = Embedding(shape, width, rngs=rngs)
            self.per_layer_model_projection = Linear((width,), (shape.hidden_size,), rngs=rngs)
            self.per_layer_projection_norm = _norm(shape, size)

    def __call__(
        self,
        tokens: Int[Array, "R L"],
        positions: Int[Array, "R L"],
        segments: Int[Array, "R L"] | None = None,
        *,
        offsets: Float[Array, "N L D"] | None = None,
        experts: Int[Array, "R L N K"] | None = None,
        prompts: Int[Array, "R L"] | None = None,
    ) -> Hidden:
        """Hidden states after the last norm; multiply by `head` for logits.

        `offsets` are added to the input of each layer, for gradients with respect to it. Tokens are sent
        to these `experts`, but where they are -1, and see the segments that `prompts` names too.
        """
        x = self.embed(tokens)
        inputs, ropes = self.inputs(tokens, x, experts), self.ropes(positions)
        live = None if self.shape.mixture is None else _live(positions, segments)
        shared = None
        if prompts is not None:
            self.shape.refuse_shared_prompts()
            shared = attention.Shared(prompts, positions)

        def layer_of(definition, fixed):
            def apply(x, shared_kv, layer, offset, inputs, kind):
                if offset is not None:
                    x = x + offset[None].astype(x.dtype)
                weights = gathered(int8.dequantize(layer, self.compute.dtype), self.compute.dtype)
                kind = kind if fixed is None else fixed
                attend = lambda q, k, v: self.attend(q, k, v, segments, kind, shared)
                x, kv = nnx.merge(definition, weights)(
                    x,
                    ropes[kind],
                    attend,
                    segments,
                    inputs,
                    live,
                    shared_kv[kind] if shared_kv else None,
                )
                read_later = self.shape.shared_layers and not shared_kv
                return self.between_layers(x), {kind: kv} if read_later else {}

            return apply if self.compute.remat is None else self.compute.remat(apply)

        def scan(x, shared_kv, definitions, each):
            """x after the layers of a stretch, which read those keys and values; their last own, by kind."""
            layers = [layer_of(*one) for one in definitions]

            def period(carry, each):
                x, new = carry
                for apply, one in zip(layers, each, strict=True):
                    x, of_layer = apply(x, shared_kv, *one)
                    new = new | of_layer
                return (x, new), None

            # carried from period to period and overwritten: what the last leaves is read later,
            # and nothing is saved of it for the backward pass
            zeros = lambda kind: (
                (jnp.zeros((*x.shape[:2], *self.shape.heads_of(kind)), x.dtype),) * 2
            )
            keeps = self.shape.shared_layers and not shared_kv
            empty = dict(enumerate(map(zeros, self.shape.distinct))) if keeps else {}
            return jax.lax.scan(period, (x, empty), each)[0]

        x, shared_kv = self.between_layers(x), {}
        for stack in self.stacks(inputs, offsets):
            x, new = scan(x, shared_kv, *stack)
            shared_kv = shared_kv or new
        x = self.norm(x)
        return constrain(x, BATCH, None, None) if self.compute.sequence_parallel else x

    def between_layers(self, x: Hidden) -> Hidden:
        """Hidden states in their place: rows over the batch's axes, positions over `tensor` or on all."""
        return constrain(x, BATCH, "tensor" if self.compute.sequence_parallel else None, None)

    def inputs(self, tokens: Int[Array, "R L"], x: Hidden, experts=None) -> LayerInputs:
        """Those of each layer, from the tokens, the first layer's input, and the experts if they are chosen."""
        experts = None if experts is None else jnp.moveaxis(experts, 2, 0)
        if not self.shape.per_layer:
            return LayerInputs(None, experts)
        table = self.embed_tokens_per_layer.weight[...]
        rows = primitives.rows(table, tokens, self.compute.dtype)
        return LayerInputs(self.of_layers(rows, x), experts)

    def of_layers(self, rows, x: Hidden) -> Float[Array, "N R L P"]:
        """`LayerInputs.tokens` from the tokens' rows of the second table."""
        size = self.shape.per_layer
        cut = lambda y: y.reshape(*y.shape[:2], -1, size)
        seen = self.per_layer_model_projection(x) * self.shape.hidden_size**-0.5
        both = self.per_layer_projection_norm(cut(seen)) + cut(
            rows * jnp.asarray(size**0.5, rows.dtype)
        )
        return jnp.moveaxis(both * 2**-0.5, 2, 0)

    def embed(self, tokens: Int[Array, "R L"]) -> Hidden:
        """The rows of the embedding table for these tokens, in the compute dtype."""
        found = primitives.rows(self.embed_tokens.weight[...], tokens, self.compute.dtype)
        return self.scaled(found)

    def scaled(self, rows: Hidden) -> Hidden:
        """Rows of the embedding table as the first layer reads them."""
        factor = jnp.asarray(self.shape.hidden_size**0.5, rows.dtype)
        return rows * factor if self.shape.scaled_embedding else rows

    def stacks(self, inputs: LayerInputs, offsets: Any = None) -> list[tuple[list[Any], list[Any]]]:
        """Of each layer of a stretch's period its definition with its kind, and what is scanned over.

        That is `(parameters, offset, inputs, kind)`, of all periods; the kind is there in one of the
        two, if there are several.
        """
        if self.shape.is_one_stack:
            definition, layers = nnx.split(self.layers)
            each = nnx.to_pure_dict(layers), offsets, inputs, self.kinds()
            return [([(definition, None)], [each])]
        stacks = []
        for stretch in self.shape.stretches:
            definitions, each = [], []
            for i, name in enumerate(stretch.names, stretch.first):
                definition, layers = nnx.split(self.layers[name])
                here = slice(i, stretch.first + stretch.period * stretch.number, stretch.period)
                parts = jax.tree.map(operator.itemgetter(here), (offsets, inputs))
                definitions.append((definition, self.shape.kind_of[i]))
                each.append((nnx.to_pure_dict(layers), *parts, None))
            stacks.append((definitions, each))
        return stacks

    def kinds(self) -> Int[Array, "N"] | None:
        """Which of the distinct kinds each layer is, to be scanned; None if all are the same."""
        several = len(self.shape.distinct) > 1
        return jnp.asarray(self.shape.kind_of) if several else None

    def ropes(self, positions: Int[Array, "R L"]) -> "OfKind":
        """cos and sin of position * frequency, `[R,L,1,D/2]` each, by kind of layer."""
        at = positions[..., None, None].astype(jnp.float32)
        size = lambda kind: self.shape.rotary_size or self.shape.heads_of(kind)[1]
        angles = [
            at * frequencies(kind, size(kind) // 2)[None, None, None]
            for kind in self.shape.distinct
        ]
        waves = [(jnp.cos(angle), jnp.sin(angle)) for angle in angles]
        for i, kind in enumerate(self.shape.distinct):
            if kind.amplitude != 1.0:
                waves[i] = (kind.amplitude * waves[i][0], kind.amplitude * waves[i][1])
        return OfKind(waves)

    def attend(self, q, k, v, segments, kind, shared=None) -> Float[Array, "R L H D"]:
        """Attention in a layer of this kind, within its window; kernels know no `shared` prompts."""
        kernel = partial(attention.xla, shared=shared) if shared else self.compute.attend

        def within(window):
            limit = {} if window is None or window >= q.shape[1] else {"window": window}
            return lambda q, k, v: kernel(q, k, v, segments, **limit)

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


def named(stacks: list[Any], shape: Shape) -> Any:
    """Stacks as a model has them: by name, or a single one as it is."""
    names = [name for stretch in shape.stretches for name in stretch.names]
    return stacks[0] if shape.is_one_stack else dict(zip(names, stacks, strict=True))


def unstacked(layers: Any, shape: Shape, one: Callable[[Any, int], Any]) -> list[Any]:
    """A tree for each layer, with `one(leaf, number in its stack)` of the stacks' trees."""
    of = lambda i, stack: jax.tree.map(lambda x: one(x, i), stack)
    return [
        of(i, layers if shape.is_one_stack else layers[name])
        for stretch in shape.stretches
        for i in range(stretch.number)
        for name in stretch.names
    ]


class OfKind:
    """Arrays for each kind of layer; of a single one whatever is asked for."""

    def __init__(self, each: list[Any]):
        like = [[x.shape for x in jax.tree.leaves(one)] for one in each]
        self._several, self._alike = len(each) > 1, all(shapes == like[0] for shapes in like)
        stack = lambda: jax.tree.map(lambda *x: jnp.stack(x), *each)
        self._all = each[0] if not self._several else stack() if self._alike else each

    def __getitem__(self, kind):
        """The arrays of a kind, a number that may be traced where all have one shape."""
        if self._several and not self._alike:
            return self._all[kind]
        return jax.tree.map(lambda x: x[kind], self._all) if self._several else self._all


def _live(positions: Int[Array, "R L"], segments: Int[Array, "R L"] | None) -> Bool[Array, "R L"]:
    """Which tokens are no padding: that has segment 0, or position 0 behind the first column."""
    if segments is not None:
        return segments > 0
    return (positions > 0) | (jnp.arange(positions.shape[1])[None] == 0)


def frequencies(kind: LayerKind, half: int) -> Float[Array, "C"]:
    """The `half` rotary frequencies of a kind of layer; 0, which turns nothing, without a base."""
    if (theta := kind.theta) is None:
        return jnp.zeros(half)
    rates = 1.0 / theta ** (jnp.arange(half, dtype=jnp.float32) / half)
    if kind.turned is not None:
        rates = jnp.where(jnp.arange(half) < kind.turned, rates, 0.0)
    if kind.ramp is not None:
        fast, slow, length = kind.ramp
        at = lambda turns: half * math.log(length / (turns * 2 * math.pi)) / math.log(theta)
        low, high = max(math.floor(at(fast)), 0), min(math.ceil(at(slow)), 2 * half - 1)
        ramp = jnp.clip((jnp.arange(half) - low) / ((high - low) or 0.001), 0.0, 1.0)
        return ramp * rates / kind.factor + (1 - ramp) * rates
    if kind.bands is None:
        return rates if kind.factor == 1.0 else rates / kind.factor
    low, high, length = kind.bands
    turns = length * rates / (2 * math.pi)  # within the length of earlier training
    share = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - share) * rates / kind.factor + share * rates


def rotate(x: Float[Array, "R L H D"], rope) -> Float[Array, "R L H D"]:
    """Rotary position embedding of the two halves of each head, or of what a narrower `rope` is for."""
    cos, sin = rope
    if (size := 2 * cos.shape[-1]) < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :size], rope), x[..., size:]], -1)
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
    """The shape and settings that `graph` made a definition of."""
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
        if not re.fullmatch(r"layers/.*(_proj(_\w+)?(/lora_[AB])?|/per_layer_\w+)/weight", name):
            return None
        whole = "/o_proj/" in name and not name.endswith("lora_B/weight")  # heads go in
        first_in = 2 if whole else leaf.ndim - 1
        first_out = 2 if "/experts/" in name else 1
        return tuple(range(first_in, leaf.ndim)), tuple(range(first_out, first_in))

    return jax.tree_util.tree_map_with_path(one, params)
