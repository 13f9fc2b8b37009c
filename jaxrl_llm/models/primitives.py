"""The inputs of a policy, products with a fixed precision, loops with a limit in the compiled program.

By default NVIDIA GPUs multiply float32 as TF32 and TPUs as bfloat16: 10 and 7 bits of 23.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int

T = TypeVar("T")


class Inputs(NamedTuple):
    """What a policy reads and which tokens are scored; mini- and micro-batch axes may lead.

    The R rows are bins. `segments` is None where a bin is one right-padded sequence (causality is
    exact then), else the number of each token's sequence, 0 on padding. `index[r,c]` is the column
    whose hidden state predicts the c-th response token of bin r, `target` is that token, and
    `scored` says whether it counts.
    """

    tokens: Int[Array, "*lead R L"]
    positions: Int[Array, "*lead R L"]
    segments: Int[Array, "*lead R L"] | None
    index: Int[Array, "*lead R C"]
    target: Int[Array, "*lead R C"]
    scored: Bool[Array, "*lead R C"]


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
