"""The interfaces of a model that engines use; `jaxrl_llm.models.policy.Policy` implements them."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from jax.sharding import Mesh


@runtime_checkable
class Decoder(Protocol):
    """Generation with a key/value cache on `mesh`; the methods are those of `models.generation`.

    If it is `static`, a step reads all columns of a cache, so callers start with few and `grow` it;
    calls with the same shapes are one program.
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
    """A server's config.json and tensors, and the trainer's log-probs to verify it by."""

    def config(self, params: Any, dtype: str) -> dict[str, Any]: ...

    def tensors(self, params: Any, dtype: str) -> Iterable[tuple[str, np.ndarray]]: ...

    def score(self, params: Any, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]: ...


@runtime_checkable
class Model(Protocol):
    """A model that can generate here or be served elsewhere."""

    def decoder(self, mesh: Mesh, *, block: int, devices_a_copy: int | None) -> Decoder: ...

    def served(self, shards: int) -> Served: ...
