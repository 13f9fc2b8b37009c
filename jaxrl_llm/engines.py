"""What generates: a record of settings whose `start` gives a sampler that lives as long as the `with` block."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.models import decode
from jaxrl_llm.rollouts.native import NativeSampler
from jaxrl_llm.rollouts.sampler import Sampler


class Engine(Protocol):
    """Settings that can start a sampler for the model of this definition."""

    def start(self, definition: Any, mesh: Mesh) -> AbstractContextManager[Sampler]: ...


@dataclass(frozen=True)
class Native:
    """The embedded engine, on the devices of the trainer: `slots` sequences decode at a time.

    The cache is cut into blocks of `block` columns: a step reads no more blocks than the longest needs.
    """

    slots: int = 64
    prefill_rows: int = 16
    block: int = decode.BLOCK

    @contextmanager
    def start(self, definition: Any, mesh: Mesh) -> Iterator[Sampler]:
        """A sampler that reads the trainer's own parameters."""
        yield NativeSampler(
            **decode.functions(definition, block=self.block),
            slots=self.slots,
            prefill_rows=self.prefill_rows,
            put=partial(jax.device_put, device=NamedSharding(mesh, P())),
        )


ENGINES = (Native,)
