"""Loops that end with their data."""

from collections.abc import Callable
from typing import TypeVar

import jax

T = TypeVar("T")


def up_to(most: int, used: jax.Array, body: Callable[..., T], start: T) -> T:
    """`fori_loop(0, used, body, start)` with `used <= most`, the limit said in the program's text."""
    with jax.named_scope(f"at_most_{most}"):
        return jax.lax.fori_loop(0, used, body, start)
