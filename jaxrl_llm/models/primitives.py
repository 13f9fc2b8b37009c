"""Products with a fixed precision, and loops with a limit that the compiled program names.

By default NVIDIA GPUs multiply float32 as TF32 and TPUs as bfloat16: 10 and 7 bits of 23.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

T = TypeVar("T")


def einsum(subscripts: str, a: Array, b: Array, dtype: DTypeLike = jnp.float32) -> Array:
    """The product, accumulated and returned in `dtype`; float32 inputs keep all bits everywhere."""
    return jnp.einsum(subscripts, a, b, precision=precision(a, b), preferred_element_type=dtype)


def precision(a: Array, b: Array) -> jax.lax.Precision | None:
    """All bits where both are float32, else None: the device's default."""
    whole = a.dtype == b.dtype == jnp.float32
    return jax.lax.Precision.HIGHEST if whole else None


def up_to(most: int, used: jax.Array, body: Callable[..., T], start: T) -> T:
    """`fori_loop(0, used, body, start)` with `used <= most`, and that limit in the program's text.

    The analysis of compiled programs (`jaxrl_llm.planning.hlo`) could not know it otherwise.
    """
    with jax.named_scope(f"at_most_{most}"):
        return jax.lax.fori_loop(0, used, body, start)
