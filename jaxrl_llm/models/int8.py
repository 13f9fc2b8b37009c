"""Weights in 8 bits, for those that are not trained: half the memory of bfloat16."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from jaxrl_llm.models.sharding import fit

BLOCK = 128  # numbers of a row, at most, that share a scale


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8:
    """A weight `[..., C]` as int8 `numbers` times a `scale` `[..., B]` for each block of columns.

    Off by at most 1/254 of the largest number of the block. (Or shapes or shardings of the two.)
    """

    numbers: Any
    scale: Any

    def astype(self, dtype: Any) -> Array:
        """The weight as numbers of a dtype."""
        columns = self.numbers.shape[-1] // self.scale.shape[-1]
        scale = jnp.repeat(self.scale, columns, -1)
        return (self.numbers.astype(jnp.float32) * scale).astype(dtype)


def rounded(weight: Float[Array, "*rows C"]) -> Int8:
    """The nearest weight in 8 bits."""
    blocks = weight.astype(jnp.float32).reshape(*weight.shape[:-1], -1, _block(weight.shape[-1]))
    scale = jnp.maximum(jnp.abs(blocks).max(-1), 1e-30) / 127
    numbers = jnp.round(blocks / scale[..., None]).astype(jnp.int8)
    return Int8(numbers.reshape(weight.shape), scale)


def placed(like: Any, sharding: NamedSharding) -> Any:
    """Shardings of `rounded(like)`, for a weight sharded so."""
    shape = (*like.shape[:-1], like.shape[-1] // _block(like.shape[-1]))
    spec = fit(sharding.spec, shape, sharding.mesh)
    return Int8(sharding, NamedSharding(sharding.mesh, spec))


def dequantize(tree: Any, dtype: Any) -> Any:
    """The tree with weights in 8 bits as numbers of a dtype."""
    is_weight = lambda x: isinstance(x, Int8)
    one = lambda x: x.astype(dtype) if is_weight(x) else x
    return jax.tree.map(one, tree, is_leaf=is_weight)


def _block(columns: int) -> int:
    return next(n for n in range(min(BLOCK, columns), 0, -1) if columns % n == 0)
