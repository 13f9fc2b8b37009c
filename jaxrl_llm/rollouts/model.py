"""What engines ask of a model; `jaxrl_llm.models.policy.Policy` has it."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from jax.sharding import Mesh


@runtime_checkable
class Decoder(Protocol):
    """Generation with a key/value cache, for the embedded engine.

    It computes on `mesh`. If it is `static`, a cache has exactly the columns that
    a program reads, and `grow` makes a longer one; the calls of the same shapes are one program.
    """

    static: ClassVar[bool]

    @property
    def mesh(self) -> Mesh: ...

    def weights(self, params: Any) -> Any: ...

    def empty(self, params: Any, slots: int, columns: int) -> Any: ...

    def grow(self, cache: Any, columns: int) -> Any: ...

    def prefill(self, params: Any, tokens: Any) -> Any: ...

    def insert(self, cache: Any, prompts: Any, slot: Any, which: Any) -> Any: ...

    def decode(self, params: Any, cache: Any, token: Any, position: Any) -> tuple[Any, Any]: ...


@runtime_checkable
class Served(Protocol):
    """What a server is given, and the log-probs to check it by."""

    def config(self, params: Any, dtype: str) -> dict[str, Any]: ...

    def tensors(self, params: Any, dtype: str) -> Iterable[tuple[str, np.ndarray]]: ...

    def score(self, params: Any, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]: ...


@runtime_checkable
class Model(Protocol):
    """Both, of one model."""

    def decoder(self, mesh: Mesh, *, block: int, devices_a_copy: int | None) -> Decoder: ...

    def served(self, shards: int) -> Served: ...
