"""Products and loops, with what a compiler must be told about them.

By default NVIDIA's GPUs multiply float32 as TF32 and TPUs as bfloat16: 10 and 7 bits of 23.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

T = TypeVar("T")


def einsum(subscripts: str, a: Array, b: Array, dtype: DTypeLike = jnp.float32) -> Array:
    """The product, added up and given in `dtype`; float32 times float32 keeps all bits everywhere."""
    return jnp.einsum(subscripts, a, b, precision=precision(a, b), preferred_element_type=dtype)


def precision(a: Array, b: Array) -> jax.lax.Precision | None:
    """All bits where both are float32; what is narrower is multiplied as the device likes."""
    whole = a.dtype == b.dtype == jnp.float32
    return jax.lax.Precision.HIGHEST if whole else None


def up_to(most: int, used: jax.Array, body: Callable[..., T], start: T) -> T:
    """`fori_loop(0, used, body, start)` with `used <= most`, the limit said in the program's text.

    Who reads the compiled program (`jaxrl_llm.planning.hlo`) cannot know it otherwise.
    """
    with jax.named_scope(f"at_most_{most}"):
        return jax.lax.fori_loop(0, used, body, start)
