"""Logits of one token as a function of the parameters and of offsets added to activations.

The gradient with respect to an offset, at zero, is the gradient at that activation.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxrl_llm.models.primitives import einsum


class Offsets(NamedTuple):
    """Added to the input of each layer, at every position, and to the hidden state of the head."""

    layers: Float[Array, "N L D"]
    head: Float[Array, " D"]


def no_offsets(definition: Any, params: Any, length: int) -> Offsets:
    """Zero offsets for a sequence of `length` tokens."""
    shape = nnx.merge(definition, params).shape
    layers = jnp.zeros((shape.num_layers, length, shape.hidden_size))
    return Offsets(layers, jnp.zeros(shape.hidden_size))


def logits(
    definition: Any,
    params: Any,
    offsets: Offsets,
    tokens: Int[Array, " L"],
    index: Int[Array, ""],
    *,
    temperature: float = 1.0,
) -> Float[Array, " V"]:
    """float32 logits / temperature for the token after column `index` of a right-padded row."""
    model = nnx.merge(definition, params)
    x = model.embed(tokens[None])
    rope = model.rope(jnp.arange(tokens.shape[0])[None])
    # the model's own forward pass, with an offset added to the input of each layer
    layer_def, layers = nnx.split(model.layers)
    attend = lambda q, k, v: model.compute.attend(q, k, v, None)

    def apply(x, layer_and_offset):
        layer, offset = layer_and_offset
        return nnx.merge(layer_def, layer)(x + offset[None].astype(x.dtype), rope, attend)

    if model.compute.remat is not None:
        apply = model.compute.remat(apply)
    x, _ = jax.lax.scan(lambda x, inputs: (apply(x, inputs), None), x, (layers, offsets.layers))
    hidden = model.norm(x)[0, index]
    hidden = hidden + offsets.head.astype(hidden.dtype)
    head = model.head.astype(hidden.dtype)
    return einsum("d,vd->v", hidden, head) / temperature
