"""Products of matrices in which float32 is float32 on every device.

By default NVIDIA's GPUs multiply float32 as TF32 and TPUs as bfloat16: 10 and 7 bits of 23.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array


def einsum(subscripts: str, a: Array, b: Array, dtype: DTypeLike = jnp.float32) -> Array:
    """The product, added up and given in `dtype`."""
    return jnp.einsum(subscripts, a, b, precision=precision(a, b), preferred_element_type=dtype)


def precision(a: Array, b: Array) -> jax.lax.Precision | None:
    """All bits where both are float32; what is narrower is multiplied as the device likes."""
    whole = a.dtype == b.dtype == jnp.float32
    return jax.lax.Precision.HIGHEST if whole else None
